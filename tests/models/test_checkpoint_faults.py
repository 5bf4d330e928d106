"""One test over every way a model folder can be broken: a fault builder and what the one-line message must contain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alspec.errors import UserError
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.safetensors_header import read_header
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4976698672\n"
HTML_PAGE = b"\xef\xbb\xbf\n<!DOCTYPE html>\n<html><body>Access denied</body></html>\n"

Fault = Callable[[Path], object]


def open_all(folder: Path) -> None:
    """Read what a command reads of a model before it takes memory."""
    config = LlamaConfig.from_folder(folder)
    Checkpoint.open(folder, config)
    Tokenizer.from_folder(folder, config)


def shard(folder: Path) -> Path:
    """The file that holds `Q_PROJ`."""
    index = folder / INDEX
    if not index.exists():
        return folder / "model.safetensors"
    return folder / str(json.loads(index.read_text(encoding="utf-8"))["weight_map"][Q_PROJ])


def remove(name: str) -> Fault:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Fault:
    return lambda folder: (folder / name).write_bytes(content)


def dangle(name: str) -> Fault:
    """A link without a target, as in a hub's cache whose files were removed."""

    def fault(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../../blobs/4d7a21")

    return fault


def edit_json(name: str, edit: Callable[[dict[str, Any]], object]) -> Fault:
    def fault(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        edit(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return fault


def edit_shard(edit: Callable[[bytes], bytes]) -> Fault:
    return lambda folder: shard(folder).write_bytes(edit(shard(folder).read_bytes()))


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Fault:
    def fault(folder: Path) -> None:
        tensors = load_file(shard(folder))
        edit(tensors)
        save_file(tensors, shard(folder))

    return fault


def edit_header(edit: Callable[[dict[str, Any]], object]) -> Fault:
    def edited(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return edit_shard(edited)


def only_pickle(folder: Path) -> None:
    shard(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")


def only_gguf(folder: Path) -> None:
    shard(folder).rename(folder / "model.gguf")


def a_file_instead_of_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("model", encoding="utf-8")


def a_folder_instead_of_weights(folder: Path) -> None:
    shard(folder).unlink()
    (folder / "model.safetensors").mkdir()


def missing_shard(folder: Path) -> None:
    shard(folder).unlink()


def duplicate_tensor(folder: Path) -> None:
    other = next(path for path in folder.glob("*.safetensors") if path != shard(folder))
    save_file(load_file(other) | {Q_PROJ: load_file(shard(folder))[Q_PROJ]}, other)


def shift_offsets(by: int) -> Callable[[dict[str, Any]], object]:
    def edit(header: dict[str, Any]) -> None:
        offsets = header[Q_PROJ]["data_offsets"]
        header[Q_PROJ]["data_offsets"] = [offsets[0] + by, offsets[1] + by]

    return edit


def last_tensor_out_of_range(header: dict[str, Any]) -> None:
    header.pop("__metadata__", None)
    last = max(header.values(), key=lambda entry: entry["data_offsets"][1])
    last["shape"][0] *= 1000
    last["data_offsets"][1] = last["data_offsets"][0] + 1000 * (last["data_offsets"][1] - last["data_offsets"][0])


def duplicate_key(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(header)[Q_PROJ]).encode()
    header = header[:-1] + f', "{Q_PROJ}": '.encode() + entry + b"}"
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def set_index(**content: Any) -> Fault:
    return write(INDEX, json.dumps(content).encode())


def point_index(file_name: Any) -> Fault:
    return edit_json(INDEX, lambda index: index["weight_map"].update({Q_PROJ: file_name}))


def header_length(length: int) -> Fault:
    return edit_shard(lambda data: length.to_bytes(8, "little") + data[8:])


FAULTS: dict[str, tuple[str, Fault, list[str]]] = {
    "folder missing": ("single", shutil.rmtree, ["expected a model folder, found nothing"]),
    "not a folder": ("single", a_file_instead_of_the_folder, ["expected a model folder, found a file"]),
    "no config": ("single", remove("config.json"), ["config.json", "found none"]),
    "config not JSON": ("single", write("config.json", b"{hidden_size: 4}"), ["config.json: expected JSON"]),
    "config a list": ("single", write("config.json", b"[1]"), ["config.json: expected JSON", "found [1]"]),
    "config a pointer": (
        "single",
        write("config.json", LFS_POINTER),
        ["config.json", "Git-LFS pointer", "git lfs pull"],
    ),
    "config not text": ("single", write("config.json", b"\xff\xfe{}"), ["config.json: expected JSON"]),
    "config nested": ("single", write("config.json", b'{"a":' * 100_000), ["config.json: expected JSON"]),
    "config key twice": ("single", write("config.json", b'{"a": 1, "a": 2}'), ["config.json", "duplicate key 'a'"]),
    "generation config broken": ("single", write("generation_config.json", b"{"), ["generation_config.json"]),
    "no weights": ("single", remove("model.safetensors"), ["expected model.safetensors or", INDEX, "found none"]),
    "only pickle": (
        "single",
        only_pickle,
        ["found only 'pytorch_model.bin'", "pickle is not read; give a GGUF file by its own path"],
    ),
    "only GGUF": (
        "single",
        only_gguf,
        ["found only 'model.gguf'", "pickle is not read; give a GGUF file by its own path"],
    ),
    "weights a folder": ("single", a_folder_instead_of_weights, ["model.safetensors: expected a safetensors file"]),
    "weights empty": ("single", edit_shard(lambda data: b""), ["model.safetensors: truncated", "0 bytes"]),
    "cut in the length": ("single", edit_shard(lambda data: data[:5]), ["model.safetensors: truncated", "5 bytes"]),
    "cut after the length": ("single", edit_shard(lambda data: data[:8]), ["model.safetensors: truncated", "header"]),
    "cut in the header": ("single", edit_shard(lambda data: data[:300]), ["model.safetensors: truncated", "300 bytes"]),
    "cut in the data": (
        "sharded",
        edit_shard(lambda data: data[:-1]),
        ["model-0", "truncated: tensor 'model.", "found"],
    ),
    "cut after the header": (
        "single",
        edit_shard(lambda data: data[: 8 + int.from_bytes(data[:8], "little")]),
        ["model.safetensors: truncated: tensor", "found 0"],
    ),
    "padded": ("sharded", edit_shard(lambda data: data + b"\0" * 7), ["model-0", "padded", "7 bytes more"]),
    "Git-LFS pointer": (
        "sharded",
        edit_shard(lambda data: LFS_POINTER),
        ["model-0", "Git-LFS pointer", "git lfs pull"],
    ),
    "HTML page": ("sharded", edit_shard(lambda data: HTML_PAGE), ["model-0", "HTML page", "download the file again"]),
    "GGUF renamed": ("single", edit_shard(lambda data: b"GGUF" + data), ["model.safetensors", "GGUF"]),
    "pickle renamed": ("single", edit_shard(lambda data: b"PK\3\4" + data), ["model.safetensors", "pickle"]),
    "header length absurd": ("single", header_length(2**63), ["expected a safetensors header", str(2**63)]),
    "header length zero": ("single", header_length(0), ["expected a safetensors header", "0 bytes"]),
    "header length short": ("single", header_length(50), ["model.safetensors: expected a JSON header"]),
    "noise": ("single", edit_shard(lambda data: bytes(range(256)) * 9), ["expected a safetensors header"]),
    "header not JSON": ("single", edit_shard(lambda data: data.replace(b'":{', b'":[', 1)), ["expected a JSON header"]),
    "header not text": ("single", edit_shard(lambda data: data.replace(b"model", b"\xffodel", 1)), ["a JSON header"]),
    "tensor twice in a header": ("single", edit_shard(duplicate_key), ["model.safetensors", "duplicate key", Q_PROJ]),
    "entry not an object": (
        "single",
        edit_header(lambda header: header.update({Q_PROJ: 3})),
        [Q_PROJ, "expected dtype, shape and data_offsets", "found 3"],
    ),
    "negative size": (
        "single",
        edit_header(lambda header: header[Q_PROJ].update(shape=[-32, -32])),
        [Q_PROJ, "expected dtype, shape and data_offsets"],
    ),
    "offsets do not fit the shape": (
        "single",
        edit_header(lambda header: header[Q_PROJ].update(shape=[32, 16])),
        [Q_PROJ, "2048 bytes apart"],
    ),
    "offsets reversed": (
        "single",
        edit_header(lambda header: header[Q_PROJ]["data_offsets"].reverse()),
        [Q_PROJ, "bytes apart"],
    ),
    "offsets overlap": ("single", edit_header(shift_offsets(-64)), ["model.safetensors", Q_PROJ, "overlaps"]),
    "offsets leave a hole": ("single", edit_header(shift_offsets(64)), ["model.safetensors", Q_PROJ, "a hole"]),
    "offsets out of range": ("single", edit_header(last_tensor_out_of_range), ["truncated: tensor", "ends at byte"]),
    "missing shard": ("sharded", missing_shard, ["model-0", "missing shard", "download it"]),
    "index not JSON": ("sharded", write(INDEX, b"oops"), [INDEX, "expected JSON"]),
    "index a page": ("sharded", write(INDEX, HTML_PAGE), [INDEX, "HTML page"]),
    "index without weight_map": ("sharded", set_index(metadata={}), [INDEX, "weight_map", "found None"]),
    "index with an empty weight_map": ("sharded", set_index(weight_map={}), [INDEX, "weight_map", "found {}"]),
    "index with a list": ("sharded", set_index(weight_map=["a"]), [INDEX, "weight_map", "found ['a']"]),
    "index names an absent tensor": (
        "sharded",
        edit_json(
            INDEX, lambda index: index["weight_map"].update({"model.x": next(iter(index["weight_map"].values()))})
        ),
        [INDEX, "'model.x'", "no such tensor"],
    ),
    "index names the wrong file": (
        "sharded",
        edit_json(INDEX, lambda index: index["weight_map"].update({Q_PROJ: index["weight_map"]["lm_head.weight"]})),
        [INDEX, Q_PROJ, "expected in model-0", "found model-0"],
    ),
    "index leaves a tensor out": (
        "sharded",
        edit_json(INDEX, lambda index: index["weight_map"].pop(Q_PROJ)),
        [INDEX, Q_PROJ, "left over"],
    ),
    "index leads upwards": ("sharded", point_index("../model.safetensors"), [INDEX, Q_PROJ, "in this folder"]),
    "index leads to the root": ("sharded", point_index("/etc/passwd"), [INDEX, Q_PROJ, "in this folder"]),
    "index leads to the parent": ("sharded", point_index(".."), [INDEX, Q_PROJ, "*.safetensors"]),
    "index leads to nothing": ("sharded", point_index(None), [INDEX, Q_PROJ, "found None"]),
    "index leads to a pickle": ("sharded", point_index("model.bin"), [INDEX, Q_PROJ, "pickle is not read"]),
    "index with a line break": ("sharded", point_index("a\nb\x1b.safetensors"), ["missing shard", Q_PROJ, r"a\nb"]),
    "index with a zero byte": ("sharded", point_index("a\0.safetensors"), ["missing shard", Q_PROJ]),
    "duplicate tensor": ("sharded", duplicate_tensor, ["model-0", Q_PROJ, "duplicate", "found in model-0"]),
    "tensor missing": (
        "single",
        edit_tensors(lambda tensors: tensors.pop(Q_PROJ)),
        [Q_PROJ, "missing (1 of 21 tensors)", "expected shape [32, 32]"],
    ),
    "LM head missing": (
        "single",
        edit_tensors(lambda tensors: tensors.pop("lm_head.weight")),
        ["'lm_head.weight': missing", "[320, 32]"],
    ),
    "tensor renamed": (
        "single",
        edit_tensors(lambda tensors: tensors.update({"odd": tensors.pop(Q_PROJ)})),
        [Q_PROJ, "missing", "found 'odd' instead"],
    ),
    "tensor left over": (
        "single",
        edit_tensors(lambda tensors: tensors.update({Q_PROJ.replace("weight", "bias"): torch.ones(32)})),
        ["model.safetensors", "q_proj.bias'", "left over"],
    ),
    "wrong shape": (
        "single",
        edit_tensors(lambda tensors: tensors.update({Q_PROJ: torch.ones(16, 32)})),
        ["model.safetensors", Q_PROJ, "wrong shape: expected [32, 32], found [16, 32]"],
    ),
    "shape transposed": (
        "single",
        edit_tensors(lambda tensors: tensors.update({"lm_head.weight": torch.ones(32, 320)})),
        ["'lm_head.weight'", "wrong shape: expected [320, 32], found [32, 320]"],
    ),
    "wrong dtype": (
        "single",
        edit_tensors(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)})),
        ["model.safetensors", Q_PROJ, "wrong dtype: expected F32, F16, BF16, found 'I8'"],
    ),
    "double precision": (
        "single",
        edit_tensors(lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].double()})),
        [Q_PROJ, "wrong dtype", "'F64'"],
    ),
    "config of another model": (
        "single",
        edit_json("config.json", lambda config: config.update(num_hidden_layers=3)),
        ["'model.layers.2.input_layernorm.weight': missing (9 of 30 tensors)"],
    ),
    "config with fewer layers": (
        "single",
        edit_json("config.json", lambda config: config.update(num_hidden_layers=1)),
        ["'model.layers.1.", "left over", "num_hidden_layers"],
    ),
    "no tokenizer": ("single", remove("tokenizer.json"), ["tokenizer.json: expected a tokenizer, found none"]),
    "tokenizer a pointer": ("single", write("tokenizer.json", LFS_POINTER), ["tokenizer.json", "Git-LFS pointer"]),
    "tokenizer not JSON": ("single", write("tokenizer.json", b"{]"), ["tokenizer.json: expected JSON"]),
    "tokenizer empty": ("single", write("tokenizer.json", b""), ["tokenizer.json: expected JSON"]),
    "tokenizer without a model": ("single", write("tokenizer.json", b"{}"), ["tokenizer.json: unreadable tokenizer"]),
    "tokenizer adds an unknown token": (
        "single",
        edit_json("tokenizer.json", lambda tokenizer: tokenizer["post_processor"].update(special_tokens={})),
        ["tokenizer.json: unreadable tokenizer"],
    ),
    "tokenizer vocabulary too large": (
        "single",
        edit_json("tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(zebra=320)),
        ["tokenizer.json: vocabulary", "vocab_size (320", "id 320 of 'zebra'"],
    ),
    "tokenizer settings broken": (
        "single",
        write("tokenizer_config.json", b"{"),
        ["tokenizer_config.json: expected JSON"],
    ),
    "tokenizer without the end token": (
        "single",
        edit_json("tokenizer_config.json", lambda settings: settings.update(eos_token="<stop>")),
        ["tokenizer_config.json: eos_token", "'<stop>'"],
    ),
}


