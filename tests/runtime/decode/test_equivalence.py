"""Greedy decoding on 1, 2 and 4 processes: `off` alike everywhere, and `paired` as `simulated` as the fp64 oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from alspec.priority import INITIAL_PRIORITY
from alspec.simulation import replay_priorities

pytestmark = pytest.mark.slow

THRESHOLDS = [0.0, 0.05, 0.1, 0.25, math.inf]
# Around S, 2 S, and 2 S + 64, from where on sink and window leave tokens out. Decoding from 127, 255, 319 and 700
# passes the edge of a 64-token tile.
LENGTHS = [5, 127, 129, 255, 256, 257, 319, 320, 321, 500, 700]
FEWER_LENGTHS = [127, 257, 319, 700]
EVERY_LENGTH = {(1, "off"), (1, "simulated"), (2, "off"), (2, "paired")}
NEW_TOKENS = 6
BATCH_LENGTHS, BATCH_LIMITS = [500, 130, 380], [6, 3, 9]
MODES = {1: ["off", "simulated"], 2: ["off", "simulated", "paired"], 4: ["off", "paired"]}

Results = dict[int, list[dict[str, Any]]]


def single(make_prompt: Any, length: int, threshold: float) -> dict[str, Any]:
    prompts = [make_prompt(length, seed=length)]
    return {
        "name": f"{length} at {threshold}",
        "threshold": threshold,
        "prompts": prompts,
        "max_new_tokens": [NEW_TOKENS],
    }


@pytest.fixture(scope="module")
def batches(make_prompt: Any, oracle: Any) -> dict[str, dict[str, Any]]:
    """A ragged batch at each lambda, once ended by length alone and once with a token that some request emits early."""
    prompts = [make_prompt(length, seed=length) for length in BATCH_LENGTHS]
    found = {}
    for threshold in THRESHOLDS:
        case = {"threshold": threshold, "prompts": prompts, "max_new_tokens": BATCH_LIMITS}
        found[f"batch at {threshold}"] = case
        tokens = oracle.generate(prompts, BATCH_LIMITS, threshold).tokens
        found[f"batch with eos at {threshold}"] = case | {"eos": [tokens[2][4]]}
    return {name: case | {"name": name} for name, case in found.items()}


@pytest.fixture(scope="module")
def results(run_ranks: Any, make_prompt: Any, batches: dict[str, dict[str, Any]]) -> Results:
    return {
        world_size: run_ranks(world_size, {mode: cases_of(world_size, mode, make_prompt, batches) for mode in modes})
        for world_size, modes in MODES.items()
    }


def cases_of(world_size: int, mode: str, make_prompt: Any, batches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    lengths = LENGTHS if (world_size, mode) in EVERY_LENGTH else FEWER_LENGTHS
    cases = [single(make_prompt, length, threshold) for length in lengths for threshold in THRESHOLDS]
    cases += [case for case in batches.values() if world_size < 4 or "eos" not in case]
    return [case for case in cases if mode != "off" or case["threshold"] == 0.0]


def runs_of(results: Results, case: str, modes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rank 0's record of a case, from every world and every one of `modes` that ran it."""
    names = [f"{mode} {case}" for mode in modes]
    found = [(world, name) for world, ranks in results.items() for name in names if name in ranks[0]]
    assert {world for world, _ in found} >= {1, 2}
    for world, name in found:
        print(f"{name} on {world} processes")
        yield results[world][0][name]


def live_hits(run: dict[str, Any]) -> list[list[list[bool]]]:
    """[steps][L][B] verdicts, those of requests that had ended as False."""
    return [
        [
            [bool(hit) and step < len(tokens) - 1 for hit, tokens in zip(layer, run["tokens"], strict=True)]
            for layer in layers
        ]
        for step, layers in enumerate(run["hits"])
    ]


@pytest.mark.parametrize("world_size", MODES)
def test_ranks_agree(results: Results, world_size: int) -> None:
    first, *others = results[world_size]
    for name, run in first.items():
        for other in others:
            assert [run[key] for key in ("tokens", "reasons", "hits")] == [
                other[name][key] for key in ("tokens", "reasons", "hits")
            ], name


