"""A job's key-value store whose calls end even if the store does not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["BoundedStore"]

ANSWER_LIMIT_S = 6.0
# Time in which this process was stopped counts, too. Then the answer comes as soon as both go on.
SECOND_CHANCE_S = 1.5


class BoundedStore:
    """The store is lost when it does not answer a call in time; every later call then fails at once.

    A host without power, or a network that drops packets, closes no connection: the store's own calls would wait for
    its timeout of minutes, and with them what ends this process.

    Each call raises `DistNetworkError` if the store is lost, or what the store raises.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store, self._is_lost = store, False

    def set(self, key: str, value: str) -> None:
        """See `dist.Store.set`."""
        self._within(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """See `dist.Store.get`; the key exists."""
        found: bytes = self._within(self._store.get, key)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `dist.Store.multi_get`; the keys exist."""
        found: list[bytes] = self._within(self._store.multi_get, keys)
        return found

    def check(self, keys: list[str]) -> bool:
        """See `dist.Store.check`."""
        return bool(self._within(self._store.check, keys))

    def _within(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._is_lost:
            raise dist.DistNetworkError("the store does not answer")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(*args), None))
            except BaseException as error:
                answers.put((None, error))

        try:
            threading.Thread(target=run, name="alspec-store", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down
            return call(*args)
        for limit_s in (ANSWER_LIMIT_S, SECOND_CHANCE_S):
            try:
                found, error = answers.get(timeout=limit_s)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            return found
        self._is_lost = True
        raise dist.DistNetworkError("the store does not answer")
