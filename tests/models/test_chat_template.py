from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from paths import SHARED

from alspec.errors import UserError
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.chat_template import find_template, render_chat, with_text_contents
from alspec.models.tokenizer.tokenizer import Tokenizer

PUBLISHED = SHARED / "hf"
LLAMA_3_1 = "meta-llama-Llama-3.1-8B-Instruct.jinja"
LLAMA_3_2 = "meta-llama-Llama-3.2-3B-Instruct.jinja"

TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
TWO_TURNS = [
    {"role": "system", "content": "You are a helpful assistant\n"},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": " And of <Peru> & Chile? "},
]
USER_ONLY = [{"role": "user", "content": "Hi"}]

# The prompt format of Meta's model card for Llama 3.1 and 3.2.
EXPECTED = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\n"
    "Today Date: {date}\n\n"
    "You are a helpful assistant<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n"
    "What is the capital of France?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    "The capital of France is Paris.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n"
    "And of <Peru> & Chile?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


class FixedClock:
    @staticmethod
    def now() -> datetime:
        return datetime(2025, 3, 9, 12, 0, 0)


def render(template: str, messages: list[dict[str, Any]] = USER_ONLY) -> str:
    return render_chat(template, messages, TOKENS, "model")


def published(name: str) -> str:
    path = PUBLISHED / "templates" / name
    if not path.exists():
        pytest.skip(f"needs the published template {path}")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "date"), [(LLAMA_3_1, "26 Jul 2024"), (LLAMA_3_2, "09 Mar 2025")])
def test_published_prompt(name: str, date: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alspec.models.tokenizer.chat_template.datetime", FixedClock)
    assert render(published(name), TWO_TURNS) == EXPECTED.format(date=date)


def test_published_prompt_in_tokens(tmp_path: Path) -> None:
    """The ids of the published format, with one BOS although both the template and the tokenizer add it."""
    template = published(LLAMA_3_1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(PUBLISHED / "llama3" / name)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path, LlamaConfig.from_shape("llama-3.1-8b"))
    ids = tokenizer.encode_chat(TWO_TURNS)
    assert ids.count(128000) == 1
    # <|begin_of_text|> <|start_header_id|> system <|end_header_id|> \n\n
    assert ids[:5] == [128000, 128006, 9125, 128007, 271]
    # <|eot_id|> <|start_header_id|> assistant <|end_header_id|> \n\n
    assert ids[-5:] == [128009, 128006, 78191, 128007, 271]
    assert [ids.count(special) for special in (128006, 128007, 128009)] == [5, 5, 4]


def test_zephyr_prompt_of_tinyllama() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, *USER_ONLY]
    turns = "<|user|>\nHi<|eot_id|>\n<|assistant|>\nYes?<|eot_id|>\n<|user|>\nHi<|eot_id|>\n"
    assert render(ZEPHYR, messages) == turns + "<|assistant|>\n"


