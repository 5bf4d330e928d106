"""The kernels of a traced step whose two groups talk by collectives: places, gates, and the parts of a layer.

A layer forks behind the guess (`runtime/decode/swapped_decoder.py`): *aside*, on a stream of its own, is what a
receiver does on the guess; *main* is the rest of the attention, the verdict, and what a sender does again; *verdict* is
the way of the verdict to all ranks. Kernels of aside and main have the same names and lie side by side in time, so
it is the stream that tells them apart. A captured branch may go on in another stream with each collective;
`_aside_streams` finds out which streams are whose.

Shapes: L layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from alspec.errors import AlspecError
from alspec.runtime.profiling.kernel_names import APPLY_VERDICT, DECIDE, MLP, PACK, UNPACK, Row, operation_of, work_us

__all__ = ["is_open", "is_swapped", "place", "swap_parts"]


def is_swapped(rows: list[Row]) -> bool:
    """Whether these kernels are of such a step."""
    return any(APPLY_VERDICT in row["kernel"] for row in rows)


def place(steps: list[list[Row]]) -> list[Row]:
    """One rank's rows, in the order of their starts, with `op`, `layer`, `branch`, `ready_us` and `open`."""
    streams = _aside_streams(steps)
    placed: list[Row] = []
    for rows in steps:
        placed += _place_step(rows, max((row["end_us"] for row in placed), default=0.0), streams)
    return placed


def _place_step(rows: list[Row], ready_us: float, streams: list[set[int]]) -> list[Row]:
    """The `ready_us` of the first is given, and of each layer the streams of its branch aside.

    A kernel is ready when the one before it in its branch has ended: behind a fork the one ahead of the fork, behind a
    join the latest of all branches. A kernel of another name (NCCL's, a copy) belongs to the operation before it, but
    one between attention and verdict gathers the verdict's sums.
    """
    num_layers = len(streams)
    layer = -1
    spec_branch: set[int] = set()
    ops = {"main": "embed", "spec": "", "verdict": "verdict"}
    ready = {"main": ready_us, "spec": 0.0, "verdict": 0.0}
    of_verdict = _verdict_rows(rows)
    placed = []
    for index, row in enumerate(rows):
        name = row["kernel"]
        if ops["main"] in ("pre_attention", "post_attention") and _is_first_of_layer(name):
            ready["main"], spec_branch = max(ready.values()), set()
        branch = "verdict" if index in of_verdict else "spec" if row["stream"] in spec_branch else "main"
        op = ops[branch] = _operation(name, ops[branch], layer + 1 == num_layers)
        at = layer + 1 if op in ("pre_attention", "predictor", "agree", "lm_head") else max(layer, 0)
        placed.append(row | {"op": op, "layer": at, "branch": branch, "ready_us": ready[branch], "open": True})
        ready[branch] = max(ready[branch], row["end_us"])
        if DECIDE in name:
            ready["verdict"] = row["end_us"]
        if PACK in name and layer + 1 < num_layers:
            layer += 1
            spec_branch = streams[layer]
            ops["spec"], ready["spec"] = "handover", row["end_us"]
    return placed


def _verdict_rows(rows: list[Row]) -> set[int]:
    """Indices of those of the branch `verdict`: what spreads it, and the collective ahead on the same stream."""
    found: set[int] = set()
    newest: dict[int, int] = {}  # of each stream
    for index, row in enumerate(rows):
        if APPLY_VERDICT in row["kernel"]:
            found |= {newest.get(row["stream"], index), index}
        newest[row["stream"]] = index
    return found


@dataclass
class _Stretch:
    """Kernels of a layer's branch on one stream, from a collective to the next."""

    stream: int
    start_us: float
    end_us: float
    kernels: list[str]

    def has(self, part: str) -> bool:
        return any(part in kernel for kernel in self.kernels)


def _aside_streams(steps: list[list[Row]]) -> list[set[int]]:
    """[L]: the streams on which each layer's branch aside runs.

    The first stretch of either branch has a kernel of its own, and stretches behind all-reduces are alike in both. But
    a graph's kernels are on the same streams in all replays, while what the branches do, and so how long they take,
    depends on the roles. A branch whose stretch ends earlier comes to its all-reduce earlier: that decides, by the
    sum over steps of how much.

    Raises:
        AlspecError: steps do not agree on two streams.
    """
    by_step = [_stretches(rows) for rows in steps]
    found: list[set[int]] = []
    for layers in zip(*by_step, strict=True):  # one layer, in each step
        streams = {_only(layers[0], UNPACK).stream}
        found.append(streams)
        if not any(stretch.has(DECIDE) for stretch in layers[0]):  # groups of one rank
            continue
        ends = [[_only(layer, part).end_us for part in (UNPACK, DECIDE)] for layer in layers]
        for has_mlp in (True, False):
            pairs = [_behind_all_reduces(layer, has_mlp) for layer in layers]
            if any(len(pair) != 2 or pair.keys() != pairs[0].keys() for pair in pairs):
                raise AlspecError(
                    "trace: a layer's branches cannot be told apart: their streams are not two in all steps"
                )
            one, other = pairs[0]
            lead = sum(
                (aside_us - main_us) * (pair[one].start_us - pair[other].start_us)
                for (aside_us, main_us), pair in zip(ends, pairs, strict=True)
            )
            spec_branch, main = (one, other) if lead > 0 else (other, one)
            streams.add(spec_branch)
            ends = [[pair[spec_branch].end_us, pair[main].end_us] for pair in pairs]
    return found


