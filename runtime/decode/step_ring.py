"""The ring in pinned host memory through which the device reports its steps; the host polls it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from alspec.errors import RankFailureError
from alspec.kernels.sampling.next_token import RING_STEPS
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS

__all__ = ["StepRing", "pinned"]

POLL_S = 20e-6
CHECK_S = 0.5  # time between two checks that the device still works
# A step counts as hung after this time. Kernels time out earlier, but collectives have no timeout on the device.
STEP_S = STEP_TIMEOUT_NS / 1e9 + 60


def pinned(*shape: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Zeros on the host, in memory that a GPU can write."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class StepRing:
    """Rows of int64, one for each of the last steps, each complete once its stamp is the step's number."""

    def __init__(self, width: int, device: torch.device) -> None:
        """width: int64 of a row."""
        self.rows = pinned(RING_STEPS, width, device=device, dtype=torch.int64)
        self.stamps = pinned(RING_STEPS, device=device)
        # NumPy views, because the device writes this memory without PyTorch's knowledge.
        self._rows_view, self._stamps_view = self.rows.numpy(), self.stamps.numpy()
        self._device = device

    def read(self, number: int, name: str) -> list[int]:
        """Wait for a step, by its number on the device, an int32 counter that may wrap; returns its row.

        Raises:
            RankFailureError: it has not ended in time; the message begins with `name`.
        """
        index, stamp = number % RING_STEPS, (number + 2**31) % 2**32 - 2**31
        begun = time.monotonic()
        next_check = begun + CHECK_S
        while self._stamps_view[index] != stamp:
            now = time.monotonic()
            if now > next_check:
                # A device that failed writes no stamp: this call raises its error.
                torch.cuda.current_stream(self._device).query()
                next_check = now + CHECK_S
            if now > begun + STEP_S:
                raise RankFailureError(f"{name} has not ended in {STEP_S:g} s; check the GPUs (nvidia-smi) and links")
            time.sleep(POLL_S)
        row: list[int] = self._rows_view[index].tolist()
        return row
