"""Special tokens that tokenizer_config.json and special_tokens_map.json add to tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from alspec.errors import UserError
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer

Core = tokenizers.Tokenizer
FIRST = 283  # after the tokens of `byte_level_core`
VOCAB = 4096  # rows of the embedding
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@pytest.fixture
def write(make_folder: Callable[..., Path]) -> Callable[..., Path]:
    """A folder with its tokenizer's settings replaced, and with a special_tokens_map.json, if one is given."""

    def written(settings: dict[str, Any], mapped: dict[str, Any] | None = None) -> Path:
        folder = make_folder(num_hidden_layers=1, eos_token_id=None)
        files = {"tokenizer_config.json": settings, "special_tokens_map.json": mapped}
        for name, content in files.items():
            if content is not None:
                (folder / name).write_text(json.dumps(content), encoding="utf-8")
        return folder

    return written


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, LlamaConfig.from_folder(folder))


def test_tokens_that_tokenizer_json_lacks(write: Callable[..., Path]) -> None:
    """In the order of their ids: special or not, one that strips spaces, one that ends a text."""
    from transformers import PreTrainedTokenizerFast

    added = {
        str(FIRST + 1): FLAGS | {"content": "<tool>", "special": False},
        str(FIRST): FLAGS | {"content": "<|im_end|>"},
        str(FIRST + 2): FLAGS | {"content": "<|strip|>", "lstrip": True},
        "2": FLAGS | {"content": "<|user|>", "rstrip": True},
    }
    folder = write({"eos_token": "<|im_end|>", "added_tokens_decoder": added})
    tokenizer, oracle = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.eos_token_ids == (FIRST,)
    ids = tokenizer.encode("the<|im_end|><tool> cat <|strip|>the<|user|> cat")
    assert ids == oracle.encode("the<|im_end|><tool> cat <|strip|>the<|user|> cat")
    assert {FIRST, FIRST + 1, FIRST + 2, 2} < set(ids)
    decoder = tokenizer.stream_decoder()
    streamed = "".join(decoder.push(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == streamed == oracle.decode(ids, skip_special_tokens=True) == "the<tool> catthecat"


OBJECT = {"__type": "AddedToken"} | FLAGS
NAMED = {"bos_token": "<s>", "eos_token": OBJECT | {"content": "</s>", "lstrip": True}}


@pytest.mark.parametrize(
    ("settings", "mapped"),
    [
        (NAMED, {}),
        (NAMED | {"pad_token": "<|x|>", "image_token": "<|y|>"}, {}),
        (NAMED | {"additional_special_tokens": ["<|x|>", OBJECT | {"content": "<|y|>", "rstrip": True}]}, {}),
        (NAMED | {"additional_special_tokens": ["<|x|>"], "extra_special_tokens": ["<|y|>"]}, {}),
        (NAMED | {"extra_special_tokens": {"image_token": "<|y|>"}}, {}),
        ({}, NAMED | {"additional_special_tokens": ["<|x|>"]}),
        ({"extra_special_tokens": ["<|y|>"]}, NAMED | {"additional_special_tokens": ["<|x|>"]}),
    ],
)
def test_words_that_are_named_as_special_tokens_are_special(
    settings: dict[str, Any], mapped: dict[str, Any], tmp_path: Path
) -> None:
    """They are in the vocabulary of tokenizer.json alone."""
    from transformers import AutoTokenizer

    words = [*"<>|/ abcdsxy", "<s>", "</s>", "<|x|>", "<|y|>"]
    core = Core(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    core.save(str(tmp_path / "tokenizer.json"))
    settings = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", mapped)):
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    config = LlamaConfig.from_shape("llama-3.2-1b").model_copy(update={"vocab_size": len(words)})
    tokenizer, oracle = Tokenizer.from_folder(tmp_path, config), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<s>b <|x|>c<|y|> d </s>"
    ids = tokenizer.encode(text, add_bos=False)
    assert ids == oracle.encode(text, add_special_tokens=False)
    for token_id in range(len(words)):
        assert (tokenizer.special_token_id(words[token_id]) is not None) == (token_id in oracle.all_special_ids)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("has_rule", [True, False])
@pytest.mark.parametrize(
    "own", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"split_special_tokens": True}], ids=str
)
def test_texts_are_those_of_transformers_whatever_the_flags(
    own: dict[str, Any], has_rule: bool, name: str, write: Callable[..., Path]
) -> None:
    """transformers 5 adds what tokenizer.json has in front of a text, and leaves `add_bos_token` alone."""
    from transformers import AutoTokenizer

    folder = write({"tokenizer_class": name, "bos_token": "<|begin|>", "eos_token": "<|end|>"} | own)
    if not has_rule:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}), encoding="utf-8")
    tokenizer, oracle = load(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("the cat", "the<|end|> cat", ""):
        assert tokenizer.encode(text) == oracle(text)["input_ids"]
        assert tokenizer.encode(text, add_bos=False) == oracle(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"eos_token": "<|x|>"}, {"additional_special_tokens": ["<|x|>"]}, {"added_tokens_decoder": {}}],
    ids=str,
)
@pytest.mark.parametrize(
    "added",
    [{"<|x|>": FIRST, "<y>": FIRST + 1}, {"<y>": FIRST, "<|x|>": FIRST + 1}, {"<|end|>": 1, "<|x|>": FIRST}],
    ids=str,
)
def test_an_old_file_of_added_tokens_is_read_as_in_transformers(
    added: dict[str, int], settings: dict[str, Any], write: Callable[..., Path]
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write(settings)
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    tokenizer, oracle = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    text = "the<|x|> cat <y>the < y > the<|end|>"
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_token_ids == ((added["<|x|>"],) if "eos_token" in settings else ())


@pytest.mark.parametrize(
    ("added", "needle"),
    [
        ({"<new>": "1"}, "expected ids by token, found {'<new>': '1'}; download"),
        ({"<new>": -1}, "expected ids by token, found {'<new>': -1}; download"),
    ],
    ids=str,
)
def test_old_tokens_that_cannot_be_added_are_refused(added: Any, needle: str, write: Callable[..., Path]) -> None:
    folder = write({})
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder / 'added_tokens.json'}: {needle}")


