"""Attention over floating-point K and V in PyTorch operators: prefill on every device, decode on CPU tensors.

Speculative decode first computes the partial over sink and window (`predictor_attention`), which may be sent. Then it
computes the rest, combines the two and returns the sums for the verdict (`verify_attention`). On CUDA tensors the lean
kernel does both; see `dispatch.py`.

Shapes: B requests, Hq query heads, Hkv KV heads, D head_dim, N cache capacity, n tokens. `lse` is base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from alspec.kernels.kv_codec.flashq.quantize import dequantize
from alspec.predictor import KV_TILE, first_visible, predictor_ranges
from alspec.sas import Softmax, cutoff, sas_softmax

__all__ = [
    "QUERIES_AT_ONCE",
    "SCORES_AT_ONCE",
    "SCORE_BYTES",
    "attend_tokens",
    "decode_attention",
    "decode_weights",
    "dequantized_prefill_attention",
    "combine_partials",
    "newest_causal_mask",
    "predictor_attention",
    "predictor_attention_all",
    "prefill_attention",
    "verify_attention",
    "window_prefill_attention",
]

LOG2E = math.log2(math.e)

# Scores in memory at once where no kernel fuses the softmax: 128 MiB on a GPU; on a CPU, what fits its cache.
SCORE_BYTES = 4 * 4  # peak bytes per score: fp32, and about four copies during the softmax
SCORES_AT_ONCE = {"cuda": 2**25, "cpu": 2**20}
QUERIES_AT_ONCE = 256  # at least this many queries at once after a prefix; fewer are slower

WHOLE_CHUNK = 4096  # tokens; cuDNN gets only prompt chunks of a multiple of this


def decode_weights(q: Tensor, k: Tensor, sm_scale: float, softmax: Softmax, seq_len: int) -> tuple[Tensor, Tensor]:
    """Softmax weights of one request over some of its tokens.

    The SAS cutoff is that for all `seq_len` tokens of the request. It then bounds the mass that the combined output
    lacks, because the maximum over some tokens is not above the maximum over all.

    Args:
        q: [Hq, D].  k: [Hkv, n, D], n > 0.
    Returns:
        weights: [Hkv, Hq / Hkv, n] fp32, of sum 1.  lse: [Hkv, Hq / Hkv] fp32, base 2.
    """
    # The query heads of one KV head are the rows of one product, so K and V are read once.
    rows = q.reshape(k.shape[0], -1, k.shape[2])
    scores = rows.float() @ k.float().transpose(1, 2) * sm_scale
    if softmax == "sas":
        weights, log_sum = sas_softmax(scores, cutoff(seq_len))
    else:
        weights, log_sum = torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    return weights, log_sum * LOG2E


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, softmax: Softmax, seq_len: int
) -> tuple[Tensor, Tensor]:
    """One request's partial: q [Hq, D], k, v [Hkv, n, D] -> o [Hq, D] fp32, lse [Hq] fp32; n = 0 gives (0, -inf)."""
    if k.shape[1] == 0:
        return q.new_zeros(q.shape, dtype=torch.float32), q.new_full(q.shape[:1], -math.inf, dtype=torch.float32)
    weights, lse = decode_weights(q, k, sm_scale, softmax, seq_len)
    return (weights @ v.float()).flatten(0, 1), lse.flatten()


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    softmax: Softmax = "exact",
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per request over its first `seq_lens` cached tokens.

    Oracle: `decode_attention_ref`.

    Args:
        q: [B, Hq, D].  k_cache, v_cache: [B, Hkv, N, D] in q's dtype.
        seq_lens: [B] integers; read on the host, to slice the cache.
        softmax: "sas" uses the weights of `alspec/sas.py`, with the cutoff for each request's length.
        sliding_window: only the newest tokens that it counts are read; None: all.
    Returns:
        o: [B, Hq, D] fp32.  lse: [B, Hq] fp32, base 2.
    """
    spans = zip(first_visible(seq_lens, sliding_window).tolist(), seq_lens.tolist(), strict=True)
    parts = [
        attend_tokens(q[b], k_cache[b, :, start:n], v_cache[b, :, start:n], sm_scale, softmax, n)
        for b, (start, n) in enumerate(spans)
    ]
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])


def combine_partials(o_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Combine partial attention outputs into one.

        o = sum_s 2^(lse_s - lse) o_s,   lse = log2 sum_s 2^lse_s

    Source: Lean Attention, section 4 (associativity of softmax rescaling). Oracle: `combine_partials_ref`.

    Args:
        o_partial: [num_splits, B, Hq, D] fp32.  lse_partial: [num_splits, B, Hq] fp32, base 2; an empty split has -inf.
    Returns:
        o: [B, Hq, D] fp32.  lse: [B, Hq] fp32, base 2.
    """
    lse_max = lse_partial.amax(dim=0)
    weight = torch.exp2(lse_partial - lse_max)
    total = weight.sum(dim=0)
    return (weight[..., None] * o_partial).sum(dim=0) / total[..., None], lse_max + torch.log2(total)


