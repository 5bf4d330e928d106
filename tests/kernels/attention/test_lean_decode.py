"""Lean decode attention, plain and speculative, against the fp64 oracles: interpreted on CPU, compiled on a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
import triton
import triton.language as tl
from attention_launch import EDGES, EPOCH, HAS_CUDA, AttentionLaunch, S
from torch import Tensor

from alspec.kernels.attention.decode.combine import combine_sizes, num_sums
from alspec.kernels.attention.decode.lean_decode import (
    LONG_RUN,
    LeanWorkspace,
    Phase,
    SpecOutput,
    _settings,
    _uses_tma,
    lean_decode_attention,
    spec_parts,
)
from alspec.kernels.attention.decode.tile_schedule import MANY_TILES, build_schedule, head_start
from alspec.kernels.comm.ll_packets import unpack_packets

Check = Callable[[Tensor, Tensor, torch.dtype], None]

RAGGED = [(65, 700, 319, 330, 128, 1), (700, 330), (1, 1, 1, 513), (320, 321, 1000)]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: in the interpreter, or compiled."""
    return torch.device(request.param)


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="fp32"),
        # Of one request, by copies on Hopper. The interpreter has no product of bf16.
        pytest.param(
            torch.bfloat16, id="bf16", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")]
        ),
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of q and the cache."""
    assert isinstance(request.param, torch.dtype)
    return request.param


@dataclass(kw_only=True)
class Launch(AttentionLaunch):
    """Over a random cache of floating-point numbers."""

    in_two: bool = False

    @classmethod
    def draw(
        cls,
        lengths: tuple[int, ...],
        ratio: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int,
        chunk_size: int,
        dtype: torch.dtype = torch.float32,
        parts: int = 1,
    ) -> Launch:
        batch, capacity = len(lengths), max(lengths) + 70
        generator = torch.Generator().manual_seed(sum(lengths) + ratio * head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        q, k = normal(batch, ratio * num_kv_heads, head_dim), normal(batch, num_kv_heads, capacity, head_dim)
        v = normal(*k.shape)
        for request, length in enumerate(lengths):
            k[request, :, length:] = math.nan
            v[request, :, length:] = math.nan
        launch = cls(
            q=q,
            k=k,
            v=v,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            workspace=LeanWorkspace.allocate(batch, q.shape[1], num_kv_heads, head_dim, device, num_programs),
            out=torch.empty_like(q),
            lse=torch.empty(q.shape[:2], device=device),
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

    def run(self) -> None:
        self.clear()
        for phase in ("predictor", "rest") if self.in_two else ("all",):
            lean_decode_attention(
                self.q, self.k, self.v, self.seq_lens, self.sm_scale, self.workspace, self.out, self.lse,
                self.speculation, phase,
            )  # fmt: skip

    def compare(self, check: Check) -> None:
        self.compare_each(lambda _, found, expected: check(found, expected, self.q.dtype))


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("length", EDGES)
def test_lengths_around_tiles_and_chunks(
    device: torch.device, dtype: torch.dtype, check: Check, length: int, chunk_size: int
) -> None:
    launch = Launch.draw((length,), 4, 2, 64, device, 40, chunk_size, dtype)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("parts", [0, 1, 3], ids=["plain", "guess", "in parts"])
def test_infinite_values_are_no_more_than_that(device: torch.device, parts: int) -> None:
    """Nor do they reach other channels and heads; the guess has one as well."""
    launch = Launch.draw((900,), 4, 2, 64, device, 20, S if parts else 0, parts=max(1, parts))
    launch.v[0, 1, 5, 3] = math.inf
    launch.run()
    assert launch.out[0, 4:, 3].isposinf().all()
    assert int(launch.out.isfinite().sum()) == launch.out.numel() - 4


@pytest.mark.parametrize("chunk_size", [0, S, 256], ids=["plain", "S128", "S256"])
@pytest.mark.parametrize("num_programs", [1, 7, 30, 132])
@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: "-".join(map(str, lengths)))
def test_ragged_batches_on_any_grid(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int, chunk_size: int
) -> None:
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, chunk_size)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(("batch_size", "num_programs"), [(17, 40), (32, 7), (33, 132)])
def test_batches_of_a_warp_and_one_more(
    device: torch.device, check: Check, batch_size: int, num_programs: int, chunk_size: int
) -> None:
    """Sums over requests are padded to 32 and to 64; fewer guesses than programs, and more."""
    rng = random.Random(batch_size)
    lengths = tuple(rng.choice((1, 63, 64, 65, 129, 2 * S + 1, 2 * S + 65)) for _ in range(batch_size))
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, chunk_size)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize(("lengths", "num_programs"), [((1500, 70, 1100), 10), ((640, 640, 640, 512), 9)])
def test_programs_with_a_guess_have_several_tiles_too(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int
) -> None:
    """Of 34 tiles 3 each of 6 programs, of 22 tiles 2 each of 8: 3, their share, would be more than there are."""
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, S)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 3, 4, 8, 16])
def test_head_shapes(
    device: torch.device, dtype: torch.dtype, check: Check, ratio: int, head_dim: int, chunk_size: int
) -> None:
    launch = Launch.draw((400,), ratio, 1, head_dim, device, 6, chunk_size, dtype)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("ratio", [3, 16])
def test_head_shapes_of_fp16(device: torch.device, check: Check, ratio: int, head_dim: int, chunk_size: int) -> None:
    launch = Launch.draw((400,), ratio, 1, head_dim, device, 6, chunk_size, torch.float16)
    launch.run()
    launch.compare(lambda found, expected, _: check(found, expected, torch.bfloat16))


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    ("lengths", "num_programs"),
    [((2048,), 1), ((2049,), 1), ((6400,), 3), ((3000, 70, 1500, 1), 2), ((3000, 70, 1500, 1), 5)],
    ids=["one-short", "one-long", "three-long", "ragged-long", "ragged-short"],
)
def test_narrow_heads_have_long_tiles_where_there_are_enough(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int, chunk_size: int
) -> None:
    assert LONG_RUN[128] * 128 == 2048, "the lengths here are not on both sides of so many tokens for each program"
    num_kv_heads = 1 if len(lengths) == 1 else 2
    lengths = (lengths[0] + 2 * chunk_size, *lengths[1:])  # sink and window are not counted
    # 16 bits: a tile of 128 tokens in fp32 has its full size. fp16, for the interpreter has no product of bf16.
    launch = Launch.draw(lengths, 4, num_kv_heads, 64, device, num_programs, chunk_size, torch.float16)
    launch.run()
    launch.compare(lambda found, expected, _: check(found, expected, torch.bfloat16))


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    ("lengths", "num_programs"),
    [
        ((63,), 1),
        ((128,), 1),
        ((192,), 1),
        ((193,), 1),
        ((960,), 5),
        ((961,), 5),
        ((1500, 70, 300, 1), 30),
        ((520,), 8),
    ],
    ids=["one-tile", "two-tiles", "three-tiles", "long", "five-short", "five-long", "ragged", "two-of-eight"],
)
def test_wide_heads_have_short_tiles_where_runs_are_short(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int, chunk_size: int
) -> None:
    assert LONG_RUN[64] * 64 == 192, "the lengths here are not on both sides of so many tokens for each program"
    lengths = (lengths[0] + 2 * chunk_size, *lengths[1:])
    launch = Launch.draw(lengths, 4, 1, 128, device, num_programs, chunk_size, torch.float16)
    launch.run()
    launch.compare(lambda found, expected, _: check(found, expected, torch.bfloat16))


@pytest.mark.parametrize("num_programs", [1, 7, 132])
@pytest.mark.parametrize("lengths", [(65, 700, 319, 330, 128, 1), (321,)], ids=["ragged", "one"])
def test_two_launches_give_what_one_gives(
    device: torch.device, dtype: torch.dtype, check: Check, lengths: tuple[int, ...], num_programs: int
) -> None:
    launch = Launch.draw(lengths, 2, 2, 64, device, num_programs, S, dtype)
    launch.run()
    one = launch.out.clone()
    launch.in_two = True
    # As a plain tensor, which is what two launches are for.
    assert launch.speculation is not None
    launch.speculation = replace(launch.speculation, spec_out=torch.empty_like(launch.q), epoch=None)
    launch.run()
    launch.compare(check)
    check(launch.out, one, torch.float32)


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize(
    ("lengths", "num_programs"),
    [((17000,), 300), ((6000, 70), 60), ((70, 6000, 1), 60)],
    ids=["one", "two", "three"],
)
def test_partials_are_merged_in_rounds(
    device: torch.device, dtype: torch.dtype, check: Check, lengths: tuple[int, ...], num_programs: int, chunk_size: int
) -> None:
    """One head has more than one round loads: of 300 programs, or those of a batch whose other requests are short."""
    launch = Launch.draw(lengths, 4, 1, 128, device, num_programs, chunk_size, dtype)
    launch.run()
    launch.compare(check)
    head_slots = launch.workspace.lse[: launch.workspace.num_programs, 0]
    assert head_slots.isfinite().sum() > combine_sizes(4, 128, num_programs // len(lengths))[2]


@pytest.mark.parametrize(("tiles", "programs"), [(1, 1), (40, 40), (41, 41), (42, 42), (43, 40), (80, 40), (81, 42)])
def test_equal_runs_where_the_longest_is_no_longer(
    device: torch.device, dtype: torch.dtype, check: Check, tiles: int, programs: int
) -> None:
    """Of 42 programs 40 work, a multiple of 8, where all of them would have as long a run."""
    # Heads for which tiles of 64 tokens are never longer.
    head_dim = 128 if dtype == torch.float32 else 256
    launch = Launch.draw((64 * tiles - 1,), 4, 1, head_dim, device, 42, 0, dtype)
    launch.run()
    launch.compare(check)
    assert int(launch.workspace.lse.isfinite().sum()) == 4 * programs


@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("lengths", [(300,), (300, 70, 200)], ids=["one", "three"])
def test_a_run_meets_many_outputs(
    device: torch.device, dtype: torch.dtype, check: Check, lengths: tuple[int, ...], chunk_size: int
) -> None:
    launch = Launch.draw(lengths, 1, 40, 64, device, 1, chunk_size, dtype)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("num_programs", [1, 7, 40])
@pytest.mark.parametrize(("chunk_size", "parts"), [(128, 2), (128, 3), (256, 3), (512, 5), (512, 4)])
@pytest.mark.parametrize("length", [1, 128, 300, 320, 447, 640, 1101])
def test_a_guess_in_parts(
    device: torch.device, dtype: torch.dtype, check: Check, length: int, chunk_size: int, parts: int, num_programs: int
) -> None:
    """Of 128 tokens a tile: one part to all of them, windows of whole tiles and not, few programs and many."""
    launch = Launch.draw((length,), 4, 3, 64, device, num_programs, chunk_size, dtype, parts)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("length", [480, 481, 511, 512])
def test_a_guess_in_parts_of_short_tiles(device: torch.device, check: Check, length: int) -> None:
    """Heads of 256 in fp32: tiles of 32 tokens, of which a window may have two more than its chunk."""
    launch = Launch.draw((length,), 5, 1, 256, device, 7, 128, torch.float32, 3)
    launch.run()
    launch.compare(check)


def test_what_it_refuses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a launch, which would read beyond its tensors."""
    monkeypatch.setattr("alspec.kernels.attention.decode.lean_decode.jit_launch", None)
    launch = Launch.draw((70, 90), 2, 2, 16, device, 4, 0)
    workspace = launch.workspace

    def refused(message: str, phase: Phase = "all", **other: Tensor) -> None:
        given = {"q": launch.q, "k_cache": launch.k, "v_cache": launch.v, "seq_lens": launch.seq_lens}
        given |= {"out": launch.out, "lse": launch.lse} | other
        with pytest.raises(ValueError, match=message):
            lean_decode_attention(**given, sm_scale=0.25, workspace=workspace, phase=phase)

    for name, tensor in (("q", launch.q), ("k_cache", launch.k), ("v_cache", launch.v)):
        refused("contiguous", **{name: tensor.repeat_interleave(2, -1)[..., ::2]})
    for seq_lens in (launch.seq_lens.long(), launch.seq_lens[:1]):
        refused("seq_lens", seq_lens=seq_lens)
    for phase in ("predictor", "rest"):
        refused("phase: .* needs speculation", phase)
    refused("3 heads are not a multiple of 2", q=launch.q[:, :3].contiguous())
    refused("overflow", k_cache=torch.empty(2, 2, 2**27, 16, device="meta"))
    for name, tensor in (("k_cache", launch.k), ("v_cache", launch.v)):
        refused(f"{name}: expected .*, as q has", **{name: tensor.double()})
    refused("v_cache: ", v_cache=launch.v[:, :, :-1].contiguous())
    refused("v_cache: ", v_cache=launch.v[:, :1].contiguous())
    refused("out: ", out=launch.out[:, :3].contiguous())
    refused("out: .* contiguous", out=launch.out.repeat_interleave(2, -1)[..., ::2])
    refused("lse: ", lse=launch.lse[:1])
    refused("lse: ", lse=launch.lse.double())
    workspace = LeanWorkspace.allocate(1, 4, 2, 16, device, 4)
    refused("workspace: ")


