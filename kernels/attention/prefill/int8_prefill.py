"""INT8 prefill attention: causal attention of a prompt over stage 1 (INT8) of the quantised cache.

    S = s_Q s_K (q8 k8^T),   P = 2^(S - m),   o = P V / sum P,   lse = m + log2 sum P

The kernel quantises q to INT8, symmetric, with one scale for each query token and head. `sm_scale log2 e` is part of
that scale. The limit is 127: keys and values need 119 only because their stage 2 must stay inside INT8.

Scores `S` are INT8 matrix products. P and V are fp16; a first kernel converts V once. INT8 is not used for `P V`:

- On Hopper an INT8 product needs V transposed. Each block of 64 tokens has its own scale, so the sums would leave the
  tensor cores after each block, for a second rescaling in registers.
- INT8 P loses weights below 1/254 of the largest weight of a row. In a long flat row that is most of the mass.

On Hopper the exact softmax has its own kernel, in int8_prefill_sm90.py.

Source: TurboAttention, Algorithm 1. **(corrected)**: the softmax scale is applied; the accumulator is multiplied by
`alpha = 2^(m_old - m_new)`, which is exact with either softmax; blocks of K and V are not written here, but where they
are quantised.

Shapes: n_q query tokens, the last of n tokens; Hq query heads, Hkv KV heads, D head_dim, 64 tokens per block.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from alspec.kernels.attention.prefill import int8_prefill_sm90 as hopper
from alspec.kernels.attention.prefill.int8_prefill_sm90 import MAGIC, MAGIC_BITS, P_SHIFT, Q_MAX, TINY
from alspec.kernels.attention.sas_exp2 import sas_exp2
from alspec.kernels.common.jit_launch import is_hopper, num_sms
from alspec.kernels.kv_codec.flashq.record import TOKENS, largest
from alspec.kernels.kv_codec.quantised_layer import HEAD_DIMS
from alspec.sas import Softmax, cutoff

__all__ = ["num_warps", "int8_prefill_attention"]

BLOCK = 64  # queries per program, and tokens per tile; before Hopper, 128 would spill registers
NUM_STAGES = 3
SCALES_PER_LOAD = tl.constexpr(1024)  # in the search for the largest scale


# Lengths are not specialised: one compiled kernel serves prompts of all lengths.
@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], do_not_specialize_on_alignment=["scale_ptr"])
def _widen_kernel(
    v_ptr,  # [Hkv, n, D] int8, heads `stride` apart
    scale_ptr,  # [Hkv, blocks] fp32
    max_scale_ptr,  # [Hkv] fp32, written by the first program of each head: its largest scale
    out_ptr,  # [Hkv, n, D] fp16: v8 s_V / max s_V
    num_tokens,
    num_blocks,
    stride,
    D: tl.constexpr,
):
    """Convert one block of V of one head to fp16, relative to the head's largest scale. Grid [blocks, Hkv]."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    offsets = tokens * D + tl.arange(0, D)[None, :]
    token_mask = tokens < num_tokens
    v = tl.load(v_ptr + head * stride + offsets, mask=token_mask, other=0)
    scale_ptr += head * num_blocks
    # Every program searches for the largest scale itself: this takes less time than another launch.
    max_scale = 0.0
    for first in range(0, num_blocks, SCALES_PER_LOAD):
        blocks = first + tl.arange(0, SCALES_PER_LOAD)
        max_scale = tl.maximum(max_scale, tl.max(tl.load(scale_ptr + blocks, mask=blocks < num_blocks, other=0.0)))
    if block == 0:
        tl.store(max_scale_ptr + head, max_scale)
    factor = tl.load(scale_ptr + block) / max_scale
    tl.store(out_ptr + head * num_tokens * D + offsets, (v.to(tl.float32) * factor).to(tl.float16), mask=token_mask)


