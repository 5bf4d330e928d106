"""Folders of the project, and of the programs that tests start."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
PTX = TOOLS / "ptx"
WORKERS = TOOLS / "workers"
SHARED = ROOT.parent / "shared"  # optional; tests that need it are skipped without it
