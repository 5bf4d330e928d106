"""A conversation: its messages, and the commands that a user can give between them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show
from alspec.launch.terminal.output import write_text
from alspec.models.checkpoint.files import check_utf8

__all__ = ["HELP", "Conversation"]

HELP = """\
/reset         begin a new conversation; the system message stays
/system TEXT   replace the system message; without TEXT, remove it
/save FILE     write the messages to FILE, which --prompt-file of generate.py reads if it ends in .jsonl
/help          show this
/exit, /quit   leave
Ctrl-C stops an answer; a second Ctrl-C, or Ctrl-D, leaves."""

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_ALONE = ("exit", "help", "quit", "reset")  # commands that nothing follows


class Conversation:
    """Messages so far. A text is either a command, which `obey` carries out, or what the user says."""

    def __init__(self, system: str | None, render: Callable[[list[dict[str, Any]]], object] = list) -> None:
        """render: writes messages as the chat template does.

        Raises:
            UserError: a system message that is no text, or that the template refuses.
        """
        self._render = render
        self._system = None if system is None else self._checked(system, "--system")
        self._turns: list[dict[str, Any]] = []
        self.has_ended = False  # by a command

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, as chat templates take them."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._turns]

    @property
    def has_turns(self) -> bool:
        """Whether a message of the user was answered."""
        return bool(self._turns)

    def with_user(self, text: str) -> list[dict[str, Any]]:
        """The messages, and a next one of the user."""
        return [*self.messages, {"role": "user", "content": text}]

    def add(self, user: str, assistant: str) -> None:
        """Add a message of the user and its answer."""
        self._turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def _checked(self, system: str, where: str) -> str:
        """Return a system message, if the chat template takes one."""
        check_utf8(system, where)
        user = {"role": "user", "content": "hi"}
        try:
            self._render([{"role": "system", "content": system}, user])
        except UserError:
            self._render([user])  # raises if the fault is another one
            raise UserError(f"{where}: the model's chat template takes no system message; leave it out") from None
        return system

    def obey(self, text: str) -> str | None:
        """Carry out a command, in capital or small letters.

        Returns:
            What to tell the user, '' if there is nothing to tell; None: the text is no command.
        Raises:
            UserError: an unknown command, or one that cannot be carried out.
        """
        command = _COMMAND.fullmatch(text)
        if command is None:
            return None
        name, rest = command[1].lower(), (command[2] or "").strip()
        if name in _ALONE and rest:
            raise UserError(f"/{name}: expected nothing after it, found {show(rest)}")
        if name == "help":
            return HELP
        if name in ("exit", "quit"):
            self.has_ended = True
            return ""
        if name == "reset":
            self._turns = []
            return "a new conversation"
        if name == "system":
            self._system = self._checked(rest, "/system") if rest else None
            return "the system message is replaced" if rest else "the system message is removed"
        if name == "save":
            if not rest:
                raise UserError("/save: expected a file: /save FILE")
            if not self._turns:
                raise UserError("/save: there are no messages yet")
            if "\0" in rest:
                raise UserError(f"/save: expected a file, found {show(rest)}")
            write_text(
                Path(os.path.expanduser(rest)), json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
            )
            return f"{len(self.messages)} messages written to {rest}"
        raise UserError(f"/{command[1]} is no command; /help lists them (a message may begin with a space)")
