"""Tiny random Hugging Face folders for the tests of this folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_thread import one_thread  # noqa: F401
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{- bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer whose post-processor adds BOS, as Llama 3's does; every byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log, said the cat"] * 4, trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json with `settings`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_model(folder: Path, max_shard_size: str | int = "1GB", seed: int = 0, **overrides: Any) -> None:
    """Save a tiny random transformers Llama; `overrides` are fields of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(settings | overrides))).save_pretrained(folder, max_shard_size=max_shard_size)


def write_folder(folder: Path, max_shard_size: str | int = "1GB", **overrides: Any) -> None:
    """A whole tiny folder: model and byte-level tokenizer with a chat template."""
    write_model(folder, max_shard_size, **overrides)
    write_tokenizer(
        folder,
        byte_level_tokenizer(),
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    write_folder(root / "single")
    write_folder(root / "sharded", max_shard_size=40_000)
    return root


@pytest.fixture(scope="session")
def byte_level_core() -> Callable[[], Tokenizer]:
    """Train a tiny byte-level tokenizer: ids 0 to 3 are special tokens, every byte is a token, text begins with BOS."""
    return byte_level_tokenizer


@pytest.fixture
def single_folder(_prepared: Path, tmp_path: Path) -> Path:
    """A private copy of a tiny folder with model.safetensors."""
    return Path(shutil.copytree(_prepared / "single", tmp_path / "single"))


@pytest.fixture
def sharded_folder(_prepared: Path, tmp_path: Path) -> Path:
    """A private copy of a tiny folder with an index and several shards."""
    return Path(shutil.copytree(_prepared / "sharded", tmp_path / "sharded"))


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Build a tiny folder with other config fields: `make_folder(tie_word_embeddings=True)`."""

    def make(max_shard_size: str | int = "1GB", **overrides: Any) -> Path:
        folder = tmp_path / f"folder-{len(list(tmp_path.iterdir()))}"
        write_folder(folder, max_shard_size, **overrides)
        return folder

    return make
