"""Rows of the timeline, and the trace file made from them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from alspec.runtime.profiling.timeline import Timeline, trace_json

CPU = torch.device("cpu")


def test_spans_become_rows() -> None:
    timeline = Timeline(CPU, enabled=True)
    timeline.start()
    with timeline.span("prefill", 0):
        time.sleep(0.01)
    timeline.step = 3
    with timeline.span("verdict", 5):
        pass
    first, second = timeline.rows()
    assert (first["op"], first["layer"], first["step"]) == ("prefill", 0, 0)
    assert (second["op"], second["layer"], second["step"]) == ("verdict", 5, 3)
    assert first["start_us"] >= 0
    assert first["start_us"] + 10_000 <= first["end_us"] <= second["start_us"] <= second["end_us"]


def test_start_sets_a_new_zero() -> None:
    """A second generation has its own rows."""
    timeline = Timeline(CPU, enabled=True)
    timeline.start()
    timeline.step = 9
    with timeline.span("attention", 1):
        pass
    timeline.start()
    assert timeline.rows() == []
    with timeline.span("prefill", 0):
        pass
    (row,) = timeline.rows()
    assert (row["op"], row["step"]) == ("prefill", 0)
    assert row["start_us"] >= 0


def test_a_disabled_timeline_records_nothing() -> None:
    timeline = Timeline(CPU, enabled=False)
    timeline.start()
    ran = False
    with timeline.span("attention", 0):
        ran = True
    assert ran
    assert timeline.rows() == []


def test_an_error_inside_a_span_is_raised() -> None:
    timeline = Timeline(CPU, enabled=True)
    timeline.start()
    with pytest.raises(ZeroDivisionError), timeline.span("attention", 0):
        raise ZeroDivisionError
    assert timeline.rows() == []


def test_rounds_end_when_they_are_read_and_do_not_overlap() -> None:
    """The second one was read late: its slice begins at the end of the first one, whatever its own time."""
    timeline = Timeline(CPU, enabled=True)
    timeline.enabled = False
    timeline.start()
    time.sleep(0.01)
    with timeline.span("attention", 0):
        timeline.add_round(1, [(4, 2), (0, 0)], 5_000.0)
    timeline.add_round(2, [(3, 3)], 9_000.0)
    first, second = timeline.rows()
    assert first | {"start_us": 0, "end_us": 0} == {
        "op": "round", "layer": -1, "step": 1, "start_us": 0, "end_us": 0, "step_us": 5_000.0, "drafts": [4, 0],
        "accepted": [2, 0],
    }  # fmt: skip
    assert first["end_us"] >= 10_000
    assert first["end_us"] - first["start_us"] == pytest.approx(5_000, abs=0.01)
    assert first["end_us"] == second["start_us"] <= second["end_us"]
    assert (second["step_us"], second["drafts"], second["accepted"]) == (9_000.0, [3], [3])
    timeline.keeps_rounds = False
    timeline.start()
    timeline.add_round(1, [(4, 2)], 5.0)
    assert timeline.rows() == []


def test_the_trace_file_has_a_process_for_each_rank(tmp_path: Path) -> None:
    rows = [
        [{"op": "attention", "layer": 0, "step": 1, "start_us": 10.0, "end_us": 12.5}],
        [
            {"op": "handover", "layer": 0, "step": 1, "start_us": 10.5, "end_us": 11.0},
            {"op": "post_attention", "layer": 0, "step": 1, "start_us": 11.0, "end_us": 14.0},
        ],
    ]
    (tmp_path / "trace.json").write_text(trace_json(rows))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in slices] == [
        (0, "attention", 10.0, 2.5),
        (1, "handover", 10.5, 0.5),
        (1, "post_attention", 11.0, 3.0),
    ]
    assert all(event["args"] == {"layer": 0, "step": 1} and event["tid"] == 0 for event in slices)


def test_the_trace_file_contains_the_measured_case(tmp_path: Path) -> None:
    measured = {"case": {"shape": "tiny", "hit_rate": 0.5, "forced": True}, "commit": "1234567"}
    (tmp_path / "trace.json").write_text(trace_json([[]], measured))
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == measured


def test_overlapping_operations_get_lanes(tmp_path: Path) -> None:
    spans = [("a", 0.0, 10.0), ("b", 9.0, 30.0), ("c", 10.0, 12.0), ("d", 11.0, 13.0), ("e", 12.0, 20.0)]
    rows = [{"op": name, "step": 1, "start_us": start, "end_us": end} for name, start, end in spans]
    (tmp_path / "trace.json").write_text(trace_json([rows]))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["tid"]) for event in slices] == [("a", 0), ("b", 1), ("c", 0), ("d", 2), ("e", 0)]
    assert all(event["args"] == {"step": 1} for event in slices)
