"""Device code of decode over the quantised cache: schedule, where partials lie (see turbo_attention.py for the method).

Words as in lean_schedule.py (output, guess, rest, run, turn, slot), with *steps* instead of tiles. Outputs lie in one
row of steps: before the rest of each is its *lead-in*, steps without work that stand for what its guess or its tail
takes. So a run that holds an output's first lead-in step has the guess, and is that much shorter. In two parts, the
guess's tail is of that run, and its blocks are of the one that holds the step GUESS_STEPS behind.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lean_schedule import PREDICTOR, REST, locate, start_after
from .merge import await_partials, inverse_of_sum, merge_output
from .prefetch import prefetch
from .sas import sas_cutoff
from .turbo_block import (
    COLUMNS,
    TOKENS,
    attend_blocks,
    attend_tail,
    no_tokens,
)
from .turbo_query import query_of_keys, send_query
from .turbo_records import open_slots, send_side
from .turbo_warps import free_slots, merge_warps, write_heads

__all__ = ["turbo_decode_kernel", "turbo_merge_kernel"]

# In steps: what a guess takes beyond its blocks (its tail, and sending it away), and a tail without a guess.
GUESS_STEPS = tl.constexpr(3)
TAIL_STEPS = tl.constexpr(2)


@triton.jit
def _pick(values, index):
    """values[index] of a vector in registers."""
    at = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(at == index, values, tl.zeros_like(values)), 0)


@triton.jit
def _block_ranges(seq_len, chunk_blocks, SPEC: tl.constexpr):
    """sink, window, full: the guess is over blocks `[0, sink)`, `[window, full)` and the tail; the rest lies between.

    Without a guess the rest is all: the tail and blocks `[0, full)`.
    """
    full = tl.maximum(seq_len - 1, 0) // TOKENS
    if SPEC:
        sink = tl.minimum(chunk_blocks, full)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_blocks * TOKENS, 0) // TOKENS)
    else:
        sink = tl.zeros_like(full)
        window = full
    return sink, window, full


@triton.jit
def _quotient(a, b):
    """floor(a / b), a >= 0, b > 0, if below 2^21: that of floats is one off at most, and takes a third of the time."""
    near = (a.to(tl.float32) * inverse_of_sum(b.to(tl.float32))).to(tl.int32)
    near -= (near * b > a).to(tl.int32)
    return near + ((near + 1) * b <= a).to(tl.int32)


@triton.jit
def _run_start(program, used, total):
    """First step of a program's run: floor(program total / used), in 32 bits. Equal outputs end where runs end."""
    place = tl.minimum(program, used)
    run = _quotient(total, used)
    return place * run + _quotient(place * (total - run * used), used)


@triton.jit
def _run_of(step, used, total):
    """The program whose run holds a step: the inverse of `_run_start`. The quotient of floats is one off at most."""
    near = (step.to(tl.float32) * (used.to(tl.float32) / total.to(tl.float32))).to(tl.int32)
    near = tl.minimum(near, used - 1)
    near -= (_run_start(near, used, total) > step).to(tl.int32)
    return near + (_run_start(near + 1, used, total) <= step).to(tl.int32)


