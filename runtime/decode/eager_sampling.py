"""Choose the next token from the logits in plain torch: greedy, or at random with counter-based random numbers.

Every rank computes the same token from the same logits: a random number depends on (seed, request, position, token)
alone, not on a generator's state, device or number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from alspec.config import ChoiceConfig
from alspec.kernels.sampling.adjustment import adjusted_ref, tokens_seen

__all__ = ["DRAWN_AT_ONCE", "DRAW_BYTES", "gumbel", "philox", "probabilities", "sample", "starting_counts"]

DRAWN_AT_ONCE = 8  # requests: bounds the memory of a large batch
DRAW_BYTES = 132  # for each of their logits at most: what `philox` holds at a time, beside sorted logits

_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four pseudo-random words from a counter and a key.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 4.

    Args:
        counter: four int64 tensors of one shape, of 32 bits.  key: two words of 32 bits.
    Returns:
        Four such tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        hi0, lo0 = _multiply(0xD2511F53, c0)
        hi1, lo1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, request: Tensor, position: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise: -log(-log u), where u is uniform, from `philox` at the counter (position, request, token, 0).

    Args:
        seed: below 2^63, the key.  request, position: [B] int64, below 2^32.  tokens: [B, n] int64.
    Returns:
        [B, n] fp64; u has 52 random bits and is never 0 or 1.
    """
    zero = torch.zeros_like(tokens)
    counter = position[:, None] + zero, request[:, None] + zero, tokens, zero
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return -(-((high * 2**20 + (low >> 12)).double().add_(0.5) / 2**52).log_()).log_()


def _multiply(factor: int, counter: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit numbers; the int64 product may wrap, its bits are right."""
    product = counter * factor
    return (product >> 32) & _MASK, product & _MASK


def sample(
    logits: Tensor, choice: ChoiceConfig, request: Tensor, position: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Choose one token for each request: the one with the largest log probability plus its own `gumbel` noise.

    So each token is drawn with its probability (Gumbel-max; Gumbel 1954, Maddison et al. 2014). Two distributions that
    are near each other mostly draw the same token, which is what drafts need. The distribution is that of
    `probabilities`. `temperature` 0 takes its one token.

    Args:
        logits: [B, V] fp32.  request, position: [B] int64, the counters of the random numbers.
        seen: [B, V] int32, the tokens of prompts and answers (`tokens_seen`); needed for penalties.
    Returns:
        [B] int64.
    """
    if choice.temperature == 0.0:
        return _in_parts(lambda rows: adjusted_ref(logits[rows], choice, _rows(seen, rows)).argmax(dim=-1), len(logits))

    def draw(rows: slice) -> Tensor:
        scaled, tokens = _ordered(logits[rows], choice, _rows(seen, rows))
        kept = int((scaled > -torch.inf).sum(dim=-1).max().clamp(min=1))  # the first ones, or none of NaN
        scaled, tokens = scaled[:, :kept], tokens[:, :kept]
        scores = scaled.add_(gumbel(choice.seed, request[rows], position[rows], tokens))
        return tokens.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]

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
    scaled, tokens = _ordered(logits, choice, seen)
    return probs.scatter_(1, tokens, torch.softmax(scaled, dim=-1))


def _ordered(logits: Tensor, choice: ChoiceConfig, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log probabilities but for a constant, most likely first, -inf if cut, and their tokens: at most top_k columns."""
    adjusted = adjusted_ref(logits, choice, seen).double()
    ordered, tokens = torch.sort(adjusted, dim=-1, descending=True, stable=True)
    if choice.top_k:
        ordered, tokens = ordered[:, : choice.top_k], tokens[:, : choice.top_k]
    # Subtract before dividing: near temperature 0 the quotients then go to -inf, not to inf.
    scaled = (ordered - ordered[:, :1]) / choice.temperature
    if choice.min_p:
        # top_k keeps the first tokens, too, so it may come first.
        scaled = scaled.masked_fill(scaled.exp() < choice.min_p, -torch.inf)
    if choice.top_p == 1.0:
        return scaled, tokens
    probs = torch.softmax(scaled, dim=-1)
    # A token stays if the probability before it is below top_p; the first one always stays.
    return scaled.masked_fill(probs.cumsum(dim=-1) - probs >= choice.top_p, -torch.inf), tokens


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
