"""A model's weights on disk: checked from the file headers, then read slice by slice from the memory map."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open

from alspec.errors import UserError, show
from alspec.interrupts import interrupts_wait
from alspec.models.checkpoint.files import absent, is_there, read_json
from alspec.models.checkpoint.model_folder import shards_without_index
from alspec.models.checkpoint.safetensors_header import FLOAT_DTYPES, ExpectedTensor, TensorEntry, read_header
from alspec.models.llama_config import LlamaConfig

__all__ = [
    "Checkpoint",
    "check_tensors",
    "check_tied_head",
    "expected_tensors",
    "head_as_embedding",
    "is_tolerated",
    "read_headers",
    "verify_checksums",
]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MANIFEST = "SHA256SUMS"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS_AT_ONCE = 4096  # rows per comparison of an LM head with its tied embedding
_BASE = "model."  # the prefix of all tensors but the LM head
# Prefixes of models that hold the model, longest first, and where they come from.
_WRAPPERS = {
    "model.language_model.": "those of a model that reads more than text; save its language model alone",
    "language_model.": "those of a model that reads more than text; save its language model alone",
    "_orig_mod.": "those of torch.compile; save the model in it, `model._orig_mod`",
    "module.": "those of DataParallel; save the model in it, `model.module`",
}
_COVERED = ("*.safetensors", "*.json", "*.jinja")


def expected_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names (Hugging Face spelling) and shapes of a model's weights; no LM head if embeddings are tied."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if config.fused_tensors:
        rows = {"qkv": q_rows + 2 * kv_rows}
    for part, num_rows in rows.items():
        layer[f"self_attn.{part}_proj.weight"] = (num_rows, hidden)
        if config.qkv_bias:
            layer[f"self_attn.{part}_proj.bias"] = (num_rows,)
    if config.qk_norm:
        layer |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in ("q", "k")}
    layer["self_attn.o_proj.weight"] = (hidden, q_rows)
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    layer["post_attention_layernorm.weight"] = (hidden,)
    for part, num_rows in {"gate_up": 2 * mlp}.items() if config.fused_tensors else {"gate": mlp, "up": mlp}.items():
        layer[f"mlp.{part}_proj.weight"] = (num_rows, hidden)
        if config.mlp_bias:
            layer[f"mlp.{part}_proj.bias"] = (num_rows,)
    layer["mlp.down_proj.weight"] = (hidden, mlp)
    if config.mlp_bias:
        layer["mlp.down_proj.bias"] = (hidden,)
    tensors: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[_HEAD] = (config.vocab_size, hidden)
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one folder, checked against a configuration, to be read slice by slice."""

    entries: dict[str, TensorEntry]
    files: dict[str, Path]
    stored_names: dict[str, str] = field(default_factory=dict)  # name in the file, if it differs
    unused: str | None = None  # what the files hold that is not used, in a few words
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path, config: LlamaConfig) -> Self:
        """Check the weights of a folder from the file headers alone; reads no weights and allocates no memory for them.

        Tolerated: `rotary_emb.inv_freq` buffers of older files, and an LM head beside tied embeddings if the values are
        equal (this comparison reads both). If a tied model stores only the LM head, as `safetensors.torch.save_model`
        does, it is used as the embedding. Names that all lack `model.`, as `AutoModel` saves a base model, get it.

        Raises:
            UserError: no weights, a missing or broken file (see `read_header`), an index that does not fit the files, a
                tensor that is missing, left over, stored twice, or of the wrong shape, or a tied LM head with other
                values than the embedding; names file and tensor.
        """
        entries, files = read_headers(folder, lambda name: is_tolerated(name, config))
        stored_names = _add_base_prefix(entries, files) | head_as_embedding(entries, files, config)
        expected = {name: ExpectedTensor((shape,)) for name, shape in expected_tensors(config).items()}
        check_tensors(folder, entries, files, expected, lambda name: is_tolerated(name, config))
        check_tied_head(cls(entries, files, stored_names), config)
        return cls({name: entries[name] for name in expected}, {name: files[name] for name in expected}, stored_names)

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def tensor_slice(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read `tensor[start:stop]` along `dim`, or the whole tensor when `dim` is None.

        The result uses the mapped file if possible: pages are read on first use, and a slice along the last dimension
        may be non-contiguous. The mapping is private to this process.

        Returns:
            CPU tensor in the stored dtype (fp32, fp16 or bf16).
        Raises:
            ValueError: unknown name, or a slice that is empty or out of range.
        """
        dim, start, stop = self._range(name, dim, start, stop)
        with interrupts_wait():
            return self._read(name, dim, start, stop)

    def load(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        dim: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Read a slice as `tensor_slice` does, contiguous, onto a device and in a dtype."""
        return self.tensor_slice(name, dim, start, stop).to(device, dtype).contiguous()

    def _range(self, name: str, dim: int | None, start: int, stop: int | None) -> tuple[int, int, int]:
        """A slice's dimension and range; ValueError if there is no such tensor or range."""
        if name not in self.entries:
            raise ValueError(f"name: expected a tensor of the checkpoint, found {name!r}")
        shape = self.entries[name].shape
        if dim is None:
            dim = 0
        if not 0 <= dim < len(shape):
            raise ValueError(f"dim: expected 0 .. {len(shape) - 1} for {name!r}, found {dim}")
        stop = shape[dim] if stop is None else stop
        if not 0 <= start < stop <= shape[dim]:
            raise ValueError(f"start, stop: expected a range within 0 .. {shape[dim]}, found {start} .. {stop}")
        return dim, start, stop

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        whole = [(None, None)] * dim
        return self._read_ranges(self.files[name], self.stored_names.get(name, name), *whole, (start, stop))

    def _read_ranges(self, path: Path, stored_name: str, *ranges: tuple[int | None, int | None]) -> torch.Tensor:
        """The part of a tensor in a file that ranges of its first dimensions select."""
        if path not in self._handles:
            self._handles[path] = safe_open(str(path), framework="pt", device="cpu")
        stored = self._handles[path].get_slice(stored_name)
        result = stored[tuple(slice(start, stop) for start, stop in ranges) or ...]
        assert isinstance(result, torch.Tensor)
        return result


def read_headers(
    folder: Path, tolerates: Callable[[str], bool], dtypes: Collection[str] = FLOAT_DTYPES
) -> tuple[dict[str, TensorEntry], dict[str, Path]]:
    """Read the headers of a folder's weights, and check that an index fits them.

    Args:
        tolerates: whether a file may contain a tensor of this name that is not used.
        dtypes: those that a tensor may have.
    Returns:
        Entries and files by tensor name.
    Raises:
        UserError: see `Checkpoint.open`.
    """
    folder = Path(folder)
    index_path = folder / _INDEX
    weight_map = None
    if is_there(folder / _SINGLE):
        paths = [folder / _SINGLE]
    elif is_there(index_path):
        weight_map = _read_weight_map(index_path)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = shards_without_index(folder)
        if not paths:
            raise _no_weights(folder)
    entries: dict[str, TensorEntry] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for name, entry in read_header(path, dtypes).items():
            if name in entries and not tolerates(name):
                raise UserError(
                    f"{path}: tensor {show(name)}: duplicate: expected once, found in {files[name].name} too; "
                    "remove the file that does not belong to the model"
                )
            entries[name], files[name] = entry, path
    if weight_map is not None:
        _check_weight_map(index_path, weight_map, files, tolerates)
    return entries, files


def is_tolerated(name: str, config: LlamaConfig) -> bool:
    """Whether a file may contain this tensor although the model does not use it."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == _HEAD)


def _add_base_prefix(entries: dict[str, TensorEntry], files: dict[str, Path]) -> dict[str, str]:
    """Rename the tensors of a base model, as `AutoModel` saves it; returns their names in the files."""
    if _EMBEDDING.removeprefix(_BASE) not in entries or any(name.startswith(_BASE) for name in entries):
        return {}
    stored_names = {_BASE + name: name for name in entries if name != _HEAD}
    for name, stored in stored_names.items():
        entries[name], files[name] = entries.pop(stored), files.pop(stored)
    return stored_names


def head_as_embedding(entries: dict[str, TensorEntry], files: dict[str, Path], config: LlamaConfig) -> dict[str, str]:
    """Use the LM head of a tied model that stores no embedding as its embedding; returns its name in the file."""
    if not config.tie_word_embeddings or _HEAD not in entries or _EMBEDDING in entries:
        return {}
    entries[_EMBEDDING], files[_EMBEDDING] = entries.pop(_HEAD), files.pop(_HEAD)
    return {_EMBEDDING: _HEAD}


def check_tied_head(stored: Checkpoint, config: LlamaConfig) -> None:
    """Refuse an LM head that differs from the tied embedding: it was trained separately and must not be ignored."""
    if not config.tie_word_embeddings or _HEAD not in stored.entries:
        return
    rows = stored.entries[_EMBEDDING].shape[0]

    def rows_equal(start: int) -> bool:
        stop = min(start + ROWS_AT_ONCE, rows)
        head, embedding = (stored.tensor_slice(name, 0, start, stop).float() for name in (_HEAD, _EMBEDDING))
        return torch.allclose(head, embedding, rtol=0, atol=0, equal_nan=True)

    same_shape = stored.entries[_HEAD].shape == stored.entries[_EMBEDDING].shape
    if not (same_shape and all(map(rows_equal, range(0, rows, ROWS_AT_ONCE)))):
        raise UserError(
            f"{stored.files[_HEAD]}: tensor '{_HEAD}': expected the values of {_EMBEDDING} because tie_word_embeddings "
            "is true, found other values; set it to false in config.json to use them, or remove the tensor"
        )


def _no_weights(folder: Path) -> UserError:
    if not folder.is_dir():
        return UserError(f"{folder}: expected a model folder, found none; give the folder that holds config.json")
    others = sorted(
        path.name for pattern in ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.gguf") for path in folder.glob(pattern)
    )
    found = "none" if not others else f"only {', '.join(map(show, others[:3]))}{', ...' if len(others) > 3 else ''}"
    return UserError(
        f"{folder}: expected {_SINGLE} or {_INDEX}, found {found}; "
        "download or convert the weights as safetensors (pickle is not read; give a GGUF file by its own path)"
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    """File name by tensor name, from the index. Every file must be in the index's own folder."""
    weight_map = read_json(path, "to find the weights").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{path}: weight_map: expected file names by tensor, found {show(weight_map)}; download the file again"
        )
    for name, file_name in weight_map.items():
        # A name with a separator could be outside the folder; published indices have none.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or "\\" in file_name:
            raise UserError(
                f"{path}: tensor {show(name)}: expected the name of a file in this folder, found {show(file_name)}; "
                "correct the index"
            )
        if not file_name.endswith(".safetensors"):
            raise UserError(
                f"{path}: tensor {show(name)}: expected a *.safetensors file, found {show(file_name)}; "
                "give the model's safetensors files (pickle is not read)"
            )
        shard = path.parent / file_name
        if "\0" in file_name or not shard.is_file():
            raise UserError(
                f"{path}: missing shard: expected {show(file_name)} beside the index, with tensor {show(name)}, "
                f"found {absent(shard)}; download it"
            )
    return weight_map


