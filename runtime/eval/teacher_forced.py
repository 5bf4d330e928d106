"""Teacher-forced attention: many positions of a text at once, each over the cache as it is when decoding gets there.

The token at position i reads every complete block before its own block as the codec stores it, and the tokens of its
own block from the INT8 tail. Which tokens those are depends on i only, so one pass equals token-by-token decoding.

Shapes: n tokens, m positions (the last m of the n), Hq and Hkv this rank's query and KV heads, D head_dim. Several
texts of equal length are stacked along the head dimension, in text order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from alspec.config import EvaluatedCodec, Sketch, ValueQuantiser
from alspec.kernels.attention.torch_attention import SCORES_AT_ONCE, prefill_attention, window_prefill_attention
from alspec.kernels.kv_codec.flashq.quantize import (
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
from alspec.kernels.kv_codec.formats import FORMATS, TURBOQUANT, rotates_values
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.kv_codec.turboquant.rotation import rotation
from alspec.kernels.kv_codec.turboquant.token_codes import compress_tokens, dequantize_tokens
from alspec.kernels.kv_codec.turboquant.variants import codebook_tokens, sketched_keys, uniform_values
from alspec.predictor import KV_TILE, block_masses, first_visible, predictor_ranges, recalled_blocks
from alspec.runtime.decode.prefill import CHUNK_TOKENS
from alspec.sas import Softmax, cutoffs, sas_softmax

__all__ = [
    "CODECS",
    "SOFTMAXES",
    "CachedTensor",
    "CacheSetting",
    "cache_text",
    "has_turboquant_keys",
    "teacher_forced_attention",
    "prompt_attention",
]

CODECS: tuple[str, ...] = get_args(EvaluatedCodec)
SOFTMAXES: tuple[str, ...] = get_args(Softmax)


@dataclass(frozen=True)
class CacheSetting:
    """How the cache stores keys and values, which softmax attention uses, and what `A~` recalls."""

    codec: str = "bf16"  # one of `CODECS`; bf16: the weights' dtype; int8: stage 1 of FlashQ only
    softmax: Softmax = "exact"
    block_size: int = BLOCK  # tokens of a block, and of the tail
    selector: str = SELECTORS[0]  # rule by which turbo-mixed selects its 2-bit heads
    low_heads: int | None = None  # number of 2-bit heads on this rank; None: half of its heads
    protect: int = 0  # first and last layers whose cache stays bf16
    norm_correction: bool = True  # scale of TurboQuant's tokens: that of the cache, else the norm of the token
    qjl: Sketch = "off"  # sketch of the residual of TurboQuant's keys
    value_quantiser: ValueQuantiser = "codebook"  # of TurboQuant's values
    recall_blocks: int = 0  # blocks of 64 tokens that `A~` of a KV head reads beside sink and window (predictor.py)
    sliding_window: int | None = None  # newest tokens that a token attends to in a layer: see `at_layer`; None: all

    @property
    def label(self) -> str:
        """The codec and what differs from the default, such as `turbo4, sas, blocks of 32`."""
        default = CacheSetting()
        parts = [self.codec]
        parts += [self.softmax] if self.softmax != default.softmax else []
        parts += [f"blocks of {self.block_size}"] if self.block_size != default.block_size else []
        parts += [self.selector] if self.selector != default.selector else []
        parts += [f"{self.low_heads} heads low"] if self.low_heads != default.low_heads else []
        parts += [f"{self.protect} layers at each end in bf16"] if self.protect != default.protect else []
        parts += ["plain norm"] if self.norm_correction != default.norm_correction else []
        parts += [f"{self.qjl} QJL"] if self.qjl != default.qjl else []
        parts += [f"{self.value_quantiser} values"] if self.value_quantiser != default.value_quantiser else []
        parts += [f"{self.recall_blocks} blocks recalled"] if self.recall_blocks else []
        return ", ".join(parts)

    def at_layer(self, layer: int, num_layers: int, sliding_window: int | None = None) -> CacheSetting:
        """The setting of one of `num_layers` layers: a protected layer has an exact cache."""
        is_protected = min(layer, num_layers - 1 - layer) < self.protect
        setting = CacheSetting(recall_blocks=self.recall_blocks) if is_protected else self
        return replace(setting, sliding_window=sliding_window)


def has_turboquant_keys(codec: str) -> bool:
    """Whether a codec, one of `CODECS`, stores keys by TurboQuant."""
    return codec in FORMATS and FORMATS[codec].keys.method == TURBOQUANT


@dataclass(frozen=True)
class CachedTensor:
    """Keys or values of a text as attention reads them, [Hkv, n, D] fp32 each."""

    stored: Tensor  # read by positions in later blocks
    tail: Tensor  # read by positions in the token's own block


def cache_text(
    k: Tensor, v: Tensor, prompt_tokens: int, setting: CacheSetting, num_texts: int = 1
) -> tuple[CachedTensor, CachedTensor]:
    """Keys and values of a text as decoding after a prompt reads them.

    Complete blocks of the prompt have their own stage-1 scales. All later tokens use the universal scale, that of the
    whole prompt. turbo-mixed selects its 2-bit heads by the first prompt chunk. TurboQuant stores values rotated; they
    are rotated back here, because the weights are not rotated.

    Args:
        k, v: [num_texts Hkv, n, D] any float dtype.
        prompt_tokens: length of the prompt, 1 .. n.
        setting: how the cache stores them.
        num_texts: texts that are stacked along the head dimension.
    Returns:
        The cached keys and the cached values.
    """
    keys, values = k.float(), v.float()
    if setting.codec == "bf16":
        return CachedTensor(keys, keys), CachedTensor(values, values)
    is_low = None
    if setting.codec == "turbo-mixed":
        first_chunk = min(prompt_tokens, CHUNK_TOKENS)
        priority = head_priority(k[:, :first_chunk], v[:, :first_chunk], setting.selector).view(num_texts, -1)
        low_heads = priority.shape[1] // 2 if setting.low_heads is None else setting.low_heads
        is_low = torch.cat([select_bits(scores, low_heads) for scores in priority]) == 2
    cached_keys = _cache_tensor(keys, prompt_tokens, True, is_low, setting)
    if not rotates_values(setting.codec):
        return cached_keys, _cache_tensor(values, prompt_tokens, False, is_low, setting)
    turn = rotation(v.shape[-1], v.device)
    rotated = _cache_tensor(values @ turn.T, prompt_tokens, False, is_low, setting)
    return cached_keys, CachedTensor(rotated.stored @ turn, rotated.tail @ turn)


def _cache_tensor(
    x: Tensor, prompt_tokens: int, is_key: bool, is_low: Tensor | None, setting: CacheSetting
) -> CachedTensor:
    """Cache x [H, n, D]; is_low: [H] bool, 2-bit heads of turbo-mixed. The host does not wait for the device here."""
    block = setting.block_size
    in_prompt, whole = prompt_tokens // block * block, x.shape[1] // block * block
    universal = int8_scale(x[:, :prompt_tokens]).clamp(min=MIN_SCALE)
    codes = to_int8(x, universal)
    tail = codes * universal[:, None, None]
    scales = universal[:, None].repeat(1, whole // block)
    codes[:, :in_prompt], scales[:, : in_prompt // block] = quantize_int8(x[:, :in_prompt], block)
    blocks = _after_stage_2(codes[:, :whole].unflatten(1, (-1, block)), is_key, is_low, setting)
    stored = torch.cat([dequantize(blocks.flatten(1, 2), scales, block), tail[:, whole:]], dim=1)
    return CachedTensor(stored, tail)


def _after_stage_2(blocks: Tensor, is_key: bool, is_low: Tensor | None, setting: CacheSetting) -> Tensor:
    """Stage-1 codes of blocks, [H, NB, T, D], as attention reads them after stage 2, in units of stage 1."""
    if setting.codec == "int8":
        return blocks
    if is_low is not None:
        low, high = (reconstruct(*compress(blocks, bits)) for bits in (2, 4))
        return torch.where(is_low[:, None, None, None], low, high)
    if setting.codec not in FORMATS:
        return reconstruct(*compress(blocks, {"turbo4": 4, "turbo2": 2}[setting.codec]))
    side = FORMATS[setting.codec].keys if is_key else FORMATS[setting.codec].values
    if side.method != TURBOQUANT:
        return reconstruct(*compress(blocks, side.bits))
    if is_key and setting.qjl != "off":
        return sketched_keys(blocks, side.bits, setting.qjl, setting.norm_correction)
    if not is_key and setting.value_quantiser == "uniform":
        return uniform_values(blocks, side.bits)
    if not setting.norm_correction:
        return codebook_tokens(blocks, side.bits, is_key, norm_correction=False)
    return dequantize_tokens(compress_tokens(blocks, side.bits, is_key), side.bits, is_key)


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, cached: tuple[CachedTensor, CachedTensor], sm_scale: float, setting: CacheSetting
) -> Tensor:
    """Causal attention of a prompt as in prefill.

    A prompt chunk reads its own tokens at stage 1 of FlashQ and those of earlier chunks as stored; TurboQuant's blocks
    are restored to stage 1 for it.

    Args:
        q: [n, Hq, D].
        k, v: [Hkv, n, D] in q's dtype.
        cached: keys and values from `cache_text`, n tokens or more.
        sm_scale: factor of the scores.
        setting: how the cache stores keys and values, the softmax, and the sliding window.
    Returns:
        [n, Hq, D] fp32.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if setting.sliding_window is None:
            return prefill_attention(q, k, v, sm_scale, setting.softmax)
        return window_prefill_attention(q, k, v, sm_scale, setting.sliding_window, setting.softmax)

    if setting.codec == "bf16":
        return attend(q, k, v).float()
    earlier, turn = [x.stored for x in cached], rotation(v.shape[-1], v.device)
    if rotates_values(setting.codec):
        v, earlier[1] = (v.float() @ turn.T).to(v.dtype), earlier[1] @ turn.T
    is_restored = has_turboquant_keys(setting.codec), rotates_values(setting.codec)
    earlier = [
        fake_quantize(x, 8, setting.block_size) if restored else x
        for x, restored in zip(earlier, is_restored, strict=True)
    ]
    outs = []
    for start in range(0, len(q), CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(q))
        keys, values = (
            torch.cat([before[:, :start].to(x.dtype), fake_quantize(x[:, start:stop], 8, setting.block_size)], dim=1)
            for before, x in zip(earlier, (k, v), strict=True)
        )
        outs.append(attend(q[start:stop], keys, values))
    out = torch.cat(outs).float()
    return out @ turn if rotates_values(setting.codec) else out


