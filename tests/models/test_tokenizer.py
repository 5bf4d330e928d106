from __future__ import annotations

import codecs
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paths import SHARED

from alspec.errors import UserError
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer, encode_prompts, prompts_of, spelled, token_ids

LLAMA_3 = SHARED / "hf" / "llama3"
Core = tokenizers.Tokenizer
SEPARATOR = "\n__ggml_vocab_test__\n"
BOS = 0
FAST = "PreTrainedTokenizerFast"
CJK = "\u4f60\u597d\uff0c\u4e16\u754c"
EMOJI = "\U0001f469\u200d\U0001f469\u200d\U0001f467 family \U0001f999!"


def config(vocab_size: int = 400, **overrides: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 1,
        "num_qo_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
    }
    return LlamaConfig(**(sizes | {"vocab_size": vocab_size} | overrides))


def write_tokenizer(folder: Path, core: Core, **settings: object) -> None:
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory, byte_level_core: Callable[[], Core]) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(folder, byte_level_core(), bos_token="<|begin|>", eos_token="<|end|>")
    return Tokenizer.from_folder(folder, config(bos_token_id=BOS, eos_token_ids=(1, 3)))


def metaspace_core() -> Core:
    """A sentencepiece-style tokenizer as in Llama 2 folders: spaces are a letter, byte tokens are for all the rest."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "he", "\u2581the", "\u2581\u2581"]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *letters])}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "\u2581")]
    core = Core(tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    decoders = tokenizers.decoders
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("metaspace")
    write_tokenizer(folder, metaspace_core(), bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True)
    return Tokenizer.from_folder(folder, config(bos_token_id=1, eos_token_ids=(2,)))


@pytest.fixture(scope="module")
def old_metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The decoder of folders without byte tokens: it drops every space of the first token."""
    folder = tmp_path_factory.mktemp("old_metaspace")
    core = metaspace_core()
    core.decoder = tokenizers.decoders.Metaspace()
    write_tokenizer(folder, core, bos_token="<s>", eos_token="</s>")
    return Tokenizer.from_folder(folder, config(bos_token_id=1, eos_token_ids=(2,)))


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with tokens of several bytes that begin or end within a character."""
    core = Core(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([CJK, EMOJI, "\u4e16\u754c\U0001f9aa\u00e9 \u00e8"] * 3, trainer)
    folder = tmp_path_factory.mktemp("byte_pairs")
    write_tokenizer(folder, core)
    return Tokenizer.from_folder(folder, config())


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.stream_decoder()
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.fixture(scope="module")
def llama_3() -> Tokenizer:
    if not LLAMA_3.exists():
        pytest.skip("needs the Llama 3 tokenizer in shared/hf/llama3")
    shape = LlamaConfig.from_shape("llama-3.1-8b")
    return Tokenizer.from_folder(LLAMA_3, shape)


def test_llama_3_vectors(llama_3: Tokenizer) -> None:
    texts = (LLAMA_3 / "llama-bpe.inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = (LLAMA_3 / "llama-bpe.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        expected = [int(token_id) for token_id in line.split()]
        assert llama_3.encode(text, add_bos=False) == expected
        assert llama_3.encode(text) == [128000, *expected]
        assert llama_3.decode(expected) == text
        assert "".join(stream(llama_3, expected)) == text


def test_one_bos(byte_level: Tokenizer) -> None:
    plain = byte_level.encode("the cat", add_bos=False)
    assert BOS not in plain
    assert byte_level.encode("the cat") == [BOS, *plain]
    assert byte_level.encode("<|begin|>the cat") == [BOS, *plain]
    assert byte_level.encode("<|begin|><|begin|>the cat") == [BOS, *plain]
    assert byte_level.encode("") == [BOS]
    assert byte_level.encode("<|begin|>the cat", add_bos=False) == [BOS, *plain]


@pytest.mark.parametrize(
    ("post_processor", "settings", "config_bos", "adds"),
    [
        (True, {"bos_token": "<|begin|>"}, None, True),
        (False, {"bos_token": "<|begin|>"}, None, False),
        (False, {"bos_token": "<|begin|>", "add_bos_token": True}, None, False),
        (True, {"bos_token": "<|begin|>", "add_bos_token": False}, None, True),
        (True, {"bos_token": {"content": "<|begin|>"}, "add_bos_token": None}, None, True),
        (True, {}, 0, True),
        (True, {}, None, True),
        (True, {"bos_token": None}, None, True),
        (False, {"add_bos_token": True}, None, False),
    ],
)
def test_the_folder_decides_whether_texts_begin_with_bos(
    post_processor: bool,
    settings: dict[str, Any],
    config_bos: int | None,
    adds: bool,
    byte_level_core: Callable[[], Core],
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path, byte_level_core(), **settings)
    if not post_processor:
        content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        content["post_processor"] = None
        (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path, config(bos_token_id=config_bos))
    assert tokenizer.encode("the").count(BOS) == int(adds)
    assert tokenizer.encode("<|begin|>the").count(BOS) == 1


CHATML = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.mark.parametrize(
    ("single", "begin"), [("<|begin|> $A", [0]), ("<|begin|> $A <|end|>", [0]), ("<|end|> <|begin|> $A", [1, 0])]
)
def test_texts_begin_with_what_the_post_processor_puts_in_front(
    single: str, begin: list[int], byte_level_core: Callable[[], Core], tmp_path: Path
) -> None:
    """Also if the folder's begin token is another one, which a chat template then writes."""
    core = byte_level_core()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    settings = {"bos_token": "<|user|>", "chat_template": CHATML, "tokenizer_class": FAST}
    write_tokenizer(tmp_path, core, **settings)
    tokenizer = Tokenizer.from_folder(tmp_path, config())
    plain = tokenizer.encode("the cat", add_bos=False)
    spelled_out = "".join(str(core.id_to_token(token_id)) for token_id in begin)
    for text in ("the cat", f"{spelled_out}the cat", f"{spelled_out}{spelled_out}the cat"):
        assert tokenizer.encode(text) == begin + plain
    assert tokenizer.encode("<|user|>the cat") == [*begin, 2, *plain]
    assert tokenizer.encode_chat([{"role": "user", "content": "the cat"}]) == [2, *plain, 1, 3]
    assert tokenizer.prefix_token_id == 2  # the begin token that the folder names
    (tmp_path / "chat_template.jinja").write_text("<|assistant|>", encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path, config()).encode_chat([]) == [*begin, 3]


