"""What follows from the configuration, the model and the ranks: mode, device, dtype, transports and CUDA graphs.

Nothing here takes device memory; it finds the user's mistakes before anything does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import check_codec, check_head_dim
from alspec.runtime.distributed.placement import PeerMemory, Placement
from alspec.runtime.engine.memory import DTYPES

__all__ = [
    "Choices",
    "check_links",
    "choose",
    "choose_device",
    "choose_graph",
    "choose_mode",
    "is_linked",
    "peer_memory_candidates",
]

# --transport or --pair-transport -> peer memories to try, best first.
PEER_MEMORIES: dict[str, tuple[PeerMemory, ...]] = {"auto": ("symm", "host"), "symm": ("symm",), "host": ("host",)}


@dataclass(frozen=True)
class Choices:
    """What follows from the configuration, the model and the ranks of the job."""

    mode: str  # off, simulated or paired
    placement: Placement
    device: torch.device
    backend: str  # nccl or gloo
    dtype_name: str
    has_fused_step: bool  # a whole step runs as fused kernels: it can be captured, and ranks can exchange packets
    uses_graph: bool
    candidates: tuple[PeerMemory, ...]  # memory through which packets may travel, best first; see `find_peer_memory`
    notices: list[str] = field(default_factory=list)  # choices that a user may not expect

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and activations."""
        return DTYPES[self.dtype_name]

    @property
    def packs_weights(self) -> bool:
        """Quantised weights are kept packed: kernels for them run on GPUs, with activations of 16 bits."""
        return self.device.type == "cuda" and self.dtype.itemsize == 2


def choose(
    config: EngineConfig, model: LlamaConfig, has_trace: bool, draft_model: LlamaConfig | None = None
) -> Choices:
    """Choose mode, device, dtype and how steps run.

    Args:
        has_trace: each operation is timed, which needs steps launched one by one.
        draft_model: shape of the smaller model of `--draft model:DIR`.
    Raises:
        UserError: what was asked for is not available here.
    """
    environment = Placement.from_environment()
    requested = config.speculation.mode
    if config.draft != "off" and requested not in ("auto", "off"):
        raise UserError(
            f"draft: {config.draft} needs --speculation off, found {requested}; drafts keep the text, an accepted A~ "
            "may not"
        )
    mode, num_groups = choose_mode(requested, model, environment.world_size)
    placement = replace(environment, num_groups=num_groups)
    check_codec(config.kv_cache, model, placement.tp_size, config.kv_protect)
    device, backend, notice = choose_device(config, placement)
    check_head_dim(model, device)
    notices = [notice] if notice else []
    if config.draft != "off" and mode != "off":
        sizes = [size for size in model.valid_tp_sizes if draft_model is None or size in draft_model.valid_tp_sizes]
        raise UserError(
            f"draft: {config.draft} needs mode off, and --speculation auto takes a pair here, because heads do not "
            f"divide over {placement.world_size} ranks; numbers of ranks that work: {', '.join(map(str, sizes))}"
        )
    if mode == "paired" and requested == "auto":
        notices.append(
            f"speculation: a pair, because heads do not divide over {placement.world_size} ranks; A~ within lambda "
            f"{config.speculation.threshold:g} is accepted (threshold 0 accepts none)"
        )
    has_fused_step = device.type == "cuda" and mode in ("off", "paired")
    if has_fused_step and mode == "paired":
        placement = replace(placement, is_linked=is_linked(config, placement))
    if device.type == "cuda" and not has_fused_step:
        notices.append(f"{mode}: operations are launched one by one; captured steps serve off and paired")
    if requested == "auto" and mode == "off" and not has_fused_step and not placement.is_one_host:
        notices.append(
            "speculation: off, with two all-reduces over the network in each layer; the verifier of a pair waits for "
            "no message (--speculation paired), and one host alone may be faster (docs/two_hosts.md)"
        )
    check_links(config, mode, placement, device)
    candidates = peer_memory_candidates(config, mode, len(placement.peers), has_fused_step)
    uses_graph = choose_graph(config, mode, device, has_fused_step, has_trace)
    if has_trace and has_fused_step:
        notices.append("operations are launched one by one, because --trace times each of them")
    dtype_name = config.dtype or (model.dtype if device.type == "cuda" else "fp32")
    return Choices(mode, placement, device, backend, dtype_name, has_fused_step, uses_graph, candidates, notices)


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
            world_size % 2 == 0 and not config.divides_over(world_size) and world_size // 2 in config.valid_tp_sizes
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
