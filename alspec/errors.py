"""The errors a user can meet, each with the exit code of its kind."""

from __future__ import annotations

import sys

__all__ = ["AlspecError", "BadNumbersError", "DoesNotFitError", "RankFailureError", "UserError", "report"]


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
    """NaN or Inf reached the logits; names rank, layer and step."""

    exit_code = 4


class RankFailureError(AlspecError):
    """A rank of the job died or stalled; names rank, step and operation."""

    exit_code = 5


def report(error: AlspecError) -> int:
    """Print the one line of an error; returns its exit code. Every rank prints: torchrun flattens exit codes."""
    sys.stdout.flush()
    # One write with its newline: ranks share stderr, and print() may write the newline by itself.
    sys.stderr.write(f"alspec: exit {error.exit_code}: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    return error.exit_code