@triton.jit
def _attend_tiles(
    q8,  # [BLOCK_M, D] int8
    q_scale,  # [BLOCK_M]
    positions,  # [BLOCK_M]
    row_max,  # [BLOCK_M]: result of the earlier tiles, like row_sum and acc
    row_sum,  # [BLOCK_M]
    acc,  # [BLOCK_M, D]
    k_desc,
    v_desc,
    k_row,  # row of k_desc where this head's tokens begin
    v_row,  # the same for v_desc
    k_scale_ptr,
    first,
    last,
    num_blocks,
    cutoff,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    SAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the tiles of tokens [first, last). With `MASKED`, a row uses tokens up to its position."""
    BLOCK_M: tl.constexpr = q8.shape[0]
    SCALES: tl.constexpr = BLOCK_N // TOKENS
    columns = tl.reshape(tl.arange(0, BLOCK_N), [1, SCALES, TOKENS])
    blocks = tl.arange(0, SCALES)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        block = start // TOKENS + blocks
        k_scale = tl.load(k_scale_ptr + block, mask=block < num_blocks, other=1.0)
        scale = q_scale[:, None] * k_scale[None, :]
        scale = tl.where(scale < TINY, TINY, scale)  # not `maximum`, which would drop NaN
        s = tl.dot(q8, tl.trans(k_desc.load([k_row + start, 0])))
        s = tl.reshape((s + MAGIC_BITS).to(tl.float32, bitcast=True), [BLOCK_M, SCALES, TOKENS])
        if MASKED:
            s = tl.where(start + columns <= positions[:, None, None], s, float("-inf"))
        # One FMA subtracts MAGIC and the maximum. It rounds by up to half a unit of the integer score. That is small
        # against the rounding of q, which changes the score by up to half of each channel of k8.
        base = scale * MAGIC
        new_max = tl.maximum(row_max, tl.max(tl.max(s, 2) * scale - base, 1))
        x = s * scale[:, :, None] - (base + (new_max - P_SHIFT)[:, None])[:, :, None]
        p = sas_exp2(x, cutoff + P_SHIFT) if SAS else tl.exp2(x)
        p = tl.reshape(p, [BLOCK_M, BLOCK_N])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v_desc.load([v_row + start, 0]), acc * alpha[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "num_tokens", "num_blocks", "k_stride"])
def _prefill_kernel(
    q_ptr,  # [n_q, Hq, D]
    k_desc,  # [rows, D] int8, heads `k_stride` rows apart
    v_desc,  # [Hkv n, D] fp16: v8 s_V / max s_V
    v_max_scale_ptr,  # [Hkv] fp32: max s_V
    k_scale_ptr,  # [Hkv, blocks] fp32
    out_ptr,  # [n_q, Hq, D]
    lse_ptr,  # [n_q, Hq] fp32
    num_queries,
    num_tokens,
    num_blocks,
    k_stride,
    qk_scale,  # sm_scale log2 e
    cutoff,  # of SAS weights, base 2, negative
    HQ: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of BLOCK_M queries of one head. Grid [ceil(n_q / BLOCK_M) * Hq], the longest rows first."""
    program = tl.program_id(0)
    head = program % HQ
    first_query = (tl.cdiv(num_queries, BLOCK_M) - 1 - program // HQ) * BLOCK_M
    kv_head = head // HEADS_PER_KV
    queries = first_query + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, D)
    offsets = (queries.to(tl.int64) * HQ + head)[:, None] * D + channels[None, :]
    query_mask = queries < num_queries
    q = tl.load(q_ptr + offsets, mask=query_mask[:, None], other=0.0).to(tl.float32)
    q8_scale = largest(q, 1) / Q_MAX
    inverse = tl.where(q8_scale > TINY, 1.0 / tl.maximum(q8_scale, TINY), 0.0)
    q8 = (q * inverse[:, None] + MAGIC - MAGIC).to(tl.int8)
    q_scale = q8_scale * qk_scale

    first_position = num_tokens - num_queries + first_query
    positions = first_position + tl.arange(0, BLOCK_M)
    diagonal = (first_position + 1) // BLOCK_N * BLOCK_N
    last = tl.minimum(first_position + BLOCK_M, num_tokens)
    k_row, v_row = kv_head * k_stride, kv_head * num_tokens
    k_scale_ptr += kv_head * num_blocks
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    row_max, row_sum, acc = _attend_tiles(
        q8, q_scale, positions, row_max, row_sum, acc, k_desc, v_desc, k_row, v_row, k_scale_ptr,
        0, diagonal, num_blocks, cutoff, BLOCK_N, False, SAS, STAGES,
    )  # fmt: skip
    row_max, row_sum, acc = _attend_tiles(
        q8, q_scale, positions, row_max, row_sum, acc, k_desc, v_desc, k_row, v_row, k_scale_ptr,
        diagonal, last, num_blocks, cutoff, BLOCK_N, True, SAS, STAGES,
    )  # fmt: skip
    out = acc * (tl.load(v_max_scale_ptr + kv_head) / row_sum)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=query_mask[:, None])
    lse = row_max - P_SHIFT + tl.log2(row_sum)
    tl.store(lse_ptr + queries.to(tl.int64) * HQ + head, lse, mask=query_mask)


