"""Provenance of a measurement: hardware, versions, revision and command."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["provenance", "versions"]


def versions() -> dict[str, str]:
    """Versions of the software that measurements depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for name in ("alspec", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The git revision of this code, with `-dirty` if files differ from it; None outside of its checkout."""
    # An installed copy may lie in the checkout of another project, which does not track this file.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty")


def _git(*arguments: str) -> str | None:
    """Output of git in this folder; None if it fails or is empty."""
    command, folder = ["git", *arguments], Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def provenance(num_gpus: int, command: str) -> dict[str, Any]:
    """Last fields of every measured row: hardware, versions, revision and command.

    Args:
        num_gpus: GPUs used; with 0 no GPU name is given.
        command: command line that measures the row.
    """
    return {
        "gpu": torch.cuda.get_device_name() if num_gpus else None,
        "num_gpus": num_gpus,
        "versions": versions(),
        "commit": commit(),
        "command": command,
    }
