"""Decode over the quantised cache, plain and speculative, against the fp64 oracles on the dequantised cache.

Bounds: in blocks q s_int is rounded to 2^-16 of the largest q times the largest s_int, or to 2^-14 where codes have 2
bits and lie at uneven places of a byte, q of the sum with z to 2^-16 of the largest, and P to 2^-17 of the block's
largest; in the tail q and P to fp16, 2^-12 relative. Everything else is exact or fp32. So the output differs by less
than about 2^-11 in relative RMS (errors have both signs), and `lse` by that of one score, which these inputs keep below
a few thousandths. SAS weights are relative to a block's maximum, the oracle's to the row's: 1.02e-4 each, of either
sign; the tolerance has room.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from attention_launch import EDGES, EPOCH, HAS_CUDA, AttentionLaunch, S
from comparison import close
from paired_ranks import TIMEOUT_NS, pairs
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, SpecOutput
from alspec.kernels.attention.decode_flashq.flashq_decode import (
    FlashQSettings,
    flashq_decode_attention,
    flashq_settings,
    flashq_spec_parts,
)
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.reference import decode_attention_ref, speculative_decode_attention_ref
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.flashq.layout import BlockCodes, FlashQLayer, pack_record, record_words
from alspec.kernels.speculation.handover import pair_spec_output, receive_handover
from alspec.sas import Softmax, cutoff

CODECS = ("turbo4", "turbo2", "turbo-mixed")
TOLERANCE = 2**-10


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: in the interpreter, or compiled."""
    return torch.device(request.param)


by_softmax = pytest.mark.parametrize("softmax", ["exact", "sas"])


@dataclass(kw_only=True)
class Launch(AttentionLaunch):
    """Over a random quantised cache with noise in what no token uses; `k` and `v` are fp64, as dequantised."""

    layer: FlashQLayer
    settings: FlashQSettings

    @property
    def softmax(self) -> Softmax:
        return self.layer.softmax

    @softmax.setter
    def softmax(self, softmax: Softmax) -> None:
        self.layer = replace(self.layer, softmax=softmax)

    def run(self, *phases: str, gate: Tensor | None = None) -> None:
        self.clear()
        for phase in phases or ("all",):
            flashq_decode_attention(
                self.q, self.layer, self.seq_lens, self.sm_scale, self.workspace, self.out, self.lse,
                self.speculation, phase, gate, settings=self.settings,
            )  # type: ignore[arg-type]  # fmt: skip

    def compare(self, tolerance: float = TOLERANCE) -> None:
        def bounded(name: str, found: Tensor, expected: Tensor) -> None:
            if name == "lse":
                assert float((found.cpu() - expected).abs().max()) < 8 * tolerance
            else:
                close(found, expected, 4 * tolerance if name == "sums" else tolerance)

        self.compare_each(bounded)


