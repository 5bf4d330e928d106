"""GPU kernels of elementwise.py: the operations between the matrix products of a prompt.

Each makes one pass over memory. PyTorch's operators would write every intermediate result to memory.

Shapes: n tokens, hidden channels of the residual stream x, H heads of D channels, MLP of width I.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.linear.gemv_tile import rstd

__all__ = ["add_rms_norm", "rotate_heads", "silu_mul"]

SILU_BLOCK = 1024  # channels per program


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,  # [n, HIDDEN] fp32
    parts_ptr,  # [PARTS, n, HIDDEN], or None
    weight_ptr,  # [HIDDEN]
    sum_ptr,  # [n, HIDDEN] fp32: x + all parts; not written if PARTS is 0
    y_ptr,  # [n, HIDDEN]
    eps,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN, rounded up to a power of two
):
    """Residual sum and RMSNorm of one token. Grid [n]."""
    channels = tl.arange(0, BLOCK)
    channel_mask = channels < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + channels
    x = tl.load(x_ptr + offsets, mask=channel_mask, other=0.0)
    if PARTS > 0:
        total = tl.load(parts_ptr + offsets, mask=channel_mask, other=0.0).to(tl.float32)
        for _ in tl.static_range(1, PARTS):
            # Not an argument n: with the grid size times HIDDEN the compiler keeps 16-byte loads.
            parts_ptr += tl.num_programs(0).to(tl.int64) * HIDDEN
            total += tl.load(parts_ptr + offsets, mask=channel_mask, other=0.0).to(tl.float32)
        x += total
        tl.store(sum_ptr + offsets, x, mask=channel_mask)
    weight = tl.load(weight_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)
    y = x * rstd(tl.sum(x * x, 0) / HIDDEN, eps) * weight
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=channel_mask)


def add_rms_norm(x: Tensor, parts: Tensor | None, weight: Tensor, out: Tensor, y: Tensor, eps: float) -> None:
    """Compute `out = x + sum_p parts[p]`, in the order of the parts, and `y = rms_norm(out)`.

    Oracle: `add_rms_norm_ref`.

    Args:
        x: [n, hidden] fp32.
        parts: [P, n, hidden]; with None, `y = rms_norm(x)` and `out` is not written.
        weight: [hidden].
        out: [n, hidden] fp32, written; may be `x`.  y: [n, hidden] in weight's dtype, written.  All contiguous.
    """
    assert x.is_contiguous()
    assert parts is None or parts.is_contiguous()
    num_tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(num_tokens,)](
        x, parts, weight, out, y, eps, PARTS=0 if parts is None else len(parts), HIDDEN=hidden, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip


@triton.jit
def _rotate_heads_kernel(
    qkv_ptr,  # [n, HQ + 2 HKV, D]
    cos_ptr,  # [n, D / 2] fp32
    sin_ptr,
    q_ptr,  # [n, HQ, D]
    k_ptr,  # [n, HKV, D]
    q_norm_ptr,  # [D], or None: heads are not normalised
    k_norm_ptr,  # [D]
    EPS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """RMSNorm of each head, if there are weights, then the rotary embedding of one token. Grid [n]."""
    token = tl.program_id(0).to(tl.int64)
    heads, pairs = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = D // 2
    is_pair = pairs < HALF
    head_mask = is_pair & (heads < HQ + HKV)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0)
    ptrs = qkv_ptr + (token * (HQ + 2 * HKV) + heads) * D + pairs
    first = tl.load(ptrs, mask=head_mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + HALF, mask=head_mask, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        norm_ptrs = tl.where(heads < HQ, q_norm_ptr, k_norm_ptr) + pairs
        scale = rstd(tl.sum(first * first + second * second, 1) / D, EPS)[:, None]
        first *= scale * tl.load(norm_ptrs, mask=head_mask, other=0.0).to(tl.float32)
        second *= scale * tl.load(norm_ptrs + HALF, mask=head_mask, other=0.0).to(tl.float32)
    rotated_first = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    second = (second * cos + first * sin).to(q_ptr.dtype.element_ty)
    is_q = is_pair & (heads < HQ)
    q_ptrs = q_ptr + (token * HQ + heads) * D + pairs
    tl.store(q_ptrs, rotated_first, mask=is_q)
    tl.store(q_ptrs + HALF, second, mask=is_q)
    is_k = head_mask & (heads >= HQ)
    k_ptrs = k_ptr + (token * HKV + heads - HQ) * D + pairs
    tl.store(k_ptrs, rotated_first, mask=is_k)
    tl.store(k_ptrs + HALF, second, mask=is_k)


def rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q: Tensor,
    k: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Apply the rotary embedding to the query and key heads, after an RMSNorm of each head if weights are given.

    Oracle: `apply_rope_ref`, after `rms_norm_ref`.

    Args:
        qkv: [n, Hq + 2 Hkv, D], queries first, then keys, then values.  cos, sin: [n, 1, D/2] fp32.
        q: [n, Hq, D], written.  k: [n, Hkv, D], written.  All contiguous.
        q_norm, k_norm: [D], both or none.  eps: of the norms.
    """
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin))
    (num_tokens, num_qo_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    _rotate_heads_kernel[(num_tokens,)](
        qkv, cos, sin, q, k, q_norm, k_norm, eps, HQ=num_qo_heads, HKV=num_kv_heads, D=head_dim,
        HEADS_PAD=triton.next_power_of_2(num_qo_heads + num_kv_heads), HALF_PAD=triton.next_power_of_2(head_dim // 2),
        num_warps=8 if q_norm is None else 16,  # with norms, 8 would spill registers on Blackwell
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [n, 2 WIDTH], gate first
    out_ptr,  # [n, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK channels of one token. Grid [n, WIDTH / BLOCK]."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channels < WIDTH
    ptrs = gate_up_ptr + token * (2 * WIDTH) + channels
    gate = tl.load(ptrs, mask=channel_mask, other=0.0).to(tl.float32)
    up = tl.load(ptrs + WIDTH, mask=channel_mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * WIDTH + channels, out.to(out_ptr.dtype.element_ty), mask=channel_mask)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute `out = silu(gate) * up`. Oracle: `silu_mul_ref`.

    Args:
        gate_up: [n, 2 I], gate first.  out: [n, I], written.  Both contiguous.
    """
    assert gate_up.is_contiguous()
    num_tokens, width = out.shape
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, SILU_BLOCK))](
        gate_up, out, WIDTH=width, BLOCK=min(SILU_BLOCK, triton.next_power_of_2(width)), num_warps=4
    )
