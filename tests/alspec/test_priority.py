"""The priority protocol: who sends, who skips, and how verdicts change it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alspec.priority import INITIAL_PRIORITY, after_handover, after_verdict, sender, skips_compute

VERDICTS = st.lists(st.booleans(), max_size=40)


def test_the_papers_example_accept_then_reject() -> None:
    first = INITIAL_PRIORITY
    assert first == (2, 0)
    assert [skips_compute(first, g) for g in (0, 1)] == [False, True]

    handed = after_handover(first)
    assert handed == (2, 1)
    second = after_verdict(handed, accepted=True)
    assert second == (0, 1)
    assert sender(second) == 1
    assert [skips_compute(second, g) for g in (0, 1)] == [True, False]

    handed = after_handover(second)
    assert handed[0] == 1
    third = after_verdict(handed, accepted=False)
    assert third == (1, 2)
    assert sender(third) == 1
    assert [skips_compute(third, g) for g in (0, 1)] == [False, False]


def test_a_sender_with_priority_one_still_sends_after_the_handover() -> None:
    assert sender(after_handover((0, 1))) == 1
    assert sender(after_handover((1, 0))) == 0


@given(VERDICTS)
def test_one_group_sends_and_has_the_right_x_in_every_layer(verdicts: list[bool]) -> None:
    priority = INITIAL_PRIORITY
    has_right_x = {0, 1}  # both groups embed the same token
    for accepted in verdicts:
        source = sender(priority)
        receiver = 1 - source
        assert source in has_right_x
        assert not skips_compute(priority, source)

        handed = after_handover(priority)
        assert set(handed) <= {0, 1, 2}
        assert sender(handed) == source
        assert handed[receiver] == 1

        priority = after_verdict(handed, accepted)
        assert set(priority) <= {0, 1, 2}
        assert priority[source] == (0 if accepted else 2)
        assert priority[receiver] == 1
        assert sender(priority) == (receiver if accepted else source)
        # After the verdict one of A~ and A is the layer's attention, and one group goes on with it.
        has_right_x = {receiver} if accepted else {source}
        assert {sender(priority)} == has_right_x
        assert skips_compute(priority, source) == accepted


@given(VERDICTS)
def test_the_number_of_accepts_decides_who_sends(verdicts: list[bool]) -> None:
    priority = INITIAL_PRIORITY
    for accepted in verdicts:
        priority = after_verdict(after_handover(priority), accepted)
    assert sender(priority) == sum(verdicts) % 2


@pytest.mark.parametrize("tie", [(0, 0), (1, 1), (2, 2)])
def test_a_tie_is_an_error(tie: tuple[int, int]) -> None:
    for act in (sender, after_handover):
        with pytest.raises(AssertionError):
            act(tie)


@pytest.mark.parametrize("priority", [(2, 0), (0, 1), (1, 1)])
def test_a_verdict_follows_a_handover(priority: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        after_verdict(priority, accepted=True)
