"""The kernels of a pair over collectives. One process runs all ranks, and copies stand for the collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flashq_layers import assert_same, noisy_layer, on_cpu
from paired_ranks import nan, roles_by_the_rules
from tiers import covering, fast
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import decide_ref, reduce_norm_ref
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.codec_reference import kv_append_ref
from alspec.kernels.norm.residual import num_square_sums
from alspec.kernels.speculation.collective_handover import (
    CollectiveHandover,
    PairCollectives,
    apply_verdict,
    decide,
    pack_handover,
    pack_residual,
    unpack_handover,
    unpack_residual,
)
from alspec.priority import sender

Check = Callable[[Tensor, Tensor, torch.dtype], None]

SHAPES = [
    pytest.param(PairShape(3, 1, 1, 64, 4, 2, 16), 5, id="one request"),
    pytest.param(PairShape(2, 2, 1, 200, 8, 1, 48), 9, id="odd head_dim"),
    pytest.param(PairShape(2, 3, 1, 97, 9, 3, 20), 70, id="odd hidden size"),
]


NOTHING = 7  # no verdict


def no_call(tensor: Tensor) -> Tensor:
    raise AssertionError("the tests copy what the ranks would exchange")


def handovers(device: torch.device, shape: PairShape) -> list[list[CollectiveHandover]]:
    """The handover of every rank: [group][tp_rank], with NaN in all buffers that are exchanged."""
    groups: list[list[CollectiveHandover]] = []
    for group in range(2):
        groups.append([])
        for tp_rank in range(shape.tp_size):
            exchange = Exchange(
                partial=nan(device, torch.float32, shape.batch_size, shape.hidden_size),
                epoch=torch.ones(1, dtype=torch.int32, device=device),
                fault=torch.zeros(1, dtype=torch.int32, device=device),
                tp_rank=tp_rank,
                tp_size=shape.tp_size,
                rank=group * shape.tp_size + tp_rank,
            )
            handover = CollectiveHandover.allocate(
                shape, exchange, group, PairCollectives(no_call, no_call, no_call, no_call)
            )
            for buffer in (handover.handover_buffers, handover.residuals, handover.sums):
                buffer.fill_(torch.nan)
            handover.verdicts.fill_(NOTHING)
            groups[-1].append(handover)
    return groups


def open_gates(source: CollectiveHandover, target: CollectiveHandover, layer: int) -> None:
    for handover in (source, target):
        handover.gate_buffer.zero_()
    source.gates(layer).is_sender.fill_(1)
    target.gates(layer).is_receiver.fill_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "capacity"), SHAPES)
def test_a_handover_arrives_exactly(device: torch.device, dtype: torch.dtype, shape: PairShape, capacity: int) -> None:
    layer, batch = shape.num_layers - 1, shape.batch_size
    (source,), (target,) = handovers(device, shape)
    open_gates(source, target, layer)
    cache = (batch, shape.num_kv_heads, capacity, shape.head_dim)
    seq_lens = torch.randint(1, capacity + 1, (batch,), dtype=torch.int32, device=device)
    x = torch.randn(batch, shape.hidden_size, device=device)
    x[0, :4] = torch.tensor([torch.inf, -0.0, 1e-41, -torch.inf])
    k, v, old_k, old_v = (torch.randn(cache, device=device).to(dtype) for _ in range(4))
    # The values are exact in `dtype`, because the interpreter truncates and a GPU rounds.
    speculation = source.spec_output(64)
    speculation.spec_out.copy_(torch.randn_like(speculation.spec_out).to(dtype))
    pack_handover(source, layer, x, k, v, seq_lens)
    target.handover_buffers[source.group].copy_(source.handover_buffers[source.group])

    new_k, new_v = old_k.clone(), old_v.clone()
    new_x = nan(device, torch.float32, *x.shape)
    attn_out = nan(device, dtype, batch, shape.num_qo_heads, shape.head_dim)
    unpack_handover(target, layer, new_x, KVLayer(new_k, new_v), seq_lens, attn_out)
    assert torch.equal(new_x.view(torch.int32), x.view(torch.int32))
    is_newest = (torch.arange(capacity, device=device) == (seq_lens - 1)[:, None])[:, None, :, None]
    for found, sent, old in ((new_k, k, old_k), (new_v, v, old_v)):
        assert torch.equal(found, torch.where(is_newest, sent, old))
    assert torch.equal(attn_out, speculation.spec_out.to(dtype))
    assert source.handover_buffers[1 - source.group].isnan().all(), (
        "the sender wrote into the buffer of the other group"
    )


def test_a_handover_goes_into_the_tail_of_a_quantised_cache(device: torch.device) -> None:
    """The sender's newest token lies in a cache of one position."""
    shape = PairShape(2, 3, 1, 97, 6, 2, 64)
    (source,), (target,) = handovers(device, shape)
    open_gates(source, target, 1)
    seq_lens = torch.tensor([64, 65, 130], dtype=torch.int32, device=device)
    x = torch.randn(3, 97, device=device)
    k, v = torch.randn(2, 3, 2, 1, 64, device=device).bfloat16()
    source.spec_output(64).spec_out.zero_()
    pack_handover(source, 1, x, k, v, torch.ones_like(seq_lens))
    target.handover_buffers[source.group].copy_(source.handover_buffers[source.group])
    layer = noisy_layer(3, [2, 4], 64, 2, device)
    expected = on_cpu(layer)
    new_x, attn_out = nan(device, torch.float32, *x.shape), nan(device, torch.bfloat16, 3, 6, 64)
    unpack_handover(target, 1, new_x, layer, seq_lens, attn_out)
    kv_append_ref(k[:, :, 0].cpu(), v[:, :, 0].cpu(), expected, seq_lens.cpu())
    assert_same(layer, expected)
    assert torch.equal(new_x, x)


