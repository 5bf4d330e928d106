"""Kernels of a pair over collectives, in branches on their own streams: operations and layers, and parts of layers."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import pytest
from tiers import covering

from alspec.errors import AlspecError
from alspec.latency_model import StepCosts, speculative_step_us
from alspec.runtime.profiling.kernel_trace import TRACE_STEPS, label, layer_parts

NUM_LAYERS = 5
CLOSED_US = 0.5
BUSY_US = 2.5  # time of a closed kernel beside the receiver's open kernels
MAIN, SPEC, VERDICT = 0, 1, 2
# Time of a kernel with an open gate, from when it may begin.
WORK_US = {
    "_embed_norm_kernel": 3.0,
    "_qkv_rope_append_kernel": 9.0,
    "lean_sm90_kernel": 6.0,  # of the predictor
    "_pack_kernel": 1.5,
    "ncclDevKernel_AllGather": 12.0,
    "ncclDevKernel_AllReduce": 4.0,  # within groups, two in a layer
    "_unpack_handover_kernel": 2.0,
    "_push_partial_kernel": 11.0,
    "_reduce_norm_kernel": 2.0,
    "_gate_up_silu_kernel": 30.0,
    "lean_combine_kernel": 1.5,
    "_decide_kernel": 1.5,
    "_apply_verdict_kernel": 2.0,
    "_unpack_residual_kernel": 1.0,
    "Memcpy DtoD": 1.0,
    "_collect_logits_kernel": 4.0,
    "_sample_kernel": 5.0,
    "_finish_step_kernel": 2.0,
}
POST = ("push_partial", "AllReduce", "reduce_norm", "gate_up_silu", "push_partial", "AllReduce", "reduce_norm")
LAYER_US = 11 + 2 + 30 + 11 + 2 + 9
SLOWER_US = 0.25  # added to handover and verdict on a group's second rank
LATE_US = 4.0  # longest time from when a collective may begin until it begins


class Job:
    """Two groups that launch the kernels of `runtime/decode/collective_decoder.py`, with the truth about each kernel.

    Each rank has a clock for each branch. A collective ends on all ranks `WORK_US` after the last of them has begun.
    As with the CUDA driver, most collectives move their branch to another stream, the same stream in every step, and
    the kernels after a join use the stream of the spec branch.
    """

    def __init__(self, sends: int, attention_us: float, quantised: bool, tp_size: int, late_us: float = 0.0) -> None:
        self.sends, self.attention_us, self.quantised, self.tp_size = sends, attention_us, quantised, tp_size
        self.late_us, self.random = late_us, random.Random(4)
        ranks = range(2 * tp_size)
        self.rows: list[list[dict[str, Any]]] = [[] for _ in ranks]
        self.truth: list[list[tuple[str, int, bool, float]]] = [[] for _ in ranks]  # op, layer, open, ready
        self.now = [[0.0, 0.0, 0.0] for _ in ranks]
        self.numbers = random.Random(5).sample(range(8, 1000), 20 * NUM_LAYERS)  # of streams
        self.step = 0
        self.receiver_us: list[float] = []
        self.skipped_us: list[float] = []

    def meets(self, name: str, rank: int, op: str, branch: int) -> list[int]:
        """The ranks of a collective."""
        if op == "handover":
            return [rank % self.tp_size, rank % self.tp_size + self.tp_size]
        group = rank // self.tp_size
        is_group = "AllReduce" in name or (op == "verdict" and branch == MAIN)
        return [each for each in range(len(self.now)) if not is_group or each // self.tp_size == group]

    def kernel(
        self, part: str, op: str, layer: int, gate_open: tuple[int, ...] = (0, 1), branch: int = MAIN, us: float = 0.0
    ) -> None:
        """Launch on all ranks, open in the groups of `gate_open`. A dependent launch starts before it is ready."""
        name = next(name for name in WORK_US if part in name)
        is_collective = "nccl" in name
        if is_collective:
            number = next(self.next_number)
            if "AllReduce" not in name or number % 4:  # others keep their stream
                self.streams[branch] = number
        ready = [clock[branch] for clock in self.now]
        # After a fork or a join, launches are ordinary ones and start when they are ready.
        early = 0.125 if part not in ("lean_sm90", "pack") and not is_collective else 0.0
        late = self.late_us if is_collective else 0.0
        starts = [each - early + late * self.random.random() for each in ready]
        for rank, clock in enumerate(self.now):
            group = rank // self.tp_size
            is_open = group in gate_open
            works = is_open or op == "verdict" or is_collective  # every rank takes part in a verdict
            closed_us = BUSY_US if branch == MAIN and group != self.sends and op != "agree" else CLOSED_US
            begins = max(starts[each] for each in self.meets(name, rank, op, branch)) if is_collective else ready[rank]
            end = begins + ((us or WORK_US[name]) if works else closed_us)
            if part in ("unpack_handover", "decide") and works:
                end += rank % self.tp_size * SLOWER_US
            row = {"kernel": name, "stream": self.streams[branch], "step": self.step}
            self.rows[rank].append(row | {"start_us": starts[rank], "end_us": end})
            self.truth[rank].append((op, layer, is_open, ready[rank]))
            clock[branch] = end

    def go_on(self, layer: int, gate_open: tuple[int, ...], branch: int) -> None:
        for part in POST:
            if part != "AllReduce" or self.tp_size > 1:
                self.kernel(part, "post_attention", layer, gate_open, branch)
        if layer + 1 < NUM_LAYERS:
            self.kernel("qkv", "pre_attention", layer + 1, gate_open, branch)

    def layer(self, layer: int, accepted: int) -> None:
        sends, receives = (self.sends,), (1 - self.sends,)
        # The sender and the receiver of each pair.
        pairs = [[group * self.tp_size + tp_rank for group in sends + receives] for tp_rank in range(self.tp_size)]
        begun = [clock[MAIN] for clock in self.now]
        self.kernel("lean_sm90", "predictor", layer, sends)
        self.kernel("pack", "predictor", layer, sends)
        for clock in self.now:
            clock[SPEC] = clock[MAIN]
        self.kernel("AllGather", "handover", layer, receives, SPEC)
        self.kernel("unpack_handover", "handover", layer, receives, SPEC)
        self.receiver_us += [self.now[receiver][SPEC] - begun[sender] for sender, receiver in pairs]
        self.go_on(layer, receives, SPEC)
        self.kernel("lean_combine", "full_attention", layer, sends, us=self.attention_us)
        self.kernel("lean_combine", "full_attention", layer, sends)
        if self.tp_size > 1:
            self.kernel("AllGather", "verdict", layer, sends)
        self.kernel("decide", "verdict", layer, sends)
        decided = [clock[MAIN] for clock in self.now]
        for clock in self.now:
            clock[VERDICT] = clock[MAIN]
        waits = sends if accepted else ()
        self.kernel("AllGather", "verdict", layer, waits, VERDICT)
        self.kernel("apply_verdict", "verdict", layer, waits, VERDICT)
        self.go_on(layer, () if accepted else sends, MAIN)
        if accepted and layer + 1 < NUM_LAYERS:
            # A receiver waits for the verdict or for its own closed branch.
            self.skipped_us += [
                max(self.now[receiver][MAIN], self.now[receiver][VERDICT]) - decided[sender]
                for sender, receiver in pairs
            ]
        for clock in self.now:
            clock[MAIN] = max(clock)
        self.streams[MAIN] = self.streams[SPEC]
        self.sends ^= accepted

    def run(self, verdicts: list[int]) -> float:
        """One step; returns its time."""
        self.step += 1
        self.streams, self.next_number = [7, 7, 7], iter(self.numbers)
        begun = self.now[0][MAIN]
        self.kernel("embed", "embed", 0)
        self.kernel("qkv", "pre_attention", 0, (self.sends,))
        for layer, accepted in enumerate(verdicts):
            self.layer(layer, accepted)
        self.kernel("pack", "agree", NUM_LAYERS, (self.sends,))
        self.kernel("AllGather", "agree", NUM_LAYERS)
        self.kernel("unpack_residual", "agree", NUM_LAYERS, (1 - self.sends,))
        self.kernel("Memcpy", "agree", NUM_LAYERS)
        for part in ("push_partial", "AllGather", "collect", "sample", "finish_step"):
            self.kernel(part, "lm_head", NUM_LAYERS)
        return self.now[0][MAIN] - begun

    def traced(self) -> list[list[dict[str, Any]]]:
        """Rows in the profiler's order, by start."""
        return [sorted(rows, key=lambda row: row["start_us"]) for rows in self.rows]


