"""The codebooks of TurboQuant: Lloyd-Max levels of a normal variable, as integers that a kernel looks up.

A code is an index into the levels in ascending order. The decode kernel looks up a byte u in [0, 127]; its level is
`u - 63.5`. Levels are symmetric: `m + 0.5` and `-(m + 0.5)` for the magnitudes m below. So 7 bits hold them, and the
rounding raises the mean square error of a codebook by 0.4 % at 4 bits, by less at 3 and 2.

Lloyd-Max levels of N(0, 1): 2 bits 0.4528, 1.5104; 3 bits 0.2451, 0.7560, 1.3439, 2.1519; 4 bits 0.1284, 0.3880,
0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326. Source: TurboQuant, section 3.
"""

from __future__ import annotations

import triton

__all__ = ["MAGNITUDES", "UNITS", "code_bytes", "thresholds"]

MAGNITUDES = {2: (17, 58), 3: (6, 20, 36, 58), 4: (2, 7, 12, 18, 24, 31, 40, 53)}
UNITS = {2: 38.72, 3: 27.17, 4: 19.70}  # levels of one standard deviation


@triton.constexpr_function
def code_bytes(bits: int) -> tuple[int, ...]:
    """The byte u of each code; the level is `u - 63.5`."""
    magnitudes = MAGNITUDES[bits]
    return (*(63 - m for m in reversed(magnitudes)), *(64 + m for m in magnitudes))


@triton.constexpr_function
def thresholds(bits: int) -> tuple[float, ...]:
    """The 2^bits - 1 midpoints between levels, ascending: the code of x is the number of midpoints below `UNITS x`."""
    levels = [u - 63.5 for u in code_bytes(bits)]
    return tuple((levels[i] + levels[i + 1]) / 2 for i in range(len(levels) - 1))
