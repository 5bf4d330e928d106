"""Decode projections: skinny matrix-vector products that read each weight once, for 1 to 8 requests.

One program holds a tile of whole weight rows in registers, its first one loaded before it waits for the kernel ahead of
it (programmatic dependent launch): the stream of weights does not stop at kernel boundaries. Then come the activations,
the products and the epilogue: RoPE and cache append, SiLU, or the push of partial sums to the group. With a gate, the
tile is loaded that early only if the gate looks open: a group that does not compute leaves the memory to others.

The input of a normalised projection is `x * gamma` in the weights' dtype; the factor `1 / rms(x)` is applied to the
product, from the sums of squares that the kernel ahead left.

Shapes: B requests, K inputs, Hq and Hkv this rank's query and KV heads, D head_dim, I intermediate size of this rank,
T ranks of the group, S sums of squares of each request, N cache capacity.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .exchange import Exchange, LogitExchange
from .flashq_kernels import TOKENS, _to_int8
from .flashq_layout import BLOCK, TurboLayer
from .launch import launch, launch_options, prefer_l1
from .words import BAD_NUMBERS, fault_code, pack_words

__all__ = ["MAX_BATCH", "gate_up_silu", "lm_head", "push_partial", "qkv_rope_append"]

MAX_BATCH = 8  # requests; each more is one more pass over the tile in registers
TILE_BYTES = 16384  # of weights in the registers of one program; a longer row is one tile
# Programs that take several tiles, each loaded while the one before is in use. Where a gate can close, few programs
# make a closed launch cheap: one for each tile of gate and up takes 37 us to do nothing (8B shape, one H200). Elsewhere
# this was faster for the row-parallel projections alone.
PROGRAMS_PER_SM = 4


@triton.jit
def _opens(gate_ptr, PDL: tl.constexpr):
    """Whether weights are worth reading. A gate that looks closed may be about to open: then wait for its value.

    Warps may see different values. They part only until each of them has waited; nothing they share lies in between.
    """
    is_open = tl.load(gate_ptr, volatile=True) != 0
    if PDL:  # noqa: SIM102 (one is of the compiler, the other of the program)
        if not is_open:
            gdc_wait()
            is_open = tl.load(gate_ptr, volatile=True) != 0
    return is_open


@triton.jit
def _weights(w_ptr, rows, num_rows, K: tl.constexpr, KP: tl.constexpr, MASKED: tl.constexpr):
    """Tile [rows, KP] of a [num_rows, K] matrix; read once in a step, so it may leave the cache first."""
    k = tl.arange(0, KP)
    at = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    if MASKED:
        inside = (rows < num_rows)[:, None] & (k < K)[None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    if KP != K:
        return tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _inputs(x_ptr, request, K: tl.constexpr, KP: tl.constexpr):
    """One request's activations [KP] fp32."""
    k = tl.arange(0, KP)
    if KP != K:
        return tl.load(x_ptr + request * K + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.load(x_ptr + request * K + k).to(tl.float32)


@triton.jit
def _dot(w, x):
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def _dot_pairs(w, x, PAIRS: tl.constexpr):
    """Products of the even and of the odd rows of a tile, with one reduction for both."""
    return tl.split(tl.reshape(_dot(w, x), [PAIRS, 2]))


@triton.jit
def _rstd(squares_ptr, request, eps, K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr):
    """`1 / sqrt(mean(x^2) + eps)` of one request."""
    s = tl.arange(0, SP)
    squares = tl.load(squares_ptr + request * S + s, mask=s < S, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _qkv_tile(
    w, tile, x_ptr, squares_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr, capacity, eps,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, B: tl.constexpr, HQ: tl.constexpr,
    HKV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Products of one tile, turned and stored."""
    HALF: tl.constexpr = D // 2
    head = tile // (HALF // PAIRS)
    channels = tile % (HALF // PAIRS) * PAIRS + tl.arange(0, PAIRS)
    kv_head, is_v = tl.maximum(head - HQ, 0) % HKV, tl.maximum(head - HQ, 0) // HKV
    for request in tl.static_range(B):
        if tail_ptr is not None:
            # So early that it arrives while the product is made. A query head has no use for the one that it loads.
            row = (request * HKV + kv_head) * 2 + is_v
            scale = tl.load(tail_scale_ptr + row)
        x = _inputs(x_ptr, request, K, KP)
        rstd = _rstd(squares_ptr, request, eps, K, S, SP)
        first, second = _dot_pairs(w, x, PAIRS)
        first *= rstd
        second *= rstd
        if head < HQ + HKV:
            cos = tl.load(rope_ptr + request * D + channels)
            sin = tl.load(rope_ptr + request * D + HALF + channels)
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        if head < HQ:
            q_at = q_ptr + (request * HQ + head) * D + channels
            tl.store(q_at, first.to(q_ptr.dtype.element_ty))
            tl.store(q_at + HALF, second.to(q_ptr.dtype.element_ty))
        else:
            position = tl.load(seq_lens_ptr + request) - 1
            low, high = first.to(k_ptr.dtype.element_ty), second.to(k_ptr.dtype.element_ty)
            if tail_ptr is not None:
                # Of the rounded token, as a handover passes it on: the other group comes to the same bits.
                slot = tail_ptr + (row * TOKENS + position % TOKENS) * D + channels
                tl.store(slot, _to_int8(low.to(tl.float32), scale).to(tl.int8))
                tl.store(slot + HALF, _to_int8(high.to(tl.float32), scale).to(tl.int8))
                position = 0
            at = ((request * HKV + kv_head).to(tl.int64) * capacity + position) * D + channels
            if is_v == 0:
                tl.store(k_ptr + at, low)
                tl.store(k_ptr + at + HALF, high)
            else:
                tl.store(v_ptr + at, low)
                tl.store(v_ptr + at + HALF, high)


@triton.jit
def _qkv_rope_append_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32
    w_ptr,  # [(Hq + 2 Hkv) D, K]
    rope_ptr,  # [B, 2, D / 2] fp32: cosine, sine at the new token's position
    seq_lens_ptr,  # [B] int32, with the new token
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, N, D]
    v_ptr,
    tail_ptr,  # [B, Hkv, 2, 64, D] int8, or None; with a tail N is 1
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    gate_ptr,  # [1] int32 or None
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
    LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of channel pairs (c, c + D/2) of one head, every `num_programs`-th."""
    TILES: tl.constexpr = D // 2 // PAIRS  # of one head
    row = tl.arange(0, 2 * PAIRS)
    row = row // 2 + row % 2 * (D // 2)
    tile = tl.program_id(0)
    if gate_ptr is not None:  # noqa: SIM102
        if not _opens(gate_ptr, PDL):
            return
    w = _weights(w_ptr, tile // TILES * D + tile % TILES * PAIRS + row, 0, K, KP, False)
    if PDL:
        gdc_wait()
        # Not before: attention reads lengths and older tokens as soon as it starts, and they must be there.
        gdc_launch_dependents()
    if gate_ptr is not None:  # noqa: SIM102
        if tl.load(gate_ptr, volatile=True) == 0:
            return
    if LOOP:
        while tile < (HQ + 2 * HKV) * TILES:
            following = tile + tl.num_programs(0)
            rows = following // TILES * D + following % TILES * PAIRS + row
            w_next = _weights(w_ptr, rows, (HQ + 2 * HKV) * D, K, KP, True)
            _qkv_tile(
                w, tile, x_ptr, squares_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr,
                capacity, eps, K, KP, S, SP, B, HQ, HKV, D, PAIRS,
            )  # fmt: skip
            tile = following
            w = w_next
    else:
        _qkv_tile(
            w, tile, x_ptr, squares_ptr, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr,
            capacity, eps, K, KP, S, SP, B, HQ, HKV, D, PAIRS,
        )  # fmt: skip


def qkv_rope_append(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor,
    rope: Tensor,
    seq_lens: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    gate: Tensor | None = None,
    layer: TurboLayer | None = None,
) -> None:
    """RMSNorm's factor, QKV projection, RoPE, and the new key and value into the cache. Oracle: `qkv_rope_append_ref`.

        y = (x_norm W^T) / sqrt(sum(square_sums) / K + eps);  q, k rotated;  cache[seq_len - 1] = k, v

    With a quantised `layer` they also go into its tail, as `turbo_append` would put them there; k_cache and v_cache
    then hold the newest token alone, as it is. Oracle of the tail: `turbo_append_ref`.

    Args:
        x_norm: [B, K] in weight's dtype, `x * gamma`.  square_sums: [B, S] fp32.  weight: [(Hq + 2 Hkv) D, K].
        rope: [B, 2, D/2] fp32, cosine and sine.  seq_lens: [B] int32 with the new token.  q: [B, Hq, D], written.
        k_cache, v_cache: [B, Hkv, N, D], one position of each request written.  gate: [1] int32; 0 skips everything.
        layer: of the same B, Hkv and D, with N = 1; its tail is written.
    Raises:
        ValueError: `layer` and k_cache do not fit.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_inputs = x_norm.shape
    num_kv_heads, capacity, head_dim = k_cache.shape[1:]
    if layer is not None and layer.tail.shape != (batch_size, num_kv_heads, 2, BLOCK * capacity, head_dim):
        raise ValueError(f"layer: expected a tail for k_cache {list(k_cache.shape)}, found {list(layer.tail.shape)}")
    num_heads = weight.shape[0] // head_dim
    width = triton.next_power_of_2(num_inputs)
    pairs = _rows_in_tile(head_dim // 2, width, weight.itemsize, 2)
    num_tiles = num_heads * head_dim // (2 * pairs)
    num_programs = _num_programs(num_tiles, PROGRAMS_PER_SM if gate is not None else 0, x_norm.device)
    compiled = launch(_qkv_rope_append_kernel, (num_programs,))(
        x_norm,
        square_sums,
        weight,
        rope,
        seq_lens,
        q,
        k_cache,
        v_cache,
        None if layer is None else layer.tail,
        None if layer is None else layer.tail_scale,
        gate,
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
        LOOP=num_programs < num_tiles,
        num_warps=_num_warps(2 * pairs, width, weight.itemsize),
        **launch_options(x_norm.device),
    )
    prefer_l1(compiled)


@triton.jit
def _gate_up_tile(
    w, tile, x_ptr, squares_ptr, out_ptr, eps,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, B: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
):  # fmt: skip
    """Products of one tile, through SiLU, stored."""
    for request in tl.static_range(B):
        x = _inputs(x_ptr, request, K, KP)
        rstd = _rstd(squares_ptr, request, eps, K, S, SP)
        gate, up = _dot_pairs(w, x, ROWS)
        gate *= rstd
        out = gate / (1.0 + tl.exp(-gate)) * (up * rstd)
        rows = tile * ROWS + tl.arange(0, ROWS)
        tl.store(out_ptr + request * I + rows, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate_up_silu_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32
    w_ptr,  # [2 I, K], gate first
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
    PDL: tl.constexpr,
):
    """Tiles of ROWS rows of gate and the same of up, every `num_programs`-th."""
    if PDL:
        gdc_launch_dependents()
    row = tl.arange(0, 2 * ROWS)
    row = row // 2 + row % 2 * I
    tile = tl.program_id(0)
    if gate_ptr is not None:  # noqa: SIM102
        if not _opens(gate_ptr, PDL):
            return
    w = _weights(w_ptr, tile * ROWS + row, 0, K, KP, False)
    if PDL:
        gdc_wait()
    if gate_ptr is not None:  # noqa: SIM102
        if tl.load(gate_ptr, volatile=True) == 0:
            return
    if LOOP:
        while tile * ROWS < I:
            following = tile + tl.num_programs(0)
            # Rows past the end of gate count as past the end of all.
            w_next = _weights(w_ptr, following * ROWS + row, tl.where(following * ROWS < I, 2 * I, 0), K, KP, True)
            _gate_up_tile(w, tile, x_ptr, squares_ptr, out_ptr, eps, K, KP, S, SP, B, I, ROWS)
            tile = following
            w = w_next
    else:
        _gate_up_tile(w, tile, x_ptr, squares_ptr, out_ptr, eps, K, KP, S, SP, B, I, ROWS)


def gate_up_silu(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor,
    out: Tensor,
    eps: float,
    gate: Tensor | None = None,
) -> None:
    """`silu(gate) * up` of the normalised input. Oracle: `gate_up_silu_ref`.

    Args:
        x_norm, square_sums, gate: as `qkv_rope_append`.  weight: [2 I, K], gate first.  out: [B, I], written.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_inputs = x_norm.shape
    width = triton.next_power_of_2(num_inputs)
    rows = _rows_in_tile(out.shape[1], width, weight.itemsize, 2)
    num_tiles = out.shape[1] // rows
    num_programs = _num_programs(num_tiles, 4 * PROGRAMS_PER_SM if gate is not None else 0, x_norm.device)
    compiled = launch(_gate_up_silu_kernel, (num_programs,))(
        x_norm,
        square_sums,
        weight,
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
        num_warps=_num_warps(2 * rows, width, weight.itemsize),
        **launch_options(x_norm.device),
    )
    prefer_l1(compiled)


@triton.jit
def _push_tile(
    w, rows, x_ptr, squares_ptr, out_ptr, bases, epoch, fault, fault_ptr, slot, rank, code, num_rows, out_width, eps,
    K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, B: tl.constexpr, PEERS: tl.constexpr,
    SOURCES: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Products of one tile, to every peer."""
    exists = rows < num_rows
    for request in tl.static_range(B):
        y = _dot(w, _inputs(x_ptr, request, K, KP))
        if squares_ptr is not None:
            y *= _rstd(squares_ptr, request, eps, K, S, SP)
        if PUSH:
            words = pack_words(y, epoch)
            at = ((slot * B + request) * SOURCES + rank).to(tl.int64) * out_width + rows
            for peer in tl.static_range(PEERS):
                tl.store(bases[peer] + at, words, mask=exists)
        else:
            tl.store(out_ptr + request * out_width + rows, y, mask=exists)
        # NaN compares with nothing. Only the first fault of a step is kept.
        is_bad = (~(tl.abs(y) < float("inf"))) & exists & (fault == 0)
        tl.store(fault_ptr + tl.zeros_like(rows), code + tl.zeros_like(rows), mask=is_bad)


@triton.jit(do_not_specialize=["slot", "rank", "code"])
def _push_partial_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32, or None: the input is not normalised
    w_ptr,  # [num_rows, K]
    out_ptr,  # [B, out_width] fp32: where nothing is pushed
    peers_ptr,  # [PEERS] int64: address of each peer's words [slots, B, SOURCES, out_width]
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    gate_ptr,  # [1] int32 or None
    slot,
    rank,
    code,
    num_rows,
    out_width,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    PEERS: tl.constexpr,
    SOURCES: tl.constexpr,
    PUSH: tl.constexpr,
    LOOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of ROWS rows of the product, every `num_programs`-th, to every peer."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if gate_ptr is not None:  # noqa: SIM102
        if not _opens(gate_ptr, PDL):
            return
    w = _weights(w_ptr, rows, num_rows, K, KP, MASKED)
    # The epoch stands during the whole step, so it may be read before the wait.
    epoch = tl.load(epoch_ptr)
    bases = ()
    for peer in tl.static_range(PEERS):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    if PDL:
        gdc_wait()
    if gate_ptr is not None:  # noqa: SIM102
        if tl.load(gate_ptr, volatile=True) == 0:
            return
    fault = tl.load(fault_ptr)
    if LOOP:
        first = tl.program_id(0) * ROWS
        while first < num_rows:
            following = first + tl.num_programs(0) * ROWS
            w_next = _weights(w_ptr, following + tl.arange(0, ROWS), num_rows, K, KP, True)
            _push_tile(
                w, first + tl.arange(0, ROWS), x_ptr, squares_ptr, out_ptr, bases, epoch, fault, fault_ptr, slot, rank,
                code, num_rows, out_width, eps, K, KP, S, SP, B, PEERS, SOURCES, PUSH,
            )  # fmt: skip
            first = following
            w = w_next
    else:
        _push_tile(
            w, rows, x_ptr, squares_ptr, out_ptr, bases, epoch, fault, fault_ptr, slot, rank, code, num_rows, out_width,
            eps, K, KP, S, SP, B, PEERS, SOURCES, PUSH,
        )  # fmt: skip


def push_partial(x: Tensor, weight: Tensor, exchange: Exchange, slot: int, gate: Tensor | None = None) -> None:
    """Row-parallel projection: this rank's partial sums, to every rank of the group. Oracle: `push_partial_ref`.

        partial = x W^T, fp32

    With peers, the sums go into the words of `slot` in every rank's memory, without one into `exchange.partial`; either
    way `reduce_norm` adds them up. A sum that is not finite is noted in the fault word.

    Args:
        x: [B, K].  weight: [hidden, K], this rank's columns.  gate: [1] int32; 0 skips everything.
    Capture: graph-safe; allocates nothing.
    """
    _push(
        x, None, weight, exchange.partial, exchange.peers, exchange.epoch, exchange.fault, gate, slot,
        exchange.tp_rank, fault_code(BAD_NUMBERS, slot, exchange.rank), exchange.tp_size, 0.0,
    )  # fmt: skip


def lm_head(
    x_norm: Tensor, square_sums: Tensor, weight: Tensor, exchange: LogitExchange, eps: float, slot: int
) -> None:
    """This rank's rows of the vocabulary, to every rank of the job. Oracle: `lm_head_ref`.

    Args:
        x_norm, square_sums: as `qkv_rope_append`.  weight: [rows of the shard, K].  slot: for the fault word only.
    Capture: graph-safe; allocates nothing.
    """
    if weight.shape[0] == 0:  # the last shards of a small vocabulary can be empty
        return
    local = exchange.shard
    code = fault_code(BAD_NUMBERS, slot, exchange.rank)
    _push(
        x_norm, square_sums, weight, local, exchange.peers, exchange.epoch, exchange.fault, None, 0,
        exchange.rank, code, exchange.world_size, eps,
    )  # fmt: skip


def _push(
    x: Tensor,
    square_sums: Tensor | None,
    weight: Tensor,
    local: Tensor,
    peers: Tensor | None,
    epoch: Tensor,
    fault: Tensor,
    gate: Tensor | None,
    slot: int,
    rank: int,
    code: int,
    num_sources: int,
    eps: float,
) -> None:
    batch_size, num_inputs = x.shape
    num_rows, width = weight.shape[0], triton.next_power_of_2(num_inputs)
    rows = _rows_in_tile(num_rows if square_sums is None else 0, width, weight.itemsize, 1)
    num_squares = 1 if square_sums is None else square_sums.shape[1]
    num_tiles, num_warps = triton.cdiv(num_rows, rows), _num_warps(rows, width, weight.itemsize)
    loops = gate is not None or (square_sums is None and num_warps <= 4)
    num_programs = _num_programs(num_tiles, PROGRAMS_PER_SM if loops else 0, x.device)
    compiled = launch(_push_partial_kernel, (num_programs,))(
        x,
        square_sums,
        weight,
        local,
        peers,
        epoch,
        fault,
        gate,
        slot,
        rank,
        code,
        num_rows,
        local.shape[1],
        eps,
        K=num_inputs,
        KP=width,
        S=num_squares,
        SP=triton.next_power_of_2(num_squares),
        B=batch_size,
        ROWS=rows,
        MASKED=num_rows % rows != 0,
        PEERS=0 if peers is None else peers.shape[0],
        SOURCES=num_sources,
        PUSH=peers is not None,
        LOOP=num_programs < num_tiles,
        num_warps=num_warps,
        **launch_options(x.device),
    )
    prefer_l1(compiled)


def _rows_in_tile(num_rows: int, width: int, itemsize: int, matrices: int) -> int:
    """Rows of each of `matrices` in one program's tile: a power of two that divides `num_rows` (0: any does)."""
    rows = max(1, TILE_BYTES // (width * itemsize * matrices))
    return min(rows, num_rows & -num_rows) if num_rows else rows


def _num_programs(num_tiles: int, per_sm: int, device: torch.device) -> int:
    """Programs of a launch on a device, about `per_sm` on each SM; with 0 one for each tile."""
    return programs_for(num_tiles, per_sm * _num_sms(device))


def programs_for(num_tiles: int, at_once: int) -> int:
    """Programs of equal shares of the tiles, about `at_once`; with 0 one for each tile."""
    return -(-num_tiles // max(1, round(num_tiles / at_once))) if at_once else num_tiles


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _num_warps(rows: int, width: int, itemsize: int) -> int:
    """64 weights to a thread, or 32 of a row longer than a tile: the fastest on H200 with 1 and with 4 ranks."""
    weights_per_thread = 64 if rows * width * itemsize <= TILE_BYTES else 32
    return max(1, min(16, rows * width // (32 * weights_per_thread)))
