"""Draw layers of a trace, one lane for each rank: `plot_trace.py trace.json out.png --step 3 --layers 4:8`.

A trace holds the operations of eager steps (generate.py) or the kernels of captured steps (latency.py).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import gzip
import json
import sys
import zlib
from pathlib import Path
from statistics import median
from typing import Any

from alspec.errors import UserError
from alspec.launch.plots.plot_link import LINK_STYLES, draw_link, link_outcomes, relabel
from alspec.launch.terminal.flags import Parser, check_picture
from alspec.launch.terminal.output import exit_code, writing
from alspec.runtime.profiling.kernel_names import BESIDE

__all__ = ["main"]

COLORS = {
    "prefill": "#f2f2f2",
    "embed": "#d8cfb4",
    "pre_attention": "#7aa6c2",
    "predictor": "#e8a33d",
    "full_attention": "#c8553d",
    "attention": "#dd8f7d",
    "handover": "#d9d9d9",
    "verdict": "#8f8f8f",
    "post_attention": "#4f8a5b",
    "rejected": "#bcd3c1",
    "agree": "#b9a5d1",
    "lm_head": "#5b5b7a",
}
LABELS = {
    "pre_attention": "projections (q, k, v)",
    "predictor": "predictor (A~)",
    "full_attention": "full attention",
    "handover": "handover and waits",
    "post_attention": "post-attention",
    "rejected": "on a rejected A~",
    "lm_head": "LM head",
}
HATCHES = {"rejected": "////"}
# Shares of the picture's width. Narrower bars get no entry in the legend (VISIBLE), or no text (ROOM_FOR_TEXT).
VISIBLE, ROOM_FOR_TEXT = 0.005, 0.12
HALF = 0.28  # half the height of a bar; lanes are 1 apart
LINK_ARGS = ("side", "accepted", "taken", "lost")  # of a pair over a link: runtime/profiling/link_trace.py


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    with exit_code(argv) as outcome:
        outcome.code = _run(argv)
    return outcome.code


def _run(argv: list[str] | None) -> int:
    parser = Parser(
        prog="plot_trace",
        description="Draw a timeline of sender and receiver from a trace of a pair.",
    )
    parser.add_argument("trace", type=Path, help="file written by --trace of generate.py or latency.py, plain or .gz")
    parser.add_argument("picture", type=Path, help="PNG, SVG or PDF to write")
    parser.add_argument("--step", type=int, required=True, help="decode step to draw")
    parser.add_argument("--layers", help="first:last layer (the last one is not drawn); default: the first four")
    parser.add_argument("--title", default="", help="what was run, and where")
    args = parser.parse_args(argv)
    check_picture("picture", args.picture)
    wanted = None if args.layers is None else _layers(args.layers)
    bars, run, forced = _read(args.trace)
    found = spec_outputs(bars)
    if not found and not is_linked(bars):
        raise UserError(
            f"trace: {args.trace} has no pair: no rank computes on the A~ of another rank; trace one with "
            "generate.py --speculation paired or latency.py --modes paired"
        )
    first, last = wanted or (0, 4)
    end = 1 + max(bar["layer"] for bar in bars)  # the LM head counts as a layer behind the last one
    if wanted and last > end:
        raise UserError(f"flags: --layers: expected layers within 0:{end}, as {args.trace} has, found {args.layers!r}")
    chosen = [bar for bar in bars if bar["step"] == args.step and first <= bar["layer"] < last]
    if not chosen:
        raise UserError(f"trace: {args.trace} has no operation of step {args.step}, layers {first}:{last}")
    with writing(args.picture):
        _draw(chosen, args.picture, "; ".join(filter(None, (args.title or run, forced))))
    for line in filter(None, (run, forced)):
        print(line)
    if is_linked(bars):
        print(link_outcomes(bars))
    else:
        print(overlap(bars))
        print(outcomes(found))
    skew_us = clock_skew_us(bars)
    if skew_us is not None and not is_linked(bars):
        print(f"the last kernel of a step ends within {skew_us:.1f} us on all ranks, by the clocks of this trace")
    return 0


def _layers(text: str) -> tuple[int, int]:
    """`4:8` -> (4, 8)."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(f"flags: --layers: expected first:last such as 4:8, found {text!r}")
    return int(first), int(last)


