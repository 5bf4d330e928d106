"""The decode step's all-reduce, residual and norm statistics alone, against NCCL's and PyTorch's all-reduce.

torchrun --standalone --nproc-per-node 4 launch/bench_kernels.py --bench allreduce --rows out.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.errors import BadNumbersError, RankFailureError, UserError
from alspec.kernels.exchange import Exchange
from alspec.kernels.launch import launch_options, prefer_l1
from alspec.kernels.residual import BLOCK as STREAM_BLOCK
from alspec.kernels.residual import new_stream, num_square_sums, reduce_norm
from alspec.kernels.words import pack_words
from alspec.launch.output import no_command
from alspec.runtime.placement import Placement
from alspec.runtime.stats import spread
from alspec.runtime.symmetric import exchanges, symmetric_fault
from alspec.runtime.transport import Transport, connect_store

__all__ = ["BATCHES", "HIDDEN", "AllReduce", "connect", "measure", "push", "time_chains"]

HIDDEN = 4096
BATCHES = (1, 4, 8)
SLOTS = 64  # all-reduces of one epoch: a step of 32 layers
ROUNDS = 32  # epochs in one graph: beside them, what ranks start apart by does not count
RIVAL_CALLS = 32  # sums of sums stay finite
REPLAYS = 25
WARMUP_REPLAYS = 3
PATIENCE_NS = 20 * 10**9  # the first call of a rank also compiles
TOLERANCE = 1e-6  # relative RMS of fp32 sums against fp64
NORM_TOLERANCE = 5e-3  # of bf16 values
BLOCK = 64  # words of one program


@triton.jit(do_not_specialize=["slot", "rank"])
def _push_kernel(
    partial_ptr,  # [B, hidden] fp32
    peers_ptr,  # [T] int64: address of each peer's words [slots, B, T, hidden]
    epoch_ptr,  # [1] int32
    slot,
    rank,
    HIDDEN: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK words of one request to every peer; grid [hidden / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    epoch = tl.load(epoch_ptr)
    words = pack_words(tl.load(partial_ptr + request * HIDDEN + channels, mask=inside, other=0.0), epoch)
    at = ((slot * tl.num_programs(1) + request) * T + rank).to(tl.int64) * HIDDEN + channels
    bases = ()
    for peer in tl.static_range(T):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    if PDL:
        gdc_wait()
    for peer in tl.static_range(T):
        tl.store(bases[peer] + at, words, mask=inside)


def push(partial: Tensor, exchange: Exchange, slot: int) -> None:
    """Send partial sums to every rank as words: the end of `push_partial`, without its product.

    Args:
        partial: [B, hidden] fp32, not written by the kernel ahead.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, hidden = partial.shape
    assert exchange.peers is not None
    compiled = _push_kernel[(triton.cdiv(hidden, BLOCK), batch_size)](
        partial, exchange.peers, exchange.epoch, slot, exchange.tp_rank, HIDDEN=hidden, T=exchange.tp_size,
        BLOCK=BLOCK, num_warps=2, **launch_options(partial.device),
    )  # fmt: skip
    prefer_l1(compiled)


