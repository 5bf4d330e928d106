"""Engines over the models of the runtime tests, their caches, and a drafter that is right half of the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alspec.config import SamplingConfig
from alspec.kernels.attention.dispatch import KVLayer
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy
from alspec.runtime.decode.rounds.drafter import Drafter, DraftRequest, Drafts
from alspec.runtime.decode.rounds.round_step import RoundStep
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.decode.rounds.token_history import TokenHistory
from alspec.runtime.engine.engine import Engine

__all__ = [
    "CoinDrafter",
    "ConstantDrafter",
    "ListsForward",
    "NoDrafter",
    "cached",
    "engine_of",
    "generated",
    "put_captured",
    "put_drafter",
]


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, transport="gloo", dtype="fp32", **options)


def generated(engine: Engine, prompts: list[list[int]], sampling: SamplingConfig) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate(prompts, sampling)]  # type: ignore[union-attr]


def cached(engine: Engine, lengths: Sequence[int]) -> list[Tensor]:
    """Every byte that the cache holds of each request's first `lengths` tokens; records as far as blocks are full."""
    cache, found = engine.cache, []
    for index in range(cache.num_layers):
        layer = cache.layer(index)
        for request, length in enumerate(lengths):
            if isinstance(layer, KVLayer):
                found += [buffer[request, :, :length].clone() for buffer in (layer.k, layer.v)]
                continue
            blocks, rest = divmod(length, 64)
            found += [layer.tail[request, :, :, :rest].clone(), layer.tail_scale[request].clone()]
            found.append(layer.scales[request, :, :blocks].clone())
            size = len(layer.words) // layer.batch_size // layer.num_kv_heads // layer.scales.shape[2]
            for start in layer.offset[request].tolist():
                found.append(layer.words[start : start + blocks * size].clone())
    return found


class CoinDrafter:
    """Proposes the tokens of a known text, each right with probability 1/2; now and then fewer, or none."""

    def __init__(self, texts: list[list[int]], seed: int) -> None:
        self._texts, self._draw = texts, random.Random(seed)

    def begin(self, history: TokenHistory) -> None:
        pass

    def draft(self, request: DraftRequest) -> Drafts:
        rows, counts = [], []
        for text, length, most in zip(
            self._texts, request.history.lengths.tolist(), request.max_drafts.tolist(), strict=True
        ):
            right = (text[length : length + request.width] + [0] * request.width)[: request.width]
            rows.append([token if self._draw.random() < 0.5 else (token + 1) % 256 for token in right])
            counts.append(self._draw.choice([most, most, self._draw.randint(0, most)]))
        return Drafts(torch.tensor(rows), torch.tensor(counts))

    def cost(self, seq_lens: list[int]) -> float:
        return 0.0


class NoDrafter:
    """Proposes nothing: each round is a plain step."""

    def begin(self, history: TokenHistory) -> None:
        pass

    def draft(self, request: DraftRequest) -> Drafts:
        return Drafts(torch.zeros(len(request.max_drafts), request.width).long(), 0 * request.max_drafts)

    def cost(self, seq_lens: list[int]) -> float:
        return 0.0


class ConstantDrafter:
    """Proposes one token only."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def begin(self, history: TokenHistory) -> None:
        pass

    def draft(self, request: DraftRequest) -> Drafts:
        return Drafts(torch.full((len(request.max_drafts), request.width), self._token_id), request.max_drafts)

    def cost(self, seq_lens: list[int]) -> float:
        return 0.0


def put_captured(engine: Engine) -> None:
    """Replace the engine's step by its rounds over the fused kernels, in the interpreter. The engine is loaded."""
    drafting = engine._drafting
    assert drafting is not None
    choices = replace(drafting.choices, has_fused_step=True, uses_graph=False)
    fused = replace(drafting, choices=choices)
    step = fused.build_step(engine.model, engine.cache, engine.connected(), None, engine._step_operation)
    assert isinstance(step, CapturedRoundStep)
    engine.decode_step = step


class ListsForward(RowForward):
    """Keeps the recall lists that drafts after each round would have, [L, ...] for a request and its length."""

    def begin(self) -> None:
        self.left: dict[tuple[int, int], Tensor] = {}
        super().begin()

    def recall_rows(self, rows: Tensor, seq_lens: Tensor) -> None:
        super().recall_rows(rows, seq_lens)
        self._choose_blocks()
        assert self._recall is not None
        for request, length in enumerate(seq_lens.tolist()):
            self.left[request, length] = self._recall.lists[:, request].clone()


def put_drafter(engine: Engine, drafter: Drafter, num_drafts: int, recall_blocks: int = 0) -> RowForward:
    """Replace the engine's step by rounds with this drafter, and sink and window of 64 tokens. The engine is loaded."""
    assert isinstance(engine.decode_step, RoundStep)
    kind = ListsForward if recall_blocks else RowForward
    forward = kind(engine.model, engine.cache, engine.connected(), 64, engine._step_operation, recall_blocks)
    engine.decode_step = RoundStep(forward, drafter, num_drafts, DraftPolicy(always=True))
    return forward
