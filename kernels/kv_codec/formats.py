"""Which codec stores which side of a record: the formats of the quantised KV cache, and the sizes of their records.

A *side format* is a method and a number of bits. `flashq` quantises channels (flashq/quantize.py), `turboquant` tokens
after a rotation (turboquant/token_codes.py). A format names one for K and one for V: they are chosen separately.

Size of a side, in bytes per token and head, for D channels: D b / 8 of codes; flashq 2 D / 64 of parameters, turboquant
2 of a scale. Each block also has one fp32 scale for K and one for V.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from alspec.kernels.kv_codec.quantised_layer import BLOCK, HEAD_DIMS

__all__ = [
    "FORMATS",
    "KVFormat",
    "SideFormat",
    "format_of",
    "has_own_bits",
    "record_words",
    "rotates_values",
    "side_bits",
    "side_method",
    "side_of",
    "side_words",
]

FLASHQ, TURBOQUANT = "flashq", "turboquant"
FLASHQ_CODECS = ("turbo4", "turbo2", "turbo-mixed")  # the format `flashq`: each head has its own bits


class SideFormat(NamedTuple):
    """How one side of a record is stored."""

    method: str  # FLASHQ or TURBOQUANT
    bits: int  # of a code; 0 in FORMATS: 4 or 2, as `QuantisedLayer.bits` says for each head


class KVFormat(NamedTuple):
    """How a record is stored."""

    keys: SideFormat
    values: SideFormat


FORMATS = {
    "flashq": KVFormat(SideFormat(FLASHQ, 0), SideFormat(FLASHQ, 0)),
    **{f"turboquant{b}": KVFormat(SideFormat(TURBOQUANT, b), SideFormat(TURBOQUANT, b)) for b in (4, 3, 2)},
    **{
        f"hybrid-k{k}v{v}": KVFormat(SideFormat(FLASHQ, k), SideFormat(TURBOQUANT, v))
        for k, v in ((4, 3), (4, 2), (3, 2))
    },
}


def format_of(codec: str) -> str:
    """Return the name in `FORMATS` of a quantised `kv_cache`: `flashq` for turbo4, turbo2 and turbo-mixed."""
    return "flashq" if codec in FLASHQ_CODECS else codec


def rotates_values(codec: str) -> bool:
    """Whether a cache of this codec, any `kv_cache`, holds rotated values: `W_v` and `W_o` are then rotated."""
    return codec in FORMATS and FORMATS[codec].values.method == TURBOQUANT


def record_words(format: str, bits: int, head_dim: int) -> int:
    """Return the size of one record of a head in 32-bit words; arguments and errors as for `side_words`."""
    return sum(side_words(format, is_v, bits, head_dim) for is_v in (False, True))


# The following also serve kernels, where all arguments are constants.


@triton.constexpr_function
def has_own_bits(format: str) -> bool:
    """Whether each head has its own bits, 4 or 2."""
    return not FORMATS[format].keys.bits


@triton.constexpr_function
def side_of(format: str, is_v: bool, bits: int) -> SideFormat:
    """Return method and bits of a side; is_v: V's, else K's.  bits: of the head; not read unless `has_own_bits`."""
    side = FORMATS[format][int(is_v)]
    return SideFormat(side.method, side.bits or bits)


@triton.constexpr_function
def side_method(format: str, is_v: bool) -> str:
    """Return the method of a side."""
    return FORMATS[format][int(is_v)].method


@triton.constexpr_function
def side_bits(format: str, is_v: bool, bits: int) -> int:
    """Return the bits of a side."""
    return FORMATS[format][int(is_v)].bits or bits


@triton.constexpr_function
def side_words(format: str, is_v: bool, bits: int, head_dim: int) -> int:
    """Return the size of one side of a record in 32-bit words: codes, then parameters.

    Raises:
        ValueError: no kernel supports the bits or `head_dim`.
    """
    side: SideFormat = side_of(format, is_v, bits)
    allowed = (4, 2) if has_own_bits(format) else (4, 3, 2)
    if side.bits not in allowed:
        raise ValueError(f"bits: expected one of {allowed}, found {side.bits}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS} for a quantised cache, found {head_dim}")
    return BLOCK * head_dim * side.bits // 32 + (head_dim // 2 if side.method == FLASHQ else BLOCK // 2)
