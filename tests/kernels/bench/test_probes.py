"""The kernels of `doctor`: one runs everywhere, all compile for Ampere, Hopper and Blackwell."""

import os
import subprocess
import sys

import pytest
import torch
from paths import PTX
from tiers import fast

from alspec.kernels.bench.probes import increment


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
def test_increment_writes_only_its_elements(size: int, device: torch.device) -> None:
    x = torch.randn(size, device=device)
    out = torch.full((size + 8,), torch.nan, device=device)
    expected = x + 1
    increment(x, out[:size])
    assert torch.equal(out[:size], expected)
    assert out[size:].isnan().all()
    increment(x, x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("capability", fast([80, 90, 100], keep=[90]))
def test_kernels_compile(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(PTX / "compile_probes.py"), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["_increment_kernel", "_send_word_kernel", "_exchange_packets_kernel"]
