"""What the cache still holds of the last generation, so that the next prompts need not be processed from their start.

Kept is what a prompt that is processed anew would write again:

- the prompts of the last generation, up to the first token that differs, as far as the cache can be cut (`keepable`);
- its answers too, if decode steps write what a prompt would write: over a cache that is not quantised, with no
  speculation. An accepted `A~` changes the keys and values of later layers, and a quantised cache cuts appended tokens
  to the range of the prompt. Such an answer is processed again as part of the next prompt.

Passes that append rows (rounds/row_append.py) write a prompt's new tokens as decode steps do. With them a quantised
cache keeps answers, too. The prompt may differ from what is held within the newest block, which is not quantised yet:
those tokens are replaced. So a text keeps its cache if it ended in the middle of a round, whose accepted drafts the
next prompt does not have.

Nothing is kept for a prompt of another length, if its rotary frequencies depend on the length and differ.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.runtime.cache.codecs import Cache

__all__ = ["KeptPrefix", "common_prefix"]


class KeptPrefix:
    """Token ids of each request that a cache holds.

    Args:
        cache: which holds nothing yet.
        is_lossless: decode steps speculate nothing, or accept nothing.
        max_appended: most tokens that are appended behind any token; 0: a prompt pass processes them.
        frequency_length: of the model, see `RopeScaling.frequency_length`.
    """

    def __init__(
        self,
        cache: Cache,
        is_lossless: bool,
        max_appended: int = 0,
        frequency_length: Callable[[int], int] = lambda text_length: 0,
    ) -> None:
        self._cache, self._max_appended, self._frequency_length = cache, max_appended, frequency_length
        self._keeps_answers = is_lossless and (cache.appends_exactly or max_appended > 0)
        self._ids: list[list[int]] = [[] for _ in range(cache.batch_size)]
        self._answers = [0] * cache.batch_size  # where the answer of each request begins
        self._frequency_lengths = [0] * cache.batch_size  # of the prompts

    def forget(self) -> None:
        """The cache was written in another way, or may be wrong."""
        self._ids = [[] for _ in self._ids]

    def reusable(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Tokens of each prompt that can stay in the cache: fewer than all, because its last token gives the logits."""
        reusable = []
        for request, (ids, held) in enumerate(zip(prompts, self._ids, strict=True)):
            has_same = self._frequency_length(len(ids)) == self._frequency_lengths[request]
            common = common_prefix(ids, held) if has_same else 0
            kept = min(common, len(ids) - 1)
            appends = self._in_tail(request, kept) and self.appends(kept, len(ids))
            if not appends:
                kept = self._cache.keepable(kept, is_whole=common == len(held))
            reusable.append(kept)
        return reusable

    def appends(self, kept: int, num_tokens: int) -> bool:
        """Whether passes of rows may append what a prompt of `num_tokens` tokens has behind the kept ones.

        A row has the rotary frequencies of a text that ends with it; they must be those of the prompt.
        """
        first, last = map(self._frequency_length, (kept + 1, num_tokens))
        return num_tokens - kept <= self._max_appended and first == last

    def _in_tail(self, request: int, num_tokens: int) -> bool:
        """Whether tokens can be appended behind the first `num_tokens` of those that are held.

        Tokens of the answer can be replaced in the block of the last one: they have left no trace in scales, and no
        step that was launched ahead has left that block.
        """
        held = len(self._ids[request])
        if num_tokens == held:
            return True
        is_in_answer = num_tokens >= self._answers[request]
        return is_in_answer and not self._cache.appends_exactly and num_tokens // BLOCK == held // BLOCK

    def cut(self, request: int, num_tokens: int) -> None:
        """Cut a request back to some of its `reusable` tokens, before the rest of a prompt is written behind them."""
        if not self._in_tail(request, num_tokens):
            self._cache.cut(request, num_tokens)
        # If this prompt is never finished, only what stays in any case is left.
        kept = self._cache.keepable(num_tokens, is_whole=False)
        self._ids[request] = self._ids[request][:kept]

    def interrupted(self) -> None:
        """Keep whole blocks. Of two steps in flight the second may have replaced the tail by the next block's."""
        self._ids = [ids[: self._cache.keepable(len(ids), is_whole=False)] for ids in self._ids]

    def wrote_prompt(self, request: int, ids: Sequence[int], text_length: int | None = None) -> None:
        """The cache holds this prompt now. text_length: as of `prefill`."""
        self._ids[request] = list(ids)
        self._answers[request] = len(ids)
        self._frequency_lengths[request] = self._frequency_length(text_length or len(ids))

    def appended(self, request: int, token_ids: Sequence[int]) -> None:
        """A decode step has written these tokens behind what the cache held: the newest one, and accepted drafts."""
        if self._keeps_answers:
            self._ids[request] += token_ids


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    # Comparing slices is much faster than comparing tokens one by one.
    return bisect.bisect_left(range(min(len(a), len(b))), True, key=lambda index: a[: index + 1] != b[: index + 1])
