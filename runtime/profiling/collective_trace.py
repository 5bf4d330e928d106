"""Kernel traces of a pair over collectives: operation, branch and gate of each kernel, and the time of a layer's parts.

A layer forks after the predictor (`runtime/decode/collective_decoder.py`). The *spec* branch, on its own stream, is the
receiver's work on `A~`. The *main* branch is the rest of the attention, the verdict, and the sender's recompute. The
*verdict* branch sends the verdict to all ranks.

Kernels of the spec and the main branch have the same names and overlap in time, so only the stream tells them apart. A
captured branch may continue on another stream after each collective; `_spec_branch_streams` finds the streams.

Shapes: L layers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from alspec.errors import AlspecError
from alspec.runtime.profiling.kernel_names import APPLY_VERDICT, DECIDE, MLP, PACK, UNPACK, Row, operation_of, work_us

__all__ = ["is_open", "is_over_collectives", "place", "collective_parts"]


def is_over_collectives(rows: list[Row]) -> bool:
    """Return whether these kernels belong to a pair over collectives."""
    return any(APPLY_VERDICT in row["kernel"] for row in rows)


def place(steps: list[list[Row]]) -> list[Row]:
    """Add `op`, `layer`, `branch`, `ready_us` and `open` to one rank's rows [steps], in the order of their starts."""
    streams = _spec_branch_streams(steps)
    labelled: list[Row] = []
    for rows in steps:
        labelled += _label_step(rows, max((row["end_us"] for row in labelled), default=0.0), streams)
    return labelled


def _label_step(rows: list[Row], ready_us: float, streams: list[set[int]]) -> list[Row]:
    """Label the rows of one step.

    A kernel is ready when the one before it in its branch has ended: after a fork, the one before the fork; after a
    join, the last of all branches. A kernel without an operation of its own (NCCL's, a copy) belongs to the operation
    before it, except that one between attention and verdict gathers the sums of the verdict.

    Args:
        rows: in the order of their starts.
        ready_us: when the first kernel is ready.
        streams: [L], the streams of each layer's spec branch.
    """
    num_layers = len(streams)
    layer = -1
    spec_branch: set[int] = set()
    ops = {"main": "embed", "spec": "", "verdict": "verdict"}
    ready = {"main": ready_us, "spec": 0.0, "verdict": 0.0}
    verdict_rows = _verdict_rows(rows)
    labelled = []
    for index, row in enumerate(rows):
        name = row["kernel"]
        if ops["main"] in ("pre_attention", "post_attention") and _is_first_of_layer(name):
            ready["main"], spec_branch = max(ready.values()), set()
        branch = "verdict" if index in verdict_rows else "spec" if row["stream"] in spec_branch else "main"
        op = ops[branch] = _operation(name, ops[branch], layer + 1 == num_layers)
        row_layer = layer + 1 if op in ("pre_attention", "predictor", "agree", "lm_head") else max(layer, 0)
        labelled.append(row | {"op": op, "layer": row_layer, "branch": branch, "ready_us": ready[branch], "open": True})
        ready[branch] = max(ready[branch], row["end_us"])
        if DECIDE in name:
            ready["verdict"] = row["end_us"]
        if PACK in name and layer + 1 < num_layers:
            layer += 1
            spec_branch = streams[layer]
            ops["spec"], ready["spec"] = "handover", row["end_us"]
    return labelled


def _verdict_rows(rows: list[Row]) -> set[int]:
    """Indices of the verdict branch: `apply_verdict`, and the collective before it on the same stream."""
    found: set[int] = set()
    newest: dict[int, int] = {}  # stream -> index of its last row
    for index, row in enumerate(rows):
        if APPLY_VERDICT in row["kernel"]:
            found |= {newest.get(row["stream"], index), index}
        newest[row["stream"]] = index
    return found


@dataclass
class _Segment:
    """Kernels of a layer's branch on one stream, from one collective to the next."""

    stream: int
    start_us: float
    end_us: float
    kernels: list[str]

    def has(self, part: str) -> bool:
        return any(part in kernel for kernel in self.kernels)


