"""Device code of decode over the quantised cache: schedule and tickets (see turbo_attention.py for the method)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .lean_kernel import (
    ALL,
    PREDICTOR,
    REST,
    _arrive,
    _finish,
    _locate,
    _merge_partials,
    _no_partial,
    _output_at,
    _run_of,
    _run_start,
    _store_partial,
)
from .turbo_block import COLUMNS, TOKENS, attend_blocks, attend_tail, merge_warps, no_tokens, scaled_query

__all__ = ["turbo_decode_kernel"]

# What a step over records costs, in 512 bytes at D = 128: with its tail, an output has one step more.
STEP_COST_4 = tl.constexpr(17)
STEP_COST_2 = tl.constexpr(9)
GUESS_OVERHEAD = tl.constexpr(34)  # what starting on a guess's tail and sending it away costs


@triton.jit
def _pick(values, index):
    """values[index] of a vector in registers."""
    at = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(at == index, values, tl.zeros_like(values)), 0)


@triton.jit
def _block_ranges(seq_len, chunk_blocks, SPEC: tl.constexpr):
    """sink, window, full: the guess is over blocks `[0, sink)`, `[window, full)` and the tail; the rest lies between.

    Without a guess the rest is all: blocks `[0, full)` and the tail.
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
def _deal(num_guesses, guess_cost, total, largest, programs):
    """How the rest is dealt, in units of cost: `_run_start` and `_run_of` take the result.

    `leaders` programs begin with a guess and take `lead_run` after it, the others `run`, the first `longer` of them one
    more. A step belongs to the program in whose run it begins. A run is empty or as long as the `largest` step, so that
    a step begins in it, and the runs that meet one output use consecutive slots.
    """
    leaders = tl.where(num_guesses < programs, num_guesses, 0)
    lead_run = (total + leaders * guess_cost) // programs - guess_cost
    lead_run = tl.where(lead_run < largest, 0, lead_run)
    left = total - leaders * lead_run
    followers = tl.maximum(tl.minimum(programs - leaders, left // largest), 1)
    run = left // followers
    return leaders, lead_run, followers, run, left - run * followers


# One compiled kernel for all sizes: what a size tells the compiler here saves nothing.
@triton.jit(do_not_specialize=["num_kv_heads", "num_outputs", "num_blocks", "chunk_blocks", "wide", "fan"])
def turbo_decode_kernel(
    q_ptr,  # [B, Hkv * GROUP, D]
    records_ptr,  # [W] int32
    offset_ptr,  # [B, Hkv] int64
    bits_ptr,  # [B, Hkv] int32
    scales_ptr,  # [B, Hkv, NB, 2] fp32
    tail_ptr,  # [B, Hkv, 2, 64, D / 4] int32
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    seq_lens_ptr,  # [B] int32
    out_ptr,  # [B, Hkv * GROUP, D]
    lse_ptr,  # [B, Hkv * GROUP] fp32
    spec_out_ptr,  # [B, Hkv * GROUP, D], may lie in the paired rank's memory
    spec_flag_ptr,  # [B, Hkv] int32 beside spec_out: the epoch, once that head's A~ is there
    epoch_ptr,  # [1] int32
    sums_ptr,  # [B, Hkv * GROUP, 2] fp32: dist2, norm2
    o_partial_ptr,  # [G + 2 B Hkv, GROUP, D] fp32 partials: of runs, then A~ of each head
    lse_partial_ptr,  # [G + 2 B Hkv, GROUP] fp32
    counters_ptr,  # [B Hkv] int32 and
    group_counters_ptr,  # [G + B Hkv] int32: arrivals at outputs and at groups of partials; all 0 between launches
    gate_ptr,  # [1] int32 or None
    num_kv_heads,
    num_outputs,  # B Hkv
    num_blocks,  # NB
    qk_scale,
    chunk_blocks,
    wide,  # beyond so many partials of an output, they are merged in two levels,
    fan,  # the first of groups of so many
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE: tl.constexpr,
    SPEC: tl.constexpr,
    PART: tl.constexpr,
    FLAG: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch, or with `PART` a part of one; grid [programs]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if gate_ptr is not None:  # noqa: SIM102 (one is of the compiler, the other of the program)
        if tl.load(gate_ptr) == 0:
            return
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # All that the schedule and the addresses need of every output, loaded together: one latency, not one after another.
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < num_outputs
    seq_lens = tl.load(seq_lens_ptr + outputs // num_kv_heads, mask=exists, other=0)
    bits = tl.load(bits_ptr + outputs, mask=exists, other=4)
    offsets = tl.load(offset_ptr + outputs, mask=exists, other=0)
    if FLAG:
        epoch = tl.load(epoch_ptr)
    sink, window, _ = _block_ranges(seq_lens, chunk_blocks, SPEC)
    costs = tl.where(bits == 2, STEP_COST_2, STEP_COST_4) * WARPS
    steps = tl.cdiv(window - sink, WARPS) + (0 if SPEC else 1)
    lengths = tl.where(exists, steps * costs, 0)
    ends = tl.cumsum(lengths, 0)
    total = tl.sum(lengths, 0)
    largest = tl.max(tl.where(exists, costs, 1), 0)
    num_guesses = num_outputs if SPEC and PART != REST else 0
    guess_cost = (tl.cdiv(2 * chunk_blocks, WARPS) + 1) * largest + GUESS_OVERHEAD
    leaders, lead_run, followers, run, longer = _deal(
        num_guesses if PART == ALL else 0, guess_cost, total, largest, programs
    )
    here = _run_start(program, leaders, lead_run, followers, run, longer)
    last = _run_start(program + 1, leaders, lead_run, followers, run, longer)
    if PART == PREDICTOR:
        here = last + 0
    # To the first step that begins in this run.
    output, before = _locate(here, ends)
    cost = tl.maximum(_pick(costs, output), 1)
    here = before + tl.cdiv(here - before, cost) * cost

    # First the guess of a head, sent and merged before this program's run of the rest begins.
    guess = program
    while (guess < num_guesses) | (here < last):
        is_guess = guess < num_guesses
        output, before = _locate(here, ends)
        if SPEC:
            output = tl.where(is_guess, guess, output)
            before = tl.sum(tl.where(outputs < output, lengths, 0), 0)
        length = _pick(lengths, output)
        cost = _pick(costs, output)
        seq_len = _pick(seq_lens, output)
        sink_o, window_o, full = _block_ranges(seq_len, chunk_blocks, SPEC)
        first_step = (here - before) // cost
        end_step = tl.minimum(tl.cdiv(last - before, cost), length // cost)
        first = sink_o + first_step * WARPS
        split = tl.minimum(sink_o + end_step * WARPS, window_o) - first
        count, second = split, first
        has_tail = end_step * cost == length
        if SPEC:
            has_tail = is_guess
            first, split = tl.where(is_guess, 0, first), tl.where(is_guess, sink_o, split)
            count = tl.where(is_guess, sink_o + full - window_o, split)
            second = window_o

        even, odd, inverse = scaled_query(q_ptr, output, GROUP, D)
        unit = inverse * qk_scale
        if has_tail:
            row_max, row_sum, acc = attend_tail(
                even, odd, unit, tail_ptr + output.to(tl.int64) * (2 * TOKENS * D // 4), tail_scale_ptr + output * 2,
                seq_len - full * TOKENS, WARPS, D,
            )  # fmt: skip
        else:
            row_max, row_sum, acc = no_tokens(WARPS, D)
        offset = _pick(offsets, output)
        scales = scales_ptr + output.to(tl.int64) * num_blocks * 2
        if _pick(bits, output) == 2:
            row_max, row_sum, acc = attend_blocks(
                row_max, row_sum, acc, even, odd, unit, records_ptr, offset, scales, first, split, second, count,
                2, WARPS, D, STAGES,
            )  # fmt: skip
        else:
            row_max, row_sum, acc = attend_blocks(
                row_max, row_sum, acc, even, odd, unit, records_ptr, offset, scales, first, split, second, count,
                4, WARPS, D, STAGES,
            )  # fmt: skip
        o, lse = merge_warps(row_max, row_sum, acc, WARPS)

        slot = program + output
        if SPEC and PART != REST:  # noqa: SIM102 (one is of the compiler, the other of the program)
            if is_guess:
                at, real = _output_at(output, COLUMNS, GROUP, D, D)
                tl.store(spec_out_ptr + at, tl.trans(o).to(spec_out_ptr.dtype.element_ty), mask=real)
                if FLAG:
                    tl.debug_barrier()
                    tl.atomic_xchg(spec_flag_ptr + output, epoch, sem="release", scope="sys")
                slot = programs + num_outputs + output
        _store_partial(o, lse, o_partial_ptr, lse_partial_ptr, slot, COLUMNS, GROUP, D)

        # The ticket: an output's rest is one range, and the runs that meet it use consecutive slots.
        first_run = _run_of(before, leaders, lead_run, run, longer)
        last_run = _run_of(before + length - cost, leaders, lead_run, run, longer)
        runs = tl.where(length > 0, last_run - first_run + 1, 0)
        arrives = True
        if (runs > wide) and (not is_guess):
            # Many partials are merged in two levels: the groups of the first side by side, on many SMs.
            place = program - first_run
            group_slot = program + output - place % fan
            members = tl.minimum(runs - place + place % fan, fan)
            arrives = _arrive(group_counters_ptr + group_slot, members)
            if arrives:
                none_max, none_sum, none_o = _no_partial(GROUP_PAD, D)
                group_o, group_lse = _merge_partials(
                    o_partial_ptr, lse_partial_ptr, group_slot, 1, members, none_max, none_sum, none_o,
                    GROUP, GROUP_PAD, D, MERGE,
                )  # fmt: skip
                # Into the slot of the group's first member, once every thread has read that.
                tl.debug_barrier()
                _store_partial(
                    tl.trans(group_o), group_lse, o_partial_ptr, lse_partial_ptr, group_slot, GROUP_PAD, GROUP, D
                )
        if arrives:
            stride = tl.where(runs > wide, fan, 1)
            contributors = tl.cdiv(runs, stride)
            if PART == PREDICTOR:
                is_last = length == 0
                tl.debug_barrier()
            else:
                is_last = _arrive(counters_ptr + output, contributors + (1 if SPEC and PART == ALL else 0))
            if is_last:
                _finish(
                    o_partial_ptr, lse_partial_ptr, first_run + output, stride, contributors,
                    programs + num_outputs + output, output,
                    out_ptr, lse_ptr, sums_ptr, GROUP, GROUP_PAD, D, D, MERGE, SPEC,
                )  # fmt: skip
        here = tl.where(is_guess, here, before + length)
        guess += programs
