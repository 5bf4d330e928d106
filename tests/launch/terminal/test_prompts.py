"""Prompts of generate.py: from flags, files, standard input, and in batches."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from generated import LONG_PROMPT, PROMPT, SMALL, read_json
from paths import ROOT
from tiers import fast

from alspec import Engine
from alspec.config import GenerateConfig
from alspec.errors import UserError
from alspec.launch.terminal import prompts
from alspec.models.tokenizer.tokenizer import Tokenizer

Run = Callable[..., tuple[int, str, str]]
GenerateText = Callable[..., str]


def test_every_source_of_the_same_prompt(
    generate_text: GenerateText, generate_json: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate_text("--prompt", PROMPT, *SMALL)
    # Editors and `echo` end the last line: one line end is not part of the prompt.
    for end in ("", "\n", "\r\n"):
        (tmp_path / "prompt.txt").write_bytes((PROMPT + end).encode())
        assert generate_text("--prompt-file", tmp_path / "prompt.txt", *SMALL) == expected
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + end))
        assert generate_text(*SMALL) == expected
    ids = generate_json("--prompt", PROMPT, *SMALL)["requests"][0]["prompt_ids"]
    assert generate_text("--prompt-ids", ",".join(map(str, ids)), *SMALL) == expected


@pytest.mark.parametrize("end", fast(["\n", "\r\n", "\r"], keep=["\r\n"]), ids=["LF", "CRLF", "CR"])
def test_line_ends_are_the_same_from_every_source(
    generate_json: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def prompt_ids(*flags: object) -> list[int]:
        return generate_json(*flags, *SMALL)["requests"][0]["prompt_ids"]

    data = end.join(["ab", "", "cd", ""]).encode()
    (tmp_path / "prompt.txt").write_bytes(data)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert prompt_ids() == prompt_ids("--prompt-file", tmp_path / "prompt.txt") == prompt_ids("--prompt", "ab\n\ncd")


@pytest.mark.parametrize(("flags", "name"), [((), "encode"), (("--chat",), "encode_chat")], ids=["text", "chat"])
def test_no_more_is_encoded_than_the_model_takes(
    flags: tuple[str, ...], name: str, generate_json: Callable[..., Any]
) -> None:
    """A text of many megabytes is refused before it is cut into tokens."""
    with mock.patch.object(Tokenizer, name, autospec=True, side_effect=getattr(Tokenizer, name)) as encode:
        generate_json("--prompt", "hi", *flags, "--max-new-tokens", 1)
    assert encode.call_args_list[0].kwargs["max_total_tokens"] == 1024


def test_prompt_flag_leaves_stdin_unread(generate_text: GenerateText, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("unread")
    monkeypatch.setattr("sys.stdin", stdin)
    generate_text("--prompt", PROMPT, *SMALL)
    assert stdin.read() == "unread"


def test_prompt_ids_are_used_as_they_are(generate_json: Callable[..., Any]) -> None:
    """No begin token is added."""
    assert generate_json("--prompt-ids", "5, 6,7", *SMALL)["requests"][0]["prompt_ids"] == [5, 6, 7]


def test_chat_and_system(generate_json: Callable[..., Any], checkpoint: Path) -> None:
    def prompt_text(*flags: str) -> str:
        ids = generate_json(*flags, "--max-new-tokens", 1)["requests"][0]["prompt_ids"]
        assert ids.count(96) == 1
        special = {96: "<begin>", 97: "<end>", 98: "<user>", 99: "<assistant>"}
        engine = Engine.from_pretrained(checkpoint, transport="gloo")
        assert engine.tokenizer is not None
        return "".join(special.get(id_) or engine.tokenizer.decode([id_]) for id_ in ids)

    assert prompt_text("--prompt", "hi", "--chat") == "<begin><user>hi<end><assistant>"
    expected = "<begin><system>be brief<end><user>hi<end><assistant>"
    assert prompt_text("--prompt", "hi", "--chat", "--system", "be brief") == expected


def test_the_system_message_of_a_flag_is_for_messages_without_one(
    run: Run, generate_json: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    user = {"role": "user", "content": "hi"}
    own = [{"role": "system", "content": "be kind"}, user]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"messages": [user]}, {"messages": own}]))
    flags = ("--prompt-file", path, "--chat", "--system", "be brief", *SMALL)
    found = generate_json(*flags)["requests"]
    expected = [
        generate_json("--prompt", "hi", "--chat", "--system", system, *SMALL)["requests"][0]["prompt_ids"]
        for system in ("be brief", "be kind")
    ]
    assert [request["prompt_ids"] for request in found] == expected
    model = ("--model", checkpoint, "--transport", "gloo")
    notice = "alspec: --system: 1 of 2 requests have a system message of their own, which they keep\n"
    assert notice in run(*model, *flags)[2]
    path.write_text(json.dumps({"messages": [user]}))
    assert "--system" not in run(*model, *flags)[2]
    path.write_text(json.dumps({"messages": [{"role": "developer", "content": "be kind"}, user]}))
    assert "--system: 1 of 1 requests" in run(*model, *flags)[2]


def test_settings_in_a_line_are_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """They set nothing, as other keys of a line do not."""
    path, flags = tmp_path / "prompts.jsonl", ("--model", checkpoint, "--transport", "gloo", *SMALL)
    path.write_text('{"prompt": "a", "id": 3}\n{"prompt": "b", "max_tokens": 5, "temperature": 2}\n')
    notice = "alspec: --prompt-file: max_tokens, temperature in its lines: settings are flags, for all requests\n"
    code, out, err = run(*flags, "--prompt-file", path)
    assert code == 0
    assert notice in err
    assert json.loads(out.splitlines()[1])["max_tokens"] == 5
    path.write_text('{"prompt": "a", "id": 3}\n')
    assert "--prompt-file" not in run(*flags, "--prompt-file", path)[2]


def test_keys_beside_messages_reach_the_chat_template(
    run: Run, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}none{% endif %}{% endif %}"
    )
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}
    lines = [
        {"messages": [user], "chat_template_kwargs": {"enable_thinking": False}, "tools": None},
        {"messages": [user], "add_generation_prompt": False, "chat_template_kwargs": None},
        {"messages": [user, answer], "continue_final_message": True},
        {"messages": [user, answer], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [user], "enable_thinking": False},
        {"prompt": "hi", "continue_final_message": True},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--prompt-file", path, "--json", tmp_path / "out.json", *SMALL)
    err = run("--model", checkpoint, "--transport", "gloo", *flags)[2]
    found = [request["prompt_ids"] for request in read_json(tmp_path / "out.json")["requests"]]
    tokenizer = Engine.from_pretrained(checkpoint, transport="gloo").tokenizer
    assert tokenizer is not None
    begin = "<user>hi<end>"
    texts = [f"{begin}<assistant>none", begin, *[f"{begin}<assistant>It is"] * 2, f"{begin}<assistant>", "hi"]
    assert found == [tokenizer.encode(text) for text in texts]
    advice = 'sets nothing; give "chat_template_kwargs": {"enable_thinking": ...} beside messages'
    assert f"alspec: --prompt-file: enable_thinking in its lines: {advice}\n" in err
    assert "alspec: --prompt-file: continue_final_message in its lines: sets nothing without messages\n" in err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"continue_final_message": "yes"}, "continue_final_message: expected true or false, found 'yes'"),
        ({"add_generation_prompt": 1}, "add_generation_prompt: expected true or false, found 1"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other; give one of them"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object, found [1]"),
        ({"chat_template_kwargs": {"tools": []}}, "expected variables of the template; tools is a key beside it"),
        ({"chat_template_kwargs": {"tokenize": True}}, "expected variables of the template; tokenize is not one"),
    ],
    ids=str,
)
def test_wrong_keys_beside_messages_name_the_line(
    keys: dict[str, Any], message: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | keys))
    code, _, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", path, *SMALL)
    assert code == 2
    assert f"{path}:1: " in err
    assert message in err


@pytest.mark.parametrize("other", ['"\\ud800x"', "NaN", "[-Infinity]"])
def test_other_keys_that_cannot_be_written_are_refused(run: Run, checkpoint: Path, tmp_path: Path, other: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "id": {other}}}\n')
    code, out, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", path)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"alspec: exit 2: prompt_file: {path}:2: other keys are written with the answer: NaN, Infinity"
    )


def test_contents_of_messages_may_be_text_parts(
    run: Run, generate_json: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    """As in OpenAI's API; another part is refused with the number of its line."""
    path, text = tmp_path / "prompts.jsonl", {"type": "text", "text": "hi"}
    path.write_text(json.dumps({"messages": [{"role": "user", "content": [text]}]}) + "\n")
    (found,) = generate_json("--prompt-file", path, *SMALL)["requests"]
    assert found == generate_json("--prompt", "hi", "--chat", *SMALL)["requests"][0]
    line = {"messages": [{"role": "user", "content": [text, {"type": "image_url"}]}]}
    path.write_text(f'{{"prompt": "a"}}\n{json.dumps(line)}\n')
    code, _, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", path)
    assert code == 2
    assert err.startswith(f"alspec: exit 2: prompt_file: {path}:2: messages[0]: content: expected parts ")
    assert "found 'image_url'" in err
    assert err.count("\n") == 1


