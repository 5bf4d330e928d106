"""The kernels of a traced step whose two groups talk by collectives: places, gates, and the parts of a layer.

A layer forks behind the guess (`models/swapped_decoder.py`): *aside*, on a stream of its own, is what a receiver does
on the guess; *main* is the rest of the attention, the verdict, and what a sender does again. Their kernels have the
same names and lie side by side in time, so it is the stream that tells them apart. A captured branch goes on in a new
stream behind each collective: with one rank in each group aside has one, its first kernel. Of more it would have
several, and which stream is whose could not be told.

Shapes: L layers.
"""

from __future__ import annotations

from collections import defaultdict

from .kernel_names import PACK, SETTLE, UNPACK, Row, operation_of, work_us

__all__ = ["is_open", "is_swapped", "place", "swap_parts"]


def is_swapped(rows: list[Row]) -> bool:
    """Whether these kernels are of such a step."""
    return any(SETTLE in row["kernel"] for row in rows)


def place(rows: list[Row], ready_us: float) -> list[Row]:
    """One step's rows, in the order of their starts, with `op`, `layer`, `branch`, `ready_us` and `open`.

    The `ready_us` of the first is given. A kernel is ready when the one before it in its branch has ended: behind a
    fork the one ahead of the fork, behind a join the later of both branches. A kernel of another name (NCCL's, a copy)
    belongs to the operation before it, but one between attention and verdict gathers the verdict's sums.
    """
    num_layers = sum(SETTLE in row["kernel"] for row in rows)
    streams = iter([row["stream"] for row in rows if UNPACK in row["kernel"]])  # of the branches aside, layer by layer
    aside = layer = -1
    ops = {"main": "embed", "aside": ""}
    ready = {"main": ready_us, "aside": 0.0}
    placed = []
    for row in rows:
        name = row["kernel"]
        if ops["main"] in ("pre_attention", "post_attention") and _is_first_of_layer(name):
            ready["main"], aside = max(ready.values()), -1
        branch = "aside" if row["stream"] == aside else "main"
        op = ops[branch] = _operation(name, ops[branch], layer + 1 == num_layers)
        at = layer + 1 if op in ("pre_attention", "predictor", "agree", "lm_head") else max(layer, 0)
        placed.append(row | {"op": op, "layer": at, "branch": branch, "ready_us": ready[branch], "open": True})
        ready[branch] = max(ready[branch], row["end_us"])
        if PACK in name and layer + 1 < num_layers:
            layer, aside = layer + 1, next(streams, -1)
            ops["aside"], ready["aside"] = "handover", row["end_us"]
    return placed


def _is_first_of_layer(name: str) -> bool:
    """Of a kernel behind the projections of both branches: the next guess, or the first one after the last layer."""
    return operation_of(name) in ("predictor", "full_attention")


def _operation(name: str, before: str, layers_ended: bool) -> str:
    """Of a kernel, given that of the one before it in its branch."""
    found = operation_of(name)
    if PACK in name and layers_ended:
        return "agree"
    if before in ("agree", "lm_head"):
        return "lm_head" if found in ("post_attention", "lm_head") else before
    if found == "full_attention":  # the first one in a layer makes the guess
        return found if before in ("predictor", "full_attention") else "predictor"
    if found is None:
        return "verdict" if before == "full_attention" else before
    return found


def is_open(row: Row, group: int, senders: list[int], accepted: list[int]) -> bool:
    """Whether this group's gate was open; senders: [L + 1] and accepted: [L] of the row's step.

    Collectives run on all ranks: the swap counts for the receiver, who waits for it, the verdict for the sender.
    """
    op, layer, name = row["op"], row["layer"], row["kernel"]
    if op in ("pre_attention", "post_attention"):
        fork = layer - 1 if op == "pre_attention" else layer
        if fork < 0:
            return group == senders[0]
        return group != senders[fork] if row["branch"] == "aside" else group == senders[fork] and not accepted[fork]
    if op == "handover" or "unpack_" in name:
        return group != senders[layer]
    if op in ("predictor", "full_attention", "verdict") or PACK in name:
        return group == senders[layer]
    return True


def swap_parts(
    labelled: list[list[Row]], verdicts: list[list[int]], senders: list[list[int]]
) -> dict[str, list[float]]:
    """As `layer_parts`, of a pair of two ranks over collectives; senders: [steps][L + 1].

    `sender`: from where a layer's guess may begin to the verdict. `receiver`: from there until the receiver has
    unpacked the handover. `layer`: post-attention and the next pre-attention, in the branch that computes them.
    `skipped`: of an accepted guess, from the verdict to the end of the receiver's main branch, whose gates are closed:
    until then it may not send. `fixed`: what precedes the first pre-attention and follows the last layer's join.
    """
    begins: dict[tuple[int, int, int, str], float] = {}
    ends: dict[tuple[int, int, int, str], float] = defaultdict(float)
    attention_us: dict[tuple[int, int], float] = defaultdict(float)
    for rank, rows in enumerate(labelled):
        for row in rows:
            step, layer = row["step"], row["layer"]
            name = row["op"] if row["op"] != "pre_attention" else f"pre_attention {row['branch']}"
            begins.setdefault((rank, step, layer, name), row["ready_us"])
            ends[rank, step, layer, name] = max(row["end_us"], ends[rank, step, layer, name])
            if row["op"] == "full_attention" and row["open"]:
                attention_us[step, layer] += work_us(row)
    parts: dict[str, list[float]] = {name: [] for name in ("sender", "receiver", "layer", "skipped", "fixed", "step")}
    for step, (line, accepted) in enumerate(zip(senders, verdicts, strict=True), start=1):
        for layer, hit in enumerate(accepted):
            sender, receiver = line[layer], 1 - line[layer]
            begin = begins[sender, step, layer, "predictor"]
            decided, arrived = ends[sender, step, layer, "verdict"], ends[receiver, step, layer, "handover"]
            parts["sender"].append(decided - begin)
            parts["receiver"].append(arrived - begin)
            if layer + 1 < len(accepted):
                parts["layer"].append(ends[receiver, step, layer + 1, "pre_attention aside"] - arrived)
                name, rank = ("skipped", receiver) if hit else ("layer", sender)
                parts[name].append(ends[rank, step, layer + 1, "pre_attention main"] - decided)
        if step > 1:
            num_layers = len(accepted)
            before = ends[line[0], step - 1, num_layers, "lm_head"]
            head = ends[line[0], step, 0, "embed"] - before
            tail = ends[line[-1], step, num_layers, "lm_head"] - begins[line[-1], step, num_layers, "agree"]
            parts["fixed"].append(head + tail)
            parts["step"].append(ends[line[0], step, num_layers, "lm_head"] - before)
    return {"attention": list(attention_us.values())} | parts
