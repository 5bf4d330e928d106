"""Device code of decode attention over a quantised cache: the INT8 tail of an output, the same for every codec.

The bytes of the tail become fp16 without a conversion: as the low bits of an fp16 they are denormals, n 2^-24. Its q
and P are rounded to fp16. Query heads are columns of the products (block_attention.py).

Where operands are built with `tl.join`, the compiler gives a lane four consecutive columns of each 16 (kWidth 4)
instead of two and two. So the columns of such a product are numbered in *operand order* (t, kh, i), 16 at a time. Then
the loaded registers are the operand, and no data moves between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.lanes import FLIP_SIGNS, heads_to_lanes, to_lane_state
from alspec.kernels.attention.decode_quantised.query import head_offset
from alspec.kernels.attention.sas_exp2 import sas_exp2
from alspec.kernels.common.device import INTERPRETED
from alspec.kernels.kv_codec.flashq.record import TOKENS

__all__ = ["COLUMNS", "EMPTY_MAX", "attend_tail"]

COLUMNS = tl.constexpr(8)  # columns of an MMA, for query heads
ULP = tl.constexpr(2.0**-24)  # lowest bit of a denormal fp16
EMPTY_MAX = tl.constexpr(-1.0e30)  # maximum of no tokens; finite, so that differences are not NaN


@triton.jit
def _unpack_fp16(x):
    """Split each 32-bit word into its two fp16: [..., 2]."""
    if INTERPRETED:
        low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    return tl.join(low, high)


@triton.jit
def _unpack_bytes_fp16(x):
    """Split each word into its four bytes, as fp16 n 2^-24: [..., 2, 2]."""
    if INTERPRETED:
        a = (x & 255).to(tl.int16).to(tl.float16, bitcast=True)
        b = ((x >> 8) & 255).to(tl.int16).to(tl.float16, bitcast=True)
        c = ((x >> 16) & 255).to(tl.int16).to(tl.float16, bitcast=True)
        d = ((x >> 24) & 255).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 u; prmt.b32 u, $4, 0, 0x4140; mov.b32 {$0, $1}, u;"
            " prmt.b32 u, $4, 0, 0x4342; mov.b32 {$2, $3}, u; }",
            "=h,=h,=h,=h,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _asm_identity(x):
    """Identity for fp16 x: hides a `tl.join` from the compiler, which would otherwise reorder the operand's columns."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
    return x


