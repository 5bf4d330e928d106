"""Kernels of lean decode attention in Triton: the main loop for any GPU and batch, and the combine.

lean_decode.py describes the method. tile_schedule.py defines the vocabulary (output, spec item, rest, run, partial
index).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import NO_TOKEN, await_partials, combine_output, send_spec, store_partial
from alspec.kernels.attention.decode.tile_schedule import (
    KV_BLOCK,
    PREDICTOR,
    REST,
    build_schedule,
    count_hidden,
    delay_for_predictor,
    head_of_tile,
    load_seq_lens,
    locate,
    output_tiles,
    program_of_tile,
    program_work,
    query_row,
    recall_part_blocks,
    request_ranges,
    rows_reach,
    spec_block_n,
    spec_part_tokens,
    start_after,
    tiles_of_block,
)
from alspec.kernels.common.device import inverse_of_sum, log2_of_sum
from alspec.kernels.common.pdl import prefetch

__all__ = ["lean_decode_kernel", "lean_combine_kernel"]


@triton.jit
def _init_softmax(BLOCK_N: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr):
    """Initial state of the online softmax: row_max [HEADS_PAD], weight_sums [BLOCK_N, HEADS_PAD], acc [D, HEADS_PAD].

    weight_sums adds up each token lane of the tiles by itself; `_finish_softmax` adds up the lanes.
    """
    row_max = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    return row_max, tl.zeros([BLOCK_N, HEADS_PAD], tl.float32), tl.zeros([D, HEADS_PAD], tl.float32)


@triton.jit
def _tile_max(s, BLOCK_N: tl.constexpr, HEADS_PAD: tl.constexpr):
    """Maximum over the tokens of s [BLOCK_N, HEADS_PAD].

    `tl.max` goes through shared memory twice, this only once: each of the 4 warps holds 16 of every 64 tokens, and
    `tl.split` gives the 4 values to every thread. Not for tiles of 64 tokens, which would spill registers on Blackwell.
    """
    if BLOCK_N % 128 == 0:
        warp_max = tl.max(tl.max(tl.reshape(s, [BLOCK_N // 64, 4, 16, HEADS_PAD]), 0), 1)
        a, b = tl.split(tl.reshape(tl.trans(warp_max), [HEADS_PAD, 2, 2]))
        a, b = tl.split(tl.maximum(a, b))
        tile_max = tl.maximum(a, b)
    else:
        tile_max = tl.max(s, 0)
    return tile_max


@triton.jit
def _drop_padding(x, N: tl.constexpr, HEADS_PAD: tl.constexpr, REAL: tl.constexpr):
    """Return the first REAL columns of x [N, HEADS_PAD], all or half of them. They stay in the same registers."""
    if REAL < HEADS_PAD:
        x, _ = tl.split(tl.permute(tl.reshape(x, [N, 2, REAL]), (0, 2, 1)))
    return x


@triton.jit
def _pad_columns(x, N: tl.constexpr, HEADS_PAD: tl.constexpr, REAL: tl.constexpr):
    """Append columns of zeros to x [N, REAL], up to HEADS_PAD columns."""
    if REAL < HEADS_PAD:
        x = tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), [N, HEADS_PAD])
    return x


@triton.jit
def _finish_softmax(row_max, weight_sums, acc, MASKED: tl.constexpr):
    """Finish an online softmax: o [D, HEADS_PAD], normalised, and lse [HEADS_PAD], base 2."""
    # Sum over tokens here, once. In every tile it would go through shared memory twice, to get the layout of row_max.
    weight_sums = tl.sum(weight_sums, 0)
    o, lse = acc * inverse_of_sum(weight_sums)[None, :], row_max + log2_of_sum(weight_sums)
    if MASKED:  # a row may see no token of these tiles
        o = tl.where((lse > float("-inf"))[None, :], o, 0.0)
    return o, lse


@triton.jit
def _store_block_lse(p, row_max, block_lse_ptr, output, token, left, num_blocks, enabled, HEADS_PER_KV: tl.constexpr):
    """Store log2 of the sum of weights of every 16 tokens of a tile.

    Args:
        p: [BLOCK_N, heads], weights relative to row_max [heads].
        token, left: first token of the tile, and tokens from there to the end of the range.
        enabled: whether to store at all.
    """
    PARTS: tl.constexpr = p.shape[0] // 16
    sums = tl.sum(tl.reshape(p, [PARTS, 16, p.shape[1]]), 1)
    parts, heads = tl.arange(0, PARTS)[:, None], tl.arange(0, p.shape[1])[None, :]
    offsets = (output.to(tl.int64) * num_blocks * 4 + token // 16 + parts) * HEADS_PER_KV + heads
    mask = enabled & (parts * 16 < left) & (heads < HEADS_PER_KV)
    tl.store(block_lse_ptr + offsets, row_max[None, :] + tl.log2(sums), mask=mask)


@triton.jit
def _attend_run(
    q_ptr,
    k_ptr,
    v_ptr,
    output,  # output of the first tile
    begin,  # tokens [begin, end) of that output come first
    end,
    begin2,  # then tokens [begin2, end2): of the same output if `is_spec`, else of each further output
    end2,
    is_spec,
    is_recall,  # tiles are blocks of the list `listed_ptr`
    num_blocks,  # NB of block_lse
    tile,  # first tile, in the row of all rests
    count,  # number of tiles
    seq_lens,  # [B_PAD]
    rest_end,  # [B_PAD], cumulative tiles of the rests
    o_ptr,  # partials
    lse_ptr,
    capacity,
    chunk_size,
    qk_scale,
    program,
    listed_ptr,  # blocks, or None
    block_lse_ptr,  # [B Hkv, NB, 4, HEADS_PER_KV] fp32, written for tiles of the rest; or None
    row_lens_ptr,  # of the kernel, or None
    seq_lens_ptr,  # of the kernel
    sliding_window,  # of the kernel, or None
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Online softmax over `count` tiles in one loop. Loads for the next output start before this output ends.

    Products are transposed: their rows are tokens, then channels, because a Hopper matrix instruction has 64 rows. The
    few query heads, padded to HEADS_PAD, are the columns.

    Returns:
        o [D, HEADS_PAD], normalised, lse [HEADS_PAD], base 2, and the partial index, all of the last output. The
        partials of earlier outputs are stored here.
    """
    REAL: tl.constexpr = 8 if HEADS_PER_KV <= 8 and HEADS_PAD == 16 else HEADS_PAD
    MASKED: tl.constexpr = ROWS > 1 or sliding_window is not None  # rows may see no token of a tile
    reach = rows_reach(sliding_window, ROWS)
    channels = tl.arange(0, D)
    offsets = tl.arange(0, BLOCK_N)
    heads = tl.arange(0, HEADS_PAD)
    q_offsets = heads[:, None] * HEAD_DIM + channels[None, :]
    q_mask = (heads < HEADS_PER_KV)[:, None] & (channels < HEAD_DIM)[None, :]
    row_max, weight_sums, acc = _init_softmax(BLOCK_N, REAL, D)
    partial_index, token, limit = program + output, begin - BLOCK_N, end + 0
    for i in tl.range(0, count, num_stages=STAGES):
        # Advance from the previous tile: computing the token from the tile index would take a division.
        token += BLOCK_N
        if listed_ptr is not None:
            # A tile may be shorter or longer than a block: the tile that ends a block is followed by the next block.
            TILES: tl.constexpr = tiles_of_block(BLOCK_N)
            block = tl.load(listed_ptr + i // TILES, mask=is_recall, other=0) * KV_BLOCK
            token = tl.where(is_recall, block + i % TILES * BLOCK_N, token)
            limit = tl.where(is_recall, block + KV_BLOCK, limit)
        if B_PAD == 1:
            crosses = token >= limit
            token = tl.where(crosses, begin2, token)
            limit = tl.where(crosses, end2, limit)
            output += (crosses & (not is_spec)).to(tl.int32)
        else:
            if token >= limit:
                token, limit = begin2 + 0, end2 + 0
                if not is_spec:
                    request, before = locate(tile + i, rest_end)
                    _, token, limit, _, rest = request_ranges(
                        request, seq_lens, chunk_size, False, B_PAD, BLOCK_N, SPEC, reach
                    )
                    output = request * HKV + (tile + i - before) // tl.maximum(rest, 1)
        left = limit - token
        # Load q with every tile, so that one wait covers q and the first tile.
        if ROWS == 1:
            q = tl.load(q_ptr + output * (HEADS_PER_KV * HEAD_DIM) + q_offsets, mask=q_mask, other=0.0)
        else:
            q_rows = query_row(output, heads, HKV, HEADS_PER_KV, ROWS, ROWS)
            q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + channels[None, :], mask=q_mask, other=0.0)
        # Clamp to the last token: cheaper than a mask, and never reads unused memory, which may hold NaN.
        tokens = tl.minimum(offsets, left - 1).to(tl.int64)[:, None] * HEAD_DIM
        base = output.to(tl.int64) * (capacity * HEAD_DIM) + token * HEAD_DIM
        k_ptrs = (k_ptr + base + channels)[None, :] + tokens
        v_ptrs = (v_ptr + base + channels)[None, :] + tokens
        if D == HEAD_DIM:
            k = tl.load(k_ptrs, eviction_policy="evict_first")
            v = tl.load(v_ptrs, eviction_policy="evict_first")
        else:
            channel_mask = (channels < HEAD_DIM)[None, :]
            k = tl.load(k_ptrs, mask=channel_mask, other=0.0, eviction_policy="evict_first")
            v = tl.load(v_ptrs, mask=channel_mask, other=0.0, eviction_policy="evict_first")
        if program + output != partial_index:
            o, lse = _finish_softmax(row_max, weight_sums, acc, MASKED)
            store_partial(o, lse, o_ptr, lse_ptr, partial_index, tl.arange(0, REAL), channels, HEADS_PER_KV)
            row_max, weight_sums, acc = _init_softmax(BLOCK_N, REAL, D)
            # Add a 0 that the compiler cannot prove: with only constants it splits the branch and spills registers on
            # Blackwell.
            weight_sums += (partial_index >> 31).to(tl.float32)
        partial_index = program + output  # not `output`: the pipeliner rejects a value used two tiles later
        s = _drop_padding(tl.dot(k, tl.trans(q), input_precision="ieee"), BLOCK_N, HEADS_PAD, REAL) * qk_scale
        s = tl.where((offsets < left)[:, None], s, float("-inf"))
        if ROWS > 1:
            columns = tl.arange(0, REAL)
            row = output // HKV * ROWS + columns // (HEADS_PER_KV // ROWS)
            row_ends = tl.load(row_lens_ptr + row, mask=columns < HEADS_PER_KV, other=1) - token
            s = tl.where(offsets[:, None] < row_ends[None, :], s, float("-inf"))
            if sliding_window is not None:
                s = tl.where(offsets[:, None] >= row_ends[None, :] - sliding_window, s, float("-inf"))
        elif sliding_window is not None:
            visible = tl.load(seq_lens_ptr + output // HKV) - sliding_window - token
            s = tl.where((offsets >= visible)[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, _tile_max(s, BLOCK_N, REAL))
        if MASKED:
            new_max = tl.maximum(new_max, NO_TOKEN)
        p = tl.exp2(s - new_max[None, :])
        alpha = tl.exp2(row_max - new_max)
        weight_sums = weight_sums * alpha[None, :] + p
        if block_lse_ptr is not None:
            _store_block_lse(p, new_max, block_lse_ptr, output, token, left, num_blocks, not is_spec, HEADS_PER_KV)
        p, acc = (
            _pad_columns(p.to(v.dtype), BLOCK_N, HEADS_PAD, REAL),
            _pad_columns(acc * alpha[None, :], D, HEADS_PAD, REAL),
        )
        acc = _drop_padding(tl.dot(tl.trans(v), p, acc, input_precision="ieee"), D, HEADS_PAD, REAL)
        row_max = new_max
    o, lse = _finish_softmax(row_max, weight_sums, acc, MASKED)
    return o, lse, partial_index


# One compiled kernel serves every capacity.
@triton.jit(do_not_specialize=["capacity", "num_requests", "num_blocks", "sliding_window"])
def lean_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, head_dim]
    k_ptr,  # [B, Hkv, capacity, head_dim]
    v_ptr,
    capacity,
    seq_lens_ptr,  # [B] int32
    # [B, Hkv * HEADS_PER_KV, head_dim], or [P, ...] with P = SPEC_PARTS + RECALL_PARTS parts; int64 LL packets with an
    # epoch. May be the paired rank's mailbox.
    spec_out_ptr,
    spec_lse_ptr,  # [P, B, Hkv * HEADS_PER_KV] int64 LL packets; None with one part
    epoch_ptr,  # [1] int32 if A~ is sent as LL packets, or None
    # [G + (1 + P) B Hkv, HEADS_PER_KV, D] fp32 partials: those of runs, then the parts of A~ of each output
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + P) B Hkv, HEADS_PER_KV] fp32
    gate_ptr,  # [1] int32 or None
    recalled_ptr,  # [B, Hkv, RECALL] int32, blocks in ascending order, then -1; or None
    block_lse_ptr,  # [B, Hkv, NB, 4, HEADS_PER_KV] fp32, written: log2 of the weights of every 16 tokens; or None
    row_lens_ptr,  # [B, ROWS] int32: tokens that each row sees; None with one row. Without speculation
    sliding_window,  # newest tokens that each row attends to; None: all that it sees
    num_requests,
    chunk_size,
    num_blocks,  # NB
    qk_scale,
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,  # columns of an output, see `query_row`
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # of each request
    PROGRAMS: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,  # with more tiles in an average run, tiles have 2 BLOCK_N tokens; 0: never
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,  # 1 with a batch
    RECALL: tl.constexpr,  # blocks of a recall list; 0: none
    RECALL_PARTS: tl.constexpr,  # parts of A~ over them
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    READ_LENGTHS_EARLY: tl.constexpr,
):
    """Write the partials, and with speculation `A~`. Grid [PROGRAMS]."""
    PREFETCH_TILE: tl.constexpr = READ_LENGTHS_EARLY and not SPEC and gate_ptr is None
    if PDL and not READ_LENGTHS_EARLY:
        start_after(False)
    seq_lens = load_seq_lens(seq_lens_ptr, num_requests, B_PAD)
    if PDL and READ_LENGTHS_EARLY:
        start_after(PREFETCH_TILE)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return

    # 1. The schedule. Every program computes all of it from `seq_lens` alone.
    program = tl.program_id(0)
    requests = tl.arange(0, B_PAD)
    reach = rows_reach(sliding_window, ROWS)
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)  # loaded here, to arrive together with seq_lens
    is_long, rest_tiles, total_rest, parts, schedule = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE,
        RECALL_PARTS, RECALL, reach,
    )  # fmt: skip
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    num_spec = num_outputs * (parts + RECALL_PARTS) if SPEC and PHASE != REST else 0
    block_n = tl.where(is_long, 2 * BLOCK_N, BLOCK_N)
    rest_end = tl.cumsum(rest_tiles, 0)
    tile, run_end, num_spec_items, num_items = program_work(program, num_spec, schedule, PROGRAMS, SPEC, PHASE)
    # With two tile loops, do not hoist loop invariants before both: it would spill registers and delay the first load.
    for item in tl.range(num_items, disable_licm=LONG > 0):
        # 2. The output and the tokens of this work item.
        delay_for_predictor(program, item, num_spec, total_rest, is_long, BLOCK_N, HEAD_DIM, PROGRAMS, SPEC, PHASE, PDL)
        is_spec = item < num_spec_items
        spec_index = program + item * PROGRAMS
        part, is_recall = 0, False
        if SPEC_PARTS + RECALL_PARTS > 1:
            part = spec_index // num_outputs
        if RECALL_PARTS > 0:
            is_recall = is_spec & (part >= parts)
        if B_PAD == 1:
            request, before = 0, 0
        else:
            request, before = locate(tile, rest_end)
            if SPEC:
                request = tl.where(is_spec, spec_index % num_outputs // HKV, request)
                before = tl.max(tl.where(requests < request, rest_end, 0), 0)
        first_r, sink_r, window_r, seq_len, rest_r = request_ranges(
            request, seq_lens, chunk_size, is_long, B_PAD, BLOCK_N, SPEC, reach
        )
        head = head_of_tile(tile - before, rest_r, HKV) if HKV <= 32 else (tile - before) // tl.maximum(rest_r, 1)
        if SPEC:
            head = tl.where(is_spec, spec_index % HKV, head)
        output = request * HKV + head
        head_tile = before + head * rest_r
        begin, end, begin2, end2 = sink_r + (tile - head_tile) * block_n, window_r, sink_r, window_r
        count = run_end - tile
        if PREFETCH_TILE:
            # Prefetch before the previous kernel ends. Only one tile: more would arrive together and delay the first.
            ELEMENT: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
            size = tl.where(count > 0, tl.minimum(block_n, end - begin) * (HEAD_DIM * ELEMENT), 0)
            offset = (output.to(tl.int64) * capacity + begin) * HEAD_DIM
            prefetch(k_ptr + offset, size)
            prefetch(v_ptr + offset, size)
            gdc_wait()
        use_long = is_long
        if SPEC:
            SPEC_N: tl.constexpr = spec_block_n(BLOCK_N, LONG)
            first, first_end, spec_tiles = spec_part_tokens(
                part, first_r, sink_r, window_r, seq_len, chunk_size, SPEC_N, SPEC_PARTS, reach
            )
            if LONG > 0:
                use_long = (use_long | is_spec) if SPEC_N > BLOCK_N else (use_long & (item >= num_spec_items))
            begin, end = tl.where(is_spec, first, begin), tl.where(is_spec, first_end, end)
            begin2, end2 = tl.where(is_spec, window_r, begin2), tl.where(is_spec, seq_len, end2)
            count = tl.where(is_spec, spec_tiles, count)
        listed_ptr = None
        if RECALL_PARTS > 0:
            PART_BLOCKS: tl.constexpr = recall_part_blocks(RECALL, RECALL_PARTS)
            first_block = tl.where(is_recall, part - parts, 0) * PART_BLOCKS
            listed_ptr = recalled_ptr + output * RECALL + first_block
            entries = tl.arange(0, triton.next_power_of_2(PART_BLOCKS))
            is_entry = (entries < PART_BLOCKS) & (first_block + entries < RECALL)
            listed = tl.load(listed_ptr + entries, mask=is_entry, other=-1)
            hidden = 0
            if sliding_window is not None:
                hidden = count_hidden(listed, is_entry, seq_len - sliding_window)
                listed_ptr += hidden
            TILES: tl.constexpr = tiles_of_block(BLOCK_N)
            LONG_TILES: tl.constexpr = tiles_of_block(2 * BLOCK_N)
            listed_blocks = tl.sum((listed >= 0).to(tl.int32), 0) - hidden
            count = tl.where(is_recall, listed_blocks * tl.where(use_long, LONG_TILES, TILES), count)

        # 3. Stream the tiles. `_attend_run` stores the partials of all outputs but the last.
        args = (
            q_ptr, k_ptr, v_ptr, output, begin, end, begin2, end2, is_spec, is_recall, num_blocks, tile, count,
            seq_lens, rest_end, o_partial_ptr, lse_partial_ptr, capacity, chunk_size, qk_scale, program,
        )  # fmt: skip
        # A tuple cannot hold the pointers that may be None.
        if LONG > 0 and use_long:
            o, lse, partial_index = _attend_run(
                *args, listed_ptr, block_lse_ptr, row_lens_ptr, seq_lens_ptr, sliding_window, HKV, HEADS_PER_KV,
                HEADS_PAD, D, HEAD_DIM, ROWS, B_PAD, 2 * BLOCK_N, STAGES, SPEC,
            )  # fmt: skip
        else:
            o, lse, partial_index = _attend_run(
                *args, listed_ptr, block_lse_ptr, row_lens_ptr, seq_lens_ptr, sliding_window, HKV, HEADS_PER_KV,
                HEADS_PAD, D, HEAD_DIM, ROWS, B_PAD, BLOCK_N, STAGES, SPEC,
            )  # fmt: skip

        has_partial = count > 0
        if RECALL_PARTS > 0:
            has_partial |= is_recall
            o = tl.where((lse > float("-inf"))[None, :], o, 0.0)  # a part without blocks has weight 0
        if has_partial:
            # 4. Store the partial of the last output; also send it to the receiver if it is `A~`.
            current, heads, channels = partial_index - program, tl.arange(0, o.shape[1]), tl.arange(0, D)
            if SPEC and PHASE != REST:
                if is_spec:
                    if RECALL_PARTS > 0:
                        part = tl.where(is_recall, part - parts + SPEC_PARTS, part)
                    if RECALL_PARTS == 0 or epoch is not None:
                        send_spec(
                            o, lse, current, part, parts, num_outputs * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch,
                            heads, channels, HEADS_PER_KV, HEAD_DIM, SPEC_PARTS, RECALL_PARTS,
                        )  # fmt: skip
                    partial_index = PROGRAMS + num_outputs + current * (SPEC_PARTS + RECALL_PARTS) + part
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, partial_index, heads, channels, HEADS_PER_KV)


