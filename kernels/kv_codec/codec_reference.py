"""PyTorch oracles of codec_kernels.py, also used for CPU tensors.

With the same arguments, an oracle writes the same bits to the same places as its launcher.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alspec.kernels.kv_codec.flashq.layout import BlockCodes, pack_side, unpack_side
from alspec.kernels.kv_codec.flashq.quantize import MIN_SCALE, compress, int8_scale, quantize_int8, reconstruct, to_int8
from alspec.kernels.kv_codec.formats import FLASHQ, SideFormat, side_of, side_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, QuantisedLayer
from alspec.kernels.kv_codec.turboquant.token_codes import (
    compress_tokens,
    dequantize_tokens,
    pack_tokens_side,
    restore_tokens,
    unpack_tokens_side,
)

__all__ = [
    "compress_side",
    "dequantize_side",
    "kv_append_ref",
    "kv_compact_ref",
    "kv_dequantize",
    "kv_restore_ref",
    "kv_store_ref",
    "restore_side_ref",
]


def kv_store_ref(
    k: Tensor,
    v: Tensor,
    layer: QuantisedLayer,
    request: int,
    start: int,
    k8: Tensor,
    v8: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Oracle of `kv_store`; same arguments."""
    num_tokens = k.shape[0]
    full_blocks = num_tokens // BLOCK
    if start == 0:
        layer.tail_scale[request] = MIN_SCALE
    for index, (x, q1, scale) in enumerate(((k, k8, k_scale), (v, v8, v_scale))):
        heads = x.transpose(0, 1)
        codes, scales = quantize_int8(heads)
        q1.copy_(codes)
        scale.copy_(scales)
        universal = layer.tail_scale[request, :, index]
        universal.copy_(torch.maximum(universal, int8_scale(heads)))
        tail_tokens = heads[:, (num_tokens - 1) // BLOCK * BLOCK :]
        layer.tail[request, :, index, : tail_tokens.shape[1]] = to_int8(tail_tokens, universal)
    for head in range(layer.num_kv_heads if full_blocks else 0):
        blocks = (q1[head, : full_blocks * BLOCK].unflatten(0, (full_blocks, BLOCK)) for q1 in (k8, v8))
        factors = _write_records(layer, request, head, start // BLOCK, *blocks)
        for index, (factor, scale) in enumerate(zip(factors, (k_scale, v_scale), strict=True)):
            own = layer.scales[request, head, start // BLOCK : start // BLOCK + full_blocks, index]
            own.copy_(scale[head, :full_blocks] * factor)


def kv_append_ref(k: Tensor, v: Tensor, layer: QuantisedLayer, seq_lens: Tensor) -> None:
    """Oracle of `kv_append`; same arguments. Reads `seq_lens` on the host."""
    for request, n in enumerate(seq_lens.tolist()):
        for index, x in enumerate((k, v)):
            universal = layer.tail_scale[request, :, index]
            layer.tail[request, :, index, (n - 1) % BLOCK] = to_int8(x[request, :, None], universal)[:, 0]


def kv_compact_ref(layers: QuantisedLayer, seq_lens: Tensor) -> None:
    """Oracle of `kv_compact`; same arguments. Reads `seq_lens` on the host."""
    if layers.tail.dim() == 6:
        for index in range(layers.tail.shape[0]):
            kv_compact_ref(layers.select(index), seq_lens)
        return
    for request, n in enumerate(seq_lens.tolist()):
        block, rest = divmod(n, BLOCK)
        if rest == 0:
            for head in range(layers.num_kv_heads):
                factors = _write_records(
                    layers, request, head, block - 1, *layers.tail[request, head, :, None].unbind(0)
                )
                layers.scales[request, head, block - 1] = layers.tail_scale[request, head] * torch.cat(factors)


def kv_restore_ref(
    layer: QuantisedLayer, request: int, num_blocks: int, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Oracle of `kv_restore`; same arguments."""
    for head in range(layer.num_kv_heads if num_blocks else 0):
        records = _records(layer, request, head, 0, num_blocks)
        for index, (q1, scale) in enumerate(((k8, k_scale), (v8, v_scale))):
            method, bits = records.formats[index]
            blocks, factor = restore_side_ref(records.words[index], method, bits, layer.head_dim, bool(index))
            q1[head] = blocks.flatten(0, 1)
            scale[head] = layer.scales[request, head, :num_blocks, index] * factor


def kv_dequantize(layer: QuantisedLayer, seq_lens: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Dequantise the keys and values that decode attention reads.

    Args:
        layer: one layer.  seq_lens: [B] integers (n), including the newest token; read on the host.
        dtype: of the results.
    Returns:
        k, v: [B, H, max n, D], zero past the length of each request.
    """
    lengths = seq_lens.tolist()
    shape = (layer.num_kv_heads, max(lengths), layer.head_dim)
    kv = layer.tail.new_zeros((2, len(lengths), *shape), dtype=dtype)
    for request, n in enumerate(lengths):
        full_blocks = (n - 1) // BLOCK
        for head in range(layer.num_kv_heads if full_blocks else 0):
            records = _records(layer, request, head, 0, full_blocks)
            for index, words in enumerate(records.words):
                blocks = dequantize_side(words, *records.formats[index], layer.head_dim, bool(index), dtype)
                blocks *= layer.scales[request, head, :full_blocks, index, None, None].to(dtype)
                kv[index, request, head, : full_blocks * BLOCK] = blocks.flatten(0, 1)
        tail = layer.tail[request, :, :, : n - full_blocks * BLOCK].to(dtype)
        tail *= layer.tail_scale[request, :, :, None, None].to(dtype)
        kv[:, request, :, full_blocks * BLOCK : n] = tail.movedim(1, 0)
    return kv[0], kv[1]


def compress_side(q1: Tensor, method: str, bits: int, is_v: bool) -> tuple[Tensor, Tensor]:
    """Quantise blocks of stage 1, q1 [m, 64, D] int8, into sides of records.

    Returns:
        words: [m, side_words] int32.  factor: [m] fp32; the scale of a side is that of q1 times its factor.
    """
    if method == FLASHQ:
        q2, s_int, z = compress(q1, bits)
        return pack_side(BlockCodes(q2, s_int, z.int()), bits, is_v), torch.ones(len(q1), device=q1.device)
    tokens = compress_tokens(q1, bits, not is_v)
    return pack_tokens_side(tokens, bits, is_v), tokens.factor


def restore_side_ref(words: Tensor, method: str, bits: int, head_dim: int, is_v: bool) -> tuple[Tensor, Tensor]:
    """Restore sides [m, side_words] to stage 1: q1 [m, 64, D] int8, and the factor [m] from their scale to q1's."""
    if method == FLASHQ:
        q1 = reconstruct(*unpack_side(words, bits, head_dim, is_v))
        return q1, torch.ones(len(words), device=words.device)
    return restore_tokens(unpack_tokens_side(words, bits, head_dim, is_v), bits, not is_v)


def dequantize_side(
    words: Tensor, method: str, bits: int, head_dim: int, is_v: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantise sides [m, side_words] to [m, 64, D], without the scale of the side."""
    if method == FLASHQ:
        return reconstruct(*unpack_side(words, bits, head_dim, is_v)).to(dtype)
    return dequantize_tokens(unpack_tokens_side(words, bits, head_dim, is_v), bits, not is_v, dtype)


class _Records(NamedTuple):
    """The sides of some records of one head: K's, then V's."""

    words: list[Tensor]  # [count, side_words] each, views of the cache
    formats: list[SideFormat]


def _write_records(layer: QuantisedLayer, request: int, head: int, first: int, k: Tensor, v: Tensor) -> list[Tensor]:
    """Write blocks k, v [m, 64, D] int8 into records `first`, `first + 1`, ...; return the factors [m] of K and V."""
    records, factors = _records(layer, request, head, first, k.shape[0]), []
    for is_v, x in enumerate((k, v)):
        words, factor = compress_side(x, *records.formats[is_v], bool(is_v))
        records.words[is_v].copy_(words)
        factors.append(factor)
    return factors


def _records(layer: QuantisedLayer, request: int, head: int, first: int, count: int) -> _Records:
    bits = int(layer.bits[request, head])
    formats = [side_of(layer.format, is_v, bits) for is_v in (False, True)]
    sizes = [side_words(layer.format, is_v, bits, layer.head_dim) for is_v in (False, True)]
    start = int(layer.offset[request, head]) + first * sum(sizes)
    records = layer.words[start : start + count * sum(sizes)].view(count, sum(sizes))
    return _Records(list(records.split(sizes, 1)), formats)
