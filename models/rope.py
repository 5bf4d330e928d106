"""Rotary frequencies: their scaling, as config.json states it and as transformers computes it."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, ValidationError, model_validator

from alspec.errors import UserError, show
from alspec.models.families.config_file import ConfigFile
from alspec.models.validation import Frozen, user_error

__all__ = ["RopeScaling", "read_rope", "rope_inv_freq", "yarn_attention_factor"]

RopeKind = Literal["linear", "llama3", "dynamic", "yarn", "longrope"]
# Keys that may hold the RoPE settings; the first one present is used.
ROPE_NAMES = ("rope_scaling", "rope_parameters")
# Kinds of scaling: what config.json must give, and what it may give.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "truncate")}
_OLD_NAMES = {"su": "longrope"}  # of Phi-3


class RopeScaling(Frozen):
    """Scaling of the rotary frequencies; see `rope_inv_freq` for the equations."""

    rope_type: RopeKind
    factor: float = Field(default=1.0, gt=0.0, le=1e6, description="divisor of the low frequencies")
    low_freq_factor: float = Field(default=1.0, gt=0.0, description="llama3: wavelengths above C / this are divided")
    high_freq_factor: float = Field(default=4.0, gt=0.0, description="llama3: wavelengths below C / this are kept")
    original_max_position_embeddings: int = Field(
        default=8192, gt=1, le=10**18, description="C, context before scaling, tokens; not for linear"
    )
    attention_factor: float = Field(
        default=1.0, gt=0.0, le=1e6, description="yarn, longrope: multiplies cosines and sines"
    )
    beta_fast: float = Field(default=32.0, gt=0.0, description="yarn: more turns than this in C tokens are kept")
    beta_slow: float = Field(default=1.0, gt=0.0, description="yarn: fewer turns than this in C tokens are divided")
    truncate: bool = Field(default=True, description="yarn: the channels between are rounded outwards")
    short_factor: tuple[float, ...] = Field(default=(), description="longrope: divisors for up to C tokens")
    long_factor: tuple[float, ...] = Field(default=(), description="longrope: divisors for more than C tokens")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor must be below high_freq_factor ({self.high_freq_factor})")
        for name in ("short_factor", "long_factor"):
            if any(value <= 0 for value in getattr(self, name)):
                raise ValueError(f"{name} must hold positive numbers")
        return self

    @property
    def short_context(self) -> int | None:
        """C of longrope, whose longer texts have other frequencies for all of their tokens; None for other kinds."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    def frequency_length(self, text_length: int) -> int:
        """A number that two prompts share if their frequencies are the same: a length that has them."""
        context = self.original_max_position_embeddings
        if self.rope_type == "dynamic":
            return max(text_length, context)
        return context + 1 if self.rope_type == "longrope" and text_length > context else context

    def longest(self, max_positions: int) -> int:
        """Longest context in tokens, for `max_position_embeddings` of config.json."""
        if self.rope_type in ("linear", "dynamic"):
            return max(max_positions, int(max_positions * self.factor))
        if self.rope_type == "yarn":
            return max(max_positions, int(self.original_max_position_embeddings * self.factor))
        return max_positions


