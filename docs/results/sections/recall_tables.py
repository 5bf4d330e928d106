"""Tables of recalled blocks, for tables.py: what `A~` gains by them, and what they cost in the kernels."""

from __future__ import annotations

import re
from typing import Any

from result_rows import provenance, read, table

from sections.quality_tables import lambda_name

QUALITY, ATTENTION, WINDOW = "quality_recall.jsonl", "recall_attention.jsonl", "quality_smollm2.jsonl"
NAMES = {"valid.jsonl.xz": "books", "code.txt": "code", "chat.txt": "chat", "copies.txt": "copies"}
SHOWN = ("0.05", "0.1", "0.2", "inf")  # lambda

OF_LAYERS = "Hit rate of each layer of SmolLM2, then of the bundled model, on books, 8192 tokens, lambda 0.1:"
OF_TASKS = (
    "Exact answers to questions about facts in a text (*recall*) and about one of 75 keys of a record (*record"
    " recall*). SmolLM2 answers none about records by full attention either."
)

Rows = list[dict[str, Any]]


def recall() -> list[str]:
    """Sections on hit rates with recalled blocks and on their cost; empty without rows."""
    quality, attention = read(QUALITY), read(ATTENTION)
    sections = []
    if quality:
        text = (
            "Reference semantics (`simulated`). *Recalled* blocks of 64 tokens are those heaviest for"
            " the token before; 0 is sink and window alone. Code and chat of SmolLM2 at 8192 tokens are other texts"
            " than the rest of code and chat."
        )
        of_answers = (
            "Greedy answers to prompts over books, in fp32, S = 128, against those of full attention: the share of"
            " equal tokens, where each token follows the answer of full attention, and the number of answers that are"
            " equal as a whole."
        )
        sections.append(
            "\n\n".join(
                [
                    "## Recalled blocks",
                    text,
                    provenance(*quality),
                    hits(quality),
                    OF_LAYERS,
                    layers(quality, "smollm2"),
                    layers(quality, "demo"),
                    OF_TASKS,
                    tasks(quality),
                    of_answers,
                    answers(quality),
                ]
            )
        )
    if attention:
        text = (
            "Median time of attention of one layer, 32 query heads and 8 KV heads of 128, S = 128, cold L2; of the time"
            " from the launch until another kernel has all of `A~` (bf16); and of the choice of the lists of 32 layers,"
            " once a step. Lists are spread evenly over the cache."
        )
        sections.append(
            "\n\n".join(["## Recalled blocks in the kernels", text, provenance(*attention), costs(attention)])
        )
    return sections


