"""Device code: what decode attention does with K and with V, for every codec of a side.

A key codec prepares q and computes the scores of a block; a value codec adds weighted values to an online softmax. The
main loop calls the functions below. FORMAT names the codecs (kv_codec/formats.py). BITS are those of the head, read
where the format lets each head have its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_flashq.flashq_keys import channel_scores, prepare_flashq_query, scale_flashq_query
from alspec.kernels.attention.decode_flashq.flashq_values import accumulate_channels
from alspec.kernels.attention.decode_quantised.record_loads import read_channels, read_tokens
from alspec.kernels.attention.decode_turboquant.turboquant_keys import (
    prepare_rotated_query,
    scale_rotated_query,
    token_scores,
)
from alspec.kernels.attention.decode_turboquant.turboquant_values import accumulate_tokens
from alspec.kernels.kv_codec.formats import side_bits, side_method

__all__ = ["accumulate", "prepare_query", "read_keys", "read_values", "scale_query", "scores"]


@triton.jit
def prepare_query(
    source, buffers, parity, FORMAT: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr,
    TOGETHER: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BULK_Q: tl.constexpr,
):  # fmt: skip
    """Load the query heads of an output, as the key codec uses them.

    source: of `query_source`.  BULK_Q: by `copy_query`.
    """
    if side_method(FORMAT, False) == "flashq":
        query = prepare_flashq_query(source, buffers, parity, HEADS_PER_KV, HEADS, TOGETHER, W, D, BULK_Q)
    else:
        query = prepare_rotated_query(source, buffers, parity, HEADS_PER_KV, HEADS, TOGETHER, W, D, BULK_Q)
    return query


@triton.jit
def scale_query(query, qk_scale, FORMAT: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Scale q for records of BITS bits: (factor of the scores for each c, ...)."""
    if side_method(FORMAT, False) == "flashq":
        scaled = scale_flashq_query(query, qk_scale, side_bits(FORMAT, False, BITS), D, C)
    else:
        scaled = (scale_rotated_query(query, qk_scale, D, C),)
    return scaled


@triton.jit
def read_keys(side, FORMAT: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Load K of a tile: its words and parameters, and `done` as the last element."""
    if side_method(FORMAT, False) == "flashq":
        keys = read_channels(side, D, side_bits(FORMAT, False, BITS), False)
    else:
        keys = read_tokens(side, D, side_bits(FORMAT, False, BITS))
    return keys


@triton.jit
def scores(query, query_scale, keys, FORMAT: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Compute the scores of a block, without `query_scale[0]` and the scale of K.

    Returns, for each c: the scores of the tokens 8 n + g, for each n; what all scores of the block lack.
    """
    if side_method(FORMAT, False) == "flashq":
        s, offset = channel_scores(query, query_scale, keys[0], keys[1], keys[2], D, side_bits(FORMAT, False, BITS), C)
    else:
        s = token_scores(query, keys[0], keys[1], D, side_bits(FORMAT, False, BITS), C)
        offset = ()
        for _ in tl.static_range(C):
            offset = offset + (0.0,)  # noqa: RUF005 (Triton has no *)
    return s, offset


@triton.jit
def read_values(side, FORMAT: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Load V of a tile: its words and parameters, and `done` as the last element."""
    if side_method(FORMAT, True) == "flashq":
        values = read_channels(side, D, side_bits(FORMAT, True, BITS), True)
    else:
        values = read_tokens(side, D, side_bits(FORMAT, True, BITS))
    return values


@triton.jit
def accumulate(
    state, p, alphas, betas, v_scale, values, FORMAT: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Add a block's weights p and weighted values to the state of an online softmax (see lanes.py)."""
    if side_method(FORMAT, True) == "flashq":
        state = accumulate_channels(
            state, p, alphas, betas, v_scale, values[0], values[1], values[2], HEADS, W, D,
            side_bits(FORMAT, True, BITS),
        )  # fmt: skip
    else:
        state = accumulate_tokens(
            state, p, alphas, betas, v_scale, values[0], values[1], HEADS, W, D, side_bits(FORMAT, True, BITS)
        )
    return state
