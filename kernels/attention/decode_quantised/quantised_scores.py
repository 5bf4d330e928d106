"""Scores of decode attention over the records of a quantised cache: the first stage of the fused kernel, alone.

Decode attention never writes scores. This launch does, with the device code of the fused kernel, for every key codec.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.attention.decode_quantised.query import query_source
from alspec.kernels.attention.decode_quantised.record_loads import init_buffers, load_scales, side_pointer
from alspec.kernels.attention.decode_quantised.sides import prepare_query, read_keys, scale_query, scores
from alspec.kernels.attention.decode_quantised.tail_attention import COLUMNS
from alspec.kernels.kv_codec.flashq.record import TOKENS
from alspec.kernels.kv_codec.formats import has_own_bits
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD, QuantisedLayer

__all__ = ["quantised_scores"]


@triton.jit
def _write_scores(
    out_ptr, query, qk_scale, records_ptr, scales_ptr, block, head_stride, FORMAT: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the scores of one block; `out_ptr` is that of the first query head and the first token."""
    C: tl.constexpr = HEADS // 4
    blocks = (block, 1, block, 1)
    factors = scale_query(query, qk_scale, FORMAT, BITS, D, C)
    keys = read_keys(side_pointer(records_ptr, 0, blocks, FORMAT, False, 1, D, BITS), FORMAT, D, BITS)
    s, offset = scores(query, factors, keys, FORMAT, D, BITS, C)
    k_scale, _ = load_scales(scales_ptr, 0, blocks, 1)
    lanes = tl.arange(0, 32)[None, :]
    for c in tl.static_range(C):
        head = lanes % 4 * C + c
        for n in tl.static_range(TOKENS // 8):
            x = (s[c][n] + offset[c]) * (k_scale[:, None] * factors[0][c])
            tl.store(out_ptr + head * head_stride + (8 * n + lanes // 4), x, mask=head < HEADS_PER_KV)


@triton.jit(do_not_specialize=["num_blocks", "head_stride"], do_not_specialize_on_alignment=PER_HEAD)
def _scores_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, D]
    records_ptr,  # [W] int32
    offset_ptr,  # [B, Hkv] int64
    bits_ptr,  # [B, Hkv] int32
    scales_ptr,  # [B, Hkv, NB, 2] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, head_stride] fp32
    num_blocks,  # NB
    head_stride,
    qk_scale,  # sm_scale log2(e)
    FORMAT: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
):
    """Scores of one block. Grid [blocks, B Hkv]."""
    HEADS: tl.constexpr = COLUMNS // 2 if HEADS_PER_KV <= COLUMNS // 2 else COLUMNS
    block, output = tl.program_id(0), tl.program_id(1)
    buffers = init_buffers(1, D, False)
    source = query_source(q_ptr, output, 1, HEADS_PER_KV, D, 1, 1)
    query = prepare_query(source, buffers, 0, FORMAT, HEADS_PER_KV, HEADS, 1, 1, D, False)
    records = records_ptr + tl.load(offset_ptr + output)
    scales = scales_ptr + output.to(tl.int64) * num_blocks * 2
    out = out_ptr + output.to(tl.int64) * HEADS_PER_KV * head_stride + block * TOKENS
    if has_own_bits(FORMAT) and (tl.load(bits_ptr + output) == 2):
        _write_scores(out, query, qk_scale, records, scales, block, head_stride, FORMAT, HEADS_PER_KV, HEADS, D, 2)
    else:
        _write_scores(out, query, qk_scale, records, scales, block, head_stride, FORMAT, HEADS_PER_KV, HEADS, D, 4)


def quantised_scores(q: Tensor, layer: QuantisedLayer, num_blocks: int, sm_scale: float) -> Tensor:
    """Compute the scores of one new token per request over the first records of its cache, in base 2.

        s_t = sm_scale log2(e) q . k_t,   K dequantised

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous; at most 8 query heads per KV head.
        layer: the cache of one layer.  num_blocks: records of each request and head to read.
    Returns:
        [B, Hq, 64 num_blocks] fp32.
    """
    batch_size, num_qo_heads, head_dim = q.shape
    out = torch.empty(batch_size, num_qo_heads, 64 * num_blocks, device=q.device)
    _scores_kernel[(num_blocks, batch_size * layer.num_kv_heads)](
        q, layer.words, layer.offset, layer.bits, layer.scales, out, layer.num_blocks, out.shape[2],
        sm_scale * math.log2(math.e), FORMAT=layer.format, HEADS_PER_KV=num_qo_heads // layer.num_kv_heads, D=head_dim,
        num_warps=1,
    )  # fmt: skip
    return out
