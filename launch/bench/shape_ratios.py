"""Rows of `bench_kernels.py --bench shapes` as ratios: the time of other implementations over ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from alspec.runtime.profiling.stats import percentile

__all__ = ["OURS", "SDPA", "Ratio", "distribution", "lengths_text", "ratios"]

OURS, SDPA = "alspec.lean_decode_attention", "torch.sdpa"


@dataclass(frozen=True)
class Ratio:
    """One shape: how many times longer the others take than our kernel, by medians."""

    case: dict[str, Any]
    num_bytes: int  # K and V
    us: float  # ours
    sdpa: float
    best: float  # the quickest other implementation


def ratios(rows: list[dict[str, Any]]) -> list[Ratio]:
    """The ratios of each shape, in the order of the rows. Rows of other benches are left out.

    The row of our kernel is the first of a shape. If a shape was measured again, only the rows of the last time count.
    """
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["bench"] == "shapes":
            key = json.dumps(row["case"], sort_keys=True)
            if row["impl"] == OURS:
                shapes[key] = {}
            shapes.setdefault(key, {})[row["impl"]] = row
    found = []
    for impls in shapes.values():
        if impls.keys() >= {OURS, SDPA}:
            ours = impls[OURS]
            times = {impl: row["us"]["p50"] / ours["us"]["p50"] for impl, row in impls.items() if impl != OURS}
            found.append(Ratio(ours["case"], ours["bytes"], ours["us"]["p50"], times[SDPA], min(times.values())))
    return found


def distribution(values: list[float]) -> dict[str, str]:
    """5th percentile, 25th, median, and the share of values below 1, as texts; values must not be empty."""
    shown = {name: percentile(values, share) for name, share in (("p5", 0.05), ("p25", 0.25), ("median", 0.5))}
    below = sum(value < 1 for value in values) / len(values)
    return {**{name: f"{value:.2f}x" for name, value in shown.items()}, "below 1": f"{100 * below:.0f} %"}


def lengths_text(seq_lens: list[int]) -> str:
    """`996`, or `129 to 20013` if requests differ."""
    shortest, longest = min(seq_lens), max(seq_lens)
    return str(longest) if shortest == longest else f"{shortest} to {longest}"