def draw_codes(num_blocks: int, head_dim: int, bits: int, kind: str, generator: torch.Generator) -> BlockCodes:
    """Codes whose reconstruction stays within 8 bits, as a quantiser's does."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (num_blocks, *shape), generator=generator)

    top = 2**bits - 1
    codes = integers(0, top + 1, 64, head_dim)
    s_int = integers(1, 1 + -(-238 // top), head_dim)
    z = -119 + (integers(0, 1000, head_dim) % (239 - (s_int - 1) * top).clamp(min=1))
    if kind == "constant":  # every channel of every token alike
        codes, s_int = torch.zeros_like(codes), torch.ones_like(s_int)
    elif kind == "zero":
        codes, s_int, z = torch.zeros_like(codes), torch.ones_like(s_int), torch.zeros_like(z)
    elif kind in ("widest", "highest"):
        s_int, z = torch.full_like(s_int, -(-238 // top)), torch.full_like(z, -119)
        codes = torch.full_like(codes, top) if kind == "highest" else codes
    elif kind == "high":
        s_int, z = torch.ones_like(s_int), torch.full_like(z, 119 - top)
    return BlockCodes(codes, s_int, z)


def draw(
    lengths: tuple[int, ...],
    ratio: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    num_programs: int,
    chunk_size: int = 0,
    codec: str = "turbo-mixed",
    num_warps: int = 1,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    scale: float = 0.02,
    parts: int = 1,
) -> Launch:
    batch, num_blocks = len(lengths), max(lengths) // 64 + 2
    generator = torch.Generator().manual_seed(sum(lengths) + ratio * head_dim + num_warps)
    bits = torch.full((batch, num_kv_heads), 2 if codec == "turbo2" else 4, dtype=torch.int32)
    if codec == "turbo-mixed":
        for request in range(batch):
            bits[request, torch.randperm(num_kv_heads, generator=generator)[: num_kv_heads // 2 + request % 2]] = 2
    values = torch.full((2, batch, num_kv_heads, 64 * num_blocks, head_dim), math.nan, dtype=torch.float64)
    scales = scale * (0.2 + torch.rand(batch, num_kv_heads, num_blocks, 2, generator=generator))
    tail = torch.randint(-128, 128, (batch, num_kv_heads, 2, 64, head_dim), generator=generator, dtype=torch.int8)
    tail_scale = scale * (0.2 + torch.rand(batch, num_kv_heads, 2, generator=generator))
    records, offset, at = [], [], 0
    for request, length in enumerate(lengths):
        full = (length - 1) // 64
        for head in range(num_kv_heads):
            width = int(bits[request, head])
            sides = [draw_codes(num_blocks, head_dim, width, kind, generator) for _ in range(2)]
            words = pack_record(*sides, width)
            words[full:] = torch.randint(-(2**31), 2**31, words[full:].shape, generator=generator).int()
            scales[request, head, full:] = math.nan
            for side, codes in enumerate(sides):
                integers = (codes.codes * codes.s_int[:, None] + codes.z[:, None])[:full].double()
                exact = integers * scales[request, head, :full, side, None, None].double()
                values[side, request, head, : 64 * full] = exact.flatten(0, 1)
                newest = tail[request, head, side, : length - 64 * full].double()
                values[side, request, head, 64 * full : length] = newest * tail_scale[request, head, side].double()
            gap = 4 * int(torch.randint(0, 9, (), generator=generator))
            records += [torch.randint(-(2**31), 2**31, (gap,), generator=generator).int(), words.flatten()]
            offset.append(at + gap)
            at += gap + num_blocks * record_words(width, head_dim)
    layer = FlashQLayer(
        words=torch.cat(records).to(device),
        offset=torch.tensor(offset).view(batch, num_kv_heads).to(device),
        bits=bits.to(device),
        scales=scales.to(device),
        tail=tail.to(device),
        tail_scale=tail_scale.to(device),
    )
    q = torch.randn(batch, ratio * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    launch = Launch(
        q=q,
        layer=layer,
        k=values[0],
        v=values[1],
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        workspace=LeanWorkspace.allocate(batch, q.shape[1], num_kv_heads, head_dim, device, num_programs),
        out=torch.empty_like(q, dtype=torch.float32),
        lse=torch.empty(q.shape[:2], device=device),
        settings=replace(flashq_settings(device), num_warps=num_warps),
    )
    if chunk_size:
        launch.speculation = SpecOutput(
            chunk_size,
            spec_out=torch.empty(parts, *q.shape, dtype=torch.int64, device=device),
            sums=torch.empty(batch, num_sums(q.shape[1], head_dim), 2, device=device),
            epoch=torch.tensor([EPOCH], dtype=torch.int32, device=device),
            spec_lse=torch.empty(parts, *q.shape[:2], dtype=torch.int64, device=device) if parts > 1 else None,
        )
    return launch


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("length", EDGES)
def test_lengths_around_blocks_and_chunks(device: torch.device, length: int, chunk_size: int) -> None:
    launch = draw((length,), 4, 2, 64, device, 5, chunk_size)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(
    ("head_dim", "ratio", "num_warps"),
    [(64, 1, 1), (64, 4, 2), (64, 5, 1), (64, 7, 4), (128, 1, 4), (128, 4, 1), (128, 7, 2), (128, 8, 4)],
)
@pytest.mark.parametrize("codec", CODECS)
def test_head_shapes(device: torch.device, codec: str, head_dim: int, ratio: int, num_warps: int) -> None:
    launch = draw((64 * 5 + 37,), ratio, 2, head_dim, device, 3, 0, codec, num_warps)
    launch.run()
    launch.compare()


@pytest.mark.parametrize("chunk_size", [0, S, 256], ids=["plain", "S128", "S256"])
@pytest.mark.parametrize(("num_programs", "num_warps"), [(1, 1), (7, 2), (30, 1), (30, 4)])
@pytest.mark.parametrize("lengths", [(65, 450, 319, 128, 1), (320, 321, 640)], ids=lambda n: "-".join(map(str, n)))
def test_ragged_batches_on_any_grid(
    device: torch.device, lengths: tuple[int, ...], num_programs: int, num_warps: int, chunk_size: int
) -> None:
    launch = draw(lengths, 2, 2, 64, device, num_programs, chunk_size, num_warps=num_warps)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(("batch_size", "num_programs", "chunk_size"), [(17, 20, S), (32, 7, 0)])
def test_large_batches(device: torch.device, batch_size: int, num_programs: int, chunk_size: int) -> None:
    """Most requests have a tail only."""
    lengths = (*((1, 64, 30, 65) * 8)[: batch_size - 1], 2 * S + 65)
    launch = draw(lengths, 1, 1, 64, device, num_programs, chunk_size)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(("num_programs", "num_warps"), [(1, 1), (5, 4), (24, 2), (60, 1)])
@pytest.mark.parametrize(
    ("length", "chunk_size"), [(1, S), (64, S), (65, 256), (129, S), (2 * S + 65, S), (700, 256), (1500, S)]
)
def test_guess_in_two_parts(
    device: torch.device, length: int, chunk_size: int, num_programs: int, num_warps: int
) -> None:
    """Where runs are short, the tail and the blocks, which there may be none of; else one that is all."""
    launch = draw((length,), 3, 2, 64, device, num_programs, chunk_size, num_warps=num_warps, parts=2)
    launch.run()
    launch.compare()
    assert not launch.guess_lse.isnan().any(), "a part did not come"


@pytest.mark.parametrize("num_programs", [2, 60])
@pytest.mark.parametrize("length", [40, 700])
def test_a_guess_in_two_parts_arrives_as_one(device: torch.device, length: int, num_programs: int) -> None:
    shape, layer = PairShape(2, 1, 1, 64, 4, 2, 64, 2), 1
    ((source,), (target,)) = pairs(device, shape, EPOCH)
    launch = draw((length,), 2, 2, 64, device, num_programs, S, parts=2)
    assert launch.speculation is not None
    launch.speculation = pair_spec_output(source, layer, S, launch.speculation.sums)
    launch.run()
    launch.compare()
    target.is_receiver.fill_(1)
    target.own.inbox.fill_(EPOCH << 32)
    x, attn_out = torch.zeros(1, 64, device=device), torch.full((1, 4, 64), math.nan, device=device)
    k, v = torch.zeros(2, 1, 2, length, 64, device=device)
    receive_handover(target, layer, x, KVLayer(k, v), launch.seq_lens, attn_out, TIMEOUT_NS)
    close(attn_out, launch.guess.cpu(), TOLERANCE)


@pytest.mark.parametrize(("num_programs", "parts"), [(1, 1), (9, 1), (10, 2), (60, 2)])
def test_guess_is_one_part_where_runs_are_long(device: torch.device, num_programs: int, parts: int) -> None:
    """A row of 28 steps: runs of four for 9 programs, of three, as far apart as both parts begin, for 10."""
    launch = draw((700,), 4, 2, 64, device, num_programs, S, parts=2)
    launch.run()
    launch.compare()
    assert [bool(part.isfinite().all()) for part in launch.guess_lse] == [True, parts == 2]


@pytest.mark.parametrize("num_programs", [1, 7, 40])
def test_two_launches_give_what_one_gives(device: torch.device, num_programs: int) -> None:
    launch = draw((65, 700, 319, 1), 2, 2, 64, device, num_programs, S)
    launch.run()
    assert launch.speculation is not None
    one = [output.clone() for output in (launch.out, launch.lse, launch.guess, launch.speculation.sums)]
    # As a plain tensor, which is what two launches are for.
    launch.speculation = replace(launch.speculation, spec_out=torch.empty_like(launch.out), epoch=None)
    launch.run("predictor", "rest")
    launch.compare()
    for found, expected in zip(launch.outputs(), one, strict=True):
        close(found, expected.cpu().double(), TOLERANCE)


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("num_programs", [47, 120])
def test_many_partials_of_one_warp(device: torch.device, num_programs: int, chunk_size: int) -> None:
    launch = draw((64 * 45 + 9,), 3, 1, 64, device, num_programs, chunk_size, "turbo4")
    launch.run()
    launch.compare()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(("ratio", "num_programs"), [(4, 20), (4, 40), (4, 130), (4, 300), (7, 130), (1, 300)])
def test_many_partials_of_several_warps(ratio: int, num_programs: int, chunk_size: int) -> None:
    """In one round of loads, and in two."""
    launch = draw((64 * 4 * 300 + 9,), ratio, 1, 128, torch.device("cuda"), num_programs, chunk_size, "turbo4", 4)
    launch.run()
    launch.compare()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_warps", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_queries_of_16_bits(dtype: torch.dtype, ratio: int, head_dim: int, num_warps: int) -> None:
    """They come through shared memory, once a turn; a program has several turns, of tails alone as well."""
    device = torch.device("cuda")
    launch = draw((65, 700, 40, 319), ratio, 2, head_dim, device, 3, S, num_warps=num_warps, dtype=dtype)
    launch.run()
    launch.compare()


@pytest.mark.parametrize("codec", ["turbo4", "turbo2"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["constant", "zero", "widest"])
def test_blocks_at_the_ends_of_the_range(device: torch.device, kind: str, head_dim: int, codec: str) -> None:
    launch = draw((64 * 4 + 5,), 4, 1, head_dim, device, 2, 0, codec, 2, kind)
    launch.run()
    launch.compare()


@pytest.mark.parametrize("codec", ["turbo4", "turbo2"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["widest", "highest", "high"])
def test_sums_at_the_ends_of_the_range(device: torch.device, kind: str, head_dim: int, codec: str) -> None:
    """Every channel of q is as large as the largest; of one sign, of the other, of both, or all are 0."""
    launch = draw((64 * 2 + 5,), 4, 1, head_dim, device, 1, 0, codec, 1, kind)
    launch.q[:, 0], launch.q[:, 1], launch.q[:, 3] = 1, -1, 0
    launch.q[:, 2] = launch.q[:, 2].sign()
    launch.run()
    launch.compare()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 3.0])
@pytest.mark.parametrize("q_scale", [1e-6, 1.0, 1e4])
def test_extreme_scales(device: torch.device, q_scale: float, scale: float) -> None:
    launch = draw((64 * 3 + 20,), 2, 1, 64, device, 2, 0, "turbo4", scale=scale)
    launch.q *= q_scale
    # Scores so far apart that their own rounding decides between tokens belong to no model.
    launch.layer.scales[..., 0] /= max(1.0, q_scale * scale / 0.05)
    launch.layer.tail_scale[..., 0] /= max(1.0, q_scale * scale / 0.05)
    launch.k /= max(1.0, q_scale * scale / 0.05)
    launch.run()
    launch.compare()


def test_bf16_queries_lose_nothing(device: torch.device) -> None:
    """With 4 bits, q s_int in 16 bits is as good as exact."""
    launch = draw((64 * 4 + 30,), 4, 2, 128, device, 3, 0, "turbo4", dtype=torch.bfloat16)
    launch.run()
    _, lse = decode_attention_ref(launch.q.cpu(), launch.k, launch.v, launch.seq_lens.cpu(), 128**-0.5)
    launch.compare()
    assert float((launch.lse.cpu() - lse).abs().max()) < TOLERANCE


@by_softmax
@pytest.mark.parametrize("seed", range(4))
def test_random_work(device: torch.device, seed: int, softmax: Softmax) -> None:
    rng = random.Random(seed)
    lengths = tuple(rng.choice(EDGES) for _ in range(rng.choice([1, 2, 3, 5])))
    launch = draw(
        lengths, rng.choice([1, 3, 8]), rng.choice([1, 3]), rng.choice([64, 128]), device, rng.choice([1, 3, 17, 64]),
        rng.choice([0, S]), rng.choice(CODECS), rng.choice([1, 2, 4]),
    )  # fmt: skip
    launch.softmax = softmax
    launch.run()
    launch.compare()


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(("codec", "head_dim", "num_warps"), [("turbo4", 64, 1), ("turbo2", 128, 1), ("turbo4", 64, 2)])
def test_sas_weights(device: torch.device, codec: str, head_dim: int, num_warps: int, chunk_size: int) -> None:
    launch = draw((700, 64, 129), 4, 1, head_dim, device, 9, chunk_size, codec, num_warps)
    launch.run()
    exact = launch.out.clone()
    launch.softmax = "sas"
    launch.run()
    launch.compare()
    assert not torch.equal(launch.out, exact)
    launch.run(*(("predictor", "rest") if chunk_size else ()))
    launch.compare()


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("beyond", [-0.01, 0.01], ids=["within", "beyond"])
def test_sas_cutoff_is_that_of_each_request(device: torch.device, beyond: float, chunk_size: int) -> None:
    """The newest token, of value 0, is ahead of all others by the cutoff: their mass is `DROPPED_MASS`, or nothing."""
    lengths = (322, 642)  # two in the tail
    launch = draw(lengths, 4, 1, 64, device, 1, chunk_size, "turbo4", kind="constant")
    launch.softmax = "sas"
    launch.q.zero_()[..., 0] = 1
    layer, tail = launch.layer, launch.layer.tail
    layer.scales[..., 0] = 0  # of K
    tail.zero_()
    tail[:, :, 0, 1, 0] = 64
    tail[:, :, 1, 0] = 100
    launch.k[:] = 0
    for request, length in enumerate(lengths):
        ahead = cutoff(length) + beyond
        layer.tail_scale[request, 0, 0] = ahead * 8 / 64
        launch.k[request, 0, length - 1, 0] = ahead * 8
        launch.v[request, 0, length - 2] = 100 * layer.tail_scale[request, 0, 1].double()
        launch.v[request, 0, length - 1] = 0
    launch.run()
    expected, _ = decode_attention_ref(launch.q.cpu(), launch.k, launch.v, launch.seq_lens.cpu(), 64**-0.5, "sas")
    assert bool(expected.any(-1).all()) == (beyond < 0)
    seen = launch.out if launch.speculation is None else launch.guess
    if beyond > 0:
        assert not seen.any()
        # A part without the newest token keeps the others: less is dropped.
        assert launch.out.abs().amax() <= 1.02e-3 * launch.v.nan_to_num().abs().amax()
    else:
        # In the tail P is a denormal of fp16 here, with five bits or six.
        close(launch.out, expected, 2**-6)
        if launch.speculation is not None:
            args = (launch.q.cpu(), launch.k, launch.v, launch.seq_lens.cpu(), S, 64**-0.5, "sas")
            close(seen, speculative_decode_attention_ref(*args)[0], 2**-6)


@pytest.mark.parametrize(("head_dim", "ratio", "num_warps"), [(64, 5, 1), (64, 8, 1), (128, 4, 2), (128, 8, 4)])
def test_heads_of_different_sizes(device: torch.device, head_dim: int, ratio: int, num_warps: int) -> None:
    """Each query head has a power of two of its own."""
    launch = draw((65, 200), ratio, 2, head_dim, device, 5, num_warps=num_warps)
    launch.q *= 2.0 ** (torch.arange(2 * ratio, device=device) % 7 - 3)[None, :, None]
    launch.run()
    launch.compare()


@by_softmax
def test_queries_that_are_no_numbers_are_seen_in_the_output(device: torch.device, softmax: Softmax) -> None:
    launch = draw((200,), 4, 1, 64, device, 2)
    launch.softmax = softmax
    launch.q[0, 1, 5] = torch.nan
    launch.run()
    assert launch.out[0, [0, 2, 3]].isfinite().all()
    assert not launch.out[0, 1].isfinite().any()


def test_where_sink_and_window_meet_the_guess_is_exact(device: torch.device) -> None:
    launch = draw((2 * S + 63,), 4, 2, 64, device, 20, S)
    launch.run()
    assert launch.speculation is not None
    assert torch.equal(launch.guess, launch.out)
    assert not launch.speculation.sums[..., 0].any()


def test_a_closed_gate_does_nothing(device: torch.device) -> None:
    launch = draw((300,), 4, 2, 64, device, 5, S)
    gate = torch.zeros(1, dtype=torch.int32, device=device)
    launch.run(gate=gate)
    assert launch.speculation is not None
    assert all(bool(output.isnan().all()) for output in launch.outputs() if output.is_floating_point())
    assert not launch.speculation.spec_out.any()
    launch.run(gate=gate + 1)
    launch.compare()


def test_the_same_bits_every_time(device: torch.device) -> None:
    launch = draw((900, 400), 4, 2, 64, device, 30, S)
    launch.run()
    first = [output.clone() for output in launch.outputs()]
    for _ in range(200 if device.type == "cuda" else 1):
        launch.run()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(launch.outputs(), first, strict=True))


def test_what_it_refuses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a launch, which would write beyond its tensors."""
    monkeypatch.setattr("alspec.kernels.attention.decode_flashq.flashq_decode.jit_launch", None)
    launch = draw((70,), 4, 1, 64, device, 1)
    args = (launch.seq_lens, 0.125, launch.workspace, launch.out, launch.lse)
    uneven = torch.cat([launch.q, launch.q], 1)[:, :7]
    for q, layer, message in (
        (torch.cat([launch.q, launch.q, launch.q], 1)[:, :9], launch.layer, "q: 9 heads"),
        (uneven, draw((70,), 4, 2, 64, device, 1).layer, "q: 7 heads"),
        (launch.q[..., :32], launch.layer, "head_dim: .* found 32 and 64"),
        (launch.q.repeat(1, 1, 2), launch.layer, "head_dim: .* found 128 and 64"),
        (launch.q.repeat(2, 1, 1), launch.layer, "q: expected 1 contiguous requests, found 2"),
    ):
        with pytest.raises(ValueError, match=message):
            flashq_decode_attention(q.contiguous(), layer, *args)
    with pytest.raises(ValueError, match="contiguous"):
        flashq_decode_attention(launch.q.repeat_interleave(2, -1)[..., ::2], launch.layer, *args)
    odd = torch.empty(launch.q.numel() + 1, dtype=launch.q.dtype, device=device)[1:].view_as(launch.q)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        flashq_decode_attention(odd, launch.layer, *args)
    words = torch.empty(launch.layer.words.numel() + 1, dtype=torch.int32, device=device)[1:]
    with pytest.raises(ValueError, match="words: expected to begin at a multiple of 16 bytes, found 4"):
        flashq_decode_attention(launch.q, replace(launch.layer, words=words), *args)
    with pytest.raises(ValueError, match="chunk_size"):
        flashq_decode_attention(launch.q, launch.layer, *args, SpecOutput(96, launch.out, launch.lse))
    with pytest.raises(ValueError, match="phase"):
        flashq_decode_attention(launch.q, launch.layer, *args, phase="rest")
    with pytest.raises(ValueError, match="seq_lens"):
        flashq_decode_attention(launch.q, launch.layer, launch.seq_lens.long(), *args[1:])
    sums = torch.empty(1, num_sums(4, 64), 2, device=device)
    epoch = torch.ones(1, dtype=torch.int32, device=device)
    words = torch.empty(3, 1, 4, 64, dtype=torch.int64, device=device)
    good = SpecOutput(128, words[:2], sums, epoch, words[:2, ..., 0])
    for in_parts, message in (
        (replace(good, spec_out=words, spec_lse=words[..., 0]), "spec_lse: expected 2 parts at most"),
        (replace(good, epoch=None), "spec_lse"),
        (replace(good, spec_out=words), "spec_out"),
        (replace(good, sums=sums[:, 1:]), "sums"),
    ):
        with pytest.raises(ValueError, match=message):
            flashq_decode_attention(launch.q, launch.layer, *args, in_parts)
    with pytest.raises(ValueError, match="spec_lse"):
        flashq_decode_attention(launch.q, launch.layer, *args, good, "predictor")


