"""Qwen3: q and k are normalised in each head before RoPE, and head_dim is its own number."""

from __future__ import annotations

from typing import Any

from alspec.models.families.config_file import ConfigFile
from alspec.models.families.family import Family, window_options

__all__ = ["QWEN3"]


def _options(config: ConfigFile) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return {"qk_norm": True, "qkv_bias": bias, "o_bias": bias} | window_options(config)


QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    options=_options,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    gguf_architecture="qwen3",
    gguf_options={"qk_norm": True},
)
