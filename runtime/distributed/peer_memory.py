"""Peer memory: buffers through which the kernels of several ranks exchange LL packets.

`symm` is GPU memory of peers (symmetric memory) and needs peer access. `host` is pinned memory of one host. NVLink
multicast is never used: a program that crashes while using it can disable the GPUs of the host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from alspec.errors import DoesNotFitError, one_line
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import PACKETS_PER_LINE
from alspec.kernels.comm.pair_state import PairShape, PairState
from alspec.kernels.linear.push import push_partial
from alspec.kernels.norm.residual import new_residual, reduce_norm
from alspec.runtime.distributed.host_memory import HostMemoryError, share_host_memory
from alspec.runtime.distributed.placement import PeerMemory, Placement, why_no_peers
from alspec.runtime.distributed.transport import Transport

__all__ = ["allocate_packets", "build_exchanges", "probe_peer_memory"]

AnyExchange = TypeVar("AnyExchange", Exchange, LogitExchange)

NAMES: dict[PeerMemory, str] = {"symm": "symmetric memory", "host": "the host's memory"}

# How long the self-test waits for packets.
SELF_TEST_TIMEOUT_NS = 20 * 10**9


def build_exchanges(
    transport: Transport,
    peer_memory: PeerMemory | None,
    num_reduces: int,
    batch_size: int,
    hidden_size: int,
    vocab_size: int,
    pair_shape: PairShape | None = None,
) -> tuple[Exchange, LogitExchange, PairState | None]:
    """Allocate the buffers for the all-reduces and logits of a step, and for the handovers of a pair.

    Every rank calls it with the same arguments. With peer memory, partial sums and logits are sent as LL packets
    between the peers (`Placement.peers`), and so is what the ranks of a linked group agree on; without it, collectives
    exchange them.

    Args:
        transport: connects the ranks.
        peer_memory: where packets are stored; None for collectives.
        num_reduces: all-reduces of a step.
        batch_size: B.
        hidden_size: size of the residual stream.
        vocab_size: V, split over the peers.
        pair_shape: sizes of a pair; None without a pair.
    Returns:
        The exchange of partial sums, the exchange of logits, and the state of a pair over peer memory, else None.
    Raises:
        DoesNotFitError: host memory for the packets cannot be allocated; raised on all ranks.
        RuntimeError: symmetric memory cannot be allocated; raised on all ranks.
    """
    placement, device = transport.placement, transport.device
    tp_size, num_peers, own = placement.tp_size, len(placement.peers), placement.peer_rank
    rows = -(-vocab_size // num_peers)
    exchange, logit_exchange = _without_packets(placement, device, batch_size, hidden_size, rows)
    if peer_memory is None or num_peers == 1:
        assert pair_shape is None or placement.is_linked
        return exchange, logit_exchange, None
    mailbox_shape, linked_shape = (None, pair_shape) if placement.is_linked else (pair_shape, None)
    sizes = [
        num_reduces * batch_size * tp_size * hidden_size if tp_size > 1 else 0,
        batch_size * num_peers * rows,
        sum(mailbox_shape.field_sizes()) if mailbox_shape else 0,
        num_peers if mailbox_shape else 0,
        linked_shape.num_layers * tp_size * linked_shape.agreed_packets if linked_shape else 0,
    ]
    peers = range(num_peers)
    # In host memory, a group shares the buffer of its partial sums, and all peers share that of the logits. The others
    # are not shared.
    buffer_ids = [[peer // tp_size for peer in peers], [0] * num_peers, peers, peers, peers]
    try:
        partials, logits, mailboxes, barriers, agreed = allocate_packets(peer_memory, sizes, buffer_ids, transport)
    except HostMemoryError as error:
        raise DoesNotFitError(f"transport: host: {error}; use --transport nccl, which needs no host memory") from error
    first = placement.group_ranks.start - placement.peers.start
    group = range(first, first + tp_size)
    if tp_size > 1:
        exchange = _with_packets(exchange, partials, own, group, (num_reduces, batch_size, tp_size, hidden_size))
    logit_exchange = _with_packets(logit_exchange, logits, own, peers, (batch_size, num_peers, rows))
    if linked_shape is not None:
        exchange = replace(
            exchange,
            agreed=agreed[own].view(linked_shape.num_layers, tp_size, linked_shape.agreed_packets),
            agreed_peers=torch.tensor(_addresses(agreed, group), device=device),
        )
    if mailbox_shape is None:
        return exchange, logit_exchange, None
    pair = PairState.build(
        mailbox_shape, exchange, placement.group, placement.paired_rank, mailboxes[own],
        mailboxes[placement.paired_rank], _addresses(mailboxes, group), barriers[own], _addresses(barriers, peers),
    )  # fmt: skip
    return exchange, logit_exchange, pair


def _without_packets(
    placement: Placement, device: torch.device, batch_size: int, hidden_size: int, rows: int
) -> tuple[Exchange, LogitExchange]:
    """The exchanges of partial sums and of logits over collectives."""
    exchange = Exchange(
        partial=torch.zeros(batch_size, hidden_size, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        tp_rank=placement.tp_rank,
        tp_size=placement.tp_size,
        rank=placement.rank,
    )
    shard = placement.shard
    logit_exchange = LogitExchange(
        torch.zeros(batch_size, rows, device=device), exchange.epoch, exchange.fault, shard.vocab_rank,
        shard.vocab_shards, first_rank=placement.peers.start,
    )  # fmt: skip
    return exchange, logit_exchange


def _addresses(buffers: Sequence[Tensor], ranks: range) -> list[int]:
    """Addresses where packets for these ranks are stored; a shared buffer is listed once."""
    return list(dict.fromkeys(buffers[rank].data_ptr() for rank in ranks))


def _with_packets(
    exchange: AnyExchange, buffers: Sequence[Tensor], own: int, ranks: range, shape: tuple[int, ...]
) -> AnyExchange:
    """Return a copy of `exchange` that uses these buffers, one per peer. It reads its `own` and writes to `ranks`."""
    packets, addresses = buffers[own].view(shape), _addresses(buffers, ranks)
    own_packets = None
    if len(addresses) < len(ranks):
        # Several ranks share one host buffer. Keep a copy of this rank's packets on the GPU, so as not to read them
        # back over PCIe.
        own_packets = torch.zeros_like(packets)
        addresses.append(own_packets.data_ptr())
    peers = torch.tensor(addresses, device=packets.device)
    return replace(exchange, packets=packets, own_packets=own_packets, peers=peers)


def allocate_packets(
    peer_memory: PeerMemory, sizes: Sequence[int], buffer_ids: Sequence[Sequence[int]], transport: Transport
) -> list[list[Tensor]]:
    """Allocate zeroed packet buffers for several fields, each aligned to a line of 128 bytes.

    All ranks of the job call it together. A rank writes to the buffers of its peers and reads its own.

    Args:
        peer_memory: where to allocate.
        sizes: packets of each field.
        buffer_ids: [field][peer]. In host memory, peers with equal ids share one buffer of that field. `symm` ignores
            the ids.
        transport: connects the ranks.
    Returns:
        [field][peer] int64 tensors of `size` packets that this rank's kernels can write.
    Raises:
        HostMemoryError: host memory cannot be allocated; raised on all ranks.
        RuntimeError: symmetric memory cannot be allocated; raised on all ranks.
    """
    own, device = transport.placement.peer_rank, transport.device
    padded_sizes = [-(-size // PACKETS_PER_LINE) * PACKETS_PER_LINE for size in sizes]
    if peer_memory == "host":
        keys = [(field, buffer_id) for field, numbers in enumerate(buffer_ids) for buffer_id in dict.fromkeys(numbers)]
        aligned = [padded_sizes[field] for field, _ in keys]
        found = dict(zip(keys, share_host_memory(sum(aligned), transport).split(aligned), strict=True))
        return [[found[field, buffer_id][:size] for buffer_id in buffer_ids[field]] for field, size in enumerate(sizes)]
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    failed: RuntimeError | None = None
    try:
        # Not `symm_mem.empty`: it loads SymPy to compute the strides of one dimension, which is slow.
        memory = _SymmetricMemory.empty_strided_p2p((sum(padded_sizes),), (1,), torch.int64, device)
        handle = symm_mem.rendezvous(memory, transport.peer_group.group_name)
        memory.zero_()
    except RuntimeError as error:  # perhaps in one of two groups
        failed = error
    reason = transport.first_reason("" if failed is None else one_line(failed))
    if failed is not None:
        raise failed
    if reason:
        raise RuntimeError(reason)
    transport.barrier()
    buffers = [handle.get_buffer(peer, (sum(padded_sizes),), torch.int64) for peer in range(handle.world_size)]
    buffers[own] = memory
    fields = zip(*(buffer.split(padded_sizes) for buffer in buffers), strict=True)
    return [[packets[:size] for packets in field] for field, size in zip(fields, sizes, strict=True)]


def probe_peer_memory(candidates: Sequence[PeerMemory], transport: Transport) -> tuple[PeerMemory | None, str]:
    """Find the first peer memory that works. All ranks of the job call it together.

    Args:
        candidates: peer memories to try, best first.
        transport: connects the ranks.
    Returns:
        The first that works (None if none does), and why each earlier one failed; the same on every rank.
    """
    reasons: list[str] = []
    for peer_memory in candidates:
        reason = _problem(peer_memory, transport)
        if not reason:
            return peer_memory, "; ".join(reasons)
        if reason not in reasons:
            reasons.append(reason)
    return None, "; ".join(reasons)


def _problem(peer_memory: PeerMemory, transport: Transport) -> str:
    """Return why the kernels of this job cannot use this peer memory; '' if they can. The same on every rank.

    It checks hosts and links first. Then it compares an all-reduce of the peers over LL packets with NCCL's, bit for
    bit. The values are -0.0, subnormal numbers, large numbers and integers. Their sums are exact, so any order of
    addition gives the same bits. Two linked groups use the same memory, so that they compute the same bits.
    """
    reason = transport.first_reason(_topology_problem(peer_memory, transport.placement))
    if reason:
        return reason
    try:
        problem = _self_test_problem(peer_memory, transport)
    except RuntimeError as error:
        problem = one_line(error)
    reason = transport.first_reason(problem)
    return f"{NAMES[peer_memory]} failed: {reason}" if reason else ""


def _topology_problem(peer_memory: PeerMemory, placement: Placement) -> str:
    """Return why hosts or links rule out this peer memory; '' if they do not."""
    if not placement.is_inside_host(placement.peers):
        return "ranks on several hosts"
    return why_no_peers(placement.peer_gpus) if peer_memory == "symm" else ""


def _self_test_problem(peer_memory: PeerMemory, transport: Transport) -> str:
    """Compare one all-reduce over LL packets with NCCL's. Returns the difference as text; '' if there is none."""
    device, placement = transport.device, transport.placement
    rank, num_peers = placement.peer_rank, len(placement.peers)
    hidden = 256
    (buffers,) = allocate_packets(peer_memory, [num_peers * hidden], [[0] * num_peers], transport)
    exchange = Exchange(
        partial=torch.zeros(1, hidden, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        tp_rank=rank,
        tp_size=num_peers,
        rank=placement.rank,
    )
    exchange = _with_packets(exchange, buffers, rank, range(num_peers), (1, 1, num_peers, hidden))
    values = torch.full((hidden,), -0.0, device=device)
    values[:64] = 1e-41 * (rank + 1)
    values[64 + rank : 128 : num_peers] = 3e38 * (-1) ** rank
    generator = torch.Generator(device).manual_seed(rank)
    values[128:192] = torch.randint(-1000, 1000, (64,), generator=generator, device=device).float()
    # The other columns are -0.0. So the product of a row with ones is exactly its value, including the sign of zero.
    weight = torch.full((hidden, 16), -0.0, device=device)
    weight[:, 0] = values
    x, x_norm, square_sums = new_residual(1, hidden, torch.float32, device)
    x.fill_(-0.0)
    push_partial(torch.ones(1, 16, device=device), weight, exchange, 0)
    # `values` stands in for gamma: the norm's output is not used.
    reduce_norm(exchange, 0, SELF_TEST_TIMEOUT_NS, x, values, x_norm, square_sums)
    dist.all_reduce(values, group=transport.peer_group)
    transport.synchronize()
    if int(exchange.fault):
        return "a packet did not arrive"
    different = x[0].view(torch.int32) != values.view(torch.int32)
    if bool(different.any()):
        index = int(different.int().argmax())
        return f"wrong sum: {float(x[0, index])!r}, expected {float(values[index])!r}"
    return ""
