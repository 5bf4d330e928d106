"""Device functions of the SAS softmax; `alspec/sas.py` has the method, its source and its error bounds."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from alspec import sas

__all__ = ["sas_cutoff", "sas_exp2"]

MAGIC = tl.constexpr(sas.MAGIC)
C1, C2, C3 = (tl.constexpr(c) for c in sas.COEFFICIENTS)
LOG2_ODDS = tl.constexpr(math.log2((1 - sas.DROPPED_MASS) / sas.DROPPED_MASS))


@triton.jit
def sas_cutoff(num_tokens):
    """Cutoff of `sas_exp2` for rows of up to `num_tokens` >= 1 (a scalar), relative to the row's maximum.

        -n_r log2(e) = -log2(n - 1) - log2((1 - mass) / mass),   mass = `DROPPED_MASS`

    Oracle: `alspec.sas.cutoff`.
    """
    return -tl.log2(tl.maximum(num_tokens - 1, 1).to(tl.float32)) - LOG2_ODDS


@triton.jit
def sas_exp2(x, cutoff):
    """`2^x` with a relative error of at most 1.02e-4, 0 where `x < cutoff`; exact where x is an integer.

    Not for `alpha`, which rescales earlier sums and must be exact. Oracle: `alspec.sas.sas_exp2`.

    Args:
        x: fp32 tensor, below 127; -inf gives 0, NaN gives NaN.
        cutoff: fp32 scalar, `-n_r log2(e)`, at least -125. It has the same reference as x: shift it if x is not
            relative to the row's maximum.
    """
    # Multiply by the power of two: adding to the exponent bits would turn NaN into a number.
    shifted = x + MAGIC
    f = x - (shifted - MAGIC)
    fraction = ((C3 * f + C2) * f + C1) * f + 1.0
    power = fraction * (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < cutoff, 0.0, power)
