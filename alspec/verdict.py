"""Acceptance of the speculative attention output, per request and per layer.

    accept  <=>  sum((A~ - A)^2) < lambda^2 sum(A^2)

over every query head of the layer, before the output projection. Under tensor parallelism each rank holds some heads:
ranks exchange their two sums and add them in rank order, so that all of them get the same bits and the same verdict.
Source: Attention-Level Speculation, section 3.2 and Algorithm 1; the exchange of the sums is ours.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["accepts", "combine_sums", "distance_sums", "layer_verdict"]


def distance_sums(spec_out: Tensor, full_out: Tensor) -> Tensor:
    """Sum `(A~ - A)^2` and `A^2` over this rank's heads, per request.

    Computed in fp32, or in fp64 for fp64 inputs; the sums are rounded to fp32 at the end.

    Args:
        spec_out: [B, Hq, D] any float dtype, `A~`.
        full_out: [B, Hq, D] any float dtype, `A`.

    Returns:
        [B, 2] fp32: (dist2, norm2).

    Raises:
        ValueError: the shapes differ or are not [B, Hq, D].

    """
    if spec_out.shape != full_out.shape or full_out.dim() != 3:
        raise ValueError(f"expected two [B, Hq, D], found {list(spec_out.shape)} and {list(full_out.shape)}")
    dtype = torch.promote_types(torch.promote_types(spec_out.dtype, full_out.dtype), torch.float32)
    full = full_out.to(dtype)
    dist2 = (spec_out.to(dtype) - full).square().sum(dim=(1, 2))
    norm2 = full.square().sum(dim=(1, 2))
    return torch.stack((dist2, norm2), dim=-1).to(torch.float32)


def combine_sums(rank_sums: Tensor) -> Tensor:
    """Add the sums of all ranks of a group, strictly in rank order, in fp32.

    Args:
        rank_sums: [T, B, 2] fp32, index 0 is the rank; T >= 1.

    Returns:
        [B, 2] fp32: (dist2, norm2) over all heads.

    Raises:
        ValueError: dtype or shape.

    """
    if rank_sums.dtype != torch.float32 or rank_sums.dim() != 3 or rank_sums.shape[0] < 1 or rank_sums.shape[2] != 2:
        raise ValueError(f"rank_sums: expected [T, B, 2] float32, found {list(rank_sums.shape)} {rank_sums.dtype}")
    total = rank_sums[0].clone()
    # A reduction over dim 0 may add in any order; fp32 addition is not associative.
    for rank in range(1, rank_sums.shape[0]):
        total += rank_sums[rank]
    return total


def accepts(sums: Tensor, threshold: float) -> Tensor:
    """Each request's verdict: `dist2 < lambda^2 norm2`, strict, in fp32.

    `lambda^2` is computed in double precision and rounded to fp32 once. `lambda = 0` never accepts. `lambda = inf`
    always accepts, whatever the sums. NaN sums reject for any finite lambda.

    Args:
        sums: [B, 2] fp32, (dist2, norm2) over all heads.
        threshold: lambda >= 0.

    Returns:
        [B] bool.

    Raises:
        ValueError: `threshold` is negative or NaN; dtype or shape of `sums`.

    """
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a number >= 0, found {threshold}")
    if sums.dtype != torch.float32 or sums.dim() != 2 or sums.shape[1] != 2:
        raise ValueError(f"sums: expected [B, 2] float32, found {list(sums.shape)} {sums.dtype}")
    dist2, norm2 = sums.unbind(dim=1)
    if math.isinf(threshold):  # inf * 0 is NaN, which would reject
        return torch.ones_like(dist2, dtype=torch.bool)
    return dist2 < norm2 * (threshold * threshold)


def layer_verdict(accepted: Tensor, live: Tensor) -> Tensor:
    """Whether the layer lets `A~` through: every live request accepts (True where no request is live).

    Args:
        accepted: [B] bool, each request's verdict.
        live: [B] bool, requests still generating.

    Returns:
        scalar bool tensor.

    Raises:
        ValueError: shape or dtype.

    """
    if accepted.dtype != torch.bool or live.dtype != torch.bool or accepted.shape != live.shape or live.dim() != 1:
        raise ValueError(
            f"expected two [B] bool, found {list(accepted.shape)} {accepted.dtype} and {list(live.shape)} {live.dtype}"
        )
    return (accepted | ~live).all()
