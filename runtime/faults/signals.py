"""Deliver signals to another thread, because a main thread blocked in a collective runs no Python handler."""

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
    """Delivers to a thread the signals that arrive while it is open.

    Create it in the main thread; elsewhere it delivers none. It sees only signals that have a Python handler.

    Handlers stay as they are, except the default one of SIGTERM: with `takes_sigterm`, SIGTERM no longer ends the
    process. If the program has a SIGTERM handler of its own, that handler stays and SIGTERM is not delivered here. A
    wakeup file descriptor that was set before, such as asyncio's, still receives its signals. A forked child inherits
    none of this.
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
        """Wait at most `timeout_s` for signals.

        Returns:
            The signals that arrived since the last call; empty after a timeout or if `wake` ended the wait.
        """
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
        """End a `wait` that is in progress in another thread."""
        with contextlib.suppress(OSError):  # the socket is full: then no thread is waiting
            self._sending.send(bytes([received]))

    def close(self) -> None:
        """Restore the previous signal setup. No thread may be in `wait`.

        Python allows that in the main thread only. In another thread, a helper thread keeps forwarding signals to the
        previous descriptor instead.
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
        """Restore the previous wakeup descriptor; True if nothing writes to our socket any more."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not _takers and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            current = signal.set_wakeup_fd(self._previous_fd)
        except (OSError, ValueError):  # its owner has closed it
            current = signal.set_wakeup_fd(-1)
        if current == self._sending.fileno():
            return True
        # Another descriptor was installed after ours; its owner may forward signals to ours, so put it back.
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(current)
        return False

    def _pass_on(self) -> None:
        while True:
            self.wait(None)


_takers: set[SignalWatch] = set()
_installed: set[SignalWatch] = set()  # their sockets may still be written to


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    for watch in tuple(_takers):
        watch.wake(number)  # needed if another wakeup descriptor has replaced ours
    if not _takers:  # closed outside the main thread, which could not restore the default
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _forget_after_fork() -> None:
    """Reset a forked child: the parent would read what the child writes to the shared sockets as its own signals."""
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    current = signal.set_wakeup_fd(-1)
    if current >= 0 and all(current != watch._sending.fileno() for watch in _installed):
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(current)
    _takers.clear()
    _installed.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
