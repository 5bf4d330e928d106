"""Read prompts from a flag, a file or standard input. Rank 0 reads and encodes them for all ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from alspec.config import GenerateConfig, SamplingConfig, nearest_name
from alspec.errors import UserError, show
from alspec.launch.terminal.flags import check_writable
from alspec.launch.terminal.output import is_dash
from alspec.models.checkpoint.files import check_utf8, parse_json
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import check_ids

__all__ = ["GivenPrompts", "from_first_rank", "read_prompts", "read_text_ids"]

_T = TypeVar("_T")
_KINDS = ("prompt", "prompt_ids", "messages")  # keys of a line of a batch file: exactly one of them
_SYSTEM_ROLES = ("system", "developer")  # OpenAI's name for its newer models
# Keys of what is written for each request, whatever the flags: results of all runs then have the same keys.
_WRITTEN = ("request", "answer", "text", "finish_reason", "token_ids", "logprobs", "drafted")
_EXTRA = "extra"
# Names that set something in the requests of APIs, also OpenAI's and llama.cpp's, or on the command line.
_SETTINGS = {
    *SamplingConfig.model_fields, "answers", "chat", "max_completion_tokens", "max_tokens", "repeat_penalty", "system",
    "top_logprobs",
}  # fmt: skip
_CHAT_KEYS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")  # beside messages
_FLAGS = ("add_generation_prompt", "continue_final_message")  # keys of messages that are true or false
# What others pass beside the template's variables: keys of a line, or no variable at all.
_NO_VARIABLES = {"messages", "chat_template", "tokenize", *_CHAT_KEYS}
_VARIABLES = {"enable_thinking", "reasoning_effort"}  # variables that APIs also take as keys of a request
_EXPECTED = (
    'expected {"prompt": "..."}, {"prompt_ids": [1, 2, 3]} or {"messages": [{"role": "user", "content": "..."}]}'
)


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a command line."""

    ids: list[list[int]]  # token ids of each request
    extras: list[dict[str, Any]]  # of each request: what else its line of the batch file holds, such as an id
    is_batch: bool  # they come from a batch file
    notices: list[str] = field(default_factory=list)  # what a user may not expect


def read_prompts(config: GenerateConfig, engine: Engine) -> GivenPrompts:
    """Read the prompts of every request. Checks the output files first.

    Raises:
        UserError: no usable prompt, or an output file that cannot be written; raised on every rank.
    """

    def read() -> tuple[list[tuple[list[int], dict[str, Any]]], bool, list[str]]:
        check_writable("json", config.json_file)
        check_writable("trace", config.trace)
        prompts, is_batch = _read(config)
        return [(_encode(line, config, engine), line.extra) for line in prompts], is_batch, _notices(prompts, config)

    found, is_batch, notices = from_first_rank(engine, read)
    return GivenPrompts([ids for ids, _ in found], [extra for _, extra in found], is_batch, notices)


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

    return from_first_rank(engine, read)


def from_first_rank(engine: Engine, read: Callable[[], _T]) -> _T:
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


def _is_batch(path: Path, text: str) -> bool:
    """Whether a file holds a request in each line: by its name, or by the first line of standard input, without one."""
    return _begins_with_request(text) if is_dash(path) else path.suffix.lower() == ".jsonl"


def _begins_with_request(text: str) -> bool:
    first = next((line for line in text.split("\n") if line.strip()), "")
    try:
        value = parse_json(first)
    except ValueError:
        return False
    return isinstance(value, dict) and any(value.get(kind) is not None for kind in _KINDS)


@dataclass(frozen=True)
class _Prompt:
    """The prompt of one request, before it is encoded: a text, token ids, or the messages of a chat."""

    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    where: str = "prompt"
    chat: dict[str, Any] = field(default_factory=dict)  # arguments of `encode_chat` for the messages
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def has_system(self) -> bool:
        """Whether its messages say what the system message is."""
        return any(message["role"] in _SYSTEM_ROLES for message in self.messages or ())


