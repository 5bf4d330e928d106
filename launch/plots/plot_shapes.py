"""Draw the ratios of random shapes: `launch/plots/plot_shapes.py rows.jsonl out.png`.

The rows are those of `launch/bench_kernels.py --bench shapes --rows rows.jsonl`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import json
import sys
from pathlib import Path
from typing import Any

from alspec.errors import UserError
from alspec.launch.bench.shape_ratios import distribution, ratios
from alspec.launch.terminal.flags import Parser, check_picture
from alspec.launch.terminal.output import exit_code, writing

__all__ = ["draw", "main"]

TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    with exit_code(argv) as outcome:
        outcome.code = _run(argv)
    return outcome.code


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="plot_shapes", description="Draw how much longer others take than our decode attention.")
    parser.add_argument("rows", type=Path, help="file written by --bench shapes --rows of bench_kernels.py")
    parser.add_argument("picture", type=Path, help="PNG, SVG or PDF to write")
    parser.add_argument("--title", default="", help="what was run, and where (default: the GPU of the rows)")
    args = parser.parse_args(argv)
    check_picture("picture", args.picture)
    rows = _read(args.rows)
    with writing(args.picture):
        draw(args.picture, rows, args.title or f"decode attention over a bf16 cache, {rows[-1].get('gpu')}")
    return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of the bench.

    Raises:
        UserError: the file is unreadable, or has no such rows.
    """
    advice = "give a file written by bench_kernels.py --bench shapes --rows"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row["bench"] == "shapes"]
        is_empty = not ratios(rows)
    except OSError as error:
        raise UserError(f"rows: cannot read {path}: {error.strerror}; {advice}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"rows: {path} does not hold measured rows; {advice}") from None
    if is_empty:
        raise UserError(f"rows: {path} has no rows of bench shapes; {advice}")
    return rows


def draw(picture: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the rows of one sweep (bench `shapes`): a point for each shape, over the bytes of its K and V.

    Where rows of FlashInfer are among them, a second point shows the quicker one of SDPA and FlashInfer.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = ratios(rows)
    sizes = [x.num_bytes for x in found]
    hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": "tab:blue", "s": 36}
    series = [("torch SDPA / ours", [x.sdpa for x in found], hollow)]
    if any(row["impl"] == "flashinfer" for row in rows):
        series.append(("best of SDPA and FlashInfer / ours", [x.best for x in found], {"color": "tab:red", "s": 10}))
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, values, style in series:
        shares = ", ".join(f"{heading}: {text}" for heading, text in distribution(values).items())
        axes.scatter(sizes, values, label=f"{name}; {shares}", **style)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks(TICKS, [f"{tick:g}x" for tick in TICKS])
    axes.minorticks_off()
    lowest, highest = min(x.best for x in found), max(x.sdpa for x in found)
    axes.set_ylim(min(0.9, lowest / 1.1), max(1.1, highest * 1.5))  # room for the legend above the points
    axes.set_xlabel("bytes of K and V")
    axes.set_ylabel("time / our time (above 1: ours is quicker)")
    axes.set_title(f"{title}, {len(found)} random shapes", parse_math=False, fontsize=9)
    axes.legend(frameon=False, fontsize=7, loc="upper right")
    figure.savefig(picture, dpi=130, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
