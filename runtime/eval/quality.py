"""Quality under speculation: verdicts and predictions as in token-by-token decoding of a given text.

The verdict at a position depends on its own activations and on the keys and values of the tokens before it. For a given
text all of them are known, so one pass over all positions, layer by layer, equals `simulated` decoding step by step.
This holds for a quantised cache too: how a position reads an earlier token depends only on their two positions. Blocks
that `A~` recalls follow from the full attention of the tokens before.

Rotary frequencies that depend on the length are those of the text that is read, all but its last token, as in a forward
pass of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.config import QUANTISED_CODECS
from alspec.kernels.attention.torch_attention import predictor_attention_all, prefill_attention
from alspec.models.llama import Llama, pad_halves
from alspec.runtime.cache.codecs import fit_heads
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

# Positions whose logits are in memory at once.
LOGITS_TOKENS = 1024
# Largest number of key values of a layer for all lambdas that are scored together: 512 MiB in fp32.
KEYS_AT_ONCE = 2**27
# Without a prompt, this many first tokens determine the scales and the 2-bit heads of the cache, as a prompt would.
CALIBRATION_TOKENS = 1024
EXACT_CACHE = CacheSetting()


@dataclass(frozen=True)
class TextScore:
    """Prediction of a text by a model under speculation."""

    nll: Tensor  # [n - 1] fp32, -ln p(token i + 1 | tokens up to i)
    predicted: Tensor  # [n - 1] int64, the greedy token after token i
    hits: Tensor  # [L, n] bool, True where A~ is accepted; False in the prompt


def score_text(
    model: Llama,
    transport: Transport,
    token_ids: list[int],
    threshold: float | Sequence[float],
    chunk_size: int,
    prompt_tokens: int = 0,
    cache: CacheSetting = EXACT_CACHE,
) -> TextScore:
    """Score a text as if all tokens after the first `prompt_tokens` were decoded with speculation, batch 1.

    Args:
        model: this rank's part of the model.
        transport: connects the ranks.
        token_ids: the text, n >= 2 tokens.
        threshold: lambda, or one for each layer.
        chunk_size: S.
        prompt_tokens: length of the prompt, which uses full attention as in prefill.
        cache: the cache that decoded tokens read. Without a prompt, the first `CALIBRATION_TOKENS` set its scales.
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
    """`score_text` for several lambdas at once. The prompt is the same for all of them and is computed once.

    Args:
        thresholds: for each result, one lambda for each layer.
    Returns:
        One score for each entry of `thresholds`.
    """
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
    """Score all lambdas in one pass. Rows of activations: first the prompt, then the other tokens once per lambda."""
    num_texts, num_decoded = len(thresholds), len(token_ids) - prompt_tokens
    ids = torch.tensor(token_ids, device=transport.device)
    positions = torch.arange(len(ids), device=transport.device)

    def rows_of(per_token: Tensor) -> Tensor:
        return torch.cat([per_token[:prompt_tokens], per_token[prompt_tokens:].repeat(num_texts)])

    padding = 0 if cache.codec not in QUANTISED_CODECS else fit_heads(cache.codec, model.config).head_padding
    positions = rows_of(positions)
    x, partial = model.embed(rows_of(ids)), None
    hits, windows = [], model.config.windows(len(ids))
    for layer in range(model.num_layers):
        x, q, k, v = model.pre_attention(layer, x, partial, positions, len(ids) - 1)
        # As in an engine with this cache; the verdict sees what a rotation of the values moves into the padding.
        q, k, v = pad_halves(q, padding), pad_halves(k, padding), F.pad(v, (0, padding))
        setting = cache.at_layer(layer, model.num_layers, windows[layer])
        prompt_out, full_out, spec_out = _attention(
            q, k, v, chunk_size, model.sm_scale, prompt_tokens, num_texts, setting
        )
        sums = combine_sums(transport.all_gather_group(distance_sums(spec_out, full_out))).split(num_decoded)
        accepted = torch.cat([accepts(each, by_layer[layer]) for each, by_layer in zip(sums, thresholds, strict=True)])
        hits.append(accepted.view(num_texts, num_decoded))
        attn_out = torch.cat([prompt_out, torch.where(accepted[:, None, None], spec_out, full_out)])
        attn_out = attn_out[..., : attn_out.shape[-1] - padding]
        x, partial = model.post_attention(layer, x, attn_out)
    x = model.reduce_residual(x, partial)

    # The prompt's last row predicts the first token after it for all lambdas; the text's last row predicts nothing.
    decoded = x[prompt_tokens:].unflatten(0, (num_texts, num_decoded))[:, :-1].flatten(0, 1)
    nll, predicted = _predict(
        model,
        transport,
        torch.cat([x[:prompt_tokens], decoded]),
        torch.cat([ids[1 : prompt_tokens + 1], ids[prompt_tokens + 1 :].repeat(num_texts)]),
    )
    nll, predicted = (
        torch.cat([each[:prompt_tokens].expand(num_texts, -1), each[prompt_tokens:].view(num_texts, -1)], dim=1).cpu()
        for each in (nll, predicted)
    )
    accepted = F.pad(torch.stack(hits, dim=1), (prompt_tokens, 0)).cpu()  # [num_texts, L, n]
    return [TextScore(*fields) for fields in zip(nll, predicted, accepted, strict=True)]


