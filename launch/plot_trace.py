"""Draw some layers of a trace, a lane for each rank: `plot_trace.py trace.json out.png --step 3 --layers 4:8`.

Traces are of operations launched one by one (generate.py) or of the kernels inside replayed steps (latency.py).
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
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
from alspec.launch.terminal.flags import Parser, check_picture
from alspec.launch.terminal.output import exit_code, writing

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
    "in_vain": "#bcd3c1",
    "agree": "#b9a5d1",
    "lm_head": "#5b5b7a",
}
LABELS = {
    "pre_attention": "projections (q, k, v)",
    "predictor": "guess",
    "full_attention": "full attention",
    "handover": "handover and waits",
    "post_attention": "post-attention",
    "in_vain": "on a rejected guess",
    "lm_head": "LM head",
}
HATCHES = {"in_vain": "////"}
# Shares of the picture's width: narrower bars get no entry in the legend, or no words.
VISIBLE, ROOM_FOR_WORDS = 0.005, 0.12
HALF = 0.28  # of a bar's height; lanes are 1 apart


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return exit_code(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = Parser(
        prog="plot_trace",
        description="Draw a timeline of sender and receiver from a trace of a pair.",
    )
    parser.add_argument("trace", type=Path, help="file written by --trace of generate.py or latency.py, plain or .gz")
    parser.add_argument("picture", type=Path, help="PNG, SVG or PDF to write")
    parser.add_argument("--step", type=int, required=True, help="decode step to draw")
    parser.add_argument("--layers", default="0:4", help="first:last layer (the last one is not drawn)")
    parser.add_argument("--title", default="", help="what was run, and where")
    args = parser.parse_args(argv)
    check_picture("picture", args.picture)
    first, last = _layers(args.layers)
    bars, run, forced = _read(args.trace)
    found = guesses(bars)
    if not found:
        raise UserError(
            f"trace: {args.trace} has no pair, no rank that works on the guess of another; trace one with "
            "generate.py --speculation paired or latency.py --modes paired"
        )
    chosen = [bar for bar in bars if bar["step"] == args.step and first <= bar["layer"] < last]
    if not chosen:
        raise UserError(f"trace: {args.trace} has no operation of step {args.step}, layers {args.layers}")
    with writing(args.picture):
        _draw(chosen, args.picture, "; ".join(filter(None, (args.title or run, forced))))
    for line in filter(None, (run, forced)):
        print(line)
    print(overlap(bars))
    print(outcomes(found))
    skew_us = clock_skew_us(bars)
    if skew_us is not None:
        print(f"the last kernel of a step ends within {skew_us:.1f} us on all ranks, by the clocks of this trace")
    return 0


def _layers(text: str) -> tuple[int, int]:
    """`4:8` -> (4, 8)."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(f"flags: --layers: expected first:last such as 4:8, found {text!r}")
    return int(first), int(last)


def _read(path: Path) -> tuple[list[dict[str, Any]], str, str]:
    """The operations of a trace, as bars; what was run, and that verdicts were forced, where the trace says so.

    Raises:
        UserError: unreadable, or not a trace of this project.
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
        bars = [bar for event in trace["traceEvents"] if event["ph"] == "X" for bar in work(event)]
        return bars, *_what_was_run(trace.get("otherData"))
    except (LookupError, TypeError, AttributeError):
        raise UserError(
            f"trace: {path} is a trace of something else: its events lack step or layer; give a file written by --trace"
        ) from None


def _what_was_run(measured: dict[str, Any] | None) -> tuple[str, str]:
    """Of the row in a trace: model, hardware and context, and how many verdicts were forced to accept."""
    if measured is None:  # a trace of generate.py, or an older one
        return "", ""
    case, gpu = measured["case"], measured["gpu"]
    where = f"{measured['num_gpus']} x {gpu}" if gpu else f"{case['world']} rank(s) on CPU"
    run = f"{case['shape']}, {where}, {case['dtype']}, {case['mode']}, {case['context']} tokens"
    return run, f"verdicts forced: {100 * case['hit_rate']:.0f} %" if case["forced"] else ""


def work(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar of a slice of the trace while it really worked, in a list; none if it did nothing.

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
            ends[key] = max(ends.get(key, float("-inf")), bar["end"])
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


def guesses(bars: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """What became of a pair's guesses, by step and layer.

    Returns:
        `senders` and `receivers`, ranks; `begin` and `end` of the full attention; `arrival` of the guess, when the
        receivers began to compute on it; `accepted`, that is whether the senders did not do that work again.
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
        on_guess = [bar for bar in rest[key] if bar["rank"] not in senders]
        if on_guess:
            found[key] = {
                "senders": senders,
                "receivers": {bar["rank"] for bar in on_guess},
                "begin": min(bar["begin"] for bar in attention[key]),
                "end": max(bar["end"] for bar in attention[key]),
                "arrival": min(bar["begin"] for bar in on_guess),
                "accepted": len(on_guess) == len(rest[key]),
            }
    return found


