"""Device code of decode attention over a quantised cache: a block, between record words and an online softmax.

A tile is W blocks, one for each warp: W is the leading size of all tensors here. Up to 8 query heads are columns of

    S^T = K q^T,   O^T = V^T P^T

Both products are INT8 MMAs of the codecs (sides.py). Between them all values are in *lanes*: tensors [W, 32], one value
for each lane of each warp. With up to 4 heads (HEADS = 4) a head has two columns, and a lane has the scores of one
head. With HEADS = 8 a lane has the scores of two heads: c of C.

Products are exact, except that q and P are rounded to 16 bits. Sums are fp32 or exact. The weights of a block are
relative to its own largest weight, so in a long context they keep as many bits as in a short one. With SAS the weights
follow `alspec/sas.py`; the factors that rescale sums, between blocks and between warps, remain exact powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.lanes import reduce_rows
from alspec.kernels.attention.decode_quantised.record_loads import (
    await_side,
    block_index,
    copy_side,
    load_scales,
    side_pointer,
)
from alspec.kernels.attention.decode_quantised.sides import accumulate, read_keys, read_values, scale_query, scores
from alspec.kernels.attention.decode_quantised.tail_attention import EMPTY_MAX
from alspec.kernels.attention.decode_quantised.warp_combine import store_lanes
from alspec.kernels.attention.sas_exp2 import sas_exp2
from alspec.kernels.common.device import log2_of_sum
from alspec.kernels.kv_codec.flashq.record import TOKENS
from alspec.kernels.kv_codec.formats import side_method

__all__ = ["attend_blocks", "empty_softmax"]


@triton.jit
def empty_softmax(HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Return the online softmax of no tokens, in lanes: the maximum for each c; the state of `accumulate_channels`."""
    maxima, state = (), ()
    for _ in tl.static_range(HEADS // 4):
        maxima = maxima + (tl.full([W, 32], EMPTY_MAX, tl.float32),)  # noqa: RUF005 (Triton has no *)
        for _ in tl.static_range(D // 8 + 2):
            state = state + (tl.zeros([W, 32], tl.float32),)  # noqa: RUF005
    return maxima, state


@triton.jit
def _hidden_tokens(count):
    """What tokens of each warp's block a lane must not see: the token 8 n + g is visible if the result is <= 8 n.

    count: [W], tokens at the start of the block that are masked.
    """
    return count[:, None] - tl.arange(0, 32)[None, :] // 4


@triton.jit
def _block_max(s, hidden):
    """Maximum over the visible tokens of the block of the scores of a head, (n) in lanes; hidden: None, all are."""
    block_max = s[0] if hidden is None else tl.where(hidden <= 0, s[0], EMPTY_MAX)
    for n in tl.static_range(1, TOKENS // 8):
        block_max = tl.maximum(block_max, s[n] if hidden is None else tl.where(hidden <= 8 * n, s[n], EMPTY_MAX))
    return reduce_rows(block_max, "max")


@triton.jit
def _store_block_lse(p, block_maxima, block_lse, block, valid, HEADS_PER_KV: tl.constexpr, C: tl.constexpr):
    """Store log2 of the sum of weights of each warp's block.

    Args:
        p: weights relative to block_maxima, (c n) in lanes.  block: [W].  valid: [W, 1].
    """
    lanes = tl.arange(0, 32)[None, :]
    for c in tl.static_range(C):
        total = p[c * (TOKENS // 8)]
        for n in tl.static_range(1, TOKENS // 8):
            total += p[c * (TOKENS // 8) + n]
        total = reduce_rows(total, "add")
        head = lanes % 4 * C + c
        pointers = block_lse[0] + block[:, None] * (4 * HEADS_PER_KV) + head
        mask = block_lse[1] & valid & (head < HEADS_PER_KV) & (lanes < 4)
        store_lanes(pointers, block_maxima[c] + log2_of_sum(total), mask)


@triton.jit
def attend_blocks(
    maxima,  # an online softmax, in lanes, with `state`: of `empty_softmax` or `attend_tail`
    state,
    query,  # of `prepare_query`
    qk_scale,  # sm_scale log2(e)
    records_ptr,  # of this output
    scales_ptr,  # of this output
    blocks,  # as for `block_index`; there are some
    block_lse,  # None, or (pointer of [NB, 4, HEADS_PER_KV] fp32, enabled): written for each block if enabled
    first_visible,  # tokens before this one are masked; each block has a later one. None: all are visible
    cutoff,  # of SAS weights, relative to the maximum so far
    buffers,  # of `init_buffers`; with BULK the copies of the first tile are already issued
    parity,  # barrier phase of the first tile; it alternates from tile to tile
    FORMAT: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,  # of the head
    W: tl.constexpr,
    D: tl.constexpr,
    SAS: tl.constexpr,
    BULK: tl.constexpr,
):
    """Continue an online softmax over the records of one output; return maxima, state and parity."""
    C: tl.constexpr = HEADS // 4
    warps = tl.arange(0, W)
    count = blocks[3]
    query_scale = scale_query(query, qk_scale, FORMAT, BITS, D, C)
    k_scale, v_scale = load_scales(scales_ptr, 0, blocks, W)
    num_tiles = tl.cdiv(count, W)
    # With FlashQ keys and two heads in a lane, no registers are left for V while the weights of blocks are computed.
    LATE_VALUES: tl.constexpr = block_lse is not None and C > 1 and side_method(FORMAT, False) == "flashq"
    for tile in tl.range(0, num_tiles, num_stages=1):
        more = tile + 1 < num_tiles
        if BULK:
            keys = read_keys(await_side(buffers, parity, False, W, D), FORMAT, D, BITS)
            copy_side(buffers, records_ptr, tile + 1, blocks, BITS, more, keys[-1], FORMAT, False, W, D)
        else:
            keys = read_keys(side_pointer(records_ptr, tile, blocks, FORMAT, False, W, D, BITS), FORMAT, D, BITS)
            values = read_values(side_pointer(records_ptr, tile, blocks, FORMAT, True, W, D, BITS), FORMAT, D, BITS)
        next_k_scale, next_v_scale = load_scales(scales_ptr, tile + 1, blocks, W)
        s, offset = scores(query, query_scale, keys, FORMAT, D, BITS, C)
        hidden = None
        if first_visible is not None:
            hidden = _hidden_tokens(first_visible - block_index(tile, warps, blocks, W) * TOKENS)
        if BULK and not LATE_VALUES:
            values = read_values(await_side(buffers, parity, True, W, D), FORMAT, D, BITS)
            copy_side(buffers, records_ptr, tile + 1, blocks, BITS, more, values[-1], FORMAT, True, W, D)

        valid = (tile * W + warps < count)[:, None]
        p, alphas, betas, new_maxima, block_maxima = (), (), (), (), ()
        for c in tl.static_range(C):
            unit = k_scale[:, None] * query_scale[0][c]
            code_max = _block_max(s[c], hidden)
            block_max = (code_max + offset[c]) * unit
            if W > 1:
                block_max = tl.where(valid, block_max, float("-inf"))
            new_max = tl.maximum(maxima[c], block_max)
            alphas = alphas + (tl.exp2(maxima[c] - new_max),)  # noqa: RUF005 (Triton has no *)
            betas = betas + (tl.exp2(block_max - new_max),)  # noqa: RUF005
            new_maxima = new_maxima + (new_max,)  # noqa: RUF005
            block_maxima = block_maxima + (block_max,)  # noqa: RUF005
            code_max *= unit
            for n in tl.static_range(TOKENS // 8):
                x = s[c][n] * unit - code_max
                # The cutoff is relative to the maximum so far, not to the block's maximum.
                weight = sas_exp2(x, cutoff + (new_max - block_max)) if SAS else tl.exp2(x)
                if hidden is not None:
                    weight = tl.where(hidden <= 8 * n, weight, 0.0)
                p = p + (weight,)  # noqa: RUF005
        maxima = new_maxima
        if block_lse is not None:
            _store_block_lse(p, block_maxima, block_lse, block_index(tile, warps, blocks, W), valid, HEADS_PER_KV, C)
        if BULK and LATE_VALUES:
            values = read_values(await_side(buffers, parity, True, W, D), FORMAT, D, BITS)
            copy_side(buffers, records_ptr, tile + 1, blocks, BITS, more, values[-1], FORMAT, True, W, D)
        state = accumulate(state, p, alphas, betas, v_scale, values, FORMAT, HEADS, W, D, BITS)
        k_scale, v_scale = next_k_scale, next_v_scale
        parity ^= 1
    return maxima, state, parity
