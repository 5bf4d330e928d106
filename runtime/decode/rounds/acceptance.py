"""Rows of a round, and which drafts are accepted.

A draft is accepted if it is the token that plain decoding chooses at its position. Choosing reads the logits after the
tokens before the position, and the random numbers of (seed, request, position); the draft does not matter. So every
token of the text is the one that plain decoding gives with the same seed, greedy or sampled, whatever drafts were made.

This replaces the rejection sampling of speculative decoding (Leviathan et al., Chen et al., 2023), which keeps the
distribution but gives another text for each drafter and K. Here the distribution is exact because each token is drawn
from it by its own random numbers. A drafter with probabilities draws its drafts by the same ones as the model, which
makes agreement likely: `sample` adds the same noise to each token's log probability, so with total variation v between
the two distributions they draw the same token with probability (1 - v) / (1 + v) at least. Rejection sampling accepts
1 - v (Daliri, Musco, Suresh, Coupling without Communication, 2024).

Shapes: R = K + 1 rows of each of B requests: the newest token, then the drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.sampling.adjustment import count_newest
from alspec.runtime.decode.rounds.drafter import Drafts

__all__ = ["accepted_drafts", "max_drafts", "round_rows", "seen_by_rows"]


def max_drafts(seq_lens: Tensor, num_drafts: int, capacity: int, has_blocks: bool) -> Tensor:
    """How many drafts each request can take.

    Over a quantised cache a round ends with the block of 64 tokens that its newest token lies in. The tail holds one
    block, so a row behind it would replace a token that is still read; and a block becomes a record when all of its
    tokens are accepted, as in plain decoding.

    Args:
        seq_lens: [B] integers, with the newest token.  num_drafts: K.
        capacity: most tokens of a text: a round emits none behind it.  has_blocks: the cache is quantised.
    Returns:
        [B], from 0 to K.
    """
    limits = (capacity - 1 - seq_lens).clamp(0, num_drafts)
    return torch.minimum(limits, BLOCK - 1 - (seq_lens - 1) % BLOCK) if has_blocks else limits


def round_rows(newest: Tensor, seq_lens: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """Tokens and lengths of the rows of a round. Rows behind a request's last draft repeat it, which changes nothing.

    Args:
        newest: [B] int64.  seq_lens: [B] integers, with the newest token.  drafts: K for each request.
    Returns:
        token_ids: [R, B] int64.  lengths: [R, B] int32, up to and with the row's token.
    """
    rows = torch.arange(drafts.token_ids.shape[1] + 1, device=newest.device)
    rows = torch.minimum(rows, drafts.counts[:, None])  # [B, R]
    token_ids = torch.cat([newest[:, None], drafts.token_ids], 1).gather(1, rows)
    return token_ids.T.contiguous(), (seq_lens[:, None] + rows).T.contiguous().int()


def accepted_drafts(drafts: Drafts, chosen: Tensor) -> Tensor:
    """Length of the longest prefix of each request's drafts that are the chosen tokens: [B] int64.

    Args:
        chosen: [R, B] int64, the token that follows each row.
    """
    place = torch.arange(drafts.token_ids.shape[1], device=chosen.device)
    is_right = (drafts.token_ids == chosen[:-1].T) & (place < drafts.counts[:, None])
    return is_right.long().cumprod(1).sum(1)


def seen_by_rows(seen: Tensor, drafts: Drafts) -> Tensor:
    """The tokens that each row has seen, for penalties: the drafts up to itself count as part of the answer.

    Args:
        seen: [B, V] int32, with the newest token; see `tokens_seen`.
    Returns:
        [R, B, V] int32.
    """
    rows = [seen]
    for place, token_ids in enumerate(drafts.token_ids.T):
        after = rows[-1].clone()
        count_newest(after, token_ids)
        rows.append(torch.where((place < drafts.counts)[:, None], after, rows[-1]))
    return torch.stack(rows)
