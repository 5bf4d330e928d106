"""Run a program whose ranks outnumber the GPUs: `torchrun --nproc-per-node 4 shared_gpu.py PROGRAM ARGUMENTS`.

Rank r uses GPU r modulo the number of GPUs, and a GPU runs its ranks in time slices. A kernel that waits for a packet
of another rank spins until that rank's time slice, so a step takes tens of milliseconds and packets arrive in any
order. Values are the same as with a GPU for each rank. Times mean nothing.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from alspec.config import EngineConfig
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.engine import choices


def share_gpus() -> None:
    """Let the engine of this process connect to ranks on the same GPU."""
    # NCCL refuses two ranks on one GPU of a host. With different host ids it uses sockets instead.
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    num_gpus = torch.cuda.device_count()
    reaches = torch.cuda.can_device_access_peer

    def choose_device(config: EngineConfig, place: Placement) -> tuple[torch.device, str, str]:
        return torch.device("cuda", place.local_rank % num_gpus), "nccl", ""

    def can_device_access_peer(device: int, peer: int) -> bool:
        return device % num_gpus == peer % num_gpus or reaches(device % num_gpus, peer % num_gpus)

    choices.choose_device = choose_device
    torch.cuda.can_device_access_peer = can_device_access_peer


if __name__ == "__main__":
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        share_gpus()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
