"""Train the demo checkpoint's byte-level BPE tokenizer and write its Hugging Face files.

    python -P -m alspec.models.demo.demo_tokenizer --corpus DIR --out models/demo/checkpoint

Text is split into words (with their leading space), single digits, runs of punctuation and runs of white space; BPE
merges never cross such a piece. Single digits let a small model handle numbers of any length.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from alspec.models.demo import DEMO_CHECKPOINT

__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "END",
    "EOS",
    "SPECIAL_TOKENS",
    "read_corpus",
    "token_id",
    "train_tokenizer",
    "write_files",
]

BOS, EOS, SYSTEM, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, SYSTEM, USER, ASSISTANT, END]

_SPLIT = r"'(?:ll|re|ve|[sdmt])\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def read_corpus(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of each document of an xz-compressed JSON-lines file."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            yield document["source"], document["text"]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that the vocabulary must contain.

    Raises:
        ValueError: the vocabulary does not contain it.
    """
    number: int | None = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"tokenizer: expected the special token {token} in the vocabulary, found none")
    return number


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE merges from `texts`.

    Returns:
        A tokenizer with exactly `vocab_size` entries, special tokens first. Its post-processor prepends one BOS.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_SPLIT), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
    )
    return tokenizer


def write_files(tokenizer: Tokenizer, out: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _sample(corpus: Path) -> Iterator[str]:
    """Training text: every third page of 10,000 characters of each book, and of the other documents every third."""
    for number, (source, text) in enumerate(read_corpus(corpus)):
        if source.startswith("books/"):
            yield from (text[start : start + 10_000] for start in range(0, len(text), 30_000))
        elif number % 3 == 0:
            yield text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the demo checkpoint's tokenizer.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.jsonl.xz")
    parser.add_argument("--out", type=Path, default=DEMO_CHECKPOINT)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--max-positions", type=int, default=8192)
    args = parser.parse_args()
    tokenizer = train_tokenizer(_sample(args.corpus / "train.jsonl.xz"), args.vocab_size)
    write_files(tokenizer, args.out, args.max_positions)
    print(f"{tokenizer.get_vocab_size()} entries written to {args.out}")


if __name__ == "__main__":
    main()
