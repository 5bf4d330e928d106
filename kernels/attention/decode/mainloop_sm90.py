"""Lean decode attention of one request on Hopper: the launch of mainloop_sm80.py with its own way of streaming.

Schedule, turns and slots are those of tile_schedule.py, whose terms are used here. What differs is how tiles
come: one instruction (TMA) copies K or V of a tile into shared memory, and as soon as the tile has been read, the one
that is STAGES further on is on its way to the same place. So a program always has the same bytes on their way, and few
are enough: with 64 KB on each SM memory is busy, and what is asked for next, such as a guess, waits for less.

A tile that reaches beyond the end of its tokens begins earlier instead, so that it ends there: unused memory, which may
hold NaN, is never read. Tokens before its beginning count as zeros, which the copy writes. Tokens that it
repeats have weights of 0. (An infinite value of theirs becomes NaN by that, but has spoilt the output in its own tile.)

    S^T = K q^T,   O^T = V^T P^T

Tokens, then channels, are the 64 rows of a matrix instruction; 8 or 16 query heads are its columns.
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
    deal,
    give_head_start,
    head_of,
    parts_of_spec,
    spec_tile,
    start_after,
    tiles_in,
    token_ranges,
    tokens_of_spec_part,
)
from alspec.kernels.common.device import inverse_of_sum, log2_of_sum
from alspec.kernels.common.pdl import spin_cycles

__all__ = ["lean_sm90_kernel"]

WARPS = gl.constexpr(4)
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


@gluon.constexpr_function
def _products(rows):
    """Layout of both products, [64 n, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def _of_all_warps(rows):
    """Layout [4, rows] of what four warps have found: every warp has all of it, lanes have the columns of a product."""
    registers = [[0, 1], [1, 0], [2, 0]] + ([[0, 8]] if rows == 16 else [])
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [4, rows])


@gluon.constexpr_function
def _stored(d, rows, heads):
    """Layout [d, rows] in which a partial is stored: the products', but rows 4 to 7, where all are beyond `heads`, lie
    in registers. Left in lanes that store nothing, they would have the compiler jump over each store."""
    lane, register = ([8, 0], [0, 4]) if heads <= 4 else ([0, 4], [8, 0])
    more_rows = [[0, 8]] if rows == 16 else []
    registers = [[0, 1], register, *more_rows, *([2**i, 0] for i in range(6, d.bit_length() - 1))]
    lanes = [[0, 2], lane, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [d, rows])


@gluon.jit
def _begin_of(place, BLOCK_N: gl.constexpr):
    """Where the tile begins that holds tokens from the place's on, up to its end."""
    return gl.minimum(place[1], place[2] - BLOCK_N)


@gluon.jit
def _after(place, follow, BLOCK_N: gl.constexpr):
    """The place of the next tile; place: (output, token, end).  follow: (token, end, step to the output) behind it."""
    output, token, end = place
    token += BLOCK_N
    crosses = token >= end
    output += gl.where(crosses, follow[2], 0)
    return output, gl.where(crosses, follow[0], token), gl.where(crosses, follow[1], end)


