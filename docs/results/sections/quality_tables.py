"""The tables of quality, for tables.py."""

from __future__ import annotations

from typing import Any

import torch
from result_rows import provenance, read, table

from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import bytes_per_token


def quality(rows: list[dict[str, Any]]) -> str:
    """Bits per byte, recall and hit rates for each lambda."""
    if not rows:
        return ""
    values: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        values.setdefault(case["threshold"], {})[case["measure"], case["context"]] = row
    columns = sorted({key for found in values.values() for key in found})
    text = next(key for key in reversed(columns) if key[0] == "bits per byte")
    recall = next((key for key in columns if key[0] == "recall"), None)
    names = [f"{QUALITY_COLUMNS[measure]}, {context} tokens" for measure, context in columns]
    head = ["lambda", *names, "hit rate, text"]
    lines = []
    for threshold, found in values.items():
        cells = [
            f"{found[key]['value']:.4f}" if key[0] == "bits per byte" else f"{found[key]['value']:.1%}"
            for key in columns
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
            f"Reference semantics (`simulated`), S = {case['chunk_size']}, {case['dtype']}. lambda 0 is full attention;"
            " with lambda inf every layer attends to sink and window only.",
            provenance(rows[0]),
            table(head, lines),
            f"Hit rate of each layer on text ({text[1]} tokens), at positions where `A~` leaves tokens out:",
            per_layer[0],
            *(["Hit rate of each layer on the answers of recall prompts:", per_layer[1]] if recall else []),
        ]
    )


def codecs(title: str, rows: list[dict[str, Any]]) -> str:
    """Each cache and lambda at the longest context, with the change from bf16. The last of repeated rows counts."""
    if not rows:
        return ""
    longest: dict[str, int] = {}
    for case in (row["case"] for row in rows):
        longest[case["measure"]] = max(case["context"], longest.get(case["measure"], 0))
    lines: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] in QUALITY_COLUMNS and case["context"] == longest[case["measure"]]:
            lines.setdefault((case["threshold"], case["cache"]), {})[case["measure"]] = row
    columns = [name for name in QUALITY_COLUMNS if any(name in line for line in lines.values())]
    head = ["lambda", "cache", *(title for name in columns for title in (QUALITY_COLUMNS[name], "change"))]
    cells = []
    for (threshold, cache), found in lines.items():
        cell = [lambda_name(threshold), cache]
        for name in columns:
            own, base = (line.get(name, {}).get("value") for line in (found, lines.get((threshold, "bf16"), {})))
            cell.append("" if own is None else f"{own:.4f}" if name == "bits per byte" else f"{own:.1%}")
            if own is None or base is None or cache == "bf16":
                cell.append("")
            else:
                cell.append(
                    f"{own / base - 1:+.2%}" if name == "bits per byte" else f"{100 * (own - base):+.1f} points"
                )
        hits = found.get("bits per byte") or next(iter(found.values()))
        cells.append([*cell, f"{hits['hit_rate']:.3f}"])
    case = max((row["case"] for row in rows), key=lambda case: int(case["context"]))
    own_length = " (UUIDs: their own length)" if "record recall" in columns else ""
    notes = [
        f"Decoded token by token from the given cache, at {case['context']} tokens{own_length}, S ="
        f" {case['chunk_size']}, {case['dtype']}. *change* is relative to the bf16 cache with the same lambda."
    ]
    if any(threshold == "fixed" for threshold, _ in lines):
        notes.append(
            "*fixed layers*: layers with a hit rate above 0.8 on text at lambda 0.1 always accept `A~`, others never."
        )
    notes.append("An empty cell or a missing line was not measured, even if a command names it.")
    return "\n\n".join(
        [f"## {title}", " ".join(notes), provenance(*rows), table([*head, "hit rate"], cells)],
    )


VARIANTS = {
    "two layers at each end in bf16": {"protect": 2},
    "plain norm": {"norm_correction": False},
    "orthogonal QJL": {"qjl": "orthogonal"},
    "Gaussian QJL": {"qjl": "gaussian"},
    "uniform values": {"value_quantiser": "uniform"},
}
NEW_SCALE = "Rows of the bundled model are older: there the scale of values was that of least squares, too."
DEFAULT = {"protect": 0, "norm_correction": True, "qjl": "off", "value_quantiser": "codebook"}


