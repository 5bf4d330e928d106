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

from alspec.kernels.attention.torch_ref import predictor_attention_all, prefill_attention
from alspec.models.llama import Llama
from alspec.runtime.decode.eager_step import gather_logits
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.eval.teacher_forced import (
    CachedTensor,
    CacheSetting,
    cache_text,
    prompt_attention,
    teacher_forced_attention,
)
from alspec.verdict import accepts, combine_sums, distance_sums

__all__ = ["TextScore", "score_text", "score_under"]

# Positions whose logits are held at once.
LOGITS_TOKENS = 1024
# Keys of a layer, in numbers, that several lambdas may take at once: 512 MiB in fp32.
KEYS_AT_ONCE = 2**27
# A text without a prompt has its scales and its 2-bit heads from so many tokens, as if they had been its prompt.
CALIBRATION_TOKENS = 1024
EXACT_CACHE = CacheSetting()


@dataclass(frozen=True)
class TextScore:
    """How a model predicts a text under speculation."""

    nll: Tensor  # [n - 1] fp32, nats of token i + 1 given the tokens before it
    predicted: Tensor  # [n - 1] int64, the greedy token after token i
    hits: Tensor  # [L, n] bool, accepted verdicts; False in the prompt


def score_text(
    model: Llama,
    transport: Transport,
    token_ids: list[int],
    threshold: float | Sequence[float],
    chunk_size: int,
    prompt_tokens: int = 0,
    cache: CacheSetting = EXACT_CACHE,
) -> TextScore:
    """Score a text as if each token behind the first `prompt_tokens` had been decoded with speculation, batch 1.

    Args:
        token_ids: the text, at least two tokens.  threshold: lambda, or one for each layer.  chunk_size: S.
        prompt_tokens: how many are a prompt, read with full attention as prefill does.
        cache: what the decoded tokens read. Without a prompt, the first `CALIBRATION_TOKENS` fix its scales.
    """
    thresholds = [threshold] * model.num_layers if isinstance(threshold, (int, float)) else threshold
    return score_under(model, transport, token_ids, [thresholds], chunk_size, prompt_tokens, cache)[0]


