"""Kernels that benchmarks measure with, or beside, what a step consists of."""

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

PUSHED = 128  # words of one program of `push_packets`, two of each thread: with one, 0.2 us longer (four H100s)
# Words of a program that waits, one for each lane. A poll takes as long as the slowest of its loads, which go through
# what memory is busy with: with 256 words, up to 22 us.
POLLED = 32
NEVER = torch.iinfo(torch.int64).max  # a time


@triton.jit(do_not_specialize=["slot", "rank"])
def _push_packets_kernel(
    partial_ptr,  # [B, hidden] fp32
    peers_ptr,  # [PEERS] int64: addresses of all words [slots, B, T, hidden] to store into
    epoch_ptr,  # [1] int32
    slot,
    rank,
    HIDDEN: tl.constexpr,
    T: tl.constexpr,
    PEERS: tl.constexpr,
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
    partial = tl.load(partial_ptr + request * HIDDEN + channels, mask=inside, other=0.0)
    at = ((slot * tl.num_programs(1) + request) * T + rank).to(tl.int64) * HIDDEN + channels
    bases = ()
    for peer in tl.static_range(PEERS):
        bases = bases + (tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64)),)  # noqa: RUF005 (Triton has no *)
    if PDL:
        gdc_wait()
    for peer in tl.static_range(PEERS):
        store_packets(bases[peer] + at, partial, epoch, inside)


def push_packets(partial: Tensor, exchange: Exchange, slot: int) -> None:
    """Send partial sums to every rank as words: the end of `push_partial`, without its product.

    Args:
        partial: [B, hidden] fp32, not written by the kernel ahead.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, hidden = partial.shape
    assert exchange.peers is not None
    compiled = _push_packets_kernel[(triton.cdiv(hidden, PUSHED), batch_size)](
        partial, exchange.peers, exchange.epoch, slot, exchange.tp_rank, HIDDEN=hidden, T=exchange.tp_size,
        PEERS=exchange.peers.shape[0], BLOCK=PUSHED, num_warps=2, **pdl_options(partial.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _nothing_kernel(PDL: tl.constexpr):
    """Starts, waits for the kernel ahead, and ends."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def nothing(grid: tuple[int, ...], num_warps: int, device: torch.device) -> None:
    """A launch of such a size that does nothing, dependent where the device has that."""
    _nothing_kernel[grid](num_warps=num_warps, **pdl_options(device))


@triton.jit
def _stamp_time_kernel(time_ptr):
    tl.store(time_ptr, globaltimer())


def stamp_time(time: Tensor) -> None:
    """Write the GPU's clock, in ns, to `time`, [1] int64."""
    _stamp_time_kernel[(1,)](time)


@triton.jit(do_not_specialize=["epoch", "size"])
def _watch_packets_kernel(
    packets_ptr,  # [size] int64: values under an epoch
    epoch,
    copy_ptr,  # [size] fp32
    size,
    times_ptr,  # [size / PAD] int64: when words were first seen, in ns; before that, `never`
    never,
    deadline_ns,
    PAD: tl.constexpr,
    WATCHERS: tl.constexpr,
):
    """Spin until all words carry the epoch; who sees a block first copies its values. Past the deadline, just end.

    Every PAD words have WATCHERS programs; grid [WATCHERS size / PAD].
    """
    start = globaltimer()
    block = tl.program_id(0) // WATCHERS
    at = block * PAD + tl.arange(0, PAD)
    late = 1
    packets = tl.full([PAD], 0, tl.int64)
    while (late > 0) & (globaltimer() - start < deadline_ns):
        packets = tl.load(packets_ptr + at, mask=at < size, other=0, volatile=True)
        late = tl.sum(((packets >> 32 != epoch) & (at < size)).to(tl.int32))
    if late == 0:
        if tl.atomic_min(times_ptr + block, globaltimer()) == never:
            tl.store(copy_ptr + at, packets.to(tl.int32).to(tl.float32, bitcast=True), mask=at < size)


def watch_packets(packets: Tensor, epoch: int, copy: Tensor, times: Tensor, watchers: int, deadline_ns: int) -> None:
    """Wait for words under an epoch, note when they were seen, and copy their values.

    Args:
        words: [n] int64.  copy: [n] fp32.  times: [ceil(n / POLLED)] int64, in ns, each `NEVER` at first.
        watchers: programs that wait for the same words: what one asks for too early, another one sees.
    """
    # Many small programs: one that polls many words takes much of its SM's share of memory bandwidth.
    compiled = _watch_packets_kernel[(watchers * len(times),)](
        packets, epoch, copy, packets.numel(), times, NEVER, deadline_ns, POLLED, watchers, num_warps=1
    )
    # All of an SM's memory as shared memory, as attention needs: an SM cannot change that while a program runs.
    room = torch.cuda.get_device_properties(packets.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    set_l1_carveout(compiled, (room + RESERVED_BYTES) // (compiled.metadata.shared + RESERVED_BYTES))


@triton.jit(do_not_specialize=["first"])
def _compare_clocks_kernel(
    mine_ptr,  # [1] int64, on this GPU: the last round that the other one has answered, or asked for
    other_ptr,  # [1] int64, on the other GPU
    # [rounds, 2] int64: this GPU's clock in ns before a round begins, and when its word has come; `never` if it has not
    times_ptr,
    rounds,
    first,
    never,
    deadline_ns,
    ASKS: tl.constexpr,
):
    start = globaltimer()
    for i in range(rounds):
        before = globaltimer()
        if ASKS:
            tl.store(other_ptr, first + i)
        seen = tl.load(mine_ptr, volatile=True)
        while (seen != first + i) & (globaltimer() - start < deadline_ns):
            seen = tl.load(mine_ptr, volatile=True)
        came = tl.where(seen == first + i, globaltimer(), never)
        if not ASKS:
            tl.store(other_ptr, first + i)
        tl.store(times_ptr + 2 * i, before)
        tl.store(times_ptr + 2 * i + 1, came)


def compare_clocks(mine: Tensor, other: Tensor, times: Tensor, first: int, asks: bool, deadline_ns: int) -> None:
    """A word to the other GPU and one back, again and again; both GPUs launch it, one of them asks.

    Args:
        mine, other: [1] int64, on this GPU and on the other one, 0 at first.
        times: [rounds, 2] int64: this GPU's clock in ns before each round, and when its word had come, or `NEVER`.
        first: number of the first round, above all that were before it.
    """
    _compare_clocks_kernel[(1,)](mine, other, times, len(times), first, NEVER, deadline_ns, ASKS=asks, num_warps=1)


@gluon.jit(do_not_specialize=["tiles"])
def _read_tiles_kernel(desc, tiles, STAGES: gl.constexpr):
    """Copy tiles into shared memory, in equal runs; each is over the one before the last. One warp; any grid."""
    gdc_launch_dependents()
    room = gl.allocate_shared_memory(gl.int8, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(STAGES):
        mbarrier.init(bars.index(each), count=1)
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
            tma.async_copy_global_to_shared(desc, [(first + tile) * rows, 0], bars.index(stage), room.index(stage))


def read_tiles(tiles: TensorDescriptor, num_tiles: int, stages: int, num_programs: int) -> None:
    """Read so many tiles into shared memory and do nothing else: a dependent launch, as attention is (sm_90).

    Args:
        tiles: of int8, one below the other.  stages: tiles on their way for each program.
    """
    _read_tiles_kernel[(num_programs,)](tiles, num_tiles, stages, num_warps=1, launch_pdl=True)
