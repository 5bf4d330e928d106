"""Where a measurement comes from: hardware, versions, revision and command."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["provenance", "versions"]


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for name in ("alspec", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """The revision measured, where this code stands in its git checkout; `-dirty` where files differ from it."""
    # Of an installed copy, the checkout around it may be somebody else's: there this file is not tracked.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty")


def _git(*arguments: str) -> str | None:
    """What git says in this folder; None where it fails."""
    command, folder = ["git", *arguments], Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def provenance(num_gpus: int, command: str) -> dict[str, Any]:
    """The end of every measured row: where, with what and how it was made; on this rank's GPU, if it used any."""
    return {
        "gpu": torch.cuda.get_device_name() if num_gpus else None,
        "num_gpus": num_gpus,
        "versions": versions(),
        "commit": commit(),
        "command": command,
    }
