"""AWQ weights, version `gemm`: everything transposed, and eight output channels interleaved in a word.

Nibble i of a word is output channel [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight. Source: AutoAWQ, utils/packing_utils.py.
"""

from __future__ import annotations

from torch import Tensor

from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.weight_reader import Range, StoredTensors, WeightReader, ceil_div, unpack_words
from alspec.models.checkpoint.safetensors_header import FLOAT_DTYPES, ExpectedTensor

__all__ = ["AwqReader"]

_PER_WORD = 8
_NIBBLE_OF_CHANNEL = [0, 4, 1, 5, 2, 6, 3, 7]


class AwqReader(WeightReader):
    """Reads AWQ weights; see above."""

    def tensors(self) -> dict[str, ExpectedTensor]:
        """`qweight`, `qzeros` and `scales`."""
        rows, columns = self.shape
        words = ceil_div(rows, _PER_WORD)
        return {
            "qweight": ExpectedTensor(((columns, words),), ("I32",)),
            "qzeros": ExpectedTensor(((self.num_groups, words),), ("I32",)),
            "scales": ExpectedTensor(((self.num_groups, rows),), FLOAT_DTYPES),
        }

    def read(self, stored: StoredTensors, rows: Range, columns: Range) -> PackedWeight:
        """See `WeightReader.read`."""
        groups, _ = self.groups_of(columns, None)
        codes = _channels(stored, "qweight", columns, rows)
        zeros = _channels(stored, "qzeros", groups, rows)
        return self.packed(codes, stored.read("scales", groups, rows).T, zeros, None, columns)


def _channels(stored: StoredTensors, name: str, lines: Range, rows: Range) -> Tensor:
    """Codes of output channels `rows`, [out, lines] uint8."""
    first, last = rows[0] // _PER_WORD, ceil_div(rows[1], _PER_WORD)
    nibbles = unpack_words(stored.read(name, lines, (first, last)), 4, 1, (0, (last - first) * _PER_WORD))
    channels: Tensor = nibbles.unflatten(1, (-1, _PER_WORD))[..., _NIBBLE_OF_CHANNEL].flatten(1)
    return channels[:, rows[0] - first * _PER_WORD : rows[1] - first * _PER_WORD].T