def _stretches(rows: list[Row]) -> list[list[_Stretch]]:
    """[L] those of all branches of one step."""
    num_layers = sum(APPLY_VERDICT in row["kernel"] for row in rows)
    found: list[list[_Stretch]] = []
    current: dict[int, _Stretch] = {}
    for row in rows:
        name, stream = row["kernel"], row["stream"]
        if operation_of(name) in ("predictor", "full_attention"):  # ahead of the fork, or main without a verdict yet
            current.pop(stream, None)
            if PACK in name:
                if len(found) == num_layers:  # the residual, after the last layer
                    return found
                found.append([])
                current.clear()
        elif found and "nccl" in name.lower():
            current[stream] = _Stretch(stream, row["start_us"], row["end_us"], [name])
            found[-1].append(current[stream])
        elif stream in current:
            current[stream].end_us = row["end_us"]
            current[stream].kernels.append(name)
    return found


def _only(layer: list[_Stretch], part: str) -> _Stretch:
    return next(stretch for stretch in layer if stretch.has(part))


def _behind_all_reduces(layer: list[_Stretch], has_mlp: bool) -> dict[int, _Stretch]:
    """By stream, the two that begin with the MLP, or the two behind it."""
    return {
        stretch.stream: stretch
        for stretch in layer
        if not any(stretch.has(part) for part in (UNPACK, DECIDE, APPLY_VERDICT)) and stretch.has(MLP) == has_mlp
    }


def _is_first_of_layer(name: str) -> bool:
    """Of a kernel behind the projections of main and aside: the next guess, or the first one after the last layer."""
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

    Collectives run on all ranks: the swap counts for the receiver, who waits for it, those of the verdict for the
    sender; the way of a verdict that rejects for nobody, because nobody waits for it.
    """
    op, layer, name = row["op"], row["layer"], row["kernel"]
    if op in ("pre_attention", "post_attention"):
        fork = layer - 1 if op == "pre_attention" else layer
        if fork < 0:
            return group == senders[0]
        return group != senders[fork] if row["branch"] == "spec" else group == senders[fork] and not accepted[fork]
    if op == "handover" or "unpack_" in name:
        return group != senders[layer]
    if row["branch"] == "verdict":
        return group == senders[layer] and bool(accepted[layer])
    if op in ("predictor", "full_attention", "verdict") or PACK in name:
        return group == senders[layer]
    return True


def swap_parts(
    labelled: list[list[Row]], verdicts: list[list[int]], senders: list[list[int]]
) -> dict[str, list[float]]:
    """As `layer_parts`, of paired groups over collectives; senders: [steps][L + 1].

    `sender`: from where a layer's guess may begin to the sender's verdict. `receiver`: from there until the receiver
    has unpacked the handover. `layer`: post-attention and the next pre-attention, in the branch that computes them.
    `skipped`: of an accepted guess, from that verdict until the receiver may send: it has come to know the verdict, and
    its main branch, whose gates are closed, has ended. `fixed`: what precedes the first pre-attention and follows the
    last layer's join.
    """
    begins: dict[tuple[int, int, int, str], float] = {}
    ends: dict[tuple[int, int, int, str], float] = defaultdict(float)
    attention_us: dict[tuple[int, int, int], float] = defaultdict(float)
    for rank, rows in enumerate(labelled):
        for row in rows:
            step, layer = row["step"], row["layer"]
            name = row["op"] if row["op"] not in ("pre_attention", "verdict") else f"{row['op']} {row['branch']}"
            begins.setdefault((rank, step, layer, name), row["ready_us"])
            ends[rank, step, layer, name] = max(row["end_us"], ends[rank, step, layer, name])
            if row["op"] == "full_attention" and row["open"]:
                attention_us[rank, step, layer] += work_us(row)
    tp_size = len(labelled) // 2
    parts: dict[str, list[float]] = {name: [] for name in ("sender", "receiver", "layer", "skipped", "fixed", "step")}
    for step, (line, accepted) in enumerate(zip(senders, verdicts, strict=True), start=1):
        for tp_rank in range(tp_size):
            ranks = [group * tp_size + tp_rank for group in line]
            for layer, hit in enumerate(accepted):
                sender, receiver = ranks[layer], tp_rank + (1 - line[layer]) * tp_size
                begin = begins[sender, step, layer, "predictor"]
                decided, arrived = ends[sender, step, layer, "verdict main"], ends[receiver, step, layer, "handover"]
                parts["sender"].append(decided - begin)
                parts["receiver"].append(arrived - begin)
                if layer + 1 < len(accepted):
                    parts["layer"].append(ends[receiver, step, layer + 1, "pre_attention aside"] - arrived)
                    name, rank = ("skipped", receiver) if hit else ("layer", sender)
                    ended = ends[rank, step, layer + 1, "pre_attention main"]
                    known = ends[rank, step, layer, "verdict verdict"] if hit else 0.0
                    parts[name].append(max(ended, known) - decided)
            if step > 1:
                num_layers, first, last = len(accepted), ranks[0], ranks[-1]
                before = ends[first, step - 1, num_layers, "lm_head"]
                head = ends[first, step, 0, "embed"] - before
                tail = ends[last, step, num_layers, "lm_head"] - begins[last, step, num_layers, "agree"]
                parts["fixed"].append(head + tail)
                parts["step"].append(ends[first, step, num_layers, "lm_head"] - before)
    return {"attention": list(attention_us.values())} | parts
