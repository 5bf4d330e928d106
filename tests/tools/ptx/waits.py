"""What compiled kernels do before they wait for the kernel ahead: `python tests/tools/ptx/waits.py` prints it as JSON.

A programmatic dependent launch runs beside the kernel ahead of it until `griddepcontrol.wait`. Until then it may write
nothing, and read only what no kernel of the step writes; a way around the wait would break the chain for all kernels
behind it. Started by test_waits.py in a process of its own, because the tests import the kernels for the interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import compile_kernels
from ptx_emulator import Kernel
from ptx_operations import Instruction

WAIT = "griddepcontrol"
COPIES = ("cp.async", "cp.async.bulk", "cp.async.bulk.tensor", "cp.async.bulk.prefetch")


def before_the_wait(kernel: Any) -> dict[str, Any]:
    """What a compiled kernel does on ways from its entry that meet no wait.

    Returns:
        waits: whether a way leads to one.  reads, prefetches: arguments.  writes: instructions, to global memory.
        ends: how many.
    """
    ptx = Kernel(kernel.asm["ptx"])
    signature = kernel.src.signature
    # A descriptor of a tensor is followed by sizes and strides.
    names = [
        name
        for name, kind in signature.items()
        if kind != "constexpr"
        for _ in range(1 + 2 * _dimensions(kind) if kind.startswith("tensordesc") else 1)
    ]
    in_memory = {name for name, kind in signature.items() if kind.startswith(("*", "tensordesc"))}
    arguments = {parameter: name for (_, parameter), name in zip(ptx.parameters, names, strict=False)}
    reached: set[int] = set()
    ways = [0]
    while ways:
        at = ways.pop()
        if at in reached or at >= len(ptx.code):
            continue
        reached.add(at)
        i = ptx.code[at]
        if i.op == WAIT and i.modifiers[0] == "wait":
            continue
        if i.op == "bra":
            ways.append(ptx.labels[i.operands[0]])
        if i.guard or i.op not in ("bra", "ret", "exit"):
            ways.append(at + 1)
    code = [ptx.code[at] for at in sorted(reached)]
    origins = _Origins(code, arguments)
    # What is prefetched goes as far as the L2, where the kernel ahead writes, too: no early read.
    found: dict[str, Any] = {"waits": False, "reads": set(), "prefetches": set(), "writes": [], "ends": 0}
    for i in code:
        if i.op == WAIT:
            found["waits"] |= i.modifiers[0] == "wait"
        elif i.op in ("ret", "exit"):
            found["ends"] += 1
        elif i.op in ("st", "red", "atom") and "shared" not in i.modifiers:
            found["writes"].append(i.text)
        elif i.op in ("ld", "prefetch") or i.op in COPIES:
            if "shared" in i.modifiers and i.op == "ld":
                continue
            # Of a copy the source comes second.
            address = [operand for operand in i.operands if operand.startswith("[")][:2][-1]
            kind = "prefetches" if "prefetch" in i.op else "reads"
            found[kind] |= origins.of(address) & in_memory
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


def _dimensions(kind: str) -> int:
    """Of a tensor, by the type of its descriptor."""
    return len(re.search(r"\[([\d, ]*)\]", kind)[1].split(","))


class _Origins:
    """Arguments that a register is computed from, whatever the way there; loads count as what they load from."""

    def __init__(self, code: list[Instruction], arguments: dict[str, str]) -> None:
        self._arguments = arguments
        self._sources: dict[str, set[str]] = {}
        for i in code:
            if not i.operands or i.op in ("st", "red", "bra") or i.op in COPIES:
                continue
            results = re.findall(r"%?\w+", i.operands[0])
            sources = set(re.findall(r"%?\w+", " ".join(i.operands[1:])))
            for result in results:
                self._sources.setdefault(result, set()).update(sources)

    def of(self, operand: str) -> set[str]:
        found, seen, left = set(), set(), set(re.findall(r"%?\w+", operand))
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self._arguments:
                found.add(self._arguments[name])
            left |= self._sources.get(name, set())
        return found


def main() -> None:
    """All kernels of a step that may be launched dependent, for Hopper."""
    kernels = {
        "lean": compile_kernels.lean(90, 4, 128, 1, False),
        "lean, batch 8": compile_kernels.lean(90, 4, 128, 8, False),
        "lean, head 64": compile_kernels.lean(90, 4, 64, 1, False),
        "lean, head 64, batch 8": compile_kernels.lean(90, 4, 64, 8, False),
        "lean, gated": compile_kernels.lean(90, 4, 128, 1, False, True),
        "lean, gated, guess": compile_kernels.lean(90, 4, 128, 1, True, True),
        "lean, gated, guess, batch 8": compile_kernels.lean(90, 4, 128, 8, True, True),
        "lean, guess in parts": compile_kernels.lean(90, 4, 128, 1, True, True, spec_parts=5),
        "lean merge": compile_kernels.lean_merge(90, 4, 128, 1, False),
        "lean merge, batch 8, guess": compile_kernels.lean_merge(90, 4, 128, 8, True),
        "turbo merge": compile_kernels.turbo_merge(90, 4, 128, 1, False),
        "turbo merge, batch 8, guess": compile_kernels.turbo_merge(90, 4, 128, 8, True),
        "turbo": compile_kernels.turbo(90, 4, 128, 1, False),
        "turbo, batch 8, guess": compile_kernels.turbo(90, 4, 128, 8, True),
        "turbo, guess in parts": compile_kernels.turbo(90, 4, 128, 1, True, spec_parts=2),
        "turbo merge, guess in parts": compile_kernels.turbo_merge(90, 4, 128, 1, True, spec_parts=2),
        "turbo, head 64": compile_kernels.turbo(90, 7, 64, 1, False),
    }
    for gate in (False, True):
        kernels |= {
            f"{name}, gate {gate}": kernel for name, kernel in compile_kernels.decode_step(90, 2, 1, gate).items()
        }
    kernels |= compile_kernels.pair(90, 2, 1) | compile_kernels.quantised_cache(90) | compile_kernels.long_rows(90)
    found = {name: before_the_wait(kernel) for name, kernel in kernels.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
