"""Prompts of one generation: each is processed once, behind what the cache still holds of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.generation import Generation
from alspec.runtime.engine.kept_prefix import KeptPrefix

__all__ = ["PromptPass", "appends_prompt"]


def appends_prompt(prefix: KeptPrefix, generation: Generation) -> bool:
    """Whether passes of several rows process what a single prompt has behind its kept tokens."""
    if len(generation.requests) > 1:
        return False
    (request,), (kept,) = generation.requests, generation.reused_tokens
    return kept > 0 and prefix.appends(kept, len(request.prompt_ids))


@dataclass(frozen=True)
class PromptPass:
    """Processes the prompts of a generation into the cache.

    Args:
        kept: cut to the tokens that are reused; updated.
        last_queries: [L, B, Hq, D], written: queries of the last token of each text that is processed.
    """

    model: Llama
    cache: Cache
    kept: KeptPrefix
    transport: Transport
    operation: OperationHook
    last_queries: Tensor | None = None

    def process(self, generation: Generation, progress: Callable[[int], None] | None = None) -> tuple[Tensor, Tensor]:
        """Process all prompts.

        Args:
            progress: called now and then with the prompt tokens done so far.
        Returns:
            Logits after each prompt [B, V], and what `choose_tokens` takes of the layers, summed over the prompts.
        """
        parts: list[tuple[Tensor, Tensor]] = []
        done = 0
        for index, request in enumerate(generation.requests):
            if progress is not None:
                progress(done)
            in_prompt = None if progress is None else lambda tokens, before=done: progress(before + tokens)
            first_answer = index - index % generation.num_answers
            if index > first_answer:  # another answer to the same prompt
                self.cache.copy_prompt(first_answer, index)
                parts.append(parts[first_answer])
                if self.last_queries is not None:
                    self.last_queries[:, index] = self.last_queries[:, first_answer]
                self.kept.wrote_prompt(index, request.prompt_ids)
            else:
                parts.append(
                    self._prefill(
                        index, request.prompt_ids, len(request.prompt_ids), generation.reused_tokens[index], in_prompt
                    )
                )
            done += len(request.prompt_ids)
        logits, layer_sums = zip(*parts, strict=True)
        return torch.cat(logits), torch.stack(layer_sums).sum(0)

    def process_again(self, generation: Generation) -> None:
        """Process the texts that have become longer than the short context, with the frequencies of longer texts.

        The newest token of each is left to a decode step.
        """
        for index in generation.crossing:
            request = generation.requests[index]
            self.kept.cut(index, 0)
            self._prefill(index, request.text_ids[:-1], request.seq_len)

    def _prefill(
        self,
        index: int,
        ids: list[int],
        text_length: int,
        start: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Process the tokens of one request from `start` on. text_length: as of `prefill`."""
        queries = None if self.last_queries is None else self.last_queries[:, index]
        found = prefill(
            self.model, self.cache, self.transport, index, ids, self.operation, progress=progress, start=start,
            last_queries=queries, text_length=text_length,
        )  # fmt: skip
        self.kept.wrote_prompt(index, ids, text_length)
        return found
