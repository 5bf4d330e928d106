"""The latency model against the numbers that Attention-Level Speculation prints.

Tables 4 to 7 give the parts of one token on 1, 2, 4 and 8 N150 chips: per-layer operations, flash decode at 1K tokens,
and the operations outside the layers. Their totals are reproduced to the nanosecond, except for the LM head of Table 5:
its rows sum to 42 ns more than the printed total. Figures 7 and 12 show token latencies and flash decode at other
context lengths as plots only, so the tests compare what the text says about them. Table 3 (H100) prints parts and
projected throughput, and is reproduced.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alspec.latency_model import (
    LinkCosts,
    StepCosts,
    hit_layer_us,
    linked_lead,
    linked_step_us,
    miss_layer_us,
    speculative_step_us,
    tp_step_us,
)

TIME = st.floats(0, 1000)
RATE = st.floats(0, 1)


def ints(row: str) -> list[int]:
    return [int(value) for value in row.split()]


# Tables 4-7, nanoseconds; keys: number of chips.
LAYER_OPS_NS = {
    1: ints("12454 109174 4299 21048 4828 4827 13166 13049 1701 3055 76389 1823 12487 141261 141772 30204 252556 2654"),
    2: ints(
        "19567 12471 56690 2541 10972 4834 4820 8447 8383 1833 2320 41730 21842 1621 20887 12486 76942 77430 "
        "16543 128695 19108 3233 1620"
    ),
    4: ints(
        "22378 12485 39022 2057 6269 4837 4834 6260 6342 1694 1955 24505 24753 1517 22055 13423 39711 39791 15800 "
        "68424 24764 3212 1496"
    ),
    8: ints(
        "34069 12507 35745 1620 3976 4839 4837 5007 5078 1708 1774 2274 88825 2847 1464 54386 15771 22705 22899 "
        "15804 38486 59572 2817 1441"
    ),
}
FIXED_OPS_NS = {
    1: ints(
        "5745 5639 13808 13512 2091 2089 1694 1759 3386 13243 546986 9003 545955 8833 545707 8944 547068 9055 29186"
    ),
    2: ints("5549 5767 13570 13590 2094 2222 1748 1743 20607 12931 546309 8779 546729 8992 17048"),
    4: ints("5622 5767 13328 13585 2088 2193 1795 1703 24259 12906 546508 8775"),
    8: ints("5641 5607 13717 13680 2095 2092 1707 1726 43463 12909 276107 5716"),
}
FLASH_DECODE_1K_NS = {1: 69853, 2: 64309, 4: 56024, 8: 50096}
PRINTED_LAYER_NS = {1: 846747, 2: 555015, 4: 387584, 8: 440451}
PRINTED_FIXED_NS = {1: 2313703, 2: 1207636, 4: 638529, 8: 384460}

# Table 3: context -> 4xH100 attention and other time per layer (us, rounded), TP tok/s, projected tok/s at r = 0.65.
TABLE_3 = {
    "1K": (13, 95, 244.6, 262.0),
    "32K": (29, 100, 214.2, 246.0),
    "64K": (49, 100, 191.4, 237.8),
    "96K": (56, 100, 178.2, 224.9),
    "128K": (63, 101, 169.3, 217.5),
}


def n150_costs(chips: int, attention_us: float | None = None) -> StepCosts:
    attention_us = FLASH_DECODE_1K_NS[chips] / 1000 if attention_us is None else attention_us
    return StepCosts(
        num_layers=32,
        fixed_us=sum(FIXED_OPS_NS[chips]) / 1000,
        layer_us=sum(LAYER_OPS_NS[chips]) / 1000,
        attention_us=attention_us,
        sender_us=attention_us,
        receiver_us=0,
    )


def h100_costs(context: str) -> StepCosts:
    """The parts of Table 3. It does not print `fixed`, which is the rest of its TP throughput."""
    attention_us, other_us, tp_tokens_per_s, _ = TABLE_3[context]
    fixed_us = 1e6 / tp_tokens_per_s - 32 * (attention_us + other_us)
    return StepCosts(32, fixed_us, other_us, attention_us, sender_us=attention_us, receiver_us=0)


@pytest.mark.parametrize("chips", [1, 2, 4, 8])
def test_tables_4_to_7_parts_give_the_printed_totals(chips: int) -> None:
    costs = n150_costs(chips)
    assert costs.layer_us * 1000 == pytest.approx(PRINTED_LAYER_NS[chips], abs=1e-6)
    assert costs.fixed_us * 1000 == pytest.approx(PRINTED_FIXED_NS[chips] + (42 if chips == 2 else 0), abs=1e-6)
    printed_ns = PRINTED_FIXED_NS[chips] + 32 * (PRINTED_LAYER_NS[chips] + FLASH_DECODE_1K_NS[chips])
    assert tp_step_us(costs) == pytest.approx(printed_ns / 1000, rel=1e-5)


def test_tensor_parallel_scaling_stops_at_four_chips() -> None:
    """Section 5.2: full tensor parallelism provides almost no improvement from 4 to 8 devices."""
    one, two, four, eight = (tp_step_us(n150_costs(chips)) for chips in (1, 2, 4, 8))
    assert one > two > four
    assert eight > 0.95 * four


def test_the_model_can_give_the_published_best_speedup() -> None:
    """Section 5.2: at best 1.65x, at 87.5 % hits, 4 + 4 chips against 8. Attention is taken as equal."""

    def speedup(attention_us: float) -> float:
        paired = speculative_step_us(n150_costs(4, attention_us), 0.875)
        return tp_step_us(n150_costs(8, attention_us)) / paired

    shortest, best = FLASH_DECODE_1K_NS[8] / 1000, PRINTED_LAYER_NS[4] / 1000
    assert speedup(shortest) < 1.65 < speedup(best)
    assert speedup(best) > max(speedup(best * 0.9), speedup(best * 1.1))  # attention fills the layer exactly


@pytest.mark.parametrize("context", TABLE_3)
def test_table_3_projection(context: str) -> None:
    """Table 3 projects 0.65 x 32 = 20.8 hits: it keeps the fraction that the printed formula's floor drops.

    It also takes a receiver latency of 0. The per-layer times reproduce it to 0.1 %; rounding its parts to 1 us allows
    0.2 %. The formula with `floor` is an upper bound on the latency, at most 1.1 % larger.
    """
    costs = h100_costs(context)
    hits = 32 * 0.65
    latency_us = costs.fixed_us + hits * hit_layer_us(costs) + (32 - hits) * miss_layer_us(costs)
    projected = TABLE_3[context][3]
    assert 1e6 / latency_us == pytest.approx(projected, rel=1e-3)

    bound_us = speculative_step_us(costs, 0.65)
    assert latency_us < bound_us < 1.011 * latency_us
    assert bound_us == pytest.approx(costs.fixed_us + 20 * hit_layer_us(costs) + 12 * miss_layer_us(costs))


def test_layers_by_hand() -> None:
    receiver_bound = StepCosts(4, 100, layer_us=50, attention_us=30, sender_us=32, receiver_us=5)
    assert hit_layer_us(receiver_bound) == 55
    assert miss_layer_us(receiver_bound) == 82
    assert speculative_step_us(receiver_bound, 0.75) == 100 + 3 * 55 + 82
    assert tp_step_us(receiver_bound) == 100 + 4 * 80

    attention_bound = dataclasses.replace(receiver_bound, sender_us=70)
    assert hit_layer_us(attention_bound) == 70
    assert miss_layer_us(attention_bound) == 120
    assert speculative_step_us(attention_bound, 0.5) == 100 + 2 * 70 + 2 * 120


def test_a_step_over_a_link_by_hand() -> None:
    """The speculator is ahead after one layer; after a reject two layers are lost, and one more whose x is late."""
    costs = LinkCosts(fixed_us=100, verifier_us=70, post_us=50, speculator_us=40, link_us=16)
    assert linked_step_us(costs, [False] * 3) == 100 + 3 * 120
    # x behind layer 0 arrives at 16 + 40 + 16 = 72, after the verdict at 70; that behind layer 1 at 112, before 190.
    assert linked_step_us(costs, [True] * 4) == 100 + 120 + 3 * 70
    # Layer 2 ends at 120 + 70 + 120 = 310. The speculator learns of that at 326, when message 3 arrives, and would
    # begin layer 4: it waits for the verifier's x until 446. Its x behind layer 4 arrives at 502, after the verdict at
    # 500; that behind layer 5 at 542, before 620.
    assert linked_lead(costs) == 1
    assert linked_step_us(costs, [True, True, False, True, True, True]) == 100 + 120 + 70 + 3 * 120 + 70
    # It learns of the reject of layer 1 at 121, in front of layer 3, and waits for the verifier's x until 181. Its x
    # behind layer 5 arrives at 302, before the verdict at 310.
    near = dataclasses.replace(costs, verifier_us=10, speculator_us=40, link_us=1)
    assert linked_step_us(near, [True, False, True, True, True]) == 100 + 300
    assert linked_step_us(near, [True, False, True, True, True, True]) == 100 + 310
    with pytest.raises(ValueError, match="link_us: expected a finite number >= 0, found -1"):
        dataclasses.replace(costs, link_us=-1)


@given(TIME, TIME, TIME, RATE, st.integers(1, 100))
def test_the_step_time_is_the_printed_formula(
    layer: float, sender_us: float, receiver_us: float, rate: float, layers: int
) -> None:
    """`floor` and `ceil` of the printed formula in exact arithmetic, on rates that are ratios of counts."""
    r = Fraction(rate).limit_denominator(1000)
    costs = StepCosts(layers, 7.0, layer, sender_us, sender_us, receiver_us)
    printed = (
        7.0
        + math.floor(layers * r) * (receiver_us + max(sender_us - receiver_us, layer))
        + math.ceil(layers * (1 - r)) * (layer + sender_us)
    )
    assert speculative_step_us(costs, float(r)) == pytest.approx(printed, rel=1e-9)


@pytest.mark.parametrize("layers", range(1, 130))
def test_a_whole_number_of_hits_is_never_rounded_down(layers: int) -> None:
    """One hit saves 1 us, so the latency counts hits. `floor(100 * 0.29)` in doubles is 28."""
    costs = StepCosts(layers, 0, layer_us=1, attention_us=1, sender_us=1, receiver_us=0)
    for hits in range(layers + 1):
        assert speculative_step_us(costs, hits / layers) == 2 * layers - hits


def test_a_partial_hit_is_rounded_down() -> None:
    costs = StepCosts(100, 0, layer_us=1, attention_us=1, sender_us=1, receiver_us=0)
    assert math.floor(100 * 0.29) == 28
    assert speculative_step_us(costs, 0.29) == 200 - 29
    assert speculative_step_us(costs, 0.2899) == 200 - 28
    assert speculative_step_us(costs, 0.2999) == 200 - 29


@given(TIME, TIME, TIME, RATE, RATE)
def test_more_hits_are_never_slower(layer: float, sender_us: float, lead: float, r1: float, r2: float) -> None:
    costs = StepCosts(32, 5.0, layer, sender_us, sender_us, receiver_us=min(lead, sender_us))
    low, high = sorted((r1, r2))
    assert speculative_step_us(costs, high) <= speculative_step_us(costs, low) + 1e-9
    assert speculative_step_us(costs, 0) == pytest.approx(tp_step_us(costs))


@pytest.mark.parametrize("rate", [-0.01, 1.01, math.nan])
def test_a_hit_rate_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="hit_rate"):
        speculative_step_us(n150_costs(4), rate)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(StepCosts)])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_impossible_costs_are_refused(field: str, value: float) -> None:
    parts: dict[str, Any] = {**dataclasses.asdict(n150_costs(4)), field: value}
    with pytest.raises(ValueError, match=field):
        StepCosts(**parts)