def predictor_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    chunk_size: int,
    sm_scale: float,
    softmax: Softmax = "exact",
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`A~`: attention over sink and window, each token counted once. Source: ALSpec, section 3.1.

    Args and Returns as for `decode_attention`; `chunk_size` (S) gives the lengths of sink and window.
    """
    sink_end, window_start = (ends.tolist() for ends in predictor_ranges(seq_lens, chunk_size, sliding_window))
    first = first_visible(seq_lens, sliding_window).tolist()
    parts = []
    for b, n in enumerate(seq_lens.tolist()):
        spans = [(min(first[b], sink_end[b]), sink_end[b]), (max(first[b], window_start[b]), n)]
        k, v = (torch.cat([cache[b, :, i:j] for i, j in spans], dim=1) for cache in (k_cache, v_cache))
        parts.append(attend_tokens(q[b], k, v, sm_scale, softmax, n))
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])


def verify_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    spec_out: Tensor,
    spec_lse: Tensor,
    chunk_size: int,
    sm_scale: float,
    softmax: Softmax = "exact",
    sliding_window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the tokens between sink and window and complete the partial over sink and window to `A`.

    Args:
        spec_out, spec_lse: from `predictor_attention`. Others as there.
    Returns:
        full_out: [B, Hq, D] fp32.  lse: [B, Hq] fp32, base 2.
    Oracle: `speculative_decode_attention_ref`.
    """
    sink_end, window_start = predictor_ranges(seq_lens, chunk_size, sliding_window)
    starts = torch.maximum(sink_end, torch.minimum(first_visible(seq_lens, sliding_window), window_start))
    spans = zip(starts.tolist(), window_start.tolist(), seq_lens.tolist(), strict=True)
    parts = [
        attend_tokens(q[b], k_cache[b, :, start:stop], v_cache[b, :, start:stop], sm_scale, softmax, n)
        for b, (start, stop, n) in enumerate(spans)
    ]
    rest_out, rest_lse = torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])
    return combine_partials(torch.stack([spec_out, rest_out]), torch.stack([spec_lse, rest_lse]))


