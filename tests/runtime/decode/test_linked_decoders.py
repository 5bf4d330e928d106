"""Fused steps of two paired groups that exchange messages over a link, here Gloo, against the simulated eager step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from paths import WORKERS
from tiers import fast

from alspec.config import SpeculationConfig
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

CPU = torch.device("cpu")
S = 128
GENERATOR = torch.Generator().manual_seed(2)


def prompt(length: int) -> list[int]:
    return torch.randint(256, (length,), generator=GENERATOR).tolist()


# A step has 3 layers. Requests of the batch end at different steps; the predictor reads all tokens of the second one.
CASES: dict[str, dict[str, Any]] = {
    "one request": {
        "kv_cache": "bf16",
        "prompts": [prompt(341)],
        "live_steps": [9],
        "thresholds": [{"value": "0.2", "steps": 2}, {"value": "inf", "steps": 1}],
    },
    "ragged batch": {
        "kv_cache": "bf16",
        "prompts": [prompt(350), prompt(70), prompt(333)],
        "live_steps": [1, 9, 2],
        "thresholds": [{"value": "0.2", "steps": 3}],
    },
}
FORCED: dict[str, Any] = CASES["one request"] | {
    "thresholds": [{"value": "0", "steps": 1, "forced": [1, 0, 1]}, {"value": "inf", "steps": 1, "forced": [0, 0, 0]}]
}
# The second step completes a block of the quantised cache, which the third step reads.
QUANTISED: dict[str, Any] = {
    "kv_cache": "turbo-mixed",
    "prompts": [prompt(382)],
    "live_steps": [9],
    "thresholds": [{"value": "0.35", "steps": 3}],
}


def run_ranks(
    folder: Path, model: Path, world_size: int, cases: list[dict[str, Any]], has_packets: bool = False
) -> list[Any]:
    """What each rank recorded of each case. has_packets: between the ranks of a group."""
    (folder / "spec.json").write_text(json.dumps({"model": str(model), "cases": cases, "packets": has_packets}))
    worker = WORKERS / "linked_worker.py"
    jobs.run_ranks(worker, world_size, folder, timeout_s=600, TRITON_INTERPRET="1")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def simulated(folder: Path, case: dict[str, Any]) -> list[dict[str, Any]]:
    """The reference: tokens and hits of each step, in one process."""
    config = LlamaConfig.from_folder(folder)
    weights = load_weights(Checkpoint.open(folder, config), config, Placement().shard, torch.float32, CPU)
    transport = Transport(Placement(), CPU, "gloo", None)
    model = Llama(config, weights, transport)
    prompts = case["prompts"]
    capacity = max(map(len, prompts)) + max(sum(threshold["steps"] for threshold in case["thresholds"]), 9)
    cache = new_cache(case["kv_cache"], config, 1, len(prompts), capacity, torch.float32, CPU)
    found = []
    for threshold in case["thresholds"]:
        speculation = SpeculationConfig(
            threshold=float(threshold["value"]), chunk_size=S, **case.get("predictor", {"predictor": "window"})
        )
        eager = [EagerStep(model, cache, transport, mode, speculation, no_hook) for mode in ("off", "simulated")]
        tokens = [
            int(prefill(model, cache, transport, request, ids, no_hook)[0].argmax())
            for request, ids in enumerate(prompts)
        ]
        for step in range(threshold["steps"]):
            speculates = case["kinds"][step] if "kinds" in case else True
            result = eager[speculates].run(
                DecodeState(
                    torch.tensor(tokens),
                    torch.tensor([len(ids) + 1 + step for ids in prompts], dtype=torch.int32),
                    torch.tensor([step < limit for limit in case["live_steps"]]),
                )
            )
            assert (result.hits is not None) == speculates
            tokens = result.logits.argmax(1).tolist()
            hits = None if result.hits is None else result.hits.int().tolist()
            found.append({"tokens": tokens, "hits": hits, "fault": 0})
    return found


def check(folder: Path, cases: list[dict[str, Any]], ranks: list[Any]) -> None:
    """Every rank's steps are the simulated ones, and paired ranks end with the same cache."""
    expected = [simulated(folder, case) for case in cases]
    for found in ranks:
        assert [case["steps"] for case in found] == expected
    check_pairs(ranks)
    for case, steps in zip(cases, expected, strict=True):
        judged = steps[: case["thresholds"][0]["steps"]]
        assert {hit for step in judged for layer in step["hits"] or [] for hit in layer} == {0, 1}


