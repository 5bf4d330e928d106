"""Device code of FlashQ decode attention: the product with V, O^T = V^T P^T, in INT8 (see block_attention.py).

m16n8k32 multiplies A [16 channels, 32 tokens] by B [32 tokens, 8 columns], here unsigned bytes; the product is exact.

- P has 16 bits, `rint(P_SCALE p)`, with p relative to the largest weight of the block and head. Its high and its low
  byte are separate columns: with up to 4 heads the two columns of a head, with 8 heads the columns of two MMAs.
- The stored words of V are A operands as they are (layout.py). One mask selects a field of all four bytes. The upper of
  two fields needs no mask: its product is that of the whole bytes minus that of the lower field.
- Sums are integers below 2^23. Read as floats they are denormals, n 2^-149; multiplications take them as they are.
- The factors of a channel, `s_int` and `z + 128`, are bytes. A small fp16 MMA distributes them over lanes as floats. It
  also divides `s_int` by the power of two of a field, and multiplies `z + 128` by the sum of weights, which is split
  into two fp16 of 11 bits each.

All values are in *lanes*: tensors [W, 32] with a warp in each row and a lane `4 g + t` in each column. Lane `4 g + t`
holds the values of head t, or of heads 2 t and 2 t + 1: C heads. So the assembly decides which lane holds what, not the
compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, stacked, unstacked

__all__ = [
    "accumulate_block",
    "byte_perm",
    "heads_to_lanes",
    "mma_m16n8k32",
    "reduce_rows",
    "to_lane_state",
    "transpose_8x8",
]

# Scale of P. Fits 16 bits, with room for p slightly above 1: rounding of scores as large as 2^20 can cause that.
P_SCALE = tl.constexpr(61440.0)
ROUND = tl.constexpr(8388608.0)  # 2^23: added to a float, it leaves the nearest integer in the lowest bits
PV_UNIT = tl.constexpr(2.0**-30)  # factor in the results of `_pv_mma`
ULP = tl.constexpr(2.0**-24)  # lowest bit of a denormal fp16
FACTOR_UNIT = tl.constexpr(2.0**-9)  # factor in the results of `_scale_mma`, for the lowest field


@triton.jit
def _to_lanes(x, W: tl.constexpr, HEADS: tl.constexpr):
    """Return an MMA result x [W, 8 N, HEADS] in lanes: for each of C heads and N rows; (c, n) at index c N + n."""
    N: tl.constexpr = x.shape[1] // 8
    C: tl.constexpr = HEADS // 4
    x = tl.permute(tl.reshape(x, [W, N, 8, 4, C]), (0, 2, 3, 4, 1))
    return unstacked(tl.reshape(x, [W, 32, C * N]), C * N)


@triton.jit
def _unpack_bytes(x):
    """The four bytes of each word, lowest first: [..., 4]."""
    return (tl.reshape(x, x.shape + [1]) >> (8 * tl.arange(0, 4))) & 255  # noqa: RUF005


@triton.jit
def byte_perm(a, b, PICK: tl.constexpr):
    """Select four bytes of a (numbers 0 to 3) and b (4 to 7): the hexadecimal digits of PICK, lowest byte first."""
    if INTERPRETED:
        both, index = tl.reshape(tl.join(_unpack_bytes(a), _unpack_bytes(b)), a.shape + [4, 2]), tl.arange(0, 4)  # noqa: RUF005
        x = tl.zeros_like(a)
        for i in tl.static_range(4):
            selected = (index == (PICK >> 4 * i) % 4)[:, None] & (tl.arange(0, 2) == (PICK >> 4 * i) % 8 // 4)[None, :]
            x |= tl.sum(tl.sum(tl.where(selected, both, 0), -1), -1) << (8 * i)
    else:
        x = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {PICK};", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def transpose_8x8(x):
    """Transpose an [8, 8] matrix of 16-bit values in each warp; four lanes hold a row, two values each."""
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
def _p_operands(p, C: tl.constexpr):
    """B operands of the MMAs with V, four words each, from P as 16-bit integers p (c, n), token 8 n + g.

    A word of lane `4 g + t` holds column g and the tokens 2 t, 2 t + 8, 2 t + 1 and 2 t + 9 of 16.
    """
    if C == 1:
        operand = ()
        for i in tl.static_range(4):
            operand = operand + (transpose_8x8(byte_perm(p[2 * i], p[2 * i + 1], 0x4051)),)  # noqa: RUF005
        operands = (operand,)
    else:
        high, low = (), ()
        for i in tl.static_range(4):
            even = byte_perm(p[2 * i], p[2 * i + 1], 0x4051)
            odd = byte_perm(p[2 * i + 8], p[2 * i + 9], 0x4051)
            high = high + (transpose_8x8(byte_perm(even, odd, 0x5410)),)  # noqa: RUF005
            low = low + (transpose_8x8(byte_perm(even, odd, 0x7632)),)  # noqa: RUF005
        operands = (high, low)
    return operands


@triton.jit
def _to_fragment(product, N: tl.constexpr):
    """Interpreter only: the N registers of each lane that hold an MMA result [W, 16, 8]: N tensors [W, 32]."""
    x = tl.permute(tl.reshape(product, [product.shape[0], 2, 8, 4, 2]), (0, 2, 3, 1, 4))
    return unstacked(tl.reshape(x, [product.shape[0], 32, N]), N)


@triton.constexpr_function
def _mma_assembly(n, signed, start):
    """Assembly of n accumulating MMAs; operands: four results, 4 n words of A, 2 n words of B."""
    types = "s32.u8.s8.s32" if signed else "s32.u8.u8.s32"
    acc, code = "{z, z, z, z}", f"{{ .reg .b32 z, u0, u1, u2, u3; mov.b32 z, {start};"
    for i in range(n):
        dst = "{$0, $1, $2, $3}" if i == n - 1 else "{u0, u1, u2, u3}"
        a, b = 4 + 4 * i, 4 + 4 * n + 2 * i
        left, right = f"{{${a}, ${a + 1}, ${a + 2}, ${a + 3}}}", f"{{${b}, ${b + 1}}}"
        code += f" mma.sync.aligned.m16n8k32.row.col.{types} {dst}, {left}, {right}, {acc};"
        acc = dst
    return code + " }"


@triton.jit
def mma_m16n8k32(a, b, N: tl.constexpr, SIGNED: tl.constexpr, START: tl.constexpr):
    """Multiply bytes [16, 32 N] by bytes [32 N, 8] and add START; exact, int32.

    Args:
        a: 4 N words of each lane, unsigned bytes.  b: 2 N words of each lane; SIGNED: signed bytes.
    Returns:
        Columns 2 t and 2 t + 1 of row g, then of row g + 8.
    """
    if INTERPRETED:
        W: tl.constexpr = a[0].shape[0]
        left = tl.reshape(_unpack_bytes(stacked(a, 4 * N)), [W, 8, 4, N, 2, 2, 4])  # g t ks kh rh byte
        left = tl.reshape(tl.permute(left, (0, 5, 1, 3, 4, 2, 6)), [W, 16, 32 * N])
        right = tl.reshape(_unpack_bytes(stacked(b, 2 * N)), [W, 8, 4, 2 * N, 4])
        right = tl.reshape(tl.permute(right, (0, 3, 2, 4, 1)), [W, 32 * N, 8])
        if SIGNED:
            right = (right ^ 128) - 128
        x = _to_fragment(tl.dot(left.to(tl.float32), right.to(tl.float32)).to(tl.int32) + START, 4)
    else:
        x = tl.inline_asm_elementwise(
            _mma_assembly(N, SIGNED, START), "=r,=r,=r,=r" + ",r" * (6 * N), a + b,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def reduce_rows(x, OP: tl.constexpr):
    """Reduce x [W, 32] over all lanes with the same t. OP: "add", "max", or "max.NaN", which keeps NaN."""
    if INTERPRETED:
        rows = tl.reshape(x, [x.shape[0], 8, 4])
        reduced = tl.sum(rows, 1) if OP == "add" else tl.max(rows, 1)
        x = tl.reshape(tl.broadcast_to(reduced[:, None, :], [x.shape[0], 8, 4]), [x.shape[0], 32])
    else:
        x = tl.inline_asm_elementwise(
            f"{{ .reg .f32 u, v; shfl.sync.bfly.b32 u, $1, 16, 31, -1; {OP}.f32 u, $1, u;"
            f" shfl.sync.bfly.b32 v, u, 8, 31, -1; {OP}.f32 u, u, v;"
            f" shfl.sync.bfly.b32 v, u, 4, 31, -1; {OP}.f32 $0, u, v; }}",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _pv_mma(a, operands, C: tl.constexpr):
    """PV_UNIT P_SCALE V^T P^T of 16 channels: for each head and row of a lane; (c, rh) at index 2 c + rh."""
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
    """PV_UNIT (256 high + low) as fp32, for integers below 2^23."""
    if INTERPRETED:
        x = (high * 256 + low).to(tl.float32) * PV_UNIT
    else:
        # The integers, read as floats, are n 2^-149: multiply by 2^119 and 2^127.
        x = tl.inline_asm_elementwise(
            "{ .reg .f32 u; mul.rn.f32 u, $2, 0f7B000000; fma.rn.f32 $0, $1, 0f7F000000, u; }",
            "=f,r,r", [high, low], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


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
        left = tl.reshape(_unpack_bytes(x), [W, 8, 4, 2, 2])  # g t i rh
        left = tl.reshape(tl.permute(left, (0, 4, 1, 2, 3)), [W, 16, 8]).to(tl.float32) * ULP
        right = tl.join((b & 0xFFFF).to(tl.int16), (b >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
        right = tl.reshape(tl.permute(tl.reshape(right, [W, 8, 4, 2]), (0, 2, 3, 1)), [W, 8, 8])
        y = _to_fragment(tl.dot(left, right.to(tl.float32)), 4)
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
    """B operands of `_scale_mma` from sums of weights (of `_pv_mma`): one for both channel tiles, or one for each."""
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
    """`z + 128` of a word times the sums of weights, in PV_UNIT FACTOR_UNIT: for two channel tiles, as `_pv_mma`."""
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
    low = _pv_mma(_mask_field(words, BITS, FIELD), operands, C)
    high = _pv_mma(_mask_field(words, BITS, FIELD + 1), operands, C)
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
def heads_to_lanes(x, W: tl.constexpr, HEADS: tl.constexpr):
    """Return x [W, HEADS] in lanes: one tensor for each head of a lane."""
    # Broadcast to 16 rows, as an MMA result has: then each lane already holds its values, as in `_to_lanes`.
    rows = _to_lanes(tl.broadcast_to(x[:, None, :], [W, 16, HEADS]), W, HEADS)
    values = ()
    for c in tl.static_range(HEADS // 4):
        values = values + (rows[2 * c],)  # noqa: RUF005
    return values


@triton.jit
def to_lane_state(row_sum, acc, W: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr):
    """Convert sums of an online softmax to the state of `accumulate_block`.

    Args:
        row_sum: [W, 16, HEADS], all rows equal.  acc: [W, D, HEADS].
    Returns:
        In lanes, for each c: the row sum; the excess of acc, because bytes are z + 128 (0 here); D / 8 values of acc.
    """
    N: tl.constexpr = D // 8
    sums, values, state = _to_lanes(row_sum, W, HEADS), _to_lanes(acc, W, HEADS), ()
    for c in tl.static_range(HEADS // 4):
        state = state + (sums[2 * c], tl.zeros_like(sums[2 * c]))  # noqa: RUF005
        for n in tl.static_range(N):
            state = state + (values[c * N + n],)  # noqa: RUF005
    return state


@triton.jit
def accumulate_block(
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
    operands = _p_operands(integers, C)
    ones = tl.full([W, 32], 0x01010101, tl.int32)
    weight_sums = _pv_mma((ones, ones, ones, ones, ones, ones, ones, ones), operands, C)
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
