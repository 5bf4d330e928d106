"""Llama 2 and 3, and models of its architecture: TinyLlama, SmolLM, and others."""

from __future__ import annotations

from typing import Any

from alspec.models.families.config_file import ConfigFile
from alspec.models.families.family import Family

__all__ = ["LLAMA"]


def _options(config: ConfigFile) -> dict[str, Any]:
    attention_bias = config.flag("attention_bias")
    return {"qkv_bias": attention_bias, "o_bias": attention_bias, "mlp_bias": config.flag("mlp_bias")}


LLAMA = Family(
    name="Llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    options=_options,
    unused=("sliding_window",),
    gguf_architecture="llama",
    gguf_interleaves=True,
)
