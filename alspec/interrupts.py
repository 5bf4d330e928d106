"""Delay Ctrl-C until the end of a call that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["HeldInterrupt", "interrupts_wait"]


class HeldInterrupt:
    """SIGINT handler inside `interrupts_wait`. It records the signals; `handler` runs at the end of the block."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.received: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal."""
        self.received.append((number, frame))


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """In the main thread, delay Ctrl-C in this block until its end.

    For calls that replace an exception of the handler by their own error, as PyTorch does when it reads a storage.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = HeldInterrupt(handler)
    signal.signal(signal.SIGINT, held)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held.received:
            handler(*held.received[0])
