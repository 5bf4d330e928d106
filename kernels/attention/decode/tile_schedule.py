"""Device code of lean decode attention: the schedule, in closed form from the lengths (see lean_decode.py).

- *output*: a (request, KV head), with all query heads of that KV head; numbered `request * HKV + head`.
- *guess*: `A~` of an output, over the tokens of sink and window; it may come in *parts*.
- *rest*: the tokens of an output outside sink and window; without speculation, all of them. The rests of all outputs
  form one row of tiles, in the order of outputs.
- *run*: the consecutive tiles of that row which one program takes.
- *leader*: a program that begins with a guess, and whose run is that much shorter; *follower*: any other. Where there
  are as many guesses as programs or more, there are no leaders.
- *turn*: what a program does at a time: a guess, or its run. Guesses come first.
- *slot*: where a partial lies. That of a program's run for an output is `program + output`: each program adds one, and
  so does each further output that a run meets, so no two partials share a slot. Those of guesses lie behind.
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
    "deal",
    "give_head_start",
    "spec_tile",
    "head_of",
    "head_start",
    "lengths_of",
    "locate",
    "more_tiles",
    "parts_of_spec",
    "build_schedule",
    "rest_of",
    "run_of",
    "start_after",
    "tiles_in",
    "tiles_of",
    "token_ranges",
    "tokens_of_spec_part",
]

# The phase that a launch does. Of two launches the first leaves `A~` and its partial for the second; in between, `A~`
# goes to a paired rank whose memory cannot be addressed.
ALL = tl.constexpr(0)
PREDICTOR = tl.constexpr(1)
REST = tl.constexpr(2)

WINDOW_ALIGN = tl.constexpr(KV_TILE)  # the window is widened to whole tiles of so many tokens, whatever BLOCK_N is
SPEC_OVERHEAD = tl.constexpr(1)  # what waiting for a guess's tiles and sending it away costs, in streamed tiles
# Cycles by which programs with a guess start ahead of the others, besides the 300 that those take for the schedule:
# requests are served in the order in which they come, and the first tiles of all programs take 4 us. Only where runs
# have so many KB (32K tokens of 2 heads have, 8K of 8 have not): of shorter launches it is more, and less is ahead.
HEAD_START, BUSY_KB = tl.constexpr(320), tl.constexpr(244)
# There, and where copies are asked for one by one, the others also wait so long between their first tile and more: that
# one takes longer to come, and what it takes is less while nobody asks for more.
PAUSE = tl.constexpr(1600)
# All programs work where each has so many tiles: 128 of 132 SMs stream slower by 1 %, more than a merge gains.
MANY_TILES = tl.constexpr(32)


@triton.jit
def token_ranges(seq_len, chunk_size, SPEC: tl.constexpr):
    """sink, window: the guess is over tokens `[0, sink)` and `[window, seq_len)`, the rest lies in between.

    Without a guess the rest is all tokens.
    """
    if SPEC:
        sink = tl.minimum(chunk_size, seq_len)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_size, 0) // WINDOW_ALIGN * WINDOW_ALIGN)
    else:
        sink = seq_len * 0
        window = seq_len
    return sink, window


@triton.jit
def _divide(a, b):
    """a // b for a >= 0 and b > 0: unsigned, which takes a third fewer instructions."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _divide_by(a, B: tl.constexpr):
    """The same by a constant: a product or a shift."""
    return (a.to(tl.uint32) // B).to(tl.int32)


@triton.jit
def _divide_up(a, B: tl.constexpr):
    """The same, rounded up: how many tiles of B tokens, or shares of B programs, there are of `a`."""
    return _divide_by(a + (B - 1), B)


@triton.jit
def tiles_in(tokens, is_long, BLOCK_N: tl.constexpr):
    """How many tiles of BLOCK_N tokens, or of twice as many, they fill. By constants, so that nothing is divided."""
    return tl.where(is_long, _divide_up(tokens, 2 * BLOCK_N), _divide_up(tokens, BLOCK_N))


@triton.jit
def head_of(tile, tiles, HKV: tl.constexpr):
    """The head of a request that a tile lies in, if each head has `tiles`: counted, which is faster than a division."""
    head = tile * 0
    for other in tl.static_range(1, HKV):
        head += (other * tiles <= tile).to(tl.int32)
    return head


@triton.constexpr_function
def _others(num_spec, programs):
    """Programs without a guess; all, where none are leaders."""
    return programs - num_spec if num_spec < programs else programs


@triton.jit
def _divide_work(
    num_spec, spec_tiles, total_rest, HKV: tl.constexpr, MAX_PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
    EVEN: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """How the tiles of the rest are dealt: (leaders, lead_run, followers, run, longer), below called the schedule.

    `leaders` programs begin with a guess and take `lead_run` tiles after it. The other tiles go to `followers`
    programs, `run` tiles each and the first `longer` of them one more. A guess counts as `spec_tiles` tiles; where
    that is more than a program's share, leaders get no tiles of the rest. No follower's run is empty, so that the runs
    that meet one output use consecutive slots.

    MAX_PARTS: how many parts each of HKV guesses may come in, if all are of one request; else 0.

    Without guesses, EVEN programs work instead of all if their longest run is no longer: lengths are often powers of
    two, and few runs then cross from one head into the next.
    """
    if SPEC:
        leaders = tl.where(num_spec < PROGRAMS, num_spec, 0)
        shares = total_rest + leaders * spec_tiles
        lead_run = tl.maximum(_divide_by(shares, PROGRAMS) - spec_tiles, 0)
        # Rounded up where runs are long, so that followers' are not: at 10000 tokens 4 to 5 % faster. Beside runs of a
        # tile or two, a guess takes longer than it counts. If nearly all are leaders, there are not so many tiles.
        rounded = _divide_up(shares, PROGRAMS) - spec_tiles
        lead_run = tl.where((lead_run > 1) & (leaders * rounded <= total_rest), rounded, lead_run)
        left = total_rest - leaders * lead_run
        others = PROGRAMS - leaders
        if MAX_PARTS == 0:
            run = _divide(left, others)
        else:
            # By each of the numbers of followers that there may be: a division takes 100 cycles.
            run = left * 0
            for parts in tl.static_range(1, MAX_PARTS + 1):
                of_parts = _divide_by(left, _others(parts * HKV, PROGRAMS))
                run = tl.where(num_spec == parts * HKV, of_parts, run)
    else:
        # By constants: the compiler makes such divisions multiplications.
        leaders, lead_run, left = 0, 0, total_rest
        others, run = PROGRAMS, _divide_by(left, PROGRAMS)
        if EVEN < PROGRAMS:
            even_run = _divide_up(left, EVEN)
            is_even = (even_run <= _divide_up(left, PROGRAMS)) & (even_run < MANY_TILES)
            others, run = tl.where(is_even, EVEN, others), tl.where(is_even, _divide_by(left, EVEN), run)
    followers = tl.maximum(tl.minimum(others, left), 1)
    run = tl.where(left < others, tl.minimum(left, 1), run)
    return leaders, lead_run, followers, run, left - run * followers


@triton.jit
def _run_start(program, leaders, lead_run, followers, run, longer):
    """First tile of a program's run; from 0 for the first program to the number of tiles past the last one."""
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    place = tl.minimum(program - leaders, followers)
    follow = leaders * lead_run + place * run + tl.minimum(place, longer)
    return tl.where(program < leaders, program * lead_run, follow)


@triton.jit
def run_of(tile, leaders, lead_run, run, longer):
    """The program whose run holds a tile: the inverse of `_run_start`. One division only, because it is slow."""
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    after = tile - leaders * lead_run
    is_lead = after < 0
    is_longer = after < longer * (run + 1)
    size = tl.where(is_lead, lead_run, tl.where(is_longer, run + 1, run))
    from_tile = tl.where(is_lead, tile, tl.where(is_longer, after, after - longer * (run + 1)))
    first = tl.where(is_lead, 0, tl.where(is_longer, leaders, leaders + longer))
    return first + _divide(from_tile, tl.maximum(size, 1))


@triton.jit
def locate(tile, tiles_end):
    """Request of a tile in the row of all rests, and where its tiles begin; tiles_end: [B_PAD], cumulative."""
    before = tiles_end <= tile
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, tiles_end, 0), 0)


