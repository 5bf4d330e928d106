"""`launch/bench_kernels.py --bench shapes`: the shapes, who is measured, the table, and flags; on the CPU."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from alspec.errors import BadNumbersError
from alspec.kernels.attention.oracles import decode_attention_ref
from alspec.launch import bench_kernels
from alspec.launch.bench import bench_shapes, shape_ratios
from alspec.launch.bench.bench_shapes import Shape, draw_shapes, measure_shape, shapes_table
from alspec.launch.bench.decode_case import Case, Run
from alspec.launch.bench.shape_ratios import OURS, SDPA, Ratio, distribution, ratios

RAGGED, EQUAL, ALONE = (Shape(8, 2, 64, lengths) for lengths in ((129, 35, 64), (77, 77), (145,)))


def test_a_seed_gives_the_same_shapes() -> None:
    """Also if fewer are drawn."""
    shapes = draw_shapes(40, 3)
    assert draw_shapes(40, 3) == shapes
    assert draw_shapes(7, 3) == shapes[:7]
    assert draw_shapes(7, 4) != shapes[:7]


def test_shapes_are_within_the_limits() -> None:
    shapes = draw_shapes(2000, 0)
    for index, shape in enumerate(shapes):
        assert 1 <= shape.num_kv_heads <= 16
        assert shape.num_qo_heads % shape.num_kv_heads == 0
        assert 1 <= shape.num_qo_heads // shape.num_kv_heads <= 16
        assert shape.head_dim in (64, 80, 96, 112, 128, 160, 192, 256)
        assert 1 + index % 2 <= len(shape.seq_lens) <= 32
        assert all(128 < length < 256 * 1024 and length % 2 for length in shape.seq_lens)
        assert index % 2 or len(set(shape.seq_lens)) == 1
        assert shape.copies * shape.copy_bytes <= 8e9
        assert shape.copies * shape.copy_bytes >= 500e6 or shape.copies == 128
    ragged = [shape for shape in shapes if len(set(shape.seq_lens)) > 1]
    assert 980 <= len(ragged) <= 1000
    # All values occur.
    assert {shape.num_kv_heads for shape in shapes} == set(range(1, 17))
    assert {shape.num_qo_heads // shape.num_kv_heads for shape in shapes} == set(range(1, 17))
    assert len({shape.head_dim for shape in shapes}) == 8
    assert {len(shape.seq_lens) for shape in shapes} == set(range(1, 33))
    lengths = sorted(shape.seq_lens[0] for shape in shapes if len(shape.seq_lens) == 1)
    assert lengths[0] < 150
    assert lengths[-1] > 200_000


def test_rows_say_which_shape_it_is() -> None:
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    assert RAGGED.case == {**heads, "batch": 3, "seq_lens": [129, 35, 64]}
    assert RAGGED.copy_bytes == 2 * 2 * 3 * 2 * 129 * 64  # K and V in bf16, padded


class Timed:
    """Stands for `times_us`: run number i takes `us[i]`."""

    def __init__(self, *us: float) -> None:
        self.us = us
        self.runs: list[Run] = []

    def __call__(self, runs: list[Run], copies: int, replays: int, flush_l2: bool) -> list[dict[str, float]]:
        assert (copies, replays, flush_l2) == (3, bench_shapes.REPLAYS, True)
        self.runs = runs
        return [{"p20": us - 1, "p50": us, "p80": us + 1} for us, _ in zip(self.us, runs, strict=True)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies; the oracle stands for our kernel, a backend of the CPU for the fused ones; no FlashInfer."""

    def lean(case: Case) -> Run:
        scale = case.q.shape[-1] ** -0.5
        return lambda i: (decode_attention_ref(case.q[i], case.k[i], case.v[i], case.seq_lens, scale)[0],)

    monkeypatch.setattr(bench_shapes, "lean", lean)
    monkeypatch.setattr(bench_shapes, "MAX_COPIES", 3)
    monkeypatch.setattr(bench_shapes, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(bench_shapes, "FUSED_WITH_MASK", [bench_shapes.SDPBackend.MATH])
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: getattr(sys.modules[name], "__spec__", None))


def measured(shape: Shape, monkeypatch: pytest.MonkeyPatch, *us: float) -> list[tuple[str, float]]:
    """Implementations and medians of the rows of a shape whose runs take `us`."""
    monkeypatch.setattr(bench_shapes, "times_us", Timed(*us))
    rows = measure_shape(shape, 4e12, "cpu")
    for row in rows:
        assert (row["bench"], row["case"], row["stream_tb_s"]) == ("shapes", shape.case, 4.0)
        assert row["bytes"] == sum(shape.seq_lens) * 2 * 64 * 2 * 2
        assert row["us"] == {name: row["us"]["p50"] + offset for name, offset in (("p20", -1), ("p50", 0), ("p80", 1))}
    return [(row["impl"], row["us"]["p50"]) for row in rows]


