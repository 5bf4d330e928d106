"""What plot_trace.py adds for a pair over a link: verdicts above the verifier, and arrows for the messages taken."""

from __future__ import annotations

from typing import Any

__all__ = ["LINK_STYLES", "VERDICTS", "draw_link", "link_outcomes", "messages_taken", "relabel", "verdict_spans"]

Bar = dict[str, Any]

# No colour of an operation in plot_trace.py is here.
VERDICTS = {
    "accepted, x taken": "#17a2a2",
    "accepted, no right x in time": "#f6ea6a",
    "rejected": "#b5179e",
}
_RESTART = "#6b4423"  # arrows of x that the speculator takes
LINK_STYLES = VERDICTS | {"x taken by the speculator": _RESTART}
STRIP = 0.07  # height of the strip with verdicts


def _of(bars: list[Bar], side: str, op: str) -> dict[tuple[int, int], list[Bar]]:
    """(step, layer) -> the bars of an operation on one side."""
    found: dict[tuple[int, int], list[Bar]] = {}
    for bar in bars:
        if bar.get("side") == side and bar["op"] == op:
            found.setdefault((bar["step"], bar["layer"]), []).append(bar)
    return found


def _taken(bars: list[Bar], side: str) -> dict[tuple[int, int], list[Bar]]:
    """(step, layer) -> the bars that took x of the other side."""
    return _of([bar for bar in bars if bar.get("taken")], side, "handover")


def messages_taken(bars: list[Bar]) -> list[dict[str, Any]]:
    """The messages whose x was taken, in order of layers.

    Returns:
        For each: `step`, `layer`, `to` (a side), `sent` and `taken` (times), and neighbouring ranks `source`, `rank`.
        The speculator sends x behind its post-attention, the verifier behind its pre-attention.
    """
    found = []
    for to, source, sends in (
        ("verifier", "speculator", "post_attention"),
        ("speculator", "verifier", "pre_attention"),
    ):
        sent = _of(bars, source, sends)
        for key, takers in sorted(_taken(bars, to).items()):
            if key not in sent:  # of a layer that is not drawn, or behind the last one
                continue
            ranks, sources = {bar["rank"] for bar in takers}, {bar["rank"] for bar in sent[key]}
            is_up = max(ranks) < min(sources)
            found.append(
                {
                    "step": key[0],
                    "layer": key[1],
                    "to": to,
                    "sent": max(bar["end"] for bar in sent[key]),
                    "taken": max(bar["end"] for bar in takers),
                    "source": min(sources) if is_up else max(sources),
                    "rank": max(ranks) if is_up else min(ranks),
                }
            )
    return found


def verdict_spans(bars: list[Bar]) -> list[tuple[str, int, float, float]]:
    """(verdict, rank, begin, end) of each layer of the verifier, from its pre-attention to its last kernel."""
    found = []
    taken = _taken(bars, "verifier")
    for key, decided in sorted(_of(bars, "verifier", "verdict").items()):
        for bar in decided:
            same = [each for each in bars if (each["step"], each["layer"], each["rank"]) == (*key, bar["rank"])]
            name = "accepted, x taken" if key in taken else "accepted, no right x in time"
            span = min(each["begin"] for each in same), max(each["end"] for each in same)
            found.append((name if bar["accepted"] else "rejected", bar["rank"], *span))
    return found


def link_outcomes(bars: list[Bar]) -> str:
    """How many layers the verifier skipped, computed on `A~` and computed on `A`; how many the speculator lost."""
    first = min(bar["rank"] for bar in bars)
    names = [name for name, rank, *_ in verdict_spans(bars) if rank == first]
    late, rejected = (names.count(name) for name in ("accepted, no right x in time", "rejected"))
    lost = {(bar["step"], bar["layer"]) for bar in bars if bar.get("lost")}
    restarts = sum(message["to"] == "speculator" for message in messages_taken(bars))
    return (
        f"{names.count('accepted, x taken')} of {len(names)} x were taken by the verifier, {late} were late or wrong, "
        f"{rejected} A~ were rejected; the speculator took {restarts} x and lost {len(lost)} layers"
    )


def relabel(parts: list[Bar]) -> None:
    """Name the operations of a pair over a link: what each side computes on, and what was lost."""
    rejected = {(bar["step"], bar["layer"]) for bar in parts if bar["op"] == "verdict" and not bar["accepted"]}
    for part in parts:
        if part["op"] != "post_attention":
            continue
        if part["side"] == "speculator":
            part["op"] = "rejected" if part["lost"] else "post_attention"
            part["label"] = "on A~"
        else:
            part["label"] = "on A" if (part["step"], part["layer"]) in rejected else "on A~"


def draw_link(axes: Any, bars: list[Bar], zero: float, half: float) -> None:
    """Draw the verdicts as a strip above each verifier's lane, and an arrow for each message taken.

    half: half the height of a bar; lanes are 1 apart.
    """
    for name, rank, begin, end in verdict_spans(bars):
        axes.broken_barh([(begin - zero, end - begin)], (rank - half - 1.5 * STRIP, STRIP), facecolors=VERDICTS[name])
    for message in messages_taken(bars):
        toward = 1 if message["rank"] > message["source"] else -1
        color = VERDICTS["accepted, x taken"] if message["to"] == "verifier" else _RESTART
        axes.annotate(
            "",
            (message["taken"] - zero, message["rank"] - half * toward),
            (message["sent"] - zero, message["source"] + half * toward),
            arrowprops={"arrowstyle": "->", "color": color},
        )
