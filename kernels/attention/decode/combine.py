"""Partials of decode attention: how they are stored, how `A~` is sent, and how they are combined.

`combine_output` and `await_partials` serve every codec. `store_partial` and `send_spec` are for the bf16 cache; their
counterparts for a quantised cache are in warp_combine.py and quantised_mainloop.py.

A partial is `(o, lse)` of some tokens of one output: all query heads of one (request, KV head), of all rows that are
computed together. It is normalised, fp32, with `lse` in base 2. The partials of one output have consecutive indices. A
second launch combines them; each of its programs is one warp and computes a slice of the channels of one query head. A
program computes from the schedule where its partials lie, and it is resident before the attention launch ends (except
after a `rest`, see `launch_combine`). So the combine costs only one kernel transition and one round of loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode.tile_schedule import query_row
from alspec.kernels.comm.ll_packets import store_packets
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum, log2_of_sum

__all__ = [
    "COMBINE_REGISTERS",
    "NO_TOKEN",
    "await_partials",
    "combine_output",
    "combine_sizes",
    "num_sums",
    "send_spec",
    "slices_per_program",
    "store_output",
    "store_partial",
]

NO_TOKEN = tl.constexpr(-1e30)  # maximum of a row that sees no token yet: exp2 of -inf minus it is 0, not NaN
LANE = tl.constexpr(4)  # channels per lane and load
# Channels per program: beyond 8 a program, which is one warp, is issue-bound. But with more than MAX_NARROW_PROGRAMS
# programs per request 16 are faster: over a quantised cache, attention holds all registers of an SM until it ends.
SLICE = 8
WIDE_SLICE = 16
MAX_NARROW_PROGRAMS = 128
# Batches have wider slices, up to 128 channels (one load of a warp): more than MAX_PROGRAMS are not resident together.
MAX_PROGRAMS = 512
COMBINE_VALUES = 2048  # values that a program loads in one round: 64 registers
# The ptxas default aims at 64 registers in all, and then delays some loads until earlier ones have arrived.
COMBINE_REGISTERS = 128


def _slice_width(batch_size: int, num_qo_heads: int, head_dim: int) -> int:
    width = WIDE_SLICE if num_qo_heads * -(-head_dim // SLICE) > MAX_NARROW_PROGRAMS else SLICE
    widest, rows = min(head_dim, 32 * int(LANE.value)), batch_size * num_qo_heads
    while width < widest and rows * -(-head_dim // width) > MAX_PROGRAMS:
        width *= 2
    return width


def num_sums(batch_size: int, num_qo_heads: int, head_dim: int) -> int:
    """R, the number of (dist2, norm2) pairs that the heads of one request write for the verdict."""
    return num_qo_heads * -(-head_dim // _slice_width(batch_size, num_qo_heads, head_dim))


def combine_sizes(batch_size: int, num_qo_heads: int, head_dim: int, programs_per_head: int) -> tuple[int, int, int]:
    """Sizes of the combine launch of a batch.

    Args:
        programs_per_head: programs of the attention launch divided by its outputs.
    Returns:
        (channels per program, programs per query head, partials loaded in one round). One round nearly always covers
        all partials of a head.
    """
    width = _slice_width(batch_size, num_qo_heads, head_dim)
    side_by_side = 32 * int(LANE.value) // width  # partials that a warp loads at once
    most = -(-(programs_per_head + 2) // side_by_side) * side_by_side
    return width, -(-head_dim // width), min(most, COMBINE_VALUES // width)


def slices_per_program(batch_size: int, num_qo_heads: int, head_dim: int) -> int:
    """Slices that a program combines one after another: more than one only for batches of many heads."""
    num_slices = -(-head_dim // _slice_width(batch_size, num_qo_heads, head_dim))
    return -(-batch_size * num_qo_heads * num_slices // MAX_PROGRAMS)


@triton.jit
def store_partial(o, lse, o_ptr, lse_ptr, partial_index, heads, channels, HEADS_PER_KV: tl.constexpr):
    """Store a partial o [D, HEADS_PAD], lse [HEADS_PAD], without its padded heads.

    Args:
        heads: [HEADS_PAD], query heads.  channels: [D]. Both in the layout of o.
    """
    head_mask = heads < HEADS_PER_KV
    tl.store(
        o_ptr + (partial_index * HEADS_PER_KV + heads)[None, :] * o.shape[0] + channels[:, None], o,
        mask=head_mask[None, :],
    )  # fmt: skip
    tl.store(lse_ptr + partial_index * HEADS_PER_KV + heads, lse, mask=head_mask)


@triton.jit
def store_output(
    o, lse, output, is_whole, o_ptr, lse_ptr, program, out_ptr, out_lse_ptr, heads, channels, HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store what a program computed of an output: a partial, or if `is_whole` the output itself, which is then final.

    Args:
        o, lse, heads, channels: as for `store_partial`.
        out_ptr, out_lse_ptr: of the launch's results; None: it always is a partial.
    """
    if out_ptr is None:
        store_partial(o, lse, o_ptr, lse_ptr, program + output, heads, channels, HEADS_PER_KV)
    else:
        if is_whole:
            row, head_mask = query_row(output, heads, HKV, HEADS_PER_KV, ROWS, ROWS), heads < HEADS_PER_KV
            tl.store(
                out_ptr + row[None, :] * HEAD_DIM + channels[:, None], o.to(out_ptr.dtype.element_ty),
                mask=head_mask[None, :] & (channels < HEAD_DIM)[:, None],
            )  # fmt: skip
            tl.store(out_lse_ptr + row, lse, mask=head_mask)
        else:
            store_partial(o, lse, o_ptr, lse_ptr, program + output, heads, channels, HEADS_PER_KV)


