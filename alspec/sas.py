"""SAS, the approximate softmax of TurboAttention: a table, a cubic and a cutoff replace the exponential.

    e^-t = 2^x,  x = -t log2(e) = i + f,  i the nearest integer to x:   2^x ~ 2^i * POLY(f),  0 where t > n_r

Source: TurboAttention, section 4 and Appendix B. **(corrected)** Two parts of the printed form are changed:

- The paper has `POLY(0) = 0.9996`. It uses this for `alpha`, which rescales the sums of earlier blocks, so every block
  reduces them by 0.0004. Here `alpha` is never approximated (the kernels use exact powers of two), and `POLY(0) = 1`.
- The paper has `n_r = 6` for every length. The mass beyond it grows with the number of tokens n: for logits N(0, 2^2)
  it is 3 % at 1K and 27 % at 128K. Here `n_r` grows with ln n (`cutoff`), and the dropped mass has a bound.

In base 2 the exponent field of a float replaces the table of powers. This costs one product and no memory, so `n_r` can
be as large as needed. The fraction lies in [-1/2, 1/2], not in [0, 1) as in base e. On this interval a cubic is ten
times closer (largest relative error 1.0e-4; 10.3e-4 for the printed one). The best cubic with `POLY(0) = 1` is also
continuous from one integer to the next: `2 POLY(-1/2) = POLY(1/2)`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "COEFFICIENTS",
    "DROPPED_MASS",
    "RELATIVE_ERROR",
    "Softmax",
    "cutoff",
    "cutoffs",
    "dropped_mass_bound",
    "sas_exp",
    "sas_exp2",
    "sas_softmax",
]

Softmax = Literal["exact", "sas"]

# POLY(f) = 1 + c1 f + c2 f^2 + c3 f^3: minimax relative error against 2^f on [-1/2, 1/2] with POLY(0) = 1.
COEFFICIENTS = (0.69328293, 0.24221101, 0.05500895)
RELATIVE_ERROR = 1.02e-4  # largest error of POLY, including fp32 rounding
DROPPED_MASS = 2.0**-10  # largest share of a row's softmax that `cutoff` may drop

# Adding it to |x| < 2^22 - 127 rounds x to an integer i. The low bits of the sum are i + 127, which is the exponent
# field of the float 2^i for -127 < i < 128.
MAGIC = 1.5 * 2.0**23 + 127


def cutoff(num_tokens: int) -> float:
    """`n_r` in nats: logits further below their row's maximum count as 0. Drops at most `DROPPED_MASS` of the softmax.

        n_r = ln(n - 1) + ln((1 - mass) / mass),   mass = DROPPED_MASS

    This is the smallest value with `dropped_mass_bound(n, n_r) <= DROPPED_MASS`.

    Args:
        num_tokens: n >= 1, the largest number of tokens in a row.
    Raises:
        ValueError: out of range.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected >= 1, found {num_tokens}")
    return math.log(max(num_tokens - 1, 1)) + math.log((1 - DROPPED_MASS) / DROPPED_MASS)


def dropped_mass_bound(num_tokens: int, n_r: float) -> float:
    """Upper bound on the share of a row's softmax that a cutoff of `n_r` nats drops, for any logits.

        mass <= x / (1 + x),   x = (n - 1) e^-n_r

    Proof: let `t_j >= 0` be the distance of logit j below the maximum. Logits with `t_j > n_r` are dropped, never the
    maximum itself: at most n - 1 logits, each of weight `e^-t_j < e^-n_r`, so their sum is D < x. The kept weights
    include the maximum's, so their sum is K >= 1. The dropped share D / (D + K) grows with D and falls with K, so it is
    below x / (x + 1).

    The bound also holds for an online softmax: the running maximum is not above the final one, so no `t_j` is larger
    than its final value, and no more is dropped. The approximation changes each kept weight by `RELATIVE_ERROR` at
    most.

    Args:
        num_tokens: n >= 1.  n_r: nats, >= 0.
    Raises:
        ValueError: out of range.
    """
    if num_tokens < 1 or not n_r >= 0:
        raise ValueError(f"num_tokens, n_r: expected n >= 1 and n_r >= 0, found {num_tokens}, {n_r}")
    x = (num_tokens - 1) * math.exp(-n_r)
    return x / (1 + x)


def cutoffs(num_tokens: Tensor) -> Tensor:
    """`cutoff` of each element of `num_tokens`: fp32, same shape."""
    return (num_tokens - 1).clamp(min=1).float().log() + cutoff(1)


def sas_softmax(scores: Tensor, n_r: float | Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension with `sas_exp` in place of the exponential.

    Args:
        scores: [..., n] fp32, nats; -inf where masked, but not in a whole row.
        n_r: nats, from `cutoff`; or one per row, broadcast to `scores`.
    Returns:
        weights: [..., n] fp32; their sum is 1.  log_sum: [...] fp32, nats: logarithm of the sum before normalisation.
    """
    highest = scores.amax(-1, keepdim=True)
    weights = sas_exp(highest - scores, n_r)
    total = weights.sum(-1, keepdim=True)
    return weights / total, (highest + total.log()).squeeze(-1)


def sas_exp(t: Tensor, n_r: float | Tensor) -> Tensor:
    """`e^-t` within `RELATIVE_ERROR`, 0 where `t > n_r`; t >= 0, fp32 -> fp32."""
    return sas_exp2(t.float() * -math.log2(math.e), -n_r * math.log2(math.e))


def sas_exp2(x: Tensor, cutoff: float | Tensor) -> Tensor:
    """`2^x` within `RELATIVE_ERROR`, 0 where `x < cutoff`. Oracle of `kernels/attention/sas_exp2.py`.

    Args:
        x: fp32, below 127; -inf gives 0, NaN gives NaN.
        cutoff: in powers of two, -125 or more; `-n_r log2(e)`.
    Returns:
        fp32, shape of x. Exact where x is an integer; continuous for x >= cutoff.
    """
    c1, c2, c3 = COEFFICIENTS
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    fraction = ((c3 * f + c2) * f + c1) * f + 1
    # Multiply by the power of two, which is exact. Adding to the exponent bits would turn NaN into a number.
    power = fraction * (shifted.view(torch.int32) << 23).view(torch.float32)
    return torch.where(x < cutoff, 0.0, power)
