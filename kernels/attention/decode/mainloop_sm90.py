"""Main loop of lean decode attention on Hopper: K and V are loaded by TMA.

It computes what mainloop_sm80.py does, with the schedule and the vocabulary of tile_schedule.py. Only the loads differ:
one TMA instruction copies K or V of a tile into shared memory. As soon as all warps have read tile i, the program
starts loading tile i + STAGES into the same buffer. So the program always has the same number of bytes in flight. 64 KB
per SM keep the memory busy. More would only lengthen the queue in which the predictor's loads wait.

The last tile of a range is shifted back, so that it ends where the range ends. So no tile reads unused memory, which
may hold NaN. The copy writes zeros for tokens before the start of the cache. Tokens before the `token` of a cursor are
masked: they belong to the previous tile or range. (If V of such a token is infinite, 0 * inf is NaN. But that token is
part of the same full output, which is then not finite either way.) So are tokens in front of a sliding window, some of
which a tile at its begin may hold.

    S^T = K q^T,   O^T = V^T P^T

The 64 rows of a matrix instruction are tokens in the first product and channels in the second. Its columns are the
query heads, padded to HEADS_PAD = 8 or 16.
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

from alspec.kernels.attention.decode.combine import NO_TOKEN, send_spec, store_output, store_partial
from alspec.kernels.attention.decode.softmax_sm90 import (
    WARPS,
    barrier,
    finish_softmax,
    init_softmax,
    mma_layout,
    partial_indices,
    split_by_warp,
    store_block_lse,
    warp_values_layout,
)
from alspec.kernels.attention.decode.tile_schedule import (
    ALL,
    KV_BLOCK,
    PAUSE,
    PREDICTOR,
    REST,
    build_schedule,
    count_hidden,
    count_tiles,
    delay_for_predictor,
    head_of_tile,
    locate,
    num_spec_parts,
    program_work,
    query_row,
    recall_part_blocks,
    rows_reach,
    spec_block_n,
    spec_part_tokens,
    start_after,
    token_ranges,
)
from alspec.kernels.common.pdl import spin_cycles

__all__ = ["lean_sm90_kernel"]


@gluon.jit
def _tile_start(cursor, listed, BLOCK_N: gl.constexpr):
    """First token of the tile at a cursor (output, token, end): `token`, or `end - BLOCK_N` if that is smaller.

    Args:
        listed: as for `_advance`.
    """
    start = cursor[1] + (KV_BLOCK - BLOCK_N)  # of a block: the tile holds all of it
    if listed is None:
        start = gl.minimum(cursor[1], cursor[2] - BLOCK_N)
    return start


@gluon.jit
def _next_output(output, batch, HKV: gl.constexpr, SPEC: gl.constexpr):
    """Return the cursor (output, token, end) of the next output that has a rest; past the last output it has no use.

    Args:
        batch: (seq_lens_ptr, num_requests, chunk_size), with a sliding window also the reach. The lengths are in L1
            after the first load.
    """
    seq_lens_ptr, num_requests, chunk_size = batch[0], batch[1], batch[2]
    reach = None
    if len(batch) > 3:
        reach = batch[3]
    output += 1
    request = gl.minimum((output.to(gl.uint32) // HKV).to(gl.int32), num_requests - 1)
    _, sink, window = token_ranges(gl.load(seq_lens_ptr + request), chunk_size, SPEC, reach)
    if SPEC:
        while (sink >= window) & (request < num_requests - 1):
            request += 1
            output = request * HKV
            _, sink, window = token_ranges(gl.load(seq_lens_ptr + request), chunk_size, SPEC, reach)
    return output, sink, window


@gluon.jit
def _advance(cursor, next_range, batch, listed, BLOCK_N: gl.constexpr, HKV: gl.constexpr, SPEC: gl.constexpr):
    """Return the cursor (output, token, end) of the next tile.

    Args:
        next_range: the range that follows `end`: (token, end, increment of the output).
        batch: as for `_next_output`, which then finds the next range; or None.
        listed: None, or (list of blocks, its length): each tile is a block of this list. Instead of `end` the cursor
            then has the block's index in the list.
    """
    output, token, end = cursor
    if listed is not None:
        end += 1
        token = gl.load(listed[0] + end, mask=end < listed[1], other=0) * KV_BLOCK
    else:
        token += BLOCK_N
        crosses = token >= end
        if batch is None:
            output += gl.where(crosses, next_range[2], 0)
            token, end = gl.where(crosses, next_range[0], token), gl.where(crosses, next_range[1], end)
        elif crosses:
            output, token, end = _next_output(output, batch, HKV, SPEC)
    return output, token, end


@gluon.jit
def _stage_and_parity(tile, STAGES: gl.constexpr):
    """Return the buffer stage and the mbarrier parity of a program's tile. Unsigned arithmetic is shorter code."""
    tile = tile.to(gl.uint32)
    return (tile % STAGES).to(gl.int32), (tile // STAGES).to(gl.int32) & 1


@gluon.jit
def _issue_copy(desc, bars, tiles, stage, cursor, listed, enable):
    """Issue the TMA copy of the tile at a cursor, if `enable`.

    Each issued copy must be waited for; otherwise the mbarrier parity of later tiles is wrong.
    """
    bar, start = bars.index(stage), _tile_start(cursor, listed, tiles.shape[2])
    mbarrier.expect(bar, desc.block_type.nbytes, pred=enable)
    tma.async_copy_global_to_shared(desc, [cursor[0], start, 0], bar, tiles.index(stage), pred=enable)


@gluon.jit
def _load_query(
    q_ptr, output, num_outputs, HKV: gl.constexpr, HEADS_PAD: gl.constexpr, HEADS_PER_KV: gl.constexpr,
    D: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Load q [HEADS_PAD, D] of one output, that is, of the query heads of one KV head; padding is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    heads = gl.arange(0, HEADS_PAD, layout=gl.SliceLayout(1, layout))[:, None]
    channels = gl.arange(0, D, layout=gl.SliceLayout(0, layout))[None, :]
    q_mask = (heads < HEADS_PER_KV) & (channels < HEAD_DIM) & (output < num_outputs)
    row = query_row(output, heads, HKV, HEADS_PER_KV, ROWS, ROWS)
    return gl.load(q_ptr + row * HEAD_DIM + channels, mask=q_mask, other=0.0)


@gluon.jit
def _row_lengths(
    row_lens_ptr, output, num_outputs, HKV: gl.constexpr, HEADS_PAD: gl.constexpr, HEADS_PER_KV: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Load the tokens that each column of an output sees, [HEADS_PAD]: those of its row."""
    columns = gl.arange(0, HEADS_PAD, layout=gl.SliceLayout(0, mma_layout(HEADS_PAD)))
    row = output // HKV * ROWS + columns // (HEADS_PER_KV // ROWS)
    return gl.load(row_lens_ptr + row, mask=(columns < HEADS_PER_KV) & (output < num_outputs), other=1)


@gluon.jit
def _store_query(q_tile, q):
    """Store q in shared memory for the products. The caller ensures that no warp still reads the previous q."""
    q_tile.store(q)
    fence_async_shared()
    barrier()


@gluon.jit
def _issue_first_copies(
    streams, cursor, next_range, batch, listed, count, tiles_done, was_delayed, HKV: gl.constexpr, SPEC: gl.constexpr,
    PREFETCH_TILE: gl.constexpr,
):  # fmt: skip
    """Issue the copies of the first tiles of a work item.

    With PREFETCH_TILE, tile 0 is issued before `gdc_wait`. No further tile is, because q would queue behind it. Tile 0
    is not issued early if it holds the newest token, which the previous kernel may not have written yet.

    Args:
        count: tiles of the work item.
        was_delayed: from `delay_for_predictor`; if True, PAUSE cycles pass after the first tile.
    Returns:
        The cursors of the first copies that the loop issues: V of tile STAGES - 1 (not in the first iteration), and K
        of tile STAGES.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    is_issued = False
    if PREFETCH_TILE:
        is_issued = (count > 0) & (_tile_start(cursor, listed, BLOCK_N) + BLOCK_N < cursor[2])
        _issue_copy(k_desc, k_bars, k_tiles, 0, cursor, listed, is_issued)
        _issue_copy(v_desc, v_bars, v_tiles, 0, cursor, listed, is_issued)
        gdc_wait()
    last_cursor = cursor
    for i in gl.static_range(STAGES):
        if i == 1 and was_delayed is not None:
            if was_delayed:
                spin_cycles(PAUSE)
        enable = i < count
        if PREFETCH_TILE and i == 0:
            enable = enable & (is_issued == 0)
        stage, _ = _stage_and_parity(tiles_done + i, STAGES)
        _issue_copy(k_desc, k_bars, k_tiles, stage, cursor, listed, enable)
        _issue_copy(v_desc, v_bars, v_tiles, stage, cursor, listed, enable)
        last_cursor = cursor
        cursor = _advance(cursor, next_range, batch, listed, BLOCK_N, HKV, SPEC)
    return last_cursor, cursor


@gluon.jit
def _attend_run(
    streams, q_ptr, q_tile, warp_buffer, cursor, next_range, count, tiles_done, o_ptr, lse_ptr, qk_scale, program,
    num_outputs, batch, listed, block_lse, row_lens_ptr, seq_lens_ptr, sliding_window, out_ptr, out_lse_ptr, is_whole,
    was_delayed, HKV: gl.constexpr, HEADS_PER_KV: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
    SPEC: gl.constexpr, IS_SPEC: gl.constexpr, PREFETCH_TILE: gl.constexpr,
):  # fmt: skip
    """Online softmax over `count` tiles. Copies for the next output start before this output ends.

    Args:
        streams: descriptors, tiles [STAGES, 1, BLOCK_N, D] and barriers [STAGES, 1], each of K and of V.
        cursor: (output, token, end) of the first tile.
        next_range: (token, end, increment of the output) of the range that follows `end`. With IS_SPEC it belongs to
            the same output, and the increment is 0. Otherwise it is the range of every further output, and the
            increment is 1.
        batch: None with IS_SPEC or one request; otherwise as for `_next_output`, in place of `next_range`.
        listed: as for `_advance`; then there is no `next_range` and no `batch`.
        block_lse: as for `_store_block_lse`, or None.
        row_lens_ptr: of the kernel; None if ROWS is 1.
        seq_lens_ptr, sliding_window: of the kernel.
        out_ptr, out_lse_ptr: as for `store_output`.
        is_whole: the run begins with the first tile of its first output.
        tiles_done: tiles that this program has loaded before; gives the stage and parity of the next tile.
        was_delayed: as for `_issue_first_copies`.
    Returns:
        (o, lse, output, is_whole) of the last output: o [D, HEADS_PAD], normalised, and lse [HEADS_PAD], base 2, both
        in the layout for the store; whether it has all tiles of that output. Earlier outputs are stored here.
    """
    k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars = streams
    BLOCK_N: gl.constexpr = k_tiles.shape[2]
    STAGES: gl.constexpr = k_tiles.shape[0]
    HEADS_PAD: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS_PAD, BLOCK_N], q_tile.dtype)
    p_tile = gl.allocate_shared_memory(q_tile.dtype, [HEADS_PAD, BLOCK_N], p_layout)
    barrier()  # every warp sees the initialised barriers, and has read the previous contents of the buffers
    output, token, end = cursor
    if PREFETCH_TILE:
        v_cursor, k_cursor = _issue_first_copies(
            streams, cursor, next_range, batch, listed, count, tiles_done, was_delayed, HKV, SPEC, PREFETCH_TILE
        )
    # Without PREFETCH_TILE q is ready: load it before the tiles. Load q of the next output early, to hide its latency.
    q = _load_query(q_ptr, output, num_outputs, HKV, HEADS_PAD, HEADS_PER_KV, D, HEAD_DIM, ROWS)
    if not IS_SPEC:
        following = output + 1, next_range[0], next_range[1]
        upcoming = following if batch is None else _next_output(output, batch, HKV, SPEC)
        next_q = _load_query(q_ptr, upcoming[0], num_outputs, HKV, HEADS_PAD, HEADS_PER_KV, D, HEAD_DIM, ROWS)
    if not PREFETCH_TILE:
        v_cursor, k_cursor = _issue_first_copies(
            streams, cursor, next_range, batch, listed, count, tiles_done, was_delayed, HKV, SPEC, PREFETCH_TILE
        )
    _store_query(q_tile, q)
    zero_scores = gl.zeros([BLOCK_N, HEADS_PAD], gl.float32, mma_layout(HEADS_PAD))
    offsets = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, zero_scores.type.layout))
    row_max, weight_sums, acc = init_softmax(BLOCK_N, HEADS_PAD, D)
    for i in range(count):
        if listed is not None:
            token = gl.load(listed[0] + i) * KV_BLOCK
            end = i
        elif token >= end:
            if IS_SPEC:
                token, end = next_range[0], next_range[1]
            else:
                o, lse = finish_softmax(row_max, weight_sums, acc, warp_buffer, HEADS_PER_KV, ROWS)
                store_output(
                    o, lse, output, is_whole, o_ptr, lse_ptr, program, out_ptr, out_lse_ptr, *partial_indices(o),
                    HKV, HEADS_PER_KV, HEAD_DIM, ROWS,
                )  # fmt: skip
                is_whole = token > 0  # true; a tensor, as before
                row_max, weight_sums, acc = init_softmax(BLOCK_N, HEADS_PAD, D)
                _store_query(q_tile, next_q)
                output, token, end = upcoming
                upcoming = (output + 1, token, end) if batch is None else _next_output(output, batch, HKV, SPEC)
                next_q = _load_query(q_ptr, upcoming[0], num_outputs, HKV, HEADS_PAD, HEADS_PER_KV, D, HEAD_DIM, ROWS)
        if ROWS > 1:  # from L1; kept over the loop they would take too many registers
            row_lens = _row_lengths(row_lens_ptr, output, num_outputs, HKV, HEADS_PAD, HEADS_PER_KV, ROWS)
        stage, parity = _stage_and_parity(tiles_done + i, STAGES)
        mbarrier.wait(k_bars.index(stage), parity)
        k = k_tiles.index(stage).reshape([BLOCK_N, D])
        s = warpgroup_mma(k, q_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s]) * qk_scale
        # Mask the tokens before `token`: the tile may start earlier (`_tile_start`).
        own_start = token
        if ROWS == 1 and sliding_window is not None:  # nor does a row see tokens in front of its window
            request = (output.to(gl.uint32) // HKV).to(gl.int32)
            own_start = gl.maximum(token, gl.load(seq_lens_ptr + request) - sliding_window)
        own_tokens = offsets >= own_start - _tile_start((output, token, end), listed, BLOCK_N)
        s = gl.where(own_tokens[:, None], s, float("-inf"))
        if ROWS > 1:
            row_ends = row_lens - _tile_start((output, token, end), listed, BLOCK_N)
            s = gl.where(offsets[:, None] < row_ends[None, :], s, float("-inf"))
            if sliding_window is not None:
                s = gl.where(offsets[:, None] >= row_ends[None, :] - sliding_window, s, float("-inf"))
        warp_buffer.store(gl.max(gl.max(split_by_warp(s), 0), 1))
        barrier()
        # Every warp has now read K of this tile and V of the previous one, so both buffers can be refilled.
        last_stage, _ = _stage_and_parity(stage + STAGES - 1, STAGES)
        _issue_copy(v_desc, v_bars, v_tiles, last_stage, v_cursor, listed, (i > 0) & (i + STAGES <= count))
        _issue_copy(k_desc, k_bars, k_tiles, stage, k_cursor, listed, i + STAGES < count)
        v_cursor, k_cursor = k_cursor, _advance(k_cursor, next_range, batch, listed, BLOCK_N, HKV, SPEC)
        tile_max = gl.max(warp_buffer.load(warp_values_layout(HEADS_PAD)), 0)
        new_max = gl.maximum(row_max, gl.convert_layout(tile_max, row_max.type.layout, assert_trivial=True))
        if ROWS > 1:
            new_max = gl.maximum(new_max, NO_TOKEN)
        p = gl.exp2(s - new_max[None, :])
        alpha = gl.exp2(row_max - new_max)
        row_max, weight_sums = new_max, weight_sums * alpha[None, :] + p
        p_tile.permute((1, 0)).store(p.to(p_tile.dtype))
        fence_async_shared()
        barrier()
        mbarrier.wait(v_bars.index(stage), parity)
        v = v_tiles.index(stage).reshape([BLOCK_N, D])
        acc = warpgroup_mma(v.permute((1, 0)), p_tile.permute((1, 0)), acc * alpha[None, :], is_async=True)
        if block_lse is not None:  # beside the product
            start = _tile_start((output, token, end), None, BLOCK_N)
            store_block_lse(p, new_max, block_lse, output, token, start, HEADS_PER_KV)
        acc = warpgroup_mma_wait(0, [acc])
        token += BLOCK_N
    o, lse = finish_softmax(row_max, weight_sums, acc, warp_buffer, HEADS_PER_KV, ROWS)
    return o, lse, output, is_whole & (token >= end)


@gluon.jit
def _listed_blocks(
    recalled_ptr, output, recall_part, first_visible, RECALL: gl.constexpr, RECALL_PARTS: gl.constexpr
):  # fmt: skip
    """Return where the blocks of a part over recalled blocks are listed, and how many there are.

    Args:
        first_visible: first token of the sliding window, or None; blocks in front of it are left out.
    """
    BLOCKS: gl.constexpr = recall_part_blocks(RECALL, RECALL_PARTS)
    first = recall_part * BLOCKS
    blocks_ptr = recalled_ptr + output * RECALL + first
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    entries = gl.arange(0, 32, layout=layout)
    is_entry = (entries < BLOCKS) & (first + entries < RECALL)
    blocks = gl.load(blocks_ptr + entries, mask=is_entry, other=-1)
    count = gl.sum((blocks >= 0).to(gl.int32), 0)
    if first_visible is not None:
        hidden = count_hidden(blocks, is_entry, first_visible)
        blocks_ptr, count = blocks_ptr + hidden, count - hidden
    return blocks_ptr, count


# Not specialised: Triton makes an argument of 1 a constexpr, and calls with it would not compile.
@gluon.jit(do_not_specialize=["num_requests", "chunk_size", "num_blocks", "sliding_window"])
def lean_sm90_kernel(
    q_ptr, k_desc, v_desc, k_long, v_long, seq_lens_ptr, out_ptr, out_lse_ptr, spec_out_ptr, spec_lse_ptr, epoch_ptr,
    o_partial_ptr, lse_partial_ptr, gate_ptr, recalled_ptr, block_lse_ptr, row_lens_ptr, sliding_window, num_requests,
    chunk_size, num_blocks, qk_scale, HKV: gl.constexpr, HEADS_PER_KV: gl.constexpr, HEADS_PAD: gl.constexpr,
    D: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, PROGRAMS: gl.constexpr, B_PAD: gl.constexpr,
    BLOCK_N: gl.constexpr, LONG: gl.constexpr, STAGES: gl.constexpr, SPEC: gl.constexpr, SPEC_PARTS: gl.constexpr,
    RECALL: gl.constexpr, RECALL_PARTS: gl.constexpr, PHASE: gl.constexpr, PDL: gl.constexpr,
    READ_LENGTHS_EARLY: gl.constexpr,
):  # fmt: skip
    """Write the partials, and with speculation `A~`. Grid [PROGRAMS].

    Arguments as for `lean_decode_kernel`, except that K and V are TMA descriptors of [B Hkv, capacity, head_dim]:
    k_desc, v_desc with tiles of BLOCK_N tokens; k_long, v_long with tiles of 2 BLOCK_N (BLOCK_N if LONG is 0).
    out_ptr, out_lse_ptr are the results of the launch, for a batch without speculation; otherwise None. ROWS > 1 is
    without speculation.
    """
    # A short tile fills half a buffer.
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
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS_PAD, D], k_desc.dtype)
    q_tile = gl.allocate_shared_memory(k_desc.dtype, [HEADS_PAD, D], q_layout)
    warp_buffer = gl.allocate_shared_memory(gl.float32, [4, HEADS_PAD], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    PREFETCH_TILE: gl.constexpr = READ_LENGTHS_EARLY and not SPEC and gate_ptr is None
    if PDL and not READ_LENGTHS_EARLY:
        start_after(False)
    request_layout: gl.constexpr = gl.BlockedLayout([1 if B_PAD == 1 else B_PAD // 32], [32], [WARPS], [0])
    reach = rows_reach(sliding_window, ROWS)
    if B_PAD == 1:
        seq_len = gl.load(seq_lens_ptr)
        batch = None
    else:
        requests = gl.arange(0, B_PAD, layout=request_layout)
        lengths = gl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)
        batch = seq_lens_ptr, num_requests, chunk_size
        if reach is not None:
            batch = batch + (reach,)  # noqa: RUF005 (Triton has no *)
    if PDL and READ_LENGTHS_EARLY:
        start_after(PREFETCH_TILE)
    if gate_ptr is not None:
        if gl.load(gate_ptr) == 0:
            return

    # 1. Values that depend on the lengths alone.
    program = gl.program_id(0)
    epoch = None
    if epoch_ptr is not None:
        epoch = gl.load(epoch_ptr)  # loaded here, to arrive together with the lengths
    num_outputs = HKV
    if B_PAD == 1:
        range_first, sink, window = token_ranges(seq_len, chunk_size, SPEC, reach)
        lengths = gl.full([1], seq_len, gl.int32, request_layout)
    else:
        num_outputs = num_requests * HKV
    num_spec = 0

    tiles_done = program * 0  # 0 as a tensor: `_stage_and_parity` converts it
    if SPEC and PHASE != REST:
        # 2. Compute and send the spec items, one after another. They come first: they do not depend on the schedule.
        SPEC_N: gl.constexpr = spec_block_n(BLOCK_N, LONG)
        firsts, sinks, windows = token_ranges(lengths, chunk_size, SPEC, reach)
        parts = num_spec_parts(sinks - firsts, lengths - windows, chunk_size, SPEC_N, SPEC_PARTS)
        num_spec = num_outputs * (parts + RECALL_PARTS)
        # No hoisting of loop invariants: before the loop they would delay the first copy.
        for spec_index in tl.range(program, num_spec, PROGRAMS, disable_licm=True):
            if B_PAD == 1:
                part = (spec_index.to(gl.uint32) // HKV).to(gl.int32)
                output = spec_index - part * HKV
            else:
                part, output = 0, spec_index
                if RECALL_PARTS > 0:
                    part = spec_index // num_outputs
                    output = spec_index - part * num_outputs
                seq_len = gl.load(seq_lens_ptr + (output.to(gl.uint32) // HKV).to(gl.int32))
                range_first, sink, window = token_ranges(seq_len, chunk_size, SPEC, reach)
            # Without batch, block_lse, row_lens_ptr, out_ptr, out_lse_ptr and was_delayed; IS_SPEC, no PREFETCH_TILE.
            slot = part
            if RECALL_PARTS > 0 and part >= parts:
                recall_part = part - parts
                first_visible = None
                if sliding_window is not None:
                    first_visible = seq_len - sliding_window
                blocks_ptr, count = _listed_blocks(
                    recalled_ptr, output, recall_part, first_visible, RECALL, RECALL_PARTS
                )
                first = gl.load(blocks_ptr, mask=count > 0, other=0) * KV_BLOCK
                o, lse, _, _ = _attend_run(
                    streams, q_ptr, q_tile, warp_buffer, (output, first, 0), None, count, tiles_done, o_partial_ptr,
                    lse_partial_ptr, qk_scale, program, num_outputs, None, (blocks_ptr, count), None, None,
                    seq_lens_ptr, sliding_window, None, None, count > 0, None, HKV, HEADS_PER_KV, HEAD_DIM, 1, SPEC,
                    True, False,
                )  # fmt: skip
                slot = recall_part + SPEC_PARTS
            else:
                first, end, count = spec_part_tokens(
                    part, range_first, sink, window, seq_len, chunk_size, SPEC_N, SPEC_PARTS, reach
                )
                o, lse, _, _ = _attend_run(
                    long_streams if SPEC_N > BLOCK_N else streams, q_ptr, q_tile, warp_buffer, (output, first, end),
                    (window, seq_len, 0), count, tiles_done, o_partial_ptr, lse_partial_ptr, qk_scale, program,
                    num_outputs, None, None, None, None, seq_lens_ptr, sliding_window, None, None, count > 0, None, HKV,
                    HEADS_PER_KV, HEAD_DIM, 1, SPEC, True, False,
                )  # fmt: skip
            tiles_done += count
            indices = partial_indices(o)
            if RECALL_PARTS > 0:
                o = gl.where((lse > float("-inf"))[None, :], o, 0.0)  # a part without blocks has weight 0
            if RECALL_PARTS == 0 or epoch is not None:
                send_spec(
                    o, lse, output, slot, parts, num_outputs * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch,
                    *indices, HEADS_PER_KV, HEAD_DIM, SPEC_PARTS, RECALL_PARTS,
                )  # fmt: skip
            partial_index = PROGRAMS + num_outputs + output * (SPEC_PARTS + RECALL_PARTS) + slot
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, partial_index, *indices, HEADS_PER_KV)

    if PHASE != PREDICTOR:
        # 3. The run of this program. `_attend_run` stores the partials of all outputs but the last.
        is_long, rest_tiles, total_rest, _, schedule = build_schedule(
            lengths, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE,
            RECALL_PARTS, RECALL, reach,
        )  # fmt: skip
        tile, run_end, num_spec_items, _ = program_work(program, num_spec, schedule, PROGRAMS, SPEC, PHASE)
        if SPEC and PHASE == ALL:
            if (num_spec_items > 0) & (tile >= run_end):
                return
        was_delayed = delay_for_predictor(
            program, 0, num_spec, total_rest, is_long, BLOCK_N, D, PROGRAMS, SPEC, PHASE, PDL
        )  # fmt: skip
        first_output, first_tile = 0, 0
        if B_PAD > 1:
            request, first_tile = locate(tile, tl.cumsum(rest_tiles, 0))
            request = gl.minimum(request, num_requests - 1)  # a program without tiles
            first_output = request * HKV
            _, sink, window = token_ranges(gl.load(seq_lens_ptr + request), chunk_size, SPEC, reach)
        rest = count_tiles(window - sink, is_long, BLOCK_N)
        head = head_of_tile(tile - first_tile, rest, HKV)
        first_tile += head * rest
        begin = sink + (tile - first_tile) * gl.where(is_long, 2 * BLOCK_N, BLOCK_N)
        args = (
            q_ptr, q_tile, warp_buffer, (first_output + head, begin, window), (sink, window, 1), run_end - tile,
            tiles_done, o_partial_ptr, lse_partial_ptr, qk_scale, program, num_outputs,
        )  # fmt: skip
        block_lse = None
        if block_lse_ptr is not None:
            block_lse = block_lse_ptr, num_blocks
        if LONG > 0 and is_long:
            o, lse, output, is_whole = _attend_run(
                long_streams, *args, batch, None, block_lse, row_lens_ptr, seq_lens_ptr, sliding_window, out_ptr,
                out_lse_ptr, tile == first_tile, was_delayed, HKV, HEADS_PER_KV, HEAD_DIM, ROWS, SPEC, False,
                PREFETCH_TILE,
            )  # fmt: skip
        else:
            o, lse, output, is_whole = _attend_run(
                streams, *args, batch, None, block_lse, row_lens_ptr, seq_lens_ptr, sliding_window, out_ptr,
                out_lse_ptr, tile == first_tile, was_delayed, HKV, HEADS_PER_KV, HEAD_DIM, ROWS, SPEC, False,
                PREFETCH_TILE,
            )  # fmt: skip
        if tile < run_end:
            store_output(
                o, lse, output, is_whole, o_partial_ptr, lse_partial_ptr, program, out_ptr, out_lse_ptr,
                *partial_indices(o), HKV, HEADS_PER_KV, HEAD_DIM, ROWS,
            )  # fmt: skip
