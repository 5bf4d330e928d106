"""Qwen2 and Qwen2.5: q, k and v have biases, o has none."""

from __future__ import annotations

from alspec.models.families.family import Family, window_options

__all__ = ["QWEN2"]

QWEN2 = Family(
    name="Qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    options=lambda config: {"qkv_bias": True} | window_options(config),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    gguf_architecture="qwen2",
    gguf_options={"qkv_bias": True},
)
