"""Memory of paired ranks: the mailbox of each rank, and its roles and gates. The paired rank and the group write it.

Every layer has its own buffers and every packet carries the epoch. So nothing is reset between steps, and nothing is
overwritten before it was read: the exchange of the logits at the end of a step orders the steps of all ranks.

Shapes: B requests, L layers, Hq and Hkv this rank's query and KV heads, D head_dim, P parts (partials) of `A~`, T ranks
of a group, M = hidden + 2 Hkv D packets of a request's message: x and the newest k and v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, PACKETS_PER_LINE, fault_code

__all__ = ["GATE_MLP", "GATE_O", "GATE_PRE_ATTENTION", "GATE_STRIDE", "NUM_GATES", "PairState", "Mailbox", "PairShape"]

# Gates of a layer: for the o projection, the MLP, and the next layer's pre-attention.
NUM_GATES = 3
GATE_O, GATE_MLP, GATE_PRE_ATTENTION = range(NUM_GATES)
GATE_STRIDE = 4  # int32 from one gate to the next: compiled kernels rely on 16-byte alignment


@dataclass(frozen=True)
class PairShape:
    """The sizes that determine a mailbox; the same on every rank."""

    num_layers: int
    batch_size: int
    tp_size: int
    hidden_size: int
    num_qo_heads: int  # of one rank
    num_kv_heads: int
    head_dim: int
    spec_parts: int = 1  # P: partials in which `A~` is sent
    recall_blocks: int = 0  # blocks of a recall list; 0: there are none

    @property
    def message_packets(self) -> int:
        """M: packets of a request's message, x and the newest k and v."""
        return self.hidden_size + 2 * self.num_kv_heads * self.head_dim

    @property
    def agreed_packets(self) -> int:
        """Packets of a layer that a rank of a linked group sends to the others; see `Exchange.agreed`."""
        return 1 + 2 * self.batch_size

    def field_sizes(self) -> tuple[int, ...]:
        """Packets (8 bytes) in each field of `Mailbox`, in its order, rounded up to whole lines of 128 bytes."""
        layers, batch = self.num_layers, self.batch_size
        sizes = (
            (layers + 1) * batch * self.message_packets,
            layers * (batch + 1),
            layers * self.tp_size * batch * 2,
            layers * self.spec_parts * batch * self.num_qo_heads * self.head_dim,
            layers * self.spec_parts * batch * self.num_qo_heads,
            layers * batch * self.num_kv_heads * self.recall_blocks,  # two int32 in 8 bytes
        )
        return tuple(-(-size // PACKETS_PER_LINE) * PACKETS_PER_LINE for size in sizes)


@dataclass(frozen=True)
class Mailbox:
    """Packets that the paired rank and this rank's group write, and this rank reads. All 0 before the first step."""

    inbox: Tensor  # [L + 1, B, M] int64: x, k and v; row 0 has no x, row L has only x
    verdicts: Tensor  # [L, B + 1] int64: each request's hit, then the layer's verdict
    sums: Tensor  # [L, T, B, 2] int64: dist2 and norm2 over each rank's heads, from this rank's group
    spec_out: Tensor  # [L, P, B, Hq, D] int64: A~, in partials
    spec_lse: Tensor  # [L, P, B, Hq] int64: lse of each partial, base 2; unused if P = 1
    # [2, L, B, Hkv, recall_blocks] int32: recall lists, plain values. Step n reads half n % 2 behind its barrier; the
    # sender of a layer writes the next lists into the other half, which step n - 1 has read.
    lists: Tensor

    @classmethod
    def view(cls, memory: Tensor, shape: PairShape) -> Mailbox:
        """View memory, [sum(shape.field_sizes())] int64, as a mailbox."""
        layers, batch = shape.num_layers, shape.batch_size
        parts, heads = shape.spec_parts, shape.num_qo_heads
        inbox, verdicts, sums, spec_out, spec_lse, lists = memory.split(shape.field_sizes())

        def cut(packets: Tensor, *sizes: int) -> Tensor:
            return packets[: math.prod(sizes)].view(sizes)

        return cls(
            inbox=cut(inbox, layers + 1, batch, shape.message_packets),
            verdicts=cut(verdicts, layers, batch + 1),
            sums=cut(sums, layers, shape.tp_size, batch, 2),
            spec_out=cut(spec_out, layers, parts, batch, heads, shape.head_dim),
            spec_lse=cut(spec_lse, layers, parts, batch, heads),
            lists=cut(lists.view(torch.int32), 2, layers, batch, shape.num_kv_heads, shape.recall_blocks),
        )


@dataclass(frozen=True)
class PairState:
    """The state of one rank of a pair. `exchange` belongs to its group and holds the epoch, fault word and ranks."""

    shape: PairShape
    exchange: Exchange
    group: int  # 0 sends first
    paired_rank: int  # in the job
    own: Mailbox
    paired: Mailbox  # the paired rank's
    sums_peers: Tensor  # [T] int64, on the device: address of each rank's `sums`
    priority: Tensor  # [2] int32: own group's, other group's
    is_sender: Tensor  # [1] int32
    is_receiver: Tensor  # [1] int32
    senders: Tensor  # [L] int32: whether this rank's group was the sender of each layer of this step
    # [3, GATE_STRIDE] int32; the first word of each row is the gate, 1 if this group runs the kernels behind it. On a
    # receiver, later gates close if a reject arrives while the receiver computes on A~.
    gates: Tensor
    barrier: Tensor  # [world] int64: a packet from each rank of the job at the start of its step
    barrier_peers: Tensor  # [world] int64, on the device: address of each rank's `barrier`

    @classmethod
    def build(
        cls,
        shape: PairShape,
        exchange: Exchange,
        group: int,
        paired_rank: int,
        memory: Tensor,
        paired_memory: Tensor,
        group_addresses: Sequence[int],
        barrier: Tensor,
        barrier_addresses: Sequence[int],
    ) -> PairState:
        """Create the state from the memory of both mailboxes; group 0 is the first sender.

        Args:
            memory, paired_memory: [sum(shape.field_sizes())] int64 each: this rank's mailbox, the paired rank's.
            group_addresses: address of the mailbox memory of each rank of this rank's group, in rank order.
            barrier: [world] int64.  barrier_addresses: address of every rank's `barrier`, in rank order.
        """
        device = memory.device
        sums_offset = 8 * sum(shape.field_sizes()[:2])
        pair = cls(
            shape=shape,
            exchange=exchange,
            group=group,
            paired_rank=paired_rank,
            own=Mailbox.view(memory, shape),
            paired=Mailbox.view(paired_memory, shape),
            sums_peers=torch.tensor([address + sums_offset for address in group_addresses], device=device),
            priority=torch.zeros(2, dtype=torch.int32, device=device),
            is_sender=torch.zeros(1, dtype=torch.int32, device=device),
            is_receiver=torch.zeros(1, dtype=torch.int32, device=device),
            senders=torch.zeros(shape.num_layers, dtype=torch.int32, device=device),
            gates=torch.zeros(NUM_GATES, GATE_STRIDE, dtype=torch.int32, device=device),
            barrier=barrier,
            barrier_peers=torch.tensor(list(barrier_addresses), device=device),
        )
        pair.reset_roles()
        return pair

    def reset_roles(self) -> None:
        """Make group 0 the next sender and open its gates. After a fault the groups may disagree."""
        self.priority[0].fill_(2 * (self.group == 0))
        self.priority[1].fill_(2 * (self.group == 1))
        self.gates.fill_(int(self.group == 0))

    def peer_inbox(self, layer: int) -> Tensor:
        """[B, M] int64: where the paired rank reads x, k and v of a layer; layer L: x after the last layer."""
        return self.paired.inbox[layer]

    def gate(self, which: int) -> Tensor:
        """[1] int32: one of `gates`; which: GATE_O, GATE_MLP or GATE_PRE_ATTENTION."""
        return self.gates[which, :1]

    def own_verdict(self, layer: int) -> Tensor:
        """[1] int64: the packet with the paired rank's verdict on the `A~` that it sent in this layer."""
        return self.own.verdicts[layer, -1:]

    def late_fault(self, layer: int) -> int:
        """Return the fault code for a late packet of the paired rank in this layer; L + 1: x after the last layer."""
        return fault_code(LATE_PACKET, 2 * layer, self.paired_rank)
