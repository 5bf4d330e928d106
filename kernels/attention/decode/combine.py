"""Partials of decode attention and how they are merged: device code of both decode kernels (see lean_decode.py).

What stores partials and sends a guess is that over bf16; for a quantised
cache see warp_combine.py and flashq_mainloop.py.

A partial is `(o, lse)` of some tokens of one output, that is of the query heads of one (request, KV head), normalised,
fp32, `lse` in base 2. Partials of one output lie in consecutive slots. A launch of its own merges them: programs of
one warp, each for some channels of a query head. They know from the schedule where partials lie, and are on their SMs
before the attention has ended (but for a `rest`, see `launch_combine`); so a merge is the way from one kernel to the
next and a round of loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.comm.ll_packets import store_packets
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum, log2_of_sum

__all__ = [
    "COMBINE_REGISTERS",
    "await_partials",
    "combine_output",
    "combine_sizes",
    "num_sums",
    "send_spec",
    "store_partial",
]

LANE = tl.constexpr(4)  # channels that a lane loads at once
# Channels of a program: few, for what one warp has to do takes longer than the loads (32 were 1 us slower, H200). Twice
# as many where there are many programs even so: over a quantised cache, whose programs leave no registers to others
# until they end, 512 of them took up to 0.9 us longer than 256, and 128 of 8 heads up to 0.5 us less than 64.
SLICE = 8
WIDE_SLICE = 16
FEW_PROGRAMS = 128
COMBINE_VALUES = 2048  # that a program loads at once: 64 registers
# By itself ptxas aims at 64 in all, and delays loads until others have come.
COMBINE_REGISTERS = 128


def _slice_width(num_qo_heads: int, head_dim: int) -> int:
    return WIDE_SLICE if num_qo_heads * -(-head_dim // SLICE) > FEW_PROGRAMS else SLICE


def num_sums(num_qo_heads: int, head_dim: int) -> int:
    """R: how many pairs of sums of a request its heads leave for the verdict."""
    return num_qo_heads * -(-head_dim // _slice_width(num_qo_heads, head_dim))


def combine_sizes(num_qo_heads: int, head_dim: int, programs_of_head: int) -> tuple[int, int, int]:
    """Channels that a program merges, programs of a head, and how many partials they load at once: nearly always all
    that a head has of so many programs of the attention."""
    chunk = _slice_width(num_qo_heads, head_dim)
    slots = 32 * int(LANE.value) // chunk  # partials that a warp loads side by side
    most = -(-(programs_of_head + 2) // slots) * slots
    return chunk, -(-head_dim // chunk), min(most, COMBINE_VALUES // chunk)


@triton.jit
def store_partial(o, lse, o_ptr, lse_ptr, slot, rows, channels, HEADS_PER_KV: tl.constexpr):
    """Write the `HEADS_PER_KV` real rows of a partial, o [D, ROWS], into its slot; rows, channels: their numbers."""
    real = rows < HEADS_PER_KV
    tl.store(o_ptr + (slot * HEADS_PER_KV + rows)[None, :] * o.shape[0] + channels[:, None], o, mask=real[None, :])
    tl.store(lse_ptr + slot * HEADS_PER_KV + rows, lse, mask=real)


@triton.jit
def send_spec(
    o,
    lse,
    output,
    part,
    parts,  # how many have tokens
    num_heads,  # query heads of all outputs
    spec_out_ptr,
    spec_lse_ptr,  # or None, with one part
    epoch,  # or None
    rows,  # [ROWS] and
    channels,  # [D]: the numbers of o's columns and rows, in the layouts of a kernel that chooses its own
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
):
    """Write a part of `A~` of an output, o [D, ROWS] and lse [ROWS].

    With an epoch as words, which need no fence and no flag behind them. The first part also writes those without
    tokens, as partials of no weight: the receiver does not know how many parts have tokens.
    """
    real = rows < HEADS_PER_KV
    exists = real[None, :] & (channels < HEAD_DIM)[:, None]
    at = (output * HEADS_PER_KV + rows)[None, :] * HEAD_DIM + channels[:, None]
    to = spec_out_ptr
    if SPEC_PARTS > 1:
        to += part * (num_heads * HEAD_DIM)
    if epoch is not None:
        store_packets(to + at, o, epoch, exists)
    else:
        tl.store(to + at, o.to(spec_out_ptr.dtype.element_ty), mask=exists)
    if SPEC_PARTS > 1:
        lse_at = spec_lse_ptr + output * HEADS_PER_KV + rows
        store_packets(lse_at + part * num_heads, lse, epoch, real)
        nothing = tl.where(rows >= 0, float("-inf"), lse)
        zeros = tl.where((channels >= 0)[:, None], 0.0, o)
        for absent in tl.static_range(1, SPEC_PARTS):
            if (part == 0) & (absent >= parts):
                store_packets(lse_at + absent * num_heads, nothing, epoch, real)
                store_packets(spec_out_ptr + absent * (num_heads * HEAD_DIM) + at, zeros, epoch, exists)


@triton.jit
def await_partials(slot, runs):
    """`gdc_wait`, once these are computed: the compiler would move to behind the wait what nobody needs before.

    Declares shared memory, which nobody uses, for the reason given in pdl.py.
    """
    if not INTERPRETED:
        slot, runs = tl.inline_asm_elementwise(
            "{ .shared .align 4 .b8 unused[4]; .reg .pred known; .reg .b32 both, place; or.b32 both, $2, $3;"
            " setp.ne.u32 known, both, 0xFFFFFFFF; @known griddepcontrol.wait; mov.u32 place, unused;"
            " @!known st.shared.b32 [place], both; mov.b32 $0, $2; mov.b32 $1, $3; }",
            "=&r,=r,r,r", [slot, runs], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return slot, runs


@triton.jit
def _load_partials(
    o_ptr, lse_ptr, row, at, count, first, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """A head's partials from number `at` on, one for each LANES lanes, or with SPREAD = 0 that number in all lanes.

    All lanes that load channels of a partial load its `lse` as well, so that none is passed on.

    Args:
        row: of the workspace, where number 0 lies.  at: a constant.  count: how many there are.  first: channel.
    Returns:
        lse [SLOTS, LANES], -inf of those that there are none of, and o [SLOTS, LANES, LANE]; SLOTS LANES = 32.
    """
    LANES: tl.constexpr = SLICE // LANE
    SLOTS: tl.constexpr = 32 // LANES
    # As one dimension, of which there is one way to lie in lanes; of two, Triton 3.6 and 3.7 choose different ones.
    place = tl.arange(0, 32) // LANES * SPREAD
    slots, channels = tl.arange(0, SLOTS)[:, None] * SPREAD, tl.arange(0, SLICE)[None, :]
    # What is constant is added last, and so is part of the instruction: all loads have one address.
    lse_at = lse_ptr + row + place * HEADS_PER_KV + at * HEADS_PER_KV
    o_at = o_ptr + (row * D + first) + (slots * (HEADS_PER_KV * D) + channels) + at * (HEADS_PER_KV * D)
    # .cg: other SMs wrote these, and L1 may hold older bytes.
    lse = tl.load(lse_at, mask=place + at < count, other=float("-inf"), cache_modifier=".cg")
    o = tl.load(o_at, mask=(slots + at < count) & (channels >= 0), other=0.0, cache_modifier=".cg")
    return tl.reshape(lse, [SLOTS, LANES]), tl.reshape(o, [SLOTS, LANES, LANE])


@triton.jit
def _load_all(
    o_ptr, lse_ptr, row, count, first, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    N: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """A head's first N partials, those of each lane, by `_load_partials`."""
    loaded = ()
    for at in tl.static_range(0, N, 32 * LANE // SLICE if SPREAD else 1):
        of_lanes = _load_partials(o_ptr, lse_ptr, row, at, count, first, HEADS_PER_KV, D, SLICE, SPREAD)
        loaded = loaded + (of_lanes,)  # noqa: RUF005 (Triton has no *)
    return loaded


@triton.jit
def _largest(loaded):
    """The largest lse of each lane's partials."""
    largest = loaded[0][0]
    for i in tl.static_range(1, len(loaded)):
        largest = tl.maximum(largest, loaded[i][0])
    return largest


@triton.jit
def _scaled(weight, o):
    """weight o, of each channel."""
    return weight.broadcast_to(o.shape[:2])[:, :, None] * o


@triton.jit
def _add_scaled(weight, o, total):
    """weight o + total, of each channel."""
    return tl.fma(weight.broadcast_to(o.shape[:2])[:, :, None].broadcast_to(o.shape), o, total)


@triton.jit
def _combine_lanes(loaded, row_max):
    """sum 2^(lse - row_max) and sum 2^(lse - row_max) o of each lane's partials."""
    row_sum = tl.exp2(loaded[0][0] - row_max)
    total = _scaled(row_sum, loaded[0][1])
    for i in tl.static_range(1, len(loaded)):
        weight = tl.exp2(loaded[i][0] - row_max)
        row_sum += weight
        total = _add_scaled(weight, loaded[i][1], total)
    return row_sum, total


@triton.jit
def combine_output(
    o_ptr,  # partials
    lse_ptr,
    slot,  # the first of the output's runs
    runs,  # how many there are
    spec_slot,  # where `A~` of this output begins
    parts,  # how many it has
    row,  # of query heads of all requests: output * HEADS_PER_KV + head
    head,
    chunk,  # of the head's channels
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    ROUND: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
):
    """Merge some channels of a head's partials and write them; with a guess, also sums for the verdict.

    o = sum_s 2^(lse_s - m) o_s / l,   l = sum_s 2^(lse_s - m),   lse = m + log2 l,   m = max_s lse_s

    What crosses lanes is the largest `lse`, and sums of what each has merged. Every lane has loaded and merged all
    parts of the guess, which is one more partial of the first.
    """
    LANES: tl.constexpr = SLICE // LANE
    SLOTS: tl.constexpr = 32 // LANES
    tl.static_assert(ROUND * LANES % 32 == 0)
    at, first = slot * HEADS_PER_KV + head, chunk * SLICE
    loaded = _load_all(o_ptr, lse_ptr, at, runs, first, HEADS_PER_KV, D, SLICE, ROUND, 1)
    if SPEC:
        spec_at = spec_slot * HEADS_PER_KV + head
        guess = _load_all(o_ptr, lse_ptr, spec_at, parts, first, HEADS_PER_KV, D, SLICE, SPEC_PARTS, 0)
    slots = tl.arange(0, SLOTS)[:, None]
    largest = _largest(loaded)
    if SPEC:
        spec_max = _largest(guess)
        spec_sum, spec_o = _combine_lanes(guess, spec_max)
        first_lse = tl.where(slots == 0, spec_max, float("-inf"))
        largest = tl.maximum(largest, first_lse)
    row_max = tl.max(largest, 0)[None, :]
    row_sum, o = _combine_lanes(loaded, row_max)
    if SPEC:
        weight = tl.exp2(first_lse - row_max)
        # Not 0 times the others' values, which may be infinite.
        row_sum = tl.fma(weight, spec_sum, row_sum)
        o = _add_scaled(weight, tl.where((slots == 0)[:, :, None], spec_o, 0.0), o)
        spec_o = _scaled(inverse_of_sum(spec_sum), spec_o)
    for done in tl.range(ROUND, runs, ROUND):
        more = _load_all(
            o_ptr, lse_ptr, at + done * HEADS_PER_KV, runs - done, first, HEADS_PER_KV, D, SLICE, ROUND, 1
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(_largest(more), 0)[None, :])
        scale = tl.exp2(row_max - new_max)
        more_sum, more_o = _combine_lanes(more, new_max)
        row_max, row_sum, o = new_max, row_sum * scale + more_sum, _add_scaled(scale, o, more_o)
    # All lanes get all sums, and lie over what is stored as over what was loaded: so nothing crosses them once more.
    row_sum = tl.sum(row_sum, 0)[None, :].broadcast_to([SLOTS, LANES])
    o = _scaled(inverse_of_sum(row_sum), tl.sum(o, 0)[None, :, :].broadcast_to([SLOTS, LANES, LANE]))
    lanes, channels = tl.arange(0, 32), first + tl.arange(0, SLICE)[None, :]
    exists = (channels < HEAD_DIM) & (slots >= 0)
    out_at = out_ptr + row * HEAD_DIM + (channels + slots * 0)
    tl.store(out_at, tl.reshape(o, [SLOTS, SLICE]).to(out_ptr.dtype.element_ty), mask=exists & (slots == 0))
    lse = row_max.broadcast_to([SLOTS, LANES]) + log2_of_sum(row_sum)
    tl.store(out_lse_ptr + row + lanes, tl.reshape(lse, [32]), mask=lanes + chunk == 0)
    if SPEC:
        exists = tl.reshape(exists, [SLOTS, LANES, LANE])
        delta, full = tl.where(exists, spec_o - o, 0.0), tl.where(exists, o, 0.0)
        distance, norm = tl.sum(tl.sum(delta * delta, 2), 1), tl.sum(tl.sum(full * full, 2), 1)
        both = tl.where(tl.arange(0, LANES)[None, :] == 0, distance[:, None], norm[:, None])
        tl.store(sums_ptr + (row * SLICES + chunk) * 2 + lanes, tl.reshape(both, [32]), mask=lanes < 2)
