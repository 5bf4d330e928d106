"""`launch/bench_kernels.py --bench turn`: what a second turn keeps, its rows and tables; on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from results_folder import copy_results, make_tables
from rich.console import Console

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.launch import bench_kernels
from alspec.launch.bench import bench_turn
from alspec.launch.bench.bench_turn import ANSWER, NEW, measure_turns, turn_table

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_turn, "SAMPLES", 2)


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=folder, transport="gloo", **options)


def test_a_second_turn_keeps_the_first_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(float(number) for number in range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: next(times) ** 2)
    rows: list[Row] = []
    measure_turns(engine_config(checkpoint), [100, 300, 100], rows.append)
    assert [row["case"]["context"] for row in rows] == [100, 300]
    for row in rows:
        # All of the first prompt and its answer, but the last token.
        assert row["reused_tokens"] == row["case"]["context"] + ANSWER - 1
        assert 0 < row["us"]["p20"] <= row["us"]["p50"] <= row["us"]["p80"]
        assert row["anew_us"]["p50"] > row["us"]["p50"], "the clock of this test runs faster and faster"


def test_a_conversation_beyond_the_positions_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="--contexts: 1000 tokens and the 288 steps after them are beyond"):
        measure_turns(engine_config(checkpoint), [1000], lambda row: None)


def test_command_and_tables(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU poses as a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(bench_kernels, "stream_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(bench_kernels, "prompt_engines", lambda world_size: [engine_config(checkpoint)])
    project = copy_results(tmp_path)
    path = project / "docs" / "results" / "second_turn.jsonl"
    path.unlink(missing_ok=True)
    assert "## Second turns" not in make_tables(project)
    assert bench_kernels.main(["--bench", "turn", "--contexts", "70", "--rows", str(path)]) == 0
    assert str(70 + ANSWER - 1) in capsys.readouterr().out
    (row,) = map(json.loads, path.read_text().splitlines())
    row |= {"us": {"p20": 1.0, "p50": 2000.0, "p80": 3.0}, "anew_us": {"p20": 1.0, "p50": 50000.0, "p80": 3.0}}
    path.write_text(json.dumps(row) + "\n")
    console = Console(width=180)
    with console.capture() as shown:
        console.print(turn_table([row]))
    assert "25.0x" in shown.get()
    lines = make_tables(project)
    assert "## Second turns" in lines
    expected = f"| {checkpoint.name} | 1 | off | bf16 | 70 | {70 + ANSWER - 1} | {NEW} | 2.0 | 50.0 | 25x |"
    assert expected in lines
