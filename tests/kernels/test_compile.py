"""The lean kernel compiles for Ampere, Hopper and Blackwell, and keeps everything in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_heads_of_128_do_not_spill(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_lean.py")), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 2
    for usage in found:
        assert usage["spills"] == 0
