"""Arithmetic of decode over quantised blocks: the device code between a record's words and an online softmax.

A step takes W blocks, one for each warp (the leading size of all tensors here), with up to 8 query heads as columns:

    S^T = K q^T,   O^T = V^T P^T

Both products are in INT8, see keys.py and values.py, and between them everything is in *lanes*: tensors
[W, 32] of what a lane has. Up to four heads (HEADS) have two columns each: a lane has the scores of one. With eight it
has those of two, c of C.

The tail's bytes become fp16 without conversion: as the low bits of a half they are denormals, n 2^-24.

Products are exact, but for the rounding of q s_int and of P to 16 bits, of the tail's q and P to fp16; sums are fp32 or
exact. A block's weights are relative to its own largest, so that in a long context they have as many bits as in a short
one. With SAS they are those of `alspec/sas.py`, and what rescales sums, between blocks and between warps, stays an
exact power of two.

Where operands are built with `tl.join`, the compiler gives a lane four columns in a row of each 16 (kWidth 4) instead
of two and two. So the columns of such a product are named in *operand order* (t, kh, i), 16 at a time: then the
registers loaded are the operand's, and nothing moves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_flashq.keys import query_units, scores
from alspec.kernels.attention.decode_flashq.query import FLIP_SIGNS
from alspec.kernels.attention.decode_flashq.record_loads import (
    await_side,
    load_scales,
    read_k,
    read_v,
    send_side,
    side_of,
)
from alspec.kernels.attention.decode_flashq.values import add_values, first_values, for_heads, over_rows
from alspec.kernels.attention.sas_exp2 import sas_exp2
from alspec.kernels.common.device import INTERPRETED
from alspec.kernels.kv_codec.flashq.record import TOKENS

__all__ = ["COLUMNS", "attend_blocks", "attend_tail", "no_tokens"]

COLUMNS = tl.constexpr(8)  # query heads of a product
ULP = tl.constexpr(2.0**-24)  # of a denormal half: the value of its lowest bit
NEVER = tl.constexpr(-1.0e30)  # the maximum of no tokens: finite, so that differences are numbers


@triton.jit
def _halves(x):
    """The two fp16 of each 32-bit word: [..., 2]."""
    if INTERPRETED:
        low = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = ((x >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    return tl.join(low, high)


@triton.jit
def _bytes_as_halves(x):
    """The four bytes of each word as fp16, n 2^-24: [..., 2, 2]."""
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
def _opaque(x):
    """x fp16, with its origin hidden from the compiler: where it sees a join, it reorders the operand's columns."""
    if not INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
    return x


