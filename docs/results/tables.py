"""Make tables of the measured rows beside this file, here and in the README: `python docs/results/tables.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Rewrite docs/results/README.md, and the tables of the project's README between their markers."""
    project = HERE.parents[1] / "README.md"
    text = project.read_text(encoding="utf-8")
    for name, lines in (("quality", short_quality()), ("decode", short_decode())):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{lines}\n{end}{rest.partition(end)[2]}"
    project.write_text(text, encoding="utf-8")
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


def short_quality() -> str:
    """One line for each lambda: hit rate on text, bits per byte at the longest context, recall."""
    rows = read("quality.jsonl")
    longest = max(row["case"]["context"] for row in rows)
    head = ["lambda", "hit rate on text", f"bits per byte, {longest} tokens"]
    head += [f"fact recalled from {longest} tokens", "UUID recalled among 75 pairs"]
    lines: dict[str, list[str]] = {}
    for row in rows:
        case = row["case"]
        line = lines.setdefault(case["threshold"], [f"{float(case['threshold']):g}"])
        if case["measure"] != "bits per byte":
            line.append(f"{row['value']:.0%}")
        elif case["context"] == longest:
            line += [f"{row['hit_rate']:.0%}", f"{row['value']:.4f}"]
    return "\n".join([table(head, list(lines.values())), "", where(rows[0])])


def short_decode() -> str:
    """Medians of the 8B shape's decode attention over contexts."""
    rows = [row for row in read("decode_attention.jsonl") if label(row)[:2] == ("32/8", "128")]
    contexts = list(dict.fromkeys(label(row)[2] for row in rows))
    names = {
        "torch.sdpa": "torch SDPA",
        "decode_attention": "lean decode",
        "speculative_decode": "with guess and verdict, one launch",
    }
    lines: dict[str, list[str]] = {}
    for row in rows:
        name = names.get(row["impl"]) or names[row["bench"]]
        lines.setdefault(name, [name]).append(f"{row['us']['p50']:.1f}")
    return "\n".join([table(["us", *contexts], list(lines.values())), "", where(rows[0])])


def label(row: dict[str, Any]) -> tuple[str, str, str]:
    """Heads, head_dim and context of a decode row."""
    case = row["case"]
    return case["heads"], str(case["head_dim"]), str(case["context"])


if __name__ == "__main__":
    main()
