"""Prefill: fill the cache with a prompt, chunk by chunk, and return the logits of its last token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.eager_step import gather_logits
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.distributed.transport import Transport

__all__ = ["CHUNK_TOKENS", "PromptPart", "prefill", "prompt_parts"]

# Bounds the activations (n x intermediate_size) and keeps the products large; a multiple of a quantised cache's blocks.
CHUNK_TOKENS = 8192
# Two groups share a prompt chunk of at least this many tokens. With fewer, the launches take longer than the kernels.
MIN_SHARED_TOKENS = 2048


def prefill(
    model: Llama,
    cache: Cache,
    transport: Transport,
    request: int,
    token_ids: list[int],
    operation: OperationHook,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int], None] | None = None,
    start: int = 0,
    last_queries: Tensor | None = None,
    text_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Process one request's prompt with full causal attention. Two groups share the work; both cache all of it.

    Group 0 computes the first and group 1 the second of two prompt chunks, both at the same layer. In each layer the
    groups exchange keys and values, because the attention of the second chunk reads those of the first chunk. A single
    last chunk is split into two halves for the groups, but it is cached as one chunk.

    Args:
        request: index in the batch.  token_ids: the prompt, at least one token.
        chunk_tokens: tokens at a time; a multiple of 64 with a quantised cache.
        progress: called with the number of tokens done, while others follow.
        start: tokens of the prompt that the cache holds already, fewer than all. Prompt chunks begin behind them; a
            multiple of 64 with a quantised cache.
        last_queries: [L, Hq, D], written: queries of the last token.
        text_length: tokens of the text that the prompt is the beginning of, for rotary frequencies; None: it is all.
    Returns:
        logits: [1, V] fp32 after the last token, the same on every rank.
        layer_sums: [L] fp32, not finite where this rank's activations were not.
    """
    assert start < len(token_ids)
    device, placement = cache.device, transport.placement
    layer_sums = torch.zeros(model.num_layers, device=device)
    text_length = text_length or len(token_ids)
    for part in prompt_parts(len(token_ids), chunk_tokens, placement.num_groups, start):
        own = part.shares[placement.group % len(part.shares)]
        ids = torch.tensor(token_ids[own.start : own.stop], device=device)
        positions = torch.arange(own.start, own.stop, device=device)
        kept = transport.own_tokens(len(own))
        x, partial = model.embed(ids)[kept.start : kept.stop], None
        for layer in range(model.num_layers):
            with operation("prefill", layer):
                x, q, k, v = model.pre_attention(layer, x, partial, positions, text_length)
                for chunk, kv in zip(part.chunks, _of_chunks(transport, part, k, v), strict=True):
                    at = layer, request, chunk.start
                    if own.start in chunk:
                        attn_out = cache.prefill_attention(*at, q, *kv, model.sm_scale, own.stop)
                    else:
                        cache.write_prefill(*at, *kv)
                if last_queries is not None:
                    last_queries[layer] = q[-1]
                del q, k, v, kv  # free them before the MLP allocates
                x, partial = model.post_attention(layer, x, attn_out)
                layer_sums[layer] += x[-1].sum() + partial[-1].sum(dtype=torch.float32)
        if progress is not None and part.chunks[-1].stop < len(token_ids):
            transport.synchronize()
            progress(part.chunks[-1].stop)
    last = transport.all_gather_group(x[-1:])[-1] if len(kept) < len(own) else x[-1:]
    x = model.reduce_residual(last, None if partial is None else partial[-1:].contiguous())
    if len(part.shares) == 2:
        x = transport.gather_pair(x)[1]
        if last_queries is not None:
            last_queries.copy_(transport.gather_pair(last_queries)[1])
    return gather_logits(model, transport, x), layer_sums


class PromptPart(NamedTuple):
    """Tokens that the groups process side by side."""

    chunks: list[range]  # tokens that are cached together
    shares: list[range]  # tokens of each group; both groups process a single share


def prompt_parts(num_tokens: int, chunk_tokens: int, num_groups: int, start: int = 0) -> list[PromptPart]:
    """Divide the tokens of a prompt from `start` on into parts.

    A part is one prompt chunk per group, or half of the last chunk if only one remains.
    """
    chunks = [range(at, min(at + chunk_tokens, num_tokens)) for at in range(start, num_tokens, chunk_tokens)]
    by_group = [chunks[at : at + num_groups] for at in range(0, len(chunks), num_groups)]
    parts = [PromptPart(each, each) for each in by_group]
    last = chunks[-1]
    if len(parts[-1].chunks) < num_groups and len(last) >= MIN_SHARED_TOKENS:
        # The first half ends at a block boundary of a quantised cache.
        middle = last.start + -(-len(last) // 128) * 64
        parts[-1] = PromptPart([last], [range(last.start, middle), range(middle, last.stop)])
    return parts


def _of_chunks(transport: Transport, part: PromptPart, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [n, Hkv, D] of each chunk of a part, from this rank's k and v of its share."""
    if len(part.shares) == 1:
        return [(k, v)]
    own = k.new_empty(2, max(map(len, part.shares)), *k.shape[1:])
    own[0, : len(k)], own[1, : len(k)] = k, v
    of_chunks = transport.gather_pair(own)
    if len(part.chunks) == 1:
        # The first half is the longest, so the halves lie side by side.
        of_chunks = of_chunks.transpose(0, 1).flatten(1, 2)[None]
    return [(kv[0, : len(chunk)], kv[1, : len(chunk)]) for kv, chunk in zip(of_chunks, part.chunks, strict=True)]
