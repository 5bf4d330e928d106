"""Device code of TurboQuant: the product of decode attention with V, O^T = V^T P^T, in INT8.

    o_c = sum_j p_j ratio_j (u_jc - 63.5)

u is the byte of a code (turboquant/codebook.py). The ratio of a token is a factor of its weight, before P is rounded to
16 bits. Bytes are levels + 63.5; `63.5 sum p ratio` is collected as the excess of all channels. The output stays in the
basis of the rotated values: W_o contains the rotation back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.expand_codes import expand_group
from alspec.kernels.attention.decode_quantised.lanes import P_SCALE, PV_UNIT, ROUND, p_operands, pv_mma, reduce_rows
from alspec.kernels.attention.decode_turboquant.turboquant_keys import code_table, token_ratios

__all__ = ["accumulate_tokens"]


@triton.jit
def accumulate_tokens(
    state,  # of `to_lane_state`, `empty_softmax` or this function
    p,  # weights relative to the largest of the block: (c, n), token 8 n + g
    alphas,  # for each c: factor of the values so far
    betas,  # for each c: factor of this block
    v_scale,  # [W]
    words,  # of `read_side`
    ratio_words,  # of `read_side`
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add a block's weights and weighted values to the state of an online softmax."""
    C: tl.constexpr = HEADS // 4
    N: tl.constexpr = D // 8
    ratios = token_ratios(ratio_words)
    integers, sums = (), ()
    for c in tl.static_range(C):
        total = p[8 * c]
        for n in tl.static_range(1, 8):
            total += p[8 * c + n]
        sums = sums + (reduce_rows(total, "add"),)  # noqa: RUF005 (Triton has no *)
        for n in tl.static_range(8):
            weight = p[8 * c + n] * ratios[n]
            integers = integers + ((weight * P_SCALE + ROUND).to(tl.int32, bitcast=True),)  # noqa: RUF005
    operands = p_operands(integers, C)
    ones = tl.full([W, 32], 0x01010101, tl.int32)
    weight_sums = pv_mma((ones, ones, ones, ones, ones, ones, ones, ones), operands, C)
    pv = ()
    for tile in tl.static_range(D // 16):
        pv = pv + (pv_mma(expand_group(words, tile, D // 16, BITS, code_table(BITS)), operands, C),)  # noqa: RUF005
    new_state = ()
    for c in tl.static_range(C):
        factor = betas[c] * (v_scale[:, None] * (1.0 / (P_SCALE * PV_UNIT)))
        old = state[c * (N + 2)] * alphas[c]
        new_state = new_state + (old + sums[c] * betas[c],)  # noqa: RUF005
        old = state[c * (N + 2) + 1] * alphas[c]
        new_state = new_state + (old + weight_sums[2 * c] * (factor * 63.5),)  # noqa: RUF005
        for n in tl.static_range(N):
            old = state[c * (N + 2) + 2 + n] * alphas[c]
            new_state = new_state + (old + pv[n // 2][2 * c + n % 2] * factor,)  # noqa: RUF005
    return new_state
