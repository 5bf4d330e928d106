"""Select a KV-cache codec by name (`kv_cache`): check that the model supports it, size it, create it."""

from __future__ import annotations

import torch

from alspec.config import QUANTISED_CODECS, EngineConfig
from alspec.errors import UserError
from alspec.kernels.common.limits import MAX_HEADS_PER_KV
from alspec.kernels.kv_codec.quantised_layer import HEAD_DIMS
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.cache.protected_cache import ProtectedCache
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.runtime.cache.window_cache import WindowCache
from alspec.sas import Softmax

__all__ = [
    "Cache",
    "bytes_per_token",
    "cache_bytes",
    "cache_name",
    "check_codec",
    "check_head_dim",
    "check_softmax",
    "fit_heads",
    "new_cache",
    "read_bytes",
    "read_tokens",
]

Cache = KVCache | QuantisedCache | ProtectedCache | WindowCache

MIN_HEAD_DIM = 16  # smallest inner size of `tl.dot`


def check_codec(codec: str, config: LlamaConfig, tp_size: int, protect: int = 0) -> None:
    """Check that a codec supports this model on `tp_size` ranks.

    Raises:
        UserError: it does not; the message names `kv_cache` or `kv_protect`.
    """
    if codec == "bf16":
        if protect:
            raise UserError("kv_protect: a bf16 cache has no quantised layers; use it with another --kv-cache")
        return
    if 2 * protect >= config.num_layers:
        raise UserError(
            f"kv_protect: expected less than half of the model's {config.num_layers} layers, found {protect}; "
            "use --kv-cache bf16 for all layers"
        )
    if config.head_dim not in HEAD_DIMS or (config.head_padding and config.qk_norm):
        sizes = " or ".join(map(str, HEAD_DIMS))
        needed = f"a head_dim of {sizes}" if config.qk_norm else f"a head_dim of up to {max(HEAD_DIMS)}"
        normed = ", with norms of heads" if config.qk_norm else ""
        raise UserError(f"kv_cache: {codec} needs {needed}, the model has {config.stored_head_dim}{normed}; use bf16")
    num_qo_heads, num_kv_heads = config.local_heads(tp_size)
    heads_per_kv = num_qo_heads // num_kv_heads
    if heads_per_kv > MAX_HEADS_PER_KV:
        raise UserError(
            f"kv_cache: {codec} takes up to {MAX_HEADS_PER_KV} query heads for each KV head, a rank has "
            f"{heads_per_kv}; use bf16"
        )
    if codec == "turbo-mixed" and num_kv_heads < 2:
        raise UserError(
            f"kv_cache: turbo-mixed needs two KV heads on a rank, found {num_kv_heads}; "
            "use turbo4 or turbo2, or fewer ranks"
        )


def fit_heads(codec: str, config: LlamaConfig) -> LlamaConfig:
    """Return the model as it runs with a codec: a quantised cache takes heads of `HEAD_DIMS`, shorter ones are padded.

    TurboQuant's rotation of a padded head is that of a longer vector: an orthonormal map for any head_dim.
    """
    sizes = [size for size in HEAD_DIMS if size >= config.head_dim]
    if codec == "bf16" or config.head_dim in HEAD_DIMS or not sizes:
        return config
    return config.with_head_dim(sizes[0])


