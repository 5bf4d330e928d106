"""Where a rank's partial results go, and where it finds those of the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Exchange", "LogitExchange"]


@dataclass(frozen=True)
class Exchange:
    """Partial sums of one tensor-parallel group.

    With `peers`, they travel as words (ll_packets.py): `words` has a slot for each all-reduce of a step, so that no
    word is overwritten before it has been read. Each rank has its own, or all share those of the host; then each
    keeps what it pushed in `own_packets`, too, for it need not come back from there. Without peers, the sums lie
    in `partial`, and a collective adds them up in between if there are several ranks.
    """

    partial: Tensor  # [B, hidden] fp32
    epoch: Tensor  # [1] int32: number of the step, counted by its last kernel
    fault: Tensor  # [1] int32: 0, or the step's first fault
    tp_rank: int = 0
    tp_size: int = 1
    rank: int = 0  # in the job: what a fault is reported under
    packets: Tensor | None = None  # [slots, B, T, hidden] int64: what this rank reads
    own_packets: Tensor | None = None  # as words, places of others unused: where it reads its own instead
    peers: Tensor | None = None  # [T or 2] int64: addresses of all such words, on the device


@dataclass(frozen=True)
class LogitExchange:
    """Logits of the vocabulary shards of all ranks; `own_packets` and `peers` as in `Exchange`."""

    shard: Tensor  # [B, rows] fp32: this rank's, where nothing is pushed; rows = ceil(V / world)
    epoch: Tensor
    fault: Tensor
    rank: int = 0
    world_size: int = 1
    packets: Tensor | None = None  # [B, world, rows] int64
    own_packets: Tensor | None = None  # as words
    peers: Tensor | None = None  # [world or 2] int64
