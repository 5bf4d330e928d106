"""Decode over the quantised cache, plain and speculative, against the fp64 oracles on the dequantised cache.

These values round, and all others are exact or fp32:
- in blocks, q s_int: to 2^-16 of the largest q times the largest s_int, or to 2^-14 for 2-bit codes at uneven bits;
- in blocks, q for the sum with z: to 2^-16 of the largest q;
- in blocks, P: to 2^-17 of the largest P of the block;
- in the tail, q and P: to fp16, which is 2^-12 relative.
Errors have both signs, so the output differs by less than about 2^-11 in relative RMS. `lse` differs by the error of
one score, which is a few thousandths with these inputs. SAS weights are relative to the maximum of a block, and those
of the oracle to the maximum of the row: an error of 1.02e-4 each, with either sign. The tolerance has room for it.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from attention_launch import BY_EDGE, EDGES, EPOCH, HAS_CUDA, S
from comparison import close
from flashq_launch import TOLERANCE, draw
from paired_ranks import TIMEOUT_NS, pairs
from tiers import covering, fast

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.attention.decode_quantised.quantised_decode import (
    quantised_decode_attention,
    quantised_spec_parts,
)
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import decode_attention_ref, speculative_decode_attention_ref
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.formats import FORMATS
from alspec.kernels.speculation.handover import pair_spec_output, receive_handover
from alspec.sas import Softmax, cutoff

CODECS = ("turbo4", "turbo2", "turbo-mixed")
MIXED = tuple(name for name in FORMATS if name != "flashq")
SPLITS = [(0, 1), (S, 1), (S, 2)]  # chunk_size, parts


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernel runs in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


by_softmax = pytest.mark.parametrize("softmax", ["exact", "sas"])


@pytest.mark.parametrize(("length", "chunk_size"), BY_EDGE)
def test_lengths_around_blocks_and_chunks_match_the_oracle(device: torch.device, length: int, chunk_size: int) -> None:
    launch = draw((length,), 4, 2, 64, device, 5, chunk_size)
    launch.run()
    launch.compare()


# head_dim, ratio, num_warps; the fast tier has one codec for each of them, and each codec with both head_dims.
HEADS = [(64, 1, 1), (64, 4, 2), (64, 5, 1), (64, 7, 4), (128, 1, 4), (128, 4, 1), (128, 7, 2), (128, 8, 4)]
KEPT_HEADS = [(CODECS[index % 3], heads) for index, heads in enumerate(HEADS)]


@pytest.mark.parametrize(("codec", "heads"), fast(list(itertools.product(CODECS, HEADS)), KEPT_HEADS), ids=str)
def test_every_head_shape_matches_the_oracle(device: torch.device, codec: str, heads: tuple[int, int, int]) -> None:
    head_dim, ratio, num_warps = heads
    launch = draw((64 * 5 + 37,), ratio, 2, head_dim, device, 3, 0, codec, num_warps)
    launch.run()
    launch.compare()


MIXED_SHAPES = [(64, 1, 1), (64, 7, 2), (128, 4, 4), (128, 8, 1)]  # head_dim, ratio, num_warps
HOWS = [(0, "exact"), (S, "exact"), (S, "sas")]
# Every second pair of a shape and a way, over one codec after another; the last shape, which takes longest, with none.
KEPT_MIXED = [(MIXED[index % len(MIXED)], *each) for index, each in enumerate(itertools.product(MIXED_SHAPES, HOWS))]
KEPT_MIXED = KEPT_MIXED[:-2:2]


@pytest.mark.parametrize(
    ("codec", "heads", "how"), fast(list(itertools.product(MIXED, MIXED_SHAPES, HOWS)), KEPT_MIXED), ids=str
)
def test_every_format_matches_the_oracle(
    device: torch.device, codec: str, heads: tuple[int, int, int], how: tuple[int, Softmax]
) -> None:
    (head_dim, ratio, num_warps), (chunk_size, softmax) = heads, how
    launch = draw((64 * 5 + 37, 700), ratio, 2, head_dim, device, 5, chunk_size, codec, num_warps)
    launch.softmax = softmax
    launch.run()
    launch.compare()


KINDS = ["constant", "zero", "widest", "highest", "high"]
KEPT_KINDS = [(codec, KINDS[(index + step) % 5]) for index, codec in enumerate(MIXED) for step in (0, 2)]


@pytest.mark.parametrize(("codec", "kind"), fast(list(itertools.product(MIXED, KINDS)), KEPT_KINDS))
def test_extreme_codes_of_every_format(device: torch.device, codec: str, kind: str) -> None:
    launch = draw((330,), 4, 1, 64, device, 2, 0, codec, kind=kind)
    launch.run()
    launch.compare()


RAGGED = [(65, 450, 319, 128, 1), (320, 321, 640)]
GRIDS = [(1, 1), (7, 2), (30, 1), (30, 4)]  # num_programs, num_warps
CHUNKS = [0, S, 256]
KEPT_RAGGED = [
    (lengths, grid, CHUNKS[(i + j) % len(CHUNKS)]) for i, lengths in enumerate(RAGGED) for j, grid in enumerate(GRIDS)
]


@pytest.mark.parametrize(
    ("lengths", "grid", "chunk_size"), fast(list(itertools.product(RAGGED, GRIDS, CHUNKS)), KEPT_RAGGED), ids=str
)
def test_ragged_batches_match_the_oracle_on_any_grid(
    device: torch.device, lengths: tuple[int, ...], grid: tuple[int, int], chunk_size: int
) -> None:
    num_programs, num_warps = grid
    launch = draw(lengths, 2, 2, 64, device, num_programs, chunk_size, num_warps=num_warps)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(("batch_size", "num_programs", "chunk_size"), [(17, 20, S), (32, 7, 0)])
def test_large_batches_of_short_requests(
    device: torch.device, batch_size: int, num_programs: int, chunk_size: int
) -> None:
    """Most requests have only a tail."""
    lengths = (*((1, 64, 30, 65) * 8)[: batch_size - 1], 2 * S + 65)
    launch = draw(lengths, 1, 1, 64, device, num_programs, chunk_size)
    launch.run()
    launch.compare()


PART_LENGTHS = [(1, S), (64, S), (65, 256), (129, S), (2 * S + 65, S), (700, 256), (1500, S)]  # length, chunk_size
PART_GRIDS = [(1, 1), (5, 4), (24, 2), (60, 1)]  # num_programs, num_warps
KEPT_PARTS = [
    (lengths, PART_GRIDS[grid]) for i, lengths in enumerate(PART_LENGTHS) for grid in (i % 2, 2 + (i + 1) // 2 % 2)
]


@pytest.mark.parametrize(
    ("lengths", "grid"), fast(list(itertools.product(PART_LENGTHS, PART_GRIDS)), KEPT_PARTS), ids=str
)
def test_a_spec_output_in_two_parts(device: torch.device, lengths: tuple[int, int], grid: tuple[int, int]) -> None:
    """If runs are short, the parts are the tail and the blocks, of which there may be none. Else one part has all."""
    (length, chunk_size), (num_programs, num_warps) = lengths, grid
    launch = draw((length,), 3, 2, 64, device, num_programs, chunk_size, num_warps=num_warps, parts=2)
    launch.run()
    launch.compare()
    assert not launch.spec_lse.isnan().any(), "a part did not arrive"


@pytest.mark.parametrize("num_programs", [2, 60])
@pytest.mark.parametrize("length", [40, 700])
def test_a_spec_output_in_two_parts_arrives_as_one(device: torch.device, length: int, num_programs: int) -> None:
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
    close(attn_out, launch.spec_out.cpu(), TOLERANCE)


@pytest.mark.parametrize(("num_programs", "parts"), fast([(1, 1), (9, 1), (10, 2), (60, 2)], keep=[(9, 1), (10, 2)]))
def test_a_spec_output_has_one_part_if_runs_are_long(device: torch.device, num_programs: int, parts: int) -> None:
    """28 tiles give runs of four on 9 programs. 10 programs have runs of three, and both parts begin there."""
    launch = draw((700,), 4, 2, 64, device, num_programs, S, parts=2)
    launch.run()
    launch.compare()
    assert [bool(part.isfinite().all()) for part in launch.spec_lse] == [True, parts == 2]


@pytest.mark.parametrize("num_programs", fast([1, 7, 40], keep=[7]))
def test_two_launches_give_the_result_of_one(device: torch.device, num_programs: int) -> None:
    launch = draw((65, 700, 319, 1), 2, 2, 64, device, num_programs, S)
    launch.run()
    assert launch.speculation is not None
    one = [output.clone() for output in (launch.out, launch.lse, launch.spec_out, launch.speculation.sums)]
    # A~ is a plain tensor, as a pair over collectives has it.
    launch.speculation = replace(launch.speculation, spec_out=torch.empty_like(launch.out), epoch=None)
    launch.run("predictor", "rest")
    launch.compare()
    for found, expected in zip(launch.outputs(), one, strict=True):
        close(found, expected.cpu().double(), TOLERANCE)


@pytest.mark.parametrize(("num_programs", "chunk_size"), fast([(47, 0), (47, S), (120, 0), (120, S)], keep=[(120, S)]))
def test_many_partials_of_one_warp(device: torch.device, num_programs: int, chunk_size: int) -> None:
    launch = draw((64 * 45 + 9,), 3, 1, 64, device, num_programs, chunk_size, "turbo4")
    launch.run()
    launch.compare()


MANY = [(4, 20), (4, 40), (4, 130), (4, 300), (7, 130), (1, 300)]  # ratio, num_programs
KEPT_MANY = [(work, (0, S)[index % 2]) for index, work in enumerate(MANY)]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("work", "chunk_size"), fast(list(itertools.product(MANY, [0, S])), KEPT_MANY), ids=str)
def test_many_partials_of_several_warps(work: tuple[int, int], chunk_size: int) -> None:
    """One or two rounds load them."""
    ratio, num_programs = work
    launch = draw((64 * 4 * 300 + 9,), ratio, 1, 128, torch.device("cuda"), num_programs, chunk_size, "turbo4", 4)
    launch.run()
    launch.compare()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("dtype", "ratio", "head_dim", "num_warps"),
    covering([torch.bfloat16, torch.float16], range(1, 9), [64, 128], [1, 2, 4]),
    ids=str,
)
def test_queries_of_16_bits(dtype: torch.dtype, ratio: int, head_dim: int, num_warps: int) -> None:
    """Each work item loads q into shared memory. A program has several work items, some with only a tail."""
    device = torch.device("cuda")
    launch = draw((65, 700, 40, 319), ratio, 2, head_dim, device, 3, S, num_warps=num_warps, dtype=dtype)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(
    ("kind", "head_dim", "codec"), covering(["constant", "zero", "widest"], [64, 128], ["turbo4", "turbo2"])
)
def test_blocks_at_the_ends_of_the_range(device: torch.device, kind: str, head_dim: int, codec: str) -> None:
    launch = draw((64 * 4 + 5,), 4, 1, head_dim, device, 2, 0, codec, 2, kind)
    launch.run()
    launch.compare()


@pytest.mark.parametrize(
    ("kind", "head_dim", "codec"), covering(["widest", "highest", "high"], [64, 128], ["turbo4", "turbo2"])
)
def test_sums_at_the_ends_of_the_range(device: torch.device, kind: str, head_dim: int, codec: str) -> None:
    """All channels of q have the largest magnitude: with sign +, with sign -, with both signs; or q is 0."""
    launch = draw((64 * 2 + 5,), 4, 1, head_dim, device, 1, 0, codec, 1, kind)
    launch.q[:, 0], launch.q[:, 1], launch.q[:, 3] = 1, -1, 0
    launch.q[:, 2] = launch.q[:, 2].sign()
    launch.run()
    launch.compare()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 3.0])
@pytest.mark.parametrize("q_scale", [1e-6, 1.0, 1e4])
def test_extreme_scales_match_the_oracle(device: torch.device, q_scale: float, scale: float) -> None:
    launch = draw((64 * 3 + 20,), 2, 1, 64, device, 2, 0, "turbo4", scale=scale)
    launch.q *= q_scale
    # Keep scores close: no model has scores whose rounding alone decides between tokens.
    launch.layer.scales[..., 0] /= max(1.0, q_scale * scale / 0.05)
    launch.layer.tail_scale[..., 0] /= max(1.0, q_scale * scale / 0.05)
    launch.k /= max(1.0, q_scale * scale / 0.05)
    launch.run()
    launch.compare()


def test_bf16_queries_lose_nothing(device: torch.device) -> None:
    """With 4-bit codes, 16 bits of q s_int lose nothing that matters."""
    launch = draw((64 * 4 + 30,), 4, 2, 128, device, 3, 0, "turbo4", dtype=torch.bfloat16)
    launch.run()
    _, lse = decode_attention_ref(launch.q.cpu(), launch.k, launch.v, launch.seq_lens.cpu(), 128**-0.5)
    launch.compare()
    assert float((launch.lse.cpu() - lse).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("seed", "softmax"),
    fast(list(itertools.product(range(4), ["exact", "sas"])), keep=[(1, "exact"), (2, "sas"), (3, "exact")]),
)
def test_random_work_matches_the_oracle(device: torch.device, seed: int, softmax: Softmax) -> None:
    rng = random.Random(seed)
    lengths = tuple(rng.choice(EDGES) for _ in range(rng.choice([1, 2, 3, 5])))
    launch = draw(
        lengths, rng.choice([1, 3, 8]), rng.choice([1, 3]), rng.choice([64, 128]), device, rng.choice([1, 3, 17, 64]),
        rng.choice([0, S]), rng.choice(CODECS), rng.choice([1, 2, 4]),
    )  # fmt: skip
    launch.softmax = softmax
    launch.run()
    launch.compare()


SAS_HEADS = [("turbo4", 64, 1), ("turbo2", 128, 1), ("turbo4", 64, 2)]  # codec, head_dim, num_warps
KEPT_SAS = [(SAS_HEADS[0], S), (SAS_HEADS[1], 0), (SAS_HEADS[2], S)]


@pytest.mark.parametrize(("heads", "chunk_size"), fast(list(itertools.product(SAS_HEADS, [0, S])), KEPT_SAS), ids=str)
def test_sas_weights_match_the_oracle(device: torch.device, heads: tuple[str, int, int], chunk_size: int) -> None:
    codec, head_dim, num_warps = heads
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
def test_each_request_has_its_own_sas_cutoff(device: torch.device, beyond: float, chunk_size: int) -> None:
    """The score of the newest token exceeds all others by the cutoff, so their mass is `DROPPED_MASS`, or 0."""
    lengths = (322, 642)  # two tokens in the tail
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
    predicted = launch.out if launch.speculation is None else launch.spec_out
    if beyond > 0:
        assert not predicted.any()
        # A part without the newest token keeps its tokens, so less is dropped.
        assert launch.out.abs().amax() <= 1.02e-3 * launch.v.nan_to_num().abs().amax()
    else:
        # Here P in the tail is a denormal of fp16, which has five or six bits.
        close(launch.out, expected, 2**-6)
        if launch.speculation is not None:
            args = (launch.q.cpu(), launch.k, launch.v, launch.seq_lens.cpu(), S, 64**-0.5, "sas")
            close(predicted, speculative_decode_attention_ref(*args)[0], 2**-6)


@pytest.mark.parametrize(
    ("head_dim", "ratio", "num_warps"),
    fast([(64, 5, 1), (64, 8, 1), (128, 4, 2), (128, 8, 4)], keep=[(64, 5, 1), (128, 8, 4)]),
)
def test_query_heads_of_different_magnitudes(device: torch.device, head_dim: int, ratio: int, num_warps: int) -> None:
    """Each query head has its own power of two."""
    launch = draw((65, 200), ratio, 2, head_dim, device, 5, num_warps=num_warps)
    launch.q *= 2.0 ** (torch.arange(2 * ratio, device=device) % 7 - 3)[None, :, None]
    launch.run()
    launch.compare()


@by_softmax
def test_nan_in_a_query_head_reaches_its_output_only(device: torch.device, softmax: Softmax) -> None:
    launch = draw((200,), 4, 1, 64, device, 2)
    launch.softmax = softmax
    launch.q[0, 1, 5] = torch.nan
    launch.run()
    assert launch.out[0, [0, 2, 3]].isfinite().all()
    assert not launch.out[0, 1].isfinite().any()


def test_the_spec_output_is_exact_if_sink_and_window_cover_all_tokens(device: torch.device) -> None:
    launch = draw((2 * S + 63,), 4, 2, 64, device, 20, S)
    launch.run()
    assert launch.speculation is not None
    assert torch.equal(launch.spec_out, launch.out)
    assert not launch.speculation.sums[..., 0].any()


def test_a_closed_gate_writes_nothing(device: torch.device) -> None:
    launch = draw((300,), 4, 2, 64, device, 5, S)
    gate = torch.zeros(1, dtype=torch.int32, device=device)
    launch.run(gate=gate)
    assert launch.speculation is not None
    assert all(bool(output.isnan().all()) for output in launch.outputs() if output.is_floating_point())
    assert not launch.speculation.spec_out.any()
    launch.run(gate=gate + 1)
    launch.compare()


def test_every_launch_gives_the_same_bits(device: torch.device) -> None:
    lengths = (900, 400) if device.type == "cuda" else (450, 300)
    launch = draw(lengths, 4, 2, 64, device, 30, S)
    launch.run()
    first = [output.clone() for output in launch.outputs()]
    for _ in range(200 if device.type == "cuda" else 1):
        launch.run()
        assert all(torch.equal(a, b) for a, b in zip(launch.outputs(), first, strict=True))


def test_wrong_arguments_are_refused_before_a_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch would write beyond its tensors."""
    monkeypatch.setattr("alspec.kernels.attention.decode_quantised.quantised_decode.jit_launch", None)
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
            quantised_decode_attention(q.contiguous(), layer, *args)
    with pytest.raises(ValueError, match="contiguous"):
        quantised_decode_attention(launch.q.repeat_interleave(2, -1)[..., ::2], launch.layer, *args)
    odd = torch.empty(launch.q.numel() + 1, dtype=launch.q.dtype, device=device)[1:].view_as(launch.q)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        quantised_decode_attention(odd, launch.layer, *args)
    words = torch.empty(launch.layer.words.numel() + 1, dtype=torch.int32, device=device)[1:]
    with pytest.raises(ValueError, match="words: expected to begin at a multiple of 16 bytes, found 4"):
        quantised_decode_attention(launch.q, replace(launch.layer, words=words), *args)
    with pytest.raises(ValueError, match="chunk_size"):
        quantised_decode_attention(launch.q, launch.layer, *args, SpecOutput(96, launch.out, launch.lse))
    with pytest.raises(ValueError, match="phase"):
        quantised_decode_attention(launch.q, launch.layer, *args, phase="rest")
    with pytest.raises(ValueError, match="seq_lens"):
        quantised_decode_attention(launch.q, launch.layer, launch.seq_lens.long(), *args[1:])
    sums = torch.empty(1, num_sums(1, 4, 64), 2, device=device)
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
            quantised_decode_attention(launch.q, launch.layer, *args, in_parts)
    with pytest.raises(ValueError, match="spec_lse"):
        quantised_decode_attention(launch.q, launch.layer, *args, good, "predictor")


