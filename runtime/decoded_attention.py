"""Attention of many positions of a text at once, each over the cache as it is when decoding has come to that position.

The token at position i reads every complete block before its own as the codec stores it, and the tokens of its own
block from the INT8 tail. Which tokens those are follows from i alone, so one pass gives what decoding token by token
does.

Shapes: n tokens, m positions (the last of the n), Hq and Hkv this rank's query and KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ..kernels.attention import SCORES_AT_ONCE, prefill_attention
from ..kernels.flashq import (
    BLOCK,
    MIN_SCALE,
    SELECTORS,
    compress,
    dequantize,
    fake_quantize,
    head_priority,
    int8_scale,
    quantize_int8,
    reconstruct,
    select_bits,
    to_int8,
)
from ..predictor import predictor_ranges
from ..sas import Softmax, cutoffs, sas_softmax
from .prefill import CHUNK_TOKENS
from .turbo_cache import TURBO_CODECS

__all__ = ["CODECS", "SOFTMAXES", "CachedTensor", "CacheSetting", "cache_text", "decoded_attention", "prompt_attention"]

CODECS = ("bf16", "int8", *TURBO_CODECS)
SOFTMAXES: tuple[str, ...] = get_args(Softmax)


@dataclass(frozen=True)
class CacheSetting:
    """How the cache holds keys and values, and how attention weighs them."""

    codec: str = "bf16"  # one of `CODECS`; bf16 is the weights' dtype, int8 is stage 1 of FlashQ alone
    softmax: str = "exact"  # one of `SOFTMAXES`
    block_size: int = BLOCK  # tokens of a block, and of the tail
    selector: str = SELECTORS[0]  # of the heads that turbo-mixed holds at 2 bits
    low_heads: int | None = None  # how many of this rank's heads those are; None: half

    @property
    def label(self) -> str:
        """What differs from the default, such as `turbo4, sas, blocks of 32`."""
        default = CacheSetting()
        parts = [self.codec]
        parts += [self.softmax] if self.softmax != default.softmax else []
        parts += [f"blocks of {self.block_size}"] if self.block_size != default.block_size else []
        parts += [self.selector] if self.selector != default.selector else []
        parts += [f"{self.low_heads} heads low"] if self.low_heads != default.low_heads else []
        return ", ".join(parts)


@dataclass(frozen=True)
class CachedTensor:
    """Keys or values of a text, [Hkv, n, D] fp32 each, as they are read."""

    stored: Tensor  # by positions of later blocks
    tail: Tensor  # by positions of a token's own block


def cache_text(k: Tensor, v: Tensor, prompt_tokens: int, setting: CacheSetting) -> tuple[CachedTensor, CachedTensor]:
    """Keys and values of a text as decoding reads them, after a prompt of `prompt_tokens`.

    Complete blocks of the prompt have stage-1 scales of their own; all later tokens have the universal scale, that of
    the whole prompt. turbo-mixed chooses its 2-bit heads by the prompt's first chunk.

    Args:
        k, v: [Hkv, n, D] any float dtype.  prompt_tokens: 1 .. n.
    """
    if setting.codec == "bf16":
        return CachedTensor(k.float(), k.float()), CachedTensor(v.float(), v.float())
    if setting.codec == "turbo-mixed":
        first_chunk = min(prompt_tokens, CHUNK_TOKENS)
        priority = head_priority(k[:, :first_chunk], v[:, :first_chunk], setting.selector)
        low_heads = k.shape[0] // 2 if setting.low_heads is None else setting.low_heads
        bits = select_bits(priority, low_heads).tolist()
    else:
        bits = [{"int8": 8, "turbo4": 4, "turbo2": 2}[setting.codec]] * k.shape[0]
    return tuple(_cache_tensor(x, prompt_tokens, bits, setting.block_size) for x in (k, v))  # type: ignore[return-value]


def _cache_tensor(x: Tensor, prompt_tokens: int, bits: list[int], block: int) -> CachedTensor:
    own, whole = prompt_tokens // block * block, x.shape[1] // block * block
    universal = int8_scale(x[:, :prompt_tokens]).clamp(min=MIN_SCALE)
    codes = to_int8(x, universal)
    tail = codes * universal[:, None, None]
    scales = universal[:, None].repeat(1, whole // block)
    codes[:, :own], scales[:, : own // block] = quantize_int8(x[:, :own], block)
    stored = tail.clone()
    for same in set(bits):
        heads = [head for head, head_bits in enumerate(bits) if head_bits == same]
        blocks = codes[heads, :whole].unflatten(1, (-1, block))
        read = blocks if same == 8 else reconstruct(*compress(blocks, same))
        stored[heads, :whole] = dequantize(read.flatten(1, 2), scales[heads], block)
    return CachedTensor(stored, tail)


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, cached: tuple[CachedTensor, CachedTensor], sm_scale: float, setting: CacheSetting
) -> Tensor:
    """Causal attention of a prompt as prefill reads it: a chunk at stage 1 of FlashQ, the chunks before it as stored.

    Args:
        q: [n, Hq, D].  k, v: [Hkv, n, D] in q's dtype.  cached: of `cache_text`, n tokens or more.
    Returns:
        [n, Hq, D] fp32.
    """
    softmax: Softmax = "sas" if setting.softmax == "sas" else "exact"
    if setting.codec == "bf16":
        return prefill_attention(q, k, v, sm_scale, softmax).float()
    outs = []
    for start in range(0, len(q), CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(q))
        keys, values = (
            torch.cat([of.stored[:, :start].to(x.dtype), fake_quantize(x[:, start:stop], 8, setting.block_size)], dim=1)
            for of, x in zip(cached, (k, v), strict=True)
        )
        outs.append(prefill_attention(q[start:stop], keys, values, sm_scale, softmax))
    return torch.cat(outs).float()


def decoded_attention(
    q: Tensor, k: CachedTensor, v: CachedTensor, chunk_size: int, sm_scale: float, setting: CacheSetting
) -> tuple[Tensor, Tensor]:
    """`A` and `A~` of the last m positions, each over the cache as it is when its token is the newest.

    Both read the same cached values; the positions are taken some at a time, so that their scores fit in memory.

    Args:
        q: [m, Hq, D] any float dtype.  k, v: of `cache_text`, n >= m tokens.  chunk_size: S.
    Returns:
        full_out, spec_out: [m, Hq, D] fp32.
    """
    num_tokens = k.tail.shape[1]
    rows = max(1, SCORES_AT_ONCE[q.device.type] // (q.shape[1] * num_tokens))
    starts = range(num_tokens - q.shape[0], num_tokens, rows)
    parts = [
        _attend(part, start, k, v, chunk_size, sm_scale, setting)
        for part, start in zip(q.split(rows), starts, strict=True)
    ]
    full_out, spec_out = zip(*parts, strict=True)
    return torch.cat(full_out), torch.cat(spec_out)


def _attend(
    q: Tensor, start: int, k: CachedTensor, v: CachedTensor, chunk_size: int, sm_scale: float, setting: CacheSetting
) -> tuple[Tensor, Tensor]:
    """As `decoded_attention`, of the positions `[start, start + m)`."""
    (num_rows, num_qo_heads, head_dim), num_kv_heads = q.shape, k.tail.shape[0]
    block, stop = setting.block_size, start + num_rows
    # Columns: stored tokens before the last position's block, then tail tokens from the first position's block on.
    num_stored, first_in_tail = (stop - 1) // block * block, start // block * block
    keys, values = (
        torch.cat([x.stored[:, :num_stored], x.tail[:, first_in_tail:stop]], dim=1) for x in (k, v)
    )  # [Hkv, columns, D]
    token = torch.cat([torch.arange(num_stored), torch.arange(first_in_tail, stop)]).to(q.device)
    in_tail = torch.arange(len(token), device=q.device) >= num_stored
    seq_len = torch.arange(start + 1, stop + 1, device=q.device)[:, None]
    own_block = (seq_len - 1) // block * block
    visible = torch.where(in_tail, (token >= own_block) & (token < seq_len), token < own_block)  # [m, columns]
    sink_end, window_start = predictor_ranges(seq_len, chunk_size)
    guessed = visible & ((token < sink_end) | (token >= window_start))
    # The guess needs few of the columns.
    near = (token < chunk_size) | (token >= window_start[0])
    rows = q.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [Hkv, heads of a group x m, D]
    scores = (rows @ keys.transpose(1, 2) * sm_scale).unflatten(1, (-1, num_rows))

    def weigh(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
        out = _softmax(scores.masked_fill(~visible, -torch.inf), n_r).flatten(1, 2) @ values
        return out.view(num_qo_heads, num_rows, head_dim).transpose(0, 1)

    n_r = cutoffs(seq_len) if setting.softmax == "sas" else None
    return weigh(scores, visible, values), weigh(scores[..., near], guessed[:, near], values[:, near])


def _softmax(scores: Tensor, n_r: Tensor | None) -> Tensor:
    """Exact, or SAS with a cutoff."""
    return scores.softmax(-1) if n_r is None else sas_softmax(scores, n_r)[0]