@triton.jit(do_not_specialize=["num_requests", "sliding_window"])
def lean_combine_kernel(
    seq_lens_ptr,  # [B] int32
    o_partial_ptr,  # [G + (1 + P) B Hkv, HEADS_PER_KV, D] fp32, from the attention kernel; P parts of A~
    lse_partial_ptr,  # [G + (1 + P) B Hkv, HEADS_PER_KV] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, head_dim]
    lse_ptr,  # [B, Hkv * HEADS_PER_KV] fp32
    sums_ptr,  # [B, Hkv * HEADS_PER_KV * SLICES, 2] fp32: dist2, norm2; or None
    gate_ptr,  # [1] int32 or None
    sliding_window,  # of the attention kernel
    num_requests,
    chunk_size,
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of the attention kernel
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    SLICE: tl.constexpr,  # channels in a slice
    SLICES: tl.constexpr,  # slices of a query head
    SLICES_PER_PROGRAM: tl.constexpr,
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    RECALL: tl.constexpr,
    RECALL_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # of the attention kernel; PREDICTOR: combine the parts of A~
    PDL: tl.constexpr,
    WHOLE: tl.constexpr,  # the attention kernel has written each output that has only one partial
):
    """Combine the partials of the attention kernel. Grid [B Hkv HEADS_PER_KV SLICES / SLICES_PER_PROGRAM]."""
    if PDL:
        gdc_launch_dependents()
    seq_lens = load_seq_lens(seq_lens_ptr, num_requests, B_PAD)
    _, rest_tiles, _, parts, schedule = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE,
        RECALL_PARTS, RECALL, rows_reach(sliding_window, ROWS),
    )  # fmt: skip
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    for i in tl.range(SLICES_PER_PROGRAM):
        index = tl.program_id(0) * SLICES_PER_PROGRAM + i
        row, slice_index = index // SLICES, index % SLICES
        output, head = row // HEADS_PER_KV, row % HEADS_PER_KV
        # The rest of an output is one range of tiles; the partials of its runs have consecutive indices.
        first_tile, tiles = output_tiles(tl.arange(0, 1) + output, rest_tiles // HKV, HKV, B_PAD)
        first_tile, tiles = tl.sum(first_tile, 0), tl.sum(tiles, 0)
        first_run = program_of_tile(first_tile, schedule)
        last_run = program_of_tile(first_tile + tiles - 1, schedule)
        partial_index, runs = first_run + output, tl.where(tiles > 0, last_run - first_run + 1, 0)
        if PHASE == PREDICTOR:
            runs = runs * 0
        if PDL:
            partial_index, runs = await_partials(partial_index, runs)
        is_needed = output < num_outputs
        if WHOLE:
            is_needed = is_needed & (runs > 1)
        if gate_ptr is not None:
            is_needed = is_needed & (tl.load(gate_ptr) != 0)
        if ROWS > 1:
            row = query_row(output, head, HKV, HEADS_PER_KV, ROWS, ROWS)
        if is_needed:
            combine_output(
                o_partial_ptr, lse_partial_ptr, partial_index, runs,
                PROGRAMS + num_outputs + output * (SPEC_PARTS + RECALL_PARTS), parts, row, head, slice_index, out_ptr,
                lse_ptr, sums_ptr, HEADS_PER_KV, D, HEAD_DIM, SLICE, SLICES, ROUND, SPEC, SPEC_PARTS, RECALL_PARTS,
                PHASE == PREDICTOR,
            )  # fmt: skip
