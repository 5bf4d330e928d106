"""Programs of several ranks: under torchrun for tests of faults, or as plain processes for tests of results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
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


@contextmanager
def default_interrupts() -> Iterator[None]:
    """In this block SIGINT has Python's default handler, also in processes that start here.

    A shell script starts its background jobs with SIGINT ignored, and an ignored signal is inherited.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Job:
    """torchrun with launch/generate.py or another program, its outputs in files, and the processes of its ranks."""

    def __init__(
        self, folder: Path, world_size: int, flags: list[str], program: Path = GENERATE, options: tuple[str, ...] = ()
    ) -> None:
        self._outputs = [folder / "stdout.txt", folder / "stderr.txt"]
        with self._outputs[0].open("w") as stdout, self._outputs[1].open("w") as stderr, default_interrupts():
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
        """The lines that alspec itself has written to stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("alspec: ")]

    def find_ranks(self) -> dict[int, int]:
        """torchrun's child processes by their RANK variable."""
        found = {}
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if parent_of(process) == self.torchrun.pid:
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                rank = next((one[5:] for one in variables if one.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = process
        return found

    def wait_for_tokens(self) -> None:
        """Wait until rank 0 has printed tokens, and a second more, so that a beat has reported a decode step."""
        deadline = time.monotonic() + 90
        while len(self.stdout) < 5:
            assert self.torchrun.poll() is None, self.stderr
            assert time.monotonic() < deadline, f"no tokens within 90 s\n{self.stderr}"
            time.sleep(0.05)
        time.sleep(1.0)
        self.ranks = self.find_ranks()

    def seconds_until_gone(self) -> float:
        """Wait until torchrun and every rank have ended. A zombie has ended."""
        started = time.monotonic()
        while self.torchrun.poll() is None or any(map(is_running, self.ranks.values())):
            assert time.monotonic() - started < 60, f"still running\n{self.stderr}"
            time.sleep(0.05)
        return time.monotonic() - started


def stat_of(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone."""
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
    """A `Job` that is killed at the end of the block."""
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
    """Write a program for torchrun: `PROGRAM`, then `text`."""
    program = folder / "program.py"
    program.write_text(f"{PROGRAM}{text}", encoding="utf-8")
    return program


def run_failing_program(folder: Path, model: Path, text: str, within_s: float = 60.0) -> Job:
    """Run two ranks of a program until they end, which must be with an error."""
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
    """Ports on which nobody listens now.

    Below those that Linux gives to connections, so that no other process is given one before it is used.
    """
    draw, ports = random.SystemRandom(), set()
    while len(ports) < count:
        port = draw.randrange(10_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            ports.add(port)
    return list(ports)


def free_port() -> int:
    """A port on which nobody listens now."""
    return free_ports(1)[0]


def _be_rank(program: Path, arguments: list[str], environment: dict[str, str], stderr: Path) -> None:
    """The main function of a rank's process. It runs a program nearly as Python does.

    Differences: all ranks share one hash seed, and exit handlers do not run.
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
    """Run `program FOLDER ARGUMENTS` on `world_size` processes with torchrun's variables; all must exit with 0."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)} | variables
    # Files, because a full pipe would block a rank, and with it all others.
    outputs = [folder / f"stderr{rank}.txt" for rank in range(world_size)]
    # Fork from a process that has imported torch: the import takes longer than most of what a rank does here.
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
