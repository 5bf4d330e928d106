"""Rows of a round, accepted drafts and what rows have seen, against loops over single requests."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from tiers import fast

from alspec.config import SamplingConfig
from alspec.kernels.sampling.adjustment import count_newest, tokens_seen
from alspec.runtime.decode.eager_sampling import probabilities, sample
from alspec.runtime.decode.rounds.acceptance import accepted_drafts, max_drafts, round_rows, seen_by_rows
from alspec.runtime.decode.rounds.drafter import Drafts
from alspec.runtime.decode.rounds.token_history import TokenHistory

CPU = torch.device("cpu")


def random_drafts(draw: random.Random, batch: int, width: int, vocab: int) -> Drafts:
    ids = [[draw.randrange(vocab) for _ in range(width)] for _ in range(batch)]
    return Drafts(torch.tensor(ids).view(batch, width), torch.tensor([draw.randint(0, width) for _ in range(batch)]))


@pytest.mark.parametrize("seed", range(20))
def test_accepted_drafts_are_the_longest_right_prefix(seed: int) -> None:
    draw = random.Random(seed)
    batch, width = draw.randint(1, 9), draw.randint(0, 15)
    drafts = random_drafts(draw, batch, width, 2)
    chosen = torch.tensor([[draw.randrange(2) for _ in range(batch)] for _ in range(width + 1)])
    expected = []
    for request in range(batch):
        pairs = zip(drafts.token_ids[request].tolist(), chosen[:, request].tolist(), strict=False)
        right = itertools.takewhile(
            lambda pair: pair[0] == pair[1], itertools.islice(pairs, int(drafts.counts[request]))
        )
        expected.append(len(list(right)))
    assert accepted_drafts(drafts, chosen).tolist() == expected


@pytest.mark.parametrize("has_blocks", [False, True])
def test_max_drafts(has_blocks: bool) -> None:
    """Rows stay in the block of the newest token, and the text within the capacity."""
    capacity = 203
    lengths = torch.arange(1, capacity + 1, dtype=torch.int32)
    for num_drafts in (0, 1, 4, 15):
        for length, most in zip(lengths.tolist(), max_drafts(lengths, num_drafts, capacity, has_blocks), strict=True):
            fitting = [
                count
                for count in range(num_drafts + 1)
                if count == 0
                or (
                    length + count + 1 <= capacity
                    and (not has_blocks or (length - 1) // 64 == (length + count - 1) // 64)
                )
            ]
            assert most == max(fitting)


@pytest.mark.parametrize("seed", range(10))
def test_rows(seed: int) -> None:
    """Rows behind the last draft of a request repeat it."""
    draw = random.Random(seed)
    batch, width = draw.randint(1, 5), draw.randint(0, 6)
    drafts = random_drafts(draw, batch, width, 50)
    newest = torch.tensor([draw.randrange(50) for _ in range(batch)])
    lengths = torch.tensor([draw.randint(1, 99) for _ in range(batch)], dtype=torch.int32)
    token_ids, seq_lens = round_rows(newest, lengths, drafts)
    assert token_ids.shape == seq_lens.shape == (width + 1, batch)
    for request, (row, at) in itertools.product(range(batch), enumerate(range(width + 1))):
        place = min(at, int(drafts.counts[request]))
        text = [int(newest[request]), *drafts.token_ids[request].tolist()]
        assert (token_ids[row, request], seq_lens[row, request]) == (text[place], lengths[request] + place)


@pytest.mark.parametrize("seed", range(5))
def test_rows_have_seen_the_drafts_up_to_themselves(seed: int) -> None:
    draw = random.Random(seed)
    batch, width, vocab = 3, draw.randint(0, 5), 6
    drafts = random_drafts(draw, batch, width, vocab)
    seen = tokens_seen([[draw.randrange(vocab) for _ in range(4)] for _ in range(batch)], vocab, CPU)
    before = seen.clone()
    rows = seen_by_rows(seen, drafts)
    assert torch.equal(seen, before)
    for row, request in itertools.product(range(width + 1), range(batch)):
        expected = seen[request : request + 1].clone()
        for token in drafts.token_ids[request, : min(row, int(drafts.counts[request]))]:
            count_newest(expected, token[None])
        assert torch.equal(rows[row, request], expected[0])


@pytest.mark.parametrize("seed", range(5))
def test_history(seed: int) -> None:
    """Appending any numbers of tokens up to the capacity gives the text, and nothing behind it changes it."""
    draw = random.Random(seed)
    capacity, texts = 40, [[draw.randrange(99) for _ in range(draw.randint(1, 9))] for _ in range(3)]
    history = TokenHistory(3, capacity, CPU)
    for prompts in (None, [text[:-1] for text in texts]):
        history.begin([text[-1] for text in texts], [len(text) for text in texts], prompts)
        assert history.newest.tolist() == [text[-1] for text in texts]
    while max(map(len, texts)) < capacity:
        new = torch.tensor([[draw.randrange(99) for _ in range(16)] for _ in texts])
        counts = [min(draw.randint(0, 16), capacity - len(text)) for text in texts]
        history.append(new, torch.tensor(counts))
        for text, row, count in zip(texts, new.tolist(), counts, strict=True):
            text += row[:count]
        assert history.lengths.tolist() == [len(text) for text in texts]
        assert history.newest.tolist() == [text[-1] for text in texts]
        for row, text in zip(history.token_ids.tolist(), texts, strict=True):
            assert row[: len(text)] == text


DISTRIBUTIONS: list[dict[str, float]] = [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 0.7}]


@pytest.mark.parametrize(
    ("settings", "count"),
    fast([(DISTRIBUTIONS[-1], 4000), *((settings, 20_000) for settings in DISTRIBUTIONS)], [(DISTRIBUTIONS[-1], 4000)]),
    ids=lambda each: "-".join(each) if isinstance(each, dict) else str(each),
)
def test_emitted_texts_have_the_models_distribution(settings: dict[str, float], count: int) -> None:
    """Chi-square over `count` random streams: texts of three tokens from rounds of a drafter that is often wrong.

    Model and drafter are Markov chains over five tokens, so the distribution of a text is a product of `probabilities`.
    """
    vocab, new_tokens, width = 5, 3, 3
    generator = torch.Generator().manual_seed(3)
    model = torch.randn(vocab, vocab, generator=generator) * 1.5
    drafter = model + torch.randn(vocab, vocab, generator=generator)
    sampling = SamplingConfig(**{"temperature": 1.0, "seed": 11} | settings)
    request, lengths = torch.arange(count), torch.ones(count, dtype=torch.int64)
    texts = torch.zeros(count, 1 + new_tokens + width + 1, dtype=torch.int64)
    accepted_of_rounds = []
    while int(lengths.min()) < 1 + new_tokens:
        newest = texts.gather(1, lengths[:, None] - 1)[:, 0]
        proposed = [newest]
        for place in range(width):
            proposed.append(sample(drafter[proposed[-1]], sampling, request, lengths + place))
        counts = (1 + new_tokens - lengths).clamp(0, width)
        drafts = Drafts(torch.stack(proposed[1:], 1), counts)
        rows, row_lens = round_rows(newest, lengths, drafts)
        # Requests that have their text run on with no drafts; their places are not read.
        chosen = torch.stack(
            [sample(model[ids], sampling, request, lens.long()) for ids, lens in zip(rows, row_lens, strict=True)]
        )
        accepted = accepted_drafts(drafts, chosen)
        accepted_of_rounds.append(accepted[counts == width])
        padded = torch.cat([drafts.token_ids, newest[:, None]], 1)
        emitted = torch.where(torch.arange(width + 1) < accepted[:, None], padded, chosen.T)
        live = counts > 0
        for place in range(width + 1):
            writes = live & (place <= accepted)
            at = (lengths + place)[writes]
            texts[writes, at] = emitted[writes, place]
        lengths = torch.where(live, lengths + accepted + 1, lengths)
    assert set(torch.cat(accepted_of_rounds).tolist()) == {0, 1, 2, 3}
    found = torch.zeros(vocab**new_tokens)
    found.index_add_(0, (texts[:, 1:4] * torch.tensor([vocab**2, vocab, 1])).sum(1), torch.ones(count))
    probs = probabilities(model, sampling).double()
    expected = count * (probs[0][:, None, None] * probs[:, :, None] * probs[None]).flatten()
    assert not found[expected == 0].any()  # a token that was cut is never emitted
    kept = expected > 5
    chi2, freedom = float(((found - expected)[kept].square() / expected[kept]).sum()), int(kept.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5
