"""Measure the decode step's all-reduce with residual and norm sums, against NCCL's and PyTorch's all-reduce.

Without peer access, LL packets go through the host's memory, and PyTorch has no one-shot all-reduce to compare with.

torchrun --standalone --nproc-per-node 4 launch/bench_kernels.py --bench allreduce --rows out.jsonl
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from alspec.errors import BadNumbersError, RankFailureError, UserError
from alspec.kernels.bench.measuring import PUSHED, nothing, push_packets
from alspec.kernels.norm.residual import BLOCK as STREAM_BLOCK
from alspec.kernels.norm.residual import new_residual, num_square_sums, reduce_norm
from alspec.launch.bench.bench_common import check_close
from alspec.runtime.distributed.peer_memory import build_exchanges, probe_peer_memory
from alspec.runtime.distributed.placement import PeerMemory, Placement
from alspec.runtime.distributed.transport import Transport, connect_store
from alspec.runtime.profiling.stats import spread

__all__ = ["BATCHES", "HIDDEN", "AllReduce", "connect", "measure", "time_chains"]

HIDDEN = 4096
BATCHES = (1, 4, 8)
REDUCTIONS = 64  # all-reduces of one epoch: those of a step of 32 layers
ROUNDS = 32  # epochs in one graph: long enough that the ranks' different start times do not matter
RIVAL_CALLS = 32  # all-reduces in place: few enough that the sums of sums stay finite
REPLAYS = 25
WARMUP_REPLAYS = 3
TIMEOUT_NS = 20 * 10**9  # long, because the first call of a rank also compiles
TOLERANCE = 1e-6  # relative RMS of fp32 sums against fp64
NORM_TOLERANCE = 5e-3  # of bf16 values


class AllReduce:
    """The buffers of one batch size on this rank, and the all-reduces to compare."""

    def __init__(self, transport: Transport, peer_memory: PeerMemory, batch_size: int) -> None:
        self._transport, self.batch_size = transport, batch_size
        device = transport.device
        # Logits are not exchanged here: take the smallest vocabulary that all ranks share.
        self.exchange, _, _ = build_exchanges(
            transport, peer_memory, REDUCTIONS, batch_size, HIDDEN, transport.placement.world_size
        )
        generator = torch.Generator(device).manual_seed(transport.placement.rank)
        self.partial = torch.randn(batch_size, HIDDEN, generator=generator, device=device)
        self.gamma = torch.randn(HIDDEN, generator=generator.manual_seed(99), device=device).bfloat16()
        self._start = torch.randn(batch_size, HIDDEN, generator=generator, device=device)
        self.x, self.x_norm, self.square_sums = new_residual(batch_size, HIDDEN, torch.bfloat16, device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._group = dist.group.WORLD
        self._symmetric: Tensor | None = None
        if peer_memory == "symm":
            assert self._group is not None
            self._symmetric = symm_mem.empty(batch_size * HIDDEN, dtype=torch.float32, device=device)
            symm_mem.rendezvous(self._symmetric, self._group.group_name)
            self._symmetric.copy_(self.partial.flatten())
        self._sum = self.partial.clone()

    def ours(self) -> None:
        """`REDUCTIONS` pushes and reductions of one epoch. It ends with two launches that nothing overlaps."""
        for index in range(REDUCTIONS):
            push_packets(self.partial, self.exchange, index)
            reduce_norm(self.exchange, index, TIMEOUT_NS, self.x, self.gamma, self.x_norm, self.square_sums)
        self._next_epoch()

    def nothing(self) -> None:
        """Launch empty kernels, as many as `ours` and with the same grids."""
        device = self.partial.device
        for _ in range(REDUCTIONS):
            nothing((HIDDEN // PUSHED, self.batch_size), 2, device)
            nothing((num_square_sums(HIDDEN), self.batch_size), 4, device)
        self._next_epoch()

    def _next_epoch(self) -> None:
        # A push may read the epoch before its dependent-launch wait: an ordinary launch lies in between.
        self.exchange.epoch.add_(1)
        self._counter.add_(1)

    def nccl(self) -> None:
        """NCCL's all-reduce in place, repeated."""
        self._sum.copy_(self.partial).mul_(1e-3)
        for _ in range(RIVAL_CALLS):
            dist.all_reduce(self._sum)

    def one_shot(self) -> None:
        """PyTorch's one-shot all-reduce over symmetric memory, repeated."""
        for _ in range(RIVAL_CALLS):
            self._one_shot_sum()

    def _one_shot_sum(self) -> Tensor:
        assert self._group is not None
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(self._symmetric, "sum", self._group.group_name)
        return total

    @property
    def rivals(self) -> dict[str, tuple[Callable[[], None], int, int]]:
        """Return the other all-reduces that work here, as `chains` of `time_chains`."""
        found: dict[str, tuple[Callable[[], None], int, int]] = {"nccl": (self.nccl, RIVAL_CALLS, 1)}
        if self._symmetric is not None:
            found["torch.symm_mem.one_shot"] = (self.one_shot, RIVAL_CALLS, 1)
        return found

    def check(self) -> None:
        """Compare one epoch of `ours` with an fp64 sum and with NCCL. All ranks must get the same bits.

        Raises:
            BadNumbersError: a wrong result.
            RankFailureError: a packet did not arrive in time.
        """
        gather, count = self._transport.all_gather_world, REDUCTIONS
        total = torch.zeros_like(self.partial, dtype=torch.float64)
        for partial in gather(self.partial):
            total += partial.double()
        for out in (self.x_norm, self.square_sums):
            out.fill_(torch.nan)
        self.x.copy_(self._start)
        self.ours()
        self._transport.synchronize()
        expected = self._start.double() + count * total
        # Each addition rounds, and the addends are as large as the sum.
        check_close("x", self.x, expected, TOLERANCE * count)
        check_close("x * gamma", self.x_norm, expected * self.gamma.double(), NORM_TOLERANCE)
        squares = self.x.double().square().view(self.batch_size, -1, STREAM_BLOCK).sum(2)
        check_close("sums of x^2", self.square_sums, squares, TOLERANCE)
        self._sum.copy_(self.partial)
        dist.all_reduce(self._sum)
        check_close("NCCL's sum", self._sum, total, TOLERANCE)
        if self._symmetric is not None:
            check_close("one-shot sum", self._one_shot_sum().view_as(total), total, TOLERANCE)
        # One reduction onto -0.0 gives the sum alone.
        self.x.fill_(-0.0)
        push_packets(self.partial, self.exchange, 0)
        reduce_norm(self.exchange, 0, TIMEOUT_NS, self.x, self.gamma, self.x_norm, self.square_sums)
        self._next_epoch()
        self._transport.barrier()
        check_close("sum", self.x, total, TOLERANCE)
        check_close("sum against NCCL's", self.x, self._sum.double(), 2 * TOLERANCE)
        bits = gather(self.x.view(torch.int32))
        if bool((bits != bits[0]).any()):
            raise BadNumbersError("allreduce: ranks have different bits")
        self.check_fault()

    def check_fault(self) -> None:
        """Raise `RankFailureError` if a packet did not arrive in time."""
        if int(self.exchange.fault):
            raise RankFailureError(f"allreduce: a packet did not arrive in time: fault {int(self.exchange.fault):#x}")


