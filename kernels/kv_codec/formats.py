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
    "key_bits",
    "key_method",
    "record_words",
    "rotates_values",
    "side_words",
    "value_bits",
    "value_method",
]

FLASHQ, TURBOQUANT = "flashq", "turboquant"
BITS = {FLASHQ: (4, 3, 2), TURBOQUANT: (4, 3, 2)}


class SideFormat(NamedTuple):
    """How one side of a record is stored."""

    method: str  # a key of `BITS`
    bits: int  # of a code; 0: 4 or 2, as `QuantisedLayer.bits` says for each head


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
    return codec if codec in FORMATS else "flashq"


def rotates_values(codec: str) -> bool:
    """Whether a cache of this codec, any `kv_cache`, holds rotated values: `W_v` and `W_o` are then rotated."""
    return codec in FORMATS and FORMATS[codec].values.method == TURBOQUANT


def record_words(format: str, bits: int, head_dim: int) -> int:
    """Return the size of one record in 32-bit words.

    Args:
        format: name in `FORMATS`.  bits: of the head; read only where the format lets each head have its own.
    Raises:
        ValueError: no kernel supports the bits or `head_dim`.
    """
    sides = FORMATS[format]
    if not sides.keys.bits and bits not in (4, 2):
        raise ValueError(f"bits: expected 4 or 2 for a head, found {bits}")
    return sum(side_words(side.method, side.bits or bits, head_dim) for side in sides)


@triton.constexpr_function
def side_words(method: str, bits: int, head_dim: int) -> int:
    """Return the size of one side of a record in 32-bit words: codes, then parameters.

    Raises:
        ValueError: no kernel supports the bits or `head_dim`.
    """
    if bits not in BITS[method]:
        raise ValueError(f"bits: expected one of {BITS[method]}, found {bits}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS} for a quantised cache, found {head_dim}")
    return BLOCK * head_dim * bits // 32 + (head_dim // 2 if method == FLASHQ else BLOCK // 2)


# For kernels: `format` is a constexpr, the name in `FORMATS`; `bits` are those of the head.


@triton.constexpr_function
def key_method(format: str) -> str | int:
    """Method of the format's keys."""
    return FORMATS[format].keys.method


@triton.constexpr_function
def value_method(format: str) -> str | int:
    """Method of the format's values."""
    return FORMATS[format].values.method


@triton.constexpr_function
def key_bits(format: str) -> str | int:
    """Bits of the format's keys; 0: each head has its own."""
    return FORMATS[format].keys.bits


@triton.constexpr_function
def value_bits(format: str) -> str | int:
    """Bits of the format's values; 0: each head has its own."""
    return FORMATS[format].values.bits
