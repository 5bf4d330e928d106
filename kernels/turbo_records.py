"""How words of records come from memory to the registers of a warp: device code of decode over a quantised cache.

A step takes W blocks, one for each warp. The order of a record's words (flashq_layout.py) is that of a warp's operands:
so words go from memory into the registers where they are used, without shared memory, a barrier or the predicates and
addresses of asynchronous copies, which had taken a quarter of a step. What hides memory's latency is that a step's V is
loaded before its K is used, the next step's K while V is, and that parts of steps after it are on their way to the L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .prefetch import prefetch, prefetch_by_warp, prefetch_lines
from .words import INTERPRETED

__all__ = ["end_of_basic_block", "load_k", "load_scales", "load_v", "prefetch_blocks", "prefetch_step", "rows_of_warps"]

LANE_WORDS = tl.constexpr(128)  # of a warp's load: four for each lane


@triton.jit
def rows_of_warps(x, W: tl.constexpr):
    """[N W, M], rows of the warps by turns -> [W, N M].

    A tensor of 128 words in a row is loaded 16 bytes by each lane, and a row is of one warp: so each has its own block.
    """
    N: tl.constexpr = x.shape[0] // W
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N, W, M]), (1, 0, 2)), [W, N * M])


@triton.jit
def _block_of(step, warps, blocks, W: tl.constexpr):
    """The block of each warp in a step, the last one again beyond the end.

    `blocks` are (first, split, second, count): [first, first + split), then those from `second` on; `count` of both.
    """
    index = tl.minimum(step * W + warps, blocks[3] - 1)
    gap = blocks[2] - blocks[0] - blocks[1]
    return blocks[0] + index + tl.minimum(tl.maximum(index - blocks[1] + 1, 0), 1) * gap


@triton.jit
def _load_rows(records_ptr, step, blocks, row_size, places, W: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr):
    """N rows of words for each warp, [W, N M]: `places` [M] in each of them, `row_size` words apart."""
    rows = tl.arange(0, N * W)
    block = _block_of(step, rows % W, blocks, W).to(tl.int64)
    # Constants come last, so that they become offsets in the instructions.
    at = (records_ptr + block * STRIDE)[:, None] + places[None, :]
    return rows_of_warps(tl.load(at + (rows // W * row_size)[:, None]), W)


@triton.jit
def load_k(records_ptr, step, blocks, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """K of a step, int32: codes [W, 2 D BITS], and of `s_int` and `z` [W, 2 D] the words of a lane's channels.

    Those are the same for all g of a lane (g, t), [D / 64][g][t][4]: for each column of q, or row of an operand.
    """
    CODES: tl.constexpr = 2 * D * BITS
    STRIDE: tl.constexpr = 2 * CODES + D
    TILES: tl.constexpr = D // 16
    r = tl.arange(0, LANE_WORDS)
    words = _load_rows(records_ptr, step, blocks, LANE_WORDS, r, W, CODES // LANE_WORDS, STRIDE)
    places = tl.multiple_of(tl.max_contiguous(r // 4 % 4 * TILES + r % 4, [4]), [4])
    s_int = _load_rows(records_ptr + 2 * CODES, step, blocks, 4, places, W, TILES // 4, STRIDE)
    z = _load_rows(records_ptr + (2 * CODES + D // 4), step, blocks, 4, places, W, TILES // 4, STRIDE)
    return words, s_int, z


@triton.jit
def load_v(records_ptr, step, blocks, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """V of a step, int32: codes [W, 2 D BITS], and of `s_int` and `z` [W, D] the words of a lane's rows.

    Those are the same for all t, [g][t][D / 32]: for each column of an output.
    """
    CODES: tl.constexpr = 2 * D * BITS
    STRIDE: tl.constexpr = 2 * CODES + D
    RUN: tl.constexpr = D // 32
    r = tl.arange(0, LANE_WORDS)
    words = _load_rows(records_ptr + CODES, step, blocks, LANE_WORDS, r, W, CODES // LANE_WORDS, STRIDE)
    r = tl.arange(0, D)
    places = tl.multiple_of(tl.max_contiguous(r // (4 * RUN) * RUN + r % RUN, [RUN]), [RUN])
    params = _load_rows(records_ptr + (2 * CODES + D // 2), step, blocks, D // 4, places, W, 2, STRIDE)
    s_int, z = tl.split(tl.permute(tl.reshape(params, [W, 2, D]), (0, 2, 1)))
    return words, s_int, z


@triton.jit
def load_scales(scales_ptr, step, blocks, W: tl.constexpr):
    """The scales of K and of V of a step's blocks, [W] each."""
    block = _block_of(step, tl.arange(0, W), blocks, W)
    return tl.load(scales_ptr + block * 2), tl.load(scales_ptr + block * 2 + 1)


@triton.jit
def prefetch_blocks(records_ptr, scales_ptr, first, count, is_low, D: tl.constexpr):
    """Fetch `count` records from `first` on, and the scales of the first few, into the L2."""
    if count > 0:
        words = tl.where(is_low, 9 * D, 17 * D)
        prefetch(records_ptr + first.to(tl.int64) * words, count * words * 4)
        prefetch(scales_ptr + first * 2, 16)


@triton.jit
def prefetch_step(records_ptr, step, blocks, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BULK: tl.constexpr):
    """Send something of the steps ahead on its way to the L2: what measured best.

    Of 4-bit records the first warp's in the next step, by one instruction (BULK, from compute capability 9.0 on); each
    warp's own, or none, is slower. Otherwise all lines of a step: of the next one, of 2-bit records of the one after.
    """
    STRIDE: tl.constexpr = 4 * D * BITS + D
    AHEAD: tl.constexpr = 1 if BITS == 4 else 2
    if BULK and BITS == 4:
        # Of W values the first lane of every warp has the first, so all of them ask for that record: it costs nothing,
        # and the assembler then keeps loads where they are. Asked for by one thread alone, a launch took 28 % longer.
        warps = tl.arange(0, W)
        block = _block_of(step + AHEAD, warps, blocks, W).to(tl.int64)
        size = tl.where((step + AHEAD) * W + warps < blocks[3], STRIDE * 4, 0)
        prefetch_by_warp(records_ptr + block * STRIDE, size)
    else:
        rows = tl.arange(0, W * D * BITS // 128)
        block = _block_of(step + AHEAD, rows % W, blocks, W).to(tl.int64)
        line = tl.minimum((rows // W * 32)[:, None] + tl.arange(0, 32)[None, :], STRIDE // 32 - 1)
        prefetch_lines((records_ptr + block * STRIDE)[:, None] + line * 32)


@triton.jit
def end_of_basic_block(step):
    """Keep loads above from what is below, where the assembler would put them: an exit that no program takes.

    Loads that cross it share one scoreboard, which is waited for once in a step. `step` is not negative.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred never; setp.lt.s32 never, $1, 0; @never exit; mov.u32 $0, 0; }",
            "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
