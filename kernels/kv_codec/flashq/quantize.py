"""FlashQ: block progressive quantisation of keys and values, in PyTorch operators on any device.

Stage 1, per KV head and block of 64 tokens, symmetric INT8:

    s = max|X| / 119,   q1 = rint(X / s) in [-119, 119]

Stage 2, per channel of a block, integers only, b = 4 or 2 bits:

    z = min_t q1,   s_int = max(1, ceil((max_t q1 - z) / (2^b - 1))),   q2 = floor((2 (q1 - z) + s_int) / (2 s_int))

and back: `q1' = q2 s_int + z`, `X' = s q1'`. 119 instead of 127 keeps q1' inside INT8.

Source: TurboAttention, section 3.1 and equation 11. **(corrected)**: printed with the denominator `2^(b-1)` and
`z = round(min / s)`, and with the labels of the symmetric and the asymmetric stage swapped. Where it departs from the
paper on purpose: docs/turbo_attention.md.

Shapes: n tokens, H KV heads, D head_dim, T tokens of a block.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.kv_codec.flashq.layout import BLOCK

__all__ = [
    "BLOCK",
    "INT8_MAX",
    "MIN_SCALE",
    "SELECTORS",
    "compress",
    "dequantize",
    "fake_quantize",
    "head_priority",
    "int8_scale",
    "quantize_int8",
    "reconstruct",
    "select_bits",
    "to_int8",
]

INT8_MAX = 119
MIN_SCALE = 2.0**-126  # smallest normal fp32: a scale that values of zero leave
SELECTORS = ("gap_std", "entropy", "min_max", "variation")


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """`clamp(rint(x / scale), -119, 119)`: half to even, after a division in fp32; scale [..] for x [.., n, D]."""
    return torch.round(x.float() / scale[..., None, None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_scale(x: Tensor) -> Tensor:
    """`max|x| / 119` of [.., n, D]: [..] fp32."""
    # On CUDA, division by a number of the host is a multiplication by its reciprocal: other bits.
    return x.float().abs().amax((-2, -1)) / torch.full((), INT8_MAX, dtype=torch.float32, device=x.device)


def quantize_int8(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Stage 1 of each block of tokens; an incomplete last block has a scale of its own.

    Args:
        x: [.., n, D] any float dtype.  block: tokens.
    Returns:
        q1: [.., n, D] int8 in [-119, 119].  scale: [.., ceil(n / block)] fp32; 1 where a block is zero.
    """
    blocks = _blocks(x.float(), block)
    scale = int8_scale(blocks)
    scale = torch.where(scale == 0, 1.0, scale)
    return to_int8(blocks, scale).flatten(-3, -2)[..., : x.shape[-2], :], scale


def compress(q1: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 2 of whole blocks.

    Args:
        q1: [.., T, D] int8 in [-119, 119].  bits: 4 or 2.
    Returns:
        q2: [.., T, D] uint8 in [0, 2^bits).  s_int: [.., D] uint8 in [1, 80].  z: [.., D] int8.
    """
    levels = _levels(bits)
    codes = q1.to(torch.int32)
    low, high = codes.amin(-2), codes.amax(-2)
    step = torch.div(high - low + levels - 1, levels, rounding_mode="floor").clamp(min=1)
    above, steps = codes - low[..., None, :], step[..., None, :]
    q2 = torch.div(2 * above + steps, 2 * steps, rounding_mode="floor")
    return q2.to(torch.uint8), step.to(torch.uint8), low.to(torch.int8)


def reconstruct(q2: Tensor, s_int: Tensor, z: Tensor) -> Tensor:
    """`q1' = q2 s_int + z`, [.., T, D] int8 in [-119, 127], from the results of `compress`."""
    steps = s_int[..., None, :].to(torch.int32)
    return (q2.to(torch.int32) * steps + z[..., None, :].to(torch.int32)).to(torch.int8)


def dequantize(q1: Tensor, scale: Tensor, block: int = BLOCK) -> Tensor:
    """`X' = s q1`: q1 [.., n, D] int8, scale [.., ceil(n / block)] -> [.., n, D] in scale's dtype."""
    per_token = scale.repeat_interleave(block, dim=-1)[..., : q1.shape[-2]]
    return q1.to(scale.dtype) * per_token[..., None]


def fake_quantize(x: Tensor, bits: int, block: int = BLOCK) -> Tensor:
    """What is read back of x after both stages; an incomplete last block stays at stage 1.

    Args:
        x: [.., n, D] any float dtype.  bits: 2, 4, or 8 for stage 1 alone.  block: tokens; 64 is what a cache holds.
    Returns:
        [.., n, D] in x's dtype.
    """
    q1, scale = quantize_int8(x, block)
    whole = x.shape[-2] // block * block
    if bits != 8 and whole:
        blocks = _blocks(q1[..., :whole, :], block)
        q1 = torch.cat([reconstruct(*compress(blocks, bits)).flatten(-3, -2), q1[..., whole:, :]], dim=-2)
    return dequantize(q1, scale, block).to(x.dtype)


def head_priority(k: Tensor, v: Tensor, selector: str = "gap_std") -> Tensor:
    """How much precision each head needs: the heads of lowest priority are the ones to hold at 2 bits.

        gap_std    gap(h) std(h), with gap the range of all values of a head and std the standard deviation over its
                   channels of each channel's range over tokens (TurboAttention, equation 11)
        min_max    gap(h) alone;  variation: std(h) alone
        entropy    Shannon entropy, in bits, of the INT8 codes of the head under one scale

    A head's K and V have the same bits, so their priorities are added.

    Args:
        k, v: [H, n, D] any float dtype.  selector: one of `SELECTORS`.
    Returns:
        [H] fp32.
    """
    return _priority(k.float(), selector) + _priority(v.float(), selector)


def select_bits(priority: Tensor, num_low: int) -> Tensor:
    """2 bits for the `num_low` heads of lowest priority (of equals the first), 4 for the rest: [H] -> [H] int32."""
    bits = torch.full(priority.shape, 4, dtype=torch.int32, device=priority.device)
    bits[torch.argsort(priority, stable=True)[:num_low]] = 2
    return bits


def _priority(x: Tensor, selector: str) -> Tensor:
    if selector == "entropy":
        codes = to_int8(x, int8_scale(x).clamp(min=MIN_SCALE)).long() + INT8_MAX
        counts = torch.zeros(x.shape[0], 2 * INT8_MAX + 1, device=x.device)
        counts.scatter_add_(1, codes.flatten(1), torch.ones_like(x).flatten(1))
        shares = counts / counts.sum(1, keepdim=True)
        return -torch.xlogy(shares, shares).sum(1) / math.log(2)
    gap = x.amax((1, 2)) - x.amin((1, 2))
    std = (x.amax(1) - x.amin(1)).std(1, correction=0)
    return {"gap_std": gap * std, "min_max": gap, "variation": std}[selector]


def _blocks(x: Tensor, block: int) -> Tensor:
    """[.., n, D] -> [.., ceil(n / block), block, D], padded with zeros, which change neither a maximum nor a code."""
    missing = -x.shape[-2] % block
    padded: Tensor = F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, block))
    return padded


def _levels(bits: int) -> int:
    if bits not in (2, 4):
        raise ValueError(f"bits: expected 2 or 4, found {bits}")
    return (1 << bits) - 1
