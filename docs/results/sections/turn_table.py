"""The table of second turns of conversations, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table


def turns(rows: list[dict[str, Any]]) -> str:
    """Second turns of conversations. The last of repeated rows counts."""
    if not rows:
        return ""
    text = (
        "Time until the host has the first token of a second turn, p50: with what the cache kept of the first prompt"
        " and its answer, and with all of it processed anew."
    )
    lines: dict[tuple[Any, ...], list[str]] = {}
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        case, us, anew = row["case"], row["us"]["p50"], row["anew_us"]["p50"]
        key = (case["shape"], case["world"], case["mode"], case["kv_cache"], case["context"])
        cells = [str(row["reused_tokens"]), str(case["new"]), f"{us / 1e3:.1f}", f"{anew / 1e3:.1f}"]
        kept[key] = row
        lines[key] = [*map(str, key), *cells, f"{anew / us:.0f}x"]
    head = ["shape", "GPUs", "mode", "cache", "first prompt", "kept", "new", "ms", "anew, ms", "sooner"]
    return "\n\n".join(
        ["## Second turns", text, provenance(*kept.values()), table(head, [lines[key] for key in sorted(lines)])]
    )
