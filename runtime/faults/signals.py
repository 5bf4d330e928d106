"""Signals for a thread to see: a main thread that is blocked in a collective runs no Python handler."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from types import FrameType

__all__ = ["SignalWatch"]


class SignalWatch:
    """Shows a thread the signals that arrive while it is open; made in the main thread, or it shows none.

    Only signals with a Python handler are seen. Handlers stay as they are, but for SIGTERM's default: with
    `takes_sigterm` it no longer ends the process. Where the program has a SIGTERM handler of its own, that stays, and
    SIGTERM is not seen. A file descriptor for signals that was there before, such as asyncio's, still gets them.
    A forked child has none of this: its signals are its own.
    """

    def __init__(self, takes_sigterm: bool = False) -> None:
        self._takes_sigterm = takes_sigterm
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._previous_fd = -1
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            _installed.add(self)
            self._previous_fd = signal.set_wakeup_fd(self._sending.fileno(), warn_on_full_buffer=False)
            if takes_sigterm:
                _takers.add(self)
                if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                    signal.signal(signal.SIGTERM, _on_sigterm)

    def wait(self, timeout_s: float | None) -> set[int]:
        """The signals that came since the last call, after at most `timeout_s`; none if `wake` ended the wait."""
        ready = select.poll()  # `select` takes no descriptor beyond 1023
        ready.register(self._receiving, select.POLLIN)
        if not ready.poll(None if timeout_s is None else timeout_s * 1e3):
            return set()
        found = set(self._receiving.recv(64)) - {0}
        is_ours = signal.getsignal(signal.SIGTERM) is _on_sigterm
        others = found - {signal.SIGTERM} if is_ours else found
        if others and self._previous_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._previous_fd, bytes(others))
        return found if self._takes_sigterm and is_ours else found - {signal.SIGTERM}

    def wake(self, received: int = 0) -> None:
        """End a `wait` that goes on in another thread."""
        with contextlib.suppress(OSError):  # it is full: then nobody waits
            self._sending.send(bytes([received]))

    def close(self) -> None:
        """Leave signals as they were. No thread may be in `wait`.

        Python lets only the main thread do that: from another one, signals go where they went before through us.
        """
        _takers.discard(self)
        if not self._is_installed or self._uninstall():
            _installed.discard(self)
            self._receiving.close()
            self._sending.close()
            return
        if self._previous_fd >= 0:
            threading.Thread(target=self._pass_on, name="alspec-signals", daemon=True).start()

    def _uninstall(self) -> bool:
        """Whether nobody writes to the socket any more."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not _takers and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            current = signal.set_wakeup_fd(self._previous_fd)
        except (OSError, ValueError):  # whose it is has closed it
            current = signal.set_wakeup_fd(-1)
        if current == self._sending.fileno():
            return True
        # Somebody has come after us, and may pass signals on to us.
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(current)
        return False

    def _pass_on(self) -> None:
        while True:
            self.wait(None)


_takers: set[SignalWatch] = set()
_installed: set[SignalWatch] = set()  # somebody may write to their sockets


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for watch in tuple(_takers):
        watch.wake(number)  # another wakeup descriptor may have taken the place of ours
    if not _takers:  # closed outside the main thread, which could not put the default back
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _forget_after_fork() -> None:
    """In a child: what it wrote to the sockets, the parent would take for signals of its own."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    current = signal.set_wakeup_fd(-1)
    if current >= 0 and all(current != watch._sending.fileno() for watch in _installed):
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(current)
    _takers.clear()
    _installed.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
