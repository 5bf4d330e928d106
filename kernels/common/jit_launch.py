"""Compile and launch kernels: parallel compilation, dependent launch, shared-memory limit, L1 carveout."""

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
    "is_compiling",
    "is_hopper",
    "jit_launch",
    "num_sms",
    "pdl_options",
    "raise_smem_limit",
    "set_l1_carveout",
]

_to_compile: ContextVar[list[Any] | None] = ContextVar("_to_compile", default=None)

# CU_FUNC_ATTRIBUTE_* of the CUDA driver API: SHARED_SIZE_BYTES (static shared memory of a kernel),
# MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT.
DECLARED_SHARED = 1
MAX_DYNAMIC_SHARED = 8
PREFERRED_CARVEOUT = 9
RESERVED_BYTES = 1024  # shared memory that the driver reserves for each program
DEFAULT_SHARED_BYTES = 49152  # shared memory that a program may use without raising the limit


def jit_launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return `kernel[grid]`; inside `compiling`, return a function that only queues the kernel for compilation."""
    kernels = _to_compile.get()
    if kernels is None:
        return kernel[grid]  # type: ignore[no-any-return]

    def only_compile(*args: Any, **options: Any) -> None:
        kernels.append(kernel.warmup(*args, grid=grid, **options))

    return only_compile


def is_compiling() -> bool:
    """Whether launches are collected at present."""
    return _to_compile.get() is not None


@contextmanager
def compiling() -> Iterator[None]:
    """Collect launches instead of running them; at the end of the block, compile and load their kernels in parallel.

    Every kernel of the block is compiled in a thread of its own, for the current GPU; Triton's disk cache is used. Only
    launches through `jit_launch` are collected. Other PyTorch operations in the block run as usual.
    """
    kernels: list[Any] = []
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        token = _to_compile.set(kernels)
        try:
            # Ignore errors here: an error at the end of the mode would leave it switched on. `_load` raises them.
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            _to_compile.reset(token)
        # Do the rest of a first launch now: build the launcher (C code in Triton 3.6), load the code onto the device.
        list(pool.map(_load, {id(kernel): kernel for kernel in kernels}.values()))


def _load(kernel: Any) -> None:
    # A kernel that was compiled before the block is not a future.
    (kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel).run  # noqa: B018 (a property that loads)


@functools.cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Kernel arguments for programmatic dependent launch; off below compute capability 9.0."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def num_sms(device: torch.device) -> int:
    """Number of streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_hopper(device: torch.device) -> bool:
    """True for a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def raise_smem_limit(kernel: Any) -> None:
    """Raise the shared-memory limit of a kernel that declares shared memory in inline assembly.

    The driver counts such a declaration towards the default limit of 48 KB. Triton raises the limit only if its own
    allocation is larger.
    """
    triton.knobs.runtime.kernel_load_end_hook.add(_RaiseSmemLimit(kernel.__name__))


class _RaiseSmemLimit:
    """Hook that Triton calls after it has loaded a kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: Any, function: int, name: str, *_: Any) -> None:
        if name == self.name:
            _driver().cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, DEFAULT_SHARED_BYTES)


def set_l1_carveout(compiled: Any, per_sm: int = 0) -> None:
    """Prefer L1 on every SM that runs this kernel: shared memory is reserved for only `per_sm` programs.

    Loads into registers (weight tiles, quantised records) pass through L1. The bf16 attention kernel takes most of an
    SM as shared memory, and with dependent launches no SM becomes idle in between. Without this preference every SM
    keeps that split for the whole layer.

    Args:
        compiled: the return value of a launch; None in the interpreter.
        per_sm: programs per SM to reserve shared memory for; 0: none.
    """
    if compiled is not None:
        _set_l1_carveout(compiled.function, compiled.metadata.shared, per_sm)


@functools.cache
def _set_l1_carveout(function: int, dynamic_bytes: int, per_sm: int) -> None:
    # Only a preference: results do not depend on it.
    static_bytes = ctypes.c_int()
    _driver().cuFuncGetAttribute(ctypes.byref(static_bytes), DECLARED_SHARED, ctypes.c_void_p(function))
    num_bytes = per_sm * (static_bytes.value + dynamic_bytes + RESERVED_BYTES)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # An SM has the largest shared memory of one program, plus the bytes that the driver reserves.
    total = properties.shared_memory_per_block_optin + RESERVED_BYTES  # type: ignore[attr-defined]  # missing in the stub
    _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_CARVEOUT, math.ceil(100 * num_bytes / total))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
