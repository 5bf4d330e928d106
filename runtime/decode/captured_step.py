"""The captured decode step: one CUDA graph, replayed; the host launches ahead and reads tokens.

The graph serves every length. Its last kernel writes the chosen tokens, the device's clock and the fault word into a
ring in pinned host memory, which the host polls: no call into CUDA waits for anything.
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
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.common.jit_launch import compiling
from alspec.kernels.sampling.next_token import RING_HEADER, RING_STEPS, finish_step
from alspec.runtime.decode.captured_choice import CapturedChoice, ChoiceKinds
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.decode.decoder import Decoder, SpeculationState
from alspec.runtime.decode.hooks import OperationHook, no_hook
from alspec.runtime.decode.pair_policy import PairPolicy
from alspec.runtime.decode.step_queue import StepQueue, pinned

__all__ = ["CapturedStep", "capture_graph"]

# Steps in flight: one step runs while the host reads the previous one. Every rank must launch the same number of steps,
# so the number depends on the tokens alone.
DEPTH = 2
MAIN, ALONE = "m", "a"  # letters of `recent_kinds`: the step, and that of one group alone in a pair


def capture_graph(device: torch.device, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture what `launch` launches."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: the heartbeat and NCCL's watchdog may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        launch()
    return graph


@dataclass
class StepKind:
    """One kind of step: its decoder, whether it has verdicts, and its graph."""

    decoder: Decoder
    speculates: bool
    graph: torch.cuda.CUDAGraph | None = None


class CapturedStep:
    """The fused decode step of one batch on one rank, replayed from a graph or launched kernel by kernel.

    A pair over a link may have a second kind of step, in which each group decodes alone: see pair_policy.py.
    """

    is_fused = True

    def __init__(
        self,
        decoder: Decoder,
        speculation: SpeculationState | None,
        capacity: int,
        uses_graph: bool,
        operation: OperationHook,
        alone: Decoder | None = None,
        policy: PairPolicy | None = None,
    ) -> None:
        """Create the step; `prepare` captures it.

        Args:
            speculation: of a pair's decoder.  capacity: tokens of each request.
            alone: of one group, over the same buffers; `policy` says when it runs.
        """
        self.uses_graph = uses_graph
        self._decoder = decoder
        self._main = StepKind(decoder, speculation is not None)
        self._alone = None if alone is None else StepKind(alone, False)
        self.pair_policy = policy
        self._num_tokens = 0  # of all requests when the generation began
        self._depth = DEPTH  # most steps in flight
        self._speculation = speculation
        self._capacity = capacity
        self._operation = operation
        self._prepared = False
        self._batch_size, self._device = decoder.buffers.token_ids.shape[0], decoder.buffers.token_ids.device
        self._choice = self._new_choice(SamplingConfig())
        self._is_cuda = self._device.type == "cuda"
        width, name = RING_HEADER + self._batch_size, f"rank {decoder.exchange.rank}: step"
        self._queue: StepQueue[StepKind] = StepQueue(width, name, int(decoder.exchange.epoch) - 1, self._device)
        self._hits_ring = None
        if speculation is not None:
            self._hits_ring = pinned(RING_STEPS, *speculation.hits.shape, device=self._device)
        self.prompt_queries: Tensor | None = None
        self._prompt_attention: DecodeAttention | None = None
        if speculation is not None and speculation.recall is not None:
            shape = len(decoder.cache.layers), *decoder.buffers.q.shape
            self.prompt_queries = torch.zeros(shape, dtype=decoder.buffers.q.dtype, device=self._device)
        self._live = [True] * self._batch_size  # the flags that the devices of a pair have
        self._live_flags = pinned(self._batch_size, device=self._device).fill_(1)  # source of the copy to the device

    def _choose_first_lists(self, prompt_queries: Tensor, continued: Sequence[int], lists: Tensor | None) -> None:
        """Choose the first recall lists by attention of each prompt's last token.

        lists: those of `continued` requests, which keep them.
        """
        decoder, speculation = self._decoder, self._speculation
        assert speculation is not None
        assert speculation.recall is not None
        if self._prompt_attention is None:
            self._prompt_attention = DecodeAttention(
                decoder.cache.layers, prompt_queries.shape[2], speculation.chunk_size, decoder.cache.sm_scale,
                self._device, speculation.recall,
            )  # fmt: skip
        if lists is not None:
            speculation.recall.lists.copy_(lists)
        self._prompt_attention.recall_prompts(prompt_queries, decoder.buffers.seq_lens - 1, continued)
        decoder.publish_lists()

    def set_verdict_rule(self, threshold: float, forced: Tensor | None = None) -> None:
        """Change threshold and forced verdicts; the next `prepare` captures again. See `DecodeStep.speculate`."""
        assert self._speculation is not None, "nothing is speculated"
        self._speculation.threshold, self._speculation.forced = threshold, forced
        self._prepared = False

    def prepare(self, sampling: SamplingConfig, kept: Sequence[int] | None = None) -> int:
        """Capture the step, unless the captured one serves settings of these kinds. See `DecodeStep.prepare`."""
        kinds = ChoiceKinds.of(sampling, self._decoder.config.vocab_size)
        is_captured = self._prepared and kinds == self._choice.kinds
        if not is_captured:
            self._prepared = False  # until all of it has succeeded
            self.release()
            self._choice = self._new_choice(sampling)
        self._choice.set(sampling)
        return 0 if is_captured else self._capture(kept or [0] * self._batch_size)

    def _new_choice(self, sampling: SamplingConfig) -> CapturedChoice:
        vocab_size = self._decoder.config.vocab_size
        return CapturedChoice(ChoiceKinds.of(sampling, vocab_size), self._batch_size, vocab_size, self._device)

    def _capture(self, kept: Sequence[int]) -> int:
        """Compile the step's kernels, run two steps, then capture one if graphs are used; returns the fault word."""
        seq_lens = [num_tokens + 1 for num_tokens in kept]
        self.begin([0] * self._batch_size, seq_lens)
        for kind in self._kinds:
            if self._is_cuda:
                # Collectives and copies of the step are not kernels of ours: they run here.
                with compiling():
                    self._launch_step(kind, no_hook)
            for _ in range(2):
                # Both write to the same place: the next one may lie in another block, whose tokens replace kept ones.
                self._decoder.buffers.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
                self._launch_step(kind, no_hook)
                self._queue.begin(self._queue.launched + 1)
            fault = int(self._decoder.exchange.fault)
            if fault:
                return fault
            if self.uses_graph:
                kind.graph = capture_graph(self._device, partial(self._launch_kernels, kind, no_hook))
        self._prepared = True
        return 0

    @property
    def _kinds(self) -> list[StepKind]:
        return [self._main] if self._alone is None else [self._main, self._alone]

    def begin(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        """Set tokens and lengths, and drop steps in flight. See `DecodeStep.begin`."""
        lists = self._decoder.next_lists() if continued else None
        self._decoder.begin(token_ids, seq_lens)
        if prompts is not None and self.prompt_queries is not None:
            self._choose_first_lists(self.prompt_queries, continued, lists)
        self._choice.begin(seen)
        self._num_tokens = sum(seq_lens)
        if self.pair_policy is not None:
            self.pair_policy.begin()
        self._queue.begin(int(self._decoder.exchange.epoch) - 1)

    @property
    def exchange(self) -> Exchange:
        """The group's exchange. Other passes over the same cache share its epoch and its fault word."""
        return self._decoder.exchange

    @property
    def launched(self) -> int:
        """See `DecodeStep.launched`."""
        return self._queue.launched

    @property
    def recent_kinds(self) -> str:
        """See `DecodeStep.recent_kinds`."""
        return self._queue.recent_kinds

    def launch_missing(self, launched: int, kinds: str) -> None:
        """Launch what other ranks have launched: each step needs all ranks. See `DecodeStep.launch_missing`."""
        if self._main.graph is not None:
            for letter in self._queue.missing(launched, kinds):
                self._launch(self._alone if letter == ALONE and self._alone is not None else self._main)

    def _next_kind(self) -> StepKind:
        """What kind of step is launched next: every rank has read as many steps by then, so all choose alike."""
        if self._alone is None or self.pair_policy is None or self.pair_policy.decide_next(self._next_tokens):
            return self._main
        return self._alone

    @property
    def _next_tokens(self) -> int:
        """Tokens of all requests when the next step begins."""
        return self._tokens_behind(self._queue.next_step - 1)

    def _tokens_behind(self, num_steps: int) -> int:
        """Tokens of all requests behind as many steps of this generation."""
        return self._num_tokens + num_steps * self._batch_size

    def _launch(self, kind: StepKind) -> None:
        """Launch a step. Ctrl-C is held until a captured one is counted."""
        if self.pair_policy is not None:
            self._decoder.set_lead(self.pair_policy.lead(self._next_tokens))
        if kind.graph is None:
            try:
                self._launch_step(kind, self._operation)
            except BaseException:
                self._prepared = False  # an incomplete step leaves counts in the sampler's tables
                raise
            self._count(kind)
            return
        with interrupts_wait():
            with kind.decoder.launching(self._queue.launched + 1):
                kind.graph.replay()
            self._count(kind)

    def _count(self, kind: StepKind) -> None:
        """Count a step that has been launched."""
        self._queue.add(kind, ALONE if kind is self._alone else MAIN)

    @property
    def next_step(self) -> int:
        """See `DecodeStep.next_step`."""
        return self._queue.next_step

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Read the oldest step in flight; up to `DEPTH` - 1 later steps stay in flight. See `DecodeStep.step`."""
        # Verdicts of several requests read `live`, which may change after every step.
        reads_live = live is not None and self._batch_size > 1 and self._speculation is not None
        self._depth = 1 if reads_live else DEPTH
        depth = min(self._depth, remaining)
        if self._speculation is not None:
            self._set_live(live or [True] * self._batch_size)
        while len(self._queue.in_flight) < depth:
            self._launch(self._next_kind())
        return self._read()

    def _read(self) -> StepRecord:
        """Read the oldest step in flight."""
        result = self._queue.read()
        kind = result.kind
        hits = self._hits_ring[result.index].bool() if kind.speculates and self._hits_ring is not None else None
        if hits is not None and self.pair_policy is not None:
            accepted: list[bool] = (hits | ~torch.tensor(self._live)).all(1).tolist()
            self.pair_policy.record(accepted, self._tokens_behind(self._queue.num_read))
        logprobs = self._choice.read_logprobs(result.index)
        emitted, is_alone = [[token] for token in result.values], kind is self._alone
        return StepRecord(emitted, hits, result.step_us, result.fault, logprobs, is_alone=is_alone)

    def _set_live(self, live: list[bool]) -> None:
        if live != self._live:
            assert self._speculation is not None
            # No step is in flight that could still read the flags.
            self._live = []  # not known, if an interrupt ends the copy
            self._live_flags.copy_(torch.tensor(live))
            self._speculation.live.copy_(self._live_flags, non_blocking=True)
            self._live = list(live)

    def release(self) -> None:
        """Wait for the device, then destroy the graph. See `DecodeStep.release`."""
        self._decoder.release()
        if self._is_cuda:
            # Steps in flight still write to the ring.
            torch.cuda.synchronize(self._device)
        for kind in self._kinds:
            if kind.graph is not None:
                kind.graph.reset()
                kind.graph = None

    def _launch_step(self, kind: StepKind, operation: OperationHook) -> None:
        with kind.decoder.launching(self._queue.launched + 1):
            self._launch_kernels(kind, operation)

    def _launch_kernels(self, kind: StepKind, operation: OperationHook) -> None:
        """Launch every operation of one step, in order."""
        decoder, buffers = kind.decoder, kind.decoder.buffers
        hits = self._speculation.hits if kind.speculates and self._speculation is not None else None
        with operation("embed", 0):
            decoder.embed()
        decoder.run_layers(operation)
        with operation("lm_head", decoder.config.num_layers):
            decoder.logits()
            sampled = self._choice.launch(buffers)
            finish_step(
                buffers.best, buffers.best_token, sampled, buffers.token_ids, buffers.seq_lens, self._capacity,
                decoder.logit_exchange, self._queue.ring.rows, self._queue.ring.stamps,
                hits, None if hits is None else self._hits_ring, self._choice.logprobs_of(buffers),
            )  # fmt: skip
            decoder.end_step()
