"""The shape of a Llama model, read from a Hugging Face folder or taken from a table of published shapes."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from alspec.config import SHORT_DTYPES, DType
from alspec.errors import UserError, show
from alspec.models.checkpoint.files import read_json
from alspec.models.generation_config import GENERATION_CONFIG, read_generation_config
from alspec.models.tokenizer.tokenizer_config import is_token_id, read_tokenizer_config, special_tokens

__all__ = ["RANDOM_SHAPES", "LlamaConfig", "RopeScaling", "rope_inv_freq"]

NO_TOKEN = -1  # id that some folders use for "no such token"
# Keys that may hold the RoPE settings; the first one present is used.
_ROPE_NAMES = ("rope_scaling", "rope_parameters")

# config.json's spelling of our field names, where it differs.
_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_qo_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RopeScaling(_Frozen):
    """Scaling of the rotary frequencies; see `rope_inv_freq` for the equations."""

    rope_type: Literal["linear", "llama3"]
    factor: float = Field(ge=1.0, le=1e6, description="divisor of the low frequencies")
    low_freq_factor: float = Field(default=1.0, gt=0.0, description="llama3: wavelengths above C / this are divided")
    high_freq_factor: float = Field(default=4.0, gt=0.0, description="llama3: wavelengths below C / this are kept")
    original_max_position_embeddings: int = Field(
        default=8192, gt=0, description="llama3: C, context before scaling, tokens"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor must be below high_freq_factor ({self.high_freq_factor})")
        return self


class LlamaConfig(_Frozen):
    """All that the runtime needs of a Llama model besides its weights."""

    hidden_size: int = Field(gt=0, description="width of the residual stream")
    intermediate_size: int = Field(gt=0, description="width of the MLP")
    num_layers: int = Field(gt=0, le=10_000, description="decoder layers")
    num_qo_heads: int = Field(gt=0, description="query heads of the whole model")
    num_kv_heads: int = Field(gt=0, description="key and value heads of the whole model")
    head_dim: int = Field(gt=0, description="elements of one head; even, because RoPE rotates pairs")
    vocab_size: int = Field(gt=0, description="rows of the embedding")
    rms_norm_eps: float = Field(default=1e-6, gt=0.0, description="added to the mean square in RMSNorm")
    rope_theta: float = Field(default=10_000.0, gt=0.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(default=None, description="None: frequencies are not scaled")
    max_position_embeddings: int = Field(
        default=2048, gt=0, le=10**18, description="longest context, tokens; linear RoPE scaling multiplies it"
    )
    tie_word_embeddings: bool = Field(default=False, description="the LM head is the embedding")
    dtype: DType = Field(default="fp32", description="dtype the weights were published in")
    bos_token_id: int | None = Field(default=None, ge=0, description="begin of text")
    eos_token_ids: tuple[int, ...] = Field(default=(), description="tokens that end a text, ascending")

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_qo_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even")
        for name, ids in (("bos_token_id", (self.bos_token_id or 0,)), ("eos_token_id", self.eos_token_ids)):
            if any(not 0 <= token_id < self.vocab_size for token_id in ids):
                raise ValueError(f"{name} ({', '.join(map(str, ids))}) must be below vocab_size ({self.vocab_size})")
        return self

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read config.json, generation_config.json and the tokenizer's end-of-text token from a Hugging Face folder.

        Reads folders of Llama 2 and 3, TinyLlama and SmolLM. A missing `num_key_value_heads` means as many as query
        heads. A missing or null `head_dim` means hidden_size / num_attention_heads. RoPE settings are in `rope_scaling`
        (`type` or `rope_type`) or, without one, in `rope_parameters`. A missing dtype means fp32.

        Raises:
            UserError: no folder, no or broken config.json, or a model that is not supported; names the field.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):  # `Path.is_dir` raises if the name is too long
            found = "a file" if os.path.exists(folder) else "nothing"
            raise UserError(
                f"{folder}: expected a model folder, found {found}; give the folder that holds config.json"
                + _download_hint(folder)
            )
        path = folder / "config.json"
        raw = read_json(path, "for the model's shape")
        _check_runnable(raw, path)
        values = _required_sizes(raw, path) | {
            "rope_theta": _rope_theta(raw, path),
            "rope_scaling": _rope_scaling(raw, path),
            "dtype": _dtype(raw, path),
            "eos_token_ids": _eos_token_ids(raw, folder),
        }
        for name in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id"):
            if raw.get(name) is not None and (name, raw[name]) != ("bos_token_id", NO_TOKEN):
                values[name] = raw[name]
        try:
            return cls(**values)
        except ValidationError as error:
            raise _user_error(error, str(path)) from None

    @classmethod
    def from_shape(cls, name: str) -> Self:
        """The configuration of one of `RANDOM_SHAPES`, or of a folder (see `from_folder`), which needs no weights.

        Raises:
            UserError: `name` is neither (lists the known names), or as `from_folder`.
        """
        if name in _SHAPES:
            return cls(**_LLAMA_3, **_SHAPES[name])
        if os.path.isdir(name):
            return cls.from_folder(Path(name))
        known = ", ".join(RANDOM_SHAPES)
        raise UserError(f"random_weights: expected {known} or a folder that holds config.json, found {show(name)}")

    @property
    def longest_context(self) -> int:
        """Longest context in tokens.

        `linear` scaling multiplies `max_position_embeddings`; for `llama3` the number already includes the scaling.
        """
        factor = self._linear_factor
        return self.max_position_embeddings if factor == 1.0 else int(self.max_position_embeddings * factor)

    @property
    def longest_context_name(self) -> str:
        """Origin of `longest_context`, for messages."""
        stretched = f" times {self._linear_factor:g} (linear RoPE scaling)" if self._linear_factor > 1.0 else ""
        return f"the model's max_position_embeddings{stretched}"

    @property
    def _linear_factor(self) -> float:
        scaling = self.rope_scaling
        return scaling.factor if scaling is not None and scaling.rope_type == "linear" else 1.0

    @property
    def valid_tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes T that divide the heads and the MLP, ascending.

        The vocabulary is no constraint, because its shards may be uneven.
        """
        common = math.gcd(self.num_qo_heads, self.num_kv_heads, self.intermediate_size)
        return tuple(size for size in range(1, common + 1) if common % size == 0)

    def check_tp_size(self, tp_size: int) -> None:
        """Raise UserError, which lists the valid sizes, unless `tp_size` ranks can share the heads and the MLP."""
        if tp_size not in self.valid_tp_sizes:
            raise UserError(
                f"tensor parallelism: {tp_size} ranks must divide num_attention_heads ({self.num_qo_heads}), "
                f"num_key_value_heads ({self.num_kv_heads}) and intermediate_size ({self.intermediate_size}); "
                f"valid sizes of one group: {', '.join(map(str, self.valid_tp_sizes))}"
            )

    def inv_freq(self) -> torch.Tensor:
        """Rotary frequencies of this model, [head_dim / 2] fp32, on CPU; see `rope_inv_freq`."""
        return rope_inv_freq(self.head_dim, self.rope_theta, self.rope_scaling)


