"""Output that cannot be written, and Ctrl-C: one line and an exit code in place of a traceback."""

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
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from alspec.errors import AlspecError, InterruptedJobError, UserError, print_error, report

__all__ = [
    "append_rows",
    "exit_code",
    "exit_on_interrupt",
    "is_special",
    "target_of",
    "write_text",
    "writing",
]


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

    def check(self) -> None:
        """Flush.

        Raises:
            UserError: something could not be written, be it now or before.
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
            if signal.getsignal(signal.SIGINT) is _on_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return _run_checked(work, stdout)
        except AlspecError as error:
            if is_debug():
                traceback.print_exc()
            return report(error)
        except KeyboardInterrupt:
            stdout.flush()
            code = _print_interrupted()
            if os.environ.get("WORLD_SIZE", "1") != "1":
                os._exit(code)  # without meeting the other ranks, who were interrupted, too
            return code


def _run_checked(work: Callable[[], int], stdout: _Stream) -> int:
    """Run the work; if it did well, what it printed must have been written."""
    try:
        code = work()
    except SystemExit as ended:  # --help
        if not ended.code:
            stdout.check()
        raise
    if code == 0:
        stdout.check()
    return code


def exit_on_interrupt() -> None:
    """Until `exit_code` takes over, Ctrl-C prints its line and ends the process: for scripts, before slow imports."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    with _streams():
        os._exit(_print_interrupted())


def _print_interrupted() -> int:
    sys.stderr.write("\n" if sys.stderr.isatty() else "")  # the terminal shows ^C
    return print_error(InterruptedJobError("interrupted"))


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


def _stream_at(path: Path) -> TextIO | None:
    """Standard output or error, if that is where the path leads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no such file; no descriptor, or a closed one
            if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                return stream
    return None


def _is_open_already(path: Path) -> bool:
    """By its name, such as /dev/stdout or /dev/fd/3."""
    return os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))


def is_special(path: Path) -> bool:
    """Whether this is no file to replace: a device, a pipe, or what is open already, such as standard output."""
    if os.path.exists(path) and not os.path.isfile(path):
        return True
    return _is_open_already(path) or _stream_at(path) is not None


def _append(path: Path, text: str) -> None:
    """Write after what is there. What else is printed to the same file must go on behind it: so it is printed, too."""
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
    """A named pipe, open until the process ends: its reader leaves when nobody has it open any more."""
    return os.open(path, os.O_WRONLY)


def target_of(path: Path) -> Path:
    """Where links lead.

    Raises:
        OSError: to each other. (`Path.resolve` raises another error in Python 3.11.)
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that was there; to what is special, append.

    Raises:
        UserError: it cannot be written.
    """
    with writing(path):
        if is_special(path):
            _append(path, text)
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
    """Append one JSON line for each row to a file, if there is one.

    Raises:
        UserError: it cannot be written.
    """
    if path is not None:
        with writing(path):
            _append(path, "".join(json.dumps(row) + "\n" for row in rows))
