"""Small files of a model folder: JSON read as data, and faults described in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show

__all__ = ["absent", "check_utf8", "foreign_content", "is_there", "parse_json", "parse_json_object", "read_json"]

_HEAD_BYTES = 512


def check_utf8(text: str, where: str) -> str:
    """The text itself.

    Raises:
        UserError: it holds half of a surrogate pair, which JSON can spell, and which stands for bytes that are not
            UTF-8; `where` it came from.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = show(text[error.start : error.end])
        raise UserError(
            f"{where}: expected UTF-8 text, found {found} at character {error.start}; convert it to UTF-8"
        ) from None
    return text


def is_there(path: Path) -> bool:
    """Whether a folder has an entry of this name, be it a link that leads nowhere, which is not to be passed over."""
    return os.path.lexists(path)


def absent(path: Path) -> str:
    """What is found where a file is missing: none, or a link that leads nowhere, as in a cache that has lost files."""
    if path.is_symlink() and not path.exists():
        return f"a link that leads nowhere ({show(os.readlink(path))})"
    return "none"


def foreign_content(head: bytes) -> str | None:
    """What the first bytes of a file are when they are not what the file's name says, with the remedy; else None."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer; fetch the content with `git lfs pull`"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page; download the file again, signed in where the site asks for it"
    if head.startswith(b"GGUF"):
        return "a GGUF file; use the model's safetensors files"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (a PyTorch pickle); use the model's safetensors files"
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {show(next(name for name in names if names.count(name) > 1))}")
    return result


def parse_json(text: str) -> Any:
    """Parse JSON in which no key of an object stands twice.

    Raises:
        ValueError: one line that says what is wrong; also for nesting too deep, and numbers too long, to parse.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """`parse_json` of UTF-8 that must be an object.

    Raises:
        ValueError: one line that says what is wrong.
    """
    value = parse_json(data.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {show(value)}")
    return value


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """Read a JSON object; `purpose` completes "the folder needs it ..." when the file is missing.

    Raises:
        UserError: missing or unreadable file, a Git-LFS pointer, an HTML page, or not a JSON object.
    """
    try:
        if not path.is_file():  # raises in a folder that may not be entered
            found = absent(path)
            advice = f"the model folder needs it {purpose}" if found == "none" else "download the file again"
            raise UserError(f"{path}: expected a file, found {found}; {advice}")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None
    foreign = foreign_content(data[:_HEAD_BYTES])
    if foreign is not None:
        raise UserError(f"{path}: expected JSON, found {foreign}")
    try:
        return parse_json_object(data)
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found {show(str(error))}; download the file again") from None
