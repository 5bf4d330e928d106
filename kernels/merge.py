"""Partials of decode attention, and who merges them: device code of both decode kernels (see lean_attention.py).

A partial is `(o, lse)` of some tokens of one output, that is of the query heads of one (request, KV head), normalised,
fp32, `lse` in base 2. Partials of one output lie in consecutive slots. Each of its programs takes a ticket after it has
left its own; who draws the last one merges. Nobody waits, and the order of summation does not depend on who it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["hand_in", "merge_rounds", "output_at", "store_partial", "sum_of_warps"]

# One SM takes in 50 bytes a clock: beyond so many partials, or two rounds of loads if that is more, groups come first.
WIDE = 24


def merge_rounds(group_pad: int, width: int, num_warps: int, registers: int) -> tuple[int, int]:
    """How many partials each warp loads at once into so many registers, and beyond how many there are two levels."""
    loaded = max(1, min(16, registers * 32 // (group_pad * width)))
    return loaded, max(WIDE, 2 * loaded * num_warps)


@triton.jit
def output_at(output, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets [ROWS, D] of one output's rows in `out` and the like, and which of them exist."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, D)
    at = (output * GROUP + rows)[:, None] * HEAD_DIM + channels[None, :]
    return at, (rows < GROUP)[:, None] & (channels < HEAD_DIM)[None, :]


@triton.jit
def store_partial(o, lse, o_ptr, lse_ptr, slot, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Write the `GROUP` real rows of a partial, o [D, ROWS], into its slot."""
    rows = tl.arange(0, ROWS)
    real = rows < GROUP
    tl.store(o_ptr + (slot * GROUP + rows)[None, :] * D + tl.arange(0, D)[:, None], o, mask=real[None, :])
    tl.store(lse_ptr + slot * GROUP + rows, lse, mask=real)


@triton.jit
def sum_of_warps(x, W: tl.constexpr):
    """x [..., W] summed over the last dimension, which lies across the W warps: 1, 2 or 4.

    `tl.sum` would leave all of the result in every warp, value by value. `tl.split` wants both halves in one thread: so
    everything crosses the warps once, and each warp has its part of the result.
    """
    if W == 4:
        low, high = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005 (Triton has no *)
        x = low + high
    if W > 1:
        low, high = tl.split(x)
        x = low + high
    else:
        x = tl.reshape(x, x.shape[:-1])
    return x


@triton.jit
def _merge(
    o_ptr,
    lse_ptr,
    slot,
    stride,
    count,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    MERGE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Merge `count` slots from `slot` on, `stride` apart; warp w takes every `WARPS`-th, from the w-th on.

        o = sum_s 2^(lse_s - m) o_s,   l = sum_s 2^(lse_s - m),   m = max_s lse_s

    The loads of `MERGE` slots of each warp are issued together: their latency, not the arithmetic, is what this costs.

    Returns:
        m, l [GROUP_PAD] and o [GROUP_PAD, D].
    """
    # The first and the last dimension fill a warp's loads, so that a warp has slots to itself.
    ROW: tl.constexpr = 128 // GROUP_PAD if GROUP_PAD <= 4 else 32
    INNER: tl.constexpr = ROW if ROW < D else D
    OUTER: tl.constexpr = D // INNER
    rows, warps = tl.arange(0, GROUP_PAD), tl.arange(0, WARPS)
    places = warps * stride  # of the warps' slots, from the first on
    channels = tl.arange(0, OUTER)[None, None, :, None] * INNER + tl.arange(0, INNER)[None, None, None, :]
    o_at = (places[None, :, None, None] * GROUP + rows[:, None, None, None]) * D + channels
    lse_at = places[None, :] * GROUP + rows[:, None]
    row_max = tl.full([GROUP_PAD, WARPS], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD, WARPS], tl.float32)
    acc = tl.zeros([GROUP_PAD, WARPS, OUTER, INNER], tl.float32)
    for start in tl.range(0, count, MERGE * WARPS):
        values, weights = (), ()
        new_max = row_max
        for i in tl.static_range(MERGE):
            inside = (rows < GROUP)[:, None] & (start + i * WARPS + warps < count)[None, :]
            # .cg: another SM wrote these, and L1 may hold older bytes.
            row = (slot + (start + i * WARPS) * stride) * GROUP
            o_s = tl.load(o_ptr + row * D + o_at, mask=inside[:, :, None, None], other=0.0, cache_modifier=".cg")
            lse_s = tl.load(lse_ptr + row + lse_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
            values, weights = values + (o_s,), weights + (lse_s,)  # noqa: RUF005 (Triton has no *)
            new_max = tl.maximum(new_max, lse_s)
        # Rows without a partial stay at -inf; 0 avoids -inf - -inf there.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - base)
        row_sum = row_sum * alpha
        acc = acc * alpha[:, :, None, None]
        for i in tl.static_range(MERGE):
            weight = tl.exp2(weights[i] - base)
            row_sum += weight
            acc += weight[:, :, None, None] * values[i]
        row_max = new_max
    largest = tl.max(row_max, 1)
    weight = tl.exp2(row_max - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    acc = sum_of_warps(tl.permute(acc * weight[:, :, None, None], (0, 2, 3, 1)), WARPS)
    # Rounded before it is added: fused with the first addition, threads that hold the same sum would round differently.
    row_sum = tl.fma(row_sum, weight, tl.zeros_like(weight))
    return largest, tl.sum(row_sum, 1), tl.reshape(acc, [GROUP_PAD, D])


@triton.jit
def _arrive(counter_ptr, contributors):
    """Take a ticket; whether all contributors have come. The last one puts the counter back to 0."""
    # The ticket is taken by one thread: all threads' stores must come before it, and their loads after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == contributors - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def _finish(
    row_max,
    row_sum,
    o,
    o_ptr,
    lse_ptr,
    spec_slot,
    output,
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Write an output, from what its partials merged to; with `A~`, one more partial, also the verdict's sums."""
    rows = tl.arange(0, GROUP_PAD)
    at, mask = output_at(output, GROUP_PAD, GROUP, D, HEAD_DIM)
    if SPEC:
        spec_at = o_ptr + (spec_slot * GROUP + rows[:, None]) * D + tl.arange(0, D)[None, :]
        spec_o = tl.load(spec_at, mask=mask, other=0.0, cache_modifier=".cg")
        spec_lse = tl.load(lse_ptr + spec_slot * GROUP + rows, mask=rows < GROUP, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, spec_lse)
        alpha, weight = tl.exp2(row_max - new_max), tl.exp2(spec_lse - new_max)
        o = o * alpha[:, None] + spec_o * weight[:, None]
        row_max, row_sum = new_max, row_sum * alpha + weight
    o = o * (1.0 / row_sum)[:, None]
    tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_lse_ptr + output * GROUP + rows, row_max + tl.log2(row_sum), mask=rows < GROUP)
    if SPEC:
        # A sum for each row: one over all of them costs a microsecond, and whoever decides adds up heads anyway.
        full = tl.where(mask, o, 0.0)
        delta = spec_o - full
        sums_at = sums_ptr + (output * GROUP + rows) * 2
        tl.store(sums_at, tl.sum(delta * delta, 1), mask=rows < GROUP)
        tl.store(sums_at + 1, tl.sum(full * full, 1), mask=rows < GROUP)