def test_what_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a predictor, nor the merge behind a rest, beside which collectives need the SMs that attention leaves."""
    started: dict[str, list[bool]] = {"all": [], "predictor": [], "rest": []}
    launch = Launch.draw((700,), 2, 1, 16, torch.device("cpu"), 3, S)

    def record(*_: object, PDL: bool, launch_pdl: bool = False, **__: object) -> None:
        assert launch_pdl == PDL
        started[phase].append(PDL)

    module = "alspec.kernels.attention.decode.lean_decode."
    monkeypatch.setattr(module + "_settings", lambda *_: (64, 3, 3, True))
    monkeypatch.setattr(module + "jit_launch", lambda *_: record)
    monkeypatch.setattr(module + "set_l1_carveout", lambda _: None)
    for phase in get_args(Phase):
        lean_decode_attention(
            launch.q, launch.k, launch.v, launch.seq_lens, launch.sm_scale, launch.workspace, launch.out, launch.lse,
            launch.speculation, phase,
        )  # fmt: skip
    assert started == {"all": [True, True], "predictor": [False], "rest": [True, False]}


REFUSED = (((300,), 2), ((300, 70), 2), ((300,), 6))  # the first is not, as it is


def test_parts_that_do_not_fit_are_refused(device: torch.device) -> None:
    one, two, many = (Launch.draw(lengths, 2, 2, 16, device, 9, 128, parts=p) for lengths, p in REFUSED)
    for launch in (two, many):
        with pytest.raises(ValueError, match="spec_lse"):
            launch.run()
    assert one.speculation is not None
    good = one.speculation
    for wrong, name in (
        (replace(good, sums=good.sums[:, :-1]), "sums"),
        (replace(good, epoch=None), "spec_lse"),
        (replace(good, spec_out=good.spec_out[:1]), "spec_out"),
    ):
        one.speculation = wrong
        with pytest.raises(ValueError, match=name):
            one.run()
    one.speculation, one.in_two = good, True
    with pytest.raises(ValueError, match="spec_lse"):
        one.run()


@pytest.mark.parametrize(("length", "expected"), [(100, 1), (384, 2), (385, 3)])
def test_parts_without_tokens_say_so(device: torch.device, dtype: torch.dtype, length: int, expected: int) -> None:
    launch = Launch.draw((length,), 2, 2, 64, device, 9, 128, dtype, 3)
    launch.run()
    assert launch.speculation is not None
    assert launch.guess_lse[:expected].isfinite().all()
    assert (launch.guess_lse[expected:] == -math.inf).all()
    assert not unpack_packets(launch.speculation.spec_out, EPOCH)[expected:].any()


@pytest.mark.parametrize("seed", range(6))
def test_random_work(device: torch.device, check: Check, seed: int) -> None:
    rng = random.Random(seed)
    lengths = tuple(rng.choice(EDGES) for _ in range(rng.choice([1, 2, 3, 5, 9])))
    launch = Launch.draw(
        lengths, rng.choice([1, 3, 4]), rng.choice([1, 3]), 16, device, rng.choice([1, 3, 17, 64]), rng.choice([0, S])
    )
    launch.run()
    launch.compare(check)


def test_where_sink_and_window_meet_the_guess_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    launch = Launch.draw((2 * S + 63,), 4, 2, 64, device, 20, S, dtype)
    launch.run()
    assert launch.speculation is not None
    assert torch.equal(launch.guess.to(dtype), launch.out)
    assert not launch.speculation.sums[..., 0].any()


@pytest.mark.parametrize("lengths", [(900, 400), (900,)], ids=["ragged", "one"])
def test_the_same_bits_every_time(device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    launch = Launch.draw(lengths, 4, 2, 64, device, 30, S, dtype)
    launch.run()
    assert launch.speculation is not None
    first = [
        launch.out.clone(),
        launch.lse.clone(),
        launch.speculation.spec_out.clone(),
        launch.speculation.sums.clone(),
    ]
    for _ in range(1000 if device.type == "cuda" else 2):
        launch.run()
        again = [launch.out, launch.lse, launch.speculation.spec_out, launch.speculation.sums]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
def test_one_captured_graph_serves_every_length(check: Check, chunk_size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    launch = Launch.draw((3000,), 4, 8, 128, device, 264, chunk_size, torch.float32)
    launch.q, launch.k, launch.v = (tensor.nan_to_num().to(dtype) for tensor in (launch.q, launch.k, launch.v))
    launch.out = launch.out.to(dtype)
    if launch.speculation is not None:
        # As a plain tensor here, as a pair over collectives has it.
        launch.speculation = replace(launch.speculation, spec_out=torch.empty_like(launch.out), epoch=None)
    launch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    tolerance_dtype = torch.bfloat16
    for length in [*range(1, 70), *range(120, 136), *range(2 * S - 2, 2 * S + 67), 511, 1000, 1024, 2047, 2999, 3000]:
        launch.seq_lens.fill_(length)
        graph.replay()
        torch.cuda.synchronize()
        launch.compare(lambda found, expected, _: check(found, expected, tolerance_dtype))


@triton.jit
def _plan_kernel(
    facts_ptr,  # [N, 6] int32: is_long, total_rest, parts, lead_run, followers, cycles of a head start
    chunk_size,
    HKV: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The schedule of one request with as many tokens as there are programs up to this one; grid [N]."""
    at = facts_ptr + tl.program_id(0) * 6
    seq_lens = tl.zeros([1], tl.int32) + (tl.program_id(0) + 1)
    is_long, _, total_rest, parts, _, lead_run, followers, _, _ = build_schedule(
        seq_lens, 1, chunk_size, HKV, PROGRAMS, 1, BLOCK_N, LONG, SPEC, SPEC_PARTS, 0
    )
    tl.store(at, tl.where(is_long, 1, 0))
    tl.store(at + 1, total_rest)
    tl.store(at + 2, parts)
    tl.store(at + 3, lead_run)
    tl.store(at + 4, followers)
    tl.store(at + 5, head_start(total_rest, is_long, BLOCK_N, HEAD_DIM, PROGRAMS))


