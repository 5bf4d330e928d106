from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from alspec.errors import UserError
from alspec.models.checkpoint.checkpoint import Checkpoint, expected_tensors, verify_checksums
from alspec.models.llama_config import LlamaConfig

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def open_folder(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, LlamaConfig.from_folder(folder))


def write_checksums(folder: Path) -> Path:
    """SHA256SUMS as sha256sum writes it."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return folder / "SHA256SUMS"


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_is_read(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{kind}_folder")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (kind == "sharded")
    checkpoint, stored = open_folder(folder), stored_tensors(folder)
    assert set(expected_tensors(LlamaConfig.from_folder(folder))) == set(stored)
    for name, tensor in stored.items():
        torch.testing.assert_close(checkpoint.tensor_slice(name), tensor, rtol=0, atol=0)
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_slices(sharded_folder: Path) -> None:
    checkpoint, stored = open_folder(sharded_folder), stored_tensors(sharded_folder)
    for dim, start, stop in [(0, 0, 16), (0, 5, 6), (0, 16, None), (1, 0, 16), (1, 31, 32), (1, 7, None)]:
        found = checkpoint.tensor_slice(O_PROJ, dim, start, stop)
        expected = stored[O_PROJ][start:stop] if dim == 0 else stored[O_PROJ][:, start:stop]
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
    assert torch.equal(checkpoint.tensor_slice("model.norm.weight", 0, 3, 9), stored["model.norm.weight"][3:9])


def test_a_slice_is_private(single_folder: Path) -> None:
    before = stored_tensors(single_folder)[Q_PROJ].clone()
    open_folder(single_folder).tensor_slice(Q_PROJ).zero_()
    assert torch.equal(stored_tensors(single_folder)[Q_PROJ], before)


@pytest.fixture
def _default_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also if pytest was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_interrupts")
def test_an_interrupt_waits_for_the_end_of_a_read(single_folder: Path) -> None:
    """PyTorch turns an exception of a signal handler into a ValueError while it reads a storage."""
    checkpoint, handler = open_folder(single_folder), signal.getsignal(signal.SIGINT)
    name = "model.norm.weight"
    expected = checkpoint.tensor_slice(name).clone()
    (path,) = {checkpoint.files[name]}

    class Interrupted:
        """A handle whose reads are interrupted as PyTorch's are."""

        def get_slice(self, _: str) -> Interrupted:
            return self

        def __getitem__(self, _: object) -> torch.Tensor:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ValueError("could not determine the shape") from None
            reached.append(True)
            return expected

    reached: list[bool] = []
    checkpoint._handles[path] = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.tensor_slice(name)
    assert reached
    assert signal.getsignal(signal.SIGINT) is handler
    with ThreadPoolExecutor(1) as pool:  # signals go to the main thread
        del checkpoint._handles[path]
        assert torch.equal(pool.submit(checkpoint.tensor_slice, name).result(), expected)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("model.nothing", 0, 0, 1), "name"),
        ((Q_PROJ, 2, 0, 1), "dim"),
        ((Q_PROJ, -1, 0, 1), "dim"),
        ((Q_PROJ, 0, 0, 33), "start, stop"),
        ((Q_PROJ, 0, 5, 5), "start, stop"),
        ((Q_PROJ, 0, -1, 5), "start, stop"),
    ],
)
def test_bad_slices(arguments: tuple[str, int, int, int], named: str, single_folder: Path) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        open_folder(single_folder).tensor_slice(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_dtype_is_kept(dtype: torch.dtype, single_folder: Path) -> None:
    path = single_folder / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {name: tensor.to(dtype if "norm" not in name else torch.float32) for name, tensor in tensors.items()}, path
    )
    checkpoint = open_folder(single_folder)
    assert checkpoint.tensor_slice(Q_PROJ, 1, 3, 5).dtype == dtype
    assert checkpoint.tensor_slice("model.norm.weight").dtype == torch.float32
    assert torch.equal(checkpoint.tensor_slice(Q_PROJ, 1, 3, 5), tensors[Q_PROJ][:, 3:5].to(dtype))


def test_single_file_comes_before_an_index(single_folder: Path, sharded_folder: Path) -> None:
    for path in sharded_folder.glob("model*"):
        shutil.copy(path, single_folder / path.name)
    assert {path.name for path in open_folder(single_folder).files.values()} == {"model.safetensors"}


