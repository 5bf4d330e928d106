from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import SHARED
from pydantic import ValidationError

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.checkpoint.checkpoint import expected_tensors
from alspec.models.checkpoint.source import model_config, model_name
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import RANDOM_SHAPES, LlamaConfig, RopeScaling, rope_inv_freq

PUBLISHED = SHARED / "hf" / "configs"

LLAMA_2_CHAT = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
SHORT, LONG = [1.0 + 0.1 * i for i in range(64)], [1.0 + i for i in range(64)]


def num_parameters(config: LlamaConfig) -> int:
    """Elements of all tensors that a checkpoint must have."""
    return sum(torch.Size(shape).numel() for shape in expected_tensors(config).values())


def write(folder: Path, raw: dict[str, Any], **others: Any) -> Path:
    """Write config.json and, from keyword arguments, other JSON files."""
    for name, content in ({"config": raw} | others).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_no_token_may_be_written_in_several_ways(tmp_path: Path) -> None:
    config = LlamaConfig.from_folder(write(tmp_path, LLAMA_2_CHAT | {"bos_token_id": -1, "eos_token_id": [-1, 7]}))
    assert (config.bos_token_id, config.eos_token_ids) == (None, (7,))


def test_llama_2_spelling(tmp_path: Path) -> None:
    config = LlamaConfig.from_folder(write(tmp_path, LLAMA_2_CHAT))
    assert config == LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_qo_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="fp16",
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert num_parameters(config) == 6_738_415_616


@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_random_shapes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    family, version, size = name.split("-")
    path = PUBLISHED / f"{family.title()}-{version}-{size.upper()}.config.json"
    if not path.exists():
        pytest.skip(f"needs the published configuration {path}")
    published = LlamaConfig.from_folder(write(tmp_path, json.loads(path.read_text(encoding="utf-8"))))
    assert LlamaConfig.from_shape(name) == published


def test_unknown_shape_lists_the_known_ones() -> None:
    for name in ("llama-9", "", "x" * 5000, "a\0b"):
        with pytest.raises(UserError, match=r"expected llama-3\.1-8b, .* or a folder that holds config\.json, found '"):
            LlamaConfig.from_shape(name)


