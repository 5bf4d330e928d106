"""Executes PTX on the CPU, instruction by instruction, and counts races on shared and global memory.

All threads of a Triton program share their control flow: they have one program counter, and a register is a NumPy
array over the threads. Programs run one after another, so kernels whose programs wait for each other cannot run.
Arithmetic is IEEE; instructions that the hardware approximates (`ex2.approx`) are correct to the last bits.

Rules of memory:
- A race is an access to bytes that another warp has accessed since the last barrier, where one of the two writes. Two
  writes of the same value are no race.
- A program must not read global memory that another program of the same launch writes.
- The target of an asynchronous copy is NaN until the kernel has waited for the copy: for its group, or for an mbarrier
  that counts its bytes. Copies see an mbarrier, and stored data, only after a fence.
- A copy over bytes whose load has not been used yet is a race.
- A matrix product reads shared memory, for every warp, from its issue until the wait for it. Its results are NaN until
  then. It sees stored data only after a fence.
- An access outside of memory, a misaligned one or an instruction that is not implemented raises an error that names
  the instruction.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from ptx_operations import (
    BITS,
    KINDS,
    KNOWN,
    NO_EFFECT,
    OPERATIONS,
    UNKNOWN,
    WARP,
    WIDTH,
    Arrival,
    Instruction,
    Product,
    TensorMap,
    Values,
    parts_of,
)

__all__ = ["Kernel", "Memory", "TensorMap"]

Read = Callable[[], Values]

SHARED = "global_smem"  # Triton's name


class Memory:
    """Bytes, and which warp has written or read each of them at which count of barriers."""

    def __init__(self, size: int, num_warps: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)  # NaN until it is written
        self.exists = np.zeros(size, bool)
        self.written_at = np.full(size, -1)
        self.writer = np.zeros(size, np.int16)
        self.read_at = np.full((num_warps, size), -1)
        self.program = np.full(size, -1)  # the program that wrote a byte in this launch
        self.late = np.zeros(size, bool)  # bytes that the previous kernel writes
        self.is_early = False  # before the wait for the previous kernel
        self.races = 0
        # Reads of bytes that another program wrote in this launch, or that the previous kernel may still write.
        self.unordered = 0
        self.top = 0

    def place(self, data: Values) -> int:
        """Copy an array to a new address, at least 256 bytes behind the end of the last array."""
        at = (self.top + 256 + 255) // 256 * 256
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.top = at + raw.size
        assert self.top + 256 <= self.bytes.size, "the memory is full"
        self.bytes[at : self.top], self.exists[at : self.top] = raw, True
        return at

    def at(self, address: Values, size: int) -> Values:
        """[n, size] indices of bytes; all must exist."""
        assert not (address % size).any(), f"misaligned: {address[address % size != 0][0]:#x}, {size} bytes"
        at = address[:, None] + np.arange(size)
        known = (at >= 0) & (at < self.bytes.size)
        known = known & self.exists[np.where(known, at, 0)]
        assert known.all(), f"no such memory: {int(at[~known][0]):#x}"
        return at

    def load(self, address: Values, size: int, warp: Values, clock: int, program: int) -> Values:
        """Read [n, size] bytes at n addresses; `warp`: the warp of each address."""
        at = self.at(address, size)
        written = self.written_at[at]
        self.races += int(((written > clock) | (written == clock) & (self.writer[at] != warp[:, None])).any(1).sum())
        self.read_at[warp[:, None], at] = clock
        unordered = (self.program[at] >= 0) & (self.program[at] != program)
        self.unordered += int((unordered | self.is_early & self.late[at]).any(1).sum())
        return self.bytes[at]

    def store(self, address: Values, data: Values, warp: Values, clock: int, program: int, end: int = 0) -> None:
        """Write [n, size] bytes; `end`: the clock from which they may be read, if later than now."""
        at, warps = self.at(address, data.shape[1]), np.arange(len(self.read_at))[:, None, None]
        raced = ((self.read_at[:, at] == clock) & (warps != warp[:, None])).any(0)
        written = self.written_at[at]
        raced |= (written > clock) | (written == clock) & (self.writer[at] != warp[:, None]) & (self.bytes[at] != data)
        self.bytes[at] = data
        # Another thread wrote other data in the same instruction.
        self.races += int((raced | (self.bytes[at] != data)).any(1).sum())
        self.written_at[at], self.writer[at], self.program[at] = end or clock, warp[:, None], program

    def settle(self, address: Values, data: Values, warp: Values, clock: int) -> None:
        """Write the bytes of a copy that has arrived."""
        at = self.at(address, data.shape[1])
        self.bytes[at], self.written_at[at], self.writer[at] = data, clock, warp[:, None]


def _statements(body: str) -> Iterator[str]:
    """Labels, braces and statements, to the end of the first block."""
    depth = 0
    for match in re.finditer(r"\s*(?:([{}])|([\w$]+:)(?!:)|([^;]*);)", body):
        statement = match[1] or match[2] or match[3].strip()
        yield statement
        depth += {"{": 1, "}": -1}.get(statement, 0)
        if depth == 0:
            return


def _labels_inside(statements: list[str]) -> Iterator[str]:
    """Labels of the block in which these statements begin."""
    depth = 1
    for statement in statements:
        depth += {"{": 1, "}": -1}.get(statement, 0)
        if depth == 0:
            return
        if depth == 1 and statement.endswith(":"):
            yield statement[:-1]


def _parse(body: str) -> tuple[list[Instruction], dict[str, int], dict[str, str], dict[str, int]]:
    """Instructions, labels, the types of registers, and the sizes of shared variables."""
    code: list[Instruction] = []
    variables: dict[str, int] = {}
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    scopes: list[dict[str, str]] = []  # unique names for the declarations of nested blocks

    def unique(text: str) -> str:
        for scope in reversed(scopes):
            text = re.sub(r"(?<![\w.%$])[A-Za-z_]\w*", lambda name: scope.get(name[0], name[0]), text)  # noqa: B023
        return text

    statements = list(_statements(body))
    for index, statement in enumerate(statements):
        if statement == "{":
            inside = _labels_inside(statements[index + 1 :]) if scopes else ()
            scopes.append({label: f"{label}_at_{index}" for label in inside})
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            labels[unique(statement[:-1])] = len(code)
        elif statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for name in names.split(","):
                plain = re.sub(r"<\d+>", "", name.strip())
                if len(scopes) > 1:
                    scopes[-1][plain] = f"{plain}_of_{len(registers)}"
                registers[unique(plain)] = kind[1:]
        elif variable := re.fullmatch(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]", statement):
            assert variable[1] not in variables, f"declared twice: {variable[1]}"
            variables[variable[1]] = int(variable[2])
        elif statement and not statement.startswith("."):
            match = re.match(r"(?:@(!?[\w%$]+)\s+)?([\w.:]+)\s*(.*)", statement, re.S)
            assert match, statement
            words = match[2].split(".")
            length = next((n for n in (4, 3, 2) if ".".join(words[:n]) in OPERATIONS.keys() | NO_EFFECT), 1)
            # Split at commas outside brackets.
            operands = tuple(unique(x).strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}[\]])+", match[3]))
            head = (" ".join(statement.split()), unique(match[1] or ""), ".".join(words[:length]))
            code.append(Instruction(*head, tuple(words[length:]), operands))
    return code, labels, registers, variables


class Kernel:
    """A kernel of one entry: `run` executes it on a grid."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(loc|file)\b[^\n]*", "", ptx, flags=re.S | re.M)
        entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)(.*?)(?=\{)", ptx, re.S)
        assert entry, "no .entry"
        # Types and names; a tensor descriptor has the type bytes.
        parameter = r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?([\w$]+)(?:\[\d+\])?\s*(?:,|$)"
        self.parameters = re.findall(parameter, entry[1].strip())
        self.num_threads = int(re.search(r"\.reqntid\s+(\d+)", entry[2])[1])
        self.num_warps = self.num_threads // WARP
        self.code, self.labels, self.kinds, self.variables = _parse(ptx[entry.end() :])

    def run(
        self,
        programs: Iterable[int],
        grid: int,
        arguments: Sequence[float | TensorMap],
        shared_bytes: int,
        memory: Memory,
    ) -> dict[str, int]:
        """Execute `programs`, in this order, of a grid of one dimension.

        Args:
            arguments: the kernel's arguments in order; pointers are addresses in `memory`. Missing last ones are 0.
            shared_bytes: the size of dynamic shared memory.
        Returns:
            The number of executed instructions and of conflicts: races on shared and on global memory, and reads of
            bytes that another program has written or the previous kernel writes (see `Memory.unordered`).
        """
        values = {name: 0 for _, name in self.parameters}
        tensors: list[TensorMap] = []
        for value, (kind, name) in zip(arguments, self.parameters[: len(arguments)], strict=True):
            assert isinstance(value, TensorMap) == (kind == "b8"), f"no {kind}: {value}"
            if isinstance(value, TensorMap):
                values[name] = len(tensors)
                tensors.append(value)
            else:
                values[name] = int(np.float32(value).view(np.uint32)) if kind == "f32" else int(value)
        memory.program[:] = -1
        machine = Machine(self, grid, values, tensors, shared_bytes, memory)
        executed = sum([machine.execute(program) for program in programs])
        races = {"shared": machine.shared.races, "global": memory.races}
        return {"instructions": executed, **races, "unordered": memory.unordered}


class Machine:
    """The registers and shared memory of one program after another; instructions become closures over them."""

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        parameters: dict[str, int],
        tensors: list[TensorMap],
        shared_bytes: int,
        memory: Memory,
    ) -> None:
        self.kernel, self.grid, self.memory, self.parameters = kernel, grid, memory, parameters
        self.tensors = tensors  # a parameter holds an index into this list
        self.threads = np.arange(kernel.num_threads)
        self.warps, self.lanes = self.threads // WARP, self.threads % WARP
        self.on = self.everyone = np.ones(kernel.num_threads, bool)  # threads that execute this instruction
        # Diverged threads run those furthest behind first, until they meet.
        self.active = self.everyone  # threads at this place
        self.places_apart: Values | None = None  # the place of each thread while they are diverged
        self.leaving: int | None = None  # the branch target of some active threads
        self.places: dict[str, int] = {}
        self.registers: list[Values] = []
        self.variables = {SHARED: 0}  # their addresses
        for name, size in kernel.variables.items():
            self.variables[name] = shared_bytes = (shared_bytes + 127) // 128 * 128
            shared_bytes += size
        self.shared = Memory(max(shared_bytes, 1), kernel.num_warps)
        self.shared.exists[:shared_bytes] = True
        # Stored in shared memory, and not yet visible to copies and products.
        self.stored = np.zeros(self.shared.bytes.size, bool)
        self.arrivals: dict[int, Arrival] = {}  # of bulk copies, by the address of their mbarrier
        self.products: dict[str, Product] = {}  # not waited for yet, by their registers
        self.program, self.clock = 0, 0  # barriers
        self.cycles = itertools.count(step=100)  # advances with every read
        self.groups: list[list[tuple[Values, Values, Values]]] = []  # of copies; the last group is not committed
        self.loading: list[tuple[frozenset[int], Values]] = []  # registers, and the bytes [threads, n] of shared memory
        self.special = self._special()
        self.steps = [self._bind(instruction) for instruction in kernel.code]
        self.unset = list(self.registers)

    def execute(self, program: int) -> int:
        """Run one program to its end. Returns the number of instructions."""
        self.program, self.clock, self.groups, self.memory.is_early = program, self.clock + 1, [[]], True
        self.registers[:] = self.unset
        self.shared.bytes[:], self.shared.written_at[:], self.shared.program[:] = 0xFF, -1, -1
        self.arrivals.clear()
        self.products.clear()
        self.stored[:] = False
        self.loading.clear()
        at, count = 0, 0
        with np.errstate(all="ignore"):
            while at < len(self.steps):
                try:
                    target = self.steps[at]()
                except Exception as error:
                    error.add_note(f"program {program}, instruction {at}: {self.kernel.code[at].text}")
                    raise
                count += 1
                target = at + 1 if target is None else target
                together = self.leaving is None and self.places_apart is None
                at = target if together else self._next(at, target)
        # Copies without a wait would write into the memory of a later program.
        self.shared.races += sum(len(arrival.copies) for arrival in self.arrivals.values())
        return count

    def _next(self, at: int, target: int) -> int:
        """Return the next instruction: that of the diverged threads which are furthest behind."""
        if self.places_apart is None:
            self.places_apart = np.full(self.threads.size, at)
        self.places_apart[self.active] = target
        if self.leaving is not None:
            self.places_apart[self.on] = self.leaving
            self.leaving = None
        at = int(self.places_apart.min())
        self.active = self.places_apart == at
        if self.active.all():
            self.active, self.places_apart = self.everyone, None
        return at

    def _bind(self, i: Instruction) -> Callable[[], int | None]:
        if i.op in NO_EFFECT:
            return lambda: None
        try:
            if i.op not in OPERATIONS or any((i.op, modifier) not in KNOWN for modifier in UNKNOWN & set(i.modifiers)):
                raise NotImplementedError("not implemented")
            function, sources, result = OPERATIONS[i.op]
            operands = i.operands if result is None else i.operands[1:]
            with self._touching() as used:
                reads = [self.reader(x, i.resolve(kind)) for x, kind in zip(operands, sources, strict=False)]
                guard = self.reader(i.guard, "pred") if i.guard else None
            with self._touching() as set_here:
                write = None if result is None else self.writer(i.operands[0], i.resolve(result))
        except Exception as error:
            error.add_note(f"in {i.text}")
            raise
        flush = "ftz" in i.modifiers
        loads = "shared" in i.modifiers and i.op.split(".")[0] in ("ld", "ldmatrix")

        def step() -> int | None:
            if self.loading and i.op == "mov":  # the assembler may remove it
                self.loading = [(load | set_here if load & used else load, at) for load, at in self.loading]
            elif self.loading:
                self.loading = [load for load in self.loading if not load[0] & used]
            self.on = self.active
            if guard:
                self.on = guard() if self.active is self.everyone else guard() & self.active
            values = [read() for read in reads]
            found = function(self, i, *map(_flushed, values) if flush else values)
            if loads:
                self.loading.append((frozenset(set_here), values[0]))
            if write is None:
                return found
            write(_flushed(found) if flush else found)
            return None

        return step

    @contextmanager
    def _touching(self) -> Iterator[set[int]]:
        """Collect the registers that operands name."""
        self.touched: set[int] = set()
        yield self.touched

    def still_loading(self, begin: Values, size: int) -> bool:
        """Whether a load from one of these ranges of shared memory may not have finished."""
        sources = [at for _, at in self.loading] + [product.places for product in self.products.values()]
        return any(((at >= begin[:, None]) & (at < begin[:, None] + size)).any() for at in sources)

    def store_shared(self, address: Values, data: Values, warps: Values) -> None:
        """Write shared memory: visible to copies and products after a fence, a race with products in flight."""
        self.shared.store(address, data, warps, self.clock, self.program)
        at = address[:, None] + np.arange(data.shape[1])
        self.stored[at] = True
        self.shared.races += sum(int(np.isin(product.places, at & -16).any()) for product in self.products.values())

    def read_by_all(self, address: Values) -> Values:
        """Read [n, 16] bytes of shared memory for a product: every warp reads only what a fence made visible."""
        at = self.shared.at(address, 16)
        self.shared.races += int((self.shared.written_at[at] >= self.clock).any(1).sum() + self.stored[at].any())
        self.shared.read_at[:, at] = self.clock
        return self.shared.bytes[at]

    def place(self, name: str) -> tuple[int, np.dtype]:
        """The index and the type of a register."""
        self.touched.add(self._place(name))
        place = self.places[name]
        return place, self.registers[place].dtype

    def _place(self, name: str) -> int:
        if name not in self.places:
            kind = self.kernel.kinds.get(name) or self.kernel.kinds.get(name.rstrip("0123456789"))
            assert kind, f"no operand: {name}"
            self.places[name] = len(self.registers)
            # A register that was never written holds NaN and no address.
            unset = np.array(False) if kind == "pred" else np.array(-1).astype(BITS[WIDTH[kind]])
            self.registers.append(np.full(self.threads.size, unset))
        return self.places[name]

    def reader(self, operand: str, kind: str) -> Read:
        """A function that returns an operand's values: bf16 as fp32; with `*` a vector, as [threads, n]."""
        if kind == "address":
            return self._address(operand)
        if kind == "tensor":  # [descriptor, {begin of the box}]
            inside = operand.strip("[] ")
            tensor, begin = inside.split(",", 1)
            parts = [self.reader(tensor, "s64"), *(self.reader(part, "s32") for part in parts_of(begin))]
            return lambda: np.stack([part().astype(np.int64) for part in parts], -1)
        if kind.startswith("*"):
            parts = [self.reader(part, kind[1:]) for part in parts_of(operand)]
            return lambda: np.stack([part() for part in parts], -1)
        dtype, registers = KINDS[kind], self.registers
        if operand[0] == "{":
            packed = self.reader(operand, f"*b{8 * WIDTH[kind] // len(parts_of(operand))}")
            return lambda: packed().view(dtype)[:, 0]
        # A parameter's address stands for its value: `ld.param` may load one of two selected parameters.
        operand = operand.strip("[] ")
        operand = str(self.parameters.get(operand, operand))
        special = self.special.get(operand)
        if special is not None:
            return lambda: special().astype(dtype)
        if operand in self.variables or re.match(r"-?\d", operand):
            constant = self._constant(operand, kind)
            return lambda: constant
        place, held = self.place(operand.lstrip("!"))
        if kind == "pred":
            assert held.kind == "b", f"{operand} is no predicate"
            return (lambda: ~registers[place]) if operand[0] == "!" else (lambda: registers[place])
        assert held.itemsize >= WIDTH[kind], f"{operand} is too narrow for {kind}"
        if held.itemsize > WIDTH[kind]:
            return lambda: registers[place].astype(BITS[WIDTH[kind]]).view(dtype)
        if kind.startswith("bf16"):
            return lambda: (registers[place].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return lambda: registers[place].view(dtype)

    def _special(self) -> dict[str, Read]:
        """The values of special registers."""
        size, zeros = self.threads.size, np.zeros_like(self.threads)
        known: dict[str, Read] = {"%tid.x": lambda: self.threads, "%laneid": lambda: self.lanes}
        known |= {"%warpid": lambda: self.warps, "%ctaid.x": lambda: zeros + self.program}
        known |= {"%nctaid.x": lambda: zeros + self.grid, "%ntid.x": lambda: zeros + size}
        known |= dict.fromkeys(["%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"], lambda: zeros)
        known |= dict.fromkeys(["%nctaid.y", "%nctaid.z"], lambda: zeros + 1)
        known["%globaltimer"] = lambda: zeros + self.clock
        known |= dict.fromkeys(["%clock", "%clock64"], lambda: zeros + next(self.cycles))
        return known

    def _constant(self, operand: str, kind: str) -> Values:
        digits = "0x" + operand[2:] if re.match("0[fFdD]", operand) else str(self.variables.get(operand, operand))
        value = int(digits.rstrip("U"), 0)
        if kind == "pred":
            return self.everyone if value else ~self.everyone
        bits = BITS[WIDTH[kind]](value & ((1 << 8 * WIDTH[kind]) - 1))
        return np.full(self.threads.size, bits).view(KINDS[kind])

    def _address(self, operand: str) -> Read:
        """The addresses `[register + offset]`; shared memory begins at 0."""
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        assert match, f"no address: {operand}"
        offset = int(match[2] or "0", 0)
        if match[1] in self.variables:
            return lambda: np.full(self.threads.size, self.variables[match[1]] + offset)
        base = self.reader(match[1], f"u{8 * self.place(match[1])[1].itemsize}")
        return lambda: base().astype(np.int64) + offset

    def late_writer(self, operand: str, kind: str) -> Callable[[Values], None]:
        """As `writer`, while an instruction is executed."""
        with self._touching():
            return self.writer(operand, kind)

    def writer(self, operand: str, kind: str) -> Callable[[Values], None]:
        """A function that sets a register, or those of a vector, for the threads that execute the instruction."""
        parts = parts_of(operand)
        if operand == "_":  # a result that is dropped
            return lambda values: None
        if "|" in kind:
            both = [self.writer(part, of) for part, of in zip(operand.split("|"), kind.split("|"), strict=True)]
            return lambda values: [write(value) for write, value in zip(both, values, strict=True)] and None
        if kind.startswith("*"):
            writes = [self.writer(part, kind[1:]) for part in parts]
            return lambda values: [write(values[..., n]) for n, write in enumerate(writes)] and None
        if operand[0] == "{":
            narrow = f"b{8 * WIDTH[kind] // len(parts)}"
            unpacked = self.writer(operand, "*" + narrow)
            return lambda values: unpacked(values.view(KINDS[narrow]).reshape(-1, len(parts)))
        registers, (place, held) = self.registers, self.place(operand)
        assert held.itemsize >= WIDTH[kind], f"{operand} is too narrow for {kind}"

        is_bf16, converts = kind.startswith("bf16"), held.kind == "b" or held.itemsize > WIDTH[kind]

        def write(values: Values) -> None:
            if is_bf16 and values.dtype.kind == "f":
                values = _to_bf16(values)
            if converts:
                values = values.astype(held)
            values = np.ascontiguousarray(values)
            if values.dtype != held:
                values = values.view(held)
            assert values.shape == self.threads.shape
            registers[place] = values if self.on is self.everyone else np.where(self.on, values, registers[place])

        return write


def _to_bf16(values: Values) -> Values:
    """Round to nearest, ties to even."""
    raw = values.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(values), 0x7FFF, (raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)


def _flushed(values: Values) -> Values:
    if values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)
