"""What a quantised cache holds of given keys and values, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from alspec.kernels.kv_codec.flashq.quantize import compress, quantize_int8, reconstruct
from alspec.kernels.kv_codec.formats import FORMATS, format_of
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.kv_codec.turboquant.token_codes import compress_tokens, dequantize_tokens, restore_tokens

__all__ = ["restored_blocks", "stored_blocks"]


def stored_blocks(x: Tensor, codec: str, bits: int, is_v: bool) -> Tensor:
    """Dequantised records of x [64 m, D], keys or values of a head that has `bits`; values are given rotated."""
    return _blocks(x, codec, bits, is_v, restored=False)


def restored_blocks(x: Tensor, codec: str, bits: int, is_v: bool) -> Tensor:
    """As `stored_blocks`, as a later prompt chunk reads them: records restored to INT8."""
    return _blocks(x, codec, bits, is_v, restored=True)


def _blocks(x: Tensor, codec: str, bits: int, is_v: bool, restored: bool) -> Tensor:
    side = FORMATS[format_of(codec)][is_v]
    q1, scale = quantize_int8(x.float())
    if not len(x):
        return x.float()
    blocks = q1.unflatten(0, (-1, BLOCK))
    if side.method == "flashq":
        values = reconstruct(*compress(blocks, side.bits or bits)).float()
    else:
        tokens = compress_tokens(blocks, side.bits, not is_v)
        if restored:
            again, factor = restore_tokens(tokens._replace(factor=torch.ones_like(scale)), side.bits, not is_v)
            values, scale = again.float(), scale * tokens.factor * factor
        else:
            values = dequantize_tokens(tokens._replace(factor=torch.ones_like(scale)), side.bits, not is_v)
            scale = scale * tokens.factor
    return (values * scale[:, None, None]).flatten(0, 1)
