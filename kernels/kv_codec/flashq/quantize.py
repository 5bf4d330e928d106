"""FlashQ arithmetic in PyTorch: block progressive quantisation of keys and values, on any device.

Stage 1, per KV head and block of 64 tokens, symmetric INT8:

    s = max|X| / 119,   q1 = rint(X / s) in [-119, 119]

Stage 2, per channel of a block, integers only, b = 4, 3 or 2 bits:

    z = min_t q1,   s_int = max(1, ceil((max_t q1 - z) / (2^b - 1))),   q2 = floor((2 (q1 - z) + s_int) / (2 s_int))

Dequantisation: `q1' = q2 s_int + z`, `X' = s q1'`. The limit 119 instead of 127 keeps q1' inside INT8.

Source: TurboAttention, section 3.1 and equation 11. **(corrected)**: the paper prints the denominator `2^(b-1)` and
`z = round(min / s)`, and swaps the labels of the symmetric and the asymmetric stage. docs/turbo_attention.md lists the
intended differences from the paper.

Shapes: n tokens, H KV heads, D head_dim, T tokens per block.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.kv_codec.quantised_layer import BLOCK

__all__ = [
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
MIN_SCALE = 2.0**-126  # smallest normal fp32: the scale while all values are 0
SELECTORS = ("gap_std", "entropy", "min_max", "variation")


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Compute `clamp(rint(x / scale), -119, 119)`; fp32 division, half to even. x [.., n, D], scale [..]."""
    return torch.round(x.float() / scale[..., None, None]).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_scale(x: Tensor) -> Tensor:
    """Compute `max|x| / 119` over x [.., n, D]; [..] fp32."""
    # Divide by a tensor: with a Python number, CUDA multiplies by the reciprocal, which gives other bits.
    return x.float().abs().amax((-2, -1)) / torch.full((), INT8_MAX, dtype=torch.float32, device=x.device)


def quantize_int8(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Stage 1: quantise each block of tokens to INT8. An incomplete last block has its own scale.

    Args:
        x: [.., n, D] any float dtype.  block: tokens per block.
    Returns:
        q1: [.., n, D] int8 in [-119, 119].  scale: [.., ceil(n / block)] fp32; 1 for a block of zeros.
    """
    x_blocks = _blocks(x.float(), block)
    scale = int8_scale(x_blocks)
    scale = torch.where(scale == 0, 1.0, scale)
    return to_int8(x_blocks, scale).flatten(-3, -2)[..., : x.shape[-2], :], scale


def compress(q1: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stage 2: quantise the INT8 codes of full blocks to 4, 3 or 2 bits per channel.

    Args:
        q1: [.., T, D] int8 in [-119, 119].  bits: 4, 3 or 2.
    Returns:
        q2: [.., T, D] uint8 in [0, 2^bits).  s_int: [.., D] uint8 in [1, 80].  z: [.., D] int8.
    """
    levels = _levels(bits)
    codes = q1.to(torch.int32)
    z, high = codes.amin(-2), codes.amax(-2)
    s_int = torch.div(high - z + levels - 1, levels, rounding_mode="floor").clamp(min=1)
    above_z, divisor = codes - z[..., None, :], s_int[..., None, :]
    q2 = torch.div(2 * above_z + divisor, 2 * divisor, rounding_mode="floor")
    return q2.to(torch.uint8), s_int.to(torch.uint8), z.to(torch.int8)


def reconstruct(q2: Tensor, s_int: Tensor, z: Tensor) -> Tensor:
    """Compute `q1' = q2 s_int + z` from the results of `compress`; [.., T, D] int8 in [-119, 127]."""
    factor = s_int[..., None, :].to(torch.int32)
    return (q2.to(torch.int32) * factor + z[..., None, :].to(torch.int32)).to(torch.int8)


def dequantize(q1: Tensor, scale: Tensor, block: int = BLOCK) -> Tensor:
    """Compute `X' = s q1`.

    Args:
        q1: [.., n, D] int8.  scale: [.., ceil(n / block)].  block: tokens per block.
    Returns:
        [.., n, D] in scale's dtype.
    """
    per_token = scale.repeat_interleave(block, dim=-1)[..., : q1.shape[-2]]
    return q1.to(scale.dtype) * per_token[..., None]


def fake_quantize(x: Tensor, bits: int, block: int = BLOCK) -> Tensor:
    """Quantise x and dequantise it again. An incomplete last block passes only stage 1.

    Args:
        x: [.., n, D] any float dtype.
        bits: 4, 3 or 2 for both stages, 8 for stage 1 only.
        block: tokens per block; a cache uses 64.
    Returns:
        [.., n, D] in x's dtype.
    """
    q1, scale = quantize_int8(x, block)
    full_tokens = x.shape[-2] // block * block
    if bits != 8 and full_tokens:
        q1_blocks = _blocks(q1[..., :full_tokens, :], block)
        q1 = torch.cat([reconstruct(*compress(q1_blocks, bits)).flatten(-3, -2), q1[..., full_tokens:, :]], dim=-2)
    return dequantize(q1, scale, block).to(x.dtype)


def head_priority(k: Tensor, v: Tensor, selector: str = "gap_std") -> Tensor:
    """Compute how much precision each head needs. The heads of lowest priority get 2 bits.

        gap_std    gap(h) std(h): gap is the range of all values of the head, std the standard deviation over its
                   channels of each channel's range over tokens (TurboAttention, equation 11)
        min_max    gap(h) only
        variation  std(h) only
        entropy    Shannon entropy, in bits, of the INT8 codes of the head with one scale

    K and V of a head have the same bits, so their priorities are added.

    Args:
        k, v: [H, n, D] any float dtype.  selector: one of `SELECTORS`.
    Returns:
        [H] fp32.
    """
    return _priority(k.float(), selector) + _priority(v.float(), selector)


def select_bits(priority: Tensor, num_low: int) -> Tensor:
    """Select 2 bits for the `num_low` heads of lowest priority (first head on ties), else 4; [H] -> [H] int32."""
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
    """[.., n, D] -> [.., ceil(n / block), block, D], padded with zeros; these do not change any scale or code."""
    missing = -x.shape[-2] % block
    padded: Tensor = F.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, block))
    return padded


def _levels(bits: int) -> int:
    if bits not in (2, 3, 4):
        raise ValueError(f"bits: expected 2, 3 or 4, found {bits}")
    return (1 << bits) - 1
