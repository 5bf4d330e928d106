"""The quantised KV cache of a layer, for every codec: records of 64 tokens, and an INT8 tail of the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from alspec.sas import Softmax

__all__ = ["BLOCK", "HEAD_DIMS", "PER_HEAD", "QuantisedLayer"]

BLOCK = 64  # tokens per block, and per record
HEAD_DIMS = (64, 128)
# Kernel arguments that hold a few bytes per head. With one or two heads, a layer's part of the stack may have any
# alignment. They are not specialised on alignment, so that one compiled kernel serves all layers.
PER_HEAD = ["offset_ptr", "bits_ptr", "scales_ptr", "tail_scale_ptr"]


@dataclass(frozen=True)
class QuantisedLayer:
    """Quantised cache of one layer, or a stack of layers. B requests, H KV heads of this rank, capacity NB blocks.

    With n = seq_len, including the newest token, blocks `j < (n - 1) // 64` are records. The 1 to 64 tokens after them
    lie in `tail` from index 0. A record has two sides, K's and V's, each in the order that its codec defines.

    A stack holds several layers: each tensor has a leading dimension L and is contiguous.
    """

    # [W] int32: all records; block j of (b, h) begins at word offset[b, h] + j record_words(format, bits[b, h], D)
    words: Tensor
    offset: Tensor  # [B, H] int64, multiples of 4
    bits: Tensor  # [B, H] int32: 4 or 2, where the format lets each head have its own; else not read by kernels
    scales: Tensor  # [B, H, NB, 2] fp32: scale of each block's K and V
    tail: Tensor  # [B, H, 2, 64, D] int8: stage-1 codes of the newest tokens, K then V
    tail_scale: Tensor  # [B, H, 2] fp32: universal scale of K and V
    softmax: Softmax = "exact"  # which softmax decode attention uses over this cache
    format: str = "flashq"  # name in `FORMATS` of formats.py
    sliding_window: int | None = None  # newest tokens that attention reads; None: all. Of a layer, not of a stack

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def batch_size(self) -> int:
        """B, requests."""
        return self.tail.shape[-5]

    @property
    def num_kv_heads(self) -> int:
        """H, KV heads of this rank."""
        return self.tail.shape[-4]

    @property
    def head_dim(self) -> int:
        """D, channels of a head."""
        return self.tail.shape[-1]

    @property
    def num_blocks(self) -> int:
        """NB, capacity in blocks of each request and head."""
        return self.scales.shape[-2]

    def select(self, layer: int) -> QuantisedLayer:
        """Return one layer of a stack, as views."""
        tensors = {name: tensor[layer] for name, tensor in self.tensors.items()}
        window = self.sliding_window
        return QuantisedLayer(**tensors, softmax=self.softmax, format=self.format, sliding_window=window)
