"""Device code of decode over the quantised cache: turns, where partials lie (see flashq_decode.py for the method).

The words used here are those of block_schedule.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import await_partials, combine_output
from alspec.kernels.attention.decode.tile_schedule import REST, locate, start_after
from alspec.kernels.attention.decode_flashq.block_attention import COLUMNS, attend_blocks, attend_tail, no_tokens
from alspec.kernels.attention.decode_flashq.block_schedule import (
    blocks_of_item,
    build_schedule,
    pick,
    run_of,
    run_start,
    spec_items_before,
)
from alspec.kernels.attention.decode_flashq.query import query_of_keys, send_query
from alspec.kernels.attention.decode_flashq.record_loads import init_buffers, send_side
from alspec.kernels.attention.decode_flashq.warp_combine import combine_warps, free_buffers, write_heads
from alspec.kernels.attention.sas_exp2 import sas_cutoff
from alspec.kernels.common.pdl import prefetch
from alspec.kernels.kv_codec.flashq.layout import PER_HEAD
from alspec.kernels.kv_codec.flashq.record import TOKENS

__all__ = [
    "partials_to_combine",
    "number_of_program",
    "share_of_program",
    "flashq_decode_kernel",
    "flashq_combine_kernel",
]


@triton.jit
def _unless_empty(o, lse, is_empty):
    """A partial of `combine_warps`, or without tokens, one that adds nothing to a merge."""
    kept_o, kept_lse = (), ()
    for i in tl.static_range(len(o)):
        kept_o = kept_o + (tl.where(is_empty, 0.0, o[i]),)  # noqa: RUF005 (Triton has no *)
    for c in tl.static_range(len(lse)):
        kept_lse = kept_lse + (tl.where(is_empty, float("-inf"), lse[c]),)  # noqa: RUF005
    return kept_o, kept_lse


@triton.jit
def _send_spec(
    o, lse, spec_out_ptr, spec_lse_ptr, output, part, parts, has_tokens, epoch, OUTPUTS: tl.constexpr,
    SPEC_PARTS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write `A~` of an output, with an epoch as words; or a part of it, with its lse, and also the one without tokens.

    Returns:
        The part: of no weight, if it has no tokens.
    """
    first = output * HEADS_PER_KV
    if SPEC_PARTS == 1:
        write_heads(o, lse, spec_out_ptr, None, first, epoch, HEADS_PER_KV, HEADS, WARPS, D)
    else:
        PART: tl.constexpr = OUTPUTS * HEADS_PER_KV
        o, lse = _unless_empty(o, lse, not has_tokens)
        write_heads(o, lse, spec_out_ptr, spec_lse_ptr, part * PART + first, epoch, HEADS_PER_KV, HEADS, WARPS, D)
        if parts == 1:  # the receiver does not know how many have tokens
            # Always empty here; by a condition, as that leaves each value in its lane.
            nothing, no_lse = _unless_empty(o, lse, parts == 1)
            write_heads(nothing, no_lse, spec_out_ptr, spec_lse_ptr, PART + first, epoch, HEADS_PER_KV, HEADS, WARPS, D)
    return o, lse


