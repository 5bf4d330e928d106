"""Turn the measured rows beside this file into the tables of README.md: `python docs/results/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Rewrite docs/results/README.md."""
    parts = [
        "# Measured rows and their tables",
        "One JSON line for each measured value, written by the command that it names."
        " `python docs/results/tables.py` makes the tables from them.",
        quality(read("quality.jsonl")),
        decode(read("decode_attention.jsonl")),
    ]
    (HERE / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def read(name: str) -> list[dict[str, Any]]:
    """All rows of one file, oldest first; none if there is no such file."""
    path = HERE / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(row: dict[str, Any]) -> str:
    """Hardware, versions and command of a row."""
    gpu = f"{row['num_gpus']} x {row['gpu']}" if row["gpu"] else "CPU"
    return f"{gpu}, torch {row['versions']['torch']}, `{row['command']}`"


def quality(rows: list[dict[str, Any]]) -> str:
    """Bits per byte, recall and hit rates over lambda."""
    if not rows:
        return ""
    values: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        values.setdefault(case["threshold"], {})[case["measure"], case["context"]] = row
    columns = sorted({key for found in values.values() for key in found})
    text = next(key for key in reversed(columns) if key[0] == "bits per byte")
    recall = next((key for key in columns if key[0] == "recall"), None)
    head = ["lambda", *(f"{measure}, {context} tokens" for measure, context in columns), "hit rate, text"]
    lines = []
    for threshold, found in values.items():
        cells = [
            f"{found[key]['value']:.4f}" if key[0] != "recall" else f"{found[key]['value']:.1%}" for key in columns
        ]
        lines.append([f"{float(threshold):g}", *cells, f"{found[text]['hit_rate']:.3f}"])
    layers = range(len(next(iter(values.values()))[text]["hit_rate_per_layer"]))
    per_layer = [
        table(
            ["lambda", *(f"layer {layer}" for layer in layers)],
            [
                [f"{float(threshold):g}", *(f"{rate:.3f}" for rate in found[key]["hit_rate_per_layer"])]
                for threshold, found in values.items()
                if key in found
            ],
        )
        for key in (text, recall)
        if key is not None
    ]
    case = rows[0]["case"]
    return "\n\n".join(
        [
            "## Demo checkpoint over lambda",
            f"Reference semantics (`simulated`), S = {case['chunk_size']}, {case['dtype']}. lambda 0 is full attention,"
            f" inf is attention sink in every layer. {where(rows[0])}",
            table(head, lines),
            f"Hit rate of each layer on text, at positions where the guess leaves tokens out ({text[1]} tokens):",
            per_layer[0],
            *(["Hit rate of each layer on the answers of recall prompts:", per_layer[1]] if recall else []),
        ]
    )


def decode(rows: list[dict[str, Any]]) -> str:
    """Decode attention against SDPA: one line for each case, medians."""
    if not rows:
        return ""
    base = {label(row): row["us"]["p50"] for row in rows if row["impl"] == "torch.sdpa"}
    lines = []
    for row in rows:
        us = row["us"]
        rate = row["bytes"] / us["p50"] / 1e6
        lines.append(
            [
                row["bench"],
                *label(row),
                row["impl"],
                f"{us['p20']:.1f} / {us['p50']:.1f} / {us['p80']:.1f}",
                f"{rate:.2f}",
                f"{rate / row['stream_tb_s']:.0%}",
                f"{base[label(row)] / us['p50']:.2f}x",
            ]
        )
    head = ["bench", "heads", "head_dim", "context", "impl", "us p20 / p50 / p80", "TB/s", "of stream", "against SDPA"]
    return "\n\n".join(["## Decode attention", where(rows[0]), table(head, lines)])


def label(row: dict[str, Any]) -> tuple[str, str, str]:
    """Heads, head_dim and context of a decode row."""
    case = row["case"]
    return case["heads"], str(case["head_dim"]), str(case["context"])


if __name__ == "__main__":
    main()
