"""Decode steps without the host: one captured graph for a step, replayed; the host launches ahead and reads tokens.

The graph serves every length. Its last kernel writes the chosen tokens, the device's clock and the fault word into a
ring in pinned host memory, where the host polls: no call into CUDA waits for anything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.errors import RankFailureError
from alspec.interrupts import interrupts_wait
from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import spec_parts
from alspec.kernels.attention.decode_flashq.flashq_decode import flashq_spec_parts
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.common.jit_launch import compiling
from alspec.kernels.sampling.next_token import RING_HEADER, RING_STEPS, finish_step
from alspec.kernels.sampling.sampler import Sampler, sample_tokens
from alspec.kernels.speculation.swap import Swap
from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS, DecodeBuffers, Decoder
from alspec.runtime.decode.hooks import OperationHook, no_hook
from alspec.runtime.decode.paired_decoder import PairedDecoder, SpeculationState
from alspec.runtime.decode.swapped_decoder import SPARE_SMS, SwappedDecoder
from alspec.runtime.distributed.peer_memory import build_exchanges
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import Transport

__all__ = ["CapturedStep", "StepRecord"]

# Steps in flight: the next is on its way while the host reads the last one. Every rank launches the same number, for it
# depends on the tokens alone.
DEPTH = 2
POLL_S = 20e-6
CHECK_S = 0.5  # how often a waiting host asks the driver whether the device still works
# Until a step counts as hung: longer than kernels wait for words. Behind a collective no kernel of ours waits.
STEP_S = STEP_TIMEOUT_NS / 1e9 + 60


@dataclass(frozen=True)
class StepRecord:
    """What one step told the host."""

    token_ids: list[int]
    hits: Tensor | None  # [L, B] bool: verdicts of a pair
    clock_ns: int  # of the device, at the end of the step
    fault: int  # 0, or see kernels/comm/ll_packets.py


class CapturedStep:
    """The steps of one batch on one rank, captured or launched one by one: the same kernels either way."""

    def __init__(
        self,
        decoder: Decoder,
        pairing: SpeculationState | None,
        capacity: int,
        use_graph: bool,
        operation: OperationHook,
    ) -> None:
        self._decoder = decoder
        self._pairing = pairing
        self._capacity = capacity
        self._use_graph = use_graph
        self._operation = operation
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prepared = False
        self._sampler: Sampler | None = None  # None: greedy
        batch_size, self._device = decoder.buffers.token_ids.shape[0], decoder.buffers.token_ids.device
        self._is_cuda = self._device.type == "cuda"
        self._ring = torch.zeros(RING_STEPS, RING_HEADER + batch_size, dtype=torch.int64, pin_memory=self._is_cuda)
        self._stamps = torch.zeros(RING_STEPS, dtype=torch.int32, pin_memory=self._is_cuda)
        # Plain views: the device writes behind PyTorch's back.
        self._ring_view, self._stamps_view = self._ring.numpy(), self._stamps.numpy()
        self._hits_ring: Tensor | None = None
        if pairing is not None:
            shape = (RING_STEPS, *pairing.hits.shape)
            self._hits_ring = torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_cuda)
        self._batch_size = batch_size
        self._live = [True] * batch_size  # what a pair's devices have been told, and from where they read it
        self._live_words = torch.ones(batch_size, dtype=torch.int32, pin_memory=self._is_cuda)
        self._begun = self._launched = self._taken = int(decoder.exchange.epoch) - 1

    @classmethod
    def build(
        cls,
        model: Llama,
        cache: Cache,
        transport: Transport,
        peer_memory: PeerMemory | None,
        use_graph: bool,
        operation: OperationHook,
        speculation: SpeculationConfig | None = None,
    ) -> CapturedStep:
        """The loop of one model and cache, with its buffers; every rank calls it.

        Args:
            speculation: given for two paired groups.
        """
        config, batch_size = model.config, cache.batch_size
        tp_size = transport.placement.tp_size
        num_heads = config.num_qo_heads // tp_size
        parts = 1  # through the host's memory too, where programs that read the same words wait for each other
        if speculation is not None and peer_memory == "symm":
            if isinstance(cache, KVCache):
                heads = (batch_size, num_heads, cache.num_kv_heads, config.head_dim)
                parts = spec_parts(speculation.chunk_size, *heads, cache.layers.k.dtype, transport.device)
            else:
                parts = flashq_spec_parts(batch_size, num_heads // cache.num_kv_heads, transport.device)
        shape = PairShape(
            config.num_layers, batch_size, tp_size, config.hidden_size, num_heads, cache.num_kv_heads, config.head_dim,
            parts,
        )  # fmt: skip
        exchange, logit_exchange, words = build_exchanges(
            transport, peer_memory, 2 * config.num_layers, batch_size, config.hidden_size, config.vocab_size,
            shape if speculation and peer_memory else None,
        )  # fmt: skip
        common = (
            config, model.weights, model.inv_freq, cache.layers,
            DecodeBuffers.allocate(config, tp_size, batch_size, model.weights.embedding.dtype, transport.device),
            exchange, logit_exchange, transport.all_reduce, transport.all_gather_world,
        )  # fmt: skip
        decoder: Decoder
        pairing = None
        if speculation is None:
            decoder = Decoder(*common)
        else:
            pairing = SpeculationState(
                speculation.threshold,
                speculation.chunk_size,
                hits=torch.zeros(config.num_layers, batch_size, dtype=torch.int32, device=transport.device),
                live=torch.ones(batch_size, dtype=torch.int32, device=transport.device),
            )
            if words is not None:
                sums = torch.zeros(batch_size, num_sums(num_heads, config.head_dim), 2, device=transport.device)
                decoder = PairedDecoder(*common, pairing, words, sums, stops_early=peer_memory == "symm")
            else:
                swap = Swap.allocate(shape, exchange, transport.placement.group, transport.swap_calls(SPARE_SMS))
                decoder = SwappedDecoder(*common, pairing, swap)
        return cls(decoder, pairing, cache.max_context, use_graph, operation)

    def speculate(self, threshold: float, forced: Tensor | None = None) -> None:
        """Change how a pair's guesses are judged; the next `prepare` captures again. See `SpeculationState`."""
        assert self._pairing is not None, "nothing is speculated"
        self._pairing.threshold, self._pairing.forced = threshold, forced
        self._prepared = False

    def prepare(self, sampling: SamplingConfig) -> int:
        """Compile and capture for this way of sampling; every rank calls it. Overwrites the start of the cache.

        One captured step serves all temperatures, top_k, top_p and seeds that cut alike, see `Sampler`.

        Returns:
            The fault word of the steps that it tried: 0, or see kernels/comm/ll_packets.py.
        """
        how = (sampling.temperature, sampling.top_k, sampling.top_p)
        cuts = Sampler.cuts_of(*how, self._decoder.config.vocab_size)
        is_captured = self._prepared and cuts == (self._sampler.cuts if self._sampler else ())
        if not is_captured:
            self._prepared = False  # until all of it has succeeded
            self.release()
            self._sampler = Sampler.allocate(cuts, self._batch_size, self._device) if cuts else None
        if self._sampler is not None:
            self._sampler.set(*how, sampling.seed)
        return 0 if is_captured else self._capture()

    def _capture(self) -> int:
        """Compile the step's kernels, try them and, where steps are captured, capture one; returns the fault word."""
        self.begin([0] * self._batch_size, [1] * self._batch_size)
        if self._is_cuda:
            # What else is in a step, collectives and copies, runs once more, between steps.
            with compiling():
                self._issue(no_hook)
        for _ in range(2):
            self._issue(no_hook)
            self._launched += 1
        self._taken = self._launched
        fault = int(self._decoder.exchange.fault)
        if fault:
            return fault
        if self._use_graph:
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream(self._device, priority=self._decoder.stream_priority)
            # Other threads (the heartbeat, NCCL's watchdog) may call CUDA meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._issue(no_hook)
            self._graph = graph
        self._prepared = True
        return 0

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """Set the state: the newest token of each request, and lengths with it."""
        self._decoder.begin(token_ids, seq_lens)
        # What was launched ahead and not read belongs to the generation before.
        self._begun = self._taken = self._launched = int(self._decoder.exchange.epoch) - 1

    @property
    def launched(self) -> int:
        """Steps launched so far, over all generations."""
        return self._launched

    def catch_up(self, launched: int) -> None:
        """Launch what other ranks have launched of a broken-off generation, before anything waits for the device.

        An interrupt may come in other steps on other ranks, and steps that have begun there wait for this rank's.

        Args:
            launched: the most of any rank.
        """
        while self._graph is not None and self._launched < launched:
            self._replay(self._graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch a captured step; Ctrl-C waits until it is counted, too."""
        with interrupts_wait():
            graph.replay()
            self._launched += 1

    @property
    def next_step(self) -> int:
        """The step that is launched next, or is being launched; `begin` comes before the first, 1."""
        return self._launched - self._begun + 1

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """The next step's result, with more steps in flight behind it, at most `remaining` with this one.

        Args:
            live: who is still generating; only a pair's verdicts ask. Where it may change, steps wait for the host.
        """
        depth = min(DEPTH, remaining)
        pairing = self._pairing
        if live is not None and self._batch_size > 1 and pairing is not None:
            depth = 1
        now = live or [True] * self._batch_size
        if pairing is not None and now != self._live:
            # No step is in flight that could still read the words.
            self._live_words.copy_(torch.tensor(now))
            pairing.live.copy_(self._live_words, non_blocking=True)
            self._live = list(now)
        while self._launched < self._taken + depth:
            try:
                if self._graph is not None:
                    self._replay(self._graph)
                else:
                    self._issue(self._operation)
                    self._launched += 1
            except BaseException:
                self._prepared = False  # half of a step has left the sampler half of its counts
                raise
        self._taken += 1
        place = self._taken % RING_STEPS
        self._await_stamp(place)
        clock_ns, fault, *token_ids = self._ring_view[place].tolist()
        hits = None if self._hits_ring is None else self._hits_ring[place].bool()
        return StepRecord(token_ids, hits, clock_ns, fault)

    def _await_stamp(self, place: int) -> None:
        begun = time.monotonic()
        next_check = begun + CHECK_S
        stamp = (self._taken + 2**31) % 2**32 - 2**31  # as the device counts
        while self._stamps_view[place] != stamp:
            now = time.monotonic()
            if now > next_check:
                # A device that failed never stamps: this raises what happened.
                torch.cuda.current_stream(self._device).query()
                next_check = now + CHECK_S
            if now > begun + STEP_S:
                where = f"rank {self._decoder.exchange.rank}: step {self._taken - self._begun}"
                raise RankFailureError(f"{where} has not ended in {STEP_S:g} s; check the GPUs (nvidia-smi) and links")
            time.sleep(POLL_S)

    def release(self) -> None:
        """Give the graph back; before the buffers and process groups that it refers to."""
        if self._is_cuda:
            # Steps that were launched ahead still write to the ring, captured or not.
            torch.cuda.synchronize(self._device)
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _issue(self, operation: OperationHook) -> None:
        """Launch every operation of one step, in order."""
        decoder, at = self._decoder, self._decoder.buffers
        with operation("embed", 0):
            decoder.embed()
        decoder.run_layers(operation)
        with operation("lm_head", decoder.config.num_layers):
            decoder.logits()
            sampled = None
            if self._sampler is not None:
                sampled = sample_tokens(self._sampler, at.logits, at.best, at.seq_lens)
            finish_step(
                at.best, at.best_token, sampled, at.token_ids, at.seq_lens, self._capacity, decoder.logit_exchange,
                self._ring, self._stamps, None if self._pairing is None else self._pairing.hits, self._hits_ring,
            )  # fmt: skip