@pytest.mark.usefixtures("on_cpu")
def test_the_quicker_form_of_sdpa_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one length need one form."""
    assert measured(RAGGED, monkeypatch, 10, 30, 20) == [(OURS, 10), (SDPA, 20)]
    assert measured(RAGGED, monkeypatch, 10, 30, 40) == [(OURS, 10), (SDPA, 30)]
    assert measured(EQUAL, monkeypatch, 10, 5) == [(OURS, 10), (SDPA, 5)]
    assert measured(ALONE, monkeypatch, 10, 5) == [(OURS, 10), (SDPA, 5)]


@pytest.mark.usefixtures("on_cpu")
def test_a_form_without_a_fused_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_shapes, "FUSED_WITH_MASK", [bench_shapes.SDPBackend.CUDNN_ATTENTION])
    assert measured(RAGGED, monkeypatch, 10, 30) == [(OURS, 10), (SDPA, 30)]


@pytest.mark.usefixtures("on_cpu")
def test_wrong_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong baseline is left out with a notice. A wrong result of ours is an error, even of one request."""
    monkeypatch.setattr(bench_shapes, "_sdpa_padded", lambda case: lambda i: (case.q[i],))
    assert measured(RAGGED, monkeypatch, 10, 30) == [(OURS, 10), (SDPA, 30)]
    assert capsys.readouterr().err.startswith("alspec: torch.sdpa is left out for {'num_qo_heads': 8, ")
    right = bench_shapes.lean

    def wrong(case: Case) -> Run:
        run = right(case)
        factors = torch.where(case.seq_lens > 1000, 1.05, 1.0)[:, None, None]
        return lambda i: (run(i)[0] * factors,)

    monkeypatch.setattr(bench_shapes, "lean", wrong)
    assert measured(RAGGED, monkeypatch, 10, 30) == [(OURS, 10), (SDPA, 30)]
    with pytest.raises(BadNumbersError, match="wrong result for seq_lens 3001: "):
        measured(Shape(8, 2, 64, (3001, *[129] * 9)), monkeypatch)


class PagedDecode:
    """Stands for FlashInfer's wrapper: attention over pages, with the oracle."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert (workspace.count_nonzero(), layout, options["use_cuda_graph"]) == (0, "HND", True)
        self.options = options

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *shape: int, **types: torch.dtype) -> None:
        hq, hkv, dim, self.page_size = shape
        assert (hq % hkv, dim) == (0, 64)
        assert types == {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        assert self.options["use_tensor_cores"] == (hq // hkv >= 4)
        for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            buffer = self.options[f"paged_kv_{name}_buffer"]
            assert torch.equal(buffer, tensor)
            assert buffer.data_ptr() != tensor.data_ptr()
        self.indptr, self.indices, self.last_page_len = indptr.tolist(), indices, last_page_len.tolist()

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        assert all(x.is_contiguous() and x.shape[0] == self.indptr[-1] for x in cache)
        outputs = []
        for b, last in enumerate(self.last_page_len):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]]
            length = torch.tensor([(len(pages) - 1) * self.page_size + last])
            k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None] for x in cache)
            outputs.append(decode_attention_ref(q[b : b + 1], k, v, length, q.shape[-1] ** -0.5)[0])
        return torch.cat(outputs)


@pytest.mark.usefixtures("on_cpu")
def test_flashinfer_where_it_supports_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that it refuses has no row, nor have head sizes that it does not check."""
    module: Any = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = PagedDecode
    with_tensor_cores: list[bool] = []

    def single(q: Tensor, k: Tensor, v: Tensor, kv_layout: str, use_tensor_cores: bool) -> Tensor:
        assert kv_layout == "HND"
        with_tensor_cores.append(use_tensor_cores)
        if k.shape[1] == 99:
            raise ValueError("not supported")
        return decode_attention_ref(q[None], k[None], v[None], torch.tensor([k.shape[1]]), q.shape[-1] ** -0.5)[0][0]

    module.single_decode_with_kv_cache = single
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert measured(RAGGED, monkeypatch, 10, 30, 20, 15) == [(OURS, 10), (SDPA, 20), ("flashinfer", 15)]
    assert measured(EQUAL, monkeypatch, 10, 30, 15) == [(OURS, 10), (SDPA, 30), ("flashinfer", 15)]
    assert measured(ALONE, monkeypatch, 10, 30, 15) == [(OURS, 10), (SDPA, 30), ("flashinfer", 15)]
    assert all(with_tensor_cores)
    with_tensor_cores.clear()
    assert measured(Shape(6, 2, 64, (99,)), monkeypatch, 10, 30) == [(OURS, 10), (SDPA, 30)]
    assert with_tensor_cores == [False]
    case = Case.draw([9], 8, 2, 80, 1, "cpu")
    assert bench_shapes._flashinfer_runs(case) == []


