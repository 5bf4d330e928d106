"""KV cache of one rank whose layers with a sliding window are rings of the newest tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.torch_attention import window_prefill_attention
from alspec.runtime.cache.kv_cache import KVCache

__all__ = ["WindowCache"]


class WindowCache:
    """A `KVCache` of the layers that attend to all tokens, and one of W tokens for the layers with a window of W.

    Methods and properties are those of `KVCache`. A ring keeps no token older than its window, and capturing a step
    overwrites some: a prompt always begins anew.
    """

    appends_exactly: ClassVar[bool] = True

    def __init__(self, full_layers: tuple[int, ...], num_layers: int, full: KVCache, rings: KVCache) -> None:
        self._full, self._rings = full, rings
        self.num_layers = num_layers
        # Layer -> (is a ring, index in the cache that holds it).
        self._places, counts = [], [0, 0]
        for layer in range(num_layers):
            is_ring = layer not in full_layers
            self._places.append((is_ring, counts[is_ring]))
            counts[is_ring] += 1
        assert counts == [full.num_layers, rings.num_layers]
        self.batch_size, self.num_kv_heads, self.head_dim = rings.batch_size, rings.num_kv_heads, rings.head_dim
        self.max_context = full.max_context

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._rings.device

    @property
    def window(self) -> int:
        """W, tokens of a ring."""
        return self._rings.max_context

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._full.num_bytes + self._rings.num_bytes

    def layer(self, layer: int) -> KVLayer:
        """Return one layer, as decode attention reads it."""
        is_ring, index = self._places[layer]
        if not is_ring:
            return self._full.layer(index)
        ring = self._rings.layer(index)
        return KVLayer(ring.k, ring.v, is_ring=True)

    def keepable(self, num_tokens: int, is_whole: bool) -> int:
        """As `KVCache.keepable`: nothing stays."""
        return 0

    def cut(self, request: int, num_tokens: int) -> None:
        """As `KVCache.cut`: do nothing."""

    def copy_prompt(self, source: int, target: int) -> None:
        """As `KVCache.copy_prompt`."""
        for cache in (self._full, self._rings):
            cache.copy_prompt(source, target)

    def compact(self, seq_lens: Tensor) -> None:
        """Do nothing: appended tokens stay where they are."""

    def commit(self, seq_lens: Tensor) -> None:
        """Do nothing: appended tokens stay where they are."""

    def append(self, layer: int, k: Tensor, v: Tensor, seq_lens: Tensor, is_final: bool = True) -> None:
        """As `KVCache.append`, without drafts: in a ring they would replace tokens that are still read."""
        assert is_final, "a ring takes no drafts"
        is_ring, index = self._places[layer]
        if is_ring:
            self._rings.append(index, k, v, (seq_lens - 1) % self.window + 1)
        else:
            self._full.append(index, k, v, seq_lens)

    def write_prefill(self, layer: int, request: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a prompt chunk as `KVCache.write_prefill` does.

        Returns:
            Keys and values of the chunk and, in a ring, of up to W - 1 tokens before it, else of all tokens before it.
        """
        is_ring, index = self._places[layer]
        if not is_ring:
            return self._full.write_prefill(index, request, start, k, v)
        ring, stop = self._rings.layer(index), start + len(k)
        before = self._slots(start - self.window + 1, start)
        kept = self._slots(max(start, stop - self.window), stop)
        found = []
        for buffer, new in ((ring.k[request], k), (ring.v[request], v)):
            chunk = new.transpose(0, 1).to(buffer.dtype)
            found.append(torch.cat([buffer[:, before], chunk], dim=1))
            buffer[:, kept] = chunk[:, len(k) - len(kept) :]
        return found[0], found[1]

    def _slots(self, start: int, stop: int) -> Tensor:
        """Ring slots of the positions `[start, stop)`; negative positions are left out."""
        return torch.arange(max(0, start), stop, device=self.device) % self.window

    def prefill_attention(
        self, layer: int, request: int, start: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, stop: int
    ) -> Tensor:
        """As `KVCache.prefill_attention`."""
        is_ring, index = self._places[layer]
        if not is_ring:
            return self._full.prefill_attention(index, request, start, q, k, v, sm_scale, stop)
        keys, values = self.write_prefill(layer, request, start, k, v)
        num_tokens = keys.shape[1] - (start + len(k) - stop)
        return window_prefill_attention(q, keys[:, :num_tokens], values[:, :num_tokens], sm_scale, self.window)