def _check_weight_map(
    index_path: Path, weight_map: dict[str, str], files: dict[str, Path], tolerates: Callable[[str], bool]
) -> None:
    """Check that the index and the shards' headers name the same tensors in the same files."""
    for name, file_name in weight_map.items():
        if tolerates(name):
            continue
        found = files[name].name if name in files else "no such tensor"
        if found != file_name:
            raise UserError(
                f"{index_path}: tensor {show(name)}: expected in {file_name}, as the index lists it, found {found}; "
                "download the index and that file again"
            )
    for name, path in files.items():
        if name not in weight_map and not tolerates(name):
            raise UserError(
                f"{index_path}: tensor {show(name)}: left over: expected an entry, found it only in {path.name}; "
                "download the index and that file again"
            )


def check_tensors(
    folder: Path,
    entries: Mapping[str, TensorEntry],
    files: Mapping[str, Path],
    expected: Mapping[str, ExpectedTensor],
    tolerates: Callable[[str], bool],
) -> None:
    """Check that the tensors have the names, shapes and dtypes that the configuration says.

    Raises:
        UserError: a tensor is missing, left over, or of a wrong shape or dtype; names file and tensor.
    """
    missing = [name for name, tensor in expected.items() if name not in entries and not tensor.is_optional]
    left_over = [name for name in entries if name not in expected and not tolerates(name)]
    if missing:
        instead = f"{show(left_over[0])} instead" if left_over else "none"
        advice = _why_missing(missing, left_over) or "download the weights that belong to this config.json"
        raise UserError(
            f"{folder}: tensor {show(missing[0])}: missing ({len(missing)} of {len(expected)} tensors): expected shape "
            f"{_shapes(expected[missing[0]])}, found {instead}; {advice}"
        )
    if left_over:
        name = left_over[0]
        raise UserError(
            f"{files[name]}: tensor {show(name)}: left over: expected the {len(expected)} tensors of config.json, "
            f"found {len(left_over)} more; check num_hidden_layers and tie_word_embeddings in config.json, or remove "
            "tensors that are not part of a Llama"
        )
    for name, tensor in expected.items():
        if name not in entries:
            continue
        entry = entries[name]
        if entry.shape not in tensor.shapes:
            raise UserError(
                f"{files[name]}: tensor {show(name)}: wrong shape: expected {_shapes(tensor)}, "
                f"found {list(entry.shape)}; use the config.json that belongs to these weights"
            )
        if entry.dtype not in tensor.dtypes:
            advice = "use the config.json that belongs to these weights"
            if entry.dtype in ("F8_E5M2", "F8_E8M0"):  # formats that no config.json makes readable
                advice = "give a checkpoint with weights in F8_E4M3 and scales in 16 or 32 bits"
            raise UserError(
                f"{files[name]}: tensor {show(name)}: wrong dtype: expected {' or '.join(tensor.dtypes)}, "
                f"found {entry.dtype}; {advice}"
            )


