"""Clocks of two GPUs are compared; the rest of the measurement needs GPUs."""

from __future__ import annotations

import pytest
import torch

from alspec.errors import RankFailureError
from alspec.launch.bench import spec_ready


def clocks(asked: list[list[int]], answered: list[list[int]]) -> spec_ready._Clocks:
    """The clocks after an exchange with these times."""
    compared = object.__new__(spec_ready._Clocks)
    compared.times = [torch.tensor(times, dtype=torch.int64) for times in (asked, answered)]
    return compared


@pytest.mark.parametrize("ahead", [12269, -7, 0, 3 * 10**12])
def test_the_quickest_round_gives_the_offset_of_a_clock(ahead: int) -> None:
    """To the nanosecond, for times since 1970, where floats are 256 apart."""
    now = 1_764_126_000_123_456_789
    slow = [now, now + 9000], [0, now + 8000 + ahead]
    quick = [now + 9001, now + 9001 + 2414], [0, now + 9001 + 1207 + ahead]
    slower = [now + 20000, now + 25000], [0, now + 24999 + ahead]
    asked, answered = (list(times) for times in zip(slow, quick, slower, strict=True))
    assert clocks(asked, answered).ahead_ns() == ahead


@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_packet_is_no_quick_round(side: int) -> None:
    times = [[[1000, 3000], [4000, 6500]], [[0, 2100], [0, 5100]]]
    assert clocks(*times).ahead_ns() == 100
    times[side][1][1] = spec_ready.NEVER
    with pytest.raises(RankFailureError, match="could not compare their clocks"):
        clocks(*times).ahead_ns()