def hits(rows: Rows) -> str:
    """Hit rate and change in bits per byte, for each model, text, context and number of blocks."""
    lines: dict[tuple[str, str, str, int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] == "bits per byte":
            of_text = case["model"], text_of(row), case["codec"]
            key = (*of_text, case["context"], case["chunk_size"], case.get("recall_blocks", 0))
            lines.setdefault(key, {})[case["threshold"]] = row
    cells = []
    for (model, text, codec, context, chunk_size, blocks), found in sorted(lines.items()):
        full = found["0.0"]["value"]
        name = "the bundled model" if model == "demo" else model
        windows = str(found["0.0"]["case"]["samples"])
        cell = [name, text, codec, str(context), windows, str(chunk_size), str(blocks), f"{full:.4f}"]
        for name in SHOWN:
            row = found.get(name)
            cell += ["", ""] if row is None else [f"{row['hit_rate']:.1%}", f"{row['value'] / full - 1:+.2%}"]
        cells.append([*cell[:8], *(text for at, text in enumerate(cell[8:]) if at != 2 * len(SHOWN) - 2)])
    head = ["model", "text", "cache", "tokens", "windows", "S", "recalled", "bits per byte, full attention"]
    for name in SHOWN[:-1]:
        head += [f"hits, {lambda_name(name)}", "change"]
    return table([*head, f"change, {lambda_name(SHOWN[-1])}"], cells)


def tasks(rows: Rows) -> str:
    """Share of exact answers, for each model, task and number of blocks."""
    lines: dict[tuple[str, str, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if "recall" in case["measure"]:
            key = case["model"], case["measure"], case["context"], case["recall_blocks"]
            lines.setdefault(key, {})[case["threshold"]] = row
    thresholds = ("0.0", *SHOWN)
    cells = []
    for (model, measure, context, blocks), found in sorted(lines.items()):
        shown = [f"{found[name]['value']:.0%}" if name in found else "" for name in thresholds]
        asked = str(found["0.0"]["case"]["samples"])
        cells.append(
            ["the bundled model" if model == "demo" else model, measure, str(context), asked, str(blocks), *shown]
        )
    names = ["full attention", *(lambda_name(name) for name in SHOWN)]
    return table(["model", "task", "tokens", "questions", "recalled", *names], cells)


def layers(rows: Rows, model: str) -> str:
    """Hit rate of each layer on books, a column for each S and number of blocks."""
    shown = {"model": model, "measure": "bits per byte", "codec": "bf16", "context": 8192, "threshold": "0.1"}
    columns = {
        (row["case"]["chunk_size"], row["case"]["recall_blocks"]): row["hit_rate_per_layer"]
        for row in rows
        if shown.items() <= row["case"].items() and text_of(row) == "books"
    }
    names = [f"S {chunk_size}, {blocks} recalled" for chunk_size, blocks in sorted(columns)]
    rates = zip(*(columns[key] for key in sorted(columns)), strict=True)
    lines = [[str(layer), *(f"{rate:.0%}" for rate in found)] for layer, found in enumerate(rates)]
    return table(["layer", *names], lines)


def answers(rows: Rows) -> str:
    """How far greedy answers equal those of full attention, for each number of blocks and lambda."""
    found: dict[tuple[int, float], dict[int, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] == "greedy tokens equal" and case["threshold"] != "0.0":
            found.setdefault((case["recall_blocks"], float(case["threshold"])), {})[case["context"]] = row
    contexts = sorted({context for line in found.values() for context in line})
    cells = []
    for (blocks, threshold), line in sorted(found.items()):
        cell = [str(blocks), f"{threshold:g}"]
        for context in contexts:
            row = line[context]
            whole = round(row["details"]["share of whole answers"] * row["case"]["samples"])
            cell.append(f"{row['value']:.1%}, {whole} of {row['case']['samples']}")
        cells.append(cell)
    return table(["recalled", "lambda", *(f"{context} tokens" for context in contexts)], cells)


def short_hits() -> str:
    """Hits at lambda 0.1 and the longest context, a line for each model and text; empty without rows."""
    rows = [row for name in (QUALITY, WINDOW) for row in read(name)]
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    shown = {"measure": "bits per byte", "codec": "bf16", "chunk_size": 128, "threshold": "0.1", "context": 8192}
    for row in rows:
        case = row["case"]
        if shown.items() <= case.items():
            found.setdefault((case["model"], text_of(row)), {})[case.get("recall_blocks", 0)] = row
    counts = sorted({count for line in found.values() for count in line})
    cells = [
        [
            "the bundled model" if model == "demo" else model,
            text,
            *(f"{line[count]['hit_rate']:.0%}" if count in line else "" for count in counts),
        ]
        for (model, text), line in sorted(found.items())
    ]
    return table(
        ["model", "text", *("sink and window" if not count else f"{count} recalled" for count in counts)], cells
    )


def short_costs() -> str:
    """`costs` at the shortest and the longest context; empty without rows."""
    rows = read(ATTENTION)
    contexts = sorted({row["case"]["context"] for row in rows})
    return costs([row for row in rows if row["case"]["context"] in (contexts[0], contexts[-1])]) if rows else ""


def text_of(row: dict[str, Any]) -> str:
    """Kind of text that a row's command read."""
    name = re.search(r"--text \S*?([^/\s]+)(?:\s|$)", row["command"])
    return NAMES.get(name[1], name[1]) if name else ""


def costs(rows: Rows) -> str:
    """Microseconds by context, without speculation, with sink and window, and with recalled blocks."""
    kinds = {
        "decode_attention": "none", "masses": "masses", "speculative_decode": "", "spec_ready": "", "recall_lists": "",
    }  # fmt: skip
    lines: dict[tuple[int, str], dict[str, float]] = {}
    counts: set[int] = set()
    for row in rows:
        case, bench = row["case"], row["bench"]
        name = {"spec_ready": "until `A~`", "recall_lists": "lists"}.get(bench, case.get("codec"))
        column = kinds[bench] or str(case["recall_blocks"])
        counts |= {case["recall_blocks"]}
        lines.setdefault((case["context"], name), {})[column] = row["us"]["p50"]
    has_masses = any(row["bench"] == "masses" for row in rows)
    columns = ["none", *(["masses"] if has_masses else []), *map(str, sorted(counts))]
    titles = {"none": "without `A~`", "masses": "with weights of blocks", "0": "sink and window"}
    head = ["tokens", "", *(titles.get(column, f"{column} recalled") for column in columns)]
    cells = [
        [str(context), name, *(f"{found[column]:.1f}" if column in found else "" for column in columns)]
        for (context, name), found in lines.items()
    ]
    return table(head, cells)