def check_pairs(ranks: list[Any]) -> None:
    for first, second in zip(ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :], strict=True):
        for one, other in zip(first, second, strict=True):
            assert [one[key] for key in ("steps", "cache")] == [other[key] for key in ("steps", "cache")]


@pytest.fixture(scope="module")
def cases(is_full_tier: bool) -> list[dict[str, Any]]:
    return list(CASES.values()) if is_full_tier else [CASES["one request"]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, False), marks=pytest.mark.full, id="2-ranks"),
        pytest.param((4, False), marks=pytest.mark.full, id="4-ranks"),
        pytest.param((4, True), marks=pytest.mark.full, id="4-ranks-packets"),
    ],
)
def ranks(
    small_folder: Path, cases: list[dict[str, Any]], request: pytest.FixtureRequest, tmp_path_factory: Any
) -> list[Any]:
    """What each rank recorded of `cases` and then of the forced verdicts."""
    world_size, has_packets = request.param
    return run_ranks(tmp_path_factory.mktemp("linked"), small_folder, world_size, [*cases, FORCED], has_packets)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the interpreter is slow
def test_tokens_and_hits_are_those_of_one_group(
    small_folder: Path, cases: list[dict[str, Any]], ranks: list[Any]
) -> None:
    check(small_folder, cases, [found[:-1] for found in ranks])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forced_verdicts_ignore_the_sums(ranks: list[Any]) -> None:
    check_pairs(ranks)
    for found in ranks:
        assert [step["hits"] for step in found[-1]["steps"]] == [[[1], [0], [1]], [[0]] * 3]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quantised_cache_beyond_the_end_of_a_block(turbo_folder: Path, tmp_path: Path) -> None:
    check(turbo_folder, [QUANTISED], run_ranks(tmp_path, turbo_folder, 2, [QUANTISED]))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recalled_blocks(small_folder: Path, tmp_path: Path) -> None:
    """The lists of a layer come from the group that sent in it."""
    case = CASES["one request"] | {
        "prompts": [prompt(561)],
        "predictor": {"predictor": "recall", "recall_blocks": 2},
        "thresholds": [{"value": "0.25", "steps": 4}],
    }
    check(small_folder, [case], run_ranks(tmp_path, small_folder, 2, [case]))


ALONE: dict[str, Any] = QUANTISED | {
    "kv_cache": "turbo4",  # turbo-mixed chooses the heads with 2 bits on each rank
    "predictor": {"predictor": "recall", "recall_blocks": 2},
    "thresholds": [{"value": "0.2", "steps": 6}],
    "kinds": [True, False, False, True, True, False],
    "late": True,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "has_packets"), fast([(2, False), (4, True)], keep=[]))
def test_groups_decode_alone_in_between(turbo_folder: Path, tmp_path: Path, world_size: int, has_packets: bool) -> None:
    """Both compute the same step with full attention; then the pair goes on, with messages of a later step.

    The cache is quantised, blocks are recalled, a block ends, and messages are late.
    """
    check(turbo_folder, [ALONE], run_ranks(tmp_path, turbo_folder, world_size, [ALONE], has_packets))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "repeats"), [(2, 25), (4, 5)])
def test_a_speculator_runs_ahead_over_late_messages(
    small_folder: Path, tmp_path: Path, world_size: int, repeats: int
) -> None:
    """Fused steps: x of a layer is taken from the other group or computed, as its message is there or not."""
    thresholds = [{"value": value, "steps": 3} for value in ("0.2", "0.3", "0.4", "inf")]
    case = CASES["one request"] | {"late": True, "thresholds": thresholds * repeats}
    ranks = run_ranks(tmp_path, small_folder, world_size, [case])
    expected = simulated(small_folder, case)
    for (found,) in ranks:
        assert found["steps"] == expected
    check_pairs(ranks)
    accepted = sum(hit for step in expected for layer in step["hits"] for hit in layer)
    print(f"{accepted} of {3 * len(expected)} layers accepted; x taken: {[found['taken'] for (found,) in ranks]}")
    assert 0 < ranks[0][0]["taken"] < accepted < 3 * len(expected)
