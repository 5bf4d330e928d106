"""Executes PTX on the CPU, instruction by instruction, and counts races on shared and global memory.

Triton's control flow is the same for all threads of a program: one program counter serves them, and a register is a
NumPy array over the threads. Programs run one after another, so this is for kernels whose programs never wait for each
other. Arithmetic is IEEE; what the hardware approximates (`ex2.approx`) is correct to the last bits here.

A race is an access to bytes that another warp has touched since the last barrier, one of the two writing; two writes of
the same value count as none. Asynchronous copies are in flight, and their target not a number, until they are waited
for, one by one or, those by bulk, all that a barrier in memory counts. What is in no memory, misaligned or not
implemented raises an error that names the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Kernel", "Memory"]

Values = NDArray[np.generic]
Read = Callable[[], Values]

WARP = 32
SHARED = "global_smem"  # Triton's name
NEVER = np.iinfo(np.int64).max
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS = {"pred": np.dtype(bool)}
KINDS |= {
    f"{sign}{8 * size}": np.dtype(f"{sign.replace('b', 'u').replace('s', 'i')}{size}")
    for sign in "bus"
    for size in BITS
}
# Two halves are twice as many elements; bf16, which NumPy lacks, is decoded.
KINDS |= {"f16": np.dtype("f2"), "f16x2": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u2")}
WIDTH = {kind: 4 if kind.endswith("x2") else dtype.itemsize for kind, dtype in KINDS.items()}
NO_EFFECT = {"griddepcontrol", "prefetch", "membar", "fence", "createpolicy", "nanosleep", "cp.async.bulk.prefetch"}
NO_EFFECT |= {"bar.warp"}  # a warp's threads are in step here
UNKNOWN = {"cc", "sat", "satfinite", "relu", "rz", "rm", "rp", "rna"}  # modifiers with which no operation is known
COMPARE = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class Memory:
    """Bytes that know who has touched them: writes by `warp`, reads by each warp, at which count of barriers."""

    def __init__(self, size: int, num_warps: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)  # not a number, until it is written
        self.exists = np.zeros(size, bool)
        self.written_at = np.full(size, -1)
        self.writer = np.zeros(size, np.int16)
        self.read_at = np.full((num_warps, size), -1)
        self.program = np.full(size, -1)  # that wrote it in this launch
        self.races = 0
        self.stale = 0  # reads through L1 of what another program wrote in this launch
        self.top = 0

    def place(self, data: Values) -> int:
        """Copy an array to a new address, 256 bytes or more behind the last one's end."""
        at = (self.top + 256 + 255) // 256 * 256
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.top = at + raw.size
        assert self.top + 256 <= self.bytes.size, "the memory is full"
        self.bytes[at : self.top], self.exists[at : self.top] = raw, True
        return at

    def at(self, address: Values, size: int) -> Values:
        """[n, size] places of bytes that exist."""
        assert not (address % size).any(), f"misaligned: {address[address % size != 0][0]:#x}, {size} bytes"
        at = address[:, None] + np.arange(size)
        known = (at >= 0) & (at < self.bytes.size)
        known = known & self.exists[np.where(known, at, 0)]
        assert known.all(), f"no such memory: {int(at[~known][0]):#x}"
        return at

    def load(self, address: Values, size: int, warp: Values, clock: int, program: int | None = None) -> Values:
        """[n, size] bytes from n addresses, each for a thread of this warp; `program`: which reads through its L1."""
        at = self.at(address, size)
        written = self.written_at[at]
        self.races += int(((written > clock) | (written == clock) & (self.writer[at] != warp[:, None])).any(1).sum())
        self.read_at[warp[:, None], at] = clock
        if program is not None:
            self.stale += int(((self.program[at] >= 0) & (self.program[at] != program)).any(1).sum())
        return self.bytes[at]

    def store(self, address: Values, data: Values, warp: Values, clock: int, program: int, end: int = 0) -> None:
        """Write n times [size] bytes; `end`: the clock from which they may be read, if that is not now."""
        at, warps = self.at(address, data.shape[1]), np.arange(len(self.read_at))[:, None, None]
        raced = ((self.read_at[:, at] == clock) & (warps != warp[:, None])).any(0)
        written = self.written_at[at]
        raced |= (written > clock) | (written == clock) & (self.writer[at] != warp[:, None]) & (self.bytes[at] != data)
        self.bytes[at] = data
        # Another thread wrote something else in the same instruction.
        self.races += int((raced | (self.bytes[at] != data)).any(1).sum())
        self.written_at[at], self.writer[at], self.program[at] = end or clock, warp[:, None], program

    def settle(self, address: Values, data: Values, warp: Values, clock: int) -> None:
        """The bytes of a copy in flight have arrived."""
        at = self.at(address, data.shape[1])
        self.bytes[at], self.written_at[at], self.writer[at] = data, clock, warp[:, None]


