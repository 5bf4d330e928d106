"""Memory of the host that the GPUs of all its ranks write and read, for those that cannot reach each other's.

Pages without a file's name, which the first rank creates and the others open through its process, so that nothing is
left behind, and the size of /dev/shm does not matter. Every rank pins them for its GPU.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .transport import Transport

__all__ = ["share_host_memory"]

_FLAGS = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_PAGE_WORDS = 512


class _Pinned:
    """A mapping as CUDA sees it; unpinned when the tensors over it are gone."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._words = torch.frombuffer(pages, dtype=torch.int64)
        address, size = self._words.data_ptr(), self._words.nbytes
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, size, _FLAGS))
        if code:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA keeps the error for whoever looks next
            raise RuntimeError(f"cudaHostRegister failed with {code}")
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
        # Under unified addressing the GPU finds it at the host's address.
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False), "shape": tuple(self._words.shape), "typestr": "<i8", "version": 2,
        }  # fmt: skip

    def on(self, device: torch.device) -> Tensor:
        """[words] int64 over these pages, which live as long."""
        words = torch.as_tensor(self, device=device)
        if words.data_ptr() != self._words.data_ptr():
            raise RuntimeError("CUDA maps the host's memory elsewhere")
        return words


def share_host_memory(num_words: int, transport: Transport) -> list[Tensor]:
    """[num_words] int64 of each rank, zeroed: tensors on this rank's GPU in the host's memory, the same on all ranks.

    All ranks of the job call it together, on one host.

    Raises:
        RuntimeError: this rank, or another, cannot have it; on every rank.
    """
    placement, row = transport.placement, -(-num_words // _PAGE_WORDS) * _PAGE_WORDS
    num_bytes = 8 * row * placement.world_size
    file, words, reason = -1, None, ""
    try:
        if placement.rank == 0:
            file = _create(num_bytes)
        maker = torch.tensor([os.getpid(), file], device=transport.device)
        process, its_file = transport.all_gather_world(maker)[0].tolist()
        try:
            words = _Pinned(_open(process, its_file, num_bytes)).on(transport.device)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
        # Nobody closes the file before all have opened it.
        if not transport.agree(words is not None):
            raise RuntimeError(reason or "another rank cannot share the host's memory")
    finally:
        if file >= 0:
            os.close(file)
    assert words is not None
    return list(words.view(placement.world_size, row)[:, :num_words])


def _create(num_bytes: int) -> int:
    """A file of zeros that has no name; -1 if there is no room."""
    file = -1
    try:
        file = os.memfd_create("alspec")
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        if file >= 0:
            os.close(file)
        return -1
    return file


def _open(process: int, file: int, num_bytes: int) -> mmap.mmap:
    if file < 0:
        raise OSError(f"no room for {num_bytes / 1e6:.1f} MB")
    own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        return mmap.mmap(own, num_bytes)
    finally:
        os.close(own)
