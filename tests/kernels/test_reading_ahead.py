"""Attention that reads ahead of the projection before it: captured in a chain of both, the same bits as one by one."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.flashq_kernels import turbo_compact
from alspec.kernels.launch import launch_options
from alspec.kernels.lean_attention import Ahead, LeanWorkspace, Speculation, lean_decode_attention
from alspec.kernels.merge import num_sums
from alspec.kernels.prefetch import wait_cycles
from alspec.kernels.probes import increment
from alspec.kernels.projections import qkv_rope_append
from alspec.kernels.turbo_attention import turbo_decode_attention, turbo_settings
from alspec.launch.bench_turbo import TurboCase
from alspec.launch.spec_ready import pair_speculation

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
    """`STEPS` tokens through `LAYERS` caches. Each step begins, as in decoding, with what only the one before knows.

    A dependent launch lengthens the requests, the step's end makes records of full tails, and right behind it come
    projection and attention. Whoever reads any of it too early sees other lengths, an old record or NaN.
    """

    def __init__(
        self, codec: str, head_dim: int, lengths: tuple[int, ...], device: torch.device, guess: bool = False
    ) -> None:
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
        self.turbo = TurboCase.draw(most, HEADS, KV_HEADS, head_dim, codec, 1).layers if codec != "bf16" else None
        programs = 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
        programs *= 1 if self.turbo is None else turbo_settings(device).per_sm
        self.workspace = LeanWorkspace.allocate(batch, HEADS, KV_HEADS, head_dim, device, programs)
        capacity = max(most) if self.turbo is None else 1
        self.k, self.v = normal(2, LAYERS, batch, KV_HEADS, capacity, head_dim).unbind(0)
        kept = [] if self.turbo is None else [tensor for at in self.turbo[:LAYERS] for tensor in at.tensors.values()]
        self.cache = [self.k, self.v, *kept]
        self.before = [tensor.clone() for tensor in self.cache]
        self.speculation = self._speculation() if guess else None
        self.gates = torch.tensor([1, 0, 1], dtype=torch.int32, device=device).split(1)
        self.counts = torch.zeros(2, 1, dtype=torch.int32, device=device)  # what `dawdle` reads late, and what it read

    def _speculation(self) -> Speculation:
        if self.turbo is None:
            return pair_speculation(64, self.q, KV_HEADS, self.q.device)[0]
        sums = torch.zeros(self.q.shape[0], num_sums(HEADS, self.dim), 2, device=self.q.device)
        return Speculation(64, torch.zeros_like(self.q), sums)

    def run(self, ahead: Ahead) -> None:
        """All of it, from the first length on."""
        self.seq_lens.copy_(self.first)
        for step in range(STEPS):
            increment(self.seq_lens, self.seq_lens, pdl=ahead != "all")
            for layer in range(LAYERS):
                self.launch(step, layer, ahead)
            for layer in range(LAYERS if self.turbo is not None else 0):
                turbo_compact(self.turbo[layer], self.seq_lens)

    def launch(self, step: int, layer: int, ahead: Ahead) -> None:
        """Projection and attention of one layer; with a guess another kernel between them, and one behind."""
        cache = None if self.turbo is None else self.turbo[layer]
        k, v = self.k[layer], self.v[layer]
        qkv_rope_append(
            self.x[step, layer], self.squares, self.weight, self.rope, self.seq_lens, self.q, k, v, 0.0, layer=cache
        )
        rest = (self.seq_lens, self.dim**-0.5, self.workspace, self.out[step, layer], self.lse)
        if self.speculation is not None:
            rest += (self.speculation, "all", self.gates[layer % 3])
            dawdle(self.counts[0], self.counts[1], self.out.device)
        if cache is None:
            lean_decode_attention(self.q, k, v, *rest, ahead=ahead)
        else:
            turbo_decode_attention(self.q, cache, *rest, ahead=ahead)
        if self.speculation is not None:
            increment(self.counts[0], self.counts[0], pdl=ahead != "all")

    def poison(self) -> None:
        """The caches as they were, and NaN where new tokens and outputs go."""
        for tensor, before in zip(self.cache, self.before, strict=True):
            tensor.copy_(before)
        self.q.fill_(math.nan)
        self.out.fill_(math.nan)
        self.counts.zero_()
        for request, length in enumerate(self.first.tolist()):
            at = slice(length, length + STEPS) if self.turbo is None else slice(0, 1)
            self.k[:, request, :, at] = math.nan
            self.v[:, request, :, at] = math.nan


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("codec", "head_dim", "lengths"), CASES, ids=str)
def test_older_tokens_may_be_read_before_the_newest_is_there(
    codec: str, head_dim: int, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(sum(lengths))
    chain = Chain(codec, head_dim, lengths, torch.device("cuda"))
    chain.poison()
    chain.run("all")
    torch.cuda.synchronize()
    expected = chain.out.clone()
    assert bool(expected.isfinite().all())
    chain.poison()
    compare(chain, "newest", expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("codec", "head_dim", "lengths"), CASES, ids=str)
def test_with_a_guess_only_the_end_may_wait(codec: str, head_dim: int, lengths: tuple[int, ...]) -> None:
    """The kernel ahead ends long after its own wait. Of gates, two of three are open; what is behind waits for all."""
    torch.manual_seed(sum(lengths))
    chain = Chain(codec, head_dim, lengths, torch.device("cuda"), guess=True)
    chain.poison()
    chain.run("all")
    torch.cuda.synchronize()
    expected, sums = chain.out.clone(), chain.speculation.sums.clone()
    closed = torch.arange(LAYERS) % 3 == 1
    assert bool(expected[:, ~closed].isfinite().all())
    assert bool(expected[:, closed].isnan().all())
    compare(chain, "none", expected.nan_to_num(7.0))
    assert torch.equal(chain.speculation.sums, sums)
    # The last `dawdle` read what all steps but itself had counted: nobody behind it had counted on before it ended.
    assert chain.counts.tolist() == [[STEPS * LAYERS], [STEPS * LAYERS - 1]]


def compare(chain: Chain, ahead: Ahead, expected: Tensor) -> None:
    """Replays of a captured chain with the result of one launched kernel by kernel."""
    chain.run(ahead)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run(ahead)
    for _ in range(5):
        chain.poison()
        graph.replay()
        found = chain.out if ahead == "newest" else chain.out.nan_to_num(7.0)
        assert torch.equal(found, expected)


@triton.jit
def _dawdle_kernel(count_ptr, seen_ptr, PDL: tl.constexpr):
    """Lets the next launch begin once its own wait is over, and long after that reads a count."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    wait_cycles(40000)
    tl.store(seen_ptr, tl.load(count_ptr, volatile=True))


def dawdle(count: Tensor, seen: Tensor, device: torch.device) -> None:
    """`seen = count`, 20 us later."""
    _dawdle_kernel[(1,)](count, seen, num_warps=1, **launch_options(device))
