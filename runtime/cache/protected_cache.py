"""KV cache of one rank whose first and last layers are uncompressed, and whose other layers are quantised."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import CacheLayer
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.cache.quantised_cache import QuantisedCache

__all__ = ["ProtectedCache"]


class ProtectedCache:
    """A `KVCache` of the first and last `protect` layers, and a `QuantisedCache` of the layers between them.

    Quantisation costs most in these layers. Methods and properties are those of the two caches.
    """

    appends_exactly: ClassVar[bool] = False

    def __init__(self, protected: KVCache, quantised: QuantisedCache) -> None:
        self._protected, self._quantised = protected, quantised
        self.num_layers = protected.num_layers + quantised.num_layers
        self.batch_size, self.num_kv_heads = quantised.batch_size, quantised.num_kv_heads
        self.max_context, self.head_dim = quantised.max_context, quantised.head_dim
        self.codec, self.softmax = quantised.codec, quantised.softmax

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._quantised.device

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self._protected.num_bytes + self._quantised.num_bytes

    def _at(self, layer: int) -> tuple[KVCache | QuantisedCache, int]:
        """Return the cache that holds a layer, and the layer's index in it."""
        protect = self._protected.num_layers // 2
        if layer < protect:
            return self._protected, layer
        if layer >= self.num_layers - protect:
            return self._protected, layer - self._quantised.num_layers
        return self._quantised, layer - protect

    def layer(self, layer: int) -> CacheLayer:
        """Return one layer, as decode attention reads it."""
        cache, index = self._at(layer)
        return cache.layer(index)

    def keepable(self, num_tokens: int, is_whole: bool) -> int:
        """As `QuantisedCache.keepable`."""
        return self._quantised.keepable(num_tokens, is_whole)

    def cut(self, request: int, num_tokens: int) -> None:
        """As `QuantisedCache.cut`."""
        self._quantised.cut(request, num_tokens)

    def compact(self, seq_lens: Tensor) -> None:
        """As `QuantisedCache.compact`."""
        self._quantised.compact(seq_lens)

    def commit(self, seq_lens: Tensor) -> None:
        """As `QuantisedCache.commit`."""
        self._quantised.commit(seq_lens)

    def append(self, layer: int, k: Tensor, v: Tensor, seq_lens: Tensor, is_final: bool = True) -> None:
        """As `KVCache.append`."""
        cache, index = self._at(layer)
        cache.append(index, k, v, seq_lens, is_final)

    def write_prefill(self, layer: int, request: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """As `KVCache.write_prefill`, or as `QuantisedCache.write_prefill`."""
        cache, index = self._at(layer)
        return cache.write_prefill(index, request, start, k, v)

    def copy_prompt(self, source: int, target: int) -> None:
        """As `KVCache.copy_prompt`."""
        for cache in (self._protected, self._quantised):
            cache.copy_prompt(source, target)

    def prefill_attention(
        self, layer: int, request: int, start: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, stop: int
    ) -> Tensor:
        """As `KVCache.prefill_attention`."""
        cache, index = self._at(layer)
        return cache.prefill_attention(index, request, start, q, k, v, sm_scale, stop)
