"""Kernels for benchmarks only: time stamps, waiting for packets, and baselines for the kernels of a step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import store_packets
from alspec.kernels.common.jit_launch import RESERVED_BYTES, pdl_options, set_l1_carveout

__all__ = ["NEVER", "POLLED", "compare_clocks", "nothing", "push_packets", "read_tiles", "stamp_time", "watch_packets"]

PUSHED = 128  # packets per program of `push_packets`, two per thread
# Packets per program of `watch_packets`, one for each lane. Few, because a poll takes as long as its slowest load, and
# the memory is busy with other work meanwhile.
POLLED = 32
NEVER = torch.iinfo(torch.int64).max  # stands for the time of an event that did not happen


@triton.jit(do_not_specialize=["reduce_index", "rank"])
def _push_packets_kernel(
    partial_ptr,  # [B, hidden] fp32
    peers_ptr,  # [PEERS] int64: addresses of the packets [num_reduces, B, T, hidden] to store into
    epoch_ptr,  # [1] int32
    reduce_index,
    rank,
    HIDDEN: tl.constexpr,
    T: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push BLOCK packets of one request to every peer. Grid [hidden / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channels < HIDDEN
    epoch = tl.load(epoch_ptr)
    partial = tl.load(partial_ptr + request * HIDDEN + channels, mask=channel_mask, other=0.0)
    offsets = ((reduce_index * tl.num_programs(1) + request) * T + rank).to(tl.int64) * HIDDEN + channels
    bases = ()
    for peer in tl.static_range(PEERS):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    if PDL:
        gdc_wait()
    for peer in tl.static_range(PEERS):
        store_packets(bases[peer] + offsets, partial, epoch, channel_mask)


def push_packets(partial: Tensor, exchange: Exchange, reduce_index: int) -> None:
    """Push partial sums to every rank as LL packets: the last part of `push_partial`, without its matrix product.

    Args:
        partial: [B, hidden] fp32; the previous kernel must not write it.
        exchange: buffers of the group, with `peers`.
        reduce_index: index of the all-reduce in the step.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, hidden = partial.shape
    assert exchange.peers is not None
    compiled = _push_packets_kernel[(triton.cdiv(hidden, PUSHED), batch_size)](
        partial, exchange.peers, exchange.epoch, reduce_index, exchange.tp_rank, HIDDEN=hidden, T=exchange.tp_size,
        PEERS=exchange.peers.shape[0], BLOCK=PUSHED, num_warps=2, **pdl_options(partial.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _nothing_kernel(PDL: tl.constexpr):
    """Wait for the previous kernel and end. Any grid."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def nothing(grid: tuple[int, ...], num_warps: int, device: torch.device) -> None:
    """Launch a kernel of this size that does nothing; a dependent launch where the device supports it."""
    _nothing_kernel[grid](num_warps=num_warps, **pdl_options(device))


@triton.jit
def _stamp_time_kernel(time_ptr):
    """Store the GPU's clock. Grid [1]."""
    tl.store(time_ptr, globaltimer())


def stamp_time(time: Tensor) -> None:
    """Write the GPU's clock in ns to `time`, [1] int64."""
    _stamp_time_kernel[(1,)](time)


@triton.jit(do_not_specialize=["epoch", "size"])
def _watch_packets_kernel(
    packets_ptr,  # [size] int64
    epoch,
    copy_ptr,  # [size] fp32
    size,
    times_ptr,  # [size / PAD] int64: when the packets were first seen, in ns; `never` before that
    never,
    deadline_ns,
    PAD: tl.constexpr,
    POLLERS: tl.constexpr,
):
    """Poll until all packets carry the epoch; the first program to see that copies. Grid [POLLERS size / PAD].

    POLLERS programs poll the same PAD packets. After the deadline a program ends and writes nothing.
    """
    start = globaltimer()
    block = tl.program_id(0) // POLLERS
    offsets = block * PAD + tl.arange(0, PAD)
    late = 1
    packets = tl.full([PAD], 0, tl.int64)
    while (late > 0) & (globaltimer() - start < deadline_ns):
        packets = tl.load(packets_ptr + offsets, mask=offsets < size, other=0, volatile=True)
        late = tl.sum(((packets >> 32 != epoch) & (offsets < size)).to(tl.int32))
    if late == 0:
        if tl.atomic_min(times_ptr + block, globaltimer()) == never:
            tl.store(copy_ptr + offsets, packets.to(tl.int32).to(tl.float32, bitcast=True), mask=offsets < size)


def watch_packets(packets: Tensor, epoch: int, copy: Tensor, times: Tensor, pollers: int, deadline_ns: int) -> None:
    """Poll packets until they carry the epoch; write the time at which they were seen, and copy their values.

    Args:
        packets: [n] int64.  epoch: the epoch to wait for.
        copy: [n] fp32, written.  times: [ceil(n / POLLED)] int64, in ns; the caller sets each to `NEVER` first.
        pollers: programs that poll the same packets: their polls are issued at different times, so one sees a packet
            soon after it arrives.
        deadline_ns: longest wait.
    """
    # Many small programs: a program that polls many packets takes much of its SM's share of the memory bandwidth.
    compiled = _watch_packets_kernel[(pollers * len(times),)](
        packets, epoch, copy, packets.numel(), times, NEVER, deadline_ns, POLLED, pollers, num_warps=1
    )
    # Give all of an SM's memory to shared memory, as attention does: an SM cannot change the split while it is busy.
    smem = torch.cuda.get_device_properties(packets.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    set_l1_carveout(compiled, (smem + RESERVED_BYTES) // (compiled.metadata.shared + RESERVED_BYTES))


@triton.jit(do_not_specialize=["first"])
def _compare_clocks_kernel(
    own_ptr,  # [1] int64, on this GPU: the latest round number that the other GPU has written
    other_ptr,  # [1] int64, on the other GPU
    # [rounds, 2] int64: this GPU's clock in ns when a round begins, and when its number arrived; `never` if it did not
    times_ptr,
    rounds,
    first,
    never,
    deadline_ns,
    INITIATES: tl.constexpr,
):
    """Ping-pong of round numbers between two GPUs. Grid [1] on each."""
    start = globaltimer()
    for i in range(rounds):
        begin = globaltimer()
        if INITIATES:
            tl.store(other_ptr, first + i)
        seen = tl.load(own_ptr, volatile=True)
        while (seen != first + i) & (globaltimer() - start < deadline_ns):
            seen = tl.load(own_ptr, volatile=True)
        arrived = tl.where(seen == first + i, globaltimer(), never)
        if not INITIATES:
            tl.store(other_ptr, first + i)
        tl.store(times_ptr + 2 * i, begin)
        tl.store(times_ptr + 2 * i + 1, arrived)


def compare_clocks(own: Tensor, other: Tensor, times: Tensor, first: int, initiates: bool, deadline_ns: int) -> None:
    """Exchange round numbers with another GPU and read the clock; both GPUs launch it, one of them initiates.

    Args:
        own, other: [1] int64, on this GPU and on the other one; 0 before the first use.
        times: [rounds, 2] int64: this GPU's clock in ns when a round begins, and when its number arrived, or `NEVER`.
        first: number of the first round, larger than any number used before.
        initiates: True on the GPU that initiates the rounds.
        deadline_ns: longest wait, of all rounds together.
    """
    _compare_clocks_kernel[(1,)](
        own, other, times, len(times), first, NEVER, deadline_ns, INITIATES=initiates, num_warps=1
    )


@gluon.jit(do_not_specialize=["tiles"])
def _read_tiles_kernel(desc, tiles, STAGES: gl.constexpr):
    """Copy equal runs of tiles into a ring of STAGES shared-memory buffers. One warp. Any grid."""
    gdc_launch_dependents()
    buffers = gl.allocate_shared_memory(gl.int8, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage_index in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage_index), count=1)
    fence_async_shared()
    rows: gl.constexpr = desc.block_type.shape[0]
    first = gl.program_id(0) * tiles // gl.num_programs(0)
    count = (gl.program_id(0) + 1) * tiles // gl.num_programs(0) - first
    gdc_wait()
    for tile in range(count + STAGES):
        stage = tile % STAGES
        if tile >= STAGES:
            mbarrier.wait(bars.index(stage), (tile // STAGES - 1) & 1)
        if tile < count:
            mbarrier.expect(bars.index(stage), desc.block_type.nbytes)
            tma.async_copy_global_to_shared(desc, [(first + tile) * rows, 0], bars.index(stage), buffers.index(stage))


def read_tiles(tiles: TensorDescriptor, num_tiles: int, stages: int, num_programs: int) -> None:
    """Read `num_tiles` tiles into shared memory and do nothing else; a dependent launch, like attention (sm_90).

    Args:
        tiles: int8; tile i begins at row i * rows of a tile.  stages: tiles in flight per program.
    """
    _read_tiles_kernel[(num_programs,)](tiles, num_tiles, stages, num_warps=1, launch_pdl=True)
