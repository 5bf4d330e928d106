"""The errors a user can meet, each with the exit code of its kind."""

from __future__ import annotations

__all__ = ["AlspecError", "BadNumbersError", "DoesNotFitError", "RankFailureError", "UserError"]


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
