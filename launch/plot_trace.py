"""Draw some layers of a trace, a lane for each rank: `plot_trace.py trace.json out.png --step 8 --layers 4:8`.

Traces are of operations launched one by one (generate.py) or of the kernels inside replayed steps (latency.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["main"]

COLORS = {
    "prefill": "#e6e6e6",
    "embed": "#e6e6e6",
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
LABELS = {"handover": "handover and waits"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draw a timeline of sender and receiver from a trace.")
    parser.add_argument("trace", type=Path, help="file written by --trace of generate.py or latency.py, plain or .gz")
    parser.add_argument("picture", type=Path, help="PNG or SVG to write")
    parser.add_argument("--step", type=int, required=True, help="decode step to draw")
    parser.add_argument("--layers", default="0:4", help="first:last layer (the last one is not drawn)")
    parser.add_argument("--title", default="", help="what was run, and where")
    args = parser.parse_args()
    first, last = (int(part) for part in args.layers.split(":"))
    data = args.trace.read_bytes()
    trace = json.loads(gzip.decompress(data) if args.trace.suffix == ".gz" else data)
    bars = [bar for event in trace["traceEvents"] if event["ph"] == "X" for bar in work(event)]
    chosen = [bar for bar in bars if bar["step"] == args.step and first <= bar["layer"] < last]
    if not chosen:
        parser.error(f"{args.trace} has no operation of step {args.step}, layers {args.layers}")
    _draw(chosen, args.picture, args.title)
    print(overlap(bars))
    skew_us = clock_skew_us(bars)
    if skew_us is not None:
        print(f"the last kernel of a step ends within {skew_us:.1f} us on all ranks, by the clocks of this trace")


def work(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What a slice of the trace really did, as a list of one bar or none.

    A kernel of a captured step whose gate was closed did nothing. One that was launched early waited until it was
    ready, and only then began.
    """
    args = event["args"]
    if not args.get("open", True):
        return []
    begin = max(event["ts"], args.get("ready_us", event["ts"]))
    named = {name: args[name] for name in ("step", "layer")} | {"kernel": args.get("kernel", "")}
    return [named | {"op": event["name"], "rank": event["pid"], "begin": begin, "end": event["ts"] + event["dur"]}]


def overlap(bars: list[dict[str, Any]]) -> str:
    """In how many layers of all steps the receiver began post-attention before the full attention had ended."""
    ends: dict[tuple[int, int], float] = {}
    begins: dict[tuple[int, int], float] = {}
    for bar in bars:
        key = (bar["step"], bar["layer"])
        if bar["op"] == "full_attention":
            ends[key] = max(ends.get(key, 0.0), bar["end"])
        elif bar["op"] == "post_attention":
            begins[key] = min(begins.get(key, float("inf")), bar["begin"])
    both = ends.keys() & begins.keys()
    early = sum(begins[key] < ends[key] for key in both)
    return f"post-attention began before the full attention had ended in {early} of {len(both)} layers"


def clock_skew_us(bars: list[dict[str, Any]]) -> float | None:
    """Largest difference between the ranks in when a captured step ended: they truly end within a few microseconds."""
    ends: dict[int, list[float]] = {}
    for bar in bars:
        if "finish_step" in bar["kernel"]:
            ends.setdefault(bar["step"], []).append(bar["end"])
    return max((max(times) - min(times) for times in ends.values()), default=None)


def _draw(bars: list[dict[str, Any]], picture: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({bar["rank"] for bar in bars})
    zero = min(bar["begin"] for bar in bars)
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.7 * len(ranks)))
    widest: dict[tuple[int, int, str], dict[str, Any]] = {}
    for bar in bars:
        span = (bar["begin"] - zero, bar["end"] - bar["begin"])
        axes.broken_barh([span], (bar["rank"] - 0.4, 0.8), facecolors=COLORS[bar["op"]], edgecolor="white", lw=0.4)
        key = (bar["rank"], bar["layer"], bar["op"])
        if key not in widest or span[1] > widest[key]["end"] - widest[key]["begin"]:
            widest[key] = bar
    for (rank, layer, op), bar in widest.items():
        if op in ("attention", "full_attention", "post_attention"):
            middle = (bar["begin"] + bar["end"]) / 2 - zero
            axes.text(middle, rank, str(layer), ha="center", va="center", fontsize=7)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds; the number in a bar is the layer")
    axes.set_title(title, fontsize=9)
    names = [name for name in COLORS if any(bar["op"] == name for bar in bars)]
    axes.legend(
        handles=[Patch(color=COLORS[name], label=LABELS.get(name, name)) for name in names],
        ncols=len(names),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(picture, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