def row(impl: str, us: float, shape: Shape = RAGGED) -> dict[str, Any]:
    return {"bench": "shapes", "impl": impl, "case": shape.case, "us": {"p50": us}, "bytes": 10**6}


def test_ratios_are_those_of_one_run() -> None:
    """A shape without SDPA has none; rows of an earlier measurement do not count."""
    rows = [row(OURS, 10), row(SDPA, 5), row("flashinfer", 1), row(OURS, 4, EQUAL), row("flashinfer", 5, EQUAL)]
    assert ratios(rows) == [Ratio(RAGGED.case, 10**6, 10, 0.5, 0.1)]
    rows += [{"bench": "decode_attention"}, row(OURS, 8), row(SDPA, 12), row(SDPA, 6, EQUAL)]
    assert ratios(rows) == [Ratio(RAGGED.case, 10**6, 8, 1.5, 1.5), Ratio(EQUAL.case, 10**6, 4, 1.5, 1.25)]


def test_percentiles_and_the_share_below_one() -> None:
    values = [0.5 + index / 100 for index in range(101)]
    assert distribution(values) == {"p5": "0.55x", "p25": "0.75x", "median": "1.00x", "below 1": "50 %"}
    assert distribution([1.0]) == {"p5": "1.00x", "p25": "1.00x", "median": "1.00x", "below 1": "0 %"}


def test_the_table_has_the_distribution_and_the_worst_shapes() -> None:
    shapes = [Shape(4, 1, 64, (201 + 2 * index,)) for index in range(12)]
    rows = [row(impl, us, shape) for n, shape in enumerate(shapes) for impl, us in ((OURS, 10), (SDPA, 20 + 10 * n))]
    rows += [row(OURS, 10), row(SDPA, 15), row("flashinfer", 5)]
    shares, worst = (cell for cell in shapes_table(rows).columns[0].cells)
    cells = [list(zip(*(column.cells for column in table.columns), strict=True)) for table in (shares, worst)]
    assert shares.title == "time / ours, 13 random shapes"
    assert [column.header for column in shares.columns] == ["", "p5", "p25", "median", "below 1"]
    assert cells[0] == [("SDPA", "1.80x", "4.00x", "7.00x", "0 %"), ("best other", "1.40x", "4.00x", "7.00x", "8 %")]
    assert len(cells[1]) == 10
    assert cells[1][:2] == [
        ("8/2", "64", "3", "35 to 129", "1.0", "10.0", "1.50x", "0.50x"),
        ("4/1", "64", "1", "201", "1.0", "10.0", "2.00x", "2.00x"),
    ]
    assert shape_ratios.lengths_text([5, 5]) == "5"


@pytest.mark.parametrize("flags", [["--bench", "decode", "--cases", "3"], ["--bench", "turbo", "--seed", "0"]])
def test_flags_of_this_bench_are_refused_elsewhere(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Also without --bench, and before a GPU is needed."""
    for argv in (flags, flags[2:]):
        assert bench_kernels.main(argv) == 2
        expected = f"flags: {flags[2]}: only --bench shapes draws its cases; leave it out"
        assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


@pytest.mark.parametrize("given", [{}, {"cases": 2, "seed": 5}])
@pytest.mark.usefixtures("on_cpu")
def test_command(
    given: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows with their provenance for the shapes of the seed, and the table; the CPU poses as a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(bench_kernels, "stream_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(bench_kernels, "provenance", lambda num_gpus, command: {"gpu": num_gpus, "command": command})
    compiled: list[Shape] = []
    monkeypatch.setattr(bench_shapes, "_compile", compiled.extend)

    def measure(shape: Shape, stream: float) -> list[dict[str, Any]]:
        assert stream == 1e12
        return [row(OURS, 10, shape), row(SDPA, 15, shape)]

    monkeypatch.setattr(bench_shapes, "measure_shape", measure)
    path = tmp_path / "rows.jsonl"
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert bench_kernels.main(["--bench", "shapes", *flags, "--rows", str(path)]) == 0
    shapes = draw_shapes(given.get("cases", 70), given.get("seed", 0))
    assert compiled == shapes
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["case"] for row in rows] == [shape.case for shape in shapes for _ in range(2)]
    assert {row["gpu"] for row in rows} == {1}
    assert f"{len(shapes)} random shapes" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [Shape(6, 3, 80, (129, 301, 35)), Shape(4, 1, 64, (333,))])
def test_shapes_on_a_gpu(shape: Shape) -> None:
    bench_shapes._compile([shape])
    rows = measure_shape(shape, 1e12)
    assert [row["impl"] for row in rows][:2] == [OURS, SDPA]
    assert all(0 < row["us"]["p20"] <= row["us"]["p50"] for row in rows)
