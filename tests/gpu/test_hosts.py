"""A pair whose groups are on two hosts, each with its own torchrun: this machine is both, and its GPUs meet over TCP.

In fp32 tokens and verdicts are those of `simulated` on one GPU; see test_nccl.py on equality.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu_jobs import environment, gpus, hosts, licence_ids, needs, torchrun
from jobs import GONE_WITHIN_S, free_port
from paths import WORKERS

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, needs(2), pytest.mark.timeout(900)]

PROMPTS = {256: 7082, 320: 1673, 1500: 6021}  # lengths and starts; among those of test_nccl.py
WORKER = str(WORKERS / "gpu_worker.py")


def cases(mode: str, **engine: str) -> dict[str, Any]:
    """One run of gpu_worker.py over the prompts."""
    ids = licence_ids()
    settings = {"speculation": {"mode": mode, "predictor": "window", "always": True}, "dtype": "fp32"} | engine
    run = {"name": "run", "engine": settings, "thresholds": ["0", "0.1", "inf"], "sampled": False, "long": False}
    batches = [[ids[start : start + length]] for length, start in PROMPTS.items()]
    return {"runs": [run], "batches": batches, "max_new_tokens": 24}


@contextmanager
def running(
    commands: list[tuple[list[str], dict[str, str]]], folder: Path
) -> Iterator[list[tuple[subprocess.Popen[bytes], Path]]]:
    """The commands of a job, side by side, each with the file of its output; they do not outlive the block."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for host, (command, variables) in enumerate(commands):
            log = folder / f"{host}.log"
            with log.open("w") as output:
                started.append((subprocess.Popen(command, env=variables, stdout=output, stderr=output), log))
        yield started
    finally:
        for process, _ in started:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(timeout=60)


def rows_of(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> list[dict[str, Any]]:
    """Run the commands of a job; returns what rank 0 wrote."""
    with running(commands, folder) as started:
        for process, log in started:
            assert process.wait(timeout=600) == 0, log.read_text()[-3000:]
    return list(json.loads((folder / "out.json").read_text())["run"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Tokens and verdicts of one GPU."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "cases.json").write_text(json.dumps(cases("simulated", transport="nccl")))
    visible = gpus(0, 1)
    program = [WORKER, str(folder / "cases.json"), str(folder / "out.json")]
    return rows_of([(torchrun(1, visible, program), environment(visible))], folder)


@pytest.mark.parametrize(
    ("num_ranks", "transport", "graph", "used"),
    [
        (2, "auto", "on", "nccl"),
        pytest.param(4, "auto", "on", "symm+nccl", marks=needs(4)),
        pytest.param(4, "host", "off", "host+nccl", marks=needs(4)),
        pytest.param(4, "nccl", "on", "nccl", marks=needs(4)),
    ],
)
def test_two_hosts_give_the_tokens_of_one_gpu(
    reference: list[dict[str, Any]], num_ranks: int, transport: str, graph: str, used: str, tmp_path: Path
) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(cases("paired", transport=transport, cuda_graph=graph)))
    program = [WORKER, str(tmp_path / "cases.json"), str(tmp_path / "out.json")]
    rows = rows_of(hosts(num_ranks, free_port(), program), tmp_path)
    assert {row["transport"] for row in rows} == {used}
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in reference]
    assert [row["hits"] for row in rows] == [row["hits"] for row in reference]
    assert {hit for row in rows for step in row["hits"] for layer in step for hit in layer} == {0, 1}


def process_ids(logs: list[Path]) -> dict[int, int]:
    """The process of each rank, once it has printed it in the middle of its steps."""
    lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith('{"rank"')]
    return {row["rank"]: row["pid"] for row in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("num_ranks", "transport", "rank", "sent"),
    [
        (2, "nccl", 1, signal.SIGKILL),
        pytest.param(2, "nccl", 0, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(4, "symm+nccl", 3, signal.SIGKILL, marks=[pytest.mark.full, needs(4)]),
        pytest.param(4, "symm+nccl", 1, signal.SIGSTOP, marks=[pytest.mark.full, needs(4)]),
    ],
)
def test_a_lost_rank_ends_the_job_on_both_hosts(
    num_ranks: int, transport: str, rank: int, sent: signal.Signals, tmp_path: Path
) -> None:
    """In the middle of captured steps, over TCP. A host does not see the processes of the other one."""
    program = [str(WORKERS / name) for name in ("own_host.py", "loop_worker.py")]
    with running(hosts(num_ranks, free_port(), [*program, "paired", transport, "endless"]), tmp_path) as started:
        logs, deadline = [log for _, log in started], time.monotonic() + 180
        while len(found := process_ids(logs)) < num_ranks:
            assert time.monotonic() < deadline, [log.read_text()[-1500:] for log in logs]
            assert all(process.poll() is None for process, _ in started), [log.read_text()[-1500:] for log in logs]
            time.sleep(0.1)
        time.sleep(1.5)  # a heartbeat reports a step
        os.kill(found[rank], sent)
        begun = time.monotonic()
        codes = [process.wait(timeout=60) for process, _ in started]
        assert time.monotonic() - begun < GONE_WITHIN_S
    assert 0 not in codes
    reported = [line for log in logs for line in log.read_text().splitlines() if line.startswith("alspec: exit")]
    named = [
        re.match(rf"alspec: exit 5: rank {rank} (died|stalled) at step (\d+), operation \w+", line) for line in reported
    ]
    assert named
    assert all(named), reported
    assert all(int(match[2]) >= 1 for match in named if match), reported
