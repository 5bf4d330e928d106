"""Oracles of the kernels: fp64, plain torch, with the argument names of the launchers. They never mutate inputs.

Shapes: B requests, Hq query heads, Hkv KV heads, D head_dim, N cache capacity, n tokens. `lse` is base 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.sas import COEFFICIENTS, Softmax, cutoff
from alspec.verdict import accepts, combine_sums, layer_verdict

__all__ = [
    "add_rms_norm_ref",
    "apply_rope_ref",
    "collect_logits_ref",
    "decide_ref",
    "decode_attention_ref",
    "embed_norm_ref",
    "gate_up_silu_ref",
    "lm_head_ref",
    "combine_partials_ref",
    "prefill_attention_ref",
    "push_partial_ref",
    "qkv_rope_append_ref",
    "reduce_norm_ref",
    "rms_norm_ref",
    "silu_mul_ref",
    "speculative_decode_attention_ref",
    "int8_prefill_attention_ref",
]

LOG2E = math.log2(math.e)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * weight`; x [..., hidden] -> [..., hidden] fp64."""
    x = x.double()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def add_rms_norm_ref(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x' = x + sum(parts)` and `rms_norm_ref(x')`; x [n, hidden], parts [P, n, hidden] -> two [n, hidden] fp64."""
    x = x.double() if parts is None else x.double() + parts.double().sum(0)
    return x, rms_norm_ref(x, weight, eps)


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`; gate_up [..., 2 I] with gate first -> [..., I] fp64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def apply_rope_ref(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate channel pairs `(c, c + D/2)` by `position * inv_freq[c]`; x [n, H, D], positions [n] -> [n, H, D] fp64."""
    angle = positions.double()[:, None] * inv_freq.double()[None, :]
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _softmax(scores: Tensor, n_r: float | None) -> tuple[Tensor, Tensor]:
    """Return (weights [..., n], natural logarithm of their sum [...]); with `n_r`, those of SAS by its formula."""
    if n_r is None:
        return torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    score_max = scores.amax(-1, keepdim=True)
    x = (scores - score_max) * LOG2E
    f = x - x.round()
    weights = torch.exp2(x.round()) * (1 + sum(c * f**power for power, c in enumerate(COEFFICIENTS, 1)))
    weights = weights.masked_fill(score_max - scores > n_r, 0)
    total = weights.sum(-1, keepdim=True)
    return weights / total, (score_max + total.log()).squeeze(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, n_r: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of q [Hq, D] over k, v [Hkv, n, D]; n = 0 gives o = 0, lse = -inf. n_r: cutoff of SAS, or None."""
    num_kv_heads, num_tokens, head_dim = k.shape
    q = q.double().reshape(num_kv_heads, -1, head_dim)
    if num_tokens == 0:
        return torch.zeros_like(q).flatten(0, 1), q.new_full(q.shape[:2], -math.inf).flatten()
    scores = q @ k.double().transpose(1, 2) * sm_scale
    weights, log_sum = _softmax(scores, n_r)
    return (weights @ v.double()).flatten(0, 1), (log_sum * LOG2E).flatten()


def _cutoff(softmax: Softmax, num_tokens: int) -> float | None:
    return cutoff(num_tokens) if softmax == "sas" else None


def decode_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    softmax: Softmax = "exact",
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per request over its first `seq_lens` cached tokens.

    Args:
        q: [B, Hq, D].  k_cache, v_cache: [B, Hkv, N, D].  seq_lens: [B] integers.
        softmax: "sas" uses the cutoff for each request's length.
        sliding_window: W, the newest token attends to tokens t > n - 1 - W; None: to all.
    Returns:
        o: [B, Hq, D] fp64.  lse: [B, Hq] fp64, base 2.
    """
    spans = [(max(0, n - (sliding_window or n)), n) for n in seq_lens.tolist()]
    parts = [
        _attend(q[b], k_cache[b, :, start:n], v_cache[b, :, start:n], sm_scale, _cutoff(softmax, n))
        for b, (start, n) in enumerate(spans)
    ]
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])


def combine_partials_ref(o_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """`o = sum_s 2^(lse_s - lse) o_s`, `lse = log2 sum_s 2^lse_s`.

    Args:
        o_partial: [num_splits, B, Hq, D].  lse_partial: [num_splits, B, Hq], base 2.
    Returns:
        o: [B, Hq, D] fp64.  lse: [B, Hq] fp64, base 2.
    """
    lse = torch.logsumexp(lse_partial.double() / LOG2E, dim=0) * LOG2E
    weight = torch.exp2(lse_partial.double() - lse)
    return (weight[..., None] * o_partial.double()).sum(0), lse


def speculative_decode_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    chunk_size: int,
    sm_scale: float,
    softmax: Softmax = "exact",
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`A~` over sink and window, `A` over everything, and `(dist2, norm2)` of their difference.

    `A~` covers the tokens `t < S`, and those with `t >= n - S`, rounded down to a multiple of 64. With "sas" its cutoff
    is that for all n tokens. Both read only tokens `t > n - 1 - W`, with a sliding window of W.

    Returns:
        spec_out, full_out: [B, Hq, D] fp64.  sums: [B, 2] fp64.
    """
    full_out, _ = decode_attention_ref(q, k_cache, v_cache, seq_lens, sm_scale, softmax, sliding_window)
    spec_out = torch.empty_like(full_out)
    for b, n in enumerate(seq_lens.tolist()):
        window_start = max(n - chunk_size, 0) // 64 * 64
        visible = range(max(0, n - (sliding_window or n)), n)
        tokens = [t for t in visible if t < chunk_size or t >= window_start]
        spec_k, spec_v = k_cache[b, :, tokens], v_cache[b, :, tokens]
        spec_out[b], _ = _attend(q[b], spec_k, spec_v, sm_scale, _cutoff(softmax, n))
    dist2 = (spec_out - full_out).pow(2).sum((1, 2))
    norm2 = full_out.pow(2).sum((1, 2))
    return spec_out, full_out, torch.stack([dist2, norm2], dim=1)


def prefill_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, softmax: Softmax = "exact", window: int | None = None
) -> Tensor:
    """Causal attention of the newest tokens over a prefix that ends with them.

    Args:
        q: [n_q, Hq, D], the last `n_q` of `n` tokens.  k, v: [Hkv, n, D].
        softmax: "sas" uses the cutoff for n tokens.
        window: newest tokens that a token attends to, itself included; None: all.
    Returns:
        [n_q, Hq, D] fp64.
    """
    num_queries, num_tokens = q.shape[0], k.shape[1]
    n_r = _cutoff(softmax, num_tokens)
    prefixes = range(num_tokens - num_queries + 1, num_tokens + 1)
    spans = [(max(0, n - (window or n)), n) for n in prefixes]
    return torch.stack([_attend(q[i], k[:, a:b], v[:, a:b], sm_scale, n_r)[0] for i, (a, b) in enumerate(spans)])