@dataclass(frozen=True)
class Instruction:
    """One instruction; names are unique, those of nested blocks too."""

    text: str
    guard: str  # predicate with its `!`, or nothing
    op: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The last type that it names."""
        return next((name for name in reversed(self.modifiers) if name in KINDS), "b32")

    def resolve(self, kind: str) -> str:
        """A type by what it is here: "", of the instruction; wide; to, the first it names; pair, the second, twice."""
        star, kind = kind[: kind.startswith("*")], kind.lstrip("*")
        named = [name for name in self.modifiers if name in KINDS]
        if kind == "wide":
            kind = f"{self.kind[0]}{16 * WIDTH[self.kind]}"
        elif kind in ("to", "pair"):
            kind = named[0] if kind == "to" else named[1] + "x2"
        return star + (kind or self.kind)


def _statements(body: str) -> Iterator[str]:
    """Labels, braces and what ends with a semicolon."""
    for match in re.finditer(r"\s*(?:([{}])|([\w$]+:)(?!:)|([^;]*);)", body):
        yield match[1] or match[2] or match[3].strip()


def _parse(body: str) -> tuple[list[Instruction], dict[str, int], dict[str, str], dict[str, int]]:
    """Instructions, labels, the types of registers, and the sizes of shared variables."""
    code: list[Instruction] = []
    variables: dict[str, int] = {}
    labels: dict[str, int] = {}
    registers: dict[str, str] = {}
    scopes: list[dict[str, str]] = []  # new names of what nested blocks declare

    def unique(text: str) -> str:
        for scope in reversed(scopes):
            text = re.sub(r"(?<![\w.%$])[A-Za-z_]\w*", lambda name: scope.get(name[0], name[0]), text)  # noqa: B023
        return text

    for statement in _statements(body):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            if len(scopes) == 1:
                break
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
            # By commas outside brackets; of two results, `_` is none.
            operands = tuple(
                unique(x).strip().removeprefix("_|")
                for x in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}[\]])+", match[3])
            )
            head = (" ".join(statement.split()), unique(match[1] or ""), ".".join(words[:length]))
            code.append(Instruction(*head, tuple(words[length:]), operands))
    return code, labels, registers, variables


class Kernel:
    """A kernel of one entry: `run` executes it on a grid."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.(loc|file)\b[^\n]*", "", ptx, flags=re.S | re.M)
        entry = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)(.*?)(?=\{)", ptx, re.S)
        assert entry, "no .entry"
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", entry[1].strip())
        self.num_threads = int(re.search(r"\.reqntid\s+(\d+)", entry[2])[1])
        self.num_warps = self.num_threads // WARP
        self.code, self.labels, self.kinds, self.variables = _parse(ptx[entry.end() :])

    def run(
        self, programs: Iterable[int], grid: int, arguments: Sequence[float], shared_bytes: int, memory: Memory
    ) -> dict[str, int]:
        """Execute `programs`, in this order, of a grid of one dimension.

        Args:
            arguments: of the kernel in order; pointers are addresses in `memory`. Those at the end may be missing: 0.
            shared_bytes: of dynamic shared memory.
        Returns:
            Instructions executed, and conflicts seen: races on shared and on global memory, stale reads through L1.
        """
        values = {name: 0 for _, name in self.parameters}
        for value, (kind, name) in zip(arguments, self.parameters[: len(arguments)], strict=True):
            values[name] = int(np.float32(value).view(np.uint32)) if kind == "f32" else int(value)
        memory.program[:] = -1
        machine = _Machine(self, grid, values, shared_bytes, memory)
        executed = sum([machine.execute(program) for program in programs])
        races = {"shared": machine.shared.races, "global": memory.races}
        return {"instructions": executed, **races, "stale": memory.stale}


class _Machine:
    """The registers and shared memory of one program after another; instructions become closures over them."""

    def __init__(
        self, kernel: Kernel, grid: int, parameters: dict[str, int], shared_bytes: int, memory: Memory
    ) -> None:
        self.kernel, self.grid, self.memory, self.parameters = kernel, grid, memory, parameters
        self.threads = np.arange(kernel.num_threads)
        self.warps, self.lanes = self.threads // WARP, self.threads % WARP
        self.on = self.everyone = np.ones(kernel.num_threads, bool)  # who takes part in this instruction
        self.places: dict[str, int] = {}
        self.registers: list[Values] = []
        self.variables = {SHARED: 0}  # where they begin
        for name, size in kernel.variables.items():
            self.variables[name] = shared_bytes = (shared_bytes + 127) // 128 * 128
            shared_bytes += size
        self.shared = Memory(max(shared_bytes, 1), kernel.num_warps)
        self.shared.exists[:shared_bytes] = True
        self.arrivals: dict[int, Arrival] = {}  # of bulk copies, by the address of their barrier
        self.program, self.clock = 0, 0  # barriers
        self.groups: list[list[tuple[Values, Values, Values]]] = []  # of copies in flight; the last is not committed
        self.steps = [self._bind(instruction) for instruction in kernel.code]
        self.unset = list(self.registers)

    def execute(self, program: int) -> int:
        """Run one program to its end; how many instructions that took."""
        self.program, self.clock, self.groups = program, self.clock + 1, [[]]
        self.registers[:] = self.unset
        self.shared.bytes[:], self.shared.written_at[:] = 0xFF, -1
        self.arrivals.clear()
        at, count = 0, 0
        with np.errstate(all="ignore"):
            while at < len(self.steps):
                try:
                    target = self.steps[at]()
                except Exception as error:
                    error.add_note(f"program {program}, instruction {at}: {self.kernel.code[at].text}")
                    raise
                count += 1
                at = at + 1 if target is None else target
        # Copies that nobody waited for write into whatever comes next.
        self.shared.races += sum(len(arrival.copies) for arrival in self.arrivals.values())
        return count

    def _bind(self, i: Instruction) -> Callable[[], int | None]:
        if i.op in NO_EFFECT:
            return lambda: None
        try:
            if i.op not in OPERATIONS or UNKNOWN & set(i.modifiers):
                raise NotImplementedError("not implemented")
            function, sources, result = OPERATIONS[i.op]
            operands = i.operands if result is None else i.operands[1:]
            reads = [self.reader(x, i.resolve(kind)) for x, kind in zip(operands, sources, strict=False)]
            write = None if result is None else self.writer(i.operands[0], i.resolve(result))
            guard = self.reader(i.guard or "1", "pred")
        except Exception as error:
            error.add_note(f"in {i.text}")
            raise
        flush = _flushed if "ftz" in i.modifiers else lambda values: values

        def step() -> int | None:
            self.on = guard()
            found = function(self, i, *[flush(read()) for read in reads])
            return found if write is None else write(flush(found))

        return step

    def place(self, name: str) -> tuple[int, np.dtype]:
        """Where a register is, and of which type of bits."""
        if name not in self.places:
            kind = self.kernel.kinds.get(name) or self.kernel.kinds.get(name.rstrip("0123456789"))
            assert kind, f"no operand: {name}"
            self.places[name] = len(self.registers)
            # What was never written is not a number, and no address.
            unset = np.array(False) if kind == "pred" else np.array(-1).astype(BITS[WIDTH[kind]])
            self.registers.append(np.full(self.threads.size, unset))
        place = self.places[name]
        return place, self.registers[place].dtype

    def reader(self, operand: str, kind: str) -> Read:
        """How to get an operand's values: floats as such, also of bf16; with `*` as [threads, n], n of a vector."""
        if kind == "address":
            return self._address(operand)
        if kind.startswith("*"):
            parts = [self.reader(part, kind[1:]) for part in _parts(operand)]
            return lambda: np.stack([part() for part in parts], -1)
        dtype, registers = KINDS[kind], self.registers
        if operand[0] == "{":
            packed = self.reader(operand, f"*b{8 * WIDTH[kind] // len(_parts(operand))}")
            return lambda: packed().view(dtype)[:, 0]
        operand = str(self.parameters.get(operand.strip("[] "), operand))
        special = self._special(operand)
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

    def _special(self, operand: str) -> Read | None:
        size, zeros = self.threads.size, np.zeros_like(self.threads)
        known: dict[str, Read] = {"%tid.x": lambda: self.threads, "%laneid": lambda: self.lanes}
        known |= {"%warpid": lambda: self.warps, "%ctaid.x": lambda: zeros + self.program}
        known |= {"%nctaid.x": lambda: zeros + self.grid, "%ntid.x": lambda: zeros + size}
        known |= dict.fromkeys(["%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"], lambda: zeros)
        known |= dict.fromkeys(["%clock", "%clock64", "%globaltimer"], lambda: zeros + self.clock)
        return known.get(operand)

    def _constant(self, operand: str, kind: str) -> Values:
        digits = "0x" + operand[2:] if re.match("0[fFdD]", operand) else str(self.variables.get(operand, operand))
        value = int(digits.rstrip("U"), 0)
        if kind == "pred":
            return self.everyone if value else ~self.everyone
        bits = BITS[WIDTH[kind]](value & ((1 << 8 * WIDTH[kind]) - 1))
        return np.full(self.threads.size, bits).view(KINDS[kind])

    def _address(self, operand: str) -> Read:
        """Of `[register + offset]`; those of shared memory begin at 0."""
        match = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        assert match, f"no address: {operand}"
        offset = int(match[2] or "0", 0)
        if match[1] in self.variables:
            return lambda: np.full(self.threads.size, self.variables[match[1]] + offset)
        base = self.reader(match[1], f"u{8 * self.place(match[1])[1].itemsize}")
        return lambda: base().astype(np.int64) + offset

    def writer(self, operand: str, kind: str) -> Callable[[Values], None]:
        """How to set a register, or those of a vector, for those who take part."""
        parts = _parts(operand)
        if kind.startswith("*"):
            writes = [self.writer(part, kind[1:]) for part in parts]
            return lambda values: [write(values[..., n]) for n, write in enumerate(writes)] and None
        if operand[0] == "{":
            narrow = f"b{8 * WIDTH[kind] // len(parts)}"
            unpacked = self.writer(operand, "*" + narrow)
            return lambda values: unpacked(values.view(KINDS[narrow]).reshape(-1, len(parts)))
        registers, (place, held) = self.registers, self.place(operand)
        assert held.itemsize >= WIDTH[kind], f"{operand} is too narrow for {kind}"

        def write(values: Values) -> None:
            if kind.startswith("bf16") and values.dtype.kind == "f":
                values = _to_bf16(values)
            if held.kind == "b" or held.itemsize > WIDTH[kind]:
                values = values.astype(held)
            values = np.ascontiguousarray(values).view(held)
            assert values.shape == self.threads.shape
            registers[place] = values if self.on is self.everyone else np.where(self.on, values, registers[place])

        return write


def _parts(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _to_bf16(values: Values) -> Values:
    """Rounded to the nearest, ties to even."""
    raw = values.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(values), 0x7FFF, (raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)


def _flushed(values: Values) -> Values:
    if values.dtype != np.float32:
        return values
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


# An operation: a function of the machine, the instruction and the values of its operands; what types these have, and
# what type the result has, or None. "": the last type that the instruction names; see `Instruction.resolve`.
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...], str | None]] = {}