@triton.jit
def hand_in(
    o_ptr,  # partials
    lse_ptr,
    counters_ptr,  # of outputs, and
    group_counters_ptr,  # of groups of partials
    program,
    output,
    first_run,  # the program whose partial is the first of this output's; they lie in slots `program + output`
    runs,  # how many there are, without `A~`
    spec_slot,  # where `A~` of this output is
    is_guess,  # whether what this program has left is `A~`
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    wide,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    WARPS: tl.constexpr,
    SPEC: tl.constexpr,
    IS_ALONE: tl.constexpr,  # this launch leaves `A~` only: an output that has no other partial is complete
    WITH_GUESS: tl.constexpr,  # `A~` takes a ticket in this launch
):
    """After a program has left its partial: a ticket, and for the last arriver the merge of all."""
    # Many partials are merged in two levels, the groups of the first side by side on many SMs: groups of about the
    # root of their number, in powers of two.
    fan = tl.where(runs > 512, 32, tl.where(runs > 96, 16, 8))
    FEW: tl.constexpr = MERGE * WARPS if MERGE * WARPS < 8 else 8
    arrives = True
    if (runs > wide) and (not is_guess):
        place = program - first_run
        group_slot = program + output - place % fan
        members = tl.minimum(runs - place + place % fan, fan)
        arrives = _arrive(group_counters_ptr + group_slot, members)
        if arrives:
            # Few partials: all warps take each of them, and none waits for another's sum.
            row_max, row_sum, o = _merge(
                o_ptr, lse_ptr, group_slot, 1, members, GROUP, GROUP_PAD, D, FEW, 1
            )  # fmt: skip
            # Into the slot of the group's first member, once every thread has read that.
            tl.debug_barrier()
            o = tl.trans(o * (1.0 / row_sum)[:, None])
            store_partial(o, row_max + tl.log2(row_sum), o_ptr, lse_ptr, group_slot, GROUP_PAD, GROUP, D)
    if arrives:
        stride = tl.where(runs > wide, fan, 1)
        contributors = tl.cdiv(runs, stride)
        if IS_ALONE:
            is_last = runs == 0
            tl.debug_barrier()
        else:
            is_last = _arrive(counters_ptr + output, contributors + (1 if WITH_GUESS else 0))
        if is_last:
            row_max, row_sum, o = _merge(
                o_ptr, lse_ptr, first_run + output, stride, contributors, GROUP, GROUP_PAD, D, MERGE, WARPS
            )  # fmt: skip
            _finish(
                row_max, row_sum, o, o_ptr, lse_ptr, spec_slot, output, out_ptr, out_lse_ptr, sums_ptr,
                GROUP, GROUP_PAD, D, HEAD_DIM, SPEC,
            )  # fmt: skip
