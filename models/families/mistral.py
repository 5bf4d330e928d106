"""Mistral: Llama with a sliding window in every layer. GGUF files name it `llama`."""

from __future__ import annotations

from alspec.models.families.family import Family

__all__ = ["MISTRAL"]

MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    options=lambda config: {"sliding_window": config.whole("sliding_window", None)},
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