def test_bos_is_added_where_the_template_does_not(single_folder: Path) -> None:
    (single_folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    assert tokenizer.apply_chat_template(USER_ONLY) == "Hi"
    assert tokenizer.encode_chat(USER_ONLY) == tokenizer.encode("Hi")
    assert tokenizer.encode_chat(USER_ONLY)[0] == 0


ASSISTANT_ONLY = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + ASSISTANT_ONLY + "{% endfor %}",
        "{% for m in messages %}\n  {%- generation -%}\n {{ m.content }}\n {% endgeneration %}\n{% endfor %}\n",
        "{% for m in messages %}\n  {% generation %}\n{{ loop.index }}\n  {% endgeneration %}\n\n{% endfor %}",
        "{% set n = 1 %}{% generation %}{% set n = 2 %}{{ n }}{% endgeneration %}{{ n }}",
        "{% generation %}{% generation %}{{ bos_token }}{% endgeneration %}<&>{% endgeneration %}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ '\u00e9' | tojson(true) }}",
    ],
)
def test_blocks_and_filters_against_transformers(template: str, single_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(single_folder)
    (single_folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    expected = oracle.apply_chat_template(TWO_TURNS, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(TWO_TURNS) == expected


def test_tojson_does_not_escape() -> None:
    assert render("{{ messages | tojson }}", [{"a": "<\u00e9 & 'x'>"}]) == '[{"a": "<\u00e9 & \'x\'>"}]'
    assert render("{{ messages[0] | tojson(indent=2) }}", [{"a": 1}]) == '{\n  "a": 1\n}'


def test_text_parts_of_a_content_are_one_text(single_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    for content, expected in ((parts, "Hi\nthere"), (parts[:1], "Hi"), ([], "")):
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        expected_ids = tokenizer.encode_chat([{"role": "user", "content": expected}])
        assert tokenizer.encode_chat(messages) == expected_ids
        assert messages[0]["content"] is content


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "'image_url'"),
        ({"type": "text"}, "a text part without a text"),
        ({"type": "text", "text": 7}, "a text part without a text"),
        ({"type": 7}, "7"),
        ("Hi", "'Hi'"),
    ],
)
def test_other_parts_of_a_content_are_refused_by_name(part: Any, found: str, single_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    with pytest.raises(UserError) as caught:
        tokenizer.encode_chat([*USER_ONLY, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert str(caught.value) == (
        f'messages[1]: content: expected parts {{"type": "text", "text": "..."}}, found {found}; the model reads text '
        "alone"
    )


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n{{ m.role }}\n{% endfor %}"
    )
    assert render(template, TWO_TURNS) == "system\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% generation %}{{ ''.__class__ }}{% endgeneration %}",
    ],
)
def test_sandbox_refuses(template: str) -> None:
    with pytest.raises(UserError, match="refused by the sandbox") as caught:
        render(template)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("template", "needles"),
    [
        ("{% for %}", ["TemplateSyntaxError"]),
        ("{% generation %}", ["TemplateSyntaxError", "endgeneration"]),
        ("{{ raise_exception('Roles must\nalternate') }}", ["TemplateError", r"Roles must\nalternate"]),
        ("{{ messages[0].content.nothing.more }}", ["UndefinedError", "nothing"]),
        ("{{ 1 / 0 }}", ["ZeroDivisionError"]),
        ("{{ 'a' + 1 }}", ["TypeError"]),
        ("{% include 'config.json' %}", ["no loader"]),
        ("{% for i in range(10000000000) %}{% endfor %}", ["OverflowError"]),
    ],
)
def test_failing_template(template: str, needles: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        render(template)
    message = str(caught.value)
    assert message.isprintable()
    for needle in ["model: chat template", *needles]:
        assert needle in message


@pytest.mark.parametrize("template", ["", " \n", "{% for m in messages %}{% endfor %}", "{{ messages[0].name }}\n"])
def test_a_template_without_messages_is_refused(template: str) -> None:
    """A text generated after it could not depend on the messages."""
    with pytest.raises(UserError, match="model: chat template: expected a prompt, found a blank text"):
        render(template)


def test_the_template_comes_from_the_right_file(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": None}) is None
    assert find_template(tmp_path, {"chat_template": "S"}) == "S"
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    with pytest.raises(UserError, match="found 7; correct it"):
        find_template(tmp_path, {"chat_template": 7})
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert find_template(tmp_path, {"chat_template": named}) == "F"


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    assert find_template(tmp_path, {"chat_template": named}, has_tools=True) == "T"
    assert find_template(tmp_path, {"chat_template": named[1:]}, has_tools=True) == "D"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert find_template(tmp_path, {"chat_template": named}, has_tools=True) == "F"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("U", encoding="utf-8")
    assert find_template(tmp_path, {"chat_template": named}, has_tools=True) == "U"
    assert find_template(tmp_path, {"chat_template": named}) == "F"


@pytest.mark.parametrize(
    ("file", "content", "needle"),
    [
        ("tokenizer_config.json", [{"name": "rag", "template": "R"}], "chat_template: expected a template named 'def"),
        ("tokenizer_config.json", {"default": "D"}, "chat_template: expected a text or a list of named temp"),
        ("tokenizer_config.json", [{"name": "default", "template": 7}], "chat_template: expected a text or a list of"),
        ("chat_template.jinja", b"\xff", "expected UTF-8 text, found none"),
        ("chat_template.jinja", b"<!DOCTYPE html><html>", "expected a chat template, found an HTML page"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_where_it_is_needed(
    file: str, content: Any, needle: str, single_folder: Path
) -> None:
    """A plain prompt needs none."""
    path = single_folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, bytes):
        (single_folder / file).write_bytes(content)
    else:
        path.write_text(json.dumps(settings | {"chat_template": content}), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    for call in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(UserError) as caught:
            call(USER_ONLY)
        assert str(caught.value).startswith(f"{single_folder / file}: {needle}")
        assert str(caught.value).isprintable()


def test_a_template_that_is_a_dangling_link(single_folder: Path) -> None:
    (single_folder / "chat_template.jinja").symlink_to("../blobs/1")
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    with pytest.raises(UserError, match=r"chat_template.jinja: expected UTF-8 text, found a broken symbolic link"):
        tokenizer.encode_chat(USER_ONLY)


def test_missing_template(single_folder: Path) -> None:
    path = single_folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    del settings["chat_template"]
    path.write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    for call in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(UserError, match=r"chat template: expected .* found none; leave out --chat"):
            call(USER_ONLY)


def test_against_transformers(single_folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = PUBLISHED / "templates" / LLAMA_3_1
    if path.exists():
        (single_folder / "chat_template.jinja").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    oracle = PreTrainedTokenizerFast.from_pretrained(single_folder)
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    expected = oracle.apply_chat_template(TWO_TURNS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(TWO_TURNS) == expected
    assert tokenizer.encode_chat(TWO_TURNS) == oracle.encode(expected, add_special_tokens=False)
    weather = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for tools in (None, [], [weather]):
        for adds in (True, False):
            options = {"tools": tools, "add_generation_prompt": adds}
            expected = oracle.apply_chat_template(TWO_TURNS, tokenize=False, **options)
            assert tokenizer.apply_chat_template(TWO_TURNS, **options) == expected
            assert tokenizer.encode_chat(TWO_TURNS, **options) == oracle.encode(expected, add_special_tokens=False)


ANSWER = {"role": "assistant", "content": " The capital is "}
TEMPLATES = {
    "as it is": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{{ x }}",
    "trimmed": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}",
    "reasoning": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.name is none }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}",
}


@pytest.fixture
def both(single_folder: Path) -> Callable[[str], tuple[Tokenizer, Any]]:
    """Our tokenizer and that of transformers, with a template."""
    from transformers import PreTrainedTokenizerFast

    def read(template: str) -> tuple[Tokenizer, Any]:
        (single_folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        ours = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
        return ours, PreTrainedTokenizerFast.from_pretrained(single_folder)

    return read


@pytest.mark.parametrize(
    "content", ["The capital is", " The capital is ", "", [{"type": "text", "text": "The "}]], ids=str
)
@pytest.mark.parametrize("name", [*TEMPLATES, LLAMA_3_1])
def test_the_last_message_is_continued_as_in_transformers(name: str, content: Any, both: Callable[..., Any]) -> None:
    if name not in TEMPLATES and not (PUBLISHED / "templates" / name).exists():
        pytest.skip("needs the templates in shared/hf/templates")
    template = TEMPLATES.get(name) or (PUBLISHED / "templates" / name).read_text(encoding="utf-8")
    tokenizer, oracle = both(template)
    messages = [*USER_ONLY, {"role": "assistant", "content": content}]
    given = [*USER_ONLY, {"role": "assistant", "content": content if isinstance(content, str) else "The "}]
    expected = oracle.apply_chat_template(given, tokenize=False, continue_final_message=True)
    assert tokenizer.apply_chat_template(messages, continue_final_message=True) == expected
    ids = tokenizer.encode_chat(messages, continue_final_message=True, add_generation_prompt=False)
    assert ids == tokenizer.encode(expected)


def test_templates_that_compare_a_content_with_null(both: Callable[..., Any]) -> None:
    """DeepSeek's R1 has one. transformers leaves such a content out, and the template then fails."""
    each = "{% if m['content'] is none %}<call>{% else %}{{ m['content'] + '.' }}{% endif %}"
    template = f"{{% for m in messages %}}{each}{{% endfor %}}"
    tokenizer, _ = both(template)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}, call]) == "a.<call>"


def test_messages_that_cannot_be_continued(both: Callable[..., Any]) -> None:
    tokenizer, _ = both(TEMPLATES["as it is"])
    with pytest.raises(UserError, match="exclude each other"):
        tokenizer.encode_chat([*USER_ONLY, ANSWER], add_generation_prompt=True, continue_final_message=True)
    for messages in ([], [*USER_ONLY, {"role": "assistant", "content": None}]):
        with pytest.raises(UserError, match=r"^continue_final_message: expected a last message with a text"):
            tokenizer.encode_chat(messages, continue_final_message=True)
    tokenizer, _ = both("{{ messages[0].content }}")
    with pytest.raises(UserError, match=r"^continue_final_message: the chat template does not write the last message"):
        tokenizer.encode_chat([*USER_ONLY, ANSWER], continue_final_message=True)


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"bos_token": "x"}])
@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "reasoning_content": "why"},
        {"content": None, "reasoning": "why", "name": None},
        {"thinking": "why"},
        {"content": None},
        {"content": None, "tool_calls": [{"function": {"name": "f"}}]},
    ],
    ids=str,
)
def test_variables_and_null_are_those_of_transformers(
    answer: dict[str, Any], variables: dict[str, Any], both: Callable[..., Any]
) -> None:
    tokenizer, oracle = both(TEMPLATES["reasoning"])
    messages = [*USER_ONLY, {"role": "assistant"} | answer, *USER_ONLY]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    assert tokenizer.apply_chat_template(messages, variables=variables) == expected
    assert tokenizer.encode_chat(messages, variables=variables) == tokenizer.encode(expected)


