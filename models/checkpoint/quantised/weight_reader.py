"""What the readers of all formats share: the tensors of one module, and codes in 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from alspec.models.checkpoint.quantised.packed_weight import PackedFormat, PackedWeight, unpack_nibbles
from alspec.models.checkpoint.quantised.quantisation_config import WeightScheme
from alspec.models.checkpoint.safetensors_header import ExpectedTensor

__all__ = ["Range", "StoredTensors", "WeightReader", "ceil_div", "unpack_words"]

Range = tuple[int, int]  # start, stop


class StoredTensors(Protocol):
    """The tensors of one module in the files."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name, such as `weight_scale`."""

    def read(self, name: str, *ranges: Range) -> Tensor:
        """The part of a tensor that ranges of its first dimensions select, on the device where weights go."""

    def read_order(self, name: str, group_size: int) -> Tensor | None:
        """The group of each input channel, [in] int64; None if channels are in order, or if there is no such tensor.

        Raises:
            UserError: a group that does not exist.
        """


@dataclass(frozen=True)
class WeightReader:
    """Reads one quantised weight [out, in] of a file format into the canonical form."""

    scheme: WeightScheme
    shape: tuple[int, int]  # out, in

    @property
    def group_size(self) -> int:
        """Input channels of a group, `in` for a whole row."""
        size = self.scheme.group_size
        return self.shape[1] if size == -1 else min(size, self.shape[1])

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return ceil_div(self.shape[1], self.group_size)

    def tensors(self) -> dict[str, ExpectedTensor]:
        """The tensors that the files must hold, by the last part of their names."""
        raise NotImplementedError

    def read(self, stored: StoredTensors, rows: Range, columns: Range) -> PackedWeight:
        """The canonical form of a part; reads only that part of the files.

        Raises:
            ValueError: the columns cut a group.
        """
        raise NotImplementedError

    def groups_of(self, columns: Range, order: Tensor | None) -> tuple[Range, Tensor | None]:
        """The groups that columns belong to, and the index of each column's group among them.

        The index is None where whole groups follow each other. Only of a weight whose scheme has an order may columns
        cut a group: its groups may follow each other all the same.
        """
        start, stop = columns
        if order is not None:
            return (0, self.num_groups), order[start:stop]
        size, width = self.group_size, self.shape[1]
        if size == width:
            return (0, 1), None
        groups = start // size, ceil_div(stop, size)
        if start % size or (stop % size and stop != width):
            if not self.scheme.has_order:
                raise ValueError(f"columns: expected multiples of the groups of {size}, found {start} .. {stop}")
            return groups, torch.arange(start, stop) // size - groups[0]
        return groups, None

    def packed(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, columns: Range
    ) -> PackedWeight:
        """The canonical form of unsigned codes [out, in]; see `PackedWeight.from_codes`."""
        group_size = min(self.group_size, columns[1] - columns[0]) if order is None else self.group_size
        order = None if order is None else order.to(codes.device)
        packed_format: PackedFormat = "int4" if self.scheme.bits == 4 else "int8"
        return PackedWeight.from_codes(codes, scales, zeros, packed_format, group_size, order)


def ceil_div(number: int, divisor: int) -> int:
    """`number / divisor`, rounded up."""
    return -(-number // divisor)


def unpack_words(words: Tensor, bits: int, dim: int, wanted: Range) -> Tensor:
    """Unpack the codes of 32-bit words, lowest bits first, and keep those in the range `wanted`.

    Args:
        words: [n, m] int32.  bits: 4 or 8.  dim: along which codes are packed.
        wanted: range of codes, counted from the first code of the first word.
    Returns:
        [n, m] uint8, with `wanted` codes along `dim`.
    """
    # A copy, because a dimension of size 1 may have any stride in a tensor that counts as contiguous.
    data = words.movedim(dim, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)  # lowest byte first
    codes = unpack_nibbles(data) if bits == 4 else data
    return codes[..., wanted[0] : wanted[1]].movedim(-1, dim)
