"""The tables that people read are those of the measured rows."""

import json
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


def test_tables_of_decode_steps(tmp_path: Path) -> None:
    """A line for each configuration, a column for each context; the README has captured steps of the 8B shape alone."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)

    def row(shape: str, world: int, context: int, tokens_per_s: float, cuda_graph: bool = True) -> str:
        transport = "symm" if world > 1 else None
        case = {"shape": shape, "world": world, "mode": "off", "transport": transport, "cuda_graph": cuda_graph}
        case |= {"dtype": "bf16", "batch": 1, "context": context, "kv_cache": "bf16", "hit_rate": None, "forced": False}
        rest = {
            "gpu": "NVIDIA H200",
            "num_gpus": world,
            "versions": {"torch": "2.11.0"},
            "command": "launch/latency.py",
        }
        return json.dumps({"case": case, "tokens_per_s": tokens_per_s, "share_of_limit": 0.875} | rest)

    rows = [
        row("llama-3.1-8b", 1, 8192, 100.0),
        row("llama-3.1-8b", 1, 1024, 250.4),
        row("llama-3.1-8b", 1, 8192, 240.0),  # measured again
        row("llama-3.1-8b", 4, 1024, 800.0),
        row("llama-3.1-8b", 4, 1024, 90.0, cuda_graph=False),
        row("llama-3.1-70b", 4, 1024, 100.0),
    ]
    (tmp_path / "docs" / "results" / "decode_step.jsonl").write_text("\n".join(rows) + "\n")
    for _ in range(2):
        subprocess.run([sys.executable, tmp_path / "docs" / "results" / "tables.py"], check=True)
        short = (tmp_path / "README.md").read_text().split("<!-- decode_step -->")[1].split("<!-- /decode_step -->")[0]
        assert [line for line in short.splitlines() if line.startswith("|")] == [
            "| GPUs, off | transport | 1024 | 8192 |",
            "| --- | --- | --- | --- |",
            "| 1 |  | 250 (88%) | 240 (88%) |",
            "| 4 | symm | 800 (88%) |  |",
        ]
    long = (tmp_path / "docs" / "results" / "README.md").read_text()
    assert "| llama-3.1-8b | 4 | off |  | symm | one by one | bf16 | 1 | 90 (88%) |  |" in long
    assert "| llama-3.1-70b | 4 | off |  | symm | captured | bf16 | 1 | 100 (88%) |  |" in long


def test_table_of_caches(tmp_path: Path) -> None:
    """A line for each cache and lambda, at the longest context, with its change against bf16."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)

    def row(cache: str, threshold: str, measure: str, context: int, value: float, depth: float | None = None) -> str:
        case = {"cache": cache, "threshold": threshold, "measure": measure, "context": context, "depth": depth}
        rest = {"gpu": None, "num_gpus": 0, "versions": {"torch": "2.11.0"}, "command": "launch/evaluate.py"}
        return json.dumps({"case": case | {"chunk_size": 128, "dtype": "bf16"}, "value": value, "hit_rate": 0.5} | rest)

    rows = [
        row("bf16", "0.1", "bits per byte", 1024, 9.0),
        row("bf16", "0.1", "bits per byte", 8192, 1.25),
        row("bf16", "0.1", "recall", 8192, 1.0),
        row("turbo4", "0.1", "bits per byte", 8192, 1.26),
        row("turbo4", "0.1", "recall", 8192, 0.995),
        row("turbo4", "0.1", "needle", 8192, 0.9, 0.0),
        row("turbo4", "0.1", "needle", 8192, 0.8, 1.0),
        row("turbo4", "fixed", "bits per byte", 8192, 1.5),
    ]
    (tmp_path / "docs" / "results" / "quality_codecs.jsonl").write_text("\n".join(rows) + "\n")
    subprocess.run([sys.executable, tmp_path / "docs" / "results" / "tables.py"], check=True)
    text = (tmp_path / "docs" / "results" / "README.md").read_text()
    section = text.split("## Demo checkpoint over caches")[1].split("## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == [
        "| lambda | cache | bits per byte | change | fact recalled | change | needle recalled | change | hit rate |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0.1 | bf16 | 1.2500 |  | 100.0% |  |  |  | 0.500 |",
        "| 0.1 | turbo4 | 1.2600 | +0.80% | 99.5% | -0.5 points | 85.0% |  | 0.500 |",
        "| fixed layers | turbo4 | 1.5000 |  |  |  |  |  | 0.500 |",
    ]


def test_the_readme_names_files_that_exist() -> None:
    named = [word.strip("`.,;:()") for word in (ROOT / "README.md").read_text().split() if word.startswith("`")]
    paths = [word for word in named if word.endswith((".py", ".jsonl", ".gz", ".png")) and "/" in word]
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists() and not path.startswith("corpus/")] == []
