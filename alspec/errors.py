"""The errors a user can meet, each with the exit code of its kind."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

__all__ = [
    "AlspecError",
    "BadNumbersError",
    "CannotConnectError",
    "DoesNotFitError",
    "InterruptedJobError",
    "RankFailureError",
    "UserError",
    "one_line",
    "print_error",
    "report",
    "show",
    "tell_torchrun",
]


class AlspecError(Exception):
    """Base of every error that ends a command with one line and an exit code."""

    exit_code = 1


class UserError(AlspecError, ValueError):
    """What the user gave is wrong: flags, configuration, checkpoint or prompt. Raised before device memory is taken."""

    exit_code = 2


class DoesNotFitError(AlspecError):
    """Weights, cache and buffers need more memory than there is."""

    exit_code = 3


class BadNumbersError(AlspecError):
    """NaN or Inf reached the logits (names rank, layer and step), or a result that a bench checks is wrong."""

    exit_code = 4


class RankFailureError(AlspecError):
    """A rank of the job died or stalled; names rank, step and operation."""

    exit_code = 5


class CannotConnectError(RankFailureError, RuntimeError):
    """The ranks do not reach each other; a rank that is gone may be why."""


class InterruptedJobError(AlspecError):
    """Ctrl-C, on this rank or another one; the exit code is a shell's."""

    exit_code = 130


def one_line(error: Exception) -> str:
    """What an error says, in up to 200 characters and never none: its kind, if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0][:200] if lines else type(error).__name__).rstrip(".;")


def report(error: AlspecError) -> int:
    """Print the one line of an error, after what stdout still holds; returns its exit code."""
    sys.stdout.flush()
    return print_error(error)


def print_error(error: AlspecError) -> int:
    """Print the one line of an error; returns its exit code. Every rank prints: torchrun flattens exit codes."""
    line = f"alspec: exit {error.exit_code}: {' '.join(str(error).split())}"
    tell_torchrun(line)
    # One write with its newline: ranks share stderr, and print() may write the newline by itself.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    return error.exit_code


def tell_torchrun(line: str) -> None:
    """Have torchrun's last lines, which tell of the rank that failed first, show this one, if that can be done."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": line, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        # torchrun fails on half a file, and this process may be killed at any time.
        part = f"{path}.{os.getpid()}"
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": details}}, file)
        os.replace(part, path)


def show(value: object, limit: int = 100) -> str:
    """`repr` of an untrusted value, in one line of up to `limit` characters."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except ValueError:  # Python writes up to 4300 digits
        return "an integer too long to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
