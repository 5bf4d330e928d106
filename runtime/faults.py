"""Dead and stalled ranks: a heartbeat that notices them, names them, and ends the job.

Every rank publishes a beat (a counter, its step and operation, its process) in the job's key-value store twice a
second, and watches the beats of the others from a thread of its own, so that a main thread blocked in a collective
cannot hide a loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import AlspecError, DoesNotFitError, RankFailureError, report
from .placement import Placement
from .transport import connect_store

__all__ = ["LOADING", "Heartbeat", "run_guarded"]

PERIOD_S = 0.5
STALL_LIMIT_S = 4.0
# After torchrun's SIGTERM a peer that misses this much is the one that failed.
TERMINATED_LIMIT_S = 2.0
# While weights are read, a rank may be busy in one long call.
LOADING = "load"
LOAD_LIMIT_S = 60.0


class Heartbeat:
    """Publishes this rank's beat, watches the others', and exits with code 5 when one is lost.

    Use `mark` before each operation; `stop` before the process ends well. `patience_s` is how long the others bear
    with a rank that does not beat, where that is more than a few seconds.
    """

    def __init__(self, placement: Placement, patience_s: float = 0.0, job: str = "alspec") -> None:
        self._placement = placement
        self._job = job  # tells the beats of engines that follow each other in one process apart
        self._patience_s = patience_s
        self._progress = (0, "start", -1)
        self._stopped = threading.Event()
        self._reporting = threading.Lock()
        self._counter = 0
        self._cause = ""
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin beating and watching; every rank must call it. A rank alone has nobody to watch."""
        if self._placement.world_size == 1:
            return
        # A client of its own: the main thread may block inside a call on the other one.
        self._store = dist.PrefixStore(self._job, connect_store(self._placement))
        self._wakeup, wakeup_write = socket.socketpair()
        wakeup_write.setblocking(False)
        self._wakeup_write = wakeup_write
        # The handler may never run while the main thread is blocked; the byte on the socket reaches the watcher.
        # Python allows handlers in the main thread only; elsewhere SIGTERM keeps the program's own.
        self._handles_signals = threading.current_thread() is threading.main_thread()
        if self._handles_signals:
            self._old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        self._beat()
        self._store.wait([self._key(rank) for rank in range(self._placement.world_size)])
        self._thread = threading.Thread(target=self._watch, name="alspec-heartbeat", daemon=True)
        self._thread.start()

    def mark(self, step: int, operation: str, layer: int, publish: bool = False) -> None:
        """Note what this rank is doing now; the others learn of it with the next beat, or at once with `publish`."""
        self._progress = (step, operation, layer)
        if publish and self.watching:
            self._beat()

    def stop(self) -> None:
        """Say goodbye, so that the others do not take this rank for dead."""
        if self._thread is None:
            return
        self._stopped.set()
        self._thread.join()
        if self._handles_signals:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._old_handler)
        self._wakeup.close()
        self._wakeup_write.close()
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._beat(done=True)

    def explain(self, timeout_s: float) -> RankFailureError | None:
        """After an error of a collective: the lost rank that explains it, if one shows within `timeout_s`."""
        if self._thread is None:
            return None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            lost = self._lost_rank(TERMINATED_LIMIT_S)
            if lost:
                return RankFailureError(lost)
            time.sleep(0.1)
        return None

    @property
    def watching(self) -> bool:
        """Other ranks depend on this one: leaving must not wait for them."""
        return self._thread is not None

    def end_process(self, error: AlspecError) -> NoReturn:
        """Print the one line once, and leave at once: other threads may be blocked in a collective for good."""
        with self._reporting:
            if self.watching and isinstance(error, RankFailureError):
                self._cause = str(error)
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self._beat()
            report(error)
            os._exit(error.exit_code)

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _beat(self, done: bool = False) -> None:
        self._counter += 1
        step, operation, layer = self._progress
        beat = {
            "counter": self._counter,
            "step": step,
            "op": operation if layer < 0 else f"{operation}, layer {layer}",
            "patience_s": LOAD_LIMIT_S if operation == LOADING else self._patience_s,
            "pid": os.getpid(),
            "born": _born(os.getpid()),
            "host": _host(),
            "done": done,
            "cause": self._cause,
        }
        self._store.set(self._key(self._placement.rank), json.dumps(beat))

    def _watch(self) -> None:
        limit_s = STALL_LIMIT_S
        terminated_at = None
        while not self._stopped.is_set():
            if select.select([self._wakeup], [], [], PERIOD_S if terminated_at is None else 0.1)[0]:
                self._wakeup.recv(64)
                terminated_at, limit_s = terminated_at or time.monotonic(), TERMINATED_LIMIT_S
            try:
                self._beat()
                lost = self._lost_rank(limit_s)
            except (dist.DistError, RuntimeError):
                lost = "the job's key-value store is gone: torchrun (or rank 0) died"
            if lost and not self._stopped.is_set():
                self.end_process(RankFailureError(lost))
            if terminated_at is not None and time.monotonic() - terminated_at > TERMINATED_LIMIT_S + 2 * PERIOD_S:
                print(f"alspec: rank {self._placement.rank} ended by SIGTERM", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)

    def _lost_rank(self, limit_s: float) -> str:
        """One line on a rank that died or has not moved for `limit_s`; '' if all are well."""
        peers = [rank for rank in range(self._placement.world_size) if rank != self._placement.rank]
        beats = [json.loads(beat) for beat in self._store.multi_get([self._key(rank) for rank in peers])]
        now = time.monotonic()
        for rank, beat in zip(peers, beats, strict=True):
            last, since = self._seen.get(rank, (None, now))
            if last is None or last["counter"] != beat["counter"]:
                since = now
            self._seen[rank] = (beat, since)
            if beat["done"]:
                continue
            state = _process_state(beat)
            where = f"step {beat['step']}, operation {beat['op']}"
            if state == "dead":
                # It may have left because of another rank: its last beat says so.
                cause = json.loads(self._store.get(self._key(rank)))["cause"]
                return cause or f"rank {rank} died at {where}; see its own output above for the cause"
            if now - since > max(limit_s, beat["patience_s"]):
                _kill_stalled(beat)
                return f"rank {rank} stalled at {where}: {state}, no heartbeat for {now - since:.1f} s"
        return ""


