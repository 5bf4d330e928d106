"""Host memory that processes share, and that a GPU reads and writes."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from jobs import run_ranks
from paths import WORKERS
from tiers import fast

from alspec.runtime.distributed import host_memory
from alspec.runtime.distributed.host_memory import share_host_memory
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

WORKER = WORKERS / "host_memory_worker.py"
GPUS = torch.cuda.device_count()


Outcome = dict[str, dict]  # case -> what a rank found


def outcomes(world_size: int, folder: Path, device: str, *cases: str) -> list[Outcome]:
    """What each rank found in each case."""
    run_ranks(WORKER, world_size, folder, device, ",".join(cases), timeout_s=120)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("device", "world_size"),
    [
        *fast([("cpu", 2), ("cpu", 3)], keep=[("cpu", 3)]),
        *(
            pytest.param(
                "cuda", size, marks=[pytest.mark.gpu, pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs")]
            )
            for size in (2, 4)
        ),
    ],
)
def test_all_ranks_read_what_each_writes(device: str, world_size: int, tmp_path: Path) -> None:
    words = [rank + 7 for rank in range(world_size)]
    expected = {"well": {"zeros": True, "words": words, "files": 0}}
    assert outcomes(world_size, tmp_path, device, "well") == world_size * [expected]


# What goes wrong on one rank -> the reason that every rank reports.
REASONS = {
    "no room": "no room for 0.0 MB",
    "no file": "AttributeError",
    "not allowed": "rank 1: [Errno 13] Permission denied",
    "another file": "rank 1: ranks see different processes: they run in separate containers",
    "not pinned": "no such device",
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """The outcomes of two ranks that run all of `REASONS`, and a case without a fault at the end."""
    return outcomes(2, tmp_path_factory.mktemp("failures"), "cpu", *REASONS, "well")


@pytest.mark.parametrize("case", REASONS)
def test_all_ranks_report_why_one_cannot_share(case: str, failures: list[Outcome]) -> None:
    """No rank waits, and none keeps a file open."""
    assert [rank[case] for rank in failures] == 2 * [{"error": REASONS[case], "files": 0}]


def test_ranks_share_memory_after_failures(failures: list[Outcome]) -> None:
    assert [rank["well"] for rank in failures] == 2 * [{"zeros": True, "words": [7, 8], "files": 0}]


def test_without_room_no_file_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left on device"):
        host_memory._create(8192)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.gpu
@pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")
def test_a_gpu_reads_and_writes_host_memory_until_it_is_freed() -> None:
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
    assert part.sum().item() == sum(range(900, 1000)) << 32, "a view must keep the pages"
    del part
    gc.collect()
    assert mapped() == 0
