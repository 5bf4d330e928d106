"""`paired` overlaps: the receiver goes on with `A~` while the sender is still in full attention.

A sleep makes full attention and post-attention slower. It takes no processor time, so two processes can sleep at once
on one core, and their real work stays short beside it on a busy machine too.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SLOW_US = 80_000
NUM_LAYERS = 3  # an odd number: a step of hits begins with the other sender
NEW_TOKENS = 5

Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs(run_ranks: Any, make_prompt: Any, small_folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the two ranks recorded of `all hits`, of `all misses`, and of `off` on the same prompt."""
    prompt = make_prompt(700, seed=700)
    case = {"prompts": [prompt], "max_new_tokens": [NEW_TOKENS], "slow_us": SLOW_US}
    cases = [
        case | {"name": "all hits", "threshold": math.inf},
        case | {"name": "all misses", "threshold": 0.0},
    ]
    reference = case | {"name": "reference", "threshold": 0.0, "slow_us": 0}
    ranks = run_ranks(2, {"paired": cases, "off": [reference]}, model=small_folder)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def operations(runs: list[dict[str, Any]], step: int) -> dict[tuple[int, str, int], tuple[float, float]]:
    """(rank, operation, layer) -> start and end in microseconds on the host's clock."""
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
        assert len(senders) == NUM_LAYERS
        assert all(sender != following for sender, following in pairwise(senders))


def test_a_hit_costs_the_longer_operation_and_a_miss_the_sum(runs: dict[str, Any]) -> None:
    """The fastest step counts: others may have been disturbed."""
    serial_us = 2 * SLOW_US * NUM_LAYERS
    hits_us, misses_us = (min(runs[f"paired {case}"][0]["step_us"]) for case in ("all hits", "all misses"))
    assert serial_us / 2 <= hits_us < serial_us / 2 + 20_000 * NUM_LAYERS
    assert misses_us >= serial_us


def test_tokens_do_not_depend_on_speed(runs: dict[str, Any]) -> None:
    """lambda = 0 gives the tokens of `off`. lambda = inf gives other tokens with this prompt, alike on both ranks."""
    reference = runs["off reference"][0]["tokens"]
    for run in runs["paired all misses"]:
        assert run["tokens"] == reference
        assert run["reasons"] == ["length"]
    assert runs["paired all hits"][0]["tokens"] == runs["paired all hits"][1]["tokens"] != reference
