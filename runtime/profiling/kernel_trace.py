"""Kernel traces of replayed decode steps: start and end of every kernel on every rank, and the time of a layer's parts.

With dependent launch a kernel starts early, loads weights and waits for the kernel before it. Its work therefore counts
from the time it is *ready*: when all kernels before it on its rank have ended.
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
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.heartbeat import LOADING
from alspec.runtime.profiling.kernel_names import BESIDE, LIBRARY_PRODUCTS, STEP_END, Row, operation_of, work_us
from alspec.runtime.profiling.link_trace import is_linked, mark_linked

__all__ = ["TRACE_STEPS", "kernel_rows", "label", "layer_parts", "step_kernels"]

TRACE_STEPS = 5


def kernel_rows(engine: Engine, context: int, token_ids: list[int]) -> tuple[list[Row], list[list[int]]]:
    """Trace `TRACE_STEPS` steps of `engine.decode` from `context` tokens on; every rank calls it.

    Time zero is the end of the previous step. The ranks of a host share the profiler's clock, so zero is the earliest
    end of that step on any of them. Clocks of hosts may differ, so each host has its own zero. Ranks end a step nearly
    together, when the last rank's logits have arrived; those of a pair over a link a message apart.

    Args:
        engine: loaded and prepared.
        context: tokens in the cache before the first step.
        token_ids: [B], the newest token of each request.
    Returns:
        This rank's kernels as `{"kernel", "stream", "step", "start_us", "end_us"}`, and the verdict of each step and
        layer, 1 where every request accepted (empty without a pair).
    """
    transport, placement = engine.transport, engine.placement
    assert transport is not None, "load comes first"
    records: list[StepRecord] = []
    # Starting the profiler may block the heartbeat's thread.
    engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        # Start the steps together: kernels that wait for a late rank time out.
        transport.barrier()
        records += engine.decode(token_ids, [context] * len(token_ids), TRACE_STEPS + 1)
        transport.synchronize()
        engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        exported = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))
    zero_ns, kernels = step_kernels(exported)
    zeros: Tensor = transport.all_gather_world(torch.tensor(zero_ns, device=engine.device))
    here = placement.host_ranks
    zero_ns = int(zeros[here.start : here.stop].min())
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
    """Find the kernels of whole steps in a trace that the profiler exported.

    Args:
        exported: the profiler's Chrome trace.
    Returns:
        The end of the first step, in ns since 1970, and each later kernel: name, stream, step (from 1 on), start, end.
        If no step ends in the trace: the largest int64, and no kernels.
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
    """Make rows for `trace_json` from those of `kernel_rows`: add each kernel's operation and the state of its gate.

    Args:
        rows_by_rank: rows of every rank; the first half of a pair's ranks is group 0.
        verdicts: [steps][L] of a pair; else empty.
    Returns:
        `{"op", "kernel", "layer", "step", "start_us", "end_us", "ready_us", "open"}`. A kernel that is not open
        returned at once. Over a link there is more: `link_trace.mark_linked`.
    Raises:
        AlspecError: kernels are missing.
    """
    labelled = []
    for steps in _steps(rows_by_rank):
        labelled.append(_label_rows(steps, is_pair=bool(verdicts)))
    if verdicts and is_linked(labelled):
        mark_linked(labelled, verdicts)
    elif verdicts:
        senders = _senders(labelled, verdicts)
        for rank, rows in enumerate(labelled):
            group = rank * 2 // len(labelled)
            for row in rows:
                row["open"] = _is_open(row, group, senders[row["step"] - 1], verdicts[row["step"] - 1])
    return labelled


def _steps(rows_by_rank: list[list[Row]]) -> list[list[list[Row]]]:
    """[ranks][steps] rows. A rank launches the same kernels in every step; the profiler may lose some.

    Raises:
        AlspecError: a step has fewer kernels than another one.
    """
    num_steps = max((row["step"] for rows in rows_by_rank for row in rows), default=0)
    found = []
    for rank, rows in enumerate(rows_by_rank):
        steps: list[list[Row]] = [[] for _ in range(num_steps)]
        for row in rows:
            steps[row["step"] - 1].append(row)
        # What runs beside a step may end in the next one.
        counts = [Counter(row["kernel"] for row in step if operation_of(row["kernel"]) not in BESIDE) for step in steps]
        most = max(counts, key=Counter.total, default=Counter())
        for step, count in enumerate(counts, start=1):
            if count != most or not count:
                raise AlspecError(
                    f"trace: the profiler lost kernels: it has {count.total()} of rank {rank} in step {step}, "
                    f"{most.total()} in another step; run again"
                )
        found.append(steps)
    return found


