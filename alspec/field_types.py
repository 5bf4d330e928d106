"""Types of the fields in the configuration schema: how a value is spelled as a flag, in YAML, and in Python."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, StringConstraints

from alspec.predictor import CHUNK_SIZES

__all__ = [
    "AnyInt", "ChunkSize", "Context", "DRAFT_MODEL", "DType", "DrafterName", "FilePath", "Float", "HitRate", "HitRates",
    "Int", "MeasuredMode", "ModelPath", "Penalty", "SHORT_DTYPES", "Schema", "Several", "Share", "ShortDType",
    "StopTexts", "Threshold", "TokenBiases", "TokenIds", "Tokens",
]  # fmt: skip

DType = Literal["bf16", "fp16", "fp32"]
SHORT_DTYPES: dict[str, DType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # PyTorch's name -> ours
DRAFT_MODEL = "model:"  # a drafter that begins with it names a checkpoint
MAX_BIAS = 100.0  # as in OpenAI's API
_MAX_DIGITS = 15  # digits of the longest number of tokens that is parsed


def _one_of_chunk_sizes(value: Any) -> int:
    if value not in (*CHUNK_SIZES, *map(str, CHUNK_SIZES)):  # a tuple, not a set: lists and mappings have no hash
        raise ValueError(f"expected one of {', '.join(map(str, CHUNK_SIZES))}")
    return int(value)


def _no_bool(value: Any) -> Any:
    """Refuse true and false: pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _path(value: Any) -> Any:
    """Refuse names that no file can have: NUL, and lone surrogates that do not stand for foreign bytes."""
    try:
        is_name = not isinstance(value, str | os.PathLike) or b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ValueError("expected a path")
    return value


def _ids(value: Any) -> Any:
    """Accept the flag's spelling `1,2,3` as well as a list of integers."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError("expected token ids separated by commas, such as 1,2,3")
        return tuple(parts)
    return value


def _not_empty(value: Any) -> Any:
    """Refuse an empty text: as a path it would be the current directory."""
    if value == "":
        raise ValueError("expected a folder")
    return value


def _measured_mode(value: Any) -> Any:
    if value not in ("off", "paired"):
        raise ValueError("expected off or paired")
    return value


def _dtype(value: Any) -> Any:
    """Accept PyTorch's names and dtypes as well as the short names."""
    if isinstance(value, int):
        return value  # it may have too many digits for `str`
    name = str(value).removeprefix("torch.")
    return SHORT_DTYPES.get(name, value)


def _items(value: Any) -> Any:
    """Accept the flag's spelling `a,b` and a single value as well as a list."""
    if isinstance(value, bool | os.PathLike):
        return [value]
    return [item.strip() for item in str(value).split(",")] if isinstance(value, str | int | float) else value


def _thousands(value: Any) -> Any:
    """Accept the flag's spelling `128k` for 131072."""
    is_short = isinstance(value, str) and value[:-1].isdecimal() and len(value) <= _MAX_DIGITS + 1
    return int(value[:-1]) * 1024 if is_short and value[-1] in "kK" else value


def _context(value: Any) -> Any:
    count = _thousands(value)
    if isinstance(count, str) and not count.strip().lstrip("+-").isdecimal():
        raise ValueError("expected a number of tokens such as 4096 or 128k")
    return count


def _tokens(value: Any) -> int:
    """Parse a number of tokens such as 4096 or 4k; k is 1024."""
    count = _thousands(str(value))
    if isinstance(count, str):
        count = int(count) if count.isdecimal() and len(count) <= _MAX_DIGITS else 0
    if count < 2:
        raise ValueError("expected lengths such as 1k,8k or 4096")
    return int(count)


def _texts(value: Any) -> Any:
    """Accept a single text as well as a list; None: no text."""
    return () if value is None else (value,) if isinstance(value, str) else value


def _biases(value: Any) -> dict[int, float]:
    """Accept the flag's spelling `50=-100,17=2.5` as well as a mapping; ids may be texts, as in JSON; None: no bias."""
    expected = f"expected token ids with numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, such as 50=-100,17=2.5"
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, str):
        pairs = [(token_id, bias) for token_id, _, bias in (part.partition("=") for part in value.split(","))]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    elif value is not None:
        raise ValueError(expected)
    biases: dict[int, float] = {}
    for key, bias in pairs:
        token_id = str(key).strip()
        try:
            number = float(_no_bool(bias))
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not token_id.isdecimal() or len(token_id) > _MAX_DIGITS or not abs(number) <= MAX_BIAS:
            raise ValueError(expected)
        if int(token_id) in biases:
            raise ValueError(f"expected each token id once; {int(token_id)} occurs twice")
        biases[int(token_id)] = number
    return biases


def _hit_rate(value: Any) -> float | str:
    if value == "real":
        return "real"
    try:
        rate = float(_no_bool(value))
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not 0 <= rate <= 1:
        raise ValueError("expected real or numbers from 0 to 1")
    return rate


def _hit_rate_or_file(value: Any) -> float | str | Path:
    """A text that is no number names a file."""
    is_number = not isinstance(value, (str, Path))
    with suppress(ValueError):
        float(str(value))
        is_number = True
    if not is_number and value not in ("real", ""):
        return Path(_path(value))
    try:
        return _hit_rate(value)
    except ValueError:
        raise ValueError("expected real, numbers from 0 to 1, or a file of rows that evaluate wrote") from None


def _drafter(value: Any) -> Any:
    """Accept off as YAML reads it, too: false."""
    value = "off" if value is False else value
    is_model = isinstance(value, str) and value.startswith(DRAFT_MODEL) and value != DRAFT_MODEL
    if value not in ("off", "ngram", "self") and not is_model:
        raise ValueError("expected off, ngram, self or model:DIR")
    return value


_ItemT = TypeVar("_ItemT")
Several = Annotated[tuple[_ItemT, ...], Field(min_length=1), BeforeValidator(_items)]
AnyInt = Annotated[int, BeforeValidator(_no_bool)]
Int = Annotated[AnyInt, Field(lt=2**63)]
Float = Annotated[float, BeforeValidator(_no_bool)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Tokens = Annotated[int, BeforeValidator(_tokens)]
Share = Annotated[Float, Field(ge=0.0, le=1.0)]
Penalty = Annotated[Float, Field(ge=-2.0, le=2.0)]  # the range of OpenAI's API
# JSON has no infinity: it is written as "inf", which is read back as a float.
Threshold = Annotated[
    Float,
    Field(ge=0.0),
    PlainSerializer(lambda threshold: threshold if math.isfinite(threshold) else "inf", when_used="json"),
]
HitRate = Annotated[float | Literal["real"], BeforeValidator(_hit_rate)]
HitRates = Annotated[float | Literal["real"] | Path, BeforeValidator(_hit_rate_or_file)]  # Path: of each layer
DrafterName = Annotated[str, BeforeValidator(_drafter)]
ChunkSize = Annotated[int, BeforeValidator(_one_of_chunk_sizes)]
ModelPath = Annotated[FilePath, BeforeValidator(_not_empty)]
MeasuredMode = Annotated[Literal["off", "paired"], BeforeValidator(_measured_mode)]
ShortDType = Annotated[DType, BeforeValidator(_dtype)]
Context = Annotated[Int, BeforeValidator(_context)]
StopTexts = Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], BeforeValidator(_texts)]
TokenIds = Annotated[tuple[AnyInt, ...], BeforeValidator(_ids)]
TokenBiases = Annotated[dict[int, float], BeforeValidator(_biases)]


class Schema(BaseModel):
    """Base of all configurations: unchangeable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
