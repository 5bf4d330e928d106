"""The SAS softmax keeps its bounds, and the form printed in the paper does not."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alspec.sas import COEFFICIENTS, DROPPED_MASS, RELATIVE_ERROR, cutoff, dropped_mass_bound, sas_exp, sas_exp2

LENGTHS = [1024, 4096, 32768, 131072]


def printed(t: Tensor, n_r: float = 6) -> Tensor:
    """The printed form: a cubic over [0, 1), a table of e^-i, and a fixed cutoff."""
    x = t - t.floor()
    poly = -0.1025 * x**3 + 0.4626 * x**2 - 0.9922 * x + 0.9996
    return torch.where(t > n_r, 0.0, torch.exp(-t.floor()) * poly)


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    return float((approximate.double() / exact.double() - 1).abs().max())


def test_the_exponential_is_ten_times_closer_than_the_printed_one() -> None:
    t = torch.linspace(0, 30, 1_000_001)
    exact = torch.exp(-t.double())
    # fp32 rounds x = -t log2(e) to 2^-24 relative.
    assert relative_error(sas_exp(t, 40.0), exact) < RELATIVE_ERROR + 30 * 2**-23
    assert relative_error(printed(t, 40.0), exact) > 10 * RELATIVE_ERROR


def test_powers_of_two_are_exact_and_joined_without_a_jump() -> None:
    x = -torch.arange(0, 126.0)
    assert torch.equal(sas_exp2(x, -125.0), torch.exp2(x))
    c1, c2, c3 = COEFFICIENTS
    below, above = (1 + c1 * f + c2 * f**2 + c3 * f**3 for f in (-0.5, 0.5))
    assert 2 * below == pytest.approx(above, rel=1e-7)
    fine = torch.linspace(-30, 0, 300_001)
    assert (sas_exp2(fine, -125.0).diff() > -1e-6 * sas_exp2(fine, -125.0)[1:]).all(), "grows with x"


def test_weights_beyond_the_cutoff_are_zero() -> None:
    x = torch.tensor([0.0, -9.99, -10.0, math.nextafter(-10, -11) * (1 + 1e-6), -11.0, -1e30, -math.inf])
    assert (sas_exp2(x, -10.0) > 0).tolist() == [True, True, True, False, False, False, False]
    t = torch.tensor([5.999, 6.001])
    assert (sas_exp(t, 6.0) > 0).tolist() == [True, False]


def dropped_mass(logits: Tensor, n_r: float) -> float:
    t = logits.max() - logits.double()
    weight = torch.exp(-t)
    return float(weight[t > n_r].sum() / weight.sum())


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_dropped_mass_stays_small_and_grows_with_the_printed_cutoff(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    masses, fixed = [], []
    for _ in range(16):
        logits = 2 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
        masses.append(dropped_mass(logits, cutoff(num_tokens)))
        fixed.append(dropped_mass(logits, 6))
    assert max(masses) < DROPPED_MASS
    assert max(fixed) > 10 * DROPPED_MASS
    assert sum(fixed) / len(fixed) > {1024: 0.02, 131072: 0.2}.get(num_tokens, 0)


@given(st.integers(2, 300), st.floats(0.0, 30), st.integers(0, 2**31), st.floats(0, 20))
def test_dropped_mass_is_within_its_bound(num_tokens: int, n_r: float, seed: int, spread: float) -> None:
    logits = spread * torch.randn(num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert dropped_mass(logits, n_r) <= dropped_mass_bound(num_tokens, n_r)


@pytest.mark.parametrize("num_tokens", [2, *LENGTHS])
def test_the_worst_case_reaches_the_bound_at_the_cutoff(num_tokens: int) -> None:
    """The worst case: one large logit, all others a little beyond the cutoff."""
    n_r = cutoff(num_tokens)
    logits = torch.full((num_tokens,), -n_r - 1e-9, dtype=torch.float64)
    logits[0] = 0
    assert dropped_mass(logits, n_r) == pytest.approx(DROPPED_MASS, rel=1e-6)
    assert dropped_mass_bound(num_tokens, n_r) == pytest.approx(DROPPED_MASS)
    assert cutoff(2 * num_tokens - 1) - n_r == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: cutoff(0), "num_tokens"),
        (lambda: dropped_mass_bound(0, 1.0), "num_tokens"),
        (lambda: dropped_mass_bound(5, math.nan), "n_r"),
    ],
)
def test_arguments_out_of_range_are_refused(call: Callable[[], float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()


def online_mean(values: Tensor, weight: Callable[[Tensor], Tensor], alpha: Callable[[Tensor], Tensor]) -> float:
    """Online softmax over blocks of 64 equal logits: the mean of `values`. Each block rescales the history."""
    total, row_sum = torch.zeros(()), torch.zeros(())
    for block in values.split(64):
        p, history = weight(torch.zeros_like(block)), alpha(torch.zeros(()))
        total, row_sum = total * history + (p * block).sum(), row_sum * history + p.sum()
    return float(total / row_sum)


def test_history_keeps_its_weight_over_128k_tokens_and_loses_it_in_the_printed_form() -> None:
    values = torch.ones(131072)
    values[65536:] = -1
    assert abs(online_mean(values, lambda t: sas_exp(t, 20.0), lambda t: torch.exp2(-t))) < 1e-6
    assert abs(online_mean(values, printed, printed)) > 0.15
