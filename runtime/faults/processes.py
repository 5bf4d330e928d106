"""State of the processes that other ranks publish in their beats: dead, stopped or running, and their CPU time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Any

__all__ = ["born", "host", "kill_stalled", "process_state"]


def host() -> str:
    """Return an identifier of this boot and PID namespace. Process ids can be compared only if it is equal."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
            return f"{boot_id.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # unknown: differs from the identifier of every other process


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


def born(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot. It tells apart processes that reuse an id."""
    try:
        return _stat(pid)[19]
    except OSError:
        return ""


def process_state(beat: dict[str, Any]) -> tuple[str, float]:
    """State and CPU seconds of the process that published a beat.

    Returns:
        `dead`, `stopped` or `running` for a process of this host; `silent` (and 0) for one of another host.
    """
    if beat["host"] != host():
        return "silent", 0.0
    try:
        stat = _stat(beat["pid"])
    except (FileNotFoundError, ProcessLookupError):
        return "dead", 0.0
    except OSError:
        return "silent", 0.0
    if stat[19] != beat["born"]:
        return "dead", 0.0
    state = {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(stat[0], "running")
    return state, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def kill_stalled(beat: dict[str, Any]) -> None:
    """Kill a stalled process of this host: while it is stopped it ignores torchrun's SIGTERM, for up to 30 s."""
    if beat["host"] == host() and beat["born"] == born(beat["pid"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(beat["pid"], signal.SIGKILL)
