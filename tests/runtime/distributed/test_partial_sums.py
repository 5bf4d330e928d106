"""Sums of partials of several processes, gathered or reduced, against fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import run_ranks
from paths import WORKERS
from tiers import fast

from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import MAX_GATHERED, Transport

WORKER = WORKERS / "sum_worker.py"
GPUS = torch.cuda.device_count()


@pytest.mark.parametrize(
    ("device", "world_size"),
    [
        *fast(
            [("cpu", world_size) for world_size in (1, 2, 3, MAX_GATHERED, MAX_GATHERED + 1)],
            keep=[("cpu", 1), ("cpu", 3), ("cpu", MAX_GATHERED + 1)],
        ),
        *(
            pytest.param(
                "cuda", size, marks=[pytest.mark.gpu, pytest.mark.skipif(size > GPUS, reason=f"needs {size} GPUs")]
            )
            for size in (2, 4)
        ),
    ],
)
def test_sums_are_exact_to_fp32_and_the_same_on_all_ranks(device: str, world_size: int, tmp_path: Path) -> None:
    run_ranks(WORKER, world_size, tmp_path, device, timeout_s=120)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]
    later = "rank 1: later" if world_size > 1 else ""
    for rank in ranks:
        assert rank["reasons"][:2] == ["", later]
        assert rank["reasons"][2].startswith("0 é0 é")
    for name in ("torch.bfloat16", "torch.float16", "torch.float32"):
        partials = torch.stack([rank[name]["own"].double() for rank in ranks])
        parts = ranks[0][name]["parts"]
        total = parts.sum(0, dtype=torch.float32)
        # Each addition rounds the sum so far by at most 2^-24 of it.
        bound = (world_size - 1) * 2.0**-24 * partials.abs().sum(0)
        assert bool(((total.double() - partials.sum(0)).abs() <= bound).all())
        assert all(torch.equal(rank[name]["parts"], parts) for rank in ranks)
        is_gathered = world_size == 1 or (name != "torch.float32" and world_size <= MAX_GATHERED)
        assert len(parts) == (world_size if is_gathered else 1)
        assert all(rank[name]["reduced"] == (0 if is_gathered else 1) for rank in ranks)
        # Each token belongs to one rank. That rank gets the partials of all ranks, and sends its row to all.
        assert [token for rank in ranks for token in rank[name]["tokens"]] == list(range(7))
        assert all(rank[name]["all"] == list(range(7)) for rank in ranks), "short prompts must not be spread"
        owns = torch.stack([rank[name]["own"] for rank in ranks])
        for rank in ranks:
            tokens = rank[name]["tokens"]
            assert torch.equal(rank[name]["scattered"], owns[:, tokens.start : tokens.stop])
            rows = [owner[name]["own"][token] for owner in ranks for token in owner[name]["tokens"]]
            assert torch.equal(rank[name]["gathered"], torch.stack(rows))


@pytest.mark.parametrize(
    ("tp_size", "num_tokens", "expected"),
    [(4, 1024, range(256, 512)), (3, 1024, range(342, 684)), (4, 1023, range(1023)), (2, 4096, range(4096))],
)
def test_long_prompts_are_spread_over_three_or_more_ranks(tp_size: int, num_tokens: int, expected: range) -> None:
    transport = Transport(Placement(), torch.device("cpu"), "gloo", None)
    transport.placement = Placement(1, tp_size, 1, tp_size)
    assert transport.own_tokens(num_tokens) == expected
