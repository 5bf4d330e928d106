"""Who sends in a layer, and whether what it handed over was accepted: the roles of two paired groups, on the devices.

Both groups replay one static list of launches. Every rank keeps the two priorities of alspec/priority.py, its own
group's first; before a layer they are

    (2, 0), (0, 2)  at layer 0: the sender, the receiver
    (2, 1)          the sender whose guess was rejected
    (0, 1)          the sender whose guess was accepted, the receiver from now on
    (1, 2)          the receiver, whose verdict is still under way

and a layer is, with each kernel gated by the word in brackets,

    pre-attention [GATE_PRE_ATTENTION], update_roles, lean_decode_attention [sends], decide [sends], receive_handover
    [receives], o and its all-reduce [GATE_O], MLP and its all-reduce [GATE_MLP]

The gates of what is computed are open while the own priority is not 0, and may close early on a receiver that learns of
its rejection. A rank's words go to the rank with the same `tp_rank` in the other group (see pair_state.py); what it
hands over is in handover.py.

Shapes: B requests, L layers, Hq this rank's query heads, T ranks of a group.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.comm import pair_state
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, store_packets, wait_packets
from alspec.kernels.comm.pair_state import PairState
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout

__all__ = ["add_sums", "decide", "request_verdicts", "step_barrier", "squared_threshold", "update_roles"]

NUM_GATES, GATE_STRIDE = tl.constexpr(pair_state.NUM_GATES), tl.constexpr(pair_state.GATE_STRIDE)
SUMS_LOADED = tl.constexpr(256)  # of each request together: of eight, more would not fit a warp's registers


@triton.jit(do_not_specialize=["rank", "timeout_ns", "code"])
def _step_barrier_kernel(
    barrier_ptr,  # [WORLD] int64
    peers_ptr,  # [WORLD] int64: address of each rank's
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    rank,
    timeout_ns,
    code,
    WORLD: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A word to every rank, then wait for one from every rank; grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epoch_ptr)
    ranks = tl.arange(0, PAD)
    address = tl.load(peers_ptr + ranks, mask=ranks < WORLD, other=0) + 8 * rank
    store_packets(address.to(tl.pointer_type(tl.int64)), tl.zeros([PAD], tl.float32), epoch, ranks < WORLD)
    wait_packets(barrier_ptr + ranks, ranks < WORLD, epoch, timeout_ns, fault_ptr, code + ranks)


def step_barrier(pair: PairState, timeout_ns: int) -> None:
    """All ranks of the job begin a step together, after at most `timeout_ns`.

    A rank whose host is late is waited for here and nowhere else: from here on no device waits for a host.

    Capture: graph-safe; allocates nothing.
    """
    exchange, world_size = pair.exchange, pair.barrier.shape[0]
    compiled = jit_launch(_step_barrier_kernel, (1,))(
        pair.barrier, pair.barrier_peers, exchange.epoch, exchange.fault, exchange.rank, timeout_ns,
        fault_code(LATE_PACKET, 2 * pair.shape.num_layers + 1, 0), WORLD=world_size,
        PAD=triton.next_power_of_2(world_size), num_warps=1, **pdl_options(exchange.epoch.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _set_gates(gates_ptr, is_open):
    """All gates, that of the next step's first pre-attention too; within a layer `reduce_norm` sets later ones again.

    These are set here for kernels that look ahead of their wait whether weights are worth loading (`opens`): by what
    the layer before left, they would load in vain, or too late.
    """
    for gate in tl.static_range(NUM_GATES):
        tl.store(gates_ptr + gate * GATE_STRIDE, is_open)


@triton.jit(do_not_specialize=["layer", "num_layers", "timeout_ns", "code"])
def _update_roles_kernel(
    verdicts_ptr,  # [L, B + 1] int64
    priority_ptr,  # [2] int32
    is_sender_ptr,  # [1] int32
    is_receiver_ptr,  # [1] int32
    gates_ptr,  # [3, GATE_STRIDE] int32
    hits_ptr,  # [L, B] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    layer,
    num_layers,
    timeout_ns,
    code,
    B: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """The roles of a layer; grid [1]. Every launch after it waits for all of it, because it writes their gates."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.load(priority_ptr)
    other = tl.load(priority_ptr + 1)
    if (layer > 0) & (own == 1) & (other == 2):
        epoch = tl.load(epoch_ptr)
        place = tl.arange(0, P)
        at = verdicts_ptr + (layer - 1) * (B + 1) + place
        words = wait_packets(at, place <= B, epoch, timeout_ns, fault_ptr, code + tl.zeros_like(place))
        tl.store(hits_ptr + (layer - 1) * B + place, (words == 1.0).to(tl.int32), mask=place < B)
        accepted = tl.sum(((place == B) & (words == 1.0)).to(tl.int32), 0)
        other = tl.where(accepted == 1, 0, 2)
    is_sender = own > other
    tl.store(is_sender_ptr, is_sender.to(tl.int32))
    tl.store(is_receiver_ptr, 1 - is_sender.to(tl.int32))
    # A handover: sender 2, receiver 1. At the step's end, both then having the right x, the next one begins at (2, 0).
    receiver = tl.where(layer == num_layers, 0, 1)
    mine = tl.where(is_sender, 2, receiver)
    tl.store(priority_ptr, mine)
    tl.store(priority_ptr + 1, tl.where(is_sender, receiver, 2))
    _set_gates(gates_ptr, (mine != 0).to(tl.int32))


