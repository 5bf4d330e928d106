"""Helpers of the benchmarks: buffers for `A~`, the outputs of attention, and their check."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alspec.errors import BadNumbersError
from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.comm.ll_packets import unpack_packets

__all__ = ["check_close", "combined", "new_spec_output", "written"]


def new_spec_output(chunk_size: int, q: Tensor, parts: int, device: torch.device) -> tuple[SpecOutput, Tensor]:
    """Allocate what speculative attention of q writes for a pair.

    Args:
        q: [B, Hq, D].
        parts: number of partials in which `A~` is sent.
        device: holds the packets of `A~`.
    Returns:
        The `SpecOutput`, with epoch 0, and all of its packets, [n] int64, zeroed.
    """
    batch, hq, dim = q.shape
    size = parts * q.numel()
    packets = torch.zeros(size + (parts * batch * hq if parts > 1 else 0), dtype=torch.int64, device=device)
    speculation = SpecOutput(
        chunk_size,
        packets[:size].view(parts, *q.shape),
        torch.full((batch, num_sums(hq, dim), 2), torch.nan, device=q.device),
        torch.zeros(1, dtype=torch.int32, device=q.device),
        packets[size:].view(parts, batch, hq) if parts > 1 else None,
    )
    return speculation, packets


def written(out: Tensor, speculation: SpecOutput | None) -> tuple[Tensor, ...]:
    """The outputs of attention: A; with `speculation` also A~ and the verdict's sums, and the lse if A~ has parts."""
    if speculation is None:
        return (out,)
    lse = () if speculation.spec_lse is None else (speculation.spec_lse,)
    return (out, speculation.spec_out, speculation.sums, *lse)


def combined(spec_out: Tensor, spec_lse: Tensor | None, epoch: int) -> Tensor:
    """Combine the packets of a `SpecOutput` into `A~`, [B, Hq, D] fp32; NaN where a packet of `epoch` is missing."""
    o = unpack_packets(spec_out, epoch)
    if spec_lse is None:
        return o[0]
    weight = (unpack_packets(spec_lse, epoch) * math.log(2)).softmax(0)
    return (o * weight[..., None]).sum(0)


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare two tensors by their relative error, in fp64: |found - expected| < tolerance |expected|.

    Raises:
        BadNumbersError: the error is larger, or not a number.
    """
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < tolerance:
        raise BadNumbersError(f"wrong {what}: relative error {error:.2e}, tolerance {tolerance:.0e}")
