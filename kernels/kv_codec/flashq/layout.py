"""Memory layout of the quantised KV cache, to the bit: the records of FlashQ.

A record stores one block, 64 tokens of one KV head, as 32-bit words. Bit 0 of a word comes first. A side of it is

    [codes: 2 D b][parameters: D / 2]      words, D = head_dim, b = 4, 3 or 2 bits

Codes of 3 bits are in planes (code_planes.py). The following is the order of 4 and of 2 bits.

Decode attention computes `S^T = K q^T` and `O^T = V^T P^T` with the instruction m16n8k32, whose left operand A is
[16, 32] bytes. K's codes follow the register order of m16n8k16, whose A is [16, 16] halves. Read as bytes, that is
another order of channels; q uses the same order. Lane `4 g + t` of a warp (g < 8, t < 4) holds four 32-bit registers of
A, (kh, rh) in the order 00, 01, 10, 11.

The order of codes is chosen so that 16 bytes loaded by one lane are its registers for several such tiles. Masks then
separate the tiles.

- K [64 tokens, D channels]: a register has rows `8 rh + g` and columns `8 kh + 2 t + i`; i = 0 is its lower half, i = 1
  its upper half. There are 4 token tiles and D / 16 channel tiles. A half holds F = 16 / b codes. Code f, at bits
  `b f`, belongs to channel tile `cf CW + cw` and token tile `tw TF + tf`, where `f = tf CF + cf`, CF = min(F, D / 16),
  CW = D / 16 / CF, TF = F / CF. Words, slowest index first: [tw][cw][g][t][kh][rh].
- V^T [D channels, 64 tokens]: a register has rows `8 rh + g`; its byte `jl + 2 jh` is token `16 kh + 8 jl + 2 t + jh`
  of 32. (A sum over tokens may use any order; this one is the order of P's registers.) There are 2 token tiles and
  D / 16 channel tiles. A byte holds F = 8 / b codes. Code f, at bits `b f`, belongs to channel tile `cw F + f`. Words,
  slowest index first: [cw][token tile][g][t][kh][rh].

So the position of a code in its byte depends only on its channel: for K, `code_shift(c) = b ((c / 16 / CW) % (8 / b))`;
for V, `b ((c / 16) % F)`. The kernel masks codes but does not shift them. It divides the channel's scale by this power
of two instead.

Parameters are bytes: D of `s_int`, then D of `z + 128`, each in the order in which lanes use them. K's are factors of
q, the right operand: [t][channel tile][kh][i], channel `16 tile + 8 kh + 2 t + i`. V's are factors of the rows of the
product: [g][channel tile][rh], channel `16 tile + 8 rh + g`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alspec.kernels.kv_codec.code_planes import pack_planes, unpack_planes
from alspec.kernels.kv_codec.quantised_layer import BLOCK

__all__ = [
    "BlockCodes",
    "pack_side",
    "unpack_side",
]


class BlockCodes(NamedTuple):
    """Stage-2 codes of blocks of K or V: `X / s = codes * s_int + z`."""

    codes: Tensor  # [..., 64, D] integers in [0, 2^b)
    s_int: Tensor  # [..., D] integers in [1, 16] for 4 bits, [1, 34] for 3, [1, 80] for 2
    z: Tensor  # [..., D] integers in [-128, 127]


def code_shift(bits: int, head_dim: int) -> Tensor:
    """For each channel, the bit of the byte at which K's codes begin: [D] int64."""
    cf, cw, _, _ = _tiles(bits, head_dim)
    tile = torch.arange(head_dim) // 16
    return bits * (tile // cw % min(cf, 8 // bits))


def pack_side(side: BlockCodes, bits: int, is_v: bool) -> Tensor:
    """Pack blocks of K or V into sides of records, [..., side_words("flashq", bits, D)] int32."""
    order = _v_order if is_v else _k_order
    parts = [
        pack_planes(side.codes, bits, is_v) if bits == 3 else _pack_codes(side.codes, bits, is_v),
        *(_pack_bytes(order(value)) for value in (side.s_int, side.z + 128)),
    ]
    return torch.cat([part.reshape(*side.codes.shape[:-2], -1) for part in parts], -1)


def unpack_side(words: Tensor, bits: int, head_dim: int, is_v: bool) -> BlockCodes:
    """Unpack sides of records into blocks, all int32; the inverse of `pack_side`."""
    codes, s_int, z = words.split([2 * head_dim * bits, head_dim // 4, head_dim // 4], -1)
    unpack, channels = unpack_planes if bits == 3 else _unpack_codes, _v_channels if is_v else _k_channels
    return BlockCodes(
        unpack(codes, bits, head_dim, is_v), channels(_unpack_bytes(s_int)), channels(_unpack_bytes(z)) - 128
    )


def _tiles(bits: int, head_dim: int) -> tuple[int, int, int, int]:
    """CF, CW, TF, TW: channel tiles and token tiles, each within one half of a word (F) and across words (W)."""
    fields, channel_tiles = 16 // bits, head_dim // 16
    cf = min(fields, channel_tiles)
    return cf, channel_tiles // cf, fields // cf, 4 * cf // fields


# Axes of the permutations. K: a token is (tw, tf, rh, g), a channel (cf, cw, kh, t, i). V: a token is
# (tile, kh, jl, t, jh), a channel (cw, f, rh, g). Sizes: (rh, g) = (2, 8), (kh, t, i) = (2, 4, 2).
def _pack_codes(codes: Tensor, bits: int, is_v: bool) -> Tensor:
    """Pack codes [..., 64, D] into words [blocks, W] int32. `is_v`: V's order."""
    x = codes.reshape(-1, *codes.shape[-2:]).to(torch.int64)
    if is_v:
        x = x.view(-1, 2, 2, 2, 4, 2, codes.shape[-1] * bits // 128, 8 // bits, 2, 8)
        x = x.permute(0, 6, 1, 9, 4, 2, 8, 5, 3, 7)
    else:
        cf, cw, tf, tw = _tiles(bits, codes.shape[-1])
        x = x.view(-1, tw, tf, 2, 8, cf, cw, 2, 4, 2).permute(0, 1, 6, 4, 8, 7, 3, 9, 2, 5)
    shifts = torch.arange(0, 32, bits, device=x.device)
    return _signed((x.reshape(x.shape[0], -1, 32 // bits) << shifts).sum(-1))


def _unpack_codes(words: Tensor, bits: int, head_dim: int, is_v: bool) -> Tensor:
    """Unpack words [..., W] into codes [..., 64, D] int32; the inverse of `_pack_codes`."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    x = words.reshape(-1, words.shape[-1], 1) >> shifts & (1 << bits) - 1
    if is_v:
        x = x.view(-1, head_dim * bits // 128, 2, 8, 4, 2, 2, 2, 2, 8 // bits).permute(0, 2, 5, 8, 4, 7, 1, 9, 6, 3)
    else:
        cf, cw, tf, tw = _tiles(bits, head_dim)
        x = x.view(-1, tw, cw, 8, 4, 2, 2, 2, tf, cf).permute(0, 1, 8, 6, 3, 9, 2, 5, 4, 7)
    return x.reshape(*words.shape[:-1], BLOCK, head_dim)


def _split(values: Tensor, *sizes: int) -> Tensor:
    return values.reshape(*values.shape[:-1], *sizes)


def _k_order(values: Tensor) -> Tensor:
    """Reorder channels [..., D] to K's parameter order [t][tile][kh][i]."""
    return _split(values, -1, 2, 4, 2).movedim(-2, -4).flatten(-4)


def _k_channels(values: Tensor) -> Tensor:
    return _split(values, 4, -1, 2, 2).movedim(-4, -2).flatten(-4)


def _v_order(values: Tensor) -> Tensor:
    """Reorder channels [..., D] to V's parameter order [g][tile][rh]."""
    return _split(values, -1, 2, 8).movedim(-1, -3).flatten(-3)


def _v_channels(values: Tensor) -> Tensor:
    return _split(values, 8, -1, 2).movedim(-3, -1).flatten(-3)


def _pack_bytes(values: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 8, device=values.device)
    return _signed((_split(values.to(torch.int64), -1, 4) << shifts).sum(-1))


def _unpack_bytes(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 8, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts & 255).flatten(-2)


def _signed(words: Tensor) -> Tensor:
    """Return the int32 with the same 32 bits as an integer in [0, 2^32)."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
