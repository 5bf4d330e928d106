"""Two groups share prompts: both caches equal those of one group alone, and each group computes its share."""

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
from tiers import fast

from alspec.runtime.decode import prefill as prefill_module
from alspec.runtime.decode.prefill import PromptPart, prompt_parts

WORKER = WORKERS / "prefill_worker.py"
Case = tuple[str, list[int]]  # codec, lengths of the prompts
Ranks = list[dict[str, Any]]  # what each rank recorded
# Relative RMS errors. GPUs multiply fewer rows by other kernels: up to 1 % of the words of codes differ.
QUANTISED = {"cpu": 1e-2, "cuda": 1e-1}
# One prompt chunk, or a part of one, shared or not; two, three and more chunks; around the ends of chunks and blocks.
LENGTHS = [1, 64, 79, 80, 81, 127, 128, 129, 207, 208, 209, 255, 256, 257, 320, 383, 384, 385, 500]
BATCH = [257, 40, 384]
CODECS = ("bf16", "turbo4", "turbo-mixed", "turbo2")
CASES: list[Case] = [(codec, [length]) for codec in CODECS for length in LENGTHS] + [(codec, BATCH) for codec in CODECS]
CASES += [("turbo4 sas", lengths) for lengths in ([81], [128], [207], [384], BATCH)]
# A chunk whose halves are shared, two chunks, two chunks and an odd remainder whose halves are shared.
FAST_CASES: list[Case] = [(codec, [length]) for codec in CODECS for length in (128, 256, 383)]
FAST_CASES += [("bf16", [64]), ("turbo4", BATCH), ("turbo4 sas", [384])]


def run_ranks(
    folder: Path,
    world_size: int,
    num_groups: int,
    device: str,
    cases: list[Case],
    least_spread: int = LEAST_SPREAD,
) -> Ranks:
    (folder / "spec.json").write_text(json.dumps(cases))
    jobs.run_ranks(WORKER, world_size, folder, str(num_groups), device, str(least_spread), timeout_s=300)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    skip = pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")
    return [pytest.mark.gpu, pytest.mark.multi_gpu, skip]


