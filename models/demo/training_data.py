"""Training rows of the demo checkpoint: packed text, conversations, and long-range recall tasks.

A row is `ids` [length] uint16 and `weights` [length] float32, the loss weight of each token as a target. The recall
tasks draw fresh keys and values for every row, so only the context contains the answers.
"""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset

from alspec.models.demo.demo_tokenizer import BOS, END, EOS, read_corpus, token_id

__all__ = ["Codec", "RecallPrompt", "RowStream", "common_words", "encode_corpus", "recall_prompts"]

Ids = np.ndarray[Any, np.dtype[np.uint16]]
Row = tuple[Ids, np.ndarray[Any, np.dtype[np.float32]]]

ANSWER_WEIGHT = 4.0
REPEAT_WEIGHT = 2.0
RANDOM_WEIGHT = 0.05  # where random keys and values first appear they cannot be predicted, so they teach little

BOOKS_SHARE = 0.75  # share of books in the running text of training rows
MAX_WORDS = 3000  # number of words from which keys are drawn
NUM_FACTS = 8  # facts in each prompt of `recall_prompts`

FACTS = [
    ("The code for {k} is {v}.", "What is the code for {k}?"),
    ("The secret number of {k} is {v}.", "What is the secret number of {k}?"),
    ("You should remember that {k} stands for {v}.", "What does {k} stand for?"),
]
INTRO = "Read this text and remember the facts in it."
STORY_REQUESTS = ["Continue this story:", "Continue this text:", "What comes next?"]


class Codec:
    """The tokenizer, with the special ids and the sentence ends that building rows needs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos, self.end = (token_id(tokenizer, token) for token in (BOS, EOS, END))
        pieces = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
        self.num_bytes = np.array([len(piece) for piece in pieces])  # byte-level: one character of a piece is one byte
        self._closes = np.array([piece.rstrip("\"'").endswith((".", "!", "?")) for piece in pieces])
        self._opens = np.array([piece.startswith(("\u0120", "\u010a")) for piece in pieces])  # space, newline

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` without BOS. Special tokens written out in the text become their ids."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def sentence_ends(self, ids: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Offsets directly behind the end of a sentence of `ids` where white space follows."""
        return np.flatnonzero(self._closes[ids[:-1]] & self._opens[ids[1:]]) + 1


def encode_corpus(path: Path, codec: Codec) -> tuple[Ids, Ids]:
    """Tokenize a corpus file into one stream of books and one of everything else, as BOS document EOS ..."""
    streams: dict[bool, list[Ids]] = {True: [], False: []}
    documents = read_corpus(path)
    while group := list(islice(documents, 64)):
        encodings = codec.tokenizer.encode_batch_fast([text for _, text in group], add_special_tokens=False)
        for (source, _), encoding in zip(group, encodings, strict=True):
            stream = streams[source.startswith("books/")]
            stream.append(np.array([codec.bos, *encoding.ids, codec.eos], dtype=np.uint16))
    empty = np.zeros(0, dtype=np.uint16)
    return np.concatenate([empty, *streams[True]]), np.concatenate([empty, *streams[False]])


def common_words(text: str) -> list[str]:
    """Lower-case words of 4 to 8 letters, most frequent first; skips the 100 most frequent if enough remain."""
    words = [word for word, _ in Counter(re.findall(r"\b[a-z]{4,8}\b", text)).most_common(MAX_WORDS + 100)]
    return words[100:] if len(words) >= 200 else words


