"""Residual, RMSNorm, SiLU gate and rotary embedding of prompts, and of steps that are no captured graph.

On the CPU by PyTorch's operators, on GPUs by the kernels of prompt_kernels.py, one pass over memory each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.prompt import prompt_kernels

__all__ = ["add_parts", "add_rms_norm", "rms_norm", "rope_cos_sin", "rotate_heads", "silu_mul"]


def add_parts(x: Tensor, parts: Tensor) -> Tensor:
    """`x + sum of parts`, the sum in fp32 and in the order of the parts: [n, hidden] fp32, [P, n, hidden] -> as x."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return x + total


def add_rms_norm(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x' = add_parts(x, parts)` and `rms_norm(x')`. Oracle: `add_rms_norm_ref`.

    Args:
        x: [n, hidden] fp32 residual stream.  parts: [P, n, hidden], or None for nothing; both contiguous.
        weight: [hidden].
    Returns:
        x' [n, hidden] fp32; [n, hidden] in weight's dtype.
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
    """`y = x / sqrt(mean(x^2) + eps) * weight`, computed in fp32; NaN where x^2 overflows. Oracle: `rms_norm_ref`.

    Args:
        x: [n, hidden] fp32 residual stream, contiguous.  weight: [hidden].
    Returns:
        [n, hidden] in weight's dtype.
    """
    return add_rms_norm(x, None, weight, eps)[1]


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [n, 2 I], contiguous, with gate first -> [n, I]. Oracle: `silu_mul_ref`."""
    if gate_up.is_cuda:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        prompt_kernels.silu_mul(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * inv_freq`: [n] integers, [D/2] fp32 -> two [n, 1, D/2] fp32."""
    angle = positions[:, None, None].float() * inv_freq
    return angle.cos(), angle.sin()


def rotate_heads(qkv: Tensor, num_kv_heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate channel pairs `(c, c + D/2)` of queries and keys, the Hugging Face layout, in fp32.

    Oracle: `apply_rope_ref`.

    Args:
        qkv: [n, Hq + 2 Hkv, D], contiguous.  cos, sin: [n, 1, D/2] fp32, from `rope_cos_sin`.
    Returns:
        q [n, Hq, D] and k [n, Hkv, D] in qkv's dtype, v [n, Hkv, D], part of qkv.
    """
    num_qo_heads = qkv.shape[1] - 2 * num_kv_heads
    v = qkv[:, -num_kv_heads:]
    if qkv.is_cuda:
        q, k = (qkv.new_empty(qkv.shape[0], heads, qkv.shape[2]) for heads in (num_qo_heads, num_kv_heads))
        prompt_kernels.rotate_heads(qkv, cos, sin, q, k)
        return q, k, v
    first, second = qkv[:, :-num_kv_heads].float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)
    return turned[:, :num_qo_heads], turned[:, num_qo_heads:], v
