"""Convert text to token ids and back, with a checkpoint's tokenizer.json."""

from __future__ import annotations

import codecs
import json
import operator
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import tokenizers

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import absent, check_utf8, foreign_content, is_there
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.chat_template import (
    find_template,
    render_chat,
    with_continued_end,
    with_text_contents,
)
from alspec.models.tokenizer.tokenizer_config import add_tokens, naming_file, read_tokenizer_config, special_tokens

__all__ = ["Prompt", "StreamDecoder", "Tokenizer", "encode_prompts", "prompts_of", "spelled", "token_ids"]

Prompt = str | Sequence[int]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PROMPT_CONTEXT = 8  # prompt tokens, at least, decoded in front of an answer; a character has up to 4 tokens
_OLD_FILES = (("vocab.json", "merges.txt"), ("tokenizer.model",))  # tokenizers that transformers converts
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A checkpoint's tokenizer: encoding, decoding, chat template and streaming.

    Text is decoded as the vocabulary spells it. `clean_up_tokenization_spaces` of older folders is not applied, because
    it would delete spaces that the model wrote.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        config: LlamaConfig,
        settings: dict[str, Any],
        folder: Path,
        adds_bos: bool | None = None,
    ) -> None:
        """adds_bos: whether texts begin with the begin token; None: with what the post-processor of `core` adds."""
        self._core = core
        core.encode_special_tokens = settings.get("split_special_tokens") is True
        self._folder = folder
        self._settings = settings
        self._vocab_size = config.vocab_size
        self._special_tokens = special_tokens(settings)
        self.eos_token_ids = config.eos_token_ids
        self.bos_token_id = self._bos_token_id(config)
        self._begin_ids = self._find_begin_ids(adds_bos)  # ids that a text begins with
        self._token_texts: dict[int, str] = {}  # of `token_text`, which log probabilities ask for again and again
        self._special_ids = {id_ for id_, token in core.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def from_folder(cls, folder: Path, config: LlamaConfig) -> Self:
        """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json of a Hugging Face folder.

        Raises:
            UserError: a missing or broken file, a vocabulary that does not fit the embedding, a begin or end token that
                the vocabulary lacks, or a token of `added_tokens_decoder` that cannot get its id.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        core = _load(path)
        # Added tokens, such as one for padding, may have no embedding; `encode` refuses a text that contains one.
        vocab = core.get_vocab(with_added_tokens=True)
        largest = max(core.get_vocab(with_added_tokens=False), key=vocab.__getitem__, default="")
        if not largest or vocab[largest] >= config.vocab_size:
            found = f"id {vocab[largest]} of {show(largest)}" if largest else "an empty vocabulary"
            raise UserError(
                f"{path}: vocabulary: expected ids below vocab_size ({config.vocab_size} in config.json), "
                f"found {found}; use the tokenizer that belongs to the model"
            )
        settings = read_tokenizer_config(folder)
        add_tokens(core, settings, folder, config.vocab_size)
        vocab = core.get_vocab(with_added_tokens=True)
        for name in ("bos_token", "eos_token"):
            token = special_tokens(settings).get(name)
            if token is not None and vocab.get(token, config.vocab_size) >= config.vocab_size:
                raise UserError(
                    f"{naming_file(folder, name)}: {name}: expected a token of tokenizer.json, found {show(token)}; "
                    "use files of the same model"
                )
        return cls(core, config, settings, folder)

    def _bos_token_id(self, config: LlamaConfig) -> int | None:
        """Begin token of tokenizer_config.json, else of config.json, which the chat template can then use as well."""
        token = self._special_tokens.get("bos_token")
        if token is not None:
            return self._core.token_to_id(token)
        if config.bos_token_id is not None:
            text = self._core.id_to_token(config.bos_token_id)
            if text is not None:
                self._special_tokens["bos_token"] = text
                return config.bos_token_id
        return None

    def named_token(self, name: str) -> str | None:
        """Text of a special token that the tokenizer's own files name, such as `eos_token`."""
        return special_tokens(self._settings).get(name)

    @property
    def prefix_token_id(self) -> int | None:
        """Token that stands for an empty text: BOS or EOS that the tokenizer names, else the begin token, else None."""
        for token in map(self.named_token, ("bos_token", "eos_token")):
            if token is not None:
                return self._core.token_to_id(token)
        return self._begin_ids[-1] if self._begin_ids else self.bos_token_id

    def _find_begin_ids(self, adds_bos: bool | None) -> list[int]:
        """Return the ids that each text begins with. Those of a post-processor may differ from the begin token."""
        if adds_bos is not None:
            return [self.bos_token_id] if adds_bos and self.bos_token_id is not None else []
        encoding = self._core.encode("a", add_special_tokens=True)
        # The mask is 1 for tokens that the post-processor added; only those before the text count.
        num_before = next((index for index, is_added in enumerate(encoding.special_tokens_mask) if not is_added), 0)
        return list(encoding.ids[:num_before])

    def encode(
        self, text: str, add_bos: bool = True, max_total_tokens: int | None = None, where: str = "prompt"
    ) -> list[int]:
        """Token ids of `text`.

        With `add_bos` the result begins with exactly one BOS, also if the text already begins with it. BOS is what
        tokenizer.json puts in front, whatever `add_bos_token` is, as in transformers 5; a GGUF file says so itself. If
        the tokenizer adds no BOS, as in SmolLM, none is added, because the model was trained without it. With
        `add_bos=False` the text is encoded unchanged. Special tokens written out in `text` become their ids, unless
        tokenizer_config.json has `split_special_tokens: true`.

        Args:
            text: the text to encode.
            add_bos: begin with BOS.
            max_total_tokens: largest number of tokens that is possible. A text whose length alone exceeds it is refused
                before encoding, which could take minutes and all memory.
            where: origin of the text, for messages.
        Raises:
            UserError: `text` is not valid Unicode (lone surrogates of a prompt that was not UTF-8), far too long, or
                contains a token that has no embedding.
        """
        check_utf8(text, where)
        if max_total_tokens is not None and len(text) > max_total_tokens:
            # A token decodes to at most as many characters as its name has: in names, each byte is one character.
            max_characters = max_total_tokens * max(map(len, self._core.get_vocab(with_added_tokens=True)))
            if len(text) > max_characters:
                raise UserError(
                    f"{where}: {len(text)} characters are more than {max_total_tokens} tokens can hold; "
                    "shorten the prompt"
                )
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        if (largest := max(ids, default=0)) >= self._vocab_size:
            token = show(str(self._core.id_to_token(largest)))
            raise UserError(f"{where}: {token} has no embedding: its id is {largest}, vocab_size is {self._vocab_size}")
        if not add_bos or not self._begin_ids:
            return ids
        start, length = 0, len(self._begin_ids)
        while ids[start : start + length] == self._begin_ids:
            start += length
        return [*self._begin_ids, *ids[start:]]

    @property
    def core(self) -> tokenizers.Tokenizer:
        """The tokenizer as the tokenizers library has it: names and ids of tokens."""
        return self._core

    def special_token_id(self, text: str) -> int | None:
        """Id of `text` if it is a special token, which decoding leaves out; else None."""
        token_id = self._core.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens are left out; bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id is not in 0 .. vocab_size - 1.
        """
        ids = list(ids)
        if (wrong := next((token_id for token_id in ids if not 0 <= token_id < self._vocab_size), None)) is not None:
            raise UserError(f"token ids: expected 0 .. {self._vocab_size - 1}, found {wrong}")
        return str(self._core.decode(ids, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text: with its leading space, and special tokens as they are spelled.

        Bytes that are not UTF-8 become U+FFFD, such as those of a token that is a part of a character. An id that the
        tokenizer lacks has no text.
        """
        if (text := self._token_texts.get(token_id)) is None:
            text = self._token_texts[token_id] = self._text_of_token(token_id)
        return text

    def _text_of_token(self, token_id: int) -> str:
        name = self._core.id_to_token(token_id)
        if name is None or token_id in self._special_ids:
            return name or ""
        # Behind another token, because decoders of sentencepiece drop the space that a text begins with.
        before = self._core.encode("a", add_special_tokens=False).ids
        text = str(self._core.decode([*before, token_id], skip_special_tokens=False))
        return text[len(self._core.decode(before, skip_special_tokens=False)) :]

    @property
    def chat_template(self) -> str | None:
        """The template that `apply_chat_template` uses, or None. Raises as `find_template` does."""
        return find_template(self._folder, self._settings)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template. Raises as `find_template` does."""
        return self.chat_template is not None

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        variables: dict[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of `messages`, as the template of the checkpoint writes it.

        Args:
            messages: dicts with `role` and `content`, and whatever else the template reads. A content may be a list of
                text parts; see `with_text_contents`.
            tools: functions that the model may call, as JSON schemas.
            add_generation_prompt: end with the beginning of the assistant's answer. Default: unless the last message
                is continued.
            variables: others that the template reads, such as `enable_thinking`.
            continue_final_message: end with the content of the last message, for the model to continue it.
        Raises:
            UserError: the folder has no usable chat template; see `find_template`, `render_chat`. A part of a content
                that is no text, a last message that cannot be continued, or a new answer beside it.
        """
        if add_generation_prompt and continue_final_message:
            raise UserError("add_generation_prompt and continue_final_message exclude each other; give one of them")
        adds_prompt = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        template = find_template(self._folder, self._settings, has_tools=tools is not None)
        if template is None:
            raise UserError(
                f"{self._folder}: chat template: expected chat_template.jinja or chat_template in "
                "tokenizer_config.json, found none; leave out --chat or use an instruction-tuned model"
            )
        names = self._special_tokens | (variables or {})
        texts = with_text_contents(messages)

        def render(texts: list[dict[str, Any]]) -> str:
            arguments = names, str(self._folder), tools, adds_prompt
            try:
                return render_chat(template, texts, *arguments)
            except UserError:
                if all("content" in text for text in texts):
                    raise
                # Some templates compare a content with null, and fail without one.
                return render_chat(template, [{"content": None} | text for text in texts], *arguments)

        return with_continued_end(render, texts) if continue_final_message else render(texts)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        max_total_tokens: int | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        variables: dict[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of `apply_chat_template`, with exactly one BOS (see `encode`) whether or not the template has it.

        If the template begins with tokenizer_config.json's begin token, no other begin token is added.
        """
        text = self.apply_chat_template(messages, tools, add_generation_prompt, variables, continue_final_message)
        bos = self._special_tokens.get("bos_token")
        has_own = bos is not None and text.startswith(bos) and self._begin_ids != [self.bos_token_id]
        return self.encode(text, add_bos=not has_own, max_total_tokens=max_total_tokens)

    def stream_decoder(self, prompt_ids: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one sequence of generated tokens; its text continues the text of the prompt."""
        return StreamDecoder(self._core, self._special_ids, prompt_ids)


def prompts_of(prompt: object) -> list[object]:
    """The prompts of a list or tuple of texts and token id sequences; anything else becomes a list of one."""
    return list(prompt) if _is_batch(prompt) else [prompt]  # type: ignore[call-overload]


def _is_batch(prompt: object) -> bool:
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(item, str | list | tuple | range) or _is_array(item) for item in prompt)


def _is_array(value: object) -> bool:
    return getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist")


def encode_prompts(
    prompt: Prompt | Sequence[Prompt], tokenizer: Callable[[], Tokenizer], max_total_tokens: int
) -> list[list[int]]:
    """Token ids of each of `prompts_of`. `tokenizer` is called only if a prompt is text.

    Raises:
        UserError: an empty text, a value that is not a prompt, or as `tokenizer` and `Tokenizer.encode`.
    """
    prompts, encoded = prompts_of(prompt), []
    for index, item in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt {index}"
        if not isinstance(item, str):
            encoded.append(token_ids(item, where))
        elif item:
            encoded.append(tokenizer().encode(item, max_total_tokens=max_total_tokens, where=where))
        else:
            raise UserError(f"{where}: expected a text, found an empty one")
    return encoded


def token_ids(prompt: object, where: str = "prompt") -> list[int]:
    """The ids of a prompt that is given as token ids, which may be a NumPy array or a PyTorch tensor.

    Raises:
        UserError: it is not a sequence of integers.
    """
    is_bytes = isinstance(prompt, bytes | bytearray | memoryview)  # text in an unknown encoding
    found: object = prompt
    if _is_array(prompt):
        with suppress(RuntimeError):  # raised by a sparse tensor, or one without data
            found = prompt.tolist()  # type: ignore[attr-defined]
    if isinstance(found, list) and not is_bytes and set(map(type, found)) == {int}:  # quick, for each first token
        return list(found)
    if isinstance(found, Sequence) and not is_bytes and not any(isinstance(token, bool) for token in found):
        with suppress(TypeError):
            return [operator.index(token) for token in found]
    raise UserError(f"{where}: expected a text or token ids, found {show(prompt, 80)}")


def spelled(prompt: object) -> str:
    """Return prompts as one string that ranks can compare; for an invalid prompt, the error message."""
    if isinstance(prompt, str):
        return f"text: {prompt}"
    if _is_batch(prompt):
        return f"{len(prompts_of(prompt))} prompts: {json.dumps([spelled(item) for item in prompts_of(prompt)])}"
    try:
        ids = token_ids(prompt)
    except UserError as error:
        return str(error)
    if max(map(int.bit_length, ids), default=0) < 64:
        return str(ids)
    return f"[{', '.join(map(hex, ids))}]"  # Python prints integers of any size only in hexadecimal


class StreamDecoder:
    """Turns tokens into text as they arrive: all pieces and the flush together are the decoded sequence.

    A piece ends only where the text so far is final: not inside a multibyte character, and not inside a run of
    sentencepiece byte tokens, because one invalid byte changes how the whole run is decoded. Each piece is decoded
    together with the tokens of the previous piece, the first one with the prompt's last tokens, so that spaces between
    tokens are the same as in the whole text. An incomplete character is decoded to one U+FFFD at the end, which is held
    back. While tokens continue to end like this, only the last few are decoded again.
    """

    def __init__(self, core: tokenizers.Tokenizer, special_ids: set[int], prompt_ids: Sequence[int] = ()) -> None:
        self._core = core
        self._special_ids = special_ids
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_returned = 0  # characters of the pending text that were returned
        for token_id in reversed(prompt_ids):
            if not self._is_text(token_id):
                break
            self._context.append(token_id)
            # Do not start inside a run of byte tokens.
            if len(self._context) >= PROMPT_CONTEXT and not self._is_byte(token_id):
                break
        self._context.reverse()

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now complete: often this token's text, sometimes empty."""
        if not self._is_text(token_id):
            return ""
        self._pending.append(token_id)
        if self._is_byte(token_id):
            return ""
        text = self._pending_text()
        piece = text[self._num_returned :]
        if not piece.endswith(_REPLACEMENT):
            if piece:
                self._context, self._pending, self._num_returned = self._pending, [], 0
            return piece
        self._num_returned = len(text) - 1
        if len(self._pending) > 2 * PROMPT_CONTEXT:
            # A character has at most 4 bytes, so earlier tokens cannot change the end of the text.
            self._context, self._pending = [], self._pending[-PROMPT_CONTEXT:]
            self._num_returned = len(self._pending_text()) - 1
        return piece[:-1]

    def flush(self) -> str:
        """Return the rest of the text at the end of the sequence; incomplete characters become U+FFFD."""
        piece = self._pending_text()[self._num_returned :]
        self._context, self._pending, self._num_returned = [], [], 0
        return piece

    def _is_text(self, token_id: int) -> bool:
        """False for special tokens, and for ids without a token: an embedding may have more rows than tokens."""
        return token_id not in self._special_ids and self._core.id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(str(self._core.id_to_token(token_id))) is not None

    def _pending_text(self) -> str:
        before = self._core.decode(self._context, skip_special_tokens=True) if self._context else ""
        text = str(self._core.decode(self._context + self._pending, skip_special_tokens=True))
        if not text.startswith(before):  # the prompt ends inside a character, or in a byte run that is now invalid
            self._context, before = [], ""
            text = str(self._core.decode(self._pending, skip_special_tokens=True))
        return text[len(before) :]


def _instead(path: Path) -> str:
    """What lies in the place of a missing tokenizer.json, and what to do."""
    names = next((names for names in _OLD_FILES if all(map(is_there, map(path.with_name, names)))), None)
    if path.is_symlink() or names is None:
        return f"{absent(path)}; download it"
    folder = str(path.parent)
    save = f"from transformers import AutoTokenizer as T; T.from_pretrained({folder!r}).save_pretrained({folder!r})"
    return f"only {' and '.join(names)}; save it with transformers: python -c {shlex.quote(save)}"


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise UserError(f"{path}: expected a tokenizer, found {_instead(path)}")
    try:
        data = path.read_bytes()
        foreign = foreign_content(data)
        if foreign is not None:
            raise UserError(f"{path}: expected a tokenizer, found {foreign}")
        core = tokenizers.Tokenizer.from_buffer(data.removeprefix(codecs.BOM_UTF8))
        core.encode("", add_special_tokens=True)
    except UserError:
        raise
    except BaseException as error:
        # The library raises plain Exception for a file that it cannot read. It panics at the first use of a
        # post-processor that names an unknown token; PanicException is not derived from Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{path}: unreadable tokenizer: expected a file of the tokenizers library, found {show(str(error))}; "
            "download the file again"
        ) from None
    # Remove truncation and padding, which are left from training and would change prompts.
    core.no_truncation()
    core.no_padding()
    return core
