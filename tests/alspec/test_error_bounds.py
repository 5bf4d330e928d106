"""Error bounds of the paper against hand calculation, its recurrence, and random networks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from alspec.error_bounds import high_probability_bound, self_attention_lipschitz, worst_case_bound

SMALL = st.floats(0, 2)


def test_worst_case_by_hand() -> None:
    assert worst_case_bound([], 0.5, 1, 2) == 0
    assert worst_case_bound([3], 0.5, 10, 10) == 4.5  # (1 + alpha) delta, without the attention's constant
    # (1.5)^2 (1 + 2*0.25) * 1 + 1.5 * 2
    assert worst_case_bound([1, 2], 0.5, 0.25, 2) == pytest.approx(2.25 * 1.5 + 3)


@given(st.lists(SMALL, max_size=8), SMALL, SMALL, SMALL)
def test_worst_case_is_the_printed_sum_and_solves_the_recurrence(
    deltas: list[float], alpha: float, beta: float, lipschitz: float
) -> None:
    n = len(deltas)
    printed = sum(
        (1 + alpha) ** (n - i + 1) * (1 + lipschitz * beta) ** (n - i) * delta
        for i, delta in enumerate(deltas, start=1)
    )
    recurrence = 0.0
    for delta in deltas:
        recurrence = (1 + alpha) * ((1 + lipschitz * beta) * recurrence + delta)
    bound = worst_case_bound(deltas, alpha, beta, lipschitz)
    assert bound == pytest.approx(printed)
    assert bound == pytest.approx(recurrence)


def test_worst_case_without_amplification_is_the_sum_of_the_errors() -> None:
    assert worst_case_bound([0.1] * 32, 0, 0, 5) == pytest.approx(3.2)


def test_worst_case_to_first_order() -> None:
    """To first order in alpha and f beta: `delta (N + alpha N (N + 1) / 2 + f beta N (N - 1) / 2)`, quadratic in N."""
    n, delta, small = 32, 0.1, 1e-7
    bound = worst_case_bound([delta] * n, small, 1, 2 * small)
    slope = (bound - n * delta) / (delta * small)
    assert slope == pytest.approx(n * (n + 1) / 2 + 2 * n * (n - 1) / 2, rel=1e-4)


@given(st.lists(st.floats(0.01, 2), min_size=2, max_size=6), st.floats(0.01, 2), st.floats(0.01, 2), st.floats(0.01, 2))
def test_worst_case_grows_with_every_argument(deltas: list[float], alpha: float, beta: float, f: float) -> None:
    bound = worst_case_bound(deltas, alpha, beta, f)
    assert worst_case_bound(deltas, alpha * 1.1, beta, f) > bound
    assert worst_case_bound(deltas, alpha, beta * 1.1, f) > bound
    assert worst_case_bound(deltas, alpha, beta, f * 1.1) > bound
    assert worst_case_bound([*deltas, 0.0], alpha, beta, f) > bound
    for i in range(len(deltas)):
        assert worst_case_bound([d + 0.1 * (i == j) for j, d in enumerate(deltas)], alpha, beta, f) > bound


def test_an_early_error_weighs_more_than_a_late_one() -> None:
    assert worst_case_bound([1, 0, 0], 0.1, 1, 0.1) > worst_case_bound([0, 0, 1], 0.1, 1, 0.1)


def test_worst_case_overflows_to_infinity_but_no_error_stays_no_error() -> None:
    assert worst_case_bound([1.0] * 200, 1e10, 1, 1e10) == math.inf
    assert worst_case_bound([1.0, 1.0], 0.1, 1, math.inf) == math.inf
    assert worst_case_bound([0.0] * 200, 1e10, 1, math.inf) == 0
    assert worst_case_bound([0.0, 1.0], 0.5, 1, math.inf) == 1.5  # only the last layer errs
    assert worst_case_bound([1.0, 2.0], 0.5, 0, math.inf) == 5.25  # no error reaches an attention


def with_norm(weight: Tensor, norm: float) -> Tensor:
    largest = float(torch.linalg.matrix_norm(weight, ord=2))
    return weight * (norm / largest)


def run_network(weights: list[tuple[Tensor, Tensor, Tensor]], h: Tensor, errors: list[Tensor]) -> Tensor:
    """`u = h + tanh(A N h) + error`, `h = u + tanh(M u)`; tanh has Lipschitz constant 1."""
    for (norm, attention, mlp), error in zip(weights, errors, strict=True):
        u = h + torch.tanh(attention @ (norm @ h)) + error
        h = u + torch.tanh(mlp @ u)
    return h


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("alpha", "beta", "f"), [(0.3, 0.7, 0.4), (1.2, 1.0, 0.9), (0.0, 0.5, 2.0)])
def test_worst_case_holds_on_a_random_residual_network(seed: int, alpha: float, beta: float, f: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layers, dim = 6, 12
    weights = [tuple(with_norm(randn(dim, dim), c) for c in (beta, f, alpha)) for _ in range(layers)]
    deltas = [0.5, 0.0, 0.2, 1.0, 0.1, 0.3]
    h = randn(dim)
    exact = run_network(weights, h, [torch.zeros(dim, dtype=torch.float64)] * layers)  # type: ignore[arg-type]
    bound = worst_case_bound(deltas, alpha, beta, f)
    for _ in range(50):
        errors = [delta * torch.nn.functional.normalize(randn(dim), dim=0) for delta in deltas]
        distance = torch.linalg.vector_norm(run_network(weights, h, errors) - exact)  # type: ignore[arg-type]
        assert 0 < distance <= bound


def test_worst_case_is_reached_when_all_errors_have_one_direction() -> None:
    """Linear positive layers in one dimension: the error equals the bound, so no smaller bound holds."""
    alpha, beta, f, deltas = 0.25, 0.5, 0.75, [0.1, 0.4, 0.2]

    def run(errors: list[float]) -> float:
        h = 1.0
        for error in errors:
            u = h + f * (beta * h) + error
            h = u + alpha * u
        return h

    assert run(deltas) - run([0.0] * 3) == pytest.approx(worst_case_bound(deltas, alpha, beta, f))


def test_high_probability_gives_the_published_number() -> None:
    """The paper's form for 95 %: `||error|| / ||H|| <= lambda sqrt(7 N / c)`, 7 being 4 - ln 0.05 = 6.996 rounded."""
    n, threshold, c, norm = 32, 0.1, 2.0, 3.0
    bound = high_probability_bound([norm] * n, threshold, 0.05, c)
    assert bound / norm == pytest.approx(threshold * math.sqrt(7 * n / c), rel=5e-4)
    assert bound / norm != pytest.approx(threshold * math.sqrt(7 * n / c), rel=1e-5)


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=10), st.floats(0.01, 1), st.floats(1e-6, 1), st.floats(0.01, 10)
)
def test_high_probability_inverts_the_azuma_tail(norms: list[float], threshold: float, q: float, c: float) -> None:
    eps = high_probability_bound(norms, threshold, q, c)
    tail = math.exp(4 - c * eps**2 / (threshold**2 * sum(h * h for h in norms)))
    assert tail == pytest.approx(q, rel=1e-6)


