"""The schedule of lean decode attention, in the interpreter: every guess and tile is dealt once, and has its slot."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from attention_launch import HAS_CUDA
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alspec.kernels.attention.decode.lean_decode import LONG_RUN, MAX_SPEC_PARTS, PHASES, _pad_batch
from alspec.kernels.attention.decode.tile_schedule import (
    HEAD_START,
    PREDICTOR,
    REST,
    SPEC_OVERHEAD,
    build_schedule,
    head_start,
    load_seq_lens,
    output_tiles,
    program_of_tile,
    program_work,
)

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")


@triton.jit
def _schedule_kernel(
    seq_lens_ptr,  # [B] int32
    facts_ptr,  # [8] int32
    dealt_ptr,  # [4, PROGRAMS] int32
    merged_ptr,  # [4, B HKV] int32
    num_requests,
    chunk_size,
    HKV: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """What the attention kernel asks for in each program, and the merge for each output."""
    seq_lens = load_seq_lens(seq_lens_ptr, num_requests, B_PAD)
    is_long, rest_tiles, total_rest, parts, leaders, lead_run, followers, run, longer = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
    )
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    num_spec = num_outputs * parts if SPEC and PHASE != REST else 0
    tl.store(facts_ptr, is_long.to(tl.int32))
    tl.store(facts_ptr + 1, total_rest)
    tl.store(facts_ptr + 2, parts)
    tl.store(facts_ptr + 3, leaders)
    tl.store(facts_ptr + 4, lead_run)

    program = tl.arange(0, PROGRAMS_PAD)
    tile, last, guesses, turns = program_work(
        program, num_spec, leaders, lead_run, followers, run, longer, PROGRAMS, SPEC, PHASE
    )
    exists, at = program < PROGRAMS, dealt_ptr + program
    tl.store(at, tile, mask=exists)
    tl.store(at + PROGRAMS, last, mask=exists)
    tl.store(at + 2 * PROGRAMS, guesses, mask=exists)
    tl.store(at + 3 * PROGRAMS, turns, mask=exists)

    output = tl.arange(0, OUTPUTS_PAD)
    first, tiles = output_tiles(output, rest_tiles // HKV, HKV, B_PAD)
    exists, at = output < num_outputs, merged_ptr + output
    tl.store(at, first, mask=exists)
    tl.store(at + num_outputs, tiles, mask=exists)
    tl.store(at + 2 * num_outputs, program_of_tile(first, leaders, lead_run, run, longer), mask=exists)
    tl.store(at + 3 * num_outputs, program_of_tile(first + tiles - 1, leaders, lead_run, run, longer), mask=exists)


@dataclass(frozen=True)
class Work:
    """Sizes of a launch."""

    lengths: tuple[int, ...]
    num_kv_heads: int
    num_programs: int
    block_n: int = 64
    long_run: int = 0
    chunk_size: int = 0
    parts: int = 1
    phase: str = "all"


@dataclass(frozen=True)
class Dealt:
    """What the schedule makes of it."""

    is_long: bool
    total_rest: int
    parts: int
    leaders: int
    lead_run: int
    programs: list[list[int]]  # of each: first tile, and past the last one; guesses; turns
    outputs: list[list[int]]  # of each: first tile, how many, the first and the last program that has some

    @classmethod
    def of(cls, work: Work) -> Dealt:
        batch, num_outputs = len(work.lengths), len(work.lengths) * work.num_kv_heads
        facts = torch.zeros(5, dtype=torch.int32)
        dealt = torch.zeros(4, work.num_programs, dtype=torch.int32)
        merged = torch.zeros(4, num_outputs, dtype=torch.int32)
        _schedule_kernel[(1,)](
            torch.tensor(work.lengths, dtype=torch.int32), facts, dealt, merged, batch, work.chunk_size,
            HKV=work.num_kv_heads, PROGRAMS=work.num_programs, PROGRAMS_PAD=triton.next_power_of_2(work.num_programs),
            OUTPUTS_PAD=triton.next_power_of_2(num_outputs), B_PAD=_pad_batch(batch), BLOCK_N=work.block_n,
            LONG=work.long_run, SPEC=work.chunk_size > 0, SPEC_PARTS=work.parts, PHASE=PHASES[work.phase],
        )  # fmt: skip
        is_long, *numbers = facts.tolist()
        return cls(bool(is_long), *numbers, dealt.T.tolist(), merged.T.tolist())


@st.composite
def works(draw: st.DrawFn) -> Work:
    length = st.one_of(st.integers(1, 700), st.integers(1, 30_000))
    lengths = draw(st.one_of(st.tuples(length), st.lists(length, min_size=2, max_size=20).map(tuple)))
    chunk_size = draw(st.sampled_from((0, 128, 512)))
    block_n, long_run = draw(st.sampled_from((*LONG_RUN.items(), (16, 0))))
    parts = draw(st.integers(1, MAX_SPEC_PARTS)) if chunk_size and len(lengths) == 1 else 1
    phase = draw(st.sampled_from(tuple(PHASES))) if chunk_size and parts == 1 else "all"
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 8)))
    # Often a few more than there may be guesses: then few programs have none.
    few = st.integers(0, 5).map(lambda more: min(160, len(lengths) * num_kv_heads * parts + more))
    num_programs = draw(st.one_of(st.integers(1, 140), few))
    return Work(lengths, num_kv_heads, num_programs, block_n, long_run, chunk_size, parts, phase)


ONE = Work((10_000,), 8, 132, 64, LONG_RUN[64], 128, 3)
LONGER = replace(ONE, lengths=(131_072,))
# Almost all programs have a guess, and so few tiles that rounding up what leaders take would take more than there are.
RAGGED = Work(
    (3746, 2559, 2990, 1132, 3220, 1959, 2806, 4047, 2396, 3724, 4490, 1509, 1824, 2198, 2792, 1370),
    8,
    132,
    64,
    LONG_RUN[64],
    128,
)
FEW = Work((640, 640, 640, 512), 2, 9, 128, LONG_RUN[128], 128)


@given(works())
@example(ONE)
@example(LONGER)
@example(RAGGED)
@example(FEW)
@settings(max_examples=100, deadline=None)
def test_everything_is_dealt_once(work: Work) -> None:
    dealt = Dealt.of(work)
    chunk, bounds = work.chunk_size, []
    for n in work.lengths:
        sink = min(chunk, n)
        bounds.append((sink, max(sink, max(n - chunk, 0) // 64 * 64) if chunk else n))

    def tiles_of_heads(block_n: int) -> list[int]:
        """In the row of tiles: of each request, head after head."""
        return [-(-(window - sink) // block_n) for sink, window in bounds for _ in range(work.num_kv_heads)]

    # A guess's tiles are of 128 tokens, or of all that short tiles have. It has one more than its chunks where the
    # window is widened; in parts, each has an equal share.
    guess_n = 128 if work.long_run else work.block_n
    most = 2 * -(-chunk // guess_n)
    per_part = -(-(most + (63 + guess_n - 1) // guess_n) // work.parts)
    part_tiles = min(most, per_part)
    sink, window = bounds[0]
    tiles_of_guess = -(-sink // guess_n) - (window - work.lengths[0]) // guess_n
    parts = -(-tiles_of_guess // per_part) if work.parts > 1 else 1
    assert dealt.parts == parts
    num_outputs = len(work.lengths) * work.num_kv_heads

    # Tiles are long where runs have many, or where a program's longest work has no more tokens by it.
    short, long = sum(tiles_of_heads(work.block_n)), sum(tiles_of_heads(2 * work.block_n))
    is_long = short > work.long_run * work.num_programs
    if work.block_n < 128:
        guesses = num_outputs * parts * part_tiles if chunk else 0
        is_long |= 2 * -(-(long + guesses) // work.num_programs) <= -(-(short + 2 * guesses) // work.num_programs)
    assert dealt.is_long == (work.long_run > 0 and is_long)
    block_n = work.block_n * (2 if dealt.is_long else 1)
    tiles_of_outputs = tiles_of_heads(block_n)
    starts = [0, *itertools.accumulate(tiles_of_outputs)]
    assert dealt.total_rest == starts[-1]
    assert [output[:2] for output in dealt.outputs] == [
        list(pair) for pair in zip(starts, tiles_of_outputs, strict=False)
    ]

    # Guesses.
    num_spec = num_outputs * dealt.parts if chunk and PHASES[work.phase] != REST.value else 0
    own = [len(range(program, num_spec, work.num_programs)) for program in range(work.num_programs)]
    assert [guesses for _, _, guesses, _ in dealt.programs] == own

    # Runs, one behind the other.
    runs = [(tile, last) for tile, last, *_ in dealt.programs]
    for (tile, last), (_, _, guesses, turns) in zip(runs, dealt.programs, strict=True):
        assert turns == max(guesses + (tile < last), 1)
    if PHASES[work.phase] == PREDICTOR.value:
        assert all(tile == last for tile, last in runs)
        return
    assert [tile for tile, _ in runs] == [0, *(last for _, last in runs[:-1])]
    assert runs[-1][1] == dealt.total_rest
    assert all(tile <= last for tile, last in runs)

    # Slots: the programs that have tiles of an output are those that its merge takes, and no two partials share one.
    slots = []
    for output, (start, size, first, last) in enumerate(dealt.outputs):
        met = [p for p, (tile, end) in enumerate(runs) if max(tile, start) < min(end, start + size)]
        if size:
            assert met == list(range(first, last + 1))
        slots += [program + output for program in met]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < work.num_programs + num_outputs

    # Leaders' runs are equal, and so are followers' but for one tile; those without a run come last.
    sizes = [last - tile for tile, last in runs]
    lead, follow = sizes[: dealt.leaders], sizes[dealt.leaders :]
    assert set(lead) <= {dealt.lead_run}
    assert follow == sorted(follow, reverse=True)
    working = [size for size in follow if size]
    assert not working or working[0] - working[-1] <= 1

    # Where leaders' runs are rounded up, a follower does no more than a leader with its guess.
    spec_tiles = -(-part_tiles * guess_n // block_n) + SPEC_OVERHEAD.value
    share = (dealt.total_rest + dealt.leaders * spec_tiles) / work.num_programs
    rounded = math.ceil(share) - spec_tiles
    if dealt.leaders and math.floor(share) - spec_tiles > 1 and dealt.leaders * rounded <= dealt.total_rest:
        assert dealt.lead_run == rounded
        assert follow[0] <= rounded + spec_tiles


@pytest.mark.parametrize("work", [ONE, LONGER, RAGGED, FEW])
def test_leaders_have_runs_of_two_tiles_or_more(work: Work) -> None:
    """Else the examples above would show nothing of how they are rounded."""
    dealt = Dealt.of(work)
    assert dealt.leaders == work.num_kv_heads * len(work.lengths) * dealt.parts
    assert dealt.lead_run > 1


@triton.jit
def _head_start_kernel(cycles_ptr, total_rest, IS_LONG: tl.constexpr):
    """Of tiles of 64 tokens, or of twice as many, of 128 channels, on 132 programs."""
    tl.store(cycles_ptr, head_start(total_rest, IS_LONG, 64, 128, 132))


@pytest.mark.parametrize(
    ("is_long", "total_rest", "expected"),
    [
        # Keys and values of a tile are 32 KB, of a long one 64: 244 KB for each program are these many.
        (False, 1006, 0),
        (False, 1007, HEAD_START.value),
        (True, 503, 0),
        (True, 504, HEAD_START.value),
    ],
)
def test_a_guess_has_a_head_start_where_memory_is_busy(is_long: bool, total_rest: int, expected: int) -> None:
    cycles = torch.full((1,), -1, dtype=torch.int32)
    _head_start_kernel[(1,)](cycles, total_rest, IS_LONG=is_long)
    assert int(cycles) == expected
