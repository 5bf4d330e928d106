"""Programs of several ranks: under torchrun for tests of faults, with their outputs and processes, or by themselves."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from paths import ROOT

GENERATE = ROOT / "launch" / "generate.py"
GONE_WITHIN_S = 10.0
LONG = ["--prompt-ids", "1,2,3,4,5", "--max-new-tokens", "100000", "--ignore-eos", "--transport", "gloo"]


class Job:
    """torchrun with launch/generate.py or another program, its outputs in files, and the processes of its ranks."""

    def __init__(
        self, folder: Path, world_size: int, flags: list[str], program: Path = GENERATE, options: tuple[str, ...] = ()
    ) -> None:
        self._outputs = [folder / "stdout.txt", folder / "stderr.txt"]
        with self._outputs[0].open("w") as stdout, self._outputs[1].open("w") as stderr:
            torchrun = [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",))]
            self.torchrun = subprocess.Popen(
                [*torchrun, "--nproc-per-node", str(world_size), str(program), *flags],
                stdout=stdout,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.ranks: dict[int, int] = {}  # rank -> process

    @property
    def stdout(self) -> str:
        return self._outputs[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._outputs[1].read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Those that alspec itself has written to stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("alspec: ")]

    def find_ranks(self) -> dict[int, int]:
        """torchrun's child processes by their RANK."""
        found = {}
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if parent_of(process) == self.torchrun.pid:
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                rank = next((one[5:] for one in variables if one.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = process
        return found

    def wait_for_tokens(self) -> None:
        """Until rank 0 has printed some and a second more, for a heartbeat that tells of a decode step."""
        deadline = time.monotonic() + 90
        while len(self.stdout) < 5:
            assert self.torchrun.poll() is None, self.stderr
            assert time.monotonic() < deadline, f"no tokens within 90 s\n{self.stderr}"
            time.sleep(0.05)
        time.sleep(1.0)
        self.ranks = self.find_ranks()

    def seconds_until_gone(self) -> float:
        """Wait for torchrun and every rank to end; a process that only waits to be reaped has ended."""
        started = time.monotonic()
        while self.torchrun.poll() is None or any(map(is_running, self.ranks.values())):
            assert time.monotonic() - started < 60, f"still running\n{self.stderr}"
            time.sleep(0.05)
        return time.monotonic() - started


def stat_of(process: int) -> list[str]:
    """State and parent onwards of /proc/PID/stat; empty for a process that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(process: int) -> int | None:
    stat = stat_of(process)
    return int(stat[1]) if stat else None


def is_running(process: int) -> bool:
    stat = stat_of(process)
    return bool(stat) and stat[0] not in "ZX"


@contextmanager
def job(folder: Path, world_size: int, flags: list[str], *program: Any) -> Iterator[Job]:
    started = Job(folder, world_size, flags, *program)
    try:
        yield started
    finally:
        for process in {**started.find_ranks(), **started.ranks}.values():
            if parent_of(process) == started.torchrun.pid:
                os.kill(process, signal.SIGKILL)
        started.torchrun.kill()
        started.torchrun.wait()


def write_program(folder: Path, text: str) -> Path:
    """A program for torchrun, after what all of them need."""
    program = folder / "program.py"
    program.write_text(f"{PROGRAM}{text}", encoding="utf-8")
    return program


def failed(folder: Path, model: Path, text: str, within_s: float = 60.0) -> Job:
    """Two ranks of a program, which ends with an error."""
    with job(folder, 2, [str(model)], write_program(folder, text)) as running:
        assert running.torchrun.wait(timeout=within_s) != 0, running.stderr
    return running


PROGRAM = """
import asyncio, os, signal, sys, threading, time
from alspec import Engine, SamplingConfig
from alspec.runtime.faults.guard import guarded
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def stream(engine, length=3):
    return engine.stream("The road", SamplingConfig(max_new_tokens=length, ignore_eos=True))
engine = Engine.from_pretrained(sys.argv[1], transport="gloo")
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _be_rank(program: Path, arguments: list[str], environment: dict[str, str], stderr: Path) -> None:
    """What a rank's process does: it runs a program nearly as Python does.

    Ranks share one seed of hashes, and none runs what it has registered for its exit; those of torchrun's tests do.
    """
    with stderr.open("w") as output:
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)  # too late for OMP_NUM_THREADS
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def run_ranks(
    program: Path, world_size: int, folder: Path, *arguments: str, timeout_s: float, **variables: str
) -> None:
    """`program FOLDER ARGUMENTS` on so many processes, with torchrun's variables and others; all have to end well."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)} | variables
    # In files: a pipe that is not read yet could hold up a rank, and so all of them.
    outputs = [folder / f"stderr{rank}.txt" for rank in range(world_size)]
    # Processes of one that has imported torch: to import it takes a rank longer than most of what it does here.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch"])
    ranks = []
    try:
        for rank, output in enumerate(outputs):
            output.touch()
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            each = server.Process(target=_be_rank, args=(program, [str(folder), *arguments], own, output))
            each.start()
            ranks.append(each)
        deadline = time.monotonic() + timeout_s
        for each in ranks:
            each.join(max(deadline - time.monotonic(), 0))
        codes = [each.exitcode for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.join()
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(output.read_text() for output in outputs)
