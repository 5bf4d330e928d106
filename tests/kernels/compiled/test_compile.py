"""Kernels compile for Ampere, Hopper and Blackwell, do not spill, load ahead, and wait before they write.

The fast tier compiles a part of the variants for Hopper (`FAST` in compile_kernels.py). Every part is compiled once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from paths import PTX, ROOT, TOOLS

from alspec.kernels.kv_codec.formats import FORMATS

Reports = dict[str, dict[str, Any]]

COVERING = [
    pytest.param(90, "fast", id="90-fast"),
    *(pytest.param(capability, "all", id=f"{capability}-all", marks=pytest.mark.full) for capability in (80, 90, 100)),
]
HOPPER = [pytest.param("fast"), pytest.param("all", marks=pytest.mark.full)]
by_capability = pytest.mark.parametrize(("capability", "part"), COVERING)
pytestmark = pytest.mark.timeout(900)  # the first test of a part compiles all its variants
on_hopper = pytest.mark.parametrize("part", HOPPER)

# Before the wait, a kernel may read what only the last kernel of a step writes (epoch) or it reads again later (gate).
STEADY = {"w_ptr", "scale_ptr", "gamma_ptr", "q_norm_ptr", "k_norm_ptr", "peers_ptr", "epoch_ptr", "gate_ptr"}
LENGTHS = {"seq_lens_ptr"}
RECORD_PLACES = {"bits_ptr", "offset_ptr"}
# Tiles of K and V without the newest token, which the previous projection writes: see compiled_lean_cases.py.
TILES = {"k_desc", "v_desc", "k_long", "v_long"}
# The first kernel of a step does not overlap with the previous one.
NOT_DEPENDENT = ("embed_norm",)


def run_python(*arguments: str) -> str:
    """The output of a Python process in which Triton compiles for GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (PTX, TOOLS, ROOT / "src")))
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@functools.cache
def compiled(capability: int, part: str) -> dict[str, Any]:
    """The output of kernel_report.py: `fast`, `rest` or all variants; for Hopper, all are both parts."""
    if (capability, part) == (90, "all"):
        fast, rest = compiled(90, "fast"), compiled(90, "rest")
        return {"kernels": fast["kernels"], "variants": fast["variants"] | rest["variants"]}
    found: dict[str, Any] = json.loads(run_python("-P", str(PTX / "kernel_report.py"), str(capability), part))
    return found


def reports(capability: int, part: str) -> Reports:
    variants: Reports = compiled(capability, part)["variants"]
    return variants


@by_capability
def test_every_kernel_is_compiled(capability: int, part: str) -> None:
    found = {report["kernel"] for report in reports(capability, part).values()}
    assert found == set(compiled(capability, part)["kernels"])
    expected = {(80, "all"): 233, (90, "fast"): 129, (90, "all"): 365, (100, "all"): 233}[capability, part]
    assert len(reports(capability, part)) == expected


@by_capability
def test_no_kernel_spills_registers(capability: int, part: str) -> None:
    found = reports(capability, part)
    assert {name: report["spills"] for name, report in found.items() if report["spills"]} == {}


@by_capability
def test_tensor_core_products_are_asynchronous(capability: int, part: str) -> None:
    assert {name for name, report in reports(capability, part).items() if report["serialised"]} == set()


@by_capability
def test_prompt_kernels_load_more_than_two_bytes_at_once(capability: int, part: str) -> None:
    found = reports(capability, part)
    assert [found[name]["narrow_loads"] for name in ("add_rms_norm", "rotate_heads", "silu_mul")] == [0, 0, 0]


@by_capability
def test_lean_decode_loads_ahead(capability: int, part: str) -> None:
    """A loop that does not load ahead has the copies of one tile (K, V and q) only, half as many for heads of 64.

    A copy by every thread is 2 KB. On Hopper only the variant with many query heads for a KV head has this loop.
    """
    found = reports(capability, part)
    lean = {name: report for name, report in found.items() if report["kernel"].endswith(".lean_decode_kernel")}
    one_tile = 18 if capability >= 100 else 34
    copies = {name: report["async_copies"] * (2 if "head 64" in name else 1) for name, report in lean.items()}
    assert copies
    assert all(count > one_tile for count in copies.values())
    if capability == 90:
        # Three tiles of 36 copies are in flight.
        assert copies == {"lean, 20 x 128, batch 8": 3 * 36}


