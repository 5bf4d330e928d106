"""Tiny random models of every family, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["CASES", "LONGROPE", "greedy", "save_family"]

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 151,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SHORT, LONG = [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0], [1.0, 1.5, 2.5, 4.0, 8.0, 12.0, 16.0, 30.0]  # as needed
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": SHORT, "long_factor": LONG}
# Case -> family of transformers, and fields of its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 20, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "ministral": (
        "Ministral",
        {
            "head_dim": 20,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 20,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3-window": ("Phi3", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 200}),
    "phi3-long": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "phi3-partial-long": (
        "Phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": ("Qwen2", {"rope_parameters": YARN}),
    "yarn-mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 8}}),
    "yarn-factor": ("Mistral", {"rope_parameters": YARN | {"attention_factor": 0.8, "truncate": False}}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA_3}),
    "dynamic-long": (
        "Qwen2",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 6.0},
            "max_position_embeddings": 64,
        },
    ),
    "dynamic-short": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}}),
}


def save_family(folder: Path, case: str, scale: float = 0.2, **other: Any) -> Any:
    """Save a random model of `CASES` with `other` fields; returns it as transformers reads it in fp32.

    Its weights are large enough for peaked attention, its norms differ from 1 and its biases from 0, so that every
    part shows in the logits.
    """
    family, settings = CASES[case]
    kind = getattr(transformers, f"{family}ForCausalLM")
    settings = TINY | settings | other
    rope = settings.get("rope_parameters")
    if rope is not None and "short_factor" in rope:
        rotated = settings["hidden_size"] // settings["num_attention_heads"] * rope.get("partial_rotary_factor", 1)
        factors = {name: rope[name][: int(rotated) // 2] for name in ("short_factor", "long_factor")}
        settings |= {"rope_parameters": rope | factors}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    model: Any = kind(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.rand_like(parameter) + 0.5 if "norm" in name else torch.randn_like(parameter) * scale
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32)


def greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers with its own cache."""
    prompt = torch.tensor([ids])
    made = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens
