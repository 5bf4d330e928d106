"""What is wrong with a quantised folder is found from its headers and named; what does not matter is tolerated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantised_folders import FORMATS, Stored, save_quantised
from safetensors.torch import load_file, save_file

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.quantised.quantised_checkpoint import QuantisedCheckpoint
from alspec.models.checkpoint.source import model_config, open_checkpoint

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj"
Edit = Callable[[Stored], object]


def open_folder(folder: Path) -> QuantisedCheckpoint:
    settings = EngineConfig(model=folder)
    checkpoint = open_checkpoint(settings, model_config(settings))
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return checkpoint


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_settings(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def remove(part: str) -> Edit:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def change(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda tensors: tensors.update({f"{UP}.{part}": edit(tensors[f"{UP}.{part}"])})


def add(name: str, tensor: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({name: tensor})


FAULTS: dict[str, tuple[str, Edit, list[str]]] = {
    "no scale": ("fp8-channel", remove("weight_scale"), [f"'{UP}.weight_scale': missing", "[512, 1]"]),
    "no inverse": ("fp8-inverse", remove("weight_scale_inv"), [f"'{UP}.weight_scale_inv': missing", "[4, 1]"]),
    "no inverse of the tensor": (
        "fp8-tensor-inverse", remove("weight_scale_inv"), [f"'{UP}.weight_scale': missing", "[] or [1]"],
    ),
    "scale of a row": (
        "fp8-channel", change("weight_scale", lambda scale: scale[1:]), ["wrong shape", "1] or [512]", "[511, 1]"],
    ),
    "scale of the tensor": (
        "fp8-tensor", change("weight_scale", lambda scale: scale.repeat(2)), ["wrong shape", "[] or [1]", "[2]"],
    ),
    "blocks": ("fp8-block", change("weight_scale", lambda scale: scale[:, :0]), ["wrong shape", "[4, 1]", "[4, 0]"]),
    "ints for FP8": (
        "fp8-channel", change("weight", lambda weight: weight.view(torch.int8)), ["wrong dtype", "F8_E4M3", "found I8"],
    ),
    "ints for scales": (
        "fp8-channel", change("weight_scale", lambda scale: scale.int()), ["wrong dtype", "F32 or F16", "found I32"],
    ),
    "not quantised": (
        "fp8-channel", change("weight", lambda weight: weight.float()), ["wrong dtype", "F8_E4M3", "found F32"],
    ),
    "not packed": (
        "int4-group", lambda tensors: (remove("weight_packed")(tensors), add(f"{UP}.weight", torch.ones(2))(tensors)),
        ["weight_packed': missing", "[512, 12]", f"found '{UP}.weight' instead"],
    ),
    "no zero points": (
        "int4-zeros", remove("weight_zero_point"), ["weight_zero_point': missing", "[64, 3]"],
    ),
    "zero points too many": (
        "int4-group", add(f"{UP}.weight_zero_point", torch.zeros(64, 3, dtype=torch.int32)),
        ["weight_zero_point': left over"],
    ),
    "no order": ("int4-ordered", remove("weight_g_idx"), ["weight_g_idx': missing", "[96]"]),
    "another shape": (
        "int4-group", change("weight_shape", lambda shape: shape + torch.tensor([0, 1])),
        ["weight_shape': expected [512, 96], found [512, 97]"],
    ),
    "awq scales": ("awq", change("scales", lambda scales: scales[:2]), ["wrong shape", "[3, 512]", "[2, 512]"]),
    "awq words": (
        "awq", change("qweight", lambda words: words.long()), ["wrong dtype: expected I32", "found I64"],
    ),
    "awq no zeros": ("awq", remove("qzeros"), [f"'{UP}.qzeros': missing", "[3, 64]"]),
    "gptq no weight": ("gptq", remove("qweight"), [f"'{UP}.qweight': missing", "[12, 512]"]),
    "gptq no order": ("gptq-ordered", remove("g_idx"), [f"'{UP}.g_idx': missing", "[96]"]),
    "gptq bias": (
        "gptq", add(f"{UP}.bias", torch.eye(512)[7]), [f"'{UP}.bias': expected zeros", "other values"],
    ),
    "gptq bias shape": ("gptq", add(f"{UP}.bias", torch.zeros(5)), ["wrong shape", "[512]", "[5]"]),
    "too many": ("gptq", add(f"{UP}.other", torch.zeros(5)), [f"'{UP}.other': left over"]),
    "integers": (
        "awq", add("model.norm.weight", torch.ones(96, dtype=torch.int32)), ["'model.norm.weight': wrong dtype", "I32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    name, edit, needles = FAULTS[fault]
    save_quantised(tmp_path, name)
    open_folder(tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(UserError) as caught:
        open_folder(tmp_path)
    message = str(caught.value)
    assert message.isprintable()
    for needle in [str(tmp_path), UP if fault != "integers" else "norm", *needles]:
        assert needle in message


@pytest.mark.parametrize(("name", "part"), [("gptq-ordered", "g_idx"), ("int4-ordered", "weight_g_idx")])
@pytest.mark.parametrize("wrong", [3, -1])
def test_groups_that_do_not_exist(name: str, part: str, wrong: int, tmp_path: Path) -> None:
    save_quantised(tmp_path, name)
    edit_tensors(tmp_path, change(part, lambda order: torch.where(torch.arange(96) == 5, wrong, order).int()))
    with pytest.raises(UserError, match=rf"{part}': expected groups 0 .. 2, found {min(wrong, 0)} .. {max(wrong, 2)}"):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-static", "fp8-tensor-inverse"])
def test_one_scale_without_a_dimension(name: str, tmp_path: Path) -> None:
    reference = save_quantised(tmp_path, name)
    part = "weight_scale_inv" if name.endswith("inverse") else "weight_scale"
    edit_tensors(tmp_path, change(part, lambda scale: scale.reshape(())))
    found = open_folder(tmp_path).tensor_slice(f"{UP}.weight")
    assert torch.equal(found, reference.state_dict()[f"{UP}.weight"])


def test_an_order_that_is_not_set(tmp_path: Path) -> None:
    """Older files of compressed-tensors hold -1 for each channel."""
    reference = save_quantised(tmp_path, "int4-group")
    edit_tensors(tmp_path, add(f"{UP}.weight_g_idx", torch.full((96,), -1, dtype=torch.int32)))
    found = open_folder(tmp_path).tensor_slice(f"{UP}.weight")
    assert torch.equal(found, reference.state_dict()[f"{UP}.weight"])


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-inverse", "fp8-static"])
def test_modules_that_are_not_quantised(name: str, tmp_path: Path) -> None:
    """The files of these methods say which modules are."""
    plain = (UP, "model.layers.1.self_attn.k_proj")
    reference = save_quantised(tmp_path, name, plain)
    edit_settings(tmp_path, modules_to_not_convert=["up_proj", plain[1]])
    checkpoint = open_folder(tmp_path)
    assert len(checkpoint.readers) == 12
    for weight in checkpoint.entries:
        assert torch.equal(checkpoint.tensor_slice(weight), reference.state_dict()[weight]), weight


def test_modules_that_are_ignored(tmp_path: Path) -> None:
    plain = (UP, "model.layers.1.self_attn.k_proj")
    reference = save_quantised(tmp_path, "int4-zeros", plain)
    with pytest.raises(UserError, match="weight_packed': missing"):
        open_folder(tmp_path)
    edit_settings(tmp_path, ignore=["lm_head", UP, "re:.*layers.1.*k_proj"])
    checkpoint = open_folder(tmp_path)
    assert len(checkpoint.readers) == 12
    for weight in checkpoint.entries:
        assert torch.equal(checkpoint.tensor_slice(weight), reference.state_dict()[weight]), weight


def test_a_quantised_head(tmp_path: Path) -> None:
    """compressed-tensors quantises it unless it is ignored; only this rank's rows are read."""
    reference = save_quantised(tmp_path, "int4-group")
    stored = FORMATS["int4-group"][1]
    edit_settings(tmp_path, ignore=[])
    with pytest.raises(UserError, match=r"'lm_head\.weight_packed': missing"):
        open_folder(tmp_path)
    tensors, values = stored(np.random.default_rng(5), *reference.lm_head.weight.shape)
    edit_tensors(tmp_path, lambda all_tensors: all_tensors.pop("lm_head.weight"))
    edit_tensors(tmp_path, lambda all_tensors: all_tensors.update({f"lm_head.{k}": v for k, v in tensors.items()}))
    checkpoint = open_folder(tmp_path)
    assert torch.equal(checkpoint.load("lm_head.weight", CPU, torch.float32, 0, 40, 151), values[40:])


