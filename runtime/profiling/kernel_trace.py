"""The kernels inside replayed decode steps: when each ran on every rank, what it did, and what a layer's parts take.

With dependent launches a kernel starts early, loads weights and waits for the one before it. So all that is said here
about a kernel's work counts from the moment it is *ready*, when every kernel before it on its rank has ended.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from itertools import accumulate
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from alspec.errors import AlspecError
from alspec.runtime.decode.captured_step import StepRecord
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.heartbeat import LOADING
from alspec.runtime.profiling import swap_trace
from alspec.runtime.profiling.kernel_names import PRE_ATTENTION, STEP_END, Row, operation_of, work_us

__all__ = ["TRACE_STEPS", "kernel_rows", "label", "layer_parts", "step_kernels"]

TRACE_STEPS = 5


def kernel_rows(engine: Engine, context: int, token_ids: list[int]) -> tuple[list[Row], list[list[int]]]:
    """Every kernel in `TRACE_STEPS` steps of `engine.loop` from `context` tokens on; every rank calls it.

    Time zero is the end of the step before them. On one host the profiler's timestamps are of one clock, and zero is
    that end on the first rank to reach it. On several hosts clocks may differ, and zero is each rank's own such end:
    a step ends everywhere once the last rank's logits have arrived.

    Args:
        token_ids: [B], the newest token of each request.
    Returns:
        This rank's `{"kernel", "stream", "step", "start_us", "end_us"}`, and the verdict of each step and layer, 1
        where every request accepted; empty without a pair.
    """
    transport, placement = engine.transport, engine.placement
    assert transport is not None, "load comes first"
    records: list[StepRecord] = []
    # Starting to profile may hold up the heartbeat's thread.
    engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        # A rank may take long to start, and kernels wait only so long for each other.
        transport.barrier()
        records += engine.decode(token_ids, [context] * len(token_ids), TRACE_STEPS + 1)
        transport.synchronize()
        engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        exported = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))
    zero_ns, kernels = step_kernels(exported)
    zeros: Tensor = transport.all_gather_world(torch.tensor(zero_ns, device=engine.device))
    if placement.local_world_size == placement.world_size:
        zero_ns = int(zeros.min())
    rows = [
        {
            "kernel": name,
            "stream": stream,
            "step": step,
            "start_us": (start - zero_ns) / 1e3,
            "end_us": (end - zero_ns) / 1e3,
        }
        for name, stream, step, start, end in kernels
        if step <= TRACE_STEPS
    ]
    return rows, [record.hits.all(1).int().tolist() for record in records[1:] if record.hits is not None]


def step_kernels(exported: dict[str, Any]) -> tuple[int, list[tuple[str, int, int, int, int]]]:
    """Kernels of whole steps in a trace that the profiler exported.

    Returns:
        The first step's end, in ns since the epoch, and each later kernel: name, stream, step from 1 on, start, end.
        Without a step's end in the trace: a time after all others, and no kernels.
    """
    base_ns = int(exported.get("baseTimeNanoseconds", 0))
    spans = sorted(
        (base_ns + round(event["ts"] * 1e3), round(event["dur"] * 1e3), event["name"], event["args"]["stream"])
        for event in exported["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    zero_ns, step = torch.iinfo(torch.int64).max, 0
    kernels = []
    for start_ns, duration_ns, name, stream in spans:
        if step:
            kernels.append((name, stream, step, start_ns, start_ns + duration_ns))
        if STEP_END in name:
            step += 1
            zero_ns = min(zero_ns, start_ns + duration_ns)
    return zero_ns, kernels


def label(rows_by_rank: list[list[Row]], verdicts: list[list[int]]) -> list[list[Row]]:
    """Rows for `trace_json` from those of `kernel_rows`: what each kernel belongs to, and whether it did anything.

    Args:
        rows_by_rank: of every rank; a pair's first half is group 0.  verdicts: [steps][L], of a pair; else empty.
    Returns:
        `{"op", "kernel", "layer", "step", "start_us", "end_us", "ready_us", "open"}`, and `"branch"` of a pair over
        collectives. Not open is a kernel whose gate was closed: it looked and returned.

    Raises:
        AlspecError: kernels are missing.
    """
    labelled = []
    for steps in _steps(rows_by_rank):
        if swap_trace.is_swapped(steps[0]):
            labelled.append(swap_trace.place(steps))
        else:
            labelled.append(_place_rows(steps, is_pair=bool(verdicts)))
    if verdicts:
        senders = _senders(labelled, verdicts)
        opens = swap_trace.is_open if swap_trace.is_swapped(labelled[0]) else _is_open
        for rank, rows in enumerate(labelled):
            group = rank * 2 // len(labelled)
            for row in rows:
                row["open"] = opens(row, group, senders[row["step"] - 1], verdicts[row["step"] - 1])
    return labelled


def _steps(rows_by_rank: list[list[Row]]) -> list[list[list[Row]]]:
    """[ranks][steps] rows; a rank launches the same kernels in every step, but a profiler may lose some."""
    num_steps = max((row["step"] for rows in rows_by_rank for row in rows), default=0)
    found = []
    for rank, rows in enumerate(rows_by_rank):
        steps: list[list[Row]] = [[] for _ in range(num_steps)]
        for row in rows:
            steps[row["step"] - 1].append(row)
        counts = [Counter(row["kernel"] for row in step) for step in steps]
        most = max(counts, key=Counter.total, default=Counter())
        for step, count in enumerate(counts, start=1):
            if count != most or not count:
                raise AlspecError(
                    f"trace: the profiler lost kernels: it has {count.total()} of rank {rank} in step {step}, "
                    f"in another step {most.total()}; run again"
                )
        found.append(steps)
    return found


def _place_rows(steps: list[list[Row]], is_pair: bool) -> list[Row]:
    """One rank's rows with `op`, `layer`, `ready_us` and `open`."""
    placed: list[Row] = []
    for rows in steps:
        ready_us = max((row["end_us"] for row in placed), default=0.0)
        *ready, _ = accumulate((row["end_us"] for row in rows), max, initial=ready_us)
        places = _places([row["kernel"] for row in rows], is_pair)
        placed += [
            {"op": op, "layer": layer} | row | {"ready_us": since_us, "open": True}
            for row, (op, layer), since_us in zip(rows, places, ready, strict=True)
        ]
    return placed


