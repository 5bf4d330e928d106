"""Bounds on how far accepted speculation can move the output of one step. Each bound states its assumptions.

Source: Attention-Level Speculation, section 3.2 and Appendix A. All bounds are for one forward pass with exact keys and
values in the cache; errors that earlier tokens left in the cache are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["high_probability_bound", "self_attention_lipschitz", "worst_case_bound"]


def worst_case_bound(deltas: Sequence[float], alpha: float, beta: float, attention_lipschitz: float) -> float:
    """Worst-case distance of the hidden state after N layers.

        eps <= sum_{i=1..N} (1 + alpha)^(N-i+1) (1 + f(R) beta)^(N-i) delta_i

    This solves `e_{i+1} = (1 + alpha) ((1 + f(R) beta) e_i + delta_i)`, `e_1 = 0`. **(corrected)** Equation 2 is
    printed with `e_i delta_i` in place of `e_i + delta_i`; equation 3 is right and is what this computes.

    Assumes layers `u = h + attention(norm(h))`, `h' = u + mlp(norm(u))` and constants that hold for every layer, in one
    norm. All errors may point in the same direction, so the bound grows exponentially in N. It shows stability, but is
    far too loose to choose a threshold.

    Args:
        deltas: N bounds on the error of each layer's attention branch *as it is added to the residual*: a bound on
            `A~ - A` before the output projection times that projection's spectral norm, and 0 for a rejected layer.
        alpha: Lipschitz constant of `mlp(norm(.))`.
        beta: Lipschitz constant of the norm before the attention.
        attention_lipschitz: f(R), Lipschitz constant of the attention (with its output projection) on inputs of norm up
            to R; see `self_attention_lipschitz`. May be inf.

    Returns:
        eps >= 0; inf if it exceeds the range of a double.

    Raises:
        ValueError: an argument is negative or NaN.

    """
    _require_non_negative(alpha=alpha, beta=beta, attention_lipschitz=attention_lipschitz, deltas=deltas)
    attention_growth = 1 + (attention_lipschitz * beta if beta > 0 else 0)
    total, weight = 0.0, 1 + alpha
    for delta in reversed(deltas):
        total += weight * delta if delta > 0 else 0  # inf * 0 would be NaN
        weight *= (1 + alpha) * attention_growth
    return total


def high_probability_bound(
    hidden_norms: Sequence[float], threshold: float, failure_probability: float, azuma_constant: float
) -> float:
    """Distance of the hidden state after N layers; the probability of a larger one is at most q.

        eps <= sqrt((4 - ln q) lambda^2 sum_i ||H_i||^2 / c)

    From `P(||error|| >= eps) <= e^4 exp(-c eps^2 / (lambda^2 sum_i ||H_i||^2))`. **(corrected)** The paper states the
    bound "with probability delta"; delta is the probability that the bound fails, called q here.

    Assumes, as the paper does without proof, that the errors of the layers are a martingale (mean zero given the
    layers before, no common direction) and that each is at most `lambda ||H_i||` in the 2-norm. `c` is the constant
    of the Azuma inequality for Banach-space martingales. It exists, but its value is not known: use the result for its
    scaling, `lambda sqrt(N)`, not for its value.

    Args:
        hidden_norms: ||H_i||_2 for each of the N layers.
        threshold: lambda.
        failure_probability: q in (0, 1].
        azuma_constant: c > 0.

    Returns:
        eps >= 0, in the units of `hidden_norms`.

    Raises:
        ValueError: a norm or `threshold` is negative, `failure_probability` or `azuma_constant` is out of range.

    """
    _require_non_negative(threshold=threshold, hidden_norms=hidden_norms)
    if not 0 < failure_probability <= 1:
        raise ValueError(f"failure_probability: expected 0 < q <= 1, found {failure_probability}")
    if not azuma_constant > 0:
        raise ValueError(f"azuma_constant: expected > 0, found {azuma_constant}")
    norm = math.hypot(*hidden_norms)
    return threshold * norm * math.sqrt((4 - math.log(failure_probability)) / azuma_constant)


def self_attention_lipschitz(radius: float, constant: float) -> float:
    """Lipschitz bound of self-attention on inputs of norm up to R: `f(R) = C R^2 exp(C R^2)`.

    Self-attention has no global Lipschitz constant; a norm before it bounds R. Source: Geshkovski et al. 2023, as the
    paper cites it.

    Args:
        radius: R, bound on the norm of every token that the attention reads.
        constant: C, which depends on the layer's weights only.

    Returns:
        f(R) >= 0; inf if it exceeds the range of a double.

    Raises:
        ValueError: an argument is negative or NaN.

    """
    _require_non_negative(radius=radius, constant=constant)
    exponent = constant * radius * radius
    try:
        return exponent * math.exp(exponent)
    except OverflowError:
        return math.inf


def _require_non_negative(**arguments: float | Sequence[float]) -> None:
    for name, value in arguments.items():
        values = (value,) if isinstance(value, (int, float)) else value
        if not all(v >= 0 for v in values):
            raise ValueError(f"{name}: expected numbers >= 0, found {value}")
