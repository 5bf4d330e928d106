"""Which tokens the speculative attention `A~` reads: the sink, the recent window, and blocks that are recalled.

Attention is steady from token to token: the blocks that were heavy for the last token are heavy for this one, too. The
full attention, which verifies `A~`, reads everything and so knows the *mass* of every block of 64 tokens:

    mass(block) = max over the query heads of a KV head of sum_{t in block} w_t,   w = softmax weights over all tokens

The heaviest blocks between sink and window are the *recall list* of a KV head, which `A~` of the next token also reads.
A list is chosen from one token's masses: a running mean over tokens is accepted for less than one point more layers,
and every rank of a pair would have to follow it. Ours.

In a layer with a sliding window of W tokens, the position p attends to the positions above p - W. `A~` then reads those
tokens of sink, recent window and recalled blocks that lie in the sliding window.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "CHUNK_SIZES",
    "KV_TILE",
    "MAX_RECALL_BLOCKS",
    "block_masses",
    "first_visible",
    "predictor_ranges",
    "first_lossy_length",
    "recall_lists",
    "recalled_blocks",
]

KV_TILE = 64
"""Tokens; the window starts on a multiple of it."""
CHUNK_SIZES = (128, 256, 512, 1024)
"""Supported values of S, tokens."""
MAX_RECALL_BLOCKS = 128
"""Most blocks of a recall list."""


def first_lossy_length(chunk_size: int, recall_blocks: int = 0) -> int:
    """Smallest number of cached tokens at which `A~` leaves some out: `2 S + 64 + 64 M`.

    With fewer tokens `A~ = A`, but for the token at which a block leaves the window: no list has it yet.
    """
    return 2 * chunk_size + KV_TILE * (1 + recall_blocks)


def first_visible(seq_lens: Tensor, sliding_window: int | Tensor | None) -> Tensor:
    """First token that a request's newest token attends to: `max(n - W, 0)`; 0 without a sliding window.

    Args:
        seq_lens: any shape, integers: tokens in the cache (n), the current one included.
        sliding_window: W, or one for each layer in a shape that broadcasts; None: all tokens are visible.
    """
    return torch.zeros_like(seq_lens) if sliding_window is None else (seq_lens - sliding_window).clamp(min=0)


def predictor_ranges(
    seq_lens: Tensor, chunk_size: int, sliding_window: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token ranges of the speculative attention: `[0, sink_end)` and `[window_start, seq_len)`.

        sink_end     = max(min(S, n), first)
        window_start = max(sink_end, floor(max(n - S, 0) / 64) * 64)
        first        = floor(max(n - W, 0) / 64) * 64, 0 without a sliding window

    The window starts on a KV tile, so it holds S .. S + 63 tokens. The ranges never overlap: for `n < 2 S + 64` they
    meet, cover every token once, and `A~ = A`. If `n <= S`, the window is empty and both results are `n`.

    With a sliding window of W tokens, tokens in front of `first_visible` are read by nobody; those between sink and
    window are whole blocks of 64 tokens, each with at least one visible token.

    Source: Attention-Level Speculation, section 3.1 (first and last S tokens); the widening to whole tiles is ours.

    Args:
        seq_lens: any shape, int32 or int64: tokens in the cache (n), the current one included.
        chunk_size: S, a positive multiple of `KV_TILE`.
        sliding_window: as for `first_visible`.

    Returns:
        sink_end, window_start: shape, dtype and device of `seq_lens`, broadcast with `sliding_window`.

    Raises:
        ValueError: `seq_lens` is not int32 or int64, or `chunk_size` is not a positive multiple of `KV_TILE`.

    """
    if seq_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seq_lens: expected int32 or int64, found {seq_lens.dtype}")
    if chunk_size <= 0 or chunk_size % KV_TILE != 0:
        raise ValueError(f"chunk_size: expected a positive multiple of {KV_TILE}, found {chunk_size}")
    first = torch.div(first_visible(seq_lens, sliding_window), KV_TILE, rounding_mode="floor") * KV_TILE
    sink_end = torch.maximum(seq_lens.clamp(max=chunk_size), first)
    window_tile = torch.div((seq_lens - chunk_size).clamp(min=0), KV_TILE, rounding_mode="floor")
    return sink_end, torch.maximum(sink_end, window_tile * KV_TILE)


def block_masses(weights: Tensor, blocks: Tensor, num_blocks: int) -> Tensor:
    """Mass of each block for a KV head: the largest sum of softmax weights that one of its query heads has there.

    Args:
        weights: [..., G, n], of the G query heads of a KV head over n columns.
        blocks: [n] integers, the block of each column.
        num_blocks: NB.
    Returns:
        [..., NB] in the dtype of `weights`.
    """
    # A product, not `index_add`, whose order of additions changes from run to run on a GPU.
    is_in_block = blocks[:, None] == torch.arange(num_blocks, device=weights.device)
    return (weights @ is_in_block.to(weights.dtype)).amax(-2)


def recalled_blocks(mass: Tensor, sink_end: Tensor, window_start: Tensor, count: int) -> Tensor:
    """The heaviest `count` blocks of 64 tokens that lie between sink and window; of equal ones the lower.

    Between sink and window there are whole blocks only, because both ends are multiples of 64 there.

    Args:
        mass: [..., NB], masses of one token's full attention.
        sink_end, window_start: [...] or shapes that broadcast to it, from `predictor_ranges` at that token.
        count: most blocks of each row.
    Returns:
        [..., NB] bool; fewer than `count` where there are fewer blocks.
    """
    first = torch.arange(mass.shape[-1], device=mass.device) * KV_TILE
    is_between = (first >= sink_end[..., None]) & (first + KV_TILE <= window_start[..., None])
    is_between = is_between.expand(mass.shape)
    order = mass.masked_fill(~is_between, -1.0).sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(is_between).scatter(-1, order[..., :count], True)
    return chosen & is_between


def recall_lists(mass: Tensor, sink_end: Tensor, window_start: Tensor, count: int) -> Tensor:
    """`recalled_blocks` as lists: the blocks in ascending order, then -1.

    Args:
        As for `recalled_blocks`.
    Returns:
        [..., count] int32.
    """
    chosen = recalled_blocks(mass, sink_end, window_start, count)
    num_blocks = mass.shape[-1]
    index = torch.arange(num_blocks, device=mass.device).expand(chosen.shape)
    ascending = index.masked_fill(~chosen, num_blocks).sort(dim=-1).values[..., :count]
    lists = ascending.new_full((*chosen.shape[:-1], count), -1)
    lists[..., : ascending.shape[-1]] = ascending.masked_fill(ascending == num_blocks, -1)
    return lists.int()