def _read(path: Path) -> tuple[list[dict[str, Any]], str, str]:
    """Read a trace. Returns its operations as bars, a line on what was run, and a note if verdicts were forced.

    Raises:
        UserError: the file is unreadable, or not a trace of this project.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"trace: cannot read {path}: {error.strerror}; give a file written by --trace") from None
    try:
        trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"trace: {path} is not JSON: {error}; give a file written by --trace") from None
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise UserError(f"trace: {path} is no trace: it has no traceEvents; give a file written by --trace")
    try:
        bars = [bar for event in trace["traceEvents"] if event["ph"] == "X" for bar in active_bars(event)]
        return bars, *_what_was_run(trace.get("otherData"))
    except (LookupError, TypeError, AttributeError):
        raise UserError(
            f"trace: {path} is a trace of something else: its events lack step or layer; give a file written by --trace"
        ) from None


def _what_was_run(measured: dict[str, Any] | None) -> tuple[str, str]:
    """Model, hardware and context from the row in a trace; and how many verdicts were forced to accept."""
    if measured is None or "mode" not in measured["case"]:  # a trace of generate.py, an older one, or one of rounds
        return "", ""
    case, gpu = measured["case"], measured["gpu"]
    where = f"{measured['num_gpus']} x {gpu}" if gpu else f"{case['world']} rank(s) on CPU"
    run = f"{case['shape']}, {where}, {case['dtype']}, {case['mode']}, {case['context']} tokens"
    return run, f"verdicts forced: {100 * case['hit_rate']:.0f} %" if case["forced"] else ""


def active_bars(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar in which an operation of the trace did work; empty if it did none.

    A kernel of a captured step did no work if its gate was closed. A kernel that was launched early began to work only
    when it was ready.
    """
    args = event["args"]
    if not args.get("open", True) or event["name"] in BESIDE:
        return []
    begin = max(event["ts"], args.get("ready_us", event["ts"]))
    named = {name: args[name] for name in ("step", "layer")} | {"kernel": args.get("kernel", "")}
    named |= {name: args[name] for name in LINK_ARGS if name in args}
    return [named | {"op": event["name"], "rank": event["pid"], "begin": begin, "end": event["ts"] + event["dur"]}]


def is_linked(bars: list[dict[str, Any]]) -> bool:
    """Whether the trace is of a pair over a link, whose groups do not change roles."""
    return any("side" in bar for bar in bars)


def overlap(bars: list[dict[str, Any]]) -> str:
    """Count the layers of all steps in which post-attention on the receiver began before full attention ended."""
    ends: dict[tuple[int, int], float] = {}
    begins: dict[tuple[int, int], float] = {}
    for bar in bars:
        key = (bar["step"], bar["layer"])
        if bar["op"] == "full_attention":
            ends[key] = max(ends.get(key, float("-inf")), bar["end"])
        elif bar["op"] == "post_attention":
            begins[key] = min(begins.get(key, float("inf")), bar["begin"])
    both = ends.keys() & begins.keys()
    early = sum(begins[key] < ends[key] for key in both)
    return f"post-attention began before the full attention had ended in {early} of {len(both)} layers"


def clock_skew_us(bars: list[dict[str, Any]]) -> float | None:
    """Largest difference between the ends of a captured step on its ranks. The true one is a few microseconds."""
    ends: dict[int, list[float]] = {}
    for bar in bars:
        if "finish_step" in bar["kernel"]:
            ends.setdefault(bar["step"], []).append(bar["end"])
    return max((max(times) - min(times) for times in ends.values()), default=None)


