"""tokenizer_config.json, special_tokens_map.json, added_tokens.json: settings that tokenizer.json does not contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from alspec.errors import UserError, show
from alspec.models.checkpoint.files import check_utf8, is_there, read_json

__all__ = ["add_tokens", "is_token_id", "naming_file", "read_tokenizer_config", "special_tokens"]

_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_OLD, _DECODER = "added_tokens.json", "added_tokens_decoder"  # the file is read without the setting
_MAPPED = ("bos_token", "eos_token", "pad_token", "unk_token")  # tokens that special_tokens_map.json may supply
_LISTS = ("extra_special_tokens", "additional_special_tokens")  # the first one, if there is one
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, "for the special tokens") if is_there(path) else {}


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Settings of tokenizer_config.json, with the special tokens that only special_tokens_map.json names.

    Without `added_tokens_decoder` it is made of added_tokens.json, as in transformers. No file needs to exist.

    Raises:
        UserError: a broken file.
    """
    settings, mapped = _read(folder / _CONFIG), _read(folder / _MAP)
    named = [*special_tokens(settings), *(name for name in _LISTS if name in settings)]
    settings |= {name: mapped[name] for name in (*_MAPPED, _LISTS[1]) if name in mapped and name not in named}
    if _DECODER not in settings and is_there(folder / _OLD):
        settings[_DECODER] = _old_tokens(folder / _OLD, {entry["content"] for entry in _named_entries(settings)})
    return settings


def _old_tokens(path: Path, special: set[str]) -> dict[str, Any]:
    """The tokens of added_tokens.json, which has ids by token, as `added_tokens_decoder` has them."""
    ids = _read(path)
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids.values()):
        raise UserError(f"{path}: expected ids by token, found {show(ids)}; download the file again")
    return {
        str(token_id): {"content": token, "special": token in special, "normalized": token not in special}
        for token, token_id in ids.items()
    }


def special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens (`bos_token`, ...), given as strings or objects; empty texts are left out."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            tokens[name] = content
    return tokens


def naming_file(folder: Path, name: str) -> Path:
    """The file that defines the special token `name`."""
    return folder / (_CONFIG if name in special_tokens(_read(folder / _CONFIG)) else _MAP)


def is_token_id(key: str) -> bool:
    """Whether a key of `added_tokens_decoder` is an id."""
    return key.isdecimal() and len(key) < 10


def add_tokens(core: tokenizers.Tokenizer, settings: dict[str, Any], folder: Path, vocab_size: int) -> None:
    """Add the tokens of `added_tokens_decoder` that tokenizer.json lacks to `core`, and apply the flags of all of them.

    New tokens get the next free ids, which must be the ids in the folder. New tokens with ids from `vocab_size` on have
    no embedding and are left out. What tokenizer.json says of a token holds beside added_tokens.json, an older file, of
    which new tokens with other ids are left out, too. Words of the vocabulary that the settings name as special tokens
    become special, as in transformers.

    Raises:
        UserError: a new token gets another id than in the folder, or an entry is not a token.
    """
    is_old = _DECODER not in _read(folder / _CONFIG)
    where = str(folder / _OLD) if is_old else f"{folder / _CONFIG}: {_DECODER}"
    added = settings.get(_DECODER) or {}
    known = {token.content for token in core.get_added_tokens_decoder().values()} if is_old else set()
    if not isinstance(added, dict) or not all(map(is_token_id, added)):
        raise UserError(f"{where}: expected tokens by id, found {show(added)}; download the file again")
    ids: dict[str, int] = {}  # of new tokens
    tokens = []
    for key in sorted(added, key=int):
        token = _token(added[key], f"{where}: {key}")
        is_new = core.token_to_id(token.content) is None
        if is_old and is_new and int(key) != core.get_vocab_size() + len(ids):
            continue
        if token.content and token.content not in known and (int(key) < vocab_size or not is_new):
            tokens.append(token)
            if is_new:
                ids.setdefault(token.content, int(key))
    core.add_tokens(tokens)
    for content, expected in ids.items():
        if (found := core.token_to_id(content)) != expected:
            raise UserError(
                f"{where}: {show(content)}: expected id {expected}, found id {found} with this tokenizer.json; "
                "use files of the same model, or remove the token"
            )
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    named = [_token(entry, str(folder / _CONFIG)) for entry in _named_entries(settings)]
    core.add_special_tokens(
        [token for token in named if token.content not in known and core.token_to_id(token.content) is not None]
    )


def _named_entries(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The special tokens that settings name, one by one (`bos_token`, `image_token`, ...) or in a list, as objects."""
    extra: Any = next((settings[name] for name in _LISTS if settings.get(name)), [])
    values = [value for name, value in settings.items() if name.endswith("_token")]
    values += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    entries = [value if isinstance(value, dict) else {"content": value} for value in values]
    return [entry | {"special": True} for entry in entries if isinstance(entry.get("content"), str)]


def _token(entry: Any, where: str) -> tokenizers.AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str):
        raise UserError(f"{where}: expected a token with content, found {show(entry)}; download the file again")
    flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
    return tokenizers.AddedToken(check_utf8(content, where), **flags)
