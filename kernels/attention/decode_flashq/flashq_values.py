"""Device code of FlashQ: the product of decode attention with V, O^T = V^T P^T, in INT8 (see block_attention.py).

A of the MMAs is [16 channels, 32 tokens], B [32 tokens, 8 columns], here unsigned bytes; all values are in lanes.

- The stored words of V are A operands as they are (layout.py). One mask selects a field of all four bytes. The upper of
  two fields needs no mask: its product is that of the whole bytes minus that of the lower field.
- Sums are integers below 2^23. Read as floats they are denormals, n 2^-149; multiplications take them as they are.
- The factors of a channel, `s_int` and `z + 128`, are bytes. A small fp16 MMA distributes them over lanes as floats. It
  also divides `s_int` by the power of two of a field, and multiplies `z + 128` by the sum of weights, which is split
  into two fp16 of 11 bits each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.lanes import (
    P_SCALE,
    PV_UNIT,
    ROUND,
    p_operands,
    pv_mma,
    to_fragment,
    transpose_8x8,
    unpack_bytes,
)
from alspec.kernels.common.device import INTERPRETED

__all__ = ["accumulate_channels"]

ULP = tl.constexpr(2.0**-24)  # lowest bit of a denormal fp16
FACTOR_UNIT = tl.constexpr(2.0**-9)  # factor in the results of `_scale_mma`, for the lowest field


@triton.jit
def _scale_mma(x, b):
    """Multiply [16, 8] by [8, 8] in fp16.

    Args:
        x: a word of each lane. Bytes 0 and 2 are row g of A, columns 2 t and 2 t + 1; bytes 1 and 3 are row g + 8. As
            fp16 they are denormals, n ULP.
        b: the word of the B operand.
    Returns:
        fp32, in the order of `mma_m16n8k32`.
    """
    if INTERPRETED:
        W: tl.constexpr = x.shape[0]
        left = tl.reshape(unpack_bytes(x), [W, 8, 4, 2, 2])  # g t i rh
        left = tl.reshape(tl.permute(left, (0, 4, 1, 2, 3)), [W, 16, 8]).to(tl.float32) * ULP
        right = tl.join((b & 0xFFFF).to(tl.int16), (b >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
        right = tl.reshape(tl.permute(tl.reshape(right, [W, 8, 4, 2]), (0, 2, 3, 1)), [W, 8, 8])
        y = to_fragment(tl.dot(left, right.to(tl.float32)), 4)
    else:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 u, v; .reg .f32 z; mov.f32 z, 0f00000000;"
            " prmt.b32 u, $4, 0, 0x4240; prmt.b32 v, $4, 0, 0x4341;"
            " mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {u, v}, {$5}, {z, z, z, z}; }",
            "=f,=f,=f,=f,r,r", [x, b],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return y


@triton.jit
def _fp16_bits(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _split_hi_lo(x):
    """Split x into the sum of two fp16; return their bits, the larger one first. Keeps 22 bits of x."""
    high = x.to(tl.float16).to(tl.float32)
    return _fp16_bits(high), _fp16_bits(x - high)


@triton.jit
def _weight_sum_operands(sums, C: tl.constexpr):
    """B operands of `_scale_mma` from sums of weights (of `pv_mma`): one for both channel tiles, or one for each."""
    row = tl.arange(0, 32)[None, :] // 4
    high, low = _split_hi_lo(sums[0] * (FACTOR_UNIT / ULP))
    if C == 1:
        # Rows 0 and 2 are for the even columns, rows 1 and 3 for the odd columns.
        x = tl.where(row < 2, high, low)
        x = tl.where(row % 2 == 0, x, x << 16)
        operands = (transpose_8x8(tl.where(row < 4, x, 0)),)
    else:
        odd_high, odd_low = _split_hi_lo(sums[2] * (FACTOR_UNIT / ULP))
        high |= odd_high << 16
        low |= odd_low << 16
        even = tl.where(row == 0, high, tl.where(row == 2, low, 0))
        odd = tl.where(row == 1, high, tl.where(row == 3, low, 0))
        operands = (transpose_8x8(even), transpose_8x8(odd))
    return operands


@triton.jit
def _zero_point_terms(z, operands, C: tl.constexpr):
    """`z + 128` of a word times the sums of weights, in PV_UNIT FACTOR_UNIT: for two channel tiles, as `pv_mma`."""
    x = _scale_mma(z, operands[0])
    if C == 1:
        y = ((x[0], x[2]), (x[1], x[3]))
    else:
        u = _scale_mma(z, operands[1])
        y = ((x[0], x[2], x[1], x[3]), (u[0], u[2], u[1], u[3]))
    return y


@triton.jit
def _field_scale_operand(W: tl.constexpr, BITS: tl.constexpr, FIELD: tl.constexpr):
    """B operand of `_scale_mma` that divides `s_int` by the power of two of a field.

    Even columns are for FIELD, odd columns for the next field.
    """
    EVEN: tl.constexpr = (30 - BITS * FIELD) << 10  # 2^(15 - BITS FIELD) as fp16 bits
    ODD: tl.constexpr = (30 - BITS * (FIELD + 1)) << 26
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    return tl.where(lane % 4 == 0, tl.where(lane // 4 % 2 == 0, EVEN, ODD), 0)


@triton.jit
def _mask_field(words, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Mask one field in all bytes of the words; for the upper of two fields, return the words unchanged."""
    if BITS == 4 and FIELD == 1:
        masked = words
    else:
        MASK: tl.constexpr = ((1 << BITS) - 1 << BITS * FIELD) * 0x01010101
        SIGNED: tl.constexpr = MASK if MASK < 2**31 else MASK - 2**32
        masked = ()
        for i in tl.static_range(8):
            masked = masked + (words[i] & SIGNED,)  # noqa: RUF005
    return masked


