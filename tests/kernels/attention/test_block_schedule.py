"""The schedule of decode over the quantised cache, in the interpreter.

One program computes each tile, and the combine reads the partials that programs write. A tile is one block per warp.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from attention_launch import HAS_CUDA
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import fast

from alspec.kernels.attention.decode.lean_decode import PHASES
from alspec.kernels.attention.decode.tile_schedule import PREDICTOR, REST
from alspec.kernels.attention.decode_quantised.block_schedule import build_schedule
from alspec.kernels.attention.decode_quantised.quantised_decode import schedule_sizes
from alspec.kernels.attention.decode_quantised.quantised_mainloop import (
    partials_to_combine,
    program_in_schedule,
    program_work,
)

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")

BLOCK = 64


@triton.jit
def _program_kernel(
    seq_lens_ptr,  # [B] int32
    programs_ptr,  # [PROGRAMS, 8] int32
    chunk_blocks,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PER_SM: tl.constexpr,
    WARPS: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The work of each program of the attention; grid [PROGRAMS]."""
    first_output, program = program_in_schedule(PROGRAMS, PER_SM, SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS // SCHEDULES
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    lengths, ends, rest_at, lead_in, parts, used, total = build_schedule(
        seq_lens, exists, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS, PHASE
    )
    tile, last, part, parts_end, work_items = program_work(
        program, lengths, ends, rest_at, lead_in, parts, used, total, SPEC, SPEC_PARTS, PHASE
    )
    row_ptr = programs_ptr + tl.program_id(0) * 8
    tl.store(row_ptr, first_output)
    tl.store(row_ptr + 1, program)
    tl.store(row_ptr + 2, tile)
    tl.store(row_ptr + 3, last)
    tl.store(row_ptr + 4, part)
    tl.store(row_ptr + 5, parts_end)
    tl.store(row_ptr + 6, work_items)
    tl.store(row_ptr + 7, parts)


@triton.jit
def _combine_kernel(
    seq_lens_ptr,  # [B] int32
    combined_ptr,  # [B HKV, 2] int32
    chunk_blocks,
    HKV: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCHEDULES: tl.constexpr,
    OUTPUTS_PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WARPS: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """The partials that the combine reads for each output; grid [B HKV]."""
    first, runs, _ = partials_to_combine(
        seq_lens_ptr, tl.program_id(0), chunk_blocks, HKV, OUTPUTS, SCHEDULES, OUTPUTS_PAD, PROGRAMS, WARPS, SPEC,
        SPEC_PARTS, PHASE,
    )  # fmt: skip
    tl.store(combined_ptr + tl.program_id(0) * 2, first)
    tl.store(combined_ptr + tl.program_id(0) * 2 + 1, runs)


@dataclass(frozen=True)
class Work:
    """The sizes of a launch."""

    lengths: tuple[int, ...]
    num_kv_heads: int
    num_programs: int
    per_sm: int = 1
    warps: int = 4
    chunk_size: int = 0
    parts: int = 1
    phase: str = "all"

    def schedule(self) -> tuple[list[list[int]], list[list[int]]]:
        """The work of each program, and the partials that the combine reads for each output."""
        seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        sizes = schedule_sizes(len(self.lengths), self.num_kv_heads, self.num_programs)
        common = sizes | {
            "WARPS": self.warps, "SPEC": self.chunk_size > 0, "SPEC_PARTS": self.parts, "PHASE": PHASES[self.phase],
        }  # fmt: skip
        programs = torch.full((self.num_programs, 8), -1, dtype=torch.int32)
        per_sm = self.per_sm if self.num_programs % self.per_sm == 0 else 1
        _program_kernel[(self.num_programs,)](seq_lens, programs, self.chunk_size // BLOCK, PER_SM=per_sm, **common)
        combined = torch.full((sizes["OUTPUTS"], 2), -1, dtype=torch.int32)
        _combine_kernel[(sizes["OUTPUTS"],)](seq_lens, combined, self.chunk_size // BLOCK, **common)
        return programs.tolist(), combined.tolist()


@st.composite
def works(draw: st.DrawFn) -> Work:
    length = st.one_of(st.integers(1, 700), st.integers(1, 140_000))
    lengths = draw(st.one_of(st.tuples(length), st.lists(length, min_size=2, max_size=8).map(tuple)))
    chunk_size = draw(st.sampled_from((0, 128, 512)))
    parts = draw(st.integers(1, 2)) if chunk_size and len(lengths) == 1 else 1
    phase = draw(st.sampled_from(tuple(PHASES))) if chunk_size and parts == 1 else "all"
    return Work(
        lengths, draw(st.sampled_from((1, 2, 3, 8))), draw(st.integers(1, 60)), draw(st.sampled_from((1, 2))),
        draw(st.sampled_from((1, 2, 4))), chunk_size, parts, phase,
    )  # fmt: skip


@given(works())
@example(Work((131_072,), 8, 264, 2, 4, 128, 2))
@example(Work((8192,), 2, 264, 2, 4, 128, 2))
@example(Work((100_000,), 8, 7, 1))  # fewer programs than heads
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # for outputs without partials
def test_one_program_computes_each_tile(work: Work) -> None:
    programs, combined = work.schedule()
    heads, chunk = work.num_kv_heads, work.chunk_size // BLOCK
    phase, spec = PHASES[work.phase], work.chunk_size > 0
    apart = len(work.lengths) == 1 and work.num_programs >= heads
    assert len({tuple(program[:2]) for program in programs}) == work.num_programs

    # The number of tiles in the rest of each output.
    tiles = []
    for n in work.lengths:
        full = (n - 1) // BLOCK
        sink = min(chunk, full)
        rest = max(sink, max(n - chunk * BLOCK, 0) // BLOCK) - sink if spec else full
        tiles += [0 if phase == PREDICTOR.value else -(-rest // work.warps) + (not spec)] * heads
    starts = [0, *itertools.accumulate(tiles)]

    runs_of: list[dict[int, tuple[int, int]]] = [{} for _ in tiles]  # for each output: the tiles of each partial
    spec_parts: list[int] = []
    for first, program, tile, last, part, parts_end, work_items, parts in programs:
        assert part <= parts_end
        # The schedule of this program has one head, or all.
        outputs, per_schedule = ([first], work.num_programs // heads) if apart else (range(len(tiles)), 0)
        num_runs = 0
        for index, output in enumerate(outputs):
            begin = 0 if apart else starts[output]
            run = max(tile, begin), min(last, begin + tiles[output])
            if run[0] < run[1]:
                partial = first * per_schedule + program + index
                assert partial not in runs_of[output]
                runs_of[output][partial] = (run[0] - begin, run[1] - begin)
                num_runs += 1
        spec_parts += [first * parts + number for number in range(part, parts_end)]
        assert work_items == parts_end - part + num_runs

    has_predictor = spec and phase != REST.value
    parts = {program[-1] for program in programs}
    assert len(parts) == 1
    assert sorted(spec_parts) == (list(range(len(tiles) * parts.pop())) if has_predictor else [])
    used: set[int] = set()
    for output, ((partial, runs), length) in enumerate(zip(combined, tiles, strict=True)):
        # The runs are consecutive. Their partials are those that the combine reads, and no other output has them.
        assert sorted(runs_of[output]) == (list(range(partial, partial + runs)) if length else [])
        assert runs == len(runs_of[output])
        bounds = [runs_of[output][index] for index in sorted(runs_of[output])]
        assert [begin for begin, _ in bounds] == ([0, *(end for _, end in bounds[:-1])] if length else [])
        assert not length or bounds[-1][1] == length
        assert used.isdisjoint(runs_of[output])
        used |= set(runs_of[output])
    assert max(used, default=0) < work.num_programs + len(tiles)


CASES = list(itertools.product([1, 700, 8192, 131_072], [0, 128]))


@pytest.mark.parametrize(("length", "chunk_size"), fast(CASES, keep=[(1, 0), (700, 128), (8192, 0), (131_072, 128)]))
def test_one_schedule_per_head_gives_the_runs_of_one_for_all_heads(length: int, chunk_size: int) -> None:
    """One request has a schedule per head. Two requests of its length have one for all heads, with equal runs."""
    alone = Work((length,), 4, 60, chunk_size=chunk_size).schedule()
    both = Work((length, length), 4, 120, chunk_size=chunk_size).schedule()
    assert [runs for _, runs in alone[1]] * 2 == [runs for _, runs in both[1]]
