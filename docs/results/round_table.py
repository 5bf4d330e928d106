"""The table of captured rounds against plain steps, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table


def rounds(rows: list[dict[str, Any]]) -> str:
    """The section on the time of rounds; empty without rows."""
    if not rows:
        return ""
    text = (
        "8B shape with random weights over a cache of random numbers: a round with K drafts against a plain step of the"
        " same cache and context, in one run. A forced acceptance takes drafts whatever they are."
    )
    return "\n\n".join(["## Rounds with drafts", text, provenance(*rows), against_plain(rows)])


def against_plain(rows: list[dict[str, Any]]) -> str:
    """A line for each kind of round and context; later rows replace earlier ones."""
    plain, found = {}, {}
    for row in rows:
        case = row["case"]
        if row["bench"] == "decode_step":
            plain[_place(case)] = row
        else:
            found[_place(case), case["draft"], case["draft_tokens"], case["acceptance"]] = row
    lines = []
    for (place, draft, num_drafts, acceptance), row in found.items():
        step_ms, round_ms = plain[place]["us"]["p50"] / 1e3, row["us"]["p50"] / 1e3
        gain = row["tokens_per_s"] / plain[place]["tokens_per_s"]
        lines.append(
            [
                draft, str(num_drafts), place[1], str(place[2]), f"{acceptance:.0%}", f"{step_ms:.2f}",
                f"{round_ms:.2f} ({round_ms / step_ms:.2f}x)", f"{row['tokens_per_round']:.2f}",
                f"{row['tokens_per_s']:.0f} ({gain:.2f}x)",
            ]
        )  # fmt: skip
    head = ["drafter", "K", "cache", "tokens", "accepted (forced)", "plain step, ms", "round, ms", "tokens a round"]
    return table([*head, "tokens/s"], lines)


def _place(case: dict[str, Any]) -> tuple[int, str, int]:
    """What a plain step and a round have in common: ranks, cache and context."""
    return case["world"], case["kv_cache"], case["context"]
