"""Sampling without a sort against `sample`, which sorts: both give the same token for the same random numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from alspec.config import ChoiceConfig
from alspec.kernels.sampling.next_token import BLOCK, num_candidates
from alspec.kernels.sampling.sampler import Sampler, sample_tokens
from alspec.runtime.decode.eager_sampling import sample

Settings = tuple[float, int, float, float]
# temperature, top_k, top_p, min_p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.5, 12, 1.0, 0.0),
    (1.0, 50, 0.6, 0.0),
    (1e-3, 5, 0.5, 0.0),
    (1e6, 0, 0.99, 0.0),
    (1.0, 0, 1e-12, 0.0),
    (1.3, 0, 1.0, 0.05),
    (2.0, 50, 0.9, 0.1),
    (1e6, 30, 1.0, 1.0),
]
KINDS = ["normal", "ties", "peaked", "wide"]
BATCH = 2


def largest_of_blocks(logits: Tensor) -> Tensor:
    """The largest logit of each block, as `collect_logits` writes it."""
    batch, vocab_size = logits.shape
    blocks = num_candidates(vocab_size)
    padded = logits.new_full((batch, blocks * BLOCK), -math.inf)
    padded[:, :vocab_size] = logits
    return padded.view(batch, blocks, BLOCK).amax(2)


def draw_logits(kind: str, vocab_size: int, device: torch.device) -> Tensor:
    logits = torch.randn(BATCH, vocab_size, device=device) * 3
    if kind == "ties":
        logits = logits.round()  # some are -0.0
    elif kind == "peaked":
        logits *= 20
    elif kind == "wide":
        logits *= 1e30
    return logits


def choice(temperature: float, top_k: int, top_p: float, min_p: float = 0.0, seed: int = 0) -> ChoiceConfig:
    return ChoiceConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


class SamplerSteps:
    """One sampler, which samples step after step."""

    def __init__(self, settings: Settings, vocab_size: int, device: torch.device) -> None:
        kinds = Sampler.kinds_of(choice(*settings), vocab_size)
        sampler = Sampler.allocate(kinds, BATCH, vocab_size, device)
        assert sampler is not None
        self.sampler = sampler
        self.set(settings, 7)

    def set(self, settings: Settings, seed: int) -> None:
        self.choice = choice(*settings, seed)
        self.sampler.set(self.choice)

    def tokens(self, logits: Tensor, seq_lens: Tensor) -> Tensor:
        return sample_tokens(self.sampler, logits, largest_of_blocks(logits), seq_lens)

    def expected(self, logits: Tensor, seq_lens: Tensor) -> Tensor:
        return sample(logits, self.choice, torch.arange(BATCH, device=logits.device), seq_lens.long())


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_token_is_that_of_the_sorting_sampler(device: torch.device, settings: Settings) -> None:
    """One sampler makes several steps, each of which must clear its tables for the next."""
    is_cpu = device.type == "cpu"
    for kind, vocab_size in itertools.product(KINDS, (1, 40, 1100) if is_cpu else (1, 40, 1024, 32000, 128256)):
        sampler = SamplerSteps(settings, vocab_size, device)
        for position in range(1 if is_cpu else 20):
            logits = draw_logits(kind, vocab_size, device)
            seq_lens = torch.tensor([position + 1, 2**31 - 1 - position], dtype=torch.int32, device=device)
            assert torch.equal(sampler.tokens(logits, seq_lens), sampler.expected(logits, seq_lens))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ((1.0, 0, 1.0, 0.0), 2100),
        ((1.0, 1500, 1.0, 0.0), 1500),
        ((1.0, 0, 0.5001, 0.0), 1051),
        ((1.0, 1500, 0.5001, 0.0), 751),
        ((1.0, 0, 0.5001, 1.0), 1051),
    ],
)
def test_each_of_equal_tokens_is_sampled(device: torch.device, settings: Settings, kept: int) -> None:
    """All logits are equal, over several blocks. A cut keeps the lowest ids."""
    logits = torch.zeros(BATCH, 2100, device=device)
    sampler, found = SamplerSteps(settings, 2100, device), set()
    for position in range(3 if device.type == "cpu" else 3000):
        seq_lens = torch.tensor([position, position + 5000], dtype=torch.int32, device=device)
        tokens = sampler.tokens(logits, seq_lens)
        assert torch.equal(tokens, sampler.expected(logits, seq_lens))
        found |= set(tokens.tolist())
    assert max(found) < kept
    assert len(found) > (3 if device.type == "cpu" else 0.9 * kept)


def test_the_sum_of_equal_weights_does_not_overflow(device: torch.device) -> None:
    """The sum of the weights of 2^n equal tokens is the largest possible."""
    logits = torch.zeros(BATCH, 1024, device=device)
    sampler = SamplerSteps((1.0, 0, 0.999, 0.0), 1024, device)
    for position in (3, 4):
        seq_lens = torch.tensor([position, position + 5000], dtype=torch.int32, device=device)
        assert torch.equal(sampler.tokens(logits, seq_lens), sampler.expected(logits, seq_lens))


def test_settings_change_without_another_sampler(device: torch.device) -> None:
    logits = draw_logits("normal", 500, device)
    seq_lens = torch.tensor([3, 4], dtype=torch.int32, device=device)
    sampler = SamplerSteps((1.0, 9, 0.9, 0.2), 500, device)
    for settings, seed in (
        ((1e-4, 9, 0.9, 0.1), 7), ((2.0, 400, 0.99, 0.001), 2**63 - 1), ((2.0, 3, 0.1, 0.9), 2**40),
    ):  # fmt: skip
        sampler.set(settings, seed)
        assert torch.equal(sampler.tokens(logits, seq_lens), sampler.expected(logits, seq_lens))


def test_cuts_exist_only_if_the_settings_need_them() -> None:
    def cuts(temperature: float, top_k: int, top_p: float) -> int | None:
        kinds = Sampler.kinds_of(choice(temperature, top_k, top_p, min_p=0.5), 100)
        return None if kinds is None else len(kinds[0])

    assert [cuts(0.0, 5, 0.5), cuts(1.0, 0, 1.0), cuts(1.0, 100, 1.0), cuts(1.0, 99, 1.0), cuts(1.0, 0, 0.99)] == [
        None, 0, 0, 1, 1,
    ]  # fmt: skip
    assert cuts(1.0, 5, 0.5) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_give_some_token_of_the_vocabulary(device: torch.device, bad: float) -> None:
    """The fault word reports them. The next step is right again."""
    vocab_size = 1500
    sampler = SamplerSteps((1.0, 20, 0.9, 0.01), vocab_size, device)
    seq_lens = torch.tensor([3, 4], dtype=torch.int32, device=device)
    for bad_tokens in (slice(None), slice(1100, 1200)):
        logits = draw_logits("normal", vocab_size, device)
        logits[0, bad_tokens] = bad
        tokens = sampler.tokens(logits, seq_lens).tolist()
        assert all(0 <= token < vocab_size for token in tokens)
        logits = draw_logits("normal", vocab_size, device)
        assert torch.equal(sampler.tokens(logits, seq_lens), sampler.expected(logits, seq_lens))