def _operation(names: str, *sources: str, result: str | None = "") -> Callable[[Callable[..., Any]], None]:
    def register(function: Callable[..., Any]) -> None:
        OPERATIONS.update(dict.fromkeys(names.split(), (function, sources, result)))

    return register


def _plain(**functions: np.ufunc) -> None:
    for name, function in functions.items():
        _operation(name.strip("_"), *[""] * function.nin)(lambda m, i, *values, f=function: f(*values))


_plain(add=np.add, sub=np.subtract, mul=np.multiply, neg=np.negative, abs=np.abs, not_=np.invert, sqrt=np.sqrt)
_plain(and_=np.bitwise_and, or_=np.bitwise_or, xor=np.bitwise_xor, ex2=np.exp2, lg2=np.log2)
_operation("mul.lo", "", "")(lambda m, i, a, b: a * b)
_operation("mul.wide", "", "", result="wide")(lambda m, i, a, b: np.multiply(a, b, dtype=KINDS[i.resolve("wide")]))
_operation("mul.hi", "", "")(
    lambda m, i, a, b: (a.astype(KINDS[i.resolve("wide")]) * b >> 8 * a.itemsize).astype(a.dtype)
)
_operation("mad.lo", "", "", "")(lambda m, i, a, b, c: a * b + c)
_operation("mad.wide", "", "", "wide", result="wide")(lambda m, i, a, b, c: np.multiply(a, b, dtype=c.dtype) + c)
# Rounded once; the product is exact in fp64.
_operation("fma", "", "", "")(lambda m, i, a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype))
_operation("rcp", "")(lambda m, i, x: 1 / x)
_operation("selp", "", "", "pred")(lambda m, i, a, b, which: np.where(which, a, b))
_operation("mov cvta ld.param", "")(lambda m, i, x: x)
_operation("cp.async.commit_group", result=None)(lambda m, i: m.groups.append([]))
# Of a number and none the number, unless `.NaN`.
_operation("min", "", "")(lambda m, i, a, b: (np.minimum if "NaN" in i.modifiers else np.fmin)(a, b))
_operation("max", "", "")(lambda m, i, a, b: (np.maximum if "NaN" in i.modifiers else np.fmax)(a, b))


