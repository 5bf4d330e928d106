"""The installed commands. Like the scripts, they handle Ctrl-C before the imports, which take seconds."""

from __future__ import annotations

from functools import partial
from importlib import import_module

from alspec.launch.terminal.output import exit_on_interrupt

__all__ = ["bench_kernels", "chat", "doctor", "evaluate", "generate", "latency", "plot_trace"]


def _run(module: str) -> int:
    exit_on_interrupt()
    code: int = import_module(f"alspec.launch.{module}").main()
    return code


bench_kernels = partial(_run, "bench_kernels")
chat = partial(_run, "chat")
doctor = partial(_run, "doctor")
evaluate = partial(_run, "evaluate")
generate = partial(_run, "generate")
latency = partial(_run, "latency")
plot_trace = partial(_run, "plot_trace")
