"""The priority protocol on the device: which group is the sender in a layer, and the verdict on its speculative output.

Source: Attention-Level Speculation, section 4.2 and Algorithm 2. The rules on the host: alspec/priority.py.

Every rank launches the same kernels. Two priorities, (own group, other group), select what a rank skips. Before layer 0
they are (2, 0) on the sender and (0, 2) on the receiver. Before any later layer they are

    (2, 1)  on the sender of the previous layer, if its A~ was rejected: it stays the sender
    (0, 1)  on the sender of the previous layer, if its A~ was accepted: it is the receiver from now on
    (1, 2)  on the receiver of the previous layer, which does not know the verdict yet

One layer; [g] = skipped when gate g is 0:

    qkv_rope_append           [GATE_PRE_ATTENTION]
    update_roles
    speculative attention     [is_sender]
    decide                    [is_sender]
    receive_handover          [is_receiver]
    o_proj, all-reduce, norm  [GATE_O]
    MLP, all-reduce, norm     [GATE_MLP]

The gates of pre- and post-attention are open unless this group's priority is 0. On a receiver, `reduce_norm` may close
them earlier, when the verdict is a reject. A rank sends its packets to the rank with the same `tp_rank` in the other
group (pair_state.py). handover.py describes the data that the sender hands over.

Shapes: B requests, L layers, T ranks of a group, R (dist2, norm2) pairs per request.
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

__all__ = [
    "add_sums",
    "await_sums",
    "decide",
    "push_to_group",
    "request_verdicts",
    "squared_threshold",
    "step_barrier",
    "update_roles",
]

NUM_GATES, GATE_STRIDE = tl.constexpr(pair_state.NUM_GATES), tl.constexpr(pair_state.GATE_STRIDE)
# (dist2, norm2) pairs that `add_sums` loads at once per request: 256 is what fits a warp's registers for 8 requests.
SUMS_LOADED = tl.constexpr(256)


@triton.jit(do_not_specialize=["rank", "timeout_ns", "late_code"])
def _step_barrier_kernel(
    barrier_ptr,  # [WORLD] int64
    peers_ptr,  # [WORLD] int64: address of each rank's `barrier`
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    rank,
    timeout_ns,
    late_code,
    WORLD: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """All-to-all barrier over LL packets. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epoch_ptr)
    ranks = tl.arange(0, PAD)
    address = tl.load(peers_ptr + ranks, mask=ranks < WORLD, other=0) + 8 * rank
    store_packets(address.to(tl.pointer_type(tl.int64)), tl.zeros([PAD], tl.float32), epoch, ranks < WORLD)
    wait_packets(barrier_ptr + ranks, ranks < WORLD, epoch, timeout_ns, fault_ptr, late_code + ranks)


