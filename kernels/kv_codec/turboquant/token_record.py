"""Device functions that convert a block in registers to a side of a TurboQuant record and back.

Oracles: `compress_tokens`, `restore_tokens` of token_codes.py and `pack_planes`. Results equal theirs to the bit: sums
are sums of integers, divisions and roots round to nearest.

A side holds codes (code_planes.py), then the ratio of each token, fp16, in the order in which lanes use them: [g][n],
token `8 n + g`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.kv_codec.plane_kernels import load_planes, store_planes
from alspec.kernels.kv_codec.turboquant.codebook import UNITS, code_bytes, thresholds
from alspec.kernels.kv_codec.turboquant.rotation import SIGN_BITS

__all__ = ["restore_tokens_side", "write_tokens_side"]

SMALLEST = tl.constexpr(2.0**-126)


@triton.constexpr_function
def _threshold(bits, index):
    return thresholds(bits)[index]


@triton.constexpr_function
def _doubled_level(bits, code):
    return 2 * code_bytes(bits)[code] - 127


@triton.constexpr_function
def _units(bits):
    return UNITS[bits]


@triton.constexpr_function
def _sign_word(index):
    """32 sign bits as an int32."""
    word = SIGN_BITS >> 32 * index & 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _signed_hadamard(D: tl.constexpr):
    """`signed_hadamard` as int8: [i, j] is the factor of channel i in rotated coordinate j."""
    i = tl.arange(0, D)
    common = i[:, None] & i[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    word = tl.where(i < 32, _sign_word(0), _sign_word(1))
    if D > 64:
        word = tl.where(i < 64, word, tl.where(i < 96, _sign_word(2), _sign_word(3)))
    negative = (common ^ (word >> (i % 32))[:, None]) & 1
    return (1 - 2 * negative).to(tl.int8)


@triton.jit
def write_tokens_side(q1, side_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Quantise stage-1 codes q1 [64, D] int32 and write their side of a record; return the factor of the block."""
    norm = tl.sum(q1 * q1, 1)
    square = tl.maximum(norm, 1).to(tl.float32)
    y = q1
    if IS_V:
        square *= 1.0 / D
    else:
        y = tl.dot(q1.to(tl.int8), _signed_hadamard(D), out_dtype=tl.int32)
    unit = tl.div_rn(tl.full(square.shape, _units(BITS), tl.float32), tl.sqrt_rn(square))
    position = y.to(tl.float32) * unit[:, None]
    codes = tl.zeros_like(y)
    doubled = tl.full(y.shape, _doubled_level(BITS, 0), tl.int32)
    for index in tl.static_range(2**BITS - 1):
        above = position > _threshold(BITS, index)
        codes += above.to(tl.int32)
        doubled += tl.where(above, _doubled_level(BITS, index + 1) - _doubled_level(BITS, index), 0)
    doubled_norm = tl.sum(doubled * doubled, 1).to(tl.float32)
    if IS_V:
        scale = 2 * tl.sqrt_rn(tl.div_rn(norm.to(tl.float32), doubled_norm))
    else:
        scale = tl.div_rn((2 * tl.sum(y * doubled, 1)).to(tl.float32), doubled_norm) * D**-0.5
    factor = tl.max(scale, 0)
    ratio = tl.div_rn(scale, tl.maximum(factor, SMALLEST) + tl.zeros_like(scale)).to(tl.float16)
    store_planes(codes, side_ptr, BITS, D, IS_V)
    tokens = tl.arange(0, 64)
    ratio_ptr = (side_ptr + 2 * D * BITS).to(tl.pointer_type(tl.float16))
    tl.store(ratio_ptr + tokens % 8 * 8 + tokens // 8, ratio)
    return factor


@triton.jit
def restore_tokens_side(side_ptr, factor, q1_ptr, BITS: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Restore a side to stage 1, q1 [64, D] int8, and return its scale; factor: the block's scale in the cache."""
    codes = load_planes(side_ptr, BITS, D, IS_V)
    levels = tl.full(codes.shape, _doubled_level(BITS, 0), tl.int32)
    for index in tl.static_range(2**BITS - 1):
        levels += tl.where(codes > index, _doubled_level(BITS, index + 1) - _doubled_level(BITS, index), 0)
    half = 0.5
    if not IS_V:
        levels = tl.dot(levels.to(tl.int8), tl.trans(_signed_hadamard(D)), out_dtype=tl.int32)
        half = 0.5 * D**-0.5
    tokens = tl.arange(0, 64)
    ratio_ptr = (side_ptr + 2 * D * BITS).to(tl.pointer_type(tl.float16))
    x = levels.to(tl.float32) * tl.load(ratio_ptr + tokens % 8 * 8 + tokens // 8).to(tl.float32)[:, None]
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    unit = tl.where(largest == 0, 1.0, tl.div_rn(largest, 119.0))
    q1 = tl.minimum(tl.maximum(tl.div_rn(x, unit), -119.0), 119.0)
    q1 = (q1 + 12582912.0) - 12582912.0
    tl.store(q1_ptr + tokens[:, None] * D + tl.arange(0, D)[None, :], q1.to(tl.int8))
    return unit * half * factor
