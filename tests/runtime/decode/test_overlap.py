"""`paired` really overlaps: the receiver goes on with the guess while the sender is still in full attention.

Full attention and post-attention are made slower by a sleep, which takes no processor time: on one core, too, two
processes can sleep at once, and their real work stays small beside it, on a machine with other work as well.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SLOW_US = 80_000
NUM_LAYERS = 6
NEW_TOKENS = 5

Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs(run_ranks: Any, make_prompt: Any) -> dict[str, list[dict[str, Any]]]:
    """`all hits` and `all misses`, each as its two ranks recorded it, and `off` on the same prompt."""
    prompt = make_prompt(700, seed=700)
    case = {"prompts": [prompt], "max_new_tokens": [NEW_TOKENS], "slow_us": SLOW_US}
    cases = [
        case | {"name": "all hits", "threshold": math.inf},
        case | {"name": "all misses", "threshold": 0.0},
    ]
    ranks = run_ranks(2, {"paired": cases, "off": [case | {"name": "reference", "threshold": 0.0, "slow_us": 0}]})
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def operations(runs: list[dict[str, Any]], step: int) -> dict[tuple[int, str, int], tuple[float, float]]:
    """(rank, operation, layer) -> start and end in microseconds of one clock of the host."""
    return {
        (rank, row["op"], row["layer"]): (run["zero_us"] + row["start_us"], run["zero_us"] + row["end_us"])
        for rank, run in enumerate(runs)
        for row in run["rows"]
        if row["step"] == step
    }


@pytest.mark.parametrize("case", ["all hits", "all misses"])
def test_receiver_starts_before_the_sender_ends(runs: dict[str, Any], case: str) -> None:
    compared = 0
    for step in range(1, NEW_TOKENS):
        found = operations(runs[f"paired {case}"], step)
        for layer in range(NUM_LAYERS):
            sender = next(rank for rank in (0, 1) if (rank, "full_attention", layer) in found)
            full_start, full_end = found[sender, "full_attention", layer]
            post_start, _ = found[1 - sender, "post_attention", layer]
            assert full_end - full_start >= SLOW_US
            assert post_start < full_end
            compared += 1
    assert compared == NUM_LAYERS * (NEW_TOKENS - 1)


def test_roles_swap_on_every_hit(runs: dict[str, Any]) -> None:
    for step in range(1, NEW_TOKENS):
        found = operations(runs["paired all hits"], step)
        senders = [rank for layer in range(NUM_LAYERS) for rank in (0, 1) if (rank, "full_attention", layer) in found]
        assert senders[0] != senders[1]
        assert senders == senders[:2] * (NUM_LAYERS // 2)


def test_step_time(runs: dict[str, Any]) -> None:
    """A hit costs the longer of the two, a miss their sum. The fastest step counts: others may have been disturbed."""
    serial_us = 2 * SLOW_US * NUM_LAYERS
    hits_us, misses_us = (min(runs[f"paired {case}"][0]["step_us"]) for case in ("all hits", "all misses"))
    assert serial_us / 2 <= hits_us < serial_us / 2 + 20_000 * NUM_LAYERS
    assert misses_us >= serial_us


def test_tokens(runs: dict[str, Any]) -> None:
    """Slow or not, lambda = 0 gives what `off` gives, and lambda = inf on this prompt something else."""
    reference = runs["off reference"][0]["tokens"]
    for run in runs["paired all misses"]:
        assert run["tokens"] == reference
        assert run["reasons"] == ["length"]
    assert runs["paired all hits"][0]["tokens"] == runs["paired all hits"][1]["tokens"] != reference
