"""Jobs of several ranks on the GPUs of this machine, for tests/gpu.

With `ALSPEC_SHARE_GPUS=1` ranks beyond the GPUs share them: then one GPU is enough, and all of tests/gpu takes longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT, WORKERS

from alspec.launch.two_hosts import HOSTS, host_command, host_environment
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.engine.generation import Completion

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MAX_RANKS = 4 if NUM_GPUS and os.environ.get("ALSPEC_SHARE_GPUS") == "1" else NUM_GPUS
# Two runs of these tests can share a machine: each uses the GPUs that it sees.
DEVICES = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(NUM_GPUS)))).split(",")


def needs(num_ranks: int) -> pytest.MarkDecorator:
    """Skip a test without GPUs for so many ranks."""
    reason = f"needs {num_ranks} GPUs, or ALSPEC_SHARE_GPUS=1 and one; found {NUM_GPUS}"
    return pytest.mark.skipif(num_ranks > MAX_RANKS, reason=reason)


def gpus(first: int, count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` of `count` ranks from GPU `first` on; it wraps around where there are fewer."""
    return ",".join(dict.fromkeys(DEVICES[index % NUM_GPUS] for index in range(first, first + count)))


def leads_of(answer: Completion) -> list[float]:
    """By how many nats each token of an answer with two log probabilities a place leads the second most likely one."""
    return [each.top[0][1] - each.top[1][1] for each in answer.logprobs or ()]


def unclear_place(leads: Sequence[float], least: float) -> int:
    """The place of the first token that leads the second most likely one by less than `least`, or their number."""
    return next((place for place, lead in enumerate(leads) if lead < least), len(leads))


def torchrun(num_ranks: int, visible: str, program: list[str]) -> list[str]:
    """The command of a job on the GPUs that it will see; on CPUs if it will see none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*command, *_sharing(num_ranks, visible), *program]


def _sharing(num_ranks: int, visible: str) -> list[str]:
    """What a program's ranks run in where they outnumber the GPUs that they see."""
    return [str(WORKERS / "shared_gpu.py")] if visible and num_ranks > len(visible.split(",")) else []


def run_gpu_worker(num_ranks: int, cases: dict[str, Any], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What gpu_worker.py finds for these cases on so many ranks, by the run's name."""
    files = [folder / f"{num_ranks}.{kind}" for kind in ("json", "out")]
    files[0].write_text(json.dumps(cases))
    visible = gpus(0, num_ranks)
    command = torchrun(num_ranks, visible, [str(WORKERS / "gpu_worker.py"), *map(str, files)])
    done = subprocess.run(command, env=environment(visible), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(files[1].read_text()))


def environment(visible: str) -> dict[str, str]:
    """The environment of that job."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}


def hosts(num_ranks: int, port: int, program: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and environments of a job on two hosts, for which this machine stands; see launch/two_hosts.py."""
    each, jobs = num_ranks // HOSTS, []
    for host in range(HOSTS):
        visible = gpus(host * each, each)
        command = host_command(host, each, port, [*_sharing(each, visible), *program])
        jobs.append((command, environment("") | host_environment(host, visible)))
    return jobs


def licence_ids() -> list[int]:
    """The licence four times, in tokens of the bundled model: English, so that verdicts are those of real text."""
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    return 4 * tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"), add_bos=False)
