"""Attention that reads ahead of the projection before it: captured in a chain of both, the same bits as one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from alspec.kernels.gemv import qkv_rope_append
from alspec.kernels.lean_attention import LeanWorkspace, lean_decode_attention
from alspec.kernels.turbo_attention import turbo_decode_attention, turbo_settings
from alspec.launch.bench_turbo import TurboCase

HEADS, KV_HEADS, DIM, HIDDEN = 8, 2, 128, 512
LAYERS, STEPS = 6, 3
LENGTHS = [(1,), (64,), (128,), (129,), (5000,), (8192,), (20000,), (30, 700, 3000, 10001)]


class Chain:
    """`STEPS` tokens at the same position through `LAYERS` caches: projection and append, attention, and so on."""

    def __init__(self, lengths: tuple[int, ...], codec: str) -> None:
        self.device = torch.device("cuda")
        batch = len(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.x = normal(STEPS, LAYERS, batch, HIDDEN)
        self.weight = normal((HEADS + 2 * KV_HEADS) * DIM, HIDDEN) / 16
        self.squares = torch.full((batch, 1), float(HIDDEN), device=self.device)
        self.rope = torch.stack([torch.ones(DIM // 2), torch.zeros(DIM // 2)]).repeat(batch, 1, 1).to(self.device)
        self.q = normal(batch, HEADS, DIM)
        self.out = torch.empty(STEPS, LAYERS, batch, HEADS, DIM, device=self.device)
        self.lse = torch.empty(batch, HEADS, device=self.device)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.turbo = TurboCase.draw(list(lengths), HEADS, KV_HEADS, DIM, codec, 1).layers if codec != "bf16" else None
        programs = sms * (1 if self.turbo is None else turbo_settings(self.device).per_sm)
        self.workspace = LeanWorkspace.allocate(batch, HEADS, KV_HEADS, DIM, self.device, programs)
        capacity = max(lengths) if self.turbo is None else 1
        self.k, self.v = normal(2, LAYERS, batch, KV_HEADS, capacity, DIM).unbind(0)

    def launch(self, step: int, layer: int, newest_only: bool) -> None:
        """Both kernels of one layer."""
        cache = None if self.turbo is None else self.turbo[layer]
        k, v = self.k[layer], self.v[layer]
        qkv_rope_append(
            self.x[step, layer], self.squares, self.weight, self.rope, self.seq_lens, self.q, k, v, 0.0, layer=cache
        )
        rest = (self.seq_lens, DIM**-0.5, self.workspace, self.out[step, layer], self.lse)
        if cache is None:
            lean_decode_attention(self.q, k, v, *rest, newest_only=newest_only)
        else:
            turbo_decode_attention(self.q, cache, *rest, newest_only=newest_only)

    def run(self, newest_only: bool) -> None:
        """All of them."""
        for step in range(STEPS):
            for layer in range(LAYERS):
                self.launch(step, layer, newest_only)

    def poison(self) -> None:
        """What a token leaves behind, so that one that is read too early shows."""
        self.q.fill_(math.nan)
        self.out.fill_(math.nan)
        for request, length in enumerate(self.seq_lens.tolist()):
            at = length - 1 if self.turbo is None else 0
            self.k[:, request, :, at] = math.nan
            self.v[:, request, :, at] = math.nan
            for cache in self.turbo or []:
                cache.tail[request, :, :, (length - 1) % 64] = 119


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("codec", ["bf16", "turbo4", "turbo-mixed"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_older_tokens_may_be_read_before_the_newest_is_there(lengths: tuple[int, ...], codec: str) -> None:
    torch.manual_seed(sum(lengths))
    chain = Chain(lengths, codec)
    for step in range(STEPS):
        for layer in range(LAYERS):
            chain.launch(step, layer, newest_only=False)
            torch.cuda.synchronize()
    expected = chain.out.clone()
    assert bool(expected.isfinite().all())
    chain.run(newest_only=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(newest_only=True)
    for _ in range(3):
        chain.poison()
        graph.replay()
        assert torch.equal(chain.out, expected)
