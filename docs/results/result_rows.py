"""The measured rows of this folder, and helpers that every table needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = "decode_parts"

# Tokens/s of gpt-fast, no rows, from another host: the same decode (8B shape, bf16, one request), by H200s and context.
REPORTED = {1: {8192: 158, 131072: 84}, 4: {8192: 221, 131072: 156}}


def read(name: str, bench: str | None = None) -> list[dict[str, Any]]:
    """Read the rows of one file, oldest first; [] if there is no such file.

    bench: read only its rows; None: all rows except the parts of traced steps.
    """
    path = HERE / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if (row["bench"] == bench if bench else row["bench"] != PARTS)]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def times_as_fast(base: dict[str, Any], row: dict[str, Any]) -> str:
    """How many times as fast as `base` a row is, by medians."""
    return f"{base['us']['p50'] / row['us']['p50']:.2f}x"


def provenance(*rows: dict[str, Any]) -> str:
    """The paragraph with hardware, version and commands of rows; several commands are folded away."""
    row = rows[0]
    *fewer, most = (str(number) for number in sorted({row["num_gpus"] for row in rows}))
    numbers = f"{', '.join(fewer)} and {most}" if fewer else most
    gpu = f"{numbers} x {row['gpu']}" if row["gpu"] else "CPU"
    commands = "\n".join(dict.fromkeys(re.sub("^launch/", "python launch/", row["command"]) for row in rows))
    block = f"```\n{commands}\n```"
    if "\n" in commands:
        block = f"<details><summary>The commands that wrote these rows</summary>\n\n{block}\n\n</details>"
    return f"{gpu}, torch {row['versions']['torch']}:\n\n{block}"