@gluon.jit
def _slot(tile, STAGES: gl.constexpr):
    """Stage in which a program's tile lies, and parity of how often that was used. Unsigned, by fewer instructions."""
    tile = tile.to(gl.uint32)
    return (tile % STAGES).to(gl.int32), (tile // STAGES).to(gl.int32) & 1


@gluon.jit
def _send(desc, bars, tiles, stage, place, goes):
    """Ask for the tile of a place; each request has to be awaited."""
    bar, start = bars.index(stage), _begin_of(place, tiles.shape[2])
    mbarrier.expect(bar, desc.block_type.nbytes, pred=goes)
    tma.async_copy_global_to_shared(desc, [place[0], start, 0], bar, tiles.index(stage), pred=goes)


@gluon.jit
def _load_query(
    q_ptr, output, HKV: gl.constexpr, ROWS: gl.constexpr, HEADS_PER_KV: gl.constexpr, D: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """q [ROWS, D] of an output, zeros where there is none."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    exists = (rows < HEADS_PER_KV) & (channels < HEAD_DIM) & (output < HKV)
    return gl.load(q_ptr + (output * HEADS_PER_KV + rows) * HEAD_DIM + channels, mask=exists, other=0.0)


@gluon.jit
def _store_query(q_tile, q):
    """Let products read q, once no warp forms one with what was there."""
    q_tile.store(q)
    fence_async_shared()
    _barrier()


@gluon.jit
def _no_tokens(BLOCK_N: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """The online softmax of no tokens: maximum [ROWS], sums of each place in a tile [BLOCK_N, ROWS], o [D, ROWS]."""
    layout: gl.constexpr = _products(ROWS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
    return row_max, gl.zeros([BLOCK_N, ROWS], gl.float32, layout), gl.zeros([D, ROWS], gl.float32, layout)


@gluon.jit
def _by_warps(s):
    """s [BLOCK_N, ROWS] as [BLOCK_N / 64, 4, 16, ROWS]: each of the 4 warps has 16 of every 64 tokens."""
    return s.reshape([s.shape[0] // 64, 4, 16, s.shape[1]])


@gluon.jit
def _partial(row_max, row_sum, acc, warp_max, HEADS_PER_KV: gl.constexpr):
    """The end of an online softmax: o [D, ROWS], normalised, and lse [ROWS], base 2, in the layout to store them in.

    warp_max: shared memory [4, ROWS]. By it a sum crosses the warps behind one barrier; by `gl.sum` behind two.
    """
    ROWS: gl.constexpr = acc.shape[1]
    warp_max.store(gl.sum(gl.sum(_by_warps(row_sum), 0), 1))
    _barrier()
    row_sum = gl.sum(warp_max.load(_of_all_warps(ROWS)), 0)
    row_sum = gl.convert_layout(row_sum, row_max.type.layout, assert_trivial=True)
    layout: gl.constexpr = _stored(acc.shape[0], ROWS, HEADS_PER_KV)
    o, lse = acc * inverse_of_sum(row_sum)[None, :], row_max + log2_of_sum(row_sum)
    return gl.convert_layout(o, layout), gl.convert_layout(lse, gl.SliceLayout(0, layout))


@gluon.jit
def _numbers_of(o):
    """Numbers of the columns and of the rows of o [D, ROWS], in its layout."""
    layout: gl.constexpr = o.type.layout
    rows = gl.arange(0, o.shape[1], layout=gl.SliceLayout(0, layout))
    return rows, gl.arange(0, o.shape[0], layout=gl.SliceLayout(1, layout))


@gluon.jit
def _send_first(streams, place, follow, count, done, pauses, AHEAD: gl.constexpr):
    """Ask for the first tiles of a turn; count: how many it has.  pauses: whether PAUSE lies behind the first; or None.

    With AHEAD, one of them while the kernel ahead ends, which writes q and each head's newest token: one only, for q
    would come behind more, and not one with that token.

    Returns:
        Tile STAGES - 1, whose V is asked for when K of the next one is, and tile STAGES.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    sent = False
    if AHEAD:
        sent = (count > 0) & (_begin_of(place, BLOCK_N) + BLOCK_N < place[2])
        _send(k_desc, k_bars, k_tiles, 0, place, sent)
        _send(v_desc, v_bars, v_tiles, 0, place, sent)
        gdc_wait()
    before = place
    for i in gl.static_range(STAGES):
        if i == 1 and pauses is not None:
            if pauses:
                spin_cycles(PAUSE)
        goes = i < count
        if AHEAD and i == 0:
            goes = goes & (sent == 0)
        stage, _ = _slot(done + i, STAGES)
        _send(k_desc, k_bars, k_tiles, stage, place, goes)
        _send(v_desc, v_bars, v_tiles, stage, place, goes)
        before = place
        place = _after(place, follow, BLOCK_N)
    return before, place


@gluon.jit
def _attend_run(
    streams, q_ptr, q_tile, warp_max, place, follow, count, done, o_ptr, lse_ptr, qk_scale, program, pauses,
    HKV: gl.constexpr, HEADS_PER_KV: gl.constexpr, HEAD_DIM: gl.constexpr, IS_SPEC: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Online softmax over `count` tiles, whose copies run ahead from one output into the next.

    Args:
        streams: descriptors, tiles [STAGES, 1, BLOCK_N, D] and barriers [STAGES, 1] of K and of V.
        place: (output, token, end) of the first tile.  follow: (token, end, step) of what comes behind `end`: with
            GUESS of the same output, by a step of 0, else of each output that follows.
        done: tiles of this program so far: they say where in the slots the next one lies.
        pauses: as for `_send_first`.
    Returns:
        o [D, ROWS], normalised, and lse [ROWS], base 2, as partials are stored, and the last output. Partials of those
        before are stored.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    ROWS: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_N], q_tile.dtype)
    p_tile = gl.allocate_shared_memory(q_tile.dtype, [ROWS, BLOCK_N], p_layout)
    _barrier()  # every warp sees the barriers, and has read what lay in the slots
    output, token, end = place
    if AHEAD:
        before, ahead = _send_first(streams, place, follow, count, done, pauses, AHEAD)
    # Ahead of the tiles, if q is there already, and so is that of the next output: it is not waited for in a run.
    q = _load_query(q_ptr, output, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
    if not IS_SPEC:
        next_q = _load_query(q_ptr, output + 1, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
    if not AHEAD:
        before, ahead = _send_first(streams, place, follow, count, done, pauses, AHEAD)
    _store_query(q_tile, q)
    none = gl.zeros([BLOCK_N, ROWS], gl.float32, _products(ROWS))
    offsets = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, none.type.layout))
    row_max, row_sum, acc = _no_tokens(BLOCK_N, ROWS, D)
    for i in range(count):
        if token >= end:
            token, end = follow[0], follow[1]
            if not IS_SPEC:
                o, lse = _partial(row_max, row_sum, acc, warp_max, HEADS_PER_KV)
                store_partial(o, lse, o_ptr, lse_ptr, program + output, *_numbers_of(o), HEADS_PER_KV)
                row_max, row_sum, acc = _no_tokens(BLOCK_N, ROWS, D)
                output += 1
                _store_query(q_tile, next_q)
                next_q = _load_query(q_ptr, output + 1, HKV, ROWS, HEADS_PER_KV, D, HEAD_DIM)
        stage, parity = _slot(done + i, STAGES)
        mbarrier.wait(k_bars.index(stage), parity)
        k = k_tiles.index(stage).reshape([BLOCK_N, D])
        s = warpgroup_mma(k, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s]) * qk_scale
        # Tokens before the tile's own were in the tile before.
        own = offsets >= token - _begin_of((output, token, end), BLOCK_N)
        s = gl.where(own[:, None], s, float("-inf"))
        warp_max.store(gl.max(gl.max(_by_warps(s), 0), 1))
        _barrier()
        # Every warp has read K of this tile, and V of the one before.
        last_stage, _ = _slot(stage + STAGES - 1, STAGES)
        _send(v_desc, v_bars, v_tiles, last_stage, before, (i > 0) & (i + STAGES <= count))
        _send(k_desc, k_bars, k_tiles, stage, ahead, i + STAGES < count)
        before, ahead = ahead, _after(ahead, follow, BLOCK_N)
        largest = gl.max(warp_max.load(_of_all_warps(ROWS)), 0)
        new_max = gl.maximum(row_max, gl.convert_layout(largest, row_max.type.layout, assert_trivial=True))
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
    o, lse = _partial(row_max, row_sum, acc, warp_max, HEADS_PER_KV)
    return o, lse, output


