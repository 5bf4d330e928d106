"""Placement of a rank: its group, its rank in the group, its paired rank and its device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from alspec.errors import UserError
from alspec.models.llama import Shard

__all__ = [
    "Placement",
    "PeerMemory",
    "gpus_without_access",
    "why_no_peers",
]

PeerMemory = Literal["symm", "host"]  # GPU memory of peers; pinned host memory


@dataclass(frozen=True)
class Placement:
    """Place of one rank in the job.

    Ranks `[g T, (g + 1) T)` form group `g`. Rank `t` of one group is paired with rank `t` of the other. torchrun
    numbers ranks node by node, so tensor parallelism stays inside a node if it fits there, and pairs cross nodes.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    num_groups: int = 1
    is_linked: bool = False  # the groups are connected by a link that kernels cannot reach across

    @classmethod
    def from_environment(cls) -> Placement:
        """Read torchrun's variables; without them the job is one rank.

        Raises:
            UserError: a variable is not a number, or they contradict each other.
        """

        def number(name: str, default: int) -> int:
            value = os.environ.get(name, str(default))
            if not value.isdecimal() or len(value) > 9 or (name.endswith("SIZE") and int(value) == 0):
                raise UserError(f"{name}: expected a number in the environment, found {value!r:.80}; use torchrun")
            return int(value)

        world_size = number("WORLD_SIZE", 1)
        found = cls(
            rank=number("RANK", 0),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        )
        for name, value, limit in (
            ("RANK", found.rank, world_size - 1),
            ("LOCAL_RANK", found.local_rank, found.local_world_size - 1),
            ("LOCAL_WORLD_SIZE", found.local_world_size, world_size),
        ):
            if value > limit:
                sizes = f"WORLD_SIZE {world_size} and LOCAL_WORLD_SIZE {found.local_world_size}"
                raise UserError(f"{name}: expected at most {limit} with {sizes}, found {value}; use torchrun")
        return found

    @property
    def tp_size(self) -> int:
        """T: ranks of one group."""
        return self.world_size // self.num_groups

    @property
    def group(self) -> int:
        """0 or 1."""
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        """Rank in the group, 0 .. T - 1."""
        return self.rank % self.tp_size

    @property
    def paired_rank(self) -> int:
        """The rank with the same `tp_rank` in the other group."""
        assert self.num_groups == 2
        return (self.rank + self.tp_size) % self.world_size

    @property
    def group_ranks(self) -> range:
        """The ranks of this rank's group."""
        return range(self.group * self.tp_size, (self.group + 1) * self.tp_size)

    @property
    def peers(self) -> range:
        """The ranks that share the vocabulary, and memory for packets: all of the job, or those of a linked group."""
        return self.group_ranks if self.is_linked else range(self.world_size)

    @property
    def peer_rank(self) -> int:
        """Rank among the peers."""
        return self.rank - self.peers.start

    @property
    def host_ranks(self) -> range:
        """The ranks on this rank's host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def is_inside_host(self, ranks: range) -> bool:
        """Whether all of these ranks, one of which is this one, are on this rank's host."""
        return ranks.start >= self.host_ranks.start and ranks.stop <= self.host_ranks.stop

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks of the job are on this rank's host."""
        return self.local_world_size == self.world_size

    @property
    def peer_gpus(self) -> list[int]:
        """The GPUs of the peers, which are on this rank's host."""
        return [rank - self.host_ranks.start for rank in self.peers]

    @property
    def shard(self) -> Shard:
        """This rank's part of the weights; the vocabulary is split over the peers."""
        return Shard(self.tp_rank, self.tp_size, self.peer_rank, len(self.peers))


def gpus_without_access(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs (a, b) of these GPUs of this host where a cannot access the memory of b."""
    return [(a, b) for a, b in itertools.permutations(gpus, 2) if not torch.cuda.can_device_access_peer(a, b)]


def why_no_peers(gpus: Sequence[int]) -> str:
    """Return why these GPUs of this host cannot write to each other's memory; '' if they can."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1"
    without = gpus_without_access(gpus)
    return f"GPU {without[0][0]} cannot reach GPU {without[0][1]}" if without else ""
