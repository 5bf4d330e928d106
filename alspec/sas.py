"""SAS, the softmax of TurboAttention with a table, a cubic and a cutoff in place of exponentials: its rules.

    e^-t = 2^x,  x = -t log2(e) = i + f,  i the integer next to x:   2^x ~ 2^i * POLY(f),  0 where t > n_r

Source: TurboAttention, section 4 and Appendix B. **(corrected)**, because two things of the printed form go wrong:

- `POLY(0) = 0.9996` there. Used for `alpha`, which rescales the sums of earlier blocks, it fades them by 0.0004 with
  every block. Here `alpha` is never approximated (the kernels use exact powers of two), and `POLY(0) = 1`.
- `n_r = 6` there, whatever the length. The mass beyond grows with the number of tokens n: for logits N(0, 2^2) it is
  3 % at 1K and 27 % at 128K. Here `n_r` grows with ln n (`cutoff`), and the dropped mass has a bound.

In base 2 the table of powers is the exponent of a float, which costs one product and no memory, so `n_r` may be as
large as it must. The fraction lies in [-1/2, 1/2], not in [0, 1) of base e: there a cubic is ten times closer (1.0e-4
relative at most, 10.3e-4 for the printed one), and what is best with `POLY(0) = 1` also joins without a step from one
integer to the next: `2 POLY(-1/2) = POLY(1/2)`.
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

# POLY(f) = 1 + c1 f + c2 f^2 + c3 f^3: least largest relative error against 2^f on [-1/2, 1/2] with POLY(0) = 1.
COEFFICIENTS = (0.69328293, 0.24221101, 0.05500895)
RELATIVE_ERROR = 1.02e-4  # of POLY, rounding of fp32 included
DROPPED_MASS = 2.0**-10  # of a row's softmax, at most, with the cutoff below

# Adding it to |x| < 2^22 - 127 rounds x to an integer i; the low bits of the sum are i + 127, for -127 < i < 128 the
# exponent of 2^i as a float.
MAGIC = 1.5 * 2.0**23 + 127


def cutoff(num_tokens: int) -> float:
    """`n_r`, in nats: what lies further below a row's maximum counts as 0, at most `DROPPED_MASS` of the softmax.

        n_r = ln(n - 1) + ln((1 - mass) / mass),   mass = DROPPED_MASS

    The least value for which `dropped_mass_bound` allows it.

    Args:
        num_tokens: n >= 1, the most tokens that a row sees.
    Raises:
        ValueError: out of range.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected >= 1, found {num_tokens}")
    return math.log(max(num_tokens - 1, 1)) + math.log((1 - DROPPED_MASS) / DROPPED_MASS)


def dropped_mass_bound(num_tokens: int, n_r: float) -> float:
    """The most of a row's softmax that a cutoff of `n_r` nats can drop, for any logits.

        mass <= x / (1 + x),   x = (n - 1) e^-n_r

    Proof: let `t_j >= 0` be how far logit j lies below the maximum. Dropped are those with `t_j > n_r`, and not the
    maximum itself, so at most n - 1, each of weight `e^-t_j < e^-n_r`: together D < x. What is kept holds the maximum's
    weight: K >= 1. The dropped share D / (D + K) grows with D and falls with K, so it is below x / (x + 1).

    It holds for an online softmax too: the maximum so far is not above the last one, so no `t_j` is larger than it will
    be in the end, and less is dropped. The approximation of the kept weights changes each by `RELATIVE_ERROR` at most.

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
    """`cutoff` of each number of tokens, fp32 of the same shape."""
    return (num_tokens - 1).clamp(min=1).float().log() + cutoff(1)


def sas_softmax(scores: Tensor, n_r: float | Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension with weights of `sas_exp` below each row's maximum.

    Args:
        scores: [..., n] fp32, nats; -inf where masked, not in a whole row.
        n_r: of `cutoff`, nats; or of each row, as broadcasts to `scores`.
    Returns:
        weights: [..., n] fp32, of sum 1.  log_sum: [...] fp32, nats: the logarithm of the sum they were divided by.
    """
    highest = scores.amax(-1, keepdim=True)
    weights = sas_exp(highest - scores, n_r)
    total = weights.sum(-1, keepdim=True)
    return weights / total, (highest + total.log()).squeeze(-1)


def sas_exp(t: Tensor, n_r: float | Tensor) -> Tensor:
    """`e^-t` to `RELATIVE_ERROR`, 0 where `t > n_r`; t >= 0, fp32 -> fp32."""
    return sas_exp2(t.float() * -math.log2(math.e), -n_r * math.log2(math.e))


def sas_exp2(x: Tensor, cutoff: float | Tensor) -> Tensor:
    """`2^x` to `RELATIVE_ERROR`, 0 where `x < cutoff`; the rule that `kernels/attention/sas_exp2.py` computes.

    Args:
        x: fp32, below 127; -inf gives 0, NaN gives NaN.
        cutoff: in powers of two, -125 or more; `-n_r log2(e)`.
    Returns:
        fp32, as x. Exact where x is an integer; continuous from the cutoff on.
    """
    c1, c2, c3 = COEFFICIENTS
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    fraction = ((c3 * f + c2) * f + c1) * f + 1
    # A product, exact: by adding to the exponent, NaN would become a number.
    power = fraction * (shifted.view(torch.int32) << 23).view(torch.float32)
    return torch.where(x < cutoff, 0.0, power)
