"""The decode kernels compile for Ampere, Hopper and Blackwell, keep everything in registers and load ahead."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_decode_kernels_do_not_spill_and_lean_decode_loads_ahead(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("compile_kernels.py")), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 8 + 8 + 3 * (10 + 7 + 15) + (4 + 4 + 8 if capability == 90 else 0)
    assert {name: usage["spills"] for name, usage in found.items() if usage["spills"]} == {}
    assert {name for name, usage in found.items() if usage["serialised"]} == set()
    # A copy by every thread is 2 KB; a loop that does not load ahead has those of one tile (K, V and q) and no more.
    of_one_tile = 18 if capability >= 100 else 34
    lean = {name: usage["async_copies"] for name, usage in found.items() if name.startswith("lean")}
    assert all(copies > of_one_tile for copies in lean.values())
    # Narrow heads have two loops, of tiles of 17 copies and of 33, three of each in flight.
    assert {copies for name, copies in lean.items() if "head 64" in name} == ({3 * 50} if capability == 90 else set())
    # Records come 16 bytes for each lane: K before a loop and in it, V in it, of records of 4 bits and of 2.
    turbo = {name: usage["wide_loads"] for name, usage in found.items() if name.split(",")[0] == "turbo"}
    assert all(loads >= (26 if "head 64" in name else 56) for name, loads in turbo.items())


def test_loops_over_records_load_half_a_step_ahead() -> None:
    """4-bit records: V is waited for after K is used, and the next K after V: each has the other's time to arrive.
    2-bit records: both come for the next step.

    Whether they do is decided where scoreboards are shared out: with both on one, a launch took 8 to 28 % longer.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = (
        "import compile_kernels, json, waiting; kernel = compile_kernels.turbo(90, 4, 128, 1, False)\n"
        "over_records = [loop for loop in waiting.loops(kernel.asm['cubin']) if loop.count('HMMA') == 76]\n"
        "print(json.dumps([(loop.cycles, loop.loads()) for loop in over_records]))"
    )
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    low, (cycles, loads) = sorted(json.loads(done.stdout), key=lambda loop: len(loop[1]))
    assert len(low[1]) == 14, "of 2 bits, half as many of codes"
    assert min(waited - at for at, _, waited in low[1]) > low[0] / 2
    first, second = ([load for load in loads if (load[0] < cycles / 2) == half] for half in (True, False))
    assert len(first) == 10, "V: 8 of codes, 2 of parameters"
    assert len(second) == 12, "K: 8 of codes, 4 of parameters"
    assert {board for _, board, _ in first}.isdisjoint(board for _, board, _ in second)
    assert min(waited - at for at, _, waited in loads) > cycles / 4