def connect() -> tuple[Transport, PeerMemory]:
    """Connect the ranks of the job, and find peer memory for their packets.

    Returns:
        The transport of this rank's GPU, and the peer memory that works.
    Raises:
        UserError: not started by torchrun, or no peer memory works.
    """
    placement = Placement.from_environment()
    if placement.world_size == 1:
        raise UserError("bench_kernels: --bench allreduce needs several ranks: torchrun --nproc-per-node 4 ...")
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    transport = Transport(placement, device, "nccl", connect_store(placement))
    peer_memory, reason = probe_peer_memory(("symm", "host"), transport)
    if peer_memory is None:
        raise UserError(f"bench_kernels: --bench allreduce needs memory that all ranks can write: {reason}")
    return transport, peer_memory


def time_chains(
    transport: Transport, chains: dict[str, tuple[Callable[[], None], int, int]]
) -> dict[str, dict[str, float]]:
    """Microseconds of one call inside a graph: p20, p50 and p80 over replays, each replay on its slowest rank.

    Args:
        chains: name -> (function that launches some calls, number of these calls, repetitions in the graph).
    """
    graphs = {}
    for name, (run, _, repeats) in chains.items():
        run()
        transport.barrier()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            for _ in range(repeats):
                run()
    samples: dict[str, list[float]] = {name: [] for name in chains}
    # In turn, so that all are measured at the same clock rates.
    for replay in range(WARMUP_REPLAYS + REPLAYS):
        for name, (_, calls, repeats) in chains.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            transport.barrier()
            start.record()
            graphs[name].replay()
            end.record()
            transport.synchronize()
            if replay >= WARMUP_REPLAYS:
                samples[name].append(1e3 * start.elapsed_time(end) / (calls * repeats))
    names = list(chains)
    own = torch.tensor([samples[name] for name in names], dtype=torch.float64, device=transport.device)
    slowest: list[list[float]] = transport.all_gather_world(own).amax(0).tolist()
    for graph in graphs.values():
        graph.reset()
    return {name: spread(times) for name, times in zip(names, slowest, strict=True)}


def measure(
    transport: Transport, peer_memory: PeerMemory, batch_size: int
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Check, then time every implementation. Returns the case, and the times by name."""
    reduce = AllReduce(transport, peer_memory, batch_size)
    reduce.check()
    times = time_chains(
        transport,
        reduce.rivals
        | {
            "nothing: two empty launches": (reduce.nothing, REDUCTIONS, ROUNDS),
            "alspec.push, reduce_norm": (reduce.ours, REDUCTIONS, ROUNDS),
        },
    )
    reduce.check_fault()
    if not bool(reduce.x.isfinite().all()):
        raise BadNumbersError("allreduce: numbers that are not finite after the timed runs")
    case = {"world": transport.placement.world_size, "batch": batch_size, "hidden": HIDDEN, "dtype": "fp32"}
    case["transport"] = peer_memory
    return case, times
