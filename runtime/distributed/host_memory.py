"""Pinned host memory that the GPUs of all ranks of a host write and read, for GPUs that lack peer access.

The first rank creates an anonymous file (memfd) and the others open it through /proc, so that nothing is left behind
and the size of /dev/shm does not matter. Every rank pins the pages for its GPU.
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
_NUMBERS = 2**62  # device and inode numbers modulo this fit in int64


class HostMemoryError(RuntimeError):
    """The ranks of this job cannot share host memory; raised on all of them."""


def share_host_memory(num_words: int, transport: Transport) -> Tensor:
    """Allocate zeroed host memory that the peers (`Placement.peers`) share, which are on one host.

    All ranks of the job call it together. The pages live as long as the tensors that use them.

    Args:
        num_words: size, the same on all ranks.
        transport: connects the ranks.
    Returns:
        [num_words] int64 on this rank's GPU device; the same host memory on all peers.
    Raises:
        HostMemoryError: this rank or another one cannot allocate, open or pin the memory.
    """
    device, num_bytes = transport.device, 8 * num_words
    file, packets, reason = -1, None, ""
    try:
        if transport.placement.peer_rank == 0:
            try:
                file = _create(num_bytes)
            except Exception as error:  # any error: the other ranks wait for the outcome
                reason = one_line(error)
        location = transport.all_gather_peers(torch.tensor(_location_of(file), device=device))[0].tolist()
        if location[1] >= 0:
            try:
                packets = _pin(_open(location, num_bytes), device)
            except Exception as error:
                reason = one_line(error)
        # No rank closes the file before all have opened it.
        reason = transport.first_reason(reason)
        if reason:
            raise HostMemoryError(reason)
    finally:
        if file >= 0:
            os.close(file)
    assert packets is not None
    return packets


class _Pinned:
    """Pinned pages at their address on the GPU. The tensors over them keep this object alive; then it is unpinned."""

    def __init__(self, pages: Tensor, device: torch.device) -> None:
        self._pages, address = pages, pages.data_ptr()
        runtime = torch.cuda.cudart()
        result = runtime.cudaHostRegister(address, pages.nbytes, _FLAGS)
        if int(result):
            with suppress(RuntimeError):
                torch.zeros(1, device=device)  # clears the error, which CUDA would report to a later call
            raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(result)}")
        weakref.finalize(self, _unpin, address, device).atexit = False
        # The device address equals the host address, except under WSL.
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
        RuntimeError: CUDA cannot pin them, or PyTorch cannot use them in place.
    """
    with torch.cuda.device(device):
        pinned = _Pinned(torch.frombuffer(pages, dtype=torch.int64), device)
        packets = torch.as_tensor(pinned, device=device)
    if packets.data_ptr() != pinned.address:
        raise RuntimeError("PyTorch copies the host's memory instead of using it in place")
    return packets


def _unpin(address: int, device: torch.device) -> None:
    with suppress(RuntimeError), torch.cuda.device(device):
        torch.cuda.synchronize()  # kernels of unread steps may still poll it
        torch.cuda.cudart().cudaHostUnregister(address)


def _create(num_bytes: int) -> int:
    """Descriptor of an anonymous file of zeros.

    Raises:
        OSError: it cannot be created, or memory is too small.
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


def _location_of(file: int) -> tuple[int, int, int, int]:
    """(process id, descriptor, device, inode) of a file of this process; four times -1 if there is none."""
    if file < 0:
        return -1, -1, -1, -1
    found = os.fstat(file)
    return os.getpid(), file, found.st_dev % _NUMBERS, found.st_ino % _NUMBERS


def _open(location: list[int], num_bytes: int) -> mmap.mmap:
    """Map the file that the first rank described with `_location_of`.

    Raises:
        OSError: this process may not open it, or finds another file at that location.
    """
    process, file, *identity = location
    own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        if [*_location_of(own)[2:]] != identity:
            raise OSError("ranks see different processes: they run in separate containers")
        return mmap.mmap(own, num_bytes)
    finally:
        os.close(own)
