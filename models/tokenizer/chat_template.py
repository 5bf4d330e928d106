"""A checkpoint's chat template, rendered as untrusted input in jinja2's sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import absent, foreign_content, is_there

__all__ = ["TOOLS_NAME", "find_template", "render_chat", "with_continued_end", "with_text_contents"]

_TEMPLATE_FILE = "chat_template.jinja"
_TOOLS_FILE = "additional_chat_templates/tool_use.jinja"
_TOOL_ROLES = ("tool", "ipython")  # of messages with what a tool returned; the second one is Llama 3's
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the content of the last message ends
TOOLS_NAME = "tool_use"  # of the named template that is used with tools, if there is one


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Fail at once; jinja2 would print an unsafe attribute as empty text and fail only at its next use."""
        raise SecurityError(f"access to attribute {show(attribute)} of {type(obj).__name__} is unsafe")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; in a prompt its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        # A call block, as in transformers, so that names set in the body stay local to it.
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def find_template(folder: Path, tokenizer_config: dict[str, Any], has_tools: bool = False) -> str | None:
    """The chat template of a Hugging Face folder, or None if it has none.

    chat_template.jinja takes precedence over `chat_template` of tokenizer_config.json. The latter is a string, or a
    list of named templates, of which the one named `default` is used. With tools, a template named `tool_use` comes
    first, if there is one: in that list, or in the file additional_chat_templates/tool_use.jinja.

    Raises:
        UserError: an unreadable file, a list without a default, or another type.
    """
    path = folder / _TEMPLATE_FILE
    if is_there(path):
        if has_tools and is_there(folder / _TOOLS_FILE):
            path = folder / _TOOLS_FILE
        try:
            data = path.read_bytes()
            text = data.decode("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{path}: expected UTF-8 text, found {absent(path)}; download the file again") from None
        foreign = foreign_content(data)
        if foreign is not None:
            raise UserError(f"{path}: expected a chat template, found {foreign}")
        return text
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        name = TOOLS_NAME if has_tools and TOOLS_NAME in named else "default"
        if name not in named:
            raise UserError(
                f"{folder / 'tokenizer_config.json'}: chat_template: expected a template named 'default', "
                f"found {show(list(named))}; give this name to the template to use"
            )
        template = named[name]
    if not isinstance(template, str | None):
        raise UserError(
            f"{folder / 'tokenizer_config.json'}: chat_template: expected a text or a list of named templates, "
            f"found {show(template)}; correct it"
        )
    return template


def with_text_contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are texts: the text parts of a list, as in OpenAI's API, are joined by a line feed.

    Templates of text models expect a text. vLLM joins parts in the same way. That of an assistant may be null, and is
    left out where a message calls tools or has a reasoning. What a tool returned may be any JSON, which its template
    writes. As in transformers, keys with null are dropped, and templates find a reasoning under each of its names.

    Raises:
        UserError: what is no message, or a content or a part that is no text.
    """
    texts = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UserError(f'messages[{index}]: expected {{"role": "user", "content": "..."}}, found {show(message)}')
        is_null = "content" in message and message.get("role") == "assistant"
        may_lack_content = is_null or any(message.get(name) for name in ("tool_calls", *_REASONING))
        message = _with_reasoning({name: value for name, value in message.items() if value is not None})
        content = message.get("content")
        if message.get("role") in _TOOL_ROLES and isinstance(content, dict | list) and not _are_texts(content):
            texts.append(message)
        elif isinstance(content, list):
            texts.append(message | {"content": "\n".join(_text_of(part, index) for part in content)})
        elif isinstance(content, str) or (content is None and may_lack_content):
            texts.append(message)
        else:
            found = "none" if content is None else show(content)
            raise UserError(f"messages[{index}]: content: expected a text or a list of text parts, found {found}")
    return texts


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning is also under the names that templates read, as transformers renames it."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def with_continued_end(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """The text of `messages` up to the end of the last content, which the model then continues, as in transformers.

    Args:
        render: writes messages, as `render_chat` does.
        messages: as `with_text_contents` returns them.
    Raises:
        UserError: the last message has no text, or the template does not write it.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        found = "none" if content is None else show(content)
        raise UserError(f"continue_final_message: expected a last message with a text as its content, found {found}")
    text = render([*messages[:-1], messages[-1] | {"content": content + _END}])
    end = text.rfind(_END.strip())
    if end < 0 or content.strip() not in text:
        raise UserError("continue_final_message: the chat template does not write the last message unchanged")
    # A template that trims contents also trimmed the space behind the mark.
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content)


def _text_of(part: Any, index: int) -> str:
    """The text of one part of the content of message `index`."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type", part) if isinstance(part, dict) else part
    raise UserError(
        f'messages[{index}]: content: expected parts {{"type": "text", "text": "..."}}, found '
        f"{'a text part without a text' if kind == 'text' else show(kind)}; the model reads text alone"
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML; models are not trained on such text.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    where: str,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render `messages`, with the conventions of Hugging Face templates.

    The template can use `messages`, `add_generation_prompt`, `tools`, `documents` and `variables` (such as
    `bos_token`), the functions `raise_exception` and `strftime_now`, a `tojson` that escapes nothing, and the
    block `{% generation %}`.

    Raises:
        UserError: the template is broken, calls `raise_exception`, does what the sandbox forbids, or renders a blank
            text.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    variables = {"documents": None} | variables
    variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
    try:
        text = environment.from_string(template).render(variables)
    except SecurityError as error:
        raise UserError(
            f"{where}: chat template: refused by the sandbox: {show(str(error))}; do not trust it"
        ) from None
    except Exception as error:  # a template is untrusted code and may raise anything
        raise UserError(
            f"{where}: chat template: expected a prompt, found {type(error).__name__} {show(str(error), 200)}; "
            "check the messages and the template"
        ) from None
    if not text.strip():
        raise UserError(
            f"{where}: chat template: expected a prompt, found a blank text ({show(text)}); check the messages and the "
            "template"
        )
    return text
