"""What a model family states: its names, the defaults of its config.json, and what its settings mean.

The model is one class (`Llama` in models/llama.py). A family chooses its options, which are fields of `LlamaConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from alspec.errors import show
from alspec.models.families.config_file import ConfigFile

__all__ = ["Family", "window_options", "windows_by_layer"]


def _no_options(config: ConfigFile) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A model family."""

    name: str
    model_type: str  # of config.json
    architecture: str  # of config.json, compared without regard to case
    options: Callable[[ConfigFile], dict[str, Any]] = _no_options  # fields of `LlamaConfig` that differ from Llama's
    defaults: dict[str, Any] = field(default_factory=dict)  # of config.json, if a key is absent
    unused: tuple[str, ...] = ()  # keys of config.json that sound as if they mattered, and do not, as in transformers
    has_partial_rotary: bool = False  # `partial_rotary_factor` may be below 1
    gguf_architecture: str | None = None  # of a GGUF file
    gguf_options: dict[str, Any] = field(default_factory=dict)  # fields of `LlamaConfig` of GGUF files
    gguf_interleaves: bool = False  # GGUF files hold rows of q and k in the interleaved rotary order


def window_options(config: ConfigFile) -> dict[str, Any]:
    """Options of the sliding window of Qwen models: from layer `max_window_layers` on, or by `layer_types`."""
    window = config.whole("sliding_window", None)
    if not config.flag("use_sliding_window") or window is None:
        return {}
    if config.get("layer_types") is None:
        first, layers = config.whole("max_window_layers", None), config.whole("num_hidden_layers", None)
        is_number = type(first) is int and type(layers) is int
        return {"sliding_window": window, "full_layers": tuple(range(min(first, layers)) if is_number else ())}
    return windows_by_layer(config, window)


def windows_by_layer(config: ConfigFile, window: Any) -> dict[str, Any]:
    """Options of a sliding window in the layers that `layer_types` names."""
    kinds = config.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or not known.issuperset(kind for kind in kinds if isinstance(kind, str)):
        raise config.error("layer_types", "full_attention or sliding_attention of each layer", kinds, "correct it")
    layers = config.whole("num_hidden_layers", None)
    if len(kinds) != layers:
        expected = f"one of each layer (num_hidden_layers is {show(layers)})"
        raise config.error("layer_types", expected, f"{len(kinds)} of them", "correct it")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return {"sliding_window": window if len(full) < len(kinds) else None, "full_layers": full}
