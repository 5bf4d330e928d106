"""What loops of decode attention wait for, read off the machine code: `python tests/kernels/waiting.py turbo`, or lean.

An instruction of NVIDIA GPUs (compute capability 7.0 on) says how many cycles its warp waits after it, on which of six
scoreboards it will announce its result, and which of them it waits for. Scoreboards are what makes loads overlap: an
instruction that waits for one waits for all loads announced there, those issued a moment ago too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import compile_kernels
import triton

NO_SCOREBOARD = 7
MIN_LOOP = 100  # instructions: shorter loops are of no interest


@dataclass(frozen=True)
class Instruction:
    """One instruction with its control bits (bits 105 to 125 of its 128)."""

    text: str
    cycles: int  # until the next one may follow
    announces: int | None  # scoreboard of its result
    waits: tuple[int, ...]  # scoreboards it waits for

    @property
    def name(self) -> str:
        """Operation without its predicate and its suffixes."""
        return self.text.split()[1 if self.text.startswith("@") else 0].split(".")[0]


@dataclass
class Loop:
    """Instructions from a label to the branch back to it."""

    begin: int
    body: list[Instruction]
    cycles: int = field(init=False)

    def __post_init__(self) -> None:
        self.cycles = sum(instruction.cycles for instruction in self.body)

    def count(self, name: str) -> int:
        """Instructions of a name."""
        return sum(instruction.name == name for instruction in self.body)

    def loads(self) -> list[tuple[int, int, int]]:
        """Loads of 16 bytes: cycle, scoreboard, and the cycle of the next wait for it, beyond `cycles` if around."""
        found, cycle, starts = [], 0, []
        for instruction in self.body:
            starts.append(cycle)
            cycle += instruction.cycles
        for place, instruction in enumerate(self.body):
            if "LDG" in instruction.text and ".128" in instruction.text and instruction.announces is not None:
                board = instruction.announces
                after = [*range(place + 1, len(self.body)), *range(place + 1)]
                first = next((at for at in after if board in self.body[at].waits), place)
                found.append((starts[place], board, starts[first] + (self.cycles if first <= place else 0)))
        return found


def loops(cubin: bytes) -> list[Loop]:
    """Loops of a kernel, innermost and outer ones."""
    lines = _disassemble(cubin)
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    found = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        if not (match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/", line)):
            continue
        control = int(re.search(r"0x([0-9a-f]{16})", following)[1], 16) >> 41
        board = control >> 5 & 7
        waits = tuple(bit for bit in range(6) if control >> 11 >> bit & 1)
        code.append(Instruction(match[1], control & 15, None if board == NO_SCOREBOARD else board, waits))
        branch = re.search(r"BRA.*?`\((\.L_x_\d+)\)", match[1])
        if branch and len(code) - labels.get(branch[1], len(code)) >= MIN_LOOP:
            found.append(Loop(labels[branch[1]], code[labels[branch[1]] :]))
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
    kernel = {"lean": compile_kernels.lean, "turbo": compile_kernels.turbo}[name](90, 4, 128, 1, False)
    for loop in loops(kernel.asm["cubin"]):
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(i.name for i in loop.body).most_common(8))
        print(f"at {loop.begin}: {len(loop.body)} instructions, {loop.cycles} cycles; {kinds}")
        for cycle, board, waited in loop.loads():
            print(f"    load at {cycle}, scoreboard {board}, waited for at {waited}")


if __name__ == "__main__":
    main(sys.argv[1])
