"""Read the header of a GGUF file, or of all parts of a split one: metadata, and where each tensor lies."""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import absent, foreign_content
from alspec.models.checkpoint.safetensors_header import TensorEntry

__all__ = ["BLOCKS", "GgufModel", "is_gguf", "part_paths", "read_gguf"]

# Types that are read: elements and bytes of a block. The blocks of a row are contiguous.
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# The format's number of each type; those without a block above are refused by name.
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_AGAIN = "download the file again"


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file with all its parts. Names of tensors are the file's; shapes are PyTorch's, rows first."""

    path: Path  # the file, or the first part
    metadata: dict[str, Any]
    entries: dict[str, TensorEntry]  # start and stop count from the beginning of the tensor's file
    files: dict[str, Path]


def is_gguf(path: Path) -> bool:
    """Whether a model's path names a GGUF file: by its ending, whether or not it exists, or by its first bytes."""
    if os.path.isdir(path):  # unlike `Path.is_dir`, no error for a name that is too long
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"
    except (OSError, ValueError):
        return path.suffix.lower() == ".gguf"


def part_paths(path: Path) -> list[Path]:
    """All parts of the split file that `path` is a part of, such as `x-00001-of-00003.gguf`, or `path` alone."""
    match = _PART.search(path.name)
    if match is None or match.end() != len(path.name):
        return [path]
    stem, ending = path.name[: match.start()], path.name[-len(".gguf") :]
    count = match[2]
    return [path.with_name(f"{stem}-{part:05}-of-{count}{ending}") for part in range(1, int(count) + 1)] or [path]


def read_gguf(path: Path) -> GgufModel:
    """Read the headers of a GGUF file, versions 2 and 3, and of all parts if it is split; reads no weights.

    A file is: magic, version, number of tensors and of metadata, the metadata (the first part's is used), name, shape,
    type and offset of each tensor, then the data. Source: the GGUF specification of ggml.

    Raises:
        UserError: no such file, not a GGUF file, a missing part, a truncated or broken file, a tensor type that is not
            read, tensors that overlap or lie outside the file; names file and tensor.
    """
    paths = part_paths(Path(path))
    metadata: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    files: dict[str, Path] = {}
    for index, part in enumerate(paths):
        if len(paths) > 1 and not part.is_file():
            raise UserError(
                f"{part}: missing part: expected part {index + 1} of {len(paths)} beside {Path(path).name}, "
                f"found {absent(part)}; download it"
            )
        own, found = _read_file(part)
        _check_part(part, own, index, len(paths))
        metadata = metadata or own
        for name, entry in found.items():
            if name in entries:
                raise _duplicate(part, name, files[name].name)
            entries[name], files[name] = entry, part
    expected = metadata.get("split.tensors.count", len(entries))
    if len(paths) > 1 and expected != len(entries):
        raise UserError(
            f"{paths[0]}: split.tensors.count: expected {show(expected)} tensors in {len(paths)} parts, found "
            f"{len(entries)}; download all parts of one model again"
        )
    return GgufModel(paths[0], metadata, entries, files)


def _check_part(path: Path, metadata: dict[str, Any], index: int, count: int) -> None:
    """Check that the metadata and the name say the same of a part."""
    found = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if found not in ((count, index), (0, 0) if count == 1 else (count, index)):
        raise UserError(
            f"{path}: split: expected part {index + 1} of {count} by the file's name, found split.no {show(found[1])} "
            f"and split.count {show(found[0])}; keep the names that the parts were published with"
        )


def _duplicate(path: Path, name: str, other: str) -> UserError:
    return UserError(f"{path}: tensor {show(name)}: duplicate: expected once, found in {other} too; {_AGAIN}")


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    if not path.is_file():
        raise UserError(f"{path}: expected a GGUF file, found {absent(path)}; give the path of an existing file")
    try:
        with path.open("rb") as file:
            head = file.read(512)
            _check_head(path, head)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None