class _RowBuilder:
    """Appends weighted pieces, then cuts or fills the row to one length."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.ids: list[int] = [codec.bos]
        self.weights: list[float] = [0.0]

    def add(self, piece: str | list[int] | Ids, weight: float) -> None:
        ids = self.codec.encode(piece) if isinstance(piece, str) else list(piece)
        self.ids += ids
        self.weights += [weight] * len(ids)

    def finish(self, length: int, filler: Ids) -> Row:
        """Cut to `length`, or fill with EOS, BOS and `filler` (at least `length` tokens of plain text)."""
        if len(self.ids) < length:
            self.add([self.codec.eos, self.codec.bos], 0.0)
            self.add(filler, 1.0)
        return np.array(self.ids[:length], dtype=np.uint16), np.array(self.weights[:length], dtype=np.float32)


def _insert_facts(codec: Codec, haystack: Ids, facts: list[str], depths: list[float]) -> list[tuple[Ids, bool]]:
    """Cut `haystack` at the sentence ends nearest to `depths` (0..1) and put a fact into each cut.

    Returns:
        Pieces in reading order, each with a flag that is True for a fact.
    """
    ends = codec.sentence_ends(haystack)
    if not len(ends):
        ends = np.array([0])
    cuts = [int(ends[np.abs(ends - depth * len(haystack)).argmin()]) for depth in depths]
    pieces: list[tuple[Ids, bool]] = []
    position = 0
    for cut, fact in sorted(zip(cuts, facts, strict=True), key=lambda pair: pair[0]):
        pieces.append((haystack[position:cut], False))
        pieces.append((np.array(codec.encode(" " + fact), dtype=np.uint16), True))
        position = cut
    return [*pieces, (haystack[position:], False)]


def _turn(question: str) -> str:
    return f"<|user|>{question}{END}<|assistant|>"


@dataclass(frozen=True)
class RecallPrompt:
    """A needle-in-a-haystack prompt in chat format.

    `prompt_ids` begins with BOS and ends with the assistant token. `answer_ids` is the correct answer: the sentence
    with `value`, and the end-of-turn token.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    value: str


