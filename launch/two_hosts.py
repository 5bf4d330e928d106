"""Run a command as on two hosts, for which this machine stands: `python launch/two_hosts.py launch/latency.py FLAGS`.

Each host is a torchrun that sees GPUs of its own. Between the hosts there are sockets only, over the loopback
interface; inside a host GPUs reach each other as always.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from alspec.errors import UserError
from alspec.launch.terminal.flags import Parser
from alspec.launch.terminal.output import exit_code

__all__ = ["HOSTS", "host_command", "host_environment", "main"]

HOSTS = 2


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit code."""
    with exit_code(argv) as outcome:
        outcome.code = _run(argv)
    return outcome.code


def host_command(host: int, num_ranks: int, port: int, program: list[str]) -> list[str]:
    """The torchrun of one host.

    Args:
        host: 0 or 1.
        num_ranks: on each host.
        port: of host 0, where the hosts meet.
        program: a script and its arguments.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--node-rank", str(host)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", str(num_ranks)]
    return command + program


def host_environment(host: int, devices: str) -> dict[str, str]:
    """What one host's variables are beside those of this process.

    Args:
        devices: its GPUs, for `CUDA_VISIBLE_DEVICES`; empty for a host without GPUs.
    """
    # NCCL takes ranks with different host ids for ranks on different hosts.
    variables = {"NCCL_HOSTID": f"host-{host}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables | {"CUDA_VISIBLE_DEVICES": devices}


def _run(argv: list[str] | None) -> int:
    parser = Parser(prog="two_hosts", description="Run a command as on two hosts, for which this machine stands.")
    parser.add_argument(
        "--nproc-per-node", type=int, metavar="T", help="ranks on each host, each with a GPU; default: half of the GPUs"
    )
    parser.add_argument("--master-port", type=int, metavar="PORT", help="where the hosts meet; default: a free one")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script, such as launch/latency.py, and its flags")
    args = parser.parse_args(argv)
    if not args.program or not Path(args.program[0]).is_file():
        found = repr(args.program[0]) if args.program else "nothing"
        raise UserError(f"flags: expected a script and its flags, such as launch/latency.py, found {found}")
    num_gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))
    devices = visible.split(",")[:num_gpus]
    num_ranks = args.nproc_per_node if args.nproc_per_node is not None else max(1, num_gpus // HOSTS)
    if num_ranks < 1:
        raise UserError(f"flags: --nproc-per-node: expected at least 1, found {num_ranks}")
    if num_gpus and HOSTS * num_ranks > num_gpus:
        raise UserError(
            f"flags: --nproc-per-node: {HOSTS} hosts of {num_ranks} ranks need {HOSTS * num_ranks} GPUs, found "
            f"{num_gpus}; CUDA_VISIBLE_DEVICES= runs them on CPUs"
        )
    port = args.master_port or _free_port()
    started: list[subprocess.Popen[Any]] = []
    signal.signal(signal.SIGTERM, _end)
    try:
        for host in range(HOSTS):
            variables = host_environment(host, ",".join(devices[host * num_ranks : (host + 1) * num_ranks]))
            command = host_command(host, num_ranks, port, args.program)
            started.append(subprocess.Popen(command, env=os.environ | variables))
        codes = [process.wait() for process in started]
    finally:
        # Ctrl-C reaches the torchruns, too, which end their ranks.
        for process in started:
            if process.poll() is None:
                process.terminate()
        for process in started:
            process.wait()
    return next((code for code in codes if code), 0)


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