def test_a_separate_head_is_not_ignored(make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration says it is tied to the embedding; its last row, all numbers, or its shape differ."""
    monkeypatch.setattr("alspec.models.checkpoint.checkpoint.ROWS_AT_ONCE", 5)
    folder = make_folder(tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    changed = embedding.clone()
    changed[-1, -1] += 1
    for head in (changed, torch.randn(embedding.shape), embedding[:-1].clone()):
        save_file(tensors | {"lm_head.weight": head}, path)
        with pytest.raises(UserError, match=r"lm_head.weight'.* tie_word_embeddings is true, found other values; set"):
            open_folder(folder)
    embedding[0, 0] = torch.nan  # another error reports this
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    open_folder(folder)


def test_a_tied_head_alone_is_the_embedding(make_folder: Callable[..., Path]) -> None:
    """`save_model` writes one of the tensors that share memory; an untied model needs both."""
    from transformers import LlamaForCausalLM

    folder = make_folder(tie_word_embeddings=True)
    path = folder / "model.safetensors"
    model = LlamaForCausalLM.from_pretrained(folder)
    model.lm_head.weight = model.model.embed_tokens.weight
    save_model(model, str(path))
    assert "lm_head.weight" in load_file(path)
    assert "model.embed_tokens.weight" not in load_file(path)
    checkpoint = open_folder(folder)
    assert set(checkpoint.entries) == set(expected_tensors(LlamaConfig.from_folder(folder)))
    rows = checkpoint.tensor_slice("model.embed_tokens.weight", 0, 3, 9)
    assert torch.equal(rows, model.lm_head.weight[3:9])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"tensor 'model.embed_tokens.weight': missing \(1 of"):
        open_folder(folder)


@pytest.mark.parametrize(("head", "shards"), [("tied", False), ("tied", True), ("stored", False), ("none", True)])
def test_a_base_model_is_that_of_transformers(head: str, shards: bool, make_folder: Callable[..., Path]) -> None:
    """`AutoModel` drops the prefix `model.` and the LM head; some folders have the head beside it."""
    from transformers import AutoModel, AutoModelForCausalLM

    whole = make_folder(tie_word_embeddings=head == "tied")
    folder = whole.with_name("base")
    AutoModel.from_pretrained(whole).save_pretrained(folder, max_shard_size=40_000 if shards else "1GB")
    if head == "stored":
        path, stored = folder / "model.safetensors", load_file(whole / "model.safetensors")
        save_file(load_file(path) | {"lm_head.weight": stored["lm_head.weight"]}, path, {"format": "pt"})
    if head == "none":
        with pytest.raises(UserError, match=r"'lm_head.weight': missing .*; save the model with its LM head"):
            open_folder(folder)
        return
    checkpoint, oracle = open_folder(folder), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert set(checkpoint.entries) == set(expected_tensors(LlamaConfig.from_folder(whole)))
    for name in checkpoint.entries:
        assert torch.equal(checkpoint.tensor_slice(name), oracle[name])


@pytest.mark.parametrize(
    ("prefix", "advice"),
    [
        ("_orig_mod.", "names with '_orig_mod.' are those of torch.compile; save the model in it"),
        ("language_model.", "names with 'language_model.' are those of a model that reads more than text; save"),
        ("model.language_model.", "names with 'model.language_model.' are those of a model that reads more"),
        ("module.", "names with 'module.' are those of DataParallel; save the model in it"),
    ],
)
def test_other_prefixes_of_names_are_explained(prefix: str, advice: str, single_folder: Path) -> None:
    path = single_folder / "model.safetensors"
    is_inside = prefix.startswith("model.")
    tensors = load_file(path)
    save_file({prefix + (name.removeprefix("model.") if is_inside else name): tensors[name] for name in tensors}, path)
    with pytest.raises(UserError, match=rf"missing .*{re.escape(advice)}"):
        open_folder(single_folder)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["single", "sharded"])
def test_tolerated_tensors(is_sharded: bool, make_folder: Callable[..., Path]) -> None:
    """In shards also if the index does not name them, names them elsewhere, or they occur twice."""
    folder = make_folder(tie_word_embeddings=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    buffer = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    tensors[buffer.format(0)] = torch.ones(4)
    save_file(tensors, path)
    if is_sharded:
        path.unlink()
        first, second = dict(tensors), {buffer.format(0): torch.ones(4)}
        second["model.norm.weight"] = first.pop("model.norm.weight")
        weight_map = dict.fromkeys(first, "one.safetensors") | {"model.norm.weight": "two.safetensors"}
        del weight_map["lm_head.weight"]
        weight_map[buffer.format(1)] = "two.safetensors"
        save_file(first, folder / "one.safetensors")
        save_file(second, folder / "two.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    checkpoint = open_folder(folder)
    assert "lm_head.weight" not in checkpoint.entries
    del tensors["lm_head.weight"], tensors["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_snapshot_of_links(single_folder: Path, tmp_path: Path) -> None:
    """The hub's cache is a folder of links to files named by their hash."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(single_folder.iterdir()):
        blob = tmp_path / f"blob-{number}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    assert open_folder(snapshot).total_bytes == open_folder(single_folder).total_bytes


def test_opening_maps_nothing(sharded_folder: Path) -> None:
    checkpoint = open_folder(sharded_folder)
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("needs /proc to see what is mapped")
    assert str(sharded_folder) not in mapped.read_text(encoding="utf-8")
    tensor = checkpoint.tensor_slice(Q_PROJ, 0, 0, 8)
    assert tensor.shape == (8, 32)
    assert str(checkpoint.files[Q_PROJ]) in mapped.read_text(encoding="utf-8")


def test_checksums_of_a_good_folder(sharded_folder: Path) -> None:
    manifest = write_checksums(sharded_folder)
    verify_checksums(sharded_folder)
    names = {line.split("  ")[1] for line in manifest.read_text(encoding="utf-8").splitlines()}
    assert names == {path.name for path in sharded_folder.iterdir()} - {"SHA256SUMS"}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} < names
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=sharded_folder, check=True)
        binary = subprocess.run(["sha256sum", "--binary", *names], cwd=sharded_folder, check=True, capture_output=True)
        manifest.write_bytes(binary.stdout)
        verify_checksums(sharded_folder)


