"""The shape and options of a model, read from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from pydantic import ValidationError

from alspec.config import DType
from alspec.errors import UserError, show
from alspec.models.checkpoint.gguf_checkpoint import GgufCheckpoint
from alspec.models.checkpoint.gguf_header import GgufModel
from alspec.models.checkpoint.safetensors_header import TensorEntry
from alspec.models.families.registry import gguf_family_of
from alspec.models.llama_config import LlamaConfig, RopeScaling, rope_inv_freq
from alspec.models.rope import yarn_attention_factor

__all__ = ["gguf_config"]

_DTYPES: dict[str, DType] = {"F32": "fp32", "F16": "fp16"}  # of the matrices; bf16 for the others
_ROPE_FACTORS = "rope_freqs.weight"
# Settings of other models that share the architecture's name, with the values that have no effect.
_NEUTRAL = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.causal": (True,),
}
# Control tokens that end an answer, also in files whose metadata does not say so (as in llama.cpp).
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
_CONTROL = 3
# Options of biases, and a tensor that tells.
_BIASES = {"qkv_bias": "blk.0.attn_q.bias", "o_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_up.bias"}
# Settings of yarn that llama.cpp's converter writes only if they are not these.
_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0, "yarn_beta_fast": 32.0,
         "yarn_beta_slow": 1.0, "yarn_log_multiplier": 0.0}  # fmt: skip


def gguf_config(model: GgufModel) -> LlamaConfig:
    """Read the configuration of a GGUF file whose `general.architecture` is that of a family (Mistral's is `llama`).

    Embeddings are tied if there is no `output.weight`, and a projection has biases if layer 0 has them.
    `rope_freqs.weight` must hold the factors of the llama3 rule.
    The published dtype is that of the matrices with most bytes: fp32, fp16, or bf16 for all others.

    Raises:
        UserError: another architecture, a missing or wrong value, or a variant that is not supported; names the key.
    """
    metadata, path = model.metadata, model.path
    architecture = metadata.get("general.architecture")
    family = gguf_family_of(architecture, path)
    for name, neutral in _NEUTRAL.items():
        value = metadata.get(f"{architecture}.{name}", neutral[0])
        if value not in neutral:
            raise UserError(
                f"{path}: {architecture}.{name}: expected {neutral[-1]!r}, found {show(value)}; "
                "this variant is not supported"
            )
    read = _Numbers(model)
    hidden, heads = read("embedding_length"), read("attention.head_count")
    head_dim = read("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := read(name, head_dim)) != head_dim:
            raise UserError(
                f"{path}: {architecture}.{name}: expected {head_dim}, the size of a head, found {found}; "
                "this variant is not supported"
            )
    theta = read.number("rope.freq_base", 10_000.0)
    values: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": read("feed_forward_length"),
        "num_layers": read("block_count"),
        "num_qo_heads": heads,
        "num_kv_heads": read("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": read("vocab_size", len(_tokens(metadata)) or None),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(model, head_dim, theta),
        "max_position_embeddings": read("context_length"),
        "tie_word_embeddings": "output.weight" not in model.entries,
        "dtype": _dtype(model.entries),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _end_ids(metadata),
        "sliding_window": read("attention.sliding_window") if read.has("attention.sliding_window") else None,
    } | family.gguf_options
    for name, tensor in _BIASES.items():
        values[name] = values.get(name, False) or tensor in model.entries
    try:
        return LlamaConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        where = f"{first['loc'][0]}: " if first["loc"] else ""
        raise UserError(f"{path}: metadata: {where}{message}; download or convert the model again") from None


class _Numbers:
    """Reads numbers of the metadata under the name of the architecture."""

    def __init__(self, model: GgufModel) -> None:
        self._model, self.prefix = model, model.metadata.get("general.architecture")

    def has(self, name: str) -> bool:
        """Whether a number is given; 0 says that the model has no such thing."""
        return self._model.metadata.get(f"{self.prefix}.{name}") not in (None, 0)

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or value <= 0:
            raise self._error(name, "a positive whole number", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(name, "a positive number", value)
        # Metadata are fp32: the shortest decimal number with these bits is the one that was written.
        return float(str(torch.tensor(value, dtype=torch.float32).numpy()))

    def _get(self, name: str, default: float | None) -> Any:
        value = self._model.metadata.get(f"{self.prefix}.{name}")
        return default if value is None else value

    def _error(self, name: str, expected: str, value: Any) -> UserError:
        found = "none" if value is None else show(value)
        return UserError(
            f"{self._model.path}: {self.prefix}.{name}: expected {expected}, found {found}; "
            "download or convert the model again"
        )


def _tokens(metadata: dict[str, Any]) -> list[Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def _end_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end a text (eos), a turn (eot) or a message (eom), and of well-known control tokens."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = {token_id for token_id in named if type(token_id) is int}
    types = metadata.get("tokenizer.ggml.token_type")
    for token_id, text in enumerate(_tokens(metadata)):
        if text in _END_TEXTS and isinstance(types, list) and types[token_id : token_id + 1] == [_CONTROL]:
            ids.add(token_id)
    return tuple(sorted(ids))


def _dtype(entries: dict[str, TensorEntry]) -> DType:
    sizes: Counter[str] = Counter()
    for entry in entries.values():
        if len(entry.shape) > 1:
            sizes[entry.dtype] += entry.num_bytes
    return _DTYPES.get(max(sizes, key=sizes.__getitem__, default=""), "bf16")


def _rope_scaling(model: GgufModel, head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling of the metadata, or the llama3 rule that `rope_freqs.weight` follows."""
    read = _Numbers(model)
    kind = model.metadata.get(f"{read.prefix}.rope.scaling.type")
    if kind == "yarn":
        return _yarn(model)
    if kind not in (None, "none", "linear"):
        raise UserError(
            f"{model.path}: {read.prefix}.rope.scaling.type: expected none, linear or yarn, found {show(kind)}; "
            "this scaling is not supported"
        )
    # Files without a type have the factor under its older name.
    name = "rope.scale_linear" if kind is None else "rope.scaling.factor"
    factor = 1.0 if kind == "none" else read.number(name, 1.0)
    if not 1.0 <= factor <= 1e6:
        raise UserError(
            f"{model.path}: {read.prefix}.{name}: expected 1 to 1e6, found {factor:g}; this scaling is not supported"
        )
    if _ROPE_FACTORS not in model.entries:
        return RopeScaling(rope_type="linear", factor=factor) if factor > 1.0 else None
    where = f"{model.files[_ROPE_FACTORS]}: tensor '{_ROPE_FACTORS}'"
    if factor != 1.0 or model.entries[_ROPE_FACTORS].shape != (head_dim // 2,):
        raise UserError(
            f"{where}: expected {head_dim // 2} factors without linear scaling, found shape "
            f"{list(model.entries[_ROPE_FACTORS].shape)} and factor {factor:g}; this scaling is not supported"
        )
    factors = _read_vector(model, _ROPE_FACTORS)
    if bool((factors == 1.0).all()):
        return None
    context = read("rope.scaling.original_context_length", 8192)
    largest = round(float(factors.max()), 4)
    if 1.0 < largest < 1e6:
        scaling = RopeScaling(rope_type="llama3", factor=largest, original_max_position_embeddings=context)
        expected = rope_inv_freq(head_dim, theta) / rope_inv_freq(head_dim, theta, scaling)
        if torch.allclose(factors, expected, rtol=1e-4, atol=0):
            return scaling
    raise UserError(
        f"{where}: expected the factors of the llama3 rule (low 1, high 4, {context} tokens), found others, up to "
        f"{largest:g}; this scaling is not supported"
    )


def _yarn(model: GgufModel) -> RopeScaling:
    read = _Numbers(model)
    for name, usual in _YARN.items():
        key = f"{read.prefix}.rope.scaling.{name}"
        if (found := model.metadata.get(key, usual)) != usual:
            raise UserError(
                f"{model.path}: {key}: expected {usual:g}, found {show(found)}; this scaling is not supported"
            )
    factor = read.number("rope.scaling.factor")
    if not 1.0 <= factor <= 1e6:
        raise UserError(f"{model.path}: {read.prefix}.rope.scaling.factor: expected 1 to 1e6, found {factor:g}; "
                        "this scaling is not supported")  # fmt: skip
    context = read("rope.scaling.original_context_length", read("context_length"))
    return RopeScaling(
        rope_type="yarn", factor=factor, original_max_position_embeddings=context,
        attention_factor=yarn_attention_factor(factor),
    )  # fmt: skip


def _read_vector(model: GgufModel, name: str) -> torch.Tensor:
    stored = GgufCheckpoint({name: model.entries[name]}, {name: model.files[name]}, {})
    return stored.tensor_slice(name).float()
