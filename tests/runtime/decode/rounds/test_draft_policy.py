"""Drafting stops where it does not pay, and is tried again."""

from __future__ import annotations

import math
import random

import pytest

from alspec.runtime.decode.rounds.draft_policy import (
    FIRST_PAUSE_STEPS,
    LONGEST_PAUSE_STEPS,
    PROBE_ROUNDS,
    RESUME_MARGIN,
    ROW_COST,
    WINDOW_ROUNDS,
    DraftPolicy,
    round_cost,
)


def run(policy: DraftPolicy, tokens: list[float], cost: float = 2.0) -> list[bool]:
    """Which steps draft, if a round at each step has 15 drafts, yields so many tokens and has this cost."""
    drafted = []
    for each in tokens:
        drafted.append(policy.drafts(15, cost))
        if drafted[-1]:
            policy.record(each, cost)
    return drafted


def test_it_drafts_while_that_pays() -> None:
    policy = DraftPolicy()
    assert all(run(policy, [1.0, 3.0] * 100))


def test_it_pauses_and_probes() -> None:
    """A probe that fails doubles the pause, up to a limit; one that pays by the margin resumes."""
    policy = DraftPolicy()
    assert run(policy, [1.9] * WINDOW_ROUNDS) == [True] * WINDOW_ROUNDS
    pause = FIRST_PAUSE_STEPS
    for _ in range(8):
        # Pays, but not by the margin.
        steps = [2.0 * RESUME_MARGIN - 0.01] * (pause + PROBE_ROUNDS)
        assert run(policy, steps) == [False] * pause + [True] * PROBE_ROUNDS
        pause = min(2 * pause, LONGEST_PAUSE_STEPS)
    assert pause == LONGEST_PAUSE_STEPS
    steps = [2.0 * RESUME_MARGIN + 0.01] * (pause + 100)
    assert run(policy, steps) == [False] * pause + [True] * 100
    assert run(policy, [1.0] * WINDOW_ROUNDS).count(True) < WINDOW_ROUNDS, "old rounds leave the window"


def test_a_generation_begins_anew() -> None:
    policy = DraftPolicy()
    run(policy, [1.0] * (WINDOW_ROUNDS + 5))
    assert not policy.drafts(15, 2.0)
    policy.begin()
    assert all(run(policy, [1.0] * WINDOW_ROUNDS))


def test_a_round_in_flight_when_a_pause_begins_is_no_probe() -> None:
    policy = DraftPolicy()
    run(policy, [1.0] * WINDOW_ROUNDS)
    policy.record(100.0, 2.0)
    assert run(policy, [1.0] * FIRST_PAUSE_STEPS) == [False] * FIRST_PAUSE_STEPS
    assert run(policy, [1.0] * (PROBE_ROUNDS + 1)) == [True] * PROBE_ROUNDS + [False]


def test_where_nothing_can_be_drafted() -> None:
    """An infinite cost: not a pause, so that it drafts as soon as it can."""
    for always in (False, True):
        policy = DraftPolicy(always)
        assert not any(policy.drafts(15, round_cost(15, math.inf)) for _ in range(3))
        assert policy.drafts(15, 2.0)


def test_always() -> None:
    policy = DraftPolicy(always=True)
    assert all(run(policy, [1.0] * 100, cost=20.0))


def test_it_never_tries_what_cannot_pay() -> None:
    """K drafts give K + 1 tokens at most. Whether they cost more changes with the context."""
    policy = DraftPolicy()
    assert [policy.drafts(4, cost) for cost in (5.01, 5.2, 4.9, 5.1, 3.0)] == [False, False, True, False, True]


def test_a_short_round_is_measured_by_its_own_cost() -> None:
    """Rounds near the end of a block have few drafts, and cost little."""
    policy = DraftPolicy()
    for _ in range(20 * WINDOW_ROUNDS):
        for num_drafts, tokens in ((15, 4.0), (1, 1.3)):
            cost = round_cost(num_drafts, 0.1)
            assert policy.drafts(num_drafts, cost)
            policy.record(tokens, cost)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_far_from_the_better_choice(seed: int) -> None:
    """Over texts that change their nature, it takes little longer than the better of drafting always and never."""
    draw, cost = random.Random(seed), 1.4
    tokens: list[float] = []
    for _ in range(12):
        mean = draw.choice([1.05, 1.2, 2.0, 3.0])
        tokens += [1.0 + draw.expovariate(1 / (mean - 1.0)) for _ in range(draw.randint(200, 600))]
    drafted = run(DraftPolicy(), tokens, cost)
    made = sum(each if on else 1.0 for each, on in zip(tokens, drafted, strict=True))
    time = sum(cost if on else 1.0 for on in drafted)
    better = max(1.0, sum(tokens) / len(tokens) / cost)
    assert made / time > 0.93 * better


def test_cost_of_a_round() -> None:
    assert round_cost(4, 0.0) == pytest.approx(1.0 + 4 * ROW_COST)
    assert round_cost(2, 0.25) == pytest.approx(1.5 + 2 * ROW_COST)
