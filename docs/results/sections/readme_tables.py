"""The three small tables of the project's README, made from the measured rows."""

from __future__ import annotations

from typing import Any

from result_rows import REPORTED, read, table, times_as_fast

from sections.link_table import alone_of, pairs_of, split_of

__all__ = ["attention_at_a_glance", "speculation_at_a_glance", "steps_at_a_glance", "steps_of_8b"]

Row = dict[str, Any]
CONTEXTS = (1024, 8192, 131072)
PAIR_CONTEXTS = (8192, 131072)
RECALL_HITS = "hits_recall32.jsonl"  # of each layer of SmolLM2, with 32 recalled blocks
GLANCE_CODECS = ("turbo4", "turbo-mixed", "turboquant3", "hybrid-k4v2")


def steps_of_8b(**wanted: object) -> dict[int, Row]:
    """Captured steps of the 8B shape, one request, bf16, by context; the last of repeated rows counts."""
    wanted = {"shape": "llama-3.1-8b", "batch": 1, "cuda_graph": True, "kv_cache": "bf16"} | wanted
    rows = [row for row in read("decode_step.jsonl") if not row["case"].get("text")]
    return {row["case"]["context"]: row for row in rows if wanted.items() <= row["case"].items()}


def _packed_steps(weights: str) -> dict[int, Row]:
    """The same with quantised weights, on one GPU."""
    rows = [row for row in read("weights.jsonl") if row["bench"] == "decode_step"]
    wanted = {"shape": "llama-3.1-8b", "world": 1, "batch": 1, "kv_cache": "bf16", "weights": weights}
    return {
        row["case"]["context"]: row
        for row in rows if wanted.items() <= row["case"].items() and "lm_head" not in row["case"]
    }  # fmt: skip


def _per_s(row: Row | None) -> str:
    return f"{row['tokens_per_s']:.0f}" if row else ""


def _with_share(row: Row | None) -> str:
    share = row["share_of_limit"] if row else None
    return _per_s(row) + ("" if share is None else f" ({share:.0%})")


def _speedup(base: Row | None, row: Row | None) -> str:
    return times_as_fast(base, row) if base and row else ""


def steps_at_a_glance() -> str:
    """Tensor parallelism on one, two and four GPUs beside gpt-fast's published steps on the same GPUs."""
    lines = []
    for world in (1, 2, 4):
        found = steps_of_8b(mode="off", world=world, transport=None if world == 1 else "symm")
        cells = [_with_share(found.get(at)) for at in CONTEXTS]
        reported = REPORTED.get(world, {})
        cells += [str(reported[at]) if at in reported else "" for at in PAIR_CONTEXTS]
        lines.append([f"{world} x H200", *cells])
    for weights in ("fp8", "int4"):
        packed = _packed_steps(weights)
        lines.append(
            [f"1 x H200, {weights.upper()} weights", *(_with_share(packed.get(at)) for at in CONTEXTS), "", ""]
        )
    head = ["", *(f"{context} tokens" for context in CONTEXTS), *(f"gpt-fast, {context}" for context in PAIR_CONTEXTS)]
    return table(head, lines)


def attention_at_a_glance() -> str:
    """Attention of one layer, 32/8 heads of 128, on one H200: ours over each cache, SDPA and FlashInfer."""
    names = {"torch.sdpa": "torch SDPA, bf16", "flashinfer": "FlashInfer, bf16"}
    found: dict[str, dict[int, float]] = {}
    for row in read("decode_attention.jsonl"):
        case = row["case"]
        if row["bench"] == "decode_attention" and (case["heads"], case["head_dim"]) == ("32/8", 128):
            found.setdefault(names.get(row["impl"], "alspec, bf16"), {})[case["context"]] = row["us"]["p50"]
    for row in read("turbo_attention.jsonl"):
        case = row["case"]
        is_plain = row["bench"] == "decode_attention" and row["impl"].startswith("alspec") and "sas" not in row["impl"]
        if is_plain and case["heads"] == "32/8" and case["codec"] in GLANCE_CODECS:
            found.setdefault(f"alspec, {case['codec']}", {})[case["context"]] = row["us"]["p50"]
    contexts = (8192, 32768, 131072)
    lines = [[name, *(f"{us[at]:.1f}" if at in us else "" for at in contexts)] for name, us in found.items()]
    return table(["1 x H200", *(f"{context} tokens" for context in contexts)], lines)


def speculation_at_a_glance() -> str:
    """A pair of 1 + 1 H200s beside two in tensor parallelism over the same link, and one alone."""
    linked = read("linked_pair.jsonl")
    over_tcp = pairs_of(linked, always=True)
    lines = []
    for label in ("NVLink", "TCP"):
        is_nvlink = label == "NVLink"
        two = steps_of_8b(mode="off", world=2, transport="symm") if is_nvlink else split_of(linked)
        alone = steps_of_8b(mode="off", world=1) if is_nvlink else alone_of(linked)
        for hit_rate in (0.0, 1.0) if is_nvlink else (0.0, RECALL_HITS, 1.0):
            found = steps_of_8b(mode="paired", world=2, transport="symm", hit_rate=hit_rate)
            pair = found if is_nvlink else over_tcp[hit_rate, 32]
            cells = []
            for at in PAIR_CONTEXTS:
                row = pair.get(at)
                cells += [_per_s(row), _speedup(two.get(at), row), _speedup(alone.get(at), row)]
            shares = [f"{row['case']['hit_rate']:.0%}" for row in pair.values()]
            hits = f"{shares[-1]}, SmolLM2's" if hit_rate == RECALL_HITS else f"{hit_rate:.0%}"
            lines.append([label, hits, *cells])
    head = ["link", "hits"]
    head += [f"{name}, {at}" for at in PAIR_CONTEXTS for name in ("tokens/s", "against two", "against one")]
    return table(head, lines)
