"""Random numbers against published vectors, and the sampled distribution against an oracle of top-k and top-p."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import fast
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from alspec.config import ChoiceConfig
from alspec.kernels.sampling.adjustment import adjusted_ref, count_newest, tokens_seen
from alspec.runtime.decode.eager_sampling import DRAWN_AT_ONCE, gumbel, philox, probabilities, sample

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    k0, k1 = words(key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words(expected)


def gumbel_by_hand(seed: int, request: int, position: int, token: int) -> float:
    """The same in Python's integers, which do not overflow."""
    counter, key = [position, request, token, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 % 2**32,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return -math.log(-math.log(((counter[0] << 20 | counter[1] >> 12) + 0.5) / 2**52))


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**24 - 1))
)
def test_noise_equals_that_of_python_integers(seed: int, request: int, position: int, tokens: list[int]) -> None:
    row = torch.tensor([tokens], dtype=torch.int64)
    found = gumbel(seed, torch.tensor([request]), torch.tensor([position]), row)
    assert found.dtype == torch.float64
    assert found.tolist() == [pytest.approx([gumbel_by_hand(seed, request, position, t) for t in tokens], rel=1e-12)]


def uniform(seed: int, request: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """The uniform numbers that the noise is made of."""
    return torch.exp(-torch.exp(-gumbel(seed, request, position, tokens[:, None])[:, 0]))


def test_random_numbers_are_uniform_and_unrelated() -> None:
    """Mean, spread, and correlation along positions, requests, tokens and seeds, each within 5 standard errors."""
    n = 20_000
    zeros, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    axes = (zeros, count, zeros), (count, zeros, zeros), (zeros, zeros, count)
    lines = [uniform(seed, *axis) for seed, axis in ((0, axes[0]), (0, axes[1]), (1, axes[0]), (0, axes[2]))]
    for line in lines:
        assert float(line.min()) > 0
        assert float(line.max()) < 1
        assert abs(float(line.mean()) - 0.5) < 5 / math.sqrt(12 * n)
        assert abs(float(line.var()) - 1 / 12) < 5 / math.sqrt(180 * n)
        assert abs(float(torch.corrcoef(torch.stack([line[:-1], line[1:]]))[0, 1])) < 5 / math.sqrt(n)
    assert float(torch.corrcoef(torch.stack(lines)).fill_diagonal_(0).abs().max()) < 5 / math.sqrt(n)


def choice(temperature: float, top_k: int, top_p: float, seed: int) -> ChoiceConfig:
    return ChoiceConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def draw(
    logits: Tensor, count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 7
) -> Tensor:
    """`count` tokens from one [V] distribution, one for each position."""
    request, position = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    return sample(logits.expand(count, -1), choice(temperature, top_k, top_p, seed), request, position)


def kept_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution after both cuts, by a loop over the tokens from the most likely one."""
    scaled: np.ndarray = logits.double().numpy() / temperature
    weights: np.ndarray = np.exp(scaled - scaled.max())
    order = sorted(range(len(weights)), key=lambda token: (-scaled[token], token))
    order = order[: top_k or None]
    total = weights[order].sum()
    kept: np.ndarray = np.zeros_like(weights)
    reached = 0.0
    for token in order:
        if reached >= top_p:
            break
        kept[token] = weights[token]
        reached += weights[token] / total
    kept /= kept.sum()
    return kept


CUTS = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.5, 0, 1.0),
    (1.0, 5, 1.0),
    (1.0, 1, 1.0),
    (1.0, 1000, 1.0),
    (1.0, 0, 0.6),
    (1.0, 0, 0.95),
    (1.5, 12, 0.7),
]


FAST_CUTS = [(1.0, 0, 1.0), (1.5, 12, 0.7)]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), fast(CUTS, FAST_CUTS))
def test_tokens_have_the_distribution_of_the_oracle(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square against the oracle's probabilities. A token that was cut is never drawn."""
    count = 30_000
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    expected = kept_probabilities(logits, temperature, top_k, top_p) * count
    found = torch.bincount(draw(logits, count, temperature, top_k, top_p), minlength=40).double().numpy()
    assert not found[expected == 0].any()
    common = expected >= 5
    cells = [
        (found[common], expected[common]),
        (found[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)),
    ]
    chi2 = sum(float(((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()) for seen, wanted in cells)
    freedom = max(int(common.sum()) - 1 + (expected[~common].sum() > 0), 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    st.floats(0.05, 5.0),
    st.integers(0, 15),
    st.floats(0.01, 1.0),
    st.integers(0, 2**32 - 1),
)
def test_the_token_has_the_largest_score(
    values: list[float], temperature: float, top_k: int, top_p: float, position: int
) -> None:
    """Log probability plus noise, token by token."""
    logits = torch.tensor(values)
    counters = torch.tensor([0]), torch.tensor([position])
    found = int(sample(logits[None], choice(temperature, top_k, top_p, 3), *counters))
    probs = kept_probabilities(logits, temperature, top_k, top_p)
    cut = probs > 0
    for shifted in (top_p * (1 - 1e-9), top_p * (1 + 1e-9)):  # rounding may decide whether top_p is reached
        assume(np.array_equal(kept_probabilities(logits, temperature, top_k, shifted) > 0, cut))
    scores = {
        token: math.log(probs[token]) + gumbel_by_hand(3, 0, position, token) for token in np.flatnonzero(cut).tolist()
    }
    assert scores[found] >= max(scores.values()) - 1e-9


@pytest.mark.parametrize("distance", [0.02, 0.3])
def test_near_distributions_mostly_draw_the_same_token(distance: float) -> None:
    """With total variation v they agree with probability (1 - v) / (1 + v) at least: drafts are accepted so often."""
    generator, count = torch.Generator().manual_seed(5), 4000
    first = torch.randn(500, generator=generator) * 2
    second = first + distance * torch.randn(500, generator=generator)
    v = 0.5 * float((torch.softmax(first, 0) - torch.softmax(second, 0)).abs().sum())
    agree = float((draw(first, count) == draw(second, count)).double().mean())
    assert agree > (1 - v) / (1 + v) - 5 * math.sqrt(0.25 / count)
    assert agree < 1 - v + 5 * math.sqrt(0.25 / count)


def test_a_token_does_not_depend_on_its_place_in_the_batch() -> None:
    """A token depends on its own logits, request and position, not on the other requests."""
    generator, count = torch.Generator().manual_seed(4), 2 * DRAWN_AT_ONCE + 3
    logits = torch.randn(count, 50, generator=generator)
    request, position = torch.arange(count), torch.randint(700, (count,), generator=generator)
    seen = torch.randint(5, (count, 50), dtype=torch.int32, generator=generator)
    drawn = choice(1.3, 20, 0.9, 11).model_copy(update={"repetition_penalty": 1.4, "frequency_penalty": 0.3})
    for how in (drawn, drawn.model_copy(update={"temperature": 0.0})):
        whole = sample(logits, how, request, position, seen)
        for order in ([*range(count)][::-1], [3], [1, 4], [count - 1]):
            part = sample(logits[order], how, request[order], position[order], seen[order])
            assert torch.equal(part, whole[order])


def test_seed_request_and_position_each_change_the_tokens() -> None:
    logits, count = torch.zeros(1000), torch.arange(64)
    same = torch.zeros_like(count)
    lines = [
        sample(logits.expand(64, -1), choice(1.0, 0, 1.0, seed), request, position)
        for seed, request, position in ((0, same, count), (1, same, count), (2**40, same, count), (0, count, same))
    ]
    for i, line in enumerate(lines):
        assert len(set(line.tolist())) > 50
        assert not any(torch.equal(line, other) for other in lines[:i])


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-2.0, -1.0, -4.0, -1.5]])
    counters = torch.arange(3), torch.arange(3)
    expected = torch.tensor([1, 0, 1])
    assert torch.equal(sample(logits, choice(0.0, 0, 1.0, 0), *counters), expected)
    assert torch.equal(sample(logits, choice(0.0, 2, 0.1, 0), *counters), expected)
    assert torch.equal(sample(logits, choice(1.0, 1, 1.0, 0), *counters), expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(5)) * 10
    counters = torch.zeros(100, dtype=torch.int64), torch.arange(100)
    assert torch.equal(sample(logits, choice(temperature, 0, 1.0, 0), *counters), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_high_temperature_is_uniform(temperature: float) -> None:
    found = torch.bincount(draw(torch.arange(20.0), 20_000, temperature), minlength=20).double()
    assert float(((found - 1000) ** 2 / 1000).sum()) < 19 + 5 * math.sqrt(38) + 5


@pytest.mark.parametrize("top_p", [1e-12, 5e-324])
def test_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(6)) * 0.01
    assert set(draw(logits, 500, 1.0, 0, top_p).tolist()) == {int(logits.argmax())}