def test_parts_of_a_guess() -> None:
    assert [flashq_spec_parts(batch, 4, torch.device("cuda")) for batch in (1, 2)] == [2, 1]
    assert [flashq_spec_parts(1, ratio, torch.device("cuda")) for ratio in (1, 5, 8)] == [2, 1, 1]
    assert flashq_spec_parts(1, 4, torch.device("cpu")) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_warps", [1, 4])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("chunk_size", "parts"), [(0, 1), (S, 1), (S, 2)], ids=["plain", "speculative", "in parts"])
@by_softmax
def test_one_captured_graph_serves_every_length(
    softmax: Softmax, chunk_size: int, parts: int, codec: str, num_warps: int
) -> None:
    device = torch.device("cuda")
    launch = draw(
        (8000,), 4, 8, 128, device, 1056 // num_warps, chunk_size, codec, num_warps, dtype=torch.bfloat16, parts=parts
    )
    launch.softmax = softmax
    launch.run()
    launch.compare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for length in (1, 30, 64, 65, 127, 128, 129, 2 * S, 2 * S + 1, 2 * S + 70, 1000, 2049, 5000, 7936, 7937, 8000):
        # A shorter context has fewer records, and what is in the tail is its newest tokens.
        launch.seq_lens.fill_(length)
        newest = length - 64 * ((length - 1) // 64)
        k, v = launch.k.clone(), launch.v.clone()
        for side, values in enumerate((k, v)):
            tail = launch.layer.tail[:, :, side, :newest].double() * launch.layer.tail_scale[:, :, side, None, None]
            values[:, :, length - newest : length] = tail.cpu()
        graph.replay()
        torch.cuda.synchronize()
        replace(launch, k=k, v=v).compare()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("chunk_size", "parts"), [(0, 1), (S, 1), (S, 2)], ids=["plain", "speculative", "in parts"])
def test_thousands_of_replays_are_alike(chunk_size: int, parts: int, codec: str) -> None:
    """A copy that is early, or a read that is late, shows in some launches of thousands."""
    device = torch.device("cuda")
    launch = draw((8000,), 4, 8, 128, device, 264, chunk_size, codec, 4, dtype=torch.bfloat16, parts=parts)
    launch.run()
    launch.compare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for length in (2 * S + 70, 2049, 7936, 8000):
        launch.seq_lens.fill_(length)
        graph.replay()
        first = [output.clone() for output in launch.outputs()]
        differ = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(2000):
            graph.replay()
            for ours, theirs in zip(launch.outputs(), first, strict=True):
                differ += (ours != theirs).any()
        assert not first[0].isnan().any()
        assert int(differ) == 0, f"{int(differ)} outputs of 2000 replays differ at {length} tokens"
