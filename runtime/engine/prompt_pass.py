"""Prompts of one generation: each is processed once, behind what the cache still holds of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.generation import Generation
from alspec.runtime.engine.kept_prefix import KeptPrefix

__all__ = ["appends_prompt", "process_again", "process_prompts"]


def appends_prompt(prefix: KeptPrefix, generation: Generation) -> bool:
    """Whether passes of several rows process what a single prompt has behind its kept tokens."""
    if len(generation.requests) > 1:
        return False
    (request,), (kept,) = generation.requests, generation.reused_tokens
    return kept > 0 and prefix.appends(kept, len(request.prompt_ids))


def process_prompts(
    model: Llama,
    cache: Cache,
    kept: KeptPrefix,
    transport: Transport,
    generation: Generation,
    operation: OperationHook,
    progress: Callable[[int], None] | None,
    last_queries: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Process all prompts of a generation into the cache.

    Args:
        kept: cut to the tokens that are reused; updated.
        progress: called now and then with the prompt tokens done so far.
        last_queries: [L, B, Hq, D], written: queries of each prompt's last token.
    Returns:
        Logits after each prompt [B, V], and what `choose_tokens` takes of the layers, summed over the prompts.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    done = 0
    for index, request in enumerate(generation.requests):
        if progress is not None:
            progress(done)
        in_prompt = None if progress is None else lambda tokens, before=done: progress(before + tokens)
        ids, start = request.prompt_ids, generation.reused_tokens[index]
        first_answer = index - index % generation.num_answers
        if index > first_answer:  # another answer to the same prompt
            cache.copy_prompt(first_answer, index)
            parts.append(parts[first_answer])
            if last_queries is not None:
                last_queries[:, index] = last_queries[:, first_answer]
        else:
            queries = None if last_queries is None else last_queries[:, index]
            parts.append(
                prefill(
                    model, cache, transport, index, ids, operation, progress=in_prompt, start=start,
                    last_queries=queries,
                )
            )  # fmt: skip
        kept.wrote_prompt(index, ids)
        done += len(ids)
    logits, layer_sums = zip(*parts, strict=True)
    return torch.cat(logits), torch.stack(layer_sums).sum(0)


def process_again(
    model: Llama,
    cache: Cache,
    kept: KeptPrefix,
    transport: Transport,
    generation: Generation,
    operation: OperationHook,
    last_queries: Tensor | None = None,
) -> None:
    """Process the texts that have become longer than the short context, with the frequencies of longer texts.

    The newest token of each is left to a decode step. Args as of `process_prompts`.
    """
    for index in generation.crossing:
        request = generation.requests[index]
        ids = request.text_ids[:-1]
        kept.cut(index, 0)
        queries = None if last_queries is None else last_queries[:, index]
        prefill(
            model, cache, transport, index, ids, operation, last_queries=queries, text_length=request.seq_len
        )  # fmt: skip
        kept.wrote_prompt(index, ids, request.seq_len)
