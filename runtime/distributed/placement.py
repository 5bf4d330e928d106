"""Placement of a rank: its group, its rank in the group, its paired rank and its device."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig

__all__ = [
    "Placement",
    "PeerMemory",
    "check_links",
    "choose_device",
    "choose_graph",
    "choose_mode",
    "is_linked",
    "peer_memory_candidates",
    "gpus_without_access",
    "why_no_peers",
]

PeerMemory = Literal["symm", "host"]  # GPU memory of peers; pinned host memory
# --transport or --pair-transport -> peer memories to try, best first.
PEER_MEMORIES: dict[str, tuple[PeerMemory, ...]] = {"auto": ("symm", "host"), "symm": ("symm",), "host": ("host",)}


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


def choose_mode(requested: str, config: LlamaConfig, world_size: int) -> tuple[str, int]:
    """Resolve the mode `auto` and check that the model divides over the ranks.

    `auto` is tensor parallelism over all ranks if the model divides by their number, because pairing gains only what
    tensor parallelism cannot. Otherwise (as 6 query heads over 4 ranks) one half of the ranks pairs with the other.

    Args:
        requested: value of --speculation.
        config: the model's.
        world_size: ranks of the job.
    Returns:
        The mode in use, and its number of groups.
    Raises:
        UserError: an odd number of ranks for `paired`, or a model that does not divide over a group.
    """
    if requested == "auto":
        paired = (
            world_size % 2 == 0 and world_size not in config.valid_tp_sizes and world_size // 2 in config.valid_tp_sizes
        )
        requested = "paired" if paired else "off"
    if requested == "paired":
        if world_size < 2 or world_size % 2:
            raise UserError(
                f"speculation: paired needs an even number of ranks, found {world_size}; "
                "start it with torchrun --nproc-per-node 2 (or 4, ...), or use --speculation simulated"
            )
        config.check_tp_size(world_size // 2)
        return "paired", 2
    config.check_tp_size(world_size)
    return requested, 1


def is_linked(config: EngineConfig, placement: Placement) -> bool:
    """Whether the two groups of a pair exchange messages over NCCL: as asked for, or because they span hosts."""
    if config.pair_transport != "auto":
        return config.pair_transport == "nccl"
    return config.transport == "nccl" or not placement.is_one_host


def check_links(config: EngineConfig, mode: str, placement: Placement, device: torch.device) -> None:
    """Refuse transports that exclude each other, or that these ranks cannot have.

    Args:
        mode: speculation mode in use.
        placement: complete, with groups and link.
    Raises:
        UserError: names the flag.
    """
    inside, between = config.transport, config.pair_transport
    if between != "auto" and mode != "paired":
        raise UserError(f"pair_transport: {between} needs --speculation paired, found {mode}; leave it out")
    if between == "gloo" and device.type == "cuda":
        raise UserError("pair_transport: gloo is for the CPU, and this runs on GPUs; use nccl, or --transport gloo")
    if between not in ("auto", "gloo") and device.type != "cuda":
        raise UserError(f"pair_transport: {between} needs GPUs, and this runs on the CPU; use auto or gloo")
    if between in ("symm", "host"):
        if not placement.is_one_host:
            raise UserError(f"pair_transport: {between} works inside one host, found several hosts; use auto or nccl")
        if inside not in ("auto", between):
            raise UserError(
                f"pair_transport: {between} needs the same memory inside a group, found --transport {inside}; "
                f"use --transport {between}, or --pair-transport nccl"
            )
    if inside in ("symm", "host") and len(placement.peers) > 1 and not placement.is_inside_host(placement.peers):
        raise UserError(
            f"transport: {inside} works inside one host, and the {len(placement.peers)} ranks that exchange results "
            "are on several hosts; use auto or nccl"
        )


def choose_device(config: EngineConfig, placement: Placement) -> tuple[torch.device, str, str]:
    """Choose device and backend: GPUs if every local rank has one, else the CPU.

    Returns:
        device, backend (`nccl` or `gloo`), and a sentence on an unexpected choice ('' if there is none).
    Raises:
        UserError: the transport needs GPUs, and there are fewer GPUs than local ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.transport in ("nccl", "symm", "host") and gpus < placement.local_world_size:
        raise UserError(
            f"transport: {config.transport} needs one GPU for each rank, found {gpus} for "
            f"{placement.local_world_size} ranks; start fewer ranks or use --transport gloo (CPU)"
        )
    if config.transport == "gloo" or gpus < placement.local_world_size:
        notice = ""
        if config.transport == "auto" and gpus:
            notice = f"{gpus} GPU(s) for {placement.local_world_size} ranks: running on the CPU with gloo"
        return torch.device("cpu"), "gloo", notice
    return torch.device("cuda", placement.local_rank), "nccl", ""


def peer_memory_candidates(
    config: EngineConfig, mode: str, num_peers: int, has_fused_step: bool
) -> tuple[PeerMemory, ...]:
    """Peer memories to try for LL packets, best first; empty if the fused kernels of a step do not decode.

    Args:
        config: names the transports.
        mode: speculation mode in use, for the message.
        num_peers: ranks that exchange results.
        has_fused_step: a whole step runs as fused kernels.
    Raises:
        UserError: the transport names a peer memory, and the fused kernels do not decode.
    """
    requested = config.transport
    candidates = PEER_MEMORIES.get(requested, ())
    if requested == "auto" and config.pair_transport in PEER_MEMORIES:
        candidates = PEER_MEMORIES[config.pair_transport]
    if requested != "auto" and candidates and not has_fused_step:
        raise UserError(
            f"transport: {requested} is not available with speculation {mode}; "
            "use --speculation off or paired, or --transport nccl"
        )
    return candidates if has_fused_step and num_peers > 1 else ()


def gpus_without_access(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs (a, b) of these GPUs of this host where a cannot access the memory of b."""
    return [(a, b) for a, b in itertools.permutations(gpus, 2) if not torch.cuda.can_device_access_peer(a, b)]


def why_no_peers(gpus: Sequence[int]) -> str:
    """Return why these GPUs of this host cannot write to each other's memory; '' if they can."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1"
    without = gpus_without_access(gpus)
    return f"GPU {without[0][0]} cannot reach GPU {without[0][1]}" if without else ""


def choose_graph(config: EngineConfig, mode: str, device: torch.device, has_fused_step: bool, trace: bool) -> bool:
    """Decide whether steps are captured in CUDA graphs, which needs the fused kernels.

    Args:
        config: its `cuda_graph` is on, off or auto.
        mode: speculation mode in use, for the message.
        device: where the model runs.
        has_fused_step: a whole step runs as fused kernels.
        trace: operations are timed one by one.
    Raises:
        UserError: `on` without a GPU, without the fused kernels, or with a trace.
    """
    if config.cuda_graph == "on":
        if device.type != "cuda":
            raise UserError("cuda_graph: on needs a GPU, and this runs on the CPU; use auto or off")
        if not has_fused_step:
            raise UserError(f"cuda_graph: on is not available with speculation {mode}; use auto or off")
        if trace:
            raise UserError("cuda_graph: on excludes trace, which times operations launched one by one; use off")
    return has_fused_step and device.type == "cuda" and config.cuda_graph != "off" and not trace
