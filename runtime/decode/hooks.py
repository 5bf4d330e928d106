"""The hook around every operation of a prompt or a step: progress for the heartbeat, times for the timeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

__all__ = ["OperationHook", "no_hook"]

OperationHook = Callable[[str, int], AbstractContextManager[None]]
"""(name, layer) -> a context to launch the operation in."""


def no_hook(name: str, layer: int) -> AbstractContextManager[None]:
    """A hook that does nothing."""
    return nullcontext()
