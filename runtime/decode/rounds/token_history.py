"""The tokens of each request on the device: drafts are looked up in them, accepted ones are appended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alspec.config import MAX_DRAFT_TOKENS

__all__ = ["TokenHistory"]


class TokenHistory:
    """Token ids and lengths of B requests. Updates are tensor operations without a host sync.

    Args:
        capacity: most tokens of a request that the cache holds. The buffer has room for one round more.
    """

    def __init__(self, batch_size: int, capacity: int, device: torch.device) -> None:
        width = capacity + MAX_DRAFT_TOKENS + 1
        self.token_ids = torch.zeros(batch_size, width, dtype=torch.int64, device=device)
        self.lengths = torch.ones(batch_size, dtype=torch.int32, device=device)  # with the newest token
        self._requests = torch.arange(batch_size, device=device)

    def begin(self, token_ids: Sequence[int], seq_lens: Sequence[int], prompts: Sequence[Sequence[int]] | None) -> None:
        """Set each request's newest token, its length with this token, and the tokens before it, if they are known."""
        rows = torch.zeros(self.token_ids.shape, dtype=torch.int64)
        for request, (newest, length) in enumerate(zip(token_ids, seq_lens, strict=True)):
            if prompts is not None:
                rows[request, : length - 1] = torch.tensor(prompts[request], dtype=torch.int64)
            rows[request, length - 1] = newest
        self.token_ids.copy_(rows)
        self.lengths.copy_(torch.tensor(list(seq_lens)))

    @property
    def newest(self) -> Tensor:
        """[B] int64: each request's newest token."""
        return self.token_ids[self._requests, self.lengths.long() - 1]

    def append(self, token_ids: Tensor, counts: Tensor) -> None:
        """Append the first `counts` [B] of token_ids [B, R] int64 to each request, R up to MAX_DRAFT_TOKENS + 1."""
        column = torch.arange(token_ids.shape[1], device=token_ids.device)
        places = self.lengths.long()[:, None] + column
        kept = self.token_ids.gather(1, places)
        self.token_ids.scatter_(1, places, torch.where(column < counts[:, None], token_ids, kept))
        self.lengths += counts.to(self.lengths.dtype)
