"""Kernels of steps from the profiler's export: their operations and layers, and the parts of a pair's layers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from alspec.latency_model import StepCosts, speculative_step_us
from alspec.priority import INITIAL_PRIORITY, Priority, after_handover, after_verdict, sender, skips_compute
from alspec.runtime.profiling.kernel_trace import label, layer_parts, step_kernels

NUM_LAYERS = 6
CLOSED_US = 0.25
# Time of an open kernel from when it may begin.
WORK_US = {
    "_embed_norm_kernel": 3.0,
    "_take_recall_lists_kernel": 1.5,
    "_qkv_rope_append_kernel": 9.0,
    "_update_roles_kernel": 1.0,
    "_kv_compact_kernel": 2.5,
    "lean_decode_kernel": 120.0,
    "lean_combine_kernel": 1.75,
    "_decide_kernel": 2.5,
    "_receive_handover_kernel": 1.25,
    "_gate_up_silu_kernel": 30.0,
    "_push_partial_kernel": 8.0,
    "_reduce_norm_kernel": 2.0,
    "_receive_residual_kernel": 1.25,
    "_collect_logits_kernel": 4.0,
    "_finish_step_kernel": 2.0,
}
PREDICTOR_US = 15.0  # from the start of the attention kernel until the paired rank may read A~
POST = ("push_partial", "reduce_norm", "gate_up_silu", "push_partial", "reduce_norm")


class Job:
    """Two groups of `tp_size` ranks that follow `alspec.priority`, with dependent launches that start early."""

    def __init__(self, tp_size: int, first: int, quantised: bool = False, recalls: bool = False) -> None:
        self.quantised, self.recalls = quantised, recalls
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(2 * tp_size)]
        self.is_open: list[list[bool]] = [[] for _ in range(2 * tp_size)]
        self.now = [0.0] * (2 * tp_size)
        self.priority: Priority = INITIAL_PRIORITY if first == 0 else (0, 2)
        self.step = 0

    def launch(self, group: int, part: str, is_open: bool = True, not_before: float = 0.0) -> float:
        """Launch one kernel on every rank of a group. Returns when its work began."""
        name = next(name for name in WORK_US if part in name)
        begin = 0.0
        for rank in range(len(self.now)):
            if rank * 2 // len(self.now) == group:
                begin = max(self.now[rank], not_before)
                end = begin + WORK_US[name] if is_open else self.now[rank] + CLOSED_US
                early = {"kernel": name, "step": self.step, "start_us": self.now[rank] - 0.125, "end_us": end}
                self.rows[rank].append(early)
                self.is_open[rank].append(is_open)
                self.now[rank] = end
        return begin

    def choose_lists(self, group: int) -> None:
        """On a stream of its own: it ends behind kernels that are launched later."""
        for rank in range(len(self.now)):
            if rank * 2 // len(self.now) == group:
                times = {"start_us": self.now[rank], "end_us": self.now[rank] + 10.0}
                self.rows[rank].append({"kernel": "_choose_recall_lists_kernel", "step": self.step} | times)
                self.is_open[rank].append(True)

    def run(self, verdicts: list[int]) -> float:
        """Run one step. Returns its time."""
        self.step += 1
        begun = self.now[0]
        for group in (0, 1):
            self.launch(group, "embed")
            if self.recalls:
                self.launch(group, "take_recall_lists")
        waiting, verdict_at = -1, 0.0
        for verdict in verdicts:
            for group in (0, 1):
                self.launch(group, "qkv", not skips_compute(self.priority, group))
                self.launch(group, "update_roles", not_before=verdict_at if group == waiting else 0.0)
            sends = sender(self.priority)
            self.priority = after_handover(self.priority)
            spec_at = 0.0
            for group in (sends, 1 - sends):
                begun_at = self.launch(group, "lean_decode", group == sends)
                spec_at = begun_at + PREDICTOR_US if group == sends else spec_at
                self.launch(group, "lean_combine", group == sends)
                self.launch(group, "decide", group == sends)
                if group == sends:
                    verdict_at = self.now[-1 if group else 0]
                self.launch(group, "receive_handover", group != sends, spec_at)
            self.priority = after_verdict(self.priority, bool(verdict))
            waiting = 1 - sends
            for part in POST:
                for group in (0, 1):
                    self.launch(group, part, not skips_compute(self.priority, group))
        self._end(waiting, verdict_at)
        return self.now[0] - begun

    def _end(self, waiting: int, verdict_at: float) -> None:
        sends = sender(self.priority)
        for group in (sends, 1 - sends):
            self.launch(group, "update_roles", not_before=verdict_at if group == waiting else 0.0)
            sent = self.now[-1 if sends else 0]
            self.launch(group, "receive_residual", group != sends, sent)
            if self.recalls:
                self.choose_lists(group)
            if self.quantised:
                self.launch(group, "kv_compact")
            self.launch(group, "push_partial")
        for group in (0, 1):
            self.launch(group, "collect", not_before=max(self.now))
        for group in (0, 1):
            self.launch(group, "finish_step", not_before=max(self.now) - WORK_US["_finish_step_kernel"] * group)
        self.now = [max(self.now)] * len(self.now)
        self.priority = (2, 0) if sends == 0 else (0, 2)


def kernel(name: str, start_us: float, duration_us: float, stream: int = 7) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "ts": start_us, "dur": duration_us, "args": {"stream": stream},
    }  # fmt: skip


def test_only_kernels_of_whole_steps_are_kept() -> None:
    """Kernels up to the end of the first step are left out. A step may begin before the step before it has ended."""
    base = 1_790_857_026_000_000_000
    events = [
        kernel("ncclAllGather", 1.0, 5.0),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 30.0, "dur": 4.0},
        kernel("attention", 10.0, 10.0),
        kernel("_finish_step_kernel", 19.0, 2.0),
        kernel("_finish_step_kernel", 39.0, 2.5),
        kernel("attention", 20.125, 19.0, stream=9),
        {"ph": "M", "name": "process_name"},
        kernel("attention", 41.0, 3.0),
    ]
    zero_ns, kernels = step_kernels({"traceEvents": events, "baseTimeNanoseconds": base})
    assert zero_ns == base + 21_000
    assert kernels == [
        ("attention", 9, 1, base + 20_125, base + 39_125),
        ("_finish_step_kernel", 7, 1, base + 39_000, base + 41_500),
        ("attention", 7, 2, base + 41_000, base + 44_000),
    ]


def test_a_trace_without_steps_has_no_kernels() -> None:
    zero_ns, kernels = step_kernels({"traceEvents": [kernel("attention", 10.0, 10.0)]})
    assert kernels == []
    assert zero_ns > 10**18


VERDICTS = {
    "mixed": [[1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 0, 0]],
    "accepted": [[1] * NUM_LAYERS] * 3,
    "rejected": [[0] * NUM_LAYERS] * 3,
}


@pytest.mark.parametrize(("quantised", "recalls"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", VERDICTS)
def test_labels_of_a_pair(name: str, tp_size: int, first: int, quantised: bool, recalls: bool) -> None:
    """Operation and layer of every kernel. A kernel is closed if the priority of its group skips it."""
    job = Job(tp_size, first, quantised, recalls)
    for verdicts in VERDICTS[name]:
        job.run(verdicts)
    labelled = label(job.rows, VERDICTS[name])
    layer_ops = ["pre_attention", "handover", "full_attention", "full_attention", "verdict", "handover"]
    layer_ops += ["post_attention"] * 5
    expected = [("embed", 0)] * (1 + recalls) + [(op, layer) for layer in range(NUM_LAYERS) for op in layer_ops]
    expected += [("agree", NUM_LAYERS)] * 2 + [("lists", NUM_LAYERS - 1)] * recalls
    expected += [("lm_head", NUM_LAYERS)] * (3 + quantised)
    for rows, is_open in zip(labelled, job.is_open, strict=True):
        assert [(row["op"], row["layer"]) for row in rows] == expected * 3
        assert [row["open"] for row in rows] == is_open
        for before, after in pairwise(row for row in rows if row["op"] != "lists"):
            assert after["start_us"] < after["ready_us"] == before["end_us"]


def test_labels_of_products_of_the_library() -> None:
    """A step of more rows than the fused projections take: a product and the kernel that ends it are one operation."""
    product = "nvjet_sm90"
    layer = [
        (product, "pre_attention"), ("_scale_kernel", "pre_attention"), ("_norm_rope_append_kernel", "pre_attention"),
        ("lean_decode_kernel", "attention"), ("lean_combine_kernel", "attention"),
        (product, "post_attention"), (product, "post_attention"), ("_push_products_kernel", "post_attention"),
        ("_reduce_norm_kernel", "post_attention"),
        (product, "post_attention"), ("_silu_kernel", "post_attention"),
        (product, "post_attention"), ("_push_products_kernel", "post_attention"),
        ("_reduce_norm_kernel", "post_attention"),
    ]  # fmt: skip
    begin = [("_embed_norm_kernel", "embed")]
    head = [product, "_push_products_kernel", "_collect_logits_kernel", "_finish_step_kernel"]
    names = [name for name, _ in begin + 2 * layer] + head
    expected = [
        *[(op, 0) for _, op in begin + layer], *[(op, 1) for _, op in layer], *[("lm_head", 2) for _ in head],
    ]  # fmt: skip
    rows = [{"kernel": name, "step": 1, "start_us": 2.0 * at, "end_us": 2.0 * at + 1} for at, name in enumerate(names)]
    (labelled,) = label([rows], [])
    assert [(row["op"], row["layer"]) for row in labelled] == expected


def test_labels_without_a_pair() -> None:
    """A kernel with an unknown name belongs to the kernel before it."""
    names = ["_embed_norm_kernel"]
    layer = ["qkv_rope_append", "quantised_decode_kernel", "quantised_combine_kernel", "push_partial", "ncclAllReduce"]
    names += [*layer, "reduce_norm", "gate_up_silu", "push_partial", "ncclAllReduce", "reduce_norm"] * 2
    names += ["push_partial", "ncclAllGather", "collect_logits", "radixSort", "_finish_step_kernel"]
    rows = [{"kernel": name, "step": 1, "start_us": 2.0 * at, "end_us": 2.0 * at + 1} for at, name in enumerate(names)]
    (labelled,) = label([rows], [])
    places = [(row["op"], row["layer"]) for row in labelled]
    assert places[0] == ("embed", 0)
    for layer_index in range(2):
        own = places[1 + 10 * layer_index : 11 + 10 * layer_index]
        ops = ["pre_attention", "attention", "attention", *["post_attention"] * 7]
        assert own == [(op, layer_index) for op in ops]
    assert places[21:] == [("lm_head", 2)] * 5
    assert all(row["open"] for row in labelled)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_parts_predict_the_step(name: str, tp_size: int, quantised: bool) -> None:
    """Parts are the times of the kernels. From them the latency model predicts the step's time to 5 %."""
    job = Job(tp_size, 1, quantised)
    times = [job.run(verdicts) for verdicts in VERDICTS[name]]
    parts = layer_parts(label(job.rows, VERDICTS[name]), VERDICTS[name])
    attention = WORK_US["lean_decode_kernel"] + WORK_US["lean_combine_kernel"]
    assert parts["attention"] == pytest.approx([attention] * len(parts["attention"]))
    assert len(parts["attention"]) == len(parts["sender"]) == 3 * NUM_LAYERS * tp_size
    section = WORK_US["_update_roles_kernel"]
    assert parts["sender"] == pytest.approx([section + attention + WORK_US["_decide_kernel"]] * len(parts["sender"]))
    assert parts["receiver"] == pytest.approx([section + PREDICTOR_US + 1.25] * len(parts["receiver"]), abs=3)
    layer = WORK_US["_qkv_rope_append_kernel"] + 30 + 2 * (8 + 2)
    assert parts["layer"] == pytest.approx([layer] * len(parts["layer"]), abs=2 * CLOSED_US)
    assert parts["step"] == pytest.approx([time for time in times[1:] for _ in range(tp_size)])
    p50 = {part: sorted(samples)[len(samples) // 2] for part, samples in parts.items()}
    costs = StepCosts(NUM_LAYERS, p50["fixed"], p50["layer"], p50["attention"], p50["sender"], p50["receiver"])
    for time, verdicts in zip(times[1:], VERDICTS[name][1:], strict=True):
        assert speculative_step_us(costs, sum(verdicts) / NUM_LAYERS) == pytest.approx(time, rel=0.05)


def test_a_kernel_is_ready_once_all_before_it_have_ended() -> None:
    """Also if one of them ends before another one that started earlier."""
    spans = [("_embed_norm_kernel", 0.0, 10.0), ("qkv_rope_append", 2.0, 5.0), ("quantised_decode_kernel", 6.0, 12.0)]
    rows = [{"kernel": name, "step": 1, "start_us": start, "end_us": end} for name, start, end in spans]
    (labelled,) = label([rows], [])
    assert [row["ready_us"] for row in labelled] == [0.0, 10.0, 10.0]
