"""Lean decode attention, plain and speculative, against the fp64 oracles: interpreted on CPU, compiled on a GPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
import triton
import triton.language as tl
from attention_launch import BY_EDGE, EDGES, EPOCH, HAS_CUDA, S
from lean_launch import Launch
from tiers import covering, fast
from torch import Tensor

from alspec.kernels.attention.decode.combine import combine_sizes
from alspec.kernels.attention.decode.lean_decode import (
    LONG_RUN,
    LeanWorkspace,
    Phase,
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
    """The kernel runs in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="fp32"),
        # Hopper copies the cache of one request by TMA. The interpreter has no product of bf16.
        pytest.param(
            torch.bfloat16, id="bf16", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a GPU")]
        ),
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of q and of the cache."""
    assert isinstance(request.param, torch.dtype)
    return request.param


def compare_fp16(launch: Launch, check: Check) -> None:
    """Compare fp16 with the tolerance of bf16."""
    launch.compare(lambda found, expected, _: check(found, expected, torch.bfloat16))


@pytest.mark.parametrize(("length", "chunk_size"), BY_EDGE)
def test_lengths_around_tiles_and_chunks_match_the_oracle(
    device: torch.device, dtype: torch.dtype, check: Check, length: int, chunk_size: int
) -> None:
    launch = Launch.draw((length,), 4, 2, 64, device, 40, chunk_size, dtype)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("parts", [0, 1, 3], ids=["plain", "speculative", "in parts"])
def test_an_infinite_value_reaches_only_its_channel_and_heads(device: torch.device, parts: int) -> None:
    """The output is infinite there, not NaN. The predictor reads the infinite value too."""
    launch = Launch.draw((900,), 4, 2, 64, device, 20, S if parts else 0, parts=max(1, parts))
    launch.v[0, 1, 5, 3] = math.inf
    launch.run()
    assert launch.out[0, 4:, 3].isposinf().all()
    assert int(launch.out.isfinite().sum()) == launch.out.numel() - 4


@pytest.mark.parametrize(
    ("lengths", "num_programs", "chunk_size"), covering(RAGGED, [1, 7, 30, 132], [0, S, 256]), ids=str
)
def test_ragged_batches_match_the_oracle_on_any_grid(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int, chunk_size: int
) -> None:
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, chunk_size)
    launch.run()
    launch.compare(check)


BATCHES = [(17, 40, 0), (17, 40, S), (32, 7, 0), (32, 7, S), (33, 132, 0), (33, 132, S)]


@pytest.mark.parametrize(
    ("batch_size", "num_programs", "chunk_size"), fast(BATCHES, keep=[BATCHES[1], BATCHES[2], BATCHES[5]])
)
def test_batches_of_a_warp_and_one_more(
    device: torch.device, check: Check, batch_size: int, num_programs: int, chunk_size: int
) -> None:
    """The schedule pads sums over requests to 32 and to 64. There are fewer spec outputs than programs, and more."""
    rng = random.Random(batch_size)
    lengths = tuple(rng.choice((1, 63, 64, 65, 129, 2 * S + 1, 2 * S + 65)) for _ in range(batch_size))
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, chunk_size)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize(("lengths", "num_programs"), [((1500, 70, 1100), 10), ((640, 640, 640, 512), 9)])
def test_programs_with_a_spec_output_have_several_tiles_too(
    device: torch.device, check: Check, lengths: tuple[int, ...], num_programs: int
) -> None:
    """6 programs take 3 of 34 tiles each; 8 programs take 2 of 22 tiles each, as 3 would be more than there are."""
    launch = Launch.draw(lengths, 2, 2, 16, device, num_programs, S)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize(
    ("ratio", "head_dim", "chunk_size"), covering([1, 3, 4, 8, 16], [64, 80, 96, 128, 256], [0, S])
)
def test_every_head_shape_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, check: Check, ratio: int, head_dim: int, chunk_size: int
) -> None:
    launch = Launch.draw((400,), ratio, 1, head_dim, device, 6, chunk_size, dtype)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize(("ratio", "head_dim", "chunk_size"), covering([3, 16], [80, 96, 256], [0, S]))
def test_head_shapes_in_fp16_match_the_oracle(
    device: torch.device, check: Check, ratio: int, head_dim: int, chunk_size: int
) -> None:
    launch = Launch.draw((400,), ratio, 1, head_dim, device, 6, chunk_size, torch.float16)
    launch.run()
    compare_fp16(launch, check)


# Lengths and programs whose tiles are short, long, long, long and short.
NARROW = [((2048,), 1), ((2049,), 1), ((6400,), 3), ((3000, 70, 1500, 1), 2), ((3000, 70, 1500, 1), 5)]
KEPT_NARROW = [(NARROW[0], S), (NARROW[1], 0), (NARROW[1], S), (NARROW[3], S), (NARROW[4], 0)]


@pytest.mark.parametrize(("work", "chunk_size"), fast(list(itertools.product(NARROW, [0, S])), KEPT_NARROW), ids=str)
def test_narrow_heads_have_long_tiles_in_long_runs(
    device: torch.device, check: Check, work: tuple[tuple[int, ...], int], chunk_size: int
) -> None:
    assert LONG_RUN[128] * 128 == 2048, "the lengths must be on both sides of so many tokens per program"
    lengths, num_programs = work
    num_kv_heads = 1 if len(lengths) == 1 else 2
    lengths = (lengths[0] + 2 * chunk_size, *lengths[1:])  # sink and window do not count
    # In fp32 these heads have short tiles of 64 tokens, and the interpreter has no product of bf16.
    launch = Launch.draw(lengths, 4, num_kv_heads, 64, device, num_programs, chunk_size, torch.float16)
    launch.run()
    compare_fp16(launch, check)


# One, two and three short tiles; long tiles; five programs with short tiles, with long tiles; a batch; two long tiles.
WIDE = [
    ((63,), 1), ((128,), 1), ((192,), 1), ((193,), 1), ((960,), 5), ((961,), 5), ((1500, 70, 300, 1), 30), ((520,), 8),
]  # fmt: skip
KEPT_WIDE = [(work, (0, S)[index % 2]) for index, work in enumerate(WIDE)] + [(WIDE[2], S), (WIDE[3], 0)]


@pytest.mark.parametrize(("work", "chunk_size"), fast(list(itertools.product(WIDE, [0, S])), KEPT_WIDE), ids=str)
def test_wide_heads_have_short_tiles_in_short_runs(
    device: torch.device, check: Check, work: tuple[tuple[int, ...], int], chunk_size: int
) -> None:
    assert LONG_RUN[64] * 64 == 192, "the lengths must be on both sides of so many tokens per program"
    lengths, num_programs = work
    lengths = (lengths[0] + 2 * chunk_size, *lengths[1:])
    launch = Launch.draw(lengths, 4, 1, 128, device, num_programs, chunk_size, torch.float16)
    launch.run()
    compare_fp16(launch, check)


TWO_LAUNCHES = list(itertools.product([RAGGED[0], (321,)], [1, 7, 132]))


@pytest.mark.parametrize(
    ("lengths", "num_programs"), fast(TWO_LAUNCHES, keep=[(RAGGED[0], 7), ((321,), 1), ((321,), 132)]), ids=str
)
def test_two_launches_give_the_result_of_one(
    device: torch.device, dtype: torch.dtype, check: Check, lengths: tuple[int, ...], num_programs: int
) -> None:
    launch = Launch.draw(lengths, 2, 2, 64, device, num_programs, S, dtype)
    launch.run()
    one = launch.out.clone()
    launch.in_two = True
    # A~ is a plain tensor, as a pair over collectives has it.
    assert launch.speculation is not None
    launch.speculation = replace(launch.speculation, spec_out=torch.empty_like(launch.q), epoch=None)
    launch.run()
    launch.compare(check)
    check(launch.out, one, torch.float32)


LONG_WORK = [((17000,), 300), ((6000, 70), 60), ((70, 6000, 1), 60)]
KEPT_LONG_WORK = [(LONG_WORK[0], S), (LONG_WORK[1], 0), (LONG_WORK[2], S)]


@pytest.mark.parametrize(
    ("work", "chunk_size"), fast(list(itertools.product(LONG_WORK, [0, S])), KEPT_LONG_WORK), ids=str
)
def test_many_partials_are_combined_in_rounds(
    device: torch.device, dtype: torch.dtype, check: Check, work: tuple[tuple[int, ...], int], chunk_size: int
) -> None:
    """One head has more partials than one round loads: of 300 programs, or because the other requests are short."""
    lengths, num_programs = work
    launch = Launch.draw(lengths, 4, 1, 128, device, num_programs, chunk_size, dtype)
    launch.run()
    launch.compare(check)
    partials = launch.workspace.lse[: launch.workspace.num_programs, 0]
    assert partials.isfinite().sum() > combine_sizes(len(lengths), 4, 128, num_programs // len(lengths))[2]


EQUAL_RUNS = [(1, 1), (40, 40), (41, 41), (42, 42), (43, 40), (80, 40), (81, 42)]


@pytest.mark.parametrize(("tiles", "programs"), fast(EQUAL_RUNS, keep=[(1, 1), (41, 41), (43, 40), (80, 40), (81, 42)]))
def test_fewer_programs_work_if_the_longest_run_stays_the_same(
    device: torch.device, dtype: torch.dtype, check: Check, tiles: int, programs: int
) -> None:
    """40 of 42 programs work, a multiple of 8, if all 42 would have a run as long."""
    # With these heads a tile has 64 tokens, and never twice as many.
    head_dim = 128 if dtype == torch.float32 else 256
    launch = Launch.draw((64 * tiles - 1,), 4, 1, head_dim, device, 42, 0, dtype)
    launch.run()
    launch.compare(check)
    assert int(launch.workspace.lse.isfinite().sum()) == 4 * programs


MANY_OUTPUTS = list(itertools.product([(300,), (300, 70, 200)], [0, S]))


@pytest.mark.parametrize(
    ("lengths", "chunk_size"), fast(MANY_OUTPUTS, keep=[((300,), S), ((300, 70, 200), 0)]), ids=str
)
def test_a_run_may_cover_many_outputs(
    device: torch.device, dtype: torch.dtype, check: Check, lengths: tuple[int, ...], chunk_size: int
) -> None:
    launch = Launch.draw(lengths, 1, 40, 64, device, 1, chunk_size, dtype)
    launch.run()
    launch.compare(check)


PART_LENGTHS, PART_PROGRAMS = [1, 128, 300, 320, 447, 640, 1101], [1, 7, 40]
SPLITS = [(128, 2), (128, 3), (256, 3), (512, 5), (512, 4)]  # chunk_size, parts
# Every length and every split on every grid, and each length with three splits.
KEPT_PARTS = [
    (length, SPLITS[(2 * i + j) % len(SPLITS)], num_programs)
    for i, length in enumerate(PART_LENGTHS)
    for j, num_programs in enumerate(PART_PROGRAMS)
]
PARTS = fast(list(itertools.product(PART_LENGTHS, SPLITS, PART_PROGRAMS)), KEPT_PARTS)


@pytest.mark.parametrize(("length", "split", "num_programs"), PARTS, ids=str)
def test_a_spec_output_in_parts(
    device: torch.device, dtype: torch.dtype, check: Check, length: int, split: tuple[int, int], num_programs: int
) -> None:
    """Tiles have 128 tokens. One part to all have tokens; windows have whole tiles or not."""
    chunk_size, parts = split
    launch = Launch.draw((length,), 4, 3, 64, device, num_programs, chunk_size, dtype, parts)
    launch.run()
    launch.compare(check)


@pytest.mark.parametrize("length", fast([480, 481, 511, 512], keep=[481, 512]))
def test_a_spec_output_in_parts_of_short_tiles(device: torch.device, check: Check, length: int) -> None:
    """With heads of 256 in fp32 a tile has 32 tokens, and a window may have two tiles more than its chunk."""
    launch = Launch.draw((length,), 5, 1, 256, device, 7, 128, torch.float32, 3)
    launch.run()
    launch.compare(check)


def test_wrong_arguments_are_refused_before_a_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch would read beyond its tensors."""
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


