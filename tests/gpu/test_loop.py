"""Captured steps on several GPUs, where a rank dies, stops, is late, loses a word or computes NaN, and where
none reaches another's memory; and jobs in a row.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from gpu_jobs import environment, gpus, needs, torchrun
from paths import ROOT, WORKERS

GENERATE = str(ROOT / "launch" / "generate.py")
WORKER = str(WORKERS / "loop_worker.py")
CYCLES = 20
GONE_WITHIN_S = 10.0
PAUSES_S = 0.1  # those of a generation take longer
# Mode, ranks, the first GPU, the rank that is lost and how. Jobs of one wave run side by side.
LOSSES_OF_2 = [
    ("off", 2, 0, 1, signal.SIGKILL),
    ("paired", 2, 0, 0, signal.SIGSTOP),
    ("off", 2, 2, 0, signal.SIGSTOP),
    ("paired", 2, 2, 1, signal.SIGKILL),
]
LOSSES_OF_4 = [("off", 4, 0, 3, signal.SIGKILL), ("paired", 4, 0, 2, signal.SIGSTOP)]
# Mode, ranks, the first GPU.
PLACES = [
    pytest.param([("off", 2, 0), ("paired", 2, 2)], id="2-ranks"),
    pytest.param([("paired", 4, 0)], id="4-ranks", marks=needs(4)),
]
TRANSPORTS = pytest.mark.parametrize("transport", ["symm", "host", "nccl"])
# In fp32 its best tokens lead by 0.05 and more: no order of sums changes them.
STORM = ["--prompt", "The storm had passed, and", "--max-new-tokens", "30", "--ignore-eos", "--dtype", "fp32"]

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu, needs(2), pytest.mark.timeout(600)]


@contextmanager
def jobs(*commands: tuple[int, int, list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun for each (ranks, first GPU, program with its arguments), all at once; none outlives the block."""
    started = []
    try:
        for num_ranks, first, program in commands:
            visible = gpus(first, num_ranks)
            command, pipe = torchrun(num_ranks, visible, program), subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment(visible), stdout=pipe, stderr=pipe, text=True))
        yield started
    finally:
        for job in started:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks
                job.communicate(timeout=60)


