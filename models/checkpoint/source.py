"""The model that a configuration selects: a folder, the bundled checkpoint, or a published shape."""

from __future__ import annotations

from pathlib import Path

from alspec.config import EngineConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import RANDOM_SHAPES, LlamaConfig

__all__ = ["model_config", "model_folder", "model_name"]


def model_folder(config: EngineConfig) -> Path:
    """Folder of weights and tokenizer if weights are not random; by default the bundled demo checkpoint."""
    return config.model or DEMO_CHECKPOINT


def model_name(config: EngineConfig) -> str:
    """The model's name in measurement rows: a published shape, or the last part of the folder's path."""
    if config.random_weights in RANDOM_SHAPES:
        return str(config.random_weights)
    folder = config.random_weights or config.model
    return "demo" if folder is None else Path(folder).absolute().name


def model_config(config: EngineConfig) -> LlamaConfig:
    """Shape of the selected model.

    Raises:
        UserError: an unknown shape or a broken folder.
    """
    if config.random_weights is not None:
        return LlamaConfig.from_shape(config.random_weights)
    return LlamaConfig.from_folder(model_folder(config))
