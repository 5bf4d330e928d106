"""Errors that users see; each kind has its exit code."""

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
    """Wrong flags, configuration, checkpoint or prompt. Raised before device memory is allocated."""

    exit_code = 2


class DoesNotFitError(AlspecError):
    """Weights, cache and buffers need more memory than is available."""

    exit_code = 3
    largest_context: int | None = None  # tokens for which they would fit, where that is known


class BadNumbersError(AlspecError):
    """NaN or Inf in the logits (names rank, layer and step), or a wrong result that a benchmark found."""

    exit_code = 4


class RankFailureError(AlspecError):
    """A rank of the job died or stalled; names rank, step and operation."""

    exit_code = 5


class CannotConnectError(RankFailureError, RuntimeError):
    """The ranks cannot reach each other, perhaps because a rank has died."""


class InterruptedJobError(AlspecError):
    """Ctrl-C on this rank or another one. The exit code is the one that shells use."""

    exit_code = 130


def one_line(error: Exception) -> str:
    """First line of an error's message, up to 200 characters; the error's type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0][:200] if lines else type(error).__name__).rstrip(".;")


def report(error: AlspecError) -> int:
    """Flush stdout, then print the error in one line on stderr. Returns its exit code."""
    sys.stdout.flush()
    return print_error(error)


def print_error(error: AlspecError) -> int:
    """Print the error in one line on stderr. Returns its exit code.

    Every rank prints, because torchrun exits with 1 whatever the exit code of a rank is.
    """
    line = f"alspec: exit {error.exit_code}: {' '.join(str(error).split())}"
    tell_torchrun(line)
    # Write text and newline at once: ranks share stderr, and print() may write the newline separately.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    return error.exit_code


def tell_torchrun(line: str) -> None:
    """Write `line` to torchrun's error file, if possible.

    torchrun's summary at the end then shows it for the rank that failed first.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"py_callstack": line, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        # Write, then rename: torchrun fails on half a file, and this process may be killed at any time.
        part = f"{path}.{os.getpid()}"
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": details}}, file)
        os.replace(part, path)


def show(value: object, limit: int = 100) -> str:
    """`repr` of an untrusted value in one line of up to `limit` characters."""
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return "an integer too long to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
