"""The tables that people read are those of the measured rows."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tables_are_those_of_the_rows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    subprocess.run([sys.executable, tmp_path / "docs" / "results" / "tables.py"], check=True)
    for name in ("README.md", "docs/results/README.md"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"run docs/results/tables.py: {name} is old"


def test_the_readme_names_files_that_exist() -> None:
    named = [word.strip("`.,;:()") for word in (ROOT / "README.md").read_text().split() if word.startswith("`")]
    paths = [word for word in named if word.endswith((".py", ".jsonl", ".gz", ".png")) and "/" in word]
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists() and not path.startswith("corpus/")] == []
