"""A pair on two hosts, each with its own torchrun: a rank that is killed on either side is named on both."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from jobs import GENERATE, GONE_WITHIN_S, LONG, Job, free_port, job
from paths import WORKERS
from tiers import fast

PROGRAM = WORKERS / "own_host.py"


@contextmanager
def two_hosts(folder: Path, ranks_of_host: int, flags: list[str]) -> Iterator[tuple[Job, Job]]:
    """launch/generate.py as a job on two hosts. Each sees only its own processes."""
    port = str(free_port())
    with ExitStack() as stack:
        hosts = []
        for host in range(2):
            place = folder / f"host{host}"
            place.mkdir()
            options = ("--nnodes", "2", "--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", port)
            started = job(place, ranks_of_host, [str(GENERATE), *flags], PROGRAM, options)
            hosts.append(stack.enter_context(started))
        yield hosts[0], hosts[1]


# Ranks of each host, the rank that gets the signal, the signal.
LOST = [(2, 0, signal.SIGKILL), (2, 1, signal.SIGKILL), (2, 2, signal.SIGKILL), (2, 3, signal.SIGKILL)]
LOST += [(1, 0, signal.SIGKILL), (1, 1, signal.SIGKILL), (2, 1, signal.SIGSTOP), (2, 3, signal.SIGSTOP)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_of_host", "rank", "sent"),
    fast(LOST, keep=[(2, 1, signal.SIGKILL)]),
    ids=[f"{n}+{n}-{sent.name}-rank{rank}" for n, rank, sent in LOST],
)
def test_a_rank_that_is_killed_or_stopped_is_named_on_both_hosts(
    tiny_folder: Path, tmp_path: Path, ranks_of_host: int, rank: int, sent: signal.Signals
) -> None:
    """Group 0 verifies on the first host, which has the job's store; group 1 speculates on the second one."""
    flags = [*LONG, "--model", str(tiny_folder), "--speculation", "paired"]
    with two_hosts(tmp_path, ranks_of_host, flags) as hosts:
        hosts[0].wait_for_tokens()
        hosts[1].ranks = hosts[1].find_ranks()
        processes = hosts[0].ranks | hosts[1].ranks
        assert sorted(processes) == list(range(2 * ranks_of_host))
        os.kill(processes[rank], sent)
        started = time.monotonic()
        for host in hosts:
            host.seconds_until_gone()
            assert host.torchrun.returncode != 0
        seconds = time.monotonic() - started
        lines = [[line for line in host.lines if line.startswith("alspec: exit")] for host in hosts]
        assert seconds < GONE_WITHIN_S
        named = [
            re.match(rf"alspec: exit 5: rank {rank} (died|stalled) at step (\d+), operation \w+", line)
            for line in [*lines[0], *lines[1]]
        ]
        assert named
        assert all(named), lines
        assert all(int(match[2]) >= 1 for match in named if match)
        # A host whose only rank is gone says nothing.
        for host, own in enumerate(lines):
            assert own or (ranks_of_host == 1 and host == rank), lines
