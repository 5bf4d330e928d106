"""How kernels are timed beside each other; what is timed needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from alspec.launch import bench_kernels


@dataclass
class Graph:
    """Stands for a captured graph; a replay takes as many microseconds as its run says."""

    us: float

    def replay(self) -> None:
        pass


def test_launches_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[float] = []

    def replay_us(graph: Any) -> float:
        replayed.append(graph.us)
        # What changes with time: every replay takes longer than the one before.
        return float(graph.us) + len(replayed) / 1000

    monkeypatch.setattr(bench_kernels, "_captured", lambda run, copies: Graph(run(copies)))
    monkeypatch.setattr(bench_kernels, "_replay_us", replay_us)
    runs = [lambda copies: 100.0 * copies, lambda copies: 101.0 * copies, lambda copies: 99.0 * copies]
    times = bench_kernels.times_us(runs, 4)
    assert [us["p50"] for us in times] == pytest.approx([100, 101, 99], abs=0.05)
    assert replayed[-3 * bench_kernels.REPLAYS :] == [400.0, 404.0, 396.0] * bench_kernels.REPLAYS
    assert bench_kernels.times_us(runs[1:2], 2)[0]["p50"] == pytest.approx(101, abs=0.1)


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are checked before the first is timed; the first that there is gives the base, or it is given."""
    done: list[object] = []
    q, k, v = (torch.zeros(2, 1, *shape) for shape in ((4, 16), (2, 7, 16), (2, 7, 16)))
    case = bench_kernels.Case(q, k, v, torch.tensor([7], dtype=torch.int32))

    class Results:
        def add(self, bench: str, impl: str, label: object, us: dict[str, float], size: int, base: float) -> None:
            assert (label, size) == ({"context": 7}, case.num_bytes)
            done.append((bench, impl, us["p50"], base))

    def plain(_: int) -> tuple[torch.Tensor, ...]:
        raise AssertionError("not run")

    def guess(_: int) -> tuple[torch.Tensor, ...]:
        raise AssertionError("not run")

    def times_us(runs: list[object], copies: int) -> list[dict[str, float]]:
        assert copies == 2
        done.append(runs)
        return [{"p50": float(place)} for place in range(3, 3 + len(runs))]

    monkeypatch.setattr(bench_kernels, "check", lambda _, run, chunk_size: done.append((run, chunk_size)))
    monkeypatch.setattr(bench_kernels, "times_us", times_us)
    runs = [("a", "ours", plain, 0), ("a", "theirs", None, 0), ("b", "ours", guess, 128)]
    results: Any = Results()
    assert bench_kernels.add_runs(results, {"context": 7}, case, runs) == 3.0
    assert done == [(plain, 0), (guess, 128), [plain, guess], ("a", "ours", 3.0, 3.0), ("b", "ours", 4.0, 3.0)]
    assert bench_kernels.add_runs(results, {"context": 7}, case, runs, 12.0) == 12.0
    assert done[-1] == ("b", "ours", 4.0, 12.0)
