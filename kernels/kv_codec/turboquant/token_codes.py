"""TurboQuant arithmetic in PyTorch, on stage-1 INT8 codes q1 of blocks of tokens (flashq/quantize.py), on any device.

Per token x = s q1, with y = sqrt(D) Pi q1 for keys (a rotation, rotation.py) and y = q1 for values:

    code = number of thresholds below `UNITS y / std(y)`,   std(y)^2 = |q1|^2 for keys, |q1|^2 / D for values
    c = level of each code
    scale = <y, c> / <c, c> for keys (least squares),   |y| / |c| for values (keeps the norm)

Least squares shrink a vector by what rounding lost. That is best for a score, but an average of values keeps the
shrinking and loses the errors.

Values are not rotated here: their rotation is part of the weights, W_v and W_o (models/llama.py). All sums are sums of
integers, so every device computes the same bits.

Source: TurboQuant, section 3, without the residual signs (QJL); both scales in place of the plain norm are known as
"norm correction" from public implementations. docs/turboquant.md has what each choice costs.

Shapes: T tokens per block, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alspec.kernels.kv_codec.code_planes import pack_planes, unpack_planes
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.kv_codec.turboquant.codebook import UNITS, code_bytes, thresholds
from alspec.kernels.kv_codec.turboquant.rotation import signed_hadamard

__all__ = [
    "TokenCodes",
    "compress_tokens",
    "dequantize_tokens",
    "pack_tokens_side",
    "restore_tokens",
    "unpack_tokens_side",
]

SMALLEST = 2.0**-126  # smallest normal fp32, in place of the scale of a block of zeros


class TokenCodes(NamedTuple):
    """Codes of blocks of K or V: a token is `factor * ratio * (u[codes] - 63.5)`, rotated if it is a key."""

    codes: Tensor  # [..., T, D] uint8 in [0, 2^b)
    ratio: Tensor  # [..., T] fp16 in [0, 1]: scale of each token, relative to the largest of the block
    factor: Tensor  # [...] fp32: the largest scale of the block, in units of stage 1


def compress_tokens(q1: Tensor, bits: int, is_key: bool) -> TokenCodes:
    """Quantise blocks of stage-1 codes q1 [..., T, D] int8."""
    head_dim, device = q1.shape[-1], q1.device
    square = q1.int().square().sum(-1).clamp(min=1).float()
    if is_key:
        y = q1.float() @ signed_hadamard(head_dim, device).T  # exact: integers below 2^24
    else:
        y, square = q1.float(), square / head_dim
    # Divide by a tensor: with a Python number, CUDA multiplies by the reciprocal, which gives other bits.
    unit = torch.full_like(square, UNITS[bits]) / _root(square)
    position = y * unit[..., None]
    codes = sum((position > threshold).to(torch.uint8) for threshold in thresholds(bits))
    assert isinstance(codes, Tensor)
    doubled = _doubled_levels(codes, bits)
    norm = doubled.square().sum(-1).float()
    if is_key:
        scale = (2 * (y.long() * doubled).sum(-1)).float() / norm * head_dim**-0.5
    else:
        scale = 2 * _root(q1.int().square().sum(-1).float() / norm)
    factor = scale.amax(-1)
    ratio = scale / factor.clamp(min=SMALLEST)[..., None]
    return TokenCodes(codes, ratio.half(), factor)


def dequantize_tokens(tokens: TokenCodes, bits: int, is_key: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks in units of stage 1, [..., T, D]; keys are rotated back."""
    levels = _doubled_levels(tokens.codes, bits).to(dtype)
    if is_key:
        head_dim = levels.shape[-1]
        levels = levels @ signed_hadamard(head_dim, levels.device).to(dtype)  # exact, also in fp32
        levels = levels * head_dim**-0.5
    return levels * (0.5 * tokens.ratio.to(dtype) * tokens.factor[..., None].to(dtype))[..., None]


def restore_tokens(tokens: TokenCodes, bits: int, is_key: bool) -> tuple[Tensor, Tensor]:
    """Blocks as stage-1 INT8, for prompt attention.

    Returns:
        q1: [..., T, D] int8.  factor: [...] fp32, in units of the stage 1 that `compress_tokens` was given.
    """
    levels = _doubled_levels(tokens.codes, bits).float()
    if is_key:
        levels = levels @ signed_hadamard(levels.shape[-1], levels.device)  # exact
    x = levels * tokens.ratio.float()[..., None]
    largest = x.abs().amax((-2, -1))
    unit = torch.where(largest == 0, 1.0, largest / torch.full_like(largest, 119.0))
    q1 = torch.round(x / unit[..., None, None]).clamp(-119, 119).to(torch.int8)
    half = 0.5 * levels.shape[-1] ** -0.5 if is_key else 0.5
    return q1, unit * half * tokens.factor


def pack_tokens_side(tokens: TokenCodes, bits: int, is_v: bool) -> Tensor:
    """Pack blocks into sides of records, [..., side_words("turboquant", bits, D)] int32, without their factors.

    A side is codes (code_planes.py), then ratios in the order in which lanes use them: [g][n], token `8 n + g`.
    """
    ratio = tokens.ratio.unflatten(-1, (8, 8)).transpose(-1, -2).flatten(-2).contiguous()
    return torch.cat([pack_planes(tokens.codes, bits, is_v), ratio.view(torch.int32)], -1)


def unpack_tokens_side(words: Tensor, bits: int, head_dim: int, is_v: bool) -> TokenCodes:
    """Unpack sides of records; the inverse of `pack_tokens_side`, with factors of 1."""
    codes, ratio = words.split([2 * head_dim * bits, BLOCK // 2], -1)
    ratio = ratio.contiguous().view(torch.float16).unflatten(-1, (8, 8)).transpose(-1, -2).flatten(-2)
    factor = torch.ones(words.shape[:-1], device=words.device)
    return TokenCodes(unpack_planes(codes, bits, head_dim, is_v), ratio, factor)


def _root(x: Tensor) -> Tensor:
    """Square root of fp32, rounded to nearest on every device; by way of fp64, because MKL's of fp32 is not."""
    return x.double().sqrt().float()


def _doubled_levels(codes: Tensor, bits: int) -> Tensor:
    """Twice the level of each code, int64: odd integers in [-127, 127]."""
    table = torch.tensor([2 * u - 127 for u in code_bytes(bits)], device=codes.device)
    return table[codes.long()]
