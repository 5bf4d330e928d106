"""How long it takes to read so many bytes and do nothing else: what decode attention could reach at best."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.launch.output import no_command

__all__ = ["can_read_alone", "reading_alone"]

# What was fastest on an H200 for 40 to 540 MB: pieces of 16 KB, of which two are on their way for each of two programs
# on an SM.
ROWS = ROW_BYTES = 128
STAGES, PER_SM = 2, 2


@gluon.jit(do_not_specialize=["tiles"])
def _read_kernel(desc, tiles, STAGES: gl.constexpr):
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


def can_read_alone(device: torch.device) -> bool:
    """The kernel needs compute capability 9.0 or later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def reading_alone(num_bytes: int, copies: int) -> Callable[[int], None]:
    """A launch that reads `num_bytes` of the current GPU's memory, rounded up to 16 KB, as a function of which copy.

    A programmatic dependent launch, as attention is. Its wait is the only thing between two of them in a row.
    """
    device = torch.device("cuda")
    tiles = triton.cdiv(num_bytes, ROWS * ROW_BYTES)
    memory = torch.zeros(copies, tiles * ROWS, ROW_BYTES, dtype=torch.int8, device=device)
    tile = [ROWS, ROW_BYTES]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.int8)
    descriptors = [TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout) for x in memory]
    programs = PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def run(i: int) -> None:
        _read_kernel[(programs,)](descriptors[i], tiles, STAGES, num_warps=1, launch_pdl=True)

    return run


if __name__ == "__main__":
    sys.exit(no_command(__file__, "launch/bench_kernels.py --bench decode"))
