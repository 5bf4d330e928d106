"""What people give as a model: shards without an index, adapters, GGUF folders, roots of caches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf

from alspec.config import EngineConfig
from alspec.errors import UserError
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.model_folder import usable_path
from alspec.models.checkpoint.source import model_config, open_checkpoint
from alspec.models.llama_config import LlamaConfig

INDEX = "model.safetensors.index.json"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(EngineConfig(model=folder), model_config(EngineConfig(model=folder)))
    return {name: checkpoint.tensor_slice(name) for name in checkpoint.entries}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_shards_without_an_index(sharded_folder: Path) -> None:
    expected = weights(sharded_folder)
    (sharded_folder / INDEX).unlink()
    (sharded_folder / "adapter_model.safetensors").write_bytes(b"of no interest")
    assert_same(weights(sharded_folder), expected)
    assert len(list(sharded_folder.glob("model-*-of-*.safetensors"))) > 2


def test_shards_without_an_index_under_other_names(sharded_folder: Path) -> None:
    expected = weights(sharded_folder)
    (sharded_folder / INDEX).unlink()
    for number, path in enumerate(sorted(sharded_folder.glob("*.safetensors"))):
        path.rename(sharded_folder / f"part{number}.safetensors")
    assert_same(weights(sharded_folder), expected)


def test_one_file_under_another_name(single_folder: Path) -> None:
    expected = weights(single_folder)
    (single_folder / "model.safetensors").rename(single_folder / "weights.safetensors")
    assert_same(weights(single_folder), expected)


def test_numbered_shards_come_before_other_files(sharded_folder: Path) -> None:
    expected = weights(sharded_folder)
    (sharded_folder / INDEX).unlink()
    shutil.copy(next(sharded_folder.glob("*.safetensors")), sharded_folder / "consolidated.safetensors")
    assert_same(weights(sharded_folder), expected)


@pytest.mark.parametrize("name", ["model-00002-of-", "model-00001-of-"])
def test_a_missing_shard_is_named(name: str, sharded_folder: Path) -> None:
    (sharded_folder / INDEX).unlink()
    missing = next(sharded_folder.glob(f"{name}*"))
    missing.unlink()
    with pytest.raises(UserError, match=rf"{missing.name}: missing shard: expected \d files, found \d and no index"):
        Checkpoint.open(sharded_folder, LlamaConfig.from_folder(sharded_folder))


def test_shards_of_two_models_are_refused(sharded_folder: Path) -> None:
    (sharded_folder / INDEX).unlink()
    shutil.copy(next(sharded_folder.glob("model-00001-of-*")), sharded_folder / "old-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"expected the shards of one model, found 'model-\*-of-.*', 'old-\*-of-00002'"):
        Checkpoint.open(sharded_folder, LlamaConfig.from_folder(sharded_folder))


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"}


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_says_how_to_merge_it(has_config: bool, single_folder: Path) -> None:
    (single_folder / "adapter_config.json").write_text(json.dumps(ADAPTER), encoding="utf-8")
    assert usable_path(single_folder) == single_folder  # the weights are there: it is merged
    (single_folder / "model.safetensors").rename(single_folder / "adapter_model.safetensors")
    if not has_config:
        (single_folder / "config.json").unlink()
    with pytest.raises(UserError) as caught:
        model_config(EngineConfig(model=single_folder))
    message = str(caught.value)
    assert f"{single_folder}: expected a model, found an adapter ('LORA') of 'meta-llama/Llama-3.2-1B';" in message
    assert f"AutoPeftModelForCausalLM as M; M.from_pretrained('{single_folder}').merge_and_unload()" in message
    assert "\n" not in message


@pytest.mark.full
def test_the_advice_on_adapters_works(single_folder: Path, tmp_path: Path) -> None:
    """Run what the message says: what it writes loads, with the merged values."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(single_folder)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError) as caught:
        model_config(EngineConfig(model=tmp_path / "adapter"))
    code = str(caught.value).split('python -c "')[1].split('"')[0].replace("'OUT'", f"'{tmp_path / 'merged'}'")
    exec(code, {})
    merged = weights(tmp_path / "merged")
    changed = [name for name, value in weights(single_folder).items() if not torch.equal(value, merged[name])]
    assert changed
    assert all("q_proj" in name or "down_proj" in name for name in changed)


@pytest.fixture
def cache(single_folder: Path, tmp_path: Path) -> Path:
    """The root of a Hugging Face cache with two snapshots of a model; the one that is in use comes last by name."""
    root = tmp_path / "hub" / "models--meta-llama--Tiny"
    for name in ("0aa", "fff"):
        shutil.copytree(single_folder, root / "snapshots" / name)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("fff", encoding="utf-8")
    (root / "blobs").mkdir()
    return root


@pytest.mark.parametrize("inside", [".", "snapshots", ".."])
def test_the_root_of_a_cache_names_the_snapshot(inside: str, cache: Path) -> None:
    folder = (cache / inside).resolve()
    with pytest.raises(UserError) as caught:
        model_config(EngineConfig(model=folder))
    first = cache / "snapshots" / ("0aa" if inside == "snapshots" else "fff")
    message = str(caught.value)
    assert message.startswith(f"{folder}: expected a model folder, found folders that hold models; give {cache}")
    assert str(first) in message
    if inside != "snapshots":
        assert message.index("fff") < message.index("0aa")  # the snapshot in use comes first
    assert model_config(EngineConfig(model=first)).hidden_size == 32


def test_a_folder_around_the_model_names_it(single_folder: Path) -> None:
    with pytest.raises(UserError, match=f"found folders that hold models; give {single_folder}$"):
        model_config(EngineConfig(model=single_folder.parent))


def test_a_folder_without_a_model_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: expected a file, found none"):
        model_config(EngineConfig(model=tmp_path))


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_one_gguf_file_runs(has_config: bool, tmp_path: Path, single_folder: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    if has_config:  # repositories of GGUF files often have one
        shutil.copy(single_folder / "config.json", folder)
    assert usable_path(folder) == folder / "tiny.gguf"
    assert_same(weights(folder), weights(folder / "tiny.gguf"))


def test_of_several_gguf_files_one_is_to_be_given(tmp_path: Path) -> None:
    names = ["a-Q4_0.gguf", "a-Q8_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "c.gguf", "d.gguf"]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UserError) as caught:
        usable_path(tmp_path)
    named = " or ".join(str(tmp_path / name) for name in names[:3])
    assert str(caught.value) == f"{tmp_path}: expected one model, found 5 GGUF files; give {named}, or one of 2 more"
