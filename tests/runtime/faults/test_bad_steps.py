"""From fault words to the error: if several ranks find a fault in one step, all name the first one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from alspec.errors import AlspecError, BadNumbersError, RankFailureError
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, LATE_PACKET, fault_code
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.faults import bad_steps
from alspec.runtime.faults.bad_steps import bad_logits_error, fault_error

NUM_LAYERS = 4
LM_HEAD, START, HANDED_OVER, DRAFT = 2 * NUM_LAYERS, 2 * NUM_LAYERS + 1, 2 * NUM_LAYERS + 2, 2 * NUM_LAYERS + 3
NUM_DRAFT_LAYERS = 2
Fault = tuple[int, int]  # step, fault word


@pytest.fixture(autouse=True)
def _short_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of these jobs finds no fault, so every exchange takes the whole time."""
    monkeypatch.setattr(bad_steps, "FAULT_EXCHANGE_S", 0.5)


def bad(step: int, reduce_index: int, rank: int) -> Fault:
    return step, fault_code(BAD_NUMBERS, reduce_index, rank)


def late(step: int, reduce_index: int, rank: int) -> Fault:
    return step, fault_code(LATE_PACKET, reduce_index, rank)


def errors_of(*faults: Fault, late_s: float = 0.0) -> list[AlspecError]:
    """The errors of ranks 1, 2, ..., which have found `faults`; rank 0 has found none.

    Args:
        faults: of ranks 1, 2, ...
        late_s: how much later each next rank comes.
    """
    store, world = dist.HashStore(), len(faults) + 1

    def run(rank: int) -> AlspecError:
        time.sleep(late_s * rank)
        step, code = faults[rank - 1]
        return fault_error(code, step, NUM_LAYERS, Agreement(Placement(rank, world), store), 1, NUM_DRAFT_LAYERS)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(1, world)))


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_bad_numbers_that_spread_are_named_where_they_began(late_s: float) -> None:
    """Rank 2 computes them. Ranks 1 and 3 receive them; rank 3 finds them in its own next product."""
    for error in errors_of(bad(7, 4, 1), bad(7, 3, 2), bad(7, LM_HEAD, 3), late_s=late_s):
        assert isinstance(error, BadNumbersError)
        assert str(error).startswith("NaN or Inf: first seen on rank 2, MLP output, layer 1, step 7;")


def test_in_a_chain_of_waits_the_rank_that_is_late_first_is_named() -> None:
    """Rank 1 waits for layer 1 of rank 2, which waits for layer 2 of rank 1."""
    for error in errors_of(late(5, 2, 2), late(5, 4, 1)):
        assert isinstance(error, RankFailureError)
        assert str(error) == "rank 2 stalled at step 5, operation attention output, layer 1: no data arrived"


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        # Bad numbers of a step come before a late packet of the next step.
        ((late(6, 0, 2), bad(5, 7, 2)), "rank 2, MLP output, layer 3, step 5;"),
        # The start of a step has the highest index, but comes first.
        ((bad(6, 0, 1), late(6, START, 1)), "the start of a step"),
        ((bad(6, LM_HEAD, 1), late(6, 7, 1)), "MLP output, layer 3: no data"),
        # The output of the last layer is handed over after that layer and before the LM head.
        ((late(6, LM_HEAD, 1), late(6, HANDED_OVER, 2)), "rank 2 stalled at step 6, operation the last layer's output"),
        ((late(6, HANDED_OVER, 2), late(6, 7, 1)), "MLP output, layer 3: no data"),
        # In one operation bad numbers come first: they are the cause of the late packet.
        ((late(6, 5, 2), bad(6, 5, 2)), "first seen on rank 2, MLP output, layer 2"),
        # Drafts come before the model's own operations and after the start of a step.
        ((bad(6, 0, 1), bad(6, DRAFT + 3, 2)), "first seen on rank 2, MLP output, layer 1, while drafting, step 6;"),
        ((bad(6, DRAFT + 2 * NUM_DRAFT_LAYERS, 1), bad(6, 7, 2)), "first seen on rank 1, the LM head, while drafting"),
        ((late(6, DRAFT, 1), late(6, DRAFT + 1, 2)), "rank 1 stalled at step 6, operation attention output, layer 0, "),
        ((late(6, DRAFT, 1), late(6, START, 2)), "the start of a step"),
    ],
)
def test_the_first_fault_is_named_by_all(faults: tuple[Fault, ...], expected: str) -> None:
    first, second = errors_of(*faults)
    assert str(first) == str(second)
    assert expected in str(first)