@_operation("div rem", "", "")
def _divide(m: _Machine, i: Instruction, a: Values, b: Values) -> Values:
    if a.dtype.kind == "f":
        return a / b
    size = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    quotient = np.where(b == 0, -1, np.where((a < 0) != (b < 0), -size, size)).astype(a.dtype)
    return quotient if i.op == "div" else a - quotient * b


@_operation("shl shr", "", "u32")
def _shift(m: _Machine, i: Instruction, x: Values, by: Values) -> Values:
    """By as many bits as a register has or more: all gone, but for the sign's copies."""
    bits = 8 * WIDTH[i.kind]
    count = np.minimum(by, bits - 1).astype(x.dtype)
    moved = x << count if i.op == "shl" else x >> count
    return moved if x.dtype.kind == "i" and i.op == "shr" else np.where(by < bits, moved, x.dtype.type(0))


@_operation("bfe", "", "u32", "u32")
def _extract(m: _Machine, i: Instruction, x: Values, first: Values, count: Values) -> Values:
    """Bits above the top one are copies of the sign, or zeros."""
    assert WIDTH[i.kind] == 4, "type"
    x, count = x.astype(f"{x.dtype.kind}8"), np.minimum(count & 255, 32)
    first, above = np.minimum(first & 255, 32).astype(x.dtype), (64 - np.maximum(count, 1)).astype(x.dtype)
    return np.where(count == 0, 0, x >> first << above >> above).astype(KINDS[i.kind])


