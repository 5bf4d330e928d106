"""Kernels of decode attention over a quantised cache: the attention over work items, and the combine.

Method: quantised_decode.py. block_schedule.py defines output, tile, rest, run, spec item and work item.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import await_partials, combine_output
from alspec.kernels.attention.decode.tile_schedule import (
    PREDICTOR,
    REST,
    count_hidden,
    locate,
    query_row,
    recall_part_blocks,
    request_row,
    start_after,
)
from alspec.kernels.attention.decode_quantised.block_attention import attend_blocks, empty_softmax
from alspec.kernels.attention.decode_quantised.block_schedule import (
    build_schedule,
    item_blocks,
    pick,
    program_of_tile,
    run_start,
    spec_items_before,
)
from alspec.kernels.attention.decode_quantised.query import copy_query, query_source
from alspec.kernels.attention.decode_quantised.record_loads import copy_side, init_buffers
from alspec.kernels.attention.decode_quantised.sides import prepare_query
from alspec.kernels.attention.decode_quantised.tail_attention import COLUMNS, attend_tail
from alspec.kernels.attention.decode_quantised.warp_combine import combine_warps, free_buffers, write_heads
from alspec.kernels.attention.sas_exp2 import sas_cutoff
from alspec.kernels.common.pdl import prefetch
from alspec.kernels.kv_codec.flashq.record import TOKENS
from alspec.kernels.kv_codec.formats import has_own_bits
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD

__all__ = [
    "quantised_combine_kernel",
    "quantised_decode_kernel",
    "partials_to_combine",
    "program_in_schedule",
    "program_work",
]


@triton.jit
def _mask_empty(o, lse, is_empty):
    """Return the partial unchanged, or with `is_empty` one of weight 0: o = 0, lse = -inf."""
    kept_o, kept_lse = (), ()
    for i in tl.static_range(len(o)):
        kept_o = kept_o + (tl.where(is_empty, 0.0, o[i]),)  # noqa: RUF005 (Triton has no *)
    for c in tl.static_range(len(lse)):
        kept_lse = kept_lse + (tl.where(is_empty, float("-inf"), lse[c]),)  # noqa: RUF005
    return kept_o, kept_lse


@triton.jit
def _send_spec(
    o, lse, spec_out_ptr, spec_lse_ptr, output, part, parts, has_tokens, epoch, OUTPUTS: tl.constexpr,
    SPEC_PARTS: tl.constexpr, RECALL_PARTS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr,
    WARPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write `A~` of an output, or one part of it with its lse; with an epoch as LL packets.

    If the schedule made sink and window one part of SPEC_PARTS, an empty second part is written as well. Part
    SPEC_PARTS + r is over recalled blocks. Without an epoch the parts are combined by another launch.

    Returns:
        o, lse: of the part; with weight 0 if it has no tokens.
    """
    first = output * HEADS_PER_KV
    if SPEC_PARTS + RECALL_PARTS == 1:
        write_heads(o, lse, spec_out_ptr, None, first, epoch, HEADS_PER_KV, HEADS, WARPS, D)
    else:
        PART: tl.constexpr = OUTPUTS * HEADS_PER_KV
        o, lse = _mask_empty(o, lse, not has_tokens)
        if epoch is not None:
            write_heads(o, lse, spec_out_ptr, spec_lse_ptr, part * PART + first, epoch, HEADS_PER_KV, HEADS, WARPS, D)
            if SPEC_PARTS > 1:
                if (parts == 1) & (part == 0):  # the receiver always waits for SPEC_PARTS parts
                    # Always true here; `where` keeps the register layout.
                    empty_o, empty_lse = _mask_empty(o, lse, parts == 1)
                    write_heads(
                        empty_o, empty_lse, spec_out_ptr, spec_lse_ptr, PART + first, epoch, HEADS_PER_KV, HEADS,
                        WARPS, D,
                    )  # fmt: skip
    return o, lse