def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, sm_scale: float, softmax: Softmax = "exact", cutoff_tokens: int | None = None
) -> Tensor:
    """Causal attention of the newest tokens over a prefix that ends with them. Oracle: `prefill_attention_ref`.

    Args:
        q: [n_q, Hq, D], the last `n_q` of `n` tokens.  k, v: [Hkv, n, D] in q's dtype.
        softmax: "sas" uses the weights of `alspec/sas.py`, in fp32.
        cutoff_tokens: every row has the SAS cutoff for this many tokens; default n.
    Returns:
        [n_q, Hq, D] in q's dtype.
    """
    if softmax == "sas":
        return _sas_prefill_attention(q, k, v, sm_scale, cutoff_tokens or k.shape[1])
    prefix = k.shape[1] - q.shape[0]
    qkv = q.transpose(0, 1)[None], k[None], v[None]
    if fused := _fused_prefill(*qkv):
        return fused(*qkv, prefix, sm_scale)[0].transpose(0, 1)
    if prefix == 0 and not q.is_cuda:
        out = F.scaled_dot_product_attention(*qkv, is_causal=True, scale=sm_scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    outs, end = [], prefix
    # Split the queries: a mask is as large as the scores of one head, and a GPU also holds the scores of all heads.
    row = k.shape[1] * (q.shape[1] if q.is_cuda else 1)
    for queries in q.split(max(QUERIES_AT_ONCE, SCORES_AT_ONCE[q.device.type] // row)):
        end += len(queries)
        outs.append(_masked_attention(queries, k[:, :end], v[:, :end], sm_scale))
    return torch.cat(outs)


def window_prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sm_scale: float,
    window: int,
    softmax: Softmax = "exact",
    cutoff_tokens: int | None = None,
) -> Tensor:
    """`prefill_attention` in which a token attends to its newest `window` tokens, itself included.

    Args:
        q: [n_q, Hq, D], the last `n_q` of `n` tokens.  k, v: [Hkv, n, D] in q's dtype.
        softmax, cutoff_tokens: as for `prefill_attention`.
    Returns:
        [n_q, Hq, D] in q's dtype. Oracle: `prefill_attention_ref`.
    """
    outs, end = [], k.shape[1] - q.shape[0]
    # Few queries at once: each of them reads the keys of all their windows.
    for queries in q.split(QUERIES_AT_ONCE):
        start, end = max(0, end + 1 - window), end + len(queries)
        token = torch.arange(start, end, device=q.device)
        position = token[len(token) - len(queries) :, None]
        visible = (token <= position) & (token > position - window)
        if softmax == "sas":
            keys, values = k[:, start:end].float().transpose(1, 2), v[:, start:end].float()
            n_r = cutoff(cutoff_tokens or k.shape[1])
            outs.append(_sas_attention(queries, keys, values, visible, sm_scale, n_r).to(q.dtype))
            continue
        qkv = queries.transpose(0, 1)[None], k[None, :, start:end], v[None, :, start:end]
        out = F.scaled_dot_product_attention(*qkv, visible, scale=sm_scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """`prefill_attention` with a mask. The mask is freed on return, before the next queries need one."""
    (num_queries, *_), num_tokens = q.shape, k.shape[1]
    mask = newest_causal_mask(num_queries, num_tokens) if q.is_cuda else _mask_bias(num_queries, num_tokens, q.dtype)
    qkv = q.transpose(0, 1)[None], k[None], v[None]
    out = F.scaled_dot_product_attention(*qkv, mask, scale=sm_scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _fused_prefill(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, Tensor, int, float], Tensor] | None:
    """Choose the fused GPU attention for q, k, v [1, heads, tokens, D]; None if there is none.

    On compute capability 9 and 10 cuDNN is the fastest, but it plans each new shape, which takes longer than a short
    prompt can save. So cuDNN gets prompt chunks whose shapes recur, and FlashAttention, the others.
    """
    if not q.is_cuda:
        return None
    params = SDPAParams(q, k, v, None, 0.0, False, True)
    # Multiples of 128: before cuDNN 9.15.1, PyTorch does not use it for other lengths.
    is_whole = q.shape[2] % WHOLE_CHUNK == 0 and k.shape[2] % 128 == 0
    if is_whole and torch.cuda.get_device_capability(q.device)[0] in (9, 10) and can_use_cudnn_attention(params):
        return _attention_by_cudnn
    return _attention_by_flash if can_use_flash_attention(params) and q.shape[3] % 8 == 0 else None


def _attention_by_flash(q: Tensor, k: Tensor, v: Tensor, prefix: int, sm_scale: float) -> Tensor:
    """As `_attention_by_cudnn`. This causal mask is aligned to the last token of q and k, so it needs no prefix."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=sm_scale)[0]
    return out


def _attention_by_cudnn(q: Tensor, k: Tensor, v: Tensor, prefix: int, sm_scale: float) -> Tensor:
    """Causal attention of the tokens after a prefix: among themselves, and over the prefix, then combined.

    Two calls, because cuDNN has no causal mask that starts after a prefix. Both together are still faster than
    FlashAttention, which has such a mask.

    Args:
        q, k, v: as for `_fused_prefill`; the tokens of q are the last ones of k and v.
    """
    own, lse_own = _partial_by_cudnn(q, k[:, :, prefix:], v[:, :, prefix:], True, sm_scale)
    if prefix == 0:
        return own
    before, lse_before = _partial_by_cudnn(q, k[:, :, :prefix], v[:, :, :prefix], False, sm_scale)
    share = torch.sigmoid(lse_own - lse_before)[..., None]
    return before.float().lerp_(own.float(), share).to(q.dtype)


def _partial_by_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """The operator behind F.scaled_dot_product_attention: returns (o, lse); lse: [1, Hq, n_q] fp32, base e."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(q, k, v, None, True, is_causal=is_causal, scale=sm_scale)
    return out, lse.view(out.shape[:3])


def newest_causal_mask(num_queries: int, num_tokens: int) -> Tensor:
    """Causal mask of the last `num_queries` of `num_tokens` tokens, for PyTorch's attention."""
    # Imported here: it loads TorchDynamo, which would slow down the start of every command.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(num_queries, num_tokens)


def _mask_bias(num_queries: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """`newest_causal_mask` as a bias [num_queries, num_tokens]; a CPU would make it from the mask, with more copies."""
    mask = torch.zeros(num_queries, num_tokens, dtype=dtype)
    masked = torch.ones(num_queries, num_queries, dtype=torch.bool).triu(1)
    mask[:, num_tokens - num_queries :].masked_fill_(masked, -math.inf)
    return mask


def _sas_prefill_attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float, cutoff_tokens: int) -> Tensor:
    """`prefill_attention` with SAS weights; only as many queries at a time as `SCORES_AT_ONCE` allows."""
    (num_queries, num_qo_heads, _), num_tokens = q.shape, k.shape[1]
    n_r, keys, values = cutoff(cutoff_tokens), k.float().transpose(1, 2), v.float()
    token = torch.arange(num_tokens, device=q.device)
    at_once = max(1, SCORES_AT_ONCE[q.device.type] // (num_qo_heads * num_tokens))
    outs = []
    for queries, position in zip(q.split(at_once), token[num_tokens - num_queries :].split(at_once), strict=True):
        outs.append(_sas_attention(queries, keys, values, token <= position[:, None], sm_scale, n_r))
    return torch.cat(outs).to(q.dtype)


def _sas_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, sm_scale: float, n_r: float) -> Tensor:
    """Attention with SAS weights: q [n_q, Hq, D], keys [Hkv, D, n] fp32, values [Hkv, n, D] fp32, visible [n_q, n]."""
    (num_queries, num_qo_heads, head_dim), num_kv_heads = q.shape, keys.shape[0]
    rows = q.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [Hkv, heads x queries, D]
    scores = (rows @ keys * sm_scale).unflatten(1, (-1, num_queries))
    weights, _ = sas_softmax(scores.masked_fill(~visible, -math.inf), n_r)
    return (weights.flatten(1, 2) @ values).view(num_qo_heads, num_queries, head_dim).transpose(0, 1)


def dequantized_prefill_attention(
    q: Tensor,
    k8: Tensor,
    v8: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    sm_scale: float,
    softmax: Softmax = "exact",
    cutoff_tokens: int | None = None,
    window: int | None = None,
) -> Tensor:
    """`prefill_attention` over INT8 keys and values, dequantised to q's dtype.

    Args:
        q: [n_q, Hq, D], the last `n_q` of `n` tokens.  k8, v8: [Hkv, n, D] int8.
        k_scale, v_scale: [Hkv, ceil(n / 64)] fp32, one per block of 64 tokens.
        window: newest tokens that a token attends to; None: all.
    Returns:
        [n_q, Hq, D] in q's dtype. Oracle: `prefill_attention_ref` of the dequantised tensors.
    """
    first = 0 if window is None else max(0, k8.shape[1] - len(q) + 1 - window) // KV_TILE  # block; others are not read
    k, v = (
        dequantize(x8[:, first * KV_TILE :], scale[:, first:]).to(q.dtype)
        for x8, scale in ((k8, k_scale), (v8, v_scale))
    )
    if window is None:
        return prefill_attention(q, k, v, sm_scale, softmax, cutoff_tokens)
    return window_prefill_attention(q, k, v, sm_scale, window, softmax, cutoff_tokens or k8.shape[1])


def predictor_attention_all(q: Tensor, k: Tensor, v: Tensor, chunk_size: int, sm_scale: float) -> Tensor:
    """Compute `A~` at every position of a sequence: each over the sink and window that decoding would read there.

    Args:
        q: [n, Hq, D].  k, v: [Hkv, n, D] in q's dtype.
    Returns:
        [n, Hq, D] in q's dtype. Oracle: `speculative_decode_attention_ref` at every length.
    """
    num_tokens, window = q.shape[0], chunk_size + KV_TILE - 1
    # Up to this length sink and window touch: A~ is the full causal attention.
    exact = min(num_tokens, 2 * chunk_size + KV_TILE - 1)
    out = prefill_attention(q[:exact], k[:, :exact], v[:, :exact], sm_scale)
    if exact == num_tokens:
        return out
    # Blocks of 64 queries share their first window token, `chunk_size - 1` tokens before the block's first query.
    blocks = -(-(num_tokens - exact) // KV_TILE)
    first = exact - (chunk_size - 1)
    tail = first + (blocks - 1) * KV_TILE + window - num_tokens

    def sink_and_windows(cache: Tensor) -> Tensor:
        sink = cache[:, None, :chunk_size].expand(-1, blocks, -1, -1)
        windows = F.pad(cache, (0, 0, 0, tail))[:, first:].unfold(1, window, KV_TILE).transpose(2, 3)
        return torch.cat([sink, windows], dim=2).transpose(0, 1)

    queries = F.pad(q[exact:], (0, 0, 0, 0, 0, blocks * KV_TILE - (num_tokens - exact)))
    queries = queries.view(blocks, KV_TILE, *q.shape[1:]).transpose(1, 2)
    age = torch.arange(window, device=q.device) - (chunk_size - 1) - torch.arange(KV_TILE, device=q.device)[:, None]
    visible = torch.cat([age.new_ones(KV_TILE, chunk_size, dtype=torch.bool), age <= 0], dim=1)
    rest = F.scaled_dot_product_attention(
        queries, sink_and_windows(k), sink_and_windows(v), attn_mask=visible, scale=sm_scale, enable_gqa=True
    )
    return torch.cat([out, rest.transpose(1, 2).flatten(0, 1)[: num_tokens - exact]])
