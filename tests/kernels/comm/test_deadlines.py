"""A packet that never comes: its reader goes on after the timeout, and the fault word names the rank and the place.

test_decode_step.py tests the waits of `reduce_norm`, test_handover.py those for handovers and verdicts.
"""

from __future__ import annotations

import pytest
import torch
from paired_ranks import nan, pairs, sums_for
from torch import Tensor

from alspec.kernels.comm.exchange import LogitExchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, split_fault, unpack_packets
from alspec.kernels.comm.pair_state import PairShape, PairState
from alspec.kernels.sampling.next_token import collect_logits, num_candidates
from alspec.kernels.speculation.roles import decide, step_barrier

# The interpreter cannot wait.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

EPOCH, TIMEOUT_NS = 6, 10**7
OVER = fault_code(LATE_PACKET, 0, 0)  # with this fault, all later waits of the step end at once


def lose(packets: Tensor) -> None:
    """Leave one packet as the previous step left it."""
    packets.sub_(1 << 32)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_a_rank_that_does_not_begin_the_step_is_named(tp_size: int) -> None:
    shape = PairShape(5, 1, tp_size, 64, 2, 1, 16)
    ranks = [rank for group in pairs(torch.device("cuda"), shape, EPOCH) for rank in group]
    for rank in ranks:
        rank.exchange.fault.fill_(OVER)
        step_barrier(rank, TIMEOUT_NS)
    for index, rank in enumerate(ranks):
        for missing in (None, *range(len(ranks))):
            if missing == index:  # a rank has its own packet
                continue
            if missing is not None:
                lose(rank.barrier[missing])
            rank.exchange.fault.zero_()
            step_barrier(rank, TIMEOUT_NS)
            expected = (LATE_PACKET, 2 * shape.num_layers + 1, missing) if missing is not None else (0, 0, 0)
            assert split_fault(int(rank.exchange.fault)) == expected
            if missing is not None:
                rank.barrier[missing] += 1 << 32


def sources_of(shape: PairShape, layer: int, sums: Tensor, live: Tensor, group: int) -> list[PairState]:
    """The ranks of the sender group, each with the sums of all of them."""
    sources = pairs(torch.device("cuda"), shape, EPOCH)[group]
    for rank in sources:
        rank.is_sender.fill_(1)
        rank.exchange.fault.fill_(OVER)
        decide(rank, layer, sums, live, 0.5, torch.zeros_like(live).repeat(shape.num_layers, 1), TIMEOUT_NS)
        rank.exchange.fault.zero_()
    return sources


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_a_rank_whose_sums_do_not_come_is_named_and_nothing_is_accepted(tp_size: int, group: int) -> None:
    shape, layer = PairShape(4, 2, tp_size, 64, 2, 1, 16), 2
    live = torch.ones(2, dtype=torch.int32, device="cuda")
    sums = sums_for(live.device, [True, True], 2)
    for missing in (None, *range(1, tp_size)):
        for request, part in ((0, 0), (1, 1)):
            rank = sources_of(shape, layer, sums, live, group)[0]
            hits = torch.full((4, 2), -1, dtype=torch.int32, device="cuda")
            if missing is not None:
                lose(rank.own.sums[layer, missing, request, part])
            decide(rank, layer, sums, live, 0.5, hits, TIMEOUT_NS)
            accepted = [1, 1]
            expected = (0, 0, 0)
            if missing is not None:
                accepted[request] = 0
                expected = (LATE_PACKET, 2 * layer, group * tp_size + missing)
            assert split_fault(int(rank.exchange.fault)) == expected
            verdict = int(missing is None)
            assert hits[layer].tolist() == accepted
            assert rank.priority.tolist() == [0 if verdict else 2, 1]
            assert unpack_packets(rank.paired.verdicts[layer], EPOCH).tolist() == [*accepted, verdict]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_whose_logits_do_not_come_is_named(world_size: int, batch: int) -> None:
    """The fault is a late packet, not bad numbers, although a missing logit is read as NaN."""
    rows, reduce_index, vocab_size = 900, 20, 900 * world_size - 7
    device = torch.device("cuda")
    shards = torch.randn(world_size, batch, rows, device=device)
    packets = shards.view(torch.int32).long() & 0xFFFFFFFF | EPOCH << 32
    for missing in (None, *range(world_size)):
        exchange = LogitExchange(
            shard=shards[0],
            epoch=torch.tensor([EPOCH], dtype=torch.int32, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            world_size=world_size,
            packets=torch.stack(packets.unbind(), 1),
        )
        expected = shards.transpose(0, 1).flatten(1)[:, :vocab_size].clone()
        if missing is not None:
            lose(exchange.packets[-1, missing, 500])
            expected[-1, missing * rows + 500] = torch.nan
        logits = torch.zeros(batch, vocab_size, device=device)
        best = nan(device, torch.float32, batch, num_candidates(vocab_size))
        best_token = torch.zeros_like(best, dtype=torch.int32)
        collect_logits(exchange, shards, TIMEOUT_NS, reduce_index, logits, best, best_token)
        found = split_fault(int(exchange.fault))
        assert found == ((LATE_PACKET, reduce_index, missing) if missing is not None else (0, 0, 0))
        assert torch.allclose(logits, expected, rtol=0, atol=0, equal_nan=True)
