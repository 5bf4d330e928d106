"""A rank that fails before it has an engine, and so no heartbeat: it says why in the store, for the ranks that wait."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
from collections.abc import Iterator

import torch.distributed as dist

from alspec.errors import RankFailureError, UserError
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import agent_hosts_store, connect_store

__all__ = ["check_starts", "new_job", "publish_failed_command"]

CAUSE = "failed_start/cause"  # key: the line of the first rank that failed
LINGER_S = 3.0  # on other hosts, ranks that import at the same speed have created their engines by then

_JOBS = itertools.count()
_begun: list[str] = []  # jobs of this process


@contextlib.contextmanager
def new_job() -> Iterator[str]:
    """Context that creates an engine; yields the prefix of its keys in the store.

    Engines of one process have keys of their own, and ranks create them in the same order. After an error, the ranks
    that wait for this one in the job end.
    """
    job = f"alspec-{next(_JOBS)}"
    _begun.append(job)
    try:
        yield job
    except Exception as error:
        _publish(error, job)
        raise


def publish_failed_command(error: Exception) -> None:
    """Publish the error that ends a command, unless it has begun to create an engine: then others know already."""
    if not _begun:
        _publish(error, "alspec-0")


def check_starts(store: dist.Store, placement: Placement) -> None:
    """Check that no rank has failed to create its engine.

    Args:
        store: of the job.
        placement: this rank's.
    Raises:
        RankFailureError: one has; names the first of them and its error.
    """
    if store.check([CAUSE]):
        store.set(_ended(placement.rank), "")
        raise RankFailureError(store.get(CAUSE).decode())


def _ended(rank: int) -> str:
    return f"failed_start/{rank}"


def _publish(error: Exception, job: str) -> None:
    if isinstance(error, RankFailureError):  # the store cannot be reached
        return
    with contextlib.suppress(UserError, RankFailureError, dist.DistError):
        placement = Placement.from_environment()
        # Without torchrun rank 0 hosts the store, from its first engine on.
        if placement.world_size == 1 or not agent_hosts_store():
            return
        store = dist.PrefixStore(job, connect_store(placement))
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        what = " ".join(f"{kind}{error}".split())[:300]
        store.compare_set(CAUSE, "", f"rank {placement.rank} ended before it had an engine: {what}")
        store.set(_ended(placement.rank), "")
        if 0 in placement.host_ranks and not placement.is_one_host:
            atexit.register(_linger, store, placement, time.monotonic() + LINGER_S)


def _linger(store: dist.Store, placement: Placement, deadline: float) -> None:
    """Let ranks of other hosts read why this one ends: the store ends with torchrun on this host."""
    elsewhere = [_ended(rank) for rank in range(placement.world_size) if rank not in placement.host_ranks]
    with contextlib.suppress(dist.DistError):
        while time.monotonic() < deadline and not store.check(elsewhere):
            time.sleep(0.05)
