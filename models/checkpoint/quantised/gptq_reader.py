"""GPTQ weights, `checkpoint_format` gptq (v1) and gptq_v2: everything transposed, codes packed along `in`.

`qzeros` packs zero points along `out`. Version 1 stores words of zero points minus 0x11111111 (0x01010101 for 8 bits),
as 32-bit numbers: a zero point of 0 borrows from its neighbour. `g_idx` is the group of each input channel, in any
order with `desc_act`. Sources: AutoGPTQ, nn_modules/qlinear; GPTQModel, utils/model.py, `convert_gptq_v1_to_v2_format`.
"""

from __future__ import annotations

import torch

from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.weight_reader import Range, StoredTensors, WeightReader, ceil_div, unpack_words
from alspec.models.checkpoint.safetensors_header import FLOAT_DTYPES, ExpectedTensor

__all__ = ["GptqReader"]

_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in each code of a word


class GptqReader(WeightReader):
    """Reads GPTQ weights; see above."""

    def tensors(self) -> dict[str, ExpectedTensor]:
        """`qweight`, `qzeros`, `scales` and `g_idx`."""
        (rows, columns), per_word = self.shape, 32 // self.scheme.bits
        return {
            "qweight": ExpectedTensor(((ceil_div(columns, per_word), rows),), ("I32",)),
            "qzeros": ExpectedTensor(((self.num_groups, ceil_div(rows, per_word)),), ("I32",)),
            "scales": ExpectedTensor(((self.num_groups, rows),), FLOAT_DTYPES),
            "g_idx": ExpectedTensor(((columns,),), ("I32",), is_optional=not self.scheme.requires_order),
        }

    def read(self, stored: StoredTensors, rows: Range, columns: Range) -> PackedWeight:
        """See `WeightReader.read`."""
        bits, per_word = self.scheme.bits, 32 // self.scheme.bits
        order = stored.read_order("g_idx", self.group_size)
        groups, order = self.groups_of(columns, order)
        first = columns[0] // per_word
        words = stored.read("qweight", (first, ceil_div(columns[1], per_word)), rows)
        codes = unpack_words(words, bits, 0, (columns[0] - first * per_word, columns[1] - first * per_word))
        first = rows[0] // per_word
        words = stored.read("qzeros", groups, (first, ceil_div(rows[1], per_word)))
        if self.scheme.zero_offset:
            words = (words.long() + _ONES[bits]).to(torch.int32)  # modulo 2^32
        zeros = unpack_words(words, bits, 1, (rows[0] - first * per_word, rows[1] - first * per_word))
        return self.packed(codes.T, stored.read("scales", groups, rows).T, zeros.T, order, columns)
