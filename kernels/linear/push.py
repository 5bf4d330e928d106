"""Projections whose results other ranks read: partial sums for the group, logits of a vocabulary shard for all ranks.

With peer memory, the kernels send the results as LL packets (ll_packets.py). gemv_tile.py and mma_tile.py
describe how a tile of weights is read and multiplied.

Shapes: B requests, K inputs, T ranks of the group, S sums of squares of each request.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, store_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.kernels.linear.gemv_tile import (
    PROGRAMS_PER_SM,
    dot,
    gate_open,
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

__all__ = ["add_row_bias", "lm_head", "push_partial", "push_sums"]


@triton.jit
def push_sums(
    y, rows, request, mask, out_ptr, bases, epoch, fault, fault_ptr, reduce_index, rank, code, out_width,
    B: tl.constexpr, PEERS: tl.constexpr, SOURCES: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Push the sums y [N] of `rows` to every peer. request: one for all, or [N]; mask: which sums exist."""
    if PUSH:
        offsets = ((reduce_index * B + request) * SOURCES + rank).to(tl.int64) * out_width + rows
        for peer in tl.static_range(PEERS):
            store_packets(bases[peer] + offsets, y, epoch, mask)
    else:
        tl.store(out_ptr + request * out_width + rows, y, mask=mask)
    # Written so that NaN is bad, too. Only the first fault of a step is kept.
    is_bad = (~(tl.abs(y) < float("inf"))) & mask & (fault == 0)
    tl.store(fault_ptr + tl.zeros_like(rows), code + tl.zeros_like(rows), mask=is_bad)


@triton.jit
def add_row_bias(y, bias_ptr, rows, num_rows):
    """Add the biases of `rows`, if there are any."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    return y


@triton.jit
def _push_tile(
    w, rows, x_ptr, squares_ptr, bias_ptr, out_ptr, bases, epoch, fault, fault_ptr, reduce_index, rank, code, num_rows,
    out_width, eps, K: tl.constexpr, KP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, B: tl.constexpr,
    PEERS: tl.constexpr, SOURCES: tl.constexpr, PUSH: tl.constexpr,
):  # fmt: skip
    """Multiply one tile by one request after another, and push the sums to every peer."""
    for request in tl.static_range(B):
        y = dot(w, load_inputs(x_ptr, request, K, KP))
        if squares_ptr is not None:
            y *= rstd_of(squares_ptr, request, eps, K, S, SP)
        y = add_row_bias(y, bias_ptr, rows, num_rows)
        push_sums(
            y, rows, request, rows < num_rows, out_ptr, bases, epoch, fault, fault_ptr, reduce_index, rank, code,
            out_width, B, PEERS, SOURCES, PUSH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["reduce_index", "rank", "code"])
def _push_partial_kernel(
    x_ptr,  # [B, K]
    squares_ptr,  # [B, S] fp32, or None: the input is not normalised
    w_ptr,  # [num_rows, K], or quantised (decode_weight.py)
    scale_ptr,  # of a quantised weight, or None
    bias_ptr,  # [num_rows], or None
    out_ptr,  # [B, out_width] fp32: written if there are no peers
    peers_ptr,  # [PEERS] int64: addresses of all packets [num_reduces, B, SOURCES, out_width] to write
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    gate_ptr,  # [1] int32 or None
    reduce_index,
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
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles of ROWS rows of the product, to every peer; STEPS > 0: on tensor cores. Grid [num_programs]."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if gate_ptr is not None:
        if not gate_open(gate_ptr, PDL):
            return
    if FORMAT is not None:
        w = load_tile(w_ptr, scale_ptr, tl.program_id(0), K, WARPS, STEPS, FORMAT, GROUP, PDL)
    elif STEPS > 0:
        w = load_rows(w_ptr, tl.program_id(0) * ROWS, num_rows - 1, 8, K, WARPS, STEPS)
    else:
        w = load_weights(w_ptr, rows, num_rows, K, KP, MASKED)
    # The epoch is constant during the step, so it may be read before the wait.
    epoch = tl.load(epoch_ptr)
    bases = ()
    for peer in tl.static_range(PEERS):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    if PDL:
        gdc_wait()
    if gate_ptr is not None:
        if tl.load(gate_ptr, volatile=True) == 0:
            if FORMAT is not None:
                abandon_tile(w, K, WARPS, STEPS, FORMAT, GROUP, PDL)
            return
    fault = tl.load(fault_ptr)
    if STEPS > 0:
        first = tl.program_id(0) * ROWS
        row_of_lane, request = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4 * 2
        while first < num_rows:
            next_first = first + tl.num_programs(0) * ROWS
            if FORMAT is not None:
                sums, w = packed_products(
                    w, x_ptr, squares_ptr, eps, w_ptr, scale_ptr, first // ROWS, next_first // ROWS,
                    next_first < num_rows, B, K, S, WARPS, STEPS, LOOP, FORMAT, GROUP, PDL,
                )  # fmt: skip
            else:
                sums, w = products(
                    w, x_ptr, squares_ptr, eps, w_ptr, first, next_first, num_rows - 1, next_first < num_rows, 8,
                    B, K, S, WARPS, STEPS, LOOP,
                )  # fmt: skip
            for i in tl.static_range(len(sums)):
                row, lane_request = first + row_of_lane + i % 4 // 2 * 8, request + (i // 4 * 8 + i % 2)
                y = add_row_bias(sums[i], bias_ptr, row, num_rows)
                push_sums(
                    y, row, lane_request, (row < num_rows) & (lane_request < B), out_ptr, bases, epoch, fault,
                    fault_ptr, reduce_index, rank, code, out_width, B, PEERS, SOURCES, PUSH,
                )  # fmt: skip
            first = next_first
    elif LOOP:
        first = tl.program_id(0) * ROWS
        while first < num_rows:
            next_first = first + tl.num_programs(0) * ROWS
            w_next = load_weights(w_ptr, next_first + tl.arange(0, ROWS), num_rows, K, KP, True)
            _push_tile(
                w, first + tl.arange(0, ROWS), x_ptr, squares_ptr, bias_ptr, out_ptr, bases, epoch, fault,
                fault_ptr, reduce_index, rank, code, num_rows, out_width, eps, K, KP, S, SP, B, PEERS, SOURCES, PUSH,
            )  # fmt: skip
            first = next_first
            w = w_next
    else:
        _push_tile(
            w, rows, x_ptr, squares_ptr, bias_ptr, out_ptr, bases, epoch, fault, fault_ptr, reduce_index, rank, code,
            num_rows, out_width, eps, K, KP, S, SP, B, PEERS, SOURCES, PUSH,
        )  # fmt: skip


def push_partial(
    x: Tensor,
    weight: Tensor | DecodeWeight,
    exchange: Exchange,
    reduce_index: int,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Row-parallel projection: push this rank's partial sums to every rank of the group. Oracle: `push_partial_ref`.

        partial = x W^T + bias, fp32

    With peers, the sums go into the packets of `reduce_index` of every rank, and into `own_packets` if that exists.
    Without peers, they go into `exchange.partial`. In both cases `reduce_norm` adds them up. A sum that is not finite
    sets the fault word.

    Args:
        x: [B, K] in weight's dtype; of 16 bits beside a quantised weight.
        weight: [hidden, K], this rank's columns.
        reduce_index: number of the all-reduce in the step.
        gate: [1] int32; 0 skips everything.
        bias: [hidden], on one rank of the group: the sum over the ranks adds it.
    Capture: graph-safe; allocates nothing.
    """
    _push(
        x, None, weight, bias, exchange.partial, exchange.peers, exchange.epoch, exchange.fault, gate, reduce_index,
        exchange.tp_rank, exchange.fault_code(BAD_NUMBERS, reduce_index, exchange.rank), exchange.tp_size, 0.0,
    )  # fmt: skip