def _places(names: list[str], is_pair: bool) -> list[tuple[str, int]]:
    """Operation and layer of each kernel of one step, in the order of their starts."""
    num_layers = sum(PRE_ATTENTION in name for name in names)
    layers_end = max((at for at, name in enumerate(names) if "reduce_norm" in name), default=-1)
    op, layer = "embed", -1
    places = []
    for at, name in enumerate(names):
        op = operation_of(name) or op
        if op == "full_attention" and not is_pair:
            op = "attention"
        if PRE_ATTENTION in name:
            layer += 1
        if at > layers_end:
            op, layer = "agree" if op == "handover" else "lm_head", num_layers
        places.append((op, max(layer, 0)))
    return places


def _senders(labelled: list[list[Row]], verdicts: list[list[int]]) -> list[list[int]]:
    """[steps][L + 1]: which group sends in each layer, and the stream at the end. Rules: `alspec.priority`.

    The verdicts say where roles are swapped; who began is told by the attention kernels, which take longer on senders.
    """
    senders: list[list[int]] = []
    group = 0
    for accepted in verdicts:
        line = [group]
        for hit in accepted:
            line.append(line[-1] ^ hit)
        senders.append(line)
        group = line[-1]
    balance = 0.0
    for rank, rows in enumerate(labelled):
        for row in rows:
            if row["op"] == "full_attention":
                sends = senders[row["step"] - 1][row["layer"]] == rank * 2 // len(labelled)
                balance += work_us(row) if sends else -work_us(row)
    return senders if balance >= 0 else [[1 - sends for sends in line] for line in senders]


