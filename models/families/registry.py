"""All families, and which one a config.json or a GGUF file names."""

from __future__ import annotations

from pathlib import Path

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import is_there, read_json
from alspec.models.families.config_file import ConfigFile
from alspec.models.families.family import Family
from alspec.models.families.llama_family import LLAMA
from alspec.models.families.mistral import MINISTRAL, MISTRAL
from alspec.models.families.phi3 import PHI3
from alspec.models.families.qwen2 import QWEN2
from alspec.models.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "family_of", "gguf_family_of", "notice_of_unused"]

FAMILIES = (LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3, PHI3)
_NAMES = ", ".join(family.name for family in FAMILIES)


def family_of(config: ConfigFile) -> Family:
    """Return the family of a config.json, by `model_type` and `architectures`; one of them may be absent.

    Raises:
        UserError: neither is there, they do not agree, or no family has them.
    """
    architectures, model_type = config.get("architectures") or None, config.get("model_type")
    if architectures is None and model_type is None:
        raise UserError(f"{config.path}: expected architectures or model_type, found neither; give a model of {_NAMES}")
    families = [family for family in FAMILIES if model_type in (None, family.model_type)]
    if not families:
        known = ", ".join(repr(family.model_type) for family in FAMILIES)
        raise config.error("model_type", known, model_type, f"give a model of {_NAMES}")
    if architectures is None:
        return families[0]
    # Spellings differ in case: LLaMAForCausalLM. A base model, which `AutoModel` saves, is LlamaModel.
    given = [each.lower() for each in architectures if isinstance(each, str)] if isinstance(architectures, list) else []
    for family in families:
        name = family.architecture.lower()
        if name in given or name.replace("forcausallm", "model") in given:
            return family
    known = ", ".join(family.architecture for family in families)
    known += f" (model_type is {model_type!r})" if model_type is not None else ""
    raise config.error("architectures", known, architectures, f"give a model of {_NAMES}")


def notice_of_unused(folder: Path) -> str | None:
    """One line that names keys of config.json that this family does not use; None if there are none."""
    path = folder / "config.json"
    if not is_there(path):
        return None
    config = ConfigFile(path, read_json(path, "for the model's shape"))
    family = family_of(config)
    given = [f"{name} {show(config.get(name), 20)}" for name in family.unused if config.get(name) is not None]
    if not given:
        return None
    return f"config.json: not used: {', '.join(given)}; {family.name} attends to all tokens, as in transformers' model"


def gguf_family_of(architecture: object, path: object) -> Family:
    """Return the family of a GGUF file by its `general.architecture`.

    Raises:
        UserError: no family has it.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture and architecture is not None:
            return family
    known = ", ".join(repr(family.gguf_architecture) for family in FAMILIES if family.gguf_architecture)
    raise UserError(
        f"{path}: general.architecture: expected {known}, found {show(architecture)}; give such a model, or a folder "
        f"with safetensors of {_NAMES}"
    )
