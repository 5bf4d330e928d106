"""Steps of a small model by two groups, each kernel after those whose words it waits for: as one group computes it."""

from __future__ import annotations

import pytest
import torch
from paired_ranks import PATIENCE_NS, nan, pairs
from torch import Tensor

from alspec.kernels.exchange import Exchange
from alspec.kernels.handover import receive_handover, receive_residual, send_handover, send_residual
from alspec.kernels.lean_attention import LeanWorkspace, Speculation, lean_decode_attention
from alspec.kernels.mailbox import PairShape
from alspec.kernels.projections import gate_up_silu, qkv_rope_append
from alspec.kernels.push import push_partial
from alspec.kernels.residual import num_square_sums, reduce_norm
from alspec.kernels.roles import decide, take_turn


class ToyRank:
    """A rank of a small model: the launches of a step, gated where it has a pair."""

    def __init__(self, device: torch.device, weights: list[list[Tensor]], start: Tensor, lengths: Tensor) -> None:
        batch, hidden = start.shape
        self.weights, self.seq_lens = weights, lengths
        self.x, self.x_norm = start.clone(), start.clone()
        self.squares = nan(device, torch.float32, batch, num_square_sums(hidden))
        self.squares.copy_(start.square().sum(1, keepdim=True) / self.squares.shape[1])
        self.ones = torch.ones(hidden, device=device)
        self.rope = torch.full((batch, 2, 8), 0.5**0.5, device=device)
        self.q, self.attn_out = (nan(device, torch.float32, batch, 4, 16) for _ in range(2))
        self.lse, self.sums = nan(device, torch.float32, batch, 4), nan(device, torch.float32, batch, 4, 2)
        self.mlp = nan(device, torch.float32, batch, 48)
        self.k, self.v = torch.randn(2, len(weights), batch, 2, 200, 16, generator=torch.Generator().manual_seed(1)).to(
            device
        )
        self.workspace = LeanWorkspace.allocate(batch, 4, 2, 16, device, 3)

    def pre_attention(self, layer: int, gate: Tensor | None) -> None:
        qkv_rope_append(
            self.x_norm, self.squares, self.weights[layer][0], self.rope, self.seq_lens, self.q, self.k[layer],
            self.v[layer], 1e-5, gate,
        )  # fmt: skip

    def attention(self, layer: int, speculation: Speculation, gate: Tensor | None) -> None:
        lean_decode_attention(
            self.q, self.k[layer], self.v[layer], self.seq_lens, 0.25, self.workspace, self.attn_out, self.lse,
            speculation, gate=gate,
        )  # fmt: skip

    def post_attention(self, layer: int, exchange: Exchange, gate: Tensor | None) -> None:
        _, o, gate_up, down = self.weights[layer]
        push_partial(self.attn_out.flatten(1), o, exchange, 2 * layer, gate)
        reduce_norm(exchange, 2 * layer, 0, self.x, self.ones, self.x_norm, self.squares, gate)
        gate_up_silu(self.x_norm, self.squares, gate_up, self.mlp, 1e-5, gate)
        push_partial(self.mlp, down, exchange, 2 * layer + 1, gate)
        reduce_norm(exchange, 2 * layer + 1, 0, self.x, self.ones, self.x_norm, self.squares, gate)


@pytest.mark.parametrize(
    "verdicts", [(1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (1, 0, 0, 1, 1), (0, 1, 0, 1, 0), (0, 0, 1, 1, 0)], ids=str
)
def test_two_groups_compute_what_one_would(device: torch.device, verdicts: tuple[int, ...]) -> None:
    """Steps of a small model with forced verdicts, against one rank that lets `A~` or `A` through: bit for bit."""
    num_layers, batch, hidden, chunk = len(verdicts), 2, 40, 64
    shape = PairShape(num_layers, batch, 1, hidden, 4, 2, 16)
    ((first,), (second,)) = pairs(device, shape, 1)
    handovers = (first, second)
    sizes = [(8 * 16, hidden), (hidden, 64), (96, hidden), (hidden, 48)]
    weights = [[torch.randn(size, device=device) * 0.15 for size in sizes] for _ in range(num_layers)]
    live = torch.ones(batch, dtype=torch.int32, device=device)
    hits = torch.zeros(num_layers, batch, dtype=torch.int32, device=device)
    forced = torch.tensor(verdicts, dtype=torch.int32, device=device)
    lengths = torch.tensor([197, 150], dtype=torch.int32, device=device)
    start = torch.randn(batch, hidden, device=device)
    ranks = [ToyRank(device, weights, start, lengths) for _ in handovers]
    single = ToyRank(device, weights, start, lengths)
    exchange = pairs(device, shape, 1)[0][0].exchange
    for _ in range(2):  # the second begins with the other group where an odd number of layers accepts
        for layer, accepted in enumerate(verdicts):
            spec_out = torch.empty_like(single.attn_out)
            single.pre_attention(layer, None)
            single.attention(layer, Speculation(chunk, spec_out, single.sums), None)
            if accepted:
                single.attn_out.copy_(spec_out)
            single.post_attention(layer, exchange, None)

            for rank, pair in zip(ranks, handovers, strict=True):
                rank.pre_attention(layer, pair.priority)
                take_turn(pair, layer, hits, PATIENCE_NS)
            for rank, pair in zip(ranks, handovers, strict=True):
                send_handover(pair, layer, rank.x, rank.k[layer], rank.v[layer], lengths)
                rank.attention(layer, pair.speculation(layer, chunk, rank.sums), pair.sends)
                decide(pair, layer, rank.sums, live, 0.1, hits, PATIENCE_NS, forced)
            for rank, pair in zip(ranks, handovers, strict=True):
                receive_handover(pair, layer, rank.x, rank.k[layer], rank.v[layer], lengths, rank.attn_out, PATIENCE_NS)
                rank.post_attention(layer, pair.exchange, pair.priority)
        for rank, pair in zip(ranks, handovers, strict=True):
            take_turn(pair, num_layers, hits, PATIENCE_NS)
            send_residual(pair, rank.x)
        for rank, pair in zip(ranks, handovers, strict=True):
            receive_residual(pair, rank.x, rank.ones, rank.x_norm, rank.squares, PATIENCE_NS)
            for name in ("x", "x_norm", "squares", "k", "v"):
                assert torch.equal(getattr(rank, name), getattr(single, name)), name
            assert int(pair.exchange.fault) == 0
            pair.exchange.epoch.add_(1)
        exchange.epoch.add_(1)
        lengths += 1
