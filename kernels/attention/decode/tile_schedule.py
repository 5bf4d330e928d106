"""The tile schedule of lean decode attention on the device: a closed form of the sequence lengths.

Terms (the method is described in lean_decode.py):

- *output*: one (request, KV head) with all query heads of that KV head; its index is `request * HKV + head`.
- *spec item*: the work for `A~` of one output, over the tokens of sink and window, or one *part* of that work. With
  recalled blocks, further parts are over those blocks; their tokens are part of the rest, too.
- *rest*: the tokens of an output outside sink and window; without speculation, all tokens. The rests of all outputs
  form one row of tiles, in the order of the outputs.
- *reach*: with a sliding window, the newest tokens of a request that some row of it attends to; None without one. All
  ranges begin at the block of 64 tokens that holds the first of them. Tokens in front of a row's window are masked.
- *run*: the consecutive tiles of that row that one program computes.
- *leader*: a program that begins with a spec item. Its run is shorter by the cost of that item. *Follower*: any other
  program. If there are at least as many spec items as programs, no program is a leader.
- *work item*: a spec item or a run. A program computes its spec items first, then its run.
- *grain*: the tiles that are dealt to programs together: one, or all of an output if all outputs have equally many and
  no program gets much longer work by it. Then no output is split.
- *schedule*: the tuple (leaders, lead_run, followers, run, longer, grain), see `_divide_work`.
- *partial index*: the place of a partial in the workspace. The partial that a program writes for an output of its run
  has the index `program + output`. The index grows by one with each further run, and with each further output within a
  run, so no two partials share an index. The partials of spec items come after the partials of all runs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.common.pdl import spin_cycles
from alspec.predictor import KV_TILE

__all__ = [
    "ALL",
    "PAUSE",
    "PREDICTOR",
    "REST",
    "program_work",
    "delay_for_predictor",
    "spec_block_n",
    "head_of_tile",
    "head_start",
    "load_seq_lens",
    "locate",
    "extra_window_tiles",
    "num_spec_parts",
    "recall_part_blocks",
    "KV_BLOCK",
    "build_schedule",
    "request_ranges",
    "rows_reach",
    "program_of_tile",
    "query_row",
    "request_row",
    "start_after",
    "count_hidden",
    "count_tiles",
    "output_tiles",
    "token_ranges",
    "spec_part_tokens",
    "tiles_of_block",
]

# Phase of a launch. With two launches, PREDICTOR leaves `A~` and its partial for REST. Between them a message sends
# `A~`: this is for a paired rank whose memory kernels cannot address.
ALL = tl.constexpr(0)
PREDICTOR = tl.constexpr(1)
REST = tl.constexpr(2)

KV_BLOCK = tl.constexpr(KV_TILE)  # tokens of a block that may be recalled
WINDOW_ALIGN = tl.constexpr(KV_TILE)  # the window starts at a multiple of this many tokens, for every BLOCK_N
SPEC_OVERHEAD = tl.constexpr(1)  # cost of a spec item beyond its tiles (waiting, sending), in tiles
# HEAD_START: cycles that programs without a spec item wait before their first loads, so that the predictor's loads come
# first: memory serves requests in order. BUSY_KB: only with runs of at least this many KB, because the wait is a larger
# share of a short launch.
HEAD_START, BUSY_KB = tl.constexpr(320), tl.constexpr(244)
# With a head start and TMA, those programs also wait this many cycles between their first tile and the second one, so
# that the predictor's loads see less traffic. The first tile takes that long anyway.
PAUSE = tl.constexpr(1600)
# With at least this many tiles in a run all programs work: more memory bandwidth then outweighs fewer partials.
MANY_TILES = tl.constexpr(32)
# Outputs of a batch are not split if the busiest program then has at most 1 / WHOLE_SHARE more tiles than the average.
WHOLE_SHARE = tl.constexpr(16)


@triton.jit
def token_ranges(seq_len, chunk_size, SPEC: tl.constexpr, reach=None):
    """Return (first, sink, window): `A~` covers tokens `[first, sink)` and `[window, seq_len)`, the rest lies between.

    Without speculation the rest is all tokens from `first` on.
    """
    first = seq_len * 0
    if reach is not None:
        first = tl.maximum(seq_len - reach, 0) // KV_BLOCK * KV_BLOCK
    if SPEC:
        sink = tl.minimum(chunk_size, seq_len)
        if reach is not None:
            sink = tl.maximum(sink, first)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_size, 0) // WINDOW_ALIGN * WINDOW_ALIGN)
    else:
        sink = first
        window = seq_len
    return first, sink, window


@triton.jit
def rows_reach(sliding_window, ROWS: tl.constexpr):
    """Reach of ROWS rows of a request, which end up to ROWS - 1 tokens before its last one; None without a window."""
    reach = None
    if sliding_window is not None:
        reach = sliding_window + (ROWS - 1)
    return reach


@triton.jit
def count_hidden(blocks, is_entry, first_visible):
    """Number of listed blocks in front of a sliding window that begins at `first_visible`. They come first in a list.

    Args:
        blocks: [n], a list in ascending order, then -1.  is_entry: [n].
    """
    is_hidden = is_entry & (blocks >= 0) & (blocks * KV_BLOCK + KV_BLOCK <= first_visible)
    return tl.sum(is_hidden.to(tl.int32), 0)


@triton.jit
def request_row(bundle, index, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the place among [B ROWS] rows of row `index` of a bundle, which is TOGETHER rows of a request.

    The last bundle of a request may lack rows. The last row then takes their places: its results are written again.
    """
    row = bundle
    if TOGETHER > 1:
        BUNDLES: tl.constexpr = (ROWS + TOGETHER - 1) // TOGETHER
        row = bundle % BUNDLES * TOGETHER + index
        if ROWS % TOGETHER > 0:
            row = tl.minimum(row, ROWS - 1)
        row += bundle // BUNDLES * ROWS
    return row


