"""What a folder holds: weights, whole GGUF files, an adapter, or other folders, one of which is the model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import is_there, read_json
from alspec.models.checkpoint.gguf_header import part_paths

__all__ = ["shards_without_index", "usable_path"]

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
# Folders below the given one are searched for a model, so that the error can name it.
_INSIDE = ("*", "snapshots/*", "models--*/snapshots/*")
_NAMED = 3  # paths that a message lists


def shards_without_index(folder: Path) -> list[Path]:
    """The weights of a folder that has neither model.safetensors nor an index: tensor names are in the files, too.

    All shards `NAME-00001-of-0000N.safetensors`, else all *.safetensors that are no adapter's.

    Raises:
        UserError: a missing shard, or shards of several sets.
    """
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    shards = [match for match in map(_SHARD.fullmatch, (path.name for path in paths)) if match is not None]
    sets = sorted({(match[1], match[3]) for match in shards})
    if len(sets) > 1:
        found = ", ".join(show(f"{name}-*-of-{count}") for name, count in sets[:_NAMED])
        raise UserError(f"{folder}: expected the shards of one model, found {found}; remove what is not the model's")
    if not sets:
        return paths
    name, count = sets[0]
    whole = [folder / f"{name}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = next((path for path in whole if not path.is_file()), None)
    if missing is not None:
        raise UserError(
            f"{missing}: missing shard: expected {len(whole)} files, found {len(shards)} and no index; download it"
        )
    return whole


def usable_path(path: Path) -> Path:
    """The folder or GGUF file that a path stands for: a folder of one GGUF file and no other weights is that file.

    Raises:
        UserError: an adapter's folder; a folder of several GGUF files; a folder in which other folders hold models,
            such as the root of a Hugging Face cache; names what to give.
    """
    if not os.path.isdir(path):  # `Path.is_dir` raises if the name is too long
        return path
    has_config, others = is_there(path / _CONFIG), [*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]
    has_weights = any(not other.name.startswith("adapter_") for other in others)
    if is_there(path / _ADAPTER) and not (has_config and has_weights):
        raise _adapter(path)
    if not has_weights:
        files = sorted({part_paths(file)[0] for file in path.glob("*.gguf")})
        if len(files) == 1:
            return files[0]
        if files:
            raise UserError(f"{path}: expected one model, found {len(files)} GGUF files; give {_listed(files)}")
    if not has_config:
        models = _models_inside(path)
        if models:
            raise UserError(f"{path}: expected a model folder, found folders that hold models; give {_listed(models)}")
    return path


def _adapter(folder: Path) -> UserError:
    settings: dict[str, Any] = read_json(folder / _ADAPTER, "to name the base model")
    kind, base = show(settings.get("peft_type", "LORA")), show(settings.get("base_model_name_or_path"))
    merge = (
        f"from peft import AutoPeftModelForCausalLM as M; "
        f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('OUT')"
    )
    return UserError(
        f"{folder}: expected a model, found an adapter ({kind}) of {base}; merge it first: "
        f'python -c "{merge}", then copy the tokenizer files of {base} to OUT and give OUT'
    )


def _models_inside(folder: Path) -> list[Path]:
    """Folders and GGUF files in a folder that hold a model; of a cache, the snapshots, the one in use first."""
    found = {
        path if path.suffix == ".gguf" else path.parent
        for inside in _INSIDE
        for name in (_CONFIG, "*.gguf")
        for path in folder.glob(f"{inside}/{name}")
    }
    return sorted(found, key=lambda path: (not _is_in_use(path), path))


def _is_in_use(path: Path) -> bool:
    """Whether refs/main of a cache names this snapshot."""
    reference = path.parent.parent / "refs" / "main"
    try:
        return reference.read_text(encoding="utf-8").strip() == path.name
    except (OSError, UnicodeDecodeError):
        return False


def _listed(paths: list[Path]) -> str:
    more = f", or one of {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return " or ".join(map(str, paths[:_NAMED])) + more
