"""A copy of docs/results and of the files that its tables are written to, and its scripts, run in this process."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from unittest import mock

from paths import ROOT

# The scripts import these from the package: imported here, they stay the same modules for other tests.
import alspec.config
import alspec.latency_model
import alspec.launch.plots  # noqa: F401

__all__ = ["copy_results", "make_tables", "run_script"]


def copy_results(folder: Path) -> Path:
    """Copy what the tables read and write into `folder`."""
    shutil.copytree(ROOT / "docs" / "results", folder / "docs" / "results")
    shutil.copy(ROOT / "README.md", folder)
    for page in ("performance.md", "turbo_attention.md", "recall.md", "drafts.md", "weights.md"):
        shutil.copy(ROOT / "docs" / page, folder / "docs")
    return folder


def run_script(project: Path, name: str, *arguments: str) -> None:
    """Run a script of the copy as `python docs/results/NAME ARGUMENTS` does."""
    folder = project / "docs" / "results"
    paths = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")]
    siblings = [".".join(path.parts) for path in paths] + ["sections"]
    try:
        with (
            mock.patch.object(sys, "path", [str(folder), *sys.path]),
            mock.patch.object(sys, "argv", [name, *arguments]),
        ):
            _forget(siblings)
            runpy.run_path(str(folder / name), run_name="__main__")
    finally:
        _forget(siblings)


def make_tables(project: Path) -> list[str]:
    """Make the tables; returns the lines of docs/results/README.md."""
    run_script(project, "tables.py")
    return (project / "docs" / "results" / "README.md").read_text().splitlines()


def _forget(modules: list[str]) -> None:
    """Forget modules of one copy, which know its folder."""
    for module in modules:
        sys.modules.pop(module, None)
