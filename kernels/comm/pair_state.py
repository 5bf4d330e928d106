"""Memory through which paired ranks hand over: a mailbox of each rank, which its paired rank and its group write.

Each layer has slots of its own and all words carry the epoch, so that nothing is reset, and nothing is
overwritten before the step's logits have told every rank that it was read.

Shapes: B requests, L layers, Hq and Hkv this rank's query and KV heads, D head_dim, P parts of a guess,
T ranks of a group, M = hidden + 2 Hkv D words of a request's handover.
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

# Gates of a layer, by what they open: the o projection, the MLP, the next layer's pre-attention.
NUM_GATES = 3
GATE_O, GATE_MLP, GATE_PRE_ATTENTION = range(NUM_GATES)
GATE_STRIDE = 4  # int32 words from one gate to the next: compiled kernels rely on 16-byte alignment


@dataclass(frozen=True)
class PairShape:
    """What the sizes of a mailbox follow from; the same on every rank."""

    num_layers: int
    batch_size: int
    tp_size: int
    hidden_size: int
    num_qo_heads: int  # of one rank
    num_kv_heads: int
    head_dim: int
    spec_parts: int = 1  # P, in which `A~` comes

    @property
    def message_packets(self) -> int:
        """M: words of a request's handover, x and the newest k and v."""
        return self.hidden_size + 2 * self.num_kv_heads * self.head_dim

    def field_packets(self) -> tuple[int, ...]:
        """Words (8 bytes) of each field of a `Mailbox`, in its order: every field begins at a line of 128 bytes."""
        layers, batch = self.num_layers, self.batch_size
        sizes = (
            (layers + 1) * batch * self.message_packets,
            layers * (batch + 1),
            layers * self.tp_size * batch * 2,
            layers * self.spec_parts * batch * self.num_qo_heads * self.head_dim,
            layers * self.spec_parts * batch * self.num_qo_heads,
        )
        return tuple(-(-size // PACKETS_PER_LINE) * PACKETS_PER_LINE for size in sizes)


@dataclass(frozen=True)
class Mailbox:
    """What one rank reads of its paired rank and of its own group, who write it; all 0 before the first step."""

    inbox: Tensor  # [L + 1, B, M] int64: x, k and v; no x in slot 0, nothing else in slot L
    verdicts: Tensor  # [L, B + 1] int64: each request's hit, then the layer's verdict
    sums: Tensor  # [L, T, B, 2] int64: dist2 and norm2 over each rank's heads
    spec_out: Tensor  # [L, P, B, Hq, D] int64: A~, in parts
    spec_lse: Tensor  # [L, P, B, Hq] int64: of each part, base 2; unused where there is one

    @classmethod
    def view(cls, memory: Tensor, shape: PairShape) -> Mailbox:
        """A mailbox in `sum(shape.field_packets())` words: memory [words] int64."""
        layers, batch = shape.num_layers, shape.batch_size
        parts, heads = shape.spec_parts, shape.num_qo_heads
        inbox, verdicts, sums, spec_out, spec_lse = memory.split(shape.field_packets())

        def cut(packets: Tensor, *sizes: int) -> Tensor:
            return packets[: math.prod(sizes)].view(sizes)

        return cls(
            inbox=cut(inbox, layers + 1, batch, shape.message_packets),
            verdicts=cut(verdicts, layers, batch + 1),
            sums=cut(sums, layers, shape.tp_size, batch, 2),
            spec_out=cut(spec_out, layers, parts, batch, heads, shape.head_dim),
            spec_lse=cut(spec_lse, layers, parts, batch, heads),
        )


@dataclass(frozen=True)
class PairState:
    """One rank's side of a pair. `exchange` is that of its group: its epoch, its fault word, its ranks."""

    shape: PairShape
    exchange: Exchange
    group: int  # 0 sends first
    paired_rank: int  # in the job
    own: Mailbox
    paired: Mailbox  # the paired rank's
    sums_peers: Tensor  # [T] int64: address of each rank's `sums`, on the device
    priority: Tensor  # [2] int32: own group's, the other's
    is_sender: Tensor  # [1] int32
    is_receiver: Tensor  # [1] int32
    # [3, GATE_STRIDE] int32, the first word of each row: whether this group computes what the gate opens. The later
    # gates may close where the verdict comes while a receiver computes on a rejected guess.
    gates: Tensor
    barrier: Tensor  # [world] int64: written by each rank of the job as its step begins
    barrier_peers: Tensor  # [world] int64: address of each rank's `meeting`

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
        """Both mailboxes in storages of `sum(shape.field_packets())` int64; group 0 is the first sender.

        Args:
            group_addresses: of the storage of each rank of the own group, in rank order.
            meeting: [world] int64.  barrier_addresses: of every rank's, in rank order.
        """
        device = memory.device
        begin = 8 * sum(shape.field_packets()[:2])
        pair = cls(
            shape=shape,
            exchange=exchange,
            group=group,
            paired_rank=paired_rank,
            own=Mailbox.view(memory, shape),
            paired=Mailbox.view(paired_memory, shape),
            sums_peers=torch.tensor([address + begin for address in group_addresses], device=device),
            priority=torch.zeros(2, dtype=torch.int32, device=device),
            is_sender=torch.zeros(1, dtype=torch.int32, device=device),
            is_receiver=torch.zeros(1, dtype=torch.int32, device=device),
            gates=torch.zeros(NUM_GATES, GATE_STRIDE, dtype=torch.int32, device=device),
            barrier=barrier,
            barrier_peers=torch.tensor(list(barrier_addresses), device=device),
        )
        pair.reset_roles()
        return pair

    def reset_roles(self) -> None:
        """Group 0 is the next sender, and opens its gates. After a fault the two groups may have come to disagree."""
        self.priority[0].fill_(2 * (self.group == 0))
        self.priority[1].fill_(2 * (self.group == 1))
        self.gates.fill_(int(self.group == 0))

    def inbox(self, layer: int) -> Tensor:
        """[B, M] int64: where the paired rank finds x, k and v of a layer, or in layer L the step's last x."""
        return self.paired.inbox[layer]

    def gate(self, which: int) -> Tensor:
        """[1] int32: one of `gates`, GATE_O and the like."""
        return self.gates[which, :1]

    def verdict(self, layer: int) -> Tensor:
        """[1] int64: the word with which the paired rank's group judges what it handed over in this layer."""
        return self.own.verdicts[layer, -1:]

    def late(self, layer: int) -> int:
        """The fault of a paired rank that is late in this layer; in layer L + 1, with what the last one left."""
        return fault_code(LATE_PACKET, 2 * layer, self.paired_rank)