def test_no_tokenizer_config(byte_level_core: Callable[[], Core], tmp_path: Path) -> None:
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path, config(bos_token_id=BOS, eos_token_ids=(1,)))
    assert tokenizer.encode("<|begin|>the")[0] == tokenizer.bos_token_id == BOS
    assert tokenizer.eos_token_ids == (1,)


def test_truncation_and_padding_are_switched_off(byte_level_core: Callable[[], Core], tmp_path: Path) -> None:
    core = byte_level_core()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    write_tokenizer(tmp_path, core, bos_token="<|begin|>")
    tokenizer = Tokenizer.from_folder(tmp_path, config())
    text = "a long text that has more than four tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_eos_of_the_folder(single_folder: Path) -> None:
    (single_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}), encoding="utf-8")
    settings = json.loads((single_folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["eos_token"] = "<|user|>"
    (single_folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    shape = LlamaConfig.from_folder(single_folder)
    assert shape.eos_token_ids == (1, 2, 3)
    assert Tokenizer.from_folder(single_folder, shape).eos_token_ids == (1, 2, 3)


class Vocabulary:
    """A tokenizer that encodes nothing."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self._vocab = vocab

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return self._vocab


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"prompt: expected UTF-8 text, found '\\udcff' at character 2") as caught:
        byte_level.encode("ab\udcffc")
    assert str(caught.value).isprintable()


def test_ids_of_no_token_are_refused(byte_level: Tokenizer) -> None:
    last = byte_level._vocab_size - 1
    byte_level.decode([0, last])
    for wrong in (-1, last + 1, 2**32):
        with pytest.raises(UserError, match=f"^token ids: expected 0 .. {last}, found {wrong}$"):
            byte_level.decode([0, wrong])


def test_special_tokens_by_their_text(byte_level: Tokenizer, metaspace: Tokenizer) -> None:
    found = {text: byte_level.special_token_id(text) for text in ("<|end|>", "the", "<|end|> ", "<|no|>", "")}
    assert found == dict.fromkeys(found) | {"<|end|>": 1}
    assert metaspace.special_token_id("</s>") == 2


def test_a_text_of_too_many_tokens_by_its_length(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is encoded. A text that may fit is encoded: the longest token repeated is the limit."""
    vocab = byte_level._core.get_vocab(with_added_tokens=True)
    text = "a" * (10 * max(map(len, vocab)))
    assert byte_level.encode(text, max_total_tokens=10) == byte_level.encode(text)
    monkeypatch.setattr(byte_level, "_core", Vocabulary(vocab))
    with pytest.raises(UserError, match=f"prompt: {len(text) + 1} characters are more than 10 tokens can hold"):
        byte_level.encode(text + "a", max_total_tokens=10)


@pytest.mark.parametrize("text", [CJK, EMOJI, "na\u00efve caf\u00e9", "the cat", " the", "a\n\n b", "\ufffd!", ""])
@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
def test_streaming_gives_whole_characters(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_bos=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_byte_level_streaming_does_not_delay_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("x\u4f60y", add_bos=False)
    assert len(ids) == 5
    assert stream(byte_level, ids) == ["x", "", "", "\u4f60", "y", ""]
    assert stream(byte_level, ids[:3]) == ["x", "", "", "\ufffd"]


def test_metaspace_streaming_keeps_spaces(metaspace: Tokenizer) -> None:
    ids = metaspace.encode("the cat the", add_bos=False)
    assert stream(metaspace, ids) == ["the", " ", "c", "a", "t", " the", ""]
    # A special token in the middle is skipped and does not start a new text.
    assert "".join(stream(metaspace, [1, *ids, 2, *ids])) == "the cat the the cat the"


def test_metaspace_streaming_of_byte_runs(metaspace: Tokenizer) -> None:
    def byte_ids(data: bytes) -> list[int]:
        return [3 + byte for byte in data]

    a = metaspace.encode("a", add_bos=False)[1:]
    good = byte_ids("\u00e9\U0001f999".encode())
    assert stream(metaspace, [*a, *good, *a]) == ["a", *[""] * len(good), "\u00e9\U0001f999a", ""]
    broken = [*a, *good, *byte_ids(b"\xff"), *a]
    assert "".join(stream(metaspace, broken)) == metaspace.decode(broken) == "a" + "\ufffd" * 7 + "a"


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assume("<|" not in text)  # the name of a special token is encoded as that token, and decoding leaves it out
    ids = byte_level.encode(text)
    pieces = stream(byte_level, ids)
    assert ids.count(BOS) == 1
    assert "".join(pieces) == byte_level.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.num_decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        return self._core.id_to_token(token_id)


@pytest.mark.parametrize("broken", [b"\x82", b"\xe2", b"\xe2\x82", b"\xf0\x9f\xa6", b"\xf0\x9f\xa6\xe2\x82\x82\x82"])
def test_endless_broken_characters_are_streamed_in_linear_time(broken: bytes, byte_level: Tokenizer) -> None:
    """All characters but the last are final."""
    characters = ("a", "\u2082", "\U0001f9aa")
    of_byte = {
        byte: token_id
        for char in characters
        for byte, token_id in zip(char.encode(), byte_level.encode(char, add_bos=False), strict=True)
    }
    data = b"a" + broken * 300
    ids = [of_byte[byte] for byte in data]
    core = Counting(byte_level._core)
    decoder = byte_level.stream_decoder()
    decoder._core = core
    text = ""
    for count, token_id in enumerate(ids, 1):
        text += decoder.push(token_id)
        so_far = data[:count].decode("utf-8", errors="replace")
        assert text == so_far.removesuffix("\ufffd")
    assert text + decoder.flush() == data.decode("utf-8", errors="replace") == byte_level.decode(ids)
    assert core.num_decoded < 50 * len(ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_pairs", "metaspace", "old_metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_streaming_equals_decoding(name: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    # Mostly bytes: valid, broken and partial characters occur beside words, special and unknown tokens.
    some = data.draw(st.lists(st.integers(0, 291), min_size=1, max_size=30))
    ids = data.draw(st.lists(st.sampled_from(some), max_size=60))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_whole_folder(make_folder: Callable[..., Path]) -> None:
    folder = make_folder(num_hidden_layers=1)
    tokenizer = Tokenizer.from_folder(folder, LlamaConfig.from_folder(folder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
    assert prompt == "<|begin|><|user|>the cat<|end|><|assistant|>"
    ids = tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids) == "the cat"


def test_a_byte_order_mark_is_no_part_of_a_file(single_folder: Path) -> None:
    """Editors on Windows write one."""
    expected = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder)).encode("the cat")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (single_folder / name).write_bytes(codecs.BOM_UTF8 + (single_folder / name).read_bytes())
    assert Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder)).encode("the cat") == expected


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.model"])
def test_files_of_an_old_tokenizer_are_to_be_converted(name: str, single_folder: Path) -> None:
    """The advice works."""
    path = single_folder / "tokenizer.json"
    expected = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder)).encode("the cat")
    core = Core.from_file(str(path))
    path.unlink()
    found = name
    if name == "vocab.json":
        core.model.save(str(single_folder))
        found = "vocab.json and merges.txt"
        settings = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<|begin|>"}
        (single_folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    else:
        (single_folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=rf"tokenizer.json: expected a tokenizer, found only {found}; save it") as error:
        Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder))
    if name == "vocab.json":
        exec(shlex.split(str(error.value).partition("python -c ")[2])[0])
        ids = Tokenizer.from_folder(single_folder, LlamaConfig.from_folder(single_folder)).encode("the cat")
        assert ids == expected[1:]  # Qwen2's has no begin token


