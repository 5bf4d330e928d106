"""Drafting stops where it does not pay, and is tried again."""

from __future__ import annotations

import math
import random

import pytest
from paths import ROOT

from alspec.runtime.decode.rounds.draft_policy import (
    REPEAT_PROBES,
    REPEATED_TOKENS,
    RESUME_MARGIN,
    ROW_COST,
    TIMED_PROBES,
    WINDOW_ROUNDS,
    DraftPolicy,
    RepeatedTexts,
    round_cost,
)

_, PROBE_ROUNDS, FIRST_PAUSE_STEPS, LONGEST_PAUSE_STEPS = TIMED_PROBES


def run(policy: DraftPolicy, tokens: list[float], cost: float = 2.0) -> list[bool]:
    """Which steps draft, if a round at each step has 15 drafts, yields so many tokens and has this cost."""
    drafted = []
    for each in tokens:
        drafted.append(policy.decide_next(15, cost))
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
    assert not policy.decide_next(15, 2.0)
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
        assert not any(policy.decide_next(15, round_cost(15, math.inf)) for _ in range(3))
        assert policy.decide_next(15, 2.0)


def test_always() -> None:
    policy = DraftPolicy(always=True)
    assert all(run(policy, [1.0] * 100, cost=20.0))


def test_it_never_tries_what_cannot_pay() -> None:
    """K drafts give K + 1 tokens at most. Whether they cost more changes with the context."""
    policy = DraftPolicy()
    assert [policy.decide_next(4, cost) for cost in (5.01, 5.2, 4.9, 5.1, 3.0)] == [False, False, True, False, True]


def test_a_short_round_is_measured_by_its_own_cost() -> None:
    """Rounds near the end of a block have few drafts, and cost little."""
    policy = DraftPolicy()
    for _ in range(20 * WINDOW_ROUNDS):
        for num_drafts, tokens in ((15, 4.0), (1, 1.3)):
            cost = round_cost(num_drafts, 0.1)
            assert policy.decide_next(num_drafts, cost)
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


