"""Draw recall over context and depth, and hit rates of layers over lambda."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

__all__ = ["draw", "threshold_name"]

Row = dict[str, Any]

COLORS: dict[str, Any] = {"cmap": "RdYlGn", "vmin": 0, "vmax": 1, "aspect": "auto", "alpha": 0.8}


def draw(picture: Path, rows: list[Row]) -> None:
    """Draw the rows of one run (bench `quality`): a column of heat maps for each cache; a single cache gets a row.

    For each lambda and kind of needle, one map shows recall over context and depth. The last map shows hit rates per
    layer over lambda, on the longest text. If no text was scored, it shows the answers of the first task.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    needles = [row for row in rows if row["case"]["depth"] is not None]
    texts = [row for row in rows if row["case"]["measure"] == "bits per byte"] or rows
    first = max((row["case"] for row in texts), key=lambda case: int(case["context"]))
    hits = [row for row in texts if all(row["case"][name] == first[name] for name in ("measure", "context", "depth"))]
    caches = list(dict.fromkeys(row["case"]["cache"] for row in rows))
    maps = sorted({(row["case"]["measure"], threshold_name(row)): None for row in needles}, key=lambda kind: kind[0])
    across, down = (len(maps) + 1, 1) if len(caches) == 1 else (len(caches), len(maps) + 1)
    size = (1 + 3.2 * across, 0.6 + 2.5 * down)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    grid = grid.reshape(len(maps) + 1, len(caches))
    for column, cache in zip(grid.T, caches, strict=True):
        found = [row for row in needles if row["case"]["cache"] == cache]
        for axes, kind in zip(column, maps, strict=False):
            cases = [row["case"] for row in needles if row["case"]["measure"] == kind[0]]
            contexts, depths = (sorted({case[name] for case in cases}) for name in ("context", "depth"))
            chosen = [row for row in found if (row["case"]["measure"], threshold_name(row)) == kind]
            _needle_map(axes, chosen, contexts, depths)
            axes.set_title(f"{cache}: {kind[0]} recalled, lambda {kind[1]}", parse_math=False, fontsize=8)
        image = _hit_map(column[-1], [row for row in hits if row["case"]["cache"] == cache])
        on = "text" if first["measure"] == "bits per byte" else first["measure"]
        title = f"{cache}: hit rate on {on}, {first['context']} tokens"
        column[-1].set_title(title, parse_math=False, fontsize=8)
    figure.colorbar(image, ax=grid, shrink=0.6 if down > 1 else 1.0)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _needle_map(axes: Any, rows: list[Row], contexts: list[int], depths: list[float]) -> None:
    """Draw context across and depth down; cells that were not measured stay empty."""
    cells = {(row["case"]["context"], row["case"]["depth"]): row["value"] for row in rows}
    axes.imshow([[cells.get((context, depth), math.nan) for context in contexts] for depth in depths], **COLORS)
    for (context, depth), value in cells.items():
        xy, color = (contexts.index(context), depths.index(depth)), "black" if 0.2 < value < 0.8 else "white"
        axes.annotate(f"{value:.2f}", xy, ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(contexts)), contexts)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("depth")


def _hit_map(axes: Any, rows: list[Row]) -> Any:
    """Draw lambda across and layers up; empty if no position was counted."""
    rates = [row["hit_rate_per_layer"] or [math.nan] for row in rows]
    image = axes.imshow(list(zip(*rates, strict=True)), origin="lower", **COLORS)
    axes.set_xticks(range(len(rows)), list(map(threshold_name, rows)))
    axes.set_yticks([] if rows[0]["hit_rate_per_layer"] is None else range(len(rates[0])))
    axes.set_xlabel("lambda")
    axes.set_ylabel("layer")
    return image


def threshold_name(row: Row) -> str:
    """The lambda of a row, as a heading: `0.1`, `inf`, or `fixed layers`."""
    threshold = row["case"]["threshold"]
    return "fixed layers" if threshold == "fixed" else f"{float(threshold):g}"
