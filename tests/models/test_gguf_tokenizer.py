"""Tokenizers from GGUF metadata against plain implementations of llama.cpp's rules, on random texts."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex

gguf = pytest.importorskip("gguf")

from gguf_files import VOCAB, write_gguf  # noqa: E402
from paths import SHARED  # noqa: E402
from tokenizers import Tokenizer as Core  # noqa: E402
from tokenizers import models, pre_tokenizers, trainers  # noqa: E402

from alspec.config import EngineConfig  # noqa: E402
from alspec.errors import UserError  # noqa: E402
from alspec.models.checkpoint.gguf_header import GgufModel  # noqa: E402
from alspec.models.checkpoint.source import has_tokenizer, model_config, model_path, open_tokenizer  # noqa: E402
from alspec.models.llama_config import LlamaConfig  # noqa: E402
from alspec.models.tokenizer.gguf_tokenizer import gguf_tokenizer  # noqa: E402
from alspec.models.tokenizer.tokenizer import Tokenizer  # noqa: E402

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<|begin|>", "<|eot_id|>", "<tool>"]  # begin, end of turn, a token of the user
TEXT = "the cat's 12345 dogs sat on the mat, and the dog said: it's 1234 o'clock\n\n  in the morning!"
CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp applies the patterns of a pre-tokenizer one after the other; what none matches is a piece, too.
PATTERNS = {
    "gpt-2": [GPT_2],
    "smollm": [r"\p{N}", GPT_2],
    "llama-bpe": [LLAMA_3],
    "qwen2": [LLAMA_3.replace("{1,3}", "")],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


def random_texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)

    def character(first: int, last: int) -> str:
        while True:
            found = chr(chance.randrange(first, last))
            # Not: what another version of Unicode may have, and letters that ignoring case takes for s and k.
            if unicodedata.category(found) not in ("Cn", "Cs", "Co") and found not in "\u017f\u212a":
                return found

    kinds: list[Callable[[], str]] = [
        lambda: character(32, 127),
        lambda: chance.choice([" ", "  ", "\n", "\r\n", "\t", "\u3000", "\xa0"]),
        lambda: chance.choice("0123456789²Ⅷ٣"),
        lambda: chance.choice(["'s", "'LL", "it's", " the", "the cat", "e\u0301", "👍🏽", "</s>", "<"]),
        lambda: character(0xA0, 0x3000),
        lambda: character(0x3000, 0x20000),
    ]
    return ["".join(chance.choice(kinds)() for _ in range(chance.randrange(1, 25))) for _ in range(count)]


def write(path: Path, kind: str, tokens: list[str], types: list[int], **values: Any) -> Path:
    def edit(writer: Any) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for name, value in values.items():
            key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_uint32(key, value)

    write_gguf(path, "Q8_0", edit=edit)
    return path


def opened(path: Path) -> Tokenizer:
    config = EngineConfig(model=path)
    assert has_tokenizer(config)
    return open_tokenizer(config, model_config(config))


def trained(pre: str = "gpt-2") -> tuple[list[str], list[list[str]]]:
    """Tokens, special ones first, and merges of a tiny byte-level vocabulary."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator([TEXT] * 4, trainer)
    vocab = core.get_vocab()
    return sorted(vocab, key=vocab.__getitem__), json.loads(core.to_str())["model"]["merges"]


