"""Launch compiled kernels on the CPU: shared parts of the cases of compiled_cases.py."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import ptx_emulator

from alspec.kernels.attention.oracles import decode_attention_ref

__all__ = ["CPU", "Emulated", "Found", "S", "broken", "counts_of", "error_of", "sound"]

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
    torch.int8: "i8", torch.float64: "fp64",
}  # fmt: skip
S = 128
CPU = torch.device("cpu")
CONFLICTS = ("shared", "global", "unordered")
SWIZZLE_128B = 3  # CU_TENSOR_MAP_SWIZZLE_128B of the CUDA driver API

Found = dict[str, float]  # error, counts


_parsed = functools.cache(ptx_emulator.Kernel)  # many launches have the same PTX


class Emulated:
    """Replaces a kernel in its launcher: compiles it for a GPU and emulates the PTX on the CPU.

    Args:
        edit: changes the PTX.
        late: parts of tensors that the previous kernel writes; a dependent launch may not read them before its wait.
        constants: replace constexpr arguments.
    """

    def __init__(
        self,
        kernel: Any,
        capability: int,
        edit: Callable[[str], str] = str,
        late: Sequence[Tensor] = (),
        **constants: Any,
    ) -> None:
        self.kernel, self.capability, self.edit, self.late, self.constants = kernel, capability, edit, late, constants
        assert constants.keys() <= set(kernel.arg_names), (
            f"no such arguments: {constants.keys() - set(kernel.arg_names)}"
        )
        self.counts: Found = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *args, **options: self.launch(grid[0], args, options | self.constants)

    def launch(self, grid: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile as a launch with these arguments does, run, and copy the results back to the tensors."""
        signature, constants, attributes, given = {}, {}, {}, []
        for index, parameter in enumerate(self.kernel.params):
            value = args[index] if index < len(args) else options[parameter.name]
            is_free = parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not is_free):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            given.append(value)
            kind = _type_of(value)
            signature[parameter.name] = kind
            if kind[0] == "*" or (kind == "i32" and value % 16 == 0 and not is_free):
                attributes[(index,)] = [["tt.divisibility", 16]]
        language = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = language(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        target = GPUTarget("cuda", self.capability, 32)
        chosen = {name: options[name] for name in ("num_warps", "enable_fp_fusion") if name in options}
        compiled = triton.compile(source, target=target, options=chosen)
        kernel = _parsed(self.edit(compiled.asm["ptx"]))
        # Each tensor once, also where several arguments point into it.
        tensors = {id(tensor): tensor for value in given if isinstance(tensor := _tensor_of(value), Tensor)}
        memory = ptx_emulator.Memory(sum(tensor.nbytes + 512 for tensor in tensors.values()) + 512, kernel.num_warps)
        places = {key: memory.place(_bytes(tensor)) for key, tensor in tensors.items()}
        if options["PDL"]:
            for key, tensor in tensors.items():
                self._mark_late(memory, tensor, places[key])
        boxes = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        numbers: list[Any] = []
        for value in given:
            place = places.get(id(_tensor_of(value)))
            if isinstance(value, TensorDescriptor):
                numbers += _descriptor(value, place, next(boxes))
            else:
                numbers.append(value if place is None else place)
        # No result may depend on the order of programs.
        order = [program for first in range(3) for program in reversed(range(first, grid, 3))]
        found = kernel.run(order, grid, numbers, compiled.metadata.shared, memory)
        self.counts |= {name: self.counts.get(name, 0) + count for name, count in found.items()}
        for key, tensor in tensors.items():
            data = torch.from_numpy(memory.bytes[places[key] : places[key] + tensor.nbytes])
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def _mark_late(self, memory: ptx_emulator.Memory, tensor: Tensor, place: int) -> None:
        """Mark the `late` parts of a tensor, which is the only one in its storage."""
        for part in self.late:
            if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                is_late = torch.zeros(tensor.shape, dtype=torch.bool)
                is_late.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
                memory.late[place : place + tensor.nbytes] |= is_late.flatten().repeat_interleave(part.itemsize).numpy()


def _tensor_of(value: Any) -> Any:
    return value.base if isinstance(value, TensorDescriptor) else value


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    return "*" + TYPES[value.dtype] if isinstance(value, Tensor) else "fp32" if isinstance(value, float) else "i32"


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


def _descriptor(value: TensorDescriptor, place: int | None, meta: dict[str, Any]) -> list[Any]:
    """The arguments for one descriptor: the tensor map, then sizes and strides."""
    assert place is not None
    assert meta["swizzle"] == SWIZZLE_128B, "swizzle"
    innermost_first = (tuple(reversed(sizes)) for sizes in (value.shape, value.strides, meta["block_size"]))
    return [ptx_emulator.TensorMap(place, value.base.itemsize, *innermost_first), *value.shape, *value.strides]


def counts_of(kernels: dict[str, Emulated]) -> Found:
    """The sum of the counts of several kernels."""
    return dict(sum((Counter(kernel.counts) for kernel in kernels.values()), Counter()))


def error_of(launch: Any) -> Found:
    """The relative RMS error of o against the oracle."""
    how = launch.sm_scale, launch.softmax, launch.sliding_window
    out, _ = decode_attention_ref(launch.q, launch.k, launch.v, launch.seq_lens, *how)
    return {"error": float((launch.out.double() - out).norm() / out.norm())}


def sound(case: Callable[[], Found]) -> Callable[[], Found]:
    """A case that must have no conflicts."""

    def run() -> Found:
        found = case()
        conflicts = {name: found[name] for name in CONFLICTS if found.get(name)}
        assert not conflicts, f"conflicts: {conflicts}"
        return found

    return run


def broken(
    case: Callable[..., Found], pattern: str, replacement: str | Callable[[re.Match[str]], str], noticed: str
) -> Callable[[], Found]:
    """A mutant: `pattern` is replaced in the PTX. It must show as this kind of conflict, or as an error."""

    edited = []

    def edit(ptx: str) -> str:
        changed, count = re.subn(pattern, replacement, ptx)
        if not count:
            raise RuntimeError(f"pattern not found: {pattern}")
        edited.append(changed)
        return changed

    def run() -> Found:
        try:
            found = case(edit=edit)
        except AssertionError as error:
            # Only a failed comparison counts: errors of the emulator have notes, and others come before the kernel.
            if noticed != "error" or hasattr(error, "__notes__") or not edited:
                raise
            return {}
        if noticed == "error" or not found.get(noticed):
            raise RuntimeError(f"not noticed; found {found}")
        return found

    return run
