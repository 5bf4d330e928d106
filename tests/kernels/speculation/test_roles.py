"""Roles and verdicts of two groups. One process runs all ranks; a kernel runs after those that write its packets."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from paired_ranks import TIMEOUT_NS, nan, pairs, roles_by_the_rules, sums_for
from tiers import covering, fast

from alspec.kernels.attention.oracles import decide_ref
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code
from alspec.kernels.comm.pair_state import GATE_MLP, GATE_O, GATE_PRE_ATTENTION, PairShape, PairState
from alspec.kernels.norm.residual import num_square_sums, reduce_norm
from alspec.kernels.speculation.roles import decide, step_barrier, update_roles
from alspec.priority import Priority, sender, skips_compute


def assert_priority(state: PairState, group: int, priority: Priority) -> None:
    """`priority` is indexed by group; a rank stores that of its own group first."""
    assert state.priority.tolist() == [priority[group], priority[1 - group]]


ONE_LAYER, SEVEN_LAYERS, BATCH = (1, 1, 9, 0), (1, 7, 6, 1), (3, 33, 4, 2)
SIZES_AND_RATES = list(itertools.product([ONE_LAYER, SEVEN_LAYERS, BATCH], [0.0, 0.5, 0.9, 1.0]))
FAST_RATES = [(ONE_LAYER, 0.5), (SEVEN_LAYERS, 0.0), (SEVEN_LAYERS, 0.9), (SEVEN_LAYERS, 1.0), (BATCH, 0.9)]


@pytest.mark.parametrize(("sizes", "hit_rate"), fast(SIZES_AND_RATES, keep=FAST_RATES), ids=str)
def test_roles_follow_the_rules_over_many_layers_and_steps(
    device: torch.device, sizes: tuple[int, int, int, int], hit_rate: float
) -> None:
    batch, num_layers, steps, seed = sizes
    shape = PairShape(num_layers, batch, 1, 32, 2, 1, 16)
    (first,), (second,) = pairs(device, shape, 1)
    ranks = (first, second)
    live = torch.ones(batch, dtype=torch.int32, device=device)
    for roles in roles_by_the_rules(steps, num_layers, batch, hit_rate, seed):
        hits = [torch.full((num_layers, batch), -1, dtype=torch.int32, device=device) for _ in ranks]
        for layer in roles:
            # The receiver of the previous layer does not know the verdict yet, but its gate does not depend on it.
            for group, rank in enumerate(ranks):
                assert (int(rank.priority[0]) == 0) == skips_compute(layer.before, group)
                if layer.layer == 0:
                    assert int(rank.gate(GATE_PRE_ATTENTION)) == (not skips_compute(layer.before, group))
                update_roles(rank, layer.layer, hits[group], TIMEOUT_NS)
            for group, rank in enumerate(ranks):
                assert_priority(rank, group, layer.handed)
                assert (int(rank.is_sender), int(rank.is_receiver)) == ((1, 0) if group == layer.source else (0, 1))
                assert rank.gates[:, 0].tolist() == [1, 1, 1]
            for group, rank in enumerate(ranks):
                decide(rank, layer.layer, sums_for(device, layer.accept, 2), live, 0.5, hits[group], TIMEOUT_NS)
            for group, rank in enumerate(ranks):
                assert_priority(rank, group, layer.after if group == layer.source else layer.handed)
                # The gates of O, the MLP and the next layer, as far as the rank knows the verdict.
                assert rank.gates[:, 0].tolist() == [group != layer.source or not all(layer.accept)] * 3
        source = sender(roles[-1].after)
        for group, rank in enumerate(ranks):
            update_roles(rank, num_layers, hits[group], TIMEOUT_NS)
            assert (int(rank.is_sender), int(rank.is_receiver)) == ((1, 0) if group == source else (0, 1))
            assert_priority(rank, group, (2, 0) if source == 0 else (0, 2))
            assert rank.gates[:, 0].tolist() == [group == source] * 3
            assert hits[group].bool().tolist() == [layer.accept for layer in roles]
            assert int(rank.exchange.fault) == 0
            rank.exchange.epoch.add_(1)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_the_step_barrier_joins_all_ranks(device: torch.device, tp_size: int) -> None:
    shape, epoch = PairShape(2, 1, tp_size, 32, 2, 1, 16), 7
    ranks = [rank for group in pairs(device, shape, epoch) for rank in group]
    for rank in ranks:
        # A fault ends all waits: in one process the first ranks would wait in vain for the later ones.
        rank.exchange.fault.fill_(fault_code(LATE_PACKET, 0, 0))
        step_barrier(rank, TIMEOUT_NS)
    for rank in ranks:
        assert (rank.barrier >> 32).tolist() == [epoch] * len(ranks)
        rank.exchange.fault.zero_()
        step_barrier(rank, TIMEOUT_NS)
        assert int(rank.exchange.fault) == 0


@pytest.mark.parametrize(
    ("gate", "verdict", "next_gate"),
    [
        pytest.param(1, None, 1, id="no verdict yet"),
        pytest.param(1, (0.0, 0), 0, id="rejected"),
        pytest.param(1, (1.0, 0), 1, id="accepted"),
        pytest.param(2, (0.0, -1), 1, id="rejected in another step"),
        pytest.param(0, (1.0, 0), 0, id="closed"),
    ],
)
def test_a_rejection_closes_the_next_gate(
    device: torch.device, gate: int, verdict: tuple[float, int] | None, next_gate: int
) -> None:
    """A verdict is 1 or 0, and the offset of its epoch."""
    shape, epoch, layer = PairShape(3, 2, 1, 96, 2, 1, 16), 5, 1
    rank = pairs(device, shape, epoch)[1][0]
    if verdict is not None:
        bits = int(torch.tensor(verdict[0]).view(torch.int32))
        rank.own.verdicts[layer, -1] = bits | (epoch + verdict[1]) << 32
    rank.gates.copy_(torch.tensor([[gate], [7], [7]]))
    x, squares = torch.ones(2, 96, device=device), torch.zeros(2, num_square_sums(96), device=device)
    x_norm, gamma = nan(device, torch.float32, 2, 96), torch.ones(96, device=device)
    rank.exchange.partial.fill_(1.0)
    reduce_norm(
        rank.exchange, 2 * layer, TIMEOUT_NS, x, gamma, x_norm, squares, rank.gate(GATE_O), rank.gate(GATE_MLP),
        rank.own_verdict(layer),
    )  # fmt: skip
    assert rank.gates[:, 0].tolist() == [gate, next_gate, 7]
    assert (x == (2 if gate else 1)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_rejection_ends_the_wait_for_a_rank_that_stopped() -> None:
    device, epoch = torch.device("cuda"), 3
    rank = pairs(device, PairShape(2, 1, 2, 64, 2, 1, 16), epoch)[1][0]
    exchange = replace(rank.exchange, packets=torch.zeros(4, 1, 2, 64, dtype=torch.int64, device=device))
    rank.own.verdicts[0, -1] = epoch << 32
    x, gamma = torch.ones(1, 64, device=device), torch.ones(64, device=device)
    squares = torch.zeros(1, num_square_sums(64), device=device)

    def reduce() -> None:
        gates, verdict = (rank.gate(GATE_O), rank.gate(GATE_MLP)), rank.own_verdict(0)
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


VERDICT_CASES = covering([1, 2, 3, 4], [0.0, 0.1, float("inf"), 1e25], [1, 3])


@pytest.mark.parametrize(("tp_size", "threshold", "batch"), VERDICT_CASES)
def test_the_verdict_is_that_of_the_oracle(device: torch.device, tp_size: int, threshold: float, batch: int) -> None:
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
        received = [hits_of_rank.clone() for hits_of_rank in found]
        for rank in sources:
            rank.priority.copy_(torch.tensor([2, 1]))
            rank.is_sender.fill_(1)
        # The interpreter cannot wait, so the first round only pushes the sums of all ranks.
        for _ in range(1 if tp_size == 1 else 2):
            for rank, sums, hits_of_rank in zip(sources, rank_sums, found, strict=True):
                # The fault ends all waits at once.
                rank.exchange.fault.fill_(fault_code(LATE_PACKET, 0, 0) if device.type == "cuda" else 0)
                decide(rank, layer, sums.contiguous(), live, threshold, hits_of_rank, TIMEOUT_NS)
        for rank, hits_of_rank in zip(sources, found, strict=True):
            assert torch.equal(hits_of_rank[layer].bool(), hits)
            assert (hits_of_rank[torch.arange(num_layers) != layer] == -1).all()
            assert rank.priority.tolist() == [0 if verdict else 2, 1]
        for rank, hits_of_rank in zip(targets, received, strict=True):
            rank.priority.copy_(torch.tensor([1, 2]))
            update_roles(rank, layer + 1, hits_of_rank, TIMEOUT_NS)
            assert torch.equal(hits_of_rank[layer].bool(), hits)
            assert int(rank.is_sender) == int(verdict)
            assert int(rank.is_receiver) == int(not verdict)
            assert int(rank.exchange.fault) == 0
    if threshold == 0.1:
        assert verdicts == {True, False}


def test_forced_verdicts_overrule_the_sums(device: torch.device) -> None:
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
