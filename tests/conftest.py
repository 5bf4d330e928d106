"""Without a GPU, Triton kernels run in Triton's interpreter; this must be set before the first kernel is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# These take longest, with few tests each. They begin first, so that no worker is left alone with one at the end.
LONGEST = ("test_swapped_decoder.py", "test_replay.py", "test_faults.py", "test_paired_decoder.py", "test_handover.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order of files; it is kept where workers are given whole files in it (`--no-loadscope-reorder`)."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
