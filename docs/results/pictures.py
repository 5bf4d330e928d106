"""Draw latency.png, needles.png, shapes.png, quality_bytes.png, hits.png and link_map.png from the rows of this folder.

Usage: `python docs/results/pictures.py [FOLDER]`; without a folder the pictures are written here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from result_rows import HERE, REPORTED, read, times_as_fast
from sections.hit_picture import draw_hits
from sections.link_table import alone_of, pairs_of
from sections.quality_tables import times_fewer

from alspec.latency_model import linked_step_us, tp_step_us
from alspec.launch.plots import plot_quality, plot_shapes
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.profiling.forced_verdicts import forced_verdicts
from alspec.runtime.profiling.predicted_costs import link_costs, step_costs

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from PIL import Image

Row = dict[str, Any]
# The colour shows the cache or the library, the line style the number of GPUs.
CACHES = {"bf16": "tab:blue", "turbo4": "tab:orange", "turbo-mixed": "tab:green"}
OTHERS = {"torch.sdpa": ("torch SDPA, bf16", "black", "--"), "flashinfer": ("FlashInfer, bf16", "dimgray", ":")}
GPUS = {1: ("-", "o"), 2: ("--", "s"), 4: (":", "^")}


def main() -> None:
    """Draw the pictures into the given folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    folder = parser.parse_args().folder
    latency(folder / "latency.png")
    link_map(folder / "link_map.png", read("linked_pair.jsonl"))
    plot_shapes.draw(folder / "shapes.png", read("shapes.jsonl"), "decode attention over a bf16 cache, NVIDIA H200")
    draw_hits(folder / "hits.png")
    quality_bytes(folder / "quality_bytes.png", read("quality_turboquant.jsonl"))
    needles = folder / "needles.png"
    plot_quality.draw(needles, needle_rows(read("quality_codecs.jsonl")))
    with Image.open(needles) as drawn:  # with a palette the file has a third of the bytes
        drawn.convert("RGB").quantize(64).save(needles, optimize=True)


