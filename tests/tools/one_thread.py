"""A fixture for conftest.py: tests of small tensors run on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

__all__ = ["one_thread"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Several threads are slower, and their sums may have another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