def test_an_interrupt_is_not_reported_as_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of the library is not an `Exception` either."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_buffer=interrupted))
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_folder(tmp_path, config())


def test_text_continues_the_prompts(metaspace: Tokenizer, byte_level: Tokenizer) -> None:
    """A decoder that drops the first space of a text drops none after a prompt."""
    for tokenizer in (metaspace, byte_level):
        for text in ("he the the he", "the at\u20ac the", "a\u20ac", 3 * "\u20ac\u4e2d\u6587" + "\u20ac the"):
            ids = tokenizer.encode(text)
            for cut in range(1, len(ids)):
                decoder = tokenizer.stream_decoder(ids[:cut])
                rest = "".join([*(decoder.push(token_id) for token_id in ids[cut:]), decoder.flush()])
                before = tokenizer.decode(ids[:cut])
                if "\ufffd" not in before:
                    assert before + rest == text, (cut, ids)
    assert metaspace.stream_decoder().push(metaspace.encode("he the")[-1]) == "the"


def test_tokens_that_were_added_may_have_no_embedding(tmp_path: Path, byte_level_core: Callable[[], Core]) -> None:
    core = byte_level_core()
    size = core.get_vocab_size(with_added_tokens=True)
    core.add_special_tokens(["[PAD]"])
    write_tokenizer(tmp_path, core, bos_token="<|begin|>", eos_token="<|end|>")
    shape = {"bos_token_id": BOS, "eos_token_ids": (1,)}
    with pytest.raises(UserError, match=rf"'\[PAD\]' has no embedding: its id is {size}, vocab_size is {size}"):
        Tokenizer.from_folder(tmp_path, config(size, **shape)).encode("the [PAD]")
    assert Tokenizer.from_folder(tmp_path, config(size, **shape)).encode("the")
    with pytest.raises(UserError, match="vocabulary: expected ids below vocab_size"):
        Tokenizer.from_folder(tmp_path, config(size - 1 - BOS, **shape))


