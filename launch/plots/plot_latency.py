"""Draw ms/token against context; with drafts, ms/step and tokens/s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw", "draw_rounds"]


def draw(picture: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the rows of one sweep (bench `decode_step`): median, p20 to p80, and the time to read the bytes of `off`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for label in dict.fromkeys(map(_label, rows)):
        line = [row for row in rows if _label(row) == label]
        _plot_times(axes, line, f"{label}{_measured_hits(line)}")
    # No limit for a pair: it skips launches, which then do not read their weights.
    off = [row for row in rows if row["case"]["mode"] == "off"]
    for codec, style in zip(
        dict.fromkeys(row["case"]["kv_cache"] for row in off), ("--", ":", "-.", "-"), strict=False
    ):
        line = [row for row in off if row["case"]["kv_cache"] == codec]
        limit = [row["bytes"] / row["stream_tb_s"] / 1e9 for row in line]
        label = f"bytes of {_label(line[0])} at {line[0]['stream_tb_s']:.2f} TB/s"
        axes.plot([row["case"]["context"] for row in line], limit, color="gray", linestyle=style, label=label)
    _label_axes(axes, rows, "ms/token")
    axes.set_title(title, parse_math=False, fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130, bbox_inches="tight")
    plt.close(figure)


def draw_rounds(picture: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the rows of one sweep of rounds (bench `decode_round`): time of a round, and tokens/s of all requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, speeds) = plt.subplots(1, 2, figsize=(11, 4.2))
    for label in dict.fromkeys(map(_rounds_label, rows)):
        line = [row for row in rows if _rounds_label(row) == label]
        _plot_times(times, line, label)
        contexts = [row["case"]["context"] for row in line]
        speeds.plot(contexts, [row["tokens_per_s"] for row in line], marker="o", label=f"{label}{_yields(line)}")
    for axes, name in ((times, "ms/step"), (speeds, "tokens/s")):
        _label_axes(axes, rows, name)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, parse_math=False, fontsize=9)
    figure.savefig(picture, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _plot_times(axes: Any, line: list[dict[str, Any]], label: str) -> None:
    """Plot the milliseconds of rows over their contexts: median, and a band from p20 to p80."""
    contexts = [row["case"]["context"] for row in line]
    p20, p50, p80 = ([row["us"][name] / 1e3 for row in line] for name in ("p20", "p50", "p80"))
    axes.fill_between(contexts, p20, p80, alpha=0.3)
    axes.plot(contexts, p50, marker="o", label=f"{label}, p50 (band: p20 to p80)")


def _label_axes(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    """Contexts of all rows on the horizontal axis, and what is drawn over them, from 0 on."""
    contexts = sorted({row["case"]["context"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}k" if context % 1024 == 0 else str(context) for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel(name)


def _rounds_label(row: dict[str, Any]) -> str:
    """The name of a line of rounds, such as `bf16, real drafts` or `turbo4, 90% accepted (forced)`."""
    case = row["case"]
    forced = "real drafts" if case["acceptance"] == "real" else f"{case['acceptance']:.0%} accepted (forced)"
    return f"{case['kv_cache']}, {forced}"


def _yields(line: list[dict[str, Any]]) -> str:
    """` (3.9 to 4.4 tokens/step)` of a line, or one number if they are equal."""
    yields = [row["tokens_per_step"] for row in line]
    lowest, highest = f"{min(yields):.1f}", f"{max(yields):.1f}"
    return f" ({lowest} tokens/step)" if lowest == highest else f" ({lowest} to {highest} tokens/step)"


def _label(row: dict[str, Any]) -> str:
    """Return the name of a line, such as `off` or `paired over turbo4, 88% hits (forced)`, without measured rates."""
    case = row["case"]
    name = case["mode"] + ("" if case["kv_cache"] == "bf16" else f" over {case['kv_cache']}")
    if case["hit_rate"] is None:
        return str(name)
    return f"{name}, {case['hit_rate']:.0%} hits (forced)" if case["forced"] else f"{name}, real verdicts"


def _measured_hits(line: list[dict[str, Any]]) -> str:
    """` (88% hits)`, or a range if they differ; empty if there are none or they are forced."""
    rates = [row["case"]["hit_rate"] for row in line]
    if rates[0] is None or line[0]["case"]["forced"]:
        return ""
    lowest, highest = f"{min(rates):.0%}", f"{max(rates):.0%}"
    return f" ({lowest} hits)" if lowest == highest else f" ({lowest} to {highest} hits)"