def recall_prompts(
    num_prompts: int,
    context_tokens: int,
    tokenizer: Tokenizer,
    corpus_text: str,
    seed: int,
    depth: float | None = None,
) -> list[RecallPrompt]:
    """Make recall prompts: running text with facts 'The code for <word> is <5 digits>.', and a question about one.

    The requested fact is at `depth` (0: beginning of the text, 1: its end). If `depth` is not given, it is between 10 %
    and 65 % of the text's length. The other facts are anywhere.

    Args:
        num_prompts: number of prompts.
        context_tokens: length of prompt and answer together; the actual length differs by one answer at most.
        tokenizer: the checkpoint's tokenizer.
        corpus_text: any running text, repeated if it is too short. The keys are words from it.
        seed: determines all prompts.
        depth: position of the requested fact, 0 to 1.
    Raises:
        ValueError: `corpus_text` has fewer than `NUM_FACTS` distinct words of 4 to 8 letters, or the context is too
            short for the facts; the message begins with the argument's name.
    """
    codec, rng = Codec(tokenizer), random.Random(seed)
    words = common_words(corpus_text)
    if len(words) < NUM_FACTS:
        raise ValueError(
            f"corpus_text: recall prompts take keys from it: expected at least {NUM_FACTS} words of 4 to 8 letters, "
            f"found {len(words)}"
        )
    stream = np.array(codec.encode(corpus_text), dtype=np.uint16)
    prompts = []
    for _ in range(num_prompts):
        keys = rng.sample(words, NUM_FACTS)
        values = [_digits(rng, 5) for _ in keys]
        facts = [FACTS[0][0].format(k=key, v=value) for key, value in zip(keys, values, strict=True)]
        head = [codec.bos, *codec.encode(f"<|user|>{INTRO}\n\n")]
        tail = codec.encode(f"\n\n{FACTS[0][1].format(k=keys[0])}{END}<|assistant|>")
        answer_ids = codec.encode(f"{facts[0]}{END}")
        used = len(head) + len(tail) + len(answer_ids) + sum(len(codec.encode(" " + fact)) for fact in facts)
        size = context_tokens - used
        if size < 64:
            raise ValueError(
                f"context_tokens: a recall prompt of {NUM_FACTS} facts takes {used + 64} tokens at least, found "
                f"{context_tokens}"
            )
        repeated = np.tile(stream, size // len(stream) + 2)
        start = rng.randrange(len(stream))
        asked_depth = rng.uniform(0.1, 0.65)
        depths = [asked_depth if depth is None else depth] + [rng.random() for _ in facts[1:]]
        pieces = _insert_facts(codec, repeated[start : start + size], facts, depths)
        body = [int(token) for piece, _ in pieces for token in piece]
        prompts.append(RecallPrompt(head + body + tail, answer_ids, values[0]))
    return prompts


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


class RowStream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of rows, drawn from a mixture of tasks.

    Yields ids [batch_size, length] int32 and weights [batch_size, length] float32.
    """

    def __init__(
        self,
        books: Path,
        other: Path,
        words: list[str],
        codec_file: Path,
        mixture: dict[str, float],
        batch_size: int,
        length: int,
        seed: int,
    ) -> None:
        self.books_file, self.other_file, self.words, self.codec_file = books, other, words, codec_file
        self.mixture, self.batch_size, self.length, self.seed = mixture, batch_size, length, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Open the token streams in this worker, then draw batches without end."""
        info = torch.utils.data.get_worker_info()
        self.rng = random.Random(self.seed * 1000 + (info.id if info else 0))
        self.books: Ids = np.load(self.books_file, mmap_mode="r")
        self.other: Ids = np.load(self.other_file, mmap_mode="r")
        self.codec = Codec(Tokenizer.from_file(str(self.codec_file)))
        tasks: dict[str, Callable[[], Row]] = {
            "text": self._text,
            "story": self._story,
            "needle": self._needle,
            "records": self._records,
            "repeat": self._repeat,
        }
        kinds, shares = list(self.mixture), list(self.mixture.values())
        while True:
            rows = [tasks[kind]() for kind in self.rng.choices(kinds, shares, k=self.batch_size)]
            ids = np.stack([row[0] for row in rows]).astype(np.int32)
            yield torch.from_numpy(ids), torch.from_numpy(np.stack([row[1] for row in rows]))

    def _slice(self, count: int, books_only: bool = False) -> Ids:
        stream = self.books if books_only or self.rng.random() < BOOKS_SHARE else self.other
        start = self.rng.randrange(len(stream) - count)
        return np.array(stream[start : start + count])

    def _text(self) -> Row:
        ids = self._slice(self.length)
        ids[0] = self.codec.bos
        weights = np.ones(self.length, dtype=np.float32)
        weights[0] = 0.0
        return ids, weights

    def _story(self) -> Row:
        """Conversations: a request with the beginning of a passage; the answer is its continuation."""
        row = _RowBuilder(self.codec)
        while len(row.ids) < self.length:
            passage = self._slice(self.rng.randint(200, min(1500, self.length)), books_only=True)
            ends = self.codec.sentence_ends(passage)
            if len(ends) < 4 or ((passage == self.codec.bos) | (passage == self.codec.eos)).any():
                continue
            first, last = ends[0], ends[-1]
            cut = int(self.rng.choice(list(ends[1:-1])))
            # Strip the leading space, so that the answer begins like a sentence.
            begin = self.codec.tokenizer.decode(list(passage[first:cut])).strip()
            answer = self.codec.tokenizer.decode(list(passage[cut:last])).strip()
            if len(row.ids) > 1:
                row.add([self.codec.bos], 0.0)
            row.add(_turn(f"{self.rng.choice(STORY_REQUESTS)}\n\n{begin}"), 1.0)
            row.add(answer + END, 1.0)
        return row.finish(self.length, self._slice(self.length))

    def _value(self) -> str:
        kind = self.rng.random()
        if kind < 0.65:
            return _digits(self.rng, self.rng.randint(4, 7))
        return self.rng.choice(self.words) if kind < 0.85 else f"{self.rng.getrandbits(32):08x}"

    def _keys(self, count: int) -> list[str]:
        if self.rng.random() < 0.6:
            return self.rng.sample(self.words, count)
        return [" ".join(pair) for pair in zip(*(self.rng.sample(self.words, count) for _ in range(2)), strict=True)]

    def _needle(self) -> Row:
        """Facts scattered over running text, then several questions."""
        rng, row = self.rng, _RowBuilder(self.codec)
        num_facts = rng.randint(2, self.length // 160)
        keys = self._keys(num_facts)
        fact, question = rng.choices(FACTS, [0.6, 0.2, 0.2])[0]
        facts = [fact.format(k=key, v=self._value()) for key in keys]
        asked = rng.sample(range(num_facts), min(num_facts, self.length // 200))
        questions = [question.format(k=keys[i]) for i in asked]
        budget = self.length - 48 - num_facts * 20 - len(asked) * 40
        haystack = self._slice(max(64, budget if rng.random() < 0.8 else rng.randint(64, max(65, budget))))
        row.add(f"<|user|>{INTRO}\n\n", 1.0)
        depths = [rng.random() for _ in facts]
        for piece, is_fact in _insert_facts(self.codec, haystack, facts, depths):
            row.add(piece, 0.3 if is_fact else 1.0)
        chat = rng.random() < 0.75
        for number, (index, text) in enumerate(zip(asked, questions, strict=True)):
            if chat:
                row.add(f"\n\n{text}{END}<|assistant|>" if number == 0 else _turn(text), 0.3)
                row.add(facts[index] + END, ANSWER_WEIGHT)
            else:
                row.add(" " + facts[index], ANSWER_WEIGHT)
        return row.finish(self.length, self._slice(self.length))

    def _records(self) -> Row:
        """Records of random keys and values, then requests for values by key."""
        rng, row = self.rng, _RowBuilder(self.codec)
        kind, size = rng.choices([("uuid", 62), ("hex", 22), ("word", 14), ("number", 18)], [4, 2, 3, 2])[0]
        draw: dict[str, Callable[[], str]] = {
            "uuid": lambda: _uuid(rng),
            "hex": lambda: f"{rng.getrandbits(32):08x}",
            "number": lambda: _digits(rng, 6),
        }
        num_asked = max(2, min(self.length // 4 // (size + 12), 32))
        max_count = (self.length - num_asked * (size + 20) - 64) // size
        count = max_count if rng.random() < 0.5 else rng.randint(min(4, max_count), max_count)
        keys = self._keys(count) if kind == "word" else [draw[kind]() for _ in range(count)]
        values = [_uuid(rng) if kind == "uuid" else self._value() for _ in range(count)]
        record_format, start, between, end = rng.choice(
            [('"{k}": "{v}"', "{{", ", ", "}}"), ('"{k}": "{v}"', "{{", ",\n ", "}}"), ("{k}: {v}", "", "\n", "")]
        )
        lines = [record_format.format(k=key, v=value) for key, value in zip(keys, values, strict=True)]
        asked = rng.sample(range(count), min(count, num_asked))
        style = rng.choice(["chat", "listing", "again"])
        lead = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        row.add(("<|user|>" if style == "chat" else "") + lead, 0.3)
        row.add(start.format() + between.join(lines) + end.format(), RANDOM_WEIGHT)
        for number, index in enumerate(asked):
            if style == "chat":
                question = f"What is the value of {keys[index]}?"
                row.add(f"\n\n{question}{END}<|assistant|>" if number == 0 else _turn(question), RANDOM_WEIGHT)
                row.add(values[index] + END, ANSWER_WEIGHT)
            elif style == "listing":
                row.add(f'\n\nKey: "{keys[index]}"\nCorresponding value:', RANDOM_WEIGHT)
                row.add(f' "{values[index]}"', ANSWER_WEIGHT)
            else:
                before, after = lines[index].rsplit(" ", 1)
                row.add("\n" + before, RANDOM_WEIGHT)
                row.add(" " + after, ANSWER_WEIGHT)
        return row.finish(self.length, self._slice(self.length))

    def _repeat(self) -> Row:
        """A passage that is repeated word for word after other text."""
        rng, row = self.rng, _RowBuilder(self.codec)
        size = rng.randint(48, self.length // 4)
        gap = rng.randint(0, self.length - 2 * size - 2)
        passage = self._slice(size)
        row.add(self._slice(max(1, self.length - gap - 2 * size - 1)), 1.0)
        row.add(passage, 1.0)
        row.add(self._slice(gap + 1), 1.0)
        row.add(passage, REPEAT_WEIGHT)
        return row.finish(self.length, self._slice(self.length))
