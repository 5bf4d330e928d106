"""Which tokens end a text, by the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import is_there, read_json
from alspec.models.generation_config import GENERATION_CONFIG, read_generation_config
from alspec.models.tokenizer.tokenizer_config import is_token_id, read_tokenizer_config, special_tokens

__all__ = ["NO_TOKEN", "advised_eos_token_ids", "eos_token_ids", "notice_of_end_tokens"]

NO_TOKEN = -1  # id that some folders use for "no such token"


def eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Union of the end-of-text ids of config.json, generation_config.json and the tokenizer, ascending.

    Ordinary tokens of config.json are left out if generation_config.json names others; see `notice_of_end_tokens`.

    Args:
        raw: content of config.json.
    Raises:
        UserError: ids that are none, or outside the vocabulary; names file and key.
    """
    found = {}
    for name, settings in (("config.json", raw), (GENERATION_CONFIG, read_generation_config(folder))):
        found[f"{folder / name}: eos_token_id"] = _id_list(settings, folder / name)
    path, ids = _tokenizer_eos_id(folder)
    found[f"{path}: eos_token"] = ids
    vocab_size = raw["vocab_size"]
    if type(vocab_size) is int and vocab_size > 0:  # other values are refused later
        for where, ids in found.items():
            outside = [token_id for token_id in sorted(ids) if not 0 <= token_id < vocab_size]
            if outside:
                raise UserError(
                    f"{where}: expected ids from 0 to {vocab_size - 1} (vocab_size of config.json is {vocab_size}), "
                    f"found {show(outside)}; use files of the same model"
                )
    return tuple(sorted(set().union(*found.values()) - _ordinary(raw, folder)))


def advised_eos_token_ids(folder: Path) -> list[int]:
    """The ids with which transformers ends a text: those of generation_config.json, without this file of config.json.

    Raises:
        UserError: ids that are none; names file and key.
    """
    path = folder / GENERATION_CONFIG
    if is_there(path):
        return sorted(_id_list(read_generation_config(folder), path))
    path = folder / "config.json"
    return sorted(_id_list(read_json(path, "for the end-of-text tokens"), path))


def notice_of_end_tokens(folder: Path) -> str | None:
    """One line that names ids of config.json that do not end a text; None if there are none."""
    path = folder / "config.json"
    ordinary = _ordinary(read_json(path, "for the end-of-text tokens"), folder) if is_there(path) else set()
    if not ordinary:
        return None
    ids = ", ".join(map(str, sorted(ordinary)))
    return (
        f"config.json: eos_token_id: not used: {ids}, ordinary in the vocabulary; {GENERATION_CONFIG} names other "
        "tokens that end a text"
    )


def _ordinary(raw: dict[str, Any], folder: Path) -> set[int]:
    """Ids of config.json that generation_config.json contradicts, and that are ordinary tokens of the vocabulary.

    transformers generates by generation_config.json alone. Special tokens of config.json still end a text here: nobody
    wants to read them.
    """
    path = folder / "tokenizer.json"
    advised = _id_list(read_generation_config(folder), folder / GENERATION_CONFIG)
    suspects = _id_list(raw, folder / "config.json") - advised - _tokenizer_eos_id(folder)[1]
    if not advised or not suspects or not path.is_file():
        return set()
    raw_tokenizer = read_json(path, "for the vocabulary")
    added, model = raw_tokenizer.get("added_tokens"), raw_tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    special = {entry.get("id") for entry in added if isinstance(entry, dict)} if isinstance(added, list) else set()
    decoder = read_tokenizer_config(folder).get("added_tokens_decoder")
    special |= {int(key) for key in decoder if is_token_id(key)} if isinstance(decoder, dict) else set()
    in_vocabulary = set(vocabulary.values()) if isinstance(vocabulary, dict) else set()
    return (suspects & in_vocabulary) - special


def _id_list(raw: dict[str, Any], path: Path) -> set[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise UserError(f"{path}: eos_token_id: expected an integer or a list of them, found {show(value)}; correct it")
    return set(ids) - {NO_TOKEN}


def _tokenizer_eos_id(folder: Path) -> tuple[Path, set[int]]:
    """File and id of the tokenizer's eos_token; an empty set if there is none.

    `Tokenizer` checks that the vocabulary has it.
    """
    path = folder / "tokenizer_config.json"
    tokenizer_config = read_tokenizer_config(folder)
    content = special_tokens(tokenizer_config).get("eos_token")
    if content is None:
        return path, set()
    added = tokenizer_config.get("added_tokens_decoder")
    for token_id, entry in added.items() if isinstance(added, dict) else ():
        if is_token_id(token_id) and isinstance(entry, dict) and entry.get("content") == content:
            return path, {int(token_id)}
    # Older folders (2023) list their special tokens only in tokenizer.json.
    path = folder / "tokenizer.json"
    if not path.is_file():
        return path, set()
    added = read_json(path, "for the vocabulary").get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    ids = {entry["id"] for entry in entries if entry.get("content") == content and type(entry.get("id")) is int}
    return path, ids
