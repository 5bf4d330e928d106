"""RMSNorm, SiLU gate and rotary embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["apply_rope", "rms_norm", "rope_cos_sin", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * weight`, computed in fp32. Oracle: `rms_norm_ref`.

    Args:
        x: [..., hidden] fp32 residual stream.  weight: [hidden].
    Returns:
        [..., hidden] in weight's dtype.
    """
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(weight.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [..., 2 I] with gate first -> [..., I]. Oracle: `silu_mul_ref`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * inv_freq`: [n] integers, [D/2] fp32 -> two [n, 1, D/2] fp32."""
    angle = positions[:, None, None].float() * inv_freq
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs `(c, c + D/2)`, the Hugging Face layout, in fp32. Oracle: `apply_rope_ref`.

    Args:
        x: [n, H, D].  cos, sin: [n, 1, D/2] fp32, from `rope_cos_sin`.
    Returns:
        [n, H, D] in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