def step_barrier(pair: PairState, timeout_ns: int) -> None:
    """Start a step on all ranks together; time out after `timeout_ns`.

    This is the only place where a device may wait for a late host.

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
    """Set the o and MLP gates of this layer, and the pre-attention gate of the next layer.

    A dependent launch starts before the previous kernel has finished. A kernel that reads weights tests its gate before
    `griddepcontrol.wait`, to decide whether to prefetch them, and again after it, to decide whether to compute. So all
    gates are set here: an old gate makes such a kernel prefetch needlessly, or miss the prefetch. `reduce_norm` may
    close later gates again.
    """
    for gate in tl.static_range(NUM_GATES):
        tl.store(gates_ptr + gate * GATE_STRIDE, is_open)


@triton.jit(do_not_specialize=["layer", "num_layers", "timeout_ns", "late_code"])
def _update_roles_kernel(
    verdicts_ptr,  # [L, B + 1] int64
    priority_ptr,  # [2] int32
    is_sender_ptr,  # [1] int32
    is_receiver_ptr,  # [1] int32
    senders_ptr,  # [L] int32
    gates_ptr,  # [3, GATE_STRIDE] int32
    hits_ptr,  # [L, B] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    layer,
    num_layers,
    timeout_ns,
    late_code,
    B: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [1]. Writes the gates of later launches. Each of them computes only after this kernel has finished."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.load(priority_ptr)
    other = tl.load(priority_ptr + 1)
    if (layer > 0) & (own == 1) & (other == 2):
        epoch = tl.load(epoch_ptr)
        lane = tl.arange(0, P)
        ptrs = verdicts_ptr + (layer - 1) * (B + 1) + lane
        verdicts = wait_packets(ptrs, lane <= B, epoch, timeout_ns, fault_ptr, late_code + tl.zeros_like(lane))
        tl.store(hits_ptr + (layer - 1) * B + lane, (verdicts == 1.0).to(tl.int32), mask=lane < B)
        accepted = tl.sum(((lane == B) & (verdicts == 1.0)).to(tl.int32), 0)
        other = tl.where(accepted == 1, 0, 2)
    is_sender = own > other
    tl.store(is_sender_ptr, is_sender.to(tl.int32))
    tl.store(is_receiver_ptr, 1 - is_sender.to(tl.int32))
    tl.store(senders_ptr + layer, is_sender.to(tl.int32), mask=layer < num_layers)
    # While handing over: sender 2, receiver 1. After the last layer: sender 2, receiver 0. Both groups then get the
    # right x, so the last sender starts the next step.
    receiver = tl.where(layer == num_layers, 0, 1)
    new_own = tl.where(is_sender, 2, receiver)
    tl.store(priority_ptr, new_own)
    tl.store(priority_ptr + 1, tl.where(is_sender, receiver, 2))
    _set_gates(gates_ptr, (new_own != 0).to(tl.int32))


def update_roles(pair: PairState, layer: int, hits: Tensor, timeout_ns: int) -> None:
    """Set this layer's roles from the verdict on the previous layer.

    Writes `is_sender`, `is_receiver`, the layer's `senders`, the gates, and the priorities that hold during the
    handover. The receiver of the previous layer waits for the verdict, at most `timeout_ns`; a late verdict counts as a
    reject. With `layer = L`, after the last layer, `is_sender` and `is_receiver` say who sends x in `receive_residual`,
    and the priorities are already those of the next step. Rules: `alspec.priority`.

    Args:
        hits: [L, B] int32; the receiver of the previous layer writes row `layer - 1`.
        timeout_ns: longest wait for the verdict.
    Capture: graph-safe; allocates nothing.
    """
    shape, exchange = pair.shape, pair.exchange
    compiled = jit_launch(_update_roles_kernel, (1,))(
        pair.own.verdicts, pair.priority, pair.is_sender, pair.is_receiver, pair.senders, pair.gates, hits,
        exchange.epoch, exchange.fault, layer, shape.num_layers, timeout_ns, pair.late_fault(max(layer - 1, 0)),
        B=shape.batch_size, P=triton.next_power_of_2(shape.batch_size + 1), num_warps=1,
        **pdl_options(hits.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def add_sums(sums_ptr, B: tl.constexpr, B_PAD: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr):
    """Add up dist2 and norm2 of each request: [B, SUMS, 2] fp32 to [2 B_PAD], two adjacent values per request."""
    lane, total = tl.arange(0, 2 * B_PAD), tl.zeros([2 * B_PAD], tl.float32)
    BLOCK_SUMS: tl.constexpr = min(SUMS_PAD, SUMS_LOADED)
    for first in tl.static_range(0, SUMS_PAD, BLOCK_SUMS):
        part = first + tl.arange(0, BLOCK_SUMS)
        mask = (lane < 2 * B)[:, None] & (part < SUMS)[None, :]
        offsets = ((lane // 2)[:, None] * SUMS + part[None, :]) * 2 + (lane % 2)[:, None]
        total += tl.sum(tl.load(sums_ptr + offsets, mask=mask, other=0.0), 1)
    return total


@triton.jit
def push_to_group(peers_ptr, offsets, values, epoch, mask, T: tl.constexpr):
    """Store values as packets at these offsets of a buffer of each rank of the group, this one's included."""
    for peer in tl.static_range(T):
        base = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
        store_packets(base + offsets, values, epoch, mask)


@triton.jit
def await_sums(
    packets_ptr,  # the first rank's sums
    stride,  # packets from one rank's sums to the next rank's
    epoch,
    timeout_ns,
    fault_ptr,
    late_code,  # of the group's first rank
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
):
    """Wait for the sums of all ranks of the group, and add them in rank order: all ranks get the same bits."""
    lane, ranks = tl.arange(0, 2 * B_PAD), tl.arange(0, T_PAD)
    codes = (late_code + ranks)[:, None] + tl.zeros([T_PAD, 2 * B_PAD], tl.int32)
    ptrs = packets_ptr + ranks[:, None] * stride + lane[None, :]
    mask = (ranks < T)[:, None] & (lane < 2 * B)[None, :]
    rank_sums = wait_packets(ptrs, mask, epoch, timeout_ns, fault_ptr, codes)
    total = tl.sum(tl.where((ranks == 0)[:, None], rank_sums, 0.0), 0)
    for source in tl.static_range(1, T):
        total += tl.sum(tl.where((ranks == source)[:, None], rank_sums, 0.0), 0)
    return total


