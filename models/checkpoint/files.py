"""Small files of a model folder: JSON read as untrusted data, and each fault described in one line."""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show

__all__ = ["absent", "check_utf8", "foreign_content", "is_there", "parse_json", "parse_json_object", "read_json"]

_HEAD_BYTES = 512


def check_utf8(text: str, where: str) -> str:
    """Return `text` if it can be encoded as UTF-8.

    Args:
        text: the text to check.
        where: its origin, for the message.
    Raises:
        UserError: `text` has half of a surrogate pair. JSON can spell one, and Python uses it for bytes that are not
            UTF-8.
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
    """Return whether the path exists. A broken symbolic link counts, so that it is reported instead of ignored."""
    return os.path.lexists(path)


def absent(path: Path) -> str:
    """Return, as text, what is found in place of a missing file: a broken symbolic link, or 'none'."""
    if path.is_symlink() and not path.exists():
        return f"a broken symbolic link ({show(os.readlink(path))})"
    return "none"


def foreign_content(head: bytes) -> str | None:
    """Kind of a file whose first bytes do not match its name, with the remedy; else None."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer; fetch the content with `git lfs pull`"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page; download the file again, logged in if the site requires it"
    if head.startswith(b"GGUF"):
        return "a GGUF file; give its path as the model, or use the model's safetensors files"
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
    """Parse JSON; refuse a key that appears twice in an object.

    Raises:
        ValueError: one line that names the fault; also for nesting that is too deep and numbers that are too long.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_json_object(data: bytes) -> dict[str, Any]:
    """`parse_json` for UTF-8 data that must be an object.

    Raises:
        ValueError: one line that names the fault.
    """
    value = parse_json(data.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {show(value)}")
    return value


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """Read a JSON object, with or without a byte order mark.

    `purpose` completes the message "the model folder needs it ..." for a missing file.

    Raises:
        UserError: missing or unreadable file, a Git-LFS pointer, an HTML page, or not a JSON object.
    """
    try:
        if not path.is_file():  # raises OSError if the folder may not be entered
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
        return parse_json_object(data.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise UserError(f"{path}: expected JSON, found {show(str(error))}; download the file again") from None
