"""Machine code of a kernel, and its loops: `python tests/tools/ptx/machine_code.py flashq`, or `lean`.

An instruction of NVIDIA GPUs of compute capability 7.0 or more holds the cycles that its warp waits after it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import triton

MIN_LOOP = 100  # instructions; shorter loops are left out


@dataclass(frozen=True)
class Instruction:
    """One instruction, and bits 105 to 108 of its 128: its cycles."""

    text: str
    cycles: int  # before the next instruction

    @property
    def name(self) -> str:
        """The operation without predicate and suffixes."""
        return self.text.split()[1 if self.text.startswith("@") else 0].split(".")[0]


@dataclass
class Loop:
    """The instructions from a label to the branch back to it."""

    begin: int
    body: list[Instruction]
    cycles: int = field(init=False)

    def __post_init__(self) -> None:
        self.cycles = sum(instruction.cycles for instruction in self.body)

    def count(self, name: str) -> int:
        """The number of instructions of this name."""
        return sum(instruction.name == name for instruction in self.body)


def instructions(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and the positions of its labels."""
    lines = _disassemble(cubin)
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/", line):
            control = int(re.search(r"0x([0-9a-f]{16})", following)[1], 16) >> 41
            code.append(Instruction(match[1], control & 15))
    return code, labels


def loops(cubin: bytes) -> list[Loop]:
    """The loops of a kernel, inner and outer."""
    code, labels = instructions(cubin)
    found = []
    for end, instruction in enumerate(code, start=1):
        branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", instruction.text)
        if branch and end - labels[branch[1]] >= MIN_LOOP:
            found.append(Loop(labels[branch[1]], code[labels[branch[1]] : end]))
    return found


def _disassemble(cubin: bytes) -> list[str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-hex", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(name: str) -> None:
    """Print the loops of the plain kernel for 32/8 heads of 128 on compute capability 9.0."""
    import attention_variants

    kernel = {"lean": attention_variants.lean, "flashq": attention_variants.flashq}[name](90, 4, 128, 1, False)
    for loop in loops(kernel.asm["cubin"]):
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(i.name for i in loop.body).most_common(8))
        print(f"at {loop.begin}: {len(loop.body)} instructions, {loop.cycles} cycles; {kinds}")


if __name__ == "__main__":
    main(sys.argv[1])