def test_parts_depend_on_batch_and_ratio() -> None:
    assert [quantised_spec_parts(batch, 4, torch.device("cuda")) for batch in (1, 2)] == [2, 1]
    assert [quantised_spec_parts(1, ratio, torch.device("cuda")) for ratio in (1, 5, 8)] == [2, 1, 1]
    assert quantised_spec_parts(1, 4, torch.device("cpu")) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("softmax", "split", "codec", "num_warps"), covering(["exact", "sas"], SPLITS, CODECS, [1, 4]), ids=str
)
def test_one_captured_graph_serves_every_length(
    softmax: Softmax, split: tuple[int, int], codec: str, num_warps: int
) -> None:
    chunk_size, parts = split
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
        # A shorter context has fewer records. Its newest tokens are those of the tail.
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
@pytest.mark.parametrize(
    ("split", "codec"),
    fast(list(itertools.product(SPLITS, CODECS)), keep=[(SPLITS[i], CODECS[i]) for i in range(3)]),
    ids=str,
)
def test_thousands_of_replays_give_the_same_bits(split: tuple[int, int], codec: str) -> None:
    """An early copy or a late read shows in a few launches of thousands."""
    chunk_size, parts = split
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
            for again, before in zip(launch.outputs(), first, strict=True):
                differ += (again != before).any()
        assert not first[0].isnan().any()
        assert int(differ) == 0, f"{int(differ)} outputs of 2000 replays differ at {length} tokens"