@triton.jit
def query_row(
    output, column, HKV: tl.constexpr, HEADS_PER_KV: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr
):
    """Return the row of q and of the result, [B ROWS HQ, D], of a column of an output.

    An output is a KV head and a bundle of rows of a request (`request_row`). Its HEADS_PER_KV columns are the query
    heads of one row after another.
    """
    if TOGETHER == 1:
        row = output * HEADS_PER_KV + column
    else:
        HEADS: tl.constexpr = HEADS_PER_KV // TOGETHER
        row = request_row(output // HKV, column // HEADS, ROWS, TOGETHER)
        row = (row * HKV + output % HKV) * HEADS + column % HEADS
    return row


@triton.jit
def _udiv(a, b):
    """a // b for a >= 0 and b > 0. Unsigned division needs a third fewer instructions."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _udiv_const(a, B: tl.constexpr):
    """a // B for a >= 0. The compiler makes it a multiplication or a shift."""
    return (a.to(tl.uint32) // B).to(tl.int32)


@triton.jit
def _cdiv_const(a, B: tl.constexpr):
    """ceil(a / B) for a >= 0."""
    return _udiv_const(a + (B - 1), B)


@triton.jit
def count_tiles(tokens, is_long, BLOCK_N: tl.constexpr):
    """Number of tiles of BLOCK_N tokens, or of 2 BLOCK_N if `is_long`; constant divisors need no real division."""
    return tl.where(is_long, _cdiv_const(tokens, 2 * BLOCK_N), _cdiv_const(tokens, BLOCK_N))


@triton.jit
def head_of_tile(tile, tiles, HKV: tl.constexpr):
    """KV head of a tile of a request whose heads have `tiles` tiles each. Counting is faster than a division."""
    head = tile * 0
    for other in tl.static_range(1, HKV):
        head += (other * tiles <= tile).to(tl.int32)
    return head


@triton.constexpr_function
def _programs_without_spec(num_spec, programs):
    """Number of programs without a spec item; all programs if there are no leaders."""
    return programs - num_spec if num_spec < programs else programs


@triton.jit
def _divide_work(
    num_spec, spec_tiles, total_rest, grain, HKV: tl.constexpr, MIN_PARTS: tl.constexpr, MAX_PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, EVEN: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Divide the tiles of the rest over the programs, in grains; grains have one tile with speculation.

    `leaders` programs begin with a spec item and then compute `lead_run` tiles. The other tiles go to `followers`
    programs: `run` tiles each, and one more for the first `longer` of them. A spec item counts as `spec_tiles` tiles.
    If that exceeds an equal share, leaders get no tiles of the rest. No follower has an empty run, so the partials of
    one output have consecutive indices.

    Without speculation, EVEN programs work instead of all if that does not lengthen the longest run. Lengths are often
    powers of two, and then fewer runs cross from one head into the next.

    Args:
        num_spec: number of spec items.  spec_tiles: cost of each.  total_rest: grains in the rests of all outputs.
        MIN_PARTS, MAX_PARTS: bounds of the parts of `A~` for each of HKV heads of one request; MAX_PARTS is 0 with a
            batch.
    Returns:
        The schedule (leaders, lead_run, followers, run, longer, grain); the first five count programs or grains.
    """
    if SPEC:
        leaders = tl.where(num_spec < PROGRAMS, num_spec, 0)
        shares = total_rest + leaders * spec_tiles
        lead_run = tl.maximum(_udiv_const(shares, PROGRAMS) - spec_tiles, 0)
        # Round long lead runs up, so that the followers' runs do not become longer. Beside runs of one or two tiles a
        # spec item takes longer than its cost in tiles. If nearly all programs are leaders, there are too few tiles.
        rounded = _cdiv_const(shares, PROGRAMS) - spec_tiles
        lead_run = tl.where((lead_run > 1) & (leaders * rounded <= total_rest), rounded, lead_run)
        left = total_rest - leaders * lead_run
        others = PROGRAMS - leaders
        if MAX_PARTS == 0:
            run = _udiv(left, others)
        else:
            # Divide by each possible number of followers, a constant: a real division is slow.
            run = left * 0
            for parts in tl.static_range(MIN_PARTS, MAX_PARTS + 1):
                run_for_parts = _udiv_const(left, _programs_without_spec(parts * HKV, PROGRAMS))
                run = tl.where(num_spec == parts * HKV, run_for_parts, run)
    else:
        # Divide by constants, because the compiler makes these divisions multiplications.
        leaders, lead_run, left = 0, 0, total_rest
        others, run = PROGRAMS, _udiv_const(left, PROGRAMS)
        if EVEN < PROGRAMS:
            even_run = _cdiv_const(left, EVEN)
            is_even = (even_run <= _cdiv_const(left, PROGRAMS)) & (even_run < MANY_TILES)
            others, run = tl.where(is_even, EVEN, others), tl.where(is_even, _udiv_const(left, EVEN), run)
    followers = tl.maximum(tl.minimum(others, left), 1)
    run = tl.where(left < others, tl.minimum(left, 1), run)
    return leaders, lead_run, followers, run, left - run * followers, grain


@triton.jit
def _run_start(program, schedule):
    """First tile of a program's run. Programs past the last follower start at the total number of tiles."""
    leaders, lead_run, followers, run, longer, grain = schedule
    follower = tl.minimum(program - leaders, followers)
    start = leaders * lead_run + follower * run + tl.minimum(follower, longer)
    return tl.where(program < leaders, program * lead_run, start) * grain


@triton.jit
def program_of_tile(tile, schedule):
    """The program whose run contains a tile: the inverse of `_run_start`, with few divisions, because they are slow."""
    leaders, lead_run, _, run, longer, grain = schedule
    tile = _udiv(tile, tile * 0 + grain)  # as a tensor; the compiler drops a division by 1
    after = tile - leaders * lead_run
    is_lead = after < 0
    is_longer = after < longer * (run + 1)
    size = tl.where(is_lead, lead_run, tl.where(is_longer, run + 1, run))
    from_tile = tl.where(is_lead, tile, tl.where(is_longer, after, after - longer * (run + 1)))
    first = tl.where(is_lead, 0, tl.where(is_longer, leaders, leaders + longer))
    return first + _udiv(from_tile, tl.maximum(size, 1))


@triton.jit
def locate(tile, tiles_end):
    """Return (request, first tile of that request) for a tile in the row of all rests.

    Args:
        tiles_end: [B_PAD], cumulative number of tiles up to the end of each request.
    """
    before = tiles_end <= tile
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, tiles_end, 0), 0)


@triton.jit
def request_ranges(
    request, seq_lens, chunk_size, is_long, B_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr, reach=None
):
    """Return (first, sink, window, seq_len, tiles in the rest of each head) of a request; seq_lens: [B_PAD]."""
    seq_len = tl.sum(tl.where(tl.arange(0, B_PAD) == request, seq_lens, 0), 0)
    first, sink, window = token_ranges(seq_len, chunk_size, SPEC, reach)
    return first, sink, window, seq_len, count_tiles(window - sink, is_long, BLOCK_N)


@triton.jit
def output_tiles(outputs, rest, HKV: tl.constexpr, B_PAD: tl.constexpr):
    """Return (first tile, number of tiles) of the rest of each output; rest: [B_PAD], tiles per head of a request."""
    if B_PAD == 1:
        tiles = tl.zeros_like(outputs) + tl.sum(rest, 0)
        first = outputs * tiles
    else:
        request, requests = (outputs // HKV)[:, None], tl.arange(0, B_PAD)[None, :]
        tiles = tl.sum(tl.where(requests == request, rest[None, :], 0), 1)
        first = tl.sum(tl.where(requests < request, rest[None, :], 0), 1) * HKV + outputs % HKV * tiles
    return first, tiles


@triton.constexpr_function
def extra_window_tiles(block_n):
    """Tiles by which a window can exceed its chunk, because alignment adds up to WINDOW_ALIGN - 1 tokens."""
    return (WINDOW_ALIGN.value + block_n - 2) // block_n


@triton.constexpr_function
def spec_block_n(block_n, long_run):
    """Tokens in a tile of a spec item: always the long tile, up to 128 tokens."""
    return 2 * block_n if long_run > 0 and block_n < 128 else block_n


@triton.constexpr_function
def tiles_of_block(block_n):
    """Tiles that a recalled block takes."""
    return -(-KV_BLOCK.value // block_n)


@triton.constexpr_function
def recall_part_blocks(recall, parts):
    """Most blocks in one of the parts of `A~` over recalled blocks."""
    return -(-recall // parts)


@triton.jit
def _part_tiles(chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr):
    """Tiles in one part of `A~`."""
    return _cdiv_const(2 * _cdiv_const(chunk_size, SPEC_N) + extra_window_tiles(SPEC_N), SPEC_PARTS)


@triton.jit
def num_spec_parts(sink_tokens, window_tokens, chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr):
    """Number of parts of `A~` that have tiles. With several parts, the numbers of tokens are [1]."""
    parts = 1
    if SPEC_PARTS > 1:
        part_tiles = _part_tiles(chunk_size, SPEC_N, SPEC_PARTS)
        tiles = tl.sum(_cdiv_const(sink_tokens, SPEC_N) + _cdiv_const(window_tokens, SPEC_N), 0)
        for part in tl.static_range(1, SPEC_PARTS):
            parts += (part * part_tiles < tiles).to(tl.int32)
    return parts


@triton.jit
def spec_part_tokens(
    part, first, sink, window, seq_len, chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr, reach=None
):
    """Return (first, end, tiles) of a part of `A~`: tokens [first, end), then on from `window`; `tiles` in all.

    Args:
        first, sink, window: from `token_ranges`.
    """
    sink_first = 0
    if reach is not None:
        sink_first = first
    sink_tiles = _cdiv_const(sink - sink_first, SPEC_N)
    tiles = sink_tiles + _cdiv_const(seq_len - window, SPEC_N)
    first, end = sink_first, sink
    if SPEC_PARTS > 1:
        part_tiles = _part_tiles(chunk_size, SPEC_N, SPEC_PARTS)
        first = part * part_tiles
        tiles = tl.minimum(tiles - first, part_tiles)
        end = tl.where(first < sink_tiles, sink, seq_len)
        first = first * SPEC_N + tl.where(first < sink_tiles, sink_first, window - sink_tiles * SPEC_N)
    elif reach is not None:  # the sink may lie in front of all rows' sliding windows
        first, end = tl.where(sink_tiles > 0, first, window), tl.where(sink_tiles > 0, end, seq_len)
    return first, end, tiles


@triton.jit
def program_work(program, num_spec, schedule, PROGRAMS: tl.constexpr, SPEC: tl.constexpr, PHASE: tl.constexpr):
    """The work items of a program: first its spec items, each sent before the next work item, then its run.

    Returns:
        (tile, run_end, num_spec_items, num_items): the run is tiles [tile, run_end).
    """
    tile = _run_start(program, schedule)
    run_end = _run_start(program + 1, schedule)
    if PHASE == PREDICTOR:
        tile = run_end + 0
    # At least one work item, even an empty one. The loop body is then no branch, so the compiler computes what it can
    # of it while `seq_lens` is loaded.
    num_spec_items, num_items = 0, (program >= 0).to(tl.int32)
    if SPEC:
        num_spec_items = _udiv_const(num_spec + PROGRAMS - 1 - program, PROGRAMS)
        num_items = tl.maximum(num_spec_items + (tile < run_end).to(tl.int32), 1)
    return tile, run_end, num_spec_items, num_items


@triton.jit
def head_start(total_rest, is_long, BLOCK_N: tl.constexpr, D: tl.constexpr, PROGRAMS: tl.constexpr):
    """Cycles that programs without a spec item wait; 0 if a run has less than BUSY_KB of K and V (16-bit elements)."""
    TILE_KB: tl.constexpr = BLOCK_N * D * 4 // 1024
    rest_kb = total_rest * tl.where(is_long, 2 * TILE_KB, TILE_KB)
    return tl.where(rest_kb >= BUSY_KB * PROGRAMS, HEAD_START, 0)


@triton.jit
def delay_for_predictor(
    program, item, num_spec, total_rest, is_long, BLOCK_N: tl.constexpr, D: tl.constexpr, PROGRAMS: tl.constexpr,
    SPEC: tl.constexpr, PHASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Delay the first work item of a program without a spec item, so that the predictor's loads come first.

    Call it at the beginning of a work item. Before the loop over work items, its branch would keep the compiler from
    moving work that all items share into the time in which the lengths are loaded.

    Args:
        item: index of the work item in this program.  num_spec: number of spec items in the launch.
    Returns:
        True if the program was delayed; None in launches without a delay.
    """
    is_delayed = None
    if SPEC and PHASE == ALL and PDL:
        cycles = head_start(total_rest, is_long, BLOCK_N, D, PROGRAMS)
        is_delayed = (program >= num_spec) & (item == 0) & (cycles > 0)
        if is_delayed:
            spin_cycles(cycles)
    return is_delayed


@triton.jit
def start_after(PREFETCH_TILE: tl.constexpr):
    """Begin a dependent launch: wait for the previous kernel, then let the combine launch start.

    With PREFETCH_TILE the caller waits later. The combine kernel reads the lengths at its start. So it may start only
    when the previous kernels have ended, or if they do not write the lengths (`prefetch_before_wait`). A kernel with a
    gate also waits first. Otherwise a later kernel that tests its gate early could start before the gate is written.
    """
    if PREFETCH_TILE:
        gdc_launch_dependents()
    else:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def load_seq_lens(seq_lens_ptr, num_requests, B_PAD: tl.constexpr):
    """Load seq_lens as [B_PAD]; requests past `num_requests` have length 0."""
    requests = tl.arange(0, B_PAD)
    if B_PAD == 1:
        seq_lens = tl.load(seq_lens_ptr + requests)
    else:
        seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)
    return seq_lens


@triton.jit
def build_schedule(
    seq_lens, num_requests, chunk_size, HKV: tl.constexpr, PROGRAMS: tl.constexpr, B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, LONG: tl.constexpr, SPEC: tl.constexpr, SPEC_PARTS: tl.constexpr, PHASE: tl.constexpr,
    RECALL_PARTS: tl.constexpr = 0, RECALL: tl.constexpr = 0, reach=None,
):  # fmt: skip
    """Compute the schedule and all other values that depend on the lengths [B_PAD] alone.

    RECALL blocks of each output are recalled, in RECALL_PARTS further parts of `A~`.

    Returns:
        is_long: the rest has long tiles.
        rest_tiles: [B_PAD], tiles of the rest of each request, over all its KV heads.  total_rest: their sum.
        parts: number of parts of `A~` over sink and window that have tiles.
        schedule: from `_divide_work`.
    """
    SPEC_N: tl.constexpr = spec_block_n(BLOCK_N, LONG)
    first, sink, window = token_ranges(seq_lens, chunk_size, SPEC, reach)
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    parts = num_spec_parts(sink - first, seq_lens - window, chunk_size, SPEC_N, SPEC_PARTS)
    part_tiles = tl.minimum(_part_tiles(chunk_size, SPEC_N, SPEC_PARTS), 2 * _cdiv_const(chunk_size, SPEC_N))
    if RECALL_PARTS > 0:
        part_tiles = tl.maximum(part_tiles, recall_part_blocks(RECALL, RECALL_PARTS) * KV_BLOCK // SPEC_N)
    all_parts = parts + RECALL_PARTS
    tiles = tl.sum(count_tiles(window - sink, False, BLOCK_N), 0) * HKV
    is_long = LONG > 0 and tiles > LONG * PROGRAMS
    if LONG > 0 and BLOCK_N < 128:
        # Also take long tiles if the busiest program then has no more tokens. Spec items always have long tiles.
        long_tiles = tl.sum(count_tiles(window - sink, True, BLOCK_N), 0) * HKV
        all_spec_tiles = num_outputs * all_parts * part_tiles if SPEC else 0
        longest = _cdiv_const(tiles + 2 * all_spec_tiles, PROGRAMS)
        is_long |= 2 * _cdiv_const(long_tiles + all_spec_tiles, PROGRAMS) <= longest
    head_tiles = count_tiles(window - sink, is_long, BLOCK_N)
    rest_tiles = head_tiles * HKV
    total_rest = tl.sum(rest_tiles, 0)
    grains, grain = total_rest, 1
    if B_PAD > 1 and not SPEC:
        longest_head = tl.max(head_tiles, 0)
        busiest, average = _cdiv_const(num_outputs, PROGRAMS) * longest_head, _cdiv_const(total_rest, PROGRAMS)
        is_whole = (longest_head * num_outputs == total_rest) & (busiest <= average + average // WHOLE_SHARE)
        grains, grain = tl.where(is_whole, num_outputs, total_rest), tl.where(is_whole, longest_head, 1)
    EVEN: tl.constexpr = PROGRAMS // 8 * 8 if B_PAD == 1 and PROGRAMS > 8 else PROGRAMS
    schedule = _divide_work(
        num_outputs * all_parts, count_tiles(part_tiles * SPEC_N, is_long, BLOCK_N) + SPEC_OVERHEAD, grains, grain,
        HKV, 1 + RECALL_PARTS, SPEC_PARTS + RECALL_PARTS if B_PAD == 1 else 0, PROGRAMS, EVEN, SPEC and PHASE == ALL,
    )  # fmt: skip
    return is_long, rest_tiles, total_rest, parts, schedule
