"""Matrices that a rank keeps packed: values, bytes and logits, of quantised folders and with `--weights`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import save_family
from model_runner import Runner, ThreadTransport, close, on_ranks
from quantised_folders import FORMATS, save_quantised
from safetensors.torch import load_file, save_file
from tiers import fast
from torch import Tensor

from alspec import Engine
from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.kernels.kv_codec.turboquant.rotation import rotation
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.models.checkpoint.source import model_config, open_checkpoint
from alspec.models.llama import Llama, LlamaWeights, Shard, load_weights, quantised_copy
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import MATRICES, weights_name
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.loading import model_notices
from alspec.runtime.engine.memory import plan_memory
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.profiling.stats import step_bytes

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
# What no kernel takes: codes of 8 bits, and groups in another order.
DENSE = ("int8-group", "gptq-8", "int4-ordered", "gptq-ordered", "gptq-v2-ordered", "gptq-in-order")


def load(
    folder: Path, shard: Shard, dtype: torch.dtype, packs: bool, kv_cache: str = "bf16", **options: Any
) -> tuple[LlamaConfig, LlamaWeights]:
    settings = EngineConfig(model=folder, kv_cache=kv_cache, **options)
    config = config_with_weights(settings, model_config(settings), shard.tp_size, packs)
    checkpoint = open_checkpoint(settings, config.model_copy(update={"weights": "auto"}))
    turned = rotation(config.head_dim, CPU) if config.rotates_values else None
    return config, load_weights(checkpoint, config, shard, dtype, CPU, turned)


def values_of(weight: Tensor | DecodeWeight, dtype: torch.dtype) -> Tensor:
    return weight.dequantise(dtype) if isinstance(weight, DecodeWeight) else weight


def check_alike(kept: LlamaWeights, dense: LlamaWeights, dtype: torch.dtype) -> None:
    for layer, expected in zip(kept.layers, dense.layers, strict=True):
        assert layer.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert isinstance(tensor, Tensor)
            assert torch.equal(values_of(layer.tensors[name], dtype), tensor), name


def held_bytes(weights: LlamaWeights) -> int:
    layers = [tensor for layer in weights.layers for tensor in layer.tensors.values()]
    head, table = weights.lm_head, weights.embedding
    is_tied = isinstance(head, Tensor) and head.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    return sum(tensor.nbytes for tensor in [*layers, table, weights.final_norm]) + (0 if is_tied else head.nbytes)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", fast(list(FORMATS), ["fp8-tensor", "fp8-block", "int4-zeros", "awq-row", "gptq-8"]))
def test_packed_matrices_have_the_values_of_the_files(name: str, tp_size: int, tmp_path: Path) -> None:
    save_quantised(tmp_path, name)
    shard = Shard(tp_size - 1, tp_size, tp_size - 1, tp_size)
    config, kept = load(tmp_path, shard, BF16, True)
    _, dense = load(tmp_path, shard, BF16, False)
    check_alike(kept, dense, BF16)
    found = {name for layer in kept.layers for name in MATRICES if isinstance(getattr(layer, name), DecodeWeight)}
    assert found == (set() if name in DENSE else set(MATRICES))
    assert plan_memory(config, shard, BF16, 1, 64).weights_bytes == held_bytes(kept)


def deny_order(folder: Path) -> None:
    """Say in config.json that channels are in the order of their groups."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = config["quantization_config"]
    if settings["quant_method"] == "gptq":
        settings["desc_act"] = False
    else:
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "static"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("name", ["gptq-ordered", "int4-ordered"])
def test_an_order_that_config_json_denies(name: str, tp_size: int, tmp_path: Path) -> None:
    """The tensors decide: such matrices are dequantised, also if one module has no order, and may be split anywhere."""
    reference = save_quantised(tmp_path, name, intermediate_size=672)
    deny_order(tmp_path)
    tensors, module = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj"
    settings, make = FORMATS[name.replace("-ordered", "" if "gptq" in name else "-zeros")]
    assert settings["quant_method"] in ("gptq", "compressed-tensors")
    stored, values = make(np.random.default_rng(3), 672, 96)
    order = "g_idx" if "gptq" in name else "weight_g_idx"
    for part in (*stored, order):
        tensors.pop(f"{module}.{part}", None)
    stored.pop(order, None)
    save_file(tensors | {f"{module}.{part}": tensor for part, tensor in stored.items()}, tmp_path / "model.safetensors")
    shard = Shard(tp_size - 1, tp_size, tp_size - 1, tp_size)
    config, kept = load(tmp_path, shard, F32, True)
    rows = 672 // tp_size
    assert torch.equal(values_of(kept.layers[1].gate_up, F32)[rows:], values[-rows:])
    down = reference.model.layers[1].mlp.down_proj.weight
    assert torch.equal(values_of(kept.layers[1].down, F32), down[:, -rows:])
    assert not any(isinstance(getattr(layer, name), DecodeWeight) for layer in kept.layers for name in MATRICES)
    assert plan_memory(config, shard, F32, 1, 64).weights_bytes == held_bytes(kept)
    config.check_tp_size(tp_size)


