"""Quantised KV cache of one rank: static buffers of 64-token records and INT8 tails.

On CUDA, the kernels of codec_kernels.py write it. On the CPU, their oracles write the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from alspec.config import QUANTISED_CODECS
from alspec.kernels.attention.prefill.int8_prefill import int8_prefill_attention
from alspec.kernels.attention.torch_attention import dequantized_prefill_attention
from alspec.kernels.kv_codec.codec_kernels import kv_append, kv_compact, kv_restore, kv_store
from alspec.kernels.kv_codec.codec_reference import (
    kv_append_ref,
    kv_compact_ref,
    kv_restore_ref,
    kv_store_ref,
)
from alspec.kernels.kv_codec.flashq.quantize import MIN_SCALE, head_priority, select_bits
from alspec.kernels.kv_codec.formats import format_of, record_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, QuantisedLayer
from alspec.sas import Softmax

__all__ = ["QuantisedCache"]

_CUT_ANYWHERE = ("turbo4", "turbo2")  # see `QuantisedCache.keepable`


class QuantisedCache:
    """Quantised keys and values of all layers, with capacity for `max_context` tokens per request.

    The prompt chunk at position 0 starts a new prompt and resets all state of the request. With `turbo-mixed` it also
    selects the half of the heads that get 2 bits; the others get 4. All attention over the cache, of prompts and of
    decode steps, uses the softmax given by `softmax`. With TurboQuant values, `v` is rotated by the weights already.
    `sliding_windows` is that of `KVCache`.

    Shapes: B requests, H KV heads of this rank, NB capacity in blocks, D head_dim, n tokens.
    """

    appends_exactly: ClassVar[bool] = False  # an appended token is cut to the range that the prompt had

    def __init__(
        self,
        codec: str,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        device: torch.device,
        softmax: Softmax = "exact",
        sliding_windows: Sequence[int | None] = (),
    ) -> None:
        self.codec, self.device, self.softmax = codec, device, softmax
        self.num_layers, self.batch_size, self.num_kv_heads = num_layers, batch_size, num_kv_heads
        self.max_context, self.head_dim = max_context, head_dim
        self._num_blocks = _blocks(max_context)
        bits = torch.tensor(_bits(codec, num_kv_heads), dtype=torch.int32, device=device)
        # Words per record, indexed by the bits of its head.
        self._words = torch.zeros(5, dtype=torch.int64, device=device)
        for width in (2, 4):
            self._words[width] = record_words(format_of(codec), width, head_dim)
        self._request_words = self._num_blocks * sum(_record_words(codec, num_kv_heads, head_dim))
        heads = (num_layers, batch_size, num_kv_heads)
        self._all = QuantisedLayer(
            words=torch.zeros(num_layers, batch_size * self._request_words, dtype=torch.int32, device=device),
            offset=torch.zeros(heads, dtype=torch.int64, device=device),
            bits=bits.repeat(num_layers, batch_size, 1),
            scales=torch.ones(*heads, self._num_blocks, 2, device=device),
            tail=torch.zeros(*heads, 2, BLOCK, head_dim, dtype=torch.int8, device=device),
            tail_scale=torch.ones(*heads, 2, device=device),
            softmax=softmax,
            format=format_of(codec),
        )
        windows = sliding_windows or [None] * num_layers
        self._layers = [
            replace(self._all.select(layer), sliding_window=window)
            for layer, window in zip(range(num_layers), windows, strict=True)
        ]
        for layer in self._layers:
            for request in range(batch_size):
                self._set_bits(layer, request, bits)

    @staticmethod
    def bytes_per_token(codec: str, num_layers: int, num_kv_heads: int, head_dim: int) -> float:
        """Return the bytes per cached token of one request, records and scales, on a rank with `num_kv_heads` KV heads.

        The tail is not included: its size does not depend on the number of tokens.
        """
        return num_layers * sum(4 * words + 8 for words in _record_words(codec, num_kv_heads, head_dim)) / BLOCK

    @staticmethod
    def bytes_for(
        codec: str, num_layers: int, batch_size: int, num_kv_heads: int, max_context: int, head_dim: int
    ) -> int:
        """Return `num_bytes` of a cache with these arguments, without creating it."""
        token = QuantisedCache.bytes_per_token(codec, num_layers, num_kv_heads, head_dim)
        # Tail, universal scales, offset and bits of each head.
        head = 2 * BLOCK * head_dim + 2 * 4 + 8 + 4
        return batch_size * (round(token * BLOCK * _blocks(max_context)) + num_layers * num_kv_heads * head)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self._all.tensors.values())

    @property
    def layers(self) -> QuantisedLayer:
        """All layers, stacked."""
        return self._all

    def layer(self, layer: int) -> QuantisedLayer:
        """Return one layer, as decode attention reads it."""
        return self._layers[layer]

    def keepable(self, num_tokens: int, is_whole: bool) -> int:
        """How many of the first `num_tokens` tokens of a request's last prompt can stay, so that a chunk may follow.

        Whole blocks, because a prompt chunk begins a block. But what depends on dropped tokens as well must be found
        again without them. The universal scale is the largest scale of FlashQ records; TurboQuant records do not tell
        it, nor does any record tell which heads `turbo-mixed` would select. There nothing stays unless all tokens do.

        Args:
            is_whole: the next prompt begins with all of the last one.
        """
        return num_tokens // BLOCK * BLOCK if is_whole or self.codec in _CUT_ANYWHERE else 0

    def cut(self, request: int, num_tokens: int) -> None:
        """Cut a request back to its first `num_tokens` tokens, a number that `keepable` returned."""
        if num_tokens and self.codec in _CUT_ANYWHERE:
            scales = self._all.scales[:, request, :, : num_tokens // BLOCK]
            self._all.tail_scale[:, request] = scales.amax(2).clamp(min=MIN_SCALE)

    def compact(self, seq_lens: Tensor) -> None:
        """Make records of full tails, in fused steps on a GPU; seq_lens [B] int32, with the new token. Graph-safe."""
        kv_compact(self._all, seq_lens)

    def commit(self, seq_lens: Tensor) -> None:
        """As `compact`, in eager rounds on any device; seq_lens [B] int32: tokens without rejected drafts."""
        if self.device.type == "cuda":
            kv_compact(self._all, seq_lens)
        else:
            kv_compact_ref(self._all, seq_lens)

    def append(self, layer: int, k: Tensor, v: Tensor, seq_lens: Tensor, is_final: bool = True) -> None:
        """Store one new token of each request in the tail; make a record of a tail that is then full.

        Args:
            k, v: [B, H, D].  seq_lens: [B] int32, including the new token.
            is_final: as for `KVCache.append`. Drafts make no record, and none lies in a later block than the first one:
                its place in the tail would be that of a token that is still read.
        """
        is_cuda, cache_layer = self.device.type == "cuda", self._layers[layer]
        write, compact = (kv_append, kv_compact) if is_cuda else (kv_append_ref, kv_compact_ref)
        write(k, v, cache_layer, seq_lens)
        if is_final:
            compact(cache_layer, seq_lens)

    def write_prefill(
        self, layer: int, request: int, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Store a prompt chunk, k, v [n, H, D], at positions `[start, start + n)` of one request.

        The size of every chunk except the last must be a multiple of 64 tokens.

        Returns:
            The request so far at INT8: this chunk after stage 1, earlier tokens restored from their records.
            k8, v8: [H, start + n, D] int8.  k_scale, v_scale: [H, ceil((start + n) / 64)] fp32.
        """
        assert start % BLOCK == 0, f"a prompt chunk begins at {start}: expected a multiple of {BLOCK}"
        cache_layer = self._layers[layer]
        num_tokens, num_heads, head_dim = k.shape
        if start == 0 and self.codec == "turbo-mixed":
            priority = head_priority(k.transpose(0, 1), v.transpose(0, 1))
            self._set_bits(cache_layer, request, select_bits(priority, num_heads // 2))
        stop, first_block = start + num_tokens, start // BLOCK
        q8 = torch.empty(2, num_heads, stop, head_dim, dtype=torch.int8, device=self.device)
        scales = torch.empty(2, num_heads, math.ceil(stop / BLOCK), device=self.device)
        is_cuda = self.device.type == "cuda"
        restore, store = (kv_restore, kv_store) if is_cuda else (kv_restore_ref, kv_store_ref)
        restore(cache_layer, request, first_block, *q8[:, :, :start].unbind(0), *scales[:, :, :first_block].unbind(0))
        store(k, v, cache_layer, request, start, *q8[:, :, start:].unbind(0), *scales[:, :, first_block:].unbind(0))
        return q8[0], q8[1], scales[0], scales[1]

    def copy_prompt(self, source: int, target: int) -> None:
        """Copy everything that the cache holds for one request to another, whose prompt is the same."""
        words = self._all.words.view(self.num_layers, self.batch_size, self._request_words)
        for buffer in (words, self._all.bits, self._all.scales, self._all.tail, self._all.tail_scale):
            buffer[:, target] = buffer[:, source]
        self._all.offset[:, target] = self._all.offset[:, source] + (target - source) * self._request_words

    def prefill_attention(
        self, layer: int, request: int, start: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, stop: int
    ) -> Tensor:
        """Store a prompt chunk as `write_prefill` does, then compute causal attention for its n_q tokens before `stop`.

        Keys and values of the chunk are read after stage 1, earlier ones as restored from their records. With SAS, the
        cutoff is that of all tokens up to the end of the chunk.

        Args:
            q: [n_q, Hq, D], queries of the positions `[stop - n_q, stop)`.
            k, v: [n, H, D], at positions `[start, start + n)`.
            stop: end of the tokens to read.
        Returns:
            Attention output, shape and dtype of q.
        """
        k8, v8, *scales = self.write_prefill(layer, request, start, k, v)
        blocks = math.ceil(stop / BLOCK)
        k_scale, v_scale = (scale[:, :blocks].contiguous() for scale in scales)
        prefix = k8[:, :stop], v8[:, :stop], k_scale, v_scale
        window, cutoff_tokens = self._layers[layer].sliding_window, start + len(k)
        if self.device.type == "cuda" and window is None:
            return int8_prefill_attention(q.contiguous(), *prefix, sm_scale, self.softmax, cutoff_tokens)[0]
        return dequantized_prefill_attention(q, *prefix, sm_scale, self.softmax, cutoff_tokens, window)

    def _set_bits(self, layer: QuantisedLayer, request: int, bits: Tensor) -> None:
        """Set the bits of each head, [H] int32, and lay out the request's records, head after head. No host sync."""
        sizes = self._num_blocks * self._words[bits.long()]
        layer.bits[request] = bits
        layer.offset[request] = request * self._request_words + sizes.cumsum(0) - sizes


def _blocks(max_context: int) -> int:
    """Return the number of blocks that `max_context` fills; at least 1, so that no buffer is empty."""
    return max(1, max_context // BLOCK)


def _record_words(codec: str, num_kv_heads: int, head_dim: int) -> list[int]:
    """Return the words of a record of each head."""
    return [record_words(format_of(codec), bits, head_dim) for bits in _bits(codec, num_kv_heads)]


def _bits(codec: str, num_kv_heads: int) -> list[int]:
    """Return the bits of each head before a prompt selects them, 2 first; 4 where the format has its own."""
    assert codec in QUANTISED_CODECS, codec
    num_low = {"turbo2": num_kv_heads, "turbo-mixed": num_kv_heads // 2}.get(codec, 0)
    return [2] * num_low + [4] * (num_kv_heads - num_low)
