"""The host's memory as a GPU sees it, and as processes share it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from alspec.runtime import host_memory
from alspec.runtime.host_memory import share_host_memory
from alspec.runtime.placement import Placement
from alspec.runtime.transport import Transport

READER = """
import sys
from alspec.runtime.host_memory import _open
pages = _open(int(sys.argv[1]), int(sys.argv[2]), 8192)
assert pages[:2] == b"ab" and pages[2:] == bytes(8190)
pages[-1:] = b"z"
"""


def test_pages_are_shared_by_processes_and_leave_nothing_behind() -> None:
    files = set(os.listdir("/proc/self/fd"))
    file = host_memory._create(8192)
    pages = host_memory._open(os.getpid(), file, 8192)
    assert pages[:] == bytes(8192)
    pages[:2] = b"ab"
    subprocess.run([sys.executable, "-c", READER, str(os.getpid()), str(file)], check=True, timeout=60)
    assert pages[-1:] == b"z"
    os.close(file)
    pages.close()
    assert set(os.listdir("/proc/self/fd")) <= files | {str(file)}


def test_no_room_is_told_to_all() -> None:
    """Rank 0 makes the pages and tells the others where they are, or that there are none."""
    transport = Transport(Placement(), torch.device("cpu"), "gloo", None)
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")),
        pytest.raises(RuntimeError, match=r"^no room for 1\.6 MB$"),
    ):
        share_host_memory(200_000, transport)


def test_a_process_that_is_gone() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with pytest.raises(OSError, match="No such file"):
        host_memory._open(int(gone.stdout), 3, 8192)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_writes_and_reads_it_and_gives_it_back() -> None:
    device = torch.device("cuda", 0)
    transport = Transport(Placement(), device, "nccl", None)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:alspec")

    assert mapped() == 0
    before = torch.cuda.memory_allocated()
    (words,) = share_host_memory(1000, transport)
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
