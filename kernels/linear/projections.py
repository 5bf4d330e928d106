"""The normalised projections of a decode step: QKV with RoPE and cache append, gate and up with SiLU.

Biases are added in the epilogue. If heads are normalised before RoPE, QKV only stores its products for head_norm.py.

gemv_tile.py and mma_tile.py describe how a tile of weights is read and multiplied.

Shapes: B requests, K inputs, Hq and Hkv this rank's query and KV heads, D head_dim, I intermediate size of this rank,
S sums of squares of each request, N cache capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.comm.ll_packets import store_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.kv_codec.flashq.record import TOKENS, to_int8
from alspec.kernels.kv_codec.quantised_layer import BLOCK, PER_HEAD, QuantisedLayer
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.kernels.linear.gemv_tile import (
    PROGRAMS_PER_SM,
    dot_pairs,
    dot_slices,
    gate_open,
    inputs_at_once,
    load_inputs,
    load_weights,
    num_programs_on,
    rstd_of,
)
from alspec.kernels.linear.mma_tile import load_rows, products
from alspec.kernels.linear.packed_tile import (
    abandon_tile,
    load_tile,
    packed_arguments,
    packed_products,
    shared_programs,
    tile_settings,
)

__all__ = ["gate_up_silu", "load_tail_scale", "qkv_rope_append", "rows_of_requests", "store_qkv"]


@triton.jit
def store_qkv(
    first, second, request, tile, channels, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, scale, inbox_ptr,
    epoch_ptr, capacity, K: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr, mask=None,
):  # fmt: skip
    """Rotate a tile's products and store them: q, or k and v into the cache, the tail and the paired rank's inbox.

    Args:
        first, second: products for channels c and c + D / 2, [N].
        channels: c in the tile's head, [N].
        request, scale: one for all, or [N].
        ROWS: rows of each request of the cache; each of them counts as a request here.
        mask: [N], which requests exist.
    """
    HALF: tl.constexpr = D // 2
    cached = request if ROWS == 1 else request // ROWS
    head = tile // (HALF // PAIRS)
    kv_head, is_v = tl.maximum(head - HQ, 0) % HKV, tl.maximum(head - HQ, 0) // HKV
    if head < HQ + HKV:
        cos = tl.load(rope_ptr + request * D + channels, mask=mask)
        sin = tl.load(rope_ptr + request * D + HALF + channels, mask=mask)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    if head < HQ:
        q_ptrs = q_ptr + (request * HQ + head) * D + channels
        tl.store(q_ptrs, first.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_ptrs + HALF, second.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        position = tl.load(seq_lens_ptr + request, mask=mask) - 1
        if RING:
            position = position % capacity
        low, high = first.to(k_ptr.dtype.element_ty), second.to(k_ptr.dtype.element_ty)
        if tail_ptr is not None:
            # Quantise the rounded token, as the other group does after the handover: both get the same bits.
            row = (cached * HKV + kv_head) * 2 + is_v
            tail_ptrs = tail_ptr + (row * TOKENS + position % TOKENS) * D + channels
            tl.store(tail_ptrs, to_int8(low.to(tl.float32), scale).to(tl.int8), mask=mask)
            tl.store(tail_ptrs + HALF, to_int8(high.to(tl.float32), scale).to(tl.int8), mask=mask)
            position = position * 0
            cached = request  # of the unquantised tokens
        if inbox_ptr is not None:
            epoch = tl.load(epoch_ptr)  # not earlier: it would take a register that the weights need
            packet_ptrs = inbox_ptr + request * (K + 2 * HKV * D) + K + (is_v * HKV + kv_head) * D + channels
            store_packets(packet_ptrs, low.to(tl.float32), epoch, mask)
            store_packets(packet_ptrs + HALF, high.to(tl.float32), epoch, mask)
        offsets = ((cached * HKV + kv_head).to(tl.int64) * capacity + position) * D + channels
        if is_v == 0:
            tl.store(k_ptr + offsets, low, mask=mask)
            tl.store(k_ptr + offsets + HALF, high, mask=mask)
        else:
            tl.store(v_ptr + offsets, low, mask=mask)
            tl.store(v_ptr + offsets + HALF, high, mask=mask)


@triton.jit
def _store_raw(first, second, request, rows, raw_ptr, NUM_ROWS: tl.constexpr, HALF: tl.constexpr, mask=None):
    """Store a tile's products as they are, for norm_rope_append; rows: of the first channels, [N]."""
    ptrs = raw_ptr + request * NUM_ROWS + rows
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + HALF, second, mask=mask)


