"""Compiled decode attention gives what the oracles give, layouts and all: its PTX runs on the CPU."""

import os
import subprocess
import sys

import pytest
from paths import PTX


@pytest.mark.timeout(900)  # a hundred cases, one after the other: 3 minutes, or 7 on a slow machine
def test_compiled_kernels_match_the_oracles_without_races() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(PTX / "compiled_cases.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
