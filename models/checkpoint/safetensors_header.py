"""Read the header of a safetensors file and check it against the file before anything is mapped."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import absent, foreign_content, parse_json_object

__all__ = ["ALL_DTYPES", "FLOAT_DTYPES", "ExpectedTensor", "TensorEntry", "read_header"]

_ITEMSIZE_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "BOOL": 1, "F8_E5M2": 1,
    "F8_E8M0": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8, "F64": 8,
}  # fmt: skip
FLOAT_DTYPES = ("F32", "F16", "BF16")  # of weights that are not quantised
ALL_DTYPES = tuple(_ITEMSIZE_BYTES)
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_AGAIN = "download the file again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: stored dtype such as 'F32' or 'BF16', shape, and bytes [start, stop) of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.stop - self.start


@dataclass(frozen=True)
class ExpectedTensor:
    """What a model's file must hold under a name: one of some shapes, in one of some dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    is_optional: bool = False


def read_header(path: Path, dtypes: Collection[str] = FLOAT_DTYPES) -> dict[str, TensorEntry]:
    """Read the header of a safetensors file and check that the file has exactly the layout that it describes.

    The file is: header length N (8 bytes, little endian), N bytes of JSON, then the data. Each JSON entry maps a
    tensor's name to `dtype`, `shape` and `data_offsets`. The tensors cover the data without a hole or an overlap.
    Source: the safetensors format description.

    Args:
        dtypes: those that a tensor may have.
    Returns:
        Entries by tensor name.
    Raises:
        UserError: no such file, truncated, padded, a Git-LFS pointer, an HTML page, an invalid header, overlapping or
            out-of-range offsets, another dtype; names the file and the tensor.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected a safetensors file, found {absent(path)}; download the missing file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(512)
            header_bytes = _header_bytes(path, head, size)
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None
    try:
        header = parse_json_object(raw)
    except ValueError as error:
        raise UserError(f"{path}: expected a JSON header, found {show(str(error))}; {_AGAIN}") from None
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, dtypes) for name, value in header.items()}
    _check_layout(path, entries, size - 8 - header_bytes)
    return entries


def _header_bytes(path: Path, head: bytes, size: int) -> int:
    """Length of the header, after a check that this is a safetensors file with a complete header."""
    foreign = foreign_content(head)
    if foreign is not None:
        raise UserError(f"{path}: expected a safetensors file, found {foreign}")
    if size < 8:
        raise UserError(f"{path}: truncated: expected a header, found a file of {size} bytes; {_AGAIN}")
    length = int.from_bytes(head[:8], "little")
    # The JSON starts with a brace; if it is missing, this is no safetensors file and the length is random bytes.
    if not 2 <= length <= _MAX_HEADER_BYTES or head[8:9] not in (b"{", b""):
        raise UserError(
            f"{path}: expected a safetensors header, found {show(head[:16])} (header of {length} bytes); {_AGAIN}"
        )
    if 8 + length > size:
        raise UserError(
            f"{path}: truncated: expected a header of {length} bytes, found a file of {size} bytes; {_AGAIN}"
        )
    return length


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(path: Path, name: str, value: Any, dtypes: Collection[str]) -> TensorEntry:
    where = f"{path}: tensor {show(name)}"
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not all(map(_is_size, shape))
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_size, offsets))
    ):
        raise UserError(f"{where}: expected dtype, shape and data_offsets, found {show(value)}; {_AGAIN}")
    if dtype not in dtypes:
        raise UserError(
            f"{where}: wrong dtype: expected {', '.join(dtypes)}, found {show(dtype)}; "
            "give unquantised weights in 16 or 32 bits, or the config.json that says how these are quantised"
        )
    expected = math.prod(shape) * _ITEMSIZE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise UserError(
            f"{where}: expected data_offsets {expected} bytes apart (shape {show(shape)}, {dtype}), "
            f"found {show(offsets)}; {_AGAIN}"
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    """Check that the tensors cover bytes [0, data_bytes) in some order, each byte once."""
    covered, previous = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != covered:
            fault = "overlaps" if entry.start < covered else "leaves a hole after"
            raise UserError(
                f"{path}: tensor {show(name)}: expected its data at byte {covered}, found it at {entry.start}, "
                f"where it {fault} {previous}; {_AGAIN}"
            )
        covered, previous = entry.stop, f"tensor {show(name)}"
    if covered > data_bytes:
        name = next(name for name, entry in entries.items() if entry.stop > data_bytes)
        raise UserError(
            f"{path}: truncated: tensor {show(name)} ends at byte {entries[name].stop}: expected {covered} "
            f"bytes of data, found {data_bytes}; {_AGAIN}"
        )
    if covered < data_bytes:
        raise UserError(
            f"{path}: padded: expected {covered} bytes of data, found {data_bytes - covered} bytes more; {_AGAIN}"
        )
