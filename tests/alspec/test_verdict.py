"""The verdict: sums over all heads of all ranks, a strict comparison in fp32, and the verdict of a layer."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alspec.verdict import accepts, combine_sums, distance_sums, layer_verdict


def sums(*pairs: tuple[float, float]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.float32)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)],
)
def test_distance_sums_against_a_loop(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    spec_out, full_out = torch.randn(2, 3, 5, 7, generator=generator, dtype=torch.float64).to(dtype)
    result = distance_sums(spec_out, full_out)
    assert result.shape == (3, 2)
    assert result.dtype == torch.float32
    for request in range(3):
        spec, full = spec_out[request].flatten().tolist(), full_out[request].flatten().tolist()
        expected = (math.fsum((s - f) ** 2 for s, f in zip(spec, full, strict=True)), math.fsum(f * f for f in full))
        assert result[request].tolist() == pytest.approx(expected, rel=tolerance)


def test_low_precision_inputs_are_not_summed_in_low_precision() -> None:
    # 4096 ones: a bfloat16 accumulator stops at 256, and 1/256 is lost next to 1.
    full_out = torch.ones(1, 32, 128, dtype=torch.bfloat16)
    spec_out = full_out + 2**-7
    assert distance_sums(spec_out, full_out).tolist() == [[4096 * 2**-14, 4096.0]]


def test_fp64_differences_survive_the_cast() -> None:
    full_out = torch.ones(1, 1, 4, dtype=torch.float64)
    assert distance_sums(full_out + 1e-9, full_out)[0, 0].item() == pytest.approx(4e-18, rel=1e-5, abs=0)


@pytest.mark.parametrize("shapes", [((2, 4, 8), (2, 4, 9)), ((4, 8), (4, 8))])
def test_distance_sums_checks_shapes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"\[B, Hq, D\]"):
        distance_sums(torch.ones(shapes[0]), torch.ones(shapes[1]))


def test_heads_split_over_ranks_give_the_sums_of_all_heads() -> None:
    generator = torch.Generator().manual_seed(2)
    spec_out, full_out = torch.randn(2, 3, 8, 16, generator=generator)
    per_rank = torch.stack(
        [distance_sums(spec_out[:, heads], full_out[:, heads]) for heads in torch.arange(8).reshape(4, 2)]
    )
    torch.testing.assert_close(combine_sums(per_rank), distance_sums(spec_out, full_out), rtol=1e-6, atol=0)


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=8))
def test_combine_sums_adds_left_to_right(values: list[float]) -> None:
    expected = np.float32(values[0])
    for value in values[1:]:
        expected = np.float32(expected + np.float32(value))
    rank_sums = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1).expand(-1, 2, 2)
    assert combine_sums(rank_sums).flatten().tolist() == [float(expected)] * 4


def test_combine_sums_depends_on_the_order_and_keeps_its_input() -> None:
    # 2^24 + 1 rounds back to 2^24 in fp32; 1 + 1 first does not.
    rank_sums = torch.tensor([2.0**24, 1.0, 1.0]).reshape(3, 1, 1).expand(3, 1, 2).contiguous()
    before = rank_sums.clone()
    assert combine_sums(rank_sums).tolist() == [[2.0**24, 2.0**24]]
    assert combine_sums(rank_sums.flip(0)).tolist() == [[2.0**24 + 2, 2.0**24 + 2]]
    assert torch.equal(rank_sums, before)


@pytest.mark.parametrize(
    "rank_sums",
    [torch.zeros(2, 3, 2, dtype=torch.float64), torch.zeros(3, 2), torch.zeros(0, 3, 2), torch.zeros(1, 3, 3)],
)
def test_combine_sums_checks_its_input(rank_sums: Tensor) -> None:
    with pytest.raises(ValueError, match="rank_sums"):
        combine_sums(rank_sums)


def test_the_comparison_is_strict() -> None:
    below, above = np.nextafter(np.float32(0.25), np.float32(0)), np.nextafter(np.float32(0.25), np.float32(1))
    assert accepts(sums((below, 1), (0.25, 1), (above, 1)), 0.5).tolist() == [True, False, False]


@given(
    dist2=st.floats(0, 1e6, width=32),
    norm2=st.floats(0, 1e6, width=32),
    threshold=st.sampled_from([0.05, 0.1, 0.15, 0.2, 0.25, 1.0]),
)
def test_accepts_rounds_lambda_squared_once_and_multiplies_in_fp32(
    dist2: float, norm2: float, threshold: float
) -> None:
    expected = np.float32(dist2) < np.float32(norm2) * np.float32(threshold * threshold)
    assert accepts(sums((dist2, norm2)), threshold).tolist() == [bool(expected)]


def test_fp32_decides_where_double_would_decide_otherwise() -> None:
    # fp32(0.1 * 0.1) is less than 0.01, so this dist2 lies between the two products.
    dist2 = float(np.float32(0.1 * 0.1))
    assert dist2 < 0.1 * 0.1
    assert accepts(sums((dist2, 1.0)), 0.1).tolist() == [False]


def test_infinite_threshold_always_accepts() -> None:
    edge = sums((1, 0), (0, 0), (math.inf, 1), (math.nan, 1), (0, math.nan))
    assert accepts(edge, math.inf).tolist() == [True] * 5


def test_zero_threshold_never_accepts() -> None:
    assert accepts(sums((0, 1), (0, 0), (0, math.inf), (1, 1)), 0.0).tolist() == [False] * 4


def test_huge_finite_threshold_is_still_strict() -> None:
    assert accepts(sums((1, 1e-3), (0, 0), (1, 0)), 1e200).tolist() == [True, False, False]


def test_nan_sums_reject() -> None:
    assert accepts(sums((math.nan, 1), (0, math.nan), (math.nan, math.nan)), 0.1).tolist() == [False] * 3


@pytest.mark.parametrize("threshold", [-0.1, -math.inf, math.nan])
def test_a_bad_threshold_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        accepts(sums((0, 1)), threshold)


@pytest.mark.parametrize("bad", [torch.zeros(2), torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64)])
def test_accepts_checks_its_input(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="sums"):
        accepts(bad, 0.1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6))
def test_layer_verdict_is_all_live_requests(rows: list[tuple[bool, bool]]) -> None:
    accepted = torch.tensor([a for a, _ in rows], dtype=torch.bool)
    live = torch.tensor([alive for _, alive in rows], dtype=torch.bool)
    verdict = layer_verdict(accepted, live)
    assert verdict.shape == ()
    assert verdict.dtype == torch.bool
    assert bool(verdict) == all(a for a, alive in rows if alive)


def test_layer_verdict_checks_its_input() -> None:
    with pytest.raises(ValueError, match="bool"):
        layer_verdict(torch.ones(2), torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool"):
        layer_verdict(torch.ones(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