@triton.jit
def send_spec(
    o,  # [D, HEADS_PAD]
    lse,  # [HEADS_PAD]
    output,
    part,
    parts,  # number of parts with tokens
    num_heads,  # query heads of all outputs
    spec_out_ptr,
    spec_lse_ptr,  # or None, with one part
    epoch,  # or None
    heads,  # [HEADS_PAD], query heads, in the layout of o
    channels,  # [D], in the layout of o
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    RECALL_PARTS: tl.constexpr = 0,
):
    """Send `A~` of an output, or one part of it.

    With an epoch it is sent as LL packets, which need no fence and no flag. The receiver does not know how many parts
    have tokens. So part 0 also sends the parts without tokens, as partials of weight 0.

    Args:
        SPEC_PARTS: parts over sink and window.  RECALL_PARTS: further parts; part SPEC_PARTS + r is recalled part r.
    """
    head_mask = heads < HEADS_PER_KV
    o_mask = head_mask[None, :] & (channels < HEAD_DIM)[:, None]
    offsets = (output * HEADS_PER_KV + heads)[None, :] * HEAD_DIM + channels[:, None]
    dst = spec_out_ptr
    IN_PARTS: tl.constexpr = SPEC_PARTS + RECALL_PARTS > 1
    if IN_PARTS:
        dst += part * (num_heads * HEAD_DIM)
    if epoch is not None:
        store_packets(dst + offsets, o, epoch, o_mask)
    else:
        tl.store(dst + offsets, o.to(spec_out_ptr.dtype.element_ty), mask=o_mask)
    if IN_PARTS:
        lse_dst = spec_lse_ptr + output * HEADS_PER_KV + heads
        store_packets(lse_dst + part * num_heads, lse, epoch, head_mask)
    if SPEC_PARTS > 1:
        # Always true here; `where` keeps the layouts of lse and o.
        empty_lse = tl.where(heads >= 0, float("-inf"), lse)
        zeros = tl.where((channels >= 0)[:, None], 0.0, o)
        for empty_part in tl.static_range(1, SPEC_PARTS):
            if (part == 0) & (empty_part >= parts):
                store_packets(lse_dst + empty_part * num_heads, empty_lse, epoch, head_mask)
                store_packets(spec_out_ptr + empty_part * (num_heads * HEAD_DIM) + offsets, zeros, epoch, o_mask)


