"""The schedule of decode over the quantised cache, in the interpreter: all is dealt once, and slots are a merge's."""

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

from alspec.kernels.attention.decode.lean_decode import PHASES
from alspec.kernels.attention.decode.tile_schedule import PREDICTOR, REST
from alspec.kernels.attention.decode_flashq.block_schedule import build_schedule
from alspec.kernels.attention.decode_flashq.flashq_decode import schedule_sizes
from alspec.kernels.attention.decode_flashq.flashq_mainloop import (
    partials_to_combine,
    program_in_schedule,
    program_work,
)

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")

BLOCK = 64


@triton.jit
def _deal_kernel(
    seq_lens_ptr,  # [B] int32
    dealt_ptr,  # [PROGRAMS, 8] int32
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
    """What each program of the attention does; grid [PROGRAMS]."""
    first_output, program = program_in_schedule(PROGRAMS, PER_SM, SCHEDULES)
    outputs = tl.arange(0, OUTPUTS_PAD)
    exists = outputs < OUTPUTS // SCHEDULES
    seq_lens = tl.load(seq_lens_ptr + outputs // HKV, mask=exists, other=0)
    lengths, ends, rest_at, lead_in, parts, used, total = build_schedule(
        seq_lens, exists, chunk_blocks, OUTPUTS // SCHEDULES, PROGRAMS // SCHEDULES, WARPS, SPEC, SPEC_PARTS, PHASE
    )
    here, last, guess, guesses_end, turns = program_work(
        program, lengths, ends, rest_at, lead_in, parts, used, total, SPEC, SPEC_PARTS, PHASE
    )
    at = dealt_ptr + tl.program_id(0) * 8
    tl.store(at, first_output)
    tl.store(at + 1, program)
    tl.store(at + 2, here)
    tl.store(at + 3, last)
    tl.store(at + 4, guess)
    tl.store(at + 5, guesses_end)
    tl.store(at + 6, turns)
    tl.store(at + 7, parts)


@triton.jit
def _merge_kernel(
    seq_lens_ptr,  # [B] int32
    merged_ptr,  # [B HKV, 2] int32
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
    """Which slots each output's merge takes; grid [B HKV]."""
    slot, runs, _ = partials_to_combine(
        seq_lens_ptr, tl.program_id(0), chunk_blocks, HKV, OUTPUTS, SCHEDULES, OUTPUTS_PAD, PROGRAMS, WARPS, SPEC,
        SPEC_PARTS, PHASE,
    )  # fmt: skip
    tl.store(merged_ptr + tl.program_id(0) * 2, slot)
    tl.store(merged_ptr + tl.program_id(0) * 2 + 1, runs)


@dataclass(frozen=True)
class Work:
    """Sizes of a launch."""

    lengths: tuple[int, ...]
    num_kv_heads: int
    num_programs: int
    per_sm: int = 1
    warps: int = 4
    chunk_size: int = 0
    parts: int = 1
    phase: str = "all"

    def deal(self) -> tuple[list[list[int]], list[list[int]]]:
        """What each program does, and the slots that each output's merge takes."""
        seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        sizes = schedule_sizes(len(self.lengths), self.num_kv_heads, self.num_programs)
        common = sizes | {
            "WARPS": self.warps, "SPEC": self.chunk_size > 0, "SPEC_PARTS": self.parts, "PHASE": PHASES[self.phase],
        }  # fmt: skip
        dealt = torch.full((self.num_programs, 8), -1, dtype=torch.int32)
        per_sm = self.per_sm if self.num_programs % self.per_sm == 0 else 1
        _deal_kernel[(self.num_programs,)](seq_lens, dealt, self.chunk_size // BLOCK, PER_SM=per_sm, **common)
        merged = torch.full((sizes["OUTPUTS"], 2), -1, dtype=torch.int32)
        _merge_kernel[(sizes["OUTPUTS"],)](seq_lens, merged, self.chunk_size // BLOCK, **common)
        return dealt.tolist(), merged.tolist()


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
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # where nothing is to be merged
def test_everything_is_dealt_once(work: Work) -> None:
    dealt, merged = work.deal()
    heads, chunk = work.num_kv_heads, work.chunk_size // BLOCK
    phase, spec = PHASES[work.phase], work.chunk_size > 0
    apart = len(work.lengths) == 1 and work.num_programs >= heads
    assert len({tuple(program[:2]) for program in dealt}) == work.num_programs

    # Steps of each output's rest.
    steps = []
    for n in work.lengths:
        full = (n - 1) // BLOCK
        sink = min(chunk, full)
        rest = max(sink, max(n - chunk * BLOCK, 0) // BLOCK) - sink if spec else full
        steps += [0 if phase == PREDICTOR.value else -(-rest // work.warps) + (not spec)] * heads
    starts = [0, *itertools.accumulate(steps)]

    met: list[dict[int, tuple[int, int]]] = [{} for _ in steps]  # of each output: steps by slot
    guessed: list[int] = []
    for first, program, here, last, guess, guesses_end, turns, parts in dealt:
        assert guess <= guesses_end
        # In the row of this program's plan: of one head, or of all.
        outputs, per_plan = ([first], work.num_programs // heads) if apart else (range(len(steps)), 0)
        number = 0
        for place, output in enumerate(outputs):
            begin = 0 if apart else starts[output]
            part = max(here, begin), min(last, begin + steps[output])
            if part[0] < part[1]:
                slot = first * per_plan + program + place
                assert slot not in met[output]
                met[output][slot] = (part[0] - begin, part[1] - begin)
                number += 1
        guessed += [first * parts + number for number in range(guess, guesses_end)]
        assert turns == guesses_end - guess + number

    has_guess = spec and phase != REST.value
    parts = {program[-1] for program in dealt}
    assert len(parts) == 1
    assert sorted(guessed) == (list(range(len(steps) * parts.pop())) if has_guess else [])
    taken: set[int] = set()
    for output, ((slot, runs), length) in enumerate(zip(merged, steps, strict=True)):
        # One run behind the other, in the slots that the merge takes and no other output has.
        assert sorted(met[output]) == (list(range(slot, slot + runs)) if length else [])
        assert runs == len(met[output])
        bounds = [met[output][at] for at in sorted(met[output])]
        assert [begin for begin, _ in bounds] == ([0, *(end for _, end in bounds[:-1])] if length else [])
        assert not length or bounds[-1][1] == length
        assert taken.isdisjoint(met[output])
        taken |= set(met[output])
    assert max(taken, default=0) < work.num_programs + len(steps)


@pytest.mark.parametrize("chunk_size", [0, 128])
@pytest.mark.parametrize("length", [1, 700, 8192, 131_072])
def test_one_head_after_another_shares_as_all_at_once(length: int, chunk_size: int) -> None:
    """A plan for each head of one request is that of two requests of its length: equal heads have equal runs."""
    alone = Work((length,), 4, 60, chunk_size=chunk_size).deal()
    both = Work((length, length), 4, 120, chunk_size=chunk_size).deal()
    assert [runs for _, runs in alone[1]] * 2 == [runs for _, runs in both[1]]