@on_hopper
def test_lean_decode_copies_tiles_ahead_on_hopper(part: str) -> None:
    """K and V of two tiles ahead of a loop and of one in it; without `A~` also of one ahead of the wait.

    A run has one loop for each length of tiles, and `A~` one loop, or two with recalled blocks.
    """
    found = reports(90, part)
    lean = {name for name in found if name.startswith("lean,")}
    copies = {name: found[name]["tensor_copies"] for name in lean if found[name]["tensor_copies"]}
    assert set(copies) == lean - {"lean, 20 x 128, batch 8"}
    expected = {}
    for name in copies:
        plain = "spec" not in name
        run_loops = 0 if "predictor" in name else 1 if one_tile_length(name) else 2
        spec_loops = (
            0 if plain or "rest" in name else 1 + ("recall" in name)
        )  # those over listed blocks are another loop
        gated_plain = name == "lean, gated"
        expected[name] = (8 if plain and not gated_plain else 6) * (run_loops + spec_loops)
    assert copies == expected


def one_tile_length(name: str) -> bool:
    """Whether runs have no long tiles: heads of 256 channels, and more than 16 columns."""
    return any(kind in name for kind in ("x 256", "5 rows", "16 rows"))


def reads_of_a_block(name: str) -> int:
    """Reads of 16 bytes a lane for a block of K and V, in a format named at the beginning of a variant."""
    head_dim = 64 if "x 64" in name else 128
    reads = 0
    for side in FORMATS[name.split(",")[0]]:
        # FlashQ's keys have `s_int` and `z` of each channel; TurboQuant has ratios.
        reads += head_dim * side.bits // 64 + (head_dim // 32 if side.method == "flashq" else 1)
    return reads


@on_hopper
def test_warps_read_records_without_each_other(part: str) -> None:
    """In both loops, over 4-bit and 2-bit records, nothing passes between warps: a lane reads its own operand.

    Two copies are issued, and a lane reads 16 bytes at once. A value in another layout would pass through shared memory
    with barriers of all warps: 1.3 times as many instructions.
    """
    found = {name: report for name, report in reports(90, part).items() if "loops" in report}
    assert len(found) == {"fast": 2, "all": 36}[part]
    by_lanes = {"BAR": 0, "STS": 0, "STL": 0, "LDL": 0, "LDSM": 0, "SYNCS": 4, "LDG": 2}
    for name, report in found.items():
        assert report["lanes_elsewhere"] == [], name
        loops = sorted(report["loops"], key=lambda loop: loop["LDS"])
        if name.startswith("flashq"):  # one loop for each number of bits that a head can have
            # Codes of K and V, then 4 parameters of K and 2 of V; heads of 64 have half as many codes of K.
            reads: tuple[int, ...] = (8, 12) if "x 64" in name else (14, 22)
        else:
            loops, reads = report["loops"][:1], (reads_of_a_block(name),)
        # A block's scales; with recalled blocks, also its place in a list, for K, V and scales of two tiles,
        # and for its tokens in front of a sliding window. A predictor writes no weights of blocks: one place less.
        by_lanes["LDG"] = (7 + ("window" in name) - ("predictor" in name)) if "recall" in name else 2
        assert loops == [by_lanes | {"LDS": count} for count in reads], name
        # Warps meet once for each head of a lane, and before the next work item; plain attention of one has none.
        heads_per_lane = 2 if "7 x" in name or "8 x" in name or "rows of" in name else 1
        one_item = not any(kind in name for kind in ("batch 8", "spec", "5 rows", "7 rows"))
        assert report["barriers_behind"] == heads_per_lane + (not one_item), name


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 100])
def test_flashq_assembly_has_its_lanes(capability: int) -> None:
    """On Ampere, where records are read from memory, and on Blackwell."""
    report = reports(capability, "all")["flashq"]
    assert report["lanes_elsewhere"] == []
    assert report["spills"] == 0