def test_token_ids_are_sequences_or_arrays_of_integers() -> None:
    for ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint16), torch.tensor([1, 2])):
        found = token_ids(ids)
        assert found == [1, 2]
        assert {type(token) for token in found} == {int}
    assert token_ids([]) == token_ids(np.array([], int)) == []
    for wrong in (np.array([1.0]), torch.tensor([True]), np.array([[1, 2]]), torch.tensor(1), {1, 2}, {1: 2}, b"ab", 5):
        with pytest.raises(UserError, match="prompt: expected a text or token ids, found"):
            token_ids(wrong)


def test_prompts_are_told_from_token_ids() -> None:
    for one in ("ab", [1, 2], (1, 2), np.array([1, 2]), list(np.array([1, 2])), [], [1, "a"], 5, None):
        assert len(prompts_of(one)) == 1
        assert prompts_of(one)[0] is one
    arrays = [np.array([1, 2]), torch.tensor([3])]
    for several in (["ab"], ["ab", [1]], ((1, 2), (3,)), [range(1, 3), [3]], arrays):
        assert prompts_of(several) == list(several)
    for ids in (list(np.array([1, 2])), tuple(np.array([1, 2], np.uint16)), list(torch.tensor([1, 2]))):
        (found,) = encode_prompts(ids, lambda: pytest.fail("nothing to encode"), 5)
        assert found == [1, 2]
        assert {type(token) for token in found} == {int}