def outcomes(found: dict[tuple[int, int], dict[str, Any]]) -> str:
    """How many guesses were accepted, and how long after a layer's full attention the next layer's began (medians)."""
    text = f"{sum(guess['accepted'] for guess in found.values())} of {len(found)} guesses were accepted"
    for verdict, name in ((True, "accepted"), (False, "rejected")):
        times = [
            found[step, layer + 1]["begin"] - guess["begin"]
            for (step, layer), guess in found.items()
            if guess["accepted"] == verdict and (step, layer + 1) in found
        ]
        if times:
            text += f"; where {name}, the next full attention began {median(times):.0f} us after this one"
    return text


def _parts(bars: list[dict[str, Any]], found: dict[tuple[int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Bars to draw, with the words in them: kernels of one operation in a row are one bar, with the gaps between."""
    joined: list[dict[str, Any]] = []
    for bar in sorted(bars, key=lambda bar: (bar["rank"], bar["begin"])):
        if joined and all(bar[name] == joined[-1][name] for name in ("rank", "step", "layer", "op")):
            joined[-1]["end"] = max(joined[-1]["end"], bar["end"])
        else:
            joined.append(bar | {"words": ""})
    # Where the guess is not an operation of its own, it is the beginning of attention.
    is_fused = not any(bar["op"] == "predictor" for bar in bars)
    parts = []
    for bar in joined:
        guess = found.get((bar["step"], bar["layer"]))
        if bar["op"] in ("attention", "full_attention", "post_attention"):
            bar["words"] = LABELS.get(bar["op"], bar["op"])
        if guess and bar["op"] == "post_attention":
            is_sender = bar["rank"] in guess["senders"]
            bar["words"] = "redone" if is_sender else "on the guess"
            bar["op"] = "post_attention" if is_sender or guess["accepted"] else "in_vain"
        if guess and bar["op"] == "full_attention" and is_fused:
            arrival = min(max(guess["arrival"], bar["begin"]), bar["end"])
            parts.append(bar | {"op": "predictor", "end": arrival, "words": ""})
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
    if part["words"]:
        layer = str(part["layer"])
        words = f"layer {layer}\n{part['words']}" if length > ROOM_FOR_WORDS * width else layer
        color = "black" if part["op"] == "in_vain" else "white"
        axes.text(begin + length / 2, part["rank"], words, ha="center", va="center", fontsize=9, color=color)


def _draw_guess(axes: Any, guess: dict[str, Any], zero: float, width: float) -> None:
    """An arrow between the two lanes of sender and receiver that lie next to each other, and the verdict."""
    toward = 1 if min(guess["receivers"]) > min(guess["senders"]) else -1
    near = (max, min) if toward > 0 else (min, max)
    sender, receiver = near[0](guess["senders"]), near[1](guess["receivers"])
    at, end = guess["arrival"] - zero, guess["end"] - zero
    arrow = {"arrowstyle": "->", "color": COLORS["predictor"]}
    axes.annotate("", (at, receiver - HALF * toward), (at, sender + HALF * toward), arrowprops=arrow)
    if end - at > ROOM_FOR_WORDS * width:
        verdict = "accepted:\nroles swap" if guess["accepted"] else "rejected:\nredo"
        axes.text(at, sender + toward / 2, " guess", va="center", fontsize=9)
        axes.text(end, sender + toward / 2, verdict, ha="right", va="center", fontsize=9)


def _draw_lanes(bars: list[dict[str, Any]], picture: Path, title: str) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({bar["rank"] for bar in bars})
    zero = min(bar["begin"] for bar in bars)
    width = max(bar["end"] for bar in bars) - zero
    found = guesses(bars)
    parts = _parts(bars, found)
    figure, axes = plt.subplots(figsize=(11, 1 + 1.1 * len(ranks)))
    for part in parts:
        _draw_bar(axes, part, zero, width)
    for guess in found.values():
        _draw_guess(axes, guess, zero, width)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_ylim(ranks[-1] + 0.4, ranks[0] - 0.4)
    axes.set_xlim(-0.005 * width, 1.005 * width)
    axes.set_xlabel("microseconds")
    axes.set_title(title, parse_math=False, fontsize=10)
    shown = {part["op"] for part in parts if part["end"] - part["begin"] > VISIBLE * width}
    names = [name for name in COLORS if name in shown]
    axes.legend(
        handles=[
            Patch(facecolor=COLORS[name], hatch=HATCHES.get(name), edgecolor="white", label=LABELS.get(name, name))
            for name in names
        ],
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