@on_hopper
def test_combine_kernels_know_their_partials_when_the_wait_ends(part: str) -> None:
    """The divisions that find partials come before the wait. Behind it, lanes exchange only sums and the largest `lse`.

    The largest `lse` takes a second round in part, then come five sums over 16 lanes, or 8 with `A~`, and two for the
    verdict. Shared memory is declared and not used.
    """
    found = {name: report for name, report in reports(90, part).items() if "combine" in name}
    assert len(found) == {"fast": 5, "all": 18}[part]
    for name, report in found.items():
        assert report["conversions_before"] > 0, name
        assert report["conversions_after"] == report["barriers"] == report["shared_reads"] == 0, name
        # Parts over recalled blocks lie in lanes, too: their largest `lse` and six sums.
        assert report["shuffles_after"] <= (43 if "recall" in name else 25 if "spec" in name else 28), name
        assert report["declares_unused"], name


@on_hopper
def test_dependent_launches_wait_and_write_nothing_before(part: str) -> None:
    found = reports(90, part)
    waiting = {name: report["early"] for name, report in found.items() if report["early"]["waits"]}
    dependent = {name for name, report in found.items() if report["dependent"] and not name.startswith(NOT_DEPENDENT)}
    assert waiting.keys() == dependent | {"reading alone"}
    assert {name: early["writes"] for name, early in waiting.items() if early["writes"]} == {}


@on_hopper
def test_dependent_launches_read_early_only_what_no_previous_kernel_writes(part: str) -> None:
    """The last kernels of a step write lengths and records. Attention reads lengths early, and records only plain.

    Combine kernels read lengths: they start when attention has waited for what wrote those, or reads them early itself.
    A sampling kernel starts when the previous one has waited for the logits.
    """
    expected = {}
    for name, report in reports(90, part).items():
        if not report["dependent"] or name.startswith(NOT_DEPENDENT):
            continue
        plain, kernel = "spec" not in name, report["kernel"].rpartition(".")[2]
        if name.endswith(", rest"):
            reads = set()
        elif kernel == "quantised_combine_kernel" and name.endswith(", predictor"):
            reads = set()  # where the parts of one request lie is known
        elif kernel == "quantised_decode_kernel":
            places = RECORD_PLACES if name.startswith("flashq") else RECORD_PLACES - {"bits_ptr"}
            reads = LENGTHS | places | ({"records_ptr"} if plain else set())
        elif kernel == "lean_sm90_kernel":
            reads = LENGTHS | (TILES if plain and "gated" not in name else set())
            if one_tile_length(name):
                reads -= {"k_long", "v_long"}
        elif kernel in ("lean_decode_kernel", "lean_combine_kernel", "quantised_combine_kernel"):
            reads = LENGTHS
        elif kernel == "_next_digit_kernel" or name.startswith("sampling, score behind"):
            reads = {"logits_ptr", "best_ptr"}
        else:
            reads = set()
        expected[name] = reads
    early = {name: set(reports(90, part)[name]["early"]["reads"]) - STEADY for name in expected}
    assert early == expected


@on_hopper
def test_no_path_leads_around_the_wait(part: str) -> None:
    """Otherwise later kernels would not wait for earlier ones. Programs of plain FlashQ attention may end without work:
    others have work, and a launch ends when all its programs have ended."""
    found = {name: report for name, report in reports(90, part).items() if report["early"]["waits"]}
    plain_flashq = {name for name, report in found.items() if "loops" in report and "spec" not in name}
    assert {name for name, report in found.items() if report["early"]["ends"]} == plain_flashq


@pytest.mark.full
def test_a_kernel_without_its_wait_is_found() -> None:
    program = (
        "import re, types, attention_variants, compile_kernels, waits\n"
        "def without_wait(variant):\n"
        "    ptx, count = re.subn(r'griddepcontrol\\.wait;', '', variant.asm['ptx'])\n"
        "    assert count\n"
        "    return waits.before_the_wait(types.SimpleNamespace(asm={'ptx': ptx}, src=variant.src))\n"
        "found = without_wait(compile_kernels.decode_step(90, 2, 1)['reduce_norm'])\n"
        "assert not found['waits'] and found['writes'] and found['ends'], found\n"
        "assert {'packets_ptr', 'x_ptr'} <= set(found['reads']), found\n"
        "found = without_wait(attention_variants.lean(90, 4, 128, 1, False))\n"
        "assert not found['waits'] and found['writes'] and 'q_ptr' in found['reads'], found\n"
    )
    run_python("-c", program)