VERDICTS = {
    "mixed": [[1, 0, 0, 1, 1], [0, 1, 0, 0, 1], [1, 1, 0, 1, 0], [0, 0, 0, 1, 0], [1, 1, 1, 0, 1]],
    "accepted": [[1] * NUM_LAYERS] * TRACE_STEPS,
    "rejected": [[0] * NUM_LAYERS] * TRACE_STEPS,
}


# attention_us: either branch may be the first one at its all-reduce.
@pytest.mark.parametrize(
    ("name", "attention_us", "first", "quantised", "tp_size"),
    covering(list(VERDICTS), (5.0, 90.0), (0, 1), (False, True), (1, 2, 3)),
)
def test_labels_are_the_truth(name: str, attention_us: float, first: int, quantised: bool, tp_size: int) -> None:
    """Operation, layer, gate and readiness of every kernel."""
    job = Job(first, attention_us, quantised, tp_size, LATE_US)
    for verdicts in VERDICTS[name]:
        job.run(verdicts)
    labelled = label(job.traced(), VERDICTS[name])
    for rows, own, truth in zip(labelled, job.rows, job.truth, strict=True):
        expected = {
            (row["stream"], row["start_us"], row["kernel"]): known for row, known in zip(own, truth, strict=True)
        }
        assert len(rows) == len(own)
        for row in rows:
            found = (row["op"], row["layer"], row["open"], row["ready_us"])
            assert found == expected[row["stream"], row["start_us"], row["kernel"]], row


