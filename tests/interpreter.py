"""Run before the first kernel is launched, this takes from Triton's interpreter what costs most and does nothing.

Kernels compute the same, several times as fast.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def patch_language_once() -> None:
    """A launch patches `triton.language`, and so does every call of one of its functions by another, in vain: it goes
    through all names, which are patched already."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # modules, by the launch under way

    @functools.cache
    def used(function: Callable[..., Any]) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    def launch_afresh(*args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(*args, **kwargs)

    def patch_once(function: Callable[..., Any]) -> Any:
        if used(function) <= patched:
            return None
        patched.update(used(function))
        return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, patch_once


def call_directly() -> None:
    """Each function of the language goes through two others, which look for an argument that is always given."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def leave_out_overflow_checks() -> None:
    """Every sum and product of 32-bit integers is computed a second time, in 64 bits, and compared with the limits;
    without debugging, the interpreter does not look at the result."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def remember_types() -> None:
    """The type of every value is made anew, with its name and number of elements, and so are sizes as constants."""
    make, look_up = core.block_type.__init__, interpreter._get_np_dtype
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    sizes: dict[str, tuple[Any, Any]] = {}
    found: dict[str, Any] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        # Tuples of Triton's are hashed and compared value by value: most are those of a type made before.
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
        if type.name not in sizes:  # equal tuples of Triton's are found by comparing them value by value
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
    """Values are asked whether they are constants or tuples of them, and types whether they are equal: mostly plain
    numbers and tensors, and the very same types."""
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
    """Two operands of one type and shape stay as they are, and a number becomes the same constant each time."""
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


patch_language_once()
call_directly()
leave_out_overflow_checks()
remember_types()
compare_what_differs()
look_at_operands_once()
