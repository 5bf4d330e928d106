"""The lists of recalled blocks for a cache."""

from __future__ import annotations

from alspec.kernels.attention.dispatch import attend_recall_parts
from alspec.kernels.attention.recall import RecallState
from alspec.runtime.cache.codecs import Cache

__all__ = ["new_recall_state"]


def new_recall_state(cache: Cache, num_qo_heads: int, recall_blocks: int) -> RecallState | None:
    """Allocate empty lists for all layers and requests of a cache; None if no block is recalled.

    Args:
        num_qo_heads: of this rank.  recall_blocks: M.
    """
    if not recall_blocks:
        return None
    layers = [cache.layer(layer) for layer in range(cache.num_layers)]
    return RecallState.allocate(
        cache.num_layers, cache.batch_size, num_qo_heads, cache.num_kv_heads, cache.max_context, recall_blocks,
        attend_recall_parts(layers, recall_blocks), cache.device, [layer.sliding_window for layer in layers],
    )  # fmt: skip
