"""PTX instructions as functions of the machine of ptx_emulator.py, the instruction and its operands' values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ptx_emulator import Machine, Memory

__all__ = [
    "BITS",
    "KINDS",
    "KNOWN",
    "NEVER",
    "NO_EFFECT",
    "OPERATIONS",
    "UNKNOWN",
    "WARP",
    "WIDTH",
    "Arrival",
    "Instruction",
    "Product",
    "TensorMap",
    "Values",
    "parts_of",
]

Values = NDArray[np.generic]

WARP = 32
NEVER = np.iinfo(np.int64).max
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS = {"pred": np.dtype(bool)}
KINDS |= {
    f"{sign}{8 * size}": np.dtype(f"{sign.replace('b', 'u').replace('s', 'i')}{size}")
    for sign in "bus"
    for size in BITS
}
# A pair (x2) is two elements; bf16, which NumPy lacks, is decoded.
KINDS |= {"f16": np.dtype("f2"), "f16x2": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
KINDS |= {"bf16": np.dtype("u2"), "bf16x2": np.dtype("u2")}
WIDTH = {kind: 4 if kind.endswith("x2") else dtype.itemsize for kind, dtype in KINDS.items()}
NO_EFFECT = {"prefetch", "membar", "fence", "createpolicy", "nanosleep", "cp.async.bulk.prefetch"}
NO_EFFECT |= {"bar.warp"}  # all threads of a warp execute together here
NO_EFFECT |= {"wgmma.fence.sync.aligned"}  # orders registers; the assembler reports a missing one
UNKNOWN = {"cc", "sat", "satfinite", "relu", "rz", "rm", "rp", "rna"}  # modifiers that no operation implements,
KNOWN = {("min", "relu"), ("max", "relu")}  # except these
COMPARE = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b), "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@dataclass(frozen=True)
class Instruction:
    """One instruction; names are unique, also in nested blocks."""

    text: str
    guard: str  # predicate with its `!`, or empty
    op: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The last type in the modifiers."""
        return _resolved(self.modifiers, "")

    def resolve(self, kind: str) -> str:
        """The type for "" (`kind`), "wide" (twice as wide), "to" (the first modifier) or "pair" (two of the second)."""
        return _resolved(self.modifiers, kind)


@functools.cache
def _resolved(modifiers: tuple[str, ...], kind: str) -> str:
    star, kind = kind[: kind.startswith("*")], kind.lstrip("*")
    named = [name for name in modifiers if name in KINDS]
    last = named[-1] if named else "b32"
    if kind == "wide":
        kind = f"{last[0]}{16 * WIDTH[last]}"
    elif kind in ("to", "pair"):
        kind = named[0] if kind == "to" else named[1] + "x2"
    return star + (kind or last)


