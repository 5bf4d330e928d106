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
    runpy.run_path(str(Path(__file__).with_name("interpreter.py")))


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
