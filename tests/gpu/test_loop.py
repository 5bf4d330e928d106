"""Captured steps on several GPUs when a rank is late, loses a word or computes NaN, and when jobs start and stop."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
REPOSITORY = Path(__file__).parents[2]
CYCLES = 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(600),
]


def start(*command: str, gpus: str = "0,1") -> subprocess.Popen[str]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(case: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the worker."""
    job = start(str(Path(__file__).with_name("loop_worker.py")), case)
    out, error = job.communicate(timeout=120)
    return job.returncode, out, error


def test_a_slow_host_changes_nothing_but_time() -> None:
    results = []
    for case in ("plain", "delay"):
        code, out, error = run(case)
        assert code == 0, error[-2000:]
        results.append(json.loads(out.strip().splitlines()[-1]))
    assert results[0]["graph"]
    assert results[0] == results[1]


def test_a_word_that_never_comes_names_rank_and_operation() -> None:
    started = time.monotonic()
    code, out, error = run("lost")
    assert code != 0
    assert "alspec: exit 5: rank 1 stalled at step 0, operation MLP output, layer 2" in error, error[-2000:]
    assert "token" not in out
    assert time.monotonic() - started < 60


def test_nan_names_rank_and_layer() -> None:
    code, out, error = run("nan")
    assert code != 0
    assert "alspec: exit 4: NaN or Inf: first seen on rank 1, MLP output, layer 3, step 1" in error, error[-2000:]
    assert out.count("token") == 1, "only the prompt's token may be printed"


def test_jobs_start_and_stop() -> None:
    """`CYCLES` jobs, two at a time where there are GPUs for it: exit 0, soon after the last token."""
    places = ["0,1", "2,3"][: NUM_GPUS // 2]
    command = (
        str(REPOSITORY / "launch" / "generate.py"),
        "--speculation",
        "off",
        "--prompt",
        "The",
        "--max-new-tokens",
    )
    for _ in range(CYCLES // len(places)):
        jobs = [start(*command, "30", "--cuda-graph", "on", gpus=gpus) for gpus in places]
        for job in jobs:
            assert job.stdout is not None
            job.stdout.read()  # ends with the text
            ended = time.monotonic()
            _, error = job.communicate(timeout=60)
            assert job.returncode == 0, error[-2000:]
            assert "captured graph" in error
            assert time.monotonic() - ended < 5
