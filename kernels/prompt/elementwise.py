"""Residual, RMSNorm, SiLU gate and rotary embedding, for prompts and for eager steps.

On a GPU, the kernels of prompt_kernels.py compute them, with one pass over memory each. On the CPU, PyTorch does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.prompt import prompt_kernels

__all__ = ["HeadNorms", "add_parts", "add_rms_norm", "rms_norm", "rope_cos_sin", "rotate_heads", "silu_mul"]


class HeadNorms(NamedTuple):
    """RMSNorm of each query and key head before RoPE."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float


def add_parts(x: Tensor, parts: Tensor) -> Tensor:
    """Compute `x + sum_p parts[p]`, in fp32 and in the order of the parts.

    Args:
        x: [n, hidden] fp32.  parts: [P, n, hidden].
    Returns:
        [n, hidden] fp32.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return x + total


def add_rms_norm(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `x' = x + sum_p parts[p]` and `y = rms_norm(x')`. Oracle: `add_rms_norm_ref`.

    Args:
        x: [n, hidden] fp32 residual stream, contiguous.
        parts: [P, n, hidden], contiguous; None adds nothing, then x' is x itself.
        weight: [hidden].
    Returns:
        x': [n, hidden] fp32.  y: [n, hidden] in weight's dtype.
    """
    if x.is_cuda:
        out = x if parts is None else torch.empty_like(x)
        y = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
        prompt_kernels.add_rms_norm(x, parts, weight, out, y, eps)
        return out, y
    if parts is not None:
        x = add_parts(x, parts)
    y = F.rms_norm(x, x.shape[-1:], weight.float(), eps)
    overflows = torch.linalg.vector_norm(x, dim=-1, keepdim=True) == torch.inf
    return x, y.masked_fill(overflows, torch.nan).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `y = x / sqrt(mean(x^2) + eps) * weight` in fp32; NaN where x^2 overflows. Oracle: `rms_norm_ref`.

    Args:
        x: [n, hidden] fp32 residual stream, contiguous.  weight: [hidden].
    Returns:
        y: [n, hidden] in weight's dtype.
    """
    return add_rms_norm(x, None, weight, eps)[1]


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`. Oracle: `silu_mul_ref`.

    Args:
        gate_up: [n, 2 I], contiguous, gate first.
    Returns:
        [n, I] in the same dtype.
    """
    if gate_up.is_cuda:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        prompt_kernels.silu_mul(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_cos_sin(positions: Tensor, inv_freq: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of `position * inv_freq`, times `factors` if they are given.

    Args:
        positions: [n] integers.  inv_freq: [D/2] fp32, or [n, D/2], of each token.  factors: [D/2] fp32.
    Returns:
        cos, sin: [n, 1, D/2] fp32.
    """
    angle = (positions[:, None].float() * inv_freq)[:, None]
    if factors is not None:
        return angle.cos() * factors, angle.sin() * factors
    return angle.cos(), angle.sin()


def rotate_heads(
    qkv: Tensor, num_kv_heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply the rotary embedding to queries and keys, in fp32. Oracle: `apply_rope_ref`, after `rms_norm_ref`.

    It rotates channel pairs `(c, c + D/2)`, as in the Hugging Face layout.

    Args:
        qkv: [n, Hq + 2 Hkv, D], contiguous.  cos, sin: [n, 1, D/2] fp32, from `rope_cos_sin`.
        norms: of each query and key head before the rotation; None: none.
    Returns:
        q: [n, Hq, D].  k: [n, Hkv, D].  v: [n, Hkv, D], a view of qkv.  All in qkv's dtype.
    """
    num_qo_heads = qkv.shape[1] - 2 * num_kv_heads
    v = qkv[:, -num_kv_heads:]
    if qkv.is_cuda:
        q, k = (qkv.new_empty(qkv.shape[0], heads, qkv.shape[2]) for heads in (num_qo_heads, num_kv_heads))
        prompt_kernels.rotate_heads(qkv, cos, sin, q, k, *(norms or (None, None, 0.0)))
        return q, k, v
    heads = qkv[:, :-num_kv_heads].float()
    if norms is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], None, norms.eps)
        weights = torch.cat([norms.q.expand(num_qo_heads, -1), norms.k.expand(num_kv_heads, -1)])
        heads = heads * weights.float()
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    return rotated[:, :num_qo_heads], rotated[:, num_qo_heads:], v