def turboquant(title: str, rows: list[dict[str, Any]], note: str, picture: str = "") -> str:
    """Bits per byte of each codec and of the variants of TurboQuant, one table for each model; a picture if given."""
    if not rows:
        return ""
    parts = [
        f"## {title}",
        "Bits per byte of books, decoded token by token from the given cache (lambda 0), and its change from the bf16"
        " cache. The other columns change one setting. *Times fewer* bytes than bf16 are those of heads of 64, tail not"
        f" counted. An empty cell does not apply or was not measured. {note}",
    ]
    for model in dict.fromkeys(row["case"]["model"] for row in rows):
        own = [row for row in rows if row["case"]["model"] == model]
        bits = [row for row in own if row["case"]["measure"] == "bits per byte"]
        found = {(row["case"]["codec"], tuple(row["case"][name] for name in DEFAULT)): row["value"] for row in bits}
        answers = {(row["case"]["codec"], row["case"]["measure"]): row["value"] for row in own if row not in bits}
        tasks = [name for name in QUALITY_COLUMNS if any(name == measure for _, measure in answers)]
        base = found["bf16", tuple(DEFAULT.values())]

        def change(codec: str, found: dict[Any, float] = found, base: float = base, **changed: Any) -> str:
            value = found.get((codec, tuple((DEFAULT | changed).values())))
            return "" if value is None or codec == "bf16" else f"{value / base - 1:+.2%}"

        lines = [
            [
                codec,
                f"{times_fewer(codec):.2f}",
                f"{found[codec, tuple(DEFAULT.values())]:.4f}",
                change(codec),
                *(change(codec, **changed) for changed in VARIANTS.values()),
                *(f"{answers[codec, task]:.0%}" if (codec, task) in answers else "" for task in tasks),
            ]
            for codec in sorted({codec for codec, _ in found}, key=lambda codec: (times_fewer(codec), codec))
        ]
        name = "the bundled model" if model == "demo" else model
        context, windows = bits[0]["case"]["context"], bits[0]["case"]["samples"]
        parts += [
            f"On {name}, {windows} windows of {context} tokens:",
            provenance(*own),
            table(
                ["cache", "times fewer", "bits per byte", "change", *VARIANTS, *(QUALITY_COLUMNS[t] for t in tasks)],
                lines,
            ),
        ]
    if picture:
        parts.append(f"![Change of bits per byte over the bytes of a cached token]({picture})")
    return "\n\n".join(parts)


def times_fewer(codec: str, head_dim: int = 64) -> float:
    """How many times fewer bytes a cached token of a head takes than in bf16."""
    if codec in ("bf16", "int8"):
        return 1.0 if codec == "bf16" else 4 * head_dim / (2 * head_dim + 8 / BLOCK)
    config = LlamaConfig.from_shape("llama-3.2-1b").model_copy(update={"head_dim": head_dim})
    exact, quantised = (bytes_per_token(name, config, 1, torch.bfloat16) for name in ("bf16", codec))
    return exact / quantised


def ablated(title: str, rows: list[dict[str, Any]]) -> list[str]:
    """Softmaxes, block sizes, selectors with half of the heads at 2 bits; then selectors by number of 2-bit heads."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        case = row["case"]
        if case["low_heads"] is not None:
            values = found.setdefault(case["selector"], {}).setdefault(case["low_heads"], {})
            values[case["measure"]] = row["value"]
    few = [row for row in rows if row["case"]["low_heads"] is not None]
    if not few:
        return [codecs(title, rows)]
    counts = sorted({count for of in found.values() for count in of})

    def cell(values: dict[str, float]) -> str:
        parts = [f"{values['bits per byte']:.4f}"] if "bits per byte" in values else []
        return ", ".join(parts + ([f"{values['recall']:.0%}"] if "recall" in values else []))

    lines = [[selector, *(cell(of.get(count, {})) for count in counts)] for selector, of in found.items()]
    return [
        codecs(title, [row for row in rows if row["case"]["low_heads"] is None]),
        "Bits per byte and facts recalled at lambda 0, by the number of KV heads that `turbo-mixed` stores in 2 bits:",
        provenance(*few),
        table(["heads of lowest priority by", *map(str, counts)], lines),
    ]


def over_contexts(rows: list[dict[str, Any]]) -> str:
    """Bits per byte of each cache and lambda by context, and hit rates of layers; empty for a single context."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] == "bits per byte":
            found.setdefault((case["threshold"], case["cache"]), {})[case["context"]] = row
    contexts = sorted({context for of_context in found.values() for context in of_context})
    if len(contexts) < 2:
        return ""
    lines = [
        [
            lambda_name(threshold),
            cache,
            *(f"{of[context]['value']:.4f}" if context in of else "" for context in contexts),
        ]
        for (threshold, cache), of in found.items()
    ]
    measured = {key: of[contexts[-1]] for key, of in found.items() if key[0] == "0.1" and contexts[-1] in of}
    layers = range(len(next(iter(measured.values()))["hit_rate_per_layer"])) if measured else range(0)
    rates = [[cache, *(f"{rate:.3f}" for rate in row["hit_rate_per_layer"])] for (_, cache), row in measured.items()]
    return "\n\n".join(
        [
            "Bits per byte by context:",
            table(["lambda", "cache", *map(str, contexts)], lines),
            f"Hit rate of each layer on text at lambda 0.1 ({contexts[-1]} tokens):",
            table(["cache", *(f"layer {layer}" for layer in layers)], rates),
        ]
    )


