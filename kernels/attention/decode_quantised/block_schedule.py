"""Device code of decode attention over a quantised cache: the schedule, in closed form from the sequence lengths.

- *output*: a (request, KV head) with all query heads of that KV head; numbered `request * HKV + head`. With several
  rows of a request: a (bundle of rows, KV head), and below a bundle takes the place of a request.
- *tile*: WARPS blocks of 64 tokens of one output, one block for each warp.
- *rest*: the blocks of an output outside sink and window, and without speculation the tail; computed in tiles.
- *sliding window*: if there is one, all ranges begin at the block of its first token; tokens in front of it are masked.
- *lead-in*: tiles without work before each output's rest. They represent the cost of its `A~`, or of its tail.
- *run*: the consecutive tiles of one program.
- *spec item*: `A~` of an output, or one part of it.
- *work item*: what a program does at a time: a spec item, or the part of its run in one output's rest.

All outputs lie in one row of tiles: lead-in and rest of the first, lead-in and rest of the second, and so on. Runs are
equal ranges of this row. The program whose run contains the first lead-in tile of an output computes that output's
`A~`, so it has less time for other tiles. If `A~` comes in two parts, this program computes the tail, and the program
whose run contains the tile SPEC_TILES later computes the blocks. Parts over recalled blocks follow in the lead-in: each
belongs to the program whose run contains the first of its tiles.

One schedule covers the whole batch, or, with one request, one head (SCHEDULES > 1): the heads of a request have equal
work, so each has an equal share of the programs and of the partials. The functions below see one schedule: its outputs
and its programs only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode.tile_schedule import PREDICTOR, REST, recall_part_blocks
from alspec.kernels.common.device import inverse_of_sum
from alspec.kernels.kv_codec.flashq.record import TOKENS

__all__ = [
    "build_schedule",
    "item_blocks",
    "pick",
    "program_of_tile",
    "recall_part_tiles",
    "run_start",
    "spec_items_before",
]

# Costs in tiles: of A~ beyond its blocks (its tail, and sending it), and of a tail without speculation.
SPEC_TILES = tl.constexpr(3)
TAIL_TILES = tl.constexpr(2)


@triton.jit
def pick(values, index):
    """Return values[index] of a vector in registers."""
    indices = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(indices == index, values, tl.zeros_like(values)), 0)


@triton.jit
def _block_ranges(seq_len, chunk_blocks, SPEC: tl.constexpr, sliding_window=None):
    """Return first, sink, window, full: `A~` covers blocks `[first, sink)`, `[window, full)` and the tail.

    The rest lies between. Without speculation it is the tail and all blocks `[first, full)`.
    """
    full = tl.maximum(seq_len - 1, 0) // TOKENS
    first = tl.zeros_like(full)
    if sliding_window is not None:
        first = tl.maximum(seq_len - sliding_window, 0) // TOKENS
    if SPEC:
        sink = tl.minimum(chunk_blocks, full)
        if sliding_window is not None:
            sink = tl.maximum(sink, first)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_blocks * TOKENS, 0) // TOKENS)
    else:
        sink = first
        window = full
    return first, sink, window, full


@triton.jit
def _quotient(a, b):
    """floor(a / b) for a >= 0, b > 0 and a result below 2^21, by a float division: it is wrong by at most 1."""
    approx = (a.to(tl.float32) * inverse_of_sum(b.to(tl.float32))).to(tl.int32)
    approx -= (approx * b > a).to(tl.int32)
    return approx + ((approx + 1) * b <= a).to(tl.int32)


@triton.jit
def run_start(program, used, total):
    """First tile of a program's run: floor(program total / used), in 32 bits. Equal outputs end where runs end."""
    index = tl.minimum(program, used)
    run_tiles = _quotient(total, used)
    return index * run_tiles + _quotient(index * (total - run_tiles * used), used)


@triton.jit
def program_of_tile(tile, used, total):
    """The program whose run contains a tile: the inverse of `run_start`. The float quotient is wrong by at most 1."""
    approx = (tile.to(tl.float32) * (used.to(tl.float32) / total.to(tl.float32))).to(tl.int32)
    approx = tl.minimum(approx, used - 1)
    approx -= (run_start(approx, used, total) > tile).to(tl.int32)
    return approx + (run_start(approx + 1, used, total) <= tile).to(tl.int32)