@_operation("prmt", "", "", "")
def _permute_bytes(m: _Machine, i: Instruction, a: Values, b: Values, selector: Values) -> Values:
    choice = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    picked = np.take_along_axis(np.stack([a, b], 1).view(np.uint8), (choice & 7).astype(np.int64), 1)
    return np.where(choice & 8, np.where(picked & 128, 255, 0), picked).astype(np.uint8).view(np.uint32)[:, 0]


@_operation("setp", "", "", "pred", result="pred")
def _compare(m: _Machine, i: Instruction, a: Values, b: Values, third: Values | None = None) -> Values:
    found = COMPARE[i.modifiers[0]](a, b)
    return found if third is None else LOGIC[i.modifiers[1]](found, third)


@_operation("cvt", "", "", result="to")
def _convert(m: _Machine, i: Instruction, x: Values, low: Values | None = None) -> Values:
    """To the first type named, of the second; into pairs, the first operand is the upper half."""
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    to = i.resolve("to")
    dtype = np.dtype(np.float32) if to.startswith("bf16") else KINDS[to]
    x = x if low is None else np.stack([low, x], 1).reshape(-1)
    for name in rounding.keys() & set(i.modifiers):
        x = rounding[name](x)
        if dtype.kind != "f":
            x = np.clip(np.nan_to_num(x.astype(np.float64)), np.iinfo(dtype).min, np.iinfo(dtype).max)
    return x.astype(dtype)