def test_an_old_token_with_another_id_is_left_out(write: Callable[..., Path]) -> None:
    """Files that do not belong together: this one was never needed."""
    folder = write({})
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": FIRST + 1}), encoding="utf-8")
    assert load(folder).encode("<new>") == load(write({})).encode("<new>")


def test_a_token_that_the_settings_make_special_is_not_printed(
    write: Callable[..., Path], byte_level_core: Callable[[], Core]
) -> None:
    folder = write({"added_tokens_decoder": {str(FIRST): FLAGS | {"content": "<plain>"}}})
    core = byte_level_core()
    core.add_tokens(["<plain>"])
    core.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    ids = tokenizer.encode("the<plain> cat")
    assert FIRST in ids
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.push, ids)) == tokenizer.decode(ids) == "the cat"


@pytest.mark.parametrize(
    ("added", "needle"),
    [
        (
            {str(FIRST + 1): FLAGS | {"content": "<new>"}},
            f"'<new>': expected id {FIRST + 1}, found id {FIRST} with this tokenizer.json; use files",
        ),
        ({str(FIRST): {"content": None}}, f"{FIRST}: expected a token with content, found {{'content': None}}"),
        ({str(FIRST): "<new>"}, f"{FIRST}: expected a token with content, found '<new>'"),
        ({"<new>": FIRST}, "expected tokens by id, found {'<new>'"),
        ({"1" * 5000: {"content": "<new>"}}, "expected tokens by id, found {'1111"),
        ({str(FIRST): {"content": "\ud800"}}, ""),
        (["<new>"], "expected tokens by id, found ['<new>']"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(added: Any, needle: str, write: Callable[..., Path]) -> None:
    folder = write({"added_tokens_decoder": added})
    with pytest.raises(UserError) as caught:
        load(folder)
    assert str(caught.value).startswith(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: {needle}")


@pytest.mark.parametrize(
    "added",
    [
        pytest.param({str(VOCAB): "<pad>", str(VOCAB + 40): "<pad2>"}, id="no embedding"),
        pytest.param({"7": "<|end|>"}, id="another id than in tokenizer.json"),
        pytest.param({str(FIRST): "<new>", str(FIRST + 1): "<new>"}, id="twice"),
        pytest.param({str(FIRST): ""}, id="empty"),
    ],
)
def test_tokens_that_can_be_ignored_change_nothing(added: dict[str, str], write: Callable[..., Path]) -> None:
    """The entries of tokenizer.json win; tokens without an embedding are split as before."""
    plain = load(write({}))
    text = "the<|end|> cat<pad>"
    expected = plain.encode(text)
    found = load(write({"added_tokens_decoder": {key: FLAGS | {"content": token} for key, token in added.items()}}))
    assert found.encode(text) == expected
    assert (FIRST in found.encode("<new>")) == ("<new>" in added.values())


@pytest.mark.parametrize("settings", [{}, {"bos_token": None, "eos_token": None}, {"unk_token": "<|assistant|>"}])
def test_the_map_supplies_what_the_settings_do_not_name(settings: dict[str, Any], write: Callable[..., Path]) -> None:
    mapped = {
        "bos_token": {"content": "<|user|>"},
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "unk_token": "<|begin|>",
        "cls_token": "<|begin|>",
    }
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ cls_token }}"
    tokenizer = load(write(settings | {"chat_template": template}, mapped))
    unknown = settings.get("unk_token", "<|begin|>")
    assert tokenizer.apply_chat_template([]) == f"<|user|><|end|><|end|>{unknown}"
    assert tokenizer.bos_token_id == 2
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize("mapped", [{}, {"bos_token": "<|user|>", "eos_token": "<|user|>"}])
def test_an_empty_token_is_no_token(mapped: dict[str, str], write: Callable[..., Path]) -> None:
    tokenizer = load(write({"bos_token": "", "eos_token": {"content": ""}, "tokenizer_class": "X"}, mapped))
    assert tokenizer.eos_token_ids == ((2,) if mapped else ())
    assert tokenizer.bos_token_id == (2 if mapped else 0)  # in config.json
    assert tokenizer.encode("the")[0] == 0


def test_the_settings_win_over_the_map(write: Callable[..., Path]) -> None:
    tokenizer = load(write({"bos_token": "<|begin|>", "eos_token": "<|user|>"}, {"eos_token": "<|end|>"}))
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("settings", "mapped", "file"),
    [({}, {"eos_token": "<no>"}, "special_tokens_map"), ({"eos_token": "<no>"}, {}, "tokenizer_config")],
)
def test_an_unknown_token_is_named_with_its_file(
    settings: dict[str, Any], mapped: dict[str, Any], file: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=rf"{file}\.json: eos_token: expected a token of tokenizer.json, found '<no>'"):
        load(write(settings, mapped))
