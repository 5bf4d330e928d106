"""Greedy decoding on 1, 2 and 4 processes gives the fp64 oracle's tokens: `off`, and `paired` and `simulated` alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiers import fast

from alspec.priority import INITIAL_PRIORITY
from alspec.simulation import replay_priorities

pytestmark = pytest.mark.slow

THRESHOLDS = [0.0, 0.05, 0.1, 0.25, math.inf]
# Around S, 2 S, and 2 S + 64, from where on the predictor leaves tokens out. Decoding from 127, 255, 319 and 700 goes
# beyond the end of a 64-token tile.
LENGTHS = [5, 127, 129, 255, 256, 257, 319, 320, 321, 500, 700]
FEWER_LENGTHS = [127, 257, 319, 700]
LONG_LENGTHS = [320, 321, 500, 700]
EVERY_LENGTH = {(1, "off"), (1, "simulated"), (2, "off"), (2, "paired")}
# The fast tier's cases. At lambda = 0.1 each step from 319 tokens on has both verdicts; from 700 on speculation changes
# tokens.
FAST_THRESHOLD = 0.1
FAST_LENGTHS = [127, 700]
FAST_CASES = [(127, FAST_THRESHOLD), (319, FAST_THRESHOLD), (700, 0.0), (700, math.inf)]
NEW_TOKENS = 6
BATCH_LENGTHS, BATCH_LIMITS = [500, 130, 380], [6, 3, 9]
MODES = {1: ["off", "simulated"], 2: ["off", "simulated", "paired"], 4: ["off", "paired"]}
FAST_MODES = {1: ["off", "simulated"], 2: ["off", "paired"], 4: ["paired"]}

Results = dict[int, list[dict[str, Any]]]


def single(make_prompt: Any, length: int, threshold: float) -> dict[str, Any]:
    prompts = [make_prompt(length, seed=length)]
    return {
        "name": f"{length} at {threshold}",
        "threshold": threshold,
        "prompts": prompts,
        "max_new_tokens": [NEW_TOKENS],
    }


def sampled(make_prompt: Any) -> dict[str, Any]:
    """Two requests that are sampled with every setting."""
    return {
        "name": "sampled",
        "threshold": 0.0,
        "prompts": [make_prompt(length, seed=length) for length in (130, 61)],
        "max_new_tokens": [9, 9],
        "sampling": {
            "temperature": 1.4, "top_k": 90, "top_p": 0.97, "min_p": 0.01, "repetition_penalty": 1.2,
            "frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {7: 3.0, 40: -100.0}, "seed": 6,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def batches(make_prompt: Any, oracle: Any, is_full_tier: bool) -> dict[str, dict[str, Any]]:
    """A ragged batch at each lambda, once ended by length alone and once by a token that a request emits early."""
    prompts = [make_prompt(length, seed=length) for length in BATCH_LENGTHS]
    found = {}
    for threshold in THRESHOLDS if is_full_tier else [FAST_THRESHOLD]:
        case = {"threshold": threshold, "prompts": prompts, "max_new_tokens": BATCH_LIMITS}
        found[f"batch at {threshold}"] = case
        tokens = oracle.generate(prompts, BATCH_LIMITS, threshold).tokens
        found[f"batch with eos at {threshold}"] = case | {"eos": [tokens[2][4]]}
    return {name: case | {"name": name} for name, case in found.items()}


@pytest.fixture(scope="module")
def results(run_ranks: Any, make_prompt: Any, batches: dict[str, dict[str, Any]], is_full_tier: bool) -> Results:
    """What each rank recorded, by the number of processes. All modes of a number share a job."""

    def cases(world_size: int, mode: str) -> list[dict[str, Any]]:
        found = [single(make_prompt, *case) for case in single_cases(world_size, mode, is_full_tier)]
        found += [case for case in batches.values() if world_size < 4 or "eos" not in case or not is_full_tier]
        found.append(sampled(make_prompt))
        return [case for case in found if mode != "off" or case["threshold"] == 0.0]

    return {
        world_size: run_ranks(world_size, {mode: cases(world_size, mode) for mode in modes})
        for world_size, modes in (MODES if is_full_tier else FAST_MODES).items()
    }


def single_cases(world_size: int, mode: str, is_full_tier: bool) -> list[tuple[int, float]]:
    """Prompt length and lambda of each case with one request; `off` has those at lambda = 0."""
    if not is_full_tier:
        return FAST_CASES if mode != "off" else [(length, 0.0) for length in FAST_LENGTHS]
    lengths = LENGTHS if (world_size, mode) in EVERY_LENGTH else FEWER_LENGTHS
    return list(itertools.product(lengths, THRESHOLDS))


def runs_of(results: Results, case: str, modes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rank 0's record of a case, for each number of processes and each of `modes` that ran it."""
    names = [f"{mode} {case}" for mode in modes]
    found = [(world, name) for world, ranks in results.items() for name in names if name in ranks[0]]
    assert {world for world, _ in found} >= {1, 2}
    for world, name in found:
        print(f"{name} on {world} processes")
        yield results[world][0][name]


