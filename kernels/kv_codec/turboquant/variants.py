"""Variants of TurboQuant in PyTorch, for the evaluation only: each replaces one choice of token_codes.py.

Per token x = q1, the stage-1 codes (keys: before the rotation Pi; values: rotated already), l = Lloyd-Max levels of a
normal variable, b bits:

    plain norm       x' = |x| / sqrt(D) Pi^T l[code], in place of the scales of token_codes.py
    QJL keys         x' = m + |r| corr S^T sign(S r),   m = the key in b - 1 bits,   r = x - m
                     corr = sqrt(pi / 2) / D where S has normal entries, sqrt(pi / (2 D)) where S is orthogonal
    uniform values   x' = s rint((x - z) / s) + z,   z = min x,   s = (max x - min x) / (2^b - 1)

The score of a QJL key is `<q, m> + |r| corr <S q, sign(S r)>`. It is linear in q, so the correction can be a part of
the key that attention reads.

Source: TurboQuant, section 3; uniform values are from public implementations, the orthogonal S is ours.
**(corrected)**: both terms of a score carry the softmax scale.

Scales and norms are fp16, relative to the largest of their block, as in `TokenCodes`. Results are in units of stage 1,
keys rotated back. Shapes: q1 [..., T, D] int8, T tokens per block, D head_dim.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from alspec.kernels.kv_codec.flashq.quantize import MIN_SCALE
from alspec.kernels.kv_codec.turboquant.codebook import UNITS, code_bytes
from alspec.kernels.kv_codec.turboquant.rotation import signed_hadamard

__all__ = ["codebook_tokens", "sketch_matrix", "sketched_keys", "uniform_values"]

ONE_BIT_LEVEL = 0.7979  # of N(0, 1): sqrt(2 / pi)
SKETCH_SEED = 1


def codebook_tokens(q1: Tensor, bits: int, is_key: bool, norm_correction: bool) -> Tensor:
    """Quantise tokens by a codebook of 1 to 4 bits and dequantise them; `norm_correction`: scales of token_codes.py."""
    head_dim, y = q1.shape[-1], q1.float()
    matrix = signed_hadamard(head_dim, q1.device)
    if is_key:
        y = y @ matrix.T  # exact: integers below 2^24
    std = y.square().mean(-1).sqrt()
    table = _levels(bits, q1.device)
    codes = torch.bucketize(y / std.clamp(min=MIN_SCALE)[..., None], (table[1:] + table[:-1]) / 2)
    level = table[codes]
    scale = std
    if norm_correction:
        norm = level.square().sum(-1)
        scale = (y * level).sum(-1) / norm if is_key else (y.square().sum(-1) / norm).sqrt()
    x: Tensor = level * _as_stored(scale)[..., None]
    return x @ matrix / head_dim if is_key else x


def sketched_keys(q1: Tensor, bits: int, sketch: str, norm_correction: bool) -> Tensor:
    """Quantise keys by b - 1 bits and QJL's signs, and dequantise them.

    Args:
        bits: 4, 3 or 2, the sign bit included.
        sketch: which S, gaussian or orthogonal.
        norm_correction: scale of the codes as in token_codes.py.
    """
    head_dim = q1.shape[-1]
    mean = codebook_tokens(q1, bits - 1, True, norm_correction)
    residual = q1.float() - mean
    matrix = sketch_matrix(sketch, head_dim).to(q1.device)
    signs = torch.where(residual @ matrix.T < 0, -1.0, 1.0)
    corr = math.sqrt(math.pi / 2) / (head_dim if sketch == "gaussian" else math.sqrt(head_dim))
    return mean + (corr * _as_stored(residual.norm(dim=-1)))[..., None] * (signs @ matrix)


def uniform_values(q1: Tensor, bits: int) -> Tensor:
    """Quantise values by a scale and a zero for each token, and dequantise them."""
    y, last_code = q1.float(), (1 << bits) - 1
    z = y.amin(-1, keepdim=True)
    s = ((y.amax(-1, keepdim=True) - z) / last_code).half().float()
    return s * ((y - z) / s.clamp(min=MIN_SCALE)).round().clamp(max=last_code) + z


@cache
def sketch_matrix(sketch: str, head_dim: int) -> Tensor:
    """S, [D, D] fp32 on the CPU: normal entries (gaussian), or an orthogonal matrix, uniformly distributed."""
    normal = torch.randn(head_dim, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(SKETCH_SEED))
    if sketch == "gaussian":
        return normal.float()
    q, r = torch.linalg.qr(normal)
    orthogonal: Tensor = q * r.diagonal().sign()
    return orthogonal.float()


def _levels(bits: int, device: torch.device) -> Tensor:
    """Levels of N(0, 1) in ascending order, [2^bits] fp32."""
    of_codes = [(u - 63.5) / UNITS[bits] for u in code_bytes(bits)] if bits > 1 else [-ONE_BIT_LEVEL, ONE_BIT_LEVEL]
    return torch.tensor(of_codes, device=device)


def _as_stored(scale: Tensor) -> Tensor:
    """Round scales [..., T] as a block stores them: fp16, relative to the largest."""
    largest = scale.amax(-1, keepdim=True).clamp(min=MIN_SCALE)
    return (scale / largest).half().float() * largest