def passage(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def steps_of(policy: DraftPolicy, text: list[int], steps: int, cost: float, tokens: float) -> list[bool]:
    """Which steps draft, if each emits the next token of a text, and a round counts as `tokens`."""
    drafted = []
    for token_id in text[:steps]:
        drafted.append(policy.decide_next(4, cost))
        policy.read([[token_id]])
        if drafted[-1]:
            policy.record(tokens, cost)
    return drafted


def test_a_text_that_does_not_repeat_costs_few_rounds() -> None:
    policy = DraftPolicy(repeats=RepeatedTexts())
    policy.begin([passage(1, 300)])
    drafted = steps_of(policy, passage(2, 500), 500, 1.4, 1.0)
    _, trial, pause, _ = REPEAT_PROBES
    assert drafted[: trial + pause] == [True] * trial + [False] * pause
    assert drafted[trial + pause : 2 * (trial + pause) + pause] == [True] * trial + [False] * 2 * pause
    assert sum(drafted) * 0.4 < 0.01 * 500


def test_a_text_that_repeats_itself_ends_a_pause() -> None:
    """From the token on that makes the newest ones equal to earlier ones, whether they lie in prompt or answer."""
    for where in ("prompt", "answer"):
        policy, copied = DraftPolicy(repeats=RepeatedTexts()), passage(1, 50)
        policy.begin([copied if where == "prompt" else passage(3, 100)])
        other = passage(2, 10) + (copied if where == "answer" else [])
        start = steps_of(policy, other, len(other), 1.4, 1.0)
        assert sum(start) == REPEAT_PROBES.probe_rounds
        drafted = steps_of(policy, copied, 40, 1.4, 5.0)
        assert drafted == [False] * REPEATED_TOKENS + [True] * (40 - REPEATED_TOKENS)


def test_one_text_of_many_that_repeats_itself_does_not_end_a_pause() -> None:
    copied, count = passage(1, 100), 8
    policy = DraftPolicy(repeats=RepeatedTexts())
    policy.begin([copied] + [passage(9 + n, 100) for n in range(count - 1)])
    for _ in range(REPEAT_PROBES.probe_rounds):
        assert policy.decide_next(4, 1.6)
        policy.record(1.0, 1.6)
    for step in range(20):
        assert not policy.decide_next(4, 1.6), "1 + 4 / 8 tokens do not pay for 1.6 steps"
        policy.read([[copied[step]]] + [[1000 + 100 * step + n] for n in range(count - 1)])
    policy.read([[copied[20]]] + [[] for _ in range(count - 1)])
    assert policy.decide_next(4, 1.6), "requests that have ended do not count"


@pytest.mark.parametrize("seed", range(10))
def test_repeated_texts(seed: int) -> None:
    """Against a search through the whole text, whose few different tokens repeat often; shares of the live requests."""
    draw = random.Random(seed)
    texts = [draw.choices(range(2), k=draw.randint(0, 12)) for _ in range(3)]
    repeats = RepeatedTexts()
    repeats.begin(texts)
    for _ in range(30):
        emitted = [draw.choices(range(2), k=draw.randint(0, 4)) for _ in texts]
        repeats.extend(emitted)
        found = []
        for text, ids in zip(texts, emitted, strict=True):
            text += ids
            newest = text[-REPEATED_TOKENS:]
            earlier = [text[i : i + REPEATED_TOKENS] for i in range(len(text) - REPEATED_TOKENS)]
            if ids:
                found.append(newest in earlier)
        assert repeats.share == (sum(found) / len(found) if found else 0.0)


def times_as_fast(policy: DraftPolicy, ids: list[int], prompt: int, cost: float, num_drafts: int = 4) -> float:
    """Plain steps that a text behind its prompt takes, over the cost of what is run with n-grams and this policy."""
    ends: dict[tuple[int, ...], int] = {}
    known, length, spent = 0, prompt, 0.0
    policy.begin([ids[:prompt]])
    while length < len(ids):
        for end in range(known, length - 1):
            ends.update({tuple(ids[end - size + 1 : end + 1]): end for size in range(2, 6) if end >= size - 1})
        known, made = length - 1, 1
        drafts = policy.decide_next(num_drafts, cost)
        if drafts:
            found = (ends.get(tuple(ids[length - size : length])) for size in (5, 4, 3, 2))
            start = next((end + 1 for end in found if end is not None), None)
            while start is not None and made <= num_drafts and length + made < len(ids):
                if ids[start + (made - 1) % (length - start)] != ids[length + made - 1]:
                    break
                made += 1
        spent += cost if drafts else 1.0
        policy.read([ids[length : length + made]])
        if drafts:
            policy.record(made, cost)
        length += made
    return (len(ids) - prompt) / spent


def pattern(repeated: int, free: int, length: int) -> list[int]:
    """A text in which the same tokens come again and again, with other ones between them."""
    draw, fixed = random.Random(free), passage(7, repeated)
    ids = draw.choices(range(1000, 40000), k=300)
    while len(ids) < length:
        ids += fixed + draw.choices(range(1000, 40000), k=free)
    return ids


@pytest.mark.parametrize("cost", [1.17, 1.39])
@pytest.mark.parametrize("free", [6, 8, 12, 40])
def test_repetitions_that_are_not_followed_cost_little(free: int, cost: float) -> None:
    """Each is seen at its last token. Probes behind it fail, so that fewer and fewer follow."""
    policy = DraftPolicy(repeats=RepeatedTexts())
    assert times_as_fast(policy, pattern(REPEATED_TOKENS, free, 800), 300, cost) > 0.98
    assert times_as_fast(policy, pattern(REPEATED_TOKENS, free, 1500), 300, cost) > 0.985


@pytest.mark.parametrize("cost", [1.17, 1.39])
def test_texts_that_copy_and_texts_that_do_not(cost: float) -> None:
    """Words of this repository's texts as tokens: never much slower than plain steps, and fast where text is copied."""
    policy, gains = DraftPolicy(repeats=RepeatedTexts()), []
    for path in sorted((ROOT / "docs").glob("*.md")):
        words = path.read_text(encoding="utf-8").split()
        names = {word: number for number, word in enumerate(dict.fromkeys(words))}
        ids = [names[word] for word in words]
        gains.append(times_as_fast(policy, ids[:1500], 700, cost) if len(ids) > 1000 else 1.0)
        other = passage(3, 20)
        copied = [*ids[:400], *other, *ids[:300]]
        assert times_as_fast(policy, copied, 400, cost) > 3.5 / cost
    assert min(gains) > 0.96
    assert sum(gains) / len(gains) > 0.99
