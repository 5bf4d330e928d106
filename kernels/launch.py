"""How decode kernels are launched: dependent launch, and how an SM splits its memory between L1 and shared memory."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["launch_options", "prefer_l1", "prefer_shared"]

# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the CUDA driver API.
PREFERRED_CARVEOUT = 9


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Programmatic dependent launch, where the device has it (compute capability 9.0)."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def prefer_l1(compiled: Any) -> None:
    """Ask for all of an SM's memory as L1 wherever this kernel runs, but what it needs as shared memory.

    A weight tile on its way lies in L1. The attention kernel takes nearly all of an SM's memory as shared memory, and
    with dependent launches no SM is ever idle: without this wish each stays as attention left it for the whole layer,
    which costs 11 % of a step (8B shape, 8K tokens, one H200).

    Args:
        compiled: what a launch returned; None in the interpreter.
    """
    if compiled is not None:
        _set_carveout(compiled.function, 0)


def prefer_shared(compiled: Any) -> None:
    """Ask for all of an SM's memory as shared memory: many small programs, each with little, are to live side by side.

    Args:
        compiled: what a launch returned; None in the interpreter.
    """
    if compiled is not None:
        _set_carveout(compiled.function, 100)


@functools.cache
def _set_carveout(function: int, percent: int) -> None:
    # A preference: where the driver has none of it, kernels are slower, not wrong.
    _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, percent)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
