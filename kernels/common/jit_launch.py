"""How decode kernels are launched: compiled in parallel, as dependent launches, with most of an SM's memory as L1."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton

__all__ = [
    "RESERVED_BYTES",
    "compiling",
    "raise_smem_limit",
    "is_hopper",
    "jit_launch",
    "pdl_options",
    "num_sms",
    "set_l1_carveout",
]

_to_compile: ContextVar[list[Any] | None] = ContextVar("_to_compile", default=None)

# CU_FUNC_ATTRIBUTE_... of the CUDA driver API: SHARED_SIZE_BYTES (what a kernel declares itself),
# MAX_DYNAMIC_SHARED_SIZE_BYTES and PREFERRED_SHARED_MEMORY_CARVEOUT.
DECLARED_SHARED = 1
MAX_DYNAMIC_SHARED = 8
PREFERRED_CARVEOUT = 9
RESERVED_BYTES = 1024  # of shared memory, which the driver takes for each program
UNASKED_BYTES = 49152  # of shared memory, which a program may have by default


def jit_launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, but in a `compiling` block: there it is compiled for the arguments and not launched."""
    kernels = _to_compile.get()
    if kernels is None:
        return kernel[grid]  # type: ignore[no-any-return]

    def only_compile(*args: Any, **options: Any) -> None:
        kernels.append(kernel.warmup(*args, grid=grid, **options))

    return only_compile


@contextmanager
def compiling() -> Iterator[None]:
    """Launches in this block, on the current GPU, start nothing: at its end their kernels are compiled and loaded.

    One after the other, those of a step take 4 to 10 s; here they have a thread each. What Triton's cache on disk holds
    is read. Other operations of PyTorch in the block run.
    """
    kernels: list[Any] = []
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        token = _to_compile.set(kernels)
        try:
            # An error that its end does not ignore would leave the mode on; `_load` raises it.
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            _to_compile.reset(token)
        # What is left for a first launch: the program that launches it (C with Triton 3.6), and its code on the device.
        list(pool.map(_load, {id(kernel): kernel for kernel in kernels}.values()))


def _load(kernel: Any) -> None:
    # A kernel that was compiled before the block is no future.
    (kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel).run  # noqa: B018 (a property that loads)


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Programmatic dependent launch, where the device has it (compute capability 9.0)."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def raise_smem_limit(kernel: Any) -> None:
    """Let a kernel be launched that declares shared memory in its assembly.

    The driver counts that towards the 48 KB which a program has by default, and Triton asks for more only if its own
    allocation is larger.
    """
    triton.knobs.runtime.kernel_load_end_hook.add(_RaiseSmemLimit(kernel.__name__))


class _RaiseSmemLimit:
    """What Triton calls when a kernel has been loaded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: Any, function: int, name: str, *_: Any) -> None:
        if name == self.name:
            _driver().cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, UNASKED_BYTES)


def set_l1_carveout(compiled: Any, per_sm: int = 0) -> None:
    """Ask for all of an SM's memory as L1 wherever this kernel runs, but what `per_sm` programs need as shared memory.

    What is loaded into registers, as weight tiles and quantised records are, lies in L1 on its way. The attention
    kernel over bf16 takes most of an SM's memory as shared memory, and with dependent launches no SM is ever
    idle: without this wish each stays as attention left it for the whole layer, which costs 11 % of a step (8B shape,
    8K tokens, one H200).

    Args:
        compiled: what a launch returned; None in the interpreter.
        per_sm: programs that are to live on an SM side by side; 0: as many as do without being asked for.
    """
    if compiled is not None:
        _set_l1_carveout(compiled.function, compiled.metadata.shared, per_sm)


@functools.cache
def _set_l1_carveout(function: int, dynamic: int, per_sm: int) -> None:
    # A preference: if the driver ignores it, kernels are slower, not wrong.
    declared = ctypes.c_int()
    _driver().cuFuncGetAttribute(ctypes.byref(declared), DECLARED_SHARED, ctypes.c_void_p(function))
    num_bytes = per_sm * (declared.value + dynamic + RESERVED_BYTES)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # An SM has as much as one program may ask for and, beside it, what the driver reserves.
    whole = properties.shared_memory_per_block_optin + RESERVED_BYTES  # type: ignore[attr-defined]  # missing in the stub
    _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, math.ceil(100 * num_bytes / whole))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
