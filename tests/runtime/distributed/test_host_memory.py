"""The host's memory as processes share it, and as a GPU sees it."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from jobs import run_ranks
from paths import WORKERS

from alspec.runtime.distributed import host_memory
from alspec.runtime.distributed.host_memory import share_host_memory
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

WORKER = WORKERS / "host_memory_worker.py"
GPUS = torch.cuda.device_count()


def outcomes(world_size: int, folder: Path, device: str, case: str) -> list[dict]:
    """What each rank says."""
    run_ranks(WORKER, world_size, folder, device, case, timeout_s=120)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("device", "world_size"),
    [
        ("cpu", 2),
        ("cpu", 3),
        *(
            pytest.param(
                "cuda", size, marks=[pytest.mark.gpu, pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs")]
            )
            for size in (2, 4)
        ),
    ],
)
def test_what_a_rank_writes_all_read(device: str, world_size: int, tmp_path: Path) -> None:
    words = [rank + 7 for rank in range(world_size)]
    assert outcomes(world_size, tmp_path, device, "well") == world_size * [{"zeros": True, "words": words, "files": 0}]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no room", "no room for 0.0 MB"),
        ("no file", "AttributeError"),
        ("not allowed", "rank 1: [Errno 13] Permission denied"),
        ("another file", "rank 1: ranks see different processes: they run in separate containers"),
        ("not pinned", "no such device"),
    ],
)
def test_a_rank_that_cannot_share_it_is_told_to_all(case: str, why: str, tmp_path: Path) -> None:
    """None waits for it, and none keeps a file."""
    assert outcomes(2, tmp_path, "cpu", case) == 2 * [{"error": why, "files": 0}]


def test_no_room_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left on device"):
        host_memory._create(8192)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")
def test_a_gpu_writes_and_reads_it_and_gives_it_back() -> None:
    device = torch.device("cuda", 0)
    transport = Transport(Placement(), device, "nccl", None)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:alspec")

    assert mapped() == 0
    before = torch.cuda.memory_allocated()
    words = share_host_memory(1000, transport)
    assert (words.device, words.dtype, words.shape) == (device, torch.int64, (1000,))
    assert torch.cuda.memory_allocated() == before
    assert not words.any()
    words.copy_(torch.arange(1000, device=device) << 32)
    torch.cuda.synchronize()
    assert mapped() == 1
    assert words.tolist() == [value << 32 for value in range(1000)]
    part = words[900:]
    del words
    gc.collect()
    assert part.sum().item() == sum(range(900, 1000)) << 32, "a part keeps the pages"
    del part
    gc.collect()
    assert mapped() == 0
