"""Memory layout of the quantised KV cache, to the bit: `FlashQLayer` and the records in it.

A record stores one block, 64 tokens of one KV head, as 32-bit words. Bit 0 of a word comes first.

    [K codes: 2 D b][K parameters: D / 2][V codes: 2 D b][V parameters: D / 2]      words, D = head_dim, b = 4 or 2 bits

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

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alspec.sas import Softmax

__all__ = [
    "BLOCK",
    "HEAD_DIMS",
    "PER_HEAD",
    "BlockCodes",
    "FlashQLayer",
    "pack_record",
    "record_words",
    "unpack_record",
]

BLOCK = 64  # tokens per block, and per record
BITS = (4, 2)
HEAD_DIMS = (64, 128)
# Kernel arguments that hold a few bytes per head. With one or two heads, a layer's part of the stack may have any
# alignment. They are not specialised on alignment, so that one compiled kernel serves all layers.
PER_HEAD = ["offset_ptr", "bits_ptr", "scales_ptr", "tail_scale_ptr"]


@dataclass(frozen=True)
class FlashQLayer:
    """Quantised cache of one layer, or a stack of layers. B requests, H KV heads of this rank, capacity NB blocks.

    With n = seq_len, including the newest token, blocks `j < (n - 1) // 64` are records. The 1 to 64 tokens after them
    lie in `tail` from index 0.

    A stack holds several layers: each tensor has a leading dimension L and is contiguous.
    """

    # [W] int32: all records; block j of (b, h) begins at word offset[b, h] + j record_words(bits[b, h], D)
    words: Tensor
    offset: Tensor  # [B, H] int64, multiples of 4
    bits: Tensor  # [B, H] int32: 4 or 2
    scales: Tensor  # [B, H, NB, 2] fp32: stage-1 scale of each block's K and V
    tail: Tensor  # [B, H, 2, 64, D] int8: stage-1 codes of the newest tokens, K then V
    tail_scale: Tensor  # [B, H, 2] fp32: universal scale of K and V
    softmax: Softmax = "exact"  # which softmax decode attention uses over this cache

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def batch_size(self) -> int:
        """B, requests."""
        return self.tail.shape[-5]

    @property
    def num_kv_heads(self) -> int:
        """H, KV heads of this rank."""
        return self.tail.shape[-4]

    @property
    def head_dim(self) -> int:
        """D, channels of a head."""
        return self.tail.shape[-1]

    @property
    def num_blocks(self) -> int:
        """NB, capacity in blocks of each request and head."""
        return self.scales.shape[-2]

    def select(self, layer: int) -> FlashQLayer:
        """Return one layer of a stack, as views."""
        return FlashQLayer(**{name: tensor[layer] for name, tensor in self.tensors.items()}, softmax=self.softmax)


class BlockCodes(NamedTuple):
    """Stage-2 codes of blocks of K or V: `X / s = codes * s_int + z`."""

    codes: Tensor  # [..., 64, D] integers in [0, 2^b)
    s_int: Tensor  # [..., D] integers in [1, 16] for 4 bits, [1, 80] for 2 bits
    z: Tensor  # [..., D] integers in [-128, 127]


def record_words(bits: int, head_dim: int) -> int:
    """Return the size of one record in 32-bit words.

    Raises:
        ValueError: no kernel supports `bits` or `head_dim`.
    """
    _check(bits, head_dim)
    return 4 * head_dim * bits + head_dim


def code_shift(bits: int, head_dim: int) -> Tensor:
    """For each channel, the bit of the byte at which K's codes begin: [D] int64."""
    cf, cw, _, _ = _tiles(bits, head_dim)
    tile = torch.arange(head_dim) // 16
    return bits * (tile // cw % min(cf, 8 // bits))


def pack_record(k: BlockCodes, v: BlockCodes, bits: int) -> Tensor:
    """Pack blocks of K and V, of the same leading sizes, into records [..., record_words(bits, D)] int32."""
    head_dim = k.codes.shape[-1]
    _check(bits, head_dim)
    lead = k.codes.shape[:-2]
    parts = [
        _pack_codes(k.codes, bits).reshape(*lead, -1),
        *(_pack_bytes(_k_order(value)) for value in (k.s_int, k.z + 128)),
        _pack_codes(v.codes, bits, transposed=True).reshape(*lead, -1),
        *(_pack_bytes(_v_order(value)) for value in (v.s_int, v.z + 128)),
    ]
    return torch.cat(parts, -1)


def unpack_record(words: Tensor, bits: int, head_dim: int) -> tuple[BlockCodes, BlockCodes]:
    """Unpack records [..., record_words(bits, D)] int32 into K and V, all int32; the inverse of `pack_record`."""
    _check(bits, head_dim)
    codes, params = 2 * head_dim * bits, head_dim // 4
    k_codes, k_s, k_z, v_codes, v_s, v_z = words.split(2 * [codes, params, params], -1)
    k = BlockCodes(
        _unpack_codes(k_codes, bits, head_dim), _k_channels(_unpack_bytes(k_s)), _k_channels(_unpack_bytes(k_z)) - 128
    )
    v = BlockCodes(
        _unpack_codes(v_codes, bits, head_dim, transposed=True),
        _v_channels(_unpack_bytes(v_s)),
        _v_channels(_unpack_bytes(v_z)) - 128,
    )
    return k, v


def _check(bits: int, head_dim: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits: expected one of {BITS}, found {bits}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected one of {HEAD_DIMS} for a quantised cache, found {head_dim}")


def _tiles(bits: int, head_dim: int) -> tuple[int, int, int, int]:
    """CF, CW, TF, TW: channel tiles and token tiles, each within one half of a word (F) and across words (W)."""
    fields, channel_tiles = 16 // bits, head_dim // 16
    cf = min(fields, channel_tiles)
    return cf, channel_tiles // cf, fields // cf, 4 * cf // fields


# Axes of the permutations. K: a token is (tw, tf, rh, g), a channel (cf, cw, kh, t, i). V: a token is
# (tile, kh, jl, t, jh), a channel (cw, f, rh, g). Sizes: (rh, g) = (2, 8), (kh, t, i) = (2, 4, 2).
def _pack_codes(codes: Tensor, bits: int, transposed: bool = False) -> Tensor:
    """Pack codes [..., 64, D] into words [blocks, W] int32. `transposed`: V's order."""
    x = codes.reshape(-1, *codes.shape[-2:]).to(torch.int64)
    if transposed:
        x = x.view(-1, 2, 2, 2, 4, 2, codes.shape[-1] * bits // 128, 8 // bits, 2, 8)
        x = x.permute(0, 6, 1, 9, 4, 2, 8, 5, 3, 7)
    else:
        cf, cw, tf, tw = _tiles(bits, codes.shape[-1])
        x = x.view(-1, tw, tf, 2, 8, cf, cw, 2, 4, 2).permute(0, 1, 6, 4, 8, 7, 3, 9, 2, 5)
    shifts = torch.arange(0, 32, bits, device=x.device)
    return _signed((x.reshape(x.shape[0], -1, 32 // bits) << shifts).sum(-1))


def _unpack_codes(words: Tensor, bits: int, head_dim: int, transposed: bool = False) -> Tensor:
    """Unpack words [..., W] into codes [..., 64, D] int32; the inverse of `_pack_codes`."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    x = words.reshape(-1, words.shape[-1], 1) >> shifts & (1 << bits) - 1
    if transposed:
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