def test_a_folder_without_weights_is_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path may be absolute or not; a folder named like a published shape is the published shape."""
    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 3}
    folder = write(tmp_path, raw)
    assert LlamaConfig.from_shape(str(folder)) == LlamaConfig.from_folder(folder)
    assert LlamaConfig.from_shape(str(folder)).num_layers == 3
    monkeypatch.chdir(folder)
    assert LlamaConfig.from_shape(".").num_layers == 3
    (folder / "llama-3.1-8b").mkdir()
    assert LlamaConfig.from_shape("llama-3.1-8b").num_layers == 32
    write(folder, raw | {"num_hidden_layers": 0})
    with pytest.raises(UserError, match="num_hidden_layers"):
        LlamaConfig.from_shape(str(folder))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "demo"),
        ({"random_weights": "llama-3.2-1b"}, "llama-3.2-1b"),
        ({"random_weights": "shapes/half/"}, "half"),
        ({"random_weights": "."}, "here"),
        ({"model": Path("../there")}, "there"),
    ],
)
def test_a_name_in_rows_is_the_last_part_of_the_path(
    options: dict, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(EngineConfig(**options)) == name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
    ],
)
def test_expected_tensors_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert num_parameters(LlamaConfig.from_shape(name)) == parameters


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"head_dim": None}, {"head_dim": 128}),
        ({"head_dim": 64}, {"head_dim": 64}),
        ({"num_key_value_heads": 8}, {"num_kv_heads": 8}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 32}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_theta": 500000}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rope_theta": 1e6, "rope_scaling": None}),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2}},
            {"rope_theta": 1e6, "rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 1e4, "rope_scaling": RopeScaling(rope_type="linear", factor=4.0)},
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA_3_SCALING, "factor": 32.0}},
            {"rope_scaling": RopeScaling(rope_type="llama3", factor=32.0)},
        ),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bf16"}),
        ({"torch_dtype": None, "dtype": "float32"}, {"dtype": "fp32"}),
        ({"torch_dtype": None}, {"dtype": "fp32"}),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, {"dtype": "bf16"}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"eos_token_id": [7, 5]}, {"eos_token_ids": (5, 7)}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_token_ids": (), "bos_token_id": None}),
        ({"quantization_config": None, "mlp_bias": False, "unknown_setting": [1]}, {}),
        ({"quantization_config": {}}, {}),
        ({"hidden_act": "swish"}, {}),
        ({"max_position_embeddings": 512.0}, {"max_position_embeddings": 512}),
        ({"hidden_size": 2048.0, "num_key_value_heads": 8.0}, {"head_dim": 64, "num_kv_heads": 8}),
        ({"bos_token_id": [1]}, {"bos_token_id": 1}),
        ({"architectures": ["LLaMAForCausalLM"]}, {"qkv_bias": False}),
        ({"architectures": ["LLaMAForCausalLM"], "model_type": None}, {"num_layers": 32}),
        ({"architectures": None}, {"num_layers": 32}),
        ({"architectures": []}, {"num_layers": 32}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": False}),
        ({"mlp_bias": True}, {"qkv_bias": False, "o_bias": False, "mlp_bias": True}),
        ({"sliding_window": 128}, {"sliding_window": None}),
    ],
)
def test_every_spelling_is_read(overrides: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = LlamaConfig.from_folder(write(tmp_path, LLAMA_2_CHAT | overrides))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("tokenizer_config", "tokenizer", "expected"),
    [
        (None, None, (2, 5, 6)),
        (
            {"eos_token": "<end>", "added_tokens_decoder": {"0": {"content": "<pad>"}, "9": {"content": "<end>"}}},
            None,
            (2, 5, 6, 9),
        ),
        ({"eos_token": {"content": "<end>"}}, {"added_tokens": [{"id": 11, "content": "<end>"}]}, (2, 5, 6, 11)),
        ({"eos_token": None}, {"added_tokens": [{"id": 11, "content": "<end>"}]}, (2, 5, 6)),
        ({"eos_token": "<end>"}, None, (2, 5, 6)),
    ],
)
def test_eos_is_the_union_of_both_files(
    tokenizer_config: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    others = {"tokenizer_config": tokenizer_config, "tokenizer": tokenizer}
    write(
        tmp_path,
        LLAMA_2_CHAT,
        generation_config={"eos_token_id": [6, 5]},
        **{name: content for name, content in others.items() if content is not None},
    )
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("file", "field", "others"),
    [
        ("generation_config", "eos_token_id", {"generation_config": {"eos_token_id": [2, 32000]}}),
        (
            "tokenizer_config",
            "eos_token",
            {"tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"32000": {"content": "<end>"}}}},
        ),
        (
            "tokenizer",
            "eos_token",
            {
                "tokenizer_config": {"eos_token": "<end>"},
                "tokenizer": {"added_tokens": [{"id": 32000, "content": "<end>"}]},
            },
        ),
    ],
)
def test_an_impossible_eos_is_named_where_it_stands(
    file: str, field: str, others: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA_2_CHAT, **others)
    expected = f"{tmp_path / file}.json: {field}: expected ids from 0 to 31999 (vocab_size of config.json is 32000), "
    with pytest.raises(UserError, match=re.escape(expected + "found [32000]")):
        LlamaConfig.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"])
def test_a_name_on_a_hub_is_not_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hint = f"(models are not downloaded from a hub; run `hf download {name} --local-dir DIR`, then give DIR)"
    with pytest.raises(UserError, match=re.escape(hint)):
        LlamaConfig.from_folder(Path(name))
    Path(name).parent.mkdir()
    Path(name).touch()
    others = ("../models/llama", "llama", "models/llama/8b", "models/a b", str(tmp_path / "none"), "a" * 5000)
    for other in (name, *others):
        with pytest.raises(UserError, match="expected a model folder, found") as caught:
            LlamaConfig.from_folder(Path(other))
        assert "downloaded" not in str(caught.value)
    with pytest.raises(UserError, match="expected a model folder, found nothing"):
        model_config(EngineConfig(model="a" * 5000))


@pytest.mark.parametrize(
    ("overrides", "needles"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures", "LlamaForCausalLM", "MistralForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"model_type": "qwen2"}, ["architectures: expected Qwen2ForCausalLM (model_type is 'qwen2')", "LlamaFor"]),
        (
            {"model_type": "gemma"},
            ["model_type: expected 'llama', 'mistral', 'ministral', 'qwen2', 'qwen3', 'phi3'", "'gemma'"],
        ),
        (
            {"model_type": None, "architectures": ["GemmaForCausalLM"]},
            ["architectures", "LlamaForCausalLM, MistralForCausalLM", "found ['GemmaForCausalLM']", "Qwen3, Phi-3"],
        ),
        ({"model_type": None, "architectures": None}, ["architectures or model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'silu'", "'gelu'"]),
        ({"attention_bias": 1}, ["attention_bias: expected true or false, found 1"]),
        ({"mlp_bias": "no"}, ["mlp_bias: expected true or false, found 'no'"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}, "rope_parameters": {}}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config.quant_method", "gptq", "unquantised"]),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, ["rope_type", "yarn or longrope", "'axial'"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.factor", "dynamic scaling needs it"]),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["rope_scaling.long_factor", "none"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["rope_scaling.short_factor: expected a list of 64 numbers", "[1.0]"],
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1}}, ["attention_factor", "-1"]),
        ({"rope_scaling": {**YARN, "mscale": "1", "mscale_all_dim": 1}}, ["mscale: expected a positive", "'1'"]),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, ["rope_theta (1.0) must be above 1"]),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": "x"}}, ["original_max_position", "'x'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, ["head_dim (2) must be above 2"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": [2]}},
            ["factor: expected a positive number", "[2]"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": ["x", *LONG[1:]]}},
            ["rope_scaling: long_factor"],
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": [0, *LONG[1:]]}},
            ["rope_scaling: long_factor must hold positive numbers"],
        ),
        ({"rope_scaling": {"type": ["linear"], "factor": 2.0}}, ["rope_type", "['linear']"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "an object", "'linear'"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "none"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling: factor", "0"]),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, ["rope_scaling.factor", "yarn scaling needs it"]),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            ["rope_parameters.full_attention: settings for each kind of layer are not supported"],
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor", "none"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters.low_freq_factor", "none"]),
        ({"rope_parameters": {"type": "yarn"}}, ["rope_parameters.factor", "yarn scaling needs it"]),
        ({"rope_parameters": 7, "rope_scaling": {"factor": 2.0}}, ["rope_parameters", "an object", "7"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
            ["rope_parameters.rope_theta: expected 10000.0", "found 500000.0", "give rope_theta in rope_scaling too"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA_3_SCALING, "low_freq_factor": 4.0}},
            ["low_freq_factor must be below high_freq_factor"],
        ),
        ({"num_key_value_heads": 5}, ["num_attention_heads (32)", "num_key_value_heads (5)"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "greater than 0", "found 0"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_attention_heads": 24}, ["hidden_size", "multiple of num_attention_heads (24)", "4096"]),
        ({"head_dim": 33}, ["head_dim (33) must be even"]),
        ({"head_dim": -2}, ["head_dim", "-2"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "found 0"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"vocab_size": -1}, ["vocab_size", "found -1"]),
        ({"vocab_size": None}, ["vocab_size", "none"]),
        ({"hidden_size": "4096", "head_dim": 128}, ["hidden_size", "'4096'"]),
        ({"hidden_size": True, "head_dim": 128}, ["hidden_size", "True"]),
        ({"intermediate_size": 11008.5}, ["intermediate_size", "11008.5"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps", "found 0.0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "found inf"]),
        ({"rope_theta": float("nan")}, ["rope_theta: expected a finite number, found nan"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": float("nan")}},
            ["rope_theta: expected a finite number, found nan"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": float("nan")}},
            ["rope_parameters.rope_theta: expected 10000.0", "found nan"],
        ),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "bfloat16", "'int8'"]),
        ({"bos_token_id": 32000}, ["bos_token_id (32000)", "vocab_size (32000)"]),
        ({"eos_token_id": [2, 40000]}, ["eos_token_id: expected ids from 0 to 31999", "found [40000]"]),
        ({"eos_token_id": -2}, ["eos_token_id: expected ids from 0 to 31999", "found [-2]"]),
        ({"eos_token_id": 2, "vocab_size": 0}, ["vocab_size", "found 0"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ({"hidden_act": "a\nb\x1b[31m" + "x" * 1000}, ["hidden_act", r"a\nb\x1b[31m", "..."]),
    ],
)
def test_refused_by_name(overrides: dict[str, Any], needles: list[str], tmp_path: Path) -> None:
    write(tmp_path, LLAMA_2_CHAT | overrides)
    with pytest.raises(UserError) as caught:
        LlamaConfig.from_folder(tmp_path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    for needle in [str(tmp_path / "config.json"), *needles]:
        assert needle in message


@pytest.mark.parametrize("removed", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_size_is_named(removed: str, tmp_path: Path) -> None:
    write(tmp_path, {name: value for name, value in LLAMA_2_CHAT.items() if name != removed})
    with pytest.raises(UserError, match=rf"config\.json: {removed}: expected a number, found none"):
        LlamaConfig.from_folder(tmp_path)


def test_direct_construction_is_checked() -> None:
    shape = LlamaConfig.from_shape("llama-3.2-1b").model_dump()
    with pytest.raises(ValidationError, match="head_dim"):
        LlamaConfig(**(shape | {"rope_scaling": None, "head_dim": 3}))
    with pytest.raises(ValidationError, match="frozen"):
        LlamaConfig.from_shape("llama-3.2-1b").head_dim = 3


def test_valid_tp_sizes() -> None:
    assert LlamaConfig.from_shape("llama-3.1-8b").valid_tp_sizes == (1, 2, 4, 8, 16, 32)
    smol = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    config = LlamaConfig.from_shape("llama-3.2-1b").model_copy(
        update={"num_qo_heads": 9, "num_kv_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    )
    assert config.valid_tp_sizes == (1, 3)
    assert config.model_copy(update={"num_kv_heads": 9, "intermediate_size": 48}).valid_tp_sizes == (1, 3)
    config.check_tp_size(3)
    for wrong in (0, -1, 2, 9):
        with pytest.raises(UserError, match=re.escape("valid sizes of one group: 1, 3")) as caught:
            config.check_tp_size(wrong)
        assert all(f"({smol[name]})" in str(caught.value) for name in ("num_attention_heads", "intermediate_size"))


@pytest.mark.parametrize("head_dim", [2, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA_3_SCALING},
        {"rope_type": "llama3", **LLAMA_3_SCALING, "factor": 32.0, "original_max_position_embeddings": 512},
    ],
)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_inv_freq_against_transformers(head_dim: int, scaling: dict[str, Any], theta: float) -> None:
    from transformers import LlamaConfig as Oracle
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    oracle = LlamaRotaryEmbedding(
        Oracle(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": theta, **scaling},
        )
    )
    ours = rope_inv_freq(
        head_dim, theta, None if scaling["rope_type"] == "default" else RopeScaling.model_validate(scaling)
    )
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, oracle.inv_freq, rtol=2e-7, atol=0.0)


DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_parameters": {**DEFAULT, **LLAMA_3_SCALING, "rope_type": "llama3"}},
        {"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_scaling": None},
        {"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_scaling": {}},
        {"rope_parameters": {}, "rope_scaling": LINEAR},
        {"rope_parameters": {}, "rope_scaling": LINEAR, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
        {"rope_parameters": DEFAULT, "rope_scaling": LINEAR, "rope_theta": 5e5},
        {"rope_parameters": DEFAULT, "rope_scaling": {**LINEAR, "rope_theta": 5e5}},
        {"rope_parameters": DEFAULT, "rope_scaling": {**DEFAULT, **LLAMA_3_SCALING, "rope_type": "llama3"}},
        {"rope_parameters": {**DEFAULT, **LINEAR}, "rope_scaling": DEFAULT},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, "rope_theta": 1e6},
        {"rope_scaling": {**YARN, "factor": 1.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 512},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA_3_SCALING}, "original_max_position_embeddings": 512},
        {"rope_parameters": {**YARN, "rope_theta": 5e5, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5, "attention_factor": 1.5, "truncate": False, "beta_slow": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
        {
            "rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 32.0},
            "original_max_position_embeddings": 1000,
        },
        {
            "rope_parameters": {**DEFAULT, **LINEAR},
            "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
    ],
)
def test_rope_settings_against_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import LlamaConfig as Oracle
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write(tmp_path, {name: value for name, value in LLAMA_2_CHAT.items() if name != "rope_scaling"} | settings)
    oracle = LlamaRotaryEmbedding(Oracle.from_pretrained(tmp_path))
    config = LlamaConfig.from_folder(tmp_path)
    torch.testing.assert_close(config.inv_freq(), oracle.inv_freq, rtol=2e-7, atol=0.0)
    assert config.rope_factor == pytest.approx(oracle.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "longest", "stretched"),
    [
        (None, 4096, ""),
        ({"type": "linear", "factor": 2.5}, 10240, " times 2.5 (linear RoPE scaling)"),
        ({"type": "linear", "factor": 1.0}, 4096, ""),
        ({"rope_type": "llama3", **LLAMA_3_SCALING}, 4096, ""),
        ({"type": "dynamic", "factor": 2.0}, 8192, " times 2 (dynamic RoPE scaling)"),
        ({"type": "yarn", "factor": 4.0}, 16384, " times 4 (yarn RoPE scaling)"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096, ""),
    ],
)
def test_longest_context(scaling: dict[str, Any] | None, longest: int, stretched: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_folder(write(tmp_path, LLAMA_2_CHAT | {"rope_scaling": scaling}))
    assert config.longest_context == longest
    assert config.longest_context_name == f"the model's max_position_embeddings{stretched}"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor"),
    ],
)
def test_impossible_contexts_are_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"config\.json: .*{named}.* less than or equal to"):
        LlamaConfig.from_folder(write(tmp_path, LLAMA_2_CHAT | settings))


def test_llama3_scaling_keeps_and_divides() -> None:
    config = LlamaConfig.from_shape("llama-3.1-8b")
    plain, scaled = rope_inv_freq(128, 5e5), config.inv_freq()
    wavelength = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelength < 2048], plain[wavelength < 2048])
    assert torch.equal(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength > 2048) & (wavelength < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, because root may enter every folder."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(
        UserError, match=r"config\.json: cannot be read \(Permission denied\); check the file's permissions"
    ):
        LlamaConfig.from_folder(tmp_path)


def test_defaults_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig as Oracle

    names = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    raw = {name: value for name, value in LLAMA_2_CHAT.items() if name not in names}
    found, oracle = LlamaConfig.from_folder(write(tmp_path, raw)), Oracle.from_pretrained(tmp_path)
    assert [getattr(found, name) for name in names] == [getattr(oracle, name) for name in names]
