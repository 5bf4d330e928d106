"""Draw hits.png for pictures.py: which share of layers accepts `A~`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from result_rows import read

from sections.recall_tables import QUALITY, WINDOW, text_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Row = dict[str, Any]
COLOURS = {0: "dimgray", 8: "tab:green", 16: "tab:blue", 32: "tab:orange"}  # by recalled blocks
TEXTS = {"books": "tab:blue", "code": "tab:orange", "chat": "tab:green"}
MODELS = {"smollm2": ("SmolLM2", "-"), "demo": ("bundled", "--")}


def draw_hits(picture: Path) -> None:
    """Draw hits over lambda and blocks, over contexts and texts, and in each layer; S = 128, bf16 caches."""
    rows = [row for name in (QUALITY, WINDOW) for row in read(name)]
    shown = {"measure": "bits per byte", "codec": "bf16", "chunk_size": 128}
    rows = [row for row in rows if shown.items() <= row["case"].items()]
    figure, (by_lambda, by_context, by_layer) = plt.subplots(1, 3, figsize=(14, 4.8), layout="constrained")
    over_lambda(by_lambda, rows)
    over_contexts(by_context, rows)
    over_layers(by_layer, rows)
    for axes in (by_lambda, by_context, by_layer):
        axes.set_ylim(0, 102)
        axes.set_ylabel("layers that accept A~, %")
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=3)
    by_context.set_ylim(50, 101)
    figure.savefig(picture, dpi=110)


def over_lambda(axes: Any, rows: list[Row]) -> None:
    """SmolLM2 on books of 8192 tokens, a line for each number of blocks."""
    for blocks, colour in COLOURS.items():
        found = {
            float(row["case"]["threshold"]): row
            for row in of(rows, "smollm2", "books", blocks)
            if row["case"]["context"] == 8192 and 0 < float(row["case"]["threshold"]) <= 0.2
        }
        hits = [100 * found[threshold]["hit_rate"] for threshold in sorted(found)]
        axes.plot(sorted(found), hits, color=colour, marker="o", label=name_of(blocks))
    axes.set_xlabel("lambda")
    axes.set_title("SmolLM2, books, 8192 tokens", fontsize=10)


def over_contexts(axes: Any, rows: list[Row]) -> None:
    """Both models at lambda 0.1 with 16 blocks, a line for each text."""
    for model, (name, style) in MODELS.items():
        for text, colour in TEXTS.items():
            found = {row["case"]["context"]: row for row in of(rows, model, text, 16) if is_default(row)}
            hits = [100 * found[context]["hit_rate"] for context in sorted(found)]
            axes.plot(sorted(found), hits, style, color=colour, marker="o", label=f"{name}, {text}")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2048, 4096, 8192], ["2K", "4K", "8K"])
    axes.set_xlabel("tokens")
    axes.set_title("16 recalled blocks, lambda 0.1", fontsize=10)


def over_layers(axes: Any, rows: list[Row]) -> None:
    """Both models on books of 8192 tokens at lambda 0.1, a line for each number of blocks."""
    for model, (name, style) in MODELS.items():
        for blocks in (0, 16, 32):
            for row in of(rows, model, "books", blocks):
                if row["case"]["context"] == 8192 and is_default(row):
                    hits = [100 * rate for rate in row["hit_rate_per_layer"]]
                    axes.plot(range(len(hits)), hits, style, color=COLOURS[blocks], label=f"{name}, {name_of(blocks)}")
                    break
    axes.set_xlabel("layer")
    axes.set_title("books, 8192 tokens, lambda 0.1", fontsize=10)


def of(rows: list[Row], model: str, text: str, blocks: int) -> list[Row]:
    """The rows of a model, a text and a number of recalled blocks."""
    return [
        row
        for row in rows
        if row["case"]["model"] == model and text_of(row) == text and row["case"].get("recall_blocks", 0) == blocks
    ]


def is_default(row: Row) -> bool:
    """Whether it is of the default lambda."""
    return float(row["case"]["threshold"]) == 0.1


def name_of(blocks: int) -> str:
    """What `A~` reads."""
    return f"{blocks} recalled" if blocks else "sink and window"