def _notices(prompts: list[_Prompt], config: GenerateConfig) -> list[str]:
    own, found = sum(prompt.has_system for prompt in prompts), []
    if config.system is not None and own:
        found.append(f"--system: {own} of {len(prompts)} requests have a system message of their own, which they keep")
    text = prompts[0].text if prompts[0].where == "prompt" else None
    if text is not None and is_dash(config.prompt_file) and text.lstrip()[:1] in ("{", "["):
        found.append("--prompt-file: standard input is one text: its first line is no JSON object with a prompt")
    elif text is not None and config.prompt is None and _begins_with_request(text):
        advice = "--prompt-file - reads a request in each line"
        if config.prompt_file is not None:
            advice = "a file whose name ends in .jsonl has a request in each line"
        found.append(f"prompt: JSON, taken as one text; {advice}")
    given = {name for prompt in prompts for name in prompt.extra}
    for prompt in prompts:
        beside = prompt.extra.get(_EXTRA)
        given |= beside.keys() if isinstance(beside, dict) else set()
    if settings := sorted(_SETTINGS & given):
        found.append(f"--prompt-file: {', '.join(settings)} in its lines: settings are flags, for all requests")
    if variables := sorted(_VARIABLES & given):
        advice = f'"chat_template_kwargs": {{"{variables[0]}": ...}} beside messages'
        found.append(f"--prompt-file: {', '.join(variables)} in its lines: sets nothing; give {advice}")
    if others := sorted(given.intersection(_CHAT_KEYS)):
        found.append(f"--prompt-file: {', '.join(others)} in its lines: sets nothing without messages")
    return found


def _read(config: GenerateConfig) -> tuple[list[_Prompt], bool]:
    """The prompts, and whether they are a batch with one in each line."""
    if config.prompt_ids is not None:
        return [_Prompt(ids=list(config.prompt_ids))], False
    if config.prompt is not None:
        text = config.prompt
    elif config.prompt_file is not None:
        text = _read_stdin() if is_dash(config.prompt_file) else _read_file(config.prompt_file)
        if _is_batch(config.prompt_file, text):
            return _read_jsonl(text, "standard input" if is_dash(config.prompt_file) else str(config.prompt_file)), True
        text = _without_line_end(text)
        if not text:
            raise UserError(f"prompt_file: {config.prompt_file} is empty; give a file with a text")
    else:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _without_line_end(_read_stdin())
        if not text:
            raise UserError("prompt: none given; give --prompt, --prompt-file, --prompt-ids or text on standard input")
    if not text:
        raise UserError("prompt: expected a text, found an empty one")  # given by --prompt
    return [_Prompt(text)], False


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
        return "" if sys.stdin is None else _with_line_feeds(sys.stdin.read())
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


