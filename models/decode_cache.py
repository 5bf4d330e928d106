"""The cache as the fused decode kernels use it: where a new token goes, and attention over it; one class a codec.

A projection and a handover write the newest token's key and value at position `lengths - 1` of `newest`; `append` takes
them from there into the cache, where they do not lie in it already; `attend` reads the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.decode_attention import CacheLayer, KVLayer
from ..kernels.flashq_kernels import turbo_append
from ..kernels.flashq_layout import TurboLayer
from ..kernels.lean_attention import LeanWorkspace, Part, Speculation, lean_decode_attention
from ..kernels.turbo_attention import turbo_decode_attention, turbo_settings

__all__ = ["DecodeCache", "decode_cache"]


class DecodeCache(Protocol):
    """All layers of one rank's cache; every method is graph-safe and allocates nothing."""

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """k, v [B, Hkv, N, D] and lengths [B] int32: the newest token of request b lies at [b, :, lengths[b] - 1]."""

    def append(self, layer: int, gate: Tensor | None = None, is_dependent: bool = True) -> None:
        """Take in what was written into `newest`. gate: [1] int32; 0 skips. is_dependent: see `turbo_append`."""

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
        """Decode attention with the newest token, as `lean_decode_attention`."""


def decode_cache(
    layers: Sequence[CacheLayer], seq_lens: Tensor, num_qo_heads: int, dtype: torch.dtype, spare_sms: int = 0
) -> DecodeCache:
    """The cache of one rank with its scratch memory.

    Args:
        layers: all of one codec.  seq_lens: [B] int32 on the device, with the newest token.
        num_qo_heads: of this rank.  dtype: of keys and values before a codec takes them.
    """
    plain = [layer for layer in layers if isinstance(layer, KVLayer)]
    if plain:
        return _LeanCache(plain, seq_lens, num_qo_heads, spare_sms)
    quantised = [layer for layer in layers if isinstance(layer, TurboLayer)]
    return _TurboCache(quantised, seq_lens, num_qo_heads, dtype, spare_sms)


def _num_programs(device: torch.device, spare_sms: int) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count - spare_sms


class _LeanCache:
    """Uncompressed: a new token is written where it stays."""

    def __init__(self, layers: Sequence[KVLayer], seq_lens: Tensor, num_qo_heads: int, spare_sms: int) -> None:
        self._layers, self._seq_lens = layers, seq_lens
        batch_size, num_kv_heads, _, head_dim = layers[0].k.shape
        device = seq_lens.device
        self._sm_scale = head_dim**-0.5
        self._workspace = LeanWorkspace.allocate(
            batch_size, num_qo_heads, num_kv_heads, head_dim, device, _num_programs(device, spare_sms)
        )

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return *self._layers[layer], self._seq_lens

    def append(self, layer: int, gate: Tensor | None = None, is_dependent: bool = True) -> None:
        pass

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
        lean_decode_attention(
            q, *self._layers[layer], self._seq_lens, self._sm_scale, self._workspace, out, lse, speculation, part, gate
        )


class _TurboCache:
    """Quantised: a new token waits in a cache of one position until it is appended."""

    def __init__(
        self,
        layers: Sequence[TurboLayer],
        seq_lens: Tensor,
        num_qo_heads: int,
        dtype: torch.dtype,
        spare_sms: int,
    ) -> None:
        self._layers, self._seq_lens = layers, seq_lens
        first, device = layers[0], seq_lens.device
        shape = (first.batch_size, first.num_kv_heads, 1, first.head_dim)
        self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._one = torch.ones_like(seq_lens)
        self._sm_scale = first.head_dim**-0.5
        settings = turbo_settings(device)
        sms = _num_programs(device, 0)
        programs = settings.num_programs * (sms - spare_sms) // sms
        self._workspace = LeanWorkspace.allocate(
            first.batch_size, num_qo_heads, first.num_kv_heads, first.head_dim, device, programs
        )

    def newest(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._k, self._v, self._one

    def append(self, layer: int, gate: Tensor | None = None, is_dependent: bool = True) -> None:
        turbo_append(self._k[:, :, 0], self._v[:, :, 0], self._layers[layer], self._seq_lens, gate, is_dependent)

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
        turbo_decode_attention(
            q, self._layers[layer], self._seq_lens, self._sm_scale, self._workspace, out, lse, speculation, part, gate
        )
