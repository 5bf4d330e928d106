"""Rounds over the fused kernels are put together here: plain steps, rounds with drafts, draft steps, prompt rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from alspec.config import EngineConfig
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.common.limits import MAX_COLUMNS, MAX_FUSED_ROWS
from alspec.kernels.rounds.round_state import RoundRowBuffers, RoundState
from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.cache.recall_state import new_recall_state
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decode_step import DecodeStep
from alspec.runtime.decode.decoder import DecodeBuffers, Decoder
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.rounds.captured_drafters import (
    CapturedDrafter,
    CapturedModelDrafter,
    CapturedNgramDrafter,
    CapturedSelfDrafter,
)
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep, DraftText, RoundKind
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy
from alspec.runtime.decode.rounds.model_drafter import ModelDrafter, held_by_all
from alspec.runtime.decode.rounds.row_append import RowAppend
from alspec.runtime.decode.rounds.row_decoder import DraftDecoder, RowDecoder
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.decode.rounds.token_history import TokenHistory
from alspec.runtime.distributed.peer_memory import build_exchanges
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.choices import Choices
from alspec.runtime.engine.composition import choose_products
from alspec.runtime.faults.bad_steps import num_operations

__all__ = ["build_captured_rounds", "build_row_append"]


class _DecoderFactory:
    """Arguments of decoders of one model, which share its cache, and the exchanges between ranks by number of rows."""

    def __init__(
        self,
        model: Llama,
        cache: Cache,
        transport: Transport,
        peer_memory: PeerMemory | None,
        vocab_size: int,
        shared: Exchange | None = None,
        fault_base: int = 0,
    ) -> None:
        """Remember what the decoders share.

        Args:
            vocab_size: V of the model that verifies: embeddings of a draft model may have other rows of padding.
            shared: whose epoch and fault word all decoders of a round share; None: those of the first exchange here.
            fault_base: of the exchanges.
        """
        self._vocab_size = vocab_size
        self.model, self.cache, self.transport, self._peer_memory = model, cache, transport, peer_memory
        self.shared, self._fault_base = shared, fault_base
        self._exchanges: dict[int, tuple[Exchange, LogitExchange]] = {}

    def exchanges(self, num_rows: int) -> tuple[Exchange, LogitExchange]:
        """The exchanges of a step of so many rows: steps with as many rows use them one after another."""
        if num_rows not in self._exchanges:
            config = self.model.config
            exchange, logit_exchange, _ = build_exchanges(
                self.transport, self._peer_memory, 2 * config.num_layers, num_rows, config.hidden_size,
                config.vocab_size,
            )  # fmt: skip
            self.shared = self.shared or exchange
            words: dict[str, Any] = {"epoch": self.shared.epoch, "fault": self.shared.fault}
            words["fault_base"] = self._fault_base
            self._exchanges[num_rows] = replace(exchange, **words), replace(logit_exchange, **words)
        return self._exchanges[num_rows]

    def decoder_arguments(self, num_rows: int, rows: RoundRowBuffers | None = None) -> dict[str, Any]:
        """Arguments of a `Decoder` of so many rows in all; `rows`: those that its tokens and lengths are."""
        model, transport = self.model, self.transport
        buffers = DecodeBuffers.allocate(
            model.config, transport.placement.tp_size, num_rows, model.weights.embedding.dtype, transport.device,
            self._vocab_size,
        )  # fmt: skip
        if rows is not None:
            buffers = replace(buffers, token_ids=rows.token_ids.view(-1), seq_lens=rows.row_lens.view(-1))
        exchange, logit_exchange = self.exchanges(num_rows)
        return {
            "config": model.config, "weights": model.weights, "rotary": model.rotary, "kv_cache": self.cache,
            "buffers": buffers, "exchange": exchange, "logit_exchange": logit_exchange,
            "all_reduce": transport.all_reduce, "all_gather": transport.all_gather_world,
            "products": choose_products(model, transport.placement.tp_size, num_rows),
        }  # fmt: skip


def build_captured_rounds(
    model: Llama,
    cache: Cache,
    transport: Transport,
    peer_memory: PeerMemory | None,
    uses_graph: bool,
    operation: OperationHook,
    config: EngineConfig,
    policy: DraftPolicy,
    round_cost: Callable[[list[int]], float],
    draft_model: Llama | None = None,
    draft_cache: Cache | None = None,
) -> CapturedRoundStep:
    """Rounds of one model and cache over the fused kernels, with their buffers.

    Args:
        config: draft, draft_tokens, and what `self` drafts read (speculation).
        round_cost: (lengths) -> time of a round with drafts, relative to a plain step.
        draft_model: of `--draft model:DIR`, with its cache; or the quantised copy of `--draft-weights`.
    """
    batch_size, device, rows_each = cache.batch_size, transport.device, config.draft_tokens + 1
    vocab_size = model.config.vocab_size
    factory = _DecoderFactory(model, cache, transport, peer_memory, vocab_size)
    recalled = config.speculation.recalled if config.draft == "self" else 0
    recall = new_recall_state(cache, model.config.num_qo_heads // transport.placement.tp_size, recalled)
    chunk_size = config.speculation.chunk_size

    def kind(rows: int, drafter: CapturedDrafter | None) -> RoundKind:
        round_rows = RoundRowBuffers.allocate(batch_size, rows, device)
        args = factory.decoder_arguments(batch_size * rows, round_rows)
        return RoundKind(RowDecoder(**args, round_rows=round_rows, recall=recall, chunk_size=chunk_size), drafter)

    plain, draft_text = kind(1, None), None
    drafter: CapturedDrafter
    fault_base = num_operations(model.config.num_layers)
    if config.draft == "ngram":
        drafter = CapturedNgramDrafter()
    elif config.draft == "self":
        args = factory.decoder_arguments(batch_size)
        args |= {key: replace(args[key], fault_base=fault_base) for key in ("exchange", "logit_exchange")}
        if draft_model is not None:
            products = choose_products(draft_model, transport.placement.tp_size, batch_size)
            args |= {"weights": draft_model.weights, "products": products}
        drafter = CapturedSelfDrafter(DraftDecoder(**args, chunk_size=chunk_size, recall=recall))
    else:
        assert draft_model is not None
        assert draft_cache is not None
        shared = factory.shared
        draft_factory = _DecoderFactory(
            draft_model, draft_cache, transport, peer_memory, vocab_size, shared, fault_base
        )
        two_rows = RoundRowBuffers.allocate(batch_size, 2, device)
        first_step = RowDecoder(**draft_factory.decoder_arguments(2 * batch_size, two_rows), round_rows=two_rows)
        drafter = CapturedModelDrafter(first_step, Decoder(**draft_factory.decoder_arguments(batch_size)))
        short_context = draft_model.config.short_context
        if short_context is not None:
            short_context += 1  # its first step computes the token before the newest one again
        forward = RowForward(draft_model, draft_cache, transport, chunk_size, operation)
        # Only its `catch_up` is used, so it has no cost.
        filler = ModelDrafter(forward, vocab_size, lambda _: 0.0, operation, short_context)
        draft_text = DraftText(
            _catch_up(filler, forward), partial(held_by_all, transport), short_context,
            draft_model.config.frequency_length,
        )  # fmt: skip
    state = RoundState.allocate(batch_size, cache.max_context, config.draft_tokens, device)
    return CapturedRoundStep(
        state, plain, kind(rows_each, drafter),
        policy, round_cost, cache.max_context, uses_graph, operation, draft_text,
    )  # fmt: skip


def build_row_append(
    choices: Choices,
    model: Llama,
    cache: Cache,
    transport: Transport,
    peer_memory: PeerMemory | None,
    step: DecodeStep,
    operation: OperationHook,
) -> RowAppend | None:
    """Passes that append a prompt's tokens to those that a cache of one request keeps; None where none can.

    Args:
        step: over the same cache. If it wants the last query of a prompt, only a prompt pass can give it.
    """
    if not isinstance(step, CapturedStep | CapturedRoundStep) or step.prompt_queries is not None:
        return None
    if choices.mode != "off" or cache.batch_size > 1:
        return None
    heads, kv_heads = model.config.local_heads(transport.placement.tp_size)
    rows = _most_append_rows(heads // kv_heads)
    factory = _DecoderFactory(model, cache, transport, peer_memory, model.config.vocab_size, step.exchange)
    round_rows = RoundRowBuffers.allocate(1, rows, transport.device)
    decoder = RowDecoder(**factory.decoder_arguments(rows, round_rows), round_rows=round_rows)
    return RowAppend(decoder, choices.uses_graph, operation)


def _most_append_rows(heads_per_kv_head: int) -> int:
    """Most rows of one request that the fused kernels serve in one pass."""
    return min(MAX_FUSED_ROWS, MAX_COLUMNS // heads_per_kv_head)


def _catch_up(drafter: ModelDrafter, forward: RowForward) -> Callable[[RoundState, Tensor], None]:
    """How a draft model's cache gets the texts up to the newest tokens: (state, tokens that it holds) -> None."""
    cache = forward.cache
    history = TokenHistory(cache.batch_size, cache.max_context, cache.device)

    def catch_up(state: RoundState, held: Tensor) -> None:
        width = min(history.token_ids.shape[1], state.history.shape[1])
        history.token_ids[:, :width] = state.history[:, :width]
        history.lengths.copy_(state.lengths)
        drafter.catch_up(history, held)

    return catch_up
