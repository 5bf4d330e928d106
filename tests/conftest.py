"""Without a GPU, Triton kernels run in Triton's interpreter; this must be set before the first kernel is imported."""

from __future__ import annotations

import os
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    runpy.run_path(str(Path(__file__).parent / "tools" / "interpreter.py"))

# The files that take longest without a GPU, in either tier, the longest first; but ahead of all one that mostly waits.
LONG_FILES = [
    "test_heartbeat",
    "test_compile",
    "test_quantised_decode",
    "test_lean_decode",
    "test_lengths",
    "test_captured_step",
    "test_compiled",
    "test_generate",
    "test_quality",
    "test_round_step",
    "test_interrupted_round",
    "test_prompts",
    "test_window_steps",
    "test_recall_kernels",
    "test_equivalence",
    "test_captured_round",
    "test_two_hosts",
]
GPU_CASES = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """NumPy, in the interpreter, warns of overflow and NaN where a GPU is silent."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        config.addinivalue_line("filterwarnings", "ignore:.* encountered in:RuntimeWarning")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out GPU cases where there is no GPU, and begin with the long files, which would otherwise end alone.

    `--collect-only` lists GPU cases everywhere.
    """
    if not torch.cuda.is_available() and not config.option.collectonly:
        left_out = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
        config.stash[GPU_CASES] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        removed = set(left_out)
        items[:] = [item for item in items if item not in removed]
    items.sort(key=lambda item: LONG_FILES.index(item.path.stem) if item.path.stem in LONG_FILES else len(LONG_FILES))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells its controller, which collects nothing, how many cases it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_cases"] = session.config.stash.get(GPU_CASES, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects the same cases."""
    node.config.stash[GPU_CASES] = getattr(node, "workeroutput", {}).get("gpu_cases", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for all GPU cases."""
    if left_out := config.stash.get(GPU_CASES, 0):
        terminalreporter.write_line(f"{left_out} GPU cases left out: no CUDA GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="other random inputs (default: 0)")


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Random inputs depend on the test and on `--seed` alone, whichever tests ran before: a failure can be repeated."""
    torch.manual_seed(crc32(request.node.nodeid.encode()) + request.config.getoption("--seed"))


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
    """The device that the test runs on."""
    return torch.device(request.param)