def _host() -> str:
    """This boot and PID namespace: where they are equal, a process id means the same process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # unknown: equal to nobody's


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


def _born(pid: int) -> str:
    """Start time of a process, in clock ticks since boot: tells it from a later one with the same id."""
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def _process_state(beat: dict[str, Any]) -> str:
    """`dead`, `stopped` or `running` for a process of this host, `silent` for one of another."""
    if beat["host"] != _host():
        return "silent"
    try:
        letter = _stat(beat["pid"])[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        return "silent"
    if _born(beat["pid"]) != beat["born"]:
        return "dead"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "running")


def _kill_stalled(beat: dict[str, Any]) -> None:
    """A stopped process ignores torchrun's SIGTERM for 30 s; kill it, so that the job ends now."""
    if beat["host"] == _host() and beat["born"] == _born(beat["pid"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(beat["pid"], signal.SIGKILL)


def run_guarded(heartbeat: Heartbeat, work: Callable[[], int]) -> int:
    """Run a command's main part; whatever breaks it, this rank leaves and says why.

    A collective that fails because another rank is gone is reported as that rank's loss. After an error of our own, the
    process ends without meeting the others, who may be anywhere.

    Ctrl-C ends it with one line and exit code 130, as a shell says it.

    Raises:
        AlspecError: with one rank, as it came.
    """
    try:
        try:
            return work()
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            print("\nalspec: exit 130: interrupted", file=sys.stderr, flush=True)
            os._exit(130)  # without meeting the others, who were interrupted, too
        except torch.OutOfMemoryError as error:
            line = str(error).splitlines()[0]
            raise DoesNotFitError(f"out of memory: {line} Lower --max-context, or use more ranks") from error
    except AlspecError as error:
        if not heartbeat.watching:
            raise
        heartbeat.end_process(error)
    except Exception:
        lost = heartbeat.explain(timeout_s=STALL_LIMIT_S + 1)
        if lost is None:
            raise
        heartbeat.end_process(lost)
    raise AssertionError("unreachable")
