"""Before a dependent launch waits for the kernel ahead, it writes nothing and reads nothing that a step writes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from paths import PTX, TOOLS

# Written by no kernel of a step but the last one (epoch), or read once more behind the wait (gate).
STEADY = {"w_ptr", "gamma_ptr", "peers_ptr", "epoch_ptr", "gate_ptr"}
# The last kernels of a step write lengths and records. Attention reads lengths early, records only without a gate, and
# merges read lengths: they start when the attention ahead has waited for what wrote those, or reads them early itself.
EARLY = {"seq_lens_ptr", "bits_ptr", "offset_ptr", "records_ptr"}
# Tiles of K and V but those of the newest token, which the projection ahead writes: see compiled_lean_cases.py.
TILES = {"k_desc", "v_desc", "k_long", "v_long"}
# Launched by themselves: those of prompts, and the first on a stream after two have met.
ALONE = {"flashq_store", "flashq_store, head 64", "flashq_store, tail", "flashq_restore", "pack_residual"}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(PTX / "waits.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert {name for name, kernel in kernels.items() if not kernel["waits"]} == ALONE
    return {name: kernel for name, kernel in kernels.items() if name not in ALONE}


def test_nothing_is_written(found: dict[str, dict[str, Any]]) -> None:
    assert {name: kernel["writes"] for name, kernel in found.items() if kernel["writes"]} == {}


def test_only_what_no_kernel_ahead_writes_is_read(found: dict[str, dict[str, Any]]) -> None:
    early = {name: set(kernel["reads"]) - STEADY for name, kernel in found.items()}
    lengths, records, turbo = {"seq_lens_ptr"}, {"bits_ptr", "offset_ptr"}, ["turbo", "turbo, head 64"]
    expected = {name: lengths for name in found if name.startswith("lean") or "merge" in name}
    expected |= dict.fromkeys(turbo, EARLY)
    expected |= dict.fromkeys(["turbo, batch 8, guess", "turbo, guess in parts"], records | lengths)
    expected |= dict.fromkeys(["lean", "lean, head 64"], lengths | TILES)
    assert {name: reads for name, reads in early.items() if reads} == expected


def test_no_way_leads_around_the_wait(found: dict[str, dict[str, Any]]) -> None:
    """Or those behind would not wait for what was ahead. Of turbo attention, programs without work may end: some have
    work, and a launch has ended when all its programs have."""
    assert {name for name, kernel in found.items() if kernel["ends"]} == {"turbo", "turbo, head 64"}


def test_what_comes_before_a_wait_is_found() -> None:
    program = (
        "import re, types, compile_kernels, waits\n"
        "kernel = compile_kernels.decode_step(90, 2, 1)['reduce_norm']\n"
        "without, count = re.subn(r'griddepcontrol\\.wait;', '', kernel.asm['ptx'])\n"
        "assert count == 1\n"
        "found = waits.before_the_wait(types.SimpleNamespace(asm={'ptx': without}, src=kernel.src))\n"
        "assert not found['waits'] and found['writes'] and found['ends'], found\n"
        "assert {'words_ptr', 'x_ptr'} <= set(found['reads']), found\n"
        "kernel = compile_kernels.lean(90, 4, 128, 1, False)\n"
        "without = re.sub(r'griddepcontrol\\.wait;', '', kernel.asm['ptx'])\n"
        "found = waits.before_the_wait(types.SimpleNamespace(asm={'ptx': without}, src=kernel.src))\n"
        "assert not found['waits'] and found['writes'] and 'q_ptr' in found['reads'], found\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{PTX}{os.pathsep}{TOOLS}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
