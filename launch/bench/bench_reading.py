"""Time to read a number of bytes and do nothing else: the best that decode attention could reach."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from alspec.kernels.bench.measuring import read_tiles
from alspec.kernels.common.jit_launch import num_sms

__all__ = ["can_read_alone", "reading_alone"]

# Tiles of 16 KB; two programs on each SM, each with two loads in flight.
ROWS = ROW_BYTES = 128
STAGES, PER_SM = 2, 2


def can_read_alone(device: torch.device) -> bool:
    """The kernel needs compute capability 9.0 or later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def reading_alone(num_bytes: int, copies: int) -> Callable[[int], None]:
    """A function that reads `num_bytes` (rounded up to 16 KB) of copy `i` in the current GPU's memory.

    It is a dependent launch, as attention is: only its wait separates two launches in a row.
    """
    device = torch.device("cuda")
    tiles = triton.cdiv(num_bytes, ROWS * ROW_BYTES)
    memory = torch.zeros(copies, tiles * ROWS, ROW_BYTES, dtype=torch.int8, device=device)
    tile = [ROWS, ROW_BYTES]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.int8)
    descriptors = [TensorDescriptor(x, list(x.shape), list(x.stride()), tile, layout) for x in memory]
    programs = PER_SM * num_sms(device)

    def run(i: int) -> None:
        read_tiles(descriptors[i], tiles, STAGES, programs)

    return run
