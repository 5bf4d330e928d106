"""The tables of speculation on a real model, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, read, table

from sections.quality_tables import lambda_name

ROWS = "quality_smollm2.jsonl"
TEXT, ANSWER = "bits per byte", "greedy tokens equal"
LAYERS_AT = ("0.05", "0.1", "0.2")  # lambda, of the hit rates of each layer

Rows = list[dict[str, Any]]


def _of(rows: Rows, measure: str) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Rows of a measure by predictor and lambda, then by context. The last of repeated rows counts."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] == measure and case["codec"] == "bf16" and case["threshold"] != "fixed":
            blocks = case.get("recall_blocks", 0)
            name = f"{case['chunk_size']} and {blocks} blocks" if blocks else str(case["chunk_size"])
            found.setdefault((name, case["threshold"]), {})[case["context"]] = row
    return dict(sorted(found.items(), key=lambda item: (*_numbers(item[0][0]), float(item[0][1]))))


def _numbers(predictor: str) -> tuple[int, int]:
    """S and the number of recalled blocks of a predictor's name."""
    size, *blocks = (int(word) for word in predictor.split() if word.isdigit())
    return size, (blocks or [0])[0]


def _contexts(found: dict[tuple[str, str], dict[int, dict[str, Any]]]) -> list[int]:
    return sorted({context for line in found.values() for context in line})


def _hit_rate(row: dict[str, Any] | None) -> str:
    return "" if row is None or row["hit_rate"] is None else f"{row['hit_rate']:.1%}"


def speculation() -> str:
    """Bits per byte, hit rates and answers of SmolLM2 over lambda, S and context; empty without rows."""
    rows = read(ROWS)
    texts, answers = _of(rows, TEXT), _of(rows, ANSWER)
    if not texts:
        return ""
    contexts, case = _contexts(texts), rows[0]["case"]
    samples = max(row["case"]["samples"] for line in texts.values() for row in line.values())
    parts = [
        "## SmolLM2 over lambda, S and context",
        f"{case['model']}, reference semantics (`simulated`), {case['dtype']}, books, up to {samples} windows for each"
        " context. lambda 0 is full attention; with lambda inf every layer attends to sink and window only.",
        provenance(*rows),
        table(
            ["S", "lambda", *(f"{name}, {context}" for context in contexts for name in ("bits per byte", "hit rate"))],
            [
                [
                    chunk,
                    lambda_name(threshold),
                    *(
                        cell
                        for row in map(line.get, contexts)
                        for cell in ("" if row is None else f"{row['value']:.4f}", _hit_rate(row))
                    ),
                ]
                for (chunk, threshold), line in texts.items()
            ],
        ),
        *_layers(texts, contexts[-1]),
        *_answers(answers),
    ]
    return "\n\n".join(parts)


def _layers(texts: dict[tuple[str, str], dict[int, dict[str, Any]]], context: int) -> list[str]:
    """Hit rate of each layer at the longest context, a column for each S and lambda of `LAYERS_AT`."""
    columns = {
        key: line[context]["hit_rate_per_layer"]
        for key, line in texts.items()
        if key[1] in LAYERS_AT and context in line and line[context]["hit_rate_per_layer"]
    }
    if not columns:
        return []
    lines = [
        [str(layer), *(f"{rate:.1%}" for rate in rates)]
        for layer, rates in enumerate(zip(*columns.values(), strict=True))
    ]
    head = ["layer", *(f"S {chunk}, {lambda_name(threshold)}" for chunk, threshold in columns)]
    return [f"Hit rate of each layer on text ({context} tokens):", table(head, lines)]


def _answers(answers: dict[tuple[str, str], dict[int, dict[str, Any]]]) -> list[str]:
    """Greedy answers against those of full attention."""
    if not answers:
        return []
    contexts = _contexts(answers)
    names = ("tokens equal", "before the first difference", "whole answers", "hit rate")
    lines = [
        [
            chunk,
            lambda_name(threshold),
            *(cell for context in contexts for cell in _answer_cells(line.get(context))),
        ]
        for (chunk, threshold), line in answers.items()
    ]
    count = max(row["case"]["samples"] for line in answers.values() for row in line.values())
    return [
        f"Greedy answers to {count} questions about texts, for each context, against those of full attention. *Tokens"
        " equal*: choices that are the same after the same tokens. *Before the first difference*: the share of the"
        " answers' tokens that greedy decoding under speculation gives, too. *Whole answers*: those without a"
        " difference. What is missing to 100 % at lambda 0 is rounding: answers come from the decode kernels, choices"
        " from one pass over the whole text.",
        table(["S", "lambda", *(f"{name}, {context}" for context in contexts for name in names)], lines),
    ]


def _answer_cells(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * 4
    details = row["details"]
    shares = (row["value"], details["share before the first difference"], details["share of whole answers"])
    return [*(f"{share:.1%}" for share in shares), _hit_rate(row)]


def short_speculation() -> str:
    """For S = 128 and the longest context, a line for each lambda; empty without rows."""
    rows = [row for row in read(ROWS) if row["case"]["chunk_size"] == 128 and not row["case"].get("recall_blocks")]
    texts, answers = _of(rows, TEXT), _of(rows, ANSWER)
    if not texts:
        return ""
    longest = _contexts(texts)[-1]
    head = ["lambda", "hit rate on text", f"bits per byte, {longest} tokens"]
    head += ["greedy tokens equal", "whole answers equal"] if answers else []
    lines = []
    for key, line in texts.items():
        text, answer = line.get(longest), answers.get(key, {}).get(longest)
        cells = [lambda_name(key[1]), _hit_rate(text), "" if text is None else f"{text['value']:.4f}"]
        if answers:
            equal, _, whole, _ = _answer_cells(answer)
            cells += [equal, whole]
        lines.append(cells)
    return "\n".join([f"On {rows[0]['case']['model']}, S = 128:", "", table(head, lines), "", provenance(*rows)])
