"""Guards around a command's main part: the cause of an error is reported once, by the right rank."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import torch

from alspec.errors import AlspecError, DoesNotFitError, InterruptedJobError
from alspec.interrupts import HeldInterrupt
from alspec.runtime.faults.heartbeat import STALL_LIMIT_S, Heartbeat, may_come_from_others
from alspec.runtime.faults.signals import SignalWatch

__all__ = ["guarded", "translate_out_of_memory"]

INTERRUPT_LIMIT_S = 0.5


@contextlib.contextmanager
def _ended_by_interrupt(heartbeat: Heartbeat) -> Iterator[None]:
    """Context in which Ctrl-C ends the process even if the main thread is blocked in a collective."""
    if heartbeat.placement.world_size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = SignalWatch()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if signal.SIGINT not in signals.wait(None):
                continue
            handler = signal.getsignal(signal.SIGINT)
            if isinstance(handler, HeldInterrupt):
                handler = handler.handler
            # SIG_IGN: the main thread is already ending.
            if handler in (signal.default_int_handler, signal.SIG_IGN):
                heartbeat.publish_error(InterruptedJobError("interrupted"))
                if not done.wait(INTERRUPT_LIMIT_S):
                    heartbeat.end_process(InterruptedJobError("interrupted"))

    thread = threading.Thread(target=watch, name="alspec-interrupt", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        signals.wake()
        thread.join()
        signals.close()


@contextlib.contextmanager
def translate_out_of_memory(advice: str) -> Iterator[None]:
    """Context for work that may run out of GPU memory.

    Args:
        advice: a sentence that ends the error message.
    Raises:
        DoesNotFitError: in place of PyTorch's out-of-memory error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(f"out of memory: {str(error).splitlines()[0]} {advice}") from error


@contextlib.contextmanager
def guarded(heartbeat: Heartbeat, advice: str = "Use more ranks") -> Iterator[None]:
    """Run the main part of a command inside; after any error this rank reports the cause and ends.

    If a collective fails because another rank is lost, the loss of that rank is reported. After an error of this rank,
    the process ends without waiting for the others, which may be in any place; they name the error as the cause.

    Ctrl-C ends every rank with one line and exit code 130, as in a shell. A program with its own handling of Ctrl-C
    must not use this function.

    Args:
        heartbeat: this rank's.
        advice: what to do when memory runs out, a sentence.
    Raises:
        AlspecError: with one rank, unchanged; the same for other errors.
    """
    with _ended_by_interrupt(heartbeat):
        try:
            try:
                with translate_out_of_memory(advice):
                    yield
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it again
                # Do not wait for the others: they were interrupted too.
                heartbeat.end_process(InterruptedJobError("interrupted"))
        except Exception as error:
            if heartbeat.watching:
                lost = heartbeat.explain(timeout_s=STALL_LIMIT_S + 1) if may_come_from_others(error) else None
                if isinstance(error, AlspecError):
                    lost = lost or error
                if lost is not None:
                    heartbeat.end_process(lost)
                if not may_come_from_others(error):
                    heartbeat.end_failed(error)
            heartbeat.end_output()
            raise