def _predict(model: Llama, transport: Transport, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's -ln p(target) and its greedy token."""
    nll, predicted = [], []
    for rows, target in zip(x.split(LOGITS_TOKENS), targets.split(LOGITS_TOKENS), strict=True):
        logits = gather_logits(model, transport, rows)
        nll.append(F.cross_entropy(logits, target, reduction="none"))
        predicted.append(logits.argmax(-1))
    return torch.cat(nll), torch.cat(predicted)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    sm_scale: float,
    prompt_tokens: int,
    num_texts: int,
    cache: CacheSetting,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the rows of `_score`.

    Returns:
        The prompt's full attention [prompt_tokens, Hq, D], then `A` and `A~` of the rows after it.
    """
    num_kv_heads = k.shape[1]
    q_prompt, k_prompt, v_prompt = q[:prompt_tokens], *(part[:prompt_tokens].transpose(0, 1) for part in (k, v))
    q, k, v = (_texts_as_heads(part[prompt_tokens:], num_texts) for part in (q, k, v))
    k, v = (
        torch.cat([prompt_part.repeat(num_texts, 1, 1), part.transpose(0, 1)], dim=1)
        for prompt_part, part in ((k_prompt, k), (v_prompt, v))
    )  # [num_texts Hkv, n, D]
    if cache == EXACT_CACHE and not prompt_tokens:
        prompt_out = q_prompt
        outs = prefill_attention(q, k, v, sm_scale), predictor_attention_all(q, k, v, chunk_size, sm_scale)
    else:
        cached = cache_text(k, v, prompt_tokens or min(len(q), CALIBRATION_TOKENS), cache, num_texts)
        q_before = q_prompt[-1:].repeat(1, num_texts, 1) if prompt_tokens else None
        outs = teacher_forced_attention(q, *cached, chunk_size, sm_scale, cache, q_before)
        prompt_out = q_prompt.float()
        if prompt_tokens:
            cached = _first_heads(cached[0], num_kv_heads), _first_heads(cached[1], num_kv_heads)
            prompt_out = prompt_attention(q_prompt, k_prompt, v_prompt, cached, sm_scale, cache)
    return prompt_out, *(part.unflatten(1, (num_texts, -1)).transpose(0, 1).flatten(0, 1) for part in outs)


def _texts_as_heads(rows: Tensor, num_texts: int) -> Tensor:
    """[num_texts m, H, D], one text after the other -> [m, num_texts H, D]."""
    as_heads: Tensor = rows.unflatten(0, (num_texts, -1)).transpose(0, 1).flatten(1, 2)
    return as_heads


def _first_heads(cached: CachedTensor, num_heads: int) -> CachedTensor:
    return CachedTensor(cached.stored[:num_heads], cached.tail[:num_heads])
