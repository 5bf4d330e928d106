"""Device code in *lanes*: tensors [W, 32] with a warp in each row and a lane in each column, and INT8 MMAs on them.

m16n8k32 multiplies A [16, 32] by B [32, 8], bytes; the product is exact. Lane `4 g + t` of a result holds the values of
head t, or of heads 2 t and 2 t + 1: C heads. So the assembly decides which lane holds what, not the compiler.

P has 16 bits, `rint(P_SCALE p)`, with p relative to the largest weight of the block and head. Its high and its low byte
are separate columns: with up to 4 heads the two columns of a head, with 8 heads the columns of two MMAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, stacked, unstacked

__all__ = [
    "FLIP_SIGNS", "PV_UNIT", "P_SCALE", "ROUND", "byte_perm", "heads_to_lanes", "hi_lo_operands", "mma_m16n8k32",
    "p_operands", "pv_mma", "reduce_rows", "to_fragment", "to_lane_state", "transpose_8x8", "unpack_bytes",
]  # fmt: skip

# Scale of P. Fits 16 bits, with room for p slightly above 1: rounding of scores as large as 2^20 can cause that.
P_SCALE = tl.constexpr(61440.0)
ROUND = tl.constexpr(8388608.0)  # 2^23: added to a float, it leaves the nearest integer in the lowest bits
PV_UNIT = tl.constexpr(2.0**-30)  # factor in the results of `pv_mma`
FLIP_SIGNS = tl.constexpr(0x80808080 - 2**32)  # flips the sign bit of each byte of a word: + 128
FLIP_UPPER = tl.constexpr(0x80800000 - 2**32)  # the same for the upper two bytes only


@triton.jit
def _to_lanes(x, W: tl.constexpr, HEADS: tl.constexpr):
    """Return an MMA result x [W, 8 N, HEADS] in lanes: for each of C heads and N rows; (c, n) at index c N + n."""
    N: tl.constexpr = x.shape[1] // 8
    C: tl.constexpr = HEADS // 4
    x = tl.permute(tl.reshape(x, [W, N, 8, 4, C]), (0, 2, 3, 4, 1))
    return unstacked(tl.reshape(x, [W, 32, C * N]), C * N)


@triton.jit
def unpack_bytes(x):
    """The four bytes of each word, lowest first: [..., 4]."""
    return (tl.reshape(x, x.shape + [1]) >> (8 * tl.arange(0, 4))) & 255  # noqa: RUF005


@triton.jit
def byte_perm(a, b, PICK: tl.constexpr):
    """Select four bytes of a (numbers 0 to 3) and b (4 to 7): the hexadecimal digits of PICK, lowest byte first."""
    if INTERPRETED:
        both, index = tl.reshape(tl.join(unpack_bytes(a), unpack_bytes(b)), a.shape + [4, 2]), tl.arange(0, 4)  # noqa: RUF005
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
def p_operands(p, C: tl.constexpr):
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
def to_fragment(product, N: tl.constexpr):
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
        left = tl.reshape(unpack_bytes(stacked(a, 4 * N)), [W, 8, 4, N, 2, 2, 4])  # g t ks kh rh byte
        left = tl.reshape(tl.permute(left, (0, 5, 1, 3, 4, 2, 6)), [W, 16, 32 * N])
        right = tl.reshape(unpack_bytes(stacked(b, 2 * N)), [W, 8, 4, 2 * N, 4])
        right = tl.reshape(tl.permute(right, (0, 3, 2, 4, 1)), [W, 32 * N, 8])
        if SIGNED:
            right = (right ^ 128) - 128
        x = to_fragment(tl.dot(left.to(tl.float32), right.to(tl.float32)).to(tl.int32) + START, 4)
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
def pv_mma(a, operands, C: tl.constexpr):
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
def hi_lo_operands(a, b, C: tl.constexpr):
    """Build B operands from the high and the low bytes of 16-bit integers.

    Args:
        a, b: for each c, words with n + 128 in the lowest 16 bits. Lane `4 g + t` has rows 2 g and 2 g + 1 of its own
            heads; a is for the lower byte of 16 bits, b for the upper byte.
    Returns:
        With C = 1 a word with the columns of h and l; with C = 2 two words, h and l. Lane `4 g + t` gets 4 rows of
        column g.
    """
    if C == 1:
        operands = (transpose_8x8(byte_perm(a[0], b[0], 0x4051) ^ FLIP_UPPER),)  # l
    else:
        even, odd = byte_perm(a[0], b[0], 0x4051), byte_perm(a[1], b[1], 0x4051)
        high, low = byte_perm(even, odd, 0x5410), byte_perm(even, odd, 0x7632)
        operands = (transpose_8x8(high), transpose_8x8(low ^ FLIP_SIGNS))
    return operands
