"""The canonical form against its definition, number by number, and its parts against parts of the values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alspec.models.checkpoint.quantised import packed_weight
from alspec.models.checkpoint.quantised.packed_weight import (
    PackedFormat,
    PackedWeight,
    pack_nibbles,
    unpack_nibbles,
)

FORMATS: list[PackedFormat] = ["fp8", "int8", "int4"]


@dataclass(frozen=True)
class Case:
    """Codes and scales of a weight, with the group of each column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    packed_format: PackedFormat
    group_size: int
    order: Tensor | None

    def packed(self) -> PackedWeight:
        return PackedWeight.from_codes(
            self.codes, self.scales, self.zeros, self.packed_format, self.group_size, self.order
        )

    def values(self) -> Tensor:
        """[out, in] fp32 by the definition, in Python's numbers."""
        rows, columns = self.codes.shape
        result = torch.empty(rows, columns)
        codes, scales = self.codes.double().tolist(), self.scales.double().tolist()
        middle = {"fp8": 0, "int8": 128, "int4": 8}[self.packed_format]
        for row in range(rows):
            for column in range(columns):
                group = column // self.group_size if self.order is None else int(self.order[column])
                zero = middle if self.zeros is None else int(self.zeros[row, group])
                result[row, column] = (codes[row][column] - zero) * scales[row][group]
        return result


@st.composite
def cases(draw: st.DrawFn) -> Case:
    packed_format = draw(st.sampled_from(FORMATS))
    rows, columns = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 20))
    group_size = draw(st.integers(1, columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    has_order = draw(st.booleans())
    width = columns * (draw(st.integers(1, 3)) if has_order else 1)  # a rank may hold some columns of an ordered weight
    num_groups = -(-width // group_size)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scales = (torch.rand(rows, num_groups, generator=generator) + 0.5).to(dtype)
    limit = 16 if packed_format == "int4" else 256
    codes = torch.randint(limit, (rows, columns), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(limit, (rows, num_groups), generator=generator, dtype=torch.uint8)
    if packed_format == "fp8":
        codes = codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn)  # no NaN
    has_zeros = packed_format != "fp8" and draw(st.booleans())
    order = (torch.randperm(width, generator=generator) // group_size)[:columns] if has_order else None
    return Case(codes, scales, zeros if has_zeros else None, packed_format, group_size, order)


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_values_and_parts(case: Case, data: st.DataObject) -> None:
    packed, values = case.packed(), case.values()
    assert torch.equal(packed.dequantise(torch.float32), values)
    assert torch.equal(packed.dequantise(torch.bfloat16), values.bfloat16())
    rows = len(values)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert torch.equal(packed.rows(start, stop).dequantise(torch.float32), values[start:stop])


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_pieces(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are dequantised at a time."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (7, 64), generator=generator, dtype=torch.uint8)
    order = torch.randperm(64, generator=generator) // 32
    case = Case(codes, torch.rand(7, 2, generator=generator), None, "int4", 32, order)
    monkeypatch.setattr(packed_weight, "_PIECE_NUMBERS", 64 * rows_at_once)
    assert torch.equal(case.packed().dequantise(torch.float32), case.values())


def test_layout() -> None:
    """Low bits first; columns sorted by group, and in their order within a group."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x43, 0x65, 0x87]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    order = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1])
    packed = PackedWeight.from_codes(codes, torch.ones(1, 2), None, "int4", 4, order)
    assert packed.perm is not None
    assert packed.perm.tolist() == [1, 3, 4, 6, 0, 2, 5, 7]
    assert packed.column_groups is None
    assert packed.codes().tolist() == [[2, 4, 5, 7, 1, 3, 6, 8]]


def test_ranges_that_do_not_fit() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    packed = PackedWeight.from_codes(codes, torch.ones(4, 2), None, "int4", 32)
    for start, stop in [(0, 5), (2, 2), (-1, 2)]:
        with pytest.raises(ValueError, match="rows"):
            packed.rows(start, stop)
    with pytest.raises(ValueError, match="even number of columns"):
        PackedWeight.from_codes(codes[:, :63], torch.ones(4, 2), None, "int4", 32)
    with pytest.raises(ValueError, match="expected 2 groups a row, found 3"):
        PackedWeight.from_codes(codes, torch.ones(4, 3), None, "int4", 32)
