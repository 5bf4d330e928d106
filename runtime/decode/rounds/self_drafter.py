"""The drafter `self`: steps of the same model, whose attention is A~ over the same cache."""

from __future__ import annotations

from collections.abc import Callable

from alspec.runtime.decode.rounds.drafter import DraftRequest, Drafts, draft_by_steps
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.decode.rounds.token_history import TokenHistory

__all__ = ["SelfDrafter"]


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
        """Bytes of a step with A~ relative to those of a step with A. See `Drafter.cost`."""
        return self._cost(seq_lens)
