"""What compiled kernels do before they wait for the previous kernel.

A programmatic dependent launch runs beside the previous kernel until `griddepcontrol.wait`. Before it, a kernel may
write nothing, and read only what no kernel of the step writes. A path around the wait would break the chain for all
kernels behind it. kernel_report.py prints the result for every variant; test_compile.py checks it.
"""

from __future__ import annotations

import re
from typing import Any

from ptx_emulator import Kernel
from ptx_operations import Instruction

WAIT = "griddepcontrol"
COPIES = ("cp.async", "cp.async.bulk", "cp.async.bulk.tensor", "cp.async.bulk.prefetch")


def before_the_wait(kernel: Any) -> dict[str, Any]:
    """What a compiled kernel does on paths from its entry that contain no wait.

    Returns:
        waits: whether a path leads to a wait.  reads, prefetches: arguments.  writes: instructions that write global
        memory.  ends: the number of instructions that end the program.
    """
    ptx = Kernel(kernel.asm["ptx"])
    signature = kernel.src.signature
    # Sizes and strides follow a tensor descriptor.
    names = [
        name
        for name, kind in signature.items()
        if kind != "constexpr"
        for _ in range(1 + 2 * _dimensions(kind) if kind.startswith("tensordesc") else 1)
    ]
    in_memory = {name for name, kind in signature.items() if kind.startswith(("*", "tensordesc"))}
    arguments = {parameter: name for (_, parameter), name in zip(ptx.parameters, names, strict=False)}
    reached: set[int] = set()
    paths = [0]
    while paths:
        at = paths.pop()
        if at in reached or at >= len(ptx.code):
            continue
        reached.add(at)
        i = ptx.code[at]
        if i.op == WAIT and i.modifiers[0] == "wait":
            continue
        if i.op == "bra":
            paths.append(ptx.labels[i.operands[0]])
        if i.guard or i.op not in ("bra", "ret", "exit"):
            paths.append(at + 1)
    code = [ptx.code[at] for at in sorted(reached)]
    origins = _Origins(code, arguments)
    # A prefetch fills only the L2, which the previous kernel also writes to: it is no early read.
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
            # The source of a copy is its second address.
            address = [operand for operand in i.operands if operand.startswith("[")][:2][-1]
            kind = "prefetches" if "prefetch" in i.op else "reads"
            found[kind] |= origins.of(address) & in_memory
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


def _dimensions(kind: str) -> int:
    """The number of dimensions of a tensor descriptor's type."""
    return len(re.search(r"\[([\d, ]*)\]", kind)[1].split(","))


class _Origins:
    """The arguments that a register is computed from, on any path; a load counts as its address."""

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