@pytest.mark.parametrize(("shape", "capacity"), SHAPES)
def test_closed_gates_write_nothing(device: torch.device, shape: PairShape, capacity: int) -> None:
    (source,), (target,) = handovers(device, shape)
    seq_lens = torch.ones(shape.batch_size, dtype=torch.int32, device=device)
    x = torch.randn(shape.batch_size, shape.hidden_size, device=device)
    k, v = torch.randn(2, shape.batch_size, shape.num_kv_heads, capacity, shape.head_dim, device=device)
    targets = [x, k, v, torch.randn(shape.batch_size, shape.num_qo_heads, shape.head_dim, device=device), x.clone()]
    targets.append(torch.randn(shape.batch_size, num_square_sums(shape.hidden_size), device=device))
    before = [tensor.clone() for tensor in targets]
    for handover in (source, target):
        handover.gate_buffer.zero_()
        # The gates of all other layers are open.
        handover.gate_buffer[:, :, 1:] = 1
        handover.gates(1).is_sender.fill_(1)
        handover.gates(1).is_receiver.fill_(1)
    pack_handover(source, 0, x, k, v, seq_lens)
    pack_residual(source, x)
    unpack_handover(target, 0, x, KVLayer(k, v), seq_lens, targets[3])
    unpack_residual(target, x, x[0].clone(), targets[4], targets[5])
    assert all(torch.equal(now, then) for now, then in zip(targets, before, strict=True))
    assert source.handover_buffers.isnan().all()
    assert source.residuals.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 64), (3, 97)])
def test_the_residual_reaches_the_other_group(
    device: torch.device, dtype: torch.dtype, batch: int, hidden: int, check: Check
) -> None:
    (target,), (source,) = handovers(device, PairShape(2, batch, 1, hidden, 3, 1, 20))
    open_gates(source, target, 2)
    sent, gamma = torch.randn(batch, hidden, device=device), torch.randn(hidden, device=device).to(dtype)
    x, x_norm = nan(device, torch.float32, batch, hidden), nan(device, dtype, batch, hidden)
    squares = nan(device, torch.float32, batch, num_square_sums(hidden))
    pack_residual(source, sent)
    target.residuals[source.group].copy_(source.residuals[source.group])
    unpack_residual(target, x, gamma, x_norm, squares)
    assert torch.equal(x, sent)
    _, expected, square_sum = reduce_norm_ref(torch.zeros_like(sent)[None], sent, gamma)
    check(x_norm, expected, dtype)
    check(squares.sum(1), square_sum, torch.float32)


def exchange_verdicts(ranks: list[CollectiveHandover], layer: int, hits: list[Tensor]) -> None:
    """Gather the verdicts as a collective does behind `decide`, then run `apply_verdict` on all ranks."""
    gathered = torch.stack([rank.verdicts[rank.spec_branch.rank] for rank in ranks])
    for rank, hits_of_rank in zip(ranks, hits, strict=True):
        rank.verdicts.copy_(gathered)
        apply_verdict(rank, layer, hits_of_rank)


VERDICT_CASES = covering([1, 2, 3], [0.0, 0.1, float("inf"), 1e25], [1, 3])


