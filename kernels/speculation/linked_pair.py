"""Paired groups over a link that kernels cannot reach across: the verifier decides alone, the speculator runs ahead.

Group 0, the *verifier*, computes every layer as one group alone does: attention, verdict on its own `A~`, and behind it
post-attention, on `A~` after an accept and on `A` after a reject. Group 1, the *speculator*, computes the same step on
`A~` alone, which takes it no full attention and no message. It sends x behind each layer. If x of a layer has arrived
and comes from accepted `A~`s alone, the verifier takes it and skips post-attention; otherwise it computes the same bits
itself. So the text does not depend on when messages arrive, and no layer waits for the link.

    verifier     -> speculator   slot l: x in front of layer l (l > 0), its k and v (l < L), the last rejected layer
    speculator   -> verifier     slot l: x of layer l + 1, and from which layer on its x is the verifier's: the *base*

After a reject of layer r, x of the speculator is wrong from layer r + 1 on. When it learns of r, it waits for the x of
the layer that it has come to, which becomes its base. The k and v of the layers between are replaced at the end of the
step, as all others are: those of the verifier are right. So that few layers are lost, it begins layer l when message
l - `lead` has arrived: it is as far ahead as its messages need to be in time, and no further.

Both groups sample the next token from the same x, so no token travels. Recall lists and verdicts follow the last slot.

A message is a slot of int64: a header, then LL packets (ll_packets.py), which the kernel that computes a value writes.
The slots of a step are sent in order. When one has arrived, `note_arrival` stores a packet in `arrived`.

The ranks of a group must see the same messages. Where the group exchanges packets, `decide` and `choose_x` send each
other how many have arrived (`Exchange.agreed`). Otherwise collectives gather what `snapshot` stores, and the sums.

Shapes: B requests, L layers, Hq and Hkv this rank's query and KV heads, D head_dim, N cache capacity, T ranks of a
group, R (dist2, norm2) pairs per request, S sums of squares of each request, M = hidden + 2 Hkv D packets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import RecallBuffers, SpecOutput
from alspec.kernels.attention.dispatch import CacheLayer
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, pack_packets, wait_packets
from alspec.kernels.comm.pair_state import GATE_STRIDE, PairShape
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD
from alspec.kernels.speculation.handover import cache_args, launch_receive_residual, store_message
from alspec.kernels.speculation.roles import (
    add_sums,
    await_sums,
    push_to_group,
    request_verdicts,
    squared_threshold,
)

__all__ = [
    "LinkedPair",
    "await_ending",
    "choose_x",
    "decide",
    "note_arrival",
    "replace_newest",
    "snapshot",
    "take_x",
]

HEADER = 16  # int64 in front of a slot's packets; the first one is used


@dataclass(frozen=True)
class LinkedPair:
    """The state of one rank of a pair over a link. Gates of different layers lie apart."""

    shape: PairShape
    exchange: Exchange  # of the group
    group: int  # 0: verifier
    paired_rank: int  # in the job
    outbox: Tensor  # [L + 1 or L, slot] int64
    inbox: Tensor  # [L or L + 1, slot] int64
    arrived: Tensor  # [slots of the inbox + 1] int64: a packet with the step's epoch for each message and the ending
    counts: Tensor  # [T] int32: arrived messages of each rank of the group, if collectives gather them
    progress: Tensor  # [1] int32: the verifier's last rejected layer, or -1; the speculator's base
    lead: Tensor  # [1] int32: layers that the speculator may be ahead of the newest message; >= 1
    gates: Tensor  # [3, L + 1, GATE_STRIDE] int32: see the properties; the first word of each row is the gate
    # [P, B, Hq, D] and [P, B, Hq] int64: where the verifier's attention stores A~, which nothing reads
    spec_out: Tensor
    spec_lse: Tensor
    sums: Tensor  # [T, B, R, 2] fp32: dist2 and norm2 of parts of heads, from each rank of the group
    ending: Tensor  # [L B + L B Hkv recall_blocks] int32: verdicts and recall lists of a step

    @classmethod
    def allocate(cls, shape: PairShape, exchange: Exchange, group: int, paired_rank: int) -> LinkedPair:
        """Allocate the buffers; `exchange` is the group's."""
        device, batch, layers = exchange.partial.device, shape.batch_size, shape.num_layers

        def new(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        of_verifier = new(layers + 1, HEADER + batch * shape.message_packets, dtype=torch.int64)
        of_speculator = new(layers, HEADER + batch * shape.hidden_size, dtype=torch.int64)
        of_verifier[0, 0] = -1  # in front of layer 0 nothing is rejected; the first base is 0
        outbox, inbox = (of_verifier, of_speculator) if group == 0 else (of_speculator, of_verifier)
        lists = batch * shape.num_kv_heads * shape.recall_blocks
        in_parts = shape.spec_parts, batch, shape.num_qo_heads
        return cls(
            shape, exchange, group, paired_rank, outbox, inbox,
            arrived=new(len(inbox) + 1, dtype=torch.int64),
            counts=new(shape.tp_size, dtype=torch.int32),
            progress=new(1, dtype=torch.int32),
            lead=new(1, dtype=torch.int32).fill_(layers),
            gates=new(3, layers + 1, GATE_STRIDE, dtype=torch.int32),
            spec_out=new(*in_parts, shape.head_dim, dtype=torch.int64),
            spec_lse=new(*in_parts, dtype=torch.int64),
            sums=new(shape.tp_size, batch, num_sums(batch, shape.num_qo_heads, shape.head_dim), 2),
            ending=new(layers * (batch + lists), dtype=torch.int32),
        )  # fmt: skip

    @property
    def verifies(self) -> bool:
        """This rank belongs to the verifier."""
        return self.group == 0

    def takes(self, layer: int) -> Tensor:
        """Gate [1]: x behind the layer (speculator: in front of it) is taken from the paired rank."""
        return self.gates[0, layer, :1]

    def computes(self, layer: int) -> Tensor:
        """Gate [1]: the verifier computes post-attention of the layer."""
        return self.gates[1, layer, :1]

    def predicts(self, layer: int) -> Tensor:
        """Gate [1]: the verifier computes it on `A~`: it accepts the layer, but has not the speculator's x."""
        return self.gates[2, layer, :1]

    def written(self, slot: int) -> Tensor:
        """[B, M or hidden] int64: where this rank's kernels put the packets of a message."""
        return self.outbox[slot, HEADER:].view(self.shape.batch_size, -1)

    def received(self, slot: int) -> Tensor:
        """[B, hidden or M] int64: the packets of a message of the paired rank."""
        return self.inbox[slot, HEADER:].view(self.shape.batch_size, -1)

    @property
    def own_sums(self) -> Tensor:
        """[B, R, 2] fp32: this rank's part of `sums`."""
        return self.sums[self.exchange.tp_rank]

    @property
    def hits(self) -> Tensor:
        """[L, B] int32: the part of `ending` with each request's verdicts."""
        return self.ending[: self.shape.num_layers * self.shape.batch_size].view(-1, self.shape.batch_size)

    @property
    def lists(self) -> Tensor:
        """[L, B, Hkv, recall_blocks] int32: the part of `ending` with the recall lists of the next step."""
        shape = self.shape
        lists = self.ending[shape.num_layers * shape.batch_size :]
        return lists.view(shape.num_layers, shape.batch_size, shape.num_kv_heads, shape.recall_blocks)

    def spec_output(self, chunk_size: int, recall: RecallBuffers | None = None) -> SpecOutput:
        """Return where the verifier's attention writes `A~` and the sums."""
        lse = self.spec_lse if self.shape.spec_parts > 1 else None
        return SpecOutput(chunk_size, self.spec_out, self.own_sums, self.exchange.epoch, lse, recall)

    @property
    def late_fault(self) -> int:
        """The fault code of a message that did not arrive."""
        return fault_code(LATE_PACKET, 2 * self.shape.num_layers + 2, self.paired_rank)

    def late_peer(self, layer: int) -> int:
        """The fault code of the first rank of the group, if what it knows of a layer does not arrive."""
        return fault_code(LATE_PACKET, 2 * layer, self.exchange.rank - self.exchange.tp_rank)

    def agreed(self, layer: int) -> Tensor | None:
        """[T, 1 + 2 B] int64: what the ranks of the group know of a layer, as packets; None over collectives."""
        return None if self.exchange.agreed is None else self.exchange.agreed[layer]


@triton.jit(do_not_specialize=["epoch"], do_not_specialize_on_alignment=["arrived_ptr"])
def _note_arrival_kernel(arrived_ptr, epoch):
    """Grid [1]."""
    epoch = tl.zeros([], tl.int32) + epoch.to(tl.int32)
    tl.store(arrived_ptr, pack_packets(tl.zeros([], tl.float32), epoch), cache_modifier=".wt")


def note_arrival(pair: LinkedPair, slot: int, epoch: int) -> None:
    """Tell the kernels of this rank that a message has arrived: launch it behind the copy into `inbox[slot]`.

    Args:
        slot: that behind the inbox stands for `ending`, which the speculator receives.
        epoch: of the step; messages and kernels may be a step apart.
    Not captured: the host launches it beside the step.
    """
    jit_launch(_note_arrival_kernel, (1,))(pair.arrived[slot:], epoch, num_warps=1)


@triton.jit
def _count_arrived(arrived_ptr, epoch, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr):
    """Messages of this step that have arrived; they do so in order."""
    slots = tl.arange(0, SLOTS_PAD)
    packets = tl.load(arrived_ptr + slots, mask=slots < SLOTS, other=0, volatile=True)
    return tl.sum(((packets >> 32).to(tl.int32) == epoch).to(tl.int32), 0)


@triton.jit
def _snapshot_kernel(arrived_ptr, epoch_ptr, count_ptr, SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr):
    """Grid [1]."""
    tl.store(count_ptr, _count_arrived(arrived_ptr, tl.load(epoch_ptr), SLOTS, SLOTS_PAD))


def snapshot(pair: LinkedPair) -> None:
    """Store how many messages have arrived at this rank in `counts`, which collectives then gather.

    Capture: graph-safe; allocates nothing.
    """
    slots, own = len(pair.inbox), pair.counts[pair.exchange.tp_rank :]
    jit_launch(_snapshot_kernel, (1,))(
        pair.arrived, pair.exchange.epoch, own, SLOTS=slots, SLOTS_PAD=triton.next_power_of_2(slots), num_warps=1
    )


@triton.jit
def _least_count(counts_ptr, T: tl.constexpr):
    """Messages that have arrived at all ranks of the group, from the gathered counts."""
    count = tl.load(counts_ptr)
    for rank in tl.static_range(1, T):
        count = tl.minimum(count, tl.load(counts_ptr + rank))
    return count


@triton.jit
def _await_least_count(
    agreed_ptr, stride, epoch, timeout_ns, fault_ptr, late_code, T: tl.constexpr, T_PAD: tl.constexpr
):
    """Messages that have arrived at all ranks of the group, from their packets; 0 if one of these is late."""
    ranks = tl.arange(0, T_PAD)
    counts = wait_packets(agreed_ptr + ranks * stride, ranks < T, epoch, timeout_ns, fault_ptr, late_code + ranks)
    counts = tl.where(counts == counts, counts, 0.0)  # NaN is late
    return tl.min(tl.where(ranks < T, counts, 1e9), 0).to(tl.int32)


@triton.jit(do_not_specialize=["layer", "slot_size", "rank", "timeout_ns", "late_code"])
def _decide_kernel(
    sums_ptr,  # [T, B, SUMS, 2] fp32
    live_ptr,  # [B] int32
    forced_ptr,  # [L] int32, or None
    hits_ptr,  # [L, B] int32
    arrived_ptr,  # [SLOTS] int64
    counts_ptr,  # [T] int32
    agreed_ptr,  # [T, 1 + 2 B] int64: of the layer; None: `counts` and `sums` are gathered
    peers_ptr,  # [T] int64: address of each rank's `agreed` of all layers
    inbox_ptr,  # [SLOTS, slot_size] int64
    progress_ptr,  # [1] int32: last rejected layer
    header_ptr,  # [1] int64: of the next message
    takes_ptr,  # [1] int32
    computes_ptr,
    predicts_ptr,
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    layer,
    slot_size,
    rank,
    timeout_ns,
    late_code,
    threshold2,
    ACCEPT_ALL: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    epoch = tl.load(epoch_ptr)
    if agreed_ptr is not None:
        ROW: tl.constexpr = 1 + 2 * B
        lane, first = tl.arange(0, 2 * B_PAD), (layer * T + rank) * ROW
        total = add_sums(sums_ptr + rank * (B * SUMS * 2), B, B_PAD, SUMS, SUMS_PAD)
        push_to_group(peers_ptr, first + 1 + lane, total, epoch, lane < 2 * B, T)
        one = tl.arange(0, 1)
        count = _count_arrived(arrived_ptr, epoch, SLOTS, SLOTS_PAD)
        push_to_group(peers_ptr, first + one, (count + one).to(tl.float32), epoch, one == 0, T)
        total = await_sums(agreed_ptr + 1, ROW, epoch, timeout_ns, fault_ptr, late_code, B, B_PAD, T, T_PAD)
        count = _await_least_count(agreed_ptr, ROW, epoch, timeout_ns, fault_ptr, late_code, T, T_PAD)
    else:
        total = tl.zeros([2 * B_PAD], tl.float32)
        # Add in rank order: all ranks of the group get the same bits, so the same verdict.
        for tp_rank in tl.static_range(T):
            total += add_sums(sums_ptr + tp_rank * (B * SUMS * 2), B, B_PAD, SUMS, SUMS_PAD)
        count = _count_arrived(arrived_ptr, epoch, SLOTS, SLOTS_PAD) if T == 1 else _least_count(counts_ptr, T)
    accepted, verdict = request_verdicts(total, live_ptr, forced_ptr, layer, threshold2, ACCEPT_ALL, B, B_PAD)
    requests = tl.arange(0, B_PAD)
    tl.store(hits_ptr + layer * B + requests, accepted.to(tl.int32), mask=requests < B)
    rejected = tl.where(layer == 0, -1, tl.load(progress_ptr))
    has_arrived = count > layer
    base = tl.load(inbox_ptr + layer.to(tl.int64) * slot_size, volatile=True).to(tl.int32)
    takes = verdict & has_arrived & (base > rejected)
    rejected = tl.where(verdict, rejected, layer)
    tl.store(progress_ptr, rejected)
    tl.store(header_ptr, rejected.to(tl.int64))
    tl.store(takes_ptr, takes.to(tl.int32))
    tl.store(computes_ptr, 1 - takes.to(tl.int32))
    tl.store(predicts_ptr, (verdict & ~takes).to(tl.int32))


def decide(
    pair: LinkedPair,
    layer: int,
    live: Tensor,
    threshold: float,
    hits: Tensor,
    timeout_ns: int,
    forced: Tensor | None = None,
) -> None:
    """The verifier's verdict on a layer's `A~` from `pair.sums`, and whether the speculator's x is taken.

    Writes the layer's gates, the header of the next message, and row `layer` of `hits`. Rules: `alspec.verdict`.

    Args:
        live: [B] int32, the same on every rank of the job.
        threshold: lambda >= 0, fixed at capture.
        hits: [L, B] int32; 0 for a request that is not live.
        timeout_ns: longest wait for the packets of the other ranks of the group.
        forced: [L] int32, as in `roles.decide`.
    Raises:
        ValueError: `threshold` is negative or NaN.
    Capture: graph-safe; allocates nothing.
    """
    threshold2, accept_all = squared_threshold(threshold)
    shape, sums, slots = pair.shape, pair.sums.shape[2], len(pair.inbox)
    exchange = pair.exchange
    compiled = jit_launch(_decide_kernel, (1,))(
        pair.sums, live, forced, hits, pair.arrived, pair.counts, pair.agreed(layer), exchange.agreed_peers, pair.inbox,
        pair.progress, pair.outbox[layer + 1], pair.takes(layer), pair.computes(layer), pair.predicts(layer),
        exchange.epoch, exchange.fault, layer, pair.inbox.shape[1], exchange.tp_rank, timeout_ns, pair.late_peer(layer),
        threshold2, ACCEPT_ALL=accept_all, B=shape.batch_size, B_PAD=triton.next_power_of_2(shape.batch_size),
        SUMS=sums, SUMS_PAD=triton.next_power_of_2(sums), SLOTS=slots, SLOTS_PAD=triton.next_power_of_2(slots),
        T=shape.tp_size, T_PAD=triton.next_power_of_2(shape.tp_size), num_warps=1, **pdl_options(live.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize=["layer", "slot_size", "rank", "timeout_ns", "code", "late_code"])
def _choose_x_kernel(
    arrived_ptr,  # [SLOTS] int64
    counts_ptr,  # [T] int32
    agreed_ptr,  # [T, ROW] int64: of the layer; None: `counts` are gathered
    peers_ptr,  # [T] int64: address of each rank's `agreed` of all layers
    inbox_ptr,  # [SLOTS, slot_size] int64
    progress_ptr,  # [1] int32: base
    lead_ptr,  # [1] int32
    header_ptr,  # [1] int64: of the message behind this layer, or None behind the last one
    takes_ptr,  # [1] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    layer,
    slot_size,
    rank,
    timeout_ns,
    code,
    late_code,
    ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_PAD: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [1]."""
    if PDL:
        gdc_wait()
    epoch, one = tl.load(epoch_ptr), tl.arange(0, 1)
    if header_ptr is None:
        takes = layer > 0  # always, so that both groups compute logits of the same bits
    else:
        due = layer - tl.load(lead_ptr)
        wait_packets(
            arrived_ptr + tl.maximum(due, 0) + one, (one == 0) & (due >= 0), epoch, timeout_ns, fault_ptr, code + one
        )
        if agreed_ptr is not None:
            count = _count_arrived(arrived_ptr, epoch, SLOTS, SLOTS_PAD)
            first = (layer * T + rank) * ROW
            push_to_group(peers_ptr, first + one, (count + one).to(tl.float32), epoch, one == 0, T)
            count = _await_least_count(agreed_ptr, ROW, epoch, timeout_ns, fault_ptr, late_code, T, T_PAD)
        else:
            count = _count_arrived(arrived_ptr, epoch, SLOTS, SLOTS_PAD) if T == 1 else _least_count(counts_ptr, T)
        newest = inbox_ptr + tl.maximum(count - 1, 0).to(tl.int64) * slot_size
        rejected = tl.where(count > 0, tl.load(newest, volatile=True).to(tl.int32), -1)
        base = tl.where(layer == 1, 0, tl.load(progress_ptr))
        takes = rejected >= base
        base = tl.where(takes, layer, base)
        tl.store(progress_ptr, base)
        tl.store(header_ptr, base.to(tl.int64))
    tl.store(takes_ptr, takes.to(tl.int32))
    wait_packets(arrived_ptr + layer + one, (one == 0) & takes, epoch, timeout_ns, fault_ptr, code + one)
    if PDL:
        # Not earlier: later kernels would take the SM that receives the message.
        gdc_launch_dependents()


def choose_x(pair: LinkedPair, layer: int, timeout_ns: int) -> None:
    """The speculator chooses whether it goes on with its own x in front of layer 1 .. L - 1: if it knows of no reject
    since its base. In front of the final norm, layer L, it never does.

    First it waits for message `layer - lead`. Writes the layer's gate `takes`, the base, and the header of its next
    message. Then it waits for the message that has the verifier's x, if that is taken. Each wait, also for the other
    ranks of the group, takes at most `timeout_ns`.

    Capture: graph-safe; allocates nothing.
    """
    shape, exchange, slots = pair.shape, pair.exchange, len(pair.inbox)
    is_last = layer == shape.num_layers
    header, agreed = (None, None) if is_last else (pair.outbox[layer], pair.agreed(layer))
    compiled = jit_launch(_choose_x_kernel, (1,))(
        pair.arrived, pair.counts, agreed, exchange.agreed_peers, pair.inbox, pair.progress, pair.lead, header,
        pair.takes(layer), exchange.epoch, exchange.fault, layer, pair.inbox.shape[1], exchange.tp_rank, timeout_ns,
        pair.late_fault, pair.late_peer(layer), ROW=shape.agreed_packets, SLOTS=slots,
        SLOTS_PAD=triton.next_power_of_2(slots), T=shape.tp_size, T_PAD=triton.next_power_of_2(shape.tp_size),
        num_warps=1, **pdl_options(pair.arrived.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def take_x(
    pair: LinkedPair, slot: int, x: Tensor, gamma: Tensor, x_norm: Tensor, square_sums: Tensor, timeout_ns: int
) -> None:
    """Take the paired rank's x from a slot, whose message has arrived. Gate: `takes`.

    Args:
        slot: the layer. The verifier takes x behind it, the speculator in front of it.
        x, gamma, x_norm, square_sums: as in `reduce_norm`.
        timeout_ns: longest wait for a packet.
    Capture: graph-safe; allocates nothing.
    """
    # The verifier passes x on, so that each of its messages has the right one.
    following = pair.written(slot + 1) if pair.verifies else None
    launch_receive_residual(
        pair.received(slot), x, gamma, x_norm, square_sums, pair.exchange, pair.takes(slot), timeout_ns,
        pair.late_fault, following,
    )  # fmt: skip


@triton.jit(do_not_specialize=["timeout_ns", "code"], do_not_specialize_on_alignment=["arrived_ptr"])
def _await_ending_kernel(arrived_ptr, epoch_ptr, fault_ptr, timeout_ns, code):
    """Grid [1]."""
    one = tl.arange(0, 1)
    wait_packets(arrived_ptr + one, one == 0, tl.load(epoch_ptr), timeout_ns, fault_ptr, code + one)


def await_ending(pair: LinkedPair, timeout_ns: int) -> None:
    """The speculator waits, at most `timeout_ns`, until `ending` has arrived.

    Capture: graph-safe; allocates nothing.
    """
    jit_launch(_await_ending_kernel, (1,))(
        pair.arrived[-1:], pair.exchange.epoch, pair.exchange.fault, timeout_ns, pair.late_fault, num_warps=1
    )


@triton.jit(do_not_specialize_on_alignment=PER_HEAD)
def _replace_newest_kernel(
    packets_ptr,  # [B, M] int64
    k_ptr,  # [B, HKV, N, D], or None: store into the tail
    v_ptr,
    tail_ptr,  # [B, HKV, 2, 64, D] int8, or None
    tail_scale_ptr,  # [B, HKV, 2] fp32
    capacity,
    seq_lens_ptr,  # [B] int32, with the new token
    HIDDEN: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK channels of k and v of one request. Grid [2 HKV D / BLOCK, B]."""
    M: tl.constexpr = HIDDEN + 2 * HKV * D
    request, index = tl.program_id(1), HIDDEN + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    packets = tl.load(packets_ptr + request.to(tl.int64) * M + index, mask=index < M, other=0, volatile=True)
    store_message(
        packets.to(tl.int32).to(tl.float32, bitcast=True), index, False, request, seq_lens_ptr, k_ptr, v_ptr, tail_ptr,
        tail_scale_ptr, capacity, seq_lens_ptr, HIDDEN, HKV, D,
    )  # fmt: skip


def replace_newest(pair: LinkedPair, layer: int, cache: CacheLayer, seq_lens: Tensor) -> None:
    """The speculator stores the verifier's k and v of the newest token in a layer's cache.

    Args:
        cache: of the layer; in a quantised cache the tail is written, as by `receive_handover`.
        seq_lens: [B] int32, with the new token.
    Capture: graph-safe; allocates nothing. Launch it when all messages have arrived.
    """
    shape = pair.shape
    block = 256
    grid = (triton.cdiv(2 * shape.num_kv_heads * shape.head_dim, block), shape.batch_size)
    jit_launch(_replace_newest_kernel, grid)(
        pair.received(layer), *cache_args(cache), seq_lens, HIDDEN=shape.hidden_size, HKV=shape.num_kv_heads,
        D=shape.head_dim, BLOCK=block, num_warps=2,
    )  # fmt: skip
