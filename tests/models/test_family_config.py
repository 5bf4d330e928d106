"""config.json of every family: options, what is not used, and which of its tokens end a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alspec.config import EngineConfig
from alspec.models.checkpoint.source import notices_of_model
from alspec.models.llama_config import LlamaConfig

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


def write(folder: Path, raw: dict[str, Any], **others: Any) -> Path:
    """Write config.json and, from keyword arguments, other JSON files."""
    for name, content in ({"config": raw} | others).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


ORDINARY = {
    "added_tokens": [{"id": 7, "content": "<end>", "special": True}],
    "model": {"vocab": {"a": 8, "b": 9, "<end>": 7, "c": 11}},
}


@pytest.mark.parametrize(
    ("own", "advised", "tokenizer", "expected", "left_out"),
    [
        (9, [7], ORDINARY, (7,), "9"),
        ([9, 7, 11], 7, ORDINARY, (7,), "9, 11"),
        (7, [8], ORDINARY, (7, 8), None),  # a special token
        (12, [7], ORDINARY, (7, 12), None),  # not in the vocabulary
        (9, [7], None, (7, 9), None),  # nobody knows what it is
        (9, None, ORDINARY, (9,), None),
        (9, [9, 7], ORDINARY, (7, 9), None),
    ],
)
def test_an_ordinary_token_that_only_config_json_names_does_not_end_a_text(
    own: Any, advised: Any, tokenizer: Any, expected: tuple[int, ...], left_out: str | None, tmp_path: Path
) -> None:
    """As in transformers, which generates by generation_config.json; it is said once."""
    others = {"generation_config": {"eos_token_id": advised}} | ({"tokenizer": tokenizer} if tokenizer else {})
    write(tmp_path, PLAIN | {"eos_token_id": own}, **others)
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == expected
    notices = notices_of_model(EngineConfig(model=tmp_path))
    assert notices == (
        []
        if left_out is None
        else [
            f"config.json: eos_token_id: not used: {left_out}, ordinary in the vocabulary; generation_config.json "
            "names other tokens that end a text"
        ]
    )


def test_a_window_in_a_llama_is_named(tmp_path: Path) -> None:
    notices = notices_of_model(EngineConfig(model=write(tmp_path, PLAIN | {"sliding_window": 128})))
    assert notices == [
        "config.json: not used: sliding_window 128; Llama attends to all tokens, as in transformers' model"
    ]


MISTRAL = PLAIN | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN = PLAIN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
WINDOW = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MISTRAL, {"sliding_window": 4096, "num_kv_heads": 8, "full_layers": ()}),
        (MISTRAL | {"sliding_window": None, "num_key_value_heads": None}, {"sliding_window": None, "num_kv_heads": 32}),
        (QWEN | {"sliding_window": 64}, {"sliding_window": None, "qkv_bias": True, "o_bias": False}),
        (QWEN | WINDOW, {"sliding_window": 64, "full_layers": tuple(range(28))}),
        (QWEN | WINDOW | {"max_window_layers": 30}, {"full_layers": tuple(range(30))}),
        (
            QWEN | WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 16},
            {"sliding_window": 64, "full_layers": tuple(range(1, 32, 2))},
        ),
        (QWEN | WINDOW | {"layer_types": ["full_attention"] * 32}, {"sliding_window": None}),
        (
            QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True},
            {"head_dim": 128, "qk_norm": True, "qkv_bias": True, "o_bias": True},
        ),
        (
            PLAIN | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75},
            {"rotary_dim": 96, "fused_tensors": True, "sliding_window": None},
        ),
    ],
)
def test_options_of_families(raw: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = LlamaConfig.from_folder(write(tmp_path, raw))
    assert {name: getattr(config, name) for name in expected} == expected