def _space(m: _Machine, i: Instruction) -> Memory:
    assert {"global", "shared"} & set(i.modifiers), "another space"
    return m.shared if "shared" in i.modifiers else m.memory


@_operation("ld", "address", result="*")
def _load(m: _Machine, i: Instruction, address: Values) -> Values:
    on, space = m.on, _space(m, i)
    data = np.zeros((on.size, WIDTH[i.kind] * len(_parts(i.operands[0]))), np.uint8)
    if on.any():
        by_l1 = space is m.memory and not {"cg", "volatile", "relaxed", "acquire"} & set(i.modifiers)
        data[on] = space.load(address[on], data.shape[1], m.warps[on], m.clock, m.program if by_l1 else None)
    return data.view(KINDS[i.kind])


@_operation("st", "address", "*", result=None)
def _store(m: _Machine, i: Instruction, address: Values, values: Values) -> None:
    if m.on.any():
        _space(m, i).store(address[m.on], values.view(np.uint8)[m.on], m.warps[m.on], m.clock, m.program)


@_operation("atom", "address", "")
def _atomic(m: _Machine, i: Instruction, address: Values, values: Values) -> Values:
    functions = {"add": np.add, "exch": lambda a, b: b, "min": np.minimum, "max": np.maximum}
    function, old = next(functions[name] for name in i.modifiers if name in functions), np.zeros_like(values)
    space, places = _space(m, i), np.flatnonzero(m.on)
    for thread, at in zip(places, space.at(address[m.on], values.itemsize), strict=True):
        old[thread] = space.bytes[at].view(values.dtype)[0]
        space.bytes[at] = function(old[[thread]], values[[thread]]).view(np.uint8)
    return old


