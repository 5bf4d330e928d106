"""Measured rows beside this file, and what every table of them needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = "decode_parts"


def read(name: str, bench: str | None = None) -> list[dict[str, Any]]:
    """Rows of one file, oldest first: of one bench, or all but the parts of steps. [] if there is no such file."""
    path = HERE / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if (row["bench"] == bench if bench else row["bench"] != PARTS)]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(*rows: dict[str, Any]) -> str:
    """Hardware, versions and commands of rows, a paragraph of its own; several commands are folded away."""
    row = rows[0]
    *fewer, most = (str(number) for number in sorted({row["num_gpus"] for row in rows}))
    numbers = f"{', '.join(fewer)} and {most}" if fewer else most
    gpu = f"{numbers} x {row['gpu']}" if row["gpu"] else "CPU"
    commands = "\n".join(dict.fromkeys(re.sub("^launch/", "python launch/", row["command"]) for row in rows))
    block = f"```\n{commands}\n```"
    if "\n" in commands:
        block = f"<details><summary>The commands that wrote these rows</summary>\n\n{block}\n\n</details>"
    return f"{gpu}, torch {row['versions']['torch']}:\n\n{block}"