def test_a_flipped_bit_is_found_in_each_file(sharded_folder: Path) -> None:
    write_checksums(sharded_folder)
    for path in sorted(sharded_folder.iterdir()):
        if path.name == "SHA256SUMS":
            continue
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
        with pytest.raises(UserError, match=f"differing '{path.name}';") as caught:
            verify_checksums(sharded_folder)
        assert "\n" not in str(caught.value)
        path.write_bytes(good)
    verify_checksums(sharded_folder)


def test_checksums_name_every_fault(sharded_folder: Path) -> None:
    write_checksums(sharded_folder)
    (sharded_folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (sharded_folder / "config.json").write_text("{}", encoding="utf-8")
    (sharded_folder / "generation_config.json").unlink()
    (sharded_folder / "extra.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        verify_checksums(sharded_folder)
    for part in (
        "differing 'config.json', 'tokenizer.json'",
        "missing 'generation_config.json'",
        "not covered 'extra.safetensors'",
    ):
        assert part in str(caught.value)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
@pytest.mark.parametrize("has_template", [False, True])
def test_the_requested_manifest_is_used(has_template: bool, sharded_folder: Path) -> None:
    if has_template:
        (sharded_folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(UserError, match="found none; write one in a good copy of the folder: ") as caught:
        verify_checksums(sharded_folder)
    found = re.search(r"sha256sum .* > SHA256SUMS$", str(caught.value))
    assert found is not None
    subprocess.run(found.group(), shell=True, cwd=sharded_folder, check=True)
    verify_checksums(sharded_folder)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (None, "found none; write one"),
        (b"", "found none"),
        (b"\xff\xfe", "found other bytes"),
        (b"deadbeef  config.json\n", "line 1"),
        (b"0" * 64 + b"  ../config.json\n", "line 1"),
        (b"0" * 64 + b"  /etc/hostname\n", "line 1"),
        (b"0" * 64 + b"\n", "line 1"),
    ],
)
def test_broken_manifest(content: bytes | None, needle: str, single_folder: Path) -> None:
    if content is not None:
        (single_folder / "SHA256SUMS").write_bytes(content)
    with pytest.raises(UserError, match=needle) as caught:
        verify_checksums(single_folder)
    assert "\n" not in str(caught.value)


def test_checksums_cover_the_chat_template(single_folder: Path) -> None:
    write_checksums(single_folder)
    (single_folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(UserError, match=r"found not covered 'chat_template.jinja';"):
        verify_checksums(single_folder)


@pytest.mark.parametrize(("before", "after"), [("  ", "  ./"), ("  ", " *./")])
def test_other_spellings_of_a_manifest(before: str, after: str, single_folder: Path) -> None:
    """`sha256sum ./*` writes paths with ./, and other programs write digests in capitals."""
    manifest = write_checksums(single_folder)
    lines = [line.split(before) for line in manifest.read_text(encoding="utf-8").splitlines()]
    manifest.write_text("".join(f"{digest.upper()}{after}{name}\n" for digest, name in lines), encoding="utf-8")
    verify_checksums(single_folder)
