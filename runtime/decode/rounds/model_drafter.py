"""Drafters that run a model: `self`, whose attention is A~ over the same cache, and `model:DIR`, a smaller one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.decode.rounds.drafter import DraftRequest, Drafts, draft_by_steps
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.decode.rounds.token_history import TokenHistory
from alspec.runtime.distributed.transport import Transport

__all__ = ["CATCH_UP_ROWS", "ModelDrafter", "SelfDrafter", "held_by_all"]

CATCH_UP_ROWS = 16  # tokens that its cache lacks are rows of one pass; more of them are a prompt


class SelfDrafter:
    """Drafts by the model itself with sink, window and recalled blocks. It needs no memory of its own.

    Its keys and values lie behind the accepted tokens, where the rows that verify them replace them.

    Args:
        forward: the model over its cache.
        cost: (lengths) -> time of one draft relative to a plain step.
    """

    def __init__(self, forward: RowForward, cost: Callable[[list[int]], float]) -> None:
        self._forward, self._cost = forward, cost

    def begin(self, history: TokenHistory) -> None:
        """Do nothing: what the cache holds is right. See `Drafter.begin`."""

    def draft(self, request: DraftRequest) -> Drafts:
        """One step of the model with A~ for each draft. See `Drafter.draft`."""
        history = request.history
        return draft_by_steps(request, self._forward.predict(history.newest, history.lengths), self._forward.predict)

    def cost(self, seq_lens: list[int]) -> float:
        """Predicted time of a step with A~ relative to a plain step. See `Drafter.cost`."""
        return self._cost(seq_lens)


def held_by_all(transport: Transport, held: Tensor, is_long: Tensor) -> Tensor:
    """What the draft models' caches of all ranks hold of each text, [B] int64. Every rank calls it.

    Args:
        held: [B] int64, tokens at the start of each text that this rank's cache holds.
        is_long: [B], whether they have the rotary frequencies of longer texts; nothing is held where ranks differ.
    """
    counts, kinds = transport.all_gather_world(torch.stack((held, is_long.long()))).unbind(1)  # [world, B] each
    return torch.where(kinds.amin(0) == kinds.amax(0), counts.amin(0), 0)


class ModelDrafter:
    """Drafts by a smaller model. It is split over the same ranks as the model that verifies.

    It knows which token its cache holds at each place. Before it drafts, it compares them with the text: what differs
    or is missing is computed again, such as the prompt, the last draft of a round in which all were accepted, or what
    plain steps have added.

    Args:
        forward: the smaller model over its cache, which is not quantised and has no rings.
        vocab_size: V, of the model that verifies. Rows of either embedding may be padded beyond the tokenizer.
        cost: (lengths) -> time of one draft relative to a plain step.
        short_context: longer texts have other rotary frequencies, with which all of a text is computed again.
        frequency_length: of the smaller model, see `RopeScaling.frequency_length`.
    """

    def __init__(
        self,
        forward: RowForward,
        vocab_size: int,
        cost: Callable[[list[int]], float],
        operation: OperationHook,
        short_context: int | None = None,
        frequency_length: Callable[[int], int] = lambda text_length: 0,
    ) -> None:
        self._forward, self._vocab_size, self._cost = forward, vocab_size, cost
        self._operation, self._frequency_length = operation, frequency_length
        self._short_context = short_context or forward.cache.max_context
        cache = forward.cache
        self._frequency_lengths = [0] * cache.batch_size  # of the prompts
        # [B, N]: the token whose keys and values the cache holds at each place; -1: none.
        self._held = torch.full((cache.batch_size, cache.max_context), -1, device=cache.device)
        self._places = torch.arange(cache.max_context, device=cache.device)
        # [B]: whether what the cache holds has the frequencies of longer texts.
        self._is_long = torch.zeros(cache.batch_size, dtype=torch.bool, device=cache.device)

    def begin(self, history: TokenHistory) -> None:
        """Keep what all ranks hold of these texts: an interrupted call may have ended elsewhere on each.

        With other rotary frequencies of the prompt, nothing.
        """
        lengths = [self._frequency_length(length - 1) for length in history.lengths.tolist()]
        same = [length == own for length, own in zip(lengths, self._frequency_lengths, strict=True)]
        self._frequency_lengths = lengths
        common = self._common(history) * torch.tensor(same, device=self._held.device)
        self._forget_from(held_by_all(self._forward.transport, common, self._is_long))

    def draft(self, request: DraftRequest) -> Drafts:
        """One step of the smaller model for each draft. See `Drafter.draft`."""

        def next_logits(token_ids: Tensor, seq_lens: Tensor) -> Tensor:
            logits, _ = self._forward.full(token_ids[None], seq_lens[None])
            self._held.scatter_(1, seq_lens.long()[:, None] - 1, token_ids[:, None])
            return self._fitted(logits[0])

        return draft_by_steps(request, self._add_missing(request.history), next_logits)

    def catch_up(self, history: TokenHistory, held: Tensor) -> None:
        """Compute what the cache lacks of the texts, if something else has drafted over it since.

        Args:
            held: [B] int64, tokens at the start of each text that the cache holds.
        """
        token_ids = history.token_ids[:, : len(self._places)]
        self._held = torch.where(self._places < held[:, None], token_ids, -1)
        self._add_missing(history)

    def cost(self, seq_lens: list[int]) -> float:
        """Predicted time of a step of this model, relative to a plain step. See `Drafter.cost`."""
        return self._cost(seq_lens)

    def _common(self, history: TokenHistory) -> Tensor:
        """[B] int64: tokens at the start of each text that the cache holds, the newest one left out."""
        is_held = self._held == history.token_ids[:, : self._held.shape[1]]
        return torch.minimum(is_held.long().cumprod(1).sum(1), history.lengths.long() - 1)

    def _forget_from(self, counts: Tensor) -> None:
        self._held.masked_fill_(self._places >= counts[:, None], -1)

    def _add_missing(self, history: TokenHistory) -> Tensor:
        """Give the cache all tokens of the texts; returns the logits after the newest ones, [B, V]."""
        forward, lengths = self._forward, history.lengths.long()
        is_long = lengths > self._short_context
        count = torch.where(is_long == self._is_long, self._common(history), 0)
        self._forget_from(count)  # first: if this is interrupted, the cache may hold less
        self._is_long = is_long
        for request, (start, length) in enumerate(zip(count.tolist(), lengths.tolist(), strict=True)):
            # Rows in the short context have its frequencies: in a longer text they are a prompt.
            if length - start > CATCH_UP_ROWS or start < self._short_context < length:
                ids = history.token_ids[request, : length - 1].tolist()
                prefill(
                    forward.model, forward.cache, forward.transport, request, ids, self._operation, start=start,
                    text_length=length if length > self._short_context else None,
                )  # fmt: skip
                count[request] = length - 1
        rows = torch.arange(int((lengths - count).max()), device=count.device)
        # Rows behind the newest token repeat it.
        places = torch.minimum(count[:, None] + rows, lengths[:, None] - 1)
        logits, _ = forward.full(history.token_ids.gather(1, places).T.contiguous(), places.T.contiguous().int() + 1)
        is_text = self._places < lengths[:, None]
        self._held = torch.where(is_text, history.token_ids[:, : len(self._places)], self._held)
        return self._fitted(logits[-1])

    def _fitted(self, logits: Tensor) -> Tensor:
        """Cut or pad to the vocabulary of the model that verifies."""
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
