"""The state of rounds on the device, and the rows of one round.

Shapes: B requests, C tokens that a cache holds of each, W rows of a round of each request: the newest token, then K
drafts, so W = K + 1. A plain step is a round with one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RoundRowBuffers", "RoundState"]


@dataclass(frozen=True)
class RoundState:
    """What one round leaves to the next, whatever their numbers of rows."""

    newest: Tensor  # [B] int64: each request's newest token
    lengths: Tensor  # [B] int32: tokens of each text, with the newest one
    live: Tensor  # [B] int32: 1 while a request is generating; one that is not keeps its text
    history: Tensor  # [B, C + W] int32: the texts; a round may write one round beyond C
    number: Tensor  # [1] int32: number of the round
    accepted: Tensor  # [B] int32: drafts accepted by the last round: the row whose token is the last one in the cache
    committed: Tensor  # [B] int32: tokens that the cache has for good after the last round
    forced: Tensor  # [1] fp32: for profiling, the share of drafts that is accepted, whatever they are; below 0: unused

    @classmethod
    def allocate(cls, batch_size: int, capacity: int, num_drafts: int, device: torch.device) -> RoundState:
        """Allocate for rounds of up to `num_drafts` drafts."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            newest=new(batch_size, dtype=torch.int64),
            lengths=new(batch_size) + 1,
            live=new(batch_size) + 1,
            history=new(batch_size, capacity + num_drafts + 1),
            number=new(1),
            accepted=new(batch_size),
            committed=new(batch_size),
            forced=new(1, dtype=torch.float32) - 1.0,
        )


@dataclass(frozen=True)
class RoundRowBuffers:
    """The rows of one kind of round. Rows behind a request's last draft repeat it, which changes nothing."""

    token_ids: Tensor  # [B, W] int64
    row_lens: Tensor  # [B, W] int32: tokens up to and with each row's
    last_lens: Tensor  # [B] int32: the last of them
    counts: Tensor  # [B] int32: drafts of each request, 0 to W - 1
    best_match: Tensor  # [B] int64: used by the n-gram drafter

    @classmethod
    def allocate(cls, batch_size: int, num_rows: int, device: torch.device) -> RoundRowBuffers:
        """Allocate rows of the same length."""

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(batch_size, *shape, dtype=dtype, device=device)

        return cls(
            token_ids=new(num_rows, dtype=torch.int64),
            row_lens=new(num_rows) + 1,
            last_lens=new() + 1,
            counts=new(),
            best_match=new(dtype=torch.int64),
        )
