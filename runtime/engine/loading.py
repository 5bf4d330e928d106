"""Loading: a model's files, its weights on a device, and what runs once before anything is timed."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton

from alspec.config import EngineConfig
from alspec.kernels.kv_codec.turboquant.rotation import rotation
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.source import (
    draft_model_source,
    has_tokenizer,
    model_files,
    model_path,
    notices_of_model,
    open_checkpoint,
    open_tokenizer,
)
from alspec.models.llama import Llama, LlamaWeights, load_weights, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import num_dequantised, weights_name
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.prefill import CHUNK_TOKENS, prefill
from alspec.runtime.distributed.agreement import fingerprint, shared_settings
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.choices import Choices

__all__ = ["agreed_settings", "model_notices", "open_model", "read_weights", "take_device", "warm_up_prompts"]


def open_model(config: EngineConfig, model: LlamaConfig) -> tuple[Checkpoint | None, Tokenizer | None]:
    """Open the checkpoint (None with random weights) and its tokenizer (None: prompts are token ids).

    Raises:
        UserError: a folder or a file that is not what it should be.
    """
    if config.random_weights is not None:
        return None, None
    checkpoint = open_checkpoint(config, model.as_stored)
    return checkpoint, open_tokenizer(config, model) if has_tokenizer(config) else None


def model_notices(
    config: EngineConfig, checkpoint: Checkpoint | None, model: LlamaConfig, dtype_name: str, tp_size: int
) -> list[str]:
    """Lines about a model: its source, what quantised weights are, and what of the checkpoint is not used."""
    notices = notices_of_model(config)
    cause = ""
    if model.packs_weights and num_dequantised(model, tp_size)[0]:
        causes = ["heads are padded or rotated"] if model.changes_heads and model.quantisation is not None else []
        if not causes or num_dequantised(model, tp_size)[0] > 2 * model.num_layers:  # more than qkv and o
            causes.append("no kernel of a step takes their format")
        cause = f": {', or '.join(causes)}"
    if (checkpoint is not None and model.quantisation is not None) or cause:
        notices.append(f"weights: {weights_name(model, tp_size, dtype_name)}{cause}")
    if model.packs_weights and model.lm_head == "auto" and _has_quantised_head(model):
        notices.append(f"weights: the LM head is dequantised to {dtype_name}; --lm-head fp8 keeps it in FP8")
    if checkpoint is not None and checkpoint.unused is not None:
        notices.append(
            f"checkpoint: not used: {checkpoint.unused}; only weights are quantised (the cache by --kv-cache)"
        )
    return notices


def _has_quantised_head(model: LlamaConfig) -> bool:
    """Whether the files hold a quantised LM head."""
    quantisation = model.quantisation
    return quantisation is not None and not model.tie_word_embeddings and quantisation.scheme_of("lm_head") is not None


def agreed_settings(config: EngineConfig, model: LlamaConfig, choices: Choices) -> dict[str, Any]:
    """What all ranks must have alike: ranks on different hosts may be configured, and choose, differently."""
    chosen: dict[str, Any] = {"resolved transport": choices.candidates[0] if choices.candidates else choices.backend}
    chosen |= {"resolved mode": choices.mode, "resolved dtype": choices.dtype_name}
    chosen |= {f"the model's {name}": value for name, value in model.model_dump(mode="json").items()}
    if choices.placement.is_linked and choices.device.type == "cuda":
        # Both groups compute the same numbers, bit for bit.
        chosen["GPU"] = torch.cuda.get_device_name(choices.device)
        chosen |= {"torch version": torch.__version__, "triton version": triton.__version__}
    if choices.placement.world_size > 1:
        for name, source in (("model", config), ("draft model", draft_model_source(config))):
            if source is not None and source.random_weights is None:
                chosen[f"the {name}'s files (fingerprint)"] = fingerprint(model_files(model_path(source)))
    return shared_settings(config) | chosen


def take_device(device: torch.device, placement: Placement) -> None:
    """Select this rank's GPU, or take its share of the host's cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif placement.local_world_size > 1:
        # Ranks of a host share its cores; torchrun's default is one thread a rank.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // placement.local_world_size))


def read_weights(
    checkpoint: Checkpoint | None, model: LlamaConfig, placement: Placement, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Read this rank's shard onto its device; random numbers without a checkpoint."""
    value_rotation = rotation(model.head_dim, device) if model.rotates_values else None
    if checkpoint is None:
        return random_weights(model, placement.shard, dtype, device, value_rotation)
    return load_weights(checkpoint, model, placement.shard, dtype, device, value_rotation)


def warm_up_prompts(model: Llama, cache: Cache, transport: Transport, operation: OperationHook) -> None:
    """Compile the kernels of prompts and load libraries before anything is timed; real prompts overwrite the cache."""
    # A whole prompt chunk for each group and one more behind it: that runs every kernel of a prompt.
    num_tokens = min(cache.max_context, 2 * CHUNK_TOKENS * transport.placement.num_groups)
    one_layer = model.first_layers(1)
    for tokens in (1, num_tokens):  # few tokens take other kernels
        logits, _ = prefill(one_layer, cache, transport, 0, [0] * tokens, operation)
    torch.cat([logits.argmax(dim=-1), torch.isfinite(logits).all()[None]]).tolist()  # as tokens are chosen
