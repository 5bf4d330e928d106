"""The tables of quantised weights, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table

PRODUCTS = {"qkv": "qkv", "o": "o", "gate_up": "gate and up", "down": "down"}
SHOWN_ROWS = (1, 8, 16)
COLUMNS = {
    "bf16": ("bf16", "alspec.projections"),
    "`torch.linear`": ("bf16", "torch.linear"),
    "FP8": ("fp8", "alspec.projections"),
    "INT4": ("int4", "alspec.projections"),
    "`torch._scaled_mm`, FP8": ("fp8", "torch._scaled_mm"),
    "`torch._weight_int4pack_mm`": ("int4", "torch._weight_int4pack_mm"),
    "GemLite, INT4": ("int4", "GemLite"),
}
WEIGHTS = ("auto", "fp8", "int4", "int4-g32")
MODELS = {"demo": "bundled model, trained in bf16"}


def weights(rows: list[dict[str, Any]], quality: list[dict[str, Any]]) -> str:
    """The section on quantised weights; empty without rows."""
    if not rows:
        return ""
    steps, products = ([row for row in rows if row["bench"] == name] for name in ("decode_step", "linear"))
    return "\n\n".join(
        [
            "## Quantised weights",
            "Whole steps with random weights:",
            provenance(*steps),
            weight_steps(rows),
            "Single products, in microseconds at 1 / 8 / 16 rows, where measured; ours with RoPE and append, or SiLU:",
            provenance(*products),
            weight_products(rows),
            "Bits per byte of books, 8 windows of 1024 tokens in fp32:",
            provenance(*quality),
            weight_quality(quality),
            "Recall of facts (exact answers of 50), and layers that accept at lambda 0.1 in that text or in books:",
            weight_speculation(quality),
        ]
    )


def weight_steps(rows: list[dict[str, Any]]) -> str:
    """A line for each step; later rows replace earlier ones."""
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if row["bench"] == "decode_step":
            case = row["case"]
            place = case["shape"] != "llama-3.1-8b", case["world"], case["batch"], WEIGHTS.index(case["weights"])
            names = case["shape"], str(case["world"]), str(case["batch"]), case["weights"]
            options = case.get("lm_head", "bf16"), case["kv_cache"]
            figures = f"{row['us']['p50'] / 1e3:.2f}", f"{row['tokens_per_s']:.0f}", f"{row['share_of_limit']:.0%}"
            lines[*place, *options, case["context"]] = [*names, *options, str(case["context"]), *figures]
    head = ["shape", "GPUs", "requests", "weights", "LM head", "cache", "tokens", "ms", "tokens/s"]
    return table([*head, "share of its byte limit"], [lines[key] for key in sorted(lines)])


def weight_products(rows: list[dict[str, Any]]) -> str:
    """A line for each product: microseconds by number of rows. What was not measured is left out."""
    found: dict[tuple[str, int, int], dict[tuple[str, str], dict[int, float]]] = {}
    for row in rows:
        if row["bench"] == "linear":
            case = row["case"]
            line = found.setdefault((case["product"], case["out"], case["in"]), {})
            line.setdefault((case["weights"], row["impl"]), {})[case["rows"]] = row["us"]["p50"]
    lines = [
        [
            f"{PRODUCTS[name]}, {outputs} x {inputs}",
            *(_by_rows(line.get(column, {})) for column in COLUMNS.values()),
        ]
        for (name, outputs, inputs), line in found.items()
    ]
    return table(["product", *COLUMNS], lines)


def _by_rows(us: dict[int, float]) -> str:
    return " / ".join(f"{us[rows]:.1f}" for rows in SHOWN_ROWS if rows in us)


def weight_quality(rows: list[dict[str, Any]]) -> str:
    """A line for each model and cache: bits per byte as published, and with `--weights`."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] == "bits per byte" and case["context"] == 1024:
            found.setdefault((case["model"], case["codec"]), {})[_weights(case)] = row["value"]
    lines = [
        [MODELS.get(model, model), codec, *(f"{values[each]:.4f}" if each in values else "" for each in WEIGHTS)]
        for (model, codec), values in found.items()
    ]
    return table(["model", "cache", "as published", "FP8", "INT4", "INT4, groups of 32"], lines)


def weight_speculation(rows: list[dict[str, Any]]) -> str:
    """A line for each model, cache and measure: recall, and the share of layers that accept, with `--weights`."""
    found: dict[tuple[str, str, str, str], dict[str, str]] = {}
    for row in rows:
        case, weights = row["case"], _weights(row["case"])
        place = MODELS.get(case["model"], case["model"]), case["codec"], str(case["context"])
        if case["measure"] == "bits per byte" and case["threshold"] == "0.1":
            found.setdefault((*place, "books, layers that accept"), {})[weights] = f"{row['hit_rate']:.1%}"
        elif case["measure"] != "bits per byte":
            name = f"{case['measure']}, lambda {float(case['threshold']):g}"
            found.setdefault((*place, name), {})[weights] = f"{row['value']:.0%}"
    lines = [[*place, *(values.get(each, "") for each in WEIGHTS)] for place, values in found.items()]
    return table(["model", "cache", "tokens", "measure", "as published", "FP8", "INT4", "INT4, groups of 32"], lines)


def _weights(case: dict[str, Any]) -> str:
    """The `--weights` of a row; its values are the same if they were dequantised."""
    return (case.get("weights") or "auto").removesuffix(", dequantised")