def _is_open(row: Row, group: int, senders: list[int], accepted: list[int]) -> bool:
    """Whether this group's gate was open; senders: [L + 1] and accepted: [L] of the row's step."""
    op, layer = row["op"], row["layer"]

    def computes(after: int) -> bool:
        """After the verdict of a layer: the receiver on its guess, the sender only where that was rejected."""
        return group != senders[after] or not accepted[after]

    if op == "pre_attention":
        return computes(layer - 1) if layer else group == senders[0]
    if op == "post_attention":
        return computes(layer)
    if "receive_" in row["kernel"]:
        return group != senders[layer]
    if op in ("full_attention", "verdict"):
        return group == senders[layer]
    return True


def layer_parts(labelled: list[list[Row]], verdicts: list[list[int]]) -> dict[str, list[float]]:
    """Samples in us of what the latency model's `StepCosts` are made of, from `label`'s rows of a pair.

    `attention`: the sender's attention, with its merge. `sender`: from the end of pre-attention to the end of the
    verdict, less what it waits for the verdict before. `receiver`: from there until the receiver has all of the
    handover. `layer`: post-attention and the next pre-attention. `fixed`: what precedes and follows the layers. `step`:
    whole steps, as the profiler saw them, to be compared with those of a run without it. Over several hosts `receiver`
    has in it how far the ends of a step on both ranks, which are their zeros, lie apart.
    """
    senders = _senders(labelled, verdicts)
    if swap_trace.is_swapped(labelled[0]):
        return swap_trace.swap_parts(labelled, verdicts, senders)
    tp_size = len(labelled) // 2
    ends: dict[tuple[int, int, int, str], float] = {}
    parts: dict[str, list[float]] = {
        name: [] for name in ("attention", "sender", "receiver", "layer", "fixed", "step", "turn")
    }
    attention_us: dict[tuple[int, int, int], float] = {}
    for rank, rows in enumerate(labelled):
        for row in rows:
            step, layer = row["step"], row["layer"]
            name = (
                "turn" if "update_roles" in row["kernel"] else "receive" if "receive_" in row["kernel"] else row["op"]
            )
            ends[rank, step, layer, name] = max(row["end_us"], ends.get((rank, step, layer, name), 0.0))
            if row["op"] == "full_attention" and row["open"]:
                attention_us[rank, step, layer] = attention_us.get((rank, step, layer), 0.0) + work_us(row)
            # Who sent in the layer before knows its verdict and waits for nothing.
            if name == "turn" and layer and senders[step - 1][layer - 1] == rank // tp_size:
                parts["turn"].append(work_us(row))
    parts["attention"] = list(attention_us.values())
    turns_us = parts.pop("turn")
    turn_us = median_low(turns_us) if turns_us else 0.0
    for step, (line, accepted) in enumerate(zip(senders, verdicts, strict=True), start=1):
        for pair in range(tp_size):
            ranks = [group * tp_size + pair for group in line]
            for layer, hit in enumerate(accepted):
                sender, receiver = ranks[layer], pair + (1 - line[layer]) * tp_size
                begin = ends[sender, step, layer, "turn"] - turn_us
                parts["sender"].append(ends[sender, step, layer, "verdict"] - begin)
                parts["receiver"].append(ends[receiver, step, layer, "receive"] - begin)
                if layer + 1 < len(accepted):
                    following = (step, layer + 1, "pre_attention")
                    parts["layer"].append(ends[receiver, *following] - ends[receiver, step, layer, "receive"])
                    if not hit:
                        parts["layer"].append(ends[sender, *following] - ends[sender, step, layer, "verdict"])
            if step > 1:
                before = ends[ranks[0], step - 1, len(accepted), "lm_head"]
                head = ends[ranks[0], step, 0, "embed"] - before
                tail = ends[ranks[-1], step, len(accepted), "lm_head"] - ends[ranks[-1], step, len(accepted), "turn"]
                parts["fixed"].append(head + tail + turn_us)
                parts["step"].append(ends[ranks[0], step, len(accepted), "lm_head"] - before)
    return parts
