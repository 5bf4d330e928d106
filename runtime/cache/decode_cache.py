"""The cache as the fused decode kernels use it: where a new token goes, and attention over it, whatever the codec."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import Phase, SpecOutput
from alspec.kernels.attention.dispatch import CacheLayer, KVLayer, attend, attend_workspace
from alspec.kernels.kv_codec.flashq.codec_kernels import flashq_compact
from alspec.kernels.kv_codec.flashq.layout import FlashQLayer

__all__ = ["DecodeCache"]


class DecodeCache:
    """All layers of one rank's cache, with scratch memory; every method is graph-safe and allocates nothing.

    Over a quantised cache a projection puts the newest token into the tail (`quantised`) and, as it is, into `newest`,
    from where a collective's box passes it on. After the layers, `compact` makes records of full tails.

    Args:
        layers: all, stacked.  seq_lens: [B] int32 on the device, with the newest token.
        num_qo_heads: of this rank.  dtype: of keys and values before a codec takes them.
        spare_sms: left to other work while attention runs.
    """

    def __init__(
        self,
        layers: CacheLayer,
        seq_lens: Tensor,
        num_qo_heads: int,
        dtype: torch.dtype,
        spare_sms: int = 0,
    ) -> None:
        num_layers = layers.k.shape[0] if isinstance(layers, KVLayer) else layers.tail.shape[0]
        self._all, self.layers = layers, [layers.select(layer) for layer in range(num_layers)]
        self._seq_lens, device = seq_lens, seq_lens.device
        if isinstance(layers, FlashQLayer):
            # A new token waits here, in a cache of one position.
            shape = (layers.batch_size, layers.num_kv_heads, 1, layers.head_dim)
            self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self._one = torch.ones_like(seq_lens)
        self._sm_scale = layers.head_dim**-0.5
        self._workspace = attend_workspace(layers, num_qo_heads, device, spare_sms)

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v [B, Hkv, N, D] and lengths [B] int32: the newest token of request b lies at [b, :, lengths[b] - 1]."""
        cache = self.layers[layer]
        if isinstance(cache, KVLayer):
            return cache.k, cache.v, self._seq_lens
        return self._k, self._v, self._one

    def quantised(self, layer: int) -> FlashQLayer | None:
        """The layer, where a projection has to quantise for it."""
        cache = self.layers[layer]
        return cache if isinstance(cache, FlashQLayer) else None

    def compact(self) -> None:
        """Once every layer has the newest token: full tails become records, which the next step reads."""
        if isinstance(self._all, FlashQLayer):
            flashq_compact(self._all, self._seq_lens)

    def attend(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        speculation: SpecOutput | None = None,
        phase: Phase = "all",
        gate: Tensor | None = None,
        prefetch_before_wait: bool = False,
    ) -> None:
        """Decode attention, as `lean_decode_attention`."""
        attend(
            q, self.layers[layer], self._seq_lens, self._sm_scale, self._workspace, out, lse, speculation, phase, gate,
            prefetch_before_wait,
        )  # fmt: skip
