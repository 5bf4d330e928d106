"""Recalled blocks of decode attention in PyTorch operators, on CPU tensors; see recall.py and torch_attention.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.attention.torch_attention import attend_tokens, decode_weights
from alspec.predictor import KV_TILE, first_visible, predictor_ranges
from alspec.sas import Softmax

__all__ = ["rest_block_lse", "recalled_attention"]


def recalled_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    lists: Tensor,
    sm_scale: float,
    softmax: Softmax,
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The partial of `A~` over recalled blocks.

    Args:
        q: [B, Hq, D].  k_cache, v_cache: [B, Hkv, N, D].  seq_lens: [B].
        lists: [B, Hkv, M] int32, blocks of 64 tokens, then -1.
        sliding_window: tokens in front of it are not read.
    Returns:
        o: [B, Hq, D] fp32.  lse: [B, Hq] fp32, base 2; -inf without blocks.
    """
    (batch_size, num_kv_heads, _), num_tokens = lists.shape, KV_TILE
    outs, sums = [], []
    first = first_visible(seq_lens, sliding_window).tolist()
    for b, n in enumerate(seq_lens.tolist()):
        for head, rows in enumerate(q[b].unflatten(0, (num_kv_heads, -1))):
            blocks = lists[b, head][lists[b, head] >= 0].long()
            tokens = (blocks[:, None] * num_tokens + torch.arange(num_tokens)).flatten()
            tokens = tokens[tokens >= first[b]]
            o, lse = attend_tokens(
                rows, k_cache[b, head : head + 1, tokens], v_cache[b, head : head + 1, tokens], sm_scale, softmax, n
            )
            outs.append(o)
            sums.append(lse)
    return torch.cat(outs).view(q.shape), torch.cat(sums).view(batch_size, -1)


def rest_block_lse(
    q: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    chunk_size: int,
    sm_scale: float,
    softmax: Softmax,
    block_lse: Tensor,
    sliding_window: int | None = None,
) -> None:
    """Write log2 of the weights of each block between sink and window.

    Args:
        q: [B, Hq, D].  k_cache: [B, Hkv, N, D].  seq_lens: [B].  chunk_size: S.
        block_lse: [B, Hkv, NB, 4, Hq / Hkv] fp32; row 0 of a block is written.
    """
    ends = *predictor_ranges(seq_lens, chunk_size, sliding_window), first_visible(seq_lens, sliding_window), seq_lens
    for b, (start, stop, first, n) in enumerate(zip(*(each.tolist() for each in ends), strict=True)):
        if start < stop:
            hidden = max(0, first - start)  # fewer than a block
            weights, lse = decode_weights(q[b], k_cache[b, :, start + hidden : stop], sm_scale, softmax, n)
            sums = F.pad(weights, (hidden, 0)).unflatten(-1, (-1, KV_TILE)).sum(-1)  # [Hkv, G, blocks]
            of_blocks = sums.log2() + lse[..., None]
            block_lse[b, :, start // KV_TILE : stop // KV_TILE, 0] = of_blocks.transpose(1, 2)
