"""Partials of decode attention and how they are merged: device code of both decode kernels (see lean_attention.py).

A partial is `(o, lse)` of some tokens of one output, that is of the query heads of one (request, KV head), normalised,
fp32, `lse` in base 2. Partials of one output lie in consecutive slots. Each of its programs takes a ticket after it has
left its own; the one that takes the last ticket merges. No program waits for another, and the order of summation does
not depend on which one merges. Many partials are merged in two levels: *bundles* of them side by side, then those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .words import INTERPRETED, pack_words

__all__ = [
    "WIDE",
    "arrive",
    "finish",
    "inverse_of_sum",
    "log2_of_sum",
    "merge_sizes",
    "output_at",
    "send_guess",
    "store_partial",
    "sum_of_warps",
]

# One SM takes in 50 bytes a clock. So beyond this many partials, or two rounds of loads if that is more, there are two
# levels.
WIDE = 24


def merge_sizes(heads_pad: int, width: int, num_warps: int, registers: int) -> tuple[int, int]:
    """How many partials 1, 2 or 4 warps load at once, and beyond how many there are two levels.

    At once: as many as fit into so many registers, rounded down to a multiple of 8, at most 32 and a quarter of the
    registers; or to a power of two below 8. Of two rows at most 16: with more, Triton 3.6 and 3.7 give some of the
    weights to the wrong rows.
    """
    loaded = max(1, registers * 32 // (heads_pad * width)) * num_warps
    if loaded >= 8:
        loaded = min(16 if heads_pad == 2 else 32, registers // 4, loaded // 8 * 8)
    else:
        loaded = max(num_warps, 1 << (loaded.bit_length() - 1))
    return loaded, max(WIDE, 2 * loaded)


@triton.jit
def log2_of_sum(x):
    """log2 of a sum that is 1 or more: by the hardware; `tl.log2` is 25 instructions, each waiting for the last."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def inverse_of_sum(x):
    """1 / x of a sum that is 1 or more: by the hardware, without the cases of very large and very small numbers."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def output_at(output, ROWS: tl.constexpr, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets [ROWS, D] of one output's rows in `out` and the like, and which of them exist."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, D)
    at = (output * HEADS_PER_KV + rows)[:, None] * HEAD_DIM + channels[None, :]
    return at, (rows < HEADS_PER_KV)[:, None] & (channels < HEAD_DIM)[None, :]


@triton.jit
def store_partial(o, lse, o_ptr, lse_ptr, slot, ROWS: tl.constexpr, HEADS_PER_KV: tl.constexpr, D: tl.constexpr):
    """Write the `HEADS_PER_KV` real rows of a partial, o [D, ROWS], into its slot."""
    rows = tl.arange(0, ROWS)
    real = rows < HEADS_PER_KV
    tl.store(o_ptr + (slot * HEADS_PER_KV + rows)[None, :] * D + tl.arange(0, D)[:, None], o, mask=real[None, :])
    tl.store(lse_ptr + slot * HEADS_PER_KV + rows, lse, mask=real)


@triton.jit
def send_guess(
    o,
    lse,
    output,
    part,
    parts,  # how many have tokens
    num_outputs,
    spec_out_ptr,
    spec_lse_ptr,  # or None, with one part
    epoch,  # or None
    ROWS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
):
    """Write a part of `A~` of an output, o [D, ROWS] and lse [ROWS].

    With an epoch as words, which need no fence and no flag behind them. The first part also writes those without
    tokens, as partials of no weight: the receiver does not know how many parts have tokens.
    """
    at, exists = output_at(output, ROWS, HEADS_PER_KV, D, HEAD_DIM)
    o = tl.trans(o)
    if epoch is not None:
        o = pack_words(o, epoch)
    to = spec_out_ptr
    if GUESS_PARTS > 1:
        to += part * (num_outputs * HEADS_PER_KV * HEAD_DIM)
    tl.store(to + at, o.to(spec_out_ptr.dtype.element_ty), mask=exists)
    if GUESS_PARTS > 1:
        rows = tl.arange(0, ROWS)
        lse_at = spec_lse_ptr + output * HEADS_PER_KV + rows
        tl.store(lse_at + part * (num_outputs * HEADS_PER_KV), pack_words(lse, epoch), mask=rows < HEADS_PER_KV)
        if part == 0:
            nothing = pack_words(tl.full([ROWS], float("-inf"), tl.float32), epoch)
            zeros = pack_words(tl.zeros([ROWS, D], tl.float32), epoch)
            for absent in range(parts, GUESS_PARTS):
                tl.store(lse_at + absent * (num_outputs * HEADS_PER_KV), nothing, mask=rows < HEADS_PER_KV)
                tl.store(spec_out_ptr + absent * (num_outputs * HEADS_PER_KV * HEAD_DIM) + at, zeros, mask=exists)


@triton.jit
def sum_of_warps(x, W: tl.constexpr):
    """x [..., W] summed over the last dimension, which lies across the W warps: 1, 2 or 4.

    `tl.sum` would leave the whole result in every warp, value by value. `tl.split` needs both halves in one thread: so
    everything crosses the warps once, and each warp keeps a share of the result.
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
def _chunks(x, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """x [ROWS, CHUNKS * CHUNK] in pieces [CHUNK, ROWS]: 1, 2 or 4 of them."""
    x = tl.permute(tl.reshape(x, [ROWS, CHUNKS, CHUNK]), (2, 0, 1))
    if CHUNKS == 1:
        pieces = (tl.reshape(x, [CHUNK, ROWS]),)
    else:
        if CHUNKS == 2:
            a, b = tl.split(x)
            pieces = (a, b)
        else:
            even, odd = tl.split(tl.reshape(x, [CHUNK, ROWS, 2, 2]))
            a, c = tl.split(even)
            b, d = tl.split(odd)
            pieces = (a, b, c, d)
    return pieces


@triton.jit
def _for_values(x, D: tl.constexpr):
    """x [..., ROWS] for each of a row's D values: [..., ROWS * D]."""
    LEAD: tl.constexpr = x.shape[:-1]
    ROWS: tl.constexpr = x.shape[-1]
    x = tl.broadcast_to(tl.reshape(x, LEAD + [ROWS, 1]), LEAD + [ROWS, D])  # noqa: RUF005 (Triton has no *)
    return tl.reshape(x, LEAD + [ROWS * D])  # noqa: RUF005


@triton.jit
def _merge(
    o_ptr,
    lse_ptr,
    slot,
    stride,
    count,
    HEADS_PER_KV: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Merge `count` slots from `slot` on, `stride` apart.

        o = sum_s 2^(lse_s - m) o_s,   l = sum_s 2^(lse_s - m),   m = max_s lse_s

    The loads of `ROUND` slots are issued together: their latency, not the arithmetic, is what this costs. A partial is
    one dimension, and so is all that is read of `lse`: then its threads are the compiler's only choice. From 256 values
    in a partial on, each has the same of them in every slot, and sums them by itself; `lse` of a row lies in one warp.

    Returns:
        m, l [HEADS_PAD] and o [HEADS_PAD, D].
    """
    CHUNK: tl.constexpr = ROUND if ROUND < 8 else 8
    CHUNKS: tl.constexpr = ROUND // CHUNK
    PADDED: tl.constexpr = 4 if CHUNKS == 3 else CHUNKS
    SLOTS: tl.constexpr = PADDED * CHUNK
    of_lse, values = tl.arange(0, HEADS_PAD * SLOTS), tl.arange(0, HEADS_PAD * D)
    slots, row = of_lse % SLOTS, of_lse // SLOTS
    # Rows past the last repeat it.
    value_at = tl.minimum(values // D, HEADS_PER_KV - 1) * D + values % D
    # A load is 16 bytes of a thread, or half of that where only then all threads have their own values.
    EACH: tl.constexpr = 2 if HEADS_PAD * D == 256 else 4
    value_at = tl.multiple_of(tl.max_contiguous(value_at, [EACH]), [EACH])
    row_max = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS_PAD], tl.float32)
    acc = tl.zeros([HEADS_PAD * D], tl.float32)
    for start in tl.range(0, count, ROUND):
        # .cg: another SM wrote these, and L1 may hold older bytes.
        lse_at = (slot + (start + slots) * stride) * HEADS_PER_KV + tl.minimum(row, HEADS_PER_KV - 1)
        inside = (start + slots < tl.minimum(count, start + ROUND)) & (row < HEADS_PER_KV)
        lse_s = tl.load(lse_ptr + lse_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        lse_s = tl.reshape(lse_s, [HEADS_PAD, SLOTS])
        partials = ()
        for i in tl.static_range(CHUNKS):
            o_s = tl.zeros([CHUNK, HEADS_PAD * D], tl.float32)
            if start + i * CHUNK < count:
                # Past the end the last slot again: a mask would make each load wait for its own comparison.
                places = tl.minimum(start + i * CHUNK + tl.arange(0, CHUNK), count - 1) * stride
                o_at = (slot + places)[:, None] * (HEADS_PER_KV * D) + value_at[None, :]
                o_s = tl.load(o_ptr + o_at, cache_modifier=".cg")
            partials = partials + (o_s,)  # noqa: RUF005 (Triton has no *)
        new_max = tl.maximum(row_max, tl.max(lse_s, 1))
        # Rows without a partial stay at -inf; 0 avoids -inf - -inf there.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha, weight = tl.exp2(row_max - base), tl.exp2(lse_s - base[:, None])
        row_sum = row_sum * alpha + tl.sum(weight, 1)
        acc = acc * _for_values(alpha, D)
        weights = _chunks(weight, HEADS_PAD, CHUNK, PADDED)
        for i in tl.static_range(CHUNKS):
            factor = _for_values(weights[i], D)
            # Where several lanes hold the same sum, products are rounded before they are added: fused with the first
            # addition, they would be rounded differently from lane to lane.
            weighted = (
                factor * partials[i] if HEADS_PAD * D >= 256 else tl.fma(factor, partials[i], tl.zeros_like(factor))
            )
            acc += tl.sum(weighted, 0)
        row_max = new_max
    return row_max, row_sum, tl.reshape(acc, [HEADS_PAD, D])


@triton.jit
def _guess(
    o_ptr, lse_ptr, slot, parts, HEADS_PER_KV: tl.constexpr, HEADS_PAD: tl.constexpr, D: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
):  # fmt: skip
    """`A~` [HEADS_PAD, D] and its lse [HEADS_PAD], of `parts` partials from `slot` on.

    Not by `_merge`: its loop would wait for these before it issues the loads of the others.
    """
    rows = tl.arange(0, HEADS_PAD)
    real = rows < HEADS_PER_KV
    row = slot * HEADS_PER_KV + rows
    at = o_ptr + row[:, None] * D + tl.arange(0, D)[None, :]
    o = tl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
    lse = tl.load(lse_ptr + row, mask=real, other=0.0, cache_modifier=".cg")
    if GUESS_PARTS > 1:
        total = tl.full([HEADS_PAD], 1.0, tl.float32)
        for part in tl.static_range(1, GUESS_PARTS):
            here = real & (part < parts)
            part_o = tl.load(at + part * (HEADS_PER_KV * D), mask=here[:, None], other=0.0, cache_modifier=".cg")
            lse_at = lse_ptr + row + part * HEADS_PER_KV
            part_lse = tl.load(lse_at, mask=here, other=float("-inf"), cache_modifier=".cg")
            largest = tl.maximum(lse, part_lse)
            alpha, weight = tl.exp2(lse - largest), tl.exp2(part_lse - largest)
            o = o * alpha[:, None] + part_o * weight[:, None]
            total = total * alpha + weight
            lse = largest
        o *= inverse_of_sum(total)[:, None]
        lse += log2_of_sum(total)
    return o, lse


@triton.jit
def _arrive(counter_ptr, contributors, takes):
    """Take a ticket, on one counter or on several; whether all contributors have come. The last puts it back to 0."""
    # Each ticket is taken by one thread: all threads' stores must come before it, and their loads after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, mask=takes, sem="acq_rel", scope="gpu") == contributors - 1
    is_last = is_last & takes
    tl.store(counter_ptr, 0, mask=is_last)
    tl.debug_barrier()
    return is_last


@triton.jit
def _write(
    row_max,
    row_sum,
    o,
    spec_o,
    spec_lse,
    output,
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    HEADS_PER_KV: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Write an output from its merged partials; with a guess, one more partial, also the sums for the verdict."""
    rows = tl.arange(0, HEADS_PAD)
    at, mask = output_at(output, HEADS_PAD, HEADS_PER_KV, D, HEAD_DIM)
    if SPEC:
        new_max = tl.maximum(row_max, spec_lse)
        alpha, weight = tl.exp2(row_max - new_max), tl.exp2(spec_lse - new_max)
        o = o * alpha[:, None] + spec_o * weight[:, None]
        row_max, row_sum = new_max, row_sum * alpha + weight
    o = o * inverse_of_sum(row_sum)[:, None]
    tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_lse_ptr + output * HEADS_PER_KV + rows, row_max + log2_of_sum(row_sum), mask=rows < HEADS_PER_KV)
    if SPEC:
        # A sum for each row: one over all of them costs a microsecond, and `decide` adds up heads anyway.
        full = tl.where(mask, o, 0.0)
        delta = spec_o - full
        sums_at = sums_ptr + (output * HEADS_PER_KV + rows) * 2
        tl.store(sums_at, tl.sum(delta * delta, 1), mask=rows < HEADS_PER_KV)
        tl.store(sums_at + 1, tl.sum(full * full, 1), mask=rows < HEADS_PER_KV)


@triton.jit
def _bundle(program, output, first_run, runs):
    """Many partials are merged in two levels, the bundles of the first side by side on many SMs: bundles of about the
    root of their number, in powers of two, because divisions are slow.

    Returns:
        log2 of a bundle's size, and of the bundle of this program's partial the first slot and how many they are.
    """
    log_fan = tl.where(runs > 512, 5, tl.where(runs > 96, 4, 3))
    place = program - first_run
    before = place & ((1 << log_fan) - 1)
    return log_fan, program + output - before, tl.minimum(runs - place + before, 1 << log_fan)


@triton.jit
def arrive(
    counters_ptr,  # of outputs, and
    bundle_counters_ptr,  # of bundles of partials
    program,
    output,
    first_run,  # the program whose partial is the first of this output's; they lie in slots `program + output`
    runs,  # how many there are, without `A~`
    is_guess,  # whether what this program has left is `A~`
    takes,  # whether it has left one
    wide,
    IS_ALONE: tl.constexpr,  # this launch leaves `A~` only: an output that has no other partial is complete
    guesses,  # parts of `A~` that take a ticket in this launch
):
    """After a program has left its partial of an output: its ticket. Of several outputs, tensors, all at once.

    Returns:
        Whether it has come last, to the output or, where there are two levels, to its bundle: it calls `finish`.
    """
    log_fan, bundle_slot, members = _bundle(program, output, first_run, runs)
    bundles = tl.where(runs > wide, (runs + (1 << log_fan) - 1) >> log_fan, runs)
    in_bundle = (runs > wide) & (not is_guess)
    if IS_ALONE:
        is_last = takes & (runs == 0)
        tl.debug_barrier()
    else:
        counter_ptr = tl.where(in_bundle, bundle_counters_ptr + bundle_slot, counters_ptr + output)
        is_last = _arrive(counter_ptr, tl.where(in_bundle, members, bundles + guesses), takes)
    return is_last


@triton.jit
def finish(
    o_ptr,  # partials
    lse_ptr,
    counters_ptr,
    program,
    output,
    first_run,
    runs,
    spec_slot,  # where `A~` of this output begins
    parts,  # how many it has
    is_guess,
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    wide,
    guesses,  # as in `arrive`
    HEADS_PER_KV: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROUND: tl.constexpr,
    SPEC: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
):
    """Merge, by the last to arrive: its bundle if there are two levels; if that was the last bundle, the output."""
    log_fan, bundle_slot, members = _bundle(program, output, first_run, runs)
    stride, count = 1, runs
    is_last = True
    if runs > wide:
        stride, count = 1 << log_fan, (runs + (1 << log_fan) - 1) >> log_fan
        if not is_guess:
            FEW: tl.constexpr = ROUND if ROUND < 8 else 8
            row_max, row_sum, o = _merge(o_ptr, lse_ptr, bundle_slot, 1, members, HEADS_PER_KV, HEADS_PAD, D, FEW)
            # Into the slot of the bundle's first partial, once every thread has read that.
            tl.debug_barrier()
            o = tl.trans(o * inverse_of_sum(row_sum)[:, None])
            store_partial(o, row_max + log2_of_sum(row_sum), o_ptr, lse_ptr, bundle_slot, HEADS_PAD, HEADS_PER_KV, D)
            is_last = _arrive(counters_ptr + output, count + guesses, count > 0)
    if is_last:
        spec_o, spec_lse = 0.0, 0.0
        if SPEC:
            # Loaded here, at the same time as the others.
            spec_o, spec_lse = _guess(o_ptr, lse_ptr, spec_slot, parts, HEADS_PER_KV, HEADS_PAD, D, GUESS_PARTS)
        row_max, row_sum, o = _merge(
            o_ptr, lse_ptr, first_run + output, stride, count, HEADS_PER_KV, HEADS_PAD, D, ROUND
        )  # fmt: skip
        _write(
            row_max, row_sum, o, spec_o, spec_lse, output, out_ptr, out_lse_ptr, sums_ptr,
            HEADS_PER_KV, HEADS_PAD, D, HEAD_DIM, SPEC,
        )  # fmt: skip
