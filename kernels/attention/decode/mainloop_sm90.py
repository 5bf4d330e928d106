"""Main loop of lean decode attention for one request on Hopper: K and V are loaded by TMA.

It computes what mainloop_sm80.py does, with the schedule and the terms of tile_schedule.py. Only the loads differ: one
TMA instruction copies K or V of a tile into shared memory. As soon as all warps have read a tile, the program issues
the copy of the tile STAGES later into the same buffer. So it always has the same number of bytes in flight. 64 KB per
SM keep the memory busy; with more in flight, later loads such as those of the predictor would wait longer.

A tile that would extend past the end of its tokens starts earlier instead, and ends there. So it never reads unused
memory, which may hold NaN. Tokens before the start of the cache are zeros, written by the copy. Tokens that repeat the
previous tile have weight 0. (If one of them is infinite, 0 * inf is NaN, but it has spoilt the output already.)

    S^T = K q^T,   O^T = V^T P^T

The 64 rows of a matrix instruction are tokens, then channels; its columns are 8 or 16 query heads.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from alspec.kernels.attention.decode.combine import send_spec, store_partial
from alspec.kernels.attention.decode.tile_schedule import (
    ALL,
    PAUSE,
    PREDICTOR,
    REST,
    build_schedule,
    count_tiles,
    head_of_tile,
    num_spec_parts,
    program_work,
    spec_block_n,
    spec_part_tokens,
    start_after,
    token_ranges,
    wait_head_start,
)
from alspec.kernels.common.device import inverse_of_sum, log2_of_sum
from alspec.kernels.common.pdl import spin_cycles

__all__ = ["lean_sm90_kernel"]

WARPS = gl.constexpr(4)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


@gluon.constexpr_function
def _mma_layout(rows):
    """Layout of both products, [64 n, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def _warp_values_layout(rows):
    """Layout [4, rows] of one value per warp: every warp holds all 4, its lanes the same columns as in a product."""
    registers = [[0, 1], [1, 0], [2, 0]] + ([[0, 8]] if rows == 16 else [])
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, rows])


@gluon.constexpr_function
def _store_layout(d, rows, heads):
    """Layout [d, rows] in which a partial is stored.

    It is the layout of the products, but with up to 4 heads the columns 4 to 7, which are padding, lie in registers. If
    they were in lanes, those lanes would store nothing, and the compiler would branch around each store.
    """
    lane, register = ([8, 0], [0, 4]) if heads <= 4 else ([0, 4], [8, 0])
    more_rows = [[0, 8]] if rows == 16 else []
    registers = [[0, 1], register, *more_rows, *([2**i, 0] for i in range(6, d.bit_length() - 1))]
    lanes = [[0, 2], lane, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [d, rows])


@gluon.jit
def _tile_start(cursor, BLOCK_N: gl.constexpr):
    """First token of the tile at a cursor (output, token, end): earlier than `token` if the tile would pass `end`."""
    return gl.minimum(cursor[1], cursor[2] - BLOCK_N)


@gluon.jit
def _advance(cursor, next_range, BLOCK_N: gl.constexpr):
    """The cursor (output, token, end) of the next tile; after `end` it continues with `next_range`.

    Args:
        next_range: (token, end, increment of the output).
    """
    output, token, end = cursor
    token += BLOCK_N
    crosses = token >= end
    output += gl.where(crosses, next_range[2], 0)
    return output, gl.where(crosses, next_range[0], token), gl.where(crosses, next_range[1], end)


