"""Timeline of operations and rounds on each rank, with one time axis for all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Timeline", "trace_json"]


class Timeline:
    """Records start and end of operations, by CUDA events on GPUs and by the host's clock on CPUs.

    Rounds (docs/drafts.md) are recorded by the host's clock everywhere: it reads each of them.

    Time zero is the call of `start`. Every rank calls it right after the same barrier, so that the axes of the ranks
    agree up to the skew of that barrier.

    Args:
        device: where operations run.
        enabled: if False, nothing is recorded. The attributes `enabled` and `keeps_rounds` change that later, for
            operations and for rounds.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = self.keeps_rounds = enabled
        self._cuda = device.type == "cuda"
        self._zero: Any = None
        self._zero_s = 0.0
        self._spans: list[tuple[str, int, int, Any, Any]] = []
        self._rounds: list[dict[str, Any]] = []
        self.step = 0

    def start(self) -> None:
        """Set time zero and drop all earlier records."""
        self._spans.clear()
        self._rounds.clear()
        self.step = 0
        if self._cuda and self.keeps_rounds:
            torch.cuda.synchronize()  # both clocks then start together
        self._zero, self._zero_s = self._now(), time.perf_counter()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, operation: str, layer: int) -> Iterator[None]:
        """Record one operation of the current step."""
        if not self.enabled:
            yield
            return
        start = self._now()
        yield
        self._spans.append((operation, layer, self.step, start, self._now()))

    def add_round(self, step: int, drafts: list[tuple[int, int]], step_us: float) -> None:
        """Record a round that the host has just read, so that it ends now.

        Its slice begins `step_us` before, but not before the end of the previous one: the host may have read that late.

        Args:
            step: number of the round.
            drafts: (drafts, accepted ones) of each live request; no drafts in a plain step.
            step_us: its time, see `StepRecord`; that of captured rounds is the device's.
        """
        if not self.keeps_rounds:
            return
        end_us = (time.perf_counter() - self._zero_s) * 1e6
        earliest_us = self._rounds[-1]["end_us"] if self._rounds else 0.0
        self._rounds.append(
            {
                "op": "round",
                "layer": -1,
                "step": step,
                "start_us": round(max(end_us - step_us, earliest_us), 3),
                "end_us": round(end_us, 3),
                "step_us": round(step_us, 3),
                "drafts": [made for made, _ in drafts],
                "accepted": [accepted for _, accepted in drafts],
            }
        )

    def rows(self) -> list[dict[str, Any]]:
        """One `{"op", "layer", "step", "start_us", "end_us"}` for each operation, in launch order, then the rounds.

        A round also has `step_us`, and lists of `drafts` and `accepted` ones of the live requests.
        """
        if self._cuda:
            torch.cuda.synchronize()

        def since_zero_us(moment: Any) -> float:
            if self._cuda:
                return round(float(self._zero.elapsed_time(moment)) * 1e3, 3)
            return round(float(moment - self._zero) * 1e6, 3)

        return [
            {"op": op, "layer": layer, "step": step, "start_us": since_zero_us(start), "end_us": since_zero_us(end)}
            for op, layer, step, start, end in self._spans
        ] + self._rounds


def trace_json(rows_by_rank: list[list[dict[str, Any]]], measured: dict[str, Any] | None = None) -> str:
    """A trace for Perfetto and chrome://tracing, as JSON: one process for each rank, one slice for each operation.

    Overlapping operations of a rank are drawn in separate lanes.

    Args:
        rows_by_rank: rows of each rank. All fields except `op`, `start_us` and `end_us` become the slice's arguments.
        measured: the measured row of the same steps without a profiler, with settings and provenance; it becomes the
            trace's `otherData`.
    """
    events: list[dict[str, Any]] = []
    for rank, rows in enumerate(rows_by_rank):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        lane_ends: list[float] = []
        for row in rows:
            lane = next((lane for lane, end in enumerate(lane_ends) if end <= row["start_us"]), len(lane_ends))
            lane_ends[lane : lane + 1] = [row["end_us"]]
            events.append(
                {
                    "ph": "X",
                    "name": row["op"],
                    "cat": "decode",
                    "pid": rank,
                    "tid": lane,
                    "ts": row["start_us"],
                    "dur": row["end_us"] - row["start_us"],
                    "args": {name: value for name, value in row.items() if name not in ("op", "start_us", "end_us")},
                }
            )
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if measured is not None:
        trace["otherData"] = measured
    return json.dumps(trace)
