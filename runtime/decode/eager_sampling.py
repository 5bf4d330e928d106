"""Choose the next token from the logits in plain torch: greedy, or at random with counter-based random numbers.

Every rank computes the same token from the same logits: the random number of a token depends on (seed, request,
position) alone, not on a generator's state, device or number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alspec.config import ChoiceConfig
from alspec.kernels.sampling.adjustment import adjusted_ref, tokens_seen

__all__ = ["DRAWN_AT_ONCE", "DRAW_BYTES", "philox", "philox_uniform", "probabilities", "sample", "starting_counts"]

DRAWN_AT_ONCE = 8  # requests: bounds the memory of a large batch
DRAW_BYTES = 64  # for each of their logits at most: the sort in `_ordered` and what follows it

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
    logits: Tensor, choice: ChoiceConfig, request: Tensor, position: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Choose one token for each request: invert its distribution at `philox_uniform(seed, request, position)`.

    The distribution is that of `probabilities`. `temperature` 0 takes its one token.

    Args:
        logits: [B, V] fp32.  request, position: [B] int64, the counters of the random number.
        seen: [B, V] int32, the tokens of prompts and answers (`tokens_seen`); needed for penalties.
    Returns:
        [B] int64.
    """
    if choice.temperature == 0.0:
        return _in_parts(lambda rows: adjusted_ref(logits[rows], choice, _rows(seen, rows)).argmax(dim=-1), len(logits))
    uniform = philox_uniform(choice.seed, request, position)

    def draw(rows: slice) -> Tensor:
        probs, tokens = _ordered(logits[rows], choice, _rows(seen, rows))
        total = probs.cumsum(dim=-1)
        target = uniform[rows, None] * total[:, -1:]
        chosen = (total <= target).sum(dim=-1, keepdim=True).clamp(max=probs.shape[1] - 1)
        return tokens.gather(1, chosen)[:, 0]

    return _in_parts(draw, len(logits))


def probabilities(logits: Tensor, choice: ChoiceConfig, seen: Tensor | None = None) -> Tensor:
    """The distribution of the next token after all settings: this function defines it.

    In this order, which is that of vLLM: biases and penalties (see kernels/sampling/adjustment.py); softmax at the
    temperature; only tokens with at least `min_p` of the largest probability; only the `top_k` most likely ones (0:
    all); of these the fewest most likely ones whose share of their probability reaches `top_p`. Among equal logits the
    lower id counts as more likely. Temperature 0 gives the most likely token probability 1.

    Args:
        logits: [B, V] fp32.  seen: as for `sample`.
    Returns:
        [B, V] fp64, each row of sum 1.
    """
    probs = torch.zeros_like(logits, dtype=torch.float64)
    if choice.temperature == 0.0:
        return probs.scatter_(1, adjusted_ref(logits, choice, seen).argmax(dim=-1, keepdim=True), 1.0)
    ordered, tokens = _ordered(logits, choice, seen)
    return probs.scatter_(1, tokens, ordered / ordered.sum(dim=-1, keepdim=True))


def _ordered(logits: Tensor, choice: ChoiceConfig, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """`probabilities`, most likely first and not normalised, and their tokens: at most top_k columns each."""
    adjusted = adjusted_ref(logits, choice, seen).double()
    ordered, tokens = torch.sort(adjusted, dim=-1, descending=True, stable=True)
    if choice.top_k:
        ordered, tokens = ordered[:, : choice.top_k], tokens[:, : choice.top_k]
    # Subtract before dividing: near temperature 0 the quotients then go to -inf, not to inf.
    scaled = (ordered - ordered[:, :1]) / choice.temperature
    if choice.min_p:
        # top_k keeps the first tokens, too, so it may come first.
        scaled = scaled.masked_fill(scaled.exp() < choice.min_p, -torch.inf)
    probs = torch.softmax(scaled, dim=-1)
    # A token stays if the probability before it is below top_p; the first one always stays.
    return probs * (probs.cumsum(dim=-1) - probs < choice.top_p), tokens


def _rows(seen: Tensor | None, rows: slice) -> Tensor | None:
    return None if seen is None else seen[rows]


def _in_parts(of: Callable[[slice], Tensor], batch_size: int) -> Tensor:
    """Concatenate what `of` gives for `DRAWN_AT_ONCE` requests at a time."""
    starts = range(0, batch_size, DRAWN_AT_ONCE)
    return torch.cat([of(slice(start, start + DRAWN_AT_ONCE)) for start in starts])


def starting_counts(
    choice: ChoiceConfig, seen: Tensor | None, batch_size: int, vocab_size: int, device: torch.device
) -> Tensor | None:
    """The counts [B, V] int32 that penalties begin with; None without penalties.

    Args:
        seen: of the prompts, see `tokens_seen`; None: no token is part of a prompt.
    """
    if not choice.penalises:
        return None
    return tokens_seen([[]] * batch_size, vocab_size, device) if seen is None else seen
