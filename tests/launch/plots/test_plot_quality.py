"""Pictures of `evaluate.py --plot`: the place of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alspec.launch.plots.plot_quality import draw

pyplot = pytest.importorskip("matplotlib.pyplot")


def row(measure: str, context: int, depth: float | None, value: float) -> dict[str, Any]:
    case = {"measure": measure, "context": context, "depth": depth, "cache": "bf16", "threshold": "0.1"}
    return {"case": case, "value": value, "hit_rate_per_layer": [context / 4096, 1.0]}


def test_maps_have_context_across_and_depth_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the maps are hit rates on the longest text, wherever its row is."""
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    recalled = {(1024, 0.0): 0.1, (1024, 0.5): 0.2, (1024, 1.0): 0.3, (2048, 0.0): 0.4, (2048, 0.5): 0.5}
    rows = [row("needle", context, depth, value) for (context, depth), value in recalled.items()]
    rows += [row("needle", 2048, 1.0, 0.6), *(row("bits per byte", context, None, 1.5) for context in (2048, 1024))]
    draw(tmp_path / "picture.svg", rows)
    monkeypatch.undo()
    needles, hits, *_ = figures[0].axes
    assert needles.images[0].get_array().tolist() == [[0.1, 0.4], [0.2, 0.5], [0.3, 0.6]]
    assert [label.get_text() for label in needles.get_xticklabels()] == ["1024", "2048"]
    assert [label.get_text() for label in needles.get_yticklabels()] == ["0", "0.5", "1"]
    assert hits.get_title() == "bf16: hit rate on text, 2048 tokens"
    assert hits.images[0].get_array().tolist() == [[0.5], [1.0]]
    pyplot.close(figures[0])
