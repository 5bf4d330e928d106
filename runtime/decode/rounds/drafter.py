"""What proposes tokens: the interface of drafters, and the loop of those that take one step for each draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from alspec.config import SamplingConfig
from alspec.kernels.sampling.adjustment import count_newest
from alspec.runtime.decode.eager_sampling import sample
from alspec.runtime.decode.rounds.token_history import TokenHistory

__all__ = ["DraftRequest", "Drafter", "Drafts", "draft_by_steps"]


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter may read. Shapes: B requests, V vocabulary. All tensors are on the device."""

    history: TokenHistory
    max_drafts: Tensor  # [B] int64: most drafts of each request, from 0 to K
    width: int  # the largest of them on the host, at least 1
    sampling: SamplingConfig
    seen: Tensor | None  # [B, V] int32, with the newest token; None without penalties. Not to be changed


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens: the first `counts` of each request's row. K is up to the width that was asked for."""

    token_ids: Tensor  # [B, K] int64
    counts: Tensor  # [B] int64, from 0 to K


class Drafter(Protocol):
    """Proposes tokens. Every rank makes the same calls and proposes the same tokens."""

    def begin(self, history: TokenHistory) -> None:
        """A generation begins: the history holds its prompts and first tokens."""

    def draft(self, request: DraftRequest) -> Drafts:
        """Propose the tokens that follow each request's newest token."""

    def cost(self, seq_lens: list[int]) -> float:
        """Estimated time of one draft of all requests, relative to a plain step at these lengths."""


def draft_by_steps(
    request: DraftRequest, first_logits: Tensor, next_logits: Callable[[Tensor, Tensor], Tensor]
) -> Drafts:
    """Draft token by token, chosen as the model's own tokens are: same settings, same random numbers of a position.

    Args:
        first_logits: [B, V] fp32 after the newest tokens.
        next_logits: (token_ids [B], seq_lens [B] int32) -> [B, V] fp32 after these drafts; called once for each further
            place. A request without further drafts repeats its last token at the same place.
    """
    history, limits, sampling = request.history, request.max_drafts, request.sampling
    requests = torch.arange(len(limits), device=limits.device)
    seen = None if request.seen is None else request.seen.clone()
    tokens, seq_lens = history.newest, history.lengths
    drafted: list[Tensor] = []
    for place in range(request.width):
        logits = next_logits(tokens, seq_lens) if place else first_logits
        chosen = sample(logits, sampling, requests, seq_lens.long(), seen)
        drafted.append(chosen)
        # The last draft is not fed: nothing follows it.
        goes_on = place + 1 < limits
        tokens = torch.where(goes_on, chosen, tokens)
        seq_lens = seq_lens + goes_on.int()
        if seen is not None:
            count_newest(seen, chosen)
    return Drafts(torch.stack(drafted, 1), limits)
