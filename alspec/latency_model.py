"""Decode latency of tensor parallelism and of attention-level speculation, from measured parts.

All times are in microseconds. Source of steps over peer memory: Attention-Level Speculation, Appendix F, with `floor`
and `ceil` as printed. Over a link (kernels/speculation/linked_pair.py) the times of both groups are followed layer by
layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

__all__ = [
    "LinkCosts",
    "StepCosts",
    "at_rate",
    "hit_layer_us",
    "linked_lead",
    "linked_step_us",
    "linked_tp_step_us",
    "miss_layer_us",
    "speculative_step_us",
    "tp_step_us",
]


LEAD_MARGIN_US = 60.0  # messages take longer beside kernels than alone, and longer still now and then


@dataclass(frozen=True)
class StepCosts:
    """Measured parts of one decode step on a group of T ranks, at one context length."""

    num_layers: int
    """L, decoder layers."""
    fixed_us: float
    """Work outside the layers: embedding, final norm, LM head, sampling."""
    layer_us: float
    """One layer without its attention: pre-attention + post-attention."""
    attention_us: float
    """FD: attention of one layer without speculation, as in tensor parallelism."""
    sender_us: float
    """SFD_S: attention of one layer on the sender, which computes A~ and A and verifies."""
    receiver_us: float
    """SFD_R: attention of one layer on the receiver, until it has A~."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be measurements."""
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected >= 1, found {self.num_layers}")
        _check(self)


@dataclass(frozen=True)
class LinkCosts:
    """Measured parts of one decode step of two groups over a link, at one context length."""

    fixed_us: float
    """Work outside the layers: embedding, final norm, LM head, sampling."""
    verifier_us: float
    """The verifier's layer up to its verdict: pre-attention, A and A~, and launches whose gates are closed."""
    post_us: float
    """Post-attention of one layer."""
    speculator_us: float
    """The speculator's layer: choice of x, pre-attention, A~, post-attention."""
    link_us: float
    """One message, one way."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be measurements."""
        _check(self)


_CostsT = TypeVar("_CostsT", StepCosts, LinkCosts)


def _check(costs: StepCosts | LinkCosts) -> None:
    for field in fields(costs):
        value = getattr(costs, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{field.name}: expected a finite number >= 0, found {value}")


def at_rate(costs: _CostsT, slower: float) -> _CostsT:
    """Parts on devices that take `slower` times as long for each; messages take as long as before."""
    own = [field.name for field in fields(costs) if field.name not in ("num_layers", "link_us")]
    return replace(costs, **{name: slower * getattr(costs, name) for name in own})


def hit_layer_us(costs: StepCosts) -> float:
    """One accepted layer: the receiver continues with `A~` while the sender finishes the attention.

        max(SFD_S, SFD_R + layer)

    `layer` is this layer's post-attention and the next one's pre-attention.
    """
    return max(costs.sender_us, costs.receiver_us + costs.layer_us)


def miss_layer_us(costs: StepCosts) -> float:
    """One rejected layer, in which nothing overlaps: `SFD_S + layer`."""
    return costs.sender_us + costs.layer_us


def speculative_step_us(costs: StepCosts, hit_rate: float) -> float:
    """One token with paired groups.

        t = fixed + floor(L r) max(SFD_S, SFD_R + layer) + ceil(L (1 - r)) (layer + SFD_S)

    For a rate that is not a multiple of 1/L this is an upper bound, because hits are rounded down. The last layer's
    attention could also overlap the LM head; the model leaves that out.

    Args:
        costs: parts measured on one of the two groups.
        hit_rate: r in [0, 1], the share of layers that accept.

    Raises:
        ValueError: `hit_rate` is outside [0, 1].

    """
    if not 0 <= hit_rate <= 1:
        raise ValueError(f"hit_rate: expected 0 .. 1, found {hit_rate}")
    # A rate is a ratio of counts. If L r is an integer, its double can be a few ulp less (100 * 0.29 = 28.999...).
    hits = math.floor(costs.num_layers * hit_rate + 1e-9)
    misses = costs.num_layers - hits  # = ceil(L (1 - r))
    return costs.fixed_us + hits * hit_layer_us(costs) + misses * miss_layer_us(costs)


def tp_step_us(costs: StepCosts) -> float:
    """One token with tensor parallelism alone: `t = fixed + L (layer + FD)`."""
    return costs.fixed_us + costs.num_layers * (costs.layer_us + costs.attention_us)


def linked_tp_step_us(costs: StepCosts, link_us: float) -> float:
    """One token with tensor parallelism over a link, which it waits for twice in each layer.

        t = fixed + L (layer + FD + 2 link)

    Args:
        costs: parts of a step in which all-reduces take no time, or that of peer memory.  link_us: of one all-reduce.
    """
    return tp_step_us(costs) + 2 * costs.num_layers * link_us


def linked_lead(costs: LinkCosts) -> int:
    """The fewest layers by which a speculator over a link must be ahead for its x to arrive in time, with all hits.

    Message l - lead leaves `lead` layers before the verifier begins layer l; x behind layer l must arrive before it
    ends: `2 link + speculator + margin <= (lead + 1) verifier`.
    """
    needed_us = 2 * costs.link_us + costs.speculator_us + LEAD_MARGIN_US
    return max(1, math.ceil(needed_us / max(costs.verifier_us, 1.0)) - 1)


def linked_step_us(costs: LinkCosts, accepted: Sequence[bool]) -> float:
    """One token with two groups over a link, from the verdict on each layer.

    The verifier skips post-attention of an accepted layer if the speculator's x has arrived by then and follows from
    the verifier's alone. The speculator, when it knows of a reject since its base, waits for the verifier's x. It
    begins a layer no sooner than `linked_lead` allows. The L + 1 messages of a step follow each other on the link.

    Args:
        costs: parts of a step.
        accepted: [L].
    """
    lead, began = linked_lead(costs), []
    # The speculator ends the step before with the verifier's x and begins that much later.
    verifier_at, speculator_at, base, rejected = 0.0, costs.link_us, 0, -1
    notices: list[tuple[float, int]] = []  # when the speculator learns of a rejected layer
    for layer, is_accepted in enumerate(accepted):
        began.append(verifier_at)
        if layer >= lead:
            speculator_at = max(speculator_at, began[layer - lead] + costs.link_us)
        if any(time_us <= speculator_at and rejected_layer >= base for time_us, rejected_layer in notices):
            speculator_at, base = max(speculator_at, verifier_at + costs.link_us), layer
        speculator_at += costs.speculator_us
        verifier_at += costs.verifier_us
        is_taken = is_accepted and base > rejected and speculator_at + costs.link_us <= verifier_at
        verifier_at += 0.0 if is_taken else costs.post_us
        if not is_accepted:
            rejected = layer
            notices.append((verifier_at + costs.link_us, layer))
    return max(costs.fixed_us + verifier_at, (len(accepted) + 1) * costs.link_us)
