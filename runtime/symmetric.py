"""Symmetric memory: buffers of one rank that the kernels of every other rank write through peer pointers.

Within one host whose GPUs reach each other. NVLink multicast is never used.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from ..kernels.exchange import Exchange, LogitExchange
from ..kernels.mailbox import Handover, PairShape
from ..kernels.push import push_partial
from ..kernels.residual import new_residual, reduce_norm
from .placement import Placement
from .transport import Transport

__all__ = ["exchanges", "symmetric_fault"]

# A group's first push must arrive within this time of the self-test.
TEST_PATIENCE_NS = 20 * 10**9


def exchanges(
    transport: Transport,
    use_symm: bool,
    num_slots: int,
    batch_size: int,
    hidden_size: int,
    vocab_size: int,
    pair: PairShape | None = None,
) -> tuple[Exchange, LogitExchange, Handover | None]:
    """Buffers for the partial sums of a step with `num_slots` all-reduces, for its logits, and for a pair's handovers.

    Every rank calls it with the same arguments. With `use_symm`, partial sums and logits travel as words through peer
    pointers; without, they are left to collectives. A pair needs `use_symm`.
    """
    placement, device = transport.placement, transport.device
    tp_size, world_size = placement.tp_size, placement.world_size
    rows = -(-vocab_size // world_size)
    exchange = Exchange(
        partial=torch.zeros(batch_size, hidden_size, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        tp_rank=placement.tp_rank,
        tp_size=tp_size,
        rank=placement.rank,
    )
    shard = torch.zeros(batch_size, rows, device=device)
    logit_exchange = LogitExchange(shard, exchange.epoch, exchange.fault, placement.rank, world_size)
    if not use_symm or world_size == 1:
        assert pair is None
        return exchange, logit_exchange, None
    sizes = [
        num_slots * batch_size * tp_size * hidden_size if tp_size > 1 else 0,
        -(-batch_size * world_size * rows // 2) * 2,  # so that what follows is aligned to 16 bytes
        sum(pair.field_words()) if pair else 0,
        world_size if pair else 0,
    ]
    memory, addresses, paired_memory = _allocate(sum(sizes), transport)
    words, logit_words, mailbox, meeting = memory.split(sizes)

    def peers(first: int, count: int, offset: int) -> Tensor:
        return torch.tensor([address + 8 * offset for address in addresses[first : first + count]], device=device)

    group = placement.group * tp_size
    if tp_size > 1:
        words = words.view(num_slots, batch_size, tp_size, hidden_size)
        exchange = replace(exchange, words=words, peers=peers(group, tp_size, 0))
    logit_words = logit_words[: batch_size * world_size * rows].view(batch_size, world_size, rows)
    logit_exchange = replace(logit_exchange, words=logit_words, peers=peers(0, world_size, sizes[0]))
    if pair is None:
        return exchange, logit_exchange, None
    assert paired_memory is not None
    begin, end = sum(sizes[:2]), sum(sizes[:3])
    handover = Handover.build(
        pair, exchange, placement.group, placement.paired_rank, mailbox, paired_memory[begin:end],
        [address + 8 * begin for address in addresses[group : group + tp_size]],
        meeting, [address + 8 * end for address in addresses],
    )  # fmt: skip
    return exchange, logit_exchange, handover


def _allocate(num_words: int, transport: Transport) -> tuple[Tensor, list[int], Tensor | None]:
    """Zeroed words of this rank, the address of every rank's, and the paired rank's, if there is one, as a tensor.

    All ranks of the job call it together.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # `symm_mem.empty` would load SymPy for the strides of one dimension, which takes 2 s.
    memory = _SymmetricMemory.empty_strided_p2p((num_words,), (1,), torch.int64, transport.device)
    assert dist.group.WORLD is not None
    handle = symm_mem.rendezvous(memory, dist.group.WORLD.group_name)
    memory.zero_()
    transport.barrier()
    buffers = [handle.get_buffer(rank, (num_words,), torch.int64) for rank in range(handle.world_size)]
    placement = transport.placement
    paired = buffers[placement.paired_rank] if placement.num_groups == 2 else None
    return memory, [int(buffer.data_ptr()) for buffer in buffers], paired


def symmetric_fault(transport: Transport) -> str:
    """Why this job cannot use symmetric memory; '' if it can. The same answer on every rank.

    Looks at the hosts and links first, then compares an all-reduce over words with NCCL's, bit for bit, on values whose
    sums are exact: -0.0, subnormal numbers, large ones, and integers.
    """
    placement, device = transport.placement, transport.device
    if placement.world_size == 1:
        return ""
    reason = _unreachable(placement, device)
    if not transport.agree(not reason):
        return reason or "another rank cannot reach its peers"
    try:
        wrong = _differs_from_nccl(transport)
    except RuntimeError as error:
        wrong = f"symmetric memory failed: {str(error).splitlines()[0]}"
    return "" if transport.agree(not wrong) else wrong or "another rank's self-test failed"


def _unreachable(placement: Placement, device: torch.device) -> str:
    if placement.local_world_size != placement.world_size:
        return "ranks on several hosts"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1"
    others = [index for index in range(placement.local_world_size) if index != device.index]
    blocked = [index for index in others if not torch.cuda.can_device_access_peer(device, index)]
    return f"GPU {device.index} cannot reach GPU {blocked[0]}" if blocked else ""


def _differs_from_nccl(transport: Transport) -> str:
    device, rank, world_size = transport.device, transport.placement.rank, transport.placement.world_size
    hidden = 256
    memory, addresses, _ = _allocate(world_size * hidden, transport)
    exchange = Exchange(
        partial=torch.zeros(1, hidden, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        tp_rank=rank,
        tp_size=world_size,
        rank=rank,
        words=memory.view(1, 1, world_size, hidden),
        peers=torch.tensor(addresses, device=device),
    )
    values = torch.full((hidden,), -0.0, device=device)
    values[:64] = 1e-41 * (rank + 1)
    values[64 + rank : 128 : world_size] = 3e38 * (-1) ** rank
    generator = torch.Generator(device).manual_seed(rank)
    values[128:192] = torch.randint(-1000, 1000, (64,), generator=generator, device=device).float()
    # One column of values, the others -0.0: the sum of a row is its value, sign of zero included.
    weight = torch.full((hidden, 16), -0.0, device=device)
    weight[:, 0] = values
    x, x_norm, square_sums = new_residual(1, hidden, torch.float32, device)
    x.fill_(-0.0)
    push_partial(torch.ones(1, 16, device=device), weight, exchange, 0)
    reduce_norm(exchange, 0, TEST_PATIENCE_NS, x, values, x_norm, square_sums)
    dist.all_reduce(values)
    transport.synchronize()
    if int(exchange.fault):
        return "a word did not arrive"
    different = x[0].view(torch.int32) != values.view(torch.int32)
    if bool(different.any()):
        at = int(different.int().argmax())
        return f"wrong sum: {float(x[0, at])!r} for {float(values[at])!r}"
    return ""
