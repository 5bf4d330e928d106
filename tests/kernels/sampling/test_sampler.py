"""Sampling without a sort against `sample`, which sorts: the same token for the same random number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from alspec.kernels.sampling.next_token import BLOCK, num_candidates
from alspec.kernels.sampling.sampler import Sampler, sample_tokens
from alspec.runtime.decode.eager_sampling import sample

# temperature, top_k, top_p
WAYS = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 12, 1.0), (1.0, 50, 0.6), (1e-3, 5, 0.5), (1e6, 0, 0.99), (1.0, 0, 1e-12)]
KINDS = ["normal", "ties", "peaked", "wide"]
BATCH = 2


def best_of(logits: Tensor) -> Tensor:
    """The largest of each block, as `collect_logits` leaves it."""
    batch, vocab_size = logits.shape
    blocks = num_candidates(vocab_size)
    padded = logits.new_full((batch, blocks * BLOCK), -math.inf)
    padded[:, :vocab_size] = logits
    return padded.view(batch, blocks, BLOCK).amax(2)


def drawn(kind: str, vocab_size: int, device: torch.device) -> Tensor:
    logits = torch.randn(BATCH, vocab_size, device=device) * 3
    if kind == "ties":
        logits = logits.round()  # of them some are -0.0
    elif kind == "peaked":
        logits *= 20
    elif kind == "wide":
        logits *= 1e30
    return logits


class Sampled:
    """One sampler, step after step."""

    def __init__(self, way: tuple[float, int, float], vocab_size: int, device: torch.device, seed: int = 7) -> None:
        self.way, self.seed = way, seed
        self.sampler = Sampler.allocate(Sampler.cuts_of(*way, vocab_size), BATCH, device)
        self.sampler.set(*way, seed)

    def tokens(self, logits: Tensor, seq_lens: Tensor) -> Tensor:
        return sample_tokens(self.sampler, logits, best_of(logits), seq_lens)

    def expected(self, logits: Tensor, seq_lens: Tensor) -> Tensor:
        return sample(logits, *self.way, self.seed, torch.arange(BATCH, device=logits.device), seq_lens.long())


@pytest.mark.parametrize("way", WAYS)
def test_tokens(device: torch.device, way: tuple[float, int, float]) -> None:
    """Several steps of one sampler: each finds the tables of the one before cleared."""
    torch.manual_seed(WAYS.index(way))
    is_cpu = device.type == "cpu"
    for kind, vocab_size in itertools.product(KINDS, (1, 40, 1100) if is_cpu else (1, 40, 1024, 32000, 128256)):
        sampled = Sampled(way, vocab_size, device)
        for position in range(1 if is_cpu else 20):
            logits = drawn(kind, vocab_size, device)
            seq_lens = torch.tensor([position + 1, 2**31 - 1 - position], dtype=torch.int32, device=device)
            assert torch.equal(sampled.tokens(logits, seq_lens), sampled.expected(logits, seq_lens))


@pytest.mark.parametrize(
    ("way", "kept"),
    [((1.0, 0, 1.0), 2100), ((1.0, 1500, 1.0), 1500), ((1.0, 0, 0.5001), 1051), ((1.0, 1500, 0.5001), 751)],
)
def test_of_equal_tokens_each_comes(device: torch.device, way: tuple[float, int, float], kept: int) -> None:
    """All logits equal, over several blocks; a cut keeps the lowest ids."""
    logits = torch.zeros(BATCH, 2100, device=device)
    sampled, found = Sampled(way, 2100, device), set()
    for position in range(3 if device.type == "cpu" else 3000):
        seq_lens = torch.tensor([position, position + 5000], dtype=torch.int32, device=device)
        tokens = sampled.tokens(logits, seq_lens)
        assert torch.equal(tokens, sampled.expected(logits, seq_lens))
        found |= set(tokens.tolist())
    assert max(found) < kept
    assert len(found) > (3 if device.type == "cpu" else 0.9 * kept)


def test_weights_of_a_full_vocabulary_of_equal_tokens_fit(device: torch.device) -> None:
    """A power of two of them: their sum is the largest that there is."""
    logits = torch.zeros(BATCH, 1024, device=device)
    sampled = Sampled((1.0, 0, 1.0), 1024, device)
    for position in (3, 4):
        seq_lens = torch.tensor([position, position + 5000], dtype=torch.int32, device=device)
        assert torch.equal(sampled.tokens(logits, seq_lens), sampled.expected(logits, seq_lens))


def test_settings_change_without_another_sampler(device: torch.device) -> None:
    logits = drawn("normal", 500, device)
    seq_lens = torch.tensor([3, 4], dtype=torch.int32, device=device)
    sampled = Sampled((1.0, 9, 0.9), 500, device)
    for way, seed in (((1e-4, 9, 0.9), 7), ((2.0, 400, 0.99), 2**63 - 1), ((2.0, 3, 0.1), 2**40)):
        sampled.way, sampled.seed = way, seed
        sampled.sampler.set(*way, seed)
        assert torch.equal(sampled.tokens(logits, seq_lens), sampled.expected(logits, seq_lens))


def test_what_is_cut() -> None:
    def cuts(temperature: float, top_k: int, top_p: float) -> int:
        return len(Sampler.cuts_of(temperature, top_k, top_p, 100))

    assert [cuts(0.0, 5, 0.5), cuts(1.0, 0, 1.0), cuts(1.0, 100, 1.0), cuts(1.0, 99, 1.0), cuts(1.0, 0, 0.99)] == [
        0, 1, 1, 2, 2,
    ]  # fmt: skip
    assert cuts(1.0, 5, 0.5) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_end_in_some_token(device: torch.device, bad: float) -> None:
    """The fault word tells of them; the step after them is right again."""
    vocab_size = 1500
    sampled = Sampled((1.0, 20, 0.9), vocab_size, device)
    seq_lens = torch.tensor([3, 4], dtype=torch.int32, device=device)
    for bad_tokens in (slice(None), slice(1100, 1200)):
        logits = drawn("normal", vocab_size, device)
        logits[0, bad_tokens] = bad
        tokens = sampled.tokens(logits, seq_lens).tolist()
        assert all(0 <= token < vocab_size for token in tokens)
        logits = drawn("normal", vocab_size, device)
        assert torch.equal(sampled.tokens(logits, seq_lens), sampled.expected(logits, seq_lens))
