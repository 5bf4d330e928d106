"""Where the project and the programs that tests start lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tests" / "tools"
PTX = TOOLS / "ptx"
WORKERS = TOOLS / "workers"
SHARED = ROOT.parent / "shared"  # optional material; tests that use it skip where it is absent
