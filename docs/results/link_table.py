"""The table of a pair over a link that kernels cannot reach across, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table, times_as_fast

SOCKETS = "`NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo`"


def link(rows: list[dict[str, Any]]) -> str:
    """The section on pairs over a link; empty without rows."""
    if not rows:
        return ""
    text = (
        "8B shape with random weights, one request, bf16. Two GPUs of one host that may talk over TCP alone"
        f" ({SOCKETS}), as two hosts would, against one of them alone in the same run. Hits above 0 % are forced."
    )
    return "\n\n".join(["## Pairs over TCP", text, provenance(*rows), against_one(rows)])


def against_one(rows: list[dict[str, Any]]) -> str:
    """A line for each hit rate: tokens/s at each context, and how many times as fast as one GPU alone."""
    alone = {row["case"]["context"]: row for row in rows if row["case"]["mode"] == "off"}
    pairs: dict[float, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["case"]["mode"] == "paired":
            pairs.setdefault(row["case"]["hit_rate"], {})[row["case"]["context"]] = row
    lines = [["one GPU alone", *(f"{row['tokens_per_s']:.0f}" for row in alone.values())]]
    for hit_rate, found in sorted(pairs.items()):
        cells = [f"{found[at]['tokens_per_s']:.0f} ({times_as_fast(alone[at], found[at])})" for at in alone]
        lines.append([f"1 + 1, {hit_rate:.0%} of the layers accept", *cells])
    return table(["", *(f"{context} tokens" for context in alone)], lines)
