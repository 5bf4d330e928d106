"""Compile the lean kernel for one GPU architecture without a GPU and print what ptxas says of each variant as JSON.

Started by test_compile.py in a process of its own, because the tests import the kernels for the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alspec.kernels import lean_kernel

HALF = {"q_ptr", "k_ptr", "v_ptr"}
INTEGER = {"seq_lens_ptr", "counters_ptr", "group_counters_ptr", "spec_flag_ptr", "epoch_ptr"}
SPECULATION = {"spec_out_ptr", "spec_flag_ptr", "epoch_ptr", "sums_ptr"}


def usage(capability: int, group: int, head_dim: int, spec: bool) -> dict[str, int]:
    """Registers and spilled bytes of one variant, as `lean_decode_attention` launches it."""
    kernel = lean_kernel.lean_decode_kernel
    constants = {
        "HKV": 8, "GROUP": group, "GROUP_PAD": group, "ROWS": 16, "D": head_dim, "HEAD_DIM": head_dim, "PROGRAMS": 132,
        "B_PAD": 1,
        "BLOCK_N": 64 if capability >= 100 else 128, "STAGES": 3 if capability >= 90 else 2, "MERGE": 16,
        "SPEC": spec, "PART": 0,
        "FLAG": spec, "PDL": capability >= 90,
    }  # fmt: skip
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or (name in SPECULATION and not spec):
            signature[name] = "constexpr"
            constants.setdefault(name, None)
        elif name.endswith("_ptr"):
            signature[name] = "*bf16" if name in HALF else "*i32" if name in INTEGER else "*fp32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("capacity", "chunk_size"):
            signature[name], attributes[(index,)] = "i32", [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "qk_scale" else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4})
    return ptxas(compiled.asm["ptx"])


def ptxas(ptx: str) -> dict[str, int]:
    """Assemble PTX once more, for its report."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = next(path for path in (folder / "ptxas-blackwell", folder / "ptxas") if path.exists() and _knows(path, arch))
    with tempfile.TemporaryDirectory() as work:
        Path(work, "k.ptx").write_text(ptx)
        command = [tool, "-v", f"--gpu-name={arch}", f"{work}/k.ptx", "-o", f"{work}/k.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
        "spills": sum(int(number) for number in re.findall(r"(\d+) bytes spill", report)),
    }


def _knows(tool: Path, arch: str) -> bool:
    return arch in subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    variants = [(4, 128, False), (4, 128, True)]
    print(json.dumps([usage(int(sys.argv[1]), *variant) for variant in variants]))