@pytest.mark.parametrize("length", LENGTHS)
def test_off(results: Results, oracle: Any, make_prompt: Any, length: int) -> None:
    """The same tokens on 1, 2 and 4 processes, the oracle's."""
    expected = oracle.generate([make_prompt(length, seed=length)], [NEW_TOKENS], 0.0).tokens
    for run in runs_of(results, f"{length} at 0.0", ("off",)):
        assert run["tokens"] == expected
        assert run["reasons"] == ["length"]
        assert run["hits"] == []


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_paired_is_simulated(results: Results, oracle: Any, make_prompt: Any, length: int, threshold: float) -> None:
    """Tokens and hit map are the oracle's. At lambda = 0 the oracle is full attention, so these are also `off`'s."""
    expected = oracle.generate([make_prompt(length, seed=length)], [NEW_TOKENS], threshold)
    hit_maps = [step.hit_map.tolist() for step in expected.steps]
    assert len(hit_maps) == NEW_TOKENS - 1
    for run in runs_of(results, f"{length} at {threshold}", ("simulated", "paired")):
        assert run["tokens"] == expected.tokens
        assert run["hits"] == hit_maps


def long_runs(results: Results, threshold: float) -> list[dict[str, Any]]:
    """The runs of prompts where sink and window leave tokens out."""
    return [
        run
        for length in (320, 321, 500, 700)
        for run in runs_of(results, f"{length} at {threshold}", ("paired", "simulated"))
    ]


def test_cases_mean_something(results: Results) -> None:
    """Both verdicts at every finite lambda, both within one step, and tokens that speculation changes."""
    for threshold in THRESHOLDS[1:-1]:
        rates = [float(torch.tensor(run["hits"]).float().mean()) for run in long_runs(results, threshold)]
        assert 0 < sum(rates) < len(rates), threshold
    without, always = (
        [run["tokens"] for run in long_runs(results, threshold)] for threshold in (THRESHOLDS[0], THRESHOLDS[-1])
    )
    assert without != always
    mixed = [0 < sum(map(sum, step)) < 6 for run in long_runs(results, 0.25) for step in run["hits"]]
    assert any(mixed)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("kind", ["batch", "batch with eos"])
def test_ragged_batch(
    results: Results, oracle: Any, batches: dict[str, dict[str, Any]], kind: str, threshold: float
) -> None:
    """Requests of other lengths, ending at other steps: each one's own verdicts and tokens are the oracle's."""
    case = batches[f"{kind} at {threshold}"]
    expected = oracle.generate(case["prompts"], case["max_new_tokens"], threshold, tuple(case.get("eos", ())))
    lengths = [len(tokens) for tokens in expected.tokens]
    assert len(set(lengths)) > 1
    reasons = ["eos" if made < limit else "length" for made, limit in zip(lengths, case["max_new_tokens"], strict=True)]
    assert ("eos" in reasons) == ("eos" in kind)
    hit_maps = [step.hit_map.tolist() for step in expected.steps]
    for run in runs_of(results, f"{kind} at {threshold}", ("simulated", "paired")):
        assert run["tokens"] == expected.tokens
        assert run["reasons"] == reasons
        assert live_hits(run) == hit_maps


@pytest.mark.parametrize("world_size", [2, 4])
def test_roles_follow_the_priorities(results: Results, world_size: int) -> None:
    """Each group runs the gated operations that the protocol leaves it, and the senders verify."""
    steps_with_both = 0
    for name in results[world_size][0]:
        if not name.startswith("paired"):
            continue
        priority = INITIAL_PRIORITY
        for step, accepted in enumerate(layer_verdicts(results[world_size][0][name]), 1):
            senders, gated_ops, priority = replay_priorities(accepted, priority)
            steps_with_both += any(accepted) and not all(accepted)
            for rank, runs in enumerate(results[world_size]):
                group = rank // (world_size // 2)
                rows = [row for row in runs[name]["rows"] if row["step"] == step]
                gated = [row for row in rows if row["op"] in ("pre_attention", "post_attention")]
                assert len(gated) == gated_ops[group], (name, step, rank)
                verified = [row["layer"] for row in rows if row["op"] == "full_attention"]
                received = [row["layer"] for row in rows if row["op"] == "handover"]
                assert verified == [layer for layer, sender in enumerate(senders) if sender == group]
                assert received == [layer for layer, sender in enumerate(senders) if sender != group]
    assert steps_with_both > 10


def layer_verdicts(run: dict[str, Any]) -> list[list[bool]]:
    """[steps][L]: every request still generating accepted."""
    return [
        [
            all(hit for hit, tokens in zip(layer, run["tokens"], strict=True) if step < len(tokens) - 1)
            for layer in layers
        ]
        for step, layers in enumerate(run["hits"])
    ]
