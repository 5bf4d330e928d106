"""The cache as the fused decode kernels use it: where a new token goes, and attention over it, whatever the codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.decode_attention import CacheLayer, KVLayer
from ..kernels.flashq_kernels import turbo_append
from ..kernels.lean_attention import LeanWorkspace, Part, Speculation, lean_decode_attention
from ..kernels.turbo_attention import turbo_decode_attention, turbo_settings

__all__ = ["DecodeCache"]


class DecodeCache:
    """All layers of one rank's cache, with scratch memory; every method is graph-safe and allocates nothing.

    A projection and a handover write the newest token's key and value into `newest`; `append` takes them from there,
    where they do not lie in the cache already; `attend` reads the cache.

    Args:
        layers: all of one codec.  seq_lens: [B] int32 on the device, with the newest token.
        num_qo_heads: of this rank.  dtype: of keys and values before a codec takes them.
        spare_sms: left to other work while attention runs.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        seq_lens: Tensor,
        num_qo_heads: int,
        dtype: torch.dtype,
        spare_sms: int = 0,
    ) -> None:
        self._layers, self._seq_lens = layers, seq_lens
        first, device = layers[0], seq_lens.device
        is_cuda = device.type == "cuda"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else spare_sms + 4
        if isinstance(first, KVLayer):
            batch_size, num_kv_heads, _, head_dim = first.k.shape
            programs = sms - spare_sms
        else:
            batch_size, num_kv_heads, head_dim = first.batch_size, first.num_kv_heads, first.head_dim
            programs = turbo_settings(device).per_sm * (sms - spare_sms)
            # A new token waits here, in a cache of one position.
            shape = (batch_size, num_kv_heads, 1, head_dim)
            self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self._one = torch.ones_like(seq_lens)
        self._sm_scale = head_dim**-0.5
        self._workspace = LeanWorkspace.allocate(batch_size, num_qo_heads, num_kv_heads, head_dim, device, programs)

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v [B, Hkv, N, D] and lengths [B] int32: the newest token of request b lies at [b, :, lengths[b] - 1]."""
        cache = self._layers[layer]
        if isinstance(cache, KVLayer):
            return cache.k, cache.v, self._seq_lens
        return self._k, self._v, self._one

    def append(self, layer: int, gate: Tensor | None = None, is_dependent: bool = True) -> None:
        """Take in what was written into `newest`. gate: [1] int32; 0 skips. is_dependent: see `turbo_append`."""
        cache = self._layers[layer]
        if not isinstance(cache, KVLayer):
            turbo_append(self._k[:, :, 0], self._v[:, :, 0], cache, self._seq_lens, gate, is_dependent)

    def attend(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        speculation: Speculation | None = None,
        part: Part = "all",
        gate: Tensor | None = None,
    ) -> None:
        """Decode attention, as `lean_decode_attention`; the launch ahead wrote q and the newest token, and no more."""
        cache, seq_lens, scale = self._layers[layer], self._seq_lens, self._sm_scale
        if isinstance(cache, KVLayer):
            lean_decode_attention(
                q, *cache, seq_lens, scale, self._workspace, out, lse, speculation, part, gate, newest_only=True
            )
        else:
            turbo_decode_attention(
                q, cache, seq_lens, scale, self._workspace, out, lse, speculation, part, gate, newest_only=True
            )
