"""What lies between the matrix products of a prompt, in one pass over memory each; elementwise.py says what it is.

PyTorch's operators would write every intermediate result, 134 MB for 8192 tokens of 4096 channels in fp32.

Shapes: n tokens, hidden channels of the residual stream x, H heads of D channels, MLP of width I.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.linear.gemv_tile import rstd

__all__ = ["add_rms_norm", "rotate_heads", "silu_mul"]

SILU_BLOCK = 1024  # channels of a program


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,  # [n, HIDDEN] fp32
    parts_ptr,  # [PARTS, n, HIDDEN], or None
    weight_ptr,  # [HIDDEN]
    sum_ptr,  # [n, HIDDEN] fp32: x + all parts; not written without parts
    y_ptr,  # [n, HIDDEN]
    eps,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN, rounded up to a power of two
):
    """One token; grid [n]."""
    channels = tl.arange(0, BLOCK)
    exists = channels < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + channels
    x = tl.load(x_ptr + at, mask=exists, other=0.0)
    if PARTS > 0:
        total = tl.load(parts_ptr + at, mask=exists, other=0.0).to(tl.float32)
        for _ in tl.static_range(1, PARTS):
            # By the grid, not by a number passed: the compiler would not know it to keep 16 bytes together.
            parts_ptr += tl.num_programs(0).to(tl.int64) * HIDDEN
            total += tl.load(parts_ptr + at, mask=exists, other=0.0).to(tl.float32)
        x += total
        tl.store(sum_ptr + at, x, mask=exists)
    weight = tl.load(weight_ptr + channels, mask=exists, other=0.0).to(tl.float32)
    y = x * rstd(tl.sum(x * x, 0) / HIDDEN, eps) * weight
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=exists)


def add_rms_norm(x: Tensor, parts: Tensor | None, weight: Tensor, out: Tensor, y: Tensor, eps: float) -> None:
    """`out = x + sum of parts`, in their order, and `y = rms_norm(out)`. Oracle: `add_rms_norm_ref`.

    Args:
        x: [n, hidden] fp32.  parts: [P, n, hidden], or None, then `out` is not written.  weight: [hidden].
        out: [n, hidden] fp32, may be `x`.  y: [n, hidden] in weight's dtype.  All contiguous.
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
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One token; grid [n]."""
    token = tl.program_id(0).to(tl.int64)
    heads, pairs = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = D // 2
    is_pair = pairs < HALF
    exists = is_pair & (heads < HQ + HKV)
    cos = tl.load(cos_ptr + token * HALF + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pairs, mask=is_pair, other=0.0)
    at = qkv_ptr + (token * (HQ + 2 * HKV) + heads) * D + pairs
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=exists, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(q_ptr.dtype.element_ty)
    second = (second * cos + first * sin).to(q_ptr.dtype.element_ty)
    is_q = is_pair & (heads < HQ)
    q = q_ptr + (token * HQ + heads) * D + pairs
    tl.store(q, turned, mask=is_q)
    tl.store(q + HALF, second, mask=is_q)
    is_k = exists & (heads >= HQ)
    k = k_ptr + (token * HKV + heads - HQ) * D + pairs
    tl.store(k, turned, mask=is_k)
    tl.store(k + HALF, second, mask=is_k)


def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> None:
    """Rotary embedding of the query and key heads. Oracle: `apply_rope_ref`.

    Args:
        qkv: [n, Hq + 2 Hkv, D], queries first, then keys.  cos, sin: [n, 1, D/2] fp32.
        q: [n, Hq, D].  k: [n, Hkv, D].  All contiguous.
    """
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin))
    (num_tokens, num_qo_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    _rotate_heads_kernel[(num_tokens,)](
        qkv, cos, sin, q, k, HQ=num_qo_heads, HKV=num_kv_heads, D=head_dim,
        HEADS_PAD=triton.next_power_of_2(num_qo_heads + num_kv_heads), HALF_PAD=triton.next_power_of_2(head_dim // 2),
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [n, 2 WIDTH], gate first
    out_ptr,  # [n, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of one token; grid [n, blocks of channels]."""
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channels < WIDTH
    at = gate_up_ptr + token * (2 * WIDTH) + channels
    gate = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=exists, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * WIDTH + channels, out.to(out_ptr.dtype.element_ty), mask=exists)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`silu(gate) * up` of [n, 2 I] with gate first -> [n, I], both contiguous. Oracle: `silu_mul_ref`."""
    assert gate_up.is_contiguous()
    num_tokens, width = out.shape
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, SILU_BLOCK))](
        gate_up, out, WIDTH=width, BLOCK=min(SILU_BLOCK, triton.next_power_of_2(width)), num_warps=4
    )
