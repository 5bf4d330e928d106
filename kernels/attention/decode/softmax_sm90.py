"""Online softmax of lean decode attention on Hopper: its layouts, its state, and what it leaves of blocks.

See mainloop_sm90.py. Scores are [BLOCK_N, HEADS_PAD], outputs [D, HEADS_PAD], both in the layout of the matrix
instruction; D head_dim, padded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from alspec.kernels.attention.decode.tile_schedule import KV_BLOCK
from alspec.kernels.common.device import inverse_of_sum, log2_of_sum

__all__ = [
    "WARPS",
    "barrier",
    "finish_softmax",
    "init_softmax",
    "mma_layout",
    "partial_indices",
    "split_by_warp",
    "store_block_lse",
    "warp_values_layout",
]

WARPS = gl.constexpr(4)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


@gluon.constexpr_function
def mma_layout(columns):
    """Layout of both products, [64 n, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _column_bits(columns):
    """Register bases of the columns from 8 on."""
    return [[0, 2**i] for i in range(3, columns.bit_length() - 1)]


@gluon.constexpr_function
def warp_values_layout(columns):
    """Layout [4, columns] of one value per warp. Every warp holds all 4; lanes hold columns as in the MMA layout."""
    registers = [[0, 1], [1, 0], [2, 0], *_column_bits(columns)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, columns])


@gluon.constexpr_function
def _store_layout(d, columns, heads):
    """Layout [d, columns] in which a partial is stored.

    Like the MMA layout, but with up to 4 heads the padding columns 4 to 7 lie in registers. In lanes, they would leave
    lanes that store nothing, and the compiler would branch around each store.
    """
    lane, register = ([8, 0], [0, 4]) if heads <= 4 else ([0, 4], [8, 0])
    registers = [[0, 1], register, *_column_bits(columns), *([2**i, 0] for i in range(6, d.bit_length() - 1))]
    lanes = [[0, 2], lane, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [d, columns])


@gluon.jit
def init_softmax(BLOCK_N: gl.constexpr, HEADS_PAD: gl.constexpr, D: gl.constexpr):
    """Initial state of the online softmax: row_max [HEADS_PAD], weight_sums [BLOCK_N, HEADS_PAD], acc [D, HEADS_PAD].

    weight_sums adds up each token lane of the tiles by itself; `finish_softmax` adds up the lanes.
    """
    layout: gl.constexpr = mma_layout(HEADS_PAD)
    row_max = gl.full([HEADS_PAD], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    return row_max, gl.zeros([BLOCK_N, HEADS_PAD], gl.float32, layout), gl.zeros([D, HEADS_PAD], gl.float32, layout)


@gluon.jit
def split_by_warp(s):
    """View s [BLOCK_N, HEADS_PAD] as [BLOCK_N / 64, 4, 16, HEADS_PAD]. Each of 4 warps holds 16 of every 64 tokens."""
    return s.reshape([s.shape[0] // 64, 4, 16, s.shape[1]])


@gluon.jit
def finish_softmax(row_max, weight_sums, acc, warp_buffer, HEADS_PER_KV: gl.constexpr, ROWS: gl.constexpr):
    """Finish an online softmax: o [D, HEADS_PAD], normalised, and lse [HEADS_PAD], base 2, in the layout for the store.

    Args:
        warp_buffer: shared memory [4, HEADS_PAD]. A sum over the warps through it takes one barrier; `gl.sum` takes 2.
    """
    HEADS_PAD: gl.constexpr = acc.shape[1]
    warp_buffer.store(gl.sum(gl.sum(split_by_warp(weight_sums), 0), 1))
    barrier()
    weight_sums = gl.sum(warp_buffer.load(warp_values_layout(HEADS_PAD)), 0)
    weight_sums = gl.convert_layout(weight_sums, row_max.type.layout, assert_trivial=True)
    layout: gl.constexpr = _store_layout(acc.shape[0], HEADS_PAD, HEADS_PER_KV)
    o, lse = acc * inverse_of_sum(weight_sums)[None, :], row_max + log2_of_sum(weight_sums)
    if ROWS > 1:  # a row may see no token of these tiles
        o = gl.where((lse > float("-inf"))[None, :], o, 0.0)
    return gl.convert_layout(o, layout), gl.convert_layout(lse, gl.SliceLayout(0, layout))


@gluon.jit
def store_block_lse(p, row_max, block_lse, output, token, start, HEADS_PER_KV: gl.constexpr):
    """Store log2 of the sum of weights of every 16 tokens of a tile: those that a warp holds, so no warps exchange.

    Args:
        p: [BLOCK_N, HEADS_PAD], weights relative to row_max [HEADS_PAD].
        block_lse: (pointer of [outputs, NB, 4, HEADS_PER_KV] fp32, NB).
        token, start: own first token of the tile, and where it starts. Tokens between belong to an earlier tile.
    """
    sums = gl.sum(split_by_warp(p), 2)  # [BLOCK_N / 64, 4, HEADS_PAD]
    BLOCKS: gl.constexpr = sums.shape[0]
    layout: gl.constexpr = sums.type.layout
    blocks = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    warps = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    heads = gl.arange(0, sums.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row_max = gl.convert_layout(row_max, gl.SliceLayout(0, gl.SliceLayout(1, layout)), assert_trivial=True)
    block = start // KV_BLOCK + blocks
    offsets = ((output.to(gl.int64) * block_lse[1] + block) * 4 + warps) * HEADS_PER_KV + heads
    mask = (block * KV_BLOCK >= token) & (heads < HEADS_PER_KV) & (warps >= 0)
    gl.store(block_lse[0] + offsets, row_max[None, None, :] + log2_of_sum(sums), mask=mask)


@gluon.jit
def partial_indices(o):
    """Return (query heads [HEADS_PAD], channels [D]) of a partial o [D, HEADS_PAD], in its layout."""
    layout: gl.constexpr = o.type.layout
    heads = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, layout))
    return heads, gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, layout))