def _label_rows(steps: list[list[Row]], is_pair: bool) -> list[Row]:
    """One rank's rows with `op`, `layer`, `ready_us` and `open`."""
    labelled: list[Row] = []
    for rows in steps:
        labels = _ops_and_layers([row["kernel"] for row in rows], is_pair)
        ends_us = [0.0 if op in BESIDE else row["end_us"] for row, (op, _) in zip(rows, labels, strict=True)]
        ready_us = max((row["end_us"] for row in labelled if row["op"] not in BESIDE), default=0.0)
        *ready, _ = accumulate(ends_us, max, initial=ready_us)
        labelled += [
            {"op": op, "layer": layer} | row | {"ready_us": since_us, "open": True}
            for row, (op, layer), since_us in zip(rows, labels, ready, strict=True)
        ]
    return labelled


def _ops_and_layers(names: list[str], is_pair: bool) -> list[tuple[str, int]]:
    """Operation and layer of each kernel of one step, in the order of their starts."""
    names = _with_library_products(names)
    layers_end = max((index for index, name in enumerate(names) if "reduce_norm" in name), default=-1)
    op, layer = "embed", -1
    found = []
    for index, name in enumerate(names):
        beside = operation_of(name)
        if beside in BESIDE:
            found.append((beside, max(layer, 0)))
            continue
        last, op = op, operation_of(name) or op
        if op == "full_attention" and not is_pair:
            op = "attention"
        if op == "pre_attention" != last:
            layer += 1
        if index > layers_end:
            found.append(("agree" if op == "handover" else "lm_head", layer + 1))
        else:
            found.append((op, max(layer, 0)))
    return found


def _with_library_products(names: list[str]) -> list[str]:
    """Names in which a product of the library has the name of the kernel that ends it."""
    named, following = [], ""
    for name in reversed(names):
        if operation_of(name) is None:
            name = following if any(part in following for part in LIBRARY_PRODUCTS) else name
        elif operation_of(name) not in BESIDE:
            following = name
        named.append(name)
    return named[::-1]


def _senders(labelled: list[list[Row]], verdicts: list[list[int]]) -> list[list[int]]:
    """[steps][L + 1]: the sender of each layer, and of the handover after the last one (rules: `alspec.priority`).

    The verdicts determine where the roles swap. The first sender follows from the attention kernels, which take longer
    on senders.
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
    """Return whether a kernel's gate was open for this group; senders [L + 1], accepted [L]: of the row's step."""
    op, layer = row["op"], row["layer"]

    def computes(after: int) -> bool:
        """Return whether the group runs post-attention: the receiver does (on `A~`), the sender only after a reject."""
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
    """Measure the parts of a pair's step that the latency model's `StepCosts` needs.

    Args:
        labelled: rows from `label`.
        verdicts: [steps][L].
    Returns:
        Samples in us of each part:

        attention: the sender's attention and its combine.
        sender: from the end of pre-attention to the end of `decide`, without the wait for the previous layer's verdict.
        receiver: from the same start until the receiver has all of the handover.
        layer: post-attention and the next pre-attention.
        fixed: what precedes and follows the layers.
        step: whole steps under the profiler, to compare with a run without it.

        Over several hosts, `receiver` includes the difference between the two ranks' time zeros.
    """
    senders = _senders(labelled, verdicts)
    tp_size = len(labelled) // 2
    ends: dict[tuple[int, int, int, str], float] = {}
    parts: dict[str, list[float]] = {
        name: [] for name in ("attention", "sender", "receiver", "layer", "fixed", "step", "roles")
    }
    attention_us: dict[tuple[int, int, int], float] = {}
    for rank, rows in enumerate(labelled):
        for row in rows:
            step, layer = row["step"], row["layer"]
            name = (
                "roles" if "update_roles" in row["kernel"] else "receive" if "receive_" in row["kernel"] else row["op"]
            )
            ends[rank, step, layer, name] = max(row["end_us"], ends.get((rank, step, layer, name), 0.0))
            if row["op"] == "full_attention" and row["open"]:
                attention_us[rank, step, layer] = attention_us.get((rank, step, layer), 0.0) + work_us(row)
            # The sender of the previous layer has its verdict and does not wait in `update_roles`.
            if name == "roles" and layer and senders[step - 1][layer - 1] == rank // tp_size:
                parts["roles"].append(work_us(row))
    parts["attention"] = list(attention_us.values())
    roles_us = parts.pop("roles")
    update_us = median_low(roles_us) if roles_us else 0.0
    for step, (line, accepted) in enumerate(zip(senders, verdicts, strict=True), start=1):
        for pair in range(tp_size):
            ranks = [group * tp_size + pair for group in line]
            for layer, hit in enumerate(accepted):
                sender, receiver = ranks[layer], pair + (1 - line[layer]) * tp_size
                begin = ends[sender, step, layer, "roles"] - update_us
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
                tail = ends[ranks[-1], step, len(accepted), "lm_head"] - ends[ranks[-1], step, len(accepted), "roles"]
                parts["fixed"].append(head + tail + update_us)
                parts["step"].append(ends[ranks[0], step, len(accepted), "lm_head"] - before)
    return parts
