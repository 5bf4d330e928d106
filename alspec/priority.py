"""Priority gating: which of two device groups does the work of a layer.

Both groups run one static list of operations. A vector of two priorities, replicated on every rank, decides what
each group skips:

    0  the group's x is stale: it skips every operation except the speculative attention
    1  the group took over A~, so its x is right if, and only if, that speculation is accepted
    2  the group holds the right x

One layer, with `sender(p)` the group with the larger p:

    pre-attention    each group, unless its p is 0
    handover         the sender gives A~, x and the new k, v to the receiver, whose p becomes 1
    verdict          the sender's p becomes 0 (accepted: the roles swap) or 2 (rejected: they stay)
    post-attention   each group, unless its p is 0

Source: Attention-Level Speculation, section 4.2 and Algorithm 2. There the sender is found once per layer, before the
receiver's p is written. A receiver whose A~ was accepted becomes the sender with p = 1. Once it has handed over, the
new receiver has p = 1, too, so between handover and verdict `sender(p)` would find a tie. **(ours)** A handover
therefore also sets the sender's p to 2. This is true (a sender's x is right) and changes nothing outside the layer:
the verdict overwrites it and no gated operation runs in between. The device side is kernels/speculation/roles.py.
"""

from __future__ import annotations

__all__ = ["INITIAL_PRIORITY", "Priority", "after_handover", "after_verdict", "sender", "skips_compute"]

Priority = tuple[int, int]

INITIAL_PRIORITY: Priority = (2, 0)


def sender(priority: Priority) -> int:
    """Group (0 or 1) with the larger priority: it holds the right x and computes the attention."""
    assert priority[0] != priority[1], f"priorities tie, no group is the sender: {priority}"
    return 0 if priority[0] > priority[1] else 1


def after_handover(priority: Priority) -> Priority:
    """Priorities once the receiver has `A~`: receiver 1, sender 2."""
    return _with_sender(sender(priority), 2)


def after_verdict(priority: Priority, accepted: bool) -> Priority:
    """Priorities once the sender has verified what it handed over: sender 0 on accept, 2 on reject.

    Args:
        priority: as `after_handover` returned it.
        accepted: the layer's verdict.

    """
    assert set(priority) == {1, 2}, f"expected the priorities after a handover, found {priority}"
    return _with_sender(sender(priority), 0 if accepted else 2)


def skips_compute(priority: Priority, group: int) -> bool:
    """Whether `group` (0 or 1) skips gated operations."""
    return priority[group] == 0


def _with_sender(group: int, value: int) -> Priority:
    """The sending group's priority is `value`, the receiver's 1."""
    return (value, 1) if group == 0 else (1, value)
