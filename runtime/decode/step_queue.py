"""Steps that are launched ahead, and the ring in pinned host memory through which the device reports them.

The host launches steps, or rounds, before it has read the results of earlier ones; it reads them in order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from alspec.errors import RankFailureError
from alspec.kernels.sampling.next_token import RING_STEPS
from alspec.runtime.decode.decode_step import RECENT_STEPS
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS

__all__ = ["StepQueue", "StepResult", "pinned"]

Kind = TypeVar("Kind")

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


@dataclass(frozen=True)
class StepResult(Generic[Kind]):
    """What the device has reported of a step."""

    kind: Kind
    index: int  # of its row, in all rings
    step_us: float  # see StepRecord
    fault: int
    values: list[int]  # the rest of its row


class StepQueue(Generic[Kind]):
    """Steps of any kinds that are launched and not read. All ranks launch the same ones in the same order.

    Attributes:
        ring: its rows begin with the device's clock in nanoseconds and the fault word.
        launched: steps launched so far, by the device's counter. A step's number is the count with it.
    """

    def __init__(self, width: int, name: str, counted: int, device: torch.device) -> None:
        """width: int64 of a row.  name: "rank 0: step", for errors.  counted: steps that the device has run."""
        self.ring = StepRing(width, device)
        self._name = name
        self._kinds: deque[Kind] = deque()
        self._recent: deque[str] = deque(maxlen=RECENT_STEPS)
        self.begin(counted)

    def begin(self, counted: int) -> None:
        """Begin a generation: drop what is in flight, and go on behind the `counted` steps that the device has run."""
        self._kinds.clear()
        self._begun = self._read = self.launched = counted
        self._begun_s, self._last_clock_ns = time.perf_counter(), 0

    @property
    def next_step(self) -> int:
        """See `DecodeStep.next_step`."""
        return self.launched - self._begun + 1

    @property
    def in_flight(self) -> tuple[Kind, ...]:
        """Kinds of the steps that are launched and not read, the oldest first."""
        return tuple(self._kinds)

    @property
    def num_read(self) -> int:
        """Steps of this generation that were read."""
        return self._read - self._begun

    @property
    def recent_kinds(self) -> str:
        """See `DecodeStep.recent_kinds`."""
        return "".join(self._recent)

    def add(self, kind: Kind, letter: str) -> None:
        """Count a step that has been launched; `letter` names its kind for other ranks."""
        self.launched += 1
        self._kinds.append(kind)
        self._recent.append(letter)

    def missing(self, launched: int, kinds: str) -> str:
        """Letters of the steps that this rank has not launched. See `DecodeStep.launch_missing`."""
        return kinds[self.launched - launched :] if launched > self.launched else ""

    def read(self) -> StepResult[Kind]:
        """Wait for the oldest step in flight.

        Raises:
            RankFailureError: it has not ended in time.
        """
        kind = self._kinds.popleft()
        self._read += 1
        clock_ns, fault, *values = self.ring.read(self._read, f"{self._name} {self.num_read}")
        # The first step has no predecessor on the device's clock: it is timed by the host.
        first_us = (time.perf_counter() - self._begun_s) * 1e6
        step_us = (clock_ns - self._last_clock_ns) / 1e3 if self._last_clock_ns else first_us
        self._last_clock_ns = clock_ns
        return StepResult(kind, self._read % RING_STEPS, step_us, fault, values)
