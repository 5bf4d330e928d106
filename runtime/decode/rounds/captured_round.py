"""Rounds over the fused kernels: one graph for a round with drafts, and one for a plain step, both replayed.

A round drafts K tokens, runs the model over K + 1 rows of each request, accepts, and commits, all on the device; the
host reads one row of a ring for each round. Beside it, the graph of a plain step runs where drafting has no room or
does not pay: the host decides from the numbers that it reads anyway. The oracle is `RoundStep` (round_step.py).

Shapes: B requests, K drafts, W = K + 1 rows of each request, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from alspec.config import SamplingConfig
from alspec.interrupts import interrupts_wait
from alspec.kernels.attention.dispatch import DecodeAttention
from alspec.kernels.attention.recall import RecallState
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.common.jit_launch import compiling
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.rounds.round_kernels import begin_round, finish_round, round_ring_width
from alspec.kernels.rounds.round_state import RoundState
from alspec.kernels.sampling.adjustment import RoundRows
from alspec.kernels.sampling.logprobs import Logprobs
from alspec.runtime.decode.captured_choice import CapturedChoice, ChoiceKinds
from alspec.runtime.decode.captured_step import capture_graph
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.decode.hooks import OperationHook, no_hook
from alspec.runtime.decode.rounds.captured_drafters import CapturedDrafter
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy, texts_so_far
from alspec.runtime.decode.rounds.row_decoder import RowDecoder
from alspec.runtime.decode.step_queue import StepQueue

__all__ = ["CapturedRoundStep", "DraftText", "RoundKind"]


# Letters of `recent_kinds`: a plain step, a round with drafts, and one before which the draft cache is completed.
PLAIN, DRAFTS, CAUGHT_UP = "p", "d", "c"


@dataclass
class RoundKind:
    """One kind of round: its decoder, what drafts for it (None: a plain step), its graph and choice of tokens."""

    decoder: RowDecoder
    drafter: CapturedDrafter | None = None
    choice: CapturedChoice | None = None
    graph: torch.cuda.CUDAGraph | None = None


@dataclass
class DraftText:
    """How the cache of a draft model follows the texts."""

    # (state, held) gives it the texts up to the newest tokens. held: tokens at the start of each text that it has, [B].
    complete: Callable[[RoundState, Tensor], None]
    # (held, is_long) -> what the caches of all ranks hold, [B]; every rank calls it. See `held_by_all`.
    held_by_all: Callable[[Tensor, Tensor], Tensor]
    short_context: int | None  # `complete` computes longer texts anew, with other rotary frequencies
    frequency_length: Callable[[int], int]  # of the draft model, see `RopeScaling.frequency_length`


class CapturedRoundStep:
    """Rounds of one batch on one rank of one group, replayed from graphs or launched kernel by kernel.

    Args:
        plain, drafting: the two kinds of round. They share the state and the cache.
        round_cost: (lengths) -> time of a round with drafts, relative to a plain step.
        draft_text: None without a draft model.
    """

    is_fused = True

    def __init__(
        self,
        state: RoundState,
        plain: RoundKind,
        drafting: RoundKind,
        policy: DraftPolicy,
        round_cost: Callable[[list[int]], float],
        capacity: int,
        uses_graph: bool,
        operation: OperationHook,
        draft_text: DraftText | None = None,
    ) -> None:
        """Create the step; `prepare` captures it. capacity: tokens that the cache holds of each request."""
        self.uses_graph = uses_graph
        self._state, self._plain, self._drafting = state, plain, drafting
        self._policy, self._round_cost, self._capacity = policy, round_cost, capacity
        self._operation, self._draft_text = operation, draft_text
        decoder = plain.decoder
        self._config, self._exchange = decoder.config, decoder.exchange
        self._batch_size, self._device = len(state.lengths), state.lengths.device
        self._num_drafts = drafting.decoder.rows - 1
        self._has_blocks = any(decoder.cache.quantised(layer) for layer in range(self._config.num_layers))
        width, name = round_ring_width(self._batch_size, drafting.decoder.rows), f"rank {self._exchange.rank}: round"
        self._queue: StepQueue[RoundKind] = StepQueue(width, name, int(state.number) - 1, self._device)
        self._choices: list[CapturedChoice] = []  # of draft steps, by their rows
        self._sampling = SamplingConfig()
        self._prepared = False
        self._recall, self.prompt_queries = drafting.decoder.recall, None
        self._prompt_attention: DecodeAttention | None = None
        if self._recall is not None:
            self.prompt_queries, self._prompt_attention = self._prompt_buffers(self._recall)
        self._seq_lens: list[int] = []  # cached tokens of each request, and the newest one, as far as rounds are read
        self._live: list[bool] = []  # the flags that the device has
        # Tokens of each request that a draft model's cache holds at least, as far as rounds are read.
        self._held = [0] * self._batch_size
        self._frequency_lengths = [0] * self._batch_size  # of the prompts, in the draft model's cache
        self._holds_long = [False] * self._batch_size  # whether `_held` has the frequencies of longer texts

    def _prompt_buffers(self, recall: RecallState) -> tuple[Tensor, DecodeAttention]:
        """Room for the prompts' last queries, and the attention by which they choose the first recall lists."""
        decoder = self._plain.decoder
        shape = len(decoder.cache.layers), *decoder.buffers.q.shape
        queries = torch.zeros(shape, dtype=decoder.buffers.q.dtype, device=self._device)
        chunk_size, sm_scale = self._drafting.decoder.chunk_size, decoder.cache.sm_scale
        layers = decoder.cache.layers
        return queries, DecodeAttention(layers, shape[2], chunk_size, sm_scale, self._device, recall)

    @property
    def _kinds(self) -> tuple[RoundKind, RoundKind]:
        return self._plain, self._drafting

    @property
    def exchange(self) -> Exchange:
        """See `CapturedStep.exchange`."""
        return self._exchange

    @property
    def launched(self) -> int:
        """See `DecodeStep.launched`."""
        return self._queue.launched

    @property
    def next_step(self) -> int:
        """See `DecodeStep.next_step`."""
        return self._queue.next_step

    def set_verdict_rule(self, threshold: float, forced: Tensor | None = None) -> None:
        """Refuse: a round has no verdicts. See `DecodeStep.speculate`."""
        raise AssertionError("nothing is speculated in a layer")

    def force_acceptance(self, share: float | None) -> None:
        """For profiling: accept each draft with this probability, whatever it is; None: accept what is right."""
        self._state.forced.fill_(-1.0 if share is None else share)

    def prepare(self, sampling: SamplingConfig, kept: Sequence[int] | None = None) -> int:
        """Capture both kinds of round, unless captured ones serve these settings. See `DecodeStep.prepare`."""
        kinds = ChoiceKinds.of(sampling, self._config.vocab_size)
        of_rounds = [kind.choice for kind in self._kinds if kind.choice is not None]
        own = [*of_rounds, *self._choices]
        is_captured = self._prepared and all(choice.kinds == kinds for choice in of_rounds)
        if not is_captured:
            self._prepared = False  # until all of it has succeeded
            self.release()
            own = self._new_choices(kinds)
        for choice in own:
            choice.set(sampling)
        self._sampling = sampling
        if is_captured:
            return 0
        for kind in self._kinds:
            fault = self._capture(kind, kept or [0] * self._batch_size)
            if fault:
                return fault
        self._prepared = True
        return 0

    def _new_choices(self, kinds: ChoiceKinds) -> list[CapturedChoice]:
        """How tokens are chosen: in both kinds of round, and in draft steps, which report no log probabilities."""
        args = self._batch_size, self._config.vocab_size, self._device
        step_rows = 0 if self._drafting.drafter is None else self._drafting.drafter.step_rows
        drafts = kinds._replace(logprobs=False)
        self._plain.choice = CapturedChoice(kinds, *args)
        self._drafting.choice = drafting_choice = CapturedChoice(kinds, *args, self._num_drafts + 1)
        self._choices = [CapturedChoice(drafts, *args, rows) for rows in range(1, step_rows + 1)]
        for choice in (drafting_choice, *self._choices):
            choice.share_seen(self._plain.choice)
        return [self._plain.choice, drafting_choice, *self._choices]

    def _capture(self, kind: RoundKind, kept: Sequence[int]) -> int:
        """Compile the kernels of a round, run it twice, then capture it if graphs are used; returns the fault word."""
        self.begin([0] * self._batch_size, [num_tokens + 1 for num_tokens in kept])
        if self._device.type == "cuda":
            # Collectives and copies of the round are not kernels of ours: they run here.
            with compiling():
                self._launch_kernels(kind, no_hook)
        for _ in range(2):
            # The room that `kept` leaves is for two tokens.
            self.begin([0] * self._batch_size, [num_tokens + 1 for num_tokens in kept])
            self._launch_kernels(kind, no_hook)
        fault = int(self._exchange.fault)
        if not fault and self.uses_graph:
            launch = partial(self._launch_kernels, kind, no_hook)
            kind.graph = capture_graph(self._device, launch)
        return fault

    def begin(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        """Set tokens, lengths and the texts that drafts are looked up in. See `DecodeStep.begin`."""
        state = self._state
        assert state.newest.shape == (len(token_ids),), "a batch of another size"
        texts = torch.zeros(state.history.shape, dtype=torch.int32)
        for index, (newest, length) in enumerate(zip(token_ids, seq_lens, strict=True)):
            if prompts is not None:
                texts[index, : length - 1] = torch.tensor(prompts[index], dtype=torch.int32)
            texts[index, length - 1] = newest
        new_texts = texts.to(self._device)
        self._keep_draft_text(new_texts, seq_lens)
        if prompts is not None:
            self._agree_on_draft_text(seq_lens)
        state.history.copy_(new_texts)
        state.newest.copy_(torch.tensor(token_ids))
        state.lengths.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        self._set_live([True] * self._batch_size)
        self._exchange.fault.zero_()
        if self._recall is not None:
            if prompts is None:
                self._recall.lists.fill_(-1)
            else:
                assert self._prompt_attention is not None
                assert self.prompt_queries is not None
                self._prompt_attention.recall_prompts(self.prompt_queries, state.lengths - 1, continued)
        for choice in [kind.choice for kind in self._kinds]:
            if choice is not None:
                choice.begin(seen)
        self._policy.begin(texts_so_far(token_ids, prompts))
        self._seq_lens = list(seq_lens)
        self._queue.begin(int(state.number) - 1)

    def _keep_draft_text(self, texts: Tensor, seq_lens: list[int]) -> None:
        """Keep what a draft model's cache holds of these texts, [B, C + W]: their common start with the old ones.

        With other rotary frequencies of the prompt it holds nothing of use.
        """
        if self._draft_text is None:
            return
        common = (texts == self._state.history).long().cumprod(1).sum(1).tolist()
        lengths = [self._draft_text.frequency_length(length - 1) for length in seq_lens]
        for request, (count, length) in enumerate(zip(common, lengths, strict=True)):
            same = length == self._frequency_lengths[request]
            self._held[request] = min(self._held[request], count) if same else 0
        self._frequency_lengths = lengths

    def _agree_on_draft_text(self, seq_lens: list[int]) -> None:
        """Keep what all ranks hold, because completing a draft model's cache takes all of them.

        An interrupted call may have read more rounds on one rank than on another.
        """
        if self._draft_text is None:
            return
        own = (torch.tensor(values, device=self._device) for values in (self._held, self._holds_long))
        self._held = self._draft_text.held_by_all(*own).tolist()
        are_long = zip(self._held, self._holds_long, self._are_long(seq_lens), strict=True)
        self._holds_long = [holds if held else is_long for held, holds, is_long in are_long]

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Read the oldest round in flight; one more stays in flight if it is surely needed. See `DecodeStep.step`."""
        live = live or [True] * self._batch_size
        self._set_live(live)
        # The round that is read yields this many tokens at most: if more are needed, so is another round.
        depth = 2 if remaining > self._num_drafts + 1 else 1
        while len(self._queue.in_flight) < depth:
            kind = self._next_kind(remaining, live)
            catches_up = kind is self._drafting and self._lacks_text()
            if catches_up and self._queue.in_flight:
                break  # the draft model's cache is completed from the host, which first reads the round in flight
            self._launch(kind, catches_up)
        result = self._queue.read()
        kind = result.kind
        emitted, offered = self._parse(result.values)
        counts = [len(ids) if is_live else 0 for ids, is_live in zip(emitted, live, strict=True)]
        self._policy.read([ids[:count] for ids, count in zip(emitted, counts, strict=True)])
        if kind is self._drafting and any(counts):  # a round in which nothing was found to draft costs as much
            self._policy.record(sum(counts) / sum(count > 0 for count in counts), self._cost())
        self._seq_lens = [length + count for length, count in zip(self._seq_lens, counts, strict=True)]
        if kind is self._drafting:
            # The last token is fed by no draft step, nor is the last draft: it matters if all were accepted.
            lacking = [2 if drafts and count > drafts else 1 for drafts, count in zip(offered, counts, strict=True)]
            self._held = [length - count for length, count in zip(self._seq_lens, lacking, strict=True)]
        logprobs = self._read_logprobs(kind, result.index, emitted)
        return StepRecord(emitted, None, result.step_us, result.fault, logprobs, offered)

    def _next_kind(self, remaining: int, live: list[bool]) -> RoundKind:
        """What kind of round is launched next: decided by what the rounds that were read have told."""
        room = self._room(remaining, live)
        return self._drafting if room and self._policy.decide_next(room, self._cost()) else self._plain

    def _cost(self) -> float:
        """Estimated time of a round with drafts, relative to a plain step."""
        return self._round_cost(self._seq_lens)

    def _set_live(self, live: list[bool]) -> None:
        if live != self._live:
            self._live = []  # not known, if an interrupt ends the copy
            self._state.live.copy_(torch.tensor(live, dtype=torch.int32))
            self._live = list(live)

    def _room(self, remaining: int, live: list[bool]) -> int:
        """Most drafts that a live request can use: up to K, to the end of its text, its cache and its block."""
        room = 0
        for length, is_live in zip(self._seq_lens, live, strict=True):
            own = min(self._num_drafts, remaining - 1, self._capacity - 1 - length)
            if self._has_blocks:
                own = min(own, BLOCK - 1 - (length - 1) % BLOCK)
            room = max(room, own if is_live else 0)
        return room

    def _are_long(self, seq_lens: list[int]) -> list[bool]:
        assert self._draft_text is not None
        short_context = self._draft_text.short_context or self._capacity
        return [length > short_context for length in seq_lens]

    def _lacks_text(self) -> bool:
        """Whether a draft model's cache may lack more than the newest two tokens, which its first step feeds."""
        if self._draft_text is None:
            return False
        if self._holds_long != self._are_long(self._seq_lens):
            return True
        lacking = max(length - held for length, held in zip(self._seq_lens, self._held, strict=True))
        for kind in self._queue.in_flight:
            lacking = 2 if kind is self._drafting else lacking + 1
        return lacking > 2

    def _complete_draft_cache(self) -> None:
        """Give the draft model's cache what it lacks."""
        assert self._draft_text is not None
        self._draft_text.complete(self._state, torch.tensor(self._held, device=self._device))
        lengths = self._state.lengths.tolist()  # the same on all ranks, whatever each has read
        self._held = [length - 1 for length in lengths]
        self._holds_long = self._are_long(lengths)

    def _parse(self, row: list[int]) -> tuple[list[list[int]], list[int]]:
        """Emitted tokens and numbers of drafts of each request, from the ring."""
        width, emitted, offered = self._num_drafts + 2, [], []
        for request in range(self._batch_size):
            counts, *tokens = row[request * width : (request + 1) * width]
            emitted.append(tokens[: counts & 0xFFFFFFFF])
            offered.append(counts >> 32)
        return emitted, offered

    def _read_logprobs(self, kind: RoundKind, index: int, emitted: list[list[int]]) -> Logprobs | None:
        assert kind.choice is not None
        found, rows = kind.choice.read_logprobs(index), kind.decoder.rows
        if found is None:
            return None
        places = [request * rows + row for request, ids in enumerate(emitted) for row in range(len(ids))]
        return Logprobs(found.token_ids[places], found.values[places])

    def _launch(self, kind: RoundKind, catches_up: bool) -> None:
        """Launch a round; Ctrl-C is held until a captured one is counted.

        catches_up: the draft model's cache is completed first.
        """
        if kind.graph is None:
            try:
                if catches_up:
                    self._complete_draft_cache()
                self._launch_kernels(kind, self._operation)
            except BaseException:
                self._prepared = False  # an incomplete round leaves counts in the sampler's tables
                raise
            self._count(kind, catches_up)
            return
        with interrupts_wait():
            if catches_up:
                self._complete_draft_cache()
            kind.graph.replay()
            self._count(kind, catches_up)

    def _count(self, kind: RoundKind, catches_up: bool) -> None:
        """Count a round that has been launched."""
        self._queue.add(kind, PLAIN if kind is self._plain else CAUGHT_UP if catches_up else DRAFTS)

    @property
    def recent_kinds(self) -> str:
        """See `DecodeStep.recent_kinds`."""
        return self._queue.recent_kinds

    def launch_missing(self, launched: int, kinds: str) -> None:
        """Launch the rounds that other ranks have launched: each needs all ranks. See `DecodeStep.launch_missing`.

        This rank cannot choose their kinds: it may have read fewer rounds than the others when an interrupt came.
        """
        if self._plain.graph is not None:
            for letter in self._queue.missing(launched, kinds):
                self._launch(self._plain if letter == PLAIN else self._drafting, letter == CAUGHT_UP)

    def release(self) -> None:
        """Wait for the device, then destroy the graphs. See `DecodeStep.release`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for kind in self._kinds:
            if kind.graph is not None:
                kind.graph.reset()
                kind.graph = None

    def _launch_kernels(self, kind: RoundKind, operation: OperationHook) -> None:
        """Launch every operation of one round, in order."""
        decoder, drafter, state, choice, ring = kind.decoder, kind.drafter, self._state, kind.choice, self._queue.ring
        rows, buffers = decoder.round_rows, decoder.buffers
        assert choice is not None
        begin_round(state, rows, self._capacity, self._has_blocks, None if drafter is None else drafter.inputs)
        if drafter is not None:
            drafter.launch(state, rows, self._choices, operation)
        with operation("embed", 0):
            decoder.embed()
        decoder.run_layers(operation)
        with operation("lm_head", decoder.config.num_layers):
            decoder.logits()
            sampled = choice.launch(buffers, RoundRows(rows.token_ids, rows.row_lens, 0, decoder.rows))
            finish_round(
                state, rows, self._capacity, sampled, buffers.best, buffers.best_token, decoder.logit_exchange,
                ring.rows, ring.stamps, self._num_drafts + 1, choice.seen, choice.logprobs_of(buffers),
            )  # fmt: skip
            decoder.commit(state)
