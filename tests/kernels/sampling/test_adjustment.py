"""Biases and penalties: the kernel against `adjusted_ref`, bit for bit, and that against transformers and a loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from alspec.config import ChoiceConfig
from alspec.kernels.sampling.adjustment import Adjustment, adjust_logits, adjusted_ref, count_newest, tokens_seen
from alspec.kernels.sampling.next_token import BLOCK, num_candidates

CHOICES = {
    "biases": ChoiceConfig(logit_bias={0: -100.0, 7: 2.5, 33: 100.0}),
    "repetition": ChoiceConfig(repetition_penalty=1.3),
    "below 1": ChoiceConfig(repetition_penalty=0.7, presence_penalty=-2.0),
    "counts": ChoiceConfig(frequency_penalty=0.37, presence_penalty=1.1),
    "all": ChoiceConfig(
        logit_bias={3: -1.7, 21: 0.1}, repetition_penalty=1.21, frequency_penalty=-0.6, presence_penalty=0.9
    ),
    "huge": ChoiceConfig(repetition_penalty=1e300, frequency_penalty=2.0),
}
PROMPTS = [[3, 3, 21, 39], [0, 7]]
ANSWERS = [[21, 5, 5, 21, 21], [0, 33, 1, 7, 33]]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("vocab_size", [40, 1100])
def test_steps_of_the_kernel_are_those_of_the_reference(device: torch.device, name: str, vocab_size: int) -> None:
    """Every bit is equal, also the best token of each block. A second batch of answers begins anew."""
    generator, choice = torch.Generator().manual_seed(vocab_size), CHOICES[name]
    adjustment = Adjustment.allocate(Adjustment.kinds_of(choice), 2, vocab_size, device)
    assert adjustment is not None
    adjustment.set(choice)
    blocks = num_candidates(vocab_size)
    for prompts in (PROMPTS, [[], [39]]):
        seen = tokens_seen(prompts, vocab_size, device)
        adjustment.begin(seen)
        for newest in zip(*ANSWERS, strict=True):
            logits = (torch.randn(2, vocab_size, generator=generator) * 8).to(device)
            token_ids = torch.tensor(newest, device=device)
            count_newest(seen, token_ids)
            expected = adjusted_ref(logits, choice, seen)
            best = torch.full((2, blocks), math.nan, device=device)
            best_token = torch.full((2, blocks), -1, dtype=torch.int32, device=device)
            adjustment.adjusted.fill_(math.nan)
            found = adjust_logits(adjustment, logits, token_ids, best, best_token)
            assert torch.equal(found, expected)
            for block, part in enumerate(expected.split(BLOCK, 1)):
                assert torch.equal(best[:, block], part.amax(1))
                assert torch.equal(best_token[:, block].long(), part.argmax(1) + block * BLOCK)


def test_answers_begin_without_a_prompt() -> None:
    """`begin(None)` forgets what an earlier batch has counted."""
    choice = CHOICES["all"]
    adjustment = Adjustment.allocate(Adjustment.kinds_of(choice), 1, 9, torch.device("cpu"))
    assert adjustment is not None
    assert adjustment.seen is not None
    adjustment.seen.fill_(7)
    adjustment.begin(None)
    assert not adjustment.seen.any()


def test_nothing_is_allocated_without_biases_and_penalties() -> None:
    kinds = Adjustment.kinds_of(ChoiceConfig(temperature=1.0, top_k=3))
    assert Adjustment.allocate(kinds, 1, 9, torch.device("cpu")) is None
    logits = torch.randn(1, 9)
    assert adjusted_ref(logits, ChoiceConfig()) is logits


def by_hand(logits: Tensor, choice: ChoiceConfig, prompt: list[int], answer: list[int]) -> list[float]:
    """The definition, token by token in Python."""
    values = []
    for token, logit in enumerate(logits.tolist()):
        z, times = logit + choice.logit_bias.get(token, 0.0), answer.count(token)
        if token in prompt or times:
            z = z / choice.repetition_penalty if z > 0 else z * choice.repetition_penalty
        values.append(z - choice.frequency_penalty * times - choice.presence_penalty * (times > 0))
    return values


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "huge"])
def test_the_reference_is_the_definition(name: str) -> None:
    logits, choice = torch.randn(2, 40, generator=torch.Generator().manual_seed(1)) * 8, CHOICES[name]
    seen = tokens_seen(PROMPTS, 40, torch.device("cpu"))
    for newest in zip(*ANSWERS, strict=True):
        count_newest(seen, torch.tensor(newest))
    expected = [by_hand(*each) for each in zip(logits, [choice] * 2, PROMPTS, ANSWERS, strict=True)]
    torch.testing.assert_close(adjusted_ref(logits, choice, seen), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "processor"),
    [
        ({"repetition_penalty": 1.3}, RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.8}, RepetitionPenaltyLogitsProcessor(0.8)),
        ({"logit_bias": {5: -3.5, 21: 9.0}}, SequenceBiasLogitsProcessor([[[5], -3.5], [[21], 9.0]])),
    ],
    ids=["repetition", "below 1", "biases"],
)
def test_transformers_gives_the_same(options: dict[str, object], processor: LogitsProcessor) -> None:
    ids = torch.randint(40, (2, 17), generator=torch.Generator().manual_seed(2))
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3)) * 8
    seen = tokens_seen(ids[:, :9].tolist(), 40, torch.device("cpu"))
    for newest in ids[:, 9:].T:
        count_newest(seen, newest)
    expected = processor(ids, logits.double())
    found = adjusted_ref(logits, ChoiceConfig.model_validate(options), seen)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
