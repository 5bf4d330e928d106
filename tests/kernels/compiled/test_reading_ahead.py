"""Attention that reads before the previous projection ends: a captured chain of both gives the same bits as without."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, lean_decode_attention
from alspec.kernels.attention.decode_quantised.quantised_decode import quantised_decode_attention, quantised_settings
from alspec.kernels.bench.probes import increment
from alspec.kernels.kv_codec.codec_kernels import kv_compact
from alspec.kernels.linear.projections import qkv_rope_append
from alspec.launch.bench.bench_quantised import QuantisedCase

HEADS, KV_HEADS, HIDDEN = 8, 2, 512
LAYERS, STEPS = 4, 4
CASES = [
    ("bf16", 128, (1,)),
    ("bf16", 128, (127,)),
    ("bf16", 100, (77,)),  # rows of 200 bytes
    ("bf16", 128, (5000,)),
    ("bf16", 128, (20000,)),
    ("bf16", 64, (30, 700, 3000, 10001)),
    ("turbo4", 128, (1,)),
    ("turbo4", 128, (62,)),
    ("turbo4", 128, (8190,)),
    ("turbo-mixed", 64, (62, 700, 3071, 10001)),
    ("turbo-mixed", 128, (20000,)),
]


class Chain:
    """`STEPS` tokens through `LAYERS` caches. As in decoding, each step depends on the previous one.

    A dependent launch increments the lengths, the end of a step compacts full tails into records, and projection and
    attention follow directly. A kernel that reads too early sees other lengths, an old record or NaN.
    """

    def __init__(self, codec: str, head_dim: int, lengths: tuple[int, ...], device: torch.device) -> None:
        batch = len(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self.dim = head_dim
        self.first = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
        self.seq_lens = self.first.clone()
        self.x = normal(STEPS, LAYERS, batch, HIDDEN)
        self.weight = normal((HEADS + 2 * KV_HEADS) * head_dim, HIDDEN) / 16
        self.squares = torch.full((batch, 1), float(HIDDEN), device=device)
        self.rope = torch.stack([torch.ones(head_dim // 2), torch.zeros(head_dim // 2)]).repeat(batch, 1, 1).to(device)
        self.q = normal(batch, HEADS, head_dim)
        self.out = torch.empty(STEPS, LAYERS, batch, HEADS, head_dim, device=device)
        self.lse = torch.empty(batch, HEADS, device=device)
        most = [length + STEPS for length in lengths]
        self.flashq = QuantisedCase.draw(most, HEADS, KV_HEADS, head_dim, codec, 1).layers if codec != "bf16" else None
        programs = 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
        programs *= 1 if self.flashq is None else quantised_settings(device).per_sm
        self.workspace = LeanWorkspace.allocate(batch, HEADS, KV_HEADS, head_dim, device, programs)
        capacity = max(most) if self.flashq is None else 1
        self.k, self.v = normal(2, LAYERS, batch, KV_HEADS, capacity, head_dim).unbind(0)
        kept = [] if self.flashq is None else [tensor for at in self.flashq[:LAYERS] for tensor in at.tensors.values()]
        self.cache = [self.k, self.v, *kept]
        self.before = [tensor.clone() for tensor in self.cache]

    def run(self, prefetch_before_wait: bool) -> None:
        """Run all steps, from the first lengths on."""
        self.seq_lens.copy_(self.first)
        for step in range(STEPS):
            increment(self.seq_lens, self.seq_lens, pdl=prefetch_before_wait)
            for layer in range(LAYERS):
                self.launch(step, layer, prefetch_before_wait)
            for layer in range(LAYERS if self.flashq is not None else 0):
                kv_compact(self.flashq[layer], self.seq_lens)

    def launch(self, step: int, layer: int, prefetch_before_wait: bool) -> None:
        """Launch projection and attention of one layer."""
        cache = None if self.flashq is None else self.flashq[layer]
        k, v = self.k[layer], self.v[layer]
        qkv_rope_append(
            self.x[step, layer], self.squares, self.weight, self.rope, self.seq_lens, self.q, k, v, 0.0, layer=cache
        )
        rest = (self.seq_lens, self.dim**-0.5, self.workspace, self.out[step, layer], self.lse)
        if cache is None:
            lean_decode_attention(self.q, k, v, *rest, prefetch_before_wait=prefetch_before_wait)
        else:
            quantised_decode_attention(self.q, cache, *rest, prefetch_before_wait=prefetch_before_wait)

    def poison(self) -> None:
        """Restore the caches, and write NaN where new tokens and outputs go."""
        for tensor, before in zip(self.cache, self.before, strict=True):
            tensor.copy_(before)
        self.q.fill_(math.nan)
        self.out.fill_(math.nan)
        for request, length in enumerate(self.first.tolist()):
            at = slice(length, length + STEPS) if self.flashq is None else slice(0, 1)
            self.k[:, request, :, at] = math.nan
            self.v[:, request, :, at] = math.nan


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("codec", "head_dim", "lengths"), CASES, ids=str)
def test_attention_may_read_older_tokens_before_the_newest_is_written(
    codec: str, head_dim: int, lengths: tuple[int, ...]
) -> None:
    chain = Chain(codec, head_dim, lengths, torch.device("cuda"))
    chain.poison()
    chain.run(prefetch_before_wait=False)
    torch.cuda.synchronize()
    expected = chain.out.clone()
    assert bool(expected.isfinite().all())
    chain.poison()
    chain.run(prefetch_before_wait=True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(prefetch_before_wait=True)
    for _ in range(5):
        chain.poison()
        graph.replay()
        assert torch.equal(chain.out, expected)