def test_messages_and_other_keys_of_a_batch(
    generate_text: GenerateText, generate_json: Callable[..., Any], tmp_path: Path
) -> None:
    """Messages go through the chat template; what else a line holds is written with its answer."""
    path = tmp_path / "prompts.jsonl"
    user = {"role": "user", "content": "hi"}
    lines: list[dict[str, Any]] = [
        {"id": 7, "messages": [user]},
        {"messages": [{"role": "system", "content": "be brief"}, user], "tags": ["a", None]},
        {"prompt": "\n", "id": "x"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = generate_json("--prompt-file", path, *SMALL)["requests"]
    chat = [
        generate_json("--prompt", "hi", "--chat", *more, *SMALL)["requests"][0]
        for more in ((), ("--system", "be brief"))
    ]
    assert [request["prompt_ids"] for request in found] == [chat[0]["prompt_ids"], chat[1]["prompt_ids"], [96, 0]]
    extras = [{"id": 7}, {"tags": ["a", None]}, {"id": "x"}]
    assert found[:2] == [answer | extra for answer, extra in zip(chat, extras, strict=False)]
    printed = [json.loads(line) for line in generate_text("--prompt-file", path, *SMALL).splitlines()]
    assert printed == [
        {"request": index, "text": request["text"], "finish_reason": "length"} | extra
        for index, (request, extra) in enumerate(zip(found, extras, strict=True))
    ]


def test_other_keys_that_an_answer_has_lie_under_extra(
    generate_text: GenerateText, generate_json: Callable[..., Any], tmp_path: Path
) -> None:
    """As in data sets with questions and answers; with every flag, so that runs can be compared."""
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": 1, "prompt": "a", "text": "b", "answer": "4", "logprobs": None},
        {"prompt": "a", "extra": 3, "id": 2},
        {"prompt": "a", "extra": 3, "drafted": True, "id": 3},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected: list[dict[str, Any]] = [
        {"id": 1, "extra": {"text": "b", "answer": "4", "logprobs": None}},
        {"id": 2, "extra": 3},
        {"id": 3, "extra": {"drafted": True, "extra": 3}},
    ]
    for flags in ((), ("--answers", 2, "--logprobs", 1, "--temperature", 1), ("--draft", "ngram")):
        printed = [json.loads(line) for line in generate_text("--prompt-file", path, *SMALL, *flags).splitlines()]
        requests = generate_json("--prompt-file", path, *SMALL, *flags)["requests"]
        assert len(printed) == len(requests) == (6 if "--answers" in flags else 3)
        for index, (line, request) in enumerate(zip(printed, requests, strict=True)):
            extra = expected[index * 3 // len(printed)]
            assert extra.items() <= line.items()
            assert extra.items() <= request.items()
            assert line["text"] == request["text"] != "b"


def test_tools_of_a_batch_reach_the_template(make_checkpoint: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(chat_template="{{ messages[0].content }}{% if tools %}{{ tools[0].name }}{% endif %}")
    (tmp_path / "prompts.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "clock"}]}\n'
    )
    flags = ("--model", folder, "--transport", "gloo", "--prompt-file", tmp_path / "prompts.jsonl", *SMALL)
    assert run(*flags, "--json", tmp_path / "out.json")[0] == 0
    (request,) = read_json(tmp_path / "out.json")["requests"]
    engine = Engine.from_pretrained(folder, transport="gloo")
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(request["prompt_ids"]) == "aclock"
    assert "tools" not in request


def test_ids_that_a_chat_cannot_use_name_their_line(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt_ids": [1]}\n')
    code, _, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", path, "--chat")
    assert code == 2
    assert err.startswith(f"alspec: exit 2: prompt_file: {path}:2: chat needs a text prompt: ")


def test_a_template_that_refuses_messages_names_the_line(
    make_checkpoint: Callable[..., Path], run: Run, tmp_path: Path
) -> None:
    folder = make_checkpoint(chat_template="{{ raise_exception('roles must alternate') }}")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    code, _, err = run("--model", folder, "--transport", "gloo", "--prompt-file", path)
    assert code == 2
    assert err.startswith(f"alspec: exit 2: prompt_file: {path}:2: {folder}: chat template: ")


def test_a_dash_is_standard_input_and_output(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--json -` alone writes to standard output, so that a program can read it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    flags = ("--model", checkpoint, "--transport", "gloo", *SMALL)
    code, out, _ = run(*flags, "--prompt-file", "-", "--json", "-")
    assert code == 0
    _, text, _ = run(*flags, "--prompt", PROMPT)
    (request,) = json.loads(out)["requests"]
    assert request["text"] == text.removesuffix("\n")
    assert out.endswith("}\n")
    assert list(tmp_path.iterdir()) == []


def test_standard_input_that_begins_with_a_request_is_a_batch(
    generate_text: GenerateText, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the same lines in a file; any other text, and standard input without the flag, is one prompt."""

    def give(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    path = tmp_path / "prompts.jsonl"
    messages = '{"messages": [{"role": "user", "content": "b"}]}'
    lines = f'\ufeff\n {{"id": 7, "prompt": "a"}}\r\n{{"prompt_ids": [1, 2]}}\n{messages}'
    path.write_text(lines, encoding="utf-8")
    give(lines)
    expected = generate_text("--prompt-file", path, *SMALL)
    assert generate_text("--prompt-file", "-", *SMALL) == expected
    assert len(expected.splitlines()) == 3

    give(lines)
    assert generate_text(*SMALL) == generate_text("--prompt", lines.removeprefix("\ufeff").replace("\r", ""), *SMALL)
    for text in ('{"text": "a"}\n{"prompt": "b"}', '["prompt"]', "{", '"prompt"', '{"prompt": "a"} and more'):
        give(text)
        assert generate_text("--prompt-file", "-", *SMALL) == generate_text("--prompt", text, *SMALL)
    for text, is_said in (('{"prompt": "a"', True), (lines, False), ("a {", False)):
        give(text)
        _, _, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", "-", *SMALL)
        assert ("standard input is one text" in err) == is_said

    for text, line in (('{"prompt": "a"}\n\nb\n', 3), ('{"prompt": 1}', 1), ('{"messages": []}', 1)):
        give(text)
        code, out, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", "-", *SMALL)
        assert (code, out) == (2, "")
        assert err.startswith(f"alspec: exit 2: prompt_file: standard input:{line}: ")
        assert err.count("\n") == 1


def test_a_batch_equals_each_request_alone(
    generate_text: GenerateText, generate_json: Callable[..., Any], tmp_path: Path
) -> None:
    """Ragged prompts, short and longer than 2 S + 64; one ends early at a stop text."""
    prompts: list[dict[str, Any]] = [
        {"prompt": "a"},
        {"prompt": LONG_PROMPT},
        {"prompt_ids": [1, 2, 3]},
        {"prompt": PROMPT},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(prompt) for prompt in prompts) + "\n", encoding="utf-8")
    alone = []
    for prompt in prompts:
        (name, value), *_ = prompt.items()
        flag = (f"--{name.replace('_', '-')}", value if name == "prompt" else ",".join(map(str, value)))
        alone.append(generate_json(*flag, *SMALL)["requests"][0])
    lines = [json.loads(line) for line in generate_text("--prompt-file", path, *SMALL).splitlines()]
    assert lines == [
        {"request": index, "text": request["text"], "finish_reason": "length"} for index, request in enumerate(alone)
    ]
    found = generate_json("--prompt-file", path, *SMALL)
    assert found["requests"] == alone
    assert len(found["step_us"]) == 11

    stop = alone[1]["text"][2:4]
    early = generate_json("--prompt-file", path, *SMALL, "--stop", stop)["requests"]
    assert early[1]["finish_reason"] == "stop"
    assert len(early[1]["token_ids"]) < 12
    for request, whole in zip(early, alone, strict=True):
        assert request["text"] == whole["text"].split(stop)[0]


def test_a_batch_may_hold_every_line_end(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 stand inside a JSON string as they are."""
    path = tmp_path / "PROMPTS.JSONL"
    path.write_text(json.dumps({"prompt": "a\u2028b\u2029c\x85d"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    code, out, err = run("--model", checkpoint, "--transport", "gloo", "--prompt-file", path, *SMALL)
    assert code == 0, err
    assert len(out.split("\n")) == 2
    assert json.loads(out)["request"] == 0, "a batch, also with its name in capitals"


def test_a_byte_order_mark_is_not_text(
    generate_json: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate_json("--prompt", "abc", *SMALL)["requests"]
    (tmp_path / "prompt.txt").write_text("abc", encoding="utf-8-sig")
    assert generate_json("--prompt-file", tmp_path / "prompt.txt", *SMALL)["requests"] == expected
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}', encoding="utf-8-sig")
    assert generate_json("--prompt-file", tmp_path / "prompts.jsonl", *SMALL)["requests"] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfabc")))
    assert generate_json(*SMALL)["requests"] == expected


def test_batch_hit_map(generate_json: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "short"}}\n{json.dumps({"prompt": LONG_PROMPT})}\n', encoding="utf-8")
    found = generate_json(
        "--prompt-file", path, *SMALL, "--speculation", "simulated", "--threshold", "1e-6",
        "--predictor", "window",
    )  # fmt: skip
    assert [[len(layer) for layer in step] for step in found["hit_map"]] == [[2, 2, 2]] * 11
    # Sink and window of the short request meet, so it always hits; at this threshold the long one never hits.
    assert all(layer == [1, 0] for step in found["hit_map"] for layer in step)
    assert found["summary"]["hit_rate"] == 0.0, "`A~` of the short request leaves no token out"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": ""}', "prompt is empty; expected"),
        ('{"prompt": 3}', "prompt of another kind; expected"),
        ('{"prompt_ids": [1.5]}', "prompt_ids of another kind; expected"),
        ('{"messages": []}', "messages is empty; expected"),
        ('{"prompt": "x", "prompt_ids": [1]}', "prompt and prompt_ids exclude each other; expected"),
        ('{"promt": "x"}', "no prompt, the nearest valid key is 'prompt'; expected"),
        ('{"text": "x"}', "expected"),
        ("[1]", "expected"),
    ],
)
def test_a_line_without_a_request_says_why(line: str, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"prompt_file: f.jsonl:3: {why}")):
        prompts._read_line(line, "f.jsonl:3")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"logprobs": 2, "top_logprobs": 2, "answers": 3}, "answers, logprobs, top_logprobs"),
        ({"system": "x", "chat": True, "repeat_penalty": 1.1}, "chat, repeat_penalty, system"),
        ({"id": 3, "extra": 3}, None),
    ],
)
def test_which_settings_in_a_line_are_named(line: dict[str, Any], named: str | None) -> None:
    given = prompts._read_line(json.dumps({"prompt": "x"} | line), "f.jsonl:1")
    config = GenerateConfig(prompt_file=Path("f.jsonl"))
    expected = [] if named is None else [f"--prompt-file: {named} in its lines: settings are flags, for all requests"]
    assert prompts._notices([given], config) == expected


def test_a_text_that_looks_like_requests_is_told() -> None:
    text = '{"prompt": "a"}\n{"prompt": "b"}\n'
    (notice,) = prompts._notices([prompts._Prompt(text)], GenerateConfig(prompt_file=Path("x.json")))
    assert notice == "prompt: JSON, taken as one text; a file whose name ends in .jsonl has a request in each line"
    (notice,) = prompts._notices([prompts._Prompt(text)], GenerateConfig())
    assert notice == "prompt: JSON, taken as one text; --prompt-file - reads a request in each line"
    assert prompts._notices([prompts._Prompt(text)], GenerateConfig(prompt=text)) == []


def test_a_run_ends_when_its_reader_has_gone(checkpoint: Path) -> None:
    """`generate.py | head -c 1`: nothing but the text was asked for."""
    flags = ["--model", checkpoint, "--transport", "gloo", "--prompt", "a", "--max-new-tokens", 900, "--ignore-eos"]
    command = list(map(str, [sys.executable, ROOT / "launch" / "generate.py", *flags]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        panel = process.stderr.read()
        assert process.wait(timeout=60) == 0
    made = re.search(r"new tokens: (\d+)", panel)
    assert made is not None
    assert int(made[1]) < 900
