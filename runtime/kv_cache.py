"""The uncompressed KV cache of one rank: static buffers, head-major."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every layer, `[L, B, Hkv, N, D]` each, with room for the longest context asked for.

    A codec owns layout and bytes per token, append, prefill write, and (with the kernels of its layout) the reading.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, batch_size, num_kv_heads, max_context, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one cached token of one request takes on a rank with `num_kv_heads` KV heads."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def batch_size(self) -> int:
        """B: requests."""
        return self.k.shape[1]

    @property
    def max_context(self) -> int:
        """N: tokens each request has room for."""
        return self.k.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.k.numel() * self.k.itemsize

    def append(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Store one new token for each request: k, v [B, Hkv, D] at positions [B] (integers, on the cache's device)."""
        requests = torch.arange(self.batch_size, device=positions.device)
        self.k[layer, requests, :, positions] = k.to(self.k.dtype)
        self.v[layer, requests, :, positions] = v.to(self.v.dtype)

    def write_prefill(self, layer: int, request: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a chunk of a prompt: k, v [n, Hkv, D] at positions `[start, start + n)` of one request.

        Returns:
            Keys and values of the request so far, [Hkv, start + n, D] each (views).
        """
        stop = start + k.shape[0]
        self.k[layer, request, :, start:stop] = k.transpose(0, 1).to(self.k.dtype)
        self.v[layer, request, :, start:stop] = v.transpose(0, 1).to(self.v.dtype)
        return self.k[layer, request, :, :stop], self.v[layer, request, :, :stop]
