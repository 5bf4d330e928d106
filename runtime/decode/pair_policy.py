"""Whether a pair over a link speculates in the next step, or each group decodes alone; and how far one is ahead.

Alone, both groups compute the whole step, each over its own weights and cache: the same bits, so no message is needed.
That is as fast as one group. A pair is slower than that where few layers accept or the context is short. Which it is
follows from the verdicts that both groups have read and from a model of the step (alspec/latency_model.py), with the
time of a message as both measured it when they started. So both decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from alspec.latency_model import LinkCosts, linked_lead, linked_step_us
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy

__all__ = ["PairPolicy"]

COSTS_EVERY = 256  # tokens after which costs are predicted again


class PairPolicy:
    """As `DraftPolicy`, with a step of the pair in the place of a round: it costs its time over that of one group.

    Args:
        costs: cached tokens of all requests -> time of a step of one group alone, and parts of a step of the pair.
        num_layers: L.
        link_us: measured time of a message alone; for reports.
    """

    def __init__(self, costs: Callable[[int], tuple[float, LinkCosts]], num_layers: int, link_us: float) -> None:
        """Create it; `begin` follows."""
        self.link_us = link_us
        self._costs = functools.lru_cache(maxsize=4)(costs)
        self._all_hits = [True] * num_layers
        self.begin()

    def begin(self) -> None:
        """A generation begins."""
        self._policy = DraftPolicy()

    def decide_next(self, num_tokens: int) -> bool:
        """Whether the next step speculates. Call it once for each step that is launched. num_tokens: as for costs."""
        # No drafts: a step of the pair yields one token, so it pays only if it costs less than a step alone.
        return self._policy.decide_next(0, self._cost(self._all_hits, num_tokens))

    def lead(self, num_tokens: int) -> int:
        """By how many layers the speculator is ahead, at most. num_tokens: as for costs."""
        return linked_lead(self._costs(num_tokens // COSTS_EVERY * COSTS_EVERY + 1)[1])

    def record(self, accepted: Sequence[bool], num_tokens: int) -> None:
        """Count a step that speculated. accepted: [L], whether all live requests accept the layer."""
        self._policy.record(1.0, self._cost(accepted, num_tokens))

    def _cost(self, accepted: Sequence[bool], num_tokens: int) -> float:
        """Predicted time of a step with these verdicts, relative to one group alone."""
        alone_us, parts = self._costs(num_tokens // COSTS_EVERY * COSTS_EVERY + 1)
        return linked_step_us(parts, accepted) / alone_us