_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_kv_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
    "dtype": "bf16",
    "bos_token_id": 128000,
    "eos_token_ids": (128001,),
}


def _llama_3_shape(
    hidden_size: int, intermediate_size: int, num_layers: int, num_qo_heads: int, head_dim: int, factor: float
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_layers": num_layers,
        "num_qo_heads": num_qo_heads,
        "head_dim": head_dim,
        "rope_scaling": RopeScaling(rope_type="llama3", factor=factor),
        # The published models with factor 32 (Llama 3.2) tie their embeddings.
        "tie_word_embeddings": factor == 32.0,
    }


_SHAPES = {
    "llama-3.1-8b": _llama_3_shape(4096, 14336, 32, 32, 128, 8.0),
    "llama-3.1-70b": _llama_3_shape(8192, 28672, 80, 64, 128, 8.0),
    "llama-3.2-1b": _llama_3_shape(2048, 8192, 16, 32, 64, 32.0),
    "llama-3.2-3b": _llama_3_shape(3072, 8192, 28, 24, 128, 32.0),
}
RANDOM_SHAPES = tuple(_SHAPES)


def rope_inv_freq(head_dim: int, rope_theta: float, scaling: RopeScaling | None = None) -> torch.Tensor:
    """Rotary frequencies f_i in radians per token.

        f_i = theta^(-2i / head_dim),   i = 0 .. head_dim / 2 - 1
        linear:  f_i / factor
        llama3:  with wavelength w = 2 pi / f and C = original_max_position_embeddings,
                 w > C / low_freq_factor:   f / factor
                 w < C / high_freq_factor:  f
                 between:                   (1 - s) f / factor + s f,
                                            s = (C / w - low_freq_factor) / (high_freq_factor - low_freq_factor)

    Source: RoFormer, section 3.2; Meta's Llama 3.1 reference code for the llama3 rule. Computed in fp32 as in the
    models' training code, because at long contexts a last-bit difference in f changes the angle.

    Returns:
        [head_dim / 2] fp32, on CPU.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    freq = 1.0 / rope_theta**exponent
    if scaling is None:
        return freq
    if scaling.rope_type == "linear":
        return freq / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / freq
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * freq / scaling.factor + smooth * freq
    stretched = torch.where(wavelength > context / low, freq / scaling.factor, blended)
    return torch.where(wavelength < context / high, freq, stretched)


def _download_hint(folder: Path) -> str:
    """Advice for a hub name such as meta-llama/Llama-3.1-8B; empty if `folder` cannot be one."""
    if os.path.exists(folder) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(folder), re.ASCII):
        return ""
    return f" (models are not downloaded from a hub; run `hf download {folder} --local-dir DIR`, then give DIR)"


def _check_runnable(raw: dict[str, Any], path: Path) -> None:
    """Refuse every setting of config.json that means another model than a plain Llama; names the setting."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    if architectures is None and model_type is None:
        raise UserError(f"{path}: expected architectures or model_type, found neither; give a Llama model")
    if architectures is not None and (not isinstance(architectures, list) or "LlamaForCausalLM" not in architectures):
        raise UserError(
            f"{path}: architectures: expected LlamaForCausalLM, found {show(architectures)}; give a Llama model"
        )
    if model_type not in (None, "llama"):
        raise UserError(f"{path}: model_type: expected 'llama', found {show(model_type)}; give a Llama model")
    if raw.get("quantization_config") is not None:
        raise UserError(
            f"{path}: quantization_config: expected none, found {show(raw['quantization_config'])}; "
            "give the unquantised checkpoint (the KV cache is quantised by --kv-cache)"
        )
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    for settings in (raw, *(raw.get(name) for name in _ROPE_NAMES)):
        for name, expected in plain.items():
            value = settings.get(name) if isinstance(settings, dict) else None
            if value not in (None, expected):
                raise UserError(
                    f"{path}: {name}: expected {expected!r}, found {show(value)}; this variant is not supported"
                )


