"""Which tokens the speculative attention `A~` reads: the sink and the recent window."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK_SIZES", "KV_TILE", "predictor_ranges", "first_lossy_length"]

KV_TILE = 64
"""Tokens; the window starts on a multiple of it."""
CHUNK_SIZES = (128, 256, 512)
"""Supported values of S, tokens."""


def first_lossy_length(chunk_size: int) -> int:
    """Smallest number of cached tokens at which `A~` leaves some out: `2 S + 64`. With fewer tokens `A~ = A`."""
    return 2 * chunk_size + KV_TILE


def predictor_ranges(seq_lens: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Token ranges of the speculative attention: `[0, sink_end)` and `[window_start, seq_len)`.

        sink_end     = min(S, n)
        window_start = max(sink_end, floor(max(n - S, 0) / 64) * 64)

    The window starts on a KV tile, so it holds S .. S + 63 tokens. The ranges never overlap: for `n < 2 S + 64` they
    meet, cover every token once, and `A~ = A`. If `n <= S`, the window is empty and both results are `n`.

    Source: Attention-Level Speculation, section 3.1 (first and last S tokens); the widening to whole tiles is ours.

    Args:
        seq_lens: any shape, int32 or int64: tokens in the cache (n), the current one included.
        chunk_size: S, a positive multiple of `KV_TILE`.

    Returns:
        sink_end, window_start: shape, dtype and device of `seq_lens`.

    Raises:
        ValueError: `seq_lens` is not int32 or int64, or `chunk_size` is not a positive multiple of `KV_TILE`.

    """
    if seq_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seq_lens: expected int32 or int64, found {seq_lens.dtype}")
    if chunk_size <= 0 or chunk_size % KV_TILE != 0:
        raise ValueError(f"chunk_size: expected a positive multiple of {KV_TILE}, found {chunk_size}")
    sink_end = seq_lens.clamp(max=chunk_size)
    window_tile = torch.div((seq_lens - chunk_size).clamp(min=0), KV_TILE, rounding_mode="floor")
    return sink_end, torch.maximum(sink_end, window_tile * KV_TILE)
