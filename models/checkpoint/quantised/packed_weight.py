"""The canonical form of a quantised weight: one layout for every file format, and its exact values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

__all__ = ["FP8_MAX", "PackedFormat", "PackedWeight", "join_rows", "pack_nibbles", "unpack_nibbles"]

PackedFormat = Literal["fp8", "int8", "int4"]
FP8_MAX = 448.0  # largest e4m3 number
_PIECE_NUMBERS = 1 << 24  # numbers that are dequantised at once
_MIDDLE = {"int4": 8, "int8": 128}  # the zero point of symmetric codes


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] uint8 codes below 16, n even -> [..., n / 2] uint8, the first of two in the low bits."""
    pairs: Tensor = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """[..., n / 2] uint8 -> [..., n] uint8 codes below 16, low bits first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class PackedWeight:
    """A quantised matrix [out, in] whose values are, for row r and stored column j in group g,

        value[r, c] = (code[r, j] - zero[r, g]) * scale[r, g],   c = perm[j],   g = column_groups[j]

    Without `perm`, c = j; without `column_groups`, g = j // group_size, and the last group may be smaller. FP8 codes
    are e4m3 numbers and have no zero points. INT4 and INT8 codes are unsigned; without `zeros` the zero point
    is 8 or 128.

    Rows are stored whole and side by side, so that a product of one row reads its codes and scales in order. A scale of
    several rows (FP8 per tensor, or blocks) is repeated for each row: rows can be cut anywhere.
    """

    data: Tensor  # fp8: [out, in] float8_e4m3fn; int8: [out, in] uint8; int4: [out, in / 2] uint8, see `pack_nibbles`
    scales: Tensor  # [out, groups] fp32, bf16 or fp16
    zeros: Tensor | None  # [out, groups] uint8
    format: PackedFormat
    shape: tuple[int, int]  # out, in
    group_size: int
    perm: Tensor | None = None  # [in] int32: stored columns are sorted by group; None: they are in order
    column_groups: Tensor | None = None  # [in] int32, ascending; given only if groups have other sizes

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        packed_format: PackedFormat,
        group_size: int,
        column_groups: Tensor | None = None,
    ) -> Self:
        """Sort the columns by group if they are not, and pack their codes.

        Args:
            codes: [out, in] uint8, or float8_e4m3fn.
            scales: [out, groups].  zeros: [out, groups] uint8, or None.
            group_size: columns of a group, up to `in`.
            column_groups: [in] integers, the group of each column; None: `j // group_size`.
        Raises:
            ValueError: `in` is odd with 4-bit codes, or shapes do not fit.
        """
        shape = (codes.shape[0], codes.shape[1])
        perm = groups = None
        if column_groups is not None:
            ordered, order = column_groups.sort(stable=True)
            used, groups = ordered.unique_consecutive(return_inverse=True)
            # Groups without a column here are left out: a rank may hold few columns of many groups.
            scales = scales[:, used]
            zeros = None if zeros is None else zeros[:, used]
            places = torch.arange(shape[1], device=codes.device)
            if not torch.equal(order, places):
                codes, perm = codes[:, order], order.int()
            groups = None if torch.equal(groups, places // group_size) else groups.int()
        num_groups = scales.shape[1]
        if groups is None and num_groups != -(-shape[1] // group_size):
            raise ValueError(f"scales: expected {-(-shape[1] // group_size)} groups a row, found {num_groups}")
        if packed_format == "int4" and shape[1] % 2:
            raise ValueError(f"codes: expected an even number of columns for 4 bits, found {shape[1]}")
        data = pack_nibbles(codes) if packed_format == "int4" else codes
        return cls(
            data.contiguous(), scales.contiguous(), None if zeros is None else zeros.contiguous(), packed_format,
            shape, group_size, perm, groups,
        )  # fmt: skip

    def codes(self) -> Tensor:
        """[out, in] uint8 or float8_e4m3fn codes, in stored order."""
        return unpack_nibbles(self.data) if self.format == "int4" else self.data

    def rows(self, start: int, stop: int) -> Self:
        """The rows start .. stop, a view."""
        if not 0 <= start < stop <= self.shape[0]:
            raise ValueError(f"rows: expected a range within 0 .. {self.shape[0]}, found {start} .. {stop}")
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return replace(
            self, data=self.data[start:stop], scales=self.scales[start:stop], zeros=zeros,
            shape=(stop - start, self.shape[1]),
        )  # fmt: skip

    def take_rows(self, rows: Tensor) -> Self:
        """The rows of these numbers, in their order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(
            self, data=self.data.view(torch.uint8)[rows].view(self.data.dtype), scales=self.scales[rows], zeros=zeros,
            shape=(len(rows), self.shape[1]),
        )  # fmt: skip

    def _groups(self) -> Tensor:
        """[in] int64, the group of each stored column."""
        if self.column_groups is not None:
            return self.column_groups.long()
        return torch.arange(self.shape[1], device=self.data.device) // self.group_size

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The values, [out, in], with input channels in order.

        `code - zero` is exact. Its product with the scale is rounded to fp32, and that to `dtype`, both to nearest,
        ties to even. With scales of 16 bits the fp32 product is exact, so that a value is rounded once.
        """
        result = torch.empty(self.shape, dtype=dtype, device=self.data.device)
        step = max(1, _PIECE_NUMBERS // self.shape[1])
        for row in range(0, self.shape[0], step):
            stop = min(row + step, self.shape[0])
            values = self.rows(row, stop)._values().to(dtype)
            if self.perm is None:
                result[row:stop] = values
            else:
                result[row:stop].index_copy_(1, self.perm.long(), values)
        return result

    def _values(self) -> Tensor:
        """[out, in] fp32, in stored order."""
        values, scales = self.codes().float(), self.scales.float()
        zeros = None if self.zeros is None else self.zeros.float()
        if self.column_groups is None and self.shape[1] % self.group_size == 0:  # no need to repeat scales
            grouped: Tensor = values.unflatten(1, (-1, self.group_size))
            scales, zeros = scales[..., None], None if zeros is None else zeros[..., None]
        else:
            groups = self._groups()
            grouped, scales, zeros = values, scales[:, groups], None if zeros is None else zeros[:, groups]
        if self.format != "fp8":
            grouped -= _MIDDLE[self.format] if zeros is None else zeros
        grouped *= scales
        return values


def join_rows(parts: Sequence[PackedWeight]) -> PackedWeight:
    """One weight of the rows of several, such as q, k and v; each row keeps its own scales.

    Raises:
        ValueError: the parts differ in format, groups, order of columns, or in whether they have zero points.
    """
    first = parts[0]

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b or (a is not None and b is not None and torch.equal(a, b))

    for part in parts[1:]:
        alike = (part.format, part.shape[1], part.group_size, part.zeros is None) == (
            first.format, first.shape[1], first.group_size, first.zeros is None,
        )  # fmt: skip
        if not alike or not same(part.perm, first.perm) or not same(part.column_groups, first.column_groups):
            raise ValueError("parts: expected one format, one grouping and one order of columns")
    joined: dict[str, Any] = {"shape": (sum(part.shape[0] for part in parts), first.shape[1])}
    for name in ("data", "scales", "zeros"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is not None:
            joined[name] = torch.cat(tensors)
    return replace(first, **joined)
