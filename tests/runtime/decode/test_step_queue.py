"""The queue of launched steps: order, results, times, and what other ranks have launched."""

from __future__ import annotations

import pytest
import torch

from alspec.errors import RankFailureError
from alspec.kernels.sampling.next_token import RING_STEPS
from alspec.runtime.decode import step_queue
from alspec.runtime.decode.decode_step import RECENT_STEPS
from alspec.runtime.decode.step_queue import StepQueue

CPU = torch.device("cpu")


def new_queue(counted: int) -> StepQueue[str]:
    return StepQueue(3, "rank 2: step", counted, CPU)


def report(queue: StepQueue[str], number: int, clock_ns: int, value: int, fault: int = 0) -> None:
    """What the device writes at the end of a step."""
    queue.ring.rows[number % RING_STEPS] = torch.tensor([clock_ns, fault, value])
    queue.ring.stamps[number % RING_STEPS] = (number + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("counted", [0, 7, RING_STEPS - 1, 2**31 - 2])  # the device's counter is an int32, and wraps
def test_steps_are_read_in_the_order_of_their_launches(counted: int) -> None:
    queue = new_queue(counted)
    queue.add("main", "m")
    queue.add("alone", "a")
    assert queue.launched == counted + 2
    assert queue.next_step == 3
    assert queue.in_flight == ("main", "alone")
    assert queue.recent_kinds == "ma"
    report(queue, counted + 1, 5_000_000, 11)
    report(queue, counted + 2, 5_250_000, 12, fault=9)
    first, second = queue.read(), queue.read()
    assert (first.kind, first.values, first.fault, first.index) == ("main", [11], 0, (counted + 1) % RING_STEPS)
    assert (second.kind, second.values, second.fault, second.index) == ("alone", [12], 9, (counted + 2) % RING_STEPS)
    assert 0 < first.step_us < 60e6  # by the host's clock
    assert second.step_us == 250
    assert queue.num_read == 2
    assert queue.in_flight == ()


def test_a_generation_begins_behind_what_the_device_has_run() -> None:
    queue = new_queue(0)
    for _ in range(3):
        queue.add("main", "m")
    report(queue, 1, 1000, 4)
    queue.read()
    queue.begin(3)
    assert queue.in_flight == ()
    assert (queue.launched, queue.next_step, queue.num_read) == (3, 1, 0)
    queue.add("main", "m")
    report(queue, 4, 9000, 5)
    found = queue.read()
    assert found.values == [5]
    assert found.step_us != 8  # the step before belongs to another generation


def test_it_names_a_step_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "STEP_S", 0.05)
    queue = new_queue(40)
    queue.add("main", "m")
    queue.add("main", "m")
    report(queue, 41, 1000, 4)
    queue.read()
    with pytest.raises(RankFailureError, match=r"^rank 2: step 2 has not ended in 0\.05 s"):
        queue.read()


@pytest.mark.parametrize("behind", [0, 1, 3, RECENT_STEPS])
def test_missing_steps_are_the_newest_of_the_rank_that_has_launched_most(behind: int) -> None:
    ahead, queue = new_queue(0), new_queue(0)
    letters = "mmamaamamaam"
    for index, letter in enumerate(letters):
        ahead.add("step", letter)
        if index < len(letters) - behind:
            queue.add("step", letter)
    assert queue.missing(ahead.launched, ahead.recent_kinds) == letters[len(letters) - behind :]
    assert ahead.missing(queue.launched, queue.recent_kinds) == ""