def merged(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merge the leftmost pair of the lowest rank until none has one."""
    while True:
        ranks = [(found, at) for at in range(len(symbols) - 1) if (found := rank(*symbols[at : at + 2])) is not None]
        if not ranks:
            return symbols
        _, at = min(ranks)
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


def byte_level(text: str) -> str:
    core = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in core.pre_tokenize_str(text))


def split(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        parts: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                parts += [piece[at : match.start()], match[0]]
                at = match.end()
            parts.append(piece[at:])
        pieces = [part for part in parts if part]
    return pieces


@pytest.mark.parametrize("pre", PATTERNS)
def test_byte_level_tokens_follow_the_rules(pre: str, tmp_path: Path) -> None:
    tokens, merges = trained(pre)
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    path = write(tmp_path / "model.gguf", "gpt2", tokens, types, pre=pre, merges=[" ".join(pair) for pair in merges])
    tokenizer = opened(path)
    ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
    for text in random_texts(1500):
        plain = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        expected: list[str] = []
        for piece in split(plain, PATTERNS[pre]):
            whole = byte_level(piece)
            is_kept = pre in ("llama-bpe", "tekken") and whole in tokens
            expected += [whole] if is_kept else merged(list(whole), lambda *pair: ranks.get(pair))
        ids = tokenizer.encode(text, add_bos=False)
        assert [tokens[token_id] for token_id in ids] == expected, text
        assert tokenizer.decode(ids) == plain


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("deepseek-r1-qwen", "qwen2"), ("megrez", "qwen2"), ("falcon3", "llama-bpe"), ("llama-v3", "llama-bpe"),
        ("pixtral", "llama-bpe"), ("midm-2.0", "llama-bpe"), ("mellum", "gpt-2"), ("a.x-4.0", "gpt-2"),
        ("phi-2", "gpt-2"), ("olmo", "gpt-2"), ("starcoder", "smollm"), ("refact", "smollm"), ("minerva-7b", "smollm"),
    ],
)  # fmt: skip
def test_another_name_of_a_pre_tokenizer(name: str, pre: str, tmp_path: Path) -> None:
    tokens, merges = trained(pre)
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    values: dict[str, Any] = {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 0}
    named, plain = (
        opened(write(tmp_path / f"{each}.gguf", "gpt2", tokens, types, pre=each, **values)) for each in (name, pre)
    )
    for text in random_texts(100):
        assert named.encode(text) == plain.encode(text), text


def sentencepiece_vocabulary() -> tuple[list[str], list[int], list[float]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    words = ["th", "he", "the", "▁t", "▁the", "in", "ca", "cat", "at", "▁c", "▁cat", "▁▁", "it", "'s", "▁a", "é"]
    letters = [*"▁thecainos'm.,"]
    tokens, types = [*tokens, *words, *letters][:VOCAB], [*types, *[NORMAL] * 100]
    return tokens, types[: len(tokens)], [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]


def test_sentencepiece_tokens_follow_the_rules(tmp_path: Path) -> None:
    tokens, types, scores = sentencepiece_vocabulary()
    path = write(tmp_path / "m.gguf", "llama", tokens, types, scores=scores, bos_token_id=1, eos_token_id=2)
    tokenizer = opened(path)
    ids = {token: token_id for token_id, token in enumerate(tokens)}

    def rank(left: str, right: str) -> float | None:
        return -scores[ids[left + right]] if left + right in ids and not left.startswith("<0x") else None

    for text in random_texts(1500):
        expected = []
        for part in regex.split(r"(</s>)", text):
            if part == "</s>":
                expected.append(2)
            elif part:
                symbols = merged(list("▁" + part.replace(" ", "▁")), rank)
                for symbol in symbols:
                    known = symbol in ids
                    expected += [ids[symbol]] if known else [3 + byte for byte in symbol.encode()]
        assert tokenizer.encode(text, add_bos=False) == expected, text
    assert tokenizer.encode("the cat") == [1, ids["▁the"], ids["▁cat"]]
    assert tokenizer.decode(tokenizer.encode("the cat, naïve 👍")) == "the cat, naïve 👍"
    assert tokenizer.eos_token_ids == (2,)


def test_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    tokens, merges = trained()
    types = [CONTROL, CONTROL, USER, *[NORMAL] * (len(tokens) - 3)]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    values = {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 0, "chat_template": template}
    path = tmp_path / "model.gguf"
    tokenizer = opened(write(path, "gpt2", tokens, types, pre="llama-bpe", **values))
    assert tokenizer.eos_token_ids == (1,)  # known by its text
    hello = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("hello") == [0, *hello]  # as llama.cpp does for this pre-tokenizer
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [0, *hello, 1]
    assert tokenizer.decode([0, *hello, 2, 1]) == "hello<tool>"
    assert opened(write(path, "gpt2", tokens, types, pre="gpt-2", **values)).encode("hello") == hello
    values["chat_template.tool_use"] = "{{ messages[0].content }}{{ tools[0].name }}"
    tokenizer = opened(write(path, "gpt2", tokens, types, pre="gpt-2", **values))
    user = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(user) == "<|begin|>hello<|eot_id|>"
    assert tokenizer.apply_chat_template(user, tools=[{"name": "clock"}]) == "helloclock"
    values["add_bos_token"] = True
    assert opened(write(path, "gpt2", tokens, types, pre="gpt-2", **values)).encode("hello") == [0, *hello]
    write_gguf(path)
    assert not has_tokenizer(EngineConfig(model=path))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"kind": "rwkv"}, "tokenizer.ggml.model: expected gpt2 or llama, found 'rwkv'"),
    "pre": ({"pre": "falcon"}, "tokenizer.ggml.pre: expected gpt-2, smollm, llama-bpe, qwen2, tekken"),
    "merge": ({"merges": ["a b", "zz qq"]}, "tokenizer.ggml.merges: expected pairs of tokens, found"),
    "merge of three": ({"merges": ["a b c"]}, "tokenizer.ggml.merges: expected pairs of tokens, found 'a b c'"),
    "types": ({"types": [NORMAL]}, "tokenizer.ggml.token_type: expected 4 values, as many as tokens, found 1"),
    "twice": ({"tokens": ["a", "b", "ab", "a"]}, "tokenizer.ggml.tokens: expected each token once, found 'a'"),
    "begin": ({"unknown_token_id": 9}, "tokenizer.ggml.unknown_token_id: expected an id from 0 to 3, found 9"),
    "scores": ({"kind": "llama", "scores": [0.5]}, "tokenizer.ggml.scores: expected 4 values"),
    "size": ({"tokens": [f"t{index}" for index in range(VOCAB + 1)]}, f"tokens: expected up to {VOCAB} tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    changes, expected = FAULTS[fault]
    usual = {"kind": "gpt2", "tokens": ["a", "b", "ab", "c"], "types": [NORMAL] * 4, "pre": "gpt-2", "merges": ["a b"]}
    path = write(tmp_path / "model.gguf", **(usual | changes))
    with pytest.raises(UserError) as caught:
        opened(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_smollm2_equals_the_tokenizer_of_transformers() -> None:
    """Which reads the same file but takes `smollm` for `gpt-2`: equal for texts without digits."""
    try:
        path = model_path(EngineConfig(model="smollm2"))
    except UserError as error:
        pytest.skip(str(error))
    import transformers

    reference: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = opened(path)
    core = Core.from_str(reference.backend_tokenizer.to_str())
    for text in random_texts(3000):
        plain = "".join(character for character in text if not character.isnumeric())
        assert tokenizer.encode(plain, add_bos=False) == core.encode(plain, add_special_tokens=False).ids
    first = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([first, core.pre_tokenizer])
    for text in random_texts(3000, seed=1):
        assert tokenizer.encode(text, add_bos=False) == core.encode(text, add_special_tokens=False).ids
    messages = [{"role": "user", "content": "Hello there"}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages) == expected


def test_a_published_vocabulary_gives_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    """Llama 3's, as a converter writes it, beside tokenizer.json on its own vectors and on random texts."""
    folder = SHARED / "hf" / "llama3"
    if not folder.exists():
        pytest.skip("needs the Llama 3 tokenizer in shared/hf/llama3")
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    core = Core.from_file(str(folder / "tokenizer.json"))
    tokens = [name for name, _ in sorted(core.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])]
    special = {entry["id"] for entry in raw["added_tokens"]}
    types = [CONTROL if token_id in special else NORMAL for token_id in range(len(tokens))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
    values = {"model": "gpt2", "pre": "llama-bpe", "tokens": tokens, "token_type": types, "merges": merges}
    values |= {"bos_token_id": 128000, "eos_token_id": 128009}
    model = GgufModel(tmp_path / "no.gguf", {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {}, {})
    tokenizer = gguf_tokenizer(model, LlamaConfig.from_shape("llama-3.1-8b"))
    texts = (folder / "llama-bpe.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    for text in [*texts, *random_texts(500), "<|eot_id|>a<|begin_of_text|> b", *random_texts(100, 1)]:
        assert tokenizer.encode(text) == core.encode(text).ids, text
