"""The table of a pair over a link that kernels cannot reach across, for tables.py."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from result_rows import HERE, provenance, table, times_as_fast

from alspec.latency_model import linked_step_us
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.profiling.forced_verdicts import drawn_verdicts, forced_verdicts, read_layer_rates
from alspec.runtime.profiling.predicted_costs import LINK_GB_PER_S, LINK_US, link_costs, message_us

SOCKETS = "`NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo`"


def link(rows: list[dict[str, Any]], of_hosts: list[dict[str, Any]], of_two: dict[int, dict[str, Any]]) -> str:
    """The section on pairs over a link; empty without rows. of_hosts, of_two: as for `against_two`."""
    if not rows:
        return ""
    text = (
        "8B shape with random weights, one request, bf16. Two GPUs of one host that may talk over TCP alone"
        f" ({SOCKETS}), as two hosts would, against one of them alone. Hits above 0 % are forced."
        " A pair that does not pay pauses, unless it always speculates. One torchrun saw both GPUs, with these"
        " variables set: its commands do not show them."
    )
    text_of_hosts = (
        "2 + 2 GPUs: peer memory inside a group, TCP between the groups, each of which is a host to NCCL (HOST is 0 and"
        " 1). The rows of two GPUs alone are those of [Decode steps](#decode-steps). Where no layer speculates, 94 or"
        " 100 % of the layers were forced to accept, and every measured step paused, because a pair was not predicted"
        " to pay. So no layer had a verdict, and the rows have no hit rate."
    )
    return "\n\n".join(
        ["## Pairs over TCP", text, provenance(*rows), against_one(rows),
         text_of_hosts, provenance(*of_hosts), against_two(of_hosts, of_two), PREDICTED, predictions(rows + of_hosts)]
    )  # fmt: skip


PREDICTED = (
    "Steps of pairs that always speculate, and what `--plan` predicts for a message that takes as long alone as TCP"
    " between these GPUs. Where the messages of a step take longer than its kernels (2 + 2), its time varies."
)


def predictions(rows: list[dict[str, Any]]) -> str:
    """A line for each row of a pair that always speculates: measured and predicted milliseconds."""
    lines = []
    for row in rows:
        case = row["case"]
        if "--pair-always" not in row["command"]:
            continue
        config, tp_size = LlamaConfig.from_shape(case["shape"]), case["world"] // 2
        message = message_us(config, tp_size, LINK_US, LINK_GB_PER_S)
        costs = link_costs(
            config, tp_size, torch.bfloat16, case["context"], link_us=message, recalled=case["recall_blocks"]
        )
        steps = [forced_verdicts(config.num_layers, case["hit_rate"])]
        if "layer_rates" in case:
            rates = read_layer_rates(HERE / case["layer_rates"])
            steps = drawn_verdicts(config.num_layers, rates, num_steps=256).tolist()
        predicted = median(linked_step_us(costs, [bool(hit) for hit in accepted]) for accepted in steps)
        measured, names = row["us"]["p50"], (f"{tp_size} + {tp_size}", str(case["context"]), _hits(row))
        off = f"{predicted / measured - 1:+.1%}"
        lines.append([*names, f"{measured / 1e3:.2f}", f"{predicted / 1e3:.2f}", off])
    return table(["GPUs", "tokens", "", "measured, ms", "predicted, ms", "predicted against measured"], lines)


def against_one(rows: list[dict[str, Any]]) -> str:
    """A line for each way: tokens/s at each context, and how many times as fast as one GPU alone."""
    return _against(alone_of(rows), "one GPU", rows, "two", "1 + 1")


def against_two(rows: list[dict[str, Any]], of_two: dict[int, dict[str, Any]]) -> str:
    """The same for four GPUs of two hosts, and two of one host alone, whose rows are of another run."""
    return _against(of_two, "two GPUs", rows, "four", "2 + 2")


def _against(alone: dict[int, dict[str, Any]], name: str, rows: list[dict[str, Any]], split: str, groups: str) -> str:
    contexts = [at for at in split_of(rows) if at in alone]
    lines = [[f"{name} alone", *(f"{alone[at]['tokens_per_s']:.0f}" for at in contexts)]]

    def add(label: str, found: dict[int, dict[str, Any]]) -> None:
        cells = [f"{found[at]['tokens_per_s']:.0f} ({times_as_fast(alone[at], found[at])})" for at in contexts]
        lines.append([label, *cells])

    add(f"{split} in tensor parallelism", split_of(rows))
    for always, how in ((True, "always"), (False, "with pauses")):
        for found in pairs_of(rows, always).values():
            add(f"{groups}, {_hits(next(reversed(found.values())))}, {how}", found)
    return table(["", *(f"{context} tokens" for context in contexts)], lines)


def alone_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rows of one GPU alone, by context."""
    return {row["case"]["context"]: row for row in rows if row["case"]["world"] == 1}


def split_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rows of tensor parallelism over the link, by context."""
    return {row["case"]["context"]: row for row in rows if row["case"]["world"] > 1 and row["case"]["mode"] == "off"}


def _hits(row: dict[str, Any]) -> str:
    """How many layers accept, and which."""
    case = row["case"]
    if case["hit_rate"] is None:
        forced = f" ({case['forced_rate']:.0%} forced to accept)" if "forced_rate" in case else ""
        return f"no layer speculates{forced}"
    share = f"{case['hit_rate']:.0%} of the layers accept" + (", as SmolLM2's" if "layer_rates" in case else "")
    return f"{share}, {case['recall_blocks']} recalled blocks" if "recall_blocks" in case else share


def pairs_of(
    rows: list[dict[str, Any]], always: bool
) -> dict[tuple[float | str | None, int | None], dict[int, dict[str, Any]]]:
    """The rows of the pair: by hit rate, or by the file with that of each layer, and recalled blocks; then by context.

    always: rows of a pair that always speculates, not of one that pauses. That one may not speculate at all in a short
    context, and then has no hit rate there. Rows of one rate follow each other, from the shortest context on.
    """
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["case"]["mode"] == "paired" and ("--pair-always" in row["command"]) == always:
            if not groups or row["case"]["context"] <= groups[-1][-1]["case"]["context"]:
                groups.append([])
            groups[-1].append(row)
    found = {}
    for group in groups:
        case = group[-1]["case"]
        by_context = {row["case"]["context"]: row for row in group}
        rate = case.get("forced_rate") if case["hit_rate"] is None else case["hit_rate"]
        found[case.get("layer_rates", rate), case.get("recall_blocks")] = by_context
    return found