for _kind, _name in (
    ("single", "config.json"),
    ("single", "generation_config.json"),
    ("single", "model.safetensors"),
    ("single", "special_tokens_map.json"),
    ("single", "tokenizer.json"),
    ("single", "tokenizer_config.json"),
    ("sharded", INDEX),
    ("sharded", "model-00002-of-00004.safetensors"),
):
    FAULTS[f"{_name} a dangling link"] = (
        _kind,
        dangle(_name),
        [_name, "found a broken symbolic link ('../../blobs/4d7a21'); download"],
    )


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_in_one_line(name: str, request: pytest.FixtureRequest) -> None:
    kind, fault, needles = FAULTS[name]
    folder: Path = request.getfixturevalue(f"{kind}_folder")
    open_all(folder)
    fault(folder)
    with pytest.raises(UserError) as caught:
        open_all(folder)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 700
    for needle in [str(folder), *needles]:
        assert needle in message


def test_every_cut_is_found(single_folder: Path) -> None:
    """The header check notices a download that stops at any byte."""
    path = single_folder / "model.safetensors"
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    for size in [*range(0, header_end + 1, 97), header_end - 1, header_end, *range(header_end, len(data), 9973)]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="truncated"):
            read_header(path)
    path.write_bytes(data)
    assert len(read_header(path)) == 21
