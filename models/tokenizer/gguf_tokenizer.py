"""Build a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core
from tokenizers.models import BPE

from alspec.errors import UserError, show
from alspec.models.checkpoint.gguf_header import GgufModel
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.chat_template import TOOLS_NAME
from alspec.models.tokenizer.tokenizer import Tokenizer

__all__ = ["gguf_tokenizer", "merges_of_scores"]

_TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens that are found in a text before it is split
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's spelling of a space
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # %s: how digits are grouped
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2, _SMOLLM, _LLAMA_3, _QWEN_2, _TEKKEN = "gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"
# llama.cpp (src/llama-vocab.cpp) splits texts in the same way for these names.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    _GPT_2: ("phi-2", "a.x-4.0", "mellum", "mpt", "olmo", "trillion"),
    _SMOLLM: ("starcoder", "refact", "codeshell", "minerva-7b"),
    _LLAMA_3: ("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
    _QWEN_2: ("deepseek-r1-qwen", "megrez"),
    _TEKKEN: (),
}
_PRE_NAMES = {name: pre for pre, others in _OTHER_NAMES.items() for name in (pre, *others)}
_WHOLE = (_LLAMA_3, _TEKKEN)  # a word that is a token is not merged, and texts begin with BOS


def gguf_tokenizer(model: GgufModel, config: LlamaConfig) -> Tokenizer:
    """Build the tokenizer that `tokenizer.ggml.model` names: `gpt2` (byte-level BPE) or `llama` (sentencepiece BPE).

    Raises:
        UserError: another tokenizer or pre-tokenizer (named), or metadata that are missing or do not fit together.
    """
    read = _Metadata(model)
    kind = read.get("model")
    if kind not in ("gpt2", "llama"):
        raise read.error("model", "gpt2 or llama", kind)
    tokens = read.list_of("tokens", str)
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise read.error("tokens", "each token once", twice)
    if len(tokens) > config.vocab_size:
        raise read.error("tokens", f"up to {config.vocab_size} tokens (rows of the embedding)", len(tokens))
    adds_bos = kind == "llama" or _PRE_NAMES.get(str(read.get("pre"))) in _WHOLE
    core = _byte_level_core(read, tokens) if kind == "gpt2" else _sentencepiece_core(read, tokens)
    _add_special(core, read, tokens)
    settings: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = read.token_id(key, len(tokens))
        if token_id is not None:
            settings[f"{name}_token"] = tokens[token_id]
    template = model.metadata.get(_TEMPLATE)
    if template is not None:
        settings["chat_template"] = template
        for_tools = model.metadata.get(f"{_TEMPLATE}.{TOOLS_NAME}")
        if for_tools is not None:  # as a folder lists named templates
            named = {"default": template, TOOLS_NAME: for_tools}
            settings["chat_template"] = [{"name": name, "template": each} for name, each in named.items()]
    return Tokenizer(core, config, settings, model.path, read.get("add_bos_token", adds_bos) is True)


class _Metadata:
    """Reads values of the metadata under `tokenizer.ggml.`."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model

    def get(self, name: str, default: Any = None) -> Any:
        return self._model.metadata.get(f"tokenizer.ggml.{name}", default)

    def token_id(self, name: str, num_tokens: int) -> int | None:
        found = self.get(f"{name}_token_id")
        if found is not None and (type(found) is not int or not 0 <= found < num_tokens):
            raise self.error(f"{name}_token_id", f"an id from 0 to {num_tokens - 1}", found)
        return found

    def list_of(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or (values and type(values[0]) is not kind):
            raise self.error(name, "a list", values)
        if length is not None and len(values) != length:
            raise self.error(name, f"{length} values, as many as tokens", len(values))
        return values

    def error(self, name: str, expected: str, found: Any) -> UserError:
        instead = "none" if found is None else show(found)
        return UserError(
            f"{self._model.path}: tokenizer.ggml.{name}: expected {expected}, found {instead}; "
            "give token ids, or a file that another converter wrote"
        )


def _bpe(read: _Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Core:
    try:
        return Core(BPE(vocab, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise read.error("merges", "pairs of tokens", str(error)) from None


def _byte_level_core(read: _Metadata, tokens: list[str]) -> Core:
    """Byte-level BPE, as GPT-2's, with the pre-tokenizer that `pre` names."""
    pre = _PRE_NAMES.get(str(read.get("pre")))
    if pre is None:
        raise read.error("pre", f"{', '.join(_OTHER_NAMES)} or another name of one of them", read.get("pre"))
    merges = [tuple(merge.split(" ")) for merge in read.list_of("merges", str)]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise read.error("merges", "pairs of tokens", " ".join(wrong))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    core = _bpe(read, vocab, merges, ignore_merges=pre in _WHOLE)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in (_GPT_2, _SMOLLM))
    if pre == _SMOLLM:
        first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre == _GPT_2:
        first = []
    elif pre == _TEKKEN:
        first = [pre_tokenizers.Split(Regex(_TEKKEN_WORDS), "isolated")]
    else:
        digits = r"\p{N}{1,3}" if pre == _LLAMA_3 else r"\p{N}"
        first = [pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    if pre == _QWEN_2:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece_core(read: _Metadata, tokens: list[str]) -> Core:
    """BPE of sentencepiece: the pair whose token has the highest score is merged first; bytes stand for the rest."""
    scores = read.list_of("scores", float, len(tokens))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = tokens[read.token_id("unknown", len(tokens)) or 0]
    core = _bpe(read, vocab, merges_of_scores(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prepend = [normalizers.Prepend(_SPACE)] if read.get("add_space_prefix", True) else []
    core.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return core


def merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that together are a token: the highest score of it first, then by the ids of the pair."""
    merges = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token_id], vocab[left], vocab[right], left, right))
    return [merge[3:] for merge in sorted(merges)]


def _add_special(core: Core, read: _Metadata, tokens: list[str]) -> None:
    """Declare the tokens that are found in a text as a whole; decoding leaves out all but the user's."""
    if read.get("token_type") is None:
        return
    types = read.list_of("token_type", int, len(tokens))
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    core.add_tokens(added)