def test_the_order_of_some_modules_leaves_others_packed(tmp_path: Path) -> None:
    """Two groups of modules: only the one with an order is dequantised."""
    save_quantised(tmp_path, "int4-ordered")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    groups = config["quantization_config"]["config_groups"]
    attention = groups["group_0"] | {"targets": ["re:.*self_attn.*"]}
    groups["group_0"]["weights"]["actorder"] = None
    groups["group_1"] = json.loads(json.dumps(attention))
    groups["group_1"]["weights"]["actorder"] = "group"
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "mlp" in name and name.endswith("weight_g_idx")]:
        tensors[name] = tensors[name].sort().values
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _, kept = load(tmp_path, Shard(), BF16, True)
    assert [isinstance(getattr(kept.layers[0], name), DecodeWeight) for name in MATRICES] == [False, False, True, True]


@pytest.mark.parametrize(
    ("name", "family"),
    fast(
        [(name, family) for name in ("fp8-block", "awq", "int4-channel") for family in ("Llama", "Qwen2", "Qwen3")],
        [("fp8-block", "Qwen2"), ("awq", "Qwen3")],
    ),
)
@torch.no_grad()
def test_logits_of_two_ranks_with_packed_weights(name: str, family: str, tmp_path: Path) -> None:
    """Prompts and eager steps unpack one matrix at a time; transformers has the dequantised weights."""
    reference = save_quantised(tmp_path, name, family=family)
    ids = torch.randint(151, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    parts = [load(tmp_path, Shard(rank, 2, rank, 2), F32, True) for rank in range(2)]
    assert isinstance(parts[1][1].layers[1].qkv, DecodeWeight)

    def work(transport: ThreadTransport) -> Tensor:
        runner = Runner(*parts[transport.placement.rank], transport)
        prompt = runner.prefill(ids[:-1], 7)
        return torch.cat([prompt, runner.decode(ids[-1], len(ids))])

    with on_ranks(2, work) as logits:
        expected = reference(torch.tensor([ids])).logits[0, -2:]
        close(logits[0], expected.flatten())


@pytest.mark.parametrize(
    ("case", "weights"),
    [("qwen3-biases", "fp8"), ("qwen2", "int4"), ("phi3-partial", "int4"), ("qwen3-biases", "int4-g32")],
)
@torch.no_grad()
def test_a_model_that_is_quantised_as_it_is_read(case: str, weights: str, tmp_path: Path) -> None:
    """The same values packed and not; near those of the files; logits of transformers with these values."""
    reference = save_family(tmp_path, case, hidden_size=64, intermediate_size=96)
    config, kept = load(tmp_path, Shard(), F32, True, weights=weights)
    _, dense = load(tmp_path, Shard(), F32, False, weights=weights)
    _, exact = load(tmp_path, Shard(), F32, False)
    check_alike(kept, dense, F32)
    assert plan_memory(config, Shard(), F32, 1, 64).weights_bytes == held_bytes(kept)
    for layer, original in zip(dense.layers, exact.layers, strict=True):
        for name in MATRICES:
            found, expected = getattr(layer, name), getattr(original, name)
            error = float((found - expected).norm() / expected.norm())
            assert 0.01 < error < (0.04 if weights == "fp8" else 0.13), name
    runner = Runner(config, kept, Transport(Placement(), CPU, "gloo", None))
    other = Runner(config, dense, Transport(Placement(), CPU, "gloo", None))
    ids = list(range(3, 40))
    close(runner.prefill(ids, 17), other.prefill(ids, 17))
    logits = reference(torch.tensor([ids])).logits[0, -1]
    assert float((runner.decode(5, 38) - other.decode(5, 38)).norm()) <= 1e-4 * float(logits.norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["auto", "int4"])
@torch.no_grad()
def test_the_head_is_quantised(weights: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a scale; the embedding stays as it is. Prompts unpack some rows of the head at a time."""
    monkeypatch.setattr("alspec.models.llama.PIECE_NUMBERS", 3 * 16 * 64)
    save_family(tmp_path, "qwen3-biases", hidden_size=64, intermediate_size=96, tie_word_embeddings=tied)
    options, logits = {"weights": weights, "lm_head": "fp8"}, []
    for vocab_rank in range(2):
        shard = Shard(0, 1, vocab_rank, 2)
        config, kept = load(tmp_path, shard, F32, True, **options)
        _, dense = load(tmp_path, shard, F32, False, **options)
        _, exact = load(tmp_path, shard, F32, False, weights=weights)
        check_alike(kept, dense, F32)
        assert isinstance(kept.lm_head, DecodeWeight)
        assert isinstance(dense.lm_head, Tensor)
        assert isinstance(exact.lm_head, Tensor)
        scales = exact.lm_head.abs().amax(1, keepdim=True) / 448
        expected = (exact.lm_head / scales).to(torch.float8_e4m3fn).float() * scales
        assert torch.equal(dense.lm_head, expected)
        assert torch.equal(kept.lm_head.dequantise(F32), expected)
        assert torch.equal(kept.embedding, exact.embedding)
        assert plan_memory(config, shard, F32, 1, 64).weights_bytes == held_bytes(kept)
        assert step_bytes(config, shard, F32, []) == held_bytes(kept) - kept.embedding.nbytes
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(vocab_rank))
        group = Transport(Placement(), CPU, "gloo", None)
        logits.append((Llama(config, kept, group).lm_head(x), Llama(config, dense, group).lm_head(x)))
    for found, right in logits:
        close(found, right)
    names = {"auto": "fp32", "int4": "int4 (groups of 32 and 64)"}
    assert weights_name(config, 1, "fp32") == f"{names[weights]}, LM head fp8"


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor"])
def test_an_int4_copy_of_packed_fp8(name: str, tmp_path: Path) -> None:
    """It is made of the FP8 values, one matrix at a time, and leaves the model as it is."""
    save_quantised(tmp_path, name)
    copies = []
    for packs in (True, False):
        config, weights = load(tmp_path, Shard(), BF16, packs)
        settings = EngineConfig(model=tmp_path, weights="int4")
        copied = config_with_weights(settings, config.model_copy(update={"quantisation": None}), 1, packs)
        model = Llama(config, weights, Transport(Placement(), CPU, "gloo", None))
        before = values_of(weights.layers[0].down, BF16).clone()
        copies.append(quantised_copy(model, copied, 1))
        assert torch.equal(values_of(weights.layers[0].down, BF16), before)
    for layer, original in zip(copies[0].layers, weights.layers, strict=True):
        for matrix in MATRICES:
            kept, exact = getattr(layer, matrix), getattr(original, matrix).float()
            assert isinstance(kept, DecodeWeight)
            assert kept.format == "int4"
            assert 0.01 < float((kept.dequantise(F32) - exact).norm() / exact.norm()) < 0.13
    check_alike(*copies, BF16)


def test_values_are_rotated_before_they_are_quantised(tmp_path: Path) -> None:
    """With a quantised folder, qkv and o are then not kept packed, and a notice says why."""
    save_quantised(tmp_path, "awq", head_dim=64)
    config, kept = load(tmp_path, Shard(), BF16, True, "turboquant4")
    assert [isinstance(getattr(kept.layers[0], name), DecodeWeight) for name in MATRICES] == [False, False, True, True]
    assert plan_memory(config, Shard(), BF16, 1, 64, "turboquant4").weights_bytes == held_bytes(kept)
    (told,) = [line for line in model_notices(EngineConfig(), None, config, "bf16", 1) if "dequantised" in line]
    assert told.endswith(", 4 of 8 matrices dequantised to bf16: heads are padded or rotated")


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-inverse", "fp8-static", "int4-zeros"])
def test_modules_that_are_not_quantised_take_their_own_bytes(name: str, tmp_path: Path) -> None:
    """Whether config.json names them or not; a notice counts what is not packed, and any ranks may share them."""
    plain = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("mlp.down_proj", "self_attn.k_proj")]
    save_quantised(tmp_path, name, tuple(plain), intermediate_size=656)
    config_file = tmp_path / "config.json"
    settings = json.loads(config_file.read_text(encoding="utf-8"))
    if name == "int4-zeros":
        settings["quantization_config"]["ignore"] = ["lm_head", *plain]
    else:
        settings["quantization_config"]["modules_to_not_convert"] = ["down_proj", "k_proj"]
    config_file.write_text(json.dumps(settings), encoding="utf-8")
    config, kept = load(tmp_path, Shard(), BF16, True)
    _, dense = load(tmp_path, Shard(), BF16, False)
    check_alike(kept, dense, BF16)
    for layer in kept.layers:
        assert [isinstance(getattr(layer, name), DecodeWeight) for name in MATRICES] == [False, True, True, False]
    assert plan_memory(config, Shard(), BF16, 1, 64).weights_bytes == held_bytes(kept)
    told = model_notices(EngineConfig(model=tmp_path), None, config, "bf16", 1)
    left = "2 of 8 matrices dequantised to bf16: no kernel of a step takes their format"  # qkv, not down
    assert any(line.endswith(left) for line in told)
    assert weights_name(config, 1, "bf16").endswith("2 of 8 matrices dequantised to bf16")
    assert 2 in config.valid_tp_sizes  # ranks have 328 inputs of down, which are no whole groups of 32


@pytest.mark.parametrize("name", ["gptq", "fp8-channel"])
@pytest.mark.parametrize("head", ["auto", "fp8"])
def test_a_notice_tells_of_a_quantised_head_that_is_dequantised(name: str, head: str, tmp_path: Path) -> None:
    reference = save_quantised(tmp_path, name)
    tensors, config_file = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"

    def told() -> bool:
        settings = EngineConfig(model=tmp_path, lm_head=head)
        config = config_with_weights(settings, model_config(settings), 1, packs=True)
        lines = model_notices(settings, None, config, "bf16", 1)
        return "weights: the LM head is dequantised to bf16; --lm-head fp8 keeps it in FP8" in lines

    assert not told()
    stored, _ = FORMATS[name][1](np.random.default_rng(5), *reference.lm_head.weight.shape)
    del tensors["lm_head.weight"]
    save_file(tensors | {f"lm_head.{part}": tensor for part, tensor in stored.items()}, tmp_path / "model.safetensors")
    settings = json.loads(config_file.read_text(encoding="utf-8"))
    settings["quantization_config"]["ignore"] = []
    config_file.write_text(json.dumps(settings), encoding="utf-8")
    assert told() == (head == "auto")


@pytest.mark.parametrize(("intermediate_size", "left"), [(172, 6), (176, 0)])
def test_a_notice_tells_of_matrices_that_stay_unpacked(intermediate_size: int, left: int, tmp_path: Path) -> None:
    """Kernels take widths of whole tiles only."""
    save_family(tmp_path, "qwen3-biases", hidden_size=64, intermediate_size=intermediate_size)
    settings = EngineConfig(model=tmp_path, weights="fp8")
    config = config_with_weights(settings, LlamaConfig.from_folder(tmp_path), 1, packs=True)
    told = [line for line in model_notices(settings, None, config, "bf16", 1) if "dequantised" in line]
    total = config.num_layers * len(MATRICES)
    name = f"fp8 (a scale for each row), {left} of {total} matrices dequantised to bf16"
    assert told == ([f"weights: {name}: no kernel of a step takes their format"] if left else [])


def test_weights_that_are_quantised_already(tmp_path: Path) -> None:
    save_quantised(tmp_path, "awq")
    with pytest.raises(UserError, match=r"weights: fp8 needs weights that are not quantised, found int4 \(awq"):
        Engine.from_pretrained(tmp_path, weights="fp8")


def test_inputs_that_are_not_whole_groups(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3-biases", hidden_size=72)
    with pytest.raises(UserError, match="weights: int4 needs inputs in groups of 32, a rank has 72 of qkv; use fp8"):
        Engine.from_pretrained(tmp_path, weights="int4")


def test_a_command_quantises_a_model(tmp_path: Path) -> None:
    """On the CPU the values are dequantised; settings and memory say so."""
    save_family(tmp_path, "qwen3-biases", hidden_size=64, intermediate_size=96)
    with Engine.from_pretrained(tmp_path, weights="int4", lm_head="fp8") as engine:
        engine.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)
        assert engine.weights_name == "int4 (groups of 32 and 64), LM head fp8, dequantised to fp32"
        assert engine.memory is not None
        assert engine.memory.weights_bytes == held_bytes(engine.model.weights)
