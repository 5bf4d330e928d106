"""Several answers, log probabilities and other settings of answers, as generate.py prints and writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

Run = Callable[..., tuple[int, str, str]]
SAMPLED = ("--max-new-tokens", 8, "--ignore-eos", "--temperature", 1.5, "--seed", 3)


def test_several_answers_are_lines_of_json(
    generate_text: Callable[..., str], generate_json: Callable[..., Any], tmp_path: Path
) -> None:
    """One line for each answer, prompt after prompt; with one answer the lines are as before."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "The old"}\n{"prompt": "A road"}\n', encoding="utf-8")
    lines = [json.loads(line) for line in generate_text("--prompt-file", path, *SAMPLED, "--answers", 2).splitlines()]
    places = [(line["request"], line["answer"]) for line in lines]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({line["text"] for line in lines}) == 4
    assert {tuple(line) for line in lines} == {("request", "answer", "text", "finish_reason")}
    found = generate_json("--prompt-file", path, *SAMPLED, "--answers", 2)["requests"]
    assert [each["text"] for each in found] == [line["text"] for line in lines]
    assert [(each["request"], each["answer"]) for each in found] == places
    assert [each["prompt_ids"] for each in found[::2]] == [each["prompt_ids"] for each in found[1::2]]
    one = [json.loads(line) for line in generate_text("--prompt-file", path, *SAMPLED).splitlines()]
    assert {tuple(line) for line in one} == {("request", "text", "finish_reason")}
    # The answers to a single prompt are printed in the same way.
    single = generate_text("--prompt", "The old", *SAMPLED, "--answers", 2).splitlines()
    assert [json.loads(line) for line in single] == lines[:2]


def test_log_probabilities_are_written(generate_json: Callable[..., Any], checkpoint: Path) -> None:
    core = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts = [core.decode([token], skip_special_tokens=False) for token in range(100)]
    found = generate_json("--prompt", "The old", *SAMPLED, "--logprobs", 3)
    (request,) = found["requests"]
    assert len(request["logprobs"]) == len(request["token_ids"]) == 8
    for token, each in zip(request["token_ids"], request["logprobs"], strict=True):
        assert list(each) == ["logprob", "top", "text", "top_texts"]
        assert each["text"] == texts[token]
        assert each["top_texts"] == [texts[other] for other, _ in each["top"]]
        top = dict(each["top"])
        values = list(top.values())
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.0001
        assert each["logprob"] <= values[0]
        assert top.get(token, each["logprob"]) == each["logprob"]
    plain = generate_json("--prompt", "The old", *SAMPLED)
    assert "logprobs" not in plain["requests"][0]
    assert plain["requests"][0]["token_ids"] == request["token_ids"]


def test_stop_ids_and_biases(generate_json: Callable[..., Any]) -> None:
    flags = ("--prompt", "The old", "--max-new-tokens", 8, "--ignore-eos")
    (forced,) = generate_json(*flags, "--logit-bias", "20=100,21=-5")["requests"]
    assert forced["token_ids"] == [20] * 8
    (penalised,) = generate_json(*flags, "--logit-bias", "20=100", "--repetition-penalty", 1000)["requests"]
    assert penalised["token_ids"][0] == 20
    assert penalised["token_ids"].count(20) < 8
    (stopped,) = generate_json(*flags, "--logit-bias", "20=100", "--stop-ids", "90,20")["requests"]
    assert (stopped["token_ids"], stopped["text"], stopped["finish_reason"]) == ([20], "", "stop")


@pytest.mark.parametrize("flags", [("--stop-ids", "5,100"), ("--logit-bias", "100=1")], ids=str)
def test_an_id_outside_the_vocabulary_is_refused_before_weights_are_read(
    flags: tuple[str, str], run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alspec.runtime.engine.engine.Engine.load", lambda *_: pytest.fail("it loads"))
    code, out, err = run("--model", checkpoint, "--transport", "gloo", "--prompt", "a", *flags)
    assert (code, out) == (2, "")
    name = flags[0].removeprefix("--").replace("-", "_")
    assert err == f"alspec: exit 2: {name}: token id 100 is outside the vocabulary of 100; give ids from 0 to 99\n"
