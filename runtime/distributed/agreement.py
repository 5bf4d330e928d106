"""Exchange of text between ranks through the job's key-value store: settings that must agree, prompts, result rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from alspec.config import EngineConfig
from alspec.errors import CannotConnectError, RankFailureError, UserError
from alspec.interrupts import interrupts_wait
from alspec.runtime.distributed.failed_start import check_starts
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import STORE_LOST, TIMEOUT

__all__ = ["Agreement", "fingerprint", "shared_settings"]

SAMPLED_BYTES, SAMPLES = 4096, 64  # bytes of a sample, and samples of each file
LONG, SHOWN = 128, 40  # characters: a longer value is compared by its beginning and a hash
POLL_S = 0.02  # longest time from one look into the store to the next


@contextlib.contextmanager
def _needs_store() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise CannotConnectError(STORE_LOST) from error


class Agreement:
    """Exchanges of text between all ranks of a job.

    Every rank makes the same calls in the same order, except `gather_within`. With one rank nothing is exchanged.

    Each call may raise `RankFailureError`: a rank failed before it had an engine, or did not come within ten minutes;
    or `CannotConnectError`: the store is gone.

    Args:
        placement: this rank's.
        store: the job's store; None with one rank.
    """

    def __init__(self, placement: Placement, store: dist.Store | None) -> None:
        self._placement = placement
        self._store = store
        self._calls = 0  # completed ones
        self._own_keys: list[str] = []  # keys set by this rank that are still in the store

    def _key(self) -> str:
        """Key of the next call. A call that Ctrl-C ends keeps its number: other ranks may not have begun it."""
        return f"alspec/exchange/{self._calls}"

    def _wait(self, keys: list[str], is_patient: bool = False) -> None:
        """Wait until all `keys` are set."""
        assert self._store is not None
        started = time.monotonic()
        while not self._store.check(keys):
            check_starts(self._store, self._placement)
            waited_s = time.monotonic() - started
            if waited_s > TIMEOUT.total_seconds() and not is_patient:
                late = next(key for key in keys if not self._store.check([key]))
                raise RankFailureError(f"rank {late.rpartition('/')[2]} did not come within {waited_s:.0f} s")
            time.sleep(min(waited_s / 8, POLL_S))  # short at first: most waits are

    @_needs_store()
    def exchange(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        if self._store is None:
            return [text]
        key = self._key()
        keys = [f"{key}/{rank}" for rank in range(self._placement.world_size)]
        own = keys[self._placement.rank]
        self._store.set(own, text)
        self._wait(keys)
        with interrupts_wait():
            texts = [self._store.get(each).decode() for each in keys]
            self._calls += 1
        # Every rank has begun this call, so it has read all earlier keys. The keys of this call may still be read.
        for old in self._own_keys:
            self._store.delete_key(old)
        self._own_keys = [own]
        return texts

    @_needs_store()
    def broadcast(self, text: str | None, is_patient: bool = False) -> str:
        """Rank 0's text, on every rank; the others pass None.

        Args:
            is_patient: rank 0 may come hours later, for it waits for a user; otherwise a wait ends with an error.
        """
        if self._store is None:
            assert text is not None
            return text
        key = f"{self._key()}/0"
        if self._placement.rank == 0:
            assert text is not None
            self._store.set(key, text)
            if key not in self._own_keys:
                self._own_keys.append(key)
        self._wait([key], is_patient)
        with interrupts_wait():
            found = str(self._store.get(key).decode())
            self._calls += 1
        return found

    @_needs_store()
    def gather_within(self, name: str, text: str, timeout_s: float) -> list[str]:
        """Return the texts of all ranks that call this within `timeout_s`, in rank order. Other ranks need not call it.

        Args:
            name: unique to this call.
            text: this rank's.
            timeout_s: longest wait.
        """
        if self._store is None:
            return [text]
        keys = [f"alspec/{name}/{rank}" for rank in range(self._placement.world_size)]
        self._store.set(keys[self._placement.rank], text)
        deadline = time.monotonic() + timeout_s
        while not (is_complete := self._store.check(keys)) and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        return [self._store.get(key).decode() for key in keys if is_complete or self._store.check([key])]

    def require_same(self, own: dict[str, Any]) -> None:
        """Check that every rank has the same values.

        Args:
            own: name -> value that JSON can hold.
        Raises:
            UserError: a value differs between ranks; names it.
        """
        own = {name: _digested(value) for name, value in own.items()}
        for rank, text in enumerate(self.exchange(json.dumps(own))):
            other = json.loads(text)
            name = next((name for name in own | other if own.get(name) != other.get(name)), None)
            if name is not None:
                raise UserError(
                    f"ranks disagree on {name}: rank {self._placement.rank} has {own.get(name)!r}, rank {rank} has "
                    f"{other.get(name)!r}; pass the same to every rank, and set --transport and --dtype if hosts differ"
                )


def _digested(value: Any) -> Any:
    """Return a short value unchanged; for a long value, such as a prompt, its beginning and a SHA-256."""
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= LONG:
        return value
    return f"{text[:SHOWN]}... (SHA-256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()})"


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that must agree on all ranks: all but paths and settings that only rank 0 uses."""
    rank_0 = {"prompt", "prompt_ids", "chat", "system", "color", "debug"}
    names = {name for name, field in type(config).model_fields.items() if "Path" not in str(field.annotation)}
    settings: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json", include=names - rank_0).items():
        settings |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return settings


def fingerprint(paths: Iterable[Path]) -> str:
    """Hash of a model's files of weights and tokenizer, to check that all ranks have the same.

    It reads evenly spaced samples of each file, because reading all bytes would take as long as loading.
    """
    digest = hashlib.sha256()
    for path in sorted(filter(Path.is_file, paths)):  # skips broken links
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(size - SAMPLED_BYTES, 0) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]
