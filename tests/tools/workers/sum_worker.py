"""One rank that sums partials with the others of its group; started with torchrun's variables.

Run as `sum_worker.py FOLDER DEVICE`: writes FOLDER/rank{RANK}.pt. It holds, for each dtype, this rank's partial, what
the collectives returned, and the number of reductions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from alspec.runtime.distributed import transport as transport_module
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    placement = Placement.from_environment()
    device = torch.device(kind, placement.local_rank) if kind == "cuda" else torch.device("cpu")
    transport = Transport(placement, device, "nccl" if kind == "cuda" else "gloo", connect_store(placement))
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(placement.rank)
        # Large and small numbers: a sum in 16 bits would lose the small ones.
        scale = 10.0 ** torch.randint(-3, 4, (7, 33), generator=generator)
        partial = (torch.randn(7, 33, generator=generator) * scale).to(dtype).to(device)
        own = partial.cpu().clone()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            parts = transport.gather_partials(partial)
        with mock.patch.multiple(transport_module, LEAST_SPREAD=1, FEWEST_SPREADING=2):
            tokens = transport.own_tokens(len(partial))
        if placement.tp_size > 1:
            # Use the copy: a reduction overwrites its input.
            scattered = transport.scatter_partials(own.to(device))
            gathered = transport.gather_tokens(own[tokens.start : tokens.stop].to(device), len(partial))
        else:
            scattered, gathered = own[None], own
        found[str(dtype)] = {
            "own": own, "parts": parts.cpu(), "reduced": reduced.call_count, "tokens": tokens,
            "scattered": scattered.cpu(), "gathered": gathered.cpu(), "all": list(transport.own_tokens(len(partial))),
        }  # fmt: skip
    later = "later" if placement.rank == 1 else ""
    found["reasons"] = [transport.first_reason(reason) for reason in ("", later, f"{placement.rank} é" * 200)]
    torch.save(found, folder / f"rank{placement.rank}.pt")
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    main()