def update_roles(pair: PairState, layer: int, hits: Tensor, timeout_ns: int) -> None:
    """Whether this group sends or receives in a layer: sets `sends`, `receives`, gates and priorities of the handover.

    The receiver of the layer before waits for its verdict, at most `timeout_ns`; a late one counts as rejected. With
    `layer = L`, after the last layer, `sends` and `receives` are for the residual, and the priorities the next step's.
    Rules: `alspec.priority`.

    Args:
        hits: [L, B] int32; what the paired rank found in the layer before is written.
    Capture: graph-safe; allocates nothing.
    """
    shape, exchange = pair.shape, pair.exchange
    compiled = jit_launch(_update_roles_kernel, (1,))(
        pair.own.verdicts, pair.priority, pair.is_sender, pair.is_receiver, pair.gates, hits,
        exchange.epoch, exchange.fault, layer, shape.num_layers, timeout_ns, pair.late(max(layer - 1, 0)),
        B=shape.batch_size, P=triton.next_power_of_2(shape.batch_size + 1), num_warps=1,
        **pdl_options(hits.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def add_sums(sums_ptr, B: tl.constexpr, B_PAD: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr):
    """Each request's dist2 and norm2, side by side [2 B_PAD]; sums: [B, SUMS, 2] fp32."""
    place, total = tl.arange(0, 2 * B_PAD), tl.zeros([2 * B_PAD], tl.float32)
    TOGETHER: tl.constexpr = min(SUMS_PAD, SUMS_LOADED)
    for first in tl.static_range(0, SUMS_PAD, TOGETHER):
        parts = first + tl.arange(0, TOGETHER)
        exist = (place < 2 * B)[:, None] & (parts < SUMS)[None, :]
        at = ((place // 2)[:, None] * SUMS + parts[None, :]) * 2 + (place % 2)[:, None]
        total += tl.sum(tl.load(sums_ptr + at, mask=exist, other=0.0), 1)
    return total


@triton.jit
def request_verdicts(
    total, live_ptr, forced_ptr, layer, threshold2, ALWAYS: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr
):
    """Live requests that accept [B_PAD], and the layer's verdict; total: [2 B_PAD], each request's dist2 and norm2."""
    dist2, norm2 = tl.split(tl.reshape(total, [B_PAD, 2]))
    accepted = (dist2 < norm2 * threshold2) | ALWAYS
    if forced_ptr is not None:
        # Of the sums as well: a forced verdict has to take as long as one by them.
        forced = tl.load(forced_ptr + layer)
        accepted = (accepted & (forced < 0)) | (forced == 1)
    requests = tl.arange(0, B_PAD)
    is_live = tl.load(live_ptr + requests, mask=requests < B, other=0) != 0
    return accepted & is_live, tl.sum((is_live & ~accepted).to(tl.int32), 0) == 0


@triton.jit(do_not_specialize=["layer", "rank", "timeout_ns", "code"])
def _decide_kernel(
    sums_ptr,  # [B, SUMS, 2] fp32
    live_ptr,  # [B] int32
    forced_ptr,  # [L] int32, or None
    hits_ptr,  # [L, B] int32
    packets_ptr,  # [L, T, B, 2] int64: sums of the group's ranks
    peers_ptr,  # [T] int64: address of each rank's
    verdicts_ptr,  # [L, B + 1] int64, the paired rank's
    priority_ptr,  # [2] int32
    gates_ptr,  # [3, GATE_STRIDE] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    gate_ptr,  # [1] int32
    layer,
    rank,
    timeout_ns,
    code,
    threshold2,
    ALWAYS: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_PAD: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums of the group's ranks, then the verdict; grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    epoch = tl.load(epoch_ptr)
    total = add_sums(sums_ptr, B, B_PAD, SUMS, SUMS_PAD)
    if T > 1:
        place = tl.arange(0, 2 * B_PAD)
        exist = place < 2 * B
        for peer in tl.static_range(T):
            base = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
            store_packets(base + (layer * T + rank) * (2 * B) + place, total, epoch, exist)
        ranks = tl.arange(0, T_PAD)
        codes = (code + ranks)[:, None] + tl.zeros([T_PAD, 2 * B_PAD], tl.int32)
        words = packets_ptr + (layer * T + ranks)[:, None] * (2 * B) + place[None, :]
        values = wait_packets(words, (ranks < T)[:, None] & exist[None, :], epoch, timeout_ns, fault_ptr, codes)
        # In rank order: all ranks reach the same bits, and the same verdict.
        total = tl.sum(tl.where((ranks == 0)[:, None], values, 0.0), 0)
        for source in tl.static_range(1, T):
            total += tl.sum(tl.where((ranks == source)[:, None], values, 0.0), 0)
    accepted, verdict = request_verdicts(total, live_ptr, forced_ptr, layer, threshold2, ALWAYS, B, B_PAD)
    requests = tl.arange(0, B_PAD)
    # First to the paired rank, which waits for it.
    to = verdicts_ptr + layer * (B + 1)
    store_packets(to + B, tl.where(verdict, 1.0, 0.0), epoch)
    # Floats are chosen, not integers: ptxas of CUDA 12.8 drops the conversion of integers chosen like this.
    told = tl.where(accepted, 1.0, 0.0)
    store_packets(to + requests, told, epoch, requests < B)
    tl.store(hits_ptr + layer * B + requests, accepted.to(tl.int32), mask=requests < B)
    tl.store(priority_ptr, tl.where(verdict, 0, 2))
    tl.store(priority_ptr + 1, 1)
    _set_gates(gates_ptr, tl.where(verdict, 0, 1))


def decide(
    pair: PairState,
    layer: int,
    sums: Tensor,
    live: Tensor,
    threshold: float,
    hits: Tensor,
    timeout_ns: int,
    forced: Tensor | None = None,
) -> None:
    """The sender's verdict on what it handed over, to the paired rank and into its own priority and gates.

    Gated by `sends`. A request accepts if `dist2 < threshold^2 norm2` over all heads of the group, whose ranks exchange
    their sums; the layer does if every live request accepts. Rules: `alspec.verdict`. Oracle: `decide_ref`.

    Args:
        sums: [B, R, 2] fp32, of `lean_decode_attention`.  live: [B] int32, the same on every rank of the job.
        threshold: lambda >= 0, fixed at capture.  hits: [L, B] int32, this layer written; 0 for a request that is not
        live.  forced: [L] int32, the same on every rank: 1 accepts, 0 rejects, -1 leaves it to the sums.
    Raises:
        ValueError: `threshold` is negative or NaN.
    Capture: graph-safe; allocates nothing.
    """
    threshold2, always = squared_threshold(threshold)
    shape, exchange = pair.shape, pair.exchange
    compiled = jit_launch(_decide_kernel, (1,))(
        sums, live, forced, hits, pair.own.sums, pair.sums_peers, pair.paired.verdicts, pair.priority,
        pair.gates, exchange.epoch, exchange.fault, pair.is_sender, layer, exchange.tp_rank, timeout_ns,
        fault_code(LATE_PACKET, 2 * layer, exchange.rank - exchange.tp_rank), threshold2, ALWAYS=always,
        B=shape.batch_size, B_PAD=triton.next_power_of_2(shape.batch_size), SUMS=sums.shape[1],
        SUMS_PAD=triton.next_power_of_2(sums.shape[1]), T=shape.tp_size, T_PAD=triton.next_power_of_2(shape.tp_size),
        num_warps=1, **pdl_options(sums.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def squared_threshold(threshold: float) -> tuple[float, bool]:
    """threshold^2 as the kernels compare with it, and whether every guess is accepted.

    Raises:
        ValueError: `threshold` is negative or NaN.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a number >= 0, found {threshold}")
    always = math.isinf(threshold)
    return 0.0 if always else float(torch.tensor(threshold * threshold, dtype=torch.float32)), always