def outcome(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, error = job.communicate(timeout=120)
    return job.returncode, out, error


@TRANSPORTS
@pytest.mark.parametrize(
    "wave", [pytest.param(LOSSES_OF_2, id="2-ranks"), pytest.param(LOSSES_OF_4, id="4-ranks", marks=needs(4))]
)
def test_a_lost_rank_ends_the_job_and_is_named(
    wave: list[tuple[str, int, int, int, signal.Signals]], transport: str
) -> None:
    """`kill -9` and `kill -STOP` in the middle of captured steps."""
    with jobs(*((ranks, first, [WORKER, mode, transport, "endless"]) for mode, ranks, first, *_ in wave)) as running:
        pids = []
        for job, (_, ranks, *_) in zip(running, wave, strict=True):
            assert job.stdout is not None
            told = [json.loads(line) for line in (job.stdout.readline() for _ in range(ranks)) if line]
            assert len(told) == ranks, outcome(job)[2][-2000:]
            pids.append({line["rank"]: line["pid"] for line in told})
        time.sleep(1.5)  # for a heartbeat that tells of a step
        for job, own, (mode, ranks, _, lost, sent) in zip(running, pids, wave, strict=True):
            where = f"{mode} {ranks} {sent.name}"
            assert job.poll() is None, where
            os.kill(own[lost], sent)
            started = time.monotonic()
            code, _, error = outcome(job)
            assert time.monotonic() - started < GONE_WITHIN_S, where
            assert code != 0, where
            lines = [line for line in error.splitlines() if line.startswith("alspec: exit")]
            pattern = rf"alspec: exit 5: rank {lost} (died|stalled) at step (\d+), operation \w+"
            named = [re.match(pattern, line) for line in lines]
            assert named, (where, error[-2000:])
            assert all(named), (where, lines)
            assert all(int(match[2]) >= 1 for match in named if match), (where, lines)


def results_of(places: list[tuple[str, int, int]], transport: str, case: str) -> Iterator[tuple[str, int, list[dict]]]:
    """Mode, ranks and what each generation of the job told, the first one undisturbed."""
    with jobs(*((ranks, first, [WORKER, mode, transport, case]) for mode, ranks, first in places)) as running:
        for job, (mode, ranks, _) in zip(running, places, strict=True):
            code, out, error = outcome(job)
            assert code == 0, error[-2000:]
            told = json.loads(out.strip().splitlines()[-1])
            assert told["graph"]
            assert told["transport"] == transport
            plain = told["results"][0]
            assert len(plain["tokens"]) == 20
            assert len(set(plain["tokens"])) > 5, "a text that repeats itself would hide much"
            assert len(plain["hits"]) == (19 if mode == "paired" else 0)
            if mode == "paired":
                assert {hit for step in plain["hits"] for layer in step for hit in layer} == {0, 1}
            yield mode, ranks, told["results"]


@TRANSPORTS
@pytest.mark.parametrize("places", PLACES)
def test_texts_broken_off_in_other_steps_leave_nothing_behind(
    places: list[tuple[str, int, int]], transport: str
) -> None:
    """As by Ctrl-C: a step launched ahead on one rank waits for one that another rank has not launched."""
    with jobs(*((ranks, first, [WORKER, mode, transport, "broken"]) for mode, ranks, first in places)) as running:
        for job in running:
            code, out, error = outcome(job)
            assert code == 0, error[-2000:]
            told = json.loads(out.strip().splitlines()[-1])
            assert told["graph"]
            assert told["transport"] == transport
            whole = told["results"][0]
            assert len(whole) == 20
            assert len(set(whole)) > 5
            assert told["results"] == [whole] * 4


@TRANSPORTS
@pytest.mark.parametrize("places", PLACES)
def test_a_slow_host_changes_nothing_but_time(places: list[tuple[str, int, int]], transport: str) -> None:
    """Each rank in turn, under tensor parallelism and in a pair."""
    for mode, ranks, (plain, *late) in results_of(places, transport, "delay"):
        assert len(late) == ranks
        for rank, result in enumerate(late):
            assert result["tokens"] == plain["tokens"], (mode, rank)
            assert result["hits"] == plain["hits"], (mode, rank)
            assert result["seconds"] > plain["seconds"] + 0.2, (mode, rank)


@TRANSPORTS
@pytest.mark.parametrize("places", PLACES)
def test_a_device_that_pauses_inside_a_step_changes_nothing_but_time(
    places: list[tuple[str, int, int]], transport: str
) -> None:
    """Ahead of any operation of any layer, on each rank: the others come to its words, or to a collective, long before
    it does. A captured step pauses at one place; of steps launched one by one, each at another."""
    for mode, ranks, (plain, *paused) in results_of(places, transport, "pause"):
        assert {(result["rank"], result["graph"]) for result in paused} == {
            (rank, graph) for rank in range(ranks) for graph in (True, False)
        }
        for result in paused:
            where = (mode, result["rank"], result["graph"], result["places"])
            assert len({tuple(place) for place in result["places"]}) > (1 if result["graph"] else 10), where
            assert result["tokens"] == plain["tokens"], where
            assert result["hits"] == plain["hits"], where
            assert result["seconds"] > PAUSES_S, where


@pytest.mark.parametrize("transport", ["symm", "host"])
def test_words_that_never_come_name_rank_and_operation(transport: str) -> None:
    """A partial sum of a group, and a handover of a pair.

    Over NCCL there is no word to lose: a collective comes about on all its ranks or, if one is lost, on none, and then
    it is the rank that the heartbeat names.
    """
    started = time.monotonic()
    with jobs((2, 0, [WORKER, "off", transport, "lost"]), (2, 2, [WORKER, "paired", transport, "lost"])) as running:
        for job, (rank, output) in zip(running, ((1, "MLP"), (0, "attention")), strict=True):
            code, out, error = outcome(job)
            assert code != 0
            line = f"alspec: exit 5: rank {rank} stalled at step 0, operation {output} output, layer 2"
            assert line in error, error[-2000:]
            assert "token" not in out
            assert time.monotonic() - started < 60


@TRANSPORTS
def test_bad_numbers_name_rank_and_operation(transport: str) -> None:
    with jobs((2, 0, [WORKER, "off", transport, "nan"]), (2, 2, [WORKER, "paired", transport, "nan"])) as running:
        for job, layer in zip(running, (3, 2), strict=True):
            code, out, error = outcome(job)
            assert code != 0
            first = f"first seen on rank 1, MLP output, layer {layer}, step 1"
            assert f"alspec: exit 4: NaN or Inf: {first}" in error, error[-2000:]
            assert out.count("token") == 1, "only the prompt's token may be printed"


@pytest.mark.parametrize("mode", ["off", "paired"])
def test_jobs_start_and_stop(mode: str) -> None:
    """`CYCLES` jobs, half of them in each mode, two at a time, one over each transport: exit 0, soon after the last
    token."""
    command = [GENERATE, "--speculation", mode, "--cuda-graph", "on", "--prompt", "The", "--max-new-tokens", "30"]
    for _ in range(CYCLES // 4):
        both = (2, 0, [*command, "--transport", "symm"]), (2, 2, [*command, "--transport", "nccl"])
        with ThreadPoolExecutor() as readers, jobs(*both) as running:
            seconds = list(readers.map(seconds_from_last_text, running))
            for job, transport, after_text_s in zip(running, ("symm", "nccl"), seconds, strict=True):
                code, _, error = outcome(job)
                assert code == 0, error[-2000:]
                assert f"{transport}, captured graph" in error
                assert after_text_s < 5, transport


def seconds_from_last_text(job: subprocess.Popen[str]) -> float:
    """From a job's last output to its exit."""
    assert job.stdout is not None
    last = None
    # As it comes: a file object would wait for more, and the end comes only with the exit.
    while os.read(job.stdout.fileno(), 65536):
        last = time.monotonic()
    job.wait(timeout=60)
    assert last is not None, "no text"
    return time.monotonic() - last


@pytest.mark.parametrize("mode", ["off", "paired"])
def test_without_peer_memory_the_same_text_comes_another_way(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the host's memory, of which one line tells, or over NCCL as asked for."""
    command = [GENERATE, "--speculation", mode, *STORM, "--transport"]
    with jobs((2, 0, [*command, "symm"])) as (symm,):
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        with jobs((2, 2, [*command, "auto"])) as (fallback,):
            code, text, error = outcome(fallback)
            assert code == 0, error[-2000:]
            lines = [line for line in error.splitlines() if "transport:" in line]
            assert lines == ["alspec: transport: host, because symm does not work here (NCCL_P2P_DISABLE=1)"]
            assert "host, captured graph" in error
        with jobs((2, 2, [*command, "nccl"])) as (asked,):
            code, other, error = outcome(asked)
            assert code == 0, error[-2000:]
            assert "because symm" not in error
            assert "nccl, captured graph" in error
            assert other == text
        code, expected, error = outcome(symm)
        assert code == 0, error[-2000:]
        assert "because symm" not in error
        assert "symm, captured graph" in error
        assert text == expected
        assert len(text) > 30


def test_symmetric_memory_that_is_asked_for_and_does_not_work_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with jobs((2, 0, [GENERATE, *STORM, "--transport", "symm"])) as (job,):
        code, text, error = outcome(job)
    assert code != 0
    assert not text
    line = "alspec: exit 2: transport: symm does not work here: NCCL_P2P_DISABLE=1; use auto or nccl"
    assert line in error.splitlines(), error[-2000:]
    assert re.search(r"exitcode\s*: 2\b", error), error[-2000:]  # as torchrun tells it
    assert "because symm" not in error
