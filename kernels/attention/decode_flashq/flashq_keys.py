"""Device code of FlashQ: the product of decode attention with K, S^T = K q^T, in INT8 (see block_attention.py).

    s_j = sum_c code_jc s_int_c q_c + sum_c z_c q_c      (code sum + z sum)

The z sum is the same for all tokens of a block. So it is added to the largest score of the block only.

- q s_int has 16 bits, n = 256 h + l; so has q of the z sum. Both bytes are signed and are separate columns: with up to
  4 heads the two columns of a head, with 8 heads the columns of two MMAs. The unit of n follows from the largest |q| of
  the head and the largest s_int that a quantiser gives, so nothing overflows, whatever the codes and z are.
- The stored words of K are A operands as they are (layout.py). One mask selects a field of all four bytes. The upper of
  two fields needs no mask: whole bytes are multiplied by its n, and the n of the lower field is reduced accordingly.
- A field is multiplied by 2^shift, from its position in the byte. The upper and the lower half of the bytes have
  separate sums; those of the upper half are in a 16th of the unit. With 2 bits, n of fields 1 and 3 is in a unit four
  times as large.
- Sums are positive integers, because their accumulators start high enough, and below 2^24. Read as floats they are
  n 2^-149; multiplications take them as they are.

All values are in *lanes*, as in values.py. Lane `4 g + t` has q and s_int of the channels 16 tile + 8 kh + g, for its
heads. A transposition makes B operands of the products q s_int.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.expand_codes import expand_group
from alspec.kernels.attention.decode_quantised.lanes import byte_perm, hi_lo_operands, mma_m16n8k32, reduce_rows
from alspec.kernels.attention.decode_quantised.query import (
    MAGIC,
    MAGIC_BITS,
    ULP,
    await_query,
    load_query_head,
    relative_to_max,
)
from alspec.kernels.common.device import INTERPRETED

__all__ = ["channel_scores", "prepare_flashq_query", "scale_flashq_query"]

MAX_Z_SUM_N = tl.constexpr(32500.0)  # n of the largest |q| in the z sum
# Initial accumulator of each half of the z sum (more than 128 255 64) and of the upper half of the code sum.
START_UPPER = tl.constexpr(2**21)
START = tl.constexpr(2**17)  # initial accumulator of the lower half's sums; more than 128 15 64
UNIT = tl.constexpr(2.0**-30)  # score of code 1 and n 1
# $1, $2: sums of the upper half, high and low.  $3, $4: sums of the lower half.  Multiplied by 2^123, 2^115, 2^127 and
# 2^119. The initial accumulators are subtracted first, because they are larger than the remaining sums.
SCORE = tl.constexpr(
    "{ .reg .f32 u; fma.rn.f32 u, $3, 0f7F000000, 0fBITS; fma.rn.f32 u, $1, 0f7D000000, u;"
    " fma.rn.f32 u, $4, 0f7B000000, u; fma.rn.f32 $0, $2, 0f79000000, u; }".replace(
        "BITS", struct.pack(">f", -257 * (START.value + START_UPPER.value / 16) * UNIT.value).hex().upper()
    )
)
# As SCORE, without an upper half. $1: high.  $2: low.
PLANE_SCORE = tl.constexpr(
    "{ .reg .f32 u; fma.rn.f32 u, $1, 0f7F000000, 0fBITS; fma.rn.f32 $0, $2, 0f7B000000, u; }".replace(
        "BITS", struct.pack(">f", -257 * START.value * UNIT.value).hex().upper()
    )
)


@triton.jit
def prepare_flashq_query(
    source, buffers, parity, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, BULK_Q: tl.constexpr,
):  # fmt: skip
    """Load the query heads of an output in lanes, relative to the largest |q| of each head.

    BULK_Q: whether q comes through shared memory, by `copy_query`.

    Returns, each except `operands` for each c:
        q_max: largest |q|; NaN if a q is NaN.
        values: D / 8 values q / q_max, of channels 8 n + g.
        operands: B operands of the z sum: of `hi_lo_operands`, channel tile by channel tile.
        z_excess: excess of the z sum, because bytes are z + 128 and because of its initial accumulator.
    """
    C: tl.constexpr = HEADS // 4
    TILES: tl.constexpr = D // 16
    q_address = 0
    if BULK_Q:
        q_address = await_query(buffers, parity, W, D)
    q_max, values, even, odd, z_excess = (), (), (), (), ()
    for c in tl.static_range(C):
        x, pairs = load_query_head(source, q_address, c, HEADS_PER_KV, HEADS, TOGETHER, W, D, BULK_Q)
        head_max, factor = relative_to_max(x, D)
        q_max = q_max + (head_max,)  # noqa: RUF005
        scaled = ()
        for n in tl.static_range(D // 8):
            scaled = scaled + (x[n] * factor,)  # noqa: RUF005
        values = values + (scaled,)  # noqa: RUF005
        a, b, total = (), (), tl.zeros([W, 32], tl.int32)
        for tile in tl.static_range(TILES):
            low = pairs[tile][0] * (factor * (MAX_Z_SUM_N * ULP)) + MAGIC
            high = pairs[tile][1] * (factor * (MAX_Z_SUM_N * ULP)) + MAGIC
            a, b = a + (low.to(tl.int32, bitcast=True),), b + (high.to(tl.int32, bitcast=True),)  # noqa: RUF005
            total += (a[tile] - MAGIC_BITS) + (b[tile] - MAGIC_BITS)
        even, odd = even + (a,), odd + (b,)  # noqa: RUF005
        z_excess = z_excess + (reduce_rows(total.to(tl.float32), "add") * 128.0 + 2 * 257.0 * START_UPPER,)  # noqa: RUF005
    operands = ()
    for tile in tl.static_range(TILES):
        a, b = (), ()
        for c in tl.static_range(C):
            a, b = a + (even[c][tile],), b + (odd[c][tile],)  # noqa: RUF005
        operands = operands + hi_lo_operands(a, b, C)
    return q_max, values, operands, z_excess


@triton.constexpr_function
def _max_n(bits):
    """n of the largest |q| times the largest s_int; plus 128, and with 4 bits plus a 16th, still below 2^15."""
    return 30700.0 if bits == 4 else 32500.0


@triton.constexpr_function
def _max_s_int(bits):
    """Largest s_int of a quantiser: ceil(238 / (2^bits - 1))."""
    return {4: 16.0, 3: 34.0, 2: 80.0}[bits]


@triton.jit
def scale_flashq_query(query, qk_scale, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Scale q for records of BITS bits; query: of `prepare_flashq_query`.

    Returns, for each c:
        scales: factor of the scores.
        scaled: D / 8 values q; times s_int 2^-149 they are n ULP.
        excess: excess of the z sum.
    """
    q_max, values, _, z_excess = query
    FACTOR: tl.constexpr = _max_n(BITS) / _max_s_int(BITS)
    RATIO: tl.constexpr = FACTOR / MAX_Z_SUM_N * UNIT
    scales, scaled, excess = (), (), ()
    for c in tl.static_range(C):
        scales = scales + (q_max[c] * qk_scale * (1.0 / FACTOR / UNIT),)  # noqa: RUF005
        x = ()
        for n in tl.static_range(D // 8):
            y = values[c][n] * (FACTOR * ULP * 2.0**149)
            if BITS == 2 and n // 2 % 2 == 1:
                y *= 0.25
            x = x + (y,)  # noqa: RUF005
        scaled = scaled + (x,)  # noqa: RUF005
        excess = excess + (z_excess[c] * RATIO,)  # noqa: RUF005
    return scales, scaled, excess


@triton.jit
def _extract_byte(x, index):
    """Extract byte `index` [W, 32] of words, as a float n 2^-149."""
    if INTERPRETED:
        x = (x >> 8 * index) & 255
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 u; add.u32 u, $2, 0x4440; prmt.b32 $0, $1, 0, u; }",
            "=r,r,r", [x, index], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _quantize_q(q, s_int, BITS: tl.constexpr):
    """Return n + 128 of q s_int in the lowest 16 bits of words, for a channel of each field, lowest field first.

    q, s_int: of these channels, from `scale_flashq_query` and `_extract_byte`. With 4 bits the upper n is multiplied by
    whole bytes, in a 16th of the unit: so a 16th of it is subtracted from the lower n.
    """
    if BITS == 4:
        upper = q[1] * s_int[1] + MAGIC
        n = (q[0] * s_int[0] + (upper * (-1.0 / 16) + MAGIC * (17.0 / 16)), upper)
    else:
        n = ()
        for field in tl.static_range(4):
            n = n + (q[field] * s_int[field] + MAGIC,)  # noqa: RUF005
    integers = ()
    for field in tl.static_range(8 // BITS):
        integers = integers + (n[field].to(tl.int32, bitcast=True),)  # noqa: RUF005
    return integers


@triton.jit
def _quantize_q_byte(
    q, s_int, index, TILE: tl.constexpr, STRIDE: tl.constexpr, KH: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr
):
    """For each c: `_quantize_q` of channels 8 KH + g of the channel tiles in byte `index`: TILE, TILE + STRIDE, ..."""
    byte_s_int, integers = (), ()
    for field in tl.static_range(8 // BITS):
        byte_s_int = byte_s_int + (_extract_byte(s_int[TILE + STRIDE * field], index),)  # noqa: RUF005
    for c in tl.static_range(C):
        field_q = ()
        for field in tl.static_range(8 // BITS):
            field_q = field_q + (q[c][2 * (TILE + STRIDE * field) + KH],)  # noqa: RUF005
        integers = integers + (_quantize_q(field_q, byte_s_int, BITS),)  # noqa: RUF005
    return integers


@triton.jit
def _code_operands(q, s_int, BITS: tl.constexpr, CW: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """B operands of the codes, (cw, kh, field), each one or two words of `hi_lo_operands` (see layout.py).

    With D = 64 and 2 bits, both bytes of a half word are of one channel; the neighbouring bytes are kh: (field).
    """
    FIELDS: tl.constexpr = 8 // BITS
    index = tl.arange(0, 32)[None, :] // 4 % 2 + tl.zeros_like(s_int[0])
    operands = ()
    if FIELDS * CW == D // 16:
        first = _quantize_q_byte(q, s_int, index, 0, CW, 0, BITS, C)
        second = _quantize_q_byte(q, s_int, index + 2, 0, CW, 1, BITS, C)
        operands = _field_operands(first, second, FIELDS, C)
    else:
        for cw in tl.static_range(CW):
            for kh in tl.static_range(2):
                first = _quantize_q_byte(q, s_int, index + 2 * kh, cw, CW, kh, BITS, C)
                second = _quantize_q_byte(q, s_int, index + 2 * kh, FIELDS * CW + cw, CW, kh, BITS, C)
                operands = operands + _field_operands(first, second, FIELDS, C)
    return operands


@triton.jit
def _field_operands(first, second, FIELDS: tl.constexpr, C: tl.constexpr):
    """`hi_lo_operands` of n (c, field) of the first and the second byte: (field)."""
    operands = ()
    for field in tl.static_range(FIELDS):
        a, b = (), ()
        for c in tl.static_range(C):
            a, b = a + (first[c][field],), b + (second[c][field],)  # noqa: RUF005
        operands = operands + (hi_lo_operands(a, b, C),)  # noqa: RUF005
    return operands


@triton.jit
def _split_token_tiles(words):
    """Split words (kh, rh) of two token tiles into words (rh) of each tile, with kh in neighbouring bytes."""
    lower = (byte_perm(words[0], words[2], 0x6240), byte_perm(words[1], words[3], 0x6240))
    upper = (byte_perm(words[0], words[2], 0x7351), byte_perm(words[1], words[3], 0x7351))
    return lower, upper


@triton.jit
def _mask_field(words, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Mask one field in all bytes of the words; for the upper field of 4 bits, return the words unchanged."""
    MASK: tl.constexpr = ((1 << BITS) - 1 << BITS * FIELD) * 0x01010101
    SIGNED: tl.constexpr = MASK if MASK < 2**31 else MASK - 2**32
    masked = words
    if BITS == 2 or FIELD == 0:
        masked = ()
        for n in tl.static_range(len(words)):
            masked = masked + (words[n] & SIGNED,)  # noqa: RUF005
    return masked


@triton.jit
def _half_mma(words, operands, BITS: tl.constexpr, UPPER: tl.constexpr, START: tl.constexpr, C: tl.constexpr):
    """Multiply the fields in the upper or the lower half of a token tile's bytes by q, for each word of the operands.

    words: for each cw those of a lane, (kh, rh) or (rh).  operands: of `_code_operands`.
    """
    FIELDS: tl.constexpr = 8 // BITS
    HALF: tl.constexpr = FIELDS // 2
    KH: tl.constexpr = len(words[0]) // 2
    left, products = (), ()
    for cw in tl.static_range(len(words)):
        for field in tl.static_range(HALF):
            left = left + _mask_field(words[cw], BITS, HALF * UPPER + field)
    for c in tl.static_range(C):
        right = ()
        for cw in tl.static_range(len(words)):
            for field in tl.static_range(HALF):
                for kh in tl.static_range(KH):
                    right = right + (operands[(KH * cw + kh) * FIELDS + HALF * UPPER + field][c],)  # noqa: RUF005
        products = products + (mma_m16n8k32(left, right, len(left) // 4, True, START),)  # noqa: RUF005
    return products


@triton.jit
def _score(upper_high, upper_low, high, low):
    """UNIT (256 high + low + (256 upper_high + upper_low) / 16), with the initial accumulators subtracted."""
    if INTERPRETED:
        x = (high - START) * 256 + low - START
        upper = (upper_high - START_UPPER) * 256 + upper_low - START_UPPER
        x = x.to(tl.float32) * UNIT + upper.to(tl.float32) * (UNIT / 16)
    else:
        x = tl.inline_asm_elementwise(
            SCORE, "=f,r,r,r,r", [upper_high, upper_low, high, low], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def _tile_scores(words, operands, BITS: tl.constexpr, C: tl.constexpr):
    """`_score` of rows g and g + 8 of a token tile: (c, rh) at index 2 c + rh."""
    upper = _half_mma(words, operands, BITS, 1, START_UPPER, C)
    lower = _half_mma(words, operands, BITS, 0, START, C)
    if C == 1:
        u, x = upper[0], lower[0]
        y = (_score(u[0], u[1], x[0], x[1]), _score(u[2], u[3], x[2], x[3]))
    else:
        u, v, x, z = upper[0], upper[1], lower[0], lower[1]
        y = (
            _score(u[0], v[0], x[0], z[0]), _score(u[2], v[2], x[2], z[2]),
            _score(u[1], v[1], x[1], z[1]), _score(u[3], v[3], x[3], z[3]),
        )  # fmt: skip
    return y


@triton.jit
def _z_mma(z, operands, c: tl.constexpr, ODD: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """z sum over the odd channel tiles in rows g + 8, or over the even ones in rows g; the other rows are undefined."""
    right = ()
    for m in tl.static_range(D // 32):
        right = right + (operands[C * (2 * m + ODD) + c],)  # noqa: RUF005
    return mma_m16n8k32(z, right, D // 64, True, START_UPPER)


@triton.jit
def _z_sums(z, operands, excess, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """z sum for each c; z: words `z + 128` of each channel tile, which are A operands with channel tiles as rows."""
    RATIO: tl.constexpr = _max_n(BITS) / _max_s_int(BITS) / MAX_Z_SUM_N * UNIT
    even, odd = _z_mma(z, operands, 0, 0, D, C), _z_mma(z, operands, 0, 1, D, C)
    if C == 1:
        parts = ((even[0], even[1], odd[2], odd[3]),)
    else:
        even_low, odd_low = _z_mma(z, operands, 1, 0, D, C), _z_mma(z, operands, 1, 1, D, C)
        parts = ((even[0], even_low[0], odd[2], odd_low[2]), (even[1], even_low[1], odd[3], odd_low[3]))
    sums = ()
    for c in tl.static_range(C):
        sums = sums + (_z_sum(parts[c], RATIO) - excess[c],)  # noqa: RUF005
    return sums


@triton.jit
def _z_sum(parts, RATIO: tl.constexpr):
    """RATIO (256 high + low) from the sums of even and of odd channel tiles, integers below 2^24."""
    even_high, even_low, odd_high, odd_low = parts
    if INTERPRETED:
        x = ((even_high + odd_high) * 256 + even_low + odd_low).to(tl.float32) * RATIO
    else:
        # The integers, read as floats, are n 2^-149.
        LOW: tl.constexpr = RATIO * 2.0**30 * 2.0**119
        x = even_high.to(tl.float32, bitcast=True) * (256 * LOW) + odd_high.to(tl.float32, bitcast=True) * (256 * LOW)
        x += even_low.to(tl.float32, bitcast=True) * LOW + odd_low.to(tl.float32, bitcast=True) * LOW
    return x


@triton.jit
def _field_scores(words, scaled, s_int, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """`_tile_scores` of the four token tiles of a block, for codes of 4 or 2 bits."""
    CW: tl.constexpr = D * BITS // 256 if D * BITS > 256 else 1
    right = _code_operands(scaled, s_int, BITS, CW, D, C)
    tiles = ()
    for row in tl.static_range(len(words) // CW):
        if len(words) < 4 * CW:
            for tile in tl.static_range(2):
                tiles = tiles + (_tile_scores((_split_token_tiles(words[row])[tile],), right, BITS, C),)  # noqa: RUF005
        else:
            left = ()
            for cw in tl.static_range(CW):
                left = left + (words[row * CW + cw],)  # noqa: RUF005
            tiles = tiles + (_tile_scores(left, right, BITS, C),)  # noqa: RUF005
    return tiles


@triton.jit
def _plane_operands(q, s_int, D: tl.constexpr, C: tl.constexpr):
    """B operands of codes in planes, one or two words of `hi_lo_operands` for each channel tile.

    Rows 2 g + i are channels 8 i + g of the tile.
    """
    index = tl.arange(0, 32)[None, :] // 4 % 2 + tl.zeros_like(s_int[0])
    operands = ()
    for tile in tl.static_range(D // 16):
        low, high = _extract_byte(s_int[tile], index), _extract_byte(s_int[tile], index + 2)
        a, b = (), ()
        for c in tl.static_range(C):
            a = a + ((q[c][2 * tile] * low + MAGIC).to(tl.int32, bitcast=True),)  # noqa: RUF005
            b = b + ((q[c][2 * tile + 1] * high + MAGIC).to(tl.int32, bitcast=True),)  # noqa: RUF005
        operands = operands + hi_lo_operands(a, b, C)
    return operands


@triton.jit
def _plane_scores(words, operands, D: tl.constexpr, C: tl.constexpr):
    """Scores of the four token tiles of a block, as `_tile_scores`, for codes of 3 bits, in planes."""
    tiles = ()
    for token_tile in tl.static_range(4):
        left, products = (), ()
        for part in tl.static_range(D // 64):
            left = left + expand_group(words, token_tile * (D // 64) + part, D // 16, 3, (0, 1, 2, 3, 4, 5, 6, 7))
        for c in tl.static_range(C):
            right = ()
            for tile in tl.static_range(D // 16):
                right = right + (operands[C * tile + c],)  # noqa: RUF005
            products = products + (mma_m16n8k32(left, right, D // 32, True, START),)  # noqa: RUF005
        x = products[0]
        if C == 1:
            y = (_plane_score(x[0], x[1]), _plane_score(x[2], x[3]))
        else:
            z = products[1]
            y = (
                _plane_score(x[0], z[0]), _plane_score(x[2], z[2]),
                _plane_score(x[1], z[1]), _plane_score(x[3], z[3]),
            )  # fmt: skip
        tiles = tiles + (y,)  # noqa: RUF005
    return tiles


@triton.jit
def _plane_score(high, low):
    """UNIT (256 high + low), with the initial accumulators subtracted."""
    if INTERPRETED:
        x = ((high - START) * 256 + low - START).to(tl.float32) * UNIT
    else:
        x = tl.inline_asm_elementwise(PLANE_SCORE, "=f,r,r", [high, low], dtype=tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def channel_scores(query, query_scale, words, s_int, z, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Compute the scores of a block, without the factor `scales` of `scale_flashq_query` and the scale of K.

    Args:
        query, query_scale: of `prepare_flashq_query` and `scale_flashq_query`.
        words, s_int, z: of `read_side`.
    Returns, for each c:
        head_scores: code sums of the tokens 8 n + g, for each n.
        z_sum: z sum of the block.
    """
    _, scaled, excess = query_scale
    z_sum = _z_sums(z, query[2], excess, BITS, D, C)
    if BITS == 3:
        tiles = _plane_scores(words, _plane_operands(scaled, s_int, D, C), D, C)
    else:
        tiles = _field_scores(words, scaled, s_int, D, BITS, C)
    head_scores = ()
    for c in tl.static_range(C):
        x = ()
        for n in tl.static_range(8):
            x = x + (tiles[n // 2][2 * c + n % 2],)  # noqa: RUF005
        head_scores = head_scores + (x,)  # noqa: RUF005
    return head_scores, z_sum
