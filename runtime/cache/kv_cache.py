"""Uncompressed KV cache of one rank: static buffers, head-major."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.torch_attention import prefill_attention, window_prefill_attention

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers, `[L, B, Hkv, N, D]` each; N = `max_context`.

    A cache class defines its layout, the bytes per token, and how tokens are appended, stored by prefill, and read.
    `sliding_windows` has the newest tokens that a token attends to in each layer, None: all; not given: all in each.
    """

    appends_exactly: ClassVar[bool] = True  # `append` stores a token as a prompt chunk does

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        sliding_windows: Sequence[int | None] = (),
    ) -> None:
        self._sliding_windows = sliding_windows or [None] * num_layers
        assert len(self._sliding_windows) == num_layers
        shape = (num_layers, batch_size, num_kv_heads, max_context, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return the bytes per cached token of one request on a rank with `num_kv_heads` KV heads."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.k.device

    @property
    def num_layers(self) -> int:
        """L, layers."""
        return self.k.shape[0]

    @property
    def batch_size(self) -> int:
        """B, requests."""
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Hkv, KV heads of this rank."""
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        """D, channels of a head."""
        return self.k.shape[4]

    @property
    def max_context(self) -> int:
        """N, capacity in tokens of each request."""
        return self.k.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.k.numel() * self.k.itemsize

    @property
    def layers(self) -> KVLayer:
        """All layers, stacked."""
        return KVLayer(self.k, self.v)

    def layer(self, layer: int) -> KVLayer:
        """Return one layer, as decode attention reads it."""
        return self.layers.select(layer)._replace(sliding_window=self._sliding_windows[layer])

    def compact(self, seq_lens: Tensor) -> None:
        """Do nothing: appended tokens stay where they are."""

    def keepable(self, num_tokens: int, is_whole: bool) -> int:
        """How many of a request's first `num_tokens` tokens can stay, so that a prompt chunk may follow them: all.

        Args:
            is_whole: the next prompt begins with all that the cache holds.
        """
        return num_tokens

    def cut(self, request: int, num_tokens: int) -> None:
        """Cut a request back to its first `num_tokens` tokens, a number that `keepable` returned: do nothing."""

    def commit(self, seq_lens: Tensor) -> None:
        """Do nothing: appended tokens stay where they are."""

    def append(self, layer: int, k: Tensor, v: Tensor, seq_lens: Tensor, is_final: bool = True) -> None:
        """Store one new token of each request.

        Args:
            k, v: [B, Hkv, D].  seq_lens: [B] integers, including the new token.
            is_final: False for a draft, which a later append to the same place may replace; `commit` then follows when
                the tokens are accepted.
        """
        positions = seq_lens - 1
        requests = torch.arange(self.batch_size, device=positions.device)
        self.k[layer, requests, :, positions] = k.to(self.k.dtype)
        self.v[layer, requests, :, positions] = v.to(self.v.dtype)

    def write_prefill(self, layer: int, request: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a prompt chunk, k, v [n, Hkv, D], at positions `[start, start + n)` of one request.

        Returns:
            Keys and values of the request so far, [Hkv, start + n, D] each (views).
        """
        stop = start + k.shape[0]
        self.k[layer, request, :, start:stop] = k.transpose(0, 1).to(self.k.dtype)
        self.v[layer, request, :, start:stop] = v.transpose(0, 1).to(self.v.dtype)
        return self.k[layer, request, :, :stop], self.v[layer, request, :, :stop]

    def copy_prompt(self, source: int, target: int) -> None:
        """Copy everything that the cache holds for one request to another, whose prompt is the same."""
        for buffer in (self.k, self.v):
            buffer[:, target] = buffer[:, source]

    def prefill_attention(
        self, layer: int, request: int, start: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, stop: int
    ) -> Tensor:
        """Store a prompt chunk as `write_prefill` does, then compute causal attention for its n_q tokens before `stop`.

        Args:
            q: [n_q, Hq, D], queries of the positions `[stop - n_q, stop)`.
            k, v: [n, Hkv, D], at positions `[start, start + n)`.
            stop: end of the tokens to read.
        Returns:
            Attention output, shape and dtype of q.
        """
        keys, values = (x[:, :stop] for x in self.write_prefill(layer, request, start, k, v))
        window = self._sliding_windows[layer]
        if window is not None:
            return window_prefill_attention(q, keys, values, sm_scale, window)
        return prefill_attention(q, keys, values, sm_scale)
