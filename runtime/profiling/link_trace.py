"""What the kernels of a pair over a link did in a trace: which x was taken, what was lost, how long parts took.

Verdicts are known. Whether the verifier took x shows in its post-attention, which returns at once then. Whether the
speculator took x follows from the messages that had arrived by then (kernels/speculation/linked_pair.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from alspec.runtime.profiling.kernel_names import BESIDE, PRE_ATTENTION, Row, operation_of, work_us

__all__ = ["is_linked", "link_parts", "mark_linked"]

# A post-attention with less of the time of the speculator's, which is never skipped, was skipped.
SKIPPED_SHARE = 0.5


def is_linked(labelled: list[list[Row]]) -> bool:
    """Whether these kernels belong to a pair over a link."""
    return any("note_arrival" in row["kernel"] for row in labelled[0])


def mark_linked(labelled: list[list[Row]], verdicts: list[list[int]]) -> None:
    """Add to each row the `side` of its rank and whether its kernel was open; ranks of group 0 verify.

    The verifier's `decide` gets `accepted`. The kernels that take x get `taken`: the verifier takes x behind a layer,
    the speculator in front of it. The speculator's rows get `lost`: the layer was computed on a wrong x, or on an `A~`
    that was rejected.

    Args:
        labelled: rows of every rank, with operation and layer.
        verdicts: [steps][L].
    """
    tp_size = len(labelled) // 2
    for rank, rows in enumerate(labelled):
        for row in rows:
            row["side"] = "verifier" if rank < tp_size else "speculator"
            # The speculator chooses and takes x in front of a layer.
            if row["side"] == "speculator" and row["op"] == "handover":
                row["layer"] += 1
    for step, hits in enumerate(verdicts, start=1):
        ranks = [[row for row in rows if row["step"] == step] for rows in labelled]
        verifiers, speculators = ranks[:tp_size], ranks[tp_size:]
        taken = _taken_by_verifier(verifiers[0], speculators[0], hits)
        for rows in verifiers:
            _mark_verifier(rows, hits, taken)
        bases = _bases(speculators, hits)
        for rows in speculators:
            _mark_speculator(rows, hits, bases)


def _taken_by_verifier(verifier: list[Row], speculator: list[Row], hits: Sequence[int]) -> list[bool]:
    """[L]: whether the verifier took x behind each layer."""

    def post_us(rows: list[Row], layer: int) -> float:
        """Time of the layer's own post-attention kernels; collectives between them are never skipped."""
        return sum(
            work_us(row) for row in rows if row["layer"] == layer and operation_of(row["kernel"]) == "post_attention"
        )

    layers = range(len(hits))
    whole_us = median(post_us(speculator, layer) for layer in layers)
    return [bool(hits[layer]) and post_us(verifier, layer) < SKIPPED_SHARE * whole_us for layer in layers]


def _mark_verifier(rows: list[Row], hits: Sequence[int], taken: Sequence[bool]) -> None:
    """Mark what each kernel of a step did. Attention behind the verdict of its layer is the predictor."""
    decided = -1  # the layer of the last verdict
    for row in rows:
        layer, kernel = row["layer"], row["kernel"]
        if layer >= len(hits) or row["op"] in BESIDE:
            continue
        if row["op"] == "verdict":
            decided = layer
            row["accepted"] = bool(hits[layer])
        elif row["op"] == "full_attention" and decided == layer:
            row |= {"op": "predictor", "open": bool(hits[layer]) and not taken[layer]}
        elif "receive_" in kernel:
            row |= {"open": taken[layer], "taken": taken[layer]}
        elif operation_of(kernel) == "post_attention":
            row["open"] = not taken[layer]


def _bases(speculators: list[list[Row]], hits: Sequence[int]) -> list[int]:
    """[L]: the speculator's base in each layer, from which on its x is the verifier's.

    A `choose_x` that takes x ends when the message of its layer has arrived, with news of a reject.
    """
    arrivals = [[row["start_us"] for row in rows if "note_arrival" in row["kernel"]] for rows in speculators]
    arrived_us = [max(times) for times in zip(*arrivals, strict=True)]  # of each slot, at all ranks of the group
    rejected = [-1]  # the header of each slot
    for layer, hit in enumerate(hits):
        rejected.append(rejected[-1] if hit else layer)
    bases = [0]
    for layer in range(1, len(hits)):
        ended_us = max(
            row["end_us"]
            for rows in speculators
            for row in rows
            if row["layer"] == layer and "choose_x" in row["kernel"]
        )
        count = sum(at <= ended_us for at in arrived_us[: len(rejected)])
        bases.append(layer if count > layer and rejected[count - 1] >= bases[-1] else bases[-1])
    return bases


def _mark_speculator(rows: list[Row], hits: Sequence[int], bases: Sequence[int]) -> None:
    for row in rows:
        layer = row["layer"]
        if row["op"] in BESIDE:
            continue
        if row["op"] == "full_attention":
            row["op"] = "predictor"
        takes = layer >= len(hits) or (layer > 0 and bases[layer] == layer)
        if "receive_" in row["kernel"]:
            row["open"] = takes
        elif "choose_x" in row["kernel"]:
            row["taken"] = takes
        if layer < len(hits):
            row["lost"] = not all(hits[bases[layer] : layer + 1])


def link_parts(labelled: list[list[Row]], verdicts: list[list[int]]) -> dict[str, list[float]]:
    """Measure the parts of a step that `alspec.latency_model.LinkCosts` needs, without the link itself.

    Args:
        labelled: rows from `kernel_trace.label`.
        verdicts: [steps][L].
    Returns:
        Samples in us on the first rank of each group:

        verifier: from one pre-attention to the next, where x was taken.
        post: what a layer takes longer whose `A~` was rejected.
        speculator: from one pre-attention to the next, where no x was taken.
        fixed: what precedes and follows the layers, on the verifier.
        step: whole steps under the profiler, to compare with a run without it.
    """
    parts: dict[str, list[float]] = {name: [] for name in ("verifier", "post", "speculator", "fixed", "step")}
    verifier, speculator = labelled[0], labelled[len(labelled) // 2]
    rejected_us: list[float] = []
    before_us = None
    for step, hits in enumerate(verdicts, start=1):
        own = [row for row in verifier if row["step"] == step and row["op"] not in BESIDE]
        begins, taken = _layer_begins(own), {row["layer"] for row in own if row.get("taken")}
        for layer, (begin, end) in enumerate(pairwise(begins)):
            if layer in taken:
                parts["verifier"].append(end - begin)
            elif not hits[layer]:
                rejected_us.append(end - begin)
        end_us = max(row["end_us"] for row in own)
        if before_us is not None:
            head = begins[0] - before_us
            tail = end_us - max(row["end_us"] for row in own if operation_of(row["kernel"]) == "post_attention")
            parts["fixed"].append(head + tail)
            parts["step"].append(end_us - before_us)
        before_us = end_us
        others = [row for row in speculator if row["step"] == step and row["op"] not in BESIDE]
        took = {row["layer"] for row in others if row.get("taken")}
        for layer, (begin, end) in enumerate(pairwise(_layer_begins(others)), start=1):
            if layer not in took:
                parts["speculator"].append(end - begin)
    if parts["verifier"]:
        parts["post"] = [us - median(parts["verifier"]) for us in rejected_us]
    return parts


def _layer_begins(rows: Iterable[Row]) -> list[float]:
    """When the pre-attention of each layer began to work."""
    return [max(row["start_us"], row["ready_us"]) for row in rows if PRE_ATTENTION in row["kernel"]]
