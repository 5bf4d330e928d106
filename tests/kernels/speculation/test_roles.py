"""Roles and verdicts of two groups, with all ranks in one process, each kernel after those whose words it waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paired_ranks import TIMEOUT_NS, nan, pairs, roles_by_the_rules, sums_for

from alspec.kernels.attention.reference import decide_ref
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code
from alspec.kernels.comm.pair_state import GATE_MLP, GATE_O, GATE_PRE_ATTENTION, PairShape, PairState
from alspec.kernels.norm.residual import num_square_sums, reduce_norm
from alspec.kernels.speculation.roles import decide, step_barrier, update_roles
from alspec.priority import Priority, sender, skips_compute


def assert_knows(handover: PairState, group: int, priority: Priority) -> None:
    assert handover.priority.tolist() == [priority[group], priority[1 - group]]


@pytest.mark.parametrize(("batch", "num_layers", "steps", "seed"), [(1, 1, 9, 0), (1, 7, 6, 1), (3, 33, 4, 2)])
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.9, 1.0])
def test_roles_follow_the_rules_over_many_layers_and_steps(
    device: torch.device, batch: int, num_layers: int, steps: int, seed: int, hit_rate: float
) -> None:
    shape = PairShape(num_layers, batch, 1, 32, 2, 1, 16)
    (first,), (second,) = pairs(device, shape, 1)
    ranks = (first, second)
    live = torch.ones(batch, dtype=torch.int32, device=device)
    for roles in roles_by_the_rules(steps, num_layers, batch, hit_rate, seed):
        hits = [torch.full((num_layers, batch), -1, dtype=torch.int32, device=device) for _ in ranks]
        for at in roles:
            # The receiver of the layer before does not know the verdict yet; its gate is the same either way.
            for group, rank in enumerate(ranks):
                assert (int(rank.priority[0]) == 0) == skips_compute(at.before, group)
                if at.layer == 0:
                    assert int(rank.gate(GATE_PRE_ATTENTION)) == (not skips_compute(at.before, group))
                update_roles(rank, at.layer, hits[group], TIMEOUT_NS)
            for group, rank in enumerate(ranks):
                assert_knows(rank, group, at.handed)
                assert (int(rank.is_sender), int(rank.is_receiver)) == ((1, 0) if group == at.source else (0, 1))
                assert rank.gates[:, 0].tolist() == [1, 1, 1]
            for group, rank in enumerate(ranks):
                decide(rank, at.layer, sums_for(device, at.accept, 2), live, 0.5, hits[group], TIMEOUT_NS)
            for group, rank in enumerate(ranks):
                assert_knows(rank, group, at.after if group == at.source else at.handed)
                # Of the MLP and of what follows, as far as is known yet.
                assert rank.gates[:, 0].tolist() == [group != at.source or not all(at.accept)] * 3
        source = sender(roles[-1].after)
        for group, rank in enumerate(ranks):
            update_roles(rank, num_layers, hits[group], TIMEOUT_NS)
            assert (int(rank.is_sender), int(rank.is_receiver)) == ((1, 0) if group == source else (0, 1))
            assert_knows(rank, group, (2, 0) if source == 0 else (0, 2))
            assert rank.gates[:, 0].tolist() == [group == source] * 3
            assert hits[group].bool().tolist() == [at.accept for at in roles]
            assert int(rank.exchange.fault) == 0
            rank.exchange.epoch.add_(1)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_all_ranks_meet(device: torch.device, tp_size: int) -> None:
    shape, epoch = PairShape(2, 1, tp_size, 32, 2, 1, 16), 7
    ranks = [rank for group in pairs(device, shape, epoch) for rank in group]
    for rank in ranks:
        # Nobody waits here: in one process, one after the other, the first ones would wait in vain.
        rank.exchange.fault.fill_(fault_code(LATE_PACKET, 0, 0))
        step_barrier(rank, TIMEOUT_NS)
    for rank in ranks:
        assert (rank.barrier >> 32).tolist() == [epoch] * len(ranks)
        rank.exchange.fault.zero_()
        step_barrier(rank, TIMEOUT_NS)
        assert int(rank.exchange.fault) == 0


@pytest.mark.parametrize(
    ("gate", "word", "goes_on"),
    [
        pytest.param(1, None, 1, id="no verdict yet"),
        pytest.param(1, (0.0, 0), 0, id="rejected"),
        pytest.param(1, (1.0, 0), 1, id="accepted"),
        pytest.param(2, (0.0, -1), 1, id="rejected in another step"),
        pytest.param(0, (1.0, 0), 0, id="closed"),
    ],
)
def test_a_rejection_closes_what_follows(
    device: torch.device, gate: int, word: tuple[float, int] | None, goes_on: int
) -> None:
    shape, epoch, layer = PairShape(3, 2, 1, 96, 2, 1, 16), 5, 1
    rank = pairs(device, shape, epoch)[1][0]
    if word is not None:
        bits = int(torch.tensor(word[0]).view(torch.int32))
        rank.own.verdicts[layer, -1] = bits | (epoch + word[1]) << 32
    rank.gates.copy_(torch.tensor([[gate], [7], [7]]))
    x, squares = torch.ones(2, 96, device=device), torch.zeros(2, num_square_sums(96), device=device)
    x_norm, gamma = nan(device, torch.float32, 2, 96), torch.ones(96, device=device)
    rank.exchange.partial.fill_(1.0)
    reduce_norm(
        rank.exchange, 2 * layer, TIMEOUT_NS, x, gamma, x_norm, squares, rank.gate(GATE_O), rank.gate(GATE_MLP),
        rank.verdict(layer),
    )  # fmt: skip
    assert rank.gates[:, 0].tolist() == [gate, goes_on, 7]
    assert (x == (2 if gate else 1)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_rejection_ends_the_wait_for_a_rank_that_stopped() -> None:
    device, epoch = torch.device("cuda"), 3
    rank = pairs(device, PairShape(2, 1, 2, 64, 2, 1, 16), epoch)[1][0]
    exchange = replace(rank.exchange, words=torch.zeros(4, 1, 2, 64, dtype=torch.int64, device=device))
    rank.own.verdicts[0, -1] = epoch << 32
    x, gamma = torch.ones(1, 64, device=device), torch.ones(64, device=device)
    squares = torch.zeros(1, num_square_sums(64), device=device)

    def reduce() -> None:
        gates, verdict = (rank.gate(GATE_O), rank.gate(GATE_MLP)), rank.verdict(0)
        reduce_norm(exchange, 0, 5 * 10**9, x, gamma, torch.ones_like(x), squares, *gates, verdict)

    rank.gates.zero_()
    reduce()  # compiles; closed
    rank.gates.fill_(1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    reduce()
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 1000
    assert int(exchange.fault) == 0
    assert rank.gates[:, 0].tolist() == [1, 0, 1]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("threshold", [0.0, 0.1, float("inf"), 1e25])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_verdict_is_that_of_the_rules(device: torch.device, tp_size: int, threshold: float, batch: int) -> None:
    num_layers, num_heads = 8, 3
    shape = PairShape(num_layers, batch, tp_size, 32, num_heads, 1, 16)
    sources, targets = pairs(device, shape, 4)
    generator = torch.Generator().manual_seed(batch * tp_size)
    verdicts = set()
    for layer in range(num_layers):
        rank_sums = torch.rand(tp_size, batch, num_heads, 2, generator=generator).to(device) + 0.5
        low, high = [(-1, -0.5), (0.5, 1), (-0.5, 0.5)][layer % 3]
        rank_sums[..., 0] *= 0.01 * 10 ** torch.empty(batch, 1).uniform_(low, high, generator=generator).to(device)
        if layer == 4:
            rank_sums[-1, 0, 1, :] = torch.nan
        if layer == 6:
            rank_sums.zero_()
        live = torch.ones(batch, dtype=torch.int32, device=device)
        if layer % 2 and layer > 2:
            live[layer % batch] = 0
        hits, verdict = decide_ref(rank_sums, live, threshold)
        verdicts.add(verdict)
        found = [torch.full((num_layers, batch), -1, dtype=torch.int32, device=device) for _ in sources]
        told = [each.clone() for each in found]
        for rank in sources:
            rank.priority.copy_(torch.tensor([2, 1]))
            rank.is_sender.fill_(1)
        # The interpreter cannot wait: the first round only pushes the sums of all ranks.
        for _ in range(1 if tp_size == 1 else 2):
            for rank, sums, at in zip(sources, rank_sums, found, strict=True):
                # Waits are over at once.
                rank.exchange.fault.fill_(fault_code(LATE_PACKET, 0, 0) if device.type == "cuda" else 0)
                decide(rank, layer, sums.contiguous(), live, threshold, at, TIMEOUT_NS)
        for rank, at in zip(sources, found, strict=True):
            assert torch.equal(at[layer].bool(), hits)
            assert (at[torch.arange(num_layers) != layer] == -1).all()
            assert rank.priority.tolist() == [0 if verdict else 2, 1]
        for rank, at in zip(targets, told, strict=True):
            rank.priority.copy_(torch.tensor([1, 2]))
            update_roles(rank, layer + 1, at, TIMEOUT_NS)
            assert torch.equal(at[layer].bool(), hits)
            assert int(rank.is_sender) == int(verdict)
            assert int(rank.is_receiver) == int(not verdict)
            assert int(rank.exchange.fault) == 0
    if threshold == 0.1:
        assert verdicts == {True, False}


def test_forced_verdicts(device: torch.device) -> None:
    ((rank,), _) = pairs(device, PairShape(4, 2, 1, 32, 2, 1, 16), 4)
    forced = torch.tensor([1, 0, -1, -1], dtype=torch.int32, device=device)
    live = torch.tensor([1, 0], dtype=torch.int32, device=device)
    hits = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    rank.is_sender.fill_(1)
    own = []
    for layer, accept in enumerate((False, True, True, False)):
        decide(rank, layer, sums_for(device, [accept, False], 2), live, 0.5, hits, TIMEOUT_NS, forced)
        own.append(int(rank.priority[0]))
    assert own == [0, 2, 0, 2]
    assert hits.tolist() == [[1, 0], [0, 0], [1, 0], [0, 0]]
    with pytest.raises(ValueError, match="threshold"):
        decide(rank, 0, sums_for(device, [True, True], 2), live, -0.1, hits, TIMEOUT_NS)