@triton.jit
def await_partials(partial_index, runs):
    """`gdc_wait` after `partial_index` and `runs` are computed; returns them unchanged.

    The wait depends on both values, because the compiler would otherwise move their computation behind the wait. It
    also declares unused shared memory, for the reason given in pdl.py.
    """
    if not INTERPRETED:
        partial_index, runs = tl.inline_asm_elementwise(
            "{ .shared .align 4 .b8 unused[4]; .reg .pred known; .reg .b32 both, place; or.b32 both, $2, $3;"
            " setp.ne.u32 known, both, 0xFFFFFFFF; @known griddepcontrol.wait; mov.u32 place, unused;"
            " @!known st.shared.b32 [place], both; mov.b32 $0, $2; mov.b32 $1, $3; }",
            "=&r,=r,r,r", [partial_index, runs], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return partial_index, runs


@triton.jit
def _load_partials(
    o_ptr, lse_ptr, row, first_partial, count, first_channel, HEADS_PER_KV: tl.constexpr, D: tl.constexpr,
    SLICE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Load partials of one head from number `first_partial` on.

    With SPREAD = 1 each group of LANES lanes loads another partial; with SPREAD = 0 all lanes load the same one. Each
    lane also loads the `lse` of its partial, so no lane has to pass it on.

    Args:
        row: row of partial 0 in the workspace.  first_partial: a constant.  count: number of partials.
    Returns:
        lse [PARTIALS, LANES], -inf past `count`; o [PARTIALS, LANES, LANE], with PARTIALS LANES = 32.
    """
    LANES: tl.constexpr = SLICE // LANE
    PARTIALS: tl.constexpr = 32 // LANES
    # One-dimensional, which has only one lane layout. For two dimensions Triton 3.6 and 3.7 choose different ones.
    lane_partial = tl.arange(0, 32) // LANES * SPREAD
    partials, channels = tl.arange(0, PARTIALS)[:, None] * SPREAD, tl.arange(0, SLICE)[None, :]
    # Add the constants last: they become part of the load instructions, and all loads share one address.
    lse_ptrs = lse_ptr + row + lane_partial * HEADS_PER_KV + first_partial * HEADS_PER_KV
    o_ptrs = (
        o_ptr + (row * D + first_channel) + (partials * (HEADS_PER_KV * D) + channels)
        + first_partial * (HEADS_PER_KV * D)
    )  # fmt: skip
    # .cg: other SMs wrote these values, and L1 may hold older ones.
    lse = tl.load(lse_ptrs, mask=lane_partial + first_partial < count, other=float("-inf"), cache_modifier=".cg")
    o = tl.load(o_ptrs, mask=(partials + first_partial < count) & (channels >= 0), other=0.0, cache_modifier=".cg")
    return tl.reshape(lse, [PARTIALS, LANES]), tl.reshape(o, [PARTIALS, LANES, LANE])


@triton.jit
def _load_all(
    o_ptr, lse_ptr, row, count, first_channel, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, SLICE: tl.constexpr,
    N: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Load the first N partials of a head: a tuple of the (lse, o) of `_load_partials`."""
    loaded = ()
    for first_partial in tl.static_range(0, N, 32 * LANE // SLICE if SPREAD else 1):
        lse_and_o = _load_partials(
            o_ptr, lse_ptr, row, first_partial, count, first_channel, HEADS_PER_KV, D, SLICE, SPREAD
        )  # fmt: skip
        loaded = loaded + (lse_and_o,)  # noqa: RUF005 (Triton has no *)
    return loaded


@triton.jit
def _max_lse(loaded):
    """Largest lse of the partials of each lane."""
    lse_max = loaded[0][0]
    for i in tl.static_range(1, len(loaded)):
        lse_max = tl.maximum(lse_max, loaded[i][0])
    return lse_max


@triton.jit
def _scale(weight, o):
    """weight * o, for each channel."""
    return weight.broadcast_to(o.shape[:2])[:, :, None] * o


@triton.jit
def _scale_add(weight, o, total):
    """weight * o + total, for each channel."""
    return tl.fma(weight.broadcast_to(o.shape[:2])[:, :, None].broadcast_to(o.shape), o, total)


@triton.jit
def _combine_lanes(loaded, row_max):
    """sum 2^(lse - row_max) and sum 2^(lse - row_max) o over the partials of each lane."""
    row_sum = tl.exp2(loaded[0][0] - row_max)
    total = _scale(row_sum, loaded[0][1])
    for i in tl.static_range(1, len(loaded)):
        weight = tl.exp2(loaded[i][0] - row_max)
        row_sum += weight
        total = _scale_add(weight, loaded[i][1], total)
    return row_sum, total


@triton.jit
def _add_recalled(spec_max, spec_sum, spec_o, recalled):
    """Add the partials over recalled blocks, which lie in different lanes, to the sums over sink and window.

    Returns:
        The sums of both, as `_combine_lanes` does; every lane has all of them.
    """
    all_max = tl.maximum(tl.max(_max_lse(recalled), 0)[None, :], spec_max)
    row_sum, o = _combine_lanes(recalled, all_max)
    weight = tl.exp2(spec_max - all_max)
    row_sum = tl.fma(weight, spec_sum, tl.sum(row_sum, 0)[None, :].broadcast_to(spec_sum.shape))
    return row_sum, _scale_add(weight, spec_o, tl.sum(o, 0)[None, :, :].broadcast_to(spec_o.shape))


@triton.jit
def combine_output(
    o_ptr,  # partials
    lse_ptr,
    partial_index,  # first partial of the runs of this output
    runs,  # number of these partials
    spec_index,  # first partial of `A~` of this output
    parts,  # number of these partials
    row,  # where the result lies: query head among those of all rows, see `query_row`
    head,
    slice_index,  # slice of the head's channels
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
    RECALL_PARTS: tl.constexpr = 0,
    SPEC_ONLY: tl.constexpr = False,
):
    """Combine a slice of channels of a head's partials; with speculation, also write the sums for the verdict.

    o = sum_s 2^(lse_s - m) o_s / l,   l = sum_s 2^(lse_s - m),   lse = m + log2 l,   m = max_s lse_s

    Only the maximum of `lse` and the sums over each lane's partials cross lanes. Every lane loads and combines all
    parts of `A~` over sink and window. The result counts as one more partial of the first group of lanes. Parts over
    recalled blocks belong to `A~` only, because the runs hold their tokens, too.

    Args:
        SPEC_ONLY: write `A~` instead of o; there are no runs.
    """
    LANES: tl.constexpr = SLICE // LANE
    PARTIALS: tl.constexpr = 32 // LANES
    tl.static_assert(ROUND * LANES % 32 == 0)
    first_row, first_channel = partial_index * HEADS_PER_KV + head, slice_index * SLICE
    loaded = _load_all(o_ptr, lse_ptr, first_row, runs, first_channel, HEADS_PER_KV, D, SLICE, ROUND, 1)
    if SPEC:
        spec_row = spec_index * HEADS_PER_KV + head
        spec = _load_all(o_ptr, lse_ptr, spec_row, parts, first_channel, HEADS_PER_KV, D, SLICE, SPEC_PARTS, 0)
        if RECALL_PARTS > 0:
            recalled = _load_all(
                o_ptr, lse_ptr, spec_row + SPEC_PARTS * HEADS_PER_KV, RECALL_PARTS, first_channel, HEADS_PER_KV, D,
                SLICE, RECALL_PARTS, 1
            )  # fmt: skip
    partials = tl.arange(0, PARTIALS)[:, None]
    lse_max = _max_lse(loaded)
    if SPEC:
        spec_max = _max_lse(spec)
        spec_sum, spec_o = _combine_lanes(spec, spec_max)
        full_sum, full_o = spec_sum, spec_o  # the share of the full output
        first_lse = tl.where(partials == 0, spec_max, float("-inf"))
        lse_max = tl.maximum(lse_max, first_lse)
        if RECALL_PARTS > 0:
            spec_sum, spec_o = _add_recalled(spec_max, spec_sum, spec_o, recalled)
    row_max = tl.max(lse_max, 0)[None, :]
    row_sum, o = _combine_lanes(loaded, row_max)
    if SPEC:
        weight = tl.exp2(first_lse - row_max)
        row_sum = tl.fma(weight, full_sum, row_sum)
        # Select before the product: the other lanes have weight 0, but 0 * inf is NaN.
        o = _scale_add(weight, tl.where((partials == 0)[:, :, None], full_o, 0.0), o)
        spec_o = _scale(inverse_of_sum(spec_sum), spec_o)
    for done in tl.range(ROUND, runs, ROUND):
        more = _load_all(
            o_ptr, lse_ptr, first_row + done * HEADS_PER_KV, runs - done, first_channel, HEADS_PER_KV, D, SLICE,
            ROUND, 1
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(_max_lse(more), 0)[None, :])
        scale = tl.exp2(row_max - new_max)
        more_sum, more_o = _combine_lanes(more, new_max)
        row_max, row_sum, o = new_max, row_sum * scale + more_sum, _scale_add(scale, o, more_o)
    # All lanes get all sums, in the layout of the loads, which is also that of the stores: no further exchange.
    row_sum = tl.sum(row_sum, 0)[None, :].broadcast_to([PARTIALS, LANES])
    o = _scale(inverse_of_sum(row_sum), tl.sum(o, 0)[None, :, :].broadcast_to([PARTIALS, LANES, LANE]))
    if SPEC_ONLY:
        o = spec_o
    lanes, channels = tl.arange(0, 32), first_channel + tl.arange(0, SLICE)[None, :]
    out_mask = (channels < HEAD_DIM) & (partials >= 0)
    out_ptrs = out_ptr + row * HEAD_DIM + (channels + partials * 0)
    tl.store(out_ptrs, tl.reshape(o, [PARTIALS, SLICE]).to(out_ptr.dtype.element_ty), mask=out_mask & (partials == 0))
    lse = row_max.broadcast_to([PARTIALS, LANES]) + log2_of_sum(row_sum)
    tl.store(out_lse_ptr + row + lanes, tl.reshape(lse, [32]), mask=lanes + slice_index == 0)
    if SPEC and not SPEC_ONLY:
        out_mask = tl.reshape(out_mask, [PARTIALS, LANES, LANE])
        delta, full = tl.where(out_mask, spec_o - o, 0.0), tl.where(out_mask, o, 0.0)
        dist2, norm2 = tl.sum(tl.sum(delta * delta, 2), 1), tl.sum(tl.sum(full * full, 2), 1)
        both = tl.where(tl.arange(0, LANES)[None, :] == 0, dist2[:, None], norm2[:, None])
        tl.store(sums_ptr + (row * SLICES + slice_index) * 2 + lanes, tl.reshape(both, [32]), mask=lanes < 2)
