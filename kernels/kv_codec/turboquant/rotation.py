"""The rotation of TurboQuant: a signed Hadamard matrix, orthonormal and its own kind of inverse (the transpose).

    Pi = H diag(signs) / sqrt(D),   H[j, i] = (-1)^popcount(i & j)

Rotated coordinates of any vector are close to normal, whatever channels are large. Integer products with sqrt(D) Pi are
exact. Source: TurboQuant, section 3; the paper's random rotation is replaced by random signs and H.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SIGN_BITS", "rotation", "signed_hadamard"]

SIGN_BITS = 0x243F6A8885A308D313198A2E03707344  # bit i: the sign of channel i; the first digits of pi


def signed_hadamard(head_dim: int, device: torch.device | None = None) -> Tensor:
    """`sqrt(D) Pi`, [D, D] fp32 of 1 and -1; D is a power of two, at most 128."""
    index = torch.arange(head_dim, device=device)
    common = index[:, None] & index[None, :]
    parity = torch.zeros_like(common)
    for bit in range(head_dim.bit_length()):
        parity ^= common >> bit & 1
    signs = torch.tensor([1 - 2 * (SIGN_BITS >> i & 1) for i in range(head_dim)], device=device)
    return ((1 - 2 * parity) * signs).float()


def rotation(head_dim: int, device: torch.device | None = None) -> Tensor:
    """`Pi`, [D, D] fp32: `x @ rotation(D).T` rotates vectors x [..., D]."""
    rotated: Tensor = signed_hadamard(head_dim, device) * head_dim**-0.5
    return rotated
