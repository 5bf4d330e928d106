"""Output that cannot be written, and Ctrl-C: one line and an exit code in place of a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from alspec.errors import AlspecError, InterruptedJobError, UserError, print_error, report

__all__ = ["append_rows", "exit_code", "no_command", "write_text", "writing"]


class _Stream:
    """Standard output or error. Once it cannot be written, it takes what comes and drops it, for the run to go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False
        self.error: OSError | None = None  # why it was lost, if not because its reader went away (`| head`)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            action()
        except OSError as error:
            self._is_lost = True
            self.error = None if isinstance(error, BrokenPipeError) else error
            # What is still buffered goes there when the interpreter ends.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())


@contextlib.contextmanager
def _streams() -> Iterator[_Stream]:
    """Standard output and error while a command runs; closed ones (`>&-`) are opened, to nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    before = sys.stdout, sys.stderr
    stdout, stderr = map(_Stream, before)
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, stderr)
    try:
        yield stdout
    finally:
        stdout.flush()
        stderr.flush()
        sys.stdout, sys.stderr = before


def exit_code(work: Callable[[], int], is_debug: Callable[[], bool] = lambda: False) -> int:
    """Run a command's work; returns its exit code, after the one line of an error.

    Args:
        is_debug: asked after an error, whether to show its traceback as well.
    """
    with _streams() as stdout:
        try:
            code = work()
            stdout.flush()
            if code == 0 and stdout.error is not None:
                raise UserError(f"cannot write standard output: {stdout.error.strerror}")
        except AlspecError as error:
            if is_debug():
                traceback.print_exc()
            return report(error)
        except KeyboardInterrupt:
            stdout.flush()
            sys.stderr.write("\n" if sys.stderr.isatty() else "")  # the terminal shows ^C
            code = print_error(InterruptedJobError("interrupted"))
            if os.environ.get("WORLD_SIZE", "1") != "1":
                os._exit(code)  # without meeting the other ranks, who were interrupted, too
    return code


def no_command(file: str, instead: str) -> int:
    """What a file says that is started by itself, though it is a part of other commands; returns the exit code."""

    def refuse() -> int:
        raise UserError(f"launch/{Path(file).name} is not a command; use {instead}")

    return exit_code(refuse)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file.

    Raises:
        UserError: names the file, in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that was there; a device or pipe is written as it is.

    Raises:
        UserError: it cannot be written.
    """
    with writing(path):
        target = path.resolve()
        is_special = target.exists() and not target.is_file()
        if is_special or not os.access(target.parent, os.W_OK):
            target.write_text(text, encoding="utf-8")
            return
        partial = target.with_name(f".alspec-{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def append_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Append one JSON line for each row to a file, if there is one.

    Raises:
        UserError: it cannot be written.
    """
    if path is not None:
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