@triton.jit
def _nothing_kernel(PDL: tl.constexpr):
    """Starts, waits for the kernel ahead, and ends."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


class AllReduce:
    """One batch size's buffers on this rank, and the ways to reduce them."""

    def __init__(self, transport: Transport, batch_size: int) -> None:
        self._transport, self.batch_size = transport, batch_size
        device = transport.device
        # The smallest vocabulary that every rank has a part of: logits are not exchanged here.
        self.exchange, _, _ = exchanges(transport, True, SLOTS, batch_size, HIDDEN, transport.placement.world_size)
        generator = torch.Generator(device).manual_seed(transport.placement.rank)
        self.partial = torch.randn(batch_size, HIDDEN, generator=generator, device=device)
        self.gamma = torch.randn(HIDDEN, generator=generator.manual_seed(99), device=device).bfloat16()
        self._start = torch.randn(batch_size, HIDDEN, generator=generator, device=device)
        self.x, self.x_norm, self.square_sums = new_stream(batch_size, HIDDEN, torch.bfloat16, device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._group = dist.group.WORLD
        assert self._group is not None
        self._symmetric = symm_mem.empty(batch_size * HIDDEN, dtype=torch.float32, device=device)
        symm_mem.rendezvous(self._symmetric, self._group.group_name)
        self._symmetric.copy_(self.partial.flatten())
        self._sum = self.partial.clone()

    def ours(self) -> None:
        """`SLOTS` pushes and reductions over one epoch, which ends with two launches that nothing overlaps."""
        for slot in range(SLOTS):
            push(self.partial, self.exchange, slot)
            reduce_norm(self.exchange, slot, PATIENCE_NS, self.x, self.gamma, self.x_norm, self.square_sums)
        self._next_epoch()

    def nothing(self) -> None:
        """As many launches as `ours`, of the same size, that do nothing."""
        options = launch_options(self.partial.device)
        for _ in range(SLOTS):
            _nothing_kernel[(triton.cdiv(HIDDEN, BLOCK), self.batch_size)](num_warps=2, **options)
            _nothing_kernel[(num_square_sums(HIDDEN), self.batch_size)](num_warps=4, **options)
        self._next_epoch()

    def _next_epoch(self) -> None:
        # A push may read the epoch before its wait: an ordinary launch lies between that and the count.
        self.exchange.epoch.add_(1)
        self._counter.add_(1)

    def nccl(self) -> None:
        """NCCL's all-reduce, in place, over and over."""
        self._sum.copy_(self.partial).mul_(1e-3)
        for _ in range(RIVAL_CALLS):
            dist.all_reduce(self._sum)

    def one_shot(self) -> None:
        """PyTorch's one-shot all-reduce over symmetric memory."""
        assert self._group is not None
        for _ in range(RIVAL_CALLS):
            torch.ops.symm_mem.one_shot_all_reduce(self._symmetric, "sum", self._group.group_name)

    def check(self) -> None:
        """One epoch of `ours` against an fp64 sum in rank order and against NCCL; the same bits on every rank.

        Raises:
            BadNumbersError: a wrong result.
            RankFailureError: a word did not come.
        """
        gather, count = self._transport.all_gather_world, SLOTS
        total = torch.zeros_like(self.partial, dtype=torch.float64)
        for partial in gather(self.partial):
            total += partial.double()
        for out in (self.x_norm, self.square_sums):
            out.fill_(torch.nan)
        self.x.copy_(self._start)
        self.ours()
        self._transport.synchronize()
        expected = self._start.double() + count * total
        # Each of the additions rounds; what is added is as large as what is there.
        _compare("x", self.x, expected, TOLERANCE * count)
        _compare("x * gamma", self.x_norm, expected * self.gamma.double(), NORM_TOLERANCE)
        squares = self.x.double().square().view(self.batch_size, -1, STREAM_BLOCK).sum(2)
        _compare("sums of x^2", self.square_sums, squares, TOLERANCE)
        self._sum.copy_(self.partial)
        dist.all_reduce(self._sum)
        _compare("NCCL's sum", self._sum, total, TOLERANCE)
        assert self._group is not None
        one_shot = torch.ops.symm_mem.one_shot_all_reduce(self._symmetric, "sum", self._group.group_name)
        _compare("one-shot sum", one_shot.view_as(total), total, TOLERANCE)
        # One reduction onto -0.0: the sum alone.
        self.x.fill_(-0.0)
        push(self.partial, self.exchange, 0)
        reduce_norm(self.exchange, 0, PATIENCE_NS, self.x, self.gamma, self.x_norm, self.square_sums)
        self._next_epoch()
        self._transport.barrier()
        _compare("sum", self.x, total, TOLERANCE)
        _compare("sum against NCCL's", self.x, self._sum.double(), 2 * TOLERANCE)
        bits = gather(self.x.view(torch.int32))
        if bool((bits != bits[0]).any()):
            raise BadNumbersError("allreduce: ranks have different bits")
        self.check_fault()

    def check_fault(self) -> None:
        """Raise if a word did not come in time."""
        if int(self.exchange.fault):
            raise RankFailureError(f"allreduce: a word did not come: fault {int(self.exchange.fault):#x}")


def _compare(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    if not error < tolerance:
        raise BadNumbersError(f"allreduce: wrong {name}: relative error {error:.2e}, tolerance {tolerance:.0e}")


def connect() -> Transport:
    """This rank's GPU and the job's process groups.

    Raises:
        UserError: not started by torchrun, or GPUs that do not reach each other.
    """
    placement = Placement.from_environment()
    if placement.world_size == 1:
        raise UserError("bench_kernels: --bench allreduce needs several ranks: torchrun --nproc-per-node 4 ...")
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    transport = Transport(placement, device, "nccl", connect_store(placement))
    reason = symmetric_fault(transport)
    if reason:
        raise UserError(f"bench_kernels: --bench allreduce needs symmetric memory: {reason}")
    return transport


def time_chains(
    transport: Transport, chains: dict[str, tuple[Callable[[], None], int, int]]
) -> dict[str, dict[str, float]]:
    """Microseconds of one call inside a graph: p20, p50 and p80 over replays, each on the rank it took longest on.

    Args:
        chains: name -> what launches some calls, how many it launches, how often it is repeated in the graph.
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
    # In turns, so that all are measured at the same clock rates.
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


def measure(transport: Transport, batch_size: int) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The case, and the times of every implementation; correctness first."""
    reduce = AllReduce(transport, batch_size)
    reduce.check()
    times = time_chains(
        transport,
        {
            "nccl": (reduce.nccl, RIVAL_CALLS, 1),
            "torch.symm_mem.one_shot": (reduce.one_shot, RIVAL_CALLS, 1),
            "nothing: two empty launches": (reduce.nothing, SLOTS, ROUNDS),
            "alspec.push, reduce_norm": (reduce.ours, SLOTS, ROUNDS),
        },
    )
    reduce.check_fault()
    if not bool(reduce.x.isfinite().all()):
        raise BadNumbersError("allreduce: numbers that are not finite after the timed runs")
    case = {"world": transport.placement.world_size, "batch": batch_size, "hidden": HIDDEN, "dtype": "fp32"}
    return case, times


if __name__ == "__main__":
    sys.exit(no_command(__file__, "launch/bench_kernels.py --bench allreduce"))
