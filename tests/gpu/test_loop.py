"""Captured steps on several GPUs: a rank dies, stops, is late, loses a packet or computes NaN, or no rank reaches
another's memory; and jobs in a row.

One job runs at a time. The fast tier has one case of each fault for each transport.
"""

import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gpu_jobs import environment, gpus, needs, torchrun
from paths import ROOT, WORKERS
from tiers import fast

GENERATE = str(ROOT / "launch" / "generate.py")
WORKER = str(WORKERS / "loop_worker.py")
GONE_WITHIN_S = 10.0
PAUSES_S = 0.1  # a generation with pauses takes longer
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TRANSPORTS = ("symm", "host", "nccl")
full, four = pytest.mark.full, [pytest.mark.full, needs(4)]
# In fp32 the best tokens lead by 0.05 and more: no order of sums changes them.
STORM = ["--prompt", "The storm had passed, and", "--max-new-tokens", "30", "--ignore-eos", "--dtype", "fp32"]

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, needs(2), pytest.mark.timeout(600)]


@contextmanager
def job(num_ranks: int, program: list[str]) -> Iterator[subprocess.Popen[str]]:
    """torchrun of a program with its arguments; it does not outlive the block."""
    visible, pipe = gpus(0, num_ranks), subprocess.PIPE
    command = torchrun(num_ranks, visible, program)
    process = subprocess.Popen(command, env=environment(visible), stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.communicate(timeout=60)


def outcome(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, error = process.communicate(timeout=timeout_s)
    return process.returncode, out, error


def run(num_ranks: int, program: list[str]) -> tuple[int, str, str]:
    """The outcome of a job."""
    with job(num_ranks, program) as process:
        return outcome(process)


LOSSES = [
    *((mode, 2, lost, sent) for mode, lost, sent in (("off", 1, KILL), ("paired", 0, STOP), ("off", 0, STOP))),
    *(
        ("paired", 2, 1, KILL),
        ("off", 4, 3, KILL),
        ("paired", 4, 2, STOP),
        ("rounds", 2, 1, KILL),
        ("rounds", 2, 0, STOP),
    ),
]
FAST_LOSSES = {
    "symm": [("off", 2, 1, KILL), ("rounds", 2, 1, KILL)],
    "host": [("paired", 2, 0, STOP)],
    "nccl": [("paired", 2, 1, KILL)],
}


@pytest.mark.parametrize(
    ("transport", "mode", "ranks", "lost", "sent"),
    [
        pytest.param(transport, *loss, marks=[] if loss in FAST_LOSSES[transport] else four if loss[1] == 4 else full)
        for transport in TRANSPORTS
        for loss in LOSSES
    ]
    + [pytest.param("symm+nccl", "paired", 4, lost, KILL, marks=four) for lost in (1, 2)],
)
def test_a_lost_rank_ends_the_job_and_is_named(
    transport: str, mode: str, ranks: int, lost: int, sent: signal.Signals
) -> None:
    """`kill -9` and `kill -STOP` in the middle of captured steps, or of rounds with drafts."""
    with job(ranks, [WORKER, mode, transport, "endless"]) as process:
        assert process.stdout is not None
        lines = [json.loads(line) for line in (process.stdout.readline() for _ in range(ranks)) if line]
        assert len(lines) == ranks, outcome(process)[2][-2000:]
        pids = {line["rank"]: line["pid"] for line in lines}
        time.sleep(1.5)  # a heartbeat reports a step
        assert process.poll() is None
        os.kill(pids[lost], sent)
        started = time.monotonic()
        code, _, error = outcome(process)
        assert time.monotonic() - started < GONE_WITHIN_S
    assert code != 0
    reported = [line for line in error.splitlines() if line.startswith("alspec: exit")]
    pattern = rf"alspec: exit 5: rank {lost} (died|stalled) at step (\d+), operation \w+"
    named = [re.match(pattern, line) for line in reported]
    assert named, error[-2000:]
    assert all(named), reported
    assert all(int(match[2]) >= 1 for match in named if match), reported


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((mode, ranks, transport), marks=marks, id=f"{mode}-{ranks}-{transport}")
        for mode, ranks, transport, marks in (
            *(("paired", 2, "symm", []), ("paired", 2, "nccl", []), ("off", 2, "host", full)),
            *(("off", 2, "symm", full), ("paired", 2, "host", full), ("off", 2, "nccl", full)),
            *(("paired", 4, transport, four) for transport in (*TRANSPORTS, "symm+nccl")),
        )
    ],
)
def disturbed(request: pytest.FixtureRequest) -> tuple[str, int, dict[str, list[Any]]]:
    """Mode, ranks and the results of each case of one job: slow hosts, pausing devices, texts that are broken off."""
    mode, ranks, transport = request.param
    with job(ranks, [WORKER, mode, transport, "delay,pause,broken"]) as process:
        code, out, error = outcome(process, timeout_s=300)
    assert code == 0, error[-2000:]
    reports = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert all(report["graph"] for report in reports)
    assert all(report["transport"] == transport for report in reports)
    return mode, ranks, {report["case"]: report["results"] for report in reports}


