"""Decode steps of a round over the fused kernels: all rows at once, and drafts by the model's own `A~`.

Shapes: B requests, W rows of each, L layers, Hq and Hkv query and KV heads of this rank, NB blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.attention.dispatch import attend, attend_rows, rows_together
from alspec.kernels.attention.recall import RecallState, launch_list_choice
from alspec.kernels.rounds.round_state import RoundRowBuffers, RoundState
from alspec.runtime.decode.decoder import Decoder

__all__ = ["DraftDecoder", "RowDecoder"]


@dataclass
class RowDecoder(Decoder):
    """A step over the rows of a round. Its buffers have B W rows: those of `round_rows`, a request's rows side by side.

    Full tails of the cache become records only when the round has accepted their tokens: see `commit`.
    """

    round_rows: RoundRowBuffers
    recall: RecallState | None = None  # lists of the drafter `self`, chosen from what this attention leaves
    chunk_size: int = 0  # S of that drafter

    completes_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ring = any(self.cache.is_ring(layer) for layer in range(len(self.cache.layers)))
        assert not is_ring, "a rejected row would replace a token that is still read"
        if self.recall is not None:
            # Weights of blocks, of neighbouring layers with the same bundles of rows.
            self._block_weights = [(layers, self._new_block_weights(layers)) for layers in self._alike_layers()]
            self._layer_block_weights = [weights for _, stacked in self._block_weights for weights in stacked]
            self._lse = torch.zeros(len(self.cache.layers), *self.buffers.lse.shape, device=self.buffers.lse.device)

    @property
    def rows(self) -> int:
        """Rows of each request. See `Decoder.rows`."""
        return self.round_rows.token_ids.shape[1]

    def attention(self, layer: int) -> None:
        """Attention of all rows over the cache, each over the tokens up to its own."""
        buffers, cache, rows = self.buffers, self.cache, self.round_rows
        lse, block_lse = buffers.lse, None
        if self.recall is not None:
            lse, block_lse = self._lse[layer], self._layer_block_weights[layer]
        # With several rows, the first tile may hold tokens that the projection before is still writing.
        attend_rows(
            buffers.q, cache.layers[layer], rows.row_lens, rows.last_lens, cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, lse, block_lse, prefetch_before_wait=self.rows == 1,
        )  # fmt: skip

    def commit(self, state: RoundState) -> None:
        """After acceptance: full tails become records, and attention of the last accepted row chooses recall lists."""
        self.kv_cache.compact(state.committed)
        if self.recall is None:
            return
        for layers, weights in self._block_weights:
            launch_list_choice(
                weights, self._lse[layers], state.committed, self.chunk_size, self.recall.lists[layers],
                chosen_rows=state.accepted, rows=self.rows, together=self._bundles(layers.start)[1],
                windows=None if self.recall.windows is None else self.recall.windows[layers],
            )  # fmt: skip

    def _bundles(self, layer: int) -> tuple[int, int]:
        """How many bundles attention over a layer makes of a request's rows, and of how many rows: `rows_together`."""
        together = rows_together(self.cache.layers[layer], self.buffers.q.shape[1], self.rows)
        return -(-self.rows // together), together

    def _alike_layers(self) -> list[slice]:
        """Ranges of neighbouring layers with the same bundles of rows."""
        count = len(self.cache.layers)
        changes = [i for i in range(1, count) if self._bundles(i) != self._bundles(i - 1)]
        return [slice(*ends) for ends in zip([0, *changes], [*changes, count], strict=True)]

    def _new_block_weights(self, layers: slice) -> Tensor:
        """Room for the weights of blocks as `attend_rows` writes them, of layers with the same bundles of rows."""
        assert self.recall is not None
        bundles, together = self._bundles(layers.start)
        batch_size, *shape, columns = self.recall.block_lse.shape[1:]
        shape = [layers.stop - layers.start, batch_size * bundles, *shape, together * columns]
        return torch.full(shape, float("-inf"), device=self.buffers.lse.device)


@dataclass
class DraftDecoder(Decoder):
    """A step over one token of each request with `A~` in place of attention: the drafter `self`.

    Keys and values lie behind the accepted tokens, where the rows of the round replace them.
    """

    chunk_size: int
    recall: RecallState | None

    completes_blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.buffers.q.shape
        self._no_sums = torch.zeros(shape[0], num_sums(*shape), 2, device=self.buffers.q.device)  # not written

    def attention(self, layer: int) -> None:
        """`A~` over sink, window and recalled blocks."""
        buffers, cache = self.buffers, self.cache
        recall = None if self.recall is None else self.recall.buffers(layer)
        speculation = SpecOutput(self.chunk_size, buffers.attn_out, self._no_sums, recall=recall)
        attend(
            buffers.q, cache.layers[layer], cache.lengths(layer), cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, buffers.lse, speculation, "predictor", prefetch_before_wait=not cache.is_ring(layer),
        )  # fmt: skip