def _spec_branch_streams(steps: list[list[Row]]) -> list[set[int]]:
    """[L]: the streams of each layer's spec branch.

    The first segment of the spec and of the main branch has a kernel that only this branch launches. Later segments,
    each after an all-reduce, have the same kernels in both branches. A graph's kernels run on the same streams in all
    replays, while the duration of a branch depends on the roles. The branch whose segment ends earlier starts the next
    all-reduce earlier, so the time differences, multiplied and summed over all steps, decide which stream is whose.

    Raises:
        AlspecError: the branches of a layer do not use the same two streams in all steps.
    """
    by_step = [_segments(rows) for rows in steps]
    found: list[set[int]] = []
    for layers in zip(*by_step, strict=True):  # one layer, in each step
        streams = {_segment_with(layers[0], UNPACK).stream}
        found.append(streams)
        if not any(segment.has(DECIDE) for segment in layers[0]):  # groups of one rank
            continue
        ends = [[_segment_with(layer, part).end_us for part in (UNPACK, DECIDE)] for layer in layers]
        for has_mlp in (True, False):
            pairs = [_segments_after_all_reduce(layer, has_mlp) for layer in layers]
            if any(len(pair) != 2 or pair.keys() != pairs[0].keys() for pair in pairs):
                raise AlspecError(
                    "trace: cannot tell a layer's branches apart: expected the same two streams in all steps"
                )
            one, other = pairs[0]
            lead = sum(
                (spec_us - main_us) * (pair[one].start_us - pair[other].start_us)
                for (spec_us, main_us), pair in zip(ends, pairs, strict=True)
            )
            spec_branch, main = (one, other) if lead > 0 else (other, one)
            streams.add(spec_branch)
            ends = [[pair[spec_branch].end_us, pair[main].end_us] for pair in pairs]
    return found


def _segments(rows: list[Row]) -> list[list[_Segment]]:
    """[L]: the segments of all branches of one step."""
    num_layers = sum(APPLY_VERDICT in row["kernel"] for row in rows)
    found: list[list[_Segment]] = []
    current: dict[int, _Segment] = {}
    for row in rows:
        name, stream = row["kernel"], row["stream"]
        if operation_of(name) in ("predictor", "full_attention"):  # before the fork, or main before the verdict
            current.pop(stream, None)
            if PACK in name:
                if len(found) == num_layers:  # the residual, after the last layer
                    return found
                found.append([])
                current.clear()
        elif found and "nccl" in name.lower():
            current[stream] = _Segment(stream, row["start_us"], row["end_us"], [name])
            found[-1].append(current[stream])
        elif stream in current:
            current[stream].end_us = row["end_us"]
            current[stream].kernels.append(name)
    return found


def _segment_with(layer: list[_Segment], part: str) -> _Segment:
    return next(segment for segment in layer if segment.has(part))


def _segments_after_all_reduce(layer: list[_Segment], has_mlp: bool) -> dict[int, _Segment]:
    """stream -> segment, for the two segments with the MLP (`has_mlp`) or the two after it."""
    return {
        segment.stream: segment
        for segment in layer
        if not any(segment.has(part) for part in (UNPACK, DECIDE, APPLY_VERDICT)) and segment.has(MLP) == has_mlp
    }


def _is_first_of_layer(name: str) -> bool:
    """True for the first kernel after a join: the next predictor, or the first kernel after the last layer."""
    return operation_of(name) in ("predictor", "full_attention")


def _operation(name: str, before: str, layers_ended: bool) -> str:
    """Operation of a kernel, given the operation before it in its branch."""
    found = operation_of(name)
    if PACK in name and layers_ended:
        return "agree"
    if before in ("agree", "lm_head"):
        return "lm_head" if found in ("post_attention", "lm_head") else before
    if found == "full_attention":  # the first attention kernel of a layer is the predictor
        return found if before in ("predictor", "full_attention") else "predictor"
    if found is None:
        return "verdict" if before == "full_attention" else before
    return found


def is_open(row: Row, group: int, senders: list[int], accepted: list[int]) -> bool:
    """True if the gate of a kernel was open for this group.

    Collectives run on all ranks. The exchange counts as open for the receiver, which waits for it. The collectives of
    the verdict count for the sender. No group waits for the verdict branch of a rejected `A~`, so it counts for none.

    Args:
        row: from `place`.
        group: 0 or 1.
        senders: [L + 1], the sender of each layer in the row's step, and after the last layer.
        accepted: [L], verdicts of the row's step.
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


def collective_parts(
    labelled: list[list[Row]], verdicts: list[list[int]], senders: list[list[int]]
) -> dict[str, list[float]]:
    """`layer_parts` for a pair over collectives.

    Args:
        labelled: rows from `label`.
        verdicts: [steps][L].
        senders: [steps][L + 1].
    Returns:
        Samples in us of each part:

        attention: the sender's attention and its combine.
        sender: from when a layer's predictor is ready to the sender's verdict.
        receiver: from the same start until the receiver has unpacked the handover.
        layer: post-attention and the next pre-attention, in the branch that computes them.
        skipped: after an accept, from the verdict until the receiver may send: it has received the verdict, and its
            main branch, whose gates are closed, has ended.
        fixed: what precedes the first pre-attention and follows the last layer's join.
        step: whole steps under the profiler.
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
                    parts["layer"].append(ends[receiver, step, layer + 1, "pre_attention spec"] - arrived)
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
