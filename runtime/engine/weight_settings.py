"""What settings mean for the weights of a model: how they are quantised, and whether they stay packed."""

from __future__ import annotations

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.kernels.kv_codec.formats import rotates_values
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import MATRICES, num_packed, packs_head, quantised_format

__all__ = ["config_with_weights"]


def config_with_weights(config: EngineConfig, model: LlamaConfig, tp_size: int, packs: bool) -> LlamaConfig:
    """Return the model with what `--weights` and the cache mean for its weights.

    Args:
        tp_size: ranks of a group.  packs: quantised matrices are kept packed, which needs a GPU and 16 bits.
    Raises:
        UserError: weights that are quantised already, or inputs that cannot be divided into groups.
    """
    if config.weights != "auto" and model.quantisation is not None:
        raise UserError(
            f"weights: {config.weights} needs weights that are not quantised, found {model.quantisation.name}; use auto"
        )
    update = {"weights": config.weights, "lm_head": config.lm_head, "rotates_values": rotates_values(config.kv_cache)}
    model = model.model_copy(update=update)
    for name in MATRICES:
        quantised_format(model, tp_size, name)
    packed = model.model_copy(update={"packs_weights": packs})
    return packed if num_packed(packed, tp_size) or packs_head(packed) else model