def spec_outputs(bars: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """The speculative outputs A~ of a pair, by step and layer.

    Returns:
        For each A~: `senders` and `receivers`, sets of ranks; `begin` and `end` of the full attention; `arrival`, when
        the receivers began to compute on A~; `accepted`, false if the senders recomputed post-attention.
    """
    found = {}
    attention: dict[tuple[int, int], list[dict[str, Any]]] = {}
    rest: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for bar in bars:
        kind = {"full_attention": attention, "post_attention": rest}.get(bar["op"])
        if kind is not None:
            kind.setdefault((bar["step"], bar["layer"]), []).append(bar)
    for key in sorted(attention.keys() & rest.keys()):
        senders = {bar["rank"] for bar in attention[key]}
        on_spec = [bar for bar in rest[key] if bar["rank"] not in senders]
        if on_spec:
            found[key] = {
                "senders": senders,
                "receivers": {bar["rank"] for bar in on_spec},
                "begin": min(bar["begin"] for bar in attention[key]),
                "end": max(bar["end"] for bar in attention[key]),
                "arrival": min(bar["begin"] for bar in on_spec),
                "accepted": len(on_spec) == len(rest[key]),
            }
    return found


def outcomes(found: dict[tuple[int, int], dict[str, Any]]) -> str:
    """How many A~ were accepted, and the median time from one layer's full attention to the next layer's."""
    text = f"{sum(spec['accepted'] for spec in found.values())} of {len(found)} A~ were accepted"
    for verdict, name in ((True, "accepted"), (False, "rejected")):
        times = [
            found[step, layer + 1]["begin"] - spec["begin"]
            for (step, layer), spec in found.items()
            if spec["accepted"] == verdict and (step, layer + 1) in found
        ]
        if times:
            text += f"; where {name}, the next full attention began {median(times):.0f} us after this one"
    return text


def _parts(bars: list[dict[str, Any]], found: dict[tuple[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Bars to draw, each with its label. Consecutive kernels of one operation become one bar, including their gaps."""
    joined: list[dict[str, Any]] = []
    for bar in sorted(bars, key=lambda bar: (bar["rank"], bar["begin"])):
        if joined and all(bar[name] == joined[-1][name] for name in ("rank", "step", "layer", "op")):
            joined[-1]["end"] = max(joined[-1]["end"], bar["end"])
        else:
            joined.append(bar | {"label": ""})
    # If the predictor is no operation of its own, it is the beginning of attention.
    is_fused = not any(bar["op"] == "predictor" for bar in bars)
    parts = []
    for bar in joined:
        spec = found.get((bar["step"], bar["layer"]))
        if bar["op"] in ("attention", "full_attention", "post_attention"):
            bar["label"] = LABELS.get(bar["op"], bar["op"])
        if spec and bar["op"] == "post_attention":
            is_sender = bar["rank"] in spec["senders"]
            bar["label"] = "recompute" if is_sender else "on A~"
            bar["op"] = "post_attention" if is_sender or spec["accepted"] else "rejected"
        if spec and bar["op"] == "full_attention" and is_fused:
            arrival = min(max(spec["arrival"], bar["begin"]), bar["end"])
            parts.append(bar | {"op": "predictor", "end": arrival, "label": ""})
            bar["begin"] = arrival
        parts.append(bar)
    return parts


def _draw(bars: list[dict[str, Any]], picture: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context({"hatch.color": "white"}):
        _draw_lanes(bars, picture, title)


def _draw_bar(axes: Any, part: dict[str, Any], zero: float, width: float) -> None:
    begin, length = part["begin"] - zero, part["end"] - part["begin"]
    style: dict[str, Any] = {
        "facecolors": COLORS[part["op"]],
        "hatch": HATCHES.get(part["op"]),
        "edgecolor": "white",
        "lw": 0.4,
    }
    axes.broken_barh([(begin, length)], (part["rank"] - HALF, 2 * HALF), **style)
    if part["label"]:
        layer = str(part["layer"])
        label = f"layer {layer}\n{part['label']}" if length > ROOM_FOR_TEXT * width else layer
        color = "black" if part["op"] == "rejected" else "white"
        axes.text(begin + length / 2, part["rank"], label, ha="center", va="center", fontsize=9, color=color)


def _draw_spec_output(axes: Any, spec: dict[str, Any], zero: float, width: float) -> None:
    """Draw an arrow from the sender's lane to the receiver's next to it, and the verdict."""
    toward = 1 if min(spec["receivers"]) > min(spec["senders"]) else -1
    near = (max, min) if toward > 0 else (min, max)
    sender, receiver = near[0](spec["senders"]), near[1](spec["receivers"])
    arrival, end = spec["arrival"] - zero, spec["end"] - zero
    arrow = {"arrowstyle": "->", "color": COLORS["predictor"]}
    axes.annotate("", (arrival, receiver - HALF * toward), (arrival, sender + HALF * toward), arrowprops=arrow)
    if end - arrival > ROOM_FOR_TEXT * width:
        verdict = "accepted:\nroles swap" if spec["accepted"] else "rejected:\nrecompute"
        axes.text(arrival, sender + toward / 2, " A~", va="center", fontsize=9)
        axes.text(end, sender + toward / 2, verdict, ha="right", va="center", fontsize=9)


def _draw_lanes(bars: list[dict[str, Any]], picture: Path, title: str) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({bar["rank"] for bar in bars})
    zero = min(bar["begin"] for bar in bars)
    width = max(bar["end"] for bar in bars) - zero
    linked = is_linked(bars)
    found = {} if linked else spec_outputs(bars)
    parts = _parts(bars, found)
    if linked:
        relabel(parts)
    figure, axes = plt.subplots(figsize=(11, 1 + 1.1 * len(ranks)))
    for part in parts:
        _draw_bar(axes, part, zero, width)
    for spec in found.values():
        _draw_spec_output(axes, spec, zero, width)
    if linked:
        draw_link(axes, bars, zero, HALF)
    sides = {bar["rank"]: f", {bar['side']}" for bar in bars if linked}
    axes.set_yticks(ranks, [f"rank {rank}{sides.get(rank, '')}" for rank in ranks])
    axes.set_ylim(ranks[-1] + 0.4, ranks[0] - 0.4)
    axes.set_xlim(-0.005 * width, 1.005 * width)
    axes.set_xlabel("microseconds")
    axes.set_title(title, parse_math=False, fontsize=10)
    shown = {part["op"] for part in parts if part["end"] - part["begin"] > VISIBLE * width}
    names = [name for name in COLORS if name in shown]
    added = LINK_STYLES if linked else {}
    axes.legend(
        handles=[
            Patch(facecolor=COLORS[name], hatch=HATCHES.get(name), edgecolor="white", label=LABELS.get(name, name))
            for name in names
        ]
        + [Patch(facecolor=color, label=name) for name, color in added.items()],
        ncols=len(names),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.4 / len(ranks)),
        fontsize=9,
        frameon=False,
        columnspacing=1.2,
    )
    figure.savefig(picture, dpi=140, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
