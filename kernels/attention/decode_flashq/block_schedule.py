"""Device code of decode over the quantised cache: the schedule, in closed form from the lengths.

Words as in tile_schedule.py (output, guess, rest, run, turn, slot), with *steps* instead of tiles. Outputs lie in one
row of steps: before the rest of each is its *lead-in*, steps without work that stand for what its guess or its tail
takes. So a run that holds an output's first lead-in step has the guess, and is that much shorter. In two parts, the
guess's tail is of that run, and its blocks are of the one that holds the step SPEC_STEPS behind.

All this is a *plan*. Outputs of one request are alike: there each has a plan of its own, an equal share of the programs
and of the slots, and below stand one output and the programs of its share. Else there is one plan, of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode.tile_schedule import PREDICTOR, REST
from alspec.kernels.common.device import inverse_of_sum
from alspec.kernels.kv_codec.flashq.record import TOKENS

__all__ = ["blocks_of_item", "spec_items_before", "pick", "build_schedule", "run_of", "run_start"]

# In steps: what a guess takes beyond its blocks (its tail, and sending it away), and a tail without a guess.
SPEC_STEPS = tl.constexpr(3)
TAIL_STEPS = tl.constexpr(2)


@triton.jit
def pick(values, index):
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
def run_start(program, used, total):
    """First step of a program's run: floor(program total / used), in 32 bits. Equal outputs end where runs end."""
    place = tl.minimum(program, used)
    run = _quotient(total, used)
    return place * run + _quotient(place * (total - run * used), used)


@triton.jit
def run_of(step, used, total):
    """The program whose run holds a step: the inverse of `run_start`. The quotient of floats is one off at most."""
    near = (step.to(tl.float32) * (used.to(tl.float32) / total.to(tl.float32))).to(tl.int32)
    near = tl.minimum(near, used - 1)
    near -= (run_start(near, used, total) > step).to(tl.int32)
    return near + (run_start(near + 1, used, total) <= step).to(tl.int32)


@triton.jit
def build_schedule(
    seq_lens, exists, chunk_blocks, OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr,
    SPEC: tl.constexpr, SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr,
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
        lead_in = tl.cdiv(2 * chunk_blocks, WARPS) + 1 + SPEC_STEPS
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
    if SPEC_PARTS > 1:  # where both never lie in one run
        parts += (longest <= SPEC_STEPS).to(tl.int32)
    return lengths, ends, rest_at, lead_in, parts, used, total


@triton.jit
def spec_items_before(step, leads_at, parts, SPEC_PARTS: tl.constexpr):
    """How many guesses, or parts of one, begin before a step; leads_at: where the lead-in of each output begins."""
    before = leads_at < step
    guesses = before.to(tl.int32)
    if SPEC_PARTS > 1:
        # The tail first, then the blocks.
        guesses += ((leads_at + SPEC_STEPS < step) & (parts > 1)).to(tl.int32)
    return tl.sum(guesses, 0)


@triton.jit
def blocks_of_item(
    is_spec, part, parts, here, last, before, seq_len, chunk_blocks, SPEC: tl.constexpr, SPEC_PARTS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """What a turn is about, a guess or steps of an output's rest.

    Args:
        here, last: steps of the run, in the row of rests alone.  before: where the output's rest begins there.
    Returns:
        Blocks, (first, split, second, count): `split` of them from `first` on, then from `second` on, `count` in all;
        whether the tail as well; how many full blocks there are.
    """
    sink, window, full = _block_ranges(seq_len, chunk_blocks, SPEC)
    OWN_TAIL: tl.constexpr = 0 if SPEC else 1
    first_step = here - before
    first = sink + tl.maximum(first_step - OWN_TAIL, 0) * WARPS
    split = tl.minimum(sink + (last - before - OWN_TAIL) * WARPS, window) - first
    count, second = split, first
    if SPEC:
        has_tail = is_spec
        first, split = tl.where(is_spec, 0, first), tl.where(is_spec, sink, split)
        count = tl.where(is_spec, sink + full - window, split)
        if SPEC_PARTS > 1:
            has_tail &= part == 0
            count = tl.where(has_tail & (parts > 1), 0, count)
        second = window
    else:
        has_tail = first_step == 0
    return (first, split, second, count), has_tail, full
