"""Random inputs and NaN outputs of a decode step's kernels, for their tests and the emulated cases."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.norm.residual import num_square_sums

__all__ = ["EPS", "nan", "normal", "stream"]

EPS = 1e-5


def normal(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype).to(device)


def stream(device: torch.device, dtype: torch.dtype, batch: int, hidden: int) -> tuple[Tensor, Tensor]:
    """x_norm and square sums, as the previous kernel would write them."""
    squares = torch.rand(batch, num_square_sums(hidden), device=device) * hidden
    return normal(device, dtype, batch, hidden), squares


def nan(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
