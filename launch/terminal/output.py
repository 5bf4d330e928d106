"""Files and standard output; errors and Ctrl-C end as one line and an exit code instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from alspec.errors import AlspecError, InterruptedJobError, UserError, print_error, report

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Finished",
    "Outcome",
    "append_rows",
    "exit_code",
    "exit_on_interrupt",
    "has_reader",
    "is_special",
    "is_dash",
    "result_console",
    "target_of",
    "write_text",
    "writing",
]


class _Stream:
    """Standard output or error. After a failed write it drops all further text, so that the run continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False
        self.error: OSError | None = None  # why writing failed; None if the reader closed the pipe (`| head`)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    @property
    def has_reader(self) -> bool:
        """Whether somebody may read what is written: False once the reader has closed the pipe."""
        return not self._is_lost or self.error is not None

    def check(self) -> None:
        """Flush.

        Raises:
            UserError: some text could not be written, now or earlier.
        """
        self.flush()
        if self.error is not None:
            raise UserError(f"cannot write standard output: {self.error.strerror}")

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_lost:
            return
        try:
            action()
        except OSError as error:
            self._is_lost = True
            self.error = None if isinstance(error, BrokenPipeError) else error
            # The interpreter flushes the rest of the buffer at its end: send that to /dev/null.
            with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())


def has_reader() -> bool:
    """Whether somebody may read standard output: False once the reader of a pipe has gone (`| head`)."""
    return not isinstance(sys.stdout, _Stream) or sys.stdout.has_reader


@contextlib.contextmanager
def _streams() -> Iterator[_Stream]:
    """Replace standard output and error while a command runs. Closed ones (`>&-`) write to /dev/null."""
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


class Finished(Exception):  # noqa: N818 (not an error)
    """Ends a command early, with exit code 0."""


@dataclass
class Outcome:
    """How a command ended."""

    is_debug: bool  # whether the traceback of an error is printed
    code: int = 0  # a command may set another one
    on_error: Callable[[Exception], None] = lambda error: None  # called after the error is printed


@contextlib.contextmanager
def exit_code(argv: list[str] | None) -> Iterator[Outcome]:
    """Run a command's work inside; read `code` of the outcome afterwards. An error is printed as one line.

    Args:
        argv: arguments of the command line; None: those of this process.
    """
    outcome = Outcome("--debug" in (sys.argv[1:] if argv is None else argv))
    with _streams() as stdout:
        try:
            if signal.getsignal(signal.SIGINT) is _on_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                yield outcome
            except Finished:
                outcome.code = 0
            except SystemExit as ended:  # --help
                if not ended.code:
                    stdout.check()
                raise
            if outcome.code == 0:
                stdout.check()  # all output must have been written
        except AlspecError as error:
            if outcome.is_debug:
                traceback.print_exc()
            outcome.code = report(error)
            outcome.on_error(error)
        except KeyboardInterrupt:
            stdout.flush()
            outcome.code = _print_interrupted()
            if os.environ.get("WORLD_SIZE", "1") != "1":
                os._exit(outcome.code)  # do not wait for the other ranks: they were interrupted too


def exit_on_interrupt() -> None:
    """Until `exit_code` runs, Ctrl-C prints one line and ends the process. Scripts call it before slow imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller ignores it
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    with _streams():
        os._exit(_print_interrupted())


def _print_interrupted() -> int:
    sys.stderr.write("\n" if sys.stderr.isatty() else "")  # end the line in which the terminal shows ^C
    return print_error(InterruptedJobError("interrupted"))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` while a file is written into a `UserError`.

    Raises:
        UserError: names the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def is_dash(path: Path | None) -> bool:
    """Return whether the path is `-`: standard output, or standard input."""
    return path == Path("-")


def result_console(*files: Path | None, **options: Any) -> Console:
    """The console for tables: standard error if a file of the command is `-`, which takes all of standard output."""
    from rich.console import Console  # here, because scripts import this module before slow ones

    return Console(stderr=any(map(is_dash, files)), **options)


def _stream_at(path: Path) -> TextIO | None:
    """Standard output or error, if the path leads to one of them."""
    if is_dash(path):
        return sys.stdout
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no such file; no descriptor, or a closed one
            if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                return stream
    return None


def _is_open_already(path: Path) -> bool:
    """Return whether the path names an open file, such as /dev/stdout or /dev/fd/3."""
    return os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))


def is_special(path: Path) -> bool:
    """Return whether the path cannot be replaced: a device, a pipe, or an open file such as standard output."""
    if not is_dash(path) and os.path.exists(path) and not os.path.isfile(path):
        return True
    return _is_open_already(path) or _stream_at(path) is not None


def _append(path: Path, text: str) -> None:
    """Append to a file. If it is standard output or error, print: otherwise later output would overwrite the text."""
    stream = _stream_at(path)
    if stream is not None:
        stream.write(text)
        stream.flush()
        return
    is_named_pipe = path.is_fifo() and not _is_open_already(path)
    with open(os.dup(_pipe_at(path)) if is_named_pipe else path, "a", encoding="utf-8") as file:
        file.write(text)


@functools.cache
def _pipe_at(path: Path) -> int:
    """Open a named pipe and keep it open until the process ends: its reader stops when the last writer closes it."""
    return os.open(path, os.O_WRONLY)


def target_of(path: Path) -> Path:
    """The file that symbolic links lead to.

    Raises:
        OSError: a loop of links. (`Path.resolve` raises another error in Python 3.11.)
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def write_text(path: Path, text: str) -> None:
    """Write a whole file, or leave the old one as it was. Append to special files (see `is_special`).

    Raises:
        UserError: it cannot be written.
    """
    with writing(path):
        if is_special(path):
            _append(path, f"{text}\n" if is_dash(path) else text)
            return
        target = target_of(path)
        if not os.access(target.parent, os.W_OK):
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
    """Append one JSON line for each row to the file, if a path is given.

    Raises:
        UserError: it cannot be written.
    """
    if path is not None:
        with writing(path):
            _append(path, "".join(json.dumps(row) + "\n" for row in rows))
