"""How the kernel tests compare a result with its oracle."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "check", "close"]

# One bound on |found - expected| / |expected| for each dtype that a kernel reads. It bounds the rounding of one result.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare shapes, then the positions of NaN and infinities, then the relative RMS of the finite numbers."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan()), "NaN at other positions"
    for infinity in (torch.inf, -torch.inf):
        assert torch.equal(found == infinity, expected == infinity), f"{infinity} at other positions"
    finite = expected.isfinite()
    error = (found[finite] - expected[finite]).norm()
    scale = expected[finite].norm()
    assert error <= tolerance * scale, f"relative RMS error {error / scale:.2e}, tolerance {tolerance:.0e}"


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`close` with the tolerance of a kernel that reads `dtype`."""
    close(found, expected, TOLERANCES[dtype])
