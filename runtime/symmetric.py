"""Memory through which the kernels of ranks send each other words: of their GPUs, by peer pointers, or of the host.

`symm` needs GPUs that reach each other's memory, `host` only that all are of one host. NVLink multicast is never used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from ..errors import DoesNotFitError
from ..kernels.exchange import Exchange, LogitExchange
from ..kernels.mailbox import Handover, PairShape
from ..kernels.push import push_partial
from ..kernels.residual import new_residual, reduce_norm
from .host_memory import share_host_memory
from .placement import Placement, WordsIn
from .transport import Transport

__all__ = ["allocate_words", "exchanges", "first_working"]

WAYS: dict[WordsIn, str] = {"symm": "symmetric memory", "host": "the host's memory"}

# A group's first push must arrive within this time of the self-test.
TEST_PATIENCE_NS = 20 * 10**9


def exchanges(
    transport: Transport,
    words_in: WordsIn | None,
    num_slots: int,
    batch_size: int,
    hidden_size: int,
    vocab_size: int,
    pair: PairShape | None = None,
) -> tuple[Exchange, LogitExchange, Handover | None]:
    """Buffers for the partial sums of a step with `num_slots` all-reduces, for its logits, and for a pair's handovers.

    Every rank calls it with the same arguments. Partial sums and logits travel as words if there is a place for them;
    otherwise they are left to collectives. A pair needs words.

    Raises:
        DoesNotFitError: the memory for words cannot be had; with `host` on every rank.
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
    if words_in is None or world_size == 1:
        assert pair is None
        return exchange, logit_exchange, None
    sizes = [
        num_slots * batch_size * tp_size * hidden_size if tp_size > 1 else 0,
        -(-batch_size * world_size * rows // 2) * 2,  # so that what follows is aligned to 16 bytes
        sum(pair.field_words()) if pair else 0,
        world_size if pair else 0,
    ]
    try:
        memories = allocate_words(words_in, sum(sizes), transport)
    except RuntimeError as error:
        raise DoesNotFitError(f"transport: {words_in}: {str(error).splitlines()[0]}; nccl needs less") from error
    partials, logits, mailboxes, meetings = zip(*(memory.split(sizes) for memory in memories), strict=True)
    rank, group = placement.rank, range(placement.group * tp_size, (placement.group + 1) * tp_size)

    def read_and_pushed(memories: Sequence[Tensor], ranks: range) -> tuple[Tensor, Tensor]:
        """What this rank reads of these, and the addresses to which each of `ranks` pushes."""
        readers = ranks[:1] if words_in == "host" else ranks  # the host's memory is as near to all
        return memories[rank if rank in readers else readers[0]], _addresses(memories, readers, device)

    if tp_size > 1:
        words, peers = read_and_pushed(partials, group)
        words = words.view(num_slots, batch_size, tp_size, hidden_size)
        exchange = replace(exchange, words=words, peers=peers)
    words, peers = read_and_pushed(logits, range(world_size))
    words = words[: batch_size * world_size * rows].view(batch_size, world_size, rows)
    logit_exchange = replace(logit_exchange, words=words, peers=peers)
    if pair is None:
        return exchange, logit_exchange, None
    handover = Handover.build(
        pair, exchange, placement.group, placement.paired_rank, mailboxes[rank], mailboxes[placement.paired_rank],
        _addresses(mailboxes, group, device).tolist(), meetings[rank],
        _addresses(meetings, range(world_size), device).tolist(),
    )  # fmt: skip
    return exchange, logit_exchange, handover


def _addresses(memories: Sequence[Tensor], ranks: range, device: torch.device) -> Tensor:
    return torch.tensor([memories[rank].data_ptr() for rank in ranks], device=device)


def allocate_words(words_in: WordsIn, num_words: int, transport: Transport) -> list[Tensor]:
    """[num_words] int64 of each rank, in rank order, all 0: what this rank's kernels can read and write of them.

    All ranks of the job call it together.

    Raises:
        RuntimeError: it cannot be had; with `host` on every rank.
    """
    if words_in == "host":
        return share_host_memory(num_words, transport)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # `symm_mem.empty` would load SymPy for the strides of one dimension, which takes 2 s.
    memory = _SymmetricMemory.empty_strided_p2p((num_words,), (1,), torch.int64, transport.device)
    assert dist.group.WORLD is not None
    handle = symm_mem.rendezvous(memory, dist.group.WORLD.group_name)
    memory.zero_()
    transport.barrier()
    own = transport.placement.rank
    buffers = [handle.get_buffer(rank, (num_words,), torch.int64) for rank in range(handle.world_size)]
    return [*buffers[:own], memory, *buffers[own + 1 :]]


def first_working(ways: Sequence[WordsIn], transport: Transport) -> tuple[WordsIn | None, str]:
    """The first of these that works, None if none does, and why those before it do not. The same on every rank."""
    reasons: list[str] = []
    for words_in in ways:
        reason = _fault(words_in, transport)
        if not reason:
            return words_in, "; ".join(reasons)
        if reason not in reasons:
            reasons.append(reason)
    return None, "; ".join(reasons)


def _fault(words_in: WordsIn, transport: Transport) -> str:
    """Why the kernels of this job cannot send each other words in this way; '' if they can. The same on every rank.

    Looks at the hosts and links first, then compares an all-reduce over words with NCCL's, bit for bit, on values whose
    sums are exact: -0.0, subnormal numbers, large ones, and integers.
    """
    placement, device = transport.placement, transport.device
    if placement.world_size == 1:
        return ""
    reason = _unreachable(words_in, placement, device)
    if not transport.agree(not reason):
        return reason or "another rank cannot reach its peers"
    try:
        wrong = _differs_from_nccl(words_in, transport)
    except RuntimeError as error:
        wrong = f"{WAYS[words_in]} failed: {str(error).splitlines()[0]}"
    return "" if transport.agree(not wrong) else wrong or "another rank's self-test failed"


def _unreachable(words_in: WordsIn, placement: Placement, device: torch.device) -> str:
    if placement.local_world_size != placement.world_size:
        return "ranks on several hosts"
    if words_in == "host":
        return ""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1"
    others = [index for index in range(placement.local_world_size) if index != device.index]
    blocked = [index for index in others if not torch.cuda.can_device_access_peer(device, index)]
    return f"GPU {device.index} cannot reach GPU {blocked[0]}" if blocked else ""


def _differs_from_nccl(words_in: WordsIn, transport: Transport) -> str:
    device, rank, world_size = transport.device, transport.placement.rank, transport.placement.world_size
    hidden = 256
    memories = allocate_words(words_in, world_size * hidden, transport)
    exchange = Exchange(
        partial=torch.zeros(1, hidden, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        tp_rank=rank,
        tp_size=world_size,
        rank=rank,
        words=memories[rank].view(1, 1, world_size, hidden),
        peers=_addresses(memories, range(world_size), device),
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
