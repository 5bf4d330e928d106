"""Integer weights of compressed-tensors, `pack-quantized`: signed codes, stored with 2^(bits - 1) added.

`weight_packed` packs the codes of a row along `in`, `weight_zero_point` those of a group along `out`, both lowest bits
first. Source: compressed-tensors, compressors/pack_quantized.
"""

from __future__ import annotations

from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.weight_reader import Range, StoredTensors, WeightReader, ceil_div, unpack_words
from alspec.models.checkpoint.safetensors_header import FLOAT_DTYPES, ExpectedTensor

__all__ = ["CompressedTensorsReader"]


class CompressedTensorsReader(WeightReader):
    """Reads `pack-quantized` weights; see above."""

    def tensors(self) -> dict[str, ExpectedTensor]:
        """`weight_packed`, scales, shape, and zero points and the order of channels if the scheme has them."""
        (rows, columns), per_word = self.shape, 32 // self.scheme.bits
        tensors = {
            "weight_packed": ExpectedTensor(((rows, ceil_div(columns, per_word)),), ("I32",)),
            "weight_scale": ExpectedTensor(((rows, self.num_groups),), FLOAT_DTYPES),
            "weight_shape": ExpectedTensor(((2,),), ("I64", "I32")),
            "weight_g_idx": ExpectedTensor(((columns,),), ("I32",), is_optional=not self.scheme.requires_order),
        }
        if not self.scheme.symmetric:
            packed = (ceil_div(rows, per_word), self.num_groups)
            tensors["weight_zero_point"] = ExpectedTensor((packed,), ("I32",))
        return tensors

    def read(self, stored: StoredTensors, rows: Range, columns: Range) -> PackedWeight:
        """See `WeightReader.read`."""
        bits, per_word = self.scheme.bits, 32 // self.scheme.bits
        order = stored.read_order("weight_g_idx", self.group_size)
        groups, order = self.groups_of(columns, order)
        first = columns[0] // per_word
        words = stored.read("weight_packed", rows, (first, ceil_div(columns[1], per_word)))
        codes = unpack_words(words, bits, 1, (columns[0] - first * per_word, columns[1] - first * per_word))
        zeros = None
        if not self.scheme.symmetric:
            first = rows[0] // per_word
            words = stored.read("weight_zero_point", (first, ceil_div(rows[1], per_word)), groups)
            zeros = unpack_words(words, bits, 0, (rows[0] - first * per_word, rows[1] - first * per_word))
        return self.packed(codes, stored.read("weight_scale", rows, groups), zeros, order, columns)
