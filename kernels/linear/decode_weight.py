"""A quantised weight in the order in which the decode projections read it, and its exact values.

A *tile* is 16 rows: eight rows from `r` on, and eight rows from `r + stride` on. So a tile of QKV holds both channels
of the pairs that RoPE rotates (stride D / 2), one of gate and up holds rows of both (stride I), and of others 16 rows
that follow each other (stride 8). A tile is stored as *lines* of 512 bytes, one after the other along the inputs. A
line is 16 bytes, four words, for each lane `4 g + t` of a warp (mma_tile.py), with inputs `8 t .. 8 t + 7` of each 32:

    int4   64 inputs. Words 0 and 1: rows g and g + 8, inputs 0 .. 31 of the line; words 2 and 3: inputs 32 .. 63.
           Bits 4 p .. 4 p + 3 of a word hold input 2 p of its eight, bits 16 + 4 p .. 16 + 4 p + 3 input 2 p + 1.
    fp8    32 inputs. Words 0 and 1: row g, the first and the last four of the eight inputs; words 2 and 3: row g + 8.
           Bytes 0 .. 3 of a word hold inputs 2, 0, 3, 1 of its four (e4m3).

So a pair of neighbouring inputs lies in the same bits of both halves of a word, where few instructions make two numbers
of 16 bits of it.

A word of 32 bits belongs to each row and group of inputs: the scale in fp32; for int4 its last four bits are the zero
point. The lines of two groups are followed by a quarter of a line with their words, [g, group of the two, row g or
g + 8]: 16 bytes of a lane, the same for all t. So lines and scales are one stream, in which a *block* is two groups.
If a whole row is one group, its scale lies elsewhere, and a block is one line.

    value[row, input] = (code - zero) * scale
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

__all__ = ["K_BLOCK", "TILE_ROWS", "DecodeWeight", "WeightFormat", "block_lines", "fits", "pack_weight", "packed_bytes"]

WeightFormat = Literal["fp8", "int4"]
TILE_ROWS = 16
K_BLOCK = 32  # inputs of two instructions; scales of groups are for one, two or four of them
_LARGEST_GROUP = {"fp8": 64, "int4": 128}  # inputs
_LINE_INPUTS = {"fp8": 32, "int4": 64}
_LINE_WORDS = 128
_FP8_BYTES = [2, 0, 3, 1]  # the input, of four, that a byte of a word holds
_INT4_NIBBLES = [0, 2, 4, 6, 1, 3, 5, 7]  # the input, of eight, that a nibble of a word holds
_ZERO_BITS = 15  # of a scale's word
_NAN_BITS = 0x7FC00000
_NUMBERS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class DecodeWeight:
    """A matrix [out, in] as above; `shape` is its real one, without padding."""

    data: Tensor  # [tiles, blocks, words of a block] int32
    scales: Tensor | None  # [tiles, 8, 2, 2] fp32, one group to a row: the second group of the two is 0
    format: WeightFormat
    shape: tuple[int, int]
    stride: int  # rows from the first to the second half of a tile
    group: int  # k-blocks of a group: 1, 2 or 4; 0: a whole row

    @property
    def block_lines(self) -> int:
        """Lines of a block."""
        return int(block_lines(self.format, self.group))

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def row_slice(self, start: int, stop: int) -> DecodeWeight:
        """Rows `[start, stop)`; stride 8, and `start` is a multiple of 16. It shares memory."""
        assert self.stride == TILE_ROWS // 2
        assert start % TILE_ROWS == 0
        tiles = slice(start // TILE_ROWS, -(-stop // TILE_ROWS))
        scales = None if self.scales is None else self.scales[tiles]
        return replace(self, data=self.data[tiles], scales=scales, shape=(stop - start, self.shape[1]))

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The values [out, in]. Their product with the scale is rounded to fp32, then to dtype."""
        tiles = self.data.shape[0]
        lines = self.data[..., : self.block_lines * _LINE_WORDS].reshape(tiles, -1, 8, 4, 4).view(torch.uint8)
        if self.format == "fp8":
            order = torch.tensor(_FP8_BYTES).argsort().tolist()
            codes = lines.unflatten(-1, (2, 2, 4))[..., order].permute(0, 4, 2, 1, 3, 5, 6)
            values = codes.contiguous().view(torch.float8_e4m3fn).float()
        else:
            order = torch.tensor(_INT4_NIBBLES).argsort().tolist()
            nibbles = torch.stack((lines & 15, lines >> 4), dim=-1).flatten(-2).unflatten(-1, (2, 2, 8))[..., order]
            values = nibbles.permute(0, 5, 2, 1, 4, 3, 6).float()
        values = values.reshape(tiles, 2, 8, -1)  # [tiles, half, g, inputs]
        if self.scales is None:
            words, size = self.data[..., self.block_lines * _LINE_WORDS :], K_BLOCK * self.group
        else:
            words, size = self.scales.view(torch.int32)[:, None], values.shape[-1]
        words = words.reshape(tiles, -1, 8, 2, 2).permute(0, 4, 2, 1, 3).reshape(tiles, 2, 8, -1)
        words = words.repeat_interleave(size, -1)[..., : values.shape[-1]]  # [tiles, half, g, inputs]
        if self.format == "int4":
            values -= (words & _ZERO_BITS).float()
            words = words & ~_ZERO_BITS
        values *= words.view(torch.float32)
        rows = values.view(-1, self.stride // 8, 2, 8, values.shape[-1]).transpose(1, 2).flatten(0, 3)
        result: Tensor = rows[: self.shape[0], : self.shape[1]].to(dtype)
        return result


@triton.constexpr_function
def block_lines(weight_format: str, group: int) -> int:
    """Lines of a block: of two groups, or one."""
    return max(1, (group if weight_format == "int4" else 2 * group))


def fits(shape: tuple[int, int], stride: int, group_size: int) -> bool:
    """Whether a matrix has this form: whole halves of tiles, lanes with whole inputs, groups that are k-blocks.

    Args:
        stride: 8, or a divisor of half the rows.  group_size: inputs of a group, up to `in`.
    """
    is_whole = stride % 8 == 0 and (stride == 8 or shape[0] % (2 * stride) == 0)
    has_groups = group_size in (32, 64) or group_size % 128 == 0 or group_size >= shape[1]
    return is_whole and shape[1] % 8 == 0 and has_groups


def packed_bytes(shape: tuple[int, int], stride: int, weight_format: WeightFormat, group_size: int) -> int:
    """Bytes of a `DecodeWeight`; see `pack_weight`."""
    rows = -(-shape[0] // TILE_ROWS) * TILE_ROWS if stride == 8 else shape[0]
    group = _k_blocks_of_group(shape[1], weight_format, group_size)
    lines = block_lines(weight_format, group)
    blocks = -(-shape[1] // (lines * _LINE_INPUTS[weight_format]))
    of_tile = blocks * (4 * _LINE_WORDS * lines + (128 if group else 0)) + (0 if group else 128)
    return int(rows // TILE_ROWS * of_tile)


def _k_blocks_of_group(num_inputs: int, weight_format: WeightFormat, group_size: int) -> int:
    """K-blocks of a group, so few that a block has four lines: larger groups repeat a scale. 0: one for each row."""
    largest = _LARGEST_GROUP[weight_format] // K_BLOCK
    if group_size >= num_inputs:
        return 0 if weight_format == "fp8" else largest
    return min(group_size // K_BLOCK, largest)


def pack_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, weight_format: WeightFormat, group_size: int, stride: int = 8
) -> DecodeWeight:
    """Bring a quantised matrix into the order of the decode kernels.

    Args:
        codes: [out, in] float8_e4m3fn, or uint8 codes below 16.
        scales: [out, groups]; those of int4 keep 20 significant bits, which all numbers of 16 bits have. Groups of fp8
            with a NaN become NaN as a whole.
        zeros: [out, groups] uint8, for int4 only; None: 8.
        group_size: inputs of a group, up to `in`.
        stride: see above.
    Raises:
        ValueError: shapes do not fit (`fits`).
    """
    shape = (codes.shape[0], codes.shape[1])
    if not fits(shape, stride, group_size):
        raise ValueError(f"weight: no layout for {list(shape)} with stride {stride} and groups of {group_size}")
    group = _k_blocks_of_group(shape[1], weight_format, group_size)
    if weight_format == "fp8":
        scales = _with_nan(scales.float(), codes, group_size)
    words = scales.float().contiguous().view(torch.int32)
    points = torch.full_like(words, 8) if zeros is None else zeros.int()
    if group:
        repeats, groups = -(-group_size // (K_BLOCK * group)), -(-shape[1] // (K_BLOCK * group))
        words, points = (each.repeat_interleave(repeats, 1)[:, :groups] for each in (words, points))
    padding = -shape[1] % (block_lines(weight_format, group) * _LINE_INPUTS[weight_format])
    if weight_format == "int4":
        words = torch.where(words.view(torch.float32).isnan(), _NAN_BITS, (words + 8) & ~_ZERO_BITS) | points
        # Codes behind the last input are zero points: their values are 0.
        codes = torch.cat([codes, points[:, -1:].to(torch.uint8).expand(-1, padding)], 1) if padding else codes
    else:
        codes = F.pad(codes.view(torch.uint8), (0, padding))
    words = F.pad(words, (0, words.shape[1] % 2))
    codes, words = _tiles(codes, stride), _tiles(words, stride)  # [tiles, half, g, ...]
    tiles = codes.shape[0]
    if weight_format == "int4":
        nibbles = codes.view(tiles, 2, 8, -1, 2, 4, 8)[..., _INT4_NIBBLES].unflatten(-1, (4, 2))
        data = (nibbles[..., 0] | (nibbles[..., 1] << 4)).permute(0, 3, 2, 5, 4, 1, 6)
    else:
        data = codes.view(tiles, 2, 8, -1, 4, 2, 4)[..., _FP8_BYTES].permute(0, 3, 2, 4, 1, 5, 6)
    data = data.reshape(tiles, -1, block_lines(weight_format, group) * 4 * _LINE_WORDS).view(torch.int32)
    words = words.view(tiles, 2, 8, -1, 2).permute(0, 3, 2, 4, 1)
    if group:
        return DecodeWeight(torch.cat([data, words.flatten(2)], 2), None, weight_format, shape, stride, group)
    scale_words = words[:, 0].contiguous().view(torch.float32)
    return DecodeWeight(data, scale_words, weight_format, shape, stride, group)


def _with_nan(scales: Tensor, codes: Tensor, group_size: int) -> Tensor:
    """Scales [out, groups] with NaN for groups that have a code of NaN, which kernels would read as 480."""
    found, group_size = [], min(group_size, codes.shape[1])
    for rows in codes.view(torch.uint8).split(max(1, _NUMBERS_AT_ONCE // codes.shape[1])):
        is_nan = F.pad((rows & 0x7F) == 0x7F, (0, -rows.shape[1] % group_size))
        found.append(is_nan.unflatten(1, (-1, group_size)).any(-1))
    return torch.where(torch.cat(found), torch.nan, scales)


def _tiles(rows: Tensor, stride: int) -> Tensor:
    """[out, n] -> [tiles, 2, 8, n], padded with zeros."""
    padded = F.pad(rows, (0, 0, 0, -rows.shape[0] % TILE_ROWS)) if stride == 8 else rows
    return padded.view(-1, 2, stride // 8, 8, rows.shape[1]).transpose(1, 2).reshape(-1, 2, 8, rows.shape[1])
