"""Whether drafting pays: decided on the host, from the numbers of accepted drafts that it reads anyway.

A round costs more than a plain step and yields more tokens. Drafting pays while

    sum(tokens of rounds) >= sum(costs of rounds), relative to a plain step.

The sums are over the last rounds; tokens are means over the requests. If drafting has not paid, plain steps run for a
while; then a few rounds probe whether it does now. To resume it must pay with a margin, so that the choice does not
flicker. Pauses grow while probes fail. A round that would cost more than all its tokens together is never tried. Every
rank reads the same numbers, so all ranks decide alike.

Where drafts are looked up in the texts, the texts tell when to try: a pause ends early when enough of them repeat
themselves. So few rounds are spent on a trial, and pauses are long. If the probe behind a repetition fails, the next
repetitions are left alone for a while, which grows, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["REPEATED_TOKENS", "ROW_COST", "DraftPolicy", "RepeatedTexts", "round_cost", "texts_so_far"]

ROW_COST = 0.05  # of each row beyond the first, relative to a plain step: products read the weights once for all rows
WINDOW_ROUNDS = 16  # rounds that the mean is over
RESUME_MARGIN = 1.05  # a probe must pay by this factor
REPEATED_TOKENS = 6  # shorter repetitions are common where nothing is copied: "on the other hand, the"


class ProbeSchedule(NamedTuple):
    """How drafting is tried, in rounds and plain steps."""

    begins_with_probe: bool
    probe_rounds: int
    first_pause: int  # plain steps before the first probe
    longest_pause: int  # pauses double up to this


TIMED_PROBES = ProbeSchedule(False, 4, 32, 128)
REPEAT_PROBES = ProbeSchedule(True, 3, 128, 512)
FIRST_COOLDOWN_STEPS = 16  # in which repetitions end no pause, after the first probe behind one that failed
HASH_FACTOR, HASH_MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def round_cost(num_drafts: int, draft_cost: float) -> float:
    """Time of an eager round relative to a plain step: `1 + K (row cost + draft cost)`.

    Args:
        num_drafts: K.  draft_cost: of one draft, relative to a plain step.
    """
    return 1.0 + num_drafts * (ROW_COST + draft_cost)


class RepeatedTexts:
    """The texts of a batch and whether their newest `REPEATED_TOKENS` tokens occurred before.

    The host knows all tokens that it has read, so no kernel is needed to see it.
    """

    def __init__(self) -> None:
        self.begin(())

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Take the token ids of each request: prompt, and tokens so far."""
        self._newest = [list(ids[-REPEATED_TOKENS + 1 :]) for ids in texts]
        self._seen = [set(_window_hashes(ids)) for ids in texts]
        self.share = 0.0  # of the requests that grew in the last step: those that repeat themselves

    def extend(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append the tokens of a step to each request; an empty list: the request has ended."""
        repeats = []
        # Without texts there is nothing to compare with: profiling.
        for newest, seen, ids in zip(self._newest, self._seen, emitted if self._seen else (), strict=True):
            is_repeated = False
            for token_id in ids:
                newest.append(token_id)
                del newest[:-REPEATED_TOKENS]
                key = 0
                for each in newest:
                    key = (key * HASH_FACTOR + each + 1) & HASH_MASK
                is_repeated = key in seen
                seen.add(key)
            if ids:
                repeats.append(is_repeated)
        self.share = sum(repeats) / len(repeats) if repeats else 0.0


def texts_so_far(newest: Sequence[int], prompts: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Token ids of each request at the beginning of a generation; none where only lengths matter, to profile."""
    if prompts is None:
        return []
    return [[*ids, token_id] for ids, token_id in zip(prompts, newest, strict=True)]


def _window_hashes(ids: Sequence[int]) -> list[int]:
    """A hash of each `REPEATED_TOKENS` tokens in a row: all places of a long prompt at once."""
    tokens = np.array(ids, dtype=np.uint64) + np.uint64(1)
    count = max(len(tokens) - REPEATED_TOKENS + 1, 0)
    keys = np.zeros(count, dtype=np.uint64)
    for place in range(REPEATED_TOKENS):
        keys = keys * np.uint64(HASH_FACTOR) + tokens[place : place + count]
    found: list[int] = keys.tolist()
    return found


class DraftPolicy:
    """Decides before each step whether it drafts. `always`: where it can, whether it pays or not.

    Args:
        repeats: with a drafter that looks drafts up in the texts; None: pauses end by time alone.
    """

    def __init__(self, always: bool = False, repeats: RepeatedTexts | None = None) -> None:
        self._always, self._repeats = always, repeats
        self._schedule = TIMED_PROBES if repeats is None else REPEAT_PROBES
        self.begin()

    def begin(self, texts: Sequence[Sequence[int]] = ()) -> None:
        """A generation begins: draft. texts: token ids of each request up to here, where `repeats` looks."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW_ROUNDS)  # tokens and cost of a round
        self._is_probe = self._schedule.begins_with_probe
        self._pause_left, self._next_pause = 0, self._schedule.first_pause
        self._cooldown_left, self._next_cooldown = 0, FIRST_COOLDOWN_STEPS
        self._is_at_repetition = False  # the probe began at a repetition
        if self._repeats is not None:
            self._repeats.begin(texts)

    def decide_next(self, num_drafts: int, cost: float) -> bool:
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
        self._cooldown_left = max(self._cooldown_left - 1, 0)
        if self._pause_left >= 0 and self._cooldown_left == 0 and self._repeats is not None:
            self._is_at_repetition = 1 + num_drafts * self._repeats.share >= cost * RESUME_MARGIN
            self._pause_left = -1 if self._is_at_repetition else self._pause_left
        return self._pause_left < 0

    def read(self, emitted: Sequence[Sequence[int]]) -> None:
        """Take the tokens of a step, a list for each request."""
        if self._repeats is not None:
            self._repeats.extend(emitted)

    def record(self, tokens: float, cost: float) -> None:
        """Count a round that cost more than a plain step.

        Args:
            tokens: emitted by it, mean over the requests.  cost: as in `drafts`.
        """
        if self._pause_left >= 0:
            return  # a round that was in flight when the pause began
        self._recent.append((tokens, cost))
        needed = self._schedule.probe_rounds if self._is_probe else WINDOW_ROUNDS
        if len(self._recent) < needed:
            return
        made, paid = map(sum, zip(*self._recent, strict=True))
        if made < paid * (RESUME_MARGIN if self._is_probe else 1.0):
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, self._schedule.longest_pause)
            if self._is_at_repetition:
                self._cooldown_left = self._next_cooldown
                self._next_cooldown = min(2 * self._next_cooldown, self._schedule.longest_pause)
            self._is_probe, self._is_at_repetition = True, False
            self._recent.clear()
        elif self._is_probe:
            self._is_probe, self._is_at_repetition = False, False
            self._next_pause, self._next_cooldown = self._schedule.first_pause, FIRST_COOLDOWN_STEPS
