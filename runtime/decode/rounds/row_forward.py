"""The layers and the LM head over several rows of each request, as plain operations launched one by one.

Rows are not requests: a round has R rows of each of B requests, the newest token and the drafts behind it. They share
the request's cache. Row r is the token at position seq_lens[r] - 1 and attends to the tokens up to itself.

Shapes: R rows of each of B requests, Hq and Hkv this rank's query and KV heads, D head_dim, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import DecodeAttention
from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.cache.recall_state import new_recall_state
from alspec.runtime.decode.eager_step import gather_logits
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.distributed.transport import Transport

__all__ = ["RowForward"]


class RowForward:
    """One model over its cache on one rank of one group. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        model: Llama,
        cache: Cache,
        transport: Transport,
        chunk_size: int,
        operation: OperationHook,
        recall_blocks: int = 0,
        predicting: Llama | None = None,
    ) -> None:
        """Allocate.

        Args:
            chunk_size, recall_blocks: what `predict` reads of a cache.
            predicting: a copy of the model with other weights, for `predict`; None: the model itself.
        """
        self.model, self.cache, self.transport = model, cache, transport
        self._decoding = model.for_decoding()
        self._predicting = self._decoding if predicting is None else predicting.for_decoding()
        self._operation = operation
        layers = [cache.layer(layer) for layer in range(cache.num_layers)]
        num_qo_heads = model.config.num_qo_heads // transport.placement.tp_size
        self._recall = new_recall_state(cache, num_qo_heads, recall_blocks)
        self.last_queries: Tensor | None = None  # [L, B, Hq, D]: see `recall`
        if recall_blocks:
            shape = (cache.num_layers, cache.batch_size, num_qo_heads, cache.head_dim)
            self.last_queries = torch.zeros(shape, dtype=model.weights.embedding.dtype, device=cache.device)
        self._recall_at: Tensor | None = None  # lengths of `recall`, until a draft needs its lists
        self._queries: list[Tensor] = []  # L x [R, B, Hq, D], of the last `full`
        self._attention = DecodeAttention(layers, num_qo_heads, chunk_size, model.sm_scale, cache.device, self._recall)

    def begin(self) -> None:
        """Empty the recall lists, which belong to other texts."""
        self._recall_at = None
        if self._recall is not None:
            self._recall.lists.fill_(-1)

    def recall(self, seq_lens: Tensor) -> None:
        """Choose the blocks that `predict` recalls from now on: by full attention with `last_queries`.

        That runs when a draft needs them: where drafts pause, steps do not attend twice.

        seq_lens: [B] int32, tokens up to the one with these queries.
        """
        self._recall_at = seq_lens

    def _choose_blocks(self) -> None:
        if self._recall_at is not None and self.last_queries is not None:
            self._attention.recall_prompts(self.last_queries, self._recall_at)
        self._recall_at = None

    def recall_rows(self, rows: Tensor, seq_lens: Tensor) -> None:
        """As `recall`, with the queries of one row of each request in the last `full`; rows: [B] int64."""
        if self.last_queries is not None:
            requests = torch.arange(len(rows), device=rows.device)
            for last, queries in zip(self.last_queries, self._queries, strict=True):
                last.copy_(queries[rows, requests])
            self.recall(seq_lens)

    def full(self, token_ids: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Append the rows to the cache as drafts, and attend to all tokens up to each.

        Args:
            token_ids: [R, B] int64.
            seq_lens: [R, B] int32, up to and with the row's token. A row may repeat the one before it: the same token
                at the same place. Over a quantised cache, the rows of a request lie in one block of 64 tokens.
        Returns:
            logits: [R, B, V] fp32, the same bits on every rank.
            layer_sums: [L] fp32, not finite where this rank's activations were not.
        """
        return self._run(token_ids, seq_lens, "attention")

    def predict(self, token_ids: Tensor, seq_lens: Tensor) -> Tensor:
        """As `full` for one row, but the attention is A~: sink, window, and blocks recalled for a verified token.

        Args:
            token_ids: [B] int64.  seq_lens: [B] int32.
        Returns:
            [B, V] fp32.
        """
        self._choose_blocks()
        return self._run(token_ids[None], seq_lens[None], "predictor")[0][0]

    def _run(
        self, token_ids: Tensor, seq_lens: Tensor, attention: Literal["attention", "predictor"]
    ) -> tuple[Tensor, Tensor]:
        model, rows = self._decoding if attention == "attention" else self._predicting, token_ids.shape
        positions = seq_lens.flatten() - 1
        if attention == "attention":
            self._queries = []
        x, partial = model.embed(token_ids.flatten()), None
        layer_sums = torch.zeros(model.num_layers, device=x.device)
        for layer in range(model.num_layers):
            with self._operation("pre_attention", layer):
                x, q, k, v = model.pre_attention(layer, x, partial, positions)
            with self._operation(attention, layer):
                # Rows in order: of two that write to the same place, the later one counts.
                for row_k, row_v, lengths in zip(k.unflatten(0, rows), v.unflatten(0, rows), seq_lens, strict=True):
                    self.cache.append(layer, row_k, row_v, lengths, is_final=False)
                attend = self._predict if attention == "predictor" else self._attend
                queries = q.unflatten(0, rows)
                if attention == "attention" and self._recall is not None:
                    self._queries.append(queries)
                attn_out = attend(layer, queries, seq_lens).flatten(0, 1)
            with self._operation("post_attention", layer):
                x, partial = model.post_attention(layer, x, attn_out)
                layer_sums[layer] = x.sum() + partial.sum(dtype=torch.float32)
        x = model.reduce_residual(x, partial)
        with self._operation("lm_head", model.num_layers):
            return gather_logits(model, self.transport, x).unflatten(0, rows), layer_sums

    def _attend(self, layer: int, q: Tensor, seq_lens: Tensor) -> Tensor:
        return self._attention.full_rows(q, self.cache.layer(layer), seq_lens)

    def _predict(self, layer: int, q: Tensor, seq_lens: Tensor) -> Tensor:
        return self._attention.predict(q[0], self.cache.layer(layer), seq_lens[0], layer)[None]