def test_a_fault_of_an_earlier_attempt_does_not_count() -> None:
    store = dist.HashStore()
    agreement = Agreement(Placement(0, 2), store)
    fault_error(fault_code(BAD_NUMBERS, 0, 1), 1, NUM_LAYERS, agreement, 1)
    error = fault_error(fault_code(BAD_NUMBERS, 5, 0), 9, NUM_LAYERS, agreement, 2)
    assert "rank 0, MLP output, layer 2, step 9" in str(error)


def test_one_rank_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_steps, "FAULT_EXCHANGE_S", 10.0)
    started = time.monotonic()
    error = fault_error(fault_code(BAD_NUMBERS, 1, 0), 3, NUM_LAYERS, Agreement(Placement(0, 1), None), 1)
    assert "rank 0, MLP output, layer 0, step 3" in str(error)
    assert time.monotonic() - started < 0.5


def test_a_fault_is_reported_without_the_store() -> None:
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    error = fault_error(fault_code(BAD_NUMBERS, 5, 0), 9, NUM_LAYERS, Agreement(Placement(0, 2), Gone()), 1)
    assert "rank 0, MLP output, layer 2, step 9" in str(error)


class World:
    """A transport of four ranks that gathers `sums`, the layer sums of all ranks."""

    def __init__(self, sums: Tensor, placement: Placement | None = None) -> None:
        self.placement = placement or Placement(0, 4)
        self._sums = sums

    def all_gather_world(self, _: Tensor) -> Tensor:
        return self._sums


def test_bad_logits_are_named_where_they_began() -> None:
    """In the first bad layer of any rank. If all layers are good: in the LM head of the rank that has the token.

    Each rank has up to 76 of the 301 tokens.
    """
    sums = torch.zeros(4, NUM_LAYERS)
    logits = torch.zeros(2, 301)
    for token, rank in ((75, 0), (76, 1), (227, 2), (228, 3), (300, 3)):
        bad = logits.index_fill(1, torch.tensor([token]), torch.nan)
        message = str(bad_logits_error(bad, sums[0], 5, World(sums)))  # type: ignore[arg-type]
        assert message.startswith(f"NaN or Inf in the logits: first seen on rank {rank}, the LM head, step 5;")
    sums[0, 2:] = torch.inf
    sums[3, 1:] = torch.nan
    message = str(bad_logits_error(bad, sums[0], 5, World(sums)))  # type: ignore[arg-type]
    assert "first seen on rank 3, layer 1, step 5;" in message


@pytest.mark.parametrize("rank", range(4))
def test_bad_logits_of_a_pair_over_a_link_are_named_in_the_own_group(rank: int) -> None:
    """Each group computes all logits: each of its two ranks has up to 151 of the 301 tokens."""
    placement = Placement(rank, 4, num_groups=2, is_linked=True)
    for token, owner in ((150, 0), (151, 1), (300, 1)):
        bad = torch.zeros(1, 301).index_fill(1, torch.tensor([token]), torch.nan)
        world = World(torch.zeros(4, NUM_LAYERS), placement)
        message = str(bad_logits_error(bad, torch.zeros(NUM_LAYERS), 5, world))  # type: ignore[arg-type]
        assert f"first seen on rank {rank // 2 * 2 + owner}, the LM head" in message
