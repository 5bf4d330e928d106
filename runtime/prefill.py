"""Prefill: fill the cache with a prompt, chunk by chunk, and return the logits of its last token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..models.llama import Llama
from ..operation import OperationHook
from .codecs import Cache
from .step import gather_logits
from .transport import Transport

__all__ = ["CHUNK_TOKENS", "prefill", "turns_of"]

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
    chunk's attention in a layer needs nothing of the first but its keys and values there, which groups exchange.

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
    for turn in turns_of(len(token_ids), chunk_tokens, placement.num_groups, not cache.depends_on_chunks):
        own = turn[placement.group % len(turn)]
        ids = torch.tensor(token_ids[own.start : own.stop], device=device)
        positions = torch.arange(own.start, own.stop, device=device)
        kept = transport.own_tokens(len(own))
        x, partial = model.embed(ids)[kept.start : kept.stop], None
        for layer in range(model.num_layers):
            with operation("prefill", layer):
                x, q, k, v = model.pre_attention(layer, x, partial, positions)
                for chunk, kv in zip(turn, _of_groups(transport, turn, k, v), strict=True):
                    if chunk == own:
                        attn_out = cache.prefill_attention(layer, request, chunk.start, q, *kv, model.sm_scale)
                    else:
                        cache.write_prefill(layer, request, chunk.start, *kv)
                x, partial = model.post_attention(layer, x, attn_out)
                layer_sums[layer] += x[-1].sum() + partial[-1].sum(dtype=torch.float32)
        if progress is not None and turn[-1].stop < len(token_ids):
            transport.synchronize()
            progress(turn[-1].stop)
    last = transport.all_gather_group(x[-1:])[-1] if len(kept) < len(own) else x[-1:]
    x = model.reduce_residual(last, None if partial is None else partial[-1:].contiguous())
    if len(turn) == 2:
        x = transport.gather_pair(x)[1]
    return gather_logits(model, transport, x), layer_sums


def turns_of(num_tokens: int, chunk_tokens: int, num_groups: int, may_split: bool) -> list[list[range]]:
    """Which tokens are processed side by side: a chunk for each group; a last one alone is processed by both.

    Args:
        may_split: a last one may be shared as two halves.
    """
    chunks = [range(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]
    last = chunks[-1]
    if num_groups == 2 and len(chunks) % 2 and may_split and len(last) >= LEAST_SHARED:
        middle = last.start + -(-len(last) // 128) * 64
        chunks[-1:] = [range(last.start, middle), range(middle, last.stop)]
    return [chunks[first : first + num_groups] for first in range(0, len(chunks), num_groups)]


def _of_groups(transport: Transport, turn: list[range], k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [n, Hkv, D] of each chunk of a turn, this rank's of its own."""
    if len(turn) == 1:
        return [(k, v)]
    own = k.new_empty(2, max(map(len, turn)), *k.shape[1:])
    own[0, : len(k)], own[1, : len(k)] = k, v
    both = transport.gather_pair(own)
    return [(both[group, 0, : len(chunk)], both[group, 1, : len(chunk)]) for group, chunk in enumerate(turn)]
