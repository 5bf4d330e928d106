"""A tiny checkpoint with a tokenizer, and the command line in process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from generated import read_json
from one_thread import one_thread  # noqa: F401
from tokenizers import decoders, models, pre_tokenizers, processors

from alspec.launch import generate

# Readable characters alone, so that no terminal code is ever generated.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
SPECIAL_TOKENS = {"<begin>": 96, "<end>": 97, "<user>": 98, "<assistant>": 99}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_checkpoint(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A random Llama over 96 characters and four special tokens, context 1024, with weights for peaked attention."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=100,
            max_position_embeddings=1024,
            bos_token_id=96,
            eos_token_id=97,
            initializer_range=0.3,
        )
    )
    model.save_pretrained(folder)
    # Byte-level tokenizers spell bytes as visible characters.
    spelled = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(letter)[0][0] for letter in CHARACTERS]
    core = tokenizers.Tokenizer(models.BPE(vocab={letter: id_ for id_, letter in enumerate(spelled)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    assert {token: core.token_to_id(token) for token in SPECIAL_TOKENS} == SPECIAL_TOKENS
    core.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", SPECIAL_TOKENS["<begin>"])]
    )
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<begin>", "eos_token": "<end>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test without a prompt must not wait for a user or read pytest's stdin."""
    monkeypatch.setattr("sys.stdin", Terminal())


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        """A terminal."""
        return True


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, shared: do not change it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A private checkpoint to change: `make_checkpoint(chat_template=None)`."""

    def make(**options: Any) -> Path:
        return write_checkpoint(tmp_path / "private-checkpoint", **options)

    return make


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("--flag", ...)`: the command line in this process; returns exit code, stdout and stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = generate.main([str(arg) for arg in argv])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def generate_text(run: Run, checkpoint: Path) -> Callable[..., str]:
    """`generate_text("--flag", ...)`: stdout of a generation from the tiny checkpoint on the CPU that succeeds."""

    def call(*argv: object) -> str:
        code, out, err = run("--model", checkpoint, "--transport", "gloo", *argv)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def generate_json(generate_text: Callable[..., str], tmp_path: Path) -> Callable[..., Any]:
    """`generate_json("--flag", ...)`: what --json writes."""

    def call(*argv: object) -> Any:
        generate_text("--json", tmp_path / "out.json", *argv)
        return read_json(tmp_path / "out.json")

    return call
