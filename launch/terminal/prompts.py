"""Read prompts from a flag, a file or standard input. Rank 0 reads and encodes them for all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from alspec.config import GenerateConfig
from alspec.errors import UserError
from alspec.launch.terminal.flags import check_writable
from alspec.models.checkpoint.files import check_utf8, parse_json
from alspec.runtime.engine.engine import Engine

__all__ = ["read_prompts", "read_text_ids"]

_T = TypeVar("_T")


def read_prompts(config: GenerateConfig, engine: Engine) -> tuple[list[list[int]], bool]:
    """Token ids of every request, and whether they came from a batch file. Checks the output files first.

    Raises:
        UserError: no usable prompt, or an output file that cannot be written; raised on every rank.
    """

    def read() -> list[list[int]]:
        check_writable("json", config.json_file)
        check_writable("trace", config.trace)
        return [_encode(prompt, config, engine) for prompt in _read(config)]

    ids = _from_first_rank(engine, read)
    return ids, config.prompt_file is not None and _is_batch(config.prompt_file)


def read_text_ids(path: Path, engine: Engine) -> list[int]:
    """Token ids of a text file, after the beginning-of-text token if the tokenizer has one.

    Raises:
        UserError: an unreadable or empty file, or a model without a tokenizer; raised on every rank.
    """

    def read() -> list[int]:
        tokenizer = engine.text_tokenizer("leave it out, or use --model", "prompt_file")
        text = _read_file(path)
        if not text.strip():
            raise UserError(f"prompt_file: {path} is empty; give a text file")
        return tokenizer.encode(text)

    return _from_first_rank(engine, read)


def _from_first_rank(engine: Engine, read: Callable[[], _T]) -> _T:
    """Call `read` on rank 0 and return its result on every rank; raise its `UserError` on every rank too."""
    message: dict[str, Any] = {}
    if engine.placement.rank == 0:
        try:
            message = {"found": read()}
        except UserError as error:
            message = {"error": str(error)}
    message = json.loads(engine.agreement.broadcast(json.dumps(message)))
    if "error" in message:
        raise UserError(message["error"])
    found: _T = message["found"]
    return found


def _is_batch(path: Path) -> bool:
    return path.suffix.lower() == ".jsonl"


def _read(config: GenerateConfig) -> list[str | list[int]]:
    """Return one text, or one list of token ids, for each request."""
    if config.prompt_ids is not None:
        return [list(config.prompt_ids)]
    if config.prompt is not None:
        text = config.prompt
    elif config.prompt_file is not None:
        text = _read_file(config.prompt_file)
        if _is_batch(config.prompt_file):
            return _read_jsonl(text, config.prompt_file)
        text = _without_line_end(text)
        if not text.strip():
            raise UserError(f"prompt_file: {config.prompt_file} is empty; give a file with a text")
    else:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _without_line_end(_read_stdin())
        if not text.strip():
            raise UserError("prompt: none given; give --prompt, --prompt-file, --prompt-ids or text on standard input")
    if not text.strip():
        raise UserError("prompt: expected a text, found an empty one")  # given by --prompt
    return [text]


def _without_line_end(text: str) -> str:
    """Drop the line end that editors and `echo` add, so that the model continues the line."""
    return text.removesuffix("\n")


def _text_of(data: bytes) -> str:
    """Decode UTF-8, drop a byte order mark, and end every line in a line feed."""
    return _with_line_feeds(data.decode("utf-8-sig"))


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_stdin() -> str:
    """Standard input, always read as UTF-8 whatever the locale is."""
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:  # a text stream, as in a notebook
        return _with_line_feeds(sys.stdin.read())
    try:
        return _text_of(binary.read())
    except UnicodeDecodeError as error:
        raise UserError(f"prompt: standard input is not UTF-8 at byte {error.start}; give UTF-8 text") from None


def _read_file(path: Path) -> str:
    """The text of a file, without a byte order mark."""
    try:
        return _text_of(path.read_bytes())
    except OSError as error:
        raise UserError(f"prompt_file: cannot read {path}: {error.strerror}; give an existing text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_file: {path} is not UTF-8 at byte {error.start}; give a UTF-8 text file") from None


def _read_jsonl(text: str, path: Path) -> list[str | list[int]]:
    # Not `splitlines`: strings in JSON may contain U+2028 and other line ends.
    prompts = [_read_line(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise UserError(f"prompt_file: {path} holds no request; write one JSON object a line")
    return prompts


def _read_line(line: str, where: str) -> str | list[int]:
    expected = 'expected {"prompt": "..."} or {"prompt_ids": [1, 2, 3]}'
    try:
        value = parse_json(line)
    except ValueError as error:
        fault = f"not JSON ({getattr(error, 'msg', error)})"
        if "int_max_str_digits" in fault:  # Python refuses to parse such a long number
            fault = "an integer of that size is no token id"
        raise UserError(f"prompt_file: {where}: {fault}; {expected}") from None
    if isinstance(value, dict) and len(value) == 1:
        prompt = value.get("prompt", value.get("prompt_ids"))
        if "prompt" in value and isinstance(prompt, str) and prompt.strip():
            return check_utf8(prompt, f"prompt_file: {where}")
        if "prompt_ids" in value and isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            return prompt
    raise UserError(f"prompt_file: {where}: {expected}, found {line.strip()[:60]!r}")


def _encode(prompt: str | list[int], config: GenerateConfig, engine: Engine) -> list[int]:
    if isinstance(prompt, list):
        if config.chat:
            raise UserError("chat needs a text prompt: prompt_ids are used as they are")
        return prompt
    tokenizer = engine.text_tokenizer("use --prompt-ids or prompt_ids in a JSONL file")
    if not config.chat:
        return tokenizer.encode(prompt, max_total_tokens=engine.max_total_tokens)
    # Check here: the error can name the flag and the position in its text.
    messages = [{"role": "user", "content": check_utf8(prompt, "prompt")}]
    if config.system is not None:
        messages.insert(0, {"role": "system", "content": check_utf8(config.system, "--system")})
    return tokenizer.encode_chat(messages, max_total_tokens=engine.max_total_tokens)
