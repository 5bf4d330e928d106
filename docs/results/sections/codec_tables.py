"""Tables of decode attention over quantised caches."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, read, table

from alspec.config import QUANTISED_CODECS

READING = "reading alone"
READING_TEXT = (
    "*Reading alone* is a kernel that reads the same number of bytes into shared memory and does nothing else."
)
SPEC_COLUMN = "with `A~` and verdict"

# Lines of `faster_than_bf16`: cache, GPU, query and KV heads, and whether the cache and bf16 have `A~` and verdict.
AGAINST_BF16 = {
    "`turbo4`": ("turbo4", "", "32/8", False, False),
    "`turbo4`, both with `A~` and verdict": ("turbo4", "", "32/8", True, True),
    "`turbo4` with them, bf16 without": ("turbo4", "", "32/8", True, False),
    "`turbo-mixed`": ("turbo-mixed", "", "32/8", False, False),
    "`turbo-mixed`, both with `A~` and verdict": ("turbo-mixed", "", "32/8", True, True),
    "`turbo2`": ("turbo2", "", "32/8", False, False),
    "`turbo4`, 8/2 heads": ("turbo4", "", "8/2", False, False),
    "`turbo4`, H100": ("turbo4", "_h100", "32/8", False, False),
    "`turbo-mixed`, H100": ("turbo-mixed", "_h100", "32/8", False, False),
}


def quantised(title: str, rows: list[dict[str, Any]]) -> str:
    """Decode attention over quantised caches beside bf16, one table for each shape."""
    if not rows:
        return ""
    parts = [
        f"## {title}",
        "p50 in microseconds, and the speed relative to the lean kernel over bf16 under the same heading. Each shape"
        f" has two tables: plain attention, and attention {SPEC_COLUMN}. {READING_TEXT}",
        provenance(*rows),
    ]
    for shape in dict.fromkeys(row["case"]["heads"] for row in rows):
        for bench, kind in (("decode_attention", "plain"), ("speculative_decode", SPEC_COLUMN)):
            found: dict[str, dict[int, float]] = {}
            for row in rows:
                if row["case"]["heads"] == shape and row["bench"] in (bench, "reading"):
                    name = "torch SDPA, bf16" if row["impl"] == "torch.sdpa" else row["case"]["codec"]
                    name += ", SAS" if row["impl"].endswith(".sas") else ""
                    name += f", {READING}" if row["bench"] == "reading" else ""
                    found.setdefault(name, {})[row["case"]["context"]] = row["us"]["p50"]
            contexts = sorted(found["bf16"])
            lines = [
                [name, *(f"{us[at]:.1f} ({found['bf16'][at] / us[at]:.2f}x)" if at in us else "" for at in contexts)]
                for name, us in found.items()
            ]
            parts += [f"### {shape} heads of 128, {kind}", table(["cache", *map(str, contexts)], lines)]
    return "\n\n".join(parts)


def short_quantised() -> str:
    """Attention alone and whole steps on one GPU, over each cache; empty if there are no rows."""
    attention = [row for row in read("turbo_attention.jsonl") if row["case"]["heads"] == "32/8"]
    names = ("bf16", "turbo4", "turbo-mixed")  # measured at all contexts
    steps_of = [
        row
        for row in read("decode_step.jsonl")
        if (row["case"]["shape"], row["case"]["world"], row["case"]["mode"]) == ("llama-3.1-8b", 1, "off")
        if row["case"]["batch"] == 1 and row["case"]["cuda_graph"]
    ]
    parts = []
    for title, rows in (("attention of a layer, us", attention), ("whole step, ms", steps_of)):
        found: dict[str, dict[int, float]] = {}
        for row in rows:
            case, is_ours = row["case"], row["impl"].startswith("alspec")
            is_plain = row["bench"] != "speculative_decode" and not row["impl"].endswith(".sas")
            is_plain &= case.get("softmax", "exact") == "exact"
            if is_ours and is_plain and case.get("text") is None:
                codec = case.get("codec") or case["kv_cache"]
                found.setdefault(codec, {})[case["context"]] = row["us"]["p50"] / (1 if rows is attention else 1e3)
        if set(names) - set(found):
            continue
        contexts = sorted(set.intersection(*(set(found[name]) for name in names)))
        digits = 1 if rows is attention else 2
        lines = [
            [name, *(f"{found[name][context]:.{digits}f}" if context in found[name] else "" for context in contexts)]
            for name in ("bf16", *(name for name in QUANTISED_CODECS if name in found))
        ]
        parts += [table([title, *map(str, contexts)], lines), "", provenance(*rows), ""]
    return "\n".join(parts[:-1])


def _times(gpu: str, heads: str, codec: str, has_verdict: bool, is_reading: bool = False) -> dict[int, float]:
    """Microseconds by context, with exact exponentials; `is_reading`: of the same bytes without attention."""
    bench = "reading" if is_reading else "speculative_decode" if has_verdict else "decode_attention"
    return {
        row["case"]["context"]: row["us"]["p50"]
        for row in read(f"turbo_attention{gpu}.jsonl")
        if (row["bench"], row["case"]["heads"], row["case"]["codec"]) == (bench, heads, codec)
        and row["impl"] != "torch.sdpa"
        and not row["impl"].endswith(".sas")
    }


def faster_than_bf16() -> str:
    """How many times faster attention over a quantised cache is than the kernel over bf16 of the same run."""
    contexts = sorted(_times("", "32/8", "bf16", False))
    lines = []
    for name, (codec, gpu, heads, has_verdict, bf16_has) in AGAINST_BF16.items():
        ours, bf16 = _times(gpu, heads, codec, has_verdict), _times(gpu, heads, "bf16", bf16_has)
        cells = [f"{bf16[at] / ours[at]:.2f}x" if at in ours and at in bf16 else "" for at in contexts]
        lines.append([name, *cells])
    return table(["against bf16", *map(str, contexts)], lines)


def alone(context: int = 131072) -> str:
    """What reading the records alone would allow, and how much longer attention takes."""
    lines, bf16 = [], _times("", "32/8", "bf16", False)
    for codec in ("turbo4", "turbo-mixed", "turbo2"):
        reading = _times("", "32/8", codec, False, is_reading=True).get(context)
        if reading is not None:
            plain, spec = (_times("", "32/8", codec, has_verdict)[context] - reading for has_verdict in (False, True))
            beyond = f"{plain:.1f} us; with `A~` {spec:.1f} us"
            lines.append([f"`{codec}`", f"{reading:.1f} us", f"{bf16[context] / reading:.2f}x", beyond])
    return table([f"{context} tokens", "reading alone", "against bf16", "attention beyond reading"], lines)
