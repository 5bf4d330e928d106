"""Remove expensive work without effect from Triton's interpreter, and round to bf16 as a GPU does.

Run it before the first kernel is launched. Except for that rounding, kernels compute the same results, many times
faster.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Patch `triton.language` once for each launch: every call from one kernel function to another patches it again."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # modules patched by the current launch
    rewritten: dict[Any, Callable[..., Any]] = {}  # functions rewritten by the current launch

    @functools.cache
    def used(function: Callable[..., Any]) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    def launch_afresh(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        rewritten.clear()
        return launch(*args, **kwargs)

    def patch_once(function: Callable[..., Any]) -> Any:
        if used(function) <= patched:
            return None
        patched.update(used(function))
        return patch(function)

    @functools.cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if core.is_builtin(member)]

    def patch_builtins(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if self not in rewritten:
            patch_once(self.fn)
            rewritten[self] = self.rewrite()
        try:
            return rewritten[self](*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, patch_once
    interpreter.InterpretedFunction.__call__, interpreter._patch_builtin = call, patch_builtins


def call_directly() -> None:
    """Call functions of the language without two wrappers, which look for an argument that is always given."""
    semantic = interpreter.interpreter_semantic
    made: dict[tuple[Any, str], Callable[..., Any]] = {}

    def direct(name: str, member: Any) -> Callable[..., Any]:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return AT_ONCE[name](call) if name in AT_ONCE else call

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if (owner, name) not in made:
            made[owner, name] = direct(name, member)
        scope.set_attr(owner, name, made[owner, name])

    interpreter._patch_attr = patch


def leave_out_overflow_checks() -> None:
    """Skip overflow checks: each sum and product of 32-bit integers is computed again in 64 bits and compared with the
    limits. Without debugging, the interpreter does not use the result."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def round_to_bf16() -> None:
    """Round fp32 to the nearest bf16, ties to even, as `cvt.rn.bf16.f32` does: the interpreter cuts bits off."""
    convert = interpreter._convert_float
    half, nan = np.uint32(0x7FFF), np.uint16(0x7FFF)

    def convert_as_gpu(values: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        """Return the bits of the converted values."""
        if (source.name, target.name) == ("bf16", "fp32"):
            return values.astype(np.uint32) << np.uint32(16)
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        bits = values.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = ((bits + half + odd) >> np.uint32(16)).astype(np.uint16)
        return np.where(np.isnan(values), nan, rounded)

    interpreter._convert_float = convert_as_gpu


def remember_types() -> None:
    """Keep the types of values with their names and sizes: the interpreter builds them again for each value."""
    make, look_up = core.block_type.__init__, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    sizes: dict[str, tuple[Any, Any]] = {}
    found: dict[str, Any] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        # Triton hashes and compares its tuples value by value; most belong to a type that exists already.
        key = element_ty.name, id(shape)
        if key not in blocks:
            of = (*map(int, core._unwrap_if_constexpr(core._unwrap_if_constexpr(shape))),)
            key = element_ty.name, of
            if key not in blocks:
                make(self, element_ty, list(of))
                self.shape = shapes.setdefault(of, self.shape)
                blocks[key] = blocks[element_ty.name, id(self.shape)] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in sizes:  # Triton compares equal tuples value by value
            shape = [int(size) for size in type.shape] if type.is_block() else []
            sizes[type.name] = core.constexpr(math.prod(shape)), core.tuple(list(map(core.constexpr, shape)))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes[type.name]

    def look_up_once(type: Any) -> Any:
        if type.name not in found:
            found[type.name] = look_up(type)
        return found[type.name]

    def broadcast_unlike(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = make_block_type, make_tensor
    interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value = look_up_once, broadcast_unlike


def compare_what_differs() -> None:
    """Test for frequent classes first: most values are numbers and tensors, and most compared types are identical."""
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    as_they_are = {int, float, bool, str, type(None), core.tensor}

    def unwrap_others(value: Any) -> Any:
        kind = value.__class__
        if kind in as_they_are:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_others
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def look_at_operands_once() -> None:
    """Skip type checks of operands of one type and shape; make the constant of each number once."""
    check, make = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    as_they_are = {"int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "fp32", "fp64"}
    constants: dict[Any, Any] = {}

    def check_others(self: Any, left: Any, right: Any, *flags: Any, **named: Any) -> tuple[Any, Any]:
        if left.__class__ is core.tensor:
            if right.__class__ is int and left.dtype.name == "int32" and -(2**31) <= right < 2**31:
                return self.broadcast_impl_value(left, constant(self, right, left.dtype))
            is_alike = right.__class__ is core.tensor and left.type.name == right.type.name
            if is_alike and left.dtype.name in as_they_are:
                return left, right
        return check(self, left, right, *flags, **named)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value.__class__, value, dtype.name
        if key not in constants:
            constants[key] = make(self, value, dtype)
        return constants[key]

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant = check_others, constant


# Functions of the language call some ten others, which look at types. The result for given types is kept: first, the
# interpreter computes, and if NumPy finds the same, only NumPy is called later. The interpreter calls the same
# NumPy function: for these types it treats all values alike.

# Types that NumPy has.
NATIVE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)} | {"int1", "fp16", "fp32", "fp64"}


class Result:
    """The type of a result; makes results of this type."""

    def __init__(self, like: core.tensor) -> None:
        self.tensor = {name: value for name, value in vars(like).items() if name != "handle"}
        self.dtype, self.data = like.handle.dtype, like.handle.data
        if self.data.dtype == np.bool_:  # the interpreter names the type of what was compared, here only the first one
            self.dtype = language.int1

    def of(self, data: np.ndarray) -> core.tensor:
        """Return `data` as a tensor."""
        handle, tensor = object.__new__(interpreter.TensorHandle), object.__new__(core.tensor)
        handle.data, handle.dtype, handle.attr = data, self.dtype, {}
        tensor.__dict__ = {**self.tensor, "handle": handle}
        return tensor

    def is_of(self, data: np.ndarray) -> bool:
        """Whether the interpreter's result was `data`."""
        expected = self.data
        is_alike = data.dtype == expected.dtype and data.shape == expected.shape
        return is_alike and np.array_equal(data, expected, equal_nan=data.dtype.kind == "f")


def elementwise(compute: Callable[..., Any], first: int = 0) -> Callable[..., Any]:
    """Replace an operator by `compute` of arrays; all from the `first` on have one type."""

    def operands(args: tuple[Any, ...]) -> list[Any] | None:
        """For each argument None if it is a tensor, else its number as an array; None if types differ."""
        tensors = [arg for arg in args if arg.__class__ is core.tensor]
        types = {arg.dtype.name for arg in args[first:] if arg.__class__ is core.tensor}
        if len(types) != 1 or not {tensor.dtype.name for tensor in tensors} <= NATIVE:
            return None
        dtype, numbers = tensors[-1].handle.data.dtype, []
        for arg in map(core._unwrap_if_constexpr, args):
            if arg.__class__ is core.tensor:
                numbers.append(None)
            elif fits(arg, dtype):
                numbers.append(np.array(arg or 0, dtype))  # Triton has no constant of -0.0
            else:
                return None
        return numbers

    def fits(number: Any, dtype: np.dtype) -> bool:
        """Whether a number is the same in this type and in the type that Triton may convert it to first."""
        if number.__class__ is int and dtype.kind in "iu":
            return bool(np.iinfo(dtype).min <= number <= np.iinfo(dtype).max)
        if number.__class__ not in (int, float) or dtype.kind != "f":
            return False
        if number != number or abs(number) == math.inf or number == 0:
            return True
        limits = np.finfo(np.float32)
        return bool(limits.tiny <= abs(number) <= limits.max and np.array(number, dtype) == np.float32(number))

    def faster(slow: Callable[..., Any]) -> Callable[..., Any]:
        plans: dict[Any, tuple[Result, list[Any]] | None] = {}

        def plan(key: Any, args: tuple[Any, ...]) -> Any:
            found, numbers, plans[key] = slow(*args), operands(args), None
            if numbers is not None and found.__class__ is core.tensor:
                result = Result(found)
                plans[key] = (result, numbers) if result.is_of(compute(*arrays(args, numbers))) else None
            return found

        def arrays(args: tuple[Any, ...], numbers: list[Any]) -> list[Any]:
            pairs = zip(args, numbers, strict=True)
            return [arg.handle.data if number is None else number for arg, number in pairs]

        def call(*args: Any, **named: Any) -> Any:
            if named:
                return slow(*args, **named)
            key = (*[arg.type.name if arg.__class__ is core.tensor else repr(arg) for arg in args],)
            if key not in plans:
                return plan(key, args)
            if (known := plans[key]) is None:
                return slow(*args)
            result, numbers = known
            return result.of(compute(*arrays(args, numbers)))

        return call

    return faster


def of_one(
    describe: Callable[..., Any], compute: Callable[[np.ndarray, Result, Any], np.ndarray]
) -> Callable[..., Any]:
    """Replace a function of one tensor by `compute` of its array, the type of the result, and the other arguments.

    `describe` returns the values of these arguments, or None to call the interpreter.
    """

    def faster(slow: Callable[..., Any]) -> Callable[..., Any]:
        plans: dict[Any, Result | None] = {}

        def plan(key: Any, args: tuple[Any, ...]) -> Any:
            found, plans[key] = slow(*args), None
            result = Result(found)
            if found is not args[0] and result.is_of(compute(args[0].handle.data, result, key[1])):
                plans[key] = result
            return found

        def call(*args: Any, **named: Any) -> Any:
            if named or args[0].__class__ is not core.tensor or (values := describe(*args)) is None:
                return slow(*args, **named)
            key = args[0].type.name, values
            if key not in plans:
                return plan(key, args)
            result = plans[key]
            return slow(*args) if result is None else result.of(compute(args[0].handle.data, result, values))

        return call

    return faster


def native(tensor: core.tensor, dtype: Any, *other: Any) -> str | None:
    """Describe the type of a conversion."""
    dtype = core._unwrap_if_constexpr(dtype)
    return None if other or tensor.dtype.name not in NATIVE or dtype.name not in NATIVE else dtype.name


def sizes(tensor: core.tensor, *shape: Any) -> tuple[int, ...] | None:
    """Describe a new shape."""
    if len(shape) == 1 and shape[0].__class__ is core.constexpr:
        shape = (shape[0].value,)
    if len(shape) == 1 and isinstance(shape[0], list | tuple | core.tuple):
        shape = (*shape[0],)
    return (*[size.value if size.__class__ is core.constexpr else size for size in shape],) or None


def axis(tensor: core.tensor, index: Any) -> int | None:
    """Describe a new axis."""
    return index if isinstance(index := core._unwrap_if_constexpr(index), int) else None


def axes(tensor: core.tensor, index: Any) -> str:
    """Describe new axes."""
    return repr((*index,) if isinstance(index, tuple | core.tuple) else index)


def convert(data: np.ndarray, result: Result, values: Any) -> np.ndarray:
    """Convert values between native types."""
    return data.astype(result.data.dtype)


def reshape(data: np.ndarray, result: Result, values: Any) -> np.ndarray:
    """Give the elements another shape."""
    return data.reshape(result.data.shape)


def permute(data: np.ndarray, result: Result, values: Any) -> np.ndarray:
    """Reorder axes."""
    return data.transpose(values)


def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Stack in a new last axis."""
    return np.stack((left, right) if left.shape == right.shape else np.broadcast_arrays(left, right), axis=-1)


def divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Divide integers, rounding towards zero."""
    return (left - np.fmod(left, right)) // right


def add(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Replace addition; the left operand may be pointers."""
    plans: dict[Any, Result | None] = {}
    of_values = elementwise(np.add)(slow)

    def plan(key: Any, pointers: core.tensor, offsets: Any) -> Any:
        found = slow(pointers, offsets)
        result = Result(found)
        plans[key] = result if result.is_of(moved(pointers, offsets)) else None
        return found

    def moved(pointers: core.tensor, offsets: Any) -> np.ndarray:
        size = max(1, pointers.dtype.element_ty.primitive_bitwidth // 8)
        by = offsets.handle.data if offsets.__class__ is core.tensor else np.array([offsets])
        return pointers.handle.data + size * by.astype(np.uint64)

    def call(left: core.tensor, right: Any, **named: Any) -> Any:
        if named:
            return slow(left, right, **named)
        right = core._unwrap_if_constexpr(right)
        if left.dtype.__class__ is not core.pointer_type or right.__class__ not in (core.tensor, int):
            return of_values(left, right)
        key = left.type.name, right.type.name if right.__class__ is core.tensor else int
        if key not in plans:
            return plan(key, left, right)
        return slow(left, right) if (result := plans[key]) is None else result.of(moved(left, right))

    return call


def arange(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `arange`: its results are kept."""

    @functools.cache
    def result(start: int, end: int) -> Result:
        return Result(slow(start, end))

    def call(start: Any, end: Any, **named: Any) -> Any:  # the language itself passes named arguments
        found = result(core._unwrap_if_constexpr(start), core._unwrap_if_constexpr(end))
        return found.of(found.data)

    return call


def split(slow: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `split`, of a last axis of two."""
    plans: dict[str, Result] = {}

    def call(tensor: core.tensor, **named: Any) -> Any:
        if named or len(tensor.shape) == 1:  # two scalars
            return slow(tensor, **named)
        if tensor.type.name not in plans:
            found = slow(tensor)
            plans[tensor.type.name] = Result(found[0])
            return found
        data, result = tensor.handle.data, plans[tensor.type.name]
        return result.of(data[..., 0]), result.of(data[..., 1])

    return call


AT_ONCE = {
    "__add__": add,
    "arange": arange,
    "split": split,
    "__radd__": elementwise(lambda right, left: np.add(left, right)),
    "__sub__": elementwise(np.subtract),
    "__rsub__": elementwise(lambda right, left: np.subtract(left, right)),
    "__mul__": elementwise(np.multiply),
    "__rmul__": elementwise(lambda right, left: np.multiply(left, right)),
    "__and__": elementwise(np.bitwise_and),
    "__or__": elementwise(np.bitwise_or),
    "__xor__": elementwise(np.bitwise_xor),
    "__lshift__": elementwise(np.left_shift),
    "__rshift__": elementwise(np.right_shift),
    "__lt__": elementwise(np.less),
    "__le__": elementwise(np.less_equal),
    "__gt__": elementwise(np.greater),
    "__ge__": elementwise(np.greater_equal),
    "__eq__": elementwise(np.equal),
    "__ne__": elementwise(np.not_equal),
    "minimum": elementwise(np.minimum),
    "maximum": elementwise(np.maximum),
    "where": elementwise(np.where, first=1),
    "__truediv__": elementwise(np.divide),
    "__rtruediv__": elementwise(lambda right, left: np.divide(left, right)),
    "__floordiv__": elementwise(divide),
    "__mod__": elementwise(np.fmod),
    "join": elementwise(join),
    "permute": of_one(sizes, permute),
    "to": of_one(native, convert),
    "cast": of_one(native, convert),
    "reshape": of_one(sizes, reshape),
    "expand_dims": of_one(axis, reshape),
    "__getitem__": of_one(axes, reshape),
}
patch_language_once()
call_directly()
leave_out_overflow_checks()
round_to_bf16()
remember_types()
compare_what_differs()
look_at_operands_once()
