"""The configuration schema: one set of fields is the source of flags, configuration file and `--print-config`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_serializer, model_validator

from .errors import UserError
from .predictor import CHUNK_SIZES
from .sas import Softmax

__all__ = [
    "TURBO_CODECS",
    "EngineConfig",
    "GenerateConfig",
    "LatencyConfig",
    "SamplingConfig",
    "SpeculationConfig",
    "check_fields",
    "load_yaml",
    "refuse_unavailable",
    "validate",
]

SpeculationMode = Literal["auto", "off", "paired", "colocated", "simulated"]
KVCacheCodec = Literal["bf16", "turbo4", "turbo2", "turbo-mixed", "turboquant3", "turboquant2"]
Transport = Literal["auto", "symm", "nccl", "gloo"]

TURBO_CODECS = ("turbo4", "turbo2", "turbo-mixed")  # the quantised caches that the runtime has

_SchemaT = TypeVar("_SchemaT", bound=BaseModel)


def _one_of_chunk_sizes(value: Any) -> int:
    if value not in {*CHUNK_SIZES, *map(str, CHUNK_SIZES)}:
        raise ValueError(f"expected one of {', '.join(map(str, CHUNK_SIZES))}")
    return int(value)


def _ids(value: Any) -> Any:
    """Accept the flag's spelling `1,2,3` beside a list of integers."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdigit() for part in parts):
            raise ValueError("expected token ids separated by commas, such as 1,2,3")
        return tuple(int(part) for part in parts)
    return value


class _Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class SpeculationConfig(_Schema):
    """Attention-level speculation: who computes what, and which guesses are accepted."""

    mode: SpeculationMode = Field(
        default="auto",
        description="off: tensor parallelism only; paired: two groups; simulated: the reference semantics in one group",
        json_schema_extra={"flag": "speculation"},
    )
    threshold: float = Field(
        default=0.10, ge=0.0, description="lambda: accept if |A~ - A| < lambda |A|; 0 accepts never, inf always"
    )
    chunk_size: Annotated[int, BeforeValidator(_one_of_chunk_sizes)] = Field(
        default=128,
        description="S: tokens of the sink and of the recent window, 128, 256 or 512",
        json_schema_extra={"flag": "chunk"},
    )

    @field_serializer("threshold", when_used="json")
    def _threshold_in_json(self, threshold: float) -> float | str:
        # JSON has no infinity; the text is read back as one.
        return threshold if math.isfinite(threshold) else "inf"


class EngineConfig(_Schema):
    """What is loaded and how it is executed."""

    model: Path | None = Field(default=None, description="Hugging Face folder; default: the bundled demo checkpoint")
    random_weights: str | None = Field(
        default=None, description="shape with random weights, such as llama-3.1-8b (profiling without a download)"
    )
    speculation: SpeculationConfig = Field(default=SpeculationConfig(), description="attention-level speculation")
    kv_cache: KVCacheCodec = Field(default="bf16", description="cache codec; bf16: not quantised, stored as --dtype")
    softmax: Softmax = Field(
        default="exact",
        description="of attention over a quantised cache; sas: a polynomial in place of exponentials, with a cutoff",
    )
    transport: Transport = Field(
        default="auto", description="auto: symm (peer memory) where the GPUs reach each other, else nccl; gloo on CPU"
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        default="auto", description="replay a captured decode step; auto: on GPUs, for up to 8 requests"
    )
    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(
        default=None, description="weights and cache; default: the checkpoint's on GPUs, fp32 on CPU"
    )
    max_context: int | None = Field(
        default=None, ge=1, description="tokens the cache has room for; default: what is needed"
    )
    verify_checksums: bool = Field(default=False, description="compare the model folder with its SHA256SUMS first")

    @field_serializer("model")
    def _path_as_text(self, model: Path | None) -> str | None:
        return None if model is None else str(model)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model is not None and self.random_weights is not None:
            raise ValueError("model and random_weights exclude each other; give one of them")
        return self


class SamplingConfig(_Schema):
    """How the next token is chosen and when a request ends."""

    max_new_tokens: int = Field(default=128, ge=1, description="tokens to generate for each prompt")
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="0: greedy")
    top_k: int = Field(default=0, ge=0, description="sample among the k most likely tokens; 0: all")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="sample among the most likely tokens of this total probability"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the counter-based random numbers")
    stop: tuple[str, ...] = Field(default=(), description="end a request at this text (repeatable); it is not printed")
    ignore_eos: bool = Field(default=False, description="do not stop at the end-of-sequence token")

    @model_validator(mode="after")
    def _stop_texts(self) -> Self:
        if any(not text for text in self.stop):
            raise ValueError("stop: expected a text, found an empty one")
        return self