def check_undisturbed(mode: str, plain: dict[str, Any]) -> None:
    """A text that tells programs apart: many tokens, both verdicts."""
    assert len(plain["tokens"]) == 20
    assert len(set(plain["tokens"])) > 5, "a text that repeats itself would hide much"
    assert len(plain["hits"]) == (19 if mode == "paired" else 0)
    if mode == "paired":
        assert {hit for step in plain["hits"] for layer in step for hit in layer} == {0, 1}


def test_texts_broken_off_in_other_steps_leave_nothing_behind(disturbed: tuple[str, int, dict[str, list[Any]]]) -> None:
    """As after Ctrl-C: a step launched ahead on one rank waits for a step that another rank has not launched."""
    results = disturbed[2]["broken"]
    assert len(results[0]) == 20
    assert len(set(results[0])) > 5
    assert results == [results[0]] * 4


def test_a_slow_host_changes_nothing_but_time(disturbed: tuple[str, int, dict[str, list[Any]]]) -> None:
    """Each rank is slow once, under tensor parallelism and in a pair."""
    mode, ranks, results = disturbed
    plain, *late = results["delay"]
    check_undisturbed(mode, plain)
    assert len(late) == ranks
    for rank, result in enumerate(late):
        assert result["tokens"] == plain["tokens"], rank
        assert result["hits"] == plain["hits"], rank
        assert result["seconds"] > plain["seconds"] + 0.2, rank


def test_a_device_that_pauses_inside_a_step_changes_nothing_but_time(
    disturbed: tuple[str, int, dict[str, list[Any]]],
) -> None:
    """Ahead of any operation of any layer, on each rank: the others come to its packets, or to a collective, first.

    A captured step pauses at one place; each eager step pauses at another.
    """
    mode, ranks, results = disturbed
    plain, *paused = results["pause"]
    check_undisturbed(mode, plain)
    assert {(result["rank"], result["graph"]) for result in paused} == {
        (rank, graph) for rank in range(ranks) for graph in (True, False)
    }
    for result in paused:
        case = (result["rank"], result["graph"], result["places"])
        assert len({tuple(place) for place in result["places"]}) > (1 if result["graph"] else 10), case
        assert result["tokens"] == plain["tokens"], case
        assert result["hits"] == plain["hits"], case
        assert result["seconds"] > PAUSES_S, case


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        *((2, transport) for transport in TRANSPORTS),
        *(pytest.param(4, name, marks=four) for name in ("symm", "symm+nccl")),
    ],
)
def test_thousands_of_verdicts_with_delays_lose_no_token(ranks: int, transport: str) -> None:
    """Each rank of a pair in turn: its host is late at random, and its device pauses in every step."""
    with job(ranks, [WORKER, "paired", transport, "swaps"]) as process:
        code, out, error = outcome(process, timeout_s=500)
    assert code == 0, error[-2000:]
    report = next(json.loads(line) for line in out.splitlines() if line.startswith("{"))
    assert report["graph"]
    assert report["transport"] == transport
    plain, *disturbed = report["results"]
    verdicts = [hit for step in plain["hits"] for layer in step for hit in layer]
    assert min(verdicts.count(0), verdicts.count(1)) > 1000
    assert sorted(result["rank"] for result in disturbed) == sorted([*range(ranks)] * 2)
    for result in disturbed:
        assert result["tokens"] == plain["tokens"], (result["rank"], result["places"])
        assert result["hits"] == plain["hits"], (result["rank"], result["places"])
        assert result["seconds"] > plain["seconds"] + 1, "it was not disturbed"


