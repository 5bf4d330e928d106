"""The table of decode attention on random shapes, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table

from alspec.launch.bench.shape_ratios import distribution, lengths_text, ratios


def shapes(title: str, rows: list[dict[str, Any]], picture: str = "") -> str:
    """Decode attention on random shapes: distribution of the ratios, the worst shapes, and a picture if given."""
    if not rows:
        return ""
    found = ratios(rows)
    spreads = {"SDPA": distribution([x.sdpa for x in found]), "quickest other": distribution([x.best for x in found])}
    columns = list(next(iter(spreads.values())))
    worst = [
        [
            f"{x.case['num_qo_heads']}/{x.case['num_kv_heads']}",
            str(x.case["head_dim"]),
            str(x.case["batch"]),
            lengths_text(x.case["seq_lens"]),
            f"{x.us:.1f}",
            f"{x.best:.2f}x",
        ]
        for x in sorted(found, key=lambda x: x.best)[:10]
    ]
    return "\n\n".join(
        [
            f"## {title}",
            f"Time of the others divided by ours (bf16 cache), on {len(found)} random shapes: 1 to 16 query heads for"
            " each of 1 to 16 KV heads, heads of 64 to 256, 1 to 32 requests, 128 to 256K tokens, half of the batches"
            " ragged.",
            provenance(*rows),
            table(["time / ours", *columns], [[name, *cells.values()] for name, cells in spreads.items()]),
            "The ten worst shapes:",
            table(["heads", "head_dim", "requests", "tokens", "ours, us", "quickest other / ours"], worst),
            *([f"![Ratio of each shape over the bytes of K and V]({picture})"] if picture else []),
        ]
    )
