"""The schedule of lean decode attention, in the interpreter: one program computes each tile and each part of `A~`."""

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
    WHOLE_SHARE,
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
    programs_ptr,  # [4, PROGRAMS] int32
    outputs_ptr,  # [4, B HKV] int32
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
    """The work of each program, and what the combine reads for each output; grid [1]."""
    seq_lens = load_seq_lens(seq_lens_ptr, num_requests, B_PAD)
    is_long, rest_tiles, total_rest, parts, schedule = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
    )
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    num_spec = num_outputs * parts if SPEC and PHASE != REST else 0
    tl.store(facts_ptr, is_long.to(tl.int32))
    tl.store(facts_ptr + 1, total_rest)
    tl.store(facts_ptr + 2, parts)
    tl.store(facts_ptr + 3, schedule[0])
    tl.store(facts_ptr + 4, schedule[1])
    tl.store(facts_ptr + 5, schedule[5])

    program = tl.arange(0, PROGRAMS_PAD)
    tile, last, spec_parts, work_items = program_work(program, num_spec, schedule, PROGRAMS, SPEC, PHASE)
    exists, program_ptr = program < PROGRAMS, programs_ptr + program
    tl.store(program_ptr, tile, mask=exists)
    tl.store(program_ptr + PROGRAMS, last, mask=exists)
    tl.store(program_ptr + 2 * PROGRAMS, spec_parts, mask=exists)
    tl.store(program_ptr + 3 * PROGRAMS, work_items, mask=exists)

    output = tl.arange(0, OUTPUTS_PAD)
    first, tiles = output_tiles(output, rest_tiles // HKV, HKV, B_PAD)
    exists, output_ptr = output < num_outputs, outputs_ptr + output
    first_program = program_of_tile(first, schedule)
    last_program = program_of_tile(first + tiles - 1, schedule)
    tl.store(output_ptr, first, mask=exists)
    tl.store(output_ptr + num_outputs, tiles, mask=exists)
    tl.store(output_ptr + 2 * num_outputs, first_program, mask=exists)
    tl.store(output_ptr + 3 * num_outputs, last_program, mask=exists)


@dataclass(frozen=True)
class Work:
    """The sizes of a launch."""

    lengths: tuple[int, ...]
    num_kv_heads: int
    num_programs: int
    block_n: int = 64
    long_run: int = 0
    chunk_size: int = 0
    parts: int = 1
    phase: str = "all"


@dataclass(frozen=True)
class Schedule:
    """The schedule of a launch."""

    is_long: bool
    total_rest: int
    parts: int
    leaders: int
    lead_run: int
    grain: int  # tiles that are dealt together
    programs: list[list[int]]  # for each: first tile, end of its tiles, parts of `A~`, work items
    outputs: list[list[int]]  # for each: first tile, number of tiles, its first and its last program

    @classmethod
    def build(cls, work: Work) -> Schedule:
        batch, num_outputs = len(work.lengths), len(work.lengths) * work.num_kv_heads
        facts = torch.zeros(6, dtype=torch.int32)
        programs = torch.zeros(4, work.num_programs, dtype=torch.int32)
        outputs = torch.zeros(4, num_outputs, dtype=torch.int32)
        _schedule_kernel[(1,)](
            torch.tensor(work.lengths, dtype=torch.int32), facts, programs, outputs, batch, work.chunk_size,
            HKV=work.num_kv_heads, PROGRAMS=work.num_programs, PROGRAMS_PAD=triton.next_power_of_2(work.num_programs),
            OUTPUTS_PAD=triton.next_power_of_2(num_outputs), B_PAD=_pad_batch(batch), BLOCK_N=work.block_n,
            LONG=work.long_run, SPEC=work.chunk_size > 0, SPEC_PARTS=work.parts, PHASE=PHASES[work.phase],
        )  # fmt: skip
        is_long, *numbers = facts.tolist()
        return cls(bool(is_long), *numbers, programs.T.tolist(), outputs.T.tolist())


@st.composite
def works(draw: st.DrawFn) -> Work:
    length = st.one_of(st.integers(1, 700), st.integers(1, 30_000))
    equal = st.tuples(length, st.integers(2, 20)).map(lambda pair: pair[:1] * pair[1])
    lengths = draw(st.one_of(st.tuples(length), st.lists(length, min_size=2, max_size=20).map(tuple), equal))
    chunk_size = draw(st.sampled_from((0, 128, 512)))
    block_n, long_run = draw(st.sampled_from((*LONG_RUN.items(), (16, 0))))
    parts = draw(st.integers(1, MAX_SPEC_PARTS)) if chunk_size and len(lengths) == 1 else 1
    phase = draw(st.sampled_from(tuple(PHASES))) if chunk_size and parts == 1 else "all"
    num_kv_heads = draw(st.sampled_from((1, 2, 3, 8)))
    # Often there are a few programs more than parts of `A~`, so that few programs have no part.
    few = st.integers(0, 5).map(lambda more: min(160, len(lengths) * num_kv_heads * parts + more))
    num_programs = draw(st.one_of(st.integers(1, 140), few))
    return Work(lengths, num_kv_heads, num_programs, block_n, long_run, chunk_size, parts, phase)


ONE = Work((10_000,), 8, 132, 64, LONG_RUN[64], 128, 3)
LONGER = replace(ONE, lengths=(131_072,))
# Almost all programs have a part of `A~` and few tiles: with rounded-up runs, the leaders would take too many tiles.
RAGGED = Work(
    (3746, 2559, 2990, 1132, 3220, 1959, 2806, 4047, 2396, 3724, 4490, 1509, 1824, 2198, 2792, 1370),
    8,
    132,
    64,
    LONG_RUN[64],
    128,
)
# 256 equal outputs on 132 programs: 124 have two of them and 8 have one.
WHOLE = Work((1024,) * 32, 8, 132, 64, LONG_RUN[64])
FEW = Work((640, 640, 640, 512), 2, 9, 128, LONG_RUN[128], 128)


@given(works())
@example(ONE)
@example(LONGER)
@example(RAGGED)
@example(FEW)
@example(WHOLE)
@settings(max_examples=100, deadline=None)
def test_one_program_computes_each_tile_and_each_part(work: Work) -> None:
    schedule = Schedule.build(work)
    chunk, bounds = work.chunk_size, []
    for n in work.lengths:
        sink = min(chunk, n)
        bounds.append((sink, max(sink, max(n - chunk, 0) // 64 * 64) if chunk else n))

    def tiles_of_heads(block_n: int) -> list[int]:
        """The number of tiles of each output: request after request, and head after head."""
        return [-(-(window - sink) // block_n) for sink, window in bounds for _ in range(work.num_kv_heads)]

    # The predictor's tiles have 128 tokens, or as many as a short tile. A widened window has one tile more than its
    # chunk. Parts have equal shares.
    spec_n = 128 if work.long_run else work.block_n
    most = 2 * -(-chunk // spec_n)
    per_part = -(-(most + (63 + spec_n - 1) // spec_n) // work.parts)
    part_tiles = min(most, per_part)
    sink, window = bounds[0]
    predictor_tiles = -(-sink // spec_n) - (window - work.lengths[0]) // spec_n
    parts = -(-predictor_tiles // per_part) if work.parts > 1 else 1
    assert schedule.parts == parts
    num_outputs = len(work.lengths) * work.num_kv_heads

    # Tiles are long if runs have many tiles, or if the longest work of a program then has no more tokens.
    short, long = sum(tiles_of_heads(work.block_n)), sum(tiles_of_heads(2 * work.block_n))
    is_long = short > work.long_run * work.num_programs
    if work.block_n < 128:
        spec_tiles = num_outputs * parts * part_tiles if chunk else 0
        is_long |= 2 * -(-(long + spec_tiles) // work.num_programs) <= -(-(short + 2 * spec_tiles) // work.num_programs)
    assert schedule.is_long == (work.long_run > 0 and is_long)
    block_n = work.block_n * (2 if schedule.is_long else 1)
    tiles_of_outputs = tiles_of_heads(block_n)
    starts = [0, *itertools.accumulate(tiles_of_outputs)]
    assert schedule.total_rest == starts[-1]
    assert [output[:2] for output in schedule.outputs] == [
        list(pair) for pair in zip(starts, tiles_of_outputs, strict=False)
    ]

    # Outputs of a batch are not split if they are equal and the busiest program gets little more than the average.
    whole = max(tiles_of_outputs)
    average = -(-sum(tiles_of_outputs) // work.num_programs)
    busiest = -(-num_outputs // work.num_programs) * whole
    is_whole = len(work.lengths) > 1 and not chunk and min(tiles_of_outputs) == whole
    is_whole &= busiest <= average + average // WHOLE_SHARE.value
    assert schedule.grain == (whole if is_whole else 1)

    # Parts of `A~`.
    num_spec = num_outputs * schedule.parts if chunk and PHASES[work.phase] != REST.value else 0
    own = [len(range(program, num_spec, work.num_programs)) for program in range(work.num_programs)]
    assert [spec_parts for _, _, spec_parts, _ in schedule.programs] == own

    # Runs are consecutive.
    runs = [(tile, last) for tile, last, *_ in schedule.programs]
    for (tile, last), (_, _, spec_parts, work_items) in zip(runs, schedule.programs, strict=True):
        assert work_items == max(spec_parts + (tile < last), 1)
    if PHASES[work.phase] == PREDICTOR.value:
        assert all(tile == last for tile, last in runs)
        return
    assert [tile for tile, _ in runs] == [0, *(last for _, last in runs[:-1])]
    assert runs[-1][1] == schedule.total_rest
    assert all(tile <= last for tile, last in runs)

    # The combine reads the partials of the programs with tiles of an output. No two partials share memory.
    partials = []
    for output, (start, size, first, last) in enumerate(schedule.outputs):
        programs = [p for p, (tile, end) in enumerate(runs) if max(tile, start) < min(end, start + size)]
        if size:
            assert programs == list(range(first, last + 1))
        partials += [program + output for program in programs]
    assert len(set(partials)) == len(partials)
    assert max(partials, default=0) < work.num_programs + num_outputs

    # Leaders have equal runs. The runs of followers differ by one grain at most. Programs without a run come last.
    sizes = [last - tile for tile, last in runs]
    lead, follow = sizes[: schedule.leaders], sizes[schedule.leaders :]
    assert set(lead) <= {schedule.lead_run}
    assert follow == sorted(follow, reverse=True)
    working = [size for size in follow if size]
    assert not working or working[0] - working[-1] <= schedule.grain

    # If the runs of leaders are rounded up, a follower has no more work than a leader with its part of `A~`.
    part_work = -(-part_tiles * spec_n // block_n) + SPEC_OVERHEAD.value
    share = (schedule.total_rest + schedule.leaders * part_work) / work.num_programs
    rounded = math.ceil(share) - part_work
    if schedule.leaders and math.floor(share) - part_work > 1 and schedule.leaders * rounded <= schedule.total_rest:
        assert schedule.lead_run == rounded
        assert follow[0] <= rounded + part_work


@pytest.mark.parametrize("work", [ONE, LONGER, RAGGED, FEW])
def test_leaders_of_the_examples_have_two_tiles_or_more(work: Work) -> None:
    """Only then do the examples above show how runs are rounded."""
    schedule = Schedule.build(work)
    assert schedule.leaders == work.num_kv_heads * len(work.lengths) * schedule.parts
    assert schedule.lead_run > 1


@triton.jit
def _head_start_kernel(cycles_ptr, total_rest, IS_LONG: tl.constexpr):
    """For tiles of 64 or 128 tokens and of 128 channels, on 132 programs; grid [1]."""
    tl.store(cycles_ptr, head_start(total_rest, IS_LONG, 64, 128, 132))


@pytest.mark.parametrize(
    ("is_long", "total_rest", "expected"),
    [
        # K and V of a tile have 32 KB, those of a long tile 64 KB. These are the tiles with 244 KB per program.
        (False, 1006, 0),
        (False, 1007, HEAD_START.value),
        (True, 503, 0),
        (True, 504, HEAD_START.value),
    ],
)
def test_the_predictor_has_a_head_start_if_memory_is_busy(is_long: bool, total_rest: int, expected: int) -> None:
    cycles = torch.full((1,), -1, dtype=torch.int32)
    _head_start_kernel[(1,)](cycles, total_rest, IS_LONG=is_long)
    assert int(cycles) == expected