def check_head_dim(config: LlamaConfig, device: torch.device) -> None:
    """Check that decode attention on GPUs supports the model's head size.

    Raises:
        UserError: it does not; the message names `head_dim`.
    """
    if device.type == "cuda" and config.head_dim < MIN_HEAD_DIM:
        raise UserError(
            f"head_dim: expected {MIN_HEAD_DIM} or more on a GPU, the model has {config.head_dim}; "
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
    protect: int = 0,
    keeps_context: bool = False,
) -> Cache:
    """Create an empty cache for one rank.

    Args:
        codec: value of `kv_cache`.  tp_size: ranks that share the KV heads.
        batch_size: requests.  max_context: tokens of capacity per request.
        dtype: of keys and values in an uncompressed cache; a quantised cache ignores it.
        softmax: of attention over a quantised cache; an uncompressed cache ignores it.
        protect: first and last layers that stay uncompressed beside quantised ones.
        keeps_context: layers with a sliding window hold all tokens too, not a ring of the newest ones.
    """
    shape = (batch_size, config.local_heads(tp_size)[1], max_context, config.head_dim)
    if codec == "bf16" and not keeps_context and (window := config.window_below(max_context)):
        full_layers = tuple(layer for layer in range(config.num_layers) if config.window(layer) is None)
        full = KVCache(len(full_layers), *shape, dtype, device)
        ring_shape = (*shape[:2], window, config.head_dim)
        rings = KVCache(config.num_layers - len(full_layers), *ring_shape, dtype, device)
        return WindowCache(full_layers, config.num_layers, full, rings)
    windows = config.windows(max_context)
    if codec == "bf16":
        return KVCache(config.num_layers, *shape, dtype, device, windows)
    last = config.num_layers - protect
    inner, outer = windows[protect:last], windows[:protect] + windows[last:]
    quantised = QuantisedCache(codec, len(inner), *shape, device, softmax, inner)
    return ProtectedCache(KVCache(2 * protect, *shape, dtype, device, outer), quantised) if protect else quantised


def bytes_per_token(codec: str, config: LlamaConfig, tp_size: int, dtype: torch.dtype, protect: int = 0) -> float:
    """Return the bytes per cached token of one request on one rank, without a sliding window."""
    heads, (exact, quantised) = config.local_heads(tp_size)[1], _layers(codec, config, protect)
    total: float = KVCache.bytes_per_token(exact, heads, config.head_dim, dtype)
    if quantised:
        total += QuantisedCache.bytes_per_token(codec, quantised, heads, config.head_dim)
    return total


def cache_bytes(
    codec: str,
    config: LlamaConfig,
    tp_size: int,
    batch_size: int,
    max_context: int,
    dtype: torch.dtype,
    protect: int = 0,
    keeps_context: bool = False,
) -> int:
    """Return `num_bytes` of the cache that `new_cache` would create, without creating it."""
    heads, (exact, quantised) = config.local_heads(tp_size)[1], _layers(codec, config, protect)
    total = KVCache.bytes_per_token(1, heads, config.head_dim, dtype) * batch_size
    total *= exact * max_context if quantised or keeps_context else read_tokens(config, max_context)
    if quantised:
        total += QuantisedCache.bytes_for(codec, quantised, batch_size, heads, max_context, config.head_dim)
    return total


def read_tokens(config: LlamaConfig, context: int) -> int:
    """Return how many of a request's `context` tokens all layers read, in sum; rings hold no others."""
    return sum(min(context, config.window(layer) or context) for layer in range(config.num_layers))


def read_bytes(
    codec: str, config: LlamaConfig, tp_size: int, dtype: torch.dtype, context: float, protect: int = 0
) -> float:
    """Return the bytes that attention reads of one request's cache of `context` tokens on one rank."""
    heads, layers = config.local_heads(tp_size)[1], range(config.num_layers)
    tokens = [min(context, config.window(layer) or context) for layer in layers]
    is_exact = [codec == "bf16" or min(layer, config.num_layers - 1 - layer) < protect for layer in layers]
    exact, total = sum(n for n, exact in zip(tokens, is_exact, strict=True) if exact), sum(tokens)
    read = exact * KVCache.bytes_per_token(1, heads, config.head_dim, dtype)
    if not all(is_exact):
        read += (total - exact) * QuantisedCache.bytes_per_token(codec, 1, heads, config.head_dim)
    return read


def _layers(codec: str, config: LlamaConfig, protect: int) -> tuple[int, int]:
    """Return the numbers of uncompressed and of quantised layers."""
    exact = config.num_layers if codec == "bf16" else 2 * protect
    return exact, config.num_layers - exact


def cache_name(config: EngineConfig) -> str:
    """The codec of the cache and its protected layers, as in `turboquant3, 2 layers at each end in bf16`."""
    protected = f", {config.kv_protect} layers at each end in {config.dtype or 'bf16'}" if config.kv_protect else ""
    return config.kv_cache + protected


def check_softmax(config: EngineConfig) -> None:
    """Refuse a softmax that the codec does not have.

    Raises:
        UserError: names `softmax`.
    """
    if config.softmax == "sas" and config.kv_cache not in QUANTISED_CODECS:
        raise UserError("softmax: sas needs a quantised cache; use --kv-cache turbo4 or another quantised codec")
