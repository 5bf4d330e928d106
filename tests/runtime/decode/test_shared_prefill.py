"""Prompts that two groups share: both caches hold what one group alone would have left, and each did its share."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hypothesis
import jobs
import pytest
import torch
from hypothesis import strategies as st
from paths import WORKERS
from prefill_worker import CHUNK, LEAST_SPREAD, MIN_SHARED_TOKENS

from alspec.runtime.decode import prefill as prefill_module
from alspec.runtime.decode.prefill import PromptPart, prompt_parts

WORKER = WORKERS / "prefill_worker.py"
Ranks = list[dict[str, Any]]  # what each found
# Relative RMS errors. On GPUs, products of fewer rows are other kernels: up to 1 % of the words of codes differ.
QUANTISED = {"cpu": 1e-2, "cuda": 1e-1}
# Of one chunk, or part of one, that is shared or not; of two, three and more; around their edges and those of blocks.
LENGTHS = [1, 64, 79, 80, 81, 127, 128, 129, 207, 208, 209, 255, 256, 257, 320, 383, 384, 385, 500]
BATCH = [257, 40, 384]
CODECS = ("bf16", "turbo4", "turbo-mixed", "turbo2")
CASES = [(codec, [length]) for codec in CODECS for length in LENGTHS] + [(codec, BATCH) for codec in CODECS]
CASES += [("turbo4 sas", lengths) for lengths in ([81], [128], [207], [384], BATCH)]


def run_ranks(
    folder: Path,
    world_size: int,
    num_groups: int,
    device: str,
    cases: list[tuple[str, list[int]]] = CASES,
    least_spread: int = LEAST_SPREAD,
) -> Ranks:
    (folder / "spec.json").write_text(json.dumps(cases))
    jobs.run_ranks(WORKER, world_size, folder, str(num_groups), device, str(least_spread), timeout_s=300)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", 1),
        ("cpu", 2),
        *(
            pytest.param(
                ("cuda", tp_size),
                marks=[
                    *(pytest.mark.gpu, pytest.mark.multi_gpu),
                    pytest.mark.skipif(torch.cuda.device_count() < 2 * tp_size, reason=f"needs {2 * tp_size} GPUs"),
                ],
            )
            for tp_size in (1, 2)
        ),
    ],
    ids=lambda place: f"{place[0]}-{2 * place[1]}-ranks",
)
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Device, and ranks of a group."""
    device, tp_size = request.param
    return str(device), int(tp_size)


@pytest.fixture(scope="module")
def ranks(place: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Of two groups."""
    device, tp_size = place
    return run_ranks(tmp_path_factory.mktemp("shared"), 2 * tp_size, 2, device)


@pytest.fixture(scope="module")
def alone(place: tuple[str, int], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Of one group."""
    device, tp_size = place
    return run_ranks(tmp_path_factory.mktemp("alone"), tp_size, 1, device)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def shared_turns(length: int) -> list[PromptPart]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_module, "MIN_SHARED_TOKENS", MIN_SHARED_TOKENS)
        return prompt_parts(length, CHUNK, 2)


def test_one_group_alone_leaves_the_same(place: tuple[str, int], ranks: Ranks, alone: Ranks) -> None:
    """In the caches of both groups, bit for bit. But where shares of a chunk are quantised together, one group alone
    forms products of more rows, which may round differently: a value that does may become another code."""
    for rank, found in enumerate(ranks):
        of_group = rank % len(alone)
        for (codec, lengths), (name, expected) in zip(CASES, alone[of_group].items(), strict=True):
            assert name == f"{codec} {lengths}"
            parts = [part for length in lengths for part in shared_turns(length)]
            is_exact = codec == "bf16" or all(part.chunks == part.shares for part in parts)
            for tensor, of in (expected if is_exact else ranks[of_group][name])["cache"].items():
                assert torch.equal(found[name]["cache"][tensor], of), (name, rank, tensor)
            assert error(found[name]["read"], expected["read"]) < QUANTISED[place[0]], (name, rank)
            for logits, first, of in zip(
                found[name]["logits"], ranks[0][name]["logits"], expected["logits"], strict=True
            ):
                assert torch.equal(logits, first), (name, rank)
                if is_exact:
                    torch.testing.assert_close(logits, of, rtol=1e-5, atol=1e-5)
                assert error(logits, of) < QUANTISED[place[0]], (name, rank)


@pytest.mark.parametrize(("codec", "lengths"), CASES, ids=str)
def test_each_group_does_its_share(ranks: Ranks, codec: str, lengths: list[int]) -> None:
    name = f"{codec} {lengths}"
    expected: list[list[list[int]]] = [[], []]
    for length in lengths:
        ids = torch.randint(301, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for part in shared_turns(length):
            for group in (0, 1):
                share = part.shares[group % len(part.shares)]
                expected[group].append(ids[share.start : share.stop])
    for rank, found in enumerate(ranks):
        assert found[name]["processed"] == expected[rank // (len(ranks) // 2)]
        assert all(bool(sums.isfinite().all()) for sums in found[name]["sums"])
        done = [part.chunks[-1].stop for length in lengths for part in shared_turns(length)[:-1]]
        assert found[name]["done"] == done


@pytest.mark.parametrize(("world_size", "num_groups"), [(4, 1), (4, 2)])
def test_tokens_spread_over_ranks_leave_what_they_do_together(world_size: int, num_groups: int, tmp_path: Path) -> None:
    """The residual stream of each token on one rank, or of all on every rank: caches and logits but for rounding."""
    cases = [("bf16", [length]) for length in (99, 100, 101, 127, 228, 500)]
    found = []
    for least_spread in (LEAST_SPREAD, 10**6):
        folder = tmp_path / str(least_spread)
        folder.mkdir()
        found.append(run_ranks(folder, world_size, num_groups, "cpu", cases, least_spread))
    for spread, together in zip(*found, strict=True):
        for name, expected in together.items():
            torch.testing.assert_close(spread[name]["cache"], expected["cache"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(spread[name]["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
            assert torch.equal(spread[name]["logits"][0], found[0][0][name]["logits"][0])


@hypothesis.given(
    num_tokens=st.integers(1, 100_000),
    blocks=st.integers(1, 200),
    num_groups=st.sampled_from([1, 2]),
)
def test_turns_are_all_tokens_in_order(num_tokens: int, blocks: int, num_groups: int) -> None:
    chunk_tokens = 64 * blocks
    parts = prompt_parts(num_tokens, chunk_tokens, num_groups)
    chunks = [chunk for part in parts for chunk in part.chunks]
    shares = [share for part in parts for share in part.shares]
    for ranges in (chunks, shares):
        assert ranges[0].start == 0
        assert ranges[-1].stop == num_tokens
        assert all(one.stop == other.start for one, other in itertools.pairwise(ranges))
        assert all(0 < len(of) <= chunk_tokens for of in ranges)
        assert all(len(of) % 64 == 0 for of in ranges[:-1])
    assert all(chunk.start % chunk_tokens == 0 for chunk in chunks), "what is cached depends on no group"
    assert all(part.chunks == part.shares and len(part.shares) == num_groups for part in parts[:-1])
    assert len(parts[-1].shares) == num_groups or len(chunks[-1]) < prefill_module.MIN_SHARED_TOKENS
    assert len(parts[-1].shares[0]) >= len(parts[-1].shares[-1])
