"""Drafters whose steps are launches of the round's graph: the eager ones (drafter.py) are their oracles.

Each fills the rows of a round that has begun, for as many drafts as there is room for. Shapes: B requests, W rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from alspec.kernels.rounds.ngram import draft_by_ngrams
from alspec.kernels.rounds.round_kernels import begin_model_draft, take_draft
from alspec.kernels.rounds.round_state import RoundRowBuffers, RoundState
from alspec.kernels.sampling.adjustment import RoundRows
from alspec.runtime.decode.captured_choice import CapturedChoice
from alspec.runtime.decode.decoder import DecodeBuffers, Decoder
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.rounds.row_decoder import DraftDecoder, RowDecoder

__all__ = ["CapturedDrafter", "CapturedModelDrafter", "CapturedNgramDrafter", "CapturedSelfDrafter"]


class CapturedDrafter(Protocol):
    """Launches what drafts the rows of a round."""

    @property
    def step_rows(self) -> int:
        """Most rows of each request in one of its steps; 0: it runs no model."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor] | None:
        """Tokens [B] int64 and lengths [B] int32 of its first step; None: it runs no model."""

    def launch(
        self, state: RoundState, rows: RoundRowBuffers, choices: list[CapturedChoice], operation: OperationHook
    ) -> None:
        """Launch the drafting of one round.

        Args:
            choices: how a step of 1, 2, ... `step_rows` rows of each request chooses its tokens.
        """


class CapturedNgramDrafter:
    """What followed the newest tokens before."""

    step_rows = 0
    inputs = None

    def launch(
        self, state: RoundState, rows: RoundRowBuffers, choices: list[CapturedChoice], operation: OperationHook
    ) -> None:
        """See `CapturedDrafter.launch`."""
        with operation("draft", 0):
            draft_by_ngrams(state, rows)


@dataclass
class CapturedSelfDrafter:
    """Steps of the model itself with `A~` in place of attention."""

    decoder: DraftDecoder
    step_rows = 1

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """See `CapturedDrafter.inputs`."""
        return _inputs(self.decoder.buffers)

    def launch(
        self, state: RoundState, rows: RoundRowBuffers, choices: list[CapturedChoice], operation: OperationHook
    ) -> None:
        """See `CapturedDrafter.launch`."""
        for place in range(rows.token_ids.shape[1] - 1):
            _draft_step(self.decoder, rows, place, self.inputs, choices[0], operation)


@dataclass
class CapturedModelDrafter:
    """Steps of a smaller model over its own cache, which holds all tokens but the newest two.

    The first step has two rows of each request, see `begin_model_draft`.
    """

    first: RowDecoder
    decoder: Decoder
    step_rows = 2

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """See `CapturedDrafter.inputs`."""
        return _inputs(self.decoder.buffers)

    def launch(
        self, state: RoundState, rows: RoundRowBuffers, choices: list[CapturedChoice], operation: OperationHook
    ) -> None:
        """See `CapturedDrafter.launch`."""
        begin_model_draft(state, self.first.round_rows)
        for place in range(rows.token_ids.shape[1] - 1):
            decoder, choice = (self.decoder, choices[0]) if place else (self.first, choices[1])
            _draft_step(decoder, rows, place, self.inputs, choice, operation)


def _inputs(buffers: DecodeBuffers) -> tuple[Tensor, Tensor]:
    return buffers.token_ids, buffers.seq_lens


def _draft_step(
    decoder: Decoder,
    rows: RoundRowBuffers,
    place: int,
    inputs: tuple[Tensor, Tensor],
    choice: CapturedChoice,
    operation: OperationHook,
) -> None:
    """Launch one step of a draft model, up to the draft of one place."""
    buffers, count = decoder.buffers, decoder.rows
    with operation("draft", place):
        decoder.embed()
        decoder.run_layers(operation)
        decoder.logits()
        # The draft is chosen in the step's last row: rows before it have no place in the round.
        sampled = choice.launch(buffers, RoundRows(rows.token_ids, rows.row_lens, place + 1 - count, count))
        take_draft(rows, place, inputs, sampled, buffers.best, buffers.best_token, decoder.exchange.epoch)