def _why_missing(missing: list[str], others: list[str]) -> str | None:
    """Why tensors are missing and `others` are there, and what to do; None if it is not known."""
    if missing == [_HEAD] and not others:
        return (
            "save the model with its LM head (AutoModelForCausalLM), or set tie_word_embeddings if it is the embedding"
        )
    prefix = next((prefix for prefix in _WRAPPERS if any(name.startswith(prefix) for name in others)), None)
    if prefix is not None:
        return f"names with '{prefix}' are {_WRAPPERS[prefix]}"
    if any(name.startswith(("embed_tokens.", "layers.")) for name in others):
        return f"the names lack '{_BASE}', as in a base model; save it with its LM head (AutoModelForCausalLM)"
    return None


def _shapes(tensor: ExpectedTensor) -> str:
    return " or ".join(str(list(shape)) for shape in tensor.shapes)


def _covered_files(folder: Path) -> list[Path]:
    """Weight, tokenizer and configuration files of a folder, sorted by name."""
    return sorted(path for pattern in _COVERED for path in folder.glob(pattern) if path.is_file())


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file's permissions") from None


def verify_checksums(folder: Path) -> None:
    """Compare a folder with its SHA256SUMS. The list must cover every weight, tokenizer and configuration file.

    Raises:
        UserError: no or broken manifest, or files that are missing, not covered, or different; names all of them.
    """
    folder = Path(folder)
    path = folder / _MANIFEST
    if not path.is_file():
        covered = [pattern for pattern in _COVERED if any(folder.glob(pattern))]
        raise UserError(
            f"{path}: expected a manifest, found none; write one in a good copy of the folder: "
            f"sha256sum {' '.join(covered or _COVERED)} > {_MANIFEST}"
        )
    digests = _read_manifest(path)
    missing = [name for name in digests if not (folder / name).is_file()]
    uncovered = [file.name for file in _covered_files(folder) if file.name not in digests]
    differing = [name for name in digests if name not in missing and _sha256(folder / name) != digests[name]]
    faults = [
        f"{label} {', '.join(map(show, names))}"
        for label, names in (("differing", differing), ("missing", missing), ("not covered", uncovered))
        if names
    ]
    if faults:
        raise UserError(
            f"{path}: checksum: expected {len(digests)} files as listed, found {'; '.join(faults)}; download them again"
        )


def _read_manifest(path: Path) -> dict[str, str]:
    """SHA-256, in hexadecimal, by file name."""
    digests: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; correct its permissions") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: expected text as sha256sum writes it, found other bytes; write it again") from None
    for number, line in enumerate(lines, start=1):
        digest, _, name = line.partition(" ")
        name = name[1:].removeprefix("./")  # sha256sum marks text and binary mode with ' ' or '*'
        well_formed = len(digest) == 64 and set(digest.lower()) <= set("0123456789abcdef")
        if not well_formed or not name or Path(name).name != name:
            raise UserError(
                f"{path}: line {number}: expected a SHA-256, two spaces and the name of a file in this folder, "
                f"found {show(line)}; write it again"
            )
        digests[name] = digest.lower()
    if not digests:
        raise UserError(f"{path}: expected one line for each file, found none; write it again")
    return digests