def int8_prefill_attention(
    q: Tensor,
    k8: Tensor,
    v8: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    sm_scale: float,
    softmax: Softmax = "exact",
    cutoff_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the newest n_q tokens over stage 1 (INT8) of a cache that ends with them.

        S = s_Q s_K (q8 k8^T),   P = 2^(S - m),   o = P V / sum P,   lse = m + log2 sum P

    Rounding errors: q up to 1/254 of the largest channel of its row; P and V up to 2^-11, relative. With
    `softmax="sas"`, weights change by up to 1.02e-4, relative, and up to `DROPPED_MASS` of a row is dropped
    (`alspec/sas.py`).
    Source: TurboAttention, Algorithm 1. Oracle: `int8_prefill_attention_ref`.

    Args:
        q: [n_q, Hq, D] bf16, fp16 or fp32, contiguous, the last `n_q` of `n` tokens; D 64 or 128.
        k8, v8: [Hkv, n, D] int8, stage 1 of FlashQ, each head's tokens contiguous (a view of a longer cache works).
        k_scale, v_scale: [Hkv, ceil(n / 64)] fp32, contiguous, > 0: one for each block of 64 tokens.
        sm_scale: factor of the scores, > 0.
        softmax: "exact" or "sas".
        cutoff_tokens: number of tokens that sets the cutoff of SAS weights; default n.
    Returns:
        o: [n_q, Hq, D] in q's dtype.  lse: [n_q, Hq] fp32, base 2.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    """
    num_queries, num_qo_heads, head_dim = q.shape
    num_kv_heads, num_tokens, _ = k8.shape
    num_blocks = triton.cdiv(num_tokens, TOKENS.value)
    _check(q, k8, v8, k_scale, v_scale, sm_scale)
    v = torch.empty(num_kv_heads, num_tokens, head_dim, dtype=torch.float16, device=q.device)
    v_max_scale = torch.empty(num_kv_heads, device=q.device)
    _widen_kernel[(num_blocks, num_kv_heads)](
        v8, v_scale, v_max_scale, v, num_tokens, num_blocks, v8.stride(0), D=head_dim, num_warps=4
    )
    out = torch.empty_like(q)
    lse = torch.empty(num_queries, num_qo_heads, dtype=torch.float32, device=q.device)
    k_stride = k8.stride(0) // head_dim
    rows = (num_kv_heads - 1) * k_stride + num_tokens
    v_rows = num_kv_heads * num_tokens
    log2e = math.log2(math.e)
    shared_args = (v_max_scale, k_scale, out, lse, num_queries, num_tokens, num_blocks, k_stride, sm_scale * log2e)
    shape = {"HQ": num_qo_heads, "HEADS_PER_KV": num_qo_heads // num_kv_heads, "D": head_dim}
    if softmax == "exact" and is_hopper(q.device):
        tile = [hopper.TILE, head_dim]
        k_layout, v_layout = (gl.NVMMASharedLayout.get_default_for(tile, kind) for kind in (gl.int8, gl.float16))
        blocks = triton.cdiv(num_queries, 2 * hopper.HALF_ROWS) * num_qo_heads
        hopper.prefill_sm90_kernel[(min(blocks, num_sms(q.device)),)](
            q,
            HopperDescriptor(k8, [rows, head_dim], [head_dim, 1], tile, k_layout),
            HopperDescriptor(v, [v_rows, head_dim], [head_dim, 1], tile, v_layout),
            *shared_args,
            **shape,
            STAGES=hopper.STAGES,
            num_warps=4,
            maxnreg=hopper.REGISTERS,
        )
        return out, lse
    tile = [BLOCK, head_dim]
    _prefill_kernel[(triton.cdiv(num_queries, BLOCK) * num_qo_heads,)](
        q,
        TensorDescriptor(k8, [rows, head_dim], [head_dim, 1], tile),
        TensorDescriptor(v, [v_rows, head_dim], [head_dim, 1], tile),
        *shared_args,
        -cutoff(cutoff_tokens or num_tokens) * log2e,
        **shape,
        BLOCK_M=BLOCK,
        BLOCK_N=BLOCK,
        SAS=softmax == "sas",
        STAGES=NUM_STAGES,
        num_warps=num_warps(q.device),
    )
    return out, lse


@functools.cache
def num_warps(device: torch.device) -> int:
    """Return the warps per program: 8 before Hopper, where 4 would spill registers (not measured)."""
    return 8 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9 else 4


def _check(q: Tensor, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor, sm_scale: float) -> None:
    num_queries, num_qo_heads, head_dim = q.shape
    num_kv_heads, num_tokens, _ = k8.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q: expected a head_dim in {HEAD_DIMS}, found {head_dim}")
    if not q.is_contiguous() or num_qo_heads % num_kv_heads:
        raise ValueError(f"q: expected contiguous, with a multiple of {num_kv_heads} heads, found {list(q.shape)}")
    if not 1 <= num_queries <= num_tokens:
        raise ValueError(f"q: expected 1 to {num_tokens} tokens, found {num_queries}")
    for name, values in (("k8", k8), ("v8", v8)):
        if values.dtype != torch.int8 or values.shape != (num_kv_heads, num_tokens, head_dim):
            shape = [num_kv_heads, num_tokens, head_dim]
            raise ValueError(f"{name}: expected {shape} int8, found {list(values.shape)} {values.dtype}")
        if values.stride()[1:] != (head_dim, 1) or values.stride(0) % head_dim:
            raise ValueError(f"{name}: expected contiguous rows, found strides {values.stride()}")
        if num_kv_heads * values.stride(0) >= 2**31 * head_dim or num_tokens * head_dim >= 2**31:
            raise ValueError(f"{name}: expected offsets below 2^31, found {num_tokens} tokens, which need more")
    expected = (num_kv_heads, triton.cdiv(num_tokens, TOKENS.value))
    for name, values in (("k_scale", k_scale), ("v_scale", v_scale)):
        if values.shape != expected or values.dtype != torch.float32 or not values.is_contiguous():
            raise ValueError(f"{name}: expected {list(expected)} fp32, found {list(values.shape)} {values.dtype}")
    if not sm_scale > 0:
        raise ValueError(f"sm_scale: expected > 0, found {sm_scale}")