@triton.jit
def _plan(
    seq_lens, exists, chunk_blocks, OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr,
    SPEC: tl.constexpr, GUESS_PARTS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """What follows from the lengths of all outputs, [OUTPUTS_PAD], alone.

    Returns:
        Steps of each output's rest, without a guess with one for the tail; where these end in a row of all; where they
        begin in the row with lead-ins; the lead-in of each; in how many parts a guess comes; how many programs work,
        and steps of all in that row.
    """
    outputs = tl.arange(0, seq_lens.shape[0])
    OWN_TAIL: tl.constexpr = 0 if SPEC else 1
    sink, window, _ = _block_ranges(seq_lens, chunk_blocks, SPEC)
    lengths = tl.where(exists, tl.cdiv(window - sink, WARPS) + OWN_TAIL, 0)
    if PHASE == PREDICTOR:
        lengths = tl.zeros_like(lengths)
    ends = tl.cumsum(lengths, 0)
    total = tl.sum(lengths, 0)
    if SPEC:
        lead_in = tl.cdiv(2 * chunk_blocks, WARPS) + 1 + GUESS_STEPS
        if PHASE == REST:
            lead_in = 0
    else:
        lead_in = tl.minimum(total // (4 * PROGRAMS), TAIL_STEPS)
    rest_at = tl.where(exists, ends - lengths + (outputs + 1) * lead_in, 2147483647)
    total += OUTPUTS * lead_in
    # As few programs as make the longest run no longer, because that leaves fewer partials. No run is empty, so that
    # the runs that meet an output's rest use consecutive slots; equal outputs have the same number of runs each.
    longest = tl.maximum(tl.cdiv(total, PROGRAMS), 1)
    used = _quotient(total + longest - 1, longest)
    even_used = tl.cdiv(used, OUTPUTS) * OUTPUTS
    used = tl.maximum(tl.where(even_used <= tl.minimum(PROGRAMS, total), even_used, used), 1)
    parts = 1
    if GUESS_PARTS > 1:  # where both never lie in one run
        parts += (longest <= GUESS_STEPS).to(tl.int32)
    return lengths, ends, rest_at, lead_in, parts, used, total


@triton.jit
def _weightless(o, lse, where):
    """A partial of `merge_warps`, or where there are no tokens, one that adds nothing to a merge."""
    kept_o, kept_lse = (), ()
    for i in tl.static_range(len(o)):
        kept_o = kept_o + (tl.where(where, 0.0, o[i]),)  # noqa: RUF005 (Triton has no *)
    for c in tl.static_range(len(lse)):
        kept_lse = kept_lse + (tl.where(where, float("-inf"), lse[c]),)  # noqa: RUF005
    return kept_o, kept_lse


@triton.jit
def _send_part(
    o, lse, spec_out_ptr, spec_lse_ptr, output, part, epoch, OUTPUTS: tl.constexpr, HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr, WARPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write a part of `A~` of an output, and its lse, as words."""
    first = (part * OUTPUTS + output) * HEADS_PER_KV
    write_heads(o, lse, spec_out_ptr, spec_lse_ptr, first, epoch, HEADS_PER_KV, HEADS, WARPS, D)


@triton.jit
def _guesses_before(step, leads_at, parts, GUESS_PARTS: tl.constexpr):
    """How many guesses, or parts of one, begin before a step; leads_at: where the lead-in of each output begins."""
    before = leads_at < step
    guesses = before.to(tl.int32)
    if GUESS_PARTS > 1:
        # The tail first, then the blocks.
        guesses += ((leads_at + GUESS_STEPS < step) & (parts > 1)).to(tl.int32)
    return tl.sum(guesses, 0)


# Not specialised, because nothing is divided by them: one compiled kernel serves every capacity and chunk size.
@triton.jit(do_not_specialize=["num_blocks", "chunk_blocks"])
def turbo_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, D]
    records_ptr,  # [W] int32
    offset_ptr,  # [B, Hkv] int64
    bits_ptr,  # [B, Hkv] int32
    scales_ptr,  # [B, Hkv, NB, 2] fp32
    tail_ptr,  # [B, Hkv, 2, 64, D / 4] int32
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    seq_lens_ptr,  # [B] int32
    # [B, Hkv * HEADS_PER_KV, D], or [GUESS_PARTS, ...] words; may lie in the paired rank's memory
    spec_out_ptr,
    spec_lse_ptr,  # [GUESS_PARTS, B, Hkv * HEADS_PER_KV] words, or None where there is one part
    epoch_ptr,  # [1] int32, where A~ goes as words, or None
    # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV, D] fp32 partials: of runs, then of each head the parts of A~
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV] fp32
    gate_ptr,  # [1] int32 or None
    num_blocks,  # NB
    qk_scale,
    chunk_blocks,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,  # B HKV
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PER_SM: tl.constexpr,
    WARPS: tl.constexpr,
    SAS: tl.constexpr,
    SPEC: tl.constexpr,
    GUESS_PARTS: tl.constexpr,  # 1, or 2 with one request: the tail, and the blocks
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    BULK: tl.constexpr,  # whether records come by bulk copies into shared memory
):
    """Partials, and with a guess `A~`; grid [PROGRAMS]."""
    # 1. The schedule: every program computes all of it, from what it and the addresses need of every output. Bits and
    # offsets are the prompt's, and no kernel of a step writes them: so they are asked for before the wait.
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS
    bits = tl.load(bits_ptr + outputs, mask=exists, other=4)
    # In units of 16 bytes, so that they fit 32 bits, which `_pick` takes in one instruction.
    offsets = (tl.load(offset_ptr + outputs, mask=exists, other=0) // 4).to(tl.int32)
    slots, parity, query_parity = open_slots(WARPS, D, BULK), 0, 0
    if PDL:
        start_after(EARLY)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)
    HEADS: tl.constexpr = COLUMNS // 2 if HEADS_PER_KV <= COLUMNS // 2 else COLUMNS  # that the products have columns of
    SENT: tl.constexpr = BULK and q_ptr.dtype.element_ty.primitive_bitwidth == 16
    lengths, ends, rest_at, lead_in, parts, used, total = _plan(
        seq_lens, exists, chunk_blocks, OUTPUTS, PROGRAMS, WARPS, SPEC, GUESS_PARTS, PHASE
    )
    # Programs in use are spread over all SMs, and those at the beginnings of outputs, which have more to do, lie on
    # different ones.
    SMS: tl.constexpr = PROGRAMS // PER_SM
    place, sm = tl.program_id(0) // SMS, tl.program_id(0) % SMS
    program = place * SMS + (sm + place * (SMS // 8)) % SMS
    begin = _run_start(program, used, total)
    end = _run_start(program + 1, used, total)
    here = tl.sum(tl.minimum(tl.maximum(begin - rest_at, 0), lengths), 0)
    last = tl.sum(tl.minimum(tl.maximum(end - rest_at, 0), lengths), 0)
    guess = 0
    guesses_end = 0
    if SPEC and PHASE != REST:
        guess = _guesses_before(begin, rest_at - lead_in, parts, GUESS_PARTS)
        guesses_end = _guesses_before(end, rest_at - lead_in, parts, GUESS_PARTS)

    # Turns: first the guesses of this run, each sent before the next turn, then a turn for each output whose
    # rest it meets. What no turn changes, such as addresses in shared memory, is not computed ahead of them: it would
    # take registers that the loops over records need.
    met = tl.minimum(ends, last) > tl.maximum(ends - lengths, here)
    left = guesses_end - guess + tl.sum(met.to(tl.int32), 0)
    for _ in tl.range(left, num_stages=1, disable_licm=True):
        # 2. Which output and blocks this turn is about.
        is_guess = guess < guesses_end
        part = 0
        output, before = locate(here, ends)
        if SPEC:
            guessed = guess
            if GUESS_PARTS > 1:
                guessed, part = guess >> (parts - 1), guess & (parts - 1)
            output = tl.where(is_guess, guessed, output)
            before = tl.sum(tl.where(outputs < output, lengths, 0), 0)
        length = _pick(lengths, output)
        seq_len = _pick(seq_lens, output)
        records = records_ptr + _pick(offsets, output).to(tl.int64) * 4
        width = _pick(bits, output)
        sink_o, window_o, full = _block_ranges(seq_len, chunk_blocks, SPEC)
        first_step = here - before
        OWN_TAIL: tl.constexpr = 0 if SPEC else 1
        first = sink_o + tl.maximum(first_step - OWN_TAIL, 0) * WARPS
        split = tl.minimum(sink_o + (last - before - OWN_TAIL) * WARPS, window_o) - first
        count, second = split, first
        if SPEC:
            has_tail = is_guess
            first, split = tl.where(is_guess, 0, first), tl.where(is_guess, sink_o, split)
            count = tl.where(is_guess, sink_o + full - window_o, split)
            if GUESS_PARTS > 1:
                has_tail &= part == 0
                count = tl.where(has_tail & (parts > 1), 0, count)
            second = window_o
        else:
            has_tail = first_step == 0
        blocks = (first, split, second, count)

        tail = tail_ptr + output.to(tl.int64) * (2 * TOKENS * D // 4)
        scales = scales_ptr + output.to(tl.int64) * num_blocks * 2
        if PDL:
            # Memory is asked now, and answers while q comes and is made an operand.
            if has_tail:
                prefetch(tail, 2 * TOKENS * D)
            prefetch(scales + first * 2, tl.where(count > 0, 16, 0))
        # q ahead of the records, if it is there already.
        if SENT and not EARLY:
            send_query(slots, q_ptr, output, count > 0, HEADS_PER_KV, HEADS, WARPS, D)
        if BULK:
            send_side(slots, records, 0, blocks, width, count > 0, (), False, WARPS, D)
            send_side(slots, records, 0, blocks, width, count > 0, (), True, WARPS, D)
        if EARLY:
            gdc_wait()
            if SENT:
                send_query(slots, q_ptr, output, count > 0, HEADS_PER_KV, HEADS, WARPS, D)

        # 3. Stream the records, after the tail.
        # By the tokens of this request: neither the cache's capacity nor the length at capture matters.
        cutoff = sas_cutoff(seq_len) if SAS else 0.0
        if has_tail:
            maxima, state = attend_tail(
                q_ptr, output, qk_scale, tail, tail_scale_ptr + output * 2, seq_len - full * TOKENS, cutoff,
                HEADS_PER_KV, HEADS, WARPS, D, SAS,
            )  # fmt: skip
        else:
            maxima, state = no_tokens(HEADS, WARPS, D)
        if count > 0:
            query = query_of_keys(q_ptr, output, slots, query_parity, HEADS_PER_KV, HEADS, WARPS, D, SENT)
            query_parity ^= 1
            if width == 2:
                maxima, state, parity = attend_blocks(
                    maxima, state, query, qk_scale, records, scales, blocks, cutoff, slots, parity,
                    HEADS, 2, WARPS, D, SAS, BULK,
                )  # fmt: skip
            else:
                maxima, state, parity = attend_blocks(
                    maxima, state, query, qk_scale, records, scales, blocks, cutoff, slots, parity,
                    HEADS, 4, WARPS, D, SAS, BULK,
                )  # fmt: skip
        o, lse = merge_warps(slots, maxima, state, HEADS, WARPS, D, BULK)

        # 4. Leave the partial; a guess also goes to its receiver.
        slot = program + output
        if SPEC and PHASE != REST:
            if is_guess:
                if GUESS_PARTS > 1:
                    o, lse = _weightless(o, lse, (part > 0) & (count == 0))
                    _send_part(
                        o, lse, spec_out_ptr, spec_lse_ptr, output, part, epoch, OUTPUTS, HEADS_PER_KV, HEADS, WARPS, D
                    )
                    if parts == 1:  # the receiver does not know how many have tokens
                        nothing, no_lse = _weightless(o, lse, parts == 1)
                        _send_part(
                            nothing, no_lse, spec_out_ptr, spec_lse_ptr, output, 1, epoch,
                            OUTPUTS, HEADS_PER_KV, HEADS, WARPS, D,
                        )  # fmt: skip
                else:
                    write_heads(o, lse, spec_out_ptr, None, output * HEADS_PER_KV, epoch, HEADS_PER_KV, HEADS, WARPS, D)
                slot = PROGRAMS + OUTPUTS + output * GUESS_PARTS + part
        write_heads(o, lse, o_partial_ptr, lse_partial_ptr, slot * HEADS_PER_KV, None, HEADS_PER_KV, HEADS, WARPS, D)
        left -= 1
        free_slots(left > 0, BULK)

        here = tl.where(is_guess, here, before + length)
        guess += 1


@triton.jit(do_not_specialize=["chunk_blocks"])
def turbo_merge_kernel(
    seq_lens_ptr,  # [B] int32
    o_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV, D] fp32, as the attention has left them
    lse_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, D]
    lse_ptr,  # [B, Hkv * HEADS_PER_KV] fp32
    sums_ptr,  # [B, Hkv * HEADS_PER_KV * CHUNKS, 2] fp32: dist2, norm2; or None
    gate_ptr,  # [1] int32 or None
    chunk_blocks,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,  # B HKV
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of the attention,
    WARPS: tl.constexpr,  # and its warps
    CHUNK: tl.constexpr,  # channels of a program, and
    CHUNKS: tl.constexpr,  # programs of a head
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # of the attention before it
    PDL: tl.constexpr,
):
    """Merge what the attention has left; grid [B Hkv HEADS_PER_KV CHUNKS]."""
    if PDL:
        gdc_launch_dependents()
    row, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    output, head = row // HEADS_PER_KV, row % HEADS_PER_KV
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    lengths, _, rest_at, _, parts, used, total = _plan(
        seq_lens, exists, chunk_blocks, OUTPUTS, PROGRAMS, WARPS, SPEC, GUESS_PARTS, PHASE
    )
    # The rest of an output is one range of steps, and the runs that meet it use consecutive slots.
    length, rest = _pick(lengths, output), _pick(rest_at, output)
    first_run = _run_of(rest, used, total)
    last_run = _run_of(rest + length - 1, used, total)
    slot, runs = first_run + output, tl.where(length > 0, last_run - first_run + 1, 0)
    if PDL:
        slot, runs = await_partials(slot, runs)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    merge_output(
        o_partial_ptr, lse_partial_ptr, slot, runs, PROGRAMS + OUTPUTS + output * GUESS_PARTS, parts,
        row, head, chunk, out_ptr, lse_ptr, sums_ptr, HEADS_PER_KV, D, D, CHUNK, CHUNKS, ROUND, SPEC,
        GUESS_PARTS,
    )  # fmt: skip
