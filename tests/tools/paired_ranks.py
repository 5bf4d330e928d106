"""Pair states of all ranks of a pair in one process, and the expected roles, for tests of kernels between groups."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.pair_state import PairShape, PairState
from alspec.priority import INITIAL_PRIORITY, Priority, after_handover, after_verdict, sender

__all__ = ["TIMEOUT_NS", "LayerRoles", "nan", "pairs", "roles_by_the_rules", "sums_for"]

TIMEOUT_NS = 10**8


def nan(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def pairs(device: torch.device, shape: PairShape, epoch: int) -> list[list[PairState]]:
    """The pair state of every rank: [group][tp_rank]."""
    size, tp_size = sum(shape.field_sizes()), shape.tp_size
    memories = [[torch.zeros(size, dtype=torch.int64, device=device) for _ in range(tp_size)] for _ in range(2)]
    meetings = torch.zeros(2 * tp_size, 2 * tp_size, dtype=torch.int64, device=device)
    return [
        [
            PairState.build(
                shape,
                Exchange(
                    partial=nan(device, torch.float32, shape.batch_size, shape.hidden_size),
                    epoch=torch.tensor([epoch], dtype=torch.int32, device=device),
                    fault=torch.zeros(1, dtype=torch.int32, device=device),
                    tp_rank=tp_rank,
                    tp_size=tp_size,
                    rank=group * tp_size + tp_rank,
                ),
                group,
                (1 - group) * tp_size + tp_rank,
                memories[group][tp_rank],
                memories[1 - group][tp_rank],
                [memory.data_ptr() for memory in memories[group]],
                meetings[group * tp_size + tp_rank],
                [barrier.data_ptr() for barrier in meetings],
            )
            for tp_rank in range(tp_size)
        ]
        for group in range(2)
    ]


def sums_for(device: torch.device, accept: list[bool], num_heads: int) -> Tensor:
    """[B, Hq, 2] sums for requests that accept or reject at a threshold of 0.5."""
    sums = torch.rand(len(accept), num_heads, 2) + 1
    sums[..., 0] *= torch.tensor([0.1 if each else 10.0 for each in accept])[:, None]
    return sums.to(device)


@dataclass(frozen=True)
class LayerRoles:
    """The roles in a layer by the rules of `alspec.priority`."""

    layer: int
    source: int  # the group that sends
    before: Priority
    handed: Priority  # after the handover
    after: Priority  # after the verdict
    accept: list[bool]  # for each request; the layer accepts if all requests do


def roles_by_the_rules(
    num_steps: int, num_layers: int, batch: int, hit_rate: float, seed: int
) -> Iterator[list[LayerRoles]]:
    """The layers of each step, with random verdicts. The group that ended a step is the sender in the next one."""
    rng, source = random.Random(seed), sender(INITIAL_PRIORITY)
    for _ in range(num_steps):
        priority: Priority = (2, 0) if source == 0 else (0, 2)
        layers = []
        for layer in range(num_layers):
            accept = [rng.random() < hit_rate for _ in range(batch)]
            handed = after_handover(priority)
            after = after_verdict(handed, all(accept))
            layers.append(LayerRoles(layer, sender(priority), priority, handed, after, accept))
            priority = after
        source = sender(priority)
        yield layers
