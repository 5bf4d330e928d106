"""Device functions that pack codes into planes and back; code_planes.py gives the layout and has the oracles."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_planes", "pack_fields", "store_planes"]


@triton.jit
def pack_fields(x, BITS: tl.constexpr, LOG: tl.constexpr):
    """Pack rows of 2^LOG integers of BITS bits, [N, 2^LOG], into words [N]; the first integer gets the lowest bits.

    Joins halves instead of summing shifted fields: Triton 3.6 and 3.7 miscompile such a sum when the permuted rows
    span several warps (2-bit codes of 64 channels with 8 warps).
    """
    for level in tl.static_range(LOG):
        low, high = tl.split(tl.reshape(x, [x.shape[0], 2 ** (LOG - level - 1), 2]))
        x = low | (high << (BITS * 2**level))
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _pack_plane(codes, WIDTH: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Pack codes [64, D] of WIDTH bits into the words [2 D WIDTH] of one plane."""
    if IS_V:
        x = tl.reshape(codes, [2, 2, 2, 4, 2, D // 16, 2, 8])
        if WIDTH == 4:
            x = tl.permute(x, [5, 0, 1, 7, 3, 6, 4, 2])
        elif WIDTH == 2:
            x = tl.permute(x, [5, 0, 7, 3, 6, 4, 2, 1])
        else:
            x = tl.permute(x, [5, 7, 3, 6, 4, 2, 0, 1])
    else:
        x = tl.reshape(codes, [4, 2, 8, D // 64, 2, 2, 2, 4, 2])
        if WIDTH == 4:
            x = tl.permute(x, [0, 3, 4, 5, 2, 7, 1, 8, 6])
        elif WIDTH == 2:
            x = tl.permute(x, [0, 3, 4, 2, 7, 1, 8, 6, 5])
        else:
            x = tl.permute(x, [0, 3, 2, 7, 1, 8, 6, 4, 5])
    x = tl.permute(tl.reshape(x, [D * WIDTH // 64, 4, 32, 32 // WIDTH]), [0, 2, 1, 3])
    LOG: tl.constexpr = 3 if WIDTH == 4 else 4 if WIDTH == 2 else 5
    return pack_fields(tl.reshape(x, [2 * D * WIDTH, 32 // WIDTH]), WIDTH, LOG)


@triton.jit
def _unpack_plane(words, WIDTH: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Unpack words [2 D WIDTH] into codes [64, D] of WIDTH bits; the inverse of `_pack_plane`."""
    x = (words[:, None] >> (WIDTH * tl.arange(0, 32 // WIDTH))[None, :]) & ((1 << WIDTH) - 1)
    x = tl.permute(tl.reshape(x, [D * WIDTH // 64, 32, 4, 32 // WIDTH]), [0, 2, 1, 3])
    if IS_V:
        if WIDTH == 4:
            x = tl.permute(tl.reshape(x, [D // 16, 2, 2, 8, 4, 2, 2, 2]), [1, 2, 7, 4, 6, 0, 5, 3])
        elif WIDTH == 2:
            x = tl.permute(tl.reshape(x, [D // 16, 2, 8, 4, 2, 2, 2, 2]), [1, 7, 6, 3, 5, 0, 4, 2])
        else:
            x = tl.permute(tl.reshape(x, [D // 16, 8, 4, 2, 2, 2, 2, 2]), [6, 7, 5, 2, 4, 0, 3, 1])
    else:
        if WIDTH == 4:
            x = tl.permute(tl.reshape(x, [4, D // 64, 2, 2, 8, 4, 2, 2, 2]), [0, 6, 4, 1, 2, 3, 8, 5, 7])
        elif WIDTH == 2:
            x = tl.permute(tl.reshape(x, [4, D // 64, 2, 8, 4, 2, 2, 2, 2]), [0, 5, 3, 1, 2, 8, 7, 4, 6])
        else:
            x = tl.permute(tl.reshape(x, [4, D // 64, 8, 4, 2, 2, 2, 2, 2]), [0, 4, 2, 1, 7, 8, 6, 3, 5])
    return tl.reshape(x, [64, D])


@triton.jit
def store_planes(codes, codes_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Store codes [64, D] int32 of a side as words, 2 D BITS of them. Oracle: `pack_planes`."""
    if BITS == 4:
        codes = tl.where(codes >= 8, codes - 8, 15 - codes)
        tl.store(codes_ptr + tl.arange(0, 8 * D), _pack_plane(codes, 4, D, IS_V))
    else:
        tl.store(codes_ptr + tl.arange(0, 4 * D), _pack_plane(codes & 3, 2, D, IS_V))
        if BITS == 3:
            tl.store(codes_ptr + 4 * D + tl.arange(0, 2 * D), _pack_plane(codes >> 2, 1, D, IS_V))


@triton.jit
def load_planes(codes_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Load the codes [64, D] int32 of a side. Oracle: `unpack_planes`."""
    if BITS == 4:
        codes = _unpack_plane(tl.load(codes_ptr + tl.arange(0, 8 * D)), 4, D, IS_V)
        codes = tl.where(codes >= 8, 15 - codes, codes + 8)
    else:
        codes = _unpack_plane(tl.load(codes_ptr + tl.arange(0, 4 * D)), 2, D, IS_V)
        if BITS == 3:
            high = _unpack_plane(tl.load(codes_ptr + 4 * D + tl.arange(0, 2 * D)), 1, D, IS_V)
            codes |= high << 2
    return codes
