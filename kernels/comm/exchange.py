"""Buffers through which ranks exchange partial sums and logits: where a rank writes and where it reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from alspec.kernels.comm.ll_packets import fault_code

__all__ = ["Exchange", "LogitExchange"]


@dataclass(frozen=True)
class Exchange:
    """Buffers for the partial sums of one tensor-parallel group.

    With `peers`, partial sums travel as LL packets (ll_packets.py). Each all-reduce of a step has its own buffer in
    `packets`, so that no packet is overwritten before it was read. GPU peer memory holds one `packets` for each rank.
    Host memory holds one for the whole group; a rank then also stores its own packets in `own_packets` on its GPU, and
    reads them there. Without `peers`, the sums lie in `partial`; with several ranks, a collective adds them up between
    the two kernels.
    """

    partial: Tensor  # [B, hidden] fp32
    epoch: Tensor  # [1] int32: number of the step, incremented by its last kernel
    fault: Tensor  # [1] int32: 0, or the first fault of the step
    tp_rank: int = 0
    tp_size: int = 1
    rank: int = 0  # in the job; faults are reported under it
    packets: Tensor | None = None  # [num_reduces, B, T, hidden] int64: what this rank reads
    own_packets: Tensor | None = None  # shape of `packets`: this rank's part is read here instead of there
    peers: Tensor | None = None  # [T or 2] int64, on the device: addresses of all `packets` that this rank writes
    # [L, T, 1 + 2 B] int64, only in a linked group with packets: each rank's count of arrived messages, and dist2 and
    # norm2 of each request. The ranks need the same ones, to choose alike.
    agreed: Tensor | None = None
    agreed_peers: Tensor | None = None  # [T] int64, on the device: address of each rank's `agreed`
    fault_base: int = 0  # added to each reduce_index in fault words: draft steps share the word with the model's steps

    def fault_code(self, kind: int, reduce_index: int, rank: int) -> int:
        """The fault word for an all-reduce of these steps."""
        return fault_code(kind, self.fault_base + reduce_index, rank)


@dataclass(frozen=True)
class LogitExchange:
    """Buffers for the logits of all ranks' vocabulary shards; `own_packets` and `peers` as in `Exchange`."""

    shard: Tensor  # [B, rows] fp32: this rank's logits if nothing is pushed; rows = ceil(V / world)
    epoch: Tensor
    fault: Tensor
    rank: int = 0  # among those that share the vocabulary
    world_size: int = 1
    packets: Tensor | None = None  # [B, world, rows] int64
    own_packets: Tensor | None = None  # as `packets`
    peers: Tensor | None = None  # [world or 2] int64
    first_rank: int = 0  # of them, in the job; faults are reported under `first_rank + rank`
    fault_base: int = 0  # as in `Exchange`

    def fault_code(self, kind: int, reduce_index: int, rank: int) -> int:
        """The fault word for the logits of these steps."""
        return fault_code(kind, self.fault_base + reduce_index, rank)