@triton.jit
def rest_of(request, seq_lens, chunk_size, is_long, B_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """Sink, window and length of a request, and how many tiles the rest of each of its heads has; seq_lens: [B_PAD]."""
    seq_len = tl.sum(tl.where(tl.arange(0, B_PAD) == request, seq_lens, 0), 0)
    sink, window = token_ranges(seq_len, chunk_size, SPEC)
    return sink, window, seq_len, tiles_in(window - sink, is_long, BLOCK_N)


@triton.jit
def tiles_of(outputs, rest, HKV: tl.constexpr, B_PAD: tl.constexpr):
    """First tile of the rest of each output, and how many it has; rest: [B_PAD], of each head of a request."""
    if B_PAD == 1:
        tiles = tl.zeros_like(outputs) + tl.sum(rest, 0)
        first = outputs * tiles
    else:
        request, requests = (outputs // HKV)[:, None], tl.arange(0, B_PAD)[None, :]
        tiles = tl.sum(tl.where(requests == request, rest[None, :], 0), 1)
        first = tl.sum(tl.where(requests < request, rest[None, :], 0), 1) * HKV + outputs % HKV * tiles
    return first, tiles


@triton.constexpr_function
def more_tiles(block_n):
    """By how many tiles of `block_n` tokens a window, of up to WINDOW_ALIGN - 1 tokens more, may exceed its chunk."""
    return (WINDOW_ALIGN.value + block_n - 2) // block_n


@triton.constexpr_function
def spec_tile(block_n, long_run):
    """Tokens in a tile of a guess: 128, where there are such tiles, whatever tiles the rest has."""
    return 2 * block_n if long_run > 0 and block_n < 128 else block_n


@triton.jit
def _part_tiles(chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr):
    """Tiles of one part of a guess."""
    return _divide_up(2 * _divide_up(chunk_size, SPEC_N) + more_tiles(SPEC_N), SPEC_PARTS)


@triton.jit
def parts_of_spec(sink, window_tokens, chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr):
    """How many parts of a guess have tiles; sink and the tokens of the window are [1] with parts."""
    parts = 1
    if SPEC_PARTS > 1:
        part_tiles = _part_tiles(chunk_size, SPEC_N, SPEC_PARTS)
        tiles = tl.sum(_divide_up(sink, SPEC_N) + _divide_up(window_tokens, SPEC_N), 0)
        for part in tl.static_range(1, SPEC_PARTS):
            parts += (part * part_tiles < tiles).to(tl.int32)
    return parts


@triton.jit
def tokens_of_spec_part(part, sink, window, seq_len, chunk_size, SPEC_N: tl.constexpr, SPEC_PARTS: tl.constexpr):
    """What a part of a guess begins with, tokens [first, end), and how many tiles it has; [window, seq_len) follow."""
    sink_tiles = _divide_up(sink, SPEC_N)
    tiles = sink_tiles + _divide_up(seq_len - window, SPEC_N)
    first, end = 0, sink
    if SPEC_PARTS > 1:
        part_tiles = _part_tiles(chunk_size, SPEC_N, SPEC_PARTS)
        first = part * part_tiles
        tiles = tl.minimum(tiles - first, part_tiles)
        end = tl.where(first < sink_tiles, sink, seq_len)
        first = first * SPEC_N + tl.where(first < sink_tiles, 0, window - sink_tiles * SPEC_N)
    return first, end, tiles


@triton.jit
def deal(
    program, num_spec, leaders, lead_run, followers, run, longer, PROGRAMS: tl.constexpr, SPEC: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """What a program does.

    Returns:
        First tile of its run, and past the last one; how many guesses it has, and how many turns in all: first guesses,
        each sent before the next turn, then the run.
    """
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    tile = _run_start(program, leaders, lead_run, followers, run, longer)
    last = _run_start(program + 1, leaders, lead_run, followers, run, longer)
    if PHASE == PREDICTOR:
        tile = last + 0
    # At least one turn, even with nothing to do: then what follows is no branch, and is computed while `seq_lens` is on
    # its way.
    guesses, turns = 0, (program >= 0).to(tl.int32)
    if SPEC:
        guesses = _divide_by(num_spec + PROGRAMS - 1 - program, PROGRAMS)
        turns = tl.maximum(guesses + (tile < last).to(tl.int32), 1)
    return tile, last, guesses, turns


@triton.jit
def head_start(total_rest, is_long, BLOCK_N: tl.constexpr, D: tl.constexpr, PROGRAMS: tl.constexpr):
    """Cycles for which programs without a guess wait, by the bytes of K and V of a run (16 bits each)."""
    TILE_KB: tl.constexpr = BLOCK_N * D * 4 // 1024
    rest_kb = total_rest * tl.where(is_long, 2 * TILE_KB, TILE_KB)
    return tl.where(rest_kb >= BUSY_KB * PROGRAMS, HEAD_START, 0)


@triton.jit
def give_head_start(
    program, turn, num_spec, total_rest, is_long, BLOCK_N: tl.constexpr, D: tl.constexpr, PROGRAMS: tl.constexpr,
    SPEC: tl.constexpr, PHASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Wait, in the first turn of a program without a guess, if others have one and memory will be busy.

    At the beginning of a turn, not before the first one: there the branch kept 150 instructions that all turns share
    from being done while the lengths are on their way.

    Returns:
        Whether it has waited; None in launches where no program does.
    """
    waits = None
    if SPEC and PHASE == ALL and PDL:
        cycles = head_start(total_rest, is_long, BLOCK_N, D, PROGRAMS)
        waits = (program >= num_spec) & (turn == 0) & (cycles > 0)
        if waits:
            spin_cycles(cycles)
    return waits


@triton.jit
def start_after(AHEAD: tl.constexpr):
    """Begin a dependent launch: wait for the kernel ahead, then let the merge start; AHEAD: wait later.

    The merge reads lengths at its start. So it may start when what is ahead of this launch has ended, or has promised
    not to write them. Behind a gate it does not before, either: kernels that look ahead whether their gates are open
    would start before what sets them has ended.
    """
    if AHEAD:
        gdc_launch_dependents()
    else:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def lengths_of(seq_lens_ptr, num_requests, B_PAD: tl.constexpr):
    """seq_lens [B_PAD], 0 of requests that there are none of."""
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
):  # fmt: skip
    """What follows from lengths [B_PAD] alone.

    Returns:
        Whether tiles of the rest are long; those of each request's, over all its KV heads [B_PAD], and their sum; how
        many parts of a guess have tiles; the schedule.
    """
    SPEC_N: tl.constexpr = spec_tile(BLOCK_N, LONG)
    sink, window = token_ranges(seq_lens, chunk_size, SPEC)
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    parts = parts_of_spec(sink, seq_lens - window, chunk_size, SPEC_N, SPEC_PARTS)
    part_tiles = tl.minimum(_part_tiles(chunk_size, SPEC_N, SPEC_PARTS), 2 * _divide_up(chunk_size, SPEC_N))
    tiles = tl.sum(tiles_in(window - sink, False, BLOCK_N), 0) * HKV
    is_long = LONG > 0 and tiles > LONG * PROGRAMS
    if LONG > 0 and BLOCK_N < 128:
        # Or where a program's longest work has no more tokens by it; guesses have long tiles.
        long_tiles = tl.sum(tiles_in(window - sink, True, BLOCK_N), 0) * HKV
        of_guesses = num_outputs * parts * part_tiles if SPEC else 0
        longest = _divide_up(tiles + 2 * of_guesses, PROGRAMS)
        is_long |= 2 * _divide_up(long_tiles + of_guesses, PROGRAMS) <= longest
    rest_tiles = tiles_in(window - sink, is_long, BLOCK_N) * HKV
    total_rest = tl.sum(rest_tiles, 0)
    EVEN: tl.constexpr = PROGRAMS // 8 * 8 if B_PAD == 1 and PROGRAMS > 8 else PROGRAMS
    leaders, lead_run, followers, run, longer = _divide_work(
        num_outputs * parts, tiles_in(part_tiles * SPEC_N, is_long, BLOCK_N) + SPEC_OVERHEAD,
        total_rest, HKV, SPEC_PARTS if B_PAD == 1 else 0, PROGRAMS, EVEN, SPEC and PHASE == ALL,
    )  # fmt: skip
    return is_long, rest_tiles, total_rest, parts, leaders, lead_run, followers, run, longer