def _required_sizes(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Sizes without a default, under our field names. Two that older files omit are derived."""
    values: dict[str, Any] = {}
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_qo_heads", "vocab_size"):
        json_name = _JSON_NAMES.get(name, name)
        if raw.get(json_name) is None:
            raise UserError(f"{path}: {json_name}: expected a number, found none; give the model's full config.json")
        values[name] = raw[json_name]
    kv_heads, head_dim = raw.get("num_key_value_heads"), raw.get("head_dim")
    values["num_kv_heads"] = values["num_qo_heads"] if kv_heads is None else kv_heads
    if head_dim is None:
        hidden, heads = values["hidden_size"], values["num_qo_heads"]
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0 or hidden % heads:
            raise UserError(
                f"{path}: hidden_size: expected a multiple of num_attention_heads ({show(heads)}), "
                f"found {show(hidden)}; correct it or give head_dim"
            )
        head_dim = hidden // heads
    values["head_dim"] = head_dim
    return values


def _rope_settings(raw: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the mapping with the RoPE settings; the content is empty if there is none.

    As in transformers, `rope_scaling` (older) replaces all of `rope_parameters` if both are present.
    """
    for name in _ROPE_NAMES:
        if not isinstance(raw.get(name), dict | None):
            raise UserError(f"{path}: {name}: expected an object or null, found {show(raw[name])}; correct it")
    name = next((name for name in _ROPE_NAMES if raw.get(name)), _ROPE_NAMES[0])
    return name, raw.get(name) or {}


def _rope_theta(raw: dict[str, Any], path: Path) -> Any:
    name, settings = _rope_settings(raw, path)
    theta = settings.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if isinstance(theta, float) and not math.isfinite(theta):  # NaN would compare unequal below
        raise UserError(f"{path}: rope_theta: expected a finite number, found {show(theta)}; correct the file")
    replaced = (raw.get("rope_parameters") or {}).get("rope_theta", theta)
    if replaced != theta:
        raise UserError(
            f"{path}: rope_parameters.rope_theta: expected {show(theta)}, the value used with {name}, which replaces "
            f"rope_parameters, found {show(replaced)}; give rope_theta in {name} too"
        )
    return theta


def _rope_scaling(raw: dict[str, Any], path: Path) -> RopeScaling | None:
    where, settings = _rope_settings(raw, path)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type == "default":
        return None
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(rope_type, str) or rope_type not in needed:
        raise UserError(
            f"{path}: {where}.rope_type: expected default, linear or llama3, found {show(rope_type)}; "
            "this scaling is not supported"
        )
    for name in needed[rope_type]:
        if settings.get(name) is None:
            raise UserError(f"{path}: {where}.{name}: expected a number, found none; {rope_type} scaling needs it")
    try:
        return RopeScaling.model_validate(
            {"rope_type": rope_type} | {name: settings[name] for name in needed[rope_type]}
        )
    except ValidationError as error:
        raise _user_error(error, f"{path}: {where}") from None


def _dtype(raw: dict[str, Any], path: Path) -> DType:
    """The published dtype. If absent: fp32, which loses no bits."""
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = SHORT_DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"{path}: torch_dtype: expected {', '.join(SHORT_DTYPES)}, found {show(value)}; correct it")
    return dtype


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Union of the end-of-text ids of config.json, generation_config.json and the tokenizer."""
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
    return tuple(sorted(set().union(*found.values())))


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


def _user_error(error: ValidationError, where: str) -> UserError:
    """UserError for the first fault of a validation; spells the field as config.json does."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return UserError(f"{where}: {message}; correct the file or download it again")
    field = str(first["loc"][0])
    message = message[0].lower() + message[1:]
    return UserError(
        f"{where}: {_JSON_NAMES.get(field, field)}: {message}, found {show(first['input'])}; correct the file"
    )
