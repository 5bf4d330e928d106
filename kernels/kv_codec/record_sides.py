"""Device functions for the sides of a record of any format: where they lie, how a block becomes one, and back.

This file and codec_reference.py choose the codec of a side; formats.py names them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.kv_codec.flashq.record import restore_channels_side, write_channels_side
from alspec.kernels.kv_codec.formats import has_own_bits, side_bits, side_method, side_words
from alspec.kernels.kv_codec.turboquant.token_record import restore_tokens_side, write_tokens_side

__all__ = ["record_at", "restore_side", "write_side"]


@triton.jit
def record_at(words_ptr, offset, bits, block, FORMAT: tl.constexpr, D: tl.constexpr):
    """Return the address of record `block` of one request and head; `offset` is where their records begin."""
    WIDE: tl.constexpr = side_words(FORMAT, False, 4, D) + side_words(FORMAT, True, 4, D)
    NARROW: tl.constexpr = side_words(FORMAT, False, 2, D) + side_words(FORMAT, True, 2, D)
    return words_ptr + offset + block.to(tl.int64) * tl.where(bits == 4, WIDE, NARROW)


@triton.jit
def _write_side(q1, record_ptr, FORMAT: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    side_ptr = record_ptr + IS_V * side_words(FORMAT, False, BITS, D)
    factor = 1.0
    if side_method(FORMAT, IS_V) == "flashq":
        write_channels_side(q1, side_ptr, BITS, D, IS_V)
    else:
        factor = write_tokens_side(q1, side_ptr, BITS, D, IS_V)
    return factor


@triton.jit
def write_side(q1, record_ptr, bits, FORMAT: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Write a block, q1 [64, D] int32 of stage 1, as a side of a record.

    Returns:
        factor: the scale of the side is that of q1 times this.
    """
    factor = 1.0
    if not has_own_bits(FORMAT):
        factor = _write_side(q1, record_ptr, FORMAT, side_bits(FORMAT, IS_V, 0), D, IS_V)
    elif bits == 4:
        _write_side(q1, record_ptr, FORMAT, 4, D, IS_V)
    else:
        _write_side(q1, record_ptr, FORMAT, 2, D, IS_V)
    return factor


@triton.jit
def _restore_side(
    record_ptr, scale, q1_ptr, FORMAT: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr
):
    side_ptr = record_ptr + IS_V * side_words(FORMAT, False, BITS, D)
    if side_method(FORMAT, IS_V) == "flashq":
        restore_channels_side(side_ptr, q1_ptr, BITS, D, IS_V)
    else:
        scale = restore_tokens_side(side_ptr, scale, q1_ptr, BITS, D, IS_V)
    return scale


@triton.jit
def restore_side(record_ptr, bits, scale, q1_ptr, FORMAT: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Restore a side to stage 1, q1 [64, D] int8, and return the scale of q1; scale: of the side."""
    if not has_own_bits(FORMAT):
        scale = _restore_side(record_ptr, scale, q1_ptr, FORMAT, side_bits(FORMAT, IS_V, 0), D, IS_V)
    elif bits == 4:
        scale = _restore_side(record_ptr, scale, q1_ptr, FORMAT, 4, D, IS_V)
    else:
        scale = _restore_side(record_ptr, scale, q1_ptr, FORMAT, 2, D, IS_V)
    return scale
