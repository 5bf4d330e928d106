"""A pair on two hosts, each with its own torchrun: a rank that is killed or fails on either side is named on both."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
import torch.distributed as dist
from jobs import GENERATE, GONE_WITHIN_S, LONG, Job, free_port, is_running, job
from paths import WORKERS
from tiers import fast

PROGRAM = WORKERS / "own_host.py"


@contextmanager
def two_hosts(
    folder: Path,
    ranks_of_host: int,
    flags: list[str],
    own: Mapping[int, list[str]] = MappingProxyType({}),
    port: int = 0,
) -> Iterator[tuple[Job, Job]]:
    """launch/generate.py as a job on two hosts. Each sees only its own processes.

    Args:
        own: host -> flags of this host alone, after the others.
        port: of the store; 0: any.
    """
    port = port or free_port()
    with ExitStack() as stack:
        hosts = []
        for host in range(2):
            place = folder / f"host{host}"
            place.mkdir()
            options = (
                "--nnodes",
                "2",
                "--node-rank",
                str(host),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(port),
            )
            started = job(place, ranks_of_host, [str(GENERATE), *flags, *own.get(host, [])], PROGRAM, options)
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
    """Each host is a group; the first one has the job's store. Over Gloo the groups change roles in each layer."""
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


def ends(host: Job, exit_code: int) -> str:
    """Wait until a host with one rank has ended, with this exit code and one line; returns the line."""
    host.torchrun.wait(timeout=60)
    assert len(host.lines) == 1, host.stderr
    assert host.lines[0].startswith(f"alspec: exit {exit_code}: ")
    assert re.findall(r"exitcode  : (-?\d+) ", host.stderr) == [str(exit_code)]
    assert f'File "{GENERATE}"' not in host.stderr, "alspec shows a traceback"
    return host.lines[0].removeprefix(f"alspec: exit {exit_code}: ")


# What one host gives wrong, and what it then says.
WRONG = {
    "model": (["--model", "/nowhere"], "/nowhere: expected a model folder, found nothing"),
    "flag": (["--temperature", "-1"], "flags: --temperature: expected 0 or more, found '-1'"),
}
MISTAKES = [(host, what) for host in (0, 1) for what in WRONG]


@pytest.mark.slow
@pytest.mark.parametrize(("host", "what"), fast(MISTAKES, keep=[(1, "model")]))
def test_a_mistake_on_one_host_is_named_on_the_other(host: int, what: str, tiny_folder: Path, tmp_path: Path) -> None:
    """A rank that fails before it has an engine has no heartbeat, and its host may have the job's store."""
    wrong, line = WRONG[what]
    flags = [*LONG, "--model", str(tiny_folder), "--speculation", "paired"]
    with two_hosts(tmp_path, 1, flags, {host: wrong}) as hosts:
        deadline = time.monotonic() + 60
        while not any(each.lines for each in hosts) and time.monotonic() < deadline:
            time.sleep(0.05)
        started = time.monotonic()
        assert ends(hosts[host], 2).startswith(line)
        found = ends(hosts[1 - host], 5)
        assert time.monotonic() - started < GONE_WITHIN_S
    named = f"rank {host} ended before it had an engine: {line}"
    # A host that is late finds the store gone.
    gone = r"the job's key-value store is gone.*: rank 0 or torchrun on its host has ended"
    assert found.startswith(named) or (host == 0 and re.fullmatch(gone, found)), found


@pytest.mark.slow
@pytest.mark.parametrize("rank", fast([0, 1], keep=[0]))
def test_a_rank_that_is_killed_before_the_model_loads_is_named(rank: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 0 reads a prompt that does not come, and rank 1 waits for it."""
    prompt, port = tmp_path / "prompt", free_port()
    os.mkfifo(prompt)
    flags = [
        "--transport",
        "gloo",
        "--model",
        str(tiny_folder),
        "--speculation",
        "paired",
        "--prompt-file",
        str(prompt),
    ]
    with two_hosts(tmp_path, 1, flags, port=port) as hosts:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        store.wait([f"attempt-0/alspec-0/beat/{each}" for each in range(2)])
        time.sleep(1.0)  # for a beat that the other rank reads
        process = hosts[rank].find_ranks()[rank]
        os.kill(process, signal.SIGKILL)
        started = time.monotonic()
        found = ends(hosts[1 - rank], 5)
        hosts[rank].torchrun.wait(timeout=60)
        assert time.monotonic() - started < GONE_WITHIN_S
        assert not is_running(process)
        assert hosts[rank].lines == []
    where = f"rank {rank} (died|stalled) at step 0, operation start"
    assert re.match(where, found), found
