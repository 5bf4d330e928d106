"""The drafter `ngram`: what followed the newest tokens when they occurred before, in the prompt or in the text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.rounds.ngram import LONGEST_MATCH, SHORTEST_MATCH
from alspec.runtime.decode.rounds.drafter import DraftRequest, Drafts
from alspec.runtime.decode.rounds.token_history import TokenHistory

__all__ = ["NgramDrafter", "ngram_drafts"]


class NgramDrafter:
    """Looks drafts up in the tokens of the request. See `ngram_drafts`."""

    def begin(self, history: TokenHistory) -> None:
        """Do nothing. See `Drafter.begin`."""

    def draft(self, request: DraftRequest) -> Drafts:
        """Continue the longest recent match of each request; without one, draft nothing. See `Drafter.draft`."""
        history = request.history
        token_ids, is_found = ngram_drafts(history.token_ids, history.lengths, request.width)
        return Drafts(token_ids, torch.where(is_found, request.max_drafts, 0))

    def cost(self, seq_lens: list[int]) -> float:
        """0: it runs no model. See `Drafter.cost`."""
        return 0.0


def ngram_drafts(token_ids: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Continue the longest earlier match of the newest 5 to 2 tokens; of equally long ones the most recent.

    A continuation that reaches the end of the text goes on with its own start, as a text that repeats would.

    Args:
        token_ids: [B, C] int64.  lengths: [B] integers, tokens of each request.  width: K.
    Returns:
        drafts: [B, K] int64.  is_found: [B] bool; without a match, drafts are arbitrary tokens of the request.
    """
    lengths = lengths.long()[:, None]
    ends = torch.arange(token_ids.shape[1], device=token_ids.device)
    # Tokens of the window that ends at each place, the last one first; -1 before the start of the text.
    windows = F.pad(token_ids, (LONGEST_MATCH - 1, 0), value=-1).unfold(1, LONGEST_MATCH, 1).flip(2)
    newest = windows.gather(1, (lengths - 1)[..., None].expand(-1, -1, LONGEST_MATCH))
    matched = ((windows == newest) & (newest >= 0)).long().cumprod(2).sum(2)
    matched = matched.masked_fill((matched < SHORTEST_MATCH) | (ends >= lengths - 1), 0)
    best = (matched * token_ids.shape[1] + ends).argmax(1, keepdim=True)
    start = torch.minimum(best + 1, lengths - 1)
    places = start + torch.arange(width, device=token_ids.device) % (lengths - start)
    return token_ids.gather(1, places), matched.gather(1, best)[:, 0] > 0