def live_hits(run: dict[str, Any]) -> list[list[list[bool]]]:
    """[steps][L][B] verdicts; False for requests that have ended."""
    return [
        [
            [bool(hit) and step < len(tokens) - 1 for hit, tokens in zip(layer, run["tokens"], strict=True)]
            for layer in layers
        ]
        for step, layers in enumerate(run["hits"])
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree(results: Results, world_size: int) -> None:
    first, *others = results[world_size]
    for name, run in first.items():
        for other in others:
            assert [run[key] for key in ("tokens", "reasons", "hits")] == [
                other[name][key] for key in ("tokens", "reasons", "hits")
            ], name


@pytest.mark.parametrize("length", fast(LENGTHS, FAST_LENGTHS))
def test_off_gives_the_oracles_tokens(results: Results, oracle: Any, make_prompt: Any, length: int) -> None:
    """On any number of processes."""
    expected = oracle.generate([make_prompt(length, seed=length)], [NEW_TOKENS], 0.0).tokens
    for run in runs_of(results, f"{length} at 0.0", ("off",)):
        assert run["tokens"] == expected
        assert run["reasons"] == ["length"]
        assert run["hits"] == []


def test_sampled_tokens_are_the_same_on_any_number_of_processes(results: Results) -> None:
    """With penalties and biases; lambda is 0, so that every mode computes full attention."""
    first, *others = [run["tokens"] for run in runs_of(results, "sampled", ("off", "simulated", "paired"))]
    assert len(others) >= 3
    assert all(tokens == first for tokens in others)
    assert len({*first[0], *first[1]}) > 4, "they were not chosen greedily"


@pytest.mark.parametrize(("length", "threshold"), fast(list(itertools.product(LENGTHS, THRESHOLDS)), FAST_CASES))
def test_paired_and_simulated_give_the_oracles_tokens_and_verdicts(
    results: Results, oracle: Any, make_prompt: Any, length: int, threshold: float
) -> None:
    """At lambda = 0 the oracle is full attention, so these are also the tokens of `off`."""
    expected = oracle.generate([make_prompt(length, seed=length)], [NEW_TOKENS], threshold)
    hit_maps = [step.hit_map.tolist() for step in expected.steps]
    assert len(hit_maps) == NEW_TOKENS - 1
    for run in runs_of(results, f"{length} at {threshold}", ("simulated", "paired")):
        assert run["tokens"] == expected.tokens
        assert run["hits"] == hit_maps


@pytest.mark.parametrize(
    ("thresholds", "lengths", "long"),
    [
        ([FAST_THRESHOLD], [319], [700]),
        pytest.param(THRESHOLDS[1:-1], LONG_LENGTHS, LONG_LENGTHS, marks=pytest.mark.full),
    ],
    ids=["fast", "full"],
)
def test_cases_mean_something(results: Results, thresholds: list[float], lengths: list[int], long: list[int]) -> None:
    """Both verdicts at every finite lambda, both within one step, and tokens that speculation changes."""

    def runs(lengths: list[int], threshold: float) -> list[dict[str, Any]]:
        names = [f"{length} at {threshold}" for length in lengths]
        return [run for name in names for run in runs_of(results, name, ("paired", "simulated"))]

    for threshold in thresholds:
        rates = [float(torch.tensor(run["hits"]).float().mean()) for run in runs(lengths, threshold)]
        assert 0 < sum(rates) < len(rates), threshold
    assert any(0 < sum(map(sum, step)) < 6 for run in runs(lengths, thresholds[-1]) for step in run["hits"])
    assert [run["tokens"] for run in runs(long, 0.0)] != [run["tokens"] for run in runs(long, math.inf)]


@pytest.mark.parametrize("threshold", fast(THRESHOLDS, [FAST_THRESHOLD]))
@pytest.mark.parametrize("kind", ["batch", "batch with eos"])
def test_requests_of_a_batch_end_at_different_steps(
    results: Results, oracle: Any, batches: dict[str, dict[str, Any]], kind: str, threshold: float
) -> None:
    """Each request has the oracle's tokens and verdicts."""
    case = batches[f"{kind} at {threshold}"]
    expected = oracle.generate(case["prompts"], case["max_new_tokens"], threshold, tuple(case.get("eos", ())))
    lengths = [len(tokens) for tokens in expected.tokens]
    assert len(set(lengths)) > 1
    limits = case["max_new_tokens"]
    reasons = ["eos" if length < limit else "length" for length, limit in zip(lengths, limits, strict=True)]
    assert ("eos" in reasons) == ("eos" in kind)
    hit_maps = [step.hit_map.tolist() for step in expected.steps]
    for run in runs_of(results, f"{kind} at {threshold}", ("simulated", "paired")):
        assert run["tokens"] == expected.tokens
        assert run["reasons"] == reasons
        assert live_hits(run) == hit_maps


@pytest.mark.parametrize("world_size", [2, 4])
def test_roles_follow_the_priorities(results: Results, world_size: int) -> None:
    """Each group runs the gated operations that its priorities allow, and the senders verify."""
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
    """[steps][L] layer verdicts: all requests that still generate accept."""
    return [
        [
            all(hit for hit, tokens in zip(layer, run["tokens"], strict=True) if step < len(tokens) - 1)
            for layer in layers
        ]
        for step, layers in enumerate(run["hits"])
    ]


@pytest.mark.parametrize(("world_size", "texts"), fast([(2, 1), (2, 16), (4, 8)], keep=[(2, 1)]))
def test_roles_swap_over_late_messages(run_ranks: Any, make_prompt: Any, world_size: int, texts: int) -> None:
    """Eager steps: a layer's verdict decides which group goes on, and each layer waits for one message.

    Texts end at 400 tokens: behind them this model accepts no `A~`.
    """
    cases = [single(make_prompt, 340 - seed, FAST_THRESHOLD) for seed in range(texts)]
    cases = [case | {"max_new_tokens": [60], "sampling": {"temperature": 1.0, "seed": 5}} for case in cases]
    (alone,) = run_ranks(1, {"simulated": cases})
    ranks = run_ranks(world_size, {"paired": [case | {"late_us": 2000} for case in cases]})
    swaps = layers = 0
    for case in cases:
        expected = alone[f"simulated {case['name']}"]
        for rank in ranks:
            found = rank[f"paired {case['name']}"]
            assert [found[key] for key in ("tokens", "hits")] == [expected[key] for key in ("tokens", "hits")]
        senders, priority = [], INITIAL_PRIORITY
        for step in expected["hits"]:
            of_step, _, priority = replay_priorities([bool(hit) for (hit,) in step], priority)
            senders += of_step
        layers += len(senders)
        swaps += sum(one != other for one, other in itertools.pairwise(senders))
    print(f"{swaps} role swaps in {layers} layers")
    assert layers == 6 * 59 * texts
    assert layers / 10 < swaps < layers * 9 / 10
