"""Read how weights are quantised: `quantization_config` of a config.json, or a file beside it.

What is not supported is refused by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alspec.errors import UserError
from alspec.models.checkpoint.files import read_json
from alspec.models.checkpoint.quantised.quantisation_config import QuantisationConfig, SchemeTarget, WeightScheme
from alspec.models.families.config_file import ConfigFile
from alspec.models.validation import user_error

__all__ = ["read_quantisation"]

_KEY, _OLD_KEY = "quantization_config", "compression_config"  # files of the first compressed-tensors have the old one
# Files of older tools, which hold these settings beside a config.json without them; and the method of each.
_SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_MLX_KEY = "quantization"
_ADVICE = (
    "give the unquantised checkpoint, or one in FP8 (compressed-tensors, fp8) or INT4 (compressed-tensors, AWQ, GPTQ)"
)


@dataclass(frozen=True)
class _File(ConfigFile):
    """A file, and its key that holds what it says of quantised weights; '' if the whole file does."""

    key: str

    def name_of(self, setting: str) -> str:
        """The name of one setting."""
        return f"{self.key}.{setting}" if self.key else setting


class _Lenient(BaseModel):
    """Settings of another program's file; keys that are not read may have any value."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Awq(_Lenient):
    bits: int = Field(default=4, alias="w_bit")
    group_size: int = Field(default=128, ge=-1, alias="q_group_size")
    zero_point: bool = True
    version: str = "gemm"
    backend: str | None = None

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)


class _Gptq(_Lenient):
    bits: int
    group_size: int = Field(default=128, ge=-1)
    desc_act: bool | None = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    pack_dtype: str | None = None
    dynamic: dict[str, Any] | bool | None = None


class _Fp8(_Lenient):
    weight_block_size: list[int] | None = None
    activation_scheme: str | None = None
    fmt: str | None = None


