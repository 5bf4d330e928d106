"""Memory layout of codes in planes, to the bit: for TurboQuant, and for FlashQ's keys of 3 bits.

Decode attention expands codes to bytes by a table lookup (PTX `prmt`), whose selectors are nibbles. So a code has a
field of one nibble. Codes of 4 bits are one plane of 4-bit fields; of 2 bits one plane of 2-bit fields; of 3 bits two:
first the lower two bits, then the upper bit. Planes of 2 and 1 bits put the fields of 2 and 4 registers into a nibble.

A code of 4 bits is stored as a sign and a magnitude, as levels are symmetric: c >= 8 as `c - 8`, c < 8 as `15 - c`.

The left operand A of the instruction m16n8k32 is [16, 32] bytes; lane `4 g + t` of a warp (g < 8, t < 4) holds four
32-bit registers of it, (kq, rh): rows `8 rh + g`, half kq of the 32 columns. Eight registers, of two instructions
m, are a *group*, 32 codes of a lane:

- K [64 tokens, D channels]: a group is a token tile of 16 and 64 channels p; row `8 rh + g` is the token in its tile;
  byte `2 kh + i` is channel `64 p + 32 m + 16 kq + 8 i + 2 t + kh`. (A sum over channels may use any order; this one is
  the order in which lanes hold q.)
- V^T [D channels, 64 tokens]: a group is a channel tile of 16; row `8 rh + g` is the channel in its tile; byte
  `jl + 2 jh` is token `32 m + 16 kq + 8 jl + 2 t + jh`, the order of P's registers.

Nibble n of a word is byte `n % 4` of the register with `rh = n / 4`. The registers (m, kq) of a group share words:

    plane of 4 bits: word (group, m, kq)
    plane of 2 bits: word (group, m), bits 2 kq of each nibble
    plane of 1 bit:  word (group),    bit 2 m + kq of each nibble

Words of a plane, slowest index first: [word / 4][g][t][word % 4], 16 bytes per lane at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.kv_codec.quantised_layer import BLOCK

__all__ = ["PLANES", "pack_planes", "unpack_planes"]

PLANES = {4: (4,), 3: (2, 1), 2: (2,)}  # bits of each plane, lowest bits of a code first


def pack_planes(codes: Tensor, bits: int, is_v: bool) -> Tensor:
    """Pack codes [..., 64, D] of K or V, integers in [0, 2^bits), into words [..., 2 D bits] int32."""
    head_dim = codes.shape[-1]
    x = codes.reshape(-1, BLOCK, head_dim).to(torch.int64)
    if bits == 4:
        x = torch.where(x >= 8, x - 8, 15 - x)
    planes, shift = [], 0
    for width in PLANES[bits]:
        fields = _by_field(x >> shift & (1 << width) - 1, width, is_v).flatten(1).unflatten(1, (-1, 32 // width))
        words = (fields << torch.arange(0, 32, width, device=x.device)).sum(-1)
        words = words.unflatten(1, (-1, 4, 32)).transpose(2, 3).flatten(1)
        planes.append(torch.where(words >= 2**31, words - 2**32, words).to(torch.int32))
        shift += width
    return torch.cat(planes, 1).reshape(*codes.shape[:-2], -1)


def unpack_planes(words: Tensor, bits: int, head_dim: int, is_v: bool) -> Tensor:
    """Unpack words [..., 2 D bits] into codes [..., 64, D] int32; the inverse of `pack_planes`."""
    codes = torch.zeros(words.shape[:-1].numel(), BLOCK, head_dim, dtype=torch.int32, device=words.device)
    shift = 0
    planes = words.reshape(-1, words.shape[-1]).split([2 * head_dim * width for width in PLANES[bits]], 1)
    for width, plane in zip(PLANES[bits], planes, strict=True):
        x = plane.unflatten(1, (-1, 32, 4)).transpose(2, 3).flatten(1)  # word (group ...), lane
        x = x[..., None] >> torch.arange(0, 32, width, device=words.device, dtype=torch.int32) & (1 << width) - 1
        codes |= _from_fields(x, width, head_dim, is_v) << shift
        shift += width
    if bits == 4:
        codes = torch.where(codes >= 8, 15 - codes, codes + 8)
    return codes.reshape(*words.shape[:-1], BLOCK, head_dim)


# Axes. K: a token is (tile, rh, g), a channel (p, m, kq, i, t, kh). V: a token is (m, kq, jl, t, jh), a channel
# (tile, rh, g). Sizes: (rh, g) = (2, 8), (m, kq) = (2, 2), (i, t, kh) = (jl, t, jh) = (2, 4, 2).
_K_SIZES, _V_SIZES = (4, 2, 8, -1, 2, 2, 2, 4, 2), (2, 2, 2, 4, 2, -1, 2, 8)
# For each width of a plane the order (word, g, t, nibble, field), as positions in the sizes above.
_K_ORDER = {4: (0, 3, 4, 5, 2, 7, 1, 8, 6), 2: (0, 3, 4, 2, 7, 1, 8, 6, 5), 1: (0, 3, 2, 7, 1, 8, 6, 4, 5)}
_V_ORDER = {4: (5, 0, 1, 7, 3, 6, 4, 2), 2: (5, 0, 7, 3, 6, 4, 2, 1), 1: (5, 7, 3, 6, 4, 2, 0, 1)}


def _by_field(x: Tensor, width: int, is_v: bool) -> Tensor:
    """Order codes [N, 64, D] as words, lanes and fields."""
    sizes, order = (_V_SIZES, _V_ORDER) if is_v else (_K_SIZES, _K_ORDER)
    split = (x.unflatten(1, sizes[:5]).unflatten(-1, sizes[5:])) if is_v else x.unflatten(1, sizes[:3])
    if not is_v:
        split = split.unflatten(-1, sizes[3:])
    fields: Tensor = split.permute(0, *(1 + axis for axis in order[width]))
    return fields


def _from_fields(x: Tensor, width: int, head_dim: int, is_v: bool) -> Tensor:
    """The inverse of `_by_field`, from [N, words and lanes, fields] to [N, 64, D]."""
    sizes, order = (_V_SIZES, _V_ORDER[width]) if is_v else (_K_SIZES, _K_ORDER[width])
    known = [size if size > 0 else head_dim // (16 if is_v else 64) for size in sizes]
    x = x.reshape(x.shape[0], *(known[axis] for axis in order))
    inverse = [order.index(axis) for axis in range(len(order))]
    return x.permute(0, *(1 + axis for axis in inverse)).reshape(x.shape[0], BLOCK, head_dim)