@_operation("cp.async", "address", "address", "u32", "u32", result=None)
def _copy(m: _Machine, i: Instruction, to: Values, source: Values, size: Values, real: Values | None = None) -> None:
    """Without a source where its size is 0: zeros."""
    assert "L2::cache_hint" not in i.modifiers, "cache hint"
    on, size = m.on, int(size[0])
    used = on if real is None else on & (real > 0)
    assert real is None or np.isin(real[on], (0, size)).all(), "a part of a copy"
    data = np.zeros((on.size, size), np.uint8)
    data[used] = m.memory.load(source[used], size, m.warps[used], m.clock)
    m.shared.store(to[on], np.full_like(data[on], 0xFF), m.warps[on], m.clock, m.program, NEVER)
    m.groups[-1].append((to[on], data[on], m.warps[on]))


@_operation("cp.async.wait_group", result=None)
def _wait(m: _Machine, i: Instruction) -> None:
    while len(m.groups) - 1 > int(i.operands[0]):
        for address, data, warps in m.groups.pop(0):
            m.shared.settle(address, data, warps, m.clock)


@dataclass
class Arrival:
    """A barrier that counts the bytes of copies: what the phase in progress waits for, and what is on its way."""

    phase: int = 0
    expected: int = -1  # until somebody has arrived
    copies: list[tuple[Values, Values, Values]] = field(default_factory=list)


@_operation("mbarrier.init", "address", "u32", result=None)
def _init_arrival(m: _Machine, i: Instruction, address: Values, count: Values) -> None:
    assert (count[m.on] == 1).all(), "arrivals of several"
    for at in address[m.on]:
        m.arrivals[int(at)] = Arrival()


@_operation("mbarrier.arrive.expect_tx", "address", "u32", result="b64")
def _expect(m: _Machine, i: Instruction, address: Values, size: Values) -> Values:
    for at, expected in zip(address[m.on], size[m.on], strict=True):
        assert m.arrivals[int(at)].expected < 0, "expected twice"
        m.arrivals[int(at)].expected = int(expected)
    return np.zeros(m.on.size, np.uint64)


@_operation("cp.async.bulk", "address", "address", "u32", "address", result=None)
def _bulk_copy(m: _Machine, i: Instruction, to: Values, source: Values, size: Values, barrier: Values) -> None:
    for thread in np.flatnonzero(m.on):
        chunks = np.arange(0, size[thread], 16)
        warps = np.full(chunks.size, m.warps[thread])
        data = m.memory.load(source[thread] + chunks, 16, warps, m.clock)
        m.shared.store(to[thread] + chunks, np.full_like(data, 0xFF), warps, m.clock, m.program, NEVER)
        m.arrivals[int(barrier[thread])].copies.append((to[thread] + chunks, data, warps))


@_operation("mbarrier.try_wait.parity", "address", "u32", result="pred")
def _arrived(m: _Machine, i: Instruction, address: Values, parity: Values) -> Values:
    """Everything that can arrive has: who still has to wait would do so forever."""
    for at in {int(x) for x in address[m.on]}:
        arrival = m.arrivals[at]
        if arrival.expected == sum(data.size for _, data, _ in arrival.copies):
            for places, data, warps in arrival.copies:
                m.shared.settle(places, data, warps, m.clock)
            m.arrivals[at] = Arrival(arrival.phase ^ 1)
    done = np.array([m.arrivals[int(at)].phase != which & 1 for at, which in zip(address, parity, strict=True)])
    assert done[m.on].all(), "waits for what never comes"
    return done


@_operation("bar.sync barrier.sync", result=None)
def _barrier(m: _Machine, i: Instruction) -> None:
    assert i.operands in (("0",), ("0", str(m.threads.size))), "barrier of some threads"
    m.clock += 1


@_operation("bra ret exit", result=None)
def _branch(m: _Machine, i: Instruction) -> int | None:
    assert m.on.all() == m.on.any(), "threads part here"
    target = m.kernel.labels[i.operands[0]] if i.operands else len(m.kernel.code)
    return target if m.on[0] else None