def _read_jsonl(text: str, path: str) -> list[_Prompt]:
    # Not `splitlines`: strings in JSON may contain U+2028 and other line ends.
    prompts = [_read_line(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise UserError(f"prompt_file: {path} holds no request; write one JSON object a line")
    return prompts


def _read_line(line: str, where: str) -> _Prompt:
    where = f"prompt_file: {where}"
    try:
        value = parse_json(line)
    except ValueError as error:
        fault = f"not JSON ({getattr(error, 'msg', error)})"
        if "int_max_str_digits" in fault:  # Python refuses to parse such a long number
            fault = "an integer of that size is no token id"
        raise UserError(f"{where}: {fault}; {_EXPECTED}") from None
    if isinstance(value, dict):  # tables with a column for each kind of prompt fill it with null
        value = {name: content for name, content in value.items() if name not in _KINDS or content is not None}
    kinds = [kind for kind in _KINDS if kind in value] if isinstance(value, dict) else []
    if len(kinds) != 1 or not _is_prompt(kinds[0], value[kinds[0]]):
        raise UserError(f"{where}: {_why_no_request(value, kinds)}{_EXPECTED}, found {line.strip()[:60]!r}")
    content = value.pop(kinds[0])
    if kinds == ["prompt"]:
        check_utf8(content, where)
    chat = _chat_arguments({name: value.pop(name, None) for name in _CHAT_KEYS}, where) if kinds == ["messages"] else {}
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except ValueError:
        raise UserError(
            f"{where}: other keys are written with the answer: NaN, Infinity and parts of surrogate pairs cannot be"
        ) from None
    fields = {"prompt": "text", "prompt_ids": "ids", "messages": "messages"}
    return _Prompt(**{fields[kinds[0]]: content}, where=where, chat=chat, extra=_beside_answer(value))


def _chat_arguments(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The arguments of `encode_chat` that the keys of a line with messages give; null: none."""
    given = {name: value for name, value in values.items() if value is not None}
    if not _are_dicts(given.get("tools", [])):
        raise UserError(f"{where}: tools: expected a list of JSON schemas, found {show(given['tools'])}")
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise UserError(f"{where}: {name}: expected true or false, found {show(given[name])}")
    variables = given.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise UserError(f"{where}: chat_template_kwargs: expected an object, found {show(variables)}")
    if wrong := sorted(_NO_VARIABLES & variables.keys()):
        beside = "is a key beside it" if wrong[0] in ("messages", *_CHAT_KEYS) else "is not one"
        raise UserError(f"{where}: chat_template_kwargs: expected variables of the template; {wrong[0]} {beside}")
    return given | {"variables": variables}


def _beside_answer(others: dict[str, Any]) -> dict[str, Any]:
    """The other keys of a line, as they are written with its answer: those that an answer has lie under `extra`."""
    taken = [name for name in others if name in _WRITTEN]
    if not taken:
        return others
    taken += [_EXTRA] if _EXTRA in others else []
    rest = {name: value for name, value in others.items() if name not in taken}
    return rest | {_EXTRA: {name: others[name] for name in taken}}


def _is_prompt(kind: str, content: Any) -> bool:
    if kind == "prompt":
        return isinstance(content, str) and content != ""
    if kind == "prompt_ids":
        return isinstance(content, list) and bool(content) and all(type(item) is int for item in content)
    return _are_dicts(content) and bool(content) and all(isinstance(item.get("role"), str) for item in content)


def _why_no_request(value: Any, kinds: list[str]) -> str:
    """What is wrong with a line that holds no request, as the beginning of an error."""
    if not isinstance(value, dict):
        return ""
    if len(kinds) > 1:
        return f"{' and '.join(kinds)} exclude each other; "
    if not kinds:
        near = next(filter(None, (nearest_name(name, _KINDS) for name in value)), None)
        return "" if near is None else f"no prompt, the nearest valid key is {near!r}; "
    if not value[kinds[0]]:
        return f"{kinds[0]} is empty; "
    return f"{kinds[0]} of another kind; "


def _are_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _encode(prompt: _Prompt, config: GenerateConfig, engine: Engine) -> list[int]:
    if prompt.ids is not None:
        where = "" if prompt.where == "prompt" else f"{prompt.where}: "
        if config.chat:
            raise UserError(f"{where}chat needs a text prompt: prompt_ids are used as they are")
        if where:
            check_ids(prompt.ids, prompt.where, engine.model_config)
        return prompt.ids
    tokenizer = engine.text_tokenizer("use --prompt-ids or prompt_ids in a JSONL file")
    limit = engine.max_total_tokens
    # Check here: the error can name the flag.
    system = [] if config.system is None else [{"role": "system", "content": check_utf8(config.system, "--system")}]
    if prompt.messages is not None:
        try:
            messages = prompt.messages if prompt.has_system else [*system, *prompt.messages]
            return tokenizer.encode_chat(messages, limit, **prompt.chat)
        except UserError as error:
            raise UserError(f"{prompt.where}: {error}") from None
    assert prompt.text is not None
    if not config.chat:
        return tokenizer.encode(prompt.text, max_total_tokens=limit, where=prompt.where)
    messages = [*system, {"role": "user", "content": check_utf8(prompt.text, prompt.where)}]
    return tokenizer.encode_chat(messages, max_total_tokens=limit)
