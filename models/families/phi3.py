"""Phi-3 and Phi-4-mini: q, k, v and gate, up are one tensor each; part of a head may be rotated; longrope."""

from __future__ import annotations

from alspec.models.families.family import Family

__all__ = ["PHI3"]

PHI3 = Family(
    name="Phi-3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    options=lambda config: {"fused_tensors": True, "sliding_window": config.whole("sliding_window", None)},
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    has_partial_rotary=True,
)
