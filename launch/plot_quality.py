"""Draw recall over context and depth, and hit rates of layers over lambda."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from alspec.runtime.decoded_attention import CacheSetting

__all__ = ["draw"]

Row = dict[str, Any]


def draw(picture: Path, rows: list[Row]) -> None:
    """Rows of one run (bench `quality`): a column of heat maps for each cache.

    One map of recall over context and depth for each lambda, where there are needles; below them hit rates per layer
    over lambda, on the longest text (where none was scored, on the first task's answers).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    needles = [row for row in rows if row["case"]["measure"] == "needle"]
    texts = [row for row in rows if row["case"]["measure"] == "bits per byte"] or rows
    first = max((row["case"] for row in texts), key=lambda case: int(case["context"]))
    hits = [row for row in texts if _of(row, first, "measure", "context", "depth")]
    caches = list(dict.fromkeys(_label(row) for row in rows))
    lambdas = list(dict.fromkeys(row["case"]["threshold"] for row in needles))
    num_maps = len(lambdas) + 1
    figure, grid = plt.subplots(
        num_maps,
        len(caches),
        figsize=(1 + 3.2 * len(caches), 0.6 + 2.5 * num_maps),
        squeeze=False,
        layout="constrained",
    )
    for column, cache in zip(grid.T, caches, strict=True):
        for axes, threshold in zip(column, lambdas, strict=False):
            found = [row for row in needles if row["case"]["threshold"] == threshold and _label(row) == cache]
            title = f"{cache}, lambda {_name(threshold)}: needle recalled"
            image = _map(axes, found, "context", "depth", lambda row: row["value"], title)
        image = _hit_map(column[-1], [row for row in hits if _label(row) == cache], cache, first)
    figure.colorbar(image, ax=grid, shrink=0.6)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _map(axes: Any, rows: list[Row], x: str, y: str, value: Callable[[Row], float], title: str) -> Any:
    """A heat map of one value of each row over two fields of its case."""
    columns, lines = (sorted({row["case"][name] for row in rows}) for name in (x, y))
    cells = {(row["case"][x], row["case"][y]): value(row) for row in rows}
    image = axes.imshow(
        [[cells[column, line] for column in columns] for line in lines], cmap="RdYlGn", vmin=0, vmax=1, aspect="auto"
    )
    for (column, line), number in cells.items():
        place = (columns.index(column), lines.index(line))
        axes.annotate(f"{number:.2f}", place, ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), [f"{line:g}" for line in lines])
    axes.set_xlabel(f"{x}, tokens" if x == "context" else x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=8)
    return image


def _hit_map(axes: Any, rows: list[Row], cache: str, case: Row) -> Any:
    """Layers up, lambda across."""
    rates = [row["hit_rate_per_layer"] for row in rows]
    image = axes.imshow(list(zip(*rates, strict=True)), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto", origin="lower")
    axes.set_xticks(range(len(rows)), [_name(row["case"]["threshold"]) for row in rows])
    axes.set_yticks(range(len(rates[0])))
    axes.set_xlabel("lambda")
    axes.set_ylabel("layer")
    axes.set_title(f"{cache}: hit rate, {case['measure']}, {case['context']} tokens", fontsize=8)
    return image


def _of(row: Row, case: Row, *names: str) -> bool:
    return all(row["case"][name] == case[name] for name in names)


def _label(row: Row) -> str:
    names = CacheSetting.__dataclass_fields__
    return CacheSetting(**{name: row["case"][name] for name in names}).label


def _name(threshold: str) -> str:
    return threshold if threshold == "fixed" else f"{float(threshold):g}"