def rope_inv_freq(
    rotary_dim: int, rope_theta: float, scaling: RopeScaling | None = None, is_long: bool = False
) -> torch.Tensor:
    """Rotary frequencies f_i in radians per token, for texts of up to C tokens. is_long: longrope, for longer ones.

        f_i = theta^(-2i / R),   i = 0 .. R / 2 - 1,   R = rotary_dim, C = original_max_position_embeddings
        linear:   f_i / factor
        llama3:   with wavelength w = 2 pi / f,
                  w > C / low_freq_factor:   f / factor
                  w < C / high_freq_factor:  f
                  between:                   (1 - s) f / factor + s f,
                                             s = (C / w - low_freq_factor) / (high_freq_factor - low_freq_factor)
        dynamic:  f_i up to C tokens, and for n > C those of theta (factor n / C - factor + 1)^(R / (R - 2)), which
                  `RotaryFrequencies` computes
        yarn:     (1 - r_i) f_i + r_i f_i / factor;   r_i rises from 0 to 1 between the channels that turn beta_fast
                  and beta_slow times in C tokens
        longrope: f_i / short_factor_i up to C tokens, f_i / long_factor_i for more

    Source: RoFormer, section 3.2; Meta's Llama 3.1 reference code for llama3; YaRN, section 3; LongRoPE; for dynamic
    the NTK-aware rule as in transformers. Computed in fp32 as in the models' training code, because at long contexts a
    last-bit difference in f changes the angle.

    Returns:
        [rotary_dim / 2] fp32, on CPU.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    powers = rope_theta**exponent
    freq = 1.0 / powers
    if scaling is None or scaling.rope_type == "dynamic":
        return freq
    if scaling.rope_type == "linear":
        return freq / scaling.factor
    if scaling.rope_type == "longrope":
        return 1.0 / (torch.tensor(scaling.long_factor if is_long else scaling.short_factor) * powers)
    if scaling.rope_type == "yarn":
        kept = 1 - _yarn_ramp(rotary_dim, rope_theta, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - kept) + freq * kept
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / freq
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * freq / scaling.factor + smooth * freq
    stretched = torch.where(wavelength > context / low, freq / scaling.factor, blended)
    return torch.where(wavelength < context / high, freq, stretched)


def _yarn_ramp(rotary_dim: int, rope_theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Divided share of each frequency: 0 up to the channel of `beta_fast` turns, 1 from that of `beta_slow` on."""

    def channel_of(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope_theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # as in transformers: a step instead of a division by 0
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    return torch.clamp(ramp, 0, 1)


def read_rope(config: ConfigFile, rotary_dim: int) -> tuple[float, RopeScaling | None]:
    """Read `rope_theta` and the scaling from `rope_scaling` or, without one, from `rope_parameters`.

    Raises:
        UserError: a kind of scaling that is not supported, or a value that is missing or wrong; names it.
    """
    where, settings = _settings(config)
    theta = settings.get("rope_theta", config.get("rope_theta", 10_000.0))
    if isinstance(theta, float) and not math.isfinite(theta):  # NaN would compare unequal below
        raise config.error("rope_theta", "a finite number", theta, "correct the file")
    replaced = (config.get("rope_parameters") or {}).get("rope_theta", theta)
    if replaced != theta:
        raise UserError(
            f"{config.path}: rope_parameters.rope_theta: expected {show(theta)}, the value used with {where}, which "
            f"replaces rope_parameters, found {show(replaced)}; give rope_theta in {where} too"
        )
    return theta, _read_scaling(config, where, settings, rotary_dim)


def _settings(config: ConfigFile) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the mapping with the RoPE settings; the content is empty if there is none.

    As in transformers, `rope_scaling` (older) replaces all of `rope_parameters` if both are present.
    """
    for name in ROPE_NAMES:
        settings = config.get(name)
        if not isinstance(settings, dict | None):
            raise config.error(name, "an object or null", settings, "correct it")
        nested = next((kind for kind, value in (settings or {}).items() if isinstance(value, dict)), None)
        if nested is not None:
            raise UserError(f"{config.path}: {name}.{nested}: settings for each kind of layer are not supported")
    name = next((name for name in ROPE_NAMES if config.get(name)), ROPE_NAMES[0])
    return name, config.get(name) or {}


def _read_scaling(config: ConfigFile, where: str, settings: dict[str, Any], rotary_dim: int) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if isinstance(kind, str):
        kind = _OLD_NAMES.get(kind, kind)
        if kind == "yarn" and "long_factor" in settings:  # as some folders of Phi-3 spell it
            kind = "longrope"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise config.error(
            f"{where}.rope_type", f"default, {', '.join(list(_NEEDED)[:-1])} or {list(_NEEDED)[-1]}", kind,
            "this scaling is not supported",
        )  # fmt: skip
    if kind == "yarn" and settings.get("factor") is None:
        settings = settings | _yarn_factor(config, settings)
    for name in _NEEDED[kind]:
        if settings.get(name) is None:
            raise UserError(f"{config.path}: {where}.{name}: expected a number, found none; {kind} scaling needs it")
    names = [*_NEEDED[kind], *(name for name in _OPTIONAL.get(kind, ()) if settings.get(name) is not None)]
    values = {name: settings[name] for name in names} | {"rope_type": kind}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = settings[name]
            if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
                raise config.error(f"{where}.{name}", f"a list of {rotary_dim // 2} numbers", factors, "correct it")
            values[name] = tuple(float(x) if type(x) is int else x for x in factors)
    if kind != "linear":
        values["original_max_position_embeddings"] = _original_positions(config, kind, settings)
    try:
        scaling = RopeScaling.model_validate(values)
        return scaling.model_copy(update={"attention_factor": _attention_factor(config, scaling, settings)})
    except ValidationError as error:
        raise user_error(error, f"{config.path}: {where}", {}) from None


def _original_positions(config: ConfigFile, kind: str, settings: dict[str, Any]) -> Any:
    """Context before scaling: of config.json itself, else of the RoPE settings, else `max_position_embeddings`."""
    positions = config.whole("max_position_embeddings", 2048)
    if kind == "dynamic":
        return positions
    own = config.whole("original_max_position_embeddings", None)
    return own or settings.get("original_max_position_embeddings") or positions


def _yarn_factor(config: ConfigFile, settings: dict[str, Any]) -> dict[str, float]:
    """The factor of yarn that C and `max_position_embeddings` give; empty without both."""
    positions, original = config.whole("max_position_embeddings", None), _original_positions(config, "yarn", settings)
    if type(positions) is not int or type(original) is not int or original <= 0 or positions == original:
        return {}
    return {"factor": positions / original}


def _attention_factor(config: ConfigFile, scaling: RopeScaling, settings: dict[str, Any]) -> float:
    """Factor of cosines and sines: given, or by the rule of the paper."""
    if scaling.rope_type not in ("longrope", "yarn"):
        return 1.0
    given = _number(config, "attention_factor", settings.get("attention_factor"))
    if given is not None:
        return given
    if scaling.rope_type == "longrope":
        original, factor = scaling.original_max_position_embeddings, _number(config, "factor", settings.get("factor"))
        if factor is None:
            positions = config.whole("max_position_embeddings", 2048)
            factor = (_number(config, "max_position_embeddings", positions) or 1.0) / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    first, second = (_number(config, name, settings.get(name) or None) for name in ("mscale", "mscale_all_dim"))
    if first and second:
        return yarn_attention_factor(scaling.factor, first) / yarn_attention_factor(scaling.factor, second)
    return yarn_attention_factor(scaling.factor)


def _number(config: ConfigFile, name: str, value: Any) -> float | None:
    """A positive number of the RoPE settings, or None if it is not given."""
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise config.error(name, "a positive number", value, "correct the file")
    return float(value)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Factor of cosines and sines by YaRN, section 3.4: `0.1 weight ln(factor) + 1`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
