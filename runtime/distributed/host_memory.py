"""Memory of the host that the GPUs of all its ranks write and read, for those that cannot reach each other's.

Pages without a file's name, which the first rank creates and the others open through its process, so that nothing is
left behind, and the size of /dev/shm does not matter. Every rank pins them for its GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from alspec.errors import one_line
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.memory import available_bytes

__all__ = ["HostMemoryError", "share_host_memory"]

_FLAGS = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_CLOSE_ON_EXEC = 1  # MFD_CLOEXEC
_NUMBERS = 2**62  # more than there are inodes, and an int64


class HostMemoryError(RuntimeError):
    """The ranks of this job cannot share memory of the host; raised on all of them."""


def share_host_memory(num_words: int, transport: Transport) -> Tensor:
    """[num_words] int64, zeroed: a tensor on this rank's GPU in the host's memory, which is the same on all ranks.

    All ranks of the job call it together, on one host. The pages live as long as tensors over them.

    Raises:
        HostMemoryError: this rank, or another, cannot have them.
    """
    device, num_bytes = transport.device, 8 * num_words
    file, packets, reason = -1, None, ""
    try:
        if transport.placement.rank == 0:
            try:
                file = _create(num_bytes)
            except Exception as error:  # whatever it is: the others wait to be told
                reason = one_line(error)
        place = transport.all_gather_world(torch.tensor(_place_of(file), device=device))[0].tolist()
        if place[1] >= 0:
            try:
                packets = _pin(_open(place, num_bytes), device)
            except Exception as error:
                reason = one_line(error)
        # Nobody closes the file before all have opened it.
        reason = transport.first_reason(reason)
        if reason:
            raise HostMemoryError(reason)
    finally:
        if file >= 0:
            os.close(file)
    assert packets is not None
    return packets


class _Pinned:
    """Pages as CUDA sees them, held by the tensors over them; unpinned when those are gone."""

    def __init__(self, pages: Tensor, device: torch.device) -> None:
        self._pages, address = pages, pages.data_ptr()
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(address, pages.nbytes, _FLAGS)
        if int(result):
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # CUDA keeps the error for whoever looks next
            raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(result)}")
        weakref.finalize(self, _unpin, address, device).atexit = False
        # The GPU finds them at the host's address, but under WSL at another one.
        found = ctypes.c_uint64()
        driver = ctypes.CDLL("libcuda.so.1")
        code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
        if code:
            raise RuntimeError(f"cuMemHostGetDevicePointer: error {code}")
        self.address = found.value
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (self.address, False), "shape": tuple(pages.shape), "typestr": "<i8", "version": 2,
        }  # fmt: skip


def _pin(pages: mmap.mmap, device: torch.device) -> Tensor:
    """[words] int64 over these pages, on the GPU.

    Raises:
        RuntimeError: CUDA or PyTorch cannot.
    """
    with torch.cuda.device(device):
        pinned = _Pinned(torch.frombuffer(pages, dtype=torch.int64), device)
        packets = torch.as_tensor(pinned, device=device)
    if packets.data_ptr() != pinned.address:
        raise RuntimeError("PyTorch copies the host's memory instead of using it in place")
    return packets


def _unpin(address: int, device: torch.device) -> None:
    with suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()  # kernels of steps that nobody has taken may still poll it
        torch.cuda.cudart().cudaHostUnregister(address)


def _create(num_bytes: int) -> int:
    """A file of zeros that has no name.

    Raises:
        OSError: there is none to be had, or no room.
    """
    if num_bytes > available_bytes(torch.device("cpu"), 1):
        raise OSError(f"no room for {num_bytes / 1e6:.1f} MB")
    # `os.memfd_create` is missing where Python was built for an old C library.
    file = int(ctypes.CDLL(None, use_errno=True).memfd_create(b"alspec", _CLOSE_ON_EXEC))
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file


def _place_of(file: int) -> tuple[int, int, int, int]:
    """Process, descriptor and what identifies a file of this process; -1 four times if there is none."""
    if file < 0:
        return -1, -1, -1, -1
    found = os.fstat(file)
    return os.getpid(), file, found.st_dev % _NUMBERS, found.st_ino % _NUMBERS


def _open(place: list[int], num_bytes: int) -> mmap.mmap:
    """The pages of a file that `_place_of` found in the first rank's process.

    Raises:
        OSError: this process may not open it, or sees another one there.
    """
    process, file, *identity = place
    own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        if [*_place_of(own)[2:]] != identity:
            raise OSError("ranks see different processes: they are in containers of their own")
        return mmap.mmap(own, num_bytes)
    finally:
        os.close(own)