def link_map(picture: Path, rows: list[Row]) -> None:
    """Draw how many times as fast as one GPU a pair over TCP is, over context and hit rate: predicted, and measured."""
    config, dtype = LlamaConfig.from_shape("llama-3.1-8b"), torch.bfloat16
    contexts = [round(2 ** (power / 2)) for power in range(26, 35)]  # the last is the model's longest
    rates = [hits / config.num_layers for hits in range(config.num_layers // 2, config.num_layers + 1)]
    gains, costs = [], [link_costs(config, 1, dtype, context, recalled=32) for context in contexts]
    for rate in rates:
        accepted = [bool(hit) for hit in forced_verdicts(config.num_layers, rate)]
        alone_us = [tp_step_us(step_costs(config, 1, 1, dtype, context)) for context in contexts]
        pair_us = [linked_step_us(parts, accepted) for parts in costs]
        gains.append([alone / pair for alone, pair in zip(alone_us, pair_us, strict=True)])
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    shares = [100 * rate for rate in rates]
    shown = axes.contourf(contexts, shares, gains, levels=[0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], cmap="RdYlGn")
    figure.colorbar(shown, label="times as fast as one GPU alone, predicted")
    axes.contour(contexts, shares, gains, levels=[1.0], colors="black")
    alone = alone_of(rows)
    for (rate, blocks), found in pairs_of(rows, always=True).items():
        for context, row in found.items():
            if isinstance(rate, float) and rate >= rates[0] and blocks == 32:
                place = context, 100 * rate
                axes.plot(*place, "k.")
                gain = times_as_fast(alone[context], row)
                axes.annotate(gain, place, textcoords="offset points", xytext=(4, -9), fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts[::2], [f"{context // 1024}K" for context in contexts[::2]])
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("layers that accept, evenly spread, %")
    axes.set_title("8B shape, bf16, 1 + 1 H200s over TCP; dots: measured (forced), 32 recalled blocks", fontsize=10)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def method_of(codec: str) -> str:
    """Name the method of a codec: `turbo`, `turboquant`, `hybrid`, or the codec itself."""
    return next((method for method in ("turboquant", "turbo", "hybrid") if codec.startswith(method)), codec)


def quality_bytes(picture: Path, rows: list[Row]) -> None:
    """Draw the change of bits per byte over the bytes of a cached token, relative to bf16, for each codec and model."""
    rows = [row for row in rows if row["case"]["measure"] == "bits per byte"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for panel, model in zip(axes, dict.fromkeys(row["case"]["model"] for row in rows), strict=True):
        own = [row["case"] | {"value": row["value"]} for row in rows if row["case"]["model"] == model]
        plain = [case for case in own if case["norm_correction"] and case["qjl"] == "off"]
        plain = [case for case in plain if case["value_quantiser"] == "codebook" and case["codec"] != "bf16"]
        base = next(case["value"] for case in own if case["codec"] == "bf16")
        for protect, marker in ((0, "o"), (2, "^")):
            for method, color in (("turbo", "tab:orange"), ("turboquant", "tab:blue"), ("hybrid", "tab:green")):
                points = [
                    (100 / times_fewer(case["codec"]), 100 * (case["value"] / base - 1), case["codec"])
                    for case in plain
                    if case["protect"] == protect and method_of(case["codec"]) == method
                ]
                label = {"turbo": "FlashQ", "turboquant": "TurboQuant", "hybrid": "FlashQ keys, TurboQuant values"}
                panel.plot(
                    *zip(*[point[:2] for point in points], strict=True), marker, color=color, linestyle="",
                    fillstyle="full" if protect == 0 else "none", label=label[method] if protect == 0 else None,
                )  # fmt: skip
                for x, y, codec in points if protect == 0 else []:
                    panel.annotate(codec, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
        panel.set_yscale("log")
        panel.set_xlim(12, 32)
        panel.yaxis.set_major_formatter(lambda value, _: f"+{value:g} %")
        panel.set_xlabel("bytes of a cached token, % of bf16")
        panel.set_ylabel("bits per byte, against bf16")
        panel.set_title("bundled model" if model == "demo" else model)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, title="hollow: two layers at each end in bf16", title_fontsize=8)
    figure.savefig(picture, dpi=130)


def latency(picture: Path) -> None:
    """Draw whole steps (left) and attention of a layer (right), by number of tokens in the cache."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    steps(left, read("decode_step.jsonl"))
    attention(right, read("decode_attention.jsonl"), read("turbo_attention.jsonl"))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("tokens in the cache")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=130)


def steps(axes: Any, rows: list[Row]) -> None:
    """Draw captured steps of the 8B shape, one request: tensor parallelism, and a pair that accepts every `A~`."""
    of_shape = [
        row
        for row in rows
        if row["case"]["shape"] == "llama-3.1-8b"
        and row["case"]["transport"] in (None, "symm")
        and row["case"]["cuda_graph"]
        and row["case"]["batch"] == 1
        and row["case"].get("softmax", "exact") == "exact"
        and not row["case"].get("text")
    ]
    for cache, color in CACHES.items():
        for world, (line, marker) in GPUS.items():
            found = medians(of_shape, lambda case, c=cache, w=world: (case["kv_cache"], case["world"]) == (c, w), "off")
            axes.plot(*series(found, 1e3), color=color, linestyle=line, marker=marker, markersize=4)
    pair = medians(
        of_shape, lambda case: (case["kv_cache"], case["world"], case["hit_rate"]) == ("bf16", 2, 1), "paired"
    )
    axes.plot(*series(pair, 1e3), color="tab:red", linestyle="", marker="D")
    for world, tokens_per_s in REPORTED.items():
        times = {context: 1e6 / rate for context, rate in tokens_per_s.items()}
        axes.plot(*series(times, 1e3), color="gray", linestyle="", marker=GPUS[world][1], fillstyle="none")
    axes.set_ylim(top=24)
    handles = [Line2D([], [], color=color, label=cache) for cache, color in CACHES.items()]
    handles += [
        Line2D(
            [], [], color="black", linestyle=line, marker=marker, markersize=4, label=f"{world} GPU{'s'[: world - 1]}"
        )
        for world, (line, marker) in GPUS.items()
    ]
    pair_label, reported = "1 + 1 GPUs, every A~ accepted (forced)", "gpt-fast as reported, 1 and 4 GPUs"
    handles.append(Line2D([], [], color="tab:red", linestyle="", marker="D", label=pair_label))
    handles.append(Line2D([], [], color="gray", linestyle="", marker="o", fillstyle="none", label=reported))
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="upper left", ncols=2)
    axes.set_ylabel("ms/token (median step)")
    axes.set_title("8B shape, one request, whole decode step", fontsize=10)


def attention(axes: Any, plain: list[Row], quantised: list[Row]) -> None:
    """Draw decode attention of a layer with 32/8 heads of 128, and that of other libraries."""
    rows = [row for row in plain if row["case"]["heads"] == "32/8" and row["case"]["head_dim"] == 128]
    for impl, (label, color, line) in OTHERS.items():
        found = medians([row for row in rows if row["impl"] == impl], lambda case: isinstance(case["context"], int))
        axes.plot(*series(found, 1), color=color, linestyle=line, marker=".", label=label)
    ours = [row for row in quantised if row["case"]["heads"] == "32/8" and row["bench"] == "decode_attention"]
    ours = [row for row in ours if row["impl"].startswith("alspec") and not row["impl"].endswith(".sas")]
    ours = [row for row in ours if row["case"]["codec"] != "bf16"]
    lean = [row for row in rows if row["bench"] == "decode_attention" and row["impl"].startswith("alspec")]
    for cache, color in CACHES.items():
        found = medians(lean, lambda case: isinstance(case["context"], int)) if cache == "bf16" else {}
        found = found or medians(ours, lambda case, c=cache: case["codec"] == c)
        name = "lean, bf16" if cache == "bf16" else cache
        axes.plot(*series(found, 1), color=color, marker="o", markersize=4, label=name)
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel("us (median launch)")
    axes.set_title("decode attention of a layer, 32/8 heads of 128", fontsize=10)


def needle_rows(rows: list[Row]) -> list[Row]:
    """Rows with exact softmax, including hit rates on text. The last of repeated rows counts."""
    names = ("cache", "measure", "threshold", "context", "depth")
    found = {tuple(row["case"][name] for name in names): row for row in rows if row["case"]["softmax"] == "exact"}
    return list(found.values())


def medians(rows: list[Row], matches: Callable[[Row], bool], mode: str | None = None) -> dict[int, float]:
    """Median microseconds by context of the matching rows. The last of repeated rows counts."""
    matching = [row for row in rows if (mode is None or row["case"]["mode"] == mode) and matches(row["case"])]
    return {int(row["case"]["context"]): row["us"]["p50"] for row in matching}


def series(found: dict[int, float], unit_us: float) -> tuple[list[int], list[float]]:
    """Contexts in ascending order, and their values in the unit."""
    contexts = sorted(found)
    return contexts, [found[context] / unit_us for context in contexts]


if __name__ == "__main__":
    main()
