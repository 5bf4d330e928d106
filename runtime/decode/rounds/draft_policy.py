"""Whether drafting pays: decided on the host, from the numbers of accepted drafts that it reads anyway.

A round costs more than a plain step and yields more tokens. Drafting pays while

    sum(tokens of rounds) >= sum(costs of rounds), relative to a plain step.

The sums are over the last rounds; tokens are means over the requests. If drafting has not paid, plain steps run for a
while; then a few rounds probe whether it does now. To resume it must pay with a margin, so that the choice does not
flicker. Pauses grow while probes fail. A round that would cost more than all its tokens together is never tried. Every
rank reads the same numbers, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["ROW_COST", "DraftPolicy", "round_cost"]

ROW_COST = 0.05  # of each row beyond the first, relative to a plain step: products read the weights once for all rows
WINDOW_ROUNDS = 16  # rounds that the mean is over
PROBE_ROUNDS = 4  # rounds of a probe
RESUME_MARGIN = 1.05  # a probe must pay by this factor
FIRST_PAUSE_STEPS = 32  # plain steps before the first probe
LONGEST_PAUSE_STEPS = 128  # pauses double up to this


def round_cost(num_drafts: int, draft_cost: float) -> float:
    """Time of an eager round relative to a plain step: `1 + K (row cost + draft cost)`.

    Args:
        num_drafts: K.  draft_cost: of one draft, relative to a plain step.
    """
    return 1.0 + num_drafts * (ROW_COST + draft_cost)


class DraftPolicy:
    """Decides before each step whether it drafts. `always`: where it can, whether it pays or not."""

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self.begin()

    def begin(self) -> None:
        """A generation begins: draft."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW_ROUNDS)  # tokens and cost of a round
        self._is_probe = False
        self._pause_left, self._next_pause = 0, FIRST_PAUSE_STEPS

    def drafts(self, num_drafts: int, cost: float) -> bool:
        """Whether the next step drafts. Call it once for each step that has room for drafts; where it drafts, a
        second call changes nothing.

        Args:
            num_drafts: K of this step.  cost: of a round with as many, relative to a plain step; see `round_cost`.
                Infinite: nothing can be drafted at this length.
        """
        if math.isinf(cost):
            return False
        if self._always:
            return True
        if cost > num_drafts + 1:
            return False
        self._pause_left = max(self._pause_left - 1, -1)
        return self._pause_left < 0

    def record(self, tokens: float, cost: float) -> None:
        """Count a round that cost more than a plain step.

        Args:
            tokens: emitted by it, mean over the requests.  cost: as in `drafts`.
        """
        if self._pause_left >= 0:
            return  # a round that was in flight when the pause began
        self._recent.append((tokens, cost))
        needed = PROBE_ROUNDS if self._is_probe else WINDOW_ROUNDS
        if len(self._recent) < needed:
            return
        made, paid = map(sum, zip(*self._recent, strict=True))
        if made < paid * (RESUME_MARGIN if self._is_probe else 1.0):
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE_STEPS)
            self._is_probe = True
            self._recent.clear()
        elif self._is_probe:
            self._is_probe, self._next_pause = False, FIRST_PAUSE_STEPS
