"""Choose the next token from the logits in plain torch: greedy, or top-k / top-p with counter-based random numbers.

Every rank computes the same token from the same logits: the random number of a token depends on (seed, request,
position) alone, not on a generator's state, device or number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DRAWN_AT_ONCE", "DRAW_BYTES", "philox", "philox_uniform", "sample"]

DRAWN_AT_ONCE = 8  # requests: bounds the memory of a large batch
DRAW_BYTES = 64  # for each of their logits at most: the sort in `_draw` and what follows it

_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four pseudo-random words from a counter and a key.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 4.

    Args:
        counter: four [B] int64 of 32 bits.  key: two words of 32 bits.
    Returns:
        Four [B] int64 of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _multiply(0xD2511F53, c0)
        hi1, lo1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def philox_uniform(seed: int, request: Tensor, position: Tensor) -> Tensor:
    """Uniform numbers in [0, 1): the first word of `philox` at the counter (position, request, 0, 0) under `seed`.

    Args:
        seed: 64 bits.  request, position: [B] int64, below 2^32.
    Returns:
        [B] fp64 with 32 random bits.
    """
    zero = torch.zeros_like(request)
    return philox((position, request, zero, zero), (seed & _MASK, seed >> 32 & _MASK))[0].double() / 2**32


def _multiply(factor: int, counter: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit numbers; the int64 product may wrap, its bits are right."""
    product = counter * factor
    return (product >> 32) & _MASK, product & _MASK


def sample(
    logits: Tensor, temperature: float, top_k: int, top_p: float, seed: int, request: Tensor, position: Tensor
) -> Tensor:
    """Choose one token for each request.

    `temperature` 0 takes the most likely token. Otherwise the distribution softmax(logits / temperature) is cut to the
    `top_k` most likely tokens (0: all), then to the fewest most likely ones whose probability reaches `top_p`, and
    inverted at `philox_uniform(seed, request, position)`.

    Args:
        logits: [B, V] fp32.  request, position: [B] int64, the counters of the random number.
    Returns:
        [B] int64.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    uniform = philox_uniform(seed, request, position)
    parts = zip(logits.split(DRAWN_AT_ONCE), uniform.split(DRAWN_AT_ONCE), strict=True)
    return torch.cat([_draw(of, temperature, top_k, top_p, where) for of, where in parts])


def _draw(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> Tensor:
    """Choose tokens as `sample` does for temperature > 0. The random numbers, [B] fp64, are in [0, 1)."""
    ordered, tokens = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    if top_k:
        ordered = ordered[:, :top_k]
    # Subtract before dividing: near temperature 0 the quotients then go to -inf, not to inf.
    probs = torch.softmax((ordered - ordered[:, :1]) / temperature, dim=-1)
    total = probs.cumsum(dim=-1)
    # A token stays if the probability before it is below top_p; the first one always stays.
    probs = probs * (total - probs < top_p)
    total = probs.cumsum(dim=-1)
    target = uniform[:, None] * total[:, -1:]
    chosen = (total <= target).sum(dim=-1, keepdim=True).clamp(max=probs.shape[1] - 1)
    return tokens.gather(1, chosen)[:, 0]
