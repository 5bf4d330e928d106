"""The decode kernels compile for Ampere, Hopper and Blackwell, keep everything in registers and load ahead."""

import json
import os
import subprocess
import sys

import pytest
from paths import PTX, TOOLS


def _run(*program: str) -> str:
    """What Python prints that has Triton compile for GPUs, in this folder."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{PTX}{os.pathsep}{TOOLS}"
    command = [sys.executable, *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_decode_kernels_do_not_spill_and_lean_decode_loads_ahead(capability: int) -> None:
    found = json.loads(_run("-P", str(PTX / "compile_kernels.py"), str(capability)))
    more = 4 + 3 + 7 + 11 + 12 + 9 + 1 if capability == 90 else 4 * 4 + 4
    assert len(found) == 8 + 8 + 8 + 7 + 3 + 3 * (12 + 9 + 15) + 2 + more
    assert {name: usage["spills"] for name, usage in found.items() if usage["spills"]} == {}
    assert {name for name, usage in found.items() if usage["serialised"]} == set()
    assert [found[name]["narrow_loads"] for name in ("add_rms_norm", "rotate_heads", "silu_mul")] == [0, 0, 0]
    # A copy by every thread is 2 KB; a loop that does not load ahead has those of one tile (K, V and q) and no more, of
    # heads of 64 half as many.
    of_one_tile = 18 if capability >= 100 else 34
    lean = {name: usage["async_copies"] for name, usage in found.items() if name.startswith("lean,")}
    by_copies = {name: found[name]["tensor_copies"] for name in lean if found[name]["tensor_copies"]}
    by_loads = {
        name: copies * (2 if "head 64" in name else 1) for name, copies in lean.items() if name not in by_copies
    }
    assert all(copies > of_one_tile for copies in by_loads.values())
    assert set(by_copies) == {name for name in lean if "batch 8" not in name and capability == 90}
    if capability == 90:
        # Of several requests, heads of 64 have two loops, of tiles of 17 copies and of 33, of 128 those of 18 and 34;
        # three in flight.
        narrow = {copies for name, copies in lean.items() if name not in by_copies and "head 64" in name}
        wide = {copies for name, copies in lean.items() if name not in by_copies and "head 64" not in name}
        assert (narrow, wide) == ({3 * 50}, {3 * 52})
        # Of one request, K and V of two tiles ahead of a loop, of one in it, and without a guess of one ahead of the
        # wait. Loops: of a run one for each length of tiles, and one of a guess.
        plain = {name for name in by_copies if "spec False" in name or "KV heads" in name}
        of_runs = {name: 0 if "predictor" in name else 1 if "x 256" in name else 2 for name in by_copies}
        of_guess = {name: int(name not in plain and "rest" not in name) for name in by_copies}
        expected = {name: (8 if name in plain else 6) * (of_runs[name] + of_guess[name]) for name in by_copies}
        assert by_copies == expected


@pytest.mark.parametrize(
    "form",
    [
        *("4, 128, 1, False", "4, 128, 8, True", "8, 128, 1, False", "2, 64, 1, True, sas=True", "7, 64, 1, True"),
        "4, 128, 1, True, spec_parts=2",
    ],
)
def test_warps_go_over_records_by_themselves(form: str) -> None:
    """In both loops, over 4-bit and 2-bit records, nothing passes between warps: what a lane reads is its operand.

    Two copies are sent, and a lane reads 16 bytes at once. Where the compiler gave a value another layout, it would go
    through shared memory, with barriers of all warps: 1.3 times as many instructions.
    """
    program = (
        f"import compile_kernels, json, waiting; kernel = compile_kernels.turbo(90, {form})\n"
        "over_records = [loop for loop in waiting.loops(kernel.asm['cubin']) if loop.count('UBLKCP') == 2][:2]\n"
        "names = ('BAR', 'STS', 'STL', 'LDL', 'LDSM', 'LDS', 'SYNCS', 'LDG')\n"
        "counts = [{name: loop.count(name) for name in names} for loop in over_records]\n"
        "names = [instruction.name for instruction in waiting.instructions(kernel.asm['cubin'])[0]]\n"
        "behind = names[len(names) - names[::-1].index('UBLKCP'):].count('BAR')\n"
        "print(json.dumps([counts, behind, compile_kernels.lanes_elsewhere(kernel.asm['ttgir'])]))"
    )
    by_lanes = {"BAR": 0, "STS": 0, "STL": 0, "LDL": 0, "LDSM": 0, "SYNCS": 4, "LDG": 2}
    # K and V codes, then parameters: 4 of K and 2 of V, of heads of 64 half as many of K.
    reads = {"128": (14, 22), "64": (8, 12)}[form.split(", ")[1]]
    counts, behind, elsewhere = json.loads(_run("-c", program))
    assert elsewhere == []
    # Warps meet once, or once for each head of a lane, and before the next turn: of one head without a guess is none.
    heads_per_kv, _, batch_size, spec = form.split(", ")[:4]
    one_turn = batch_size == "1" and spec == "False"
    assert behind == (2 if int(heads_per_kv) > 4 else 1) + (not one_turn)
    found = sorted(counts, key=lambda loop: loop["LDS"])
    assert found == [by_lanes | {"LDS": count} for count in reads]


@pytest.mark.parametrize("capability", [80, 100])
def test_assembly_has_its_lanes(capability: int) -> None:
    """Where records are read from memory, and on Blackwell; on Hopper, see above."""
    program = (
        f"import compile_kernels; kernel = compile_kernels.turbo({capability}, 4, 128, 1, False)\n"
        "assert compile_kernels.lanes_elsewhere(kernel.asm['ttgir']) == []\n"
        "assert compile_kernels.report(kernel.asm['ptx'])['spills'] == 0"
    )
    _run("-c", program)


@pytest.mark.parametrize(
    ("form", "most_shuffles"),
    [
        ("lean_merge(90, 4, 128, 1, False)", 28),
        ("lean_merge(90, 4, 128, 1, True, spec_parts=3)", 25),
        ("turbo_merge(90, 4, 128, 1, True, 2)", 25),
    ],
)
def test_merges_know_where_partials_lie_when_the_wait_ends(form: str, most_shuffles: int) -> None:
    """Divisions, which find that, come before it. Behind it nothing crosses lanes but the largest `lse`, in a second
    round again, five sums over 16 lanes, or 8 with a guess, and two for the verdict. Shared memory is declared, and not
    used."""
    program = (
        f"import compile_kernels, json, waiting; kernel = compile_kernels.{form}\n"
        "names = [instruction.name for instruction in waiting.instructions(kernel.asm['cubin'])[0]]\n"
        "wait = names.index('ACQBULK')\n"
        "print(json.dumps([sum(name in ('I2F', 'F2I') for name in part) for part in (names[:wait], names[wait:])]\n"
        "                 + [names[wait:].count('SHFL'), names.count('BAR'), names.count('LDS'),\n"
        "                    'unused[4]' in kernel.asm['ptx']]))"
    )
    before, after, shuffles, barriers, reads, declares = json.loads(_run("-c", program))
    assert before > 0
    assert after == barriers == reads == 0
    assert shuffles <= most_shuffles
    assert declares
