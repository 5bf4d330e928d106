"""What the cache still holds of the last generation, so that the next prompts need not be processed from their start.

Kept is what a prompt that is processed anew would write again:

- the prompts of the last generation, up to the first token that differs, as far as the cache can be cut (`keepable`);
- its answers too, if decode steps write what a prompt would write: over a cache that is not quantised, with no
  speculation. An accepted `A~` changes the keys and values of later layers, and a quantised cache cuts appended tokens
  to the range of the prompt. Such an answer is processed again as part of the next prompt.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from alspec.runtime.cache.codecs import Cache

__all__ = ["KeptPrefix", "common_prefix"]


class KeptPrefix:
    """Token ids of each request that a cache holds.

    Args:
        cache: which holds nothing yet.
        is_lossless: decode steps speculate nothing, or accept nothing.
    """

    def __init__(self, cache: Cache, is_lossless: bool) -> None:
        self._cache = cache
        self._keeps_answers = is_lossless and cache.appends_exactly
        self._ids: list[list[int]] = [[] for _ in range(cache.batch_size)]

    def forget(self) -> None:
        """The cache was written in another way, or may be wrong."""
        self._ids = [[] for _ in self._ids]

    def reusable(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each prompt that can stay in the cache: fewer than all, because its last token gives the logits."""
        reusable = []
        for ids, held in zip(prompts, self._ids, strict=True):
            common = common_prefix(ids, held)
            kept = min(common, len(ids) - 1)
            reusable.append(self._cache.keepable(kept, is_whole=common == len(held)))
        return reusable

    def cut(self, request: int, num_tokens: int) -> None:
        """Cut a request back to some of its `reusable` tokens, before the rest of a prompt is written behind them."""
        self._cache.cut(request, num_tokens)
        # If this prompt is never finished, only what stays in any case is left.
        kept = self._cache.keepable(num_tokens, is_whole=False)
        self._ids[request] = self._ids[request][:kept]

    def wrote_prompt(self, request: int, ids: Sequence[int]) -> None:
        """The cache holds this prompt now."""
        self._ids[request] = list(ids)

    def appended(self, request: int, token_ids: Sequence[int]) -> None:
        """A decode step has written these tokens behind what the cache held: the newest one, and accepted drafts."""
        if self._keeps_answers:
            self._ids[request] += token_ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    # Comparing slices is much faster than comparing tokens one by one.
    return bisect.bisect_left(range(min(len(a), len(b))), True, key=lambda index: a[: index + 1] != b[: index + 1])