@pytest.mark.parametrize("stores_head", [False, True])
def test_tied_embeddings(stores_head: bool, tmp_path: Path) -> None:
    reference = save_quantised(tmp_path, "int4-group", tie_word_embeddings=True)
    if stores_head:  # under the head's name alone, as `safetensors.torch.save_model` does
        edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))
    checkpoint = open_folder(tmp_path)
    assert "lm_head.weight" not in checkpoint.entries
    assert torch.equal(checkpoint.tensor_slice(EMBEDDING), reference.state_dict()[EMBEDDING])


EMBEDDING = "model.embed_tokens.weight"


def test_what_is_not_used_is_said_once(tmp_path: Path) -> None:
    save_quantised(tmp_path, "fp8-channel")
    assert open_folder(tmp_path).unused is None
    for layer in range(2):
        for name in ("mlp.up_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale"):
            edit_tensors(tmp_path, add(f"model.layers.{layer}.{name}", torch.ones(1)))
    settings = FORMATS["fp8-channel"][0]["config_groups"]["group_0"]
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    edit_settings(
        tmp_path, config_groups={"group_0": settings | {"input_activations": inputs}}, kv_cache_scheme={"num_bits": 8}
    )
    unused = open_folder(tmp_path).unused
    assert unused is not None
    assert unused.startswith(
        "config_groups.group_0.input_activations, kv_cache_scheme, 6 tensors such as 'model.layers"
    )


