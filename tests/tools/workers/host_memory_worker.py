"""One rank that shares host memory with others and records the outcome; started with torchrun's variables.

Run as `host_memory_worker.py FOLDER DEVICE CASE,CASE...`: writes FOLDER/rank{RANK}.json, the outcome of each case.
Without a GPU, pages are not pinned.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alspec.runtime.distributed import host_memory
from alspec.runtime.distributed.host_memory import HostMemoryError, share_host_memory
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store

NUM_WORDS = 1000


def main(folder: str, kind: str, cases: str) -> None:
    """Run the cases one after the other."""
    placement = Placement.from_environment()
    device = torch.device("cuda", placement.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cpu":
        host_memory._pin = lambda pages, _: torch.frombuffer(pages, dtype=torch.int64)
    else:
        torch.cuda.set_device(device)
    transport = Transport(placement, device, "nccl" if kind == "cuda" else "gloo", connect_store(placement))
    results = {case: run_case(transport, case) for case in cases.split(",")}
    Path(folder, f"rank{placement.rank}.json").write_text(json.dumps(results))
    transport.barrier()
    transport.close()


def run_case(transport: Transport, case: str) -> dict[str, Any]:
    """Share memory, write one word on each rank, and read the words of all ranks."""
    placement, module = transport.placement, dict(vars(host_memory))
    if case in FAULTS and placement.rank == FAULTS[case][0]:
        FAULTS[case][1]()
    transport.barrier()
    files = len(os.listdir("/proc/self/fd"))
    result: dict[str, Any]
    try:
        words = share_host_memory(NUM_WORDS, transport)
        result = {"zeros": not bool(words.any())}
        transport.barrier()
        words[placement.rank] = placement.rank + 7
        transport.barrier()
        result["words"] = words[: placement.world_size].tolist()
        transport.barrier()
        del words
    except HostMemoryError as error:
        result = {"error": str(error)}
    on_cpu = transport.device.type == "cpu"  # a GPU's driver may open files of its own
    result["files"] = len(os.listdir("/proc/self/fd")) - files if on_cpu else 0
    vars(host_memory).update(module)
    return result


def _no_room() -> None:
    host_memory.available_bytes = lambda *_: 8 * NUM_WORDS - 1


def _no_file() -> None:
    """`memfd_create` does not exist."""

    def refuse(_: int) -> int:
        raise AttributeError

    host_memory._create = refuse


def _not_allowed() -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    host_memory._open = refuse


def _another_file() -> None:
    """The rank is in a separate container, which has another process and another file with the same numbers."""
    open_there = host_memory._open

    def open_own(place: list[int], num_bytes: int) -> Any:
        file = os.memfd_create("other")
        try:
            return open_there([os.getpid(), file, *place[2:]], num_bytes)
        finally:
            os.close(file)

    host_memory._open = open_own


def _not_pinned() -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("no such device\nmore")

    host_memory._pin = refuse


# Case -> (the rank that fails, a function that makes it fail).
FAULTS: dict[str, tuple[int, Callable[[], None]]] = {
    "no room": (0, _no_room),
    "no file": (0, _no_file),
    "not allowed": (1, _not_allowed),
    "another file": (1, _another_file),
    "not pinned": (0, _not_pinned),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