@pytest.mark.parametrize(
    ("name", "quantised", "tp_size", "attention_us"), covering(list(VERDICTS), (False, True), (1, 2), (20.0, 90.0))
)
def test_parts_predict_the_step(name: str, quantised: bool, tp_size: int, attention_us: float) -> None:
    """Parts are the times of the kernels. From them the latency model predicts the step's time to 2 %."""
    job = Job(1, attention_us, quantised, tp_size)
    times = [job.run(verdicts) for verdicts in VERDICTS[name]]
    parts = layer_parts(label(job.traced(), VERDICTS[name]), VERDICTS[name])
    gather = 12 if tp_size > 1 else 0
    decided = 6 + 1.5 + attention_us + 1.5 + gather + 1.5
    verdicts = [verdict for step in VERDICTS[name] for verdict in step]
    inner = [verdict for step in VERDICTS[name] for verdict in step[:-1]]  # layers that another layer follows
    reduces = 0 if tp_size == 1 else 2 * 4
    slower = [SLOWER_US * tp_rank for tp_rank in range(tp_size)]
    expected = {
        "attention": [attention_us + 1.5] * tp_size * len(verdicts),
        "sender": [decided + each for each in slower] * len(verdicts),
        "receiver": job.receiver_us,
        # The faster rank waits for the other at the first all-reduce.
        "layer": [LAYER_US + reduces + each for each in slower] * (2 * len(inner) - sum(inner)),
        "skipped": job.skipped_us,
        "fixed": [3 + 1.5 + 12 + 1 + 1 + 11 + 12 + 4 + 5 + 2] * tp_size * (TRACE_STEPS - 1),
        "step": times[1:] * tp_size,
    }
    assert parts.keys() == expected.keys()
    for part, samples in parts.items():  # step by step, one rank of a group after the other
        assert sorted(samples) == pytest.approx(sorted(expected[part]), abs=1e-6), part
    costs = StepCosts(
        NUM_LAYERS, **{f"{part}_us": median(us) if us else 0.0 for part, us in parts.items() if part != "step"}
    )
    for time, verdicts in zip(times[1:], VERDICTS[name][1:], strict=True):
        assert speculative_step_us(costs, sum(verdicts) / NUM_LAYERS) == pytest.approx(time, rel=0.02)


def test_branches_that_change_streams_are_refused() -> None:
    job = Job(0, 90.0, False, 2)
    for verdicts in VERDICTS["mixed"]:
        job.run(verdicts)
    traced = job.traced()
    stretch = next(row for row in traced[1] if row["step"] == 3 and "AllReduce" in row["kernel"])
    for row in traced[1]:
        if row["step"] == 3 and row["stream"] == stretch["stream"]:
            row["stream"] = 5
    with pytest.raises(AlspecError, match=r"^trace: cannot tell a layer's branches apart"):
        label(traced, VERDICTS["mixed"])


@pytest.mark.parametrize("part", ["unpack_handover", "apply_verdict", "AllReduce", "gate_up", "finish_step", ""])
def test_lost_kernels_are_named(part: str) -> None:
    """One kernel of a step, or with "" all of them."""
    job = Job(0, 90.0, False, 2)
    for verdicts in VERDICTS["mixed"]:
        job.run(verdicts)
    traced = job.traced()
    found = [row for row in traced[3] if row["step"] == 4 and part in row["kernel"]]
    for row in found if not part else found[:1]:
        traced[3].remove(row)
    left = sum(row["step"] == 4 for row in traced[3])
    with pytest.raises(AlspecError, match=f"^trace: the profiler lost kernels: it has {left} of rank 3 in step 4,"):
        label(traced, VERDICTS["mixed"])
