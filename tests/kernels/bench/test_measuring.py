"""The push kernel of the benchmark: the sums of every rank reach every rank, and `reduce_norm` adds them."""

import pytest
import torch

from alspec.kernels.bench.measuring import push_packets
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.norm.residual import BLOCK, new_residual, num_square_sums, reduce_norm


@pytest.mark.parametrize(("num_ranks", "batch_size", "hidden"), [(2, 1, 256), (3, 2, 80), (4, 1, 33)])
def test_pushed_sums_are_reduced(num_ranks: int, batch_size: int, hidden: int, device: torch.device) -> None:
    """The ranks of one process use two reductions in three epochs; the other buffer does not change."""
    packets = [torch.full((3, batch_size, num_ranks, hidden), -1, device=device) for _ in range(num_ranks)]
    ranks = [
        Exchange(
            partial=torch.full((batch_size, hidden), torch.nan, device=device),
            epoch=torch.ones(1, dtype=torch.int32, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            tp_rank=rank,
            tp_size=num_ranks,
            rank=rank,
            packets=packets[rank],
            peers=torch.tensor([buffer.data_ptr() for buffer in packets], device=device),
        )
        for rank in range(num_ranks)
    ]
    gamma = torch.randn(hidden, device=device)
    for reduce_index in (1, 2, 1):
        partials = [torch.randn(batch_size, hidden, device=device) for _ in ranks]
        before = torch.randn(batch_size, hidden, device=device)
        for exchange, partial in zip(ranks, partials, strict=True):
            push_packets(partial, exchange, reduce_index)
        expected = before.double() + sum(partial.double() for partial in partials)
        residuals = []
        for exchange in ranks:
            x, x_norm, square_sums = new_residual(batch_size, hidden, torch.float32, device)
            x.copy_(before)
            x_norm.fill_(torch.nan)
            square_sums.fill_(torch.nan)
            reduce_norm(exchange, reduce_index, 10**9, x, gamma, x_norm, square_sums)
            assert float((x.double() - expected).norm() / expected.norm()) < 1e-6
            assert float((x_norm.double() - expected * gamma.double()).norm()) < 1e-5 * float(expected.norm())
            padded = torch.nn.functional.pad(x.double(), (0, num_square_sums(hidden) * BLOCK - hidden))
            squares = padded.square().view(batch_size, -1, BLOCK).sum(2)
            assert float((square_sums.double() - squares).norm() / squares.norm()) < 1e-6
            residuals.append(x)
            assert int(exchange.fault) == 0
            exchange.epoch.add_(1)
        assert all(torch.equal(x.view(torch.int32), residuals[0].view(torch.int32)) for x in residuals)
    assert all(bool((buffer[0] == -1).all()) for buffer in packets)
