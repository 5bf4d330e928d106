"""Draw ms/token against context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(picture: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw the rows of one sweep (bench `decode_step`): median, p20 to p80, and the time to read the bytes of `off`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for label in dict.fromkeys(map(_label, rows)):
        line = [row for row in rows if _label(row) == label]
        contexts = [row["case"]["context"] for row in line]
        p20, p50, p80 = ([row["us"][name] / 1e3 for row in line] for name in ("p20", "p50", "p80"))
        axes.fill_between(contexts, p20, p80, alpha=0.3)
        axes.plot(contexts, p50, marker="o", label=f"{label}{_measured_hits(line)}, p50 (band: p20 to p80)")
    # No limit for a pair: it skips launches, which then do not read their weights.
    off = [row for row in rows if row["case"]["mode"] == "off"]
    for codec, style in zip(
        dict.fromkeys(row["case"]["kv_cache"] for row in off), ("--", ":", "-.", "-"), strict=False
    ):
        line = [row for row in off if row["case"]["kv_cache"] == codec]
        limit = [row["bytes"] / row["stream_tb_s"] / 1e9 for row in line]
        label = f"bytes of {_label(line[0])} at {line[0]['stream_tb_s']:.2f} TB/s"
        axes.plot([row["case"]["context"] for row in line], limit, color="gray", linestyle=style, label=label)
    contexts = sorted({row["case"]["context"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context // 1024}k" if context % 1024 == 0 else str(context) for context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("ms/token")
    axes.set_title(title, parse_math=False, fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=130, bbox_inches="tight")
    plt.close(figure)


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
