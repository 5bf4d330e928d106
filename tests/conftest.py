"""Without a GPU, Triton kernels run in Triton's interpreter; this must be set before the first kernel is imported."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    runpy.run_path(str(Path(__file__).parent / "tools" / "interpreter.py"))

# Files that take two minutes or more without a GPU, the longest first; but ahead of all one that mostly waits.
LONG_FILES = [
    "test_heartbeat",
    "test_flashq_decode",
    "test_lean_decode",
    "test_compile",
    "test_compiled",
    "test_captured_step",
    "test_flashq_equivalence",
    "test_quality",
    "test_close",
    "test_equivalence",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: where files run side by side, none is left alone at the end."""
    items.sort(key=lambda item: LONG_FILES.index(item.path.stem) if item.path.stem in LONG_FILES else len(LONG_FILES))


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
    """Where what is tested runs."""
    return torch.device(request.param)