@triton.jit
def _with_listed(
    blocks, list_ptr, recall_part, is_recall, first_visible, RECALL: tl.constexpr, RECALL_PARTS: tl.constexpr
):
    """Return the blocks of a work item with the list from which a part over recalled blocks reads them.

    Args:
        blocks: of `item_blocks`.  list_ptr: list of the output.  recall_part: which part, if `is_recall`.
        first_visible: first token of the sliding window, or None; blocks in front of it are left out.
    """
    BLOCKS: tl.constexpr = recall_part_blocks(RECALL, RECALL_PARTS)
    first = tl.where(is_recall, recall_part, 0) * BLOCKS
    entries = tl.arange(0, 32)
    is_entry = is_recall & (entries < BLOCKS) & (first + entries < RECALL)
    listed = tl.load(list_ptr + first + entries, mask=is_entry, other=-1)
    count = tl.sum((listed >= 0).to(tl.int32), 0)
    if first_visible is not None:
        hidden = count_hidden(listed, is_entry, first_visible)
        first, count = first + hidden, count - hidden
    count = tl.where(is_recall, count, blocks[3])
    first_block, split = tl.where(is_recall, 0, blocks[0]), tl.where(is_recall, 0, blocks[1])
    return first_block, split, blocks[2], count, list_ptr + first, is_recall


@triton.jit
def _cache_head(output, HKV: tl.constexpr, BUNDLES: tl.constexpr):
    """Index of an output's KV head in the cache, [B, HKV]: the bundles of rows of a request share its cache."""
    return output if BUNDLES == 1 else output // (HKV * BUNDLES) * HKV + output % HKV