def score_under(
    model: Llama,
    transport: Transport,
    token_ids: list[int],
    thresholds: Sequence[Sequence[float]],
    chunk_size: int,
    prompt_tokens: int,
    cache: CacheSetting,
) -> list[TextScore]:
    """`score_text` under several lambdas, each one for each layer; the prompt, the same under all, is read once."""
    at_once = max(1, KEYS_AT_ONCE // (len(token_ids) * model.config.num_kv_heads * model.config.head_dim))
    return [
        score
        for start in range(0, len(thresholds), at_once)
        for score in _score(
            model, transport, token_ids, thresholds[start : start + at_once], chunk_size, prompt_tokens, cache
        )
    ]


@torch.no_grad()
def _score(
    model: Llama,
    transport: Transport,
    token_ids: list[int],
    thresholds: Sequence[Sequence[float]],
    chunk_size: int,
    prompt_tokens: int,
    cache: CacheSetting,
) -> list[TextScore]:
    """Rows of activations are those of the prompt, then for each lambda in turn those of the tokens after it."""
    texts, num_decoded = len(thresholds), len(token_ids) - prompt_tokens
    ids = torch.tensor(token_ids, device=transport.device)
    positions = torch.arange(len(ids), device=transport.device)

    def rows_of(of_tokens: Tensor) -> Tensor:
        return torch.cat([of_tokens[:prompt_tokens], of_tokens[prompt_tokens:].repeat(texts)])

    positions = rows_of(positions)
    x, partial = model.embed(rows_of(ids)), None
    hits = []
    for layer in range(model.num_layers):
        x, q, k, v = model.pre_attention(layer, x, partial, positions)
        prompt_out, full_out, spec_out = _attention(q, k, v, chunk_size, model.sm_scale, prompt_tokens, texts, cache)
        sums = combine_sums(transport.all_gather_group(distance_sums(spec_out, full_out))).split(num_decoded)
        accepted = torch.cat([accepts(of, under[layer]) for of, under in zip(sums, thresholds, strict=True)])
        hits.append(accepted.view(texts, num_decoded))
        attn_out = torch.cat([prompt_out, torch.where(accepted[:, None, None], spec_out, full_out)])
        x, partial = model.post_attention(layer, x, attn_out)
    x = model.reduce_residual(x, partial)

    # The prompt's last row says its token after it, which is the same under all; the text's last row says none.
    decoded = x[prompt_tokens:].unflatten(0, (texts, num_decoded))[:, :-1].flatten(0, 1)
    nll, predicted = _predict(
        model,
        transport,
        torch.cat([x[:prompt_tokens], decoded]),
        torch.cat([ids[1 : prompt_tokens + 1], ids[prompt_tokens + 1 :].repeat(texts)]),
    )
    nll, predicted = (
        torch.cat([of[:prompt_tokens].expand(texts, -1), of[prompt_tokens:].view(texts, -1)], dim=1).cpu()
        for of in (nll, predicted)
    )
    accepted = F.pad(torch.stack(hits, dim=1), (prompt_tokens, 0)).cpu()  # [texts, L, n]
    return [TextScore(*of_text) for of_text in zip(nll, predicted, accepted, strict=True)]


def _predict(model: Llama, transport: Transport, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each row's target, and each row's greedy token."""
    nll, predicted = [], []
    for rows, wanted in zip(x.split(LOGITS_TOKENS), targets.split(LOGITS_TOKENS), strict=True):
        logits = gather_logits(model, transport, rows)
        nll.append(F.cross_entropy(logits, wanted, reduction="none"))
        predicted.append(logits.argmax(-1))
    return torch.cat(nll), torch.cat(predicted)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    sm_scale: float,
    prompt_tokens: int,
    texts: int,
    cache: CacheSetting,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows that `_score` has: the prompt's full attention [P, Hq, D], `A` and `A~` of the rows after it."""
    num_kv_heads = k.shape[1]
    q_prompt, k_prompt, v_prompt = q[:prompt_tokens], *(of[:prompt_tokens].transpose(0, 1) for of in (k, v))
    q, k, v = (_texts_as_heads(of[prompt_tokens:], texts) for of in (q, k, v))
    k, v = (
        torch.cat([of_prompt.repeat(texts, 1, 1), of.transpose(0, 1)], dim=1)
        for of_prompt, of in ((k_prompt, k), (v_prompt, v))
    )  # [texts Hkv, n, D]
    if cache == EXACT_CACHE and not prompt_tokens:
        prompt_out = q_prompt
        outs = prefill_attention(q, k, v, sm_scale), predictor_attention_all(q, k, v, chunk_size, sm_scale)
    else:
        cached = cache_text(k, v, prompt_tokens or min(len(q), CALIBRATION_TOKENS), cache, texts)
        outs = teacher_forced_attention(q, *cached, chunk_size, sm_scale, cache)
        prompt_out = q_prompt.float()
        if prompt_tokens:
            cached = _of_heads(cached[0], num_kv_heads), _of_heads(cached[1], num_kv_heads)
            prompt_out = prompt_attention(q_prompt, k_prompt, v_prompt, cached, sm_scale, cache)
    return prompt_out, *(of.unflatten(1, (texts, -1)).transpose(0, 1).flatten(0, 1) for of in outs)


def _texts_as_heads(rows: Tensor, texts: int) -> Tensor:
    """[texts m, H, D], one text after the other -> [m, texts H, D]."""
    as_heads: Tensor = rows.unflatten(0, (texts, -1)).transpose(0, 1).flatten(1, 2)
    return as_heads


def _of_heads(cached: CachedTensor, num_heads: int) -> CachedTensor:
    return CachedTensor(cached.stored[:num_heads], cached.tail[:num_heads])
