"""The table of captured rounds against plain steps, for tables.py."""

from __future__ import annotations

from typing import Any

from result_rows import provenance, table

DEFAULT_BLOCKS = 16  # of `--recall-blocks`
REAL_TEXT = (
    "Drafts on SmolLM2, bf16, one GPU, verified: a passage that is repeated (copy), a function rewritten"
    " with one name replaced (edit), books, whose greedy continuation repeats itself and whose sampled one does not."
    " The first trial of drafts counts, and the mean of plain steps where it was measured."
)


def rounds(rows: list[dict[str, Any]]) -> str:
    """The section on the time of rounds; empty without rows."""
    if not rows:
        return ""
    text = (
        "8B shape with random weights over a cache of random numbers: a round with K drafts against a plain step of the"
        " same cache and context. Where a run measured no plain step of its own, the first of the kind is shown. A"
        " forced acceptance takes drafts whatever they are."
    )
    tables = [against_plain(rows), REAL_TEXT, with_texts(rows)]
    return "\n\n".join(["## Rounds with drafts", text, provenance(*rows), *tables])


def against_plain(rows: list[dict[str, Any]], with_ngram: bool = True) -> str:
    """A line for each kind of round and context with forced acceptance; later rows replace earlier ones."""
    plain, found = _plain_and_rounds(rows, is_real=False)
    lines = []
    for (place, *_, acceptance), row in sorted(found.items(), key=_order):
        step, case = _step_of(plain, place, row), row["case"]
        if case["draft"] == "ngram" and not with_ngram:
            continue
        step_ms, round_ms = step["us"]["p50"] / 1e3, row["us"]["p50"] / 1e3
        lines.append(
            [
                str(place[0]), _drafter(row), str(case["draft_tokens"]), str(case["batch"]),
                _option(row, "--weights") or "bf16", place[2], str(place[3]),
                f"{acceptance:.0%}", f"{step_ms:.2f}", f"{round_ms:.2f} ({round_ms / step_ms:.2f}x)",
                f"{row['tokens_per_step']:.2f}", _gain(step, row),
            ]
        )  # fmt: skip
    head = ["GPUs", "drafter", "K", "requests", "weights", "cache", "tokens", "accepted (forced)", "plain step, ms"]
    return table([*head, "round, ms", "tokens a round", "tokens/s"], lines)


def round_costs(rows: list[dict[str, Any]]) -> str:
    """For each cache and context, the time of a round of n-gram drafts in plain steps, by the number of drafts."""
    plain, found = _plain_and_rounds(rows, is_real=False)
    costs: dict[tuple[Any, ...], dict[int, float]] = {}
    for (place, _, drafter, count, _), row in sorted(found.items(), key=_order):
        if drafter == "ngram":
            key = place[0], row["case"]["batch"], *place[2:4]
            costs.setdefault(key, {})[count] = row["us"]["p50"] / _step_of(plain, place, row)["us"]["p50"]
    counts = sorted({count for found_costs in costs.values() for count in found_costs})
    cells = [
        [*map(str, key), *(f"{by_count[k]:.2f}" if k in by_count else "" for k in counts)]
        for key, by_count in costs.items()
    ]
    return table(["GPUs", "requests", "cache", "tokens", *(f"K {k}" for k in counts)], cells)


def _order(item: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, ...]:
    (place, _, drafter, count, _), row = item
    weights = place[1]
    return place[0], row["case"]["batch"], drafter.split(",")[0], weights, drafter, place[2], place[3], count


def with_texts(rows: list[dict[str, Any]]) -> str:
    """A line for each text whose drafts were verified; the host pauses drafts that do not pay."""
    plain, found = _plain_and_rounds(rows, is_real=True)
    lines = []
    for (place, *_), row in found.items():
        step, case = _step_of(plain, place, row), row["case"]
        lines.append(
            [
                case["shape"], _drafter(row), case["text"].removesuffix(".txt"), str(case["context"]),
                f"{case['temperature']:g}", _option(row, "--steps"), str(case["draft_tokens"]),
                f"{step['us']['p50'] / 1e3:.3f}", f"{row['us']['p50'] / 1e3:.3f}", f"{row['tokens_per_step']:.2f}",
                _gain(step, row),
            ]
        )  # fmt: skip
    head = [
        "model",
        "drafter",
        "text",
        "tokens",
        "temperature",
        "steps",
        "K",
        "plain step, ms",
        "round or step, ms, p50",
    ]
    return table([*head, "tokens a step", "tokens/s"], lines)


Found = dict[tuple[Any, ...], dict[str, Any]]


def _plain_and_rounds(rows: list[dict[str, Any]], is_real: bool) -> tuple[Found, Found]:
    plain, found = {}, {}
    for row in rows:
        case = row["case"]
        if row["bench"] == "decode_step":
            plain[*_place(row), row["commit"], case.get("temperature") or 0.0] = row
            plain.setdefault(_place(row), row)
        elif (case["acceptance"] == "real") == is_real:
            how = (case["temperature"], _option(row, "--steps")) if is_real else ()
            found[_place(row), case["text"], _drafter(row), case["draft_tokens"], *how, case["acceptance"]] = row
    return plain, found


def _step_of(plain: Found, place: tuple[Any, ...], row: dict[str, Any]) -> dict[str, Any]:
    """The plain step that was measured with a round, on the same machine; else the first one of its kind."""
    return plain.get((*place, row["commit"], row["case"]["temperature"])) or plain[place]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a plain step and a round have in common: ranks, weights, cache, context, model and requests."""
    case = row["case"]
    return case["world"], _option(row, "--weights"), case["kv_cache"], case["context"], case["shape"], case["batch"]


def _drafter(row: dict[str, Any]) -> str:
    draft, weights = row["case"]["draft"], _option(row, "--draft-weights")
    blocks = row["case"].get("recall_blocks", DEFAULT_BLOCKS)
    recalled = f", {blocks} recalled blocks" if draft == "self" and blocks != DEFAULT_BLOCKS else ""
    return draft + (f", {weights}{' copy' if draft == 'self' else ''}" if weights else "") + recalled


def _option(row: dict[str, Any], name: str) -> str:
    """The value of an option in the command that measured a row; '' if it was not given, or `auto`."""
    words = row["command"].split()
    value = words[words.index(name) + 1] if name in words else ""
    return "" if value == "auto" else value


def _gain(step: dict[str, Any], row: dict[str, Any]) -> str:
    """Tokens a second, of plain steps by their mean if that was measured: slow steps count on both sides."""
    plain = row["case"]["batch"] / step["mean_us"] * 1e6 if "mean_us" in step else step["tokens_per_s"]
    return f"{row['tokens_per_s']:.0f} ({row['tokens_per_s'] / plain:.2f}x)"
