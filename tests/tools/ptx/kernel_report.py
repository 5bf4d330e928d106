"""Compile variants of kernels for one GPU architecture without a GPU and print what is in their code as JSON.

`python tests/tools/ptx/kernel_report.py 90`, then `fast` or `rest` for a part of them. Started by test_compile.py in a
process of its own, because the tests import the kernels for the interpreter.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine_code
import triton
from compile_kernels import all_variants, is_fast
from variant import Variant
from waits import before_the_wait

COUNTED = ("BAR", "STS", "STL", "LDL", "LDSM", "LDS", "SYNCS", "LDG")


def report(variant: Variant) -> dict[str, Any]:
    """What the tests check of one variant."""
    ptx, kernel = variant.asm["ptx"], variant.name.rpartition(".")[2]
    found: dict[str, Any] = {"kernel": variant.name, "dependent": bool(variant.constant("PDL"))}
    found |= assembled(ptx) | {
        "async_copies": ptx.count("cp.async.cg.shared.global"),  # of 16 bytes
        "tensor_copies": ptx.count("cp.async.bulk.tensor"),  # of tiles
        "narrow_loads": len(re.findall(r"\bld\.global[\w.:]*\.b16\b", ptx)),  # of 16 bits
    }
    if kernel == "quantised_decode_kernel":
        found["lanes_elsewhere"] = lanes_elsewhere(variant.asm["ttgir"])
    if variant.capability == 90:
        found["early"] = before_the_wait(variant)
        if kernel == "quantised_decode_kernel":
            found |= loops_over_records(variant.asm["cubin"])
        elif kernel.endswith("combine_kernel"):
            found |= around_the_wait(variant.asm["cubin"]) | {"declares_unused": "unused[4]" in ptx}
    return found


def assembled(ptx: str) -> dict[str, int]:
    """Assemble PTX again: registers, spilled bytes, and `serialised`, matrix products that are not asynchronous."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    # Triton ships two assemblers in some versions: the second is for compute capability 10.0 and up.
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tools = [folder / "ptxas", folder / "ptxas-blackwell"]
    if int(re.search(r"\d+", arch)[0]) >= 100:
        tools.reverse()
    tool = next(path for path in tools if path.exists() and _knows(path, arch))
    with tempfile.TemporaryDirectory() as work:
        Path(work, "k.ptx").write_text(ptx)
        command = [tool, "-v", f"--gpu-name={arch}", f"{work}/k.ptx", "-o", f"{work}/k.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spills": sum(int(number) for number in re.findall(r"(\d+) bytes spill", log)),
        "serialised": log.count("wgmma.mma_async instructions are serialized"),
    }


@functools.cache
def _knows(tool: Path, arch: str) -> bool:
    return arch in subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout


def lanes_elsewhere(ttgir: str) -> list[str]:
    """Layouts of tensors [W, 32] in assembly where an element is not in the lane of its column, the warp of its row.

    Instructions of whole warps (products, transpositions, copies by an elected lane) would then mean something else.
    """
    natural = (
        r"#ttg\.blocked<\{sizePerThread = \[1, 1\], threadsPerWarp = \[1, 32\], warpsPerCTA = \[\d+, 1\], .*",
        # A register more may hold the same once more.
        r"#ttg\.linear<\{register = \[(?:\[0, 0\])?\], lane = \[\[0, 1\], \[0, 2\], \[0, 4\], \[0, 8\], \[0, 16\]\], "
        r"warp = \[\[1, 0\], \[2, 0\]\], .*",
    )
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S.*)$", ttgir, re.MULTILINE))
    used = {
        name
        for line in ttgir.splitlines()
        if "tt.elementwise_inline_asm" in line
        for name in re.findall(r"tensor<\d+x32x\w+, (#\w+)>", line[line.rindex("} ") :])
    }
    assert used, "no assembly over lanes"
    return [layouts[name] for name in used if not any(re.fullmatch(kind, layouts[name]) for kind in natural)]


def loops_over_records(cubin: bytes) -> dict[str, Any]:
    """Instructions of the two loops over FlashQ records, and barriers behind the last copy."""
    loops = [loop for loop in machine_code.loops(cubin) if loop.count("UBLKCP") == 2][:2]
    names = [instruction.name for instruction in machine_code.instructions(cubin)[0]]
    return {
        "loops": [{name: loop.count(name) for name in COUNTED} for loop in loops],
        "barriers_behind": names[len(names) - names[::-1].index("UBLKCP") :].count("BAR"),
    }


def around_the_wait(cubin: bytes) -> dict[str, int]:
    """Conversions (a division has some) on both sides of the wait, and exchanges between lanes and warps."""
    names = [instruction.name for instruction in machine_code.instructions(cubin)[0]]
    wait = names.index("ACQBULK")
    before, after = (sum(name in ("I2F", "F2I") for name in part) for part in (names[:wait], names[wait:]))
    found = {"conversions_before": before, "conversions_after": after, "shuffles_after": names[wait:].count("SHFL")}
    return found | {"barriers": names.count("BAR"), "shared_reads": names.count("LDS")}


def main(capability: int, part: str = "all") -> None:
    """Print the reports, and the names of all kernels that have variants."""
    variants = all_variants(capability)
    chosen = {name: variant for name, variant in variants.items() if part == "all" or is_fast(name) == (part == "fast")}
    kernels = sorted({variant.name for variant in variants.values()})
    print(json.dumps({"kernels": kernels, "variants": {name: report(each) for name, each in chosen.items()}}, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