def lm_head(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor | DecodeWeight,
    exchange: LogitExchange,
    eps: float,
    reduce_index: int,
) -> None:
    """Push the logits of this rank's vocabulary shard to every rank of the job. Oracle: `lm_head_ref`.

    Args:
        x_norm, square_sums: as `qkv_rope_append`.
        weight: [rows of the shard, K].
        reduce_index: only for the fault word.
    Capture: graph-safe; allocates nothing.
    """
    if weight.shape[0] == 0:  # the last shards of a small vocabulary can be empty
        return
    local = exchange.shard
    code = exchange.fault_code(BAD_NUMBERS, reduce_index, exchange.first_rank + exchange.rank)
    _push(
        x_norm, square_sums, weight, None, local, exchange.peers, exchange.epoch, exchange.fault, None, 0,
        exchange.rank, code, exchange.world_size, eps,
    )  # fmt: skip


def _push(
    x: Tensor,
    square_sums: Tensor | None,
    weight: Tensor | DecodeWeight,
    bias: Tensor | None,
    local: Tensor,
    peers: Tensor | None,
    epoch: Tensor,
    fault: Tensor,
    gate: Tensor | None,
    reduce_index: int,
    rank: int,
    code: int,
    num_sources: int,
    eps: float,
) -> None:
    """Launch `_push_partial_kernel` for `push_partial` and `lm_head`."""
    batch_size, num_inputs = x.shape
    num_rows, width = weight.shape[0], triton.next_power_of_2(num_inputs)
    rows, steps, num_warps = tile_settings(weight, x, num_rows if square_sums is None else 0, 1)
    operands, constants = packed_arguments(weight)
    num_squares = 1 if square_sums is None else square_sums.shape[1]
    num_tiles = triton.cdiv(num_rows, rows)
    loops = gate is not None or (square_sums is None and num_warps <= 4)
    num_programs = num_programs_on(num_tiles, PROGRAMS_PER_SM if loops else 0, x.device)
    compiled = jit_launch(_push_partial_kernel, (num_programs,))(
        x,
        square_sums,
        *operands,
        bias,
        local,
        peers,
        epoch,
        fault,
        gate,
        reduce_index,
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
        STEPS=steps,
        WARPS=num_warps,
        **constants,
        num_warps=num_warps,
        **pdl_options(x.device),
    )
    set_l1_carveout(compiled, shared_programs(weight, batch_size, num_warps))
