"""A user's lines and Ctrl-C, on a terminal or through a pipe.

With one rank, Ctrl-C is a signal. torchrun ends the job at that signal. So with several ranks on a terminal, rank 0
turns the signal off, and reads the key itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from alspec.errors import UserError

__all__ = ["UserInput"]

PROMPT = "> "
CTRL_C = b"\x03"
_PRESSED = "/ctrl-c"  # what readline returns where Ctrl-C is a key


class UserInput:
    """Lines of standard input. Use it in a `with` block, which restores handlers and terminal.

    Through a pipe, Ctrl-C has its usual effect, and `stops` is always False.

    Args:
        is_alone: this process is the only rank.
    """

    def __init__(self, is_alone: bool) -> None:
        self.is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._edits = self.is_terminal and sys.stdout.isatty()  # readline writes its prompt to standard output
        self._takes_signal = self.is_terminal and is_alone
        self._takes_key = self.is_terminal and not is_alone
        self.presses = 0  # of Ctrl-C since the last line
        self._raises = False  # at the signal, instead of counting it alone
        self._is_reading = False
        self._before: Any = None
        self._settings: list[Any] = []
        self._num_lines = 0  # so far

    def __enter__(self) -> UserInput:
        if self.is_terminal and self._edits:
            with contextlib.suppress(ImportError):
                import readline

                if self._takes_key:
                    readline.parse_and_bind(rf'"\C-c": "\C-e{_PRESSED}\C-m"')
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text become surrogates: see `read`
            sys.stdin.reconfigure(errors="surrogateescape")
            if not self.is_terminal:
                sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline=None)  # CR LF, too
        if self._takes_signal and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        if self._takes_key:
            import termios

            self._settings = termios.tcgetattr(sys.stdin)
            self._set_terminal(reads_keys=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        self.restore_terminal()

    def restore_terminal(self) -> None:
        """Give the terminal its settings back; also before a process ends without leaving the `with` block."""
        if self._settings:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    def _set_terminal(self, reads_keys: bool) -> None:
        """Turn the signal of Ctrl-C off. With `reads_keys`, single keys can be read, and are not shown."""
        import termios

        settings: list[Any] = [list(part) if isinstance(part, list) else part for part in self._settings]
        settings[6][termios.VINTR] = b"\0"
        if reads_keys:
            settings[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._press(is_line_empty=not self._is_reading or not _line_so_far())
        if self._raises or self.presses > 1:
            raise KeyboardInterrupt

    def _press(self, is_line_empty: bool) -> None:
        """Count a press of Ctrl-C. One that drops a line is a first one."""
        self.presses = self.presses + 1 if is_line_empty else 1

    def read(self) -> str | None:
        """The next line that is not blank, without its line end; None: the user leaves.

        Raises:
            UserError: the line is not UTF-8; the next call reads on behind it.
        """
        while True:
            try:
                self._raises = self._is_reading = True
                line = self._read_line()
            except (EOFError, KeyboardInterrupt) as end:
                if isinstance(end, EOFError) or self.presses > 1:
                    self._end_line()
                    return None
                print("\n(Ctrl-C again or Ctrl-D leaves)", file=sys.stderr)
                continue
            finally:
                self._raises = self._is_reading = False
            self._num_lines += 1
            if line.strip():
                self.presses = 0
                self._check_utf8(line)
                return line

    def _check_utf8(self, line: str) -> None:
        try:
            line.encode("utf-8")
        except UnicodeEncodeError as error:
            place = len(line[: error.start].encode("utf-8"))
            where = "the line" if self.is_terminal else f"line {self._num_lines} of standard input"
            raise UserError(f"{where} is not UTF-8 at byte {place} and is left out; give UTF-8 text") from None

    def _read_line(self) -> str:
        if self._edits:
            line = input(PROMPT)
            if self._takes_key and _PRESSED in line:
                self._forget_line()
                self._press(is_line_empty=line == _PRESSED)
                raise KeyboardInterrupt
            return line
        if self.is_terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = "" if sys.stdin is None else sys.stdin.readline()
        if self._takes_key and CTRL_C.decode() in line:
            self._press(is_line_empty=line.strip() == CTRL_C.decode())
            raise KeyboardInterrupt
        if not line:
            raise EOFError
        if self._num_lines == 0:
            line = line.removeprefix("\ufeff")
        return line.removesuffix("\n")

    def _forget_line(self) -> None:
        with contextlib.suppress(ImportError, ValueError):
            import readline

            readline.remove_history_item(readline.get_current_history_length() - 1)

    def _end_line(self) -> None:
        if self.is_terminal:
            print(file=sys.stderr)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Context in which Ctrl-C stops an answer: see `stops`. A second one raises KeyboardInterrupt."""
        if self._takes_key:
            self._set_terminal(reads_keys=True)
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
            if self._takes_key:
                self._set_terminal(reads_keys=False)

    def has_first_token(self) -> None:
        """From now on `stops` is called often. Before, a signal raises KeyboardInterrupt at once."""
        self._raises = False

    def stops(self) -> bool:
        """Whether the user has pressed Ctrl-C in this answer."""
        while self._takes_key and select.select([sys.stdin], [], [], 0)[0]:
            keys = os.read(sys.stdin.fileno(), 1024)
            if not keys:
                break
            self.presses += keys.count(CTRL_C)
        if self.presses > 1:
            raise KeyboardInterrupt
        return self.presses > 0


def _line_so_far() -> str:
    """What the user has typed into the line that readline edits."""
    with contextlib.suppress(ImportError):
        import readline

        return readline.get_line_buffer()
    return ""