@triton.jit
def build_schedule(
    seq_lens, output_mask, chunk_blocks, OUTPUTS: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr,
    SPEC: tl.constexpr, SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr, RECALL: tl.constexpr = 0,
    RECALL_PARTS: tl.constexpr = 0, sliding_window=None,
):  # fmt: skip
    """Compute the schedule from the lengths of all outputs.

    Args:
        seq_lens: [OUTPUTS_PAD] int32, tokens of each output.  output_mask: [OUTPUTS_PAD], which outputs exist.
        chunk_blocks: S / 64.
    Returns:
        rest_tiles: [OUTPUTS_PAD], tiles of each output's rest; without speculation one of them is for the tail.
        rest_ends: [OUTPUTS_PAD], end of each rest in the row of the rests alone.
        row_starts: [OUTPUTS_PAD], start of each rest in the row with lead-ins.
        lead_in: tiles of each lead-in.
        parts: number of parts of each `A~`.
        used: number of programs that work.
        total: tiles in the row with lead-ins.
    """
    outputs = tl.arange(0, seq_lens.shape[0])
    OWN_TAIL: tl.constexpr = 0 if SPEC else 1
    _, sink, window, _ = _block_ranges(seq_lens, chunk_blocks, SPEC, sliding_window)
    rest_tiles = tl.where(output_mask, tl.cdiv(window - sink, WARPS) + OWN_TAIL, 0)
    if PHASE == PREDICTOR:
        rest_tiles = tl.zeros_like(rest_tiles)
    rest_ends = tl.cumsum(rest_tiles, 0)
    total = tl.sum(rest_tiles, 0)
    if SPEC:
        lead_in = tl.cdiv(2 * chunk_blocks, WARPS) + 1 + SPEC_TILES
        lead_in += RECALL_PARTS * recall_part_tiles(RECALL, RECALL_PARTS, WARPS)
        if PHASE == REST:
            lead_in = 0
    else:
        lead_in = tl.minimum(total // (4 * PROGRAMS), TAIL_TILES)
    row_starts = tl.where(output_mask, rest_ends - rest_tiles + (outputs + 1) * lead_in, 2147483647)
    total += OUTPUTS * lead_in
    # Use as few programs as possible without a longer longest run: fewer partials to combine. No run is empty, so the
    # runs in one output's rest use consecutive partials. Equal outputs get the same number of runs.
    longest = tl.maximum(tl.cdiv(total, PROGRAMS), 1)
    used = _quotient(total + longest - 1, longest)
    even_used = tl.cdiv(used, OUTPUTS) * OUTPUTS
    used = tl.maximum(tl.where(even_used <= tl.minimum(PROGRAMS, total), even_used, used), 1)
    parts = 1
    if SPEC_PARTS > 1:  # two parts only if no run can contain both
        parts += (longest <= SPEC_TILES).to(tl.int32)
    return rest_tiles, rest_ends, row_starts, lead_in, parts, used, total


@triton.constexpr_function
def recall_part_tiles(recall, parts, warps):
    """Cost of a part over recalled blocks, in tiles: its blocks, q and sending it; 0 without recalled blocks."""
    return 2 + -(-recall_part_blocks(recall, parts) // warps) if parts else 0


@triton.jit
def spec_items_before(
    tile, lead_in_starts, lead_in_ends, parts, SPEC_PARTS: tl.constexpr, RECALL: tl.constexpr = 0,
    RECALL_PARTS: tl.constexpr = 0, WARPS: tl.constexpr = 1,
):  # fmt: skip
    """Count the spec items that begin before a tile; lead_in_starts, lead_in_ends: of each output."""
    is_before = lead_in_starts < tile
    count = is_before.to(tl.int32)
    if SPEC_PARTS > 1:
        # The tail is part 0, the blocks are part 1.
        count += ((lead_in_starts + SPEC_TILES < tile) & (parts > 1)).to(tl.int32)
    for part in tl.static_range(RECALL_PARTS):
        first_tile = (RECALL_PARTS - part) * recall_part_tiles(RECALL, RECALL_PARTS, WARPS)
        count += (lead_in_ends - first_tile < tile).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def item_blocks(
    is_spec, part, parts, tile, run_end, rest_start, seq_len, chunk_blocks, SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr, WARPS: tl.constexpr, sliding_window=None,
):  # fmt: skip
    """Return the blocks of a work item: a spec item, or tiles of one output's rest.

    Args:
        is_spec, part, parts: whether it is a spec item; which part of `A~`, and of how many over sink and window.
        tile, run_end: next tile and end of the run, in the row of the rests alone.
        rest_start: where the output's rest begins in that row.
    Returns:
        blocks: (first, split, second, count): `split` blocks from `first` on, then those from `second` on; `count` in
            all.
        has_tail: whether the item includes the tail.
        full: number of full blocks of the output.
    """
    sink_first, sink, window, full = _block_ranges(seq_len, chunk_blocks, SPEC, sliding_window)
    OWN_TAIL: tl.constexpr = 0 if SPEC else 1
    first_tile = tile - rest_start
    first = sink + tl.maximum(first_tile - OWN_TAIL, 0) * WARPS
    split = tl.minimum(sink + (run_end - rest_start - OWN_TAIL) * WARPS, window) - first
    count, second = split, first
    if SPEC:
        has_tail = is_spec
        first, split = tl.where(is_spec, sink_first, first), tl.where(is_spec, sink - sink_first, split)
        count = tl.where(is_spec, sink - sink_first + full - window, split)
        if SPEC_PARTS > 1:
            has_tail &= part == 0
            count = tl.where(has_tail & (parts > 1), 0, count)
        second = window
    else:
        has_tail = first_tile == 0
    return (first, split, second, count), has_tail, full