def test_kernels_beside_collectives_are_no_dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches after a join, and the combine of the rest: collectives need the SMs that attention leaves free."""
    is_dependent: dict[str, list[bool]] = {"all": [], "predictor": [], "rest": []}
    launch = Launch.draw((700,), 2, 1, 16, torch.device("cpu"), 3, S)

    def record(*_: object, PDL: bool, launch_pdl: bool = False, **__: object) -> None:
        assert launch_pdl == PDL
        is_dependent[phase].append(PDL)

    module = "alspec.kernels.attention.decode.lean_decode."
    monkeypatch.setattr(module + "_settings", lambda *_: (64, 3, 3, True))
    monkeypatch.setattr(module + "jit_launch", lambda *_: record)
    monkeypatch.setattr(module + "set_l1_carveout", lambda _: None)
    for after_join in (False, True):
        for phase in get_args(Phase):
            lean_decode_attention(
                launch.q, launch.k, launch.v, launch.seq_lens, launch.sm_scale, launch.workspace, launch.out,
                launch.lse, launch.speculation, phase, after_join=after_join,
            )  # fmt: skip
    expected = {"all": [True, True], "predictor": [True], "rest": [True, False]}
    after_joins = {"all": [False, False], "predictor": [False], "rest": [False, False]}
    assert is_dependent == {phase: expected[phase] + after_joins[phase] for phase in get_args(Phase)}


def test_wrong_parts_are_refused(device: torch.device) -> None:
    """A batch has one part, and no request has more than five."""
    works = (((300,), 2), ((300, 70), 2), ((300,), 6))
    one, batch, many = (Launch.draw(lengths, 2, 2, 16, device, 9, 128, parts=parts) for lengths, parts in works)
    for launch in (batch, many):
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
def test_parts_without_tokens_have_a_negative_infinite_lse(
    device: torch.device, dtype: torch.dtype, length: int, expected: int
) -> None:
    launch = Launch.draw((length,), 2, 2, 64, device, 9, 128, dtype, 3)
    launch.run()
    assert launch.speculation is not None
    assert launch.spec_lse[:expected].isfinite().all()
    assert (launch.spec_lse[expected:] == -math.inf).all()
    assert not unpack_packets(launch.speculation.spec_out, EPOCH)[expected:].any()


@pytest.mark.parametrize("seed", range(6))
def test_random_work_matches_the_oracle(device: torch.device, check: Check, seed: int) -> None:
    rng = random.Random(seed)
    lengths = tuple(rng.choice(EDGES) for _ in range(rng.choice([1, 2, 3, 5, 9])))
    launch = Launch.draw(
        lengths, rng.choice([1, 3, 4]), rng.choice([1, 3]), 16, device, rng.choice([1, 3, 17, 64]), rng.choice([0, S])
    )
    launch.run()
    launch.compare(check)


def test_the_spec_output_is_exact_if_sink_and_window_cover_all_tokens(device: torch.device, dtype: torch.dtype) -> None:
    launch = Launch.draw((2 * S + 63,), 4, 2, 64, device, 20, S, dtype)
    launch.run()
    assert launch.speculation is not None
    assert torch.equal(launch.spec_out.to(dtype), launch.out)
    assert not launch.speculation.sums[..., 0].any()


@pytest.mark.parametrize("lengths", [(900, 400), (900,)], ids=["ragged", "one"])
def test_every_launch_gives_the_same_bits(device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
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
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    fast(
        list(itertools.product([torch.bfloat16, torch.float16], [0, S])),
        keep=[(torch.bfloat16, S), (torch.float16, 0)],
    ),
    ids=str,
)
def test_one_captured_graph_serves_every_length(check: Check, chunk_size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    launch = Launch.draw((3000,), 4, 8, 128, device, 264, chunk_size, torch.float32)
    launch.q, launch.k, launch.v = (tensor.nan_to_num().to(dtype) for tensor in (launch.q, launch.k, launch.v))
    launch.out = launch.out.to(dtype)
    if launch.speculation is not None:
        # A~ is a plain tensor, as a pair over collectives has it.
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
def _schedule_facts_kernel(
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
    """Facts of the schedule of one request; program i takes a request of i + 1 tokens; grid [N]."""
    at = facts_ptr + tl.program_id(0) * 6
    seq_lens = tl.zeros([1], tl.int32) + (tl.program_id(0) + 1)
    is_long, _, total_rest, parts, schedule = build_schedule(
        seq_lens, 1, chunk_size, HKV, PROGRAMS, 1, BLOCK_N, LONG, SPEC, SPEC_PARTS, 0
    )
    tl.store(at, tl.where(is_long, 1, 0))
    tl.store(at + 1, total_rest)
    tl.store(at + 2, parts)
    tl.store(at + 3, schedule[1])  # lead_run
    tl.store(at + 4, schedule[2])  # followers
    tl.store(at + 5, head_start(total_rest, is_long, BLOCK_N, HEAD_DIM, PROGRAMS))


def lengths_at_switches(launch: Launch, capacity: int) -> list[int]:
    """Lengths up to `capacity` on both sides of each kind of change in the schedule of a launch."""
    device, programs = launch.q.device, launch.workspace.num_programs
    num_kv_heads, head_dim = launch.k.shape[1], launch.k.shape[3]
    spec, row_bytes = launch.speculation, head_dim * launch.q.itemsize
    copies = _uses_tma(device, launch.q.shape[1] // num_kv_heads, head_dim, launch.q.dtype)
    block_n, long_run, *_ = _settings(device, row_bytes, copies)
    facts = torch.empty(capacity, 6, dtype=torch.int32, device=device)
    _schedule_facts_kernel[(capacity,)](
        facts, spec.chunk_size if spec else 0, HKV=num_kv_heads, PROGRAMS=programs, BLOCK_N=block_n, LONG=long_run,
        SPEC=spec is not None, SPEC_PARTS=spec.parts if spec else 1, HEAD_DIM=head_dim,
    )  # fmt: skip
    is_long, total_rest, parts, lead_run, followers, cycles = facts.cpu().unbind(1)
    even = programs // 8 * 8
    kinds = torch.stack(
        [
            is_long,
            cycles,  # of the predictor's head start
            parts,
            lead_run.clamp(max=2),
            (followers == even).int() + 2 * (followers == programs).int(),
            total_rest > even * (MANY_TILES.value - 1),
        ],
        dim=1,
    )
    assert not long_run or set(is_long.tolist()) == {0, 1}, "tiles must be short at some lengths and long at others"
    assert len(set(kinds[:, 1].tolist())) == 2, "the predictor must have a head start at some lengths only"
    switches: dict[str, int] = {}
    for before in (kinds[1:] != kinds[:-1]).any(1).nonzero().flatten().tolist():
        switches.setdefault(str(kinds[before : before + 2].tolist()), before + 1)
    return sorted({length for last in switches.values() for length in (last, last + 1)})


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("heads", "head_dim", "chunk_size"), covering([(8, 2), (32, 8)], [64, 128], [0, S]), ids=str)
def test_one_captured_graph_serves_every_schedule(
    check: Check, heads: tuple[int, int], head_dim: int, chunk_size: int
) -> None:
    """The grid and the parts of A~ are those of decoding. The cache has NaN behind each length."""
    num_qo_heads, num_kv_heads = heads
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
    # The longest comes first, so that the cache behind a length can become NaN.
    for length in sorted({*lengths_at_switches(launch, capacity), *others}, reverse=True):
        launch.k[:, :, length:] = math.nan
        launch.v[:, :, length:] = math.nan
        launch.seq_lens.fill_(length)
        graph.replay()
        torch.cuda.synchronize()
        launch.compare(check)