@_operation("shfl", "", "u32", "u32")
def _shuffle(m: _Machine, i: Instruction, x: Values, by: Values, clamp: Values) -> Values:
    lane, by, last, segment = m.lanes, by.astype(np.int64) & 31, clamp & 31, clamp.astype(np.int64) >> 8 & 31
    last = (lane & segment) | (last & ~segment)
    source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}
    chosen = source[i.modifiers[1]]
    inside = chosen >= last if "up" in i.modifiers else chosen <= last
    return x[m.warps * WARP + np.where(inside, chosen, lane)]


@_operation("elect.sync", "s32", result="pred")
def _elect(m: _Machine, i: Instruction, members: Values) -> Values:
    assert (members == -1).all(), "some lanes only"
    return m.lanes == 0


@_operation("redux", "", "s32")
def _reduce(m: _Machine, i: Instruction, x: Values, members: Values) -> Values:
    assert (members == -1).all(), "some lanes only"
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[i.modifiers[1]]
    return np.repeat(function.reduce(x.reshape(-1, WARP), axis=1, dtype=x.dtype), WARP)


# Matrices. Axes: w warp, g lane // 4, t lane % 4, e half of a register, n register, of the left operand r + 2 c for the
# upper or lower rows and columns.


def _rows(m: _Machine, address: Values, count: int) -> tuple[Values, Values]:
    """Addresses of the rows of `count` matrices, which the first lanes have, and their warps."""
    assert m.on.all(), "some threads only"
    return address.reshape(-1, WARP)[:, : 8 * count].reshape(-1), np.repeat(np.arange(m.kernel.num_warps), 8 * count)


@_operation("ldmatrix.sync.aligned.m8n8", "address", result="*b32")
def _load_matrices(m: _Machine, i: Instruction, address: Values) -> Values:
    count = len(_parts(i.operands[0]))
    at, warps = _rows(m, address, count)
    data = m.shared.load(at, 16, warps, m.clock).view(np.uint16).reshape(-1, count, 8, 8)
    data = np.ascontiguousarray(data.swapaxes(2, 3) if "trans" in i.modifiers else data)
    return data.view(np.uint32).swapaxes(0, 1).reshape(count, -1).T


@_operation("stmatrix.sync.aligned.m8n8", "address", "*b32", result=None)
def _store_matrices(m: _Machine, i: Instruction, address: Values, values: Values) -> None:
    count = values.shape[1]
    data = np.ascontiguousarray(values.reshape(-1, WARP, count).swapaxes(1, 2)).view(np.uint16).reshape(-1, 8, 8)
    data = np.ascontiguousarray(data.swapaxes(1, 2) if "trans" in i.modifiers else data)
    at, warps = _rows(m, address, count)
    m.shared.store(at, data.view(np.uint8).reshape(-1, 16), warps, m.clock, m.program)


@_operation("movmatrix", "b32", result="b32")
def _transpose(m: _Machine, i: Instruction, x: Values) -> Values:
    return np.ascontiguousarray(x.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)).reshape(-1).view(np.uint32)


@_operation("mma.sync.aligned.m16n8k16", "*pair", "*pair", "*", result="*")
def _product(m: _Machine, i: Instruction, a: Values, b: Values, start: Values) -> Values:
    """Of fp16 or bf16, summed in fp32: each sum is rounded once here."""
    a = a.astype(np.float64).reshape(-1, 8, 4, 2, 2, 2)  # w g t e c r
    a = a.transpose(0, 5, 1, 4, 2, 3).reshape(-1, 16, 16)  # of w r g c t e
    b = b.astype(np.float64).reshape(-1, 8, 4, 2, 2).transpose(0, 4, 2, 3, 1).reshape(-1, 16, 8)  # of w n t e g
    product = (a @ b).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)  # w g t r e
    return (product.reshape(-1, 4) + start).astype(np.float32)