class _Arguments(_Lenient):
    """How one tensor is quantised: weights or activations."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = Field(default=None, ge=-1)
    symmetric: bool = True
    block_structure: list[int] | str | None = None
    actorder: str | bool | None = None


class _Group(_Lenient):
    targets: list[str]
    weights: dict[str, Any] | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(_Lenient):
    config_groups: dict[str, dict[str, Any]] = Field(min_length=1)
    format: str = "dense"
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def read_quantisation(config: ConfigFile) -> QuantisationConfig | None:
    """Return what a config.json, or a file of an older tool beside it, says of quantised weights; None: nothing.

    Raises:
        UserError: a method, format, number of bits or setting that is not supported, or a wrong value; names it.
    """
    key = _OLD_KEY if config.get(_KEY) in (None, {}) else _KEY
    raw, file = config.get(key), _File(config.path, config.raw, key)
    default = "compressed-tensors" if key == _OLD_KEY else None
    if config.get(_MLX_KEY) not in (None, {}) and "quant_method" not in (raw or {}):
        raise config.error(_MLX_KEY, "none", "MLX", _ADVICE)
    if raw in (None, {}):
        paths = [config.path.with_name(name) for name in _SETTINGS_FILES]
        beside = next((path for path in paths if path.exists()), None)
        if beside is None:
            return None
        raw, default = read_json(beside, "for the weights' format"), _SETTINGS_FILES[beside.name]
        file = _File(beside, raw, "")
    if not isinstance(raw, dict):
        raise config.error(key, "an object", raw, "correct the file")
    method = raw.get("quant_method", default)
    if method is None and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        method = "bitsandbytes"
    if method is None and isinstance(raw.get("producer"), dict):
        method = raw["producer"].get("name")
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq}
    reader = readers.get(method) if isinstance(method, str) else None
    if reader is None:
        raise _refused(file, "quant_method", ", ".join(readers), method)
    return reader(file, raw)


def _refused(config: _File, name: str, expected: str, found: Any) -> UserError:
    return config.error(config.name_of(name), expected, found, _ADVICE)


_ModelT = TypeVar("_ModelT", bound=_Lenient)


def _parsed(kind: type[_ModelT], config: _File, raw: Any, where: str = "") -> _ModelT:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise user_error(error, f"{config.path}: {config.key}{where}".removesuffix(": "), {}) from None


def _awq(config: _File, raw: dict[str, Any]) -> QuantisationConfig:
    version = raw.get("version") or raw.get("format") or raw.get("checkpoint_format") or "gemm"
    settings = _parsed(_Awq, config, raw | {"version": version})
    if settings.version.lower() != "gemm" or settings.backend == "llm-awq":
        found = settings.version if settings.version.lower() != "gemm" else settings.backend
        raise _refused(config, "version", "gemm", found)
    if settings.bits != 4:
        raise _refused(config, "bits", "4", settings.bits)
    if not settings.zero_point:
        raise _refused(config, "zero_point", "true", settings.zero_point)
    scheme = WeightScheme(layout="awq", bits=4, group_size=_group_size(config, settings.group_size), symmetric=False)
    return QuantisationConfig(method="awq", groups=(SchemeTarget(targets=("Linear",), scheme=scheme),))


def _gptq(config: _File, raw: dict[str, Any]) -> QuantisationConfig:
    stored = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    settings = _parsed(_Gptq, config, raw | {"checkpoint_format": stored})
    if settings.is_marlin_format:
        raise _refused(config, "is_marlin_format", "false", True)
    if settings.checkpoint_format not in ("gptq", "gptq_v2"):
        raise _refused(config, "checkpoint_format", "gptq or gptq_v2", settings.checkpoint_format)
    if settings.bits not in (4, 8):
        raise _refused(config, "bits", "4 or 8", settings.bits)
    if settings.pack_dtype not in (None, "int32", "torch.int32"):
        raise _refused(config, "pack_dtype", "int32", settings.pack_dtype)
    # "-:" leaves modules unquantised, which their tensors show; other patterns give modules other settings.
    for pattern in settings.dynamic if isinstance(settings.dynamic, dict) else ():
        if not pattern.startswith("-:"):
            raise _refused(config, "dynamic", "one setting for all modules", pattern)
    scheme = WeightScheme(
        layout="gptq",
        bits=settings.bits,
        group_size=_group_size(config, settings.group_size),
        symmetric=False,
        has_order=bool(settings.desc_act),
        zero_offset=int(settings.checkpoint_format == "gptq"),
    )
    return QuantisationConfig(method="gptq", groups=(SchemeTarget(targets=("Linear",), scheme=scheme),))


def _group_size(config: _File, size: int | None) -> int:
    """Columns of a group, which share whole bytes; -1: a whole row."""
    if size is None or size == 0 or (size % 2 and size != -1):
        raise _refused(config, "group_size", "an even number, or -1", size)
    return size


def _fp8(config: _File, raw: dict[str, Any]) -> QuantisationConfig:
    settings = _parsed(_Fp8, config, raw)
    if settings.fmt not in (None, "e4m3", "float8_e4m3fn"):
        raise _refused(config, "fmt", "e4m3", settings.fmt)
    block = settings.weight_block_size
    scheme = WeightScheme(layout="fp8", bits=8, group_size=-1, rows_per_scale=-1)
    if block is not None:
        rows, columns = _block(config, "weight_block_size", block)
        scheme = WeightScheme(
            layout="fp8", bits=8, group_size=columns, rows_per_scale=rows, scale_name="weight_scale_inv"
        )
    unused = ("activation_scheme",) if settings.activation_scheme else ()
    return QuantisationConfig(method="fp8", groups=(SchemeTarget(targets=("Linear",), scheme=scheme),), unused=unused)


def _block(config: _File, name: str, block: Any) -> tuple[int, int]:
    if isinstance(block, str):  # older files: "128x128"
        block = [int(part) if part.isdecimal() else 0 for part in block.split("x")]
    if not isinstance(block, list) or len(block) != 2 or min(block) < 1:
        raise _refused(config, name, "two sizes, such as [128, 128]", block)
    return block[0], block[1]


def _compressed_tensors(config: _File, raw: dict[str, Any]) -> QuantisationConfig:
    settings = _parsed(_CompressedTensors, config, raw)
    sparsity = (settings.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refused(config, "sparsity_config.format", "dense", sparsity)
    if settings.transform_config and settings.transform_config.get("config_groups"):
        raise _refused(config, "transform_config", "none", settings.transform_config)
    groups, unused = [], []
    for key, content in settings.config_groups.items():
        where = f"config_groups.{key}"
        group = _parsed(_Group, config, content, f".{where}")
        if group.weights is None:  # only activations, or the cache
            unused.append(where)
            continue
        if group.input_activations is not None or group.output_activations is not None:
            unused.append(f"{where}.{'input' if group.input_activations is not None else 'output'}_activations")
        groups.append(SchemeTarget(targets=tuple(group.targets), scheme=_scheme(config, settings, group, where)))
    if not groups:
        raise _refused(config, "config_groups", "a group with weights", list(settings.config_groups))
    if settings.kv_cache_scheme:
        unused.append("kv_cache_scheme")
    ignore = tuple(settings.ignore or ())
    for pattern in (*ignore, *(target for group in groups for target in group.targets)):
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error:
            raise config.error(config.key, "regular expressions after 're:'", pattern, "correct the file") from None
    return QuantisationConfig(method="compressed-tensors", groups=tuple(groups), ignore=ignore, unused=tuple(unused))


def _scheme(config: _File, settings: _CompressedTensors, group: _Group, where: str) -> WeightScheme:
    """The scheme of one of `config_groups`."""
    weights = _parsed(_Arguments, config, group.weights, f".{where}.weights")
    stored = group.format or settings.format
    inputs = _parsed(_Arguments, config, group.input_activations or {"type": "float"}, f".{where}")
    if inputs.type != "float":
        raise _refused(config, f"{where}.input_activations", "none, or FP8", f"{inputs.type}{inputs.num_bits}")
    if stored in ("float-quantized", "naive-quantized") and (weights.type, weights.num_bits) == ("float", 8):
        return _fp8_scheme(config, weights, where)
    if stored != "pack-quantized":
        raise _refused(config, "format", "float-quantized or pack-quantized", stored)
    if weights.type != "int" or weights.num_bits not in (4, 8):
        raise _refused(config, f"{where}.weights", "int4 or int8", f"{weights.type}{weights.num_bits}")
    strategy = weights.strategy or ("channel" if weights.group_size in (None, -1) else "group")
    if strategy not in ("channel", "group"):
        raise _refused(config, f"{where}.weights.strategy", "channel or group", strategy)
    return WeightScheme(
        layout="pack-quantized",
        bits=weights.num_bits,
        group_size=-1 if strategy == "channel" else _group_size(config, weights.group_size),
        symmetric=weights.symmetric,
        has_order=weights.actorder in (True, "group", "dynamic"),
    )


def _fp8_scheme(config: _File, weights: _Arguments, where: str) -> WeightScheme:
    strategy = weights.strategy or "tensor"
    if not weights.symmetric:
        raise _refused(config, f"{where}.weights.symmetric", "true for FP8", weights.symmetric)
    if strategy == "block":
        rows, columns = _block(config, f"{where}.weights.block_structure", weights.block_structure)
        return WeightScheme(layout="fp8", bits=8, group_size=columns, rows_per_scale=rows)
    if strategy not in ("tensor", "channel"):
        raise _refused(config, f"{where}.weights.strategy", "tensor, channel or block", strategy)
    return WeightScheme(layout="fp8", bits=8, group_size=-1, rows_per_scale=-1 if strategy == "tensor" else 1)
