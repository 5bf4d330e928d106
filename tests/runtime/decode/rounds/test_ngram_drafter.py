"""Drafts looked up in the text are those of a search in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from alspec.kernels.rounds.ngram import LONGEST_MATCH, SHORTEST_MATCH
from alspec.runtime.decode.rounds.ngram_drafter import ngram_drafts


def looked_up(text: list[int], width: int) -> list[int] | None:
    """The continuation of the longest, then latest earlier match of the end of the text; it may run into itself."""
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        if size >= len(text):
            continue
        end = text[-size:]
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == end:
                longer = list(text)
                for place in range(width):
                    longer.append(longer[start + size + place])
                return longer[len(text) :]
    return None


@pytest.mark.parametrize("num_tokens", [2, 3, 9])  # few different tokens: many matches, which overlap
@pytest.mark.parametrize("width", [1, 4, 15])
def test_drafts_continue_the_longest_recent_match(num_tokens: int, width: int) -> None:
    draw = random.Random(num_tokens * width)
    texts = [[draw.randrange(num_tokens) for _ in range(draw.randint(1, 70))] for _ in range(200)]
    padded = torch.full((len(texts), 90), 0)  # behind a text lie tokens that must not be read
    for row, text in zip(padded, texts, strict=True):
        row[:] = torch.tensor([draw.randrange(num_tokens) for _ in row])
        row[: len(text)] = torch.tensor(text)
    found, is_found = ngram_drafts(padded, torch.tensor([len(text) for text in texts], dtype=torch.int32), width)
    expected = [looked_up(text, width) for text in texts]
    assert is_found.tolist() == [drafts is not None for drafts in expected]
    assert {None} < {None if each is None else tuple(each) for each in expected}
    for drafts, right in zip(found.tolist(), expected, strict=True):
        assert right is None or drafts == right


def test_longer_matches_win_over_later_ones() -> None:
    text = [1, 2, 3, 7, 2, 3, 8, 1, 2, 3]
    drafts, is_found = ngram_drafts(torch.tensor([text]), torch.tensor([len(text)]), 3)
    assert is_found.all()
    assert drafts.tolist() == [[7, 2, 3]]
