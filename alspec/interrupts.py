"""Ctrl-C that waits for the end of a call which cannot be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["HeldInterrupt", "interrupts_wait"]


class HeldInterrupt:
    """The handler in force within `interrupts_wait`; at its end it is the turn of `handler`."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.came: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Keep it for later."""
        self.came.append((number, frame))


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C in this block, in the main thread, takes effect at its end.

    For calls that turn what a handler raises into an error of their own, as PyTorch does where it looks into a storage.
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
        if held.came:
            handler(*held.came[0])
