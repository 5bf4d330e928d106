"""FP8 weights: `weight` in e4m3, and a scale for the tensor, for each row, or for each block.

Sources: compressed-tensors, compressors/naive_quantized (`weight_scale`); transformers, integrations/finegrained_fp8
(`weight_scale_inv`, which is multiplied as well).
"""

from __future__ import annotations

from torch import Tensor

from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.weight_reader import Range, StoredTensors, WeightReader, ceil_div
from alspec.models.checkpoint.safetensors_header import FLOAT_DTYPES, ExpectedTensor

__all__ = ["Fp8Reader"]


class Fp8Reader(WeightReader):
    """Reads FP8 weights; see above."""

    def tensors(self) -> dict[str, ExpectedTensor]:
        """`weight` and its scales."""
        rows, rows_per_scale = self.shape[0], self.scheme.rows_per_scale
        shapes: tuple[tuple[int, ...], ...]
        if rows_per_scale == -1:
            shapes = ((), (1,), (1, 1))
        elif rows_per_scale == 1 and self.scheme.group_size == -1:
            shapes = ((rows, 1), (rows,))
        else:
            shapes = ((ceil_div(rows, rows_per_scale), self.num_groups),)
        return {
            "weight": ExpectedTensor((self.shape,), ("F8_E4M3",)),
            self.scheme.scale_name: ExpectedTensor(shapes, FLOAT_DTYPES),
        }

    def read(self, stored: StoredTensors, rows: Range, columns: Range) -> PackedWeight:
        """See `WeightReader.read`."""
        groups, _ = self.groups_of(columns, None)
        return PackedWeight.from_codes(
            stored.read("weight", rows, columns), self._scales(stored, rows, groups), None, "fp8",
            min(self.group_size, columns[1] - columns[0]),
        )  # fmt: skip

    def _scales(self, stored: StoredTensors, rows: Range, groups: Range) -> Tensor:
        """[out, groups], with a scale of several rows repeated for each of them."""
        (start, stop), size = rows, self.scheme.rows_per_scale
        if size == -1:
            return stored.read(self.scheme.scale_name).reshape(1, 1).expand(stop - start, 1)
        if size == 1 and self.scheme.group_size == -1:
            return stored.read(self.scheme.scale_name, rows).reshape(-1, 1)
        first = start // size
        blocks = stored.read(self.scheme.scale_name, (first, ceil_div(stop, size)), groups)
        return blocks.repeat_interleave(size, 0)[start - first * size : stop - first * size]