def test_top_p_of_equal_tokens_takes_the_fewest() -> None:
    """Four equal tokens: 0.5 is reached by two of them, a little more needs a third; the lowest ids come first."""
    for top_p, kept in ((0.25, {0}), (0.5, {0, 1}), (0.51, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert set(draw(torch.zeros(4), 400, 1.0, 0, top_p).tolist()) == kept


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"min_p": 0.02, "temperature": 1.7},
        {"top_k": 9, "top_p": 0.8},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.9, "temperature": 0.6},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers_in_the_order_of_vllm(options: dict[str, float]) -> None:
    """Temperature, min_p, top_k, top_p, each by transformers' class, in fp64."""
    how = ChoiceConfig.model_validate({"temperature": 1.0} | options)
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(8)) * 3
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(how.temperature)]
    warpers += [MinPLogitsWarper(how.min_p)] if how.min_p else []
    warpers += [TopKLogitsWarper(how.top_k)] if how.top_k else []
    warpers += [TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []
    scores = logits.double()
    for warper in warpers:
        scores = warper(torch.zeros(20, 1, dtype=torch.int64), scores)
    torch.testing.assert_close(probabilities(logits, how), torch.softmax(scores, -1), rtol=1e-9, atol=1e-12)


def test_the_distribution_follows_penalties_and_biases() -> None:
    """Also at temperature 0, where it is one token."""
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(9))
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {3: 6.0}}
    seen = tokens_seen([[1, 2, 3], [4]], 60, torch.device("cpu"))
    for newest in ([5, 5], [5, 6]):
        count_newest(seen, torch.tensor(newest))
    how = ChoiceConfig.model_validate({"temperature": 0.7, "min_p": 0.01} | penalties)
    plain = ChoiceConfig(temperature=0.7, min_p=0.01)
    assert torch.equal(probabilities(logits, how, seen), probabilities(adjusted_ref(logits, how, seen), plain))
    greedy = how.model_copy(update={"temperature": 0.0})
    best = adjusted_ref(logits, how, seen).argmax(-1)
    assert not torch.equal(best, logits.argmax(-1)), "the settings matter"
    assert probabilities(logits, greedy, seen).tolist() == torch.eye(60)[best].tolist()


@pytest.mark.parametrize("options", [{"temperature": 1.2, "min_p": 0.05}, {"temperature": 0.8, "top_p": 0.7}], ids=str)
def test_tokens_have_the_distribution_after_all_settings(options: dict[str, float]) -> None:
    """Chi-square of sampled tokens against `probabilities`, with penalties."""
    count = 20_000
    how = ChoiceConfig.model_validate(options | {"repetition_penalty": 1.4, "presence_penalty": 0.3, "seed": 5})
    logits = (torch.randn(1, 25, generator=torch.Generator().manual_seed(12)) * 2).expand(count, -1)
    seen = tokens_seen([[1, 2, 3, 4, 5]], 25, torch.device("cpu"))
    count_newest(seen, torch.tensor([8]))
    expected = probabilities(logits[:1], how, seen)[0] * count
    found = torch.bincount(
        sample(logits, how, torch.zeros(count, dtype=torch.int64), torch.arange(count), seen.expand(count, -1)),
        minlength=25,
    )
    assert not found[expected == 0].any()
    kept = expected > 0
    chi2 = float(((found - expected)[kept].square() / expected[kept]).sum())
    freedom = max(int(kept.sum()) - 1, 1)
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5