@pytest.fixture(
    scope="module",
    params=[
        ("cpu", 1),
        pytest.param(("cpu", 2), marks=pytest.mark.full),
        pytest.param(("cuda", 1), marks=needs_gpus(2)),
        pytest.param(("cuda", 2), marks=[*needs_gpus(4), pytest.mark.full]),
    ],
    ids=lambda place: f"{place[0]}-{2 * place[1]}-ranks",
)
def place(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The device and the number of ranks in a group."""
    device, tp_size = request.param
    return str(device), int(tp_size)


@pytest.fixture(scope="module")
def cases(is_full_tier: bool) -> list[Case]:
    return CASES if is_full_tier else FAST_CASES


@pytest.fixture(scope="module")
def ranks(place: tuple[str, int], cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the ranks of two groups recorded."""
    device, tp_size = place
    return run_ranks(tmp_path_factory.mktemp("shared"), 2 * tp_size, 2, device, cases)


@pytest.fixture(scope="module")
def alone(place: tuple[str, int], cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the ranks of one group alone recorded."""
    device, tp_size = place
    return run_ranks(tmp_path_factory.mktemp("alone"), tp_size, 1, device, cases)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def shared_parts(length: int) -> list[PromptPart]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_module, "MIN_SHARED_TOKENS", MIN_SHARED_TOKENS)
        return prompt_parts(length, CHUNK, 2)


def test_two_groups_fill_their_caches_as_one_group_alone_does(
    place: tuple[str, int], cases: list[Case], ranks: Ranks, alone: Ranks
) -> None:
    """Bit for bit, unless halves of a chunk are quantised together.

    There, one group alone multiplies more rows at once, which may round differently, and a value may get another code.
    """
    for rank, found in enumerate(ranks):
        tp_rank = rank % len(alone)
        for (codec, lengths), (name, expected) in zip(cases, alone[tp_rank].items(), strict=True):
            assert name == f"{codec} {lengths}"
            parts = [part for length in lengths for part in shared_parts(length)]
            is_exact = codec == "bf16" or all(part.chunks == part.shares for part in parts)
            for field, tensor in (expected if is_exact else ranks[tp_rank][name])["cache"].items():
                assert torch.equal(found[name]["cache"][field], tensor), (name, rank, field)
            assert error(found[name]["read"], expected["read"]) < QUANTISED[place[0]], (name, rank)
            for logits, first, logits_alone in zip(
                found[name]["logits"], ranks[0][name]["logits"], expected["logits"], strict=True
            ):
                assert torch.equal(logits, first), (name, rank)
                if is_exact:
                    torch.testing.assert_close(logits, logits_alone, rtol=1e-5, atol=1e-5)
                assert error(logits, logits_alone) < QUANTISED[place[0]], (name, rank)


@pytest.mark.parametrize(("codec", "lengths"), fast(CASES, FAST_CASES), ids=str)
def test_each_group_computes_its_share(ranks: Ranks, codec: str, lengths: list[int]) -> None:
    name = f"{codec} {lengths}"
    expected: list[list[list[int]]] = [[], []]
    for length in lengths:
        ids = torch.randint(301, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for part in shared_parts(length):
            for group in (0, 1):
                share = part.shares[group % len(part.shares)]
                expected[group].append(ids[share.start : share.stop])
    for rank, found in enumerate(ranks):
        assert found[name]["processed"] == expected[rank // (len(ranks) // 2)]
        assert all(bool(sums.isfinite().all()) for sums in found[name]["sums"])
        done = [part.chunks[-1].stop for length in lengths for part in shared_parts(length)[:-1]]
        assert found[name]["done"] == done


@pytest.mark.parametrize(
    ("num_groups", "lengths"),
    [(2, [100, 228])] + [pytest.param(n, [99, 100, 101, 127, 228, 500], marks=pytest.mark.full) for n in (1, 2)],
    ids=str,
)
def test_spread_tokens_give_the_same_cache_and_logits(num_groups: int, lengths: list[int], tmp_path: Path) -> None:
    """The residual stream of a token lies on one rank of its group, or on every rank. Only rounding differs."""
    cases: list[Case] = [("bf16", [length]) for length in lengths]
    found = []
    for least_spread in (LEAST_SPREAD, 10**6):
        folder = tmp_path / str(least_spread)
        folder.mkdir()
        found.append(run_ranks(folder, 4, num_groups, "cpu", cases, least_spread))
    for spread, together in zip(*found, strict=True):
        for name, expected in together.items():
            torch.testing.assert_close(spread[name]["cache"], expected["cache"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(spread[name]["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
            assert torch.equal(spread[name]["logits"][0], found[0][0][name]["logits"][0])


@hypothesis.given(
    num_tokens=st.integers(1, 100_000),
    blocks=st.integers(1, 200),
    num_groups=st.sampled_from([1, 2]),
    kept_blocks=st.integers(0, 500),
)
def test_parts_are_all_tokens_in_order(num_tokens: int, blocks: int, num_groups: int, kept_blocks: int) -> None:
    chunk_tokens = 64 * blocks
    start = min(kept_blocks, (num_tokens - 1) // 64) * 64
    parts = prompt_parts(num_tokens, chunk_tokens, num_groups, start)
    chunks = [chunk for part in parts for chunk in part.chunks]
    shares = [share for part in parts for share in part.shares]
    for ranges in (chunks, shares):
        assert ranges[0].start == start
        assert ranges[-1].stop == num_tokens
        assert all(one.stop == other.start for one, other in itertools.pairwise(ranges))
        assert all(0 < len(tokens) <= chunk_tokens for tokens in ranges)
        assert all(len(tokens) % 64 == 0 for tokens in ranges[:-1])
    assert all((chunk.start - start) % chunk_tokens == 0 for chunk in chunks), "what is cached depends on no group"
    assert all(part.chunks == part.shares and len(part.shares) == num_groups for part in parts[:-1])
    assert len(parts[-1].shares) == num_groups or len(chunks[-1]) < prefill_module.MIN_SHARED_TOKENS
    assert len(parts[-1].shares[0]) >= len(parts[-1].shares[-1])
