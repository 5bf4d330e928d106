"""Quantise a weight into the canonical form: FP8 with a scale for each row, and INT4 in groups."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.models.checkpoint.quantised.packed_weight import FP8_MAX, PackedWeight

__all__ = ["CLIPS", "quantise_fp8_channel", "quantise_int4"]

# Shares of a group's range that are tried. With 16 codes a smaller range pays if few numbers lie far out: of groups of
# 128 normal numbers, one share for all is best near 0.95 with zero points and 0.9 without.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def quantise_fp8_channel(weight: Tensor) -> PackedWeight:
    """Quantise to e4m3 with a scale for each row, `max |w| / 448`, rounding to nearest, ties to even.

    Args:
        weight: [out, in]. NaN and Inf make all of their row NaN.
    Returns:
        Format fp8, scales [out, 1] fp32; a row of zeros has scale 1.
    """
    rows = weight.float()
    scales = rows.abs().amax(1, keepdim=True) / FP8_MAX
    scales = torch.where(scales == 0, 1.0, torch.where(scales.isfinite(), scales, torch.nan))
    codes = (rows / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return PackedWeight.from_codes(codes, scales, None, "fp8", weight.shape[1])


def quantise_int4(
    weight: Tensor, group_size: int, symmetric: bool = False, scale_dtype: torch.dtype | None = None
) -> PackedWeight:
    """Quantise to 4 bits in groups of input channels, rounding to nearest.

    Each group tries the shares `CLIPS` of its range and keeps the one with the least sum of squared errors. With
    zero points, the range is that of the group's numbers and 0, and 15 steps cover it. Without, it is `max |w|` on both
    sides, and the codes are -8 .. 7 in steps of `max |w| / 7.5`.

    Args:
        weight: [out, in]; `in` is a multiple of `group_size`. NaN and Inf make all of their group NaN.
        group_size: even; -1: a whole row.
        scale_dtype: of stored scales; None: the weight's.
    Returns:
        Format int4, scales [out, in / group_size]; errors are those of stored scales.
    Raises:
        ValueError: the group size does not divide `in`, or is odd.
    """
    scale_dtype = scale_dtype or weight.dtype
    size = weight.shape[1] if group_size == -1 else group_size
    if size < 1 or size % 2 or weight.shape[1] % size:
        raise ValueError(f"group_size: expected an even divisor of {weight.shape[1]}, found {group_size}")
    groups = weight.float().unflatten(1, (-1, size))  # [out, groups, size]
    least, most = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    if symmetric:
        most = torch.maximum(-least, most)
        least = -most
    best = torch.full_like(least, torch.inf)
    codes = torch.zeros_like(groups)
    scales, zeros = torch.ones_like(least), torch.zeros_like(least)
    for clip in CLIPS:
        step = ((most - least) * (clip / 15)).to(scale_dtype).float()
        step = torch.where(step > 0, step, 1.0)  # zeros, or numbers too small for a scale
        zero = torch.full_like(step, 8.0) if symmetric else (-clip * least / step).round().clamp(0, 15)
        code = ((groups / step[..., None]).round() + zero[..., None]).clamp(0, 15)
        error = (((code - zero[..., None]) * step[..., None] - groups) ** 2).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, step, scales), torch.where(better, zero, zeros)
        codes = torch.where(better[..., None], code, codes)
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan)
    return PackedWeight.from_codes(
        codes.flatten(1).to(torch.uint8), scales.to(scale_dtype), None if symmetric else zeros.to(torch.uint8), "int4",
        size,
    )  # fmt: skip