@pytest.mark.parametrize(
    ("mode", "transport"),
    fast(
        [(mode, transport) for mode in ("off", "paired") for transport in ("symm", "host")],
        keep=[("off", "symm"), ("paired", "host")],
    ),
)
def test_packets_that_never_come_name_rank_and_operation(mode: str, transport: str) -> None:
    """A partial sum of a group is lost, or a handover of a pair.

    Over NCCL there is no packet to lose: a collective comes about on all its ranks or, if one is lost, on none. The
    heartbeat names that rank.
    """
    rank, operation = {"off": (1, "MLP"), "paired": (0, "attention")}[mode]
    started = time.monotonic()
    code, out, error = run(2, [WORKER, mode, transport, "lost"])
    assert code != 0
    line = f"alspec: exit 5: rank {rank} stalled at step 0, operation {operation} output, layer 2"
    assert line in error, error[-2000:]
    assert "token" not in out
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("mode", "transport"),
    fast(
        [(mode, transport) for mode in ("off", "paired", "rounds") for transport in TRANSPORTS],
        keep=[("off", "symm"), ("paired", "host"), ("rounds", "symm")],
    ),
)
def test_bad_numbers_name_rank_and_operation(mode: str, transport: str) -> None:
    code, out, error = run(2, [WORKER, mode, transport, "nan"])
    assert code != 0
    layer = 2 if mode == "paired" else 3
    first = f"first seen on rank 1, MLP output, layer {layer}, step 1"
    assert f"alspec: exit 4: NaN or Inf: {first}" in error, error[-2000:]
    assert out.count("token") == 1, "only the prompt's token may be printed"


@pytest.mark.parametrize(
    ("mode", "transport", "cycles"),
    [
        ("paired", "nccl", 1),
        *(pytest.param(mode, transport, 5, marks=full) for mode in ("off", "paired") for transport in ("symm", "nccl")),
    ],
)
def test_jobs_start_and_stop(mode: str, transport: str, cycles: int) -> None:
    """Jobs in a row end well, each soon after its last token."""
    flags = ["--cuda-graph", "on", "--prompt", "The", "--max-new-tokens", "30", "--transport", transport]
    for _ in range(cycles):
        with job(2, [GENERATE, "--speculation", mode, *flags]) as process:
            after_text_s = seconds_from_last_text(process)
            code, _, error = outcome(process)
        assert code == 0, error[-2000:]
        assert f"{transport}, captured graph" in error
        assert after_text_s < 5


def seconds_from_last_text(process: subprocess.Popen[str]) -> float:
    """From a job's last output to its exit."""
    assert process.stdout is not None
    last = None
    # As it comes: a file object would wait for more, and the end comes only with the exit.
    while os.read(process.stdout.fileno(), 65536):
        last = time.monotonic()
    process.wait(timeout=60)
    assert last is not None, "no text"
    return time.monotonic() - last


@functools.cache
def text_over_symm(mode: str) -> str:
    """What the storm becomes over symmetric memory."""
    code, text, error = run(2, [GENERATE, "--speculation", mode, *STORM, "--transport", "symm"])
    assert code == 0, error[-2000:]
    assert "because symm" not in error
    assert "symm, captured graph" in error
    assert len(text) > 30
    return text


@pytest.mark.parametrize("mode", fast(["off", "paired"], keep=["paired"]))
def test_without_peer_memory_the_text_is_the_same_through_the_hosts_memory(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so."""
    expected = text_over_symm(mode)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    code, text, error = run(2, [GENERATE, "--speculation", mode, *STORM, "--transport", "auto"])
    assert code == 0, error[-2000:]
    lines = [line for line in error.splitlines() if "transport:" in line]
    assert lines == ["alspec: transport: host, because symm does not work here (NCCL_P2P_DISABLE=1)"]
    assert "host, captured graph" in error
    assert text == expected


@full
@pytest.mark.parametrize("mode", ["off", "paired"])
def test_without_peer_memory_the_text_is_the_same_over_nccl(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asked for, so no line says why."""
    expected = text_over_symm(mode)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    code, text, error = run(2, [GENERATE, "--speculation", mode, "--pair-always", *STORM, "--transport", "nccl"])
    assert code == 0, error[-2000:]
    assert "because symm" not in error
    assert "nccl, captured graph" in error
    assert text == expected


def test_symmetric_memory_that_is_asked_for_and_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    code, text, error = run(2, [GENERATE, *STORM, "--transport", "symm"])
    assert code != 0
    assert not text
    line = "alspec: exit 2: transport: symm does not work here: NCCL_P2P_DISABLE=1; use auto or nccl"
    assert line in error.splitlines(), error[-2000:]
    assert re.search(r"exitcode\s*: 2\b", error), error[-2000:]  # torchrun's summary
    assert "because symm" not in error