@triton.jit
def _add_bias(first, second, bias_ptr, rows, STRIDE: tl.constexpr):
    """Add the biases of `rows` and of `rows + STRIDE`, if there are any."""
    if bias_ptr is not None:
        first += tl.load(bias_ptr + rows).to(tl.float32)
        second += tl.load(bias_ptr + rows + STRIDE).to(tl.float32)
    return first, second


@triton.jit
def load_tail_scale(
    tail_scale_ptr, request, tile, HQ: tl.constexpr, HKV: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    mask=None,
):  # fmt: skip
    """Load the tail's scales for a tile's head. For a query head the value is loaded but unused."""
    scale = None
    if tail_scale_ptr is not None:
        head = tl.maximum(tile // TILES - HQ, 0)
        cached = request if ROWS == 1 else request // ROWS
        scale = tl.load(tail_scale_ptr + (cached * HKV + head % HKV) * 2 + head // HKV, mask=mask)
    return scale


@triton.jit
def _qkv_tile(
    w, tile, x_ptr, squares_ptr, bias_ptr, raw_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr,
    tail_scale_ptr, inbox_ptr, epoch_ptr, capacity, eps, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, B: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile by one request after another."""
    channels = tile % (D // 2 // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    for request in tl.static_range(B):
        # Load early, so that it arrives during the product.
        scale = load_tail_scale(tail_scale_ptr, request, tile, HQ, HKV, D // 2 // PAIRS, ROWS)
        x = load_inputs(x_ptr, request, K, KP)
        rstd = rstd_of(squares_ptr, request, eps, K, S, SP)
        first, second = dot_pairs(w, x, PAIRS)
        rows = tile // (D // 2 // PAIRS) * D + channels
        first, second = _add_bias(first * rstd, second * rstd, bias_ptr, rows, D // 2)
        if raw_ptr is not None:
            _store_raw(first, second, request, rows, raw_ptr, (HQ + 2 * HKV) * D, D // 2)
        else:
            store_qkv(
                first, second, request, tile, channels, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, scale,
                inbox_ptr, epoch_ptr, capacity, K, HQ, HKV, D, PAIRS, RING, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=[*PER_HEAD, "inbox_ptr"])
def _qkv_rope_append_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32
    w_ptr,  # [(Hq + 2 Hkv) D, K], or quantised (decode_weight.py)
    scale_ptr,  # of a quantised weight, or None
    bias_ptr,  # [(Hq + 2 Hkv) D], or None
    raw_ptr,  # [B, (Hq + 2 Hkv) D] fp32: the products; nothing else is written; or None
    rope_ptr,  # [B, 2, D / 2] fp32: cosine, sine at the new token's position
    seq_lens_ptr,  # [B] int32, with the new token
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, N, D]
    v_ptr,
    tail_ptr,  # [B, Hkv, 2, 64, D] int8, or None; with a tail N is 1
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    gate_ptr,  # [1] int32 or None
    inbox_ptr,  # [B, K + 2 Hkv D] int64, the paired rank's, or None
    epoch_ptr,  # [1] int32
    capacity,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    B: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    RING: tl.constexpr,
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of channel pairs (c, c + D/2) of one head; STEPS > 0: on tensor cores. Grid [num_programs]."""
    TILES: tl.constexpr = D // 2 // PAIRS  # of one head
    NUM_TILES: tl.constexpr = (HQ + 2 * HKV) * TILES
    row = tl.arange(0, 2 * PAIRS)
    row = row // 2 + row % 2 * (D // 2)
    tile = tl.program_id(0)
    if gate_ptr is not None:
        if not gate_open(gate_ptr, PDL):
            return
    first_row = tile // TILES * D + tile % TILES * PAIRS
    if FORMAT is not None:
        w = load_tile(w_ptr, scale_ptr, tile, K, WARPS, STEPS, FORMAT, GROUP, PDL)
    elif STEPS > 0:
        w = load_rows(w_ptr, first_row, NUM_TILES * 2 * PAIRS - 1, D // 2, K, WARPS, STEPS)
    else:
        w = load_weights(w_ptr, first_row + row, 0, K, KP, False)
    if PDL:
        gdc_wait()
        # Not before the wait: attention reads lengths and older tokens as soon as it starts, before its own wait.
        gdc_launch_dependents()
    if gate_ptr is not None:
        if tl.load(gate_ptr, volatile=True) == 0:
            if FORMAT is not None:
                abandon_tile(w, K, WARPS, STEPS, FORMAT, GROUP, PDL)
            return
    if STEPS > 0:
        row_of_lane, request = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4 * 2
        while tile < NUM_TILES:
            next_tile = tile + tl.num_programs(0)
            next_row = next_tile // TILES * D + next_tile % TILES * PAIRS
            if FORMAT is not None:
                sums, w = packed_products(
                    w, x_ptr, squares_ptr, eps, w_ptr, scale_ptr, tile, next_tile, next_tile < NUM_TILES,
                    B, K, S, WARPS, STEPS, LOOP, FORMAT, GROUP, PDL,
                )  # fmt: skip
            else:
                sums, w = products(
                    w, x_ptr, squares_ptr, eps, w_ptr, first_row, next_row, NUM_TILES * 2 * PAIRS - 1,
                    next_tile < NUM_TILES, D // 2, B, K, S, WARPS, STEPS, LOOP,
                )  # fmt: skip
            for i in tl.static_range(len(sums) // 2):
                own = request + (i // 2 * 8 + i % 2)
                first, second = _add_bias(
                    sums[i // 2 * 4 + i % 2], sums[i // 2 * 4 + i % 2 + 2], bias_ptr, first_row + row_of_lane, D // 2
                )  # fmt: skip
                if raw_ptr is not None:
                    _store_raw(
                        first, second, own, first_row + row_of_lane, raw_ptr, (HQ + 2 * HKV) * D, D // 2, own < B
                    )  # fmt: skip
                else:
                    scale = load_tail_scale(tail_scale_ptr, own, tile, HQ, HKV, TILES, ROWS, own < B)
                    store_qkv(
                        first, second, own, tile, tile % TILES * PAIRS + row_of_lane, rope_ptr, seq_lens_ptr, q_ptr,
                        k_ptr, v_ptr, tail_ptr, scale, inbox_ptr, epoch_ptr, capacity, K, HQ, HKV, D, PAIRS, RING, ROWS,
                        own < B,
                    )  # fmt: skip
            tile = next_tile
            first_row = next_row
    elif KP < K:
        while tile < NUM_TILES:
            next_tile = tile + tl.num_programs(0)
            rows = tile // TILES * D + tile % TILES * PAIRS + row
            next_rows = next_tile // TILES * D + next_tile % TILES * PAIRS + row
            channels = tile % TILES * PAIRS + tl.arange(0, PAIRS)
            scale = load_tail_scale(tail_scale_ptr, 0, tile, HQ, HKV, TILES, ROWS)
            rstd = rstd_of(squares_ptr, 0, eps, K, S, SP)
            first, second, w = dot_slices(w, x_ptr, w_ptr, rows, next_rows, next_tile < NUM_TILES, K, KP, PAIRS)
            own_rows = tile // TILES * D + channels
            first, second = _add_bias(first * rstd, second * rstd, bias_ptr, own_rows, D // 2)
            if raw_ptr is not None:
                _store_raw(first, second, 0, own_rows, raw_ptr, (HQ + 2 * HKV) * D, D // 2)
            else:
                store_qkv(
                    first, second, 0, tile, channels, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, scale,
                    inbox_ptr, epoch_ptr, capacity, K, HQ, HKV, D, PAIRS, RING, ROWS,
                )  # fmt: skip
            tile = next_tile
    elif LOOP:
        while tile < NUM_TILES:
            next_tile = tile + tl.num_programs(0)
            rows = next_tile // TILES * D + next_tile % TILES * PAIRS + row
            w_next = load_weights(w_ptr, rows, (HQ + 2 * HKV) * D, K, KP, True)
            _qkv_tile(
                w, tile, x_ptr, squares_ptr, bias_ptr, raw_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr,
                tail_scale_ptr, inbox_ptr, epoch_ptr, capacity, eps, K, KP, S, SP, B, HQ, HKV, D, PAIRS, RING, ROWS,
            )  # fmt: skip
            tile = next_tile
            w = w_next
    else:
        _qkv_tile(
            w, tile, x_ptr, squares_ptr, bias_ptr, raw_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr,
            tail_scale_ptr, inbox_ptr, epoch_ptr, capacity, eps, K, KP, S, SP, B, HQ, HKV, D, PAIRS, RING, ROWS,
        )  # fmt: skip


def rows_of_requests(num_rows: int, k_cache: Tensor, layer: QuantisedLayer | None) -> int:
    """Return the rows of each request, from the requests of the cache that they are appended to.

    Raises:
        ValueError: `layer` and k_cache do not fit each other or the rows.
    """
    batch_size, (num_kv_heads, capacity, head_dim) = k_cache.shape[0], k_cache.shape[1:]
    if layer is not None:
        batch_size = layer.tail.shape[0]
        expected = (batch_size, num_kv_heads, 2, BLOCK * capacity, head_dim)
        if k_cache.shape[0] != num_rows or num_rows % batch_size or layer.tail.shape != expected:
            found = list(layer.tail.shape)
            raise ValueError(f"layer: expected a tail for k_cache {list(k_cache.shape)}, found {found}")
    if num_rows % batch_size:
        raise ValueError(f"x_norm: expected a multiple of {batch_size} rows, found {num_rows}")
    return num_rows // batch_size


def qkv_rope_append(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor | DecodeWeight,
    rope: Tensor,
    seq_lens: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    gate: Tensor | None = None,
    layer: QuantisedLayer | None = None,
    inbox: Tensor | None = None,
    epoch: Tensor | None = None,
    is_ring: bool = False,
    bias: Tensor | None = None,
    raw: Tensor | None = None,
) -> None:
    """QKV projection with the RMSNorm factor, RoPE, and append of k and v to the cache. Oracle: `qkv_rope_append_ref`.

        y = (x_norm W^T) / sqrt(sum(square_sums) / K + eps) + bias;  q, k rotated;  cache[seq_len - 1] = k, v

    With `raw`, only y is written, and `norm_rope_append` (head_norm.py) does the rest.

    With a quantised `layer`, k and v are also quantised into its tail, as `kv_append` does. Then k_cache and
    v_cache hold only the newest token, unquantised. Oracle of the tail: `kv_append_ref`.

    Args:
        x_norm: [B, K] in weight's dtype, `x * gamma`; of 16 bits beside a quantised weight.
        square_sums: [B, S] fp32.
        weight: [(Hq + 2 Hkv) D, K], quantised with stride D / 2.
        rope: [B, 2, D/2] fp32, cosine and sine.
        seq_lens: [B] int32, with the new token.
        q: [B, Hq, D], written.
        k_cache, v_cache: [B, Hkv, N, D]; one position of each request is written.
        gate: [1] int32; 0 skips everything.
        layer: with the same Hkv and D, and N = 1; its tail is written. A cache (layer, or k_cache and v_cache without
            it) of B / R requests takes R rows of each, which lie side by side.
        inbox: [B, K + 2 Hkv D] int64, the paired rank's; packets from K on become the new keys, then the new values.
        epoch: [1] int32, of the packets.
        is_ring: the caches are rings: position p lies at p mod N.
        bias: [(Hq + 2 Hkv) D].
        raw: [B, (Hq + 2 Hkv) D] fp32, written instead of q, the caches, the tail and the inbox.
    Raises:
        ValueError: `layer` and k_cache do not fit.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_inputs = x_norm.shape
    num_kv_heads, capacity, head_dim = k_cache.shape[1:]
    rows = rows_of_requests(batch_size, k_cache, layer)
    num_heads = weight.shape[0] // head_dim
    width = inputs_at_once(batch_size, num_inputs, x_norm.itemsize, gate is not None)
    pairs, steps, num_warps = tile_settings(weight, x_norm, head_dim // 2, 2, gate is not None)
    num_tiles = num_heads * head_dim // (2 * pairs)
    num_programs = num_programs_on(num_tiles, PROGRAMS_PER_SM if gate is not None else 0, x_norm.device)
    operands, constants = packed_arguments(weight)
    compiled = jit_launch(_qkv_rope_append_kernel, (num_programs,))(
        x_norm,
        square_sums,
        *operands,
        bias,
        raw,
        rope,
        seq_lens,
        q,
        k_cache,
        v_cache,
        None if layer is None else layer.tail,
        None if layer is None else layer.tail_scale,
        gate,
        inbox,
        None if inbox is None else epoch,
        capacity,
        eps,
        K=num_inputs,
        KP=width,
        S=square_sums.shape[1],
        SP=triton.next_power_of_2(square_sums.shape[1]),
        B=batch_size,
        HQ=num_heads - 2 * num_kv_heads,
        HKV=num_kv_heads,
        D=head_dim,
        PAIRS=pairs,
        RING=is_ring,
        ROWS=rows,
        LOOP=num_programs < num_tiles,
        STEPS=steps,
        WARPS=num_warps,
        **constants,
        num_warps=num_warps,
        **pdl_options(x_norm.device),
    )
    set_l1_carveout(compiled, shared_programs(weight, batch_size, num_warps))


@triton.jit
def _store_silu(gate, up, ptrs, mask=None):
    """Store silu(gate) * up of a tile at `ptrs`, [N]; mask: which requests exist."""
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(ptrs, out.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _gate_up_tile(
    w, tile, x_ptr, squares_ptr, bias_ptr, out_ptr, eps,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, B: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile by one request after another."""
    for request in tl.static_range(B):
        x = load_inputs(x_ptr, request, K, KP)
        rstd = rstd_of(squares_ptr, request, eps, K, S, SP)
        gate, up = dot_pairs(w, x, ROWS)
        rows = tile * ROWS + tl.arange(0, ROWS)
        gate, up = _add_bias(gate * rstd, up * rstd, bias_ptr, rows, I)
        _store_silu(gate, up, out_ptr + request * I + tile * ROWS + tl.arange(0, ROWS))


@triton.jit
def _gate_up_silu_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32
    w_ptr,  # [2 I, K], gate first, or quantised (decode_weight.py)
    scale_ptr,  # of a quantised weight, or None
    bias_ptr,  # [2 I], or None
    out_ptr,  # [B, I]
    gate_ptr,  # [1] int32 or None
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    B: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    LOOP: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of ROWS rows of gate and the same of up; STEPS > 0: on tensor cores. Grid [num_programs]."""
    if PDL:
        gdc_launch_dependents()
    row = tl.arange(0, 2 * ROWS)
    row = row // 2 + row % 2 * I
    tile = tl.program_id(0)
    if gate_ptr is not None:
        if not gate_open(gate_ptr, PDL):
            return
    if FORMAT is not None:
        w = load_tile(w_ptr, scale_ptr, tile, K, WARPS, STEPS, FORMAT, GROUP, PDL)
    elif STEPS > 0:
        w = load_rows(w_ptr, tile * ROWS, 2 * I - 1, I, K, WARPS, STEPS)
    else:
        w = load_weights(w_ptr, tile * ROWS + row, 0, K, KP, False)
    if PDL:
        gdc_wait()
    if gate_ptr is not None:
        if tl.load(gate_ptr, volatile=True) == 0:
            if FORMAT is not None:
                abandon_tile(w, K, WARPS, STEPS, FORMAT, GROUP, PDL)
            return
    if STEPS > 0:
        row_of_lane, request = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4 * 2
        while tile * ROWS < I:
            next_tile = tile + tl.num_programs(0)
            if FORMAT is not None:
                sums, w = packed_products(
                    w, x_ptr, squares_ptr, eps, w_ptr, scale_ptr, tile, next_tile, next_tile * ROWS < I,
                    B, K, S, WARPS, STEPS, LOOP, FORMAT, GROUP, PDL,
                )  # fmt: skip
            else:
                sums, w = products(
                    w, x_ptr, squares_ptr, eps, w_ptr, tile * ROWS, next_tile * ROWS, 2 * I - 1, next_tile * ROWS < I,
                    I, B, K, S, WARPS, STEPS, LOOP,
                )  # fmt: skip
            for i in tl.static_range(len(sums) // 2):
                own = request + (i // 2 * 8 + i % 2)
                ptrs = out_ptr + own * I + tile * ROWS + row_of_lane
                gate, up = _add_bias(
                    sums[i // 2 * 4 + i % 2], sums[i // 2 * 4 + i % 2 + 2], bias_ptr, tile * ROWS + row_of_lane, I
                )  # fmt: skip
                _store_silu(gate, up, ptrs, own < B)
            tile = next_tile
    elif KP < K:
        while tile * ROWS < I:
            next_tile = tile + tl.num_programs(0)
            rstd = rstd_of(squares_ptr, 0, eps, K, S, SP)
            gate, up, w = dot_slices(
                w, x_ptr, w_ptr, tile * ROWS + row, next_tile * ROWS + row, next_tile * ROWS < I, K, KP, ROWS
            )  # fmt: skip
            gate, up = _add_bias(gate * rstd, up * rstd, bias_ptr, tile * ROWS + tl.arange(0, ROWS), I)
            _store_silu(gate, up, out_ptr + tile * ROWS + tl.arange(0, ROWS))
            tile = next_tile
    elif LOOP:
        while tile * ROWS < I:
            next_tile = tile + tl.num_programs(0)
            # A tile past the end of gate must not read rows of up: the limit is then 0.
            w_next = load_weights(w_ptr, next_tile * ROWS + row, tl.where(next_tile * ROWS < I, 2 * I, 0), K, KP, True)
            _gate_up_tile(w, tile, x_ptr, squares_ptr, bias_ptr, out_ptr, eps, K, KP, S, SP, B, I, ROWS)
            tile = next_tile
            w = w_next
    else:
        _gate_up_tile(w, tile, x_ptr, squares_ptr, bias_ptr, out_ptr, eps, K, KP, S, SP, B, I, ROWS)


def gate_up_silu(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor | DecodeWeight,
    out: Tensor,
    eps: float,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    like_gated: bool = False,
) -> None:
    """`silu(gate) * up` of the normalised input. Oracle: `gate_up_silu_ref`.

        gate, up = (x_norm W^T) / sqrt(sum(square_sums) / K + eps) + bias

    Args:
        x_norm, square_sums, gate: as `qkv_rope_append`.
        weight: [2 I, K], gate first, quantised with stride I.
        out: [B, I], written.
        bias: [2 I].
        like_gated: without a gate, the bits that a launch with one gives.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_inputs = x_norm.shape
    closes = gate is not None or like_gated
    width = inputs_at_once(batch_size, num_inputs, x_norm.itemsize, closes)
    rows, steps, num_warps = tile_settings(weight, x_norm, out.shape[1], 2, closes)
    num_tiles = out.shape[1] // rows
    num_programs = num_programs_on(num_tiles, 4 * PROGRAMS_PER_SM if gate is not None else 0, x_norm.device)
    operands, constants = packed_arguments(weight)
    compiled = jit_launch(_gate_up_silu_kernel, (num_programs,))(
        x_norm,
        square_sums,
        *operands,
        bias,
        out,
        gate,
        eps,
        K=num_inputs,
        KP=width,
        S=square_sums.shape[1],
        SP=triton.next_power_of_2(square_sums.shape[1]),
        B=batch_size,
        I=out.shape[1],
        ROWS=rows,
        LOOP=num_programs < num_tiles,
        STEPS=steps,
        WARPS=num_warps,
        **constants,
        num_warps=num_warps,
        **pdl_options(x_norm.device),
    )
    set_l1_carveout(compiled, shared_programs(weight, batch_size, num_warps))