def teacher_forced_attention(
    q: Tensor,
    k: CachedTensor,
    v: CachedTensor,
    chunk_size: int,
    sm_scale: float,
    setting: CacheSetting,
    q_before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`A` and `A~` of the last m positions, each over the cache as it is when its token is the newest.

    Both read the same cached values. Positions are processed in slices whose scores fit in memory.

    Args:
        q: [m, Hq, D] any float dtype.
        k, v: from `cache_text`, n >= m tokens.
        chunk_size: S.
        sm_scale: factor of the scores.
        setting: block size, softmax, recalled blocks and sliding window.
        q_before: [1, Hq, D] of the token before these positions, whose attention gives the first masses of blocks that
            may be recalled; None: there is no such token.
    Returns:
        full_out, spec_out: [m, Hq, D] fp32.
    """
    num_tokens = k.tail.shape[1]
    # Recalling holds the weights of all columns beside the scores.
    rows = max(1, SCORES_AT_ONCE[q.device.type] // (q.shape[1] * num_tokens * (2 if setting.recall_blocks else 1)))
    first = num_tokens - q.shape[0]
    mass = (
        q.new_zeros(k.tail.shape[0], -(-num_tokens // KV_TILE), dtype=torch.float32) if setting.recall_blocks else None
    )
    if mass is not None and q_before is not None:
        _, _, mass = _attend(q_before, first - 1, k, v, chunk_size, sm_scale, setting, mass)
    outs = []
    for part, start in zip(q.split(rows), range(first, num_tokens, rows), strict=True):
        full_out, spec_out, mass = _attend(part, start, k, v, chunk_size, sm_scale, setting, mass)
        outs.append((full_out, spec_out))
    full_outs, spec_outs = zip(*outs, strict=True)
    return torch.cat(full_outs), torch.cat(spec_outs)


def _attend(
    q: Tensor,
    start: int,
    k: CachedTensor,
    v: CachedTensor,
    chunk_size: int,
    sm_scale: float,
    setting: CacheSetting,
    mass: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`teacher_forced_attention` for the positions `[start, start + m)`.

    Args:
        mass: [Hkv, NB] fp32, masses of the token before the first position; None without recalled blocks.
    Returns:
        full_out, spec_out, and the masses of the last position.
    """
    (num_rows, num_qo_heads, head_dim), num_kv_heads = q.shape, k.tail.shape[0]
    block, stop = setting.block_size, start + num_rows
    # Columns: stored tokens before the last position's block, then tail tokens from the first position's block on.
    num_stored, first_in_tail = (stop - 1) // block * block, start // block * block
    keys, values = (
        torch.cat([x.stored[:, :num_stored], x.tail[:, first_in_tail:stop]], dim=1) for x in (k, v)
    )  # [Hkv, columns, D]
    device = q.device
    token = torch.cat([torch.arange(num_stored, device=device), torch.arange(first_in_tail, stop, device=device)])
    in_tail = torch.arange(len(token), device=device) >= num_stored
    seq_len = torch.arange(start + 1, stop + 1, device=device)[:, None]
    own_block = (seq_len - 1) // block * block
    visible = torch.where(in_tail, (token >= own_block) & (token < seq_len), token < own_block)  # [m, columns]
    visible &= token >= first_visible(seq_len, setting.sliding_window)
    sink_end, window_start = predictor_ranges(seq_len, chunk_size)
    in_predictor = visible & ((token < sink_end) | (token >= window_start))
    # The predictor reads few of the columns: the sink, and all from the first position's window on.
    first_window = int(predictor_ranges(torch.tensor(start + 1), chunk_size)[1])
    sink = min(chunk_size, num_stored)
    window = max(sink, min(first_window, num_stored))
    rows = (q.float() * sm_scale).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [Hkv, (Hq / Hkv) m, D]
    scores = (rows @ keys.transpose(1, 2)).unflatten(1, (-1, num_rows))
    n_r = cutoffs(seq_len) if setting.softmax == "sas" else None

    def sink_and_window(x: Tensor, dim: int) -> Tensor:
        parts = (x.narrow(dim, 0, sink), x.narrow(dim, window, x.shape[dim] - window))
        return torch.cat(parts, dim)

    def attend(scores: Tensor, visible: Tensor, values: Tensor) -> Tensor:
        out = _softmax(scores.masked_fill_(~visible, -torch.inf), n_r).flatten(1, 2) @ values
        return out.view(num_qo_heads, num_rows, head_dim).transpose(0, 1)

    if mass is None:
        spec_out = attend(sink_and_window(scores, -1), sink_and_window(in_predictor, -1), sink_and_window(values, 1))
        return attend(scores, visible, values), spec_out, None
    weights = _softmax(scores.masked_fill(~visible, -torch.inf), n_r)  # [Hkv, Hq / Hkv, m, columns]
    masses = block_masses(weights.transpose(1, 2), token // KV_TILE, mass.shape[-1])  # [Hkv, m, NB]
    before = torch.cat([mass[:, None], masses[:, :-1]], dim=1)
    before_lens = seq_len[:, 0] - 1
    ranges = predictor_ranges(before_lens, chunk_size, setting.sliding_window)
    recalled = recalled_blocks(before, *ranges, setting.recall_blocks)
    in_predictor = in_predictor | (visible & recalled[..., token // KV_TILE])
    spec_out = attend(scores, in_predictor[:, None], values)
    full_out = (weights.flatten(1, 2) @ values).view(num_qo_heads, num_rows, head_dim).transpose(0, 1)
    return full_out, spec_out, masses[:, -1]


def _softmax(scores: Tensor, n_r: Tensor | None) -> Tensor:
    """Exact softmax, or SAS if its cutoffs `n_r` are given."""
    return scores.softmax(-1) if n_r is None else sas_softmax(scores, n_r)[0]
