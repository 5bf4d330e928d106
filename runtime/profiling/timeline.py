"""Timeline of operations on each rank, with one time axis for all ranks."""

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

    Time zero is the call of `start`. Every rank calls it right after the same barrier, so that the axes of the ranks
    agree up to the skew of that barrier.

    Args:
        device: where operations run.
        enabled: if False, nothing is recorded.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self._cuda = device.type == "cuda"
        self._zero: Any = None
        self._spans: list[tuple[str, int, int, Any, Any]] = []
        self.step = 0

    def start(self) -> None:
        """Set time zero and drop all earlier records."""
        self._spans.clear()
        self.step = 0
        self._zero = self._now()

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

    def rows(self) -> list[dict[str, Any]]:
        """One `{"op", "layer", "step", "start_us", "end_us"}` for each operation, in launch order."""
        if self._cuda:
            torch.cuda.synchronize()

        def since_zero_us(moment: Any) -> float:
            if self._cuda:
                return round(float(self._zero.elapsed_time(moment)) * 1e3, 3)
            return round(float(moment - self._zero) * 1e6, 3)

        return [
            {"op": op, "layer": layer, "step": step, "start_us": since_zero_us(start), "end_us": since_zero_us(end)}
            for op, layer, step, start, end in self._spans
        ]


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