@triton.jit
def _as_right_operand(x, W: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr):
    """x [W, N, HEADS] of a product as fp16 operand [W, N, COLUMNS] of the next: pairs of columns become pairs of rows.

    `movmatrix` moves the values between threads; the permutation says what it did, so that nothing else has to move.
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
    x = tl.reshape(_halves(x), [W, N // 8, 8, COLUMNS])
    return _opaque(tl.reshape(tl.permute(x, (0, 1, 3, 2)), [W, N, COLUMNS]))


@triton.jit
def _pairs(even, odd):
    """Rows of an operand two by two, [N / 2, COLUMNS] each, as words: as fp16 they would take twice the registers."""
    low = even.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = odd.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return low | high


@triton.jit
def _from_pairs(x, W: tl.constexpr, N: tl.constexpr):
    """The operand [W, N, COLUMNS] fp16, the same for every warp."""
    x = tl.reshape(tl.permute(_halves(x), (0, 2, 1)), [N, COLUMNS])
    return tl.broadcast_to(x[None, :, :], [W, N, COLUMNS])


@triton.jit
def _on_rows(x, W: tl.constexpr, N: tl.constexpr):
    """x [W, 16, C], all rows alike, with N rows: no thread needs another's values."""
    C: tl.constexpr = x.shape[2]
    x = tl.reshape(x, [W, 1, 16, C])
    return tl.reshape(tl.broadcast_to(x, [W, N // 16, 16, C]), [W, N, C])


@triton.jit
def _of_heads(x, HEADS: tl.constexpr):
    """x [..., COLUMNS] of the heads [..., HEADS]: the first of two columns, if a head has two."""
    if HEADS < COLUMNS:
        x, _ = tl.split(tl.reshape(x, x.shape[:-1] + [HEADS, 2]))  # noqa: RUF005 (Triton has no *)
    return x


@triton.jit
def no_tokens(HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """The online softmax of no tokens, in lanes: for each c the maximum; the state of `add_values`."""
    maxima, state = (), ()
    for _ in tl.static_range(HEADS // 4):
        maxima = maxima + (tl.full([W, 32], NEVER, tl.float32),)  # noqa: RUF005 (Triton has no *)
        for _ in tl.static_range(D // 8 + 2):
            state = state + (tl.zeros([W, 32], tl.float32),)  # noqa: RUF005
    return maxima, state


@triton.jit
def _scaled_query(q_ptr, output, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """The query heads of an output: q 2^e, fp16 values in fp32, even and odd channels [D / 2, COLUMNS]; 2^-e [HEADS].

    The largest of a head is in [2^14, 2^15). A power of two, so that bf16 values stay exact.
    """
    # Columns past the last head repeat it.
    heads = output * HEADS_PER_KV + tl.minimum(tl.arange(0, COLUMNS) // (COLUMNS // HEADS), HEADS_PER_KV - 1)
    q = tl.load(q_ptr + heads[None, :] * D + tl.arange(0, D)[:, None]).to(tl.float32)
    exponent = tl.maximum(tl.max(tl.abs(q), 0).to(tl.int32, bitcast=True) >> 23, 32)
    q *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    q = q.to(tl.float16).to(tl.float32)
    even, odd = tl.split(tl.permute(tl.reshape(q, [D // 2, 2, COLUMNS]), (0, 2, 1)))
    return even, odd, _of_heads(((exponent - 14) << 23).to(tl.float32, bitcast=True), HEADS)


@triton.jit
def _largest(s):
    """The largest of the scores of a head, (n) in lanes."""
    top = s[0]
    for n in tl.static_range(1, TOKENS // 8):
        top = tl.maximum(top, s[n])
    return over_rows(top, "max")


@triton.jit
def attend_blocks(
    maxima,  # an online softmax, in lanes: of `no_tokens` or `attend_tail`
    state,
    query,  # of `query_of_keys`
    qk_scale,  # sm_scale log2(e)
    records_ptr,  # of this output, and
    scales_ptr,
    blocks,  # (first, split, second, count): [first, first + split), then those from `second` on; `count` > 0 of both
    cutoff,  # of SAS weights, below the maximum so far
    buffers,  # with BULK: the first step has been asked for
    parity,  # of it; each step has the other one
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    SAS: tl.constexpr,
    BULK: tl.constexpr,
):
    """Go on with an online softmax over the records of one (request, KV head)."""
    C: tl.constexpr = HEADS // 4
    warps = tl.arange(0, W)
    count = blocks[3]
    of_bits = query_units(query, qk_scale, BITS, D, C)
    k_scale, v_scale = load_scales(scales_ptr, 0, blocks, W)
    steps = tl.cdiv(count, W)
    for i in tl.range(0, steps, num_stages=1):
        if BULK:
            k_words, k_s, k_z, done = read_k(await_side(buffers, parity, False, W, D), D, BITS)
            send_side(buffers, records_ptr, i + 1, blocks, BITS, i + 1 < steps, done, False, W, D)
        else:
            k_words, k_s, k_z, _ = read_k(side_of(records_ptr, i, blocks, False, W, D, BITS), D, BITS)
            v_words, v_s, v_z, _ = read_v(side_of(records_ptr, i, blocks, True, W, D, BITS), D, BITS)
        next_k_scale, next_v_scale = load_scales(scales_ptr, i + 1, blocks, W)
        s, second = scores(query, of_bits, k_words, k_s, k_z, D, BITS, C)
        if BULK:
            v_words, v_s, v_z, done = read_v(await_side(buffers, parity, True, W, D), D, BITS)
            send_side(buffers, records_ptr, i + 1, blocks, BITS, i + 1 < steps, done, True, W, D)

        inside = (i * W + warps < count)[:, None]
        p, alphas, betas, new_maxima = (), (), (), ()
        for c in tl.static_range(C):
            unit = k_scale[:, None] * of_bits[0][c]
            top = _largest(s[c])
            largest = (top + second[c]) * unit
            if W > 1:
                largest = tl.where(inside, largest, float("-inf"))
            new_max = tl.maximum(maxima[c], largest)
            alphas = alphas + (tl.exp2(maxima[c] - new_max),)  # noqa: RUF005 (Triton has no *)
            betas = betas + (tl.exp2(largest - new_max),)  # noqa: RUF005
            new_maxima = new_maxima + (new_max,)  # noqa: RUF005
            top *= unit
            for n in tl.static_range(TOKENS // 8):
                x = s[c][n] * unit - top
                # The cutoff is below the maximum so far, not the block's.
                p = p + (sas_exp2(x, cutoff + (new_max - largest)) if SAS else tl.exp2(x),)  # noqa: RUF005
        maxima = new_maxima
        state = add_values(state, p, alphas, betas, v_scale, v_words, v_s, v_z, HEADS, W, D, BITS)
        k_scale, v_scale = next_k_scale, next_v_scale
        parity ^= 1
    return maxima, state, parity


@triton.jit
def _rows_of_warps(x, W: tl.constexpr):
    """[N W, M], rows of the warps by turns -> [W, N M].

    A tensor of 128 words in a row is loaded 16 bytes by each lane, and a row is of one warp: so each has its own block.
    """
    N: tl.constexpr = x.shape[0] // W
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N, W, M]), (1, 0, 2)), [W, N * M])


@triton.jit
def attend_tail(
    q_ptr,
    output,
    qk_scale,  # sm_scale log2(e)
    tail_ptr,  # [2, 64, D] int8 of this output, as int32
    scale_ptr,  # [2] fp32
    tokens,  # how many there are
    cutoff,  # of SAS weights
    HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    SAS: tl.constexpr,
):
    """The online softmax of the tail, in lanes: `TOKENS / W` of its slots for each warp.

    Stored token by token, its bytes are taken as they come: which channels make a tile is the same to a sum over
    channels, if q agrees; the rows of the output are put in order afterwards, once.
    """
    T: tl.constexpr = TOKENS // W
    TILES: tl.constexpr = D // 16
    RUN: tl.constexpr = D // 32  # words of a V row that a lane holds
    # A row is what a warp loads at once, and every W-th row is of the same warp: so each has its own operands.
    # K [token tile][rh][half row][g][t][4 words]: lane t has D / 16 words in a row, one of each channel tile.
    row = tl.arange(0, W * T * D // 512)[:, None]
    r = row // W * 128 + tl.arange(0, 128)[None, :]
    token = row % W * T + r // (4 * D) * 16 + r // (2 * D) % 2 * 8 + r // 16 % 8
    at = token * (D // 4) + r // 4 % 4 * TILES + r // 128 % (D // 64) * 4 + r % 4
    at = tl.multiple_of(tl.max_contiguous(at, [1, 4]), [1, 4])
    k_words = _rows_of_warps(tl.load(tail_ptr + at), W)
    # V [token tile][kh][i][g][t][words]: lane g has D / 8 channels in a row, one of each channel tile and rh.
    row = tl.arange(0, W * T // 4)[:, None]
    r = row // W * D + tl.arange(0, D)[None, :]
    token = row % W * T + r // (4 * D) * 16 + r // (2 * D) % 2 * 8 + r // RUN % 4 * 2 + r // D % 2
    at = token * (D // 4) + r // (4 * RUN) % 8 * RUN + r % RUN
    at = tl.multiple_of(tl.max_contiguous(at, [1, RUN]), [1, RUN])
    v_words = _rows_of_warps(tl.load(tail_ptr + TOKENS * D // 4 + at), W)
    k_scale, v_scale = tl.load(scale_ptr), tl.load(scale_ptr + 1)
    # Behind these loads, so that all are on their way together.
    even, odd, inverse = _scaled_query(q_ptr, output, HEADS_PER_KV, HEADS, D)
    k = _bytes_as_halves(k_words ^ FLIP_SIGNS)
    k = tl.reshape(k, [W, T // 16, 2, D // 64, 8, 4, 4, 2, 2])
    k = tl.reshape(tl.permute(k, (0, 1, 2, 4, 3, 6, 5, 7, 8)), [W, T, D])
    q_words = tl.permute(tl.reshape(_pairs(even, odd), [4, TILES, 2, COLUMNS]), (1, 0, 2, 3))
    q = _from_pairs(tl.reshape(q_words, [D // 2, COLUMNS]), W, D)
    unbias = tl.sum(even + odd, 0) * (-128.0 * ULP)
    unbias = tl.broadcast_to(unbias[None, None, :], [W, T, COLUMNS])
    s = _of_heads(tl.dot(k, q, unbias), HEADS)
    unit = k_scale * (inverse * qk_scale) * (1.0 / ULP)
    valid = (tl.arange(0, W)[:, None] * T + tl.arange(0, T)[None, :] < tokens)[:, :, None]
    s = tl.where(valid, s * unit[None, None, :], NEVER)
    row_max = tl.max(s, 1)
    x = s - row_max[:, None, :]
    p = tl.where(valid, sas_exp2(x, cutoff) if SAS else tl.exp2(x), 0.0)
    p = _as_right_operand(p, W, T, HEADS)
    row_sum = _of_heads(tl.dot(tl.full([W, 16, T], 1.0, tl.float16), p), HEADS)

    v = _bytes_as_halves(v_words ^ FLIP_SIGNS)
    v = tl.reshape(v, [W, T // 16, 2, 2, 8, 4, RUN, 2, 2])
    v = tl.reshape(tl.permute(v, (0, 6, 7, 8, 4, 1, 2, 5, 3)), [W, D, T])
    o = _of_heads(tl.dot(_opaque(v), p), HEADS) * (1.0 / ULP) - 128.0 * _on_rows(row_sum, W, D)
    o = tl.reshape(tl.permute(tl.reshape(o, [W, TILES, 2, 8, HEADS]), (0, 3, 1, 2, 4)), [W, D, HEADS])
    return for_heads(row_max, W, HEADS), first_values(row_sum, o * v_scale, W, D, HEADS)
