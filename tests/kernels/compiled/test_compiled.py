"""Compiled kernels give what the oracles give, layouts and all: their PTX runs on the CPU."""

import os
import subprocess
import sys

import pytest
from paths import PTX
from tiers import fast


@pytest.mark.parametrize("group", fast(["fast", "lean", "Hopper", "flashq", "step", "broken"], keep=["fast"]))
def test_compiled_kernels_match_the_oracles_without_races(group: str) -> None:
    """The groups are those of compiled_cases.py; `broken` are mutants, which have to be found."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(PTX / "compiled_cases.py"), "--group", group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
