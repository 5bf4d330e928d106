"""The picture of `--bench shapes`: a point for each shape, percentiles in the legend, and files without such rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alspec.launch.plots.plot_shapes import draw, main

pyplot = pytest.importorskip("matplotlib.pyplot")


def rows_of(n: int, ours: float, **others: float) -> list[dict[str, Any]]:
    """Rows of a shape of n tokens, in which an implementation takes so many microseconds."""
    times = {"alspec.lean_decode_attention": ours, **{name.replace("_", "."): us for name, us in others.items()}}
    return [
        {"bench": "shapes", "impl": impl, "case": {"seq_lens": [n]}, "us": {"p50": us}, "bytes": 512 * n, "gpu": "H"}
        for impl, us in times.items()
    ]


ROWS = [
    *rows_of(129, 10, torch_sdpa=20, flashinfer=8),
    *rows_of(257, 10, torch_sdpa=15, flashinfer=40),
    *rows_of(9001, 10, torch_sdpa=9),
]


def drawn(rows: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    figures: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", figures.append)
        draw(folder / "picture.svg", rows, "a title")
    (axes,) = figures[0].axes
    return axes


def test_points_and_percentiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(ROWS, tmp_path, monkeypatch)
    sdpa, best = (points.get_offsets().tolist() for points in axes.collections)
    sizes = [512 * n for n in (129, 257, 9001)]
    assert sdpa == [list(point) for point in zip(sizes, (2.0, 1.5, 0.9), strict=True)]
    assert best == [list(point) for point in zip(sizes, (0.8, 1.5, 0.9), strict=True)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "torch SDPA / ours; p5: 0.96x, p25: 1.20x, median: 1.50x, below 1: 33 %",
        "best of SDPA and FlashInfer / ours; p5: 0.81x, p25: 0.85x, median: 0.90x, below 1: 67 %",
    ]
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == [1, 1]
    assert axes.get_xscale() == "log"
    low, high = axes.get_ylim()
    assert low < 0.8 < 2.0 < high
    assert axes.get_title() == "a title, 3 random shapes"
    pyplot.close(axes.figure)


def test_without_flashinfer_there_is_one_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(rows_of(9001, 10, torch_sdpa=9), tmp_path, monkeypatch)
    assert len(axes.collections) == 1
    pyplot.close(axes.figure)


def test_command(tmp_path: Path) -> None:
    """Rows of other benches may be in the file."""
    path, picture = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"bench": "decode_attention"}, *ROWS]))
    assert main([str(path), str(picture)]) == 0
    assert "decode attention over a bf16 cache, H, 3 random shapes" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read {path}: No such file or directory"),
        ('{"bench": "decode_attention"}\n', "{path} has no rows of bench shapes"),
        ("not JSON\n", "{path} does not hold measured rows"),
        ('{"bench": "shapes", "impl": "torch.sdpa"}\n', "{path} does not hold measured rows"),
        ("[1]\n", "{path} does not hold measured rows"),
    ],
)
def test_files_without_rows(text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    assert main([str(path), str(tmp_path / "picture.png")]) == 2
    line = f"alspec: exit 2: rows: {said.format(path=path)}; give a file written by bench_kernels.py --bench shapes"
    assert capsys.readouterr().err.startswith(line)
    assert not (tmp_path / "picture.png").exists()
