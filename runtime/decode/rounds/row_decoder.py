"""Decode steps of a round over the fused kernels: all rows at once, and drafts by the model's own `A~`.

Shapes: B requests, W rows of each, L layers, Hq and Hkv query and KV heads of this rank, NB blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.attention.dispatch import KVLayer, attend, attend_rows
from alspec.kernels.attention.recall import RecallState, launch_choice
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recall is not None:
            num_layers, weights = self.recall.block_lse.shape[0], self.recall.block_lse[0].numel()
            device, rows = self.buffers.lse.device, self.rows
            self._weights = torch.full((num_layers, rows * weights), float("-inf"), device=device)
            self._lse = torch.zeros(num_layers, *self.buffers.lse.shape, device=device)

    @property
    def rows(self) -> int:
        """Rows of each request. See `Decoder.rows`."""
        return self.round_rows.token_ids.shape[1]

    def attention(self, layer: int) -> None:
        """Attention of all rows over the cache, each over the tokens up to its own."""
        buffers, cache, rows = self.buffers, self.cache, self.round_rows
        lse, block_lse = buffers.lse, None
        if self.recall is not None:
            lse, block_lse = self._lse[layer], self._block_lse(slice(layer, layer + 1))[0]
        # With several rows, the first tile may hold tokens that the projection before is still writing.
        attend_rows(
            buffers.q, cache.layers[layer], rows.row_lens, rows.last_lens, cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, lse, block_lse, prefetch_before_wait=self.rows == 1,
        )  # fmt: skip

    def logits(self) -> None:
        """Logits of all rows; tails of the cache stay as they are."""
        self._project_logits()

    def commit(self, state: RoundState) -> None:
        """After acceptance: full tails become records, and attention of the last accepted row chooses recall lists."""
        self.kv_cache.compact(state.committed)
        if self.recall is None:
            return
        for layers in self._alike_layers():
            launch_choice(
                self._block_lse(layers), self._lse[layers], state.committed, self.chunk_size, self.recall.lists[layers],
                chosen_rows=state.accepted, rows=self.rows, is_apart=self._is_quantised(layers.start),
                windows=None if self.recall.windows is None else self.recall.windows[layers],
            )  # fmt: skip

    def _is_quantised(self, layer: int) -> bool:
        return not isinstance(self.cache.layers[layer], KVLayer)

    def _alike_layers(self) -> list[slice]:
        """Ranges of neighbouring layers of one kind."""
        count = len(self.cache.layers)
        changes = [i for i in range(1, count) if self._is_quantised(i) != self._is_quantised(i - 1)]
        return [slice(*ends) for ends in zip([0, *changes], [*changes, count], strict=True)]

    def _block_lse(self, layers: slice) -> Tensor:
        """Weights of blocks of layers of one kind, with the rows where `attend_rows` has them."""
        assert self.recall is not None
        batch_size, heads, num_blocks, parts, columns = self.recall.block_lse.shape[1:]
        weights = self._weights[layers]
        if self._is_quantised(layers.start):
            return weights.view(len(weights), batch_size * self.rows, heads, num_blocks, parts, columns)
        return weights.view(len(weights), batch_size, heads, num_blocks, parts, self.rows * columns)


@dataclass
class DraftDecoder(Decoder):
    """A step over one token of each request with `A~` in place of attention: the drafter `self`.

    Keys and values lie behind the accepted tokens, where the rows of the round replace them.
    """

    chunk_size: int
    recall: RecallState | None

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

    def logits(self) -> None:
        """Logits of the drafts; tails of the cache stay as they are."""
        self._project_logits()