def test_all_of_a_prompt_is_spelled() -> None:
    """Also unknown ids and values that are not prompts: ranks compare them before one of them refuses."""
    assert [spelled(prompt) for prompt in ("The road", [3, -1], (2**63 - 1,))] == [
        "text: The road",
        "[3, -1]",
        f"[{2**63 - 1}]",
    ]
    huge = [spelled([1, 10**5000 + more]) for more in (0, 1)]
    assert huge[0] != huge[1]
    assert spelled([1.5]) == "prompt: expected a text or token ids, found [1.5]"
    ids = torch.arange(5000)
    assert spelled(list(ids)) == str(ids.tolist()), "nothing is left out"
    alike = ["[1]", [1], '["[1]"]', ["[1]"], [[1]], '1 prompts: ["[1]"]']
    assert len({spelled(prompt) for prompt in alike}) == len(alike)


def test_a_text_after_a_special_token_is_a_new_text(metaspace: Tokenizer) -> None:
    """Such as an answer after the opening of the assistant's message: it does not begin with a space."""
    prompt, (*_, token_id) = [*metaspace.encode("he"), metaspace.eos_token_ids[0]], metaspace.encode("he the")
    assert metaspace.stream_decoder(prompt).push(token_id) == "the"
    assert metaspace.stream_decoder(prompt[:-1]).push(token_id) == " the"


def test_the_text_of_one_token(metaspace: Tokenizer, old_metaspace: Tokenizer, byte_level: Tokenizer) -> None:
    """As it is inside a text: with its space. The texts of the tokens of an ASCII text join to that text."""
    for tokenizer in (metaspace, old_metaspace):
        names = ["\u2581the", "he", "\u2581\u2581", "</s>", "<unk>"]
        texts = [tokenizer.token_text(tokenizer.core.token_to_id(name)) for name in names]
        assert texts == [" the", "he", "  ", "</s>", "<unk>"]
    assert metaspace.token_text(metaspace.core.token_to_id("<0xC3>")) == "\N{REPLACEMENT CHARACTER}"
    ids = byte_level.encode("the cat\n sat", add_bos=False)
    assert "".join(map(byte_level.token_text, ids)) == "the cat\n sat"
    assert byte_level.token_text(BOS) == "<|begin|>"
    assert byte_level.token_text(byte_level.encode("\u4e16", add_bos=False)[0]).startswith("\ufffd")
    assert byte_level.token_text(399) == "", "a row of the embedding without a token"
    assert byte_level.token_text(BOS) == "<|begin|>", "also a second time"
