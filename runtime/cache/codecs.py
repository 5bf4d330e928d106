"""The caches that `kv_cache` names: what each needs, and one of them for a rank."""

from __future__ import annotations

import torch

from alspec.errors import UserError
from alspec.kernels.attention.decode_flashq.flashq_decode import MAX_HEADS_PER_KV
from alspec.kernels.kv_codec.flashq.layout import HEAD_DIMS
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.flashq_cache import FlashQCache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.sas import Softmax

__all__ = ["Cache", "bytes_per_token", "cache_bytes", "check_codec", "check_head_dim", "new_cache"]

Cache = KVCache | FlashQCache

LEAST_HEAD_DIM = 16  # inputs of a product of matrices in Triton


def check_codec(codec: str, config: LlamaConfig, tp_size: int) -> None:
    """Refuse a codec that this model, or a rank of `tp_size`, cannot have.

    Raises:
        UserError: names `kv_cache`.
    """
    if codec == "bf16":
        return
    if config.head_dim not in HEAD_DIMS:
        sizes = " or ".join(map(str, HEAD_DIMS))
        raise UserError(f"kv_cache: {codec} needs a head_dim of {sizes}, the model has {config.head_dim}; use bf16")
    heads_per_kv = config.num_qo_heads // config.num_kv_heads
    if heads_per_kv > MAX_HEADS_PER_KV:
        raise UserError(
            f"kv_cache: {codec} takes up to {MAX_HEADS_PER_KV} query heads for each KV head, the model has "
            f"{heads_per_kv}; use bf16"
        )
    if codec == "turbo-mixed" and config.num_kv_heads // tp_size < 2:
        raise UserError(
            f"kv_cache: turbo-mixed needs two KV heads on a rank, found {config.num_kv_heads // tp_size}; "
            "use turbo4 or turbo2, or fewer ranks"
        )


def check_head_dim(config: LlamaConfig, device: torch.device) -> None:
    """Refuse heads that the decode attention of GPUs has no products for.

    Raises:
        UserError: names `head_dim`.
    """
    if device.type == "cuda" and config.head_dim < LEAST_HEAD_DIM:
        raise UserError(
            f"head_dim: expected {LEAST_HEAD_DIM} or more on a GPU, the model has {config.head_dim}; "
            "use --transport gloo (CPU)"
        )


def new_cache(
    codec: str,
    config: LlamaConfig,
    tp_size: int,
    batch_size: int,
    max_context: int,
    dtype: torch.dtype,
    device: torch.device,
    softmax: Softmax = "exact",
) -> Cache:
    """An empty cache of one rank of `tp_size`: `dtype` is of an uncompressed one, `softmax` of a quantised one."""
    heads = config.num_kv_heads // tp_size
    if codec == "bf16":
        return KVCache(config.num_layers, batch_size, heads, max_context, config.head_dim, dtype, device)
    return FlashQCache(codec, config.num_layers, batch_size, heads, max_context, config.head_dim, device, softmax)


def bytes_per_token(codec: str, config: LlamaConfig, tp_size: int, dtype: torch.dtype) -> float:
    """Bytes that one cached token of one request takes on a rank."""
    heads = config.num_kv_heads // tp_size
    if codec == "bf16":
        return KVCache.bytes_per_token(config.num_layers, heads, config.head_dim, dtype)
    return FlashQCache.bytes_per_token(codec, config.num_layers, heads, config.head_dim)


def cache_bytes(
    codec: str, config: LlamaConfig, tp_size: int, batch_size: int, max_context: int, dtype: torch.dtype
) -> int:
    """`num_bytes` of what `new_cache` would allocate."""
    heads = config.num_kv_heads // tp_size
    if codec == "bf16":
        token = KVCache.bytes_per_token(config.num_layers, heads, config.head_dim, dtype)
        return token * batch_size * max_context
    return FlashQCache.bytes_for(codec, config.num_layers, batch_size, heads, max_context, config.head_dim)