def needles(rows: list[dict[str, Any]]) -> str:
    """Facts and pairs recalled over all contexts and depths, and the picture; empty without rows."""
    found: dict[tuple[str, str], dict[str, dict[tuple[int, float], dict[str, Any]]]] = {}
    for row in rows:
        case = row["case"]
        if case["depth"] is not None:
            of = found.setdefault((case["measure"], case["cache"]), {}).setdefault(case["threshold"], {})
            of[case["context"], case["depth"]] = row  # the last of repeated rows counts
    if not found:
        return ""
    thresholds = list(dict.fromkeys(threshold for of in found.values() for threshold in of))
    lines = [
        [NEEDLES[measure], cache, *(recalled(list(of.get(threshold, {}).values())) for threshold in thresholds)]
        for (measure, cache), of in sorted(found.items(), key=lambda item: list(NEEDLES).index(item[0][0]))
    ]
    cases = [row["case"] for row in rows if row["case"]["depth"] is not None]
    contexts, depths = (sorted({case[name] for case in cases}) for name in ("context", "depth"))
    return "\n\n".join(
        [
            f"Recalled over all contexts ({', '.join(map(str, contexts))} tokens; for all pairs the shortest context"
            f" that holds them) and depths ({', '.join(f'{depth:g}' for depth in depths)}). A smaller total means that"
            " only some of these were measured:",
            table(["what", "cache", *map(lambda_name, thresholds)], lines),
            "The picture has a column for each cache, all with exact softmax. Each column has a map for each lambda,"
            " first of facts, then of pairs: contexts from left to right, depths from top to bottom. An empty field was"
            " not measured. Below the maps are the hit rates of the layers.",
            "![Needles recalled by context and depth, and hit rates of layers, for each lambda](needles.png)",
        ]
    )


def recalled(rows: list[dict[str, Any]]) -> str:
    """Format the number of recalled prompts of all; empty without rows."""
    total = sum(row["case"]["samples"] for row in rows)
    return f"{round(sum(row['case']['samples'] * row['value'] for row in rows))} of {total}" if rows else ""


def lambda_name(threshold: str) -> str:
    """Format lambda as a heading."""
    return "fixed layers" if threshold == "fixed" else f"{float(threshold):g}"


NEEDLES = {"needle": "a fact in a text", "record needle": "one of as many pairs as fit"}
QUALITY_COLUMNS = {
    "bits per byte": "bits per byte",
    "recall": "fact recalled",
    "record recall": "UUID recalled",
}


def short_quality() -> str:
    """A line for each lambda: hit rate on text, bits per byte at the longest context, recall."""
    rows = read("quality.jsonl")
    longest = max(row["case"]["context"] for row in rows)
    head = ["lambda", "hit rate on text", f"bits per byte, {longest} tokens"]
    head += [f"fact recalled from {longest} tokens", "UUID recalled among 75 pairs"]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = row["case"]
        if case["measure"] != "bits per byte" or case["context"] == longest:
            found.setdefault(case["threshold"], {})[case["measure"]] = row
    lines = [
        [
            f"{float(threshold):g}",
            f"{of['bits per byte']['hit_rate']:.0%}",
            f"{of['bits per byte']['value']:.4f}",
            *(f"{of[measure]['value']:.0%}" for measure in ("recall", "record recall")),
        ]
        for threshold, of in found.items()
    ]
    return "\n".join([table(head, lines), "", provenance(rows[0])])
