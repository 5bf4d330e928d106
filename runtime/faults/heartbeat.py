"""Dead and stalled ranks: a heartbeat that notices them, names them, and ends the job.

Every rank publishes a beat (a counter, its step and operation, its process) in the job's key-value store twice a
second, and watches the beats of the others from a thread of its own, so that a main thread blocked in a collective
cannot hide a loss.
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

import torch
import torch.distributed as dist

from alspec.errors import (
    AlspecError,
    DoesNotFitError,
    InterruptedJobError,
    RankFailureError,
    print_error,
    tell_torchrun,
)
from alspec.interrupts import HeldInterrupt
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import NOTICE_S, TIMEOUT, agent_hosts_store, connect_store
from alspec.runtime.faults.processes import born, host, kill_stalled, process_state
from alspec.runtime.faults.signals import SignalWatch

__all__ = ["LOADING", "Heartbeat", "error_on_its_way", "out_of_memory_is_told", "run_guarded"]

PERIOD_S = 0.5
STALL_LIMIT_S = 4.0
# After torchrun's SIGTERM a peer that misses this much is the one that failed.
TERMINATED_LIMIT_S = 2.0
# While weights are read, a rank may be busy in one long call.
LOADING = "load"
LOAD_LIMIT_S = 60.0
# A rank without a beat that has had more than this share of a core since the last one is in a long call that keeps
# Python's lock from the heartbeat (a large json.load, a regular expression), and is as well as while it reads weights.
# Less is a deadlock: what one thread did before it, in up to a period, has faded by the time of the limit.
BUSY_SHARE = 0.15
# What Python's own handling of Ctrl-C has before another thread ends a command.
INTERRUPT_LIMIT_S = 0.5
STORE_GONE = "the job's key-value store is gone: torchrun (or rank 0) died"


class Heartbeat:
    """Publishes this rank's beat, watches the others', and exits with code 5 when one is lost.

    `announce` it, `start` it before this rank first needs others; use `mark` before each operation, `waiting` around
    what other ranks take part in; `stop` before the process ends well. One that ends without leaves as well as it can,
    see `start`. Ranks that wait for each other in different places, for good, are told so, and end.

    `patience_s` is how long the others bear with a rank that does not beat, where that is more than a few seconds; on
    the same host, they bear longer with one that computes meanwhile.

    SIGTERM, where the program has no handler of its own, ends the process once the others have had time to show which
    of them failed. All other signals are the program's.
    """

    def __init__(self, placement: Placement, patience_s: float = 0.0, job: str = "alspec") -> None:
        self._placement = placement
        self._job = job  # tells the beats of engines that follow each other in one process apart
        self._patience_s = patience_s
        self._progress = (0, "start", -1)
        self._progress_s = time.monotonic()  # when it was marked
        self._waits = ""  # where this rank waits for others
        self._is_noticed = False  # that it does, and for whom
        self._has_missed = False  # the last wait ended with an error that others may have caused
        self._stopped = threading.Event()
        self._reporting = threading.Lock()
        self._beating = threading.Lock()
        self._counter = 0
        self._cause: AlspecError | None = None  # what ends this process, for the others to repeat
        self._is_closing = False
        self._has_failed = False  # the cause is an error that it closes after: who misses it ends, and it stays
        self._ended: Literal["", "closed", "unmet", "left"] = ""
        # Of each other rank, its newest beat, when that was first seen, and the process's CPU time then.
        self._seen: dict[int, tuple[dict[str, Any], float, float]] = {}
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None
        # Called before the last line of this process; a command that is in the midst of a line of stdout ends that.
        self.end_output: Callable[[], None] = _flush_stdout

    def announce(self, store: dist.Store) -> None:
        """Publish one beat in the store of this `job`: from here on the others see whether this process has ended."""
        self._store = store
        self._beat()

    def start(self, release: Callable[[], None] | None = None) -> None:
        """Begin beating and watching; again, it goes on. A rank alone has nobody to watch.

        An interpreter that ends while this goes on first says goodbye, calls `release` (a method, whose object is not
        kept alive) and ends the process groups, all without waiting for the others: threads that are in the midst of
        a call then could abort the process. After an error that nobody has caught, it names that to the others instead.
        """
        if self._placement.world_size == 1 or self._thread is not None:
            return
        # A client of its own: the main thread may block inside a call on the other one.
        self._store = dist.PrefixStore(self._job, connect_store(self._placement))
        # The handler may never run while the main thread is blocked.
        self._signals = SignalWatch(takes_sigterm=True)
        self._thread = threading.Thread(target=self._watch, name="alspec-heartbeat", daemon=True)
        self._thread.start()
        release_ref = None if release is None else weakref.WeakMethod(release)
        self._at_exit = functools.partial(_leave, weakref.ref(self), release_ref, os.getpid())
        atexit.register(self._at_exit)
        self._beat()  # not with the thread's first, half a second later: this rank has started

    def mark(self, step: int, operation: str, layer: int, publish: bool = False) -> None:
        """Note what this rank is doing now; the others learn of it with the next beat, or at once with `publish`."""
        self._progress, self._progress_s = (step, operation, layer), time.monotonic()
        if publish and self.watching:
            self._beat()

    @contextlib.contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Around what needs the others: there, one that has ended its process without `stop` is missed.

        Args:
            where: the same on all ranks that take part. Ranks that are stuck in different places wait in vain.
        """
        outer, self._waits, self._progress_s = self._waits, where, time.monotonic()
        self._has_missed = self._is_noticed = False
        try:
            yield
        except BaseException as error:
            self._has_missed = _may_come_from_others(error)
            raise
        finally:
            self._waits = outer  # a program that catches the error waits for nobody

    def meets(self, error: BaseException | None) -> bool:
        """In `close`: whether all the others come to `close`, too, without which nothing is to be sent to them.

        After an `error` that is on its way, they do where all of them had it, or nobody needed this rank any more. One
        that waits for it anywhere else ends instead, and names it and its error, which is then for the caller to show.
        """
        if self._placement.world_size == 1:
            return True
        self._is_closing = True
        # An error of a collective may be a lost rank's, which shows before that.
        tells_after_s = STALL_LIMIT_S + 1 if _may_come_from_others(error) else 0.0
        started, is_noticed = time.monotonic(), False
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone
            self._beat()
            while (waited_s := time.monotonic() - started) < TIMEOUT.total_seconds():
                if error is not None and self._cause is None and waited_s >= tells_after_s:
                    self._has_failed = True
                    self.tell(self._own_failure(error, "closed its engine after an error"))
                if self._lost_rank(STALL_LIMIT_S, misses=True) and error is not None:
                    return False  # without an error, the watch ends the process
                if len(self._seen) == self._placement.world_size - 1 and all(
                    beat["closing"] for beat, *_ in self._seen.values()
                ):
                    if self._has_failed:
                        self._cause, self._has_failed = None, False
                    return True
                if error is not None and waited_s > NOTICE_S and not is_noticed:  # else the watch says so
                    is_noticed = True
                    what = f"rank {self._placement.rank} closes after {type(error).__name__}: {error}"
                    print(f"alspec: {what}; waiting for the others to close", file=sys.stderr, flush=True)
                time.sleep(0.02)
        return False

    def stop(self, has_met: bool = True) -> None:
        """Say goodbye, so that the others do not take this rank for dead. From any thread, and again.

        Args:
            has_met: all of them; otherwise those that wait for it miss it.
        """
        self._say_goodbye("closed" if has_met else "unmet")

    def _say_goodbye(self, ended: Literal["closed", "unmet", "left"]) -> None:
        is_unstarted = self._thread is None and self._store is not None
        if self._end_watch() or is_unstarted:
            self._ended = self._ended or ended
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._beat()
                deadline = time.monotonic() + TERMINATED_LIMIT_S
                while self._store_is_needed() and time.monotonic() < deadline:
                    time.sleep(0.05)

    def _end_watch(self) -> bool:
        """Whether there was one."""
        if self._thread is None or self._stopped.is_set():
            return False
        self._stopped.set()
        self._signals.wake()
        self._thread.join()
        self._signals.close()
        atexit.unregister(self._at_exit)
        return True

    def explain(self, timeout_s: float) -> AlspecError | None:
        """After an error of a collective: the lost rank that explains it, if one shows within `timeout_s`."""
        if not self.watching or self._has_failed:  # the others are lost because of this one
            return None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                lost = self._lost_rank(TERMINATED_LIMIT_S, misses=self._has_missed)
            except (dist.DistError, RuntimeError):
                lost = RankFailureError(STORE_GONE)
            if lost:
                return lost
            time.sleep(0.1)
        return None

    @property
    def watching(self) -> bool:
        """Other ranks depend on this one: leaving must not wait for them."""
        return self._thread is not None and not self._stopped.is_set()

    @property
    def placement(self) -> Placement:
        """This rank's."""
        return self._placement

    def end_process(self, error: AlspecError) -> NoReturn:
        """Print the one line once, and leave at once: other threads may be blocked in a collective for good."""
        is_interrupt = isinstance(error, InterruptedJobError)
        is_shared = is_interrupt or isinstance(error, RankFailureError)
        self.tell(error if is_shared else self._own_failure(error))
        with self._ending(_flush_stdout if is_interrupt else self.end_output):
            if is_interrupt and self._placement.rank == 0:
                sys.stderr.write("\n")  # after ^C, and maybe half a line of text
            print_error(error)
            os._exit(error.exit_code)

    def end_failed(self, error: Exception) -> NoReturn:
        """Print the traceback of this rank's own error, and leave at once; the others name it as the cause."""
        self.tell(self._own_failure(error))
        with self._ending(self.end_output):
            traceback.print_exc()
            tell_torchrun(f"{self._own_failure(error)}; its traceback is in its output above")
            sys.stderr.flush()
            os._exit(1)

    def tell(self, cause: AlspecError) -> None:
        """What the others are to say: this process is about to leave."""
        if self.watching:
            self._cause = cause
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._beat()

    def _own_failure(self, error: BaseException, ended: str = "died") -> AlspecError:
        if isinstance(error, KeyboardInterrupt):
            return InterruptedJobError("interrupted")
        step, operation = self._place()
        kind = "" if isinstance(error, AlspecError) else f"{type(error).__name__}: "
        what = " ".join(f"{kind}{error}".split())[:300]
        return RankFailureError(f"rank {self._placement.rank} {ended} at step {step}, operation {operation}: {what}")

    @contextlib.contextmanager
    def _ending(self, end_output: Callable[[], None]) -> Iterator[None]:
        """For the one thread that ends the process: stdout is written out first, if that does not block for good."""
        self._reporting.acquire(timeout=2.0)  # for ever, when the other thread ends it in time
        flush = threading.Thread(target=end_output, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is at its end
            flush.start()
            flush.join(timeout=1.0)
        yield

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _beat(self) -> None:
        """Publish what this rank is at, built and set as one: an older record of another thread must not come last."""
        assert self._store is not None
        with self._beating:
            self._counter += 1
            step, operation = self._place()
            beat = {
                "counter": self._counter,
                "step": step,
                "op": operation,
                "has_started": self._thread is not None,
                "waits": self._waits,
                "is_stuck": self._has_waited(),
                "patience_s": LOAD_LIMIT_S if operation == LOADING else self._patience_s,
                "pid": os.getpid(),
                "born": born(os.getpid()),
                "host": host(),
                "closing": self._is_closing,
                "failed": self._has_failed,
                "ended": self._ended,
                "cause": str(self._cause or ""),
                "interrupted": isinstance(self._cause, InterruptedJobError),
            }
            self._store.set(self._key(self._placement.rank), json.dumps(beat))

    def _place(self) -> tuple[int, str]:
        """Step and operation."""
        step, operation, layer = self._progress
        return step, operation if layer < 0 else f"{operation}, layer {layer}"

    def _watch(self) -> None:
        limit_s = STALL_LIMIT_S
        terminated_at = None
        is_store_gone = False
        while not self._stopped.is_set():
            if signal.SIGTERM in self._signals.wait(PERIOD_S if terminated_at is None else 0.1):
                terminated_at, limit_s = terminated_at or time.monotonic(), TERMINATED_LIMIT_S
            if self._stopped.is_set():
                return
            lost = None
            try:
                if not is_store_gone:
                    self._beat()
                    lost = self._lost_rank(limit_s, self._has_waited()) or self._parted_rank()
                    self._tell_of_waiting()
            except (dist.DistError, RuntimeError):
                is_store_gone = True
            if is_store_gone and (self._has_waited() or not self._host_has_left()):
                lost = RankFailureError(STORE_GONE)
            if lost and not self._has_failed and not self._stopped.is_set():
                self.end_process(lost)
            if terminated_at is not None and time.monotonic() - terminated_at > TERMINATED_LIMIT_S + 2 * PERIOD_S:
                print(f"alspec: rank {self._placement.rank} ended by SIGTERM", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)

    def _has_waited(self) -> bool:
        """For others, and longer than any operation takes whose others have done their part."""
        limit_s = LOAD_LIMIT_S if self._progress[1] == LOADING else STALL_LIMIT_S
        return self._waits != "" and time.monotonic() - self._progress_s > limit_s

    def _parted_rank(self) -> AlspecError | None:
        """One line on a rank that waits for this one elsewhere, while this one waits for it here."""
        step, operation = self._place()
        own = (self._placement.rank, self._waits, step, operation, self._has_waited())
        for rank, (beat, *_) in list(self._seen.items()):
            other = (rank, beat["waits"], beat["step"], beat["op"], beat["is_stuck"])
            if own[-1] and other[-1] and other[1] != own[1]:
                places = ", ".join(
                    f"rank {rank} in {waits} at step {step}, operation {operation}"
                    for rank, waits, step, operation, _ in sorted([own, other])
                )
                return RankFailureError(f"ranks wait for each other in different places: {places}")
        return None

    def _tell_of_waiting(self) -> None:
        """One line for each wait in vain for ranks whose programs are elsewhere, maybe for good."""
        if self._is_noticed or not self._has_waited() or time.monotonic() - self._progress_s < NOTICE_S:
            return
        absent = [
            f"{rank} (which has not created its engine)"
            if rank not in self._seen
            else f"{rank} (which is not in its engine, after step {self._seen[rank][0]['step']})"
            for rank in range(self._placement.world_size)
            if rank != self._placement.rank and (rank not in self._seen or not self._seen[rank][0]["waits"])
        ]
        if absent:
            self._is_noticed = True
            line = f"rank {self._placement.rank} waits in {self._waits} for rank {', '.join(absent)}"
            print(f"alspec: {line}", file=sys.stderr, flush=True)

    def _lost_rank(self, limit_s: float, misses: bool) -> AlspecError | None:
        """One line on a rank that died, was interrupted or has not moved for `limit_s`; None if all are well.

        Args:
            misses: this rank misses one, so that one that has left, if not by `close`, is lost.
        """
        assert self._store is not None
        peers = [rank for rank in range(self._placement.world_size) if rank != self._placement.rank]
        # Of one that has not created its engine there is no beat, for which `multi_get` would wait.
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
                beat = json.loads(self._store.get(self._key(rank)))  # its last one
            lost = _dead_rank_error(rank, beat, state, misses, self._is_closing)
            if lost is None:
                lost = _stalled_rank_error(rank, beat, state, now - since, cpu_s - cpu_then_s, limit_s)
                if lost is not None:
                    kill_stalled(beat)
            if lost is not None:
                return lost
        return None

    def _store_is_needed(self) -> bool:
        """This process hosts the store of others who have not said goodbye."""
        if self._placement.rank != 0 or agent_hosts_store():
            return False
        assert self._store is not None
        keys = [self._key(rank) for rank in range(1, self._placement.world_size)]
        beats = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        return len(beats) < len(keys) or not all(beat["ended"] or process_state(beat)[0] == "dead" for beat in beats)

    def _host_has_left(self) -> bool:
        """Rank 0 had the store, and has said goodbye."""
        beat, *_ = self._seen.get(0, ({}, 0.0, 0.0))
        return not agent_hosts_store() and bool(beat.get("ended"))


def _dead_rank_error(rank: int, beat: dict[str, Any], state: str, misses: bool, is_closing: bool) -> AlspecError | None:
    """That a rank died, was interrupted, tells of an error or has left, as its newest beat says and its process shows.

    Args:
        state: of its process, see `process_state`.
        misses: the rank that asks misses one, so that one that has left, if not by `close`, is lost.
        is_closing: the rank that asks is in `close` itself.
    """
    where = f"step {beat['step']}, operation {beat['op']}"
    if beat["ended"] and not (beat["ended"] != "closed" and misses):
        return None
    # It leaves, maybe because of another rank; or it waits in `close`, and is missed only elsewhere.
    if not beat["failed"] or state == "dead" or (misses and not is_closing):
        if beat["interrupted"]:
            return InterruptedJobError("interrupted")
        if beat["cause"]:
            return RankFailureError(beat["cause"])
    if beat["ended"] == "unmet":
        return RankFailureError(f"rank {rank} closed its engine at {where}, and did not wait for others")
    if beat["ended"]:
        return RankFailureError(f"rank {rank} left at {where} without closing its engine")
    if state == "dead" and not beat["has_started"]:
        line = f"rank {rank} ended at {where}, and took no part; see its own output above for the cause"
        return RankFailureError(line)
    if state == "dead":
        return RankFailureError(f"rank {rank} died at {where}; see its own output above for the cause")
    return None


def _stalled_rank_error(
    rank: int, beat: dict[str, Any], state: str, silent_s: float, cpu_s: float, limit_s: float
) -> RankFailureError | None:
    """That a rank which is not dead has not moved for `limit_s`, or for as long as it is to be borne with.

    Args:
        state: of its process, see `process_state`.
        silent_s: since its newest beat was first seen.  cpu_s: that its process has had meanwhile.
    """
    if beat["ended"] or not beat["has_started"]:
        return None
    is_busy = state == "running" and cpu_s > BUSY_SHARE * silent_s
    if silent_s <= max(limit_s, beat["patience_s"], LOAD_LIMIT_S if is_busy else 0.0):
        return None
    where = f"step {beat['step']}, operation {beat['op']}"
    return RankFailureError(f"rank {rank} stalled at {where}: {state}, no heartbeat for {silent_s:.1f} s")


def _flush_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def _leave(
    heartbeat_ref: weakref.ref[Heartbeat], release_ref: weakref.WeakMethod[Callable[[], None]] | None, pid: int
) -> None:
    """What is left to do at the interpreter's end; without the others, who may be anywhere."""
    heartbeat = heartbeat_ref()
    if heartbeat is None or os.getpid() != pid:
        return
    error = _uncaught_error()
    if error is not None:
        lost = heartbeat.explain(TERMINATED_LIMIT_S) if _may_come_from_others(error) else None
        if lost is not None:
            heartbeat.end_process(lost)
        heartbeat.tell(heartbeat._own_failure(error))
        heartbeat._end_watch()
        return
    heartbeat._say_goodbye("left")
    if heartbeat._has_failed:
        return  # the device may wait for those who are gone
    # As far as it goes: there is nobody to tell.
    with contextlib.suppress(Exception):
        release = None if release_ref is None else release_ref()
        if release is not None:
            release()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _ended_by_interrupt(heartbeat: Heartbeat) -> Iterator[None]:
    """Ctrl-C ends the process even if the main thread is blocked among other ranks and cannot handle it."""
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
            # SIG_IGN: the main thread is on its way out.
            if handler in (signal.default_int_handler, signal.SIG_IGN):
                heartbeat.tell(InterruptedJobError("interrupted"))
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
def out_of_memory_is_told(advice: str) -> Iterator[None]:
    """Around what may take more memory of a GPU than there is.

    Raises:
        DoesNotFitError: in place of PyTorch's error, with `advice`, a sentence.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(f"out of memory: {str(error).splitlines()[0]} {advice}") from error


def run_guarded(heartbeat: Heartbeat, work: Callable[[], int], advice: str = "Use more ranks") -> int:
    """Run a command's main part; whatever breaks it, this rank leaves and says why.

    A collective that fails because another rank is gone is reported as that rank's loss. After an error of our own, the
    process ends without meeting the others, who may be anywhere; they name it as the cause.

    Ctrl-C ends every rank with one line and exit code 130, as a shell says it. A program that handles it in its own way
    does not use this function.

    Args:
        advice: on what to do when memory runs out.
    Raises:
        AlspecError: with one rank, as it came; so do other errors.
    """
    with _ended_by_interrupt(heartbeat):
        try:
            try:
                with out_of_memory_is_told(advice):
                    return work()
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends it again
                # Without meeting the others, who were interrupted, too.
                heartbeat.end_process(InterruptedJobError("interrupted"))
        except Exception as error:
            if heartbeat.watching:
                lost = heartbeat.explain(timeout_s=STALL_LIMIT_S + 1) if _may_come_from_others(error) else None
                if isinstance(error, AlspecError):
                    lost = lost or error
                if lost is not None:
                    heartbeat.end_process(lost)
                if not _may_come_from_others(error):
                    heartbeat.end_failed(error)
            heartbeat.end_output()
            raise
    raise AssertionError("unreachable")


def _may_come_from_others(error: BaseException | None) -> bool:
    """Collectives and stores fail with RuntimeError and its kinds in PyTorch; Python's own kinds are ours."""
    return isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError | RecursionError)


def error_on_its_way() -> BaseException | None:
    """What this thread is handling, be it in a `finally` block, or what nobody has caught."""
    return sys.exception() or _uncaught_error()


def _uncaught_error() -> BaseException | None:
    """It has been printed: the interpreter is at its end."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