def test_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    save_quantised(tmp_path, "gptq-v2-ordered")
    checkpoint, stored = open_folder(tmp_path), load_file(tmp_path / "model.safetensors")
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert checkpoint.entries[f"{UP}.weight"].shape == (512, 96)


def test_shards(tmp_path: Path) -> None:
    """The parts of one weight may lie in several files."""
    reference = save_quantised(tmp_path, "int4-zeros")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = [{name: tensor for place, (name, tensor) in enumerate(sorted(tensors.items())) if place % 2 == half}
              for half in (0, 1)]  # fmt: skip
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(half, tmp_path / file)
        weight_map |= dict.fromkeys(half, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    checkpoint = open_folder(tmp_path)
    assert torch.equal(checkpoint.tensor_slice(f"{UP}.weight"), reference.state_dict()[f"{UP}.weight"])


def test_quantised_files_without_settings(tmp_path: Path) -> None:
    save_quantised(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = EngineConfig(model=tmp_path)
    with pytest.raises(
        UserError, match=r"wrong dtype: expected F32, F16, BF16, found 'I32'; .* how these are quantised"
    ):
        open_checkpoint(settings, model_config(settings))


def test_only_a_rank_s_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the channels of each format: half of its codes and scales, and whole orders."""
    read: list[int] = []
    original = Checkpoint._read_ranges

    def counted(self: Checkpoint, *arguments: Any) -> torch.Tensor:
        result = original(self, *arguments)
        read.append(result.nbytes)
        return result

    down = "model.layers.0.mlp.down_proj"
    for name in FORMATS:
        folder = tmp_path / name
        save_quantised(folder, name)
        checkpoint = open_folder(folder)
        tensors = load_file(folder / "model.safetensors")
        stored = {key.rpartition(".")[2]: tensor.nbytes for key, tensor in tensors.items() if key.startswith(down)}
        order = stored.get("g_idx", stored.get("weight_g_idx", 0))
        codes = next(stored[part] for part in ("weight", "weight_packed", "qweight") if part in stored)
        monkeypatch.setattr(Checkpoint, "_read_ranges", counted)
        read.clear()
        checkpoint.load(f"{down}.weight", CPU, torch.float32, 1, 256, 512)
        monkeypatch.setattr(Checkpoint, "_read_ranges", original)
        assert sum(read) <= sum(stored.values()) - codes // 2, name
        if not order and "row" not in name and "channel" not in name and "tensor" not in name and "static" not in name:
            unread = stored.get("weight_shape", 0) + stored.get("bias", 0)
            assert sum(read) == (sum(stored.values()) - unread) // 2, name
