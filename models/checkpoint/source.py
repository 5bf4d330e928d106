"""Where the model of a configuration comes from: a folder, the bundled checkpoint, or a published shape."""

from __future__ import annotations

from pathlib import Path

from alspec.config import EngineConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import RANDOM_SHAPES, LlamaConfig

__all__ = ["model_config", "model_folder", "model_name"]


def model_folder(config: EngineConfig) -> Path:
    """Where weights and tokenizer are, if weights are not random; by default, the bundled demo checkpoint."""
    return config.model or DEMO_CHECKPOINT


def model_name(config: EngineConfig) -> str:
    """What rows of measurements call it: a published shape, or the folder's last part."""
    if config.random_weights in RANDOM_SHAPES:
        return str(config.random_weights)
    folder = config.random_weights or config.model
    return "demo" if folder is None else Path(folder).absolute().name


def model_config(config: EngineConfig) -> LlamaConfig:
    """The model that is asked for.

    Raises:
        UserError: unknown shape, or a folder that is broken.
    """
    if config.random_weights is not None:
        return LlamaConfig.from_shape(config.random_weights)
    return LlamaConfig.from_folder(model_folder(config))