@triton.jit
def program_in_schedule(PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, SCHEDULES: tl.constexpr):
    """Return the first output of this program's schedule, and the program's number in that schedule.

    PROGRAMS: of the launch. Working programs are spread over all SMs. Programs at the start of an output have more work
    and are placed on different SMs.
    """
    if SCHEDULES > 1:
        first_output, program = tl.program_id(0) % SCHEDULES, tl.program_id(0) // SCHEDULES
    else:
        SMS: tl.constexpr = PROGRAMS // PER_SM
        index, sm = tl.program_id(0) // SMS, tl.program_id(0) % SMS
        first_output, program = 0, index * SMS + (sm + index * (SMS // 8)) % SMS
    return first_output, program


@triton.jit
def program_work(
    program, rest_tiles, rest_ends, row_starts, lead_in, parts, used, total, SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr, RECALL: tl.constexpr = 0, RECALL_PARTS: tl.constexpr = 0,
    WARPS: tl.constexpr = 1,
):  # fmt: skip
    """Return the work of one program of a schedule.

    Args:
        program: its number in the schedule.  The others: as `build_schedule` returned them.
    Returns:
        tile, run_end: its run [tile, run_end) in the row of the rests alone.
        spec_item, spec_items_end: its spec items [spec_item, spec_items_end); they come first.
        num_items: number of all its work items.
    """
    begin = run_start(program, used, total)
    end = run_start(program + 1, used, total)
    tile = tl.sum(tl.minimum(tl.maximum(begin - row_starts, 0), rest_tiles), 0)
    run_end = tl.sum(tl.minimum(tl.maximum(end - row_starts, 0), rest_tiles), 0)
    spec_item = 0
    spec_items_end = 0
    if SPEC and PHASE != REST:
        spec_item = spec_items_before(
            begin, row_starts - lead_in, row_starts, parts, SPEC_PARTS, RECALL, RECALL_PARTS, WARPS
        )
        spec_items_end = spec_items_before(
            end, row_starts - lead_in, row_starts, parts, SPEC_PARTS, RECALL, RECALL_PARTS, WARPS
        )
    is_in_run = tl.minimum(rest_ends, run_end) > tl.maximum(rest_ends - rest_tiles, tile)
    return tile, run_end, spec_item, spec_items_end, spec_items_end - spec_item + tl.sum(is_in_run.to(tl.int32), 0)


@triton.jit
def _attend_item(
    buffers, parity, query_parity, source, qk_scale, records, width, scales, blocks, block_lse, tail, tail_scale_ptr,
    has_tail, tail_tokens, row_lens, first_visible, cutoff, FORMAT: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, WARPS: tl.constexpr, D: tl.constexpr, SAS: tl.constexpr,
    BULK: tl.constexpr, BULK_Q: tl.constexpr,
):  # fmt: skip
    """Attention of one work item: its tail if it has one, then its blocks.

    Args:
        buffers, parity, query_parity: of `init_buffers`; phases of the barriers of the records and of q.
        source: of `query_source`.
        records, scales, tail, tail_scale_ptr: of the output.  width: bits of a code.
        block_lse: as for `attend_blocks`.
        blocks, has_tail: of `item_blocks`; with BULK the copies of the first records are already issued.
        tail_tokens, row_lens: as for `attend_tail`.  first_visible: as for `attend_blocks`.
        cutoff: of `sas_exp2`.  BULK_Q: whether q comes through shared memory.
    Returns:
        o, lse: of `combine_warps`.  parity, query_parity: for the next work item.
    """
    if has_tail:
        maxima, state = attend_tail(
            source, qk_scale, tail, tail_scale_ptr, tail_tokens, row_lens, cutoff, HEADS_PER_KV, HEADS, TOGETHER, WARPS,
            D, SAS,
        )  # fmt: skip
    else:
        maxima, state = empty_softmax(HEADS, WARPS, D)
    if blocks[3] > 0:
        query = prepare_query(source, buffers, query_parity, FORMAT, HEADS_PER_KV, HEADS, TOGETHER, WARPS, D, BULK_Q)
        query_parity ^= 1
        # Heads may have 2 or 4 bits, known only here: the kernel contains both loops.
        if has_own_bits(FORMAT) and (width == 2):
            maxima, state, parity = attend_blocks(
                maxima, state, query, qk_scale, records, scales, blocks, block_lse, first_visible, cutoff, buffers,
                parity, FORMAT, HEADS_PER_KV, HEADS, 2, WARPS, D, SAS, BULK,
            )  # fmt: skip
        else:
            maxima, state, parity = attend_blocks(
                maxima, state, query, qk_scale, records, scales, blocks, block_lse, first_visible, cutoff, buffers,
                parity, FORMAT, HEADS_PER_KV, HEADS, 4, WARPS, D, SAS, BULK,  # 4: not read unless `has_own_bits`
            )  # fmt: skip
    o, lse = combine_warps(buffers, maxima, state, HEADS, WARPS, D, BULK)
    return o, lse, parity, query_parity


# Not specialised, because no code depends on their divisibility: one kernel serves every capacity and chunk size.
@triton.jit(do_not_specialize=["num_blocks", "chunk_blocks", "sliding_window"], do_not_specialize_on_alignment=PER_HEAD)
def quantised_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, D]; with rows [B ROWS, Hkv * HEADS_PER_KV / TOGETHER, D]
    records_ptr,  # [W] int32
    offset_ptr,  # [B, Hkv] int64
    bits_ptr,  # [B, Hkv] int32
    scales_ptr,  # [B, Hkv, NB, 2] fp32
    tail_ptr,  # [B, Hkv, 2, 64, D / 4] int32
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    seq_lens_ptr,  # [B ROWS] int32; rows of a request end in the same block of 64: all read the records before it
    # [B, Hkv * HEADS_PER_KV, D], or with an epoch [P, ...] LL packets of P = SPEC_PARTS + RECALL_PARTS parts; may be
    # the paired rank's memory
    spec_out_ptr,
    spec_lse_ptr,  # [P, B, Hkv * HEADS_PER_KV] LL packets; None with one part
    epoch_ptr,  # [1] int32: A~ is sent as LL packets; or None
    # [G + (1 + P) OUTPUTS, HEADS_PER_KV, D] fp32 partials: of the runs, then for each output the parts of A~
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + P) OUTPUTS, HEADS_PER_KV] fp32
    gate_ptr,  # [1] int32 or None
    recalled_ptr,  # [B, Hkv, RECALL] int32, blocks in ascending order, then -1; or None
    block_lse_ptr,  # [B BUNDLES, Hkv, NB of its own, 4, HEADS_PER_KV] fp32: log2 of the weights of each block; or None
    sliding_window,  # newest tokens that each row attends to; None: all
    num_blocks,  # NB
    num_recall_blocks,  # NB of block_lse
    qk_scale,  # sm_scale log2(e)
    chunk_blocks,  # S / 64
    FORMAT: tl.constexpr,  # of the records
    HEADS_PER_KV: tl.constexpr,  # columns of an output, see `query_row`
    D: tl.constexpr,
    HKV: tl.constexpr,
    ROWS: tl.constexpr,  # of each request
    TOGETHER: tl.constexpr,  # rows of an output; BUNDLES = ROWS / TOGETHER, rounded up
    OUTPUTS: tl.constexpr,  # B BUNDLES HKV
    SCHEDULES: tl.constexpr,  # 1 for all outputs, or one for each
    OUTPUTS_PAD: tl.constexpr,  # of one schedule
    PROGRAMS: tl.constexpr,
    PER_SM: tl.constexpr,
    WARPS: tl.constexpr,
    SAS: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,  # 1; with one request also 2: the tail, and the blocks
    RECALL: tl.constexpr,  # blocks of a recall list; 0: none
    RECALL_PARTS: tl.constexpr,  # parts of A~ over them
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    READ_LENGTHS_EARLY: tl.constexpr,  # `prefetch_before_wait`
    BULK: tl.constexpr,  # whether records come by bulk copies into shared memory
):
    """Write the partials of all runs; with speculation also `A~`. Grid [PROGRAMS]."""
    # 1. The schedule. Every program computes all of it. Bits and offsets are written by the prompt only, never in a
    # step, so they are loaded before the wait for the previous kernel.
    first_output, program = program_in_schedule(PROGRAMS, PER_SM, SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    output_mask = outputs < OUTPUTS // SCHEDULES
    BUNDLES: tl.constexpr = (ROWS + TOGETHER - 1) // TOGETHER
    heads = _cache_head(first_output + outputs, HKV, BUNDLES)
    bits = tl.load(bits_ptr + heads, mask=output_mask, other=4)
    # In units of 16 bytes: these fit 32 bits, so `pick` needs one reduction instruction.
    offsets = (tl.load(offset_ptr + heads, mask=output_mask, other=0) // 4).to(tl.int32)
    buffers, parity, query_parity = init_buffers(WARPS, D, BULK), 0, 0
    PREFETCH_TILE: tl.constexpr = READ_LENGTHS_EARLY and not SPEC and gate_ptr is None
    if PDL and not READ_LENGTHS_EARLY:
        start_after(False)
    last_rows = request_row(outputs // HKV, TOGETHER - 1, ROWS, TOGETHER)
    seq_lens = tl.load(seq_lens_ptr + last_rows, mask=output_mask, other=0)
    if PDL and READ_LENGTHS_EARLY:
        start_after(PREFETCH_TILE)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)
    # Heads that the MMAs have columns for: 4 with two columns each, or 8.
    HEADS: tl.constexpr = COLUMNS // 2 if HEADS_PER_KV <= COLUMNS // 2 else COLUMNS
    BULK_Q: tl.constexpr = BULK and q_ptr.dtype.element_ty.primitive_bitwidth == 16
    rest_tiles, rest_ends, row_starts, lead_in, parts, used, total = build_schedule(
        seq_lens, output_mask, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS,
        PHASE, RECALL, RECALL_PARTS, sliding_window,
    )  # fmt: skip
    tile, run_end, spec_item, spec_items_end, items_left = program_work(
        program, rest_tiles, rest_ends, row_starts, lead_in, parts, used, total, SPEC, SPEC_PARTS, PHASE, RECALL,
        RECALL_PARTS, WARPS,
    )  # fmt: skip

    # Work items: first the spec items, each sent before the next item; then one item for each output whose rest the run
    # overlaps. No loop-invariant code motion: values computed ahead, such as shared memory addresses, would take
    # registers that the loops over records need.
    for _ in tl.range(items_left, num_stages=1, disable_licm=True):
        # 2. Output and blocks of this work item.
        is_spec = spec_item < spec_items_end
        part = 0
        local_output, rest_start = 0, 0
        if SCHEDULES == 1:
            local_output, rest_start = locate(tile, rest_ends)
            if SPEC:
                if RECALL_PARTS > 0:
                    local_output = tl.where(is_spec, spec_item // (parts + RECALL_PARTS), local_output)
                else:
                    local_output = tl.where(is_spec, spec_item >> (parts - 1), local_output)
                rest_start = tl.sum(tl.where(outputs < local_output, rest_tiles, 0), 0)
        if RECALL_PARTS > 0:
            part = spec_item % (parts + RECALL_PARTS)
        elif SPEC_PARTS > 1:
            part = spec_item & (parts - 1)
        num_tiles = pick(rest_tiles, local_output)
        seq_len = pick(seq_lens, local_output)
        records = records_ptr + pick(offsets, local_output).to(tl.int64) * 4
        width = pick(bits, local_output)
        output = first_output + local_output
        blocks, has_tail, full = item_blocks(
            is_spec, part, parts, tile, run_end, rest_start, seq_len, chunk_blocks, SPEC, SPEC_PARTS, WARPS,
            sliding_window,
        )  # fmt: skip
        first_visible = None
        if sliding_window is not None:
            first_visible = seq_len - sliding_window
        is_recall = False
        if RECALL_PARTS > 0:
            is_recall = is_spec & (part >= parts)
            blocks = _with_listed(
                blocks, recalled_ptr + output * RECALL, part - parts, is_recall, first_visible, RECALL, RECALL_PARTS
            )
            has_tail = has_tail & (part < parts)
            part = tl.where(part < parts, part, part - parts + SPEC_PARTS)
        block_lse = None
        if block_lse_ptr is not None:
            block_lse = block_lse_ptr + output.to(tl.int64) * num_recall_blocks * (4 * HEADS_PER_KV), not is_spec
        first, count = blocks[0], blocks[3]
        head = _cache_head(output, HKV, BUNDLES)
        tail = tail_ptr + head.to(tl.int64) * (2 * TOKENS * D // 4)
        scales = scales_ptr + head.to(tl.int64) * num_blocks * 2
        if PDL:
            # Prefetch into L2 now; the data arrives while q is loaded and converted.
            if has_tail:
                prefetch(tail, 2 * TOKENS * D)
            prefetch(scales + first * 2, (tl.where(count > 0, blocks[1], 0) * 8 + 15) // 16 * 16)
        # Copy q before the records, if the previous kernel has already written it.
        source = query_source(q_ptr, output, HKV, HEADS_PER_KV, D, ROWS, TOGETHER)
        if BULK_Q and not PREFETCH_TILE:
            copy_query(buffers, source, count > 0, HEADS_PER_KV, HEADS, TOGETHER, WARPS, D)
        if BULK:
            copy_side(buffers, records, 0, blocks, width, count > 0, (), FORMAT, False, WARPS, D)
            copy_side(buffers, records, 0, blocks, width, count > 0, (), FORMAT, True, WARPS, D)
        if PREFETCH_TILE:
            gdc_wait()
            if BULK_Q:
                copy_query(buffers, source, count > 0, HEADS_PER_KV, HEADS, TOGETHER, WARPS, D)

        # 3. Attention over the tail and the records.
        # The cutoff depends on this request's length now, not on the cache's capacity or the length at capture.
        cutoff = sas_cutoff(seq_len) if SAS else 0.0
        tail_scale = tail_scale_ptr + head * 2
        tail_tokens = (seq_len - full * TOKENS,)
        if sliding_window is not None:
            tail_tokens = tail_tokens[0], first_visible - full * TOKENS
        row_lens = None
        if TOGETHER > 1:
            row_lens = seq_lens_ptr + request_row(output // HKV, 0, ROWS, TOGETHER), full * TOKENS
        o, lse, parity, query_parity = _attend_item(
            buffers, parity, query_parity, source, qk_scale, records, width, scales, blocks, block_lse, tail,
            tail_scale, has_tail, tail_tokens, row_lens, first_visible, cutoff, FORMAT, HEADS_PER_KV, HEADS, TOGETHER,
            WARPS, D, SAS, BULK, BULK_Q,
        )  # fmt: skip

        # 4. Write the partial; send A~ to its receiver as well.
        partial = first_output * (PROGRAMS // SCHEDULES) + program + local_output
        if SPEC and PHASE != REST:
            if is_spec:
                o, lse = _send_spec(
                    o, lse, spec_out_ptr, spec_lse_ptr, output, part, parts, (part == 0) | (count > 0), epoch,
                    OUTPUTS, SPEC_PARTS, RECALL_PARTS, HEADS_PER_KV, HEADS, WARPS, D,
                )  # fmt: skip
                partial = PROGRAMS + OUTPUTS + output * (SPEC_PARTS + RECALL_PARTS) + part
        write_heads(o, lse, o_partial_ptr, lse_partial_ptr, partial * HEADS_PER_KV, None, HEADS_PER_KV, HEADS, WARPS, D)
        items_left -= 1
        free_buffers(items_left > 0, BULK)

        tile = tl.where(is_spec, tile, rest_start + num_tiles)
        spec_item += 1


@triton.jit
def partials_to_combine(
    seq_lens_ptr, output, chunk_blocks, HKV: tl.constexpr, OUTPUTS: tl.constexpr, SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr, SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr, RECALL: tl.constexpr = 0, RECALL_PARTS: tl.constexpr = 0,
    sliding_window=None, ROWS: tl.constexpr = 1, TOGETHER: tl.constexpr = 1,
):  # fmt: skip
    """Return the first partial of an output's rest, their number, and the number of parts of its `A~`."""
    local_output = output % (OUTPUTS // SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    output_mask = outputs < OUTPUTS // SCHEDULES
    last_rows = request_row(outputs // HKV, TOGETHER - 1, ROWS, TOGETHER)
    seq_lens = tl.load(seq_lens_ptr + last_rows, mask=output_mask, other=0)
    rest_tiles, _, row_starts, _, parts, used, total = build_schedule(
        seq_lens, output_mask, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS,
        PHASE, RECALL, RECALL_PARTS, sliding_window,
    )  # fmt: skip
    # The rest of an output is one range of tiles; the runs that overlap it use consecutive partials.
    num_tiles, row_start = pick(rest_tiles, local_output), pick(row_starts, local_output)
    first_run = program_of_tile(row_start, used, total)
    last_run = program_of_tile(row_start + num_tiles - 1, used, total)
    partial = (output - local_output) * (PROGRAMS // SCHEDULES) + first_run + local_output
    return partial, tl.where(num_tiles > 0, last_run - first_run + 1, 0), parts


@triton.jit(do_not_specialize=["chunk_blocks", "sliding_window"])
def quantised_combine_kernel(
    seq_lens_ptr,  # [B ROWS] int32
    o_partial_ptr,  # [G + (1 + P) OUTPUTS, HEADS_PER_KV, D] fp32, of `quantised_decode_kernel`; P parts of A~
    lse_partial_ptr,  # [G + (1 + P) OUTPUTS, HEADS_PER_KV] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, D]; with rows [B ROWS, Hkv * HEADS_PER_KV / TOGETHER, D]
    lse_ptr,  # the same without D, fp32
    sums_ptr,  # [B, Hkv * HEADS_PER_KV * SLICES, 2] fp32: dist2, norm2; or None
    gate_ptr,  # [1] int32 or None
    sliding_window,  # of the attention kernel
    chunk_blocks,  # S / 64
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HKV: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OUTPUTS: tl.constexpr,  # B BUNDLES HKV
    SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,  # programs of the attention kernel
    WARPS: tl.constexpr,  # warps of its programs
    SLICE: tl.constexpr,  # channels of a program
    SLICES: tl.constexpr,  # programs of a head
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    RECALL: tl.constexpr,
    RECALL_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # phase of the attention kernel; PREDICTOR: combine the parts of A~
    PDL: tl.constexpr,
):
    """Combine the partials of the attention kernel. Grid [B BUNDLES Hkv HEADS_PER_KV SLICES]."""
    if PDL:
        gdc_launch_dependents()
    column, slice_index = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    output, head = column // HEADS_PER_KV, column % HEADS_PER_KV
    partial, runs, parts = partials_to_combine(
        seq_lens_ptr,
        output,
        chunk_blocks,
        HKV,
        OUTPUTS,
        SCHEDULES,
        OUTPUTS_PAD,
        PROGRAMS,
        WARPS,
        SPEC,
        SPEC_PARTS,
        PHASE,
        RECALL,
        RECALL_PARTS,
        sliding_window,
        ROWS,
        TOGETHER,
    )
    if PHASE == PREDICTOR:
        runs = runs * 0
    if PDL:
        partial, runs = await_partials(partial, runs)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    row = query_row(output, head, HKV, HEADS_PER_KV, ROWS, TOGETHER)
    combine_output(
        o_partial_ptr, lse_partial_ptr, partial, runs, PROGRAMS + OUTPUTS + output * (SPEC_PARTS + RECALL_PARTS),
        parts, row, head, slice_index, out_ptr, lse_ptr, sums_ptr, HEADS_PER_KV, D, D, SLICE, SLICES, ROUND, SPEC,
        SPEC_PARTS, RECALL_PARTS, PHASE == PREDICTOR,
    )  # fmt: skip
