"""Cases of compiled_cases.py: the compiled kernels that sample tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from emulated import CPU, Emulated, Found, counts_of, sound

from alspec.config import ChoiceConfig
from alspec.kernels.sampling import sampler
from alspec.kernels.sampling.next_token import BLOCK, num_candidates
from alspec.kernels.sampling.sampler import Sampler, sample_tokens
from alspec.runtime.decode.eager_sampling import sample

__all__ = ["CASES"]

KERNELS = ("_first_digit_kernel", "_next_digit_kernel", "_score_kernel", "_choose_kernel")


def sampled(vocab_size: int, ties: bool = False, **settings: Any) -> Found:
    """Tokens of some steps of one sampler, each of which clears its tables for the next. ties: logits are equal."""
    choice = ChoiceConfig.model_validate({"temperature": 3.0, "seed": 2**40 + 5} | settings)
    made = Sampler.allocate(Sampler.kinds_of(choice, vocab_size), 1, vocab_size, CPU)
    assert made is not None
    made.set(choice)
    generator, found, expected = torch.Generator().manual_seed(vocab_size), [], []
    kernels = {name: Emulated(getattr(sampler, name), 90) for name in KERNELS}
    with mock.patch.multiple(sampler, **kernels):
        for position in range(4):
            logits = torch.randn(1, vocab_size, generator=generator) * (0 if ties else 3)
            blocks = num_candidates(vocab_size)
            padded = logits.new_full((1, blocks * BLOCK), -math.inf)
            padded[:, :vocab_size] = logits
            seq_lens = torch.tensor([position + 1], dtype=torch.int32)
            best = padded.view(1, blocks, BLOCK).amax(2)
            found += sample_tokens(made, logits, best, seq_lens).tolist()
            expected += sample(logits, choice, torch.zeros(1, dtype=torch.int64), seq_lens.long()).tolist()
    assert found == expected, (found, expected)
    return {"error": 0.0} | counts_of(kernels)


CASES: dict[str, Callable[[], Found]] = {
    "sampler": sound(partial(sampled, 1100)),
    "sampler, min_p": sound(partial(sampled, 1100, min_p=0.02)),
    "sampler, top_k": sound(partial(sampled, 1100, top_k=12)),
    "sampler, top_p": sound(partial(sampled, 1100, top_p=0.7)),
    "sampler, top_k and top_p": sound(partial(sampled, 1100, top_k=50, top_p=0.8)),
    "sampler, top_k of equal tokens": sound(partial(sampled, 2100, ties=True, top_k=1030)),
    "sampler, top_p of equal tokens": sound(partial(sampled, 2100, ties=True, top_p=0.501)),
}
