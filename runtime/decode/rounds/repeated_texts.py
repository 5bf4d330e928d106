"""Which texts repeat themselves: the host knows all tokens that it has read, so no kernel is needed to see it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["REPEATED_TOKENS", "RepeatedTexts", "texts_so_far"]

REPEATED_TOKENS = 6  # shorter repetitions are common where nothing is copied: "on the other hand, the"


class RepeatedTexts:
    """The texts of a batch and whether their newest `REPEATED_TOKENS` tokens occurred before."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        """Take the token ids of each request: prompt, and tokens so far."""
        self._newest = [list(ids[-REPEATED_TOKENS + 1 :]) for ids in texts]
        self._seen = [set(zip(*(ids[i:] for i in range(REPEATED_TOKENS)), strict=False)) for ids in texts]
        self.share = 0.0  # of the requests that grew in the last step: those that repeat themselves

    def extend(self, emitted: Sequence[Sequence[int]]) -> None:
        """Append the tokens of a step to each request; an empty list: the request has ended."""
        repeats = []
        # Without texts there is nothing to compare with: profiling.
        for newest, seen, ids in zip(self._newest, self._seen, emitted if self._seen else (), strict=True):
            is_repeated = False
            for token_id in ids:
                window = (*newest[-REPEATED_TOKENS + 1 :], token_id)
                newest[:] = window
                is_repeated = window in seen
                seen.add(window)
            if ids:
                repeats.append(is_repeated)
        self.share = sum(repeats) / len(repeats) if repeats else 0.0


def texts_so_far(newest: Sequence[int], prompts: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Token ids of each request at the beginning of a generation; none where only lengths matter, to profile."""
    if prompts is None:
        return []
    return [[*ids, token_id] for ids, token_id in zip(prompts, newest, strict=True)]
