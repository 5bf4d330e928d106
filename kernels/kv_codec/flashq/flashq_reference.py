"""PyTorch oracles of codec_kernels.py, also used for CPU tensors.

With the same arguments, an oracle writes the same bits to the same places as its launcher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.kv_codec.flashq.layout import BlockCodes, FlashQLayer, pack_record, record_words, unpack_record
from alspec.kernels.kv_codec.flashq.quantize import (
    BLOCK,
    MIN_SCALE,
    compress,
    int8_scale,
    quantize_int8,
    reconstruct,
    to_int8,
)

__all__ = ["flashq_dequantize", "flashq_restore_ref", "flashq_store_ref", "flashq_append_ref", "flashq_compact_ref"]


def flashq_store_ref(
    k: Tensor,
    v: Tensor,
    layer: FlashQLayer,
    request: int,
    start: int,
    k8: Tensor,
    v8: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Oracle of `flashq_store`; same arguments."""
    num_tokens = k.shape[0]
    full_blocks = num_tokens // BLOCK
    if start == 0:
        layer.tail_scale[request] = MIN_SCALE
    for index, (x, q1, scale) in enumerate(((k, k8, k_scale), (v, v8, v_scale))):
        heads = x.transpose(0, 1)
        codes, scales = quantize_int8(heads)
        q1.copy_(codes)
        scale.copy_(scales)
        layer.scales[request, :, start // BLOCK : start // BLOCK + full_blocks, index] = scales[:, :full_blocks]
        universal = layer.tail_scale[request, :, index]
        universal.copy_(torch.maximum(universal, int8_scale(heads)))
        tail_tokens = heads[:, full_blocks * BLOCK :]
        layer.tail[request, :, index, : tail_tokens.shape[1]] = to_int8(tail_tokens, universal)
    for head in range(layer.num_kv_heads if full_blocks else 0):
        blocks = (q1[head, : full_blocks * BLOCK].unflatten(0, (full_blocks, BLOCK)) for q1 in (k8, v8))
        _write_records(layer, request, head, start // BLOCK, *blocks)


def flashq_append_ref(k: Tensor, v: Tensor, layer: FlashQLayer, seq_lens: Tensor) -> None:
    """Oracle of `flashq_append`; same arguments. Reads `seq_lens` on the host."""
    for request, n in enumerate(seq_lens.tolist()):
        for index, x in enumerate((k, v)):
            universal = layer.tail_scale[request, :, index]
            layer.tail[request, :, index, (n - 1) % BLOCK] = to_int8(x[request, :, None], universal)[:, 0]


def flashq_compact_ref(layers: FlashQLayer, seq_lens: Tensor) -> None:
    """Oracle of `flashq_compact`; same arguments. Reads `seq_lens` on the host."""
    if layers.tail.dim() == 6:
        for index in range(layers.tail.shape[0]):
            flashq_compact_ref(layers.select(index), seq_lens)
        return
    for request, n in enumerate(seq_lens.tolist()):
        block, rest = divmod(n, BLOCK)
        if rest == 0:
            layers.scales[request, :, block - 1] = layers.tail_scale[request]
            for head in range(layers.num_kv_heads):
                _write_records(layers, request, head, block - 1, *layers.tail[request, head, :, None].unbind(0))


def flashq_restore_ref(
    layer: FlashQLayer, request: int, num_blocks: int, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Oracle of `flashq_restore`; same arguments."""
    k_scale.copy_(layer.scales[request, :, :num_blocks, 0])
    v_scale.copy_(layer.scales[request, :, :num_blocks, 1])
    for head in range(layer.num_kv_heads if num_blocks else 0):
        words, bits = _records(layer, request, head, 0, num_blocks)
        for q1, codes in zip((k8, v8), unpack_record(words, bits, layer.head_dim), strict=True):
            q1[head] = reconstruct(*codes).flatten(0, 1)


def flashq_dequantize(
    layer: FlashQLayer, seq_lens: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
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
        q1 = layer.tail.new_empty((2, shape[0], full_blocks * BLOCK, shape[2]))
        scales = layer.scales.new_empty((2, shape[0], full_blocks))
        flashq_restore_ref(layer, request, full_blocks, *q1, *scales)
        per_token = scales.repeat_interleave(BLOCK, -1)[..., None]
        kv[:, request, :, : full_blocks * BLOCK].copy_(q1).mul_(per_token.to(dtype))
        tail = layer.tail[request, :, :, : n - full_blocks * BLOCK].to(dtype)
        tail *= layer.tail_scale[request, :, :, None, None].to(dtype)
        kv[:, request, :, full_blocks * BLOCK : n] = tail.movedim(1, 0)
    return kv[0], kv[1]


def _write_records(layer: FlashQLayer, request: int, head: int, first: int, k: Tensor, v: Tensor) -> None:
    """Stage 2: write blocks k, v [m, 64, D] int8 into records `first`, `first + 1`, ..."""
    words, bits = _records(layer, request, head, first, k.shape[0])
    k_codes, v_codes = (BlockCodes(q2, s_int, z.int()) for q2, s_int, z in (compress(k, bits), compress(v, bits)))
    words.copy_(pack_record(k_codes, v_codes, bits))


def _records(layer: FlashQLayer, request: int, head: int, first: int, count: int) -> tuple[Tensor, int]:
    """Return the words of `count` records, [count, record_words] (a view), and their bits."""
    bits = int(layer.bits[request, head])
    size = record_words(bits, layer.head_dim)
    start = int(layer.offset[request, head]) + first * size
    return layer.words[start : start + count * size].view(count, size), bits
