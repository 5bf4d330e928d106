"""A stream beside the current one: what is launched there runs beside later launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """A high-priority stream of one device. On a CPU its launches run in order with all others.

    Attributes:
        stream: None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Urgent: its kernels take an SM as soon as one is free."""
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._is_forked = False

    def follow(self) -> None:
        """Let its next launches follow the launches so far on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches of this block go to it; they follow the launches so far on both streams."""
        if self.stream is None:
            yield
            return
        self.follow()
        self._is_forked = True
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Let later launches on the current stream follow those of `fork`.

        The next one must not be a programmatic dependent one, which would wait for one of its two predecessors only.
        """
        if self.stream is not None and self._is_forked:  # else a capture would depend on what it does not contain
            torch.cuda.current_stream().wait_stream(self.stream)
            self._is_forked = False
