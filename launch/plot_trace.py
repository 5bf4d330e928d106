"""Draw some layers of a trace, a lane for each rank: `plot_trace.py trace.json out.png --step 8 --layers 4:8`."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["main"]

COLORS = {
    "pre_attention": "#7aa6c2",
    "predictor": "#e8a33d",
    "full_attention": "#c8553d",
    "attention": "#c8553d",
    "handover": "#d9d9d9",
    "verdict": "#8f8f8f",
    "post_attention": "#4f8a5b",
    "agree": "#b9a5d1",
    "lm_head": "#5b5b7a",
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draw a timeline of sender and receiver from a trace of generate.py.")
    parser.add_argument("trace", type=Path, help="file written by generate.py --trace, plain or .gz")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--step", type=int, required=True, help="decode step to draw")
    parser.add_argument("--layers", default="0:4", help="first:last layer (the last one is not drawn)")
    parser.add_argument("--title", default="", help="what was run, and where")
    args = parser.parse_args()
    first, last = (int(part) for part in args.layers.split(":"))
    data = args.trace.read_bytes()
    trace = json.loads(gzip.decompress(data) if args.trace.suffix == ".gz" else data)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    chosen = [
        event for event in events if event["args"]["step"] == args.step and first <= event["args"]["layer"] < last
    ]
    if not chosen:
        parser.error(f"{args.trace} has no operation of step {args.step}, layers {args.layers}")
    _draw(chosen, args.picture, args.title)
    print(overlap(events))


def overlap(events: list[dict[str, Any]]) -> str:
    """In how many layers of all steps the receiver began post-attention before the full attention had ended."""
    ends: dict[tuple[int, int], float] = {}
    begins: dict[tuple[int, int], float] = {}
    for event in events:
        key = (event["args"]["step"], event["args"]["layer"])
        if event["name"] == "full_attention":
            ends[key] = max(ends.get(key, 0.0), event["ts"] + event["dur"])
        elif event["name"] == "post_attention":
            begins[key] = min(begins.get(key, float("inf")), event["ts"])
    both = ends.keys() & begins.keys()
    early = sum(begins[key] < ends[key] for key in both)
    return f"post-attention began before the full attention had ended in {early} of {len(both)} layers"


def _draw(events: list[dict[str, Any]], picture: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({event["pid"] for event in events})
    zero = min(event["ts"] for event in events)
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.7 * len(ranks)))
    for event in events:
        span = (event["ts"] - zero, event["dur"])
        axes.broken_barh([span], (event["pid"] - 0.4, 0.8), facecolors=COLORS[event["name"]], edgecolor="white", lw=0.4)
        if event["name"] in ("full_attention", "post_attention"):
            axes.text(span[0] + span[1] / 2, event["pid"], event["args"]["layer"], ha="center", va="center", fontsize=7)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds; the number in a bar is the layer")
    axes.set_title(title, fontsize=9)
    names = [name for name in COLORS if any(event["name"] == name for event in events)]
    axes.legend(
        handles=[Patch(color=COLORS[name], label=name) for name in names],
        ncols=len(names),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(picture, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