def int8_prefill_attention_ref(
    q: Tensor, k8: Tensor, v8: Tensor, k_scale: Tensor, v_scale: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of the newest tokens over dequantised INT8 K and V; q is not quantised.

    Args:
        q: [n_q, Hq, D], the last `n_q` of `n` tokens.  k8, v8: [Hkv, n, D] int8.
        k_scale, v_scale: [Hkv, ceil(n / 64)], one scale per 64 tokens.
    Returns:
        o: [n_q, Hq, D] fp64.  lse: [n_q, Hq] fp64, base 2.
    """
    num_queries, num_tokens = q.shape[0], k8.shape[1]
    k, v = (
        values.double() * scale.double().repeat_interleave(64, 1)[:, :num_tokens, None]
        for values, scale in ((k8, k_scale), (v8, v_scale))
    )
    # [Hkv, n_q, Hq / Hkv, D]: the queries of one KV head are the rows of one product.
    rows = q.double().unflatten(1, (k8.shape[0], -1)).permute(1, 0, 2, 3)
    scores = torch.einsum("hqgd,hnd->hqgn", rows, k) * sm_scale
    tokens = torch.arange(num_tokens, device=q.device)
    later = tokens > tokens[num_tokens - num_queries :, None]
    scores = scores.masked_fill(later[None, :, None], -math.inf)
    out = torch.einsum("hqgn,hnd->qhgd", torch.softmax(scores, -1), v).flatten(1, 2)
    return out, (torch.logsumexp(scores, -1) * LOG2E).permute(1, 0, 2).flatten(1)


def _normalised(x_norm: Tensor, square_sums: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """`(x_norm W^T) / sqrt(sum(square_sums) / K + eps) + bias`, [B, rows] fp64."""
    rms = torch.sqrt(square_sums.double().sum(1, keepdim=True) / x_norm.shape[1] + eps)
    y = x_norm.double() @ weight.double().T / rms
    return y if bias is None else y + bias.double()


def embed_norm_ref(
    token_ids: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    gamma: Tensor,
    rotary: RotaryFrequencies,
    rope_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embedding and RoPE of the new tokens.

    Returns:
        x, x_norm = x * gamma: [B, hidden] fp64.  square_sum: [B] fp64, of x.  rope: [B, 2, D/2] fp64, cosine and sine.
    """
    x = table[token_ids].double()
    inv_freq = rotary.at(seq_lens - 1)
    angle = (seq_lens.double() - 1)[:, None] * inv_freq.double()
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    rope = torch.where(inv_freq.unsqueeze(-2) > 0, rope_factor * rope, rope)
    return x, x * gamma.double(), x.pow(2).sum(1), rope


def qkv_rope_append_ref(
    x_norm: Tensor,
    square_sums: Tensor,
    weight: Tensor,
    rope: Tensor,
    num_kv_heads: int,
    eps: float,
    bias: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, Hq, D], new k and new v [B, Hkv, D], fp64.

    Args:
        rope: [B, 2, D/2], cosine and sine.
        norms: weights [D] of an RMSNorm of each query head and each key head before the rotation.
    """
    head_dim = 2 * rope.shape[2]
    heads = _normalised(x_norm, square_sums, weight, eps, bias).unflatten(1, (-1, head_dim))
    if norms is not None:
        parts = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        normed = [rms_norm_ref(part, norm, eps) for part, norm in zip(parts[:2], norms, strict=True)]
        heads = torch.cat([*normed, parts[2]], dim=1)
    cos, sin = rope.double()[:, 0, None], rope.double()[:, 1, None]
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    num_qo_heads = heads.shape[1] - 2 * num_kv_heads
    return (
        rotated[:, :num_qo_heads],
        rotated[:, num_qo_heads : num_qo_heads + num_kv_heads],
        heads[:, num_qo_heads + num_kv_heads :],
    )


def gate_up_silu_ref(
    x_norm: Tensor, square_sums: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    """`silu(gate) * up` of the normalised input; weight [2 I, K] and bias [2 I], gate first -> [B, I] fp64."""
    return silu_mul_ref(_normalised(x_norm, square_sums, weight, eps, bias))


def push_partial_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Partial sums `x W^T + bias` of one rank: [B, hidden] fp64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def reduce_norm_ref(partials: Tensor, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the partial sums [T, B, hidden] of all ranks to the residual x [B, hidden].

    Returns:
        x, x * gamma: [B, hidden] fp64.  square_sum: [B] fp64.
    """
    x = x.double() + partials.double().sum(0)
    return x, x * gamma.double(), x.pow(2).sum(1)


def lm_head_ref(x_norm: Tensor, square_sums: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Logits of the vocabulary rows in `weight` [rows, K]: [B, rows] fp64."""
    return _normalised(x_norm, square_sums, weight, eps)


def collect_logits_ref(shards: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return (logits [B, V], argmax [B], the first one if tied) from the shards [world, B, rows] of all ranks."""
    logits = shards.movedim(0, 1).flatten(1)[:, :vocab_size]
    return logits, (logits == logits.amax(1, keepdim=True)).int().argmax(1)


def decide_ref(rank_sums: Tensor, live: Tensor, threshold: float) -> tuple[Tensor, bool]:
    """Return (hits [B] bool of live requests, verdict of the layer) from the sums [T, B, R, 2] of a group's ranks."""
    accepted = accepts(combine_sums(rank_sums.sum(2)), threshold)
    return accepted & live.bool(), bool(layer_verdict(accepted, live.bool()))
