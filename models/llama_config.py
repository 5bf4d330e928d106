"""The shape and options of a model, read from a Hugging Face folder or taken from a table of published shapes."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, ValidationError, model_validator

from alspec.config import SHORT_DTYPES, DType, HeadWeights, Weights
from alspec.errors import UserError, show
from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.models.checkpoint.files import read_json
from alspec.models.checkpoint.quantised.quantisation_config import QuantisationConfig
from alspec.models.checkpoint.quantised.quantisation_settings import read_quantisation
from alspec.models.families.config_file import ConfigFile
from alspec.models.families.family import Family
from alspec.models.families.registry import family_of
from alspec.models.rope import ROPE_NAMES, RopeScaling, read_rope, rope_inv_freq
from alspec.models.tokenizer.end_tokens import NO_TOKEN, eos_token_ids
from alspec.models.validation import Frozen, user_error

__all__ = ["RANDOM_SHAPES", "LlamaConfig", "RopeScaling", "rope_inv_freq"]


# config.json's spelling of our field names, where it differs.
_JSON_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_qo_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "eos_token_ids": "eos_token_id",
}


class LlamaConfig(Frozen):
    """All that the runtime needs of a model besides its weights: Llama, with the options that other families choose."""

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
        default=2048, gt=0, le=10**18, description="longest context, tokens; some kinds of RoPE scaling multiply it"
    )
    rotary_dim: int | None = Field(
        default=None, gt=0, description="first channels of a head, which RoPE rotates; even; None: all"
    )
    head_padding: int = Field(
        default=0, ge=0, description="of head_dim, channels of zeros, half of them behind each half of a head; even"
    )
    qkv_bias: bool = Field(default=False, description="q, k and v have biases")
    o_bias: bool = Field(default=False, description="the attention output projection has a bias")
    mlp_bias: bool = Field(default=False, description="gate, up and down have biases")
    qk_norm: bool = Field(default=False, description="RMSNorm of each query and key head before RoPE")
    sliding_window: int | None = Field(
        default=None, gt=0, description="newest tokens that a token attends to, itself included; None: all"
    )
    full_layers: tuple[int, ...] = Field(default=(), description="layers without the sliding window, ascending")
    fused_tensors: bool = Field(default=False, description="files hold q, k, v and gate, up as one tensor each")
    tie_word_embeddings: bool = Field(default=False, description="the LM head is the embedding")
    dtype: DType = Field(default="fp32", description="dtype the weights were published in")
    quantisation: QuantisationConfig | None = Field(default=None, description="None: weights are not quantised")
    weights: Weights = Field(default="auto", description="how weights are quantised when they are read; auto: not")
    lm_head: HeadWeights = Field(default="auto", description="how the LM head is quantised when it is read; auto: not")
    packs_weights: bool = Field(default=False, description="quantised matrices are kept packed where kernels can")
    rotates_values: bool = Field(default=False, description="values of heads are rotated when they are read")
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
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(f"the rotated channels ({self.rotary_dim}) must be even, up to head_dim ({self.head_dim})")
        kind = None if self.rope_scaling is None else self.rope_scaling.rope_type
        if kind == "yarn" and self.rope_theta <= 1:  # its equation divides by log(theta)
            raise ValueError(f"rope_theta ({self.rope_theta}) must be above 1 with yarn scaling")
        if kind == "dynamic" and (self.rotary_dim or self.head_dim) <= 2:  # its equation divides by R - 2
            raise ValueError(f"head_dim ({self.head_dim}) must be above 2 with dynamic scaling")
        for name, ids in (("bos_token_id", (self.bos_token_id or 0,)), ("eos_token_id", self.eos_token_ids)):
            if any(not 0 <= token_id < self.vocab_size for token_id in ids):
                raise ValueError(f"{name} ({', '.join(map(str, ids))}) must be below vocab_size ({self.vocab_size})")
        return self

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read config.json, generation_config.json and the tokenizer's end-of-text token from a Hugging Face folder.

        Reads folders of the families in models/families. A missing `num_key_value_heads` means as many as query heads,
        and a missing or null `head_dim` hidden_size / num_attention_heads, unless the family has another default.
        RoPE settings are in `rope_scaling` (`type` or `rope_type`) or, without one, in `rope_parameters`. A missing
        dtype means fp32.

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
        config = ConfigFile(path, read_json(path, "for the model's shape"))
        family = family_of(config)
        config = config.with_defaults(family.defaults)
        _check_runnable(config, family)
        values = _sizes(config) | {
            "dtype": _dtype(config.raw, path),
            "eos_token_ids": eos_token_ids(config.raw, folder),
            "bos_token_id": _bos_token_id(config),
            "quantisation": read_quantisation(config),
        }
        for name in ("rms_norm_eps", "tie_word_embeddings"):
            if config.get(name) is not None:
                values[name] = config.get(name)
        if (positions := config.whole("max_position_embeddings", None)) is not None:
            values["max_position_embeddings"] = positions
        values |= _rope(config, values["head_dim"]) | family.options(config)
        try:
            return cls(**values)
        except ValidationError as error:
            raise user_error(error, str(path), _JSON_NAMES) from None

    @classmethod
    def from_shape(cls, name: str) -> Self:
        """The configuration of one of `RANDOM_SHAPES`, or of a folder (see `from_folder`), which needs no weights.

        Raises:
            UserError: `name` is neither (lists the known names), or as `from_folder`.
        """
        if name in _SHAPES:
            return cls(**_LLAMA_3, **_SHAPES[name])
        if os.path.isdir(name):
            return cls.from_folder(Path(name)).model_copy(update={"quantisation": None})
        known = ", ".join(RANDOM_SHAPES)
        raise UserError(f"random_weights: expected {known} or a folder that holds config.json, found {show(name)}")

    @property
    def quantised_as(self) -> str | None:
        """How the weights are quantised, by files or when they are read; None: they are not."""
        if self.quantisation is not None:
            return self.quantisation.name
        return None if self.weights == "auto" else self.weights

    @property
    def quantised_bits(self) -> int:
        """Bits of a code of quantised weights, the fewest of all schemes."""
        if self.quantisation is not None:
            return min(group.scheme.bits for group in self.quantisation.groups)
        return 8 if self.weights == "fp8" else 4

    @property
    def weights_in_rows(self) -> str | None:
        """`quantised_as` for measurement rows, which also say if a run used the values in another dtype."""
        name = self.quantised_as
        return name if name is None or self.packs_weights else f"{name}, dequantised"

    @property
    def changes_heads(self) -> bool:
        """Heads are not used as files have them: they are padded, or their values are rotated."""
        return self.head_padding > 0 or self.rotates_values

    @property
    def longest_context(self) -> int:
        """Longest context in tokens.

        For some kinds of RoPE scaling it is a multiple of `max_position_embeddings`; see `RopeScaling.longest`.
        """
        positions, scaling = self.max_position_embeddings, self.rope_scaling
        return positions if scaling is None else scaling.longest(positions)

    @property
    def longest_context_name(self) -> str:
        """Origin of `longest_context`, for messages."""
        scaling, stretch = self.rope_scaling, self.longest_context / self.max_position_embeddings
        stretched = "" if scaling is None or stretch == 1 else f" times {stretch:g} ({scaling.rope_type} RoPE scaling)"
        return f"the model's max_position_embeddings{stretched}"

    @property
    def valid_tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes T that divide the query heads and the MLP, and divide the KV heads or are a multiple.

        With more ranks than KV heads, several ranks hold the same KV head. The vocabulary is no constraint, because
        its shards may be uneven. Quantised weights that are split by input channels must be split between groups.
        """
        common = math.gcd(self.num_qo_heads, self.intermediate_size)
        sizes = filter(self.divides_over, range(1, common + 1))
        return tuple(size for size in sizes if size == 1 or self._splits_groups(size) is None)

    def divides_over(self, tp_size: int) -> bool:
        """Whether `tp_size` ranks can share heads and MLP, whatever the groups of quantised weights."""
        common = math.gcd(self.num_qo_heads, self.intermediate_size)
        return common % tp_size == 0 and (self.num_kv_heads % tp_size == 0 or tp_size % self.num_kv_heads == 0)

    def _splits_groups(self, tp_size: int) -> str | None:
        """What `tp_size` ranks cannot share without cutting groups of quantised weights; None: they can.

        Only of `o_proj` and `down_proj` ranks hold input channels.
        """
        if self.quantisation is None:
            return None
        for module, name, width in (
            ("self_attn.o_proj", "heads x head_dim", self.num_qo_heads * self.stored_head_dim),
            ("mlp.down_proj", "intermediate_size", self.intermediate_size),
        ):
            for layer in range(self.num_layers):
                scheme = self.quantisation.scheme_of(f"model.layers.{layer}.{module}")
                if scheme is not None and width % (tp_size * scheme.column_multiple):
                    return f"{name} ({width}) into multiples of {scheme.column_multiple}"
        return None

    def check_tp_size(self, tp_size: int) -> None:
        """Raise UserError, which lists the valid sizes, unless `tp_size` ranks can share the heads and the MLP."""
        if tp_size in self.valid_tp_sizes:
            return
        valid = f"valid sizes of one group: {', '.join(map(str, self.valid_tp_sizes))}"
        if self.quantisation is not None and self.divides_over(tp_size):
            raise UserError(
                f"tensor parallelism: {tp_size} ranks must divide {self._splits_groups(tp_size)}, "
                f"which the groups of {self.quantisation.name} need; {valid}"
            )
        raise UserError(
            f"tensor parallelism: {tp_size} ranks must divide num_attention_heads ({self.num_qo_heads}) and "
            f"intermediate_size ({self.intermediate_size}), and divide num_key_value_heads ({self.num_kv_heads}) "
            f"or be a multiple; {valid}"
        )

    def local_heads(self, tp_size: int) -> tuple[int, int]:
        """Query and KV heads of one of `tp_size` ranks."""
        return self.num_qo_heads // tp_size, max(1, self.num_kv_heads // tp_size)

    def with_head_dim(self, head_dim: int) -> Self:
        """The same model with heads padded to `head_dim` channels by zeros, which change no result.

        RoPE rotates pairs (c, c + head_dim / 2), so each half of a head is padded by itself.
        """
        return self.model_copy(
            update={
                "head_dim": head_dim,
                "head_padding": head_dim - self.stored_head_dim,
                "rotary_dim": self.rotary_dim or self.head_dim,
            }
        )

    @property
    def stored_head_dim(self) -> int:
        """Channels of a head in the checkpoint, without padding."""
        return self.head_dim - self.head_padding

    @property
    def as_stored(self) -> Self:
        """The same model without padding of heads, as its files hold it."""
        if not self.head_padding:
            return self
        rotary_dim = None if self.rotary_dim == self.stored_head_dim else self.rotary_dim
        return self.model_copy(update={"head_dim": self.stored_head_dim, "head_padding": 0, "rotary_dim": rotary_dim})

    @property
    def sm_scale(self) -> float:
        """Factor of the scores in the softmax."""
        return float(self.stored_head_dim**-0.5)

    def window(self, layer: int) -> int | None:
        """Newest tokens that a token attends to in a layer; None: all."""
        return None if layer in self.full_layers else self.sliding_window

    def windows(self, context: int) -> list[int | None]:
        """The sliding window of each layer; None where it is not shorter than `context` tokens."""
        windows = map(self.window, range(self.num_layers))
        return [window if window is not None and window < context else None for window in windows]

    def window_below(self, context: int) -> int | None:
        """The sliding window, if it is shorter than `context` tokens in some layer; else None."""
        window = self.sliding_window
        is_used = window is not None and len(set(self.full_layers) & set(range(self.num_layers))) < self.num_layers
        return window if is_used and window is not None and window < context else None

    def inv_freq(self, is_long: bool = False) -> torch.Tensor:
        """Rotary frequencies for texts of up to C tokens, or longer ones, [head_dim / 2] fp32, on CPU.

        Channels that are not rotated have frequency 0; see `rope_inv_freq`.
        """
        rotary_dim = self.rotary_dim or self.head_dim
        freq = rope_inv_freq(rotary_dim, self.rope_theta, self.rope_scaling, is_long)
        return torch.nn.functional.pad(freq, (0, (self.head_dim - rotary_dim) // 2))

    def rotary(self, device: torch.device) -> RotaryFrequencies:
        """Rotary frequencies for texts of any length, on `device`."""
        inv_freq, scaling = self.inv_freq().to(device), self.rope_scaling
        if scaling is None or scaling.rope_type not in ("dynamic", "longrope"):
            return RotaryFrequencies(inv_freq)
        context = min(scaling.original_max_position_embeddings, 2**31 - 1)  # kernels compare it with int32
        if scaling.rope_type == "longrope":
            return RotaryFrequencies(inv_freq, context, long_freq=self.inv_freq(is_long=True).to(device))
        rotary_dim = self.rotary_dim or self.head_dim
        exponents = -torch.arange(0, rotary_dim, 2, dtype=torch.float64) / (rotary_dim - 2)
        exponents = torch.nn.functional.pad(exponents, (0, len(inv_freq) - len(exponents)))
        return RotaryFrequencies(inv_freq, context, factor=scaling.factor, exponents=exponents.to(device))

    @property
    def short_context(self) -> int | None:
        """See `RopeScaling.short_context`."""
        return None if self.rope_scaling is None else self.rope_scaling.short_context

    def frequency_length(self, text_length: int) -> int:
        """See `RopeScaling.frequency_length`."""
        return 0 if self.rope_scaling is None else self.rope_scaling.frequency_length(text_length)

    @property
    def rope_factor(self) -> float:
        """Factor of the cosines and sines of rotated channels."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.attention_factor


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


def _download_hint(folder: Path) -> str:
    """Advice for a hub name such as meta-llama/Llama-3.1-8B; empty if `folder` cannot be one."""
    if os.path.exists(folder) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(folder), re.ASCII):
        return ""
    return f" (models are not downloaded from a hub; run `hf download {folder} --local-dir DIR`, then give DIR)"


def _check_runnable(config: ConfigFile, family: Family) -> None:
    """Refuse settings of config.json that mean another model than its family's; names the setting."""
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise config.error("hidden_act", "'silu'", config.get("hidden_act"), "this variant is not supported")
    for settings in (config.raw, *(config.get(name) for name in ROPE_NAMES)):
        value = settings.get("partial_rotary_factor") if isinstance(settings, dict) else None
        if value not in (None, 1.0) and not family.has_partial_rotary:
            raise config.error("partial_rotary_factor", "1.0", value, "this variant is not supported")


def _sizes(config: ConfigFile) -> dict[str, Any]:
    """Sizes without a default, under our field names. Two that older files omit are derived."""
    values: dict[str, Any] = {}
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_qo_heads", "vocab_size"):
        json_name = _JSON_NAMES.get(name, name)
        values[name] = config.whole(json_name, None)
        if values[name] is None:
            raise UserError(
                f"{config.path}: {json_name}: expected a number, found none; give the model's full config.json"
            )
    values["num_kv_heads"] = config.whole("num_key_value_heads", values["num_qo_heads"])
    head_dim = config.whole("head_dim", None)
    if head_dim is None:
        hidden, heads = values["hidden_size"], values["num_qo_heads"]
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads <= 0 or hidden % heads:
            raise config.error(
                "hidden_size", f"a multiple of num_attention_heads ({show(heads)})", hidden,
                "correct it or give head_dim",
            )  # fmt: skip
        head_dim = hidden // heads
    values["head_dim"] = head_dim
    return values


def _rope(config: ConfigFile, head_dim: Any) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rotary_dim`."""
    parts = [settings.get("partial_rotary_factor") for settings in (
        config.raw, *(config.get(name) for name in ROPE_NAMES)) if isinstance(settings, dict)]  # fmt: skip
    part = next((part for part in reversed(parts) if part is not None), 1.0)
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise config.error("partial_rotary_factor", "a number above 0, up to 1", part, "correct the file")
    is_number = type(head_dim) is int and head_dim > 0  # other values are refused later
    rotary_dim = int(head_dim * part) if is_number else 2
    theta, scaling = read_rope(config, rotary_dim)
    rotated = rotary_dim if is_number and rotary_dim < head_dim else None
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotated}


def _bos_token_id(config: ConfigFile) -> Any:
    """The first token of a text, also if it is written as a list of one."""
    value = config.get("bos_token_id")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value == NO_TOKEN else value


def _dtype(raw: dict[str, Any], path: Path) -> DType:
    """The published dtype. If absent or "auto": fp32, which loses no bits."""
    given = (raw.get("dtype"), raw.get("torch_dtype"))
    value = next((value for value in given if value and value != "auto"), "float32")
    dtype = SHORT_DTYPES.get(str(value).removeprefix("torch."))
    if dtype is None:
        raise UserError(f"{path}: torch_dtype: expected {', '.join(SHORT_DTYPES)}, found {show(value)}; correct it")
    return dtype