# Specialised, a size of 1 would be a constant, which cannot be passed on.
@gluon.jit(do_not_specialize=["num_requests", "chunk_size"])
def lean_sm90_kernel(
    q_ptr, k_desc, v_desc, k_long, v_long, seq_lens_ptr, spec_out_ptr, spec_lse_ptr, epoch_ptr,
    o_partial_ptr, lse_partial_ptr, gate_ptr, num_requests, chunk_size, qk_scale, HKV: gl.constexpr,
    HEADS_PER_KV: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr, BLOCK_N: gl.constexpr, LONG: gl.constexpr, STAGES: gl.constexpr, SPEC: gl.constexpr,
    SPEC_PARTS: gl.constexpr, PHASE: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Partials of one request, and with a guess `A~`; grid [PROGRAMS].

    Arguments as for `lean_decode_kernel`, and descriptors of K and of V, [Hkv, capacity, head_dim], in tiles of BLOCK_N
    tokens, and of twice as many (the same again with LONG = 0).
    """
    # Short tiles take half of the slots of long ones.
    k_slots = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_long.block_shape, k_long.layout)  # noqa: RUF005
    v_slots = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_long.block_shape, k_long.layout)  # noqa: RUF005
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(stage), count=1)
        mbarrier.init(v_bars.index(stage), count=1)
    fence_async_shared()
    k_tiles = k_slots._reinterpret(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_tiles = v_slots._reinterpret(k_desc.dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    streams = (k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars)
    long_streams = (k_long, v_long, k_slots, v_slots, k_bars, v_bars)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_desc.dtype)
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], q_layout)
    warp_max = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    AHEAD: gl.constexpr = EARLY and not SPEC and gate_ptr is None
    if PDL and not EARLY:
        start_after(False)
    seq_len = gl.load(seq_lens_ptr)
    if PDL and EARLY:
        start_after(AHEAD)
    if gate_ptr is not None:
        if gl.load(gate_ptr) == 0:
            return

    # 1. What follows from the length alone.
    program = gl.program_id(0)
    epoch = None
    if epoch_ptr is not None:
        epoch = gl.load(epoch_ptr)  # here, so that it arrives together with the length
    sink, window = token_ranges(seq_len, chunk_size, SPEC)
    lengths = gl.full([1], seq_len, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    num_spec = 0

    done = program * 0
    if SPEC and PHASE != REST:
        # 2. Guesses: ahead of the schedule, of which they need nothing. Each is sent before the next one begins.
        SPEC_N: gl.constexpr = spec_tile(BLOCK_N, LONG)
        sinks, windows = token_ranges(lengths, chunk_size, SPEC)
        parts = parts_of_spec(sinks, lengths - windows, chunk_size, SPEC_N, SPEC_PARTS)
        num_spec = HKV * parts
        # What no guess changes is computed in each: ahead of them it would delay the first copy.
        for guess in tl.range(program, num_spec, PROGRAMS, disable_licm=True):
            part = (guess.to(gl.uint32) // HKV).to(gl.int32)
            output = guess - part * HKV
            first, end, count = tokens_of_spec_part(part, sink, window, seq_len, chunk_size, SPEC_N, SPEC_PARTS)
            o, lse, _ = _attend_run(
                long_streams if SPEC_N > BLOCK_N else streams, q_ptr, q_tile, warp_max, (output, first, end),
                (window, seq_len, 0), count, done, o_partial_ptr, lse_partial_ptr, qk_scale, program, None, HKV,
                HEADS_PER_KV, HEAD_DIM, True, False,
            )  # fmt: skip
            done += count
            numbers = _numbers_of(o)
            send_spec(
                o, lse, output, part, parts, HKV * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch, *numbers,
                HEADS_PER_KV, HEAD_DIM, SPEC_PARTS,
            )  # fmt: skip
            slot = PROGRAMS + HKV + output * SPEC_PARTS + part
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, slot, *numbers, HEADS_PER_KV)

    if PHASE != PREDICTOR:
        # 3. The run of this program. The partials of outputs that it goes beyond are stored on the way.
        is_long, _, total_rest, _, leaders, lead_run, followers, run, longer = build_schedule(
            lengths, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
        )
        tile, last, guesses, _ = deal(
            program, num_spec, leaders, lead_run, followers, run, longer, PROGRAMS, SPEC, PHASE
        )
        if SPEC and PHASE == ALL:
            if (guesses > 0) & (tile >= last):
                return
        pauses = give_head_start(
            program, 0, num_spec, total_rest, is_long, BLOCK_N, D, PROGRAMS, SPEC, PHASE, PDL
        )  # fmt: skip
        rest = tiles_in(window - sink, is_long, BLOCK_N)
        head = head_of(tile, rest, HKV)
        begin = sink + (tile - head * rest) * gl.where(is_long, 2 * BLOCK_N, BLOCK_N)
        work = (
            q_ptr, q_tile, warp_max, (head, begin, window), (sink, window, 1), last - tile, done, o_partial_ptr,
            lse_partial_ptr, qk_scale, program,
        )  # fmt: skip
        if LONG > 0 and is_long:
            o, lse, output = _attend_run(long_streams, *work, pauses, HKV, HEADS_PER_KV, HEAD_DIM, False, AHEAD)
        else:
            o, lse, output = _attend_run(streams, *work, pauses, HKV, HEADS_PER_KV, HEAD_DIM, False, AHEAD)
        if tile < last:
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, program + output, *_numbers_of(o), HEADS_PER_KV)
