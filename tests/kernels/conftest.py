"""Device and comparison shared by the kernel tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

# One bound on |found - expected| / |expected| for each dtype the kernel reads; both bound the rounding of one result.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}

Check = Callable[[Tensor, Tensor, torch.dtype], None]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the launcher under test runs."""
    return torch.device(request.param)


def _check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare shapes, then the positions of NaN and infinities, then the relative RMS of the finite numbers."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan()), "NaN at other positions"
    for infinity in (torch.inf, -torch.inf):
        assert torch.equal(found == infinity, expected == infinity), f"{infinity} at other positions"
    finite = expected.isfinite()
    error = (found[finite] - expected[finite]).norm()
    scale = expected[finite].norm()
    tolerance = TOLERANCES[dtype]
    assert error <= tolerance * scale, f"relative RMS error {error / scale:.2e}, tolerance {tolerance:.0e}"


@pytest.fixture
def check() -> Check:
    """`check(found, expected, dtype of the inputs)`: the comparison of every kernel test."""
    return _check