@gluon.jit
def _stage_and_parity(tile, STAGES: gl.constexpr):
    """Buffer stage of a program's tile, and its barrier's parity. Unsigned arithmetic needs fewer instructions."""
    tile = tile.to(gl.uint32)
    return (tile % STAGES).to(gl.int32), (tile // STAGES).to(gl.int32) & 1


@gluon.jit
def _issue_copy(desc, bars, tiles, stage, cursor, enable):
    """Issue the TMA copy of the tile at a cursor, if `enable`. The loop must wait for every copy that is issued."""
    bar, start = bars.index(stage), _tile_start(cursor, tiles.shape[2])
    mbarrier.expect(bar, desc.block_type.nbytes, pred=enable)
    tma.async_copy_global_to_shared(desc, [cursor[0], start, 0], bar, tiles.index(stage), pred=enable)


@gluon.jit
def _load_query(
    q_ptr, output, HKV: gl.constexpr, ROWS: gl.constexpr, HEADS_PER_KV: gl.constexpr, D: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Load q [ROWS, D] of an output; padding is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    q_mask = (rows < HEADS_PER_KV) & (channels < HEAD_DIM) & (output < HKV)
    return gl.load(q_ptr + (output * HEADS_PER_KV + rows) * HEAD_DIM + channels, mask=q_mask, other=0.0)


@gluon.jit
def _store_query(q_tile, q):
    """Store q in shared memory for the products. The caller ensures that no warp still reads the previous q."""
    q_tile.store(q)
    fence_async_shared()
    _barrier()


@gluon.jit
def _init_softmax(BLOCK_N: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Initial state of the online softmax: row_max [ROWS], row_sum [BLOCK_N, ROWS] (kept per token), acc [D, ROWS]."""
    layout: gl.constexpr = _mma_layout(ROWS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    return row_max, gl.zeros([BLOCK_N, ROWS], gl.float32, layout), gl.zeros([D, ROWS], gl.float32, layout)


@gluon.jit
def _split_by_warp(s):
    """View s [BLOCK_N, ROWS] as [BLOCK_N / 64, 4, 16, ROWS]: each of the 4 warps holds 16 of every 64 tokens."""
    return s.reshape([s.shape[0] // 64, 4, 16, s.shape[1]])


@gluon.jit
def _finish_softmax(row_max, row_sum, acc, warp_buffer, HEADS_PER_KV: gl.constexpr):
    """Finish an online softmax: o [D, ROWS], normalised, and lse [ROWS], base 2, in the layout for the store.

    Args:
        warp_buffer: shared memory [4, ROWS]. Through it a sum over the warps takes one barrier; `gl.sum` takes two.
    """
    ROWS: gl.constexpr = acc.shape[1]
    warp_buffer.store(gl.sum(gl.sum(_split_by_warp(row_sum), 0), 1))
    _barrier()
    row_sum = gl.sum(warp_buffer.load(_warp_values_layout(ROWS)), 0)
    row_sum = gl.convert_layout(row_sum, row_max.type.layout, assert_trivial=True)
    layout: gl.constexpr = _store_layout(acc.shape[0], ROWS, HEADS_PER_KV)
    o, lse = acc * inverse_of_sum(row_sum)[None, :], row_max + log2_of_sum(row_sum)
    return gl.convert_layout(o, layout), gl.convert_layout(lse, gl.SliceLayout(0, layout))


@gluon.jit
def _partial_indices(o):
    """Return (query heads [ROWS], channels [D]) of a partial o [D, ROWS], in its layout."""
    layout: gl.constexpr = o.type.layout
    rows = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, layout))
    return rows, gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, layout))


@gluon.jit
def _issue_first_copies(streams, cursor, next_range, count, tiles_done, has_waited, AHEAD: gl.constexpr):
    """Issue the copies of the first tiles of a work item.

    With AHEAD, the first tile is issued before the wait for the previous kernel, which writes q and each head's newest
    token: only one tile, because q would arrive behind further tiles, and not a tile with the newest token.

    Args:
        count: tiles of the work item.
        has_waited: from `wait_head_start`; if True, PAUSE cycles pass after the first tile.
    Returns:
        Cursors of tile STAGES - 1, whose V the loop issues together with K of the next tile, and of tile STAGES.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    is_issued = False
    if AHEAD:
        is_issued = (count > 0) & (_tile_start(cursor, BLOCK_N) + BLOCK_N < cursor[2])
        _issue_copy(k_desc, k_bars, k_tiles, 0, cursor, is_issued)
        _issue_copy(v_desc, v_bars, v_tiles, 0, cursor, is_issued)
        gdc_wait()
    last_cursor = cursor
    for i in gl.static_range(STAGES):
        if i == 1 and has_waited is not None:
            if has_waited:
                spin_cycles(PAUSE)
        enable = i < count
        if AHEAD and i == 0:
            enable = enable & (is_issued == 0)
        stage, _ = _stage_and_parity(tiles_done + i, STAGES)
        _issue_copy(k_desc, k_bars, k_tiles, stage, cursor, enable)
        _issue_copy(v_desc, v_bars, v_tiles, stage, cursor, enable)
        last_cursor = cursor
        cursor = _advance(cursor, next_range, BLOCK_N)
    return last_cursor, cursor


@gluon.jit
def _attend_run(
    streams, q_ptr, q_tile, warp_buffer, cursor, next_range, count, tiles_done, o_ptr, lse_ptr, qk_scale, program,
    has_waited, HKV: gl.constexpr, HEADS_PER_KV: gl.constexpr, HEAD_DIM: gl.constexpr, IS_SPEC: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Online softmax over `count` tiles. The copies run ahead across the boundary from one output to the next.

    Args:
        streams: descriptors, tiles [STAGES, 1, BLOCK_N, D] and barriers [STAGES, 1], each of K and of V.
        cursor: (output, token, end) of the first tile.
        next_range: (token, end, increment of the output) of the tokens after `end`. The increment is 0 with IS_SPEC
            (same output); else it is 1, and the range is that of each further output.
        tiles_done: tiles that this program has loaded before; gives the stage and parity of the next tile.
        has_waited: as for `_issue_first_copies`.
    Returns:
        o [D, ROWS], normalised, and lse [ROWS], base 2, in the layout for the store, of the last output; and that
        output. The partials of earlier outputs are stored.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    ROWS: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], q_tile.dtype)
    p_tile = gl.allocate_shared_memory(q_tile.dtype, [ROWS, BLOCK_N], p_layout)
    _barrier()  # every warp sees the initialised barriers, and has read the previous contents of the buffers
    output, token, end = cursor
    if AHEAD:
        v_cursor, k_cursor = _issue_first_copies(streams, cursor, next_range, count, tiles_done, has_waited, AHEAD)
    # Load q before the tiles if it is ready. Also load q of the next output early, so that no run waits for it.
    q = _load_query(q_ptr, output, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
    if not IS_SPEC:
        next_q = _load_query(q_ptr, output + 1, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
    if not AHEAD:
        v_cursor, k_cursor = _issue_first_copies(streams, cursor, next_range, count, tiles_done, has_waited, AHEAD)
    _store_query(q_tile, q)
    zero_scores = gl.zeros([BLOCK_N, ROWS], gl.float32, _mma_layout(ROWS))
    offsets = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, zero_scores.type.layout))
    row_max, row_sum, acc = _init_softmax(BLOCK_N, ROWS, D)
    for i in range(count):
        if token >= end:
            token, end = next_range[0], next_range[1]
            if not IS_SPEC:
                o, lse = _finish_softmax(row_max, row_sum, acc, warp_buffer, HEADS_PER_KV)
                store_partial(o, lse, o_ptr, lse_ptr, program + output, *_partial_indices(o), HEADS_PER_KV)
                row_max, row_sum, acc = _init_softmax(BLOCK_N, ROWS, D)
                output += 1
                _store_query(q_tile, next_q)
                next_q = _load_query(q_ptr, output + 1, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
        stage, parity = _stage_and_parity(tiles_done + i, STAGES)
        mbarrier.wait(k_bars.index(stage), parity)
        k = k_tiles.index(stage).reshape([BLOCK_N, D])
        s = warpgroup_mma(k, q_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s]) * qk_scale
        # Mask the tokens that the previous tile has covered.
        own = offsets >= token - _tile_start((output, token, end), BLOCK_N)
        s = gl.where(own[:, None], s, float("-inf"))
        warp_buffer.store(gl.max(gl.max(_split_by_warp(s), 0), 1))
        _barrier()
        # Every warp has now read K of this tile and V of the previous one, so both buffers can be refilled.
        last_stage, _ = _stage_and_parity(stage + STAGES - 1, STAGES)
        _issue_copy(v_desc, v_bars, v_tiles, last_stage, v_cursor, (i > 0) & (i + STAGES <= count))
        _issue_copy(k_desc, k_bars, k_tiles, stage, k_cursor, i + STAGES < count)
        v_cursor, k_cursor = k_cursor, _advance(k_cursor, next_range, BLOCK_N)
        tile_max = gl.max(warp_buffer.load(_warp_values_layout(ROWS)), 0)
        new_max = gl.maximum(row_max, gl.convert_layout(tile_max, row_max.type.layout, assert_trivial=True))
        p = gl.exp2(s - new_max[None, :])
        alpha = gl.exp2(row_max - new_max)
        row_max, row_sum = new_max, row_sum * alpha[None, :] + p
        p_tile.permute((1, 0)).store(p.to(p_tile.dtype))
        fence_async_shared()
        _barrier()
        mbarrier.wait(v_bars.index(stage), parity)
        v = v_tiles.index(stage).reshape([BLOCK_N, D])
        acc = warpgroup_mma(v.permute((1, 0)), p_tile.permute((1, 0)), acc * alpha[None, :], is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        token += BLOCK_N
    o, lse = _finish_softmax(row_max, row_sum, acc, warp_buffer, HEADS_PER_KV)
    return o, lse, output


# Not specialised: a size of 1 would become a constant, which cannot be passed to other functions.
@gluon.jit(do_not_specialize=["num_requests", "chunk_size"])
def lean_sm90_kernel(
    q_ptr, k_desc, v_desc, k_long, v_long, seq_lens_ptr, spec_out_ptr, spec_lse_ptr, epoch_ptr,
    o_partial_ptr, lse_partial_ptr, gate_ptr, num_requests, chunk_size, qk_scale, HKV: gl.constexpr,
    HEADS_PER_KV: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr, BLOCK_N: gl.constexpr, LONG: gl.constexpr, STAGES: gl.constexpr, SPEC: gl.constexpr,
    SPEC_PARTS: gl.constexpr, PHASE: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Write the partials of one request, and with speculation `A~`. Grid [PROGRAMS].

    Arguments as for `lean_decode_kernel`, except that K and V are TMA descriptors of [Hkv, capacity, head_dim]:
    k_desc, v_desc with tiles of BLOCK_N tokens; k_long, v_long with tiles of 2 BLOCK_N (BLOCK_N if LONG is 0).
    """
    # Short tiles use half of the buffer of a long tile.
    k_buffers = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_long.block_shape, k_long.layout)  # noqa: RUF005
    v_buffers = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_long.block_shape, k_long.layout)  # noqa: RUF005
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(stage), count=1)
        mbarrier.init(v_bars.index(stage), count=1)
    fence_async_shared()
    k_tiles = k_buffers._reinterpret(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_tiles = v_buffers._reinterpret(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    streams = (k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars)
    long_streams = (k_long, v_long, k_buffers, v_buffers, k_bars, v_bars)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_desc.dtype)
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], q_layout)
    warp_buffer = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    AHEAD: gl.constexpr = EARLY and not SPEC and gate_ptr is None
    if PDL and not EARLY:
        start_after(False)
    seq_len = gl.load(seq_lens_ptr)
    if PDL and EARLY:
        start_after(AHEAD)
    if gate_ptr is not None:
        if gl.load(gate_ptr) == 0:
            return

    # 1. Values that depend on the length alone.
    program = gl.program_id(0)
    epoch = None
    if epoch_ptr is not None:
        epoch = gl.load(epoch_ptr)  # loaded here, to arrive together with the length
    sink, window = token_ranges(seq_len, chunk_size, SPEC)
    lengths = gl.full([1], seq_len, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    num_spec = 0

    tiles_done = program * 0
    if SPEC and PHASE != REST:
        # 2. Spec items, before the schedule, which they do not need. Each is sent before the next one begins.
        SPEC_N: gl.constexpr = spec_block_n(BLOCK_N, LONG)
        sinks, windows = token_ranges(lengths, chunk_size, SPEC)
        parts = num_spec_parts(sinks, lengths - windows, chunk_size, SPEC_N, SPEC_PARTS)
        num_spec = HKV * parts
        # No hoisting of loop invariants: before the loop they would delay the first copy.
        for spec_index in tl.range(program, num_spec, PROGRAMS, disable_licm=True):
            part = (spec_index.to(gl.uint32) // HKV).to(gl.int32)
            output = spec_index - part * HKV
            first, end, count = spec_part_tokens(part, sink, window, seq_len, chunk_size, SPEC_N, SPEC_PARTS)
            o, lse, _ = _attend_run(
                long_streams if SPEC_N > BLOCK_N else streams, q_ptr, q_tile, warp_buffer, (output, first, end),
                (window, seq_len, 0), count, tiles_done, o_partial_ptr, lse_partial_ptr, qk_scale, program, None, HKV,
                HEADS_PER_KV, HEAD_DIM, True, False,
            )  # fmt: skip
            tiles_done += count
            indices = _partial_indices(o)
            send_spec(
                o, lse, output, part, parts, HKV * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch, *indices,
                HEADS_PER_KV, HEAD_DIM, SPEC_PARTS,
            )  # fmt: skip
            partial_index = PROGRAMS + HKV + output * SPEC_PARTS + part
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, partial_index, *indices, HEADS_PER_KV)

    if PHASE != PREDICTOR:
        # 3. The run of this program. `_attend_run` stores the partials of all outputs but the last.
        is_long, _, total_rest, _, leaders, lead_run, followers, run, longer = build_schedule(
            lengths, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
        )
        tile, last, num_spec_items, _ = program_work(
            program, num_spec, leaders, lead_run, followers, run, longer, PROGRAMS, SPEC, PHASE
        )
        if SPEC and PHASE == ALL:
            if (num_spec_items > 0) & (tile >= last):
                return
        has_waited = wait_head_start(
            program, 0, num_spec, total_rest, is_long, BLOCK_N, D, PROGRAMS, SPEC, PHASE, PDL
        )  # fmt: skip
        rest = count_tiles(window - sink, is_long, BLOCK_N)
        head = head_of_tile(tile, rest, HKV)
        begin = sink + (tile - head * rest) * gl.where(is_long, 2 * BLOCK_N, BLOCK_N)
        args = (
            q_ptr, q_tile, warp_buffer, (head, begin, window), (sink, window, 1), last - tile, tiles_done,
            o_partial_ptr, lse_partial_ptr, qk_scale, program,
        )  # fmt: skip
        if LONG > 0 and is_long:
            o, lse, output = _attend_run(long_streams, *args, has_waited, HKV, HEADS_PER_KV, HEAD_DIM, False, AHEAD)
        else:
            o, lse, output = _attend_run(streams, *args, has_waited, HKV, HEADS_PER_KV, HEAD_DIM, False, AHEAD)
        if tile < last:
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, program + output, *_partial_indices(o), HEADS_PER_KV)
