"""Device functions that convert a block in registers to a side of a FlashQ record and back; layout.py gives the format.

One permutation of a block's axes, in registers, brings codes into the order of layout.py. Results equal those of the
oracles to the bit: division is `tl.div_rn`; rounding half to even adds and subtracts 1.5 * 2^23. Rounding comes after
the clamp here. That gives the same result, because the bounds are integers.

A side holds codes, then parameters (`s_int`, `z`). Codes of 3 bits are in planes (code_planes.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.kv_codec.plane_kernels import load_planes, pack_fields, store_planes
from alspec.kernels.kv_codec.quantised_layer import BLOCK

__all__ = ["TOKENS", "largest", "restore_channels_side", "to_int8", "write_channels_side"]

TOKENS = tl.constexpr(BLOCK)


@triton.jit
def largest(x, axis: tl.constexpr):
    """max |x| over an axis; NaN if x has one. Compares bits as integers, because the float maximum ignores NaN."""
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)


@triton.jit
def to_int8(x, scale):
    """Compute `rint(clamp(x / scale, -119, 119))` as int32."""
    ratio = tl.minimum(tl.maximum(tl.div_rn(x, scale), -119.0), 119.0)
    return ((ratio + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _pack_codes(codes, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Pack codes [64, D] int32 into words [2 D BITS]; the permutation of `_pack_codes` in layout.py."""
    CF: tl.constexpr = 16 // BITS if 16 // BITS < D // 16 else D // 16
    CW: tl.constexpr = D // 16 // CF
    TF: tl.constexpr = 16 // BITS // CF
    TW: tl.constexpr = 4 // TF
    if IS_V:
        x = tl.reshape(codes, [2, 2, 2, 4, 2, D * BITS // 128, 8 // BITS, 2, 8])
        x = tl.permute(x, [5, 0, 8, 3, 1, 7, 4, 2, 6])
    else:
        x = tl.reshape(codes, [TW, TF, 2, 8, CF, CW, 2, 4, 2])
        x = tl.permute(x, [0, 5, 3, 7, 6, 2, 8, 1, 4])
    return pack_fields(tl.reshape(x, [2 * D * BITS, 32 // BITS]), BITS, 3 if BITS == 4 else 4)


@triton.jit
def _unpack_codes(words, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Unpack words [2 D BITS] into codes [64, D]; the inverse of `_pack_codes`."""
    CF: tl.constexpr = 16 // BITS if 16 // BITS < D // 16 else D // 16
    CW: tl.constexpr = D // 16 // CF
    TF: tl.constexpr = 16 // BITS // CF
    TW: tl.constexpr = 4 // TF
    x = (words[:, None] >> (BITS * tl.arange(0, 32 // BITS))[None, :]) & ((1 << BITS) - 1)
    if IS_V:
        x = tl.permute(tl.reshape(x, [D * BITS // 128, 2, 8, 4, 2, 2, 2, 2, 8 // BITS]), [1, 4, 7, 3, 6, 0, 8, 5, 2])
    else:
        x = tl.permute(tl.reshape(x, [TW, CW, 8, 4, 2, 2, 2, TF, CF]), [0, 7, 5, 2, 8, 1, 4, 3, 6])
    return tl.reshape(x, [TOKENS, D])


@triton.jit
def _pack_params(values, D: tl.constexpr, IS_V: tl.constexpr):
    """Pack one byte per channel, [D] int32, into words [D / 4]."""
    if IS_V:
        x = tl.permute(tl.reshape(values, [D // 16, 2, 8]), [2, 0, 1])
    else:
        x = tl.permute(tl.reshape(values, [D // 16, 2, 4, 2]), [2, 0, 1, 3])
    return pack_fields(tl.reshape(x, [D // 4, 4]), 8, 2)


@triton.jit
def _unpack_params(words, D: tl.constexpr, IS_V: tl.constexpr):
    """Unpack words [D / 4] into bytes [D] int32; the inverse of `_pack_params`."""
    x = (words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 255
    if IS_V:
        x = tl.permute(tl.reshape(x, [8, D // 16, 2]), [1, 2, 0])
    else:
        x = tl.permute(tl.reshape(x, [4, D // 16, 2, 2]), [1, 2, 0, 3])
    return tl.reshape(x, [D])


@triton.jit
def write_channels_side(q1, side_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Stage 2: quantise a block q1 [64, D] int32 of K or V, and write its side of the record."""
    LEVELS: tl.constexpr = (1 << BITS) - 1
    CODES: tl.constexpr = 2 * D * BITS
    z = tl.min(q1, 0)
    s_int = (tl.max(q1, 0) - z + LEVELS - 1) // LEVELS
    s_int = tl.maximum(s_int, 1)
    # floor(m / (2 s_int)) in fp32: m + 0.5 is farther from the next multiple than the rounding error.
    inv_divisor = 0.5 / s_int.to(tl.float32)
    codes = ((2 * (q1 - z[None, :]) + s_int[None, :]).to(tl.float32) + 0.5) * inv_divisor[None, :]
    if BITS == 3:
        store_planes(codes.to(tl.int32), side_ptr, BITS, D, IS_V)
    else:
        tl.store(side_ptr + tl.arange(0, CODES), _pack_codes(codes.to(tl.int32), BITS, D, IS_V))
    params_ptr = side_ptr + CODES + tl.arange(0, D // 4)
    tl.store(params_ptr, _pack_params(s_int, D, IS_V))
    tl.store(params_ptr + D // 4, _pack_params(z + 128, D, IS_V))


@triton.jit
def restore_channels_side(side_ptr, q1_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Read K's or V's side of a record and store `q1' = q2 s_int + z`, [64, D] int8."""
    CODES: tl.constexpr = 2 * D * BITS
    if BITS == 3:
        codes = load_planes(side_ptr, BITS, D, IS_V)
    else:
        codes = _unpack_codes(tl.load(side_ptr + tl.arange(0, CODES)), BITS, D, IS_V)
    params_ptr = side_ptr + CODES + tl.arange(0, D // 4)
    s_int = _unpack_params(tl.load(params_ptr), D, IS_V)
    z = _unpack_params(tl.load(params_ptr + D // 4), D, IS_V) - 128
    q1 = codes * s_int[None, :] + z[None, :]
    t = tl.arange(0, TOKENS)[:, None]
    tl.store(q1_ptr + t * D + tl.arange(0, D)[None, :], q1.to(tl.int8))
