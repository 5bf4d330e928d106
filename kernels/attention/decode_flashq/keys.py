"""The product with K of decode over quantised blocks, S^T = K q^T, in INT8 (see block_attention.py and values.py).

    s_j = sum_c code_jc s_int_c q_c + sum_c z_c q_c

The second sum is the same for all tokens of a block: only their largest score needs it.

- q s_int is in 16 bits, n = 256 h + l, and so is q of the second sum. Both bytes have a sign and are columns of their
  own: with up to four heads the two of each head, otherwise those of two products. The unit of n follows from the
  largest |q| of a head and the largest s_int of a quantiser, so nothing overflows, whatever codes and z are.
- K's words are the left operand as they are stored (layout.py). One mask keeps a field of all four bytes. The
  upper of two fields needs none: whole bytes are multiplied by its n, and the lower field by so much less.
- A field counts 2^shift times, by its place in its byte. The upper and the lower half of bytes have sums of their own,
  those of the upper half in a 16th of the unit. Of 2 bits, n of the uneven fields is so in a unit four times as large.
- Sums are positive integers, because they start high enough. They are below 2^24: read as floats, n 2^-149, which
  multiplications take as they are.

In *lanes*, as in values.py. Lane `4 g + t` has q and s_int of the channels 16 tile + 8 kh + g, for its heads; a
transposition makes operands of their products.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from alspec.kernels.attention.decode_flashq.query import LARGEST_Z, MAGIC, START_UPPER, ULP, operands_of
from alspec.kernels.attention.decode_flashq.values import mma_m16n8k32, picked
from alspec.kernels.common.device import INTERPRETED

__all__ = ["query_units", "scores"]

START = tl.constexpr(2**17)  # of sums of the lower half, more than 128 15 64
UNIT = tl.constexpr(2.0**-30)  # of scores: what a code 1 and n 1 are
# $1, $2: the upper half's sums, high and low.  $3, $4: the lower half's.  By 2^127, 2^123, 2^119 and 2^115; what they
# started at goes first, because it is larger than what is left.
SCORE = tl.constexpr(
    "{ .reg .f32 u; fma.rn.f32 u, $3, 0f7F000000, 0fBITS; fma.rn.f32 u, $1, 0f7D000000, u;"
    " fma.rn.f32 u, $4, 0f7B000000, u; fma.rn.f32 $0, $2, 0f79000000, u; }".replace(
        "BITS", struct.pack(">f", -257 * (START.value + START_UPPER.value / 16) * UNIT.value).hex().upper()
    )
)


@triton.constexpr_function
def _largest_n(bits):
    """n of the largest |q| times the largest s_int: with 128 and, of 4 bits, a 16th more, below 2^15."""
    return 30700.0 if bits == 4 else 32500.0


@triton.constexpr_function
def _largest_step(bits):
    """The largest s_int of a quantiser: ceil(238 / (2^bits - 1))."""
    return 16.0 if bits == 4 else 80.0


@triton.jit
def query_units(query, qk_scale, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """`query_of_keys` for records of BITS bits.

    Returns, for each c:
        What scores are multiplied by.
        D / 8 values q: times s_int 2^-149 they are n ULP.
        What a second sum has too much.
    """
    tops, values, _, offsets = query
    FACTOR: tl.constexpr = _largest_n(BITS) / _largest_step(BITS)
    RATIO: tl.constexpr = FACTOR / LARGEST_Z * UNIT
    scales, scaled, excess = (), (), ()
    for c in tl.static_range(C):
        scales = scales + (tops[c] * qk_scale * (1.0 / FACTOR / UNIT),)  # noqa: RUF005
        x = ()
        for n in tl.static_range(D // 8):
            y = values[c][n] * (FACTOR * ULP * 2.0**149)
            if BITS == 2 and n // 2 % 2 == 1:
                y *= 0.25
            x = x + (y,)  # noqa: RUF005
        scaled = scaled + (x,)  # noqa: RUF005
        excess = excess + (offsets[c] * RATIO,)  # noqa: RUF005
    return scales, scaled, excess


@triton.jit
def _byte(x, number):
    """Byte `number` [W, 32] of words as a float, n 2^-149."""
    if INTERPRETED:
        x = (x >> 8 * number) & 255
    else:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 u; add.u32 u, $2, 0x4440; prmt.b32 $0, $1, 0, u; }",
            "=r,r,r", [x, number], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _integers(q, s_int, BITS: tl.constexpr):
    """n of a channel of each field, the lowest first, in the lowest 16 bits of words; q and s_int: of these channels.

    Of 4 bits the upper n is multiplied by whole bytes, and its unit is a 16th: so the lower is less by a 16th of it.
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
def _integers_of_byte(
    q, s_int, which, TILE: tl.constexpr, STRIDE: tl.constexpr, KH: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr
):
    """For each c: `_integers` of the channels 8 KH + g of the tiles that share a byte, TILE and each STRIDE further."""
    steps, integers = (), ()
    for field in tl.static_range(8 // BITS):
        steps = steps + (_byte(s_int[TILE + STRIDE * field], which),)  # noqa: RUF005
    for c in tl.static_range(C):
        factors = ()
        for field in tl.static_range(8 // BITS):
            factors = factors + (q[c][2 * (TILE + STRIDE * field) + KH],)  # noqa: RUF005
        integers = integers + (_integers(factors, steps, BITS),)  # noqa: RUF005
    return integers


@triton.jit
def _operands_of_codes(q, s_int, BITS: tl.constexpr, CW: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Right operands of codes (cw, kh, field), for each one word or two, as `operands_of`: see layout.py.

    Where the two bytes of a half word are of the same channel (D = 64, 2 bits), kh is its neighbour: (field).
    """
    FIELDS: tl.constexpr = 8 // BITS
    which = tl.arange(0, 32)[None, :] // 4 % 2 + tl.zeros_like(s_int[0])
    operands = ()
    if FIELDS * CW == D // 16:
        first = _integers_of_byte(q, s_int, which, 0, CW, 0, BITS, C)
        second = _integers_of_byte(q, s_int, which + 2, 0, CW, 1, BITS, C)
        operands = _operands_of_fields(first, second, FIELDS, C)
    else:
        for cw in tl.static_range(CW):
            for kh in tl.static_range(2):
                first = _integers_of_byte(q, s_int, which + 2 * kh, cw, CW, kh, BITS, C)
                second = _integers_of_byte(q, s_int, which + 2 * kh, FIELDS * CW + cw, CW, kh, BITS, C)
                operands = operands + _operands_of_fields(first, second, FIELDS, C)
    return operands


@triton.jit
def _operands_of_fields(first, second, FIELDS: tl.constexpr, C: tl.constexpr):
    """`operands_of` of n (c, field) in the first and in the second byte: (field)."""
    operands = ()
    for field in tl.static_range(FIELDS):
        a, b = (), ()
        for c in tl.static_range(C):
            a, b = a + (first[c][field],), b + (second[c][field],)  # noqa: RUF005
        operands = operands + (operands_of(a, b, C),)  # noqa: RUF005
    return operands


@triton.jit
def _of_token_tiles(words):
    """Words of two token tiles, (kh, rh), as of each: (rh), kh in neighbouring bytes."""
    lower = (picked(words[0], words[2], 0x6240), picked(words[1], words[3], 0x6240))
    upper = (picked(words[0], words[2], 0x7351), picked(words[1], words[3], 0x7351))
    return lower, upper


@triton.jit
def _masked(words, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Words of codes with a field only of each byte; for the upper one of 4 bits, the words as they are."""
    MASK: tl.constexpr = ((1 << BITS) - 1 << BITS * FIELD) * 0x01010101
    SIGNED: tl.constexpr = MASK if MASK < 2**31 else MASK - 2**32
    masked = words
    if BITS == 2 or FIELD == 0:
        masked = ()
        for n in tl.static_range(len(words)):
            masked = masked + (words[n] & SIGNED,)  # noqa: RUF005
    return masked


@triton.jit
def _half(words, operands, BITS: tl.constexpr, UPPER: tl.constexpr, START: tl.constexpr, C: tl.constexpr):
    """The product of a token tile with the fields of the upper or the lower half of bytes, for each word of operands.

    words: for each cw those of a lane, (kh, rh) or (rh); operands: of `_operands_of_codes`.
    """
    FIELDS: tl.constexpr = 8 // BITS
    HALF: tl.constexpr = FIELDS // 2
    KH: tl.constexpr = len(words[0]) // 2
    left, products = (), ()
    for cw in tl.static_range(len(words)):
        for field in tl.static_range(HALF):
            left = left + _masked(words[cw], BITS, HALF * UPPER + field)
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
    """UNIT (256 high + low + (256 upper_high + upper_low) / 16) of sums, without what they started at."""
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
def _scores_of_tile(words, operands, BITS: tl.constexpr, C: tl.constexpr):
    """`_score` of the rows g and g + 8 of a token tile: (c, rh)."""
    upper = _half(words, operands, BITS, 1, START_UPPER, C)
    lower = _half(words, operands, BITS, 0, START, C)
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
def _product_with_z(z, operands, c: tl.constexpr, ODD: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Of the uneven tiles, or of the even ones: in its rows g + 8, or g. The other half of it means nothing."""
    right = ()
    for m in tl.static_range(D // 32):
        right = right + (operands[C * (2 * m + ODD) + c],)  # noqa: RUF005
    return mma_m16n8k32(z, right, D // 64, True, START_UPPER)


@triton.jit
def _second_sums(z, operands, excess, BITS: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """The second sum for each c; z: words `z + 128` of each tile, the left operand as they come: tiles are its rows."""
    RATIO: tl.constexpr = _largest_n(BITS) / _largest_step(BITS) / LARGEST_Z * UNIT
    even, odd = _product_with_z(z, operands, 0, 0, D, C), _product_with_z(z, operands, 0, 1, D, C)
    if C == 1:
        parts = ((even[0], even[1], odd[2], odd[3]),)
    else:
        even_low, odd_low = _product_with_z(z, operands, 1, 0, D, C), _product_with_z(z, operands, 1, 1, D, C)
        parts = ((even[0], even_low[0], odd[2], odd_low[2]), (even[1], even_low[1], odd[3], odd_low[3]))
    sums = ()
    for c in tl.static_range(C):
        sums = sums + (_second_sum(parts[c], RATIO) - excess[c],)  # noqa: RUF005
    return sums


@triton.jit
def _second_sum(parts, RATIO: tl.constexpr):
    """RATIO (256 high + low) of the sums of even tiles and of odd ones, below 2^24."""
    even_high, even_low, odd_high, odd_low = parts
    if INTERPRETED:
        x = ((even_high + odd_high) * 256 + even_low + odd_low).to(tl.float32) * RATIO
    else:
        # As floats they are n 2^-149.
        LOW: tl.constexpr = RATIO * 2.0**30 * 2.0**119
        x = even_high.to(tl.float32, bitcast=True) * (256 * LOW) + odd_high.to(tl.float32, bitcast=True) * (256 * LOW)
        x += even_low.to(tl.float32, bitcast=True) * LOW + odd_low.to(tl.float32, bitcast=True) * LOW
    return x


@triton.jit
def scores(query, of_bits, words, s_int, z, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Scores of a block before they are multiplied.

    Args:
        query, of_bits: of `query_of_keys` and `query_units`.
        words, s_int, z: of `read_k`.
    Returns, for each c:
        The first sums of the tokens 8 n + g, for each n; and the second sum.
    """
    _, scaled, excess = of_bits
    CW: tl.constexpr = D * BITS // 256 if D * BITS > 256 else 1
    right = _operands_of_codes(scaled, s_int, BITS, CW, D, C)
    second = _second_sums(z, query[2], excess, BITS, D, C)
    tiles = ()
    for row in tl.static_range(len(words) // CW):
        if len(words) < 4 * CW:
            for tile in tl.static_range(2):
                tiles = tiles + (_scores_of_tile((_of_token_tiles(words[row])[tile],), right, BITS, C),)  # noqa: RUF005
        else:
            left = ()
            for cw in tl.static_range(CW):
                left = left + (words[row * CW + cw],)  # noqa: RUF005
            tiles = tiles + (_scores_of_tile(left, right, BITS, C),)  # noqa: RUF005
    of_heads = ()
    for c in tl.static_range(C):
        x = ()
        for n in tl.static_range(8):
            x = x + (tiles[n // 2][2 * c + n % 2],)  # noqa: RUF005
        of_heads = of_heads + (x,)  # noqa: RUF005
    return of_heads, second
