"""One thread for kernel tests, and the comparison that they share."""

from __future__ import annotations

from collections.abc import Callable

import comparison
import pytest
import torch
from torch import Tensor

Check = Callable[[Tensor, Tensor, torch.dtype], None]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def check() -> Check:
    """`check(found, expected, dtype of the inputs)`: the comparison of every kernel test."""
    return comparison.check