def parts_of(operand: str) -> list[str]:
    """The registers of a vector, or the single register."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


# By name: a function of the machine, the instruction and its operands' values; the types of these operands; the type of
# the result, or None. Types are those of `Instruction.resolve`.
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
# One rounding: the product is exact in fp64.
_operation("fma", "", "", "")(lambda m, i, a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype))
_operation("popc", "")(lambda m, i, x: np.array([int(bits).bit_count() for bits in x.tolist()], np.uint32))
_operation("rcp", "")(lambda m, i, x: 1 / x)
_operation("rsqrt", "")(lambda m, i, x: 1 / np.sqrt(x))
_operation("selp", "", "", "pred")(lambda m, i, a, b, which: np.where(which, a, b))
_operation("mov cvta ld.param", "")(lambda m, i, x: x)
_operation("cp.async.commit_group", result=None)(lambda m, i: m.groups.append([]))


@_operation("min max", "", "")
def _extreme(m: Machine, i: Instruction, a: Values, b: Values) -> Values:
    """Elementwise min or max. If one operand is NaN, the result is the other one; with `.NaN` it is NaN."""
    functions = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
    found = functions[i.op]["NaN" in i.modifiers](a, b)
    if "relu" in i.modifiers:
        assert found.dtype.kind == "i", "type"
        found = np.maximum(found, found.dtype.type(0))
    return found


@_operation("griddepcontrol", result=None)
def _await_kernel_ahead(m: Machine, i: Instruction) -> None:
    m.memory.is_early &= i.modifiers[0] != "wait"


@_operation("div rem", "", "")
def _divide(m: Machine, i: Instruction, a: Values, b: Values) -> Values:
    if a.dtype.kind == "f":
        return a / b
    size = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    quotient = np.where(b == 0, -1, np.where((a < 0) != (b < 0), -size, size)).astype(a.dtype)
    return quotient if i.op == "div" else a - quotient * b


@_operation("shl shr", "", "u32")
def _shift(m: Machine, i: Instruction, x: Values, by: Values) -> Values:
    """A shift by the width of a register or more leaves only copies of the sign, or 0."""
    bits = 8 * WIDTH[i.kind]
    count = np.minimum(by, bits - 1).astype(x.dtype)
    moved = x << count if i.op == "shl" else x >> count
    return moved if x.dtype.kind == "i" and i.op == "shr" else np.where(by < bits, moved, x.dtype.type(0))


@_operation("shf", "u32", "u32", "u32")
def _funnel(m: Machine, i: Instruction, low: Values, high: Values, by: Values) -> Values:
    """The upper half of both after a left shift, or the lower half after a right shift."""
    assert "wrap" in i.modifiers, "clamp"
    both, count = high.astype(np.uint64) << 32 | low, (by & 31).astype(np.uint64)
    return ((both << count) >> 32 if "l" in i.modifiers else both >> count).astype(np.uint32)


@_operation("bfe", "", "u32", "u32")
def _extract(m: Machine, i: Instruction, x: Values, first: Values, count: Values) -> Values:
    """Bits above the extracted field are copies of its sign, or zeros."""
    bits = 8 * WIDTH[i.kind]
    x, count = x.astype(f"{x.dtype.kind}8"), np.minimum(count & 255, bits)
    first, above = np.minimum(first & 255, bits).astype(x.dtype), (64 - np.maximum(count, 1)).astype(x.dtype)
    return np.where(count == 0, 0, x >> first << above >> above).astype(KINDS[i.kind])


@_operation("prmt", "", "", "")
def _permute_bytes(m: Machine, i: Instruction, a: Values, b: Values, selector: Values) -> Values:
    choice = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    picked = np.take_along_axis(np.stack([a, b], 1).view(np.uint8), (choice & 7).astype(np.int64), 1)
    return np.where(choice & 8, np.where(picked & 128, 255, 0), picked).astype(np.uint8).view(np.uint32)[:, 0]


@_operation("setp", "", "", "pred", result="pred")
def _compare(m: Machine, i: Instruction, a: Values, b: Values, third: Values | None = None) -> Values:
    found = COMPARE[i.modifiers[0]](a, b)
    return found if third is None else LOGIC[i.modifiers[1]](found, third)


@_operation("lop3", "", "", "", "u32")
def _any_of_three_bits(m: Machine, i: Instruction, a: Values, b: Values, c: Values, table: Values) -> Values:
    """A function of three bits, by its table of eight results: bit 4 a + 2 b + c of it."""
    found = np.zeros_like(a)
    for index in range(8):
        if int(table[0]) >> index & 1:
            found |= np.bitwise_and(
                np.bitwise_and(a if index & 4 else ~a, b if index & 2 else ~b), c if index & 1 else ~c
            )
    return found


@_operation("cvt", "", "", result="to")
def _convert(m: Machine, i: Instruction, x: Values, low: Values | None = None) -> Values:
    """Convert to the first type in the modifiers, from the second; of a pair, the first operand is the upper half."""
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    to = i.resolve("to")
    dtype = np.dtype(np.float32) if to.startswith("bf16") else KINDS[to]
    x = x if low is None else np.stack([low, x], 1).reshape(-1)
    for name in rounding.keys() & set(i.modifiers):
        x = rounding[name](x)
        if dtype.kind != "f":
            x = np.clip(np.nan_to_num(x.astype(np.float64)), np.iinfo(dtype).min, np.iinfo(dtype).max)
    return x.astype(dtype)


def _space(m: Machine, i: Instruction) -> Memory:
    assert {"global", "shared"} & set(i.modifiers), "another space"
    return m.shared if "shared" in i.modifiers else m.memory


@_operation("ld", "address", result="*")
def _load(m: Machine, i: Instruction, address: Values) -> Values:
    on, space = m.on, _space(m, i)
    data = np.zeros((on.size, WIDTH[i.kind] * len(parts_of(i.operands[0]))), np.uint8)
    if on.any():
        data[on] = space.load(address[on], data.shape[1], m.warps[on], m.clock, m.program)
    return data.view(KINDS[i.kind])


@_operation("st", "address", "*", result=None)
def _store(m: Machine, i: Instruction, address: Values, values: Values) -> None:
    if m.on.any():
        data, space = values.view(np.uint8)[m.on], _space(m, i)
        if space is m.shared:
            m.store_shared(address[m.on], data, m.warps[m.on])
        else:
            space.store(address[m.on], data, m.warps[m.on], m.clock, m.program)


@_operation("atom", "address", "")
def _add_atomically(m: Machine, i: Instruction, address: Values, values: Values) -> Values:
    """Add to memory, thread after thread; a thread gets what was there. Additions do not race with each other."""
    assert {"add", "global"} <= set(i.modifiers), i.text
    found, space = np.zeros_like(values), _space(m, i)
    for thread in np.flatnonzero(m.on):
        at = space.at(address[[thread]], values.itemsize)[0]
        found[thread] = space.bytes[at].view(values.dtype)[0]
        space.bytes[at] = (found[[thread]] + values[[thread]]).view(np.uint8)
    return found


@_operation("cp.async", "address", "address", "u32", "u32", result=None)
def _copy(m: Machine, i: Instruction, to: Values, source: Values, size: Values, real: Values | None = None) -> None:
    """Copy; a source of size 0 gives zeros."""
    assert "L2::cache_hint" not in i.modifiers, "cache hint"
    on, size = m.on, int(size[0])
    used = on if real is None else on & (real > 0)
    assert real is None or np.isin(real[on], (0, size)).all(), "a part of a copy"
    data = np.zeros((on.size, size), np.uint8)
    data[used] = m.memory.load(source[used], size, m.warps[used], m.clock, m.program)
    m.shared.store(to[on], np.full_like(data[on], 0xFF), m.warps[on], m.clock, m.program, NEVER)
    m.shared.races += m.still_loading(to[on], size)
    m.groups[-1].append((to[on], data[on], m.warps[on]))


@_operation("cp.async.wait_group", result=None)
def _wait(m: Machine, i: Instruction) -> None:
    while len(m.groups) - 1 > int(i.operands[0]):
        for address, data, warps in m.groups.pop(0):
            m.shared.settle(address, data, warps, m.clock)


@dataclass
class Arrival:
    """An mbarrier that counts the bytes of copies: the bytes that its phase expects, and the copies in flight."""

    initialiser: int  # the thread; copies see the mbarrier after this thread's fence
    initialised_at: int  # count of barriers; other warps see the mbarrier after the next one
    is_seen: bool = False
    phase: int = 0
    expected: int = -1  # no thread has arrived yet
    copies: list[tuple[Values, Values, Values]] = field(default_factory=list)


@_operation("mbarrier.init", "address", "u32", result=None)
def _init_arrival(m: Machine, i: Instruction, address: Values, count: Values) -> None:
    assert (count[m.on] == 1).all(), "arrivals of several"
    for thread in np.flatnonzero(m.on):
        m.arrivals[int(address[thread])] = Arrival(thread, m.clock)


@_operation("fence.proxy.async", result=None)
def _fence(m: Machine, i: Instruction) -> None:
    """Later copies are ordered after earlier stores."""
    m.stored[:] &= not m.on.all()
    for arrival in m.arrivals.values():
        arrival.is_seen |= bool(m.on[arrival.initialiser])


@_operation("mbarrier.arrive.expect_tx", "address", "u32", result="b64")
def _expect(m: Machine, i: Instruction, address: Values, size: Values) -> Values:
    for thread in np.flatnonzero(m.on):
        arrival = _arrival(m, address, thread)
        assert arrival.expected < 0, "expected twice"
        arrival.expected = int(size[thread])
    return np.zeros(m.on.size, np.uint64)


def _arrival(m: Machine, address: Values, thread: int) -> Arrival:
    """The mbarrier at an address; a race if another warp has initialised it since the last barrier."""
    arrival = m.arrivals[int(address[thread])]
    m.shared.races += int(arrival.initialised_at == m.clock and m.warps[arrival.initialiser] != m.warps[thread])
    return arrival


@_operation("cp.async.bulk", "address", "address", "u32", "address", result=None)
def _bulk_copy(m: Machine, i: Instruction, to: Values, source: Values, size: Values, barrier: Values) -> None:
    for thread in np.flatnonzero(m.on):
        chunks = np.arange(0, size[thread], 16)
        warps = np.full(chunks.size, m.warps[thread])
        data = m.memory.load(source[thread] + chunks, 16, warps, m.clock, m.program)
        _send(m, thread, to[thread] + chunks, data, barrier)


def _send(m: Machine, thread: int, to: Values, data: Values, barrier: Values) -> None:
    """Copy 16 bytes to each address of shared memory; in flight until the mbarrier completes its phase."""
    warps, arrival = np.full(to.size, m.warps[thread]), _arrival(m, barrier, thread)
    m.shared.store(to, np.full_like(data, 0xFF), warps, m.clock, m.program, NEVER)
    m.shared.races += m.still_loading(to, 16) + (not arrival.is_seen)
    m.shared.races += int(m.stored[to[:, None] + np.arange(16)].any())
    arrival.copies.append((to, data, warps))


@dataclass(frozen=True)
class TensorMap:
    """A tensor descriptor; dimensions from the innermost to the outermost, in elements.

    A row of a box is 128 bytes. Its 16-byte chunks are swizzled with a period of 8 rows.
    """

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def chunks(self, begin: Values) -> tuple[Values, Values]:
        """Addresses of all 16-byte chunks of a box, and whether they are in the tensor: others are read as zeros."""
        each = 16 // self.itemsize
        assert self.box[0] * self.itemsize == 128, "another row"
        assert self.shape[0] % each == begin[0] % each == 0, "a part of a chunk"
        address, exists = np.array([self.address]), np.array([True])
        for n, (size, stride, box) in enumerate(zip(self.shape, self.strides, self.box, strict=True)):
            places = begin[n] + np.arange(0, box, 1 if n else each)
            address = np.add.outer(places * stride * self.itemsize, address).reshape(-1)
            exists = np.logical_and.outer((places >= 0) & (places < size), exists).reshape(-1)
        return address, exists


def _swizzled(address: Values) -> Values:
    return address ^ (address >> 7 & 7) << 4


@_operation("cp.async.bulk.tensor", "address", "tensor", "address", result=None)
def _tensor_copy(m: Machine, i: Instruction, to: Values, source: Values, barrier: Values) -> None:
    for thread in np.flatnonzero(m.on):
        tensor = m.tensors[int(source[thread, 0])]
        assert len(tensor.box) == int(i.modifiers[0][0]) == source.shape[1] - 1, "dimensions"
        assert to[thread] % 128 == 0, f"misaligned: {to[thread]:#x}"
        address, exists = tensor.chunks(source[thread, 1:])
        data = np.zeros((address.size, 16), np.uint8)
        warps = np.full(address.size, m.warps[thread])
        data[exists] = m.memory.load(address[exists], 16, warps[exists], m.clock, m.program)
        _send(m, thread, _swizzled(to[thread] + 16 * np.arange(address.size)), data, barrier)


@_operation("mbarrier.try_wait.parity", "address", "u32", result="pred")
def _arrived(m: Machine, i: Instruction, address: Values, parity: Values) -> Values:
    """A wait for a completed phase returns; for another phase, all copies in flight arrive and must complete it."""
    passes = np.zeros(m.on.size, bool)
    for thread in np.flatnonzero(m.on):
        passes[thread] = _arrival(m, address, thread).phase != parity[thread] & 1
    for at in {int(x) for x in address[m.on & ~passes]}:
        arrival = m.arrivals[at]
        if arrival.expected == sum(data.size for _, data, _ in arrival.copies):
            # The waiting warps may read, all or one. Of several, which no kernel has, only the issuing warp may.
            waiting = np.unique(m.warps[m.on & (address == at)])
            of_all = waiting.size == m.kernel.num_warps
            for places, data, warps in arrival.copies:
                warps = np.full_like(warps, waiting[0]) if waiting.size == 1 else warps
                m.shared.settle(places, data, warps, m.clock - of_all)
            m.arrivals[at] = replace(arrival, phase=arrival.phase ^ 1, expected=-1, copies=[])
    for thread in np.flatnonzero(m.on & ~passes):
        passes[thread] = m.arrivals[int(address[thread])].phase != parity[thread] & 1
    assert passes[m.on].all(), "waits for what never comes"
    return passes


@_operation("bar.sync barrier.sync", result=None)
def _barrier(m: Machine, i: Instruction) -> None:
    assert i.operands in (("0",), ("0", str(m.threads.size))), "barrier of some threads"
    if not m.on.any():
        return
    assert m.active is m.everyone, "threads have parted"
    assert m.on.all(), "barrier of some threads"
    m.clock += 1


@_operation("bra ret exit", result=None)
def _branch(m: Machine, i: Instruction) -> int | None:
    target = m.kernel.labels[i.operands[0]] if i.operands else len(m.kernel.code)
    if not m.on.any():
        return None
    if (m.on == m.active).all():
        return target
    m.leaving = target
    return None


@_operation("shfl", "", "u32", "u32")
def _shuffle(m: Machine, i: Instruction, x: Values, by: Values, clamp: Values) -> Values:
    assert m.active is m.everyone, "threads have parted"
    lane, by, last, segment = m.lanes, by.astype(np.int64) & 31, clamp & 31, clamp.astype(np.int64) >> 8 & 31
    last = (lane & segment) | (last & ~segment)
    source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": (lane & segment) | (by & ~segment)}
    chosen = source[i.modifiers[1]]
    inside = chosen >= last if "up" in i.modifiers else chosen <= last
    return x[m.warps * WARP + np.where(inside, chosen, lane)]


@_operation("elect.sync", "s32", result="b32|pred")
def _elect(m: Machine, i: Instruction, members: Values) -> tuple[Values, Values]:
    """The elected lane, and whether a thread is in it."""
    assert (members == -1).all(), "some lanes only"
    return np.zeros(m.lanes.size, np.uint32), m.lanes == 0


@_operation("redux", "", "s32")
def _reduce(m: Machine, i: Instruction, x: Values, members: Values) -> Values:
    assert (members == -1).all(), "some lanes only"
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[i.modifiers[1]]
    return np.repeat(function.reduce(x.reshape(-1, WARP), axis=1, dtype=x.dtype), WARP)


# Matrices. Axes: w warp, g lane // 4, t lane % 4, e half of a register, n register; of the left operand n = r + 2 c for
# the upper or lower rows and columns.


def _rows(m: Machine, address: Values, count: int) -> tuple[Values, Values]:
    """Row addresses of `count` matrices, held by the first lanes, and their warps."""
    assert m.on.all(), "some threads only"
    return address.reshape(-1, WARP)[:, : 8 * count].reshape(-1), np.repeat(np.arange(m.kernel.num_warps), 8 * count)


@_operation("ldmatrix.sync.aligned.m8n8", "address", result="*b32")
def _load_matrices(m: Machine, i: Instruction, address: Values) -> Values:
    count = len(parts_of(i.operands[0]))
    at, warps = _rows(m, address, count)
    data = m.shared.load(at, 16, warps, m.clock, m.program).view(np.uint16).reshape(-1, count, 8, 8)
    data = np.ascontiguousarray(data.swapaxes(2, 3) if "trans" in i.modifiers else data)
    return data.view(np.uint32).swapaxes(0, 1).reshape(count, -1).T


@_operation("stmatrix.sync.aligned.m8n8", "address", "*b32", result=None)
def _store_matrices(m: Machine, i: Instruction, address: Values, values: Values) -> None:
    count = values.shape[1]
    data = np.ascontiguousarray(values.reshape(-1, WARP, count).swapaxes(1, 2)).view(np.uint16).reshape(-1, 8, 8)
    data = np.ascontiguousarray(data.swapaxes(1, 2) if "trans" in i.modifiers else data)
    at, warps = _rows(m, address, count)
    m.store_shared(at, data.view(np.uint8).reshape(-1, 16), warps)


@_operation("movmatrix", "b32", result="b32")
def _transpose(m: Machine, i: Instruction, x: Values) -> Values:
    return np.ascontiguousarray(x.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2)).reshape(-1).view(np.uint32)


@_operation("mma.sync.aligned.m16n8k16 mma.sync.aligned.m16n8k8", "*pair", "*pair", "*", result="*")
def _product(m: Machine, i: Instruction, a: Values, b: Values, start: Values) -> Values:
    """Products of fp16 or bf16, summed in fp32; here each sum is rounded once."""
    columns = a.shape[-1] // 2
    a = a.astype(np.float64).reshape(-1, 8, 4, 2, columns, 2)  # w g t e c r
    a = a.transpose(0, 5, 1, 4, 2, 3).reshape(-1, 16, 8 * columns)  # of w r g c t e
    b = b.astype(np.float64).reshape(-1, 8, 4, 2, columns).transpose(0, 4, 2, 3, 1)
    product = a @ b.reshape(-1, 8 * columns, 8)  # of w n t e g
    product = product.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)  # w g t r e
    return (product.reshape(-1, 4) + start).astype(np.float32)


@_operation("mma.sync.aligned.m16n8k32", "*b32", "*b32", "*", result="*")
def _product_of_bytes(m: Machine, i: Instruction, a: Values, b: Values, start: Values) -> Values:
    of_a, of_b = [KINDS[name] for name in i.modifiers if name in KINDS][1:3]
    a = np.ascontiguousarray(a).view(of_a).astype(np.int32).reshape(-1, 8, 4, 2, 2, 4)  # w g t c r e
    a = a.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 32)  # of w r g c t e
    b = np.ascontiguousarray(b).view(of_b).astype(np.int32).reshape(-1, 8, 4, 2, 4)
    product = a @ b.transpose(0, 3, 2, 4, 1).reshape(-1, 32, 8)  # of w n t e g
    return product.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4) + start


@dataclass
class Product:
    """A product that four warps have issued: not in registers until they have waited for it."""

    write: Callable[[Values], None]
    values: Values
    places: Values  # [n] addresses of the 16-byte chunks that it reads
    is_committed: bool = False


def _matrix(m: Machine, i: Instruction, descriptor: Values, rows: int, is_transposed: bool) -> tuple[Values, Values]:
    """[rows, 16] numbers that a shared memory descriptor names, and the addresses of their 16-byte chunks."""
    assert (descriptor == descriptor[0]).all(), "another matrix for each thread"
    bits = int(descriptor[0])
    begin, leading, stride = ((bits >> by & 0x3FFF) << 4 for by in (0, 16, 32))
    assert bits >> 62 == 1, "rows of other than 128 bytes"
    assert bits >> 49 & 7 == 0, "base offset"
    if is_transposed:  # 64 rows of the matrix are in one row of 128 bytes
        row, column = np.arange(0, rows, 8)[:, None], np.arange(16)
        at = row % 64 * 2 + row // 64 * leading + column % 8 * 128 + column // 8 * stride
    else:
        row, column = np.arange(rows)[:, None], np.arange(0, 16, 8)
        at = row % 8 * 128 + row // 8 * stride + column * 2
    places = _swizzled(begin + at)
    raw = m.read_by_all(places.reshape(-1)).view(np.uint16).reshape(*places.shape, 8)
    raw = raw.swapaxes(1, 2).reshape(rows, 16) if is_transposed else raw.reshape(rows, 16)
    values = (raw.astype(np.uint32) << 16).view(np.float32) if i.kind == "bf16" else raw.view(np.float16)
    return values.astype(np.float64), places.reshape(-1)


@_operation("wgmma.mma_async.sync.aligned", "*f32", "u64", "u64", "pred", "s32", "s32", "u32", "u32", result=None)
def _product_in_shared_memory(
    m: Machine, i: Instruction, start: Values, a: Values, b: Values, adds: Values, *immediates: Values
) -> None:
    """Product of [64, 16] and [16, n] in fp16 or bf16, summed in fp32, with or without the previous sums."""
    assert m.on.all(), "some threads only"
    assert i.operands[1][0] != "{", "a matrix in registers"
    assert m.kernel.num_warps == 4, "another number of warps"
    assert i.modifiers[1] == "f32", "type of the sums"
    scale_a, scale_b, *transposed = (int(value[0]) for value in immediates)
    assert scale_a == scale_b == 1, "negated"
    columns = int(i.modifiers[0].split("n")[1].split("k")[0])
    left, places = _matrix(m, i, a, 64, bool(transposed[0]))
    right, others = _matrix(m, i, b, columns, bool(transposed[1]))
    product = (left @ right.T).reshape(4, 2, 8, columns // 8, 4, 2)  # w r g n t e
    product = product.transpose(0, 2, 4, 3, 1, 5).reshape(m.threads.size, -1)  # w g t n r e
    # Sums in the same registers are in order: no wait is needed between them.
    before = m.products.get(i.operands[0])
    start = before.values if before else start
    values = (product + np.where(adds[:, None], start, 0)).astype(np.float32)
    write = m.late_writer(i.operands[0], "*f32")
    write(np.full_like(values, np.nan))
    places = np.concatenate([places, others] + ([before.places] if before else []))
    m.products[i.operands[0]] = Product(write, values, places)


@_operation("wgmma.commit_group.sync.aligned", result=None)
def _commit_products(m: Machine, i: Instruction) -> None:
    for product in m.products.values():
        product.is_committed = True


@_operation("wgmma.wait_group.sync.aligned", result=None)
def _await_products(m: Machine, i: Instruction) -> None:
    assert m.on.all(), "some threads only"
    assert i.operands == ("0",), "some groups only"
    for name, product in list(m.products.items()):
        if product.is_committed:
            product.write(product.values)
            del m.products[name]
