"""The product with V of decode over quantised blocks, O^T = V^T P^T, in INT8 (see block_attention.py).

The instruction multiplies A [16 channels, 32 tokens] by B [32 tokens, 8 columns], here bytes without sign, exactly.

- P is in 16 bits, `rint(SCALE p)` with p relative to the largest of this block and head. Its high and low bytes are
  columns of their own: with up to four heads the two of each head, otherwise those of two products.
- V's words are the left operand as they are stored (layout.py). One mask keeps a field of all four bytes. The
  upper of two fields needs none: what the lower adds is the lower's own product, and is subtracted from the sums.
- Sums are integers below 2^23, which read as floats are denormals, n 2^-149: multiplications take them as they are.
- Factors of channels, `s_int` and `z + 128`, are bytes. A small fp16 product spreads them over lanes as floats, and by
  the way brings in a field's power of two, or the sum of weights, in two parts of 11 bits.

Everything here is in *lanes*: tensors [W, 32] of a warp in each row and a lane `4 g + t` in each column, which has the
values of head t, or of heads 2 t and 2 t + 1; C of them. So the assembly decides what lies where, not the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, stacked, unstacked

__all__ = [
    "add_values",
    "first_values",
    "for_heads",
    "over_rows",
    "picked",
    "mma_m16n8k32",
    "transposed",
]

# Of P. Fits 16 bits with room for the rounding of scores as large as 2^20, which can make a p more than 1.
SCALE = tl.constexpr(61440.0)
ROUND = tl.constexpr(8388608.0)  # 2^23: added to a float, it leaves the nearest integer in the lowest bits
UNIT = tl.constexpr(2.0**-30)  # of `_sums`
ULP = tl.constexpr(2.0**-24)  # of a denormal half
STEP = tl.constexpr(2.0**-9)  # of `_spread`, for the lowest field


@triton.jit
def _to_lanes(x, W: tl.constexpr, HEADS: tl.constexpr):
    """x [W, 8 N, HEADS], of a product, in lanes: for each of C heads and N rows, (c, n) at c N + n."""
    N: tl.constexpr = x.shape[1] // 8
    C: tl.constexpr = HEADS // 4
    x = tl.permute(tl.reshape(x, [W, N, 8, 4, C]), (0, 2, 3, 4, 1))
    return unstacked(tl.reshape(x, [W, 32, C * N]), C * N)


@triton.jit
def _bytes(x):
    """[..., 4] of words."""
    return (tl.reshape(x, x.shape + [1]) >> (8 * tl.arange(0, 4))) & 255  # noqa: RUF005


@triton.jit
def picked(a, b, PICK: tl.constexpr):
    """Four bytes of a (numbers 0 to 3) and b (4 to 7), the lowest first, by the hexadecimal digits of PICK."""
    if INTERPRETED:
        both, number = tl.reshape(tl.join(_bytes(a), _bytes(b)), a.shape + [4, 2]), tl.arange(0, 4)  # noqa: RUF005
        x = tl.zeros_like(a)
        for i in tl.static_range(4):
            chosen = (number == (PICK >> 4 * i) % 4)[:, None] & (tl.arange(0, 2) == (PICK >> 4 * i) % 8 // 4)[None, :]
            x |= tl.sum(tl.sum(tl.where(chosen, both, 0), -1), -1) << (8 * i)
    else:
        x = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {PICK};", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def transposed(x):
    """The matrix [8, 8] of 16 bits of each warp, a row in the words of four lanes, transposed."""
    if INTERPRETED:
        W: tl.constexpr = x.shape[0]
        x = tl.reshape(tl.join(x & 0xFFFF, x >> 16), [W, 8, 8])
        low, high = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), [W, 32, 2]))
        x = (low & 0xFFFF) | (high << 16)
    else:
        x = tl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def _right_operands(p, C: tl.constexpr):
    """Words of the products' right operands, four for each, of P's 16 bits: p (c, n), of token 8 n + g.

    A word of a lane `4 g + t` is of column g and of tokens 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of 16.
    """
    if C == 1:
        operand = ()
        for i in tl.static_range(4):
            operand = operand + (transposed(picked(p[2 * i], p[2 * i + 1], 0x4051)),)  # noqa: RUF005
        operands = (operand,)
    else:
        high, low = (), ()
        for i in tl.static_range(4):
            even = picked(p[2 * i], p[2 * i + 1], 0x4051)
            odd = picked(p[2 * i + 8], p[2 * i + 9], 0x4051)
            high = high + (transposed(picked(even, odd, 0x5410)),)  # noqa: RUF005
            low = low + (transposed(picked(even, odd, 0x7632)),)  # noqa: RUF005
        operands = (high, low)
    return operands


@triton.jit
def _matrix(rows, ROWS: tl.constexpr):
    """Interpreter: a product [W, 16, 8] of what `rows` of a lane has of it: [W, 32, 4] -> a tuple."""
    x = tl.permute(tl.reshape(rows, [rows.shape[0], 2, 8, 4, 2]), (0, 2, 3, 1, 4))
    return unstacked(tl.reshape(x, [rows.shape[0], 32, ROWS]), ROWS)


@triton.constexpr_function
def _products(n, signed, start):
    """Assembly of n products one after another; operands: four results, 4 n words of A, 2 n of B."""
    types = "s32.u8.s8.s32" if signed else "s32.u8.u8.s32"
    sums, code = "{z, z, z, z}", f"{{ .reg .b32 z, u0, u1, u2, u3; mov.b32 z, {start};"
    for i in range(n):
        to = "{$0, $1, $2, $3}" if i == n - 1 else "{u0, u1, u2, u3}"
        a, b = 4 + 4 * i, 4 + 4 * n + 2 * i
        left, right = f"{{${a}, ${a + 1}, ${a + 2}, ${a + 3}}}", f"{{${b}, ${b + 1}}}"
        code += f" mma.sync.aligned.m16n8k32.row.col.{types} {to}, {left}, {right}, {sums};"
        sums = to
    return code + " }"


@triton.jit
def mma_m16n8k32(a, b, N: tl.constexpr, SIGNED: tl.constexpr, START: tl.constexpr):
    """[16, 32 N] times [32 N, 8] of bytes, B's with a sign or without: a 4 N words of a lane, b 2 N.

    Of it, and START more, columns 2 t and 2 t + 1 of rows g and g + 8.
    """
    if INTERPRETED:
        W: tl.constexpr = a[0].shape[0]
        left = tl.reshape(_bytes(stacked(a, 4 * N)), [W, 8, 4, N, 2, 2, 4])  # g t ks kh rh byte
        left = tl.reshape(tl.permute(left, (0, 5, 1, 3, 4, 2, 6)), [W, 16, 32 * N])
        right = tl.reshape(_bytes(stacked(b, 2 * N)), [W, 8, 4, 2 * N, 4])
        right = tl.reshape(tl.permute(right, (0, 3, 2, 4, 1)), [W, 32 * N, 8])
        if SIGNED:
            right = (right ^ 128) - 128
        x = _matrix(tl.dot(left.to(tl.float32), right.to(tl.float32)).to(tl.int32) + START, 4)
    else:
        x = tl.inline_asm_elementwise(
            _products(N, SIGNED, START), "=r,=r,=r,=r" + ",r" * (6 * N), a + b,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def over_rows(x, WHAT: tl.constexpr):
    """The largest ("max"; "max.NaN": none if one is) or the sum ("add") of x [W, 32] of all lanes with the same t."""
    if INTERPRETED:
        rows = tl.reshape(x, [x.shape[0], 8, 4])
        one = tl.sum(rows, 1) if WHAT == "add" else tl.max(rows, 1)
        x = tl.reshape(tl.broadcast_to(one[:, None, :], [x.shape[0], 8, 4]), [x.shape[0], 32])
    else:
        x = tl.inline_asm_elementwise(
            f"{{ .reg .f32 u, v; shfl.sync.bfly.b32 u, $1, 16, 31, -1; {WHAT}.f32 u, $1, u;"
            f" shfl.sync.bfly.b32 v, u, 8, 31, -1; {WHAT}.f32 u, u, v;"
            f" shfl.sync.bfly.b32 v, u, 4, 31, -1; {WHAT}.f32 $0, u, v; }}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _pv_mma(a, operands, C: tl.constexpr):
    """UNIT V^T P^T SCALE of 16 channels: for each head and row of a lane, (c, rh) at 2 c + rh."""
    if C == 1:
        x = mma_m16n8k32(a, operands[0], 2, False, 0)
        y = (_combine_hi_lo(x[0], x[1]), _combine_hi_lo(x[2], x[3]))
    else:
        x, z = mma_m16n8k32(a, operands[0], 2, False, 0), mma_m16n8k32(a, operands[1], 2, False, 0)
        y = (
            _combine_hi_lo(x[0], z[0]),
            _combine_hi_lo(x[2], z[2]),
            _combine_hi_lo(x[1], z[1]),
            _combine_hi_lo(x[3], z[3]),
        )
    return y


@triton.jit
def _combine_hi_lo(high, low):
    """UNIT (256 high + low), of integers below 2^23."""
    if INTERPRETED:
        x = (high * 256 + low).to(tl.float32) * UNIT
    else:
        # By 2^119 and 2^127: as floats they are denormals.
        x = tl.inline_asm_elementwise(
            "{ .reg .f32 u; mul.rn.f32 u, $2, 0f7B000000; fma.rn.f32 $0, $1, 0f7F000000, u; }",
            "=f,r,r", [high, low], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _scale_mma(x, b):
    """[16, 8] times [8, 8] in fp16: of a lane's word, bytes 0 and 2 are row g of A in each two columns, 1 and 3 g + 8.

    Bytes are denormals, n ULP; b: the right operand's word. What a lane has of it is as of `product`.
    """
    if INTERPRETED:
        W: tl.constexpr = x.shape[0]
        left = tl.reshape(_bytes(x), [W, 8, 4, 2, 2])  # g t i rh
        left = tl.reshape(tl.permute(left, (0, 4, 1, 2, 3)), [W, 16, 8]).to(tl.float32) * ULP
        right = tl.join((b & 0xFFFF).to(tl.int16), (b >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
        right = tl.reshape(tl.permute(tl.reshape(right, [W, 8, 4, 2]), (0, 2, 3, 1)), [W, 8, 8])
        y = _matrix(tl.dot(left, right.to(tl.float32)), 4)
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
    """x as the sum of two fp16: their bits, the larger one's first. 22 bits of x are kept."""
    high = x.to(tl.float16).to(tl.float32)
    return _fp16_bits(high), _fp16_bits(x - high)


