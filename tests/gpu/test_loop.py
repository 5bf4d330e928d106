"""Captured steps on several GPUs when a rank dies, stops, is late, loses a word or computes NaN, and jobs in a row."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu_jobs import HERE, environment, gpus, needs, torchrun

REPOSITORY = Path(__file__).parents[2]
WORKER = str(HERE / "loop_worker.py")
CYCLES = 20
GONE_WITHIN_S = 10.0
# Mode, ranks, the first GPU, the rank that is lost and how. Jobs of one wave run side by side.
LOSSES_OF_2 = [
    ("off", 2, 0, 1, signal.SIGKILL),
    ("paired", 2, 0, 0, signal.SIGSTOP),
    ("off", 2, 2, 0, signal.SIGSTOP),
    ("paired", 2, 2, 1, signal.SIGKILL),
]
LOSSES_OF_4 = [("off", 4, 0, 3, signal.SIGKILL), ("paired", 4, 0, 2, signal.SIGSTOP)]

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


@pytest.mark.parametrize(
    "wave", [pytest.param(LOSSES_OF_2, id="2-ranks"), pytest.param(LOSSES_OF_4, id="4-ranks", marks=needs(4))]
)
def test_a_lost_rank_ends_the_job_and_is_named(wave: list[tuple[str, int, int, int, signal.Signals]]) -> None:
    """`kill -9` and `kill -STOP` in the middle of captured steps."""
    with jobs(*((ranks, first, [WORKER, mode, "endless"]) for mode, ranks, first, *_ in wave)) as running:
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


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([("off", 2, 0), ("paired", 2, 2)], id="2-ranks"),
        pytest.param([("paired", 4, 0)], id="4-ranks", marks=needs(4)),
    ],
)
def test_a_slow_host_changes_nothing_but_time(places: list[tuple[str, int, int]]) -> None:
    """Each rank in turn, under tensor parallelism and in a pair."""
    with jobs(*((ranks, first, [WORKER, mode, "delay"]) for mode, ranks, first in places)) as running:
        for job, (mode, ranks, _) in zip(running, places, strict=True):
            code, out, error = outcome(job)
            assert code == 0, error[-2000:]
            told = json.loads(out.strip().splitlines()[-1])
            assert told["graph"]
            plain, *late = told["results"]
            assert len(late) == ranks
            assert len(plain["tokens"]) == 20
            assert len(plain["hits"]) == (19 if mode == "paired" else 0)
            for rank, result in enumerate(late):
                assert result["tokens"] == plain["tokens"], (mode, rank)
                assert result["hits"] == plain["hits"], (mode, rank)
                assert result["seconds"] > plain["seconds"] + 0.2, (mode, rank)


def test_words_that_never_come_and_bad_numbers_name_rank_and_operation() -> None:
    started = time.monotonic()
    with jobs((2, 0, [WORKER, "off", "lost"]), (2, 2, [WORKER, "off", "nan"])) as (lost, spoilt):
        code, out, error = outcome(lost)
        assert code != 0
        assert "alspec: exit 5: rank 1 stalled at step 0, operation MLP output, layer 2" in error, error[-2000:]
        assert "token" not in out
        assert time.monotonic() - started < 60
        code, out, error = outcome(spoilt)
        assert code != 0
        assert "alspec: exit 4: NaN or Inf: first seen on rank 1, MLP output, layer 3, step 1" in error, error[-2000:]
        assert out.count("token") == 1, "only the prompt's token may be printed"


def test_jobs_start_and_stop() -> None:
    """`CYCLES` jobs, two at a time: exit 0, soon after the last token."""
    command = [str(REPOSITORY / "launch" / "generate.py"), "--speculation", "off", "--cuda-graph", "on"]
    command += ["--prompt", "The", "--max-new-tokens", "30"]
    for _ in range(CYCLES // 2):
        with jobs((2, 0, command), (2, 2, command)) as running:
            for job in running:
                assert job.stdout is not None
                job.stdout.read()  # ends with the text
                ended = time.monotonic()
                code, _, error = outcome(job)
                assert code == 0, error[-2000:]
                assert "captured graph" in error
                assert time.monotonic() - ended < 5