@triton.jit
def number_of_program(PROGRAMS: tl.constexpr, PER_SM: tl.constexpr, SCHEDULES: tl.constexpr):
    """Which plan this program works for, and its number there. PROGRAMS: of the launch.

    Programs in use are spread over all SMs, and those at the beginnings of outputs, which have more to do, lie on
    different ones.
    """
    if SCHEDULES > 1:
        first_output, program = tl.program_id(0) % SCHEDULES, tl.program_id(0) // SCHEDULES
    else:
        SMS: tl.constexpr = PROGRAMS // PER_SM
        place, sm = tl.program_id(0) // SMS, tl.program_id(0) % SMS
        first_output, program = 0, place * SMS + (sm + place * (SMS // 8)) % SMS
    return first_output, program


@triton.jit
def share_of_program(
    program, lengths, ends, rest_at, lead_in, parts, used, total, SPEC: tl.constexpr, SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """What a program does of a plan.

    Returns:
        The steps of its run, [here, last), in the row of rests alone; its guesses, [guess, guesses_end), which come
        first; in how many turns all that is done.
    """
    begin = run_start(program, used, total)
    end = run_start(program + 1, used, total)
    here = tl.sum(tl.minimum(tl.maximum(begin - rest_at, 0), lengths), 0)
    last = tl.sum(tl.minimum(tl.maximum(end - rest_at, 0), lengths), 0)
    guess = 0
    guesses_end = 0
    if SPEC and PHASE != REST:
        guess = spec_items_before(begin, rest_at - lead_in, parts, SPEC_PARTS)
        guesses_end = spec_items_before(end, rest_at - lead_in, parts, SPEC_PARTS)
    met = tl.minimum(ends, last) > tl.maximum(ends - lengths, here)
    return here, last, guess, guesses_end, guesses_end - guess + tl.sum(met.to(tl.int32), 0)


@triton.jit
def _attend_item(
    buffers, parity, query_parity, q_ptr, output, qk_scale, records, width, scales, blocks, tail, tail_scale_ptr,
    has_tail, tail_tokens, cutoff, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr,
    D: tl.constexpr, SAS: tl.constexpr, BULK: tl.constexpr, SENT: tl.constexpr,
):  # fmt: skip
    """Attention over the blocks of a turn, after its tail if it has one: o and lse of `combine_warps`, and parities.

    Args: `blocks` and `has_tail` of `blocks_of_item`, whose first records are on their way.  width: bits of a code.
        tail, tail_scale_ptr: of the output.  cutoff: of `sas_exp2`.  SENT: whether q comes through shared memory.
    """
    if has_tail:
        maxima, state = attend_tail(
            q_ptr, output, qk_scale, tail, tail_scale_ptr, tail_tokens, cutoff, HEADS_PER_KV, HEADS, WARPS, D, SAS
        )
    else:
        maxima, state = no_tokens(HEADS, WARPS, D)
    if blocks[3] > 0:
        query = query_of_keys(q_ptr, output, buffers, query_parity, HEADS_PER_KV, HEADS, WARPS, D, SENT)
        query_parity ^= 1
        if width == 2:
            maxima, state, parity = attend_blocks(
                maxima, state, query, qk_scale, records, scales, blocks, cutoff, buffers, parity,
                HEADS, 2, WARPS, D, SAS, BULK,
            )  # fmt: skip
        else:
            maxima, state, parity = attend_blocks(
                maxima, state, query, qk_scale, records, scales, blocks, cutoff, buffers, parity,
                HEADS, 4, WARPS, D, SAS, BULK,
            )  # fmt: skip
    o, lse = combine_warps(buffers, maxima, state, HEADS, WARPS, D, BULK)
    return o, lse, parity, query_parity


# Not specialised, because nothing is divided by them: one compiled kernel serves every capacity and chunk size.
@triton.jit(do_not_specialize=["num_blocks", "chunk_blocks"], do_not_specialize_on_alignment=PER_HEAD)
def flashq_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, D]
    records_ptr,  # [W] int32
    offset_ptr,  # [B, Hkv] int64
    bits_ptr,  # [B, Hkv] int32
    scales_ptr,  # [B, Hkv, NB, 2] fp32
    tail_ptr,  # [B, Hkv, 2, 64, D / 4] int32
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    seq_lens_ptr,  # [B] int32
    # [B, Hkv * HEADS_PER_KV, D], or [SPEC_PARTS, ...] words; may be the paired rank's mailbox
    spec_out_ptr,
    spec_lse_ptr,  # [SPEC_PARTS, B, Hkv * HEADS_PER_KV] words, or None where there is one part
    epoch_ptr,  # [1] int32, where A~ goes as words, or None
    # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV, D] fp32 partials: of runs, then of each head the parts of A~
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV] fp32
    gate_ptr,  # [1] int32 or None
    num_blocks,  # NB
    qk_scale,
    chunk_blocks,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,  # B HKV
    SCHEDULES: tl.constexpr,  # one for all outputs, or one for each
    OUTPUTS_PAD: tl.constexpr,  # of a plan
    PROGRAMS: tl.constexpr,
    PER_SM: tl.constexpr,
    WARPS: tl.constexpr,
    SAS: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,  # 1, or 2 with one request: the tail, and the blocks
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    BULK: tl.constexpr,  # whether records come by bulk copies into shared memory
):
    """Partials, and with a guess `A~`; grid [PROGRAMS]."""
    # 1. The schedule: every program computes all of it, from what it and the addresses need of every output. Bits and
    # offsets are the prompt's, and no kernel of a step writes them: so they are asked for before the wait.
    first_output, program = number_of_program(PROGRAMS, PER_SM, SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS // SCHEDULES
    bits = tl.load(bits_ptr + first_output + outputs, mask=exists, other=4)
    # In units of 16 bytes, so that they fit 32 bits, which `pick` takes in one instruction.
    offsets = (tl.load(offset_ptr + first_output + outputs, mask=exists, other=0) // 4).to(tl.int32)
    buffers, parity, query_parity = init_buffers(WARPS, D, BULK), 0, 0
    AHEAD: tl.constexpr = EARLY and not SPEC and gate_ptr is None
    if PDL and not EARLY:
        start_after(False)
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    if PDL and EARLY:
        start_after(AHEAD)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)
    HEADS: tl.constexpr = COLUMNS // 2 if HEADS_PER_KV <= COLUMNS // 2 else COLUMNS  # that the products have columns of
    SENT: tl.constexpr = BULK and q_ptr.dtype.element_ty.primitive_bitwidth == 16
    lengths, ends, rest_at, lead_in, parts, used, total = build_schedule(
        seq_lens, exists, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS, PHASE
    )
    here, last, guess, guesses_end, left = share_of_program(
        program, lengths, ends, rest_at, lead_in, parts, used, total, SPEC, SPEC_PARTS, PHASE
    )

    # Turns: first the guesses of this run, each sent before the next turn, then a turn for each output whose
    # rest it meets. What no turn changes, such as addresses in shared memory, is not computed ahead of them: it would
    # take registers that the loops over records need.
    for _ in tl.range(left, num_stages=1, disable_licm=True):
        # 2. Which output and blocks this turn is about.
        is_spec = guess < guesses_end
        part = 0
        planned, before = 0, 0
        if SCHEDULES == 1:
            planned, before = locate(here, ends)
            if SPEC:
                planned = tl.where(is_spec, guess >> (parts - 1), planned)
                before = tl.sum(tl.where(outputs < planned, lengths, 0), 0)
        if SPEC_PARTS > 1:
            part = guess & (parts - 1)
        length = pick(lengths, planned)
        seq_len = pick(seq_lens, planned)
        records = records_ptr + pick(offsets, planned).to(tl.int64) * 4
        width = pick(bits, planned)
        output = first_output + planned
        blocks, has_tail, full = blocks_of_item(
            is_spec, part, parts, here, last, before, seq_len, chunk_blocks, SPEC, SPEC_PARTS, WARPS
        )
        first, count = blocks[0], blocks[3]
        tail = tail_ptr + output.to(tl.int64) * (2 * TOKENS * D // 4)
        scales = scales_ptr + output.to(tl.int64) * num_blocks * 2
        if PDL:
            # Memory is asked now, and answers while q comes and is made an operand.
            if has_tail:
                prefetch(tail, 2 * TOKENS * D)
            prefetch(scales + first * 2, (tl.where(count > 0, blocks[1], 0) * 8 + 15) // 16 * 16)
        # q ahead of the records, if it is there already.
        if SENT and not AHEAD:
            send_query(buffers, q_ptr, output, count > 0, HEADS_PER_KV, HEADS, WARPS, D)
        if BULK:
            send_side(buffers, records, 0, blocks, width, count > 0, (), False, WARPS, D)
            send_side(buffers, records, 0, blocks, width, count > 0, (), True, WARPS, D)
        if AHEAD:
            gdc_wait()
            if SENT:
                send_query(buffers, q_ptr, output, count > 0, HEADS_PER_KV, HEADS, WARPS, D)

        # 3. Stream the records, after the tail.
        # By the tokens of this request: neither the cache's capacity nor the length at capture matters.
        cutoff = sas_cutoff(seq_len) if SAS else 0.0
        o, lse, parity, query_parity = _attend_item(
            buffers, parity, query_parity, q_ptr, output, qk_scale, records, width, scales, blocks, tail,
            tail_scale_ptr + output * 2, has_tail, seq_len - full * TOKENS, cutoff, HEADS_PER_KV, HEADS, WARPS, D, SAS,
            BULK, SENT,
        )  # fmt: skip

        # 4. Leave the partial; a guess also goes to its receiver.
        slot = first_output * (PROGRAMS // SCHEDULES) + program + planned
        if SPEC and PHASE != REST:
            if is_spec:
                o, lse = _send_spec(
                    o, lse, spec_out_ptr, spec_lse_ptr, output, part, parts, (part == 0) | (count > 0), epoch,
                    OUTPUTS, SPEC_PARTS, HEADS_PER_KV, HEADS, WARPS, D,
                )  # fmt: skip
                slot = PROGRAMS + OUTPUTS + output * SPEC_PARTS + part
        write_heads(o, lse, o_partial_ptr, lse_partial_ptr, slot * HEADS_PER_KV, None, HEADS_PER_KV, HEADS, WARPS, D)
        left -= 1
        free_buffers(left > 0, BULK)

        here = tl.where(is_spec, here, before + length)
        guess += 1


@triton.jit
def partials_to_combine(
    seq_lens_ptr, output, chunk_blocks, HKV: tl.constexpr, OUTPUTS: tl.constexpr, SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr, SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Where the partials of an output's rest begin and how many there are; in how many parts its guess came."""
    planned = output % (OUTPUTS // SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS // SCHEDULES
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    lengths, _, rest_at, _, parts, used, total = build_schedule(
        seq_lens, exists, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS, PHASE
    )
    # The rest of an output is one range of steps, and the runs that meet it use consecutive slots.
    length, rest = pick(lengths, planned), pick(rest_at, planned)
    first_run = run_of(rest, used, total)
    last_run = run_of(rest + length - 1, used, total)
    slot = (output - planned) * (PROGRAMS // SCHEDULES) + first_run + planned
    return slot, tl.where(length > 0, last_run - first_run + 1, 0), parts


@triton.jit(do_not_specialize=["chunk_blocks"])
def flashq_combine_kernel(
    seq_lens_ptr,  # [B] int32
    o_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV, D] fp32, as the attention has left them
    lse_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, D]
    lse_ptr,  # [B, Hkv * HEADS_PER_KV] fp32
    sums_ptr,  # [B, Hkv * HEADS_PER_KV * CHUNKS, 2] fp32: dist2, norm2; or None
    gate_ptr,  # [1] int32 or None
    chunk_blocks,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,  # B HKV
    SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of the attention,
    WARPS: tl.constexpr,  # and its warps
    SLICE: tl.constexpr,  # channels of a program, and
    SLICES: tl.constexpr,  # programs of a head
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # of the attention before it
    PDL: tl.constexpr,
):
    """Merge what the attention has left; grid [B Hkv HEADS_PER_KV CHUNKS]."""
    if PDL:
        gdc_launch_dependents()
    row, chunk = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    output, head = row // HEADS_PER_KV, row % HEADS_PER_KV
    slot, runs, parts = partials_to_combine(
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
    )
    if PDL:
        slot, runs = await_partials(slot, runs)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    combine_output(
        o_partial_ptr, lse_partial_ptr, slot, runs, PROGRAMS + OUTPUTS + output * SPEC_PARTS, parts,
        row, head, chunk, out_ptr, lse_ptr, sums_ptr, HEADS_PER_KV, D, D, SLICE, SLICES, ROUND, SPEC,
        SPEC_PARTS,
    )  # fmt: skip
