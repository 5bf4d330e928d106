"""Jobs of several ranks on the GPUs of this machine, for tests/gpu.

With `ALSPEC_SHARE_GPUS=1` ranks beyond the GPUs share them: then one GPU is enough, and all of tests/gpu takes longer.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from paths import ROOT, WORKERS

from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MAX_RANKS = 4 if NUM_GPUS and os.environ.get("ALSPEC_SHARE_GPUS") == "1" else NUM_GPUS


def needs(num_ranks: int) -> pytest.MarkDecorator:
    """Skip a test without GPUs for so many ranks."""
    reason = f"needs {num_ranks} GPUs, or ALSPEC_SHARE_GPUS=1 and one; found {NUM_GPUS}"
    return pytest.mark.skipif(num_ranks > MAX_RANKS, reason=reason)


def gpus(first: int, count: int) -> str:
    """`CUDA_VISIBLE_DEVICES` of `count` ranks from GPU `first` on; it wraps around where there are fewer."""
    return ",".join(dict.fromkeys(str(index % NUM_GPUS) for index in range(first, first + count)))


def torchrun(num_ranks: int, visible: str, program: list[str]) -> list[str]:
    """The command of a job on the GPUs that it will see."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    shares = [str(WORKERS / "shared_gpu.py")] if num_ranks > len(visible.split(",")) else []
    return [*command, *shares, *program]


def environment(visible: str) -> dict[str, str]:
    """The environment of that job."""
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}


def hosts(num_ranks: int, port: int, program: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and environments of a job on two hosts, which this machine stands for: they reach each other over TCP.

    NCCL takes ranks with different host ids for ranks on different hosts.
    """
    each, found = num_ranks // 2, []
    for host in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", str(each)]
        apart = {"NCCL_HOSTID": f"host-{host}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        found.append(([*command, *program], environment(gpus(host * each, each)) | apart))
    return found


def licence_ids() -> list[int]:
    """The licence four times, in tokens of the bundled model: English, so that verdicts are those of real text."""
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    return 4 * tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"), add_bos=False)
