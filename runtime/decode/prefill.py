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

__all__ = ["CHUNK_TOKENS", "Turn", "prefill", "turns_of"]

# Bounds the activations (n x intermediate_size) while keeping the products large: 2048 took 12 % longer on an H200. A
# multiple of the quantised cache's blocks.
CHUNK_TOKENS = 8192
# What two groups share: of fewer tokens, launching the kernels takes longer than they do.
LEAST_SHARED = 2048


def prefill(
    model: Llama,
    cache: Cache,
    transport: Transport,
    request: int,
    token_ids: list[int],
    operation: OperationHook,
    chunk_tokens: int = CHUNK_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Process one request's prompt with full causal attention. Two groups share it, and both have all of it cached.

    Of two chunks in a row, group 0 takes the first and group 1 the second, layer by layer side by side: for the second
    chunk's attention in a layer needs nothing of the first but its keys and values there, which groups exchange. A last
    chunk alone is shared as two halves, and cached as one.

    Args:
        request: index in the batch.  token_ids: the prompt, at least one token.
        chunk_tokens: tokens at a time; a multiple of 64 with a quantised cache.
        progress: told how many tokens are done, whenever others follow.
    Returns:
        logits: [1, V] fp32 after the last token, the same on every rank.
        layer_sums: [L] fp32, not finite where this rank's activations were not.
    """
    assert token_ids
    device, placement = cache.device, transport.placement
    layer_sums = torch.zeros(model.num_layers, device=device)
    for turn in turns_of(len(token_ids), chunk_tokens, placement.num_groups):
        own = turn.shares[placement.group % len(turn.shares)]
        ids = torch.tensor(token_ids[own.start : own.stop], device=device)
        positions = torch.arange(own.start, own.stop, device=device)
        kept = transport.own_tokens(len(own))
        x, partial = model.embed(ids)[kept.start : kept.stop], None
        for layer in range(model.num_layers):
            with operation("prefill", layer):
                x, q, k, v = model.pre_attention(layer, x, partial, positions)
                for chunk, kv in zip(turn.chunks, _of_chunks(transport, turn, k, v), strict=True):
                    at = layer, request, chunk.start
                    if own.start in chunk:
                        attn_out = cache.prefill_attention(*at, q, *kv, model.sm_scale, own.stop)
                    else:
                        cache.write_prefill(*at, *kv)
                del q, k, v, kv  # nothing that is done with stays beside what the MLP takes
                x, partial = model.post_attention(layer, x, attn_out)
                layer_sums[layer] += x[-1].sum() + partial[-1].sum(dtype=torch.float32)
        if progress is not None and turn.chunks[-1].stop < len(token_ids):
            transport.synchronize()
            progress(turn.chunks[-1].stop)
    last = transport.all_gather_group(x[-1:])[-1] if len(kept) < len(own) else x[-1:]
    x = model.reduce_residual(last, None if partial is None else partial[-1:].contiguous())
    if len(turn.shares) == 2:
        x = transport.gather_pair(x)[1]
    return gather_logits(model, transport, x), layer_sums


class Turn(NamedTuple):
    """What is processed side by side."""

    chunks: list[range]  # tokens that are cached together
    shares: list[range]  # tokens of each group; a share alone is processed by both


def turns_of(num_tokens: int, chunk_tokens: int, num_groups: int) -> list[Turn]:
    """The turns of a prompt: a chunk for each group, and a last one alone as a half for each."""
    chunks = [range(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]
    turns = [Turn(of, of) for of in (chunks[at : at + num_groups] for at in range(0, len(chunks), num_groups))]
    last = chunks[-1]
    if len(turns[-1].chunks) < num_groups and len(last) >= LEAST_SHARED:
        # The first half ends where a block of the quantised cache does.
        middle = last.start + -(-len(last) // 128) * 64
        turns[-1] = Turn([last], [range(last.start, middle), range(middle, last.stop)])
    return turns


def _of_chunks(transport: Transport, turn: Turn, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [n, Hkv, D] of each chunk of a turn; k, v: this rank's, of its share."""
    if len(turn.shares) == 1:
        return [(k, v)]
    own = k.new_empty(2, max(map(len, turn.shares)), *k.shape[1:])
    own[0, : len(k)], own[1, : len(k)] = k, v
    of_chunks = transport.gather_pair(own)
    if len(turn.chunks) == 1:
        # No half is longer than the first one, so that nothing lies between them.
        of_chunks = of_chunks.transpose(0, 1).flatten(1, 2)[None]
    return [(kv[0, : len(chunk)], kv[1, : len(chunk)]) for kv, chunk in zip(of_chunks, turn.chunks, strict=True)]