@triton.jit
def request_verdicts(
    total, live_ptr, forced_ptr, layer, threshold2, ACCEPT_ALL: tl.constexpr, B: tl.constexpr, B_PAD: tl.constexpr
):
    """Return each request's verdict [B_PAD], False for ended requests, and the layer's verdict.

        accept = dist2 < threshold^2 norm2;  layer: every live request accepts

    total: [2 B_PAD], dist2 and norm2 of each request.
    """
    dist2, norm2 = tl.split(tl.reshape(total, [B_PAD, 2]))
    accepted = (dist2 < norm2 * threshold2) | ACCEPT_ALL
    if forced_ptr is not None:
        # Read the sums even if the verdict is forced, so that forced runs take as long as real ones.
        forced = tl.load(forced_ptr + layer)
        accepted = (accepted & (forced < 0)) | (forced == 1)
    requests = tl.arange(0, B_PAD)
    is_live = tl.load(live_ptr + requests, mask=requests < B, other=0) != 0
    return accepted & is_live, tl.sum((is_live & ~accepted).to(tl.int32), 0) == 0


@triton.jit(do_not_specialize=["layer", "rank", "timeout_ns", "late_code"])
def _decide_kernel(
    sums_ptr,  # [B, SUMS, 2] fp32
    live_ptr,  # [B] int32
    forced_ptr,  # [L] int32, or None
    hits_ptr,  # [L, B] int32
    packets_ptr,  # [L, T, B, 2] int64: sums of the group's ranks
    peers_ptr,  # [T] int64: address of each rank's `sums`
    verdicts_ptr,  # [L, B + 1] int64, the paired rank's
    priority_ptr,  # [2] int32
    gates_ptr,  # [3, GATE_STRIDE] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    is_sender_ptr,  # [1] int32
    layer,
    rank,
    timeout_ns,
    late_code,
    threshold2,
    ACCEPT_ALL: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_PAD: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Exchange the sums within the group, then decide. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(is_sender_ptr) == 0:
        return
    epoch = tl.load(epoch_ptr)
    total = add_sums(sums_ptr, B, B_PAD, SUMS, SUMS_PAD)
    if T > 1:
        lane, first = tl.arange(0, 2 * B_PAD), layer * T * (2 * B)
        push_to_group(peers_ptr, first + rank * (2 * B) + lane, total, epoch, lane < 2 * B, T)
        total = await_sums(
            packets_ptr + first, 2 * B, epoch, timeout_ns, fault_ptr, late_code, B, B_PAD, T, T_PAD
        )  # fmt: skip
    accepted, verdict = request_verdicts(total, live_ptr, forced_ptr, layer, threshold2, ACCEPT_ALL, B, B_PAD)
    requests = tl.arange(0, B_PAD)
    # Send to the paired rank first: it is waiting.
    dst = verdicts_ptr + layer * (B + 1)
    store_packets(dst + B, tl.where(verdict, 1.0, 0.0), epoch)
    # Select floats, not integers: ptxas in CUDA 12.8 drops the int-to-float conversion here.
    request_hits = tl.where(accepted, 1.0, 0.0)
    store_packets(dst + requests, request_hits, epoch, requests < B)
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
    """Compute the sender's verdict, send it to the paired rank, set this rank's priority and gates. Gate: `is_sender`.

        request accepts:  dist2 < threshold^2 norm2, summed over all heads of the group
        layer accepts:    every live request accepts

    The ranks of the group exchange their sums. Rules: `alspec.verdict`. Oracle: `decide_ref`.

    Args:
        sums: [B, R, 2] fp32, written by the attention kernel.
        live: [B] int32, the same on every rank of the job.
        threshold: lambda >= 0, fixed at capture.
        hits: [L, B] int32; the row of this layer is written, 0 for a request that is not live.
        timeout_ns: longest wait for the sums of the other ranks.
        forced: [L] int32, the same on every rank: 1 accepts, 0 rejects, -1 decides from the sums.
    Raises:
        ValueError: `threshold` is negative or NaN.
    Capture: graph-safe; allocates nothing.
    """
    threshold2, accept_all = squared_threshold(threshold)
    shape, exchange = pair.shape, pair.exchange
    compiled = jit_launch(_decide_kernel, (1,))(
        sums, live, forced, hits, pair.own.sums, pair.sums_peers, pair.paired.verdicts, pair.priority,
        pair.gates, exchange.epoch, exchange.fault, pair.is_sender, layer, exchange.tp_rank, timeout_ns,
        fault_code(LATE_PACKET, 2 * layer, exchange.rank - exchange.tp_rank), threshold2, ACCEPT_ALL=accept_all,
        B=shape.batch_size, B_PAD=triton.next_power_of_2(shape.batch_size), SUMS=sums.shape[1],
        SUMS_PAD=triton.next_power_of_2(sums.shape[1]), T=shape.tp_size, T_PAD=triton.next_power_of_2(shape.tp_size),
        num_warps=1, **pdl_options(sums.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def squared_threshold(threshold: float) -> tuple[float, bool]:
    """Return threshold^2, the fp32 value that the kernels use, and whether every `A~` is accepted (lambda = inf).

    Raises:
        ValueError: `threshold` is negative or NaN.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a number >= 0, found {threshold}")
    accept_all = math.isinf(threshold)
    return 0.0 if accept_all else float(torch.tensor(threshold * threshold, dtype=torch.float32)), accept_all