def test_high_probability_scales() -> None:
    base = high_probability_bound([1.0] * 16, 0.1, 0.05, 1.0)
    assert high_probability_bound([1.0] * 64, 0.1, 0.05, 1.0) == pytest.approx(2 * base)  # sqrt(N)
    assert high_probability_bound([1.0] * 16, 0.2, 0.05, 1.0) == pytest.approx(2 * base)
    assert high_probability_bound([3.0] * 16, 0.1, 0.05, 1.0) == pytest.approx(3 * base)
    assert high_probability_bound([1.0] * 16, 0.1, 0.05, 4.0) == pytest.approx(base / 2)
    assert high_probability_bound([1.0] * 16, 0.1, 0.01, 1.0) > base
    assert high_probability_bound([], 0.1, 0.05, 1.0) == 0
    assert high_probability_bound([3.0, 4.0], 1.0, 1.0, 1.0) == pytest.approx(10)  # sqrt(4 * 25)


def test_self_attention_lipschitz_by_hand() -> None:
    assert self_attention_lipschitz(0, 3) == 0
    assert self_attention_lipschitz(1, 1) == pytest.approx(math.e)
    assert self_attention_lipschitz(2, 0.5) == pytest.approx(2 * math.exp(2))
    assert self_attention_lipschitz(1e3, 1) == math.inf
    assert self_attention_lipschitz(1e200, 1) == math.inf


@given(st.floats(0.1, 5), st.floats(0.1, 2))
def test_self_attention_lipschitz_grows(radius: float, constant: float) -> None:
    bound = self_attention_lipschitz(radius, constant)
    assert self_attention_lipschitz(radius * 1.01, constant) > bound
    assert self_attention_lipschitz(radius, constant * 1.01) > bound


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_negative_and_nan_arguments_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="deltas"):
        worst_case_bound([1, bad], 1, 1, 1)
    with pytest.raises(ValueError, match="alpha"):
        worst_case_bound([1], bad, 1, 1)
    with pytest.raises(ValueError, match="threshold"):
        high_probability_bound([1], bad, 0.5, 1)
    with pytest.raises(ValueError, match="azuma_constant"):
        high_probability_bound([1], 1, 0.5, bad)
    with pytest.raises(ValueError, match="radius"):
        self_attention_lipschitz(bad, 1)


@pytest.mark.parametrize("probability", [0, -0.1, 1.5, math.nan])
def test_a_failure_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="failure_probability"):
        high_probability_bound([1], 1, probability, 1)
