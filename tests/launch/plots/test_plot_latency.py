"""Lines of `latency.py --plot`: one for each mode, cache and forced rate, whatever real verdicts or drafts are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from alspec.launch.plots.plot_latency import draw, draw_rounds

pyplot = pytest.importorskip("matplotlib.pyplot")


def row(context: int, mode: str, hit_rate: float | None, forced: bool = False) -> dict[str, Any]:
    case = {"context": context, "mode": mode, "kv_cache": "bf16", "hit_rate": hit_rate, "forced": forced}
    return {"case": case, "us": {"p20": 1e3, "p50": 2e3, "p80": 3e3}, "bytes": 10**9, "stream_tb_s": 4.0}


def legend(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The legend's entries, from an SVG whose texts are comments."""
    draw(folder / "plot.svg", rows, "a title")
    found: list[str] = re.findall(r"<!-- (.* p20 to p80\))", (folder / "plot.svg").read_text(encoding="utf-8"))
    return found


def test_real_verdicts_are_one_line(tmp_path: Path) -> None:
    rows = [row(context, "paired", rate) for context, rate in ((512, 0.9), (1024, 0.84), (2048, 0.78))]
    rows += [row(context, "off", None) for context in (512, 1024, 2048)]
    band = "p50 (band: p20 to p80)"
    assert legend(tmp_path, rows) == [f"paired, real verdicts (78% to 90% hits), {band}", f"off, {band}"]
    assert legend(tmp_path, rows[:1]) == [f"paired, real verdicts (90% hits), {band}"]


def test_forced_rates_are_lines_of_their_own(tmp_path: Path) -> None:
    rows = [row(context, "paired", rate, forced=True) for context in (512, 1024) for rate in (0.5, 1.0)]
    rows += [row(512, "paired", 0.5)]
    labels = ["50% hits (forced)", "100% hits (forced)", "real verdicts (50% hits)"]
    assert legend(tmp_path, rows) == [f"paired, {label}, p50 (band: p20 to p80)" for label in labels]


def test_times_and_their_limit_are_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 us, beside 10^9 bytes at 4 TB/s; only whole thousands of tokens are written as such."""
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw(tmp_path / "plot.svg", [row(1000, "off", None), row(2048, "off", None)], "a title")
    monkeypatch.undo()
    (axes,) = figures[0].axes
    measured, limit = axes.get_lines()
    assert list(measured.get_ydata()) == [2.0, 2.0]
    assert list(limit.get_ydata()) == [0.25, 0.25]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1000", "2k"]
    pyplot.close(figures[0])


def test_rounds_have_a_time_and_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each cache and acceptance, with the tokens of a round."""
    us = {"p20": 1e3, "p50": 2e3, "p80": 3e3}
    rows = [
        {
            "case": {"context": context, "kv_cache": codec, "acceptance": acceptance}, "us": us,
            "tokens_per_step": context / 512, "tokens_per_s": 100.0,
        }
        for codec, acceptance in (("bf16", "real"), ("turbo4", 0.9)) for context in (1024, 2048)
    ]  # fmt: skip
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw_rounds(tmp_path / "plot.svg", rows, "a title")
    monkeypatch.undo()
    times, speeds = figures[0].axes
    names = ["bf16, real drafts", "turbo4, 90% accepted (forced)"]
    assert [line.get_label() for line in times.get_lines()] == [f"{name}, p50 (band: p20 to p80)" for name in names]
    assert [line.get_label() for line in speeds.get_lines()] == [f"{name} (2.0 to 4.0 tokens/step)" for name in names]
    assert list(times.get_lines()[0].get_ydata()) == [2.0, 2.0]
    assert list(speeds.get_lines()[0].get_ydata()) == [100.0, 100.0]
    assert [axes.get_ylabel() for axes in (times, speeds)] == ["ms/step", "tokens/s"]
    pyplot.close(figures[0])
