"""Log probabilities of the captured step against log_softmax and a sort, and the row that the host reads."""

from __future__ import annotations

import math

import pytest
import torch

from alspec.config import MAX_LOGPROBS
from alspec.kernels.comm.exchange import LogitExchange
from alspec.kernels.sampling.logprobs import LogprobBuffers, Logprobs, collect_logprobs, logprobs_ref
from alspec.kernels.sampling.next_token import RING_HEADER, RING_STEPS, finish_step, num_candidates


@pytest.mark.parametrize("kind", ["normal", "ties", "peaked"])
@pytest.mark.parametrize("vocab_size", [20, 1024, 2100])
def test_chosen_and_most_likely_tokens(device: torch.device, kind: str, vocab_size: int) -> None:
    """The same buffers serve several N, also 0."""
    generator = torch.Generator().manual_seed(vocab_size)
    buffers = LogprobBuffers.allocate(3, vocab_size, device)
    pin, shapes = device.type == "cuda", ((RING_STEPS, 3, 1 + MAX_LOGPROBS), (RING_STEPS, RING_HEADER + 3))
    ring, tokens_ring = (torch.full(shape, -1, dtype=torch.int64, pin_memory=pin) for shape in shapes)
    stamps = torch.zeros(RING_STEPS, dtype=torch.int32, pin_memory=pin)
    epoch, fault = (torch.tensor([value], dtype=torch.int32, device=device) for value in (5, 0))
    exchange = LogitExchange(torch.zeros(3, 1, device=device), epoch, fault)
    for step, num_top in enumerate((5, MAX_LOGPROBS, 0, 1)):
        logits = torch.randn(3, vocab_size, generator=generator).to(device) * (30 if kind == "peaked" else 4)
        logits = logits.round() if kind == "ties" else logits
        sampled = torch.randint(vocab_size, (3,), generator=generator).to(device)
        buffers.set(num_top)
        collect_logprobs(buffers, logits)
        best, seq_lens = torch.zeros(3, num_candidates(vocab_size), device=device), torch.ones(3, dtype=torch.int32)
        finish_step(
            best, best.int(), sampled, torch.zeros(3, dtype=torch.int64, device=device), seq_lens.to(device), 9,
            exchange, tokens_ring, stamps, logprobs=(logits, buffers.log_sums, buffers.top, ring),
        )  # fmt: skip
        if pin:
            torch.cuda.synchronize()
        found, expected = Logprobs.unpack(ring[5 + step], num_top), logprobs_ref(logits, sampled, num_top)
        assert torch.equal(found.token_ids, expected.token_ids)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=2e-5)
        assert tokens_ring[5 + step, RING_HEADER:].tolist() == sampled.tolist()


def test_the_reference_is_log_softmax() -> None:
    logits = torch.tensor([[math.log(value) for value in (0.1, 0.2, 0.4, 0.2, 0.1)]]) + 7
    found = logprobs_ref(logits, torch.tensor([4]), 3)
    assert found.token_ids.tolist() == [[4, 2, 1, 3]]
    torch.testing.assert_close(found.values.exp(), torch.tensor([[0.1, 0.4, 0.2, 0.2]]))


def test_a_batch_is_sorted_in_parts() -> None:
    logits = torch.randn(19, 30)
    whole = logprobs_ref(logits, torch.arange(19), 4)
    for row in range(19):
        alone = logprobs_ref(logits[row : row + 1], torch.tensor([row]), 4)
        assert torch.equal(alone.token_ids[0], whole.token_ids[row])
        assert torch.equal(alone.values[0], whole.values[row])