@pytest.mark.parametrize(("tp_size", "threshold", "batch"), VERDICT_CASES)
def test_the_verdict_is_that_of_the_oracle(device: torch.device, tp_size: int, threshold: float, batch: int) -> None:
    """All ranks take the verdict of the sending group. The sums of the other group do not matter."""
    shape = PairShape(8, batch, tp_size, 32, 3, 1, 16)
    ranks = [handover for group in handovers(device, shape) for handover in group]
    generator = torch.Generator().manual_seed(batch * tp_size)
    verdicts = set()
    parts = num_sums(shape.batch_size, shape.num_qo_heads, shape.head_dim)
    for layer in range(shape.num_layers):
        rank_sums = torch.rand(tp_size, batch, parts, 2, generator=generator) + 0.5
        low, high = [(-1, -0.5), (0.5, 1), (-0.5, 0.5)][layer % 3]
        near = torch.rand(tp_size, batch, parts, generator=generator) * (high - low) + low
        rank_sums[..., 0] = rank_sums[..., 1] * min(threshold, 1.0) ** 2 * (1 + near)
        live = (torch.rand(batch, generator=generator) < 0.7).int()
        rank_sums = rank_sums.to(device)
        accepted, verdict = decide_ref(rank_sums, live.to(device), threshold)
        # The sums of the receiving group: NaN, or sums that would give the opposite verdict.
        other = torch.full_like(rank_sums, torch.nan)
        if layer % 4 > 1:
            other.fill_(1.0)
            other[..., 0] = 2.0 * verdict
        group = layer % 2
        hits = [torch.full((shape.num_layers, batch), -1, dtype=torch.int32, device=device) for _ in ranks]
        for rank in ranks:
            rank.gate_buffer.zero_()
            role = rank.gates(layer).is_sender if rank.group == group else rank.gates(layer).is_receiver
            role.fill_(1)
            rank.sums.copy_(rank_sums if rank.group == group else other)
            rank.verdicts.fill_(NOTHING)
            decide(rank, layer, live.to(device), threshold)
            assert int(rank.gates(layer).recompute) == int(rank.group == group and not verdict)
            others = [row for row in range(len(ranks)) if row != rank.spec_branch.rank]
            assert (rank.verdicts[others] == NOTHING).all(), "the kernel wrote the verdict of another rank"
        exchange_verdicts(ranks, layer, hits)
        for rank, found in zip(ranks, hits, strict=True):
            assert torch.equal(found[layer].bool(), accepted)
            assert (found[torch.arange(shape.num_layers) != layer] == -1).all()
            sends_next = (rank.group == group) != verdict
            gates = rank.gates(layer + 1)
            assert (int(gates.is_sender), int(gates.is_receiver)) == (int(sends_next), int(not sends_next))
            assert int(rank.gates(layer).recompute) == int(rank.group == group and not verdict)
        verdicts.add(verdict)
    assert verdicts == {True} if threshold > 1 else False in verdicts
    assert True in verdicts or threshold == 0


@pytest.mark.parametrize("threshold", [-0.1, float("nan")])
def test_a_threshold_that_is_negative_or_nan_is_refused(device: torch.device, threshold: float) -> None:
    (source,), _ = handovers(device, PairShape(1, 1, 1, 32, 2, 1, 16))
    with pytest.raises(ValueError, match="threshold"):
        decide(source, 0, torch.ones(1), threshold)


@pytest.mark.parametrize(("num_layers", "steps", "seed"), [(1, 9, 0), (7, 6, 1)])
@pytest.mark.parametrize("hit_rate", fast([0.0, 0.5, 1.0], keep=[0.5]))
def test_roles_follow_the_rules_over_many_layers_and_steps(
    device: torch.device, num_layers: int, steps: int, seed: int, hit_rate: float
) -> None:
    """Verdicts are forced. The gates of a layer follow from the role of a rank and from the verdict."""
    ranks = [handover for (handover,) in handovers(device, PairShape(num_layers, 1, 1, 32, 2, 1, 16))]
    live = torch.ones(1, dtype=torch.int32, device=device)
    hits = [torch.ones(num_layers, 1, dtype=torch.int32, device=device) for _ in ranks]
    for roles in roles_by_the_rules(steps, num_layers, 1, hit_rate, seed):
        forced = torch.tensor([int(all(layer.accept)) for layer in roles], dtype=torch.int32, device=device)
        for layer in roles:
            for rank in ranks:
                decide(rank, layer.layer, live, 0.5, forced)
                gates, is_source = rank.gates(layer.layer), rank.group == layer.source
                assert (int(gates.is_sender), int(gates.is_receiver)) == ((1, 0) if is_source else (0, 1))
                assert int(gates.recompute) == int(is_source and not all(layer.accept))
            exchange_verdicts(ranks, layer.layer, hits)
        assert all(torch.equal(found.flatten(), forced) for found in hits)
        source = sender(roles[-1].after)
        for rank in ranks:
            assert int(rank.gates(num_layers).is_sender) == int(rank.group == source)
            rank.next_step()
            assert int(rank.gates(0).is_sender) == int(rank.group == source)