@triton.jit
def _dequantized_pv(
    words, s_int, z, operands, sum_operands, W: tl.constexpr, BITS: tl.constexpr, FIELD: tl.constexpr, C: tl.constexpr
):
    """Product of a block with `s_int` and `z` applied, for the channel tiles of FIELD and the next field.

    Returns:
        In PV_UNIT FACTOR_UNIT P_SCALE; (c, tile, rh) at index 4 c + 2 tile + rh.
    """
    low = pv_mma(_mask_field(words, BITS, FIELD), operands, C)
    high = pv_mma(_mask_field(words, BITS, FIELD + 1), operands, C)
    row_scales = _scale_mma(s_int, _field_scale_operand(W, BITS, FIELD))
    zero_terms = _zero_point_terms(z, sum_operands, C)
    x = ()
    for c in tl.static_range(C):
        for rh in tl.static_range(2):
            x = x + (low[2 * c + rh] * row_scales[2 * rh] + zero_terms[0][2 * c + rh],)  # noqa: RUF005
        for rh in tl.static_range(2):
            product = high[2 * c + rh]
            if BITS == 4:
                product -= low[2 * c + rh]
            x = x + (product * row_scales[2 * rh + 1] + zero_terms[1][2 * c + rh],)  # noqa: RUF005
    return x


@triton.jit
def accumulate_channels(
    state,  # of `to_lane_state`, `empty_softmax` or this function
    p,  # weights relative to the largest of the block: (c, n), token 8 n + g
    alphas,  # for each c: factor of the values so far
    betas,  # for each c: factor of this block
    v_scale,  # [W]
    words,  # of `read_v`
    s_int,  # of `read_v`
    z,  # of `read_v`
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add a block's weights and weighted values to the state of an online softmax."""
    FIELDS: tl.constexpr = 8 // BITS
    C: tl.constexpr = HEADS // 4
    N: tl.constexpr = D // 8
    integers = ()
    for n in tl.static_range(8 * C):
        integers = integers + ((p[n] * P_SCALE + ROUND).to(tl.int32, bitcast=True),)  # noqa: RUF005
    operands = p_operands(integers, C)
    ones = tl.full([W, 32], 0x01010101, tl.int32)
    weight_sums = pv_mma((ones, ones, ones, ones, ones, ones, ones, ones), operands, C)
    sum_operands = _weight_sum_operands(weight_sums, C)
    pv = ()
    for pair in tl.static_range(D // 32):
        pv_pair = _dequantized_pv(
            words[2 * (2 * pair // FIELDS)] + words[2 * (2 * pair // FIELDS) + 1], s_int[pair], z[pair], operands,
            sum_operands, W, BITS, 2 * pair % FIELDS, C,
        )  # fmt: skip
        pv = pv + (pv_pair,)  # noqa: RUF005
    new_state = ()
    for c in tl.static_range(C):
        factor = betas[c] * (v_scale[:, None] * (1.0 / (P_SCALE * PV_UNIT * FACTOR_UNIT)))
        old = state[c * (N + 2)] * alphas[c]
        new_state = new_state + (old + weight_sums[2 * c] * (betas[c] * (1.0 / (P_SCALE * PV_UNIT))),)  # noqa: RUF005
        old = state[c * (N + 2) + 1] * alphas[c]
        new_state = new_state + (old + weight_sums[2 * c] * (factor * (128.0 * FACTOR_UNIT)),)  # noqa: RUF005
        for n in tl.static_range(N):
            old = state[c * (N + 2) + 2 + n] * alphas[c]
            new_state = new_state + (old + pv[n // 4][4 * c + n % 4] * factor,)  # noqa: RUF005
    return new_state
