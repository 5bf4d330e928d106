"""Device code of TurboQuant: the product of decode attention with K, S^T = K q^T, in INT8.

    s_j = ratio_j sum_c n_c (u_jc - 63.5)

u is the byte of a code (turboquant/codebook.py); q is rotated like the keys, in lanes, once for a work item, and has 16
bits, n = 256 h + l, both bytes signed, as separate columns (see lanes.py). `63.5 sum n` is the same for all tokens. The
accumulators start high enough that sums are positive integers below 2^24. Read as floats they are n 2^-149;
multiplications take them as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.expand_codes import expand_group
from alspec.kernels.attention.decode_quantised.lanes import hi_lo_operands, mma_m16n8k32, reduce_rows
from alspec.kernels.attention.decode_quantised.query import (
    MAGIC,
    MAGIC_BITS,
    ULP,
    await_query,
    load_query_head,
    relative_to_max,
)
from alspec.kernels.common.device import INTERPRETED
from alspec.kernels.kv_codec.turboquant.codebook import code_bytes
from alspec.kernels.kv_codec.turboquant.rotation import SIGN_BITS

__all__ = ["code_table", "prepare_rotated_query", "scale_rotated_query", "token_ratios", "token_scores"]

MAX_N = tl.constexpr(32500.0)  # n of the largest |q|
START = tl.constexpr(2**21)  # initial accumulator; more than 127 127 128
UNIT = tl.constexpr(2.0**-30)  # score of n 1 and u 1


@triton.constexpr_function
def code_table(bits):
    """TABLE of `expand_group`."""
    return code_bytes(bits)[8:] if bits == 4 else code_bytes(bits)


@triton.constexpr_function
def _sign_byte(n):
    """Sign bits of the channels 8 n .. 8 n + 7."""
    return SIGN_BITS >> (8 * n) & 255


@triton.jit
def _exchange_lanes(x, DISTANCE: tl.constexpr):
    """x of the lane whose number differs by DISTANCE, a power of two."""
    if INTERPRETED:
        W: tl.constexpr = x.shape[0]
        low, high = tl.split(tl.permute(tl.reshape(x, [W, 16 // DISTANCE, 2, DISTANCE]), (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(high, low), (0, 1, 3, 2)), [W, 32])
    else:
        x = tl.inline_asm_elementwise(
            f"shfl.sync.bfly.b32 $0, $1, {DISTANCE}, 31, -1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def _rotate(values, W: tl.constexpr, D: tl.constexpr):
    """Multiply by `signed_hadamard`: D / 8 values of the channels 8 n + g in each lane."""
    N: tl.constexpr = D // 8
    g = tl.arange(0, 32)[None, :] // 4 + tl.zeros([W, 32], tl.int32)
    x = ()
    for n in tl.static_range(N):
        flipped = (values[n].to(tl.int32, bitcast=True) ^ ((_sign_byte(n) >> g) << 31)).to(tl.float32, bitcast=True)
        x = x + (flipped,)  # noqa: RUF005 (Triton has no *)
    for bit in tl.static_range(3):  # of g
        sign = tl.where((g >> bit) & 1 == 0, 1.0, -1.0)
        y = ()
        for n in tl.static_range(N):
            y = y + (x[n] * sign + _exchange_lanes(x[n], 4 << bit),)  # noqa: RUF005
        x = y
    for bit in tl.static_range(4 if N == 16 else 3):  # of n
        y = ()
        for n in tl.static_range(N):
            if (n >> bit) % 2 == 0:  # noqa: SIM108
                y = y + (x[n] + x[n + (1 << bit)],)  # noqa: RUF005
            else:
                y = y + (x[n - (1 << bit)] - x[n],)  # noqa: RUF005
        x = y
    return x


@triton.jit
def prepare_rotated_query(
    source, buffers, parity, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, BULK_Q: tl.constexpr,
):  # fmt: skip
    """Load the query heads of an output in lanes, rotated, as 16-bit integers relative to the largest |q| of each head.

    Returns, each except `operands` for each c:
        q_max: largest |q| after `signed_hadamard`; NaN if a q is NaN.
        operands: B operands of `hi_lo_operands`, channel tile by channel tile; rows 2 g + i are channels 8 i + g.
        excess: excess of the scores, because bytes are levels + 63.5 and because of the initial accumulator.
    """
    C: tl.constexpr = HEADS // 4
    TILES: tl.constexpr = D // 16
    q_address = 0
    if BULK_Q:
        q_address = await_query(buffers, parity, W, D)
    q_max, integers, excess = (), (), ()
    for c in tl.static_range(C):
        values, _ = load_query_head(source, q_address, c, HEADS_PER_KV, HEADS, TOGETHER, W, D, BULK_Q)
        x = _rotate(values, W, D)
        head_max, factor = relative_to_max(x, D)
        q_max = q_max + (head_max,)  # noqa: RUF005
        n, total = (), tl.zeros([W, 32], tl.int32)
        for i in tl.static_range(D // 8):
            y = (x[i] * (factor * (MAX_N * ULP)) + MAGIC).to(tl.int32, bitcast=True)
            n = n + (y,)  # noqa: RUF005
            total += y - MAGIC_BITS
        integers = integers + (n,)  # noqa: RUF005
        sum_n = reduce_rows(total.to(tl.float32), "add")
        excess = excess + ((sum_n * 63.5 + 257.0 * START) * UNIT,)  # noqa: RUF005
    operands = ()
    for tile in tl.static_range(TILES):
        a, b = (), ()
        for c in tl.static_range(C):
            a, b = a + (integers[c][2 * tile],), b + (integers[c][2 * tile + 1],)  # noqa: RUF005
        operands = operands + hi_lo_operands(a, b, C)
    return q_max, operands, excess


@triton.jit
def scale_rotated_query(query, qk_scale, D: tl.constexpr, C: tl.constexpr):
    """Factor of the scores for each c; query: of `prepare_rotated_query`."""
    scales = ()
    for c in tl.static_range(C):
        scales = scales + (query[0][c] * qk_scale * (D**-0.5 / MAX_N / UNIT),)  # noqa: RUF005 (Triton has no *)
    return scales


@triton.jit
def token_ratios(words):
    """Unpack four words of fp16 ratios to fp32: of the tokens 8 n + g, for each n."""
    ratios = ()
    for i in tl.static_range(4):
        if INTERPRETED:
            low = (words[i] & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (words[i] >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            low, high = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
                "=f,=f,r", [words[i]], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        ratios = ratios + (low, high)  # noqa: RUF005 (Triton has no *)
    return ratios


@triton.jit
def _score(high, low, excess):
    """UNIT (256 high + low) - excess, for integers below 2^24."""
    if INTERPRETED:
        x = ((high.to(tl.float64) * 256 + low) * UNIT - excess).to(tl.float32)
    else:
        # The integers, read as floats, are n 2^-149: multiply by 2^127 and 2^119. The excess is larger than the
        # result, so it is subtracted first.
        x = tl.inline_asm_elementwise(
            "{ .reg .f32 u; neg.f32 u, $3; fma.rn.f32 u, $1, 0f7F000000, u; fma.rn.f32 $0, $2, 0f7B000000, u; }",
            "=f,r,r,f", [high, low, excess], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def token_scores(query, words, ratio_words, D: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Compute the scores of a block, without the factor of `scale_rotated_query` and the scale of K.

    Args:
        query: of `prepare_rotated_query`.  words, ratio_words: of `read_side`.
    Returns:
        For each c: the scores of the tokens 8 n + g, for each n.
    """
    GROUPS: tl.constexpr = D // 16
    ratios = token_ratios(ratio_words)
    tiles = ()
    for token_tile in tl.static_range(4):
        left = ()
        for part in tl.static_range(D // 64):
            group = expand_group(words, token_tile * (D // 64) + part, GROUPS, BITS, code_table(BITS))
            left = left + group
        products = ()
        for c in tl.static_range(C):
            right = ()
            for tile in tl.static_range(D // 16):
                right = right + (query[1][C * tile + c],)  # noqa: RUF005 (Triton has no *)
            products = products + (mma_m16n8k32(left, right, D // 32, True, START),)  # noqa: RUF005
        for row in tl.static_range(2):
            ratio = ratios[2 * token_tile + row]
            x = products[0]
            if C == 1:
                y = (_score(x[2 * row], x[2 * row + 1], query[2][0]) * ratio,)
            else:
                z = products[1]
                y = (
                    _score(x[2 * row], z[2 * row], query[2][0]) * ratio,
                    _score(x[2 * row + 1], z[2 * row + 1], query[2][1]) * ratio,
                )
            tiles = tiles + (y,)  # noqa: RUF005
    scores = ()
    for c in tl.static_range(C):
        x = ()
        for n in tl.static_range(8):
            x = x + (tiles[n][c],)  # noqa: RUF005
        scores = scores + (x,)  # noqa: RUF005
    return scores