class GenerateConfig(EngineConfig, SamplingConfig):
    """Everything `launch/generate.py` can be told."""

    prompt: str | None = Field(default=None, description="text to continue")
    prompt_file: Path | None = Field(
        default=None,
        description="file with a prompt, less its last line end; *.jsonl: one request a line, run as a batch",
    )
    prompt_ids: Annotated[tuple[int, ...] | None, BeforeValidator(_ids)] = Field(
        default=None, description="token ids, such as 1,2,3"
    )
    chat: bool = Field(default=False, description="apply the checkpoint's chat template to the prompt")
    system: str | None = Field(default=None, description="system message; needs --chat")
    json_file: Path | None = Field(default=None, alias="json", description="write everything measured to this file")
    trace: Path | None = Field(default=None, description="write a Perfetto trace of all ranks' operations to this file")
    color: bool = Field(default=False, description="shade each token by its speculation hit rate")
    debug: bool = Field(default=False, description="show the traceback of an error")

    @field_serializer("prompt_file", "json_file", "trace")
    def _paths_as_text(self, path: Path | None) -> str | None:
        return None if path is None else str(path)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in ("prompt", "prompt_file", "prompt_ids") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give exactly one prompt")
        if self.system is not None and not self.chat:
            raise ValueError("system needs chat: a plain prompt has no system message")
        if self.chat and self.prompt_ids is not None:
            raise ValueError("chat needs a text prompt: prompt_ids are used as they are")
        return self


class LatencyConfig(EngineConfig):
    """Everything `launch/latency.py` can be told."""

    contexts: str | None = Field(
        default=None, description="tokens in the cache; default: 1k,8k,32k,128k as far as the model's positions go"
    )
    modes: str = Field(
        default="off", description="speculation modes to measure, such as off,paired; in place of --speculation"
    )
    hit_rates: str = Field(
        default="real", description="of paired: real verdicts, or forced ones for profiling, such as real,0.5,0.875,1"
    )
    prompt_file: Path | None = Field(
        default=None,
        description="text to read into the cache, repeated or cut to each context; default: random numbers or tokens",
    )
    batch: int = Field(default=1, ge=1, description="requests, all of the same length")
    steps: int = Field(default=100, ge=1, description="decode steps to measure at each context")
    rows: Path | None = Field(default=None, description="append one JSON line for each context to this file")
    json_file: Path | None = Field(default=None, alias="json", description="write every sample of every rank here")
    plot: Path | None = Field(default=None, description="picture of ms/token against context to write")
    trace: Path | None = Field(
        default=None, description="write a Perfetto trace of some steps of the last context, all ranks, to this file"
    )
    debug: bool = Field(default=False, description="show the traceback of an error")


def refuse_unavailable(config: EngineConfig) -> None:
    """Refuse what the schema accepts and the runtime does not have: not yet, or not in this combination.

    Raises:
        UserError: codec or placement that is not available; a softmax that the codec does not have.
    """
    if config.speculation.mode == "colocated":
        raise UserError("speculation: colocated is not available yet; use off, paired or simulated")
    if config.kv_cache not in ("bf16", *TURBO_CODECS):
        raise UserError(f"kv_cache: {config.kv_cache} is not available yet; use bf16, {', '.join(TURBO_CODECS)}")
    if config.softmax == "sas" and config.kv_cache not in TURBO_CODECS:
        raise UserError("softmax: sas needs a quantised cache; use --kv-cache turbo4, turbo2 or turbo-mixed")


def validate(
    schema: type[_SchemaT],
    values: dict[str, Any],
    source: str,
    spell: Callable[[tuple[str, ...]], str] = ".".join,
) -> _SchemaT:
    """Build `schema` from `values`, or raise one line that names the field.

    Args:
        source: where the values stood, the beginning of the line.  spell: how a field's path is written there.
    Raises:
        UserError: unknown key (with the nearest valid name), wrong type or value.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    path = tuple(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(path[-1], _keys(schema, path[:-1]), n=1, cutoff=0.0)
        raise UserError(f"{source}: unknown key {spell(path)!r}; the nearest valid name is {nearest[0]!r}")
    message = first["msg"].removeprefix("Value error, ")
    where, found = (f"{spell(path)}: ", f", found {first['input']!r}") if path else ("", "")
    raise UserError(f"{source}: {where}{message}{found}")


def check_fields(schema: type[BaseModel], values: dict[str, Any], source: str) -> None:
    """As `validate`, but each field for itself: what excludes or needs each other is judged with the flags.

    Raises:
        UserError: unknown key, wrong type or value.
    """
    try:
        schema.model_validate(values)
    except ValidationError as error:
        if error.errors()[0]["loc"]:
            validate(schema, values, source)


def _keys(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The valid keys of the schema that `path` leads to."""
    for part in path:
        schema = schema.model_fields[part].default.__class__
    return sorted(field.alias or name for name, field in schema.model_fields.items())


class _Loader(yaml.SafeLoader):
    """Safe loading with the booleans of YAML 1.2, true and false: off and on are text, as the fields spell them."""


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file: a YAML mapping of field names, safe loading.

    Raises:
        UserError: unreadable file, broken YAML, or anything that is not a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise UserError(f"config: cannot read {path}: {error.strerror}; give an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config: {path}: expected a mapping of field names, found {type(values).__name__}")
    return values
