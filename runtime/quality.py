"""The reference semantics of speculation over a given text: what decoding it token by token would accept and predict.

Every position's verdict depends on its own activations and on the keys and values of the tokens before it, and those
are known when the text is: one pass over all positions, layer by layer, gives what `simulated` decoding gives step by
step. That holds for a quantised cache too: what a position reads of a token follows from both positions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.attention import predictor_attention_all, prefill_attention
from ..models.llama import Llama
from ..verdict import accepts, combine_sums, distance_sums
from .decoded_attention import CacheSetting, cache_text, decoded_attention, prompt_attention
from .step import gather_logits
from .transport import Transport

__all__ = ["TextScore", "score_text"]

# Positions whose logits are held at once.
LOGITS_TOKENS = 1024
# A text without a prompt has its scales and its 2-bit heads from so many tokens, as if they had been its prompt.
CALIBRATION_TOKENS = 1024
EXACT_CACHE = CacheSetting()


@dataclass(frozen=True)
class TextScore:
    """How a model predicts a text under speculation."""

    nll: Tensor  # [n - 1] fp32, nats of token i + 1 given the tokens before it
    predicted: Tensor  # [n - 1] int64, the greedy token after token i
    hits: Tensor  # [L, n] bool, accepted verdicts; False before `first_speculated`


@torch.no_grad()
def score_text(
    model: Llama,
    transport: Transport,
    token_ids: list[int],
    threshold: float | Sequence[float],
    chunk_size: int,
    first_speculated: int = 0,
    cache: CacheSetting = EXACT_CACHE,
) -> TextScore:
    """Score a text as if each token from `first_speculated` on had been decoded with speculation, batch 1.

    Args:
        token_ids: the text, at least two tokens.  threshold: lambda, or one for each layer.  chunk_size: S.
        first_speculated: tokens before it are a prompt, read with full attention as prefill does.
        cache: what the decoded tokens read. Without a prompt, the first `CALIBRATION_TOKENS` fix its scales.
    """
    thresholds = [threshold] * model.num_layers if isinstance(threshold, (int, float)) else threshold
    ids = torch.tensor(token_ids, device=transport.device)
    positions = torch.arange(len(ids), device=transport.device)
    x, partial = model.embed(ids), None
    hits = []
    for layer in range(model.num_layers):
        x, q, k, v = model.pre_attention(layer, x, partial, positions)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        full_out, spec_out = _attention(q, k, v, chunk_size, model.sm_scale, first_speculated, cache)
        sums = combine_sums(transport.all_gather_group(distance_sums(spec_out, full_out)))
        accepted = accepts(sums, thresholds[layer]) & (positions >= first_speculated)
        hits.append(accepted)
        x, partial = model.post_attention(layer, x, torch.where(accepted[:, None, None], spec_out, full_out))
    x = model.reduce_residual(x, partial)
    nll, predicted = [], []
    for start in range(0, len(ids) - 1, LOGITS_TOKENS):
        stop = min(start + LOGITS_TOKENS, len(ids) - 1)
        logits = gather_logits(model, transport, x[start:stop])
        nll.append(F.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="none"))
        predicted.append(logits.argmax(-1))
    return TextScore(torch.cat(nll).cpu(), torch.cat(predicted).cpu(), torch.stack(hits).cpu())


def _attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, sm_scale: float, first: int, cache: CacheSetting
) -> tuple[Tensor, Tensor]:
    """`A` and `A~` of every position, [n, Hq, D] each; before `first` both are full attention."""
    if cache == EXACT_CACHE:
        return prefill_attention(q, k, v, sm_scale), predictor_attention_all(q, k, v, chunk_size, sm_scale)
    cached = cache_text(k, v, first or min(len(q), CALIBRATION_TOKENS), cache)
    outs = decoded_attention(q[first:], *cached, chunk_size, sm_scale, cache)
    if first:
        prompt_out = prompt_attention(q[:first], k[:, :first], v[:, :first], cached, sm_scale, cache)
        outs = (torch.cat([prompt_out, outs[0]]), torch.cat([prompt_out, outs[1]]))
    return outs
