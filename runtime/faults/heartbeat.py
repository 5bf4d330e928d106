"""Heartbeat between ranks: detects a dead or stalled rank, names it, and ends the job.

Twice a second every rank publishes a beat (a counter, its step and operation, its process) in the job's key-value
store and reads the beats of the others. It does so in a separate thread, so that a loss is detected even while the
main thread is blocked in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import torch.distributed as dist

from alspec.errors import (
    AlspecError,
    InterruptedJobError,
    RankFailureError,
    TerminatedJobError,
    print_error,
    tell_torchrun,
)
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import (
    NOTICE_S,
    STORE_GONE,
    STORE_LOST,
    TIMEOUT,
    agent_hosts_store,
    connect_store,
)
from alspec.runtime.faults.bounded_store import BoundedStore
from alspec.runtime.faults.processes import born, host, kill_stalled, process_state
from alspec.runtime.faults.signals import SignalWatch

__all__ = ["LOADING", "STALL_LIMIT_S", "Heartbeat", "pending_error", "may_come_from_others"]

PERIOD_S = 0.5
STALL_LIMIT_S = 4.0
# After torchrun's SIGTERM, a peer without a beat for this long is the one that failed.
TERMINATED_LIMIT_S = 2.0
# While a rank reads weights, it may be busy in one long call.
LOADING = "load"
LOAD_LIMIT_S = 60.0
# A rank that has used more than this share of a core since its last beat is not dead. It is in a long call that holds
# Python's lock (a large json.load, a regular expression), and gets as much time as while it reads weights. A smaller
# share means a deadlock: CPU time from before the deadlock, at most one period, is a small share of the limit.
BUSY_SHARE = 0.15
# Ranks on the store's host that end leave the others this time to read why.
LAST_WORDS_S = 3 * PERIOD_S
# All ranks may find the same mistake at once: each has this time to report it as its own.
OWN_ERROR_S = 0.2


class Heartbeat:
    """Publishes this rank's beat, reads the others', and exits with code 5 when a rank is lost.

    Call `start` before this rank first needs others. Call `mark` before each operation, use `waiting`
    around what other ranks take part in, and call `stop` before the process ends normally. A process that ends without
    `stop` leaves as described in `start`. Ranks that wait for each other in different places forever end with an error.

    If the program has no SIGTERM handler of its own, SIGTERM ends the process: at once if all ranks have it, else after
    a delay in which the others can show which of them failed. All other signals belong to the program.

    Args:
        placement: this rank's.
        grace_s: how long the others tolerate this rank without a beat, if that is more than a few seconds. On the
            same host, a rank that computes meanwhile is tolerated for longer.
        job: prefix of the store keys, which separates the beats of successive engines in one process.
    """

    def __init__(self, placement: Placement, grace_s: float = 0.0, job: str = "alspec") -> None:
        self._placement = placement
        self._job = job
        self._patience_s = grace_s
        self._progress = (0, "start", -1)
        self._progress_s = time.monotonic()  # time of the last mark
        self._waits = ""  # where this rank waits for others
        self._is_reported = False  # this wait has been printed
        self._wait_failed = False  # the last wait ended with an error that other ranks may have caused
        self._stopped = threading.Event()
        self._reporting = threading.Lock()
        self._beating = threading.Lock()
        self._counter = 0
        self._cause: AlspecError | None = None  # why this process ends; the others repeat it
        self._is_closing = False
        self._is_terminated = False  # this rank has received SIGTERM
        # This rank closes after an error. A rank that waits for it ends and names this error; this rank continues.
        self._has_failed = False
        self._ended: Literal["", "closed", "unmet", "left"] = ""
        # For each other rank: its newest beat, when that was first seen, and the CPU time of its process then.
        self._seen: dict[int, tuple[dict[str, Any], float, float]] = {}
        self._thread: threading.Thread | None = None
        self._store: BoundedStore | None = None
        # Called before the last line of this process, so that a command can end an unfinished line of stdout.
        self.end_output: Callable[[], None] = _flush_stdout

    def start(self, release: Callable[[], None] | None = None) -> None:
        """Start the heartbeat thread. Does nothing when called again, or with one rank.

        If the interpreter exits while the thread runs, an exit handler publishes a last beat, calls `release` and
        destroys the process groups. It does not wait for the others: threads that are inside a call at that time could
        abort the process. After an uncaught error the handler publishes that error instead.

        Args:
            release: a bound method; its object is not kept alive.
        """
        if self._placement.world_size == 1 or self._thread is not None:
            return
        # A separate client: the main thread may block inside a call on the other one.
        self._store = BoundedStore(dist.PrefixStore(self._job, connect_store(self._placement)))
        # The handler may never run while the main thread is blocked.
        self._signals = SignalWatch(takes_sigterm=True)
        self._thread = threading.Thread(target=self._watch, name="alspec-heartbeat", daemon=True)
        self._thread.start()
        release_ref = None if release is None else weakref.WeakMethod(release)
        self._at_exit = functools.partial(_leave_at_exit, weakref.ref(self), release_ref, os.getpid())
        atexit.register(self._at_exit)
        self._beat()  # shows at once that this rank has started; the thread's first beat is half a second later

    def mark(self, step: int, operation: str, layer: int, publish: bool = False) -> None:
        """Record what this rank does now. It is in the next beat; with `publish`, a beat is sent at once."""
        self._progress, self._progress_s = (step, operation, layer), time.monotonic()
        if publish and self.watching:
            self._beat()

    @contextlib.contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Context in which this rank needs the others: a rank that left without `stop` then counts as lost.

        Args:
            where: name of the place, the same on all ranks that take part. Ranks that are stuck in different places
                would wait for each other forever.
        """
        outer, self._waits, self._progress_s = self._waits, where, time.monotonic()
        self._wait_failed = self._is_reported = False
        try:
            yield
        except BaseException as error:
            self._wait_failed = may_come_from_others(error)
            raise
        finally:
            self._waits = outer  # also after an error: a program that catches it no longer waits

    def rendezvous(self, error: BaseException | None) -> bool:
        """Wait in `close` until all other ranks are in `close` too.

        After an `error` the other ranks arrive only if all of them had this error, or if no rank needed this one any
        more. Otherwise a rank that waits for this rank elsewhere ends, and names this rank and its error. The caller
        then shows the error.

        Args:
            error: the error after which this rank closes, or None.
        Returns:
            True if all ranks are in `close`. If False, nothing may be sent to them.
        """
        if self._placement.world_size == 1:
            return True
        self._is_closing = True
        # The error of a collective may come from a lost rank, which is detected within this time.
        publish_after_s = STALL_LIMIT_S + 1 if may_come_from_others(error) else 0.0
        started, is_reported = time.monotonic(), False
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone
            self._beat()
            while (waited_s := time.monotonic() - started) < TIMEOUT.total_seconds():
                if error is not None and self._cause is None and waited_s >= publish_after_s:
                    self._has_failed = True
                    self.publish_error(self._own_failure(error, "closed its engine after an error"))
                if self._lost_rank(STALL_LIMIT_S, is_waiting=True) and error is not None:
                    return False  # without an error, the heartbeat thread ends the process
                if len(self._seen) == self._placement.world_size - 1 and all(
                    beat["closing"] for beat, *_ in self._seen.values()
                ):
                    if self._has_failed:
                        self._cause, self._has_failed = None, False
                    return True
                # Without an error the heartbeat thread reports the wait.
                if error is not None and waited_s > NOTICE_S and not is_reported:
                    is_reported = True
                    what = f"rank {self._placement.rank} closes after {type(error).__name__}: {error}"
                    print(f"alspec: {what}; waiting for the others to close", file=sys.stderr, flush=True)
                time.sleep(0.02)
        return False

    def stop(self, has_met: bool = True) -> None:
        """Publish that this rank ends, so that the others do not report it as dead.

        Any thread may call it, also repeatedly.

        Args:
            has_met: all ranks have met in `close`. If False, this rank counts as lost for those that wait for it.
        """
        self._publish_end("closed" if has_met else "unmet")

    def _publish_end(self, ended: Literal["closed", "unmet", "left"]) -> None:
        if self._end_watch():
            self._ended = self._ended or ended
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._beat()
                deadline = time.monotonic() + TERMINATED_LIMIT_S
                while self._store_is_needed() and time.monotonic() < deadline:
                    time.sleep(0.05)

    def _end_watch(self) -> bool:
        """Stop the heartbeat thread; True if it was running."""
        if self._thread is None or self._stopped.is_set():
            return False
        self._stopped.set()
        self._signals.wake()
        self._thread.join()
        self._signals.close()
        atexit.unregister(self._at_exit)
        return True

    def explain(self, timeout_s: float) -> AlspecError | None:
        """The lost rank that explains an error of a collective, if one is detected within `timeout_s`; else None."""
        if not self.watching or self._has_failed:  # the others ended because of this rank
            return None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                lost = self._lost_rank(TERMINATED_LIMIT_S, is_waiting=self._wait_failed)
            except (dist.DistError, RuntimeError):
                lost = self._store_gone_error()
            if lost:
                return lost
            time.sleep(0.1)
        return None

    @property
    def watching(self) -> bool:
        """True while the heartbeat thread runs. A process that ends now must not wait for other ranks."""
        return self._thread is not None and not self._stopped.is_set()

    @property
    def placement(self) -> Placement:
        """The placement of this rank."""
        return self._placement

    def end_process(self, error: AlspecError) -> NoReturn:
        """Print the error's one line and exit at once: other threads may be blocked in a collective forever."""
        is_interrupt = isinstance(error, InterruptedJobError)
        is_shared = is_interrupt or isinstance(error, RankFailureError)
        self.publish_error(error if is_shared else self._own_failure(error))
        with self._ending(_flush_stdout if is_interrupt else self.end_output):
            if is_interrupt and self._placement.rank == 0:
                sys.stderr.write("\n")  # after ^C, and possibly an unfinished line of text
            print_error(error)
            if not is_interrupt:
                self._release_others()
            os._exit(error.exit_code)

    def end_failed(self, error: Exception) -> NoReturn:
        """Print the traceback of this rank's own error and exit at once; the other ranks name it as the cause."""
        self.publish_error(self._own_failure(error))
        with self._ending(self.end_output):
            traceback.print_exc()
            tell_torchrun(f"{self._own_failure(error)}; its traceback is in its output above")
            sys.stderr.flush()
            self._release_others()
            os._exit(1)

    def _release_others(self) -> None:
        """Kill stopped ranks of this host, for which torchrun would wait, and let other hosts read why this rank ends.

        The store ends with torchrun on its host, and that with the last rank there.
        """
        if not self.watching:
            return
        for beat, *_ in list(self._seen.values()):
            if process_state(beat)[0] == "stopped":
                kill_stalled(beat)
        here = self._placement.host_ranks
        elsewhere = [rank for rank in self._seen if rank not in here] if 0 in here else []
        deadline = time.monotonic() + LAST_WORDS_S
        with contextlib.suppress(dist.DistError, RuntimeError):
            assert self._store is not None
            while elsewhere and time.monotonic() < deadline:
                beats = [json.loads(self._store.get(self._key(rank))) for rank in elsewhere]
                if all(beat["cause"] or beat["ended"] for beat in beats):
                    return
                time.sleep(0.05)

    def _store_gone_error(self) -> RankFailureError:
        """The error of a lost store. On its host a rank or torchrun died, and no rank there has said which."""
        if 0 in self._seen and 0 not in self._placement.host_ranks:
            beat = self._seen[0][0]
            where = f"step {beat['step']}, operation {beat['op']}"
            return RankFailureError(f"rank 0 died at {where}, or torchrun on its host: {STORE_GONE}")
        return RankFailureError(STORE_LOST)

    def publish_error(self, cause: AlspecError) -> None:
        """Publish why this process is about to exit; the other ranks repeat it."""
        if self.watching:
            self._cause = cause
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._beat()

    def _own_failure(self, error: BaseException, ended: str = "died") -> AlspecError:
        if isinstance(error, KeyboardInterrupt):
            return InterruptedJobError("interrupted")
        step, operation = self._step_and_operation()
        kind = "" if isinstance(error, AlspecError) else f"{type(error).__name__}: "
        what = " ".join(f"{kind}{error}".split())[:300]
        return RankFailureError(f"rank {self._placement.rank} {ended} at step {step}, operation {operation}: {what}")

    @contextlib.contextmanager
    def _ending(self, end_output: Callable[[], None]) -> Iterator[None]:
        """Let one thread end the process: take the lock for good, and flush stdout unless that blocks."""
        self._reporting.acquire(timeout=2.0)  # never released: the thread that has it ends the process
        flush = threading.Thread(target=end_output, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            flush.start()
            flush.join(timeout=1.0)
        yield

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _beat(self) -> None:
        """Publish this rank's state. Under a lock, so that an older beat of another thread is never published last."""
        assert self._store is not None
        with self._beating:
            self._counter += 1
            step, operation = self._step_and_operation()
            beat = {
                "counter": self._counter,
                "step": step,
                "op": operation,
                "waits": self._waits,
                "is_stuck": self._is_stuck(),
                "grace_s": LOAD_LIMIT_S if operation == LOADING else self._patience_s,
                "pid": os.getpid(),
                "born": born(os.getpid()),
                "host": host(),
                "closing": self._is_closing,
                "failed": self._has_failed,
                "ended": self._ended,
                "cause": str(self._cause or ""),
                "interrupted": isinstance(self._cause, InterruptedJobError),
                "terminated": self._is_terminated,
            }
            self._store.set(self._key(self._placement.rank), json.dumps(beat))

    def _step_and_operation(self) -> tuple[int, str]:
        step, operation, layer = self._progress
        return step, operation if layer < 0 else f"{operation}, layer {layer}"

    def _watch(self) -> None:
        limit_s = STALL_LIMIT_S
        terminated_at = None
        is_store_gone = False
        while not self._stopped.is_set():
            if signal.SIGTERM in self._signals.wait(PERIOD_S if terminated_at is None else 0.1):
                terminated_at, limit_s = terminated_at or time.monotonic(), TERMINATED_LIMIT_S
                self._is_terminated = True
            if self._stopped.is_set():
                return
            lost = None
            try:
                if not is_store_gone:
                    self._beat()
                    lost = self._lost_rank(limit_s, self._is_stuck()) or self._mismatched_wait()
                    self._report_wait()
            except (dist.DistError, RuntimeError):
                is_store_gone = True
            if is_store_gone and (self._is_stuck() or not self._store_host_has_left()):
                lost = self._store_gone_error()
            if lost and any(beat["cause"] for beat, *_ in self._seen.values()):
                self._stopped.wait(OWN_ERROR_S)
            if lost and not self._has_failed and not self._stopped.is_set():
                self.end_process(lost)
            if terminated_at is not None:
                waited_s = time.monotonic() - terminated_at
                if self._are_all_terminated() or waited_s > TERMINATED_LIMIT_S + 2 * PERIOD_S:
                    self.end_process(TerminatedJobError("terminated"))

    def _are_all_terminated(self) -> bool:
        """Return whether every rank has received SIGTERM: then none of them is the cause of it."""
        beats = [beat for beat, *_ in self._seen.values()]
        return len(beats) == self._placement.world_size - 1 and all(beat["terminated"] for beat in beats)

    def _is_stuck(self) -> bool:
        """Return whether this rank has waited for others longer than any collective operation can take."""
        limit_s = LOAD_LIMIT_S if self._progress[1] == LOADING else STALL_LIMIT_S
        return self._waits != "" and time.monotonic() - self._progress_s > limit_s

    def _mismatched_wait(self) -> AlspecError | None:
        """Return an error if another rank waits for this rank in a different place; else None."""
        step, operation = self._step_and_operation()
        own = (self._placement.rank, self._waits, step, operation, self._is_stuck())
        for rank, (beat, *_) in list(self._seen.items()):
            other = (rank, beat["waits"], beat["step"], beat["op"], beat["is_stuck"])
            if own[-1] and other[-1] and other[1] != own[1]:
                places = ", ".join(
                    f"rank {rank} in {waits} at step {step}, operation {operation}"
                    for rank, waits, step, operation, _ in sorted([own, other])
                )
                return RankFailureError(f"ranks wait for each other in different places: {places}")
        return None

    def _report_wait(self) -> None:
        """Print one line for a long wait for ranks whose programs are not at this place and may never come."""
        if self._is_reported or not self._is_stuck() or time.monotonic() - self._progress_s < NOTICE_S:
            return
        absent = [
            f"{rank} (which has not created its engine)"
            if rank not in self._seen
            else f"{rank} (which is not in its engine, after step {self._seen[rank][0]['step']})"
            for rank in range(self._placement.world_size)
            if rank != self._placement.rank and (rank not in self._seen or not self._seen[rank][0]["waits"])
        ]
        if absent:
            self._is_reported = True
            line = f"rank {self._placement.rank} waits in {self._waits} for rank {', '.join(absent)}"
            print(f"alspec: {line}", file=sys.stderr, flush=True)

    def _lost_rank(self, limit_s: float, is_waiting: bool) -> AlspecError | None:
        """Return an error if another rank died, was interrupted or sent no beat for `limit_s`; else None.

        Args:
            is_waiting: this rank waits for others, so that a rank that left without `close` counts as lost.
        """
        assert self._store is not None
        peers = [rank for rank in range(self._placement.world_size) if rank != self._placement.rank]
        # A rank that has not created its engine has no beat, and `multi_get` would wait for it.
        peers = [rank for rank in peers if rank in self._seen or self._store.check([self._key(rank)])]
        beats = [json.loads(beat) for beat in self._store.multi_get([self._key(rank) for rank in peers])]
        now = time.monotonic()
        for rank, beat in zip(peers, beats, strict=True):
            state, cpu_s = process_state(beat)
            last, since, cpu_then_s = self._seen.get(rank, (None, now, cpu_s))
            if last is None or last["counter"] != beat["counter"]:
                since, cpu_then_s = now, cpu_s
            self._seen[rank] = (beat, since, cpu_then_s)
            if state == "dead":
                beat = json.loads(self._store.get(self._key(rank)))  # its last beat
            lost = _dead_rank_error(rank, beat, state, is_waiting, self._is_closing)
            if lost is None:
                lost = _stalled_rank_error(rank, beat, state, now - since, cpu_s - cpu_then_s, limit_s)
                if lost is not None:
                    kill_stalled(beat)
            if lost is not None:
                return lost
        return None

    def _store_is_needed(self) -> bool:
        """Return whether this process hosts the store and other ranks have not ended yet."""
        if self._placement.rank != 0 or agent_hosts_store():
            return False
        assert self._store is not None
        keys = [self._key(rank) for rank in range(1, self._placement.world_size)]
        beats = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return len(beats) < len(keys) or not all(beat["ended"] or process_state(beat)[0] == "dead" for beat in beats)

    def _store_host_has_left(self) -> bool:
        """Return whether rank 0 hosted the store and has published that it ends."""
        beat, *_ = self._seen.get(0, ({}, 0.0, 0.0))
        return not agent_hosts_store() and bool(beat.get("ended"))


def _dead_rank_error(
    rank: int, beat: dict[str, Any], state: str, is_waiting: bool, is_closing: bool
) -> AlspecError | None:
    """Return an error if the rank died, was interrupted, failed or left; else None.

    Args:
        beat: its newest beat.
        state: of its process, see `process_state`.
        is_waiting: the calling rank waits for others, so that a rank that left without `close` counts as lost.
        is_closing: the calling rank is in `close` itself.
    """
    where = f"step {beat['step']}, operation {beat['op']}"
    if beat["ended"] and not (beat["ended"] != "closed" and is_waiting):
        return None
    # A rank that failed but still waits in `close` is lost only for ranks that wait for it elsewhere.
    if not beat["failed"] or state == "dead" or (is_waiting and not is_closing):
        if beat["interrupted"]:
            return TerminatedJobError("terminated") if beat["terminated"] else InterruptedJobError("interrupted")
        if beat["cause"]:
            return RankFailureError(beat["cause"])
    if beat["ended"] == "unmet":
        return RankFailureError(f"rank {rank} closed its engine at {where} without waiting for the others")
    if beat["ended"]:
        return RankFailureError(f"rank {rank} left at {where} without closing its engine")
    if state == "dead":
        return RankFailureError(f"rank {rank} died at {where}; see its own output above for the cause")
    return None


def _stalled_rank_error(
    rank: int, beat: dict[str, Any], state: str, silent_s: float, cpu_s: float, limit_s: float
) -> RankFailureError | None:
    """Return an error if the rank is not dead, but has sent no beat for longer than is tolerated; else None.

    Args:
        beat: its newest beat.
        state: of its process, see `process_state`.
        silent_s: time since its newest beat was first seen.
        cpu_s: CPU time of its process in that time.
        limit_s: shortest time that a rank without a beat is tolerated.
    """
    if beat["ended"]:
        return None
    is_busy = state == "running" and cpu_s > BUSY_SHARE * silent_s
    if silent_s <= max(limit_s, beat["grace_s"], LOAD_LIMIT_S if is_busy else 0.0):
        return None
    where = f"step {beat['step']}, operation {beat['op']}"
    return RankFailureError(f"rank {rank} stalled at {where}: {state}, no heartbeat for {silent_s:.1f} s")


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _leave_at_exit(
    heartbeat_ref: weakref.ref[Heartbeat], release_ref: weakref.WeakMethod[Callable[[], None]] | None, pid: int
) -> None:
    """Exit handler of the interpreter: end without the other ranks, which may be in any place."""
    heartbeat = heartbeat_ref()
    if heartbeat is None or os.getpid() != pid:
        return
    error = _uncaught_error()
    if error is not None:
        lost = heartbeat.explain(TERMINATED_LIMIT_S) if may_come_from_others(error) else None
        if lost is not None:
            heartbeat.end_process(lost)
        heartbeat.publish_error(heartbeat._own_failure(error))
        heartbeat._end_watch()
        return
    heartbeat._publish_end("left")
    if heartbeat._has_failed:
        return  # the device may wait for ranks that have ended
    # Ignore errors: the interpreter is exiting.
    with contextlib.suppress(Exception):
        release = None if release_ref is None else release_ref()
        if release is not None:
            release()
        if dist.is_initialized():
            dist.destroy_process_group()


def may_come_from_others(error: BaseException | None) -> bool:
    """PyTorch's collectives and stores raise RuntimeError or subclasses; Python's own subclasses are this rank's."""
    return isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError | RecursionError)


def pending_error() -> BaseException | None:
    """Return the error that this thread handles (also in a `finally` block), or the uncaught error; else None."""
    return sys.exception() or _uncaught_error()


def _uncaught_error() -> BaseException | None:
    """Return the printed error that ended the program; None while the program runs."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
