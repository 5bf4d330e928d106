"""What benchmarks share: where a guess goes, what attention has written, and whether it is right."""

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
    """What attention of q [B, Hq, D] writes for a pair, with the words of `A~` on `device`; and these words, zeroed.

    `A~` comes in so many parts. Their epoch is 0.
    """
    batch, hq, dim = q.shape
    size = parts * q.numel()
    words = torch.zeros(size + (parts * batch * hq if parts > 1 else 0), dtype=torch.int64, device=device)
    speculation = SpecOutput(
        chunk_size,
        words[:size].view(parts, *q.shape),
        torch.full((batch, num_sums(hq, dim), 2), torch.nan, device=q.device),
        torch.zeros(1, dtype=torch.int32, device=q.device),
        words[size:].view(parts, batch, hq) if parts > 1 else None,
    )
    return speculation, words


def written(out: Tensor, speculation: SpecOutput | None) -> tuple[Tensor, ...]:
    """What attention writes: its output; with a guess `A~`, the verdict's sums and, of several parts, their lse."""
    if speculation is None:
        return (out,)
    lse = () if speculation.spec_lse is None else (speculation.spec_lse,)
    return (out, speculation.spec_out, speculation.sums, *lse)


def combined(spec_out: Tensor, spec_lse: Tensor | None, epoch: int) -> Tensor:
    """`A~` [B, Hq, D] fp32 of the words of a `SpecOutput` under an epoch; NaN where one is missing."""
    o = unpack_packets(spec_out, epoch)
    if spec_lse is None:
        return o[0]
    weight = (unpack_packets(spec_lse, epoch) * math.log(2)).softmax(0)
    return (o * weight[..., None]).sum(0)


def check_close(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Compare by the relative error of the whole, in fp64: |found - wanted| < tolerance |wanted|.

    Raises:
        BadNumbersError: it is larger, or not a number.
    """
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    if not error < tolerance:
        raise BadNumbersError(f"wrong {what}: relative error {error:.2e}, tolerance {tolerance:.0e}")