def lengths_at_switches(launch: Launch, capacity: int) -> list[int]:
    """Lengths up to `capacity` before and after each kind of switch that the schedule of a launch makes."""
    device, programs = launch.q.device, launch.workspace.num_programs
    num_kv_heads, head_dim = launch.k.shape[1], launch.k.shape[3]
    spec, row_bytes = launch.speculation, head_dim * launch.q.itemsize
    copies = _uses_tma(device, 1, launch.q.shape[1] // num_kv_heads, head_dim, launch.q.dtype)
    block_n, long_run, *_ = _settings(device, row_bytes, copies)
    facts = torch.empty(capacity, 6, dtype=torch.int32, device=device)
    _plan_kernel[(capacity,)](
        facts, spec.chunk_size if spec else 0, HKV=num_kv_heads, PROGRAMS=programs, BLOCK_N=block_n, LONG=long_run,
        SPEC=spec is not None, SPEC_PARTS=spec.parts if spec else 1, HEAD_DIM=head_dim,
    )  # fmt: skip
    is_long, total_rest, parts, lead_run, followers, cycles = facts.cpu().unbind(1)
    even = programs // 8 * 8
    kinds = torch.stack(
        [
            is_long,
            cycles,  # of a guess's head start
            parts,
            lead_run.clamp(max=2),
            (followers == even).int() + 2 * (followers == programs).int(),
            total_rest > even * (MANY_TILES.value - 1),
        ],
        dim=1,
    )
    assert not long_run or set(is_long.tolist()) == {0, 1}, "no tiles are long, or all"
    assert len(set(kinds[:, 1].tolist())) == 2, "no head start"
    switches: dict[str, int] = {}
    for before in (kinds[1:] != kinds[:-1]).any(1).nonzero().flatten().tolist():
        switches.setdefault(str(kinds[before : before + 2].tolist()), before + 1)
    return sorted({length for last in switches.values() for length in (last, last + 1)})


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("chunk_size", [0, S], ids=["plain", "speculative"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(8, 2), (32, 8)], ids=["8/2", "32/8"])
def test_one_captured_graph_serves_every_schedule(
    check: Check, num_qo_heads: int, num_kv_heads: int, head_dim: int, chunk_size: int
) -> None:
    """The grid that decoding has, `A~` as words in as many parts as a pair sends, and NaN behind each length."""
    device, dtype, capacity = torch.device("cuda"), torch.bfloat16, 140_000
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    parts = spec_parts(chunk_size, 1, num_qo_heads, num_kv_heads, head_dim, dtype, device) if chunk_size else 1
    launch = Launch.draw(
        (64,), num_qo_heads // num_kv_heads, num_kv_heads, head_dim, device, programs, chunk_size, dtype, parts
    )
    generator = torch.Generator(device).manual_seed(num_qo_heads + head_dim)
    launch.k, launch.v = (
        torch.randn(1, num_kv_heads, capacity, head_dim, generator=generator, dtype=dtype, device=device)
        for _ in range(2)
    )
    launch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    others = (1, 63, 64, 65, 2 * S - 1, 2 * S, 2 * S + 1, 2 * S + 65, 10_000, 131_072, capacity)
    # From the longest on, so that what lies behind a length can become NaN for good.
    for length in sorted({*lengths_at_switches(launch, capacity), *others}, reverse=True):
        launch.k[:, :, length:] = math.nan
        launch.v[:, :, length:] = math.nan
        launch.seq_lens.fill_(length)
        graph.replay()
        torch.cuda.synchronize()
        launch.compare(check)
