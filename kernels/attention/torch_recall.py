"""Recalled blocks of decode attention in PyTorch operators, on CPU tensors; see recall.py and torch_attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.attention.torch_attention import attend_tokens, decode_weights
from alspec.predictor import KV_TILE, predictor_ranges
from alspec.sas import Softmax

__all__ = ["rest_block_lse", "recalled_attention"]


def recalled_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, lists: Tensor, sm_scale: float, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """The partial of `A~` over recalled blocks.

    Args:
        q: [B, Hq, D].  k_cache, v_cache: [B, Hkv, N, D].  seq_lens: [B].
        lists: [B, Hkv, M] int32, blocks of 64 tokens, then -1.
    Returns:
        o: [B, Hq, D] fp32.  lse: [B, Hq] fp32, base 2; -inf without blocks.
    """
    (batch_size, num_kv_heads, _), num_tokens = lists.shape, KV_TILE
    outs, sums = [], []
    for b, n in enumerate(seq_lens.tolist()):
        for head, rows in enumerate(q[b].unflatten(0, (num_kv_heads, -1))):
            blocks = lists[b, head][lists[b, head] >= 0].long()
            tokens = (blocks[:, None] * num_tokens + torch.arange(num_tokens)).flatten()
            o, lse = attend_tokens(
                rows, k_cache[b, head : head + 1, tokens], v_cache[b, head : head + 1, tokens], sm_scale, softmax, n
            )
            outs.append(o)
            sums.append(lse)
    return torch.cat(outs).view(q.shape), torch.cat(sums).view(batch_size, -1)


def rest_block_lse(
    q: Tensor, k_cache: Tensor, seq_lens: Tensor, chunk_size: int, sm_scale: float, softmax: Softmax, block_lse: Tensor
) -> None:
    """Write log2 of the weights of each block between sink and window.

    Args:
        q: [B, Hq, D].  k_cache: [B, Hkv, N, D].  seq_lens: [B].  chunk_size: S.
        block_lse: [B, Hkv, NB, 4, Hq / Hkv] fp32; row 0 of a block is written.
    """
    sink_end, window_start = (ends.tolist() for ends in predictor_ranges(seq_lens, chunk_size))
    for b, (start, stop, n) in enumerate(zip(sink_end, window_start, seq_lens.tolist(), strict=True)):
        if start < stop:
            weights, lse = decode_weights(q[b], k_cache[b, :, start:stop], sm_scale, softmax, n)
            of_blocks = weights.unflatten(-1, (-1, KV_TILE)).sum(-1).log2() + lse[..., None]  # [Hkv, G, blocks]
            block_lse[b, :, start // KV_TILE : stop // KV_TILE, 0] = of_blocks.transpose(1, 2)
