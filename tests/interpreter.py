"""Run before the first kernel is launched, this takes from Triton's interpreter what costs most and does nothing.

Kernels compute the same, in a seventh of the time.
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


patch_language_once()
leave_out_overflow_checks()
remember_types()
compare_what_differs()
