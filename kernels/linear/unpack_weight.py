"""The values of a packed weight in the dtype of activations, for products through the library."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.common.jit_launch import jit_launch
from alspec.kernels.linear.decode_weight import TILE_ROWS, DecodeWeight, block_lines

__all__ = ["unpack_weight"]

INPUTS = 256  # of a program


@triton.jit
def _unpack_kernel(
    w_ptr,  # [tiles, blocks, words] int32, see decode_weight.py
    scale_ptr,  # [tiles, 8, 2, 2] fp32, or None
    out_ptr,  # [num_rows, K]
    num_rows,
    stride,
    num_blocks,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """BLOCK inputs of a tile. Grid [tiles, ceil(K / BLOCK)]."""
    OF_LINE: tl.constexpr = 64 if FORMAT == "int4" else 32
    WORDS: tl.constexpr = LINES * 128 + (32 if GROUP else 0)
    tile = tl.program_id(0)
    row, column = tl.arange(0, ROWS)[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    half, g = row // 8, row % 8
    tiles_of_block = stride // 8
    out_row = tile // tiles_of_block * 2 * stride + half * stride + tile % tiles_of_block * 8 + g
    mask = (out_row < num_rows) & (column < K)
    line, of_line = column // OF_LINE, column % OF_LINE
    block_ptr = w_ptr + (tl.cast(tile, tl.int64) * num_blocks + line // LINES) * WORDS
    lane, place = g * 4 + of_line % 32 // 8, of_line % 8
    if FORMAT == "int4":
        word_index = of_line // 32 * 2 + half
        shift = place // 2 * 4 + place % 2 * 16
    else:
        word_index = half * 2 + place // 4
        shift = 24 - (place % 4 // 2 * 8 + (1 - place % 2) * 16)
    words = tl.load(block_ptr + line % LINES * 128 + lane * 4 + word_index, mask=mask, other=0)
    if GROUP > 0:
        group = column // (32 * GROUP)
        scale_words = tl.load(block_ptr + LINES * 128 + g * 4 + group % 2 * 2 + half, mask=mask, other=0)
        scale = (scale_words & (-16 if FORMAT == "int4" else -1)).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scale_ptr + tile * 32 + g * 4 + half)
    if FORMAT == "int4":
        value = (((words >> shift) & 15) - (scale_words & 15)).to(tl.float32)
    else:
        byte = (words >> shift) & 0xFF
        value = (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    out_offsets = tl.cast(out_row, tl.int64) * K + column
    tl.store(out_ptr + out_offsets, (value * scale).to(out_ptr.dtype.element_ty), mask=mask)


def unpack_weight(weight: DecodeWeight, out: Tensor) -> None:
    """Write the values of a packed weight. Oracle: `DecodeWeight.dequantise`.

        out[row, input] = (code - zero) * scale

    Args:
        out: [out, in], written.
    Capture: graph-safe; allocates nothing.
    """
    num_rows, num_inputs = weight.shape
    grid = (weight.data.shape[0], triton.cdiv(num_inputs, INPUTS))
    jit_launch(_unpack_kernel, grid)(
        weight.data, weight.scales, out, num_rows, weight.stride, weight.data.shape[1], K=num_inputs,
        FORMAT=weight.format, GROUP=weight.group, LINES=block_lines(weight.format, weight.group), BLOCK=INPUTS,
        ROWS=TILE_ROWS,
    )  # fmt: skip
