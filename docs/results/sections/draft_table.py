"""The table of drafted tokens, for tables.py."""

from __future__ import annotations

import re
from typing import Any

from result_rows import provenance, table

from sections.recall_tables import text_of


def drafts(rows: list[dict[str, Any]], texts: list[dict[str, Any]]) -> str:
    """The section on drafts that the model accepts, and on texts with drafts; empty without rows."""
    if not rows:
        return ""
    text = (
        "Continuations of windows of a text: tokens that a round emits, and the share of rounds that accept the first,"
        " second, ... draft, and of each draft behind accepted ones. Those in fp32 are of few rounds: a difference of a"
        " tenth may be chance."
    )
    beside = (
        "Texts of 64 tokens behind 448 on a GPU, beside those of plain steps with the same seed. A round rounds"
        " differently from a plain step."
    )
    tables = [accepted(rows), beside, provenance(*texts), parted(texts)]
    return "\n\n".join(["## Accepted drafts", text, provenance(*rows), *tables])


def accepted(rows: list[dict[str, Any]]) -> str:
    """Tokens a round and accepted shares, a line for each row."""
    cells = []
    for row in rows:
        case, details = row["case"], row["details"]
        drafter = case["drafter"]
        if drafter == "self":
            blocks = re.search(r"--recall-blocks (\d+)", row["command"])
            recalled = f", {blocks[1] if blocks else 16} recalled"
            drafter += ", sink and window" if "--predictor window" in row["command"] else recalled
        weights = re.search(r"--draft-weights (\S+)", row["command"])
        if weights:
            drafter += f", {weights[1]} copy" if case["drafter"] == "self" else f", {weights[1]}"
        kept = re.search(r" --weights (\S+)", row["command"])
        by_place = details["accepted_by_place"]
        shares = " / ".join(f"{share:.0%}" for share in by_place)
        each = sum(by_place) / (1 + sum(by_place[:-1]))  # of the drafts behind accepted ones
        cells.append(
            [
                drafter, kept[1] if kept else "", text_of(row), str(case["context"]), f"{case['temperature']:g}",
                str(case["draft_tokens"]), case["dtype"], f"{row['value']:.2f}", f"{details['tokens_per_round']:.2f}",
                shares, f"{each:.0%}", str(details["rounds"]),
            ]
        )  # fmt: skip
    head = ["drafter", "weights", "text", "tokens", "temperature", "K", "dtype"]
    return table([*head, "tokens a step", "tokens a round", "accepted by place", "of each", "rounds"], cells)


def parted(rows: list[dict[str, Any]]) -> str:
    """How texts with drafts differ from those of plain steps, a line for each row."""
    cells = []
    for row in rows:
        case, details = row["case"], row["details"]
        by = details["parted_by"]
        texts = case["samples"]
        share = details["differing_tokens"] / (texts * case["new_tokens"])
        cells.append(
            [
                case["model"], case["drafter"], str(case["draft_tokens"]), case["dtype"], case["kv_cache"],
                f"{case['temperature']:g}", f"{len(by)} of {texts}", f"{share:.0%}",
                f"{min(by):.3f} to {max(by):.3f}" if by else "",
            ]
        )  # fmt: skip
    head = ["model", "drafter", "K", "dtype", "cache", "temperature", "texts that part"]
    head += ["tokens that differ, of all texts", "nats between the first two tokens, without noise"]
    return table(head, cells)