def _check_head(path: Path, head: bytes) -> None:
    foreign = foreign_content(head)
    if not head.startswith(b"GGUF"):
        raise UserError(f"{path}: expected a GGUF file, found {foreign or f'{show(head[:16])}; {_AGAIN}'}")
    version = int.from_bytes(head[4:8], "little")
    if version not in _VERSIONS:
        kind = "a big-endian file" if version & 0xFFFF == 0 and version else f"version {version}"
        raise UserError(f"{path}: expected GGUF version 2 or 3, little-endian, found {kind}; convert the model again")


class _Reader:
    """Reads the header of one mapped file, front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 8

    def read(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string("a key of the metadata")
            if key in metadata:
                raise UserError(f"{self._path}: {show(key)}: duplicate: expected once, found twice; {_AGAIN}")
            metadata[key] = self._value(self._scalar("<I"), key)
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise UserError(
                f"{self._path}: general.alignment: expected a power of two, found {show(alignment)}; {_AGAIN}"
            )
        begin = -(-self._at // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, kind, shape, offset in infos:
            if name in entries:
                raise _duplicate(self._path, name, "this file")
            entries[name] = self._entry(name, kind, shape, begin + offset)
        self._check_layout(entries)
        return metadata, entries

    def _take(self, size: int) -> int:
        """Advance by `size` bytes; returns where they begin."""
        at = self._at
        if size > len(self._data) - at:
            raise UserError(
                f"{self._path}: truncated: expected {size} bytes of the header at byte {at}, found a file of "
                f"{len(self._data)} bytes; {_AGAIN}"
            )
        self._at += size
        return at

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self._data, self._take(struct.calcsize(code)))[0]

    def _string(self, where: str) -> str:
        size = self._scalar("<Q")
        at = self._take(size)
        try:
            return self._data[at : at + size].decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self._path}: {where}: expected UTF-8 text, found other bytes; {_AGAIN}") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(show(key))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        item = self._scalar("<I") if kind == _ARRAY else kind
        if kind != _ARRAY or (item != _STRING and item not in _SCALARS):
            raise UserError(f"{self._path}: {show(key)}: expected a type of the GGUF format, found {item}; {_AGAIN}")
        count = self._scalar("<Q")
        if item == _STRING:
            return [self._string(show(key)) for _ in range(count)]
        dtype = np.dtype(_SCALARS[item])
        at = self._take(count * dtype.itemsize)
        return np.frombuffer(self._data[at : self._at], dtype).tolist()

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dims = self._scalar("<I")
        if num_dims > _MAX_DIMS:
            raise UserError(
                f"{self._path}: tensor {show(name)}: expected up to {_MAX_DIMS} dimensions, found {num_dims}; {_AGAIN}"
            )
        dims = [self._scalar("<Q") for _ in range(num_dims)]
        return name, self._scalar("<I"), tuple(reversed(dims)), self._scalar("<Q")  # the file has columns first

    def _entry(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorEntry:
        where, dtype = f"{self._path}: tensor {show(name)}", _TYPES.get(kind, f"type {kind}")
        if dtype not in BLOCKS:
            raise UserError(
                f"{where}: wrong type: expected {', '.join(BLOCKS)}, found {dtype}; give a file of another quantisation"
            )
        elements, size = BLOCKS[dtype]
        if not shape or 0 in shape or shape[-1] % elements:
            raise UserError(
                f"{where}: wrong shape: expected rows of whole blocks of {elements} ({dtype}), found {list(shape)}; "
                f"{_AGAIN}"
            )
        return TensorEntry(dtype, shape, start, start + math.prod(shape) // elements * size)

    def _check_layout(self, entries: dict[str, TensorEntry]) -> None:
        end, previous = 0, ""
        for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
            where = f"{self._path}: tensor {show(name)}"
            if entry.start < end:
                raise UserError(
                    f"{where}: expected its data from byte {end} on, found it at {entry.start}, where it overlaps "
                    f"{show(previous)}; {_AGAIN}"
                )
            if entry.stop > len(self._data):
                raise UserError(
                    f"{self._path}: truncated: tensor {show(name)} ends at byte {entry.stop}, found a file of "
                    f"{len(self._data)} bytes; {_AGAIN}"
                )
            end, previous = entry.stop, name
