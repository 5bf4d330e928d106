"""Traces of a pair over a link: what each side did is found from its kernels, and the parts predict the step."""

from __future__ import annotations

import random
from statistics import median

import pytest
from linked_trace import CLOSED_US, LINK_US, WORK_US, LinkedJob

from alspec.latency_model import LinkCosts, linked_step_us
from alspec.runtime.profiling.kernel_names import operation_of
from alspec.runtime.profiling.kernel_trace import label
from alspec.runtime.profiling.link_trace import is_linked, link_parts

NUM_LAYERS = 12


def job(
    tp_size: int, rates: list[float], link_us: float = LINK_US, lead: int = NUM_LAYERS
) -> tuple[LinkedJob, list[list[int]]]:
    """A step for each hit rate, with random verdicts."""
    rng = random.Random(len(rates))
    verdicts = [[int(rng.random() < rate) for _ in range(NUM_LAYERS)] for rate in rates]
    made = LinkedJob(tp_size, link_us, lead)
    for hits in verdicts:
        made.step(hits)
    return made, verdicts


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("link_us", [LINK_US, 5.0])
@pytest.mark.parametrize("lead", [1, 2, 3, NUM_LAYERS])
def test_rows_say_what_each_side_did(tp_size: int, link_us: float, lead: int) -> None:
    rates = [0.0, 0.4, 0.7, 0.9, 1.0]
    made, verdicts = job(tp_size, rates, link_us, lead)
    labelled = label(made.rows, verdicts)
    assert is_linked(labelled)
    seen: set[tuple[str, bool]] = set()
    for step, ((verifier, speculator), hits) in enumerate(zip(made.steps, verdicts, strict=True), start=1):
        for rank, rows in enumerate(labelled):
            own = [row for row in rows if row["step"] == step and row["op"] != "message" and row["layer"] < NUM_LAYERS]
            side = "verifier" if rank < tp_size else "speculator"
            assert {row["side"] for row in own} == {side}
            expected = verifier.taken if side == "verifier" else speculator.taken
            taken = {row["layer"]: row["taken"] for row in own if "taken" in row}
            first = int(side == "speculator")  # in front of layer 0 both have the same x
            assert [taken[layer] for layer in range(first, NUM_LAYERS)] == expected[first:]
            seen |= {(side, flag) for flag in taken.values()}
            if side == "speculator":
                assert all(row["lost"] == speculator.lost[row["layer"]] for row in own)
            else:
                assert [row["accepted"] for row in own if row["op"] == "verdict"] == list(map(bool, hits))
            for row in own:
                begin = max(row["start_us"], row["ready_us"])
                assert row["open"] == (row["end_us"] - begin > CLOSED_US + 1e-9), row
    assert (lead, link_us) == (1, LINK_US) or seen == {
        (side, flag) for side in ("verifier", "speculator") for flag in (False, True)
    }


def test_messages_are_no_part_of_the_step() -> None:
    """A kernel is ready when the one before it has ended, whatever is on its way."""
    made, verdicts = job(1, [0.5, 1.0])
    for rows in label(made.rows, verdicts):
        for row in rows:
            if operation_of(row["kernel"]) == "message":
                assert row["op"] == "message"
            else:
                assert row["ready_us"] <= row["end_us"]


def test_parts_predict_the_step() -> None:
    made, verdicts = job(1, [1.0] + [0.6] * 3 + [1.0] * 3)
    parts = link_parts(label(made.rows, verdicts), verdicts)
    post = 2 * (WORK_US["_push_partial_kernel"] + WORK_US["_reduce_norm_kernel"]) + WORK_US["_gate_up_silu_kernel"]
    take, closed_post = WORK_US["_receive_residual_kernel"], 5 * CLOSED_US
    before = sum(WORK_US[name] for name in ("_qkv_rope_append_kernel", "lean_decode_kernel", "_decide_kernel"))
    assert median(parts["verifier"]) == pytest.approx(before + CLOSED_US + take + closed_post)
    assert median(parts["post"]) == pytest.approx(CLOSED_US + post - take - closed_post)
    names = ("_choose_x_kernel", "_qkv_rope_append_kernel", "lean_predictor_kernel")
    assert median(parts["speculator"]) == pytest.approx(sum(WORK_US[name] for name in names) + post + CLOSED_US)
    costs = LinkCosts(
        fixed_us=median(parts["fixed"]),
        verifier_us=median(parts["verifier"]),
        post_us=median(parts["post"]),
        speculator_us=median(parts["speculator"]),
        link_us=LINK_US,
    )
    for hits, step_us in zip(verdicts, made.step_us, strict=True):
        assert linked_step_us(costs, list(map(bool, hits))) == pytest.approx(step_us, rel=0.08)


def test_parts_that_never_occurred_are_empty() -> None:
    made, verdicts = job(1, [0.0])
    parts = link_parts(label(made.rows, verdicts), verdicts)
    assert (parts["verifier"], parts["post"], parts["fixed"]) == ([], [], [])
