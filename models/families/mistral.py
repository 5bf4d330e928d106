"""Mistral: Llama with a sliding window in every layer, Ministral in some. GGUF files name Mistral `llama`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alspec.models.families.config_file import ConfigFile
from alspec.models.families.family import Family, windows_by_layer

__all__ = ["MINISTRAL", "MISTRAL"]


def _options(config: ConfigFile) -> dict[str, Any]:
    """A Mistral with `layer_types` is a Ministral, as in transformers: some folders of Ministral name `mistral`."""
    window = config.whole("sliding_window", None)
    if window is None or config.get("layer_types") is None:
        return {"sliding_window": window}
    return windows_by_layer(config, window)


MISTRAL = Family(
    name="Mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    options=_options,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
MINISTRAL = replace(MISTRAL, name="Ministral", model_type="ministral", architecture="MinistralForCausalLM")
