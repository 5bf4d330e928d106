"""GPU kernels that write the quantised KV cache and restore it: store a prompt, append a token, compact a full tail.

record_sides.py converts a block to the sides of a record and back, by the codec of each side. The oracles are in
codec_reference.py.

Shapes: B requests, H KV heads of this rank, D head_dim, n tokens, NB capacity in blocks, W words of a layer, L layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.common.jit_launch import jit_launch, pdl_options
from alspec.kernels.common.pdl import wait_for_previous_kernel
from alspec.kernels.kv_codec.flashq.quantize import MIN_SCALE
from alspec.kernels.kv_codec.flashq.record import TOKENS, largest, to_int8
from alspec.kernels.kv_codec.formats import record_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, PER_HEAD, QuantisedLayer
from alspec.kernels.kv_codec.record_sides import record_at, restore_side, write_side

__all__ = ["kv_restore", "kv_store", "kv_append", "kv_compact"]

NUM_WARPS = 4
STORE_WARPS = 8  # with fewer, a block of 128 channels spills registers; so does the compaction of TurboQuant
COMPACT_ROWS = 64  # rows (request, head, layer) per launch of `kv_compact`; K and V make that 128 programs


@triton.jit
def _store_tensor(
    x_ptr,  # [n, D] of this head
    x_stride,  # between tokens
    q1_ptr,  # [n, D] int8 of this head
    scale_ptr,  # stage-1 scale of this block, for prefill attention
    tail_scale_ptr,  # universal scale of this head
    cache_scale_ptr,  # scale of the record
    record_ptr,
    bits,
    n,
    chunk_block,  # index of the block in the prompt chunk
    FORMAT: tl.constexpr,
    D: tl.constexpr,
    IS_V: tl.constexpr,
):
    """Stage 1 of one block of K or V, and its side of a record. An incomplete block passes only stage 1."""
    c = tl.arange(0, D)
    t = chunk_block * TOKENS + tl.arange(0, TOKENS)
    token_mask = (t < n)[:, None]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * x_stride + c[None, :], mask=token_mask, other=0.0).to(tl.float32)
    raw = tl.div_rn(largest(largest(x, 1), 0), 119.0)
    scale = tl.where(raw == 0, 1.0, raw)
    tl.atomic_max(tail_scale_ptr, raw, sem="relaxed")
    tl.store(scale_ptr, scale)
    q1 = to_int8(x, scale)
    tl.store(q1_ptr + t[:, None].to(tl.int64) * D + c[None, :], q1.to(tl.int8), mask=token_mask)
    if (chunk_block + 1) * TOKENS <= n:
        factor = write_side(q1, record_ptr, bits, FORMAT, D, IS_V)
        tl.store(cache_scale_ptr, scale * factor)


# Lengths are not specialised, nor the alignment of pointers that depend on lengths or layers. So one compiled kernel
# serves all prompts and layers.
@triton.jit(
    do_not_specialize=["n", "request", "first_block", "num_blocks", "scale_head_stride"],
    do_not_specialize_on_alignment=[*PER_HEAD, "k_scale_ptr", "v_scale_ptr"],
)
def _store_kernel(
    k_ptr,  # [n, H, D]
    v_ptr,
    words_ptr,  # [W] int32
    offset_ptr,  # [B, H] int64
    bits_ptr,  # [B, H] int32
    scales_ptr,  # [B, H, NB, 2] fp32
    tail_scale_ptr,  # [B, H, 2] fp32
    k8_ptr,  # [H, n, D] int8
    v8_ptr,
    k_scale_ptr,  # [H, ceil(n / 64)] fp32
    v_scale_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    q8_head_stride,
    scale_head_stride,
    n,
    request,
    first_block,
    num_blocks,
    FORMAT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Quantise one block of one head, K and V. Grid [ceil(n / 64), H]."""
    chunk_block = tl.program_id(0)
    block = first_block + chunk_block
    head = tl.program_id(1).to(tl.int64)
    row = request * H + head
    bits = tl.load(bits_ptr + row)
    record_ptr = record_at(words_ptr, tl.load(offset_ptr + row), bits, block, FORMAT, D)
    scale_offset = head * scale_head_stride + chunk_block
    cache_scale_ptr = scales_ptr + (row * num_blocks + block) * 2
    _store_tensor(
        k_ptr + head * k_head_stride, k_token_stride, k8_ptr + head * q8_head_stride, k_scale_ptr + scale_offset,
        tail_scale_ptr + row * 2, cache_scale_ptr, record_ptr, bits, n, chunk_block, FORMAT, D, 0,
    )  # fmt: skip
    _store_tensor(
        v_ptr + head * v_head_stride, v_token_stride, v8_ptr + head * q8_head_stride, v_scale_ptr + scale_offset,
        tail_scale_ptr + row * 2 + 1, cache_scale_ptr + 1, record_ptr, bits, n, chunk_block, FORMAT, D, 1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rest", "request"], do_not_specialize_on_alignment=PER_HEAD)
def _store_tail_kernel(
    k_ptr,  # [rest, H, D], 1 to 64 tokens
    v_ptr,
    tail_ptr,  # [B, H, 2, 64, D] int8
    tail_scale_ptr,  # [B, H, 2] fp32
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    rest,
    request,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Write the prompt's last block into the tail, with the universal scale. Grid [H, 2], K then V."""
    head = tl.program_id(0).to(tl.int64)
    is_v = tl.program_id(1)
    row = (request * H + head) * 2 + is_v
    x_ptr, token_stride = k_ptr + head * k_head_stride, k_token_stride
    if is_v == 1:
        x_ptr, token_stride = v_ptr + head * v_head_stride, v_token_stride
    c = tl.arange(0, D)
    t = tl.arange(0, TOKENS)
    token_mask = (t < rest)[:, None]
    x = tl.load(x_ptr + t[:, None].to(tl.int64) * token_stride + c[None, :], mask=token_mask, other=0.0).to(tl.float32)
    q1 = to_int8(x, tl.load(tail_scale_ptr + row))
    tl.store(tail_ptr + (row * TOKENS + t[:, None]) * D + c[None, :], q1.to(tl.int8), mask=token_mask)


def kv_store(
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
    """Quantise one prompt chunk of one request and write it into the cache. Oracle: `kv_store_ref`.

    Full blocks become records. The universal scale becomes the largest stage-1 scale of the prompt so far. The last
    block also goes into the tail, with the universal scale: attention of its last token reads it there, full or not.
    Source: TurboAttention, sections 3.1 and 3.3.

    Args:
        k, v: [n, H, D] bf16, fp16 or fp32, channels contiguous.
        layer: written; its `bits` and `offset` are only read.  request: index of the request.
        start: position of the first token, a multiple of 64; 0 begins a new prompt.
        k8, v8: [H, n, D] int8, stage 1 of the chunk, written; any stride between heads, the same for both.
        k_scale, v_scale: [H, ceil(n / 64)] fp32, scales of stage 1, written; strides as for k8, v8.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    """
    num_tokens, num_heads, head_dim = k.shape
    _check_chunk(k, v, layer, start)
    _check_stage_1(k8, v8, k_scale, v_scale, (num_heads, num_tokens, head_dim))
    if start == 0:
        layer.tail_scale[request].fill_(MIN_SCALE)
    strides = (*k.stride()[:2], *v.stride()[:2])
    _store_kernel[(triton.cdiv(num_tokens, BLOCK), num_heads)](
        k, v, layer.words, layer.offset, layer.bits, layer.scales, layer.tail_scale, k8, v8, k_scale, v_scale, *strides,
        k8.stride(0), k_scale.stride(0), num_tokens, request, start // BLOCK, layer.num_blocks,
        FORMAT=layer.format, H=num_heads, D=head_dim, num_warps=STORE_WARPS,
    )  # fmt: skip
    rest = (num_tokens - 1) % BLOCK + 1
    _store_tail_kernel[(num_heads, 2)](
        k[num_tokens - rest :], v[num_tokens - rest :], layer.tail, layer.tail_scale, *strides, rest, request,
        H=num_heads, D=head_dim, num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=PER_HEAD)
def _kv_append_kernel(
    k_ptr,  # [B, H, D]
    v_ptr,
    seq_lens_ptr,  # [B] int32, including the new token
    tail_ptr,  # [B, H, 2, 64, D] int8
    tail_scale_ptr,  # [B, H, 2] fp32
    k_request_stride,
    k_head_stride,
    v_request_stride,
    v_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Append one token of one request and head, K or V. Grid [B H, 2]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = tl.program_id(0).to(tl.int64) * 2 + tl.program_id(1)
    x_ptr = k_ptr + request * k_request_stride + head * k_head_stride
    if tl.program_id(1) == 1:
        x_ptr = v_ptr + request * v_request_stride + head * v_head_stride
    c = tl.arange(0, D)
    q1 = to_int8(tl.load(x_ptr + c).to(tl.float32), tl.load(tail_scale_ptr + row))
    tail_index = (tl.load(seq_lens_ptr + request) - 1) % TOKENS
    tl.store(tail_ptr + (row * TOKENS + tail_index) * D + c, q1.to(tl.int8))


def kv_append(k: Tensor, v: Tensor, layer: QuantisedLayer, seq_lens: Tensor) -> None:
    """Append one new token of each request to the tail, unless `qkv_rope_append` or a handover wrote it there.

        tail[(n - 1) % 64] = clamp(rint(x / universal scale), -119, 119)

    Source: TurboAttention, section 3.3. Oracle: `kv_append_ref`.

    Args:
        k, v: [B, H, D] bf16, fp16 or fp32, channels contiguous.  layer: its tail is written.
        seq_lens: [B] int32, including the new token (n).
    Raises:
        ValueError: shape or layout, naming the argument.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_heads, head_dim = layer.batch_size, layer.num_kv_heads, layer.head_dim
    for name, x in (("k", k), ("v", v)):
        if x.shape != (batch_size, num_heads, head_dim) or x.stride(2) != 1:
            expected = f"[{batch_size}, {num_heads}, {head_dim}] with contiguous channels"
            raise ValueError(f"{name}: expected {expected}, found {list(x.shape)}")
    jit_launch(_kv_append_kernel, (batch_size * num_heads, 2))(
        k, v, seq_lens, layer.tail, layer.tail_scale, *k.stride()[:2], *v.stride()[:2], H=num_heads, D=head_dim,
        num_warps=1, **pdl_options(k.device),
    )  # fmt: skip


@triton.jit
def _compact_tensor(tail_ptr, record_ptr, bits, FORMAT: tl.constexpr, D: tl.constexpr, IS_V: tl.constexpr):
    """Write a full tail [64, D] int8 of K or V as a side of its record; return the factor of `write_side`."""
    offsets = tl.arange(0, TOKENS)[:, None] * D + tl.arange(0, D)[None, :]
    return write_side(tl.load(tail_ptr + offsets).to(tl.int32), record_ptr, bits, FORMAT, D, IS_V)


@triton.jit(do_not_specialize=["num_layers", "num_rows", "num_blocks"], do_not_specialize_on_alignment=PER_HEAD)
def _kv_compact_kernel(
    seq_lens_ptr,  # [B] int32, including the new token
    words_ptr,  # [L, W] int32
    offset_ptr,  # [L, B, H] int64
    bits_ptr,  # [L, B, H] int32
    scales_ptr,  # [L, B, H, NB, 2] fp32
    tail_ptr,  # [L, B, H, 2, 64, D] int8
    tail_scale_ptr,  # [L, B, H, 2] fp32
    layer_words,  # W
    num_layers,
    num_rows,  # B H
    num_blocks,
    FORMAT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compact one request and head, K or V, in every `num_programs(2)`-th layer. Grid [B H, 2, up to L]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq_len = tl.load(seq_lens_ptr + tl.program_id(0) // H)
    if seq_len % TOKENS != 0:
        return
    block = seq_len // TOKENS - 1
    is_v = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    while layer < num_layers:
        row = layer * num_rows + tl.program_id(0)
        bits = tl.load(bits_ptr + row)
        record_ptr = record_at(words_ptr + layer * layer_words, tl.load(offset_ptr + row), bits, block, FORMAT, D)
        scale = tl.load(tail_scale_ptr + row * 2 + is_v)
        own_tail_ptr = tail_ptr + (row * 2 + is_v) * (TOKENS * D)
        if is_v == 0:
            scale *= _compact_tensor(own_tail_ptr, record_ptr, bits, FORMAT, D, 0)
        else:
            scale *= _compact_tensor(own_tail_ptr, record_ptr, bits, FORMAT, D, 1)
        tl.store(scales_ptr + (row * num_blocks + block) * 2 + is_v, scale)
        layer += tl.num_programs(2)


def kv_compact(layers: QuantisedLayer, seq_lens: Tensor) -> None:
    """Write full tails into records, in all layers: the tail of a request becomes record `n / 64 - 1` if 64 divides n.

    Other requests do not change. Launch it at the end of a step: attention of this step reads the tail, which stays
    unchanged, attention of the next step reads the record. A second launch has no further effect.
    Source: TurboAttention, section 3.3. Oracle: `kv_compact_ref`.

    Args:
        layers: one layer or a stack; written.
        seq_lens: [B] int32, including the new token (n), at most 64 NB + 63.
    Capture: graph-safe; allocates nothing.
    """
    num_layers, num_rows = layers.tail.shape[:-5].numel(), layers.batch_size * layers.num_kv_heads
    # Few programs, each for several layers: in 63 of 64 steps of a request they return at once.
    layer_programs = min(num_layers, triton.cdiv(COMPACT_ROWS, num_rows))
    jit_launch(_kv_compact_kernel, (num_rows, 2, layer_programs))(
        seq_lens, layers.words, layers.offset, layers.bits, layers.scales, layers.tail, layers.tail_scale,
        layers.words.shape[-1], num_layers, num_rows, layers.num_blocks, FORMAT=layers.format,
        H=layers.num_kv_heads, D=layers.head_dim, num_warps=NUM_WARPS if layers.format == "flashq" else STORE_WARPS,
        **pdl_options(seq_lens.device),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["request", "num_blocks", "scale_head_stride"],
    do_not_specialize_on_alignment=[*PER_HEAD, "k_scale_ptr", "v_scale_ptr"],
)
def _restore_kernel(
    words_ptr,  # [W] int32
    offset_ptr,  # [B, H] int64
    bits_ptr,  # [B, H] int32
    scales_ptr,  # [B, H, NB, 2] fp32
    k8_ptr,  # [H, nb 64, D] int8
    v8_ptr,
    k_scale_ptr,  # [H, nb] fp32
    v_scale_ptr,
    q8_head_stride,
    scale_head_stride,
    request,
    num_blocks,
    FORMAT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Restore one record, K and V. Grid [nb, H]."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = request * H + head
    q1_offset = head * q8_head_stride + block * (TOKENS * D)
    scale_offset = head * scale_head_stride + block
    cache_scale_ptr = scales_ptr + (row * num_blocks + block) * 2
    bits = tl.load(bits_ptr + row)
    record_ptr = record_at(words_ptr, tl.load(offset_ptr + row), bits, block, FORMAT, D)
    k_scale = restore_side(record_ptr, bits, tl.load(cache_scale_ptr), k8_ptr + q1_offset, FORMAT, D, 0)
    v_scale = restore_side(record_ptr, bits, tl.load(cache_scale_ptr + 1), v8_ptr + q1_offset, FORMAT, D, 1)
    tl.store(k_scale_ptr + scale_offset, k_scale)
    tl.store(v_scale_ptr + scale_offset, v_scale)


def kv_restore(
    layer: QuantisedLayer, request: int, num_blocks: int, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor
) -> None:
    """Restore records `[0, num_blocks)` of one request to INT8, `q1' = q2 s_int + z`. Oracle: `kv_restore_ref`.

    Args:
        layer: read.  request: index of the request.
        k8, v8: [H, 64 num_blocks, D] int8, written; any stride between heads, the same for both.
        k_scale, v_scale: [H, num_blocks] fp32, written; strides as for k8, v8.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    """
    num_heads, head_dim = layer.num_kv_heads, layer.head_dim
    _check_stage_1(k8, v8, k_scale, v_scale, (num_heads, num_blocks * BLOCK, head_dim))
    if num_blocks == 0:
        return
    _restore_kernel[(num_blocks, num_heads)](
        layer.words, layer.offset, layer.bits, layer.scales, k8, v8, k_scale, v_scale, k8.stride(0), k_scale.stride(0),
        request, layer.num_blocks, FORMAT=layer.format, H=num_heads, D=head_dim, num_warps=NUM_WARPS,
    )  # fmt: skip


def _check_chunk(k: Tensor, v: Tensor, layer: QuantisedLayer, start: int) -> None:
    num_tokens, num_heads, head_dim = k.shape
    record_words(layer.format, 4, head_dim)  # raises for an unsupported head_dim
    if v.shape != k.shape or (num_heads, head_dim) != (layer.num_kv_heads, layer.head_dim):
        expected = f"[n, {layer.num_kv_heads}, {layer.head_dim}]"
        raise ValueError(f"k, v: expected two {expected}, found {list(k.shape)} and {list(v.shape)}")
    if k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("k, v: expected contiguous channels")
    if start % BLOCK or start // BLOCK + num_tokens // BLOCK > layer.num_blocks:
        raise ValueError(
            f"start: expected a multiple of {BLOCK} with space for {num_tokens} tokens in {layer.num_blocks} blocks, "
            f"found {start}"
        )


def _check_stage_1(k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor, shape: tuple[int, int, int]) -> None:
    num_heads, num_tokens, head_dim = shape
    scale_shape = (num_heads, -(-num_tokens // BLOCK))
    for name, x, expected, dtype in (
        ("k8", k8, shape, torch.int8), ("v8", v8, shape, torch.int8),
        ("k_scale", k_scale, scale_shape, torch.float32), ("v_scale", v_scale, scale_shape, torch.float32),
    ):  # fmt: skip
        if x.shape != expected or x.dtype != dtype:
            raise ValueError(f"{name}: expected {list(expected)} {dtype}, found {list(x.shape)} {x.dtype}")
    if k8.stride() != v8.stride() or k8.stride()[1:] != (head_dim, 1) or k_scale.stride() != v_scale.stride():
        raise ValueError("k8, v8, k_scale, v_scale: expected the same strides for K and V, and contiguous tokens")
    if k_scale.stride(1) != 1:
        raise ValueError("k_scale: expected contiguous blocks")
