"""Runner of the installation checks: every rank runs them in the same order, each under a deadline.

A check takes a `Scope` and returns a `Check`. Ranks share each outcome before the next check. A check that fails or is
skipped does not stop the others. Only a rank that does not return ends the job, with exit code 5 and its name. The
checks themselves are in diagnostics.py.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist

from alspec.config import EngineConfig
from alspec.errors import CannotConnectError, RankFailureError, UserError, one_line
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store
from alspec.runtime.engine.choices import choose_device
from alspec.runtime.faults.heartbeat import Heartbeat

__all__ = ["CHECKS", "Check", "Scope", "check", "run_checks", "skip"]

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class Check:
    """The outcome of one check on one rank."""

    name: str
    status: Literal["pass", "fail", "skip"]
    found: str
    advice: str = ""
    exit_code: int = 0  # exit code of a failure: 2 if the setup is wrong, 5 if the rank's work failed


@dataclass
class Scope:
    """What this rank checks: its own GPU, or with one rank every GPU of the host."""

    placement: Placement
    transport_name: str
    debug: bool
    store: dist.Store | None
    num_gpus: int
    devices: list[torch.device]
    transport: Transport | None = None  # set when the ranks are connected

    @classmethod
    def open(cls, placement: Placement, transport_name: str, debug: bool) -> Scope:
        """Find the GPUs and the job's store."""
        # NCCL and symmetric memory read these when they start. No check may use NVLink multicast.
        os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        own = range(num_gpus) if placement.world_size == 1 else [placement.local_rank]
        devices = [torch.device("cuda", index) for index in own if index < num_gpus and transport_name != "gloo"]
        store = connect_store(placement) if placement.world_size > 1 else None
        return cls(placement, transport_name, debug, store, num_gpus, devices)

    def each_gpu(self, probe: Callable[[torch.device], _ResultT]) -> list[_ResultT]:
        """Run `probe` with each GPU as the current one, and return the results; an error names the GPU."""
        self.need_gpu()
        results = []
        for device in self.devices:
            try:
                with torch.cuda.device(device):
                    results.append(probe(device))
            except _SkipError:
                raise
            except Exception as error:
                raise RuntimeError(f"{device}: {one_line(error)}") from error
        return results

    def need_gpu(self) -> None:
        """Skip the check if there is no GPU."""
        if not self.devices:
            skip("--transport gloo" if self.num_gpus and self.transport_name == "gloo" else "no CUDA GPU here")

    def need_ranks(self) -> dist.Store:
        """Return the job's store; skip the check if there is only one rank."""
        if self.store is None and self.num_gpus == 1:
            skip("one GPU, nothing to connect")
        if self.store is None:
            skip(f"start with torchrun --standalone --nproc-per-node {self.num_gpus or 2} launch/doctor.py")
        return self.store

    def connect(self, backend: str) -> Transport:
        """Connect all ranks as the engine does; skips the check if the engine would use another backend."""
        if self.transport_name not in ("auto", backend):
            skip(f"--transport {self.transport_name}")
        config = EngineConfig.model_validate({"transport": self.transport_name})
        device, chosen, _ = choose_device(config, self.placement)
        if chosen != backend:
            skip(f"ranks here use {chosen}")
        store = self.need_ranks()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            self.transport = Transport(self.placement, device, backend, store)
        except CannotConnectError as error:
            raise error.__cause__ or error from None  # the check has its own advice
        return self.transport


class _SkipError(Exception):
    """A check that cannot run here, with the reason."""


def skip(reason: str) -> NoReturn:
    """End a check that cannot run here."""
    raise _SkipError(reason)


# In order of definition, which is the order of the run. Checks that need other ranks are last, because a hang ends the
# job.
CHECKS: dict[str, Callable[[Scope], Check]] = {}


def check(name: str, advice: str) -> Callable[[Callable[[Scope], str]], Callable[[Scope], Check]]:
    """Decorator that registers a function as a check.

    The function returns what it found, or raises. A `UserError` means that the setup is wrong.

    Args:
        name: of the check.
        advice: what to do if it fails and its error has no advice.
    """

    def register(find: Callable[[Scope], str]) -> Callable[[Scope], Check]:
        @functools.wraps(find)
        def run(scope: Scope) -> Check:
            try:
                return Check(name, "pass", find(scope))
            except _SkipError as reason:
                return Check(name, "skip", str(reason))
            except UserError as error:
                found, _, remedy = str(error).partition("; ")
                return Check(name, "fail", found, remedy or advice, UserError.exit_code)
            except Exception as error:
                if scope.debug:
                    traceback.print_exc()
                return Check(name, "fail", one_line(error), advice, RankFailureError.exit_code)

        CHECKS[name] = run
        return run

    return register


def run_checks(
    placement: Placement, transport_name: str, deadline_s: float, heartbeat: Heartbeat, debug: bool
) -> Iterator[list[Check]]:
    """Run every check; yields its outcomes on all ranks, in rank order.

    Args:
        placement: this rank's.
        transport_name: value of --transport.
        deadline_s: longest time of a check.
        heartbeat: this rank's; it is started and stopped here.
        debug: print tracebacks.
    Raises:
        RankFailureError: another rank did not return from a check. A rank that hangs in one ends its own process.
    """
    rank = placement.rank
    with _deadline(heartbeat, f"rank {rank} stalled before the first check", deadline_s):
        scope = Scope.open(placement, transport_name, debug)
        heartbeat.start()
    for name, run in CHECKS.items():
        heartbeat.mark(0, f"check of {name}", -1, publish=True)
        with _deadline(heartbeat, f"rank {rank} stalled in the check of {name}", deadline_s):
            outcome = run(scope)
        yield _share(scope, outcome, deadline_s)
    with _deadline(heartbeat, f"rank {rank} stalled while the process groups ended", deadline_s):
        heartbeat.stop()
        # The checks have released their graphs and packet buffers; the process groups end last.
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _deadline(heartbeat: Heartbeat, what: str, seconds: float) -> Iterator[None]:
    """End the process if the block takes longer. A thread does it, because the block may be inside a blocking call."""
    error = RankFailureError(f"{what} for {seconds:g} s; set NCCL_DEBUG=INFO to see more, or a longer --deadline")
    timer = threading.Timer(seconds, heartbeat.end_process, [error])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _share(scope: Scope, outcome: Check, deadline_s: float) -> list[Check]:
    """Exchange the outcome of this check; returns the outcomes of all ranks.

    A rank that failed alone may have left the others inside a collective, which only their deadline ends. A failed rank
    waits less than that deadline, so that its own error is reported first; the other ranks wait longer.
    """
    rank, store = scope.placement.rank, scope.store
    if store is None:
        return [outcome]
    failed = outcome.status == "fail"
    limit_s = deadline_s / 2 if failed else deadline_s + 10
    ends = time.monotonic() + limit_s
    store.set(f"alspec/check/{outcome.name}/{rank}", json.dumps(asdict(outcome)))
    outcomes = []
    for peer in range(scope.placement.world_size):
        key = f"alspec/check/{outcome.name}/{peer}"
        while not store.check([key]):
            if time.monotonic() > ends:
                late = f"rank {peer} stalled in the check of {outcome.name} for {limit_s:g} s"
                own = f"rank {rank} failed in the check of {outcome.name}: {outcome.found}; then {late}"
                raise RankFailureError(own if failed else late)
            time.sleep(0.01)
        outcomes.append(Check(**json.loads(store.get(key))))
    return outcomes