@triton.jit
def _operand_of_weights(sums, C: tl.constexpr):
    """Right operands of `_spread` with the sums of weights of `_sums`: for each of two channel tiles, or for both."""
    row = tl.arange(0, 32)[None, :] // 4
    high, low = _split_hi_lo(sums[0] * (STEP / ULP))
    if C == 1:
        # Rows 0 and 2 for the even columns, 1 and 3 for the odd ones.
        x = tl.where(row < 2, high, low)
        x = tl.where(row % 2 == 0, x, x << 16)
        operands = (transposed(tl.where(row < 4, x, 0)),)
    else:
        odd_high, odd_low = _split_hi_lo(sums[2] * (STEP / ULP))
        high |= odd_high << 16
        low |= odd_low << 16
        even = tl.where(row == 0, high, tl.where(row == 2, low, 0))
        odd = tl.where(row == 1, high, tl.where(row == 3, low, 0))
        operands = (transposed(even), transposed(odd))
    return operands


@triton.jit
def _of_sums(z, operands, C: tl.constexpr):
    """`z + 128` of a word times sums of weights, UNIT STEP: of each of two tiles as of `_sums`."""
    x = _scale_mma(z, operands[0])
    if C == 1:
        y = ((x[0], x[2]), (x[1], x[3]))
    else:
        u = _scale_mma(z, operands[1])
        y = ((x[0], x[2], x[1], x[3]), (u[0], u[2], u[1], u[3]))
    return y


