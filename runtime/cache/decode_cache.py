"""The cache of the fused decode kernels, for all codecs, with the place of the newest token and the workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import LeanWorkspace
from alspec.kernels.attention.dispatch import KVLayer, attend_workspaces, layer_kind
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.runtime.cache.codecs import Cache

__all__ = ["DecodeCache"]


class DecodeCache:
    """All layers of one rank's cache, with workspace for attention.

    With a quantised cache, the QKV projection writes the newest token twice: quantised into the tail (`quantised`), and
    unquantised into `newest`. A pair sends the unquantised token. After the last layer, `compact`
    makes records of full tails.

    Args:
        cache: all layers.
        seq_lens: [B] int32 on the device, including the newest token.
        num_qo_heads: query heads of this rank.
        sm_scale: factor of the scores.
        dtype: of keys and values before quantisation.
        spare_sms: SMs that attention leaves to other work.
        rows: rows of each request; then `seq_lens` has one for each row.
    Capture: all methods are graph-safe and allocate nothing.
    """

    def __init__(
        self,
        cache: Cache,
        seq_lens: Tensor,
        num_qo_heads: int,
        sm_scale: float,
        dtype: torch.dtype,
        spare_sms: int = 0,
        rows: int = 1,
    ) -> None:
        self._cache, self.layers = cache, [cache.layer(layer) for layer in range(cache.num_layers)]
        self._seq_lens, device = seq_lens, seq_lens.device
        if any(isinstance(layer, QuantisedLayer) for layer in self.layers):
            # The unquantised newest token lies here, in a cache of one position.
            shape = (len(seq_lens), cache.num_kv_heads, 1, cache.head_dim)
            self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self._one = torch.ones_like(seq_lens)
        rings = [layer.k.shape[2] for layer in self.layers if isinstance(layer, KVLayer) and layer.is_ring]
        self._window = rings[0] if rings else 0  # tokens of every ring
        self._window_lens = torch.ones_like(seq_lens) if rings else seq_lens
        self.sm_scale = sm_scale
        self._workspaces = attend_workspaces(self.layers, num_qo_heads, device, spare_sms, rows)

    def workspace(self, layer: int) -> LeanWorkspace:
        """Return the scratch memory of attention over a layer; layers of one kind share it."""
        return self._workspaces[layer_kind(self.layers[layer])]

    def begin_step(self) -> None:
        """Compute how many tokens rings hold. Call it before the layers of a step."""
        if self._window:
            torch.clamp(self._seq_lens, max=self._window, out=self._window_lens)

    def is_ring(self, layer: int) -> bool:
        """Whether a layer's cache is a ring, whose newest token may lie anywhere."""
        cache = self.layers[layer]
        return isinstance(cache, KVLayer) and cache.is_ring

    def lengths(self, layer: int) -> Tensor:
        """Tokens that attention over a layer reads, [B] int32."""
        return self._window_lens if self.is_ring(layer) else self._seq_lens

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return k, v [B, Hkv, N, D] and lengths [B] int32: request b's newest token lies at [b, :, lengths[b] - 1].

        In a ring it lies at that index modulo N.
        """
        cache = self.layers[layer]
        if isinstance(cache, KVLayer):
            return cache.k, cache.v, self._seq_lens
        return self._k, self._v, self._one

    def quantised(self, layer: int) -> QuantisedLayer | None:
        """Return the quantised layer, whose tail the QKV projection also writes; None for bf16."""
        cache = self.layers[layer]
        return cache if isinstance(cache, QuantisedLayer) else None

    def compact(self) -> None:
        """Make records of full tails, for the next step. Call it after all layers have the newest token."""
        self._cache.compact(self._seq_lens)