@triton.jit
def _to_b_operand(x, W: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr):
    """Convert an MMA result x [W, N, HEADS] to the fp16 B operand [W, N, COLUMNS] of the next MMA.

    `movmatrix` moves the values between lanes: pairs of columns become pairs of rows. The permutation describes that
    move to the compiler, so that it moves nothing else.
    """
    even, odd = x, x
    if HEADS == COLUMNS:
        even, odd = tl.split(tl.reshape(x, [W, N, COLUMNS // 2, 2]))
    if INTERPRETED:
        return tl.reshape(tl.join(even.to(tl.float16), odd.to(tl.float16)), [W, N, COLUMNS])
    x = tl.inline_asm_elementwise(
        "{ .reg .b32 u; cvt.rn.f16x2.f32 u, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, u; }",
        "=r,r,r", [even, odd], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    x = tl.reshape(_unpack_fp16(x), [W, N // 8, 8, COLUMNS])
    return _asm_identity(tl.reshape(tl.permute(x, (0, 1, 3, 2)), [W, N, COLUMNS]))


@triton.jit
def _pack_row_pairs(even, odd):
    """Pack pairs of rows, [N / 2, COLUMNS] each, into words: as single fp16 they would take twice the registers."""
    low = even.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit
def _unpack_row_pairs(x, W: tl.constexpr, N: tl.constexpr):
    """Unpack `_pack_row_pairs` to the B operand [W, N, COLUMNS] fp16, the same for every warp."""
    x = tl.reshape(tl.permute(_unpack_fp16(x), (0, 2, 1)), [N, COLUMNS])
    return tl.broadcast_to(x[None, :, :], [W, N, COLUMNS])


@triton.jit
def _repeat_rows(x, W: tl.constexpr, N: tl.constexpr):
    """Repeat x [W, 16, C], all rows equal, to N rows, without moving values between lanes."""
    C: tl.constexpr = x.shape[2]
    x = tl.reshape(x, [W, 1, 16, C])
    return tl.reshape(tl.broadcast_to(x, [W, N // 16, 16, C]), [W, N, C])


@triton.jit
def _columns_to_heads(x, HEADS: tl.constexpr):
    """Convert columns x [..., COLUMNS] to heads [..., HEADS]: the first column of each head, if it has two."""
    if HEADS < COLUMNS:
        x, _ = tl.split(tl.reshape(x, x.shape[:-1] + [HEADS, 2]))  # noqa: RUF005 (Triton has no *)
    return x


@triton.jit
def _load_query_fp16(source, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, D: tl.constexpr):
    """Load the query heads of an output, scaled for fp16: the largest |q| 2^e of a head is in [2^14, 2^15).

    The factor is a power of two, so that bf16 values stay exact. source: of `query_source`.

    Returns:
        even, odd: [D / 2, COLUMNS], q 2^e of even and odd channels, fp16 values in fp32.
        inverse: [HEADS], 2^-e.
    """
    # Columns past the last head repeat the last head.
    heads = tl.minimum(tl.arange(0, COLUMNS) // (COLUMNS // HEADS), HEADS_PER_KV - 1)
    offsets = head_offset(heads, source, HEADS_PER_KV, TOGETHER, D)
    q = tl.load(source[0] + offsets[None, :] + tl.arange(0, D)[:, None]).to(tl.float32)
    exponent = tl.maximum(tl.max(tl.abs(q), 0).to(tl.int32, bitcast=True) >> 23, 32)
    q *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    q = q.to(tl.float16).to(tl.float32)
    even, odd = tl.split(tl.permute(tl.reshape(q, [D // 2, 2, COLUMNS]), (0, 2, 1)))
    return even, odd, _columns_to_heads(((exponent - 14) << 23).to(tl.float32, bitcast=True), HEADS)


@triton.jit
def _group_by_warp(x, W: tl.constexpr):
    """Regroup [N W, M] to [W, N M], where every W-th row belongs to the same warp.

    A warp loads a row of 128 words, 16 bytes per lane. So each warp loads its own tokens.
    """
    N: tl.constexpr = x.shape[0] // W
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N, W, M]), (1, 0, 2)), [W, N * M])


@triton.jit
def attend_tail(
    source,  # of `query_source`
    qk_scale,  # sm_scale log2(e)
    tail_ptr,  # [2, 64, D] int8 of this output, as int32
    scale_ptr,  # [2] fp32
    tokens,  # (end,) or (end, first): tokens [first, end) of the tail are read
    row_lens,  # with TOGETHER > 1, in place of `tokens`: (pointer of the lengths of the rows, tokens before the tail)
    cutoff,  # of SAS weights
    HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    SAS: tl.constexpr,
):
    """Return the online softmax of the tail, in lanes; each warp takes `TOKENS / W` token positions.

    The tail is stored token by token, and its bytes are used in that order. A sum over channels may group channels into
    tiles in any order, if q uses the same order. The rows of the output are reordered once, at the end.
    """
    T: tl.constexpr = TOKENS // W
    TILES: tl.constexpr = D // 16
    V_WORDS: tl.constexpr = D // 32  # words of a V row (one token) that a lane holds
    # A row of these indices is what a warp loads at once. Every W-th row belongs to the same warp, so each warp loads
    # its own operands.
    # K [token tile][rh][half row][g][t][4 words]: lane t has D / 16 consecutive words, one of each channel tile.
    row = tl.arange(0, W * T * D // 512)[:, None]
    r = row // W * 128 + tl.arange(0, 128)[None, :]
    token = row % W * T + r // (4 * D) * 16 + r // (2 * D) % 2 * 8 + r // 16 % 8
    offsets = token * (D // 4) + r // 4 % 4 * TILES + r // 128 % (D // 64) * 4 + r % 4
    offsets = tl.multiple_of(tl.max_contiguous(offsets, [1, 4]), [1, 4])
    k_words = _group_by_warp(tl.load(tail_ptr + offsets), W)
    # V [token tile][kh][i][g][t][words]: lane g has D / 8 consecutive channels, one of each channel tile and rh.
    row = tl.arange(0, W * T // 4)[:, None]
    r = row // W * D + tl.arange(0, D)[None, :]
    token = row % W * T + r // (4 * D) * 16 + r // (2 * D) % 2 * 8 + r // V_WORDS % 4 * 2 + r // D % 2
    offsets = token * (D // 4) + r // (4 * V_WORDS) % 8 * V_WORDS + r % V_WORDS
    offsets = tl.multiple_of(tl.max_contiguous(offsets, [1, V_WORDS]), [1, V_WORDS])
    v_words = _group_by_warp(tl.load(tail_ptr + TOKENS * D // 4 + offsets), W)
    k_scale, v_scale = tl.load(scale_ptr), tl.load(scale_ptr + 1)
    # q is loaded after these loads were issued, so that all are in flight together.
    even, odd, inverse = _load_query_fp16(source, HEADS_PER_KV, HEADS, TOGETHER, D)
    k = _unpack_bytes_fp16(k_words ^ FLIP_SIGNS)
    k = tl.reshape(k, [W, T // 16, 2, D // 64, 8, 4, 4, 2, 2])
    k = tl.reshape(tl.permute(k, (0, 1, 2, 4, 3, 6, 5, 7, 8)), [W, T, D])
    q_words = tl.permute(tl.reshape(_pack_row_pairs(even, odd), [4, TILES, 2, COLUMNS]), (1, 0, 2, 3))
    q = _unpack_row_pairs(tl.reshape(q_words, [D // 2, COLUMNS]), W, D)
    unbias = tl.sum(even + odd, 0) * (-128.0 * ULP)
    unbias = tl.broadcast_to(unbias[None, None, :], [W, T, COLUMNS])
    s = _columns_to_heads(tl.dot(k, q, unbias), HEADS)
    unit = k_scale * (inverse * qk_scale) * (1.0 / ULP)
    index = tl.arange(0, W)[:, None] * T + tl.arange(0, T)[None, :]
    if TOGETHER > 1:
        rows = tl.minimum(tl.arange(0, HEADS) // (HEADS_PER_KV // TOGETHER), source[2])
        ends = tl.load(row_lens[0] + rows) - row_lens[1]
        valid = index[:, :, None] < ends[None, None, :]
    else:
        valid = index < tokens[0]
        if len(tokens) > 1:
            valid &= index >= tokens[1]
        valid = valid[:, :, None]
    s = tl.where(valid, s * unit[None, None, :], EMPTY_MAX)
    row_max = tl.max(s, 1)
    x = s - row_max[:, None, :]
    p = tl.where(valid, sas_exp2(x, cutoff) if SAS else tl.exp2(x), 0.0)
    p = _to_b_operand(p, W, T, HEADS)
    row_sum = _columns_to_heads(tl.dot(tl.full([W, 16, T], 1.0, tl.float16), p), HEADS)

    v = _unpack_bytes_fp16(v_words ^ FLIP_SIGNS)
    v = tl.reshape(v, [W, T // 16, 2, 2, 8, 4, V_WORDS, 2, 2])
    v = tl.reshape(tl.permute(v, (0, 6, 7, 8, 4, 1, 2, 5, 3)), [W, D, T])
    o = _columns_to_heads(tl.dot(_asm_identity(v), p), HEADS) * (1.0 / ULP) - 128.0 * _repeat_rows(row_sum, W, D)
    o = tl.reshape(tl.permute(tl.reshape(o, [W, TILES, 2, 8, HEADS]), (0, 3, 1, 2, 4)), [W, D, HEADS])
    return heads_to_lanes(row_max, W, HEADS), to_lane_state(row_sum, o * v_scale, W, D, HEADS)