@triton.jit
def _operand_of_powers(W: tl.constexpr, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Right operand of `_spread` that takes the places of FIELD and the next one out of `s_int`: even columns, odd."""
    EVEN: tl.constexpr = (30 - BITS * FIELD) << 10  # 2^15 without a place, in fp16
    ODD: tl.constexpr = (30 - BITS * (FIELD + 1)) << 26
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    return tl.where(lane % 4 == 0, tl.where(lane // 4 % 2 == 0, EVEN, ODD), 0)


@triton.jit
def _field(words, BITS: tl.constexpr, FIELD: tl.constexpr):
    """Codes of a field in their bytes; for the upper of two, the words as they are."""
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
def _pair(
    words, s_int, z, operands, of_weights, W: tl.constexpr, BITS: tl.constexpr, FIELD: tl.constexpr, C: tl.constexpr
):
    """What a block adds to the channel tiles of FIELD and the next one, UNIT STEP SCALE: (c, tile, rh)."""
    low = _pv_mma(_field(words, BITS, FIELD), operands, C)
    high = _pv_mma(_field(words, BITS, FIELD + 1), operands, C)
    of_rows = _scale_mma(s_int, _operand_of_powers(W, BITS, FIELD))
    of_sums = _of_sums(z, of_weights, C)
    x = ()
    for c in tl.static_range(C):
        for rh in tl.static_range(2):
            x = x + (low[2 * c + rh] * of_rows[2 * rh] + of_sums[0][2 * c + rh],)  # noqa: RUF005
        for rh in tl.static_range(2):
            both = high[2 * c + rh]
            if BITS == 4:
                both -= low[2 * c + rh]
            x = x + (both * of_rows[2 * rh + 1] + of_sums[1][2 * c + rh],)  # noqa: RUF005
    return x


@triton.jit
def for_heads(x, W: tl.constexpr, HEADS: tl.constexpr):
    """x [W, HEADS] for each head of a lane."""
    # Of 16 rows, as products have them: a lane then has each value in registers of its own, as those of `_to_lanes`.
    both = _to_lanes(tl.broadcast_to(x[:, None, :], [W, 16, HEADS]), W, HEADS)
    values = ()
    for c in tl.static_range(HEADS // 4):
        values = values + (both[2 * c],)  # noqa: RUF005
    return values


@triton.jit
def first_values(row_sum, acc, W: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    """An online softmax, row_sum [W, 16, HEADS] (rows alike) and acc [W, D, HEADS], as `add_values` goes on with it.

    In lanes: for each c the sum, what acc has too much because bytes are z + 128, and D / 8 values of acc.
    """
    N: tl.constexpr = D // 8
    sums, values, state = _to_lanes(row_sum, W, HEADS), _to_lanes(acc, W, HEADS), ()
    for c in tl.static_range(HEADS // 4):
        state = state + (sums[2 * c], tl.zeros_like(sums[2 * c]))  # noqa: RUF005
        for n in tl.static_range(N):
            state = state + (values[c * N + n],)  # noqa: RUF005
    return state


@triton.jit
def add_values(
    state,  # of `first_values`
    p,  # weights relative to the largest of the block: (c, n), of token 8 n + g
    alphas,  # for each c: what the values so far are rescaled by, and
    betas,  # those of this block
    v_scale,  # [W]
    words,  # of `read_v`
    s_int,
    z,
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add a block's weights and values to an online softmax."""
    FIELDS: tl.constexpr = 8 // BITS
    C: tl.constexpr = HEADS // 4
    N: tl.constexpr = D // 8
    integers = ()
    for n in tl.static_range(8 * C):
        integers = integers + ((p[n] * SCALE + ROUND).to(tl.int32, bitcast=True),)  # noqa: RUF005
    operands = _right_operands(integers, C)
    one = tl.full([W, 32], 0x01010101, tl.int32)
    weights = _pv_mma((one, one, one, one, one, one, one, one), operands, C)
    of_weights = _operand_of_weights(weights, C)
    pairs = ()
    for pair in tl.static_range(D // 32):
        added = _pair(
            words[2 * (2 * pair // FIELDS)] + words[2 * (2 * pair // FIELDS) + 1], s_int[pair], z[pair], operands,
            of_weights, W, BITS, 2 * pair % FIELDS, C,
        )  # fmt: skip
        pairs = pairs + (added,)  # noqa: RUF005
    new_state = ()
    for c in tl.static_range(C):
        factor = betas[c] * (v_scale[:, None] * (1.0 / (SCALE * UNIT * STEP)))
        old = state[c * (N + 2)] * alphas[c]
        new_state = new_state + (old + weights[2 * c] * (betas[c] * (1.0 / (SCALE * UNIT))),)  # noqa: RUF005
        old = state[c * (N + 2) + 1] * alphas[c]
        new_state = new_state + (old + weights[2 * c] * (factor * (128.0 * STEP)),)  # noqa: RUF005
        for n in tl.static_range(N):
            old = state[c * (N + 2) + 2 + n] * alphas[c]
            new_state = new_state + (old + pairs[n // 4][4 * c + n % 4] * factor,)  # noqa: RUF005
    return new_state
