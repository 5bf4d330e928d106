"""When the groups of a pair over a link decode alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from alspec.latency_model import LinkCosts, linked_step_us, tp_step_us
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.decode.pair_policy import PairPolicy
from alspec.runtime.profiling.forced_verdicts import forced_verdicts
from alspec.runtime.profiling.predicted_costs import link_costs, step_costs

MODEL = LlamaConfig.from_shape("llama-3.1-8b")


def costs(num_tokens: int) -> tuple[float, LinkCosts]:
    alone_us = tp_step_us(step_costs(MODEL, 1, 1, torch.bfloat16, num_tokens))
    return alone_us, link_costs(MODEL, 1, torch.bfloat16, num_tokens)


def steps(num_tokens: int, hit_rate: float, count: int) -> list[bool]:
    """Which of so many steps speculate. A step is launched before the one in front of it is read."""
    policy, accepted, kinds = PairPolicy(costs, MODEL.num_layers, 77.0), forced_verdicts(MODEL.num_layers, hit_rate), []
    for step in range(count):
        kinds.append(policy.decide_next(num_tokens + step))
        if step and kinds[step - 1]:
            policy.record(list(map(bool, accepted)), num_tokens + step - 1)
    return kinds


def test_a_pair_that_pays_goes_on() -> None:
    assert all(steps(131072, 1.0, 400))


def test_a_pair_that_cannot_pay_does_not_begin() -> None:
    """At 8K tokens it is slower with all hits."""
    assert not any(steps(8192, 1.0, 400))


def test_pauses_grow_while_probes_fail() -> None:
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(steps(131072, 0.0, 260))]
    # One more step is in flight when the last one of a window is read.
    assert runs[:-1] == [(True, 17), (False, 32), (True, 5), (False, 64), (True, 5), (False, 128), (True, 5)]


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.875])
@pytest.mark.parametrize("num_tokens", [8192, 32768, 131072])
def test_a_pair_without_gain_is_nearly_as_fast_as_one_group(num_tokens: int, hit_rate: float) -> None:
    """As predicted: over a thousand steps it is within 3 %."""
    alone_us, parts = costs(num_tokens)
    accepted = list(map(bool, forced_verdicts(MODEL.num_layers, hit_rate)))
    kinds = steps(num_tokens, hit_rate, 1000)
    pair_us = linked_step_us(parts, accepted)
    total = sum(pair_us if kind else alone_us for kind in kinds)
    assert total < 1000 * alone_us / 0.97