@pytest.mark.parametrize("content", [{"a": 1}, {"b": ["x", {"c": None}]}, [1, "two"], "text", '{"a": 1}'], ids=str)
@pytest.mark.parametrize("role", ["tool", "ipython"])
@pytest.mark.parametrize("name", [LLAMA_3_1, "meta-llama-Llama-3.2-3B-Instruct.jinja"])
def test_results_of_tools_are_those_of_transformers(name: str, role: str, content: Any, single_folder: Path) -> None:
    """Objects and lists, too, which these templates write as JSON."""
    from transformers import PreTrainedTokenizerFast

    path = PUBLISHED / "templates" / name
    if not path.exists():
        pytest.skip("needs the templates in shared/hf/templates")
    (single_folder / "chat_template.jinja").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    oracle = PreTrainedTokenizerFast.from_pretrained(single_folder)
    tokenizer = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": role, "content": content},
    ]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages) == expected


def test_text_parts_of_a_tools_result_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_text_contents([{"role": "tool", "content": parts}]) == [{"role": "tool", "content": "a\nb"}]


@pytest.mark.parametrize("content", [{"type": "text", "text": "x"}, 5, True])
def test_a_content_that_is_no_text_is_refused(content: Any) -> None:
    """A template would write Python's spelling of it. A message that calls tools may have none, and null is none."""
    with pytest.raises(UserError, match=r"^messages\[1\]: content: expected a text or a list of text parts, found"):
        with_text_contents([{"role": "user", "content": "a"}, {"role": "user", "content": content}])
    with pytest.raises(UserError, match=r"^messages\[0\]: content: expected a text .*, found none$"):
        with_text_contents([{"role": "user"}])
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert with_text_contents(calls) == [{"role": "assistant", "tool_calls": calls[0]["tool_calls"]}]
    with pytest.raises(UserError, match=r"^messages\[0\]: expected .* found 'hi'$"):
        with_text_contents(["hi"])  # type: ignore[list-item]
