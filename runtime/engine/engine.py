"""The engine: from a model folder to a stream of tokens, the same program on every rank."""

from __future__ import annotations

import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from alspec.config import EngineConfig, SamplingConfig, check_softmax, validate
from alspec.errors import UserError
from alspec.kernels.sampling.adjustment import tokens_seen
from alspec.kernels.sampling.logprobs import Logprobs
from alspec.models.checkpoint.source import model_config, open_tokenizer
from alspec.models.llama import Llama
from alspec.models.tokenizer.tokenizer import Prompt, Tokenizer, encode_prompts, prompts_of, spelled
from alspec.runtime.cache.codecs import Cache, check_window, fit_heads
from alspec.runtime.decode.decode_step import DecodeStep, StepRecord
from alspec.runtime.decode.eager_step import choose_tokens
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import TIMEOUT, Transport, connect_store
from alspec.runtime.engine import composition
from alspec.runtime.engine.drafting import Drafting, check_rings
from alspec.runtime.engine.generation import (
    Completion,
    Generation,
    SamplingT,
    Token,
    check_prompts,
    check_sampling,
    fit_new_tokens,
    max_total_tokens,
    requests_of,
    rows_of,
)
from alspec.runtime.engine.kept_prefix import KeptPrefix
from alspec.runtime.engine.kept_weights import with_weights
from alspec.runtime.engine.loading import agreed_settings, model_notices, open_model, read_weights, take_device, warm_up
from alspec.runtime.engine.memory import MemoryPlan, available_bytes, check_fits, check_max_context
from alspec.runtime.engine.prompt_pass import process_prompts
from alspec.runtime.faults.bad_steps import fault_error
from alspec.runtime.faults.heartbeat import LOADING, Heartbeat, pending_error
from alspec.runtime.profiling.timeline import Timeline

__all__ = ["Engine"]

_JOBS = itertools.count()


class Engine:
    """A model on this rank's device, ready to generate.

    Creating it finds every mistake in configuration and checkpoint without taking device memory; `load` takes it.

    Raises:
        UserError: flags, checkpoint, tokenizer, or a world size the model does not divide by.
    """

    # Set by `load`.
    model: Llama
    cache: Cache
    _kept: KeptPrefix  # what the cache holds
    decode_step: DecodeStep | None = None

    def __init__(self, config: EngineConfig, trace: bool = False) -> None:
        self.config = config
        check_softmax(config)
        self.model_config = fit_heads(config.kv_cache, model_config(config))
        self.checkpoint, self.tokenizer = open_model(config, self.model_config)
        check_max_context(config.max_context, self.model_config)
        self._choices = composition.choose(config, self.model_config, trace)
        tp_size = self._choices.placement.tp_size
        self.model_config = with_weights(config, self.model_config, tp_size, self._choices.packs_weights)
        self._drafting = Drafting.open(config, self.model_config, self.tokenizer, self._choices)
        self.mode, self.placement, self.device = self._choices.mode, self._choices.placement, self._choices.device
        self.dtype, self.dtype_name = self._choices.dtype, self._choices.dtype_name
        about_model = model_notices(config, self.checkpoint, self.model_config, self.dtype_name, tp_size)
        self.notices = [*about_model, *self._choices.notices]  # choices a user may not expect
        self._has_warned = False  # `stream` shows them once; commands print them
        # Engines of one process have keys of their own; ranks create them in the same order.
        job = f"alspec-{next(_JOBS)}"
        several = self.placement.world_size > 1
        self._store = dist.PrefixStore(job, connect_store(self.placement)) if several else None
        self.agreement = Agreement(self.placement, self._store)
        self.heartbeat = Heartbeat(self.placement, job=job)
        if self._store is not None:
            self.heartbeat.announce(self._store)
        self.timeline = Timeline(self.device, trace)
        self.memory: MemoryPlan | None = None  # of what is loaded, cache included
        self._weights_bytes = 0  # of the weights that are loaded
        self.transport: Transport | None = None
        self._peer_memory: PeerMemory | None = None
        self.generation = Generation([])  # what `stream` serves, or served last: its requests and what was measured
        self._step = 0
        self._attempts = 0  # to run decode steps; a fault ends one
        self._generations = 0  # begun so far
        self._owner = 0  # the generation that may use the cache: the last one, unless a load came after it
        self._lock = threading.RLock()  # one thread at a time loads, closes or takes a step
        self._is_closed = False
        self._is_warm = self.device.type != "cuda"

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **options: Any) -> Engine:
        """An engine for a folder or GGUF file (default: the demo checkpoint); options are fields of `EngineConfig`."""
        return cls(validate(EngineConfig, {"model": model, **options}, "Engine.from_pretrained"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may be at any place: do not wait for them.
        if kind is None or self.placement.world_size == 1:
            self.close()

    @property
    def transport_name(self) -> str:
        """How this rank's results reach the others while decoding."""
        return self._peer_memory if self._peer_memory and self.is_fused else self._choices.backend

    @property
    def is_fused(self) -> bool:
        """Decode steps run the fused kernels."""
        return self.decode_step is not None and self.decode_step.is_fused

    @property
    def uses_graph(self) -> bool:
        """Decode steps are replays of a captured graph."""
        return self.decode_step is not None and self.decode_step.uses_graph

    @property
    def max_total_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return max_total_tokens(self.config, self.model_config)

    def take_notices(self) -> list[str]:
        """Choices that a user may not expect, for a command that prints them; `stream` then shows none."""
        self._has_warned = True
        return self.notices

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Refuse settings that do not fit the model: token ids that it does not have."""
        check_sampling(sampling, self.model_config)

    def fit_new_tokens(self, prompts: list[list[int]], sampling: SamplingT) -> tuple[SamplingT, str | None]:
        """See `generation.fit_new_tokens`."""
        return fit_new_tokens(prompts, sampling, self.config, self.model_config)

    def check_prompts(self, prompts: list[list[int]], max_new_tokens: int) -> int:
        """Return the tokens that the cache must hold for these rows, see `rows_of`; refuse too long prompts."""
        needed = check_prompts(prompts, max_new_tokens, self.config, self.model_config)
        context = self.config.max_context or needed
        self._check_context(context)
        return context

    def _check_context(self, context: int) -> None:
        """Refuse a context that is longer than a sliding window, if codec, mode or drafts cannot serve it."""
        check_window(self.config.kv_cache, self.mode, self.model_config, context)
        if self._drafting is not None:
            check_rings(self.config, self.model_config, self._drafting.model_config, context)

    def load(self, batch_size: int, max_context: int) -> None:
        """Take memory: connect the ranks, read this rank's weights, allocate the cache.

        A second call, for a larger batch or context, replaces only the cache. A call after an error loads what is
        missing.

        Raises:
            DoesNotFitError: before anything is allocated; for packets in the host's memory, after weights and cache.
            UserError: settings that ranks disagree on; a transport asked for that does not work; after `close`.
        """
        with self._lock:
            self._refuse_closed()
            self._check_context(max_context)
            self._load(batch_size, max_context)

    def _load(self, batch_size: int, max_context: int) -> None:
        self._owner = 0
        config, placement = self.model_config, self.placement
        held = self._weights_bytes + (self.cache.num_bytes if "cache" in vars(self) else 0)
        if self.memory is not None:  # a draft model's cache, too
            held = self._weights_bytes + self.memory.cache_bytes
        self.heartbeat.start(self._release)
        with self.heartbeat.waiting("load"):
            self._catch_up(self.agreement.exchange)
            # The rank with the least memory decides for all.
            own = available_bytes(self.device, placement.local_world_size) + held
            available = min(map(int, self.agreement.exchange(str(own))))
        drafts, recalled = self._drafting, composition.recalled_blocks(self.config, self.mode)
        memory = check_fits(
            config, placement.shard, self.dtype, batch_size, max_context, available, self.config.kv_cache,
            self.device.type, self.config.kv_protect, recalled, None if drafts is None else drafts.size,
        )  # fmt: skip
        if "cache" in vars(self):
            # Free the graph, then the cache that it refers to, before the new cache is allocated.
            self._release()
            self.memory = self.decode_step = None
            del self.cache, self._kept
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if not self._weights_bytes:
            with self.heartbeat.waiting("load"):
                self._load_model()
            self._weights_bytes = memory.weights_bytes
        self.cache = composition.build_cache(self._choices, self.config, config, batch_size, max_context)
        self._kept = KeptPrefix(self.cache, self.mode == "off" or self.config.speculation.threshold == 0.0)
        self.notices += composition.eager_notices(self._choices, batch_size, self.config, self.notices)
        parts = self.model, self.cache, self.connected()
        if self._drafting is not None:
            self.decode_step = self._drafting.build_step(*parts, self._peer_memory, self._step_operation)
        else:
            self.decode_step = composition.build_decode_step(
                self._choices, self.config.speculation, *parts, self._peer_memory, self._step_operation
            )
        self.memory = memory
        if not self._is_warm:
            warm_up(self.model, self.cache, self.connected(), self._operation)
            self._is_warm = True

    def _release(self) -> None:
        if self.decode_step is not None:
            self.decode_step.release()
            self.decode_step = None

    def _catch_up(self, exchange: Callable[[str], list[str]]) -> None:
        """Launch the steps that other ranks have launched ahead, before anything waits for the device.

        Args:
            exchange: every rank's text, given this rank's.
        """
        most = max(map(int, exchange(str(self.decode_step.launched if self.decode_step is not None else 0))))
        if self.decode_step is not None:
            self.decode_step.catch_up(most)

    def _load_model(self) -> None:
        config, placement = self.model_config, self.placement
        if self._store is not None and dist.is_initialized():
            raise UserError(
                "engine: torch.distributed is in use in this process; close the other engine first, or end your own "
                "process group: several ranks have one at a time"
            )
        self.agreement.require_same(agreed_settings(self.config, config, self._choices))
        self.heartbeat.mark(0, LOADING, -1)
        take_device(self.device, placement)
        weights = read_weights(self.checkpoint, config, placement, self.dtype, self.device)
        choices, requested = self._choices, self.config.transport
        self.transport = Transport(placement, self.device, choices.backend, self._store)
        try:
            self._peer_memory, notices = composition.find_peer_memory(choices, requested, self.transport)
        except UserError:
            self.transport.close()
            self.transport = None
            raise
        self.notices += notices
        self.model = Llama(config, weights, self.transport)
        if self._drafting is not None:
            self._drafting.load(self.transport)

    def connected(self) -> Transport:
        """The transport. Call `load` first."""
        assert self.transport is not None, "load comes first"
        return self.transport

    @contextmanager
    def _operation(self, name: str, layer: int) -> Iterator[None]:
        # Until the kernels are compiled, the heartbeat keeps the long limit of loading.
        if self._is_warm:
            self.heartbeat.mark(self._step, name, layer)
        with self.timeline.span(name, layer):
            yield

    @contextmanager
    def _step_operation(self, name: str, layer: int) -> Iterator[None]:
        # A step may be launched ahead of the one that the host reads.
        assert self.decode_step is not None
        self.timeline.step = self.decode_step.next_step
        with self._operation(name, layer):
            yield

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: SamplingConfig | None = None,
        *,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Generator[Token, None, None]:
        """Generate from a prompt, or from several at once, the same on every rank, loading the model on first use.

        A generator: nothing happens, and no error is raised, before its first token is asked for.

        With several, or with n answers to each, `token.request` says whose a token is: p n + a is answer a to prompt p.
        An engine serves one call at a time: another call, in any thread, ends this one. What was measured is in
        `generation`.

        Tokens at the start of a prompt that the cache still holds from the last call are not processed again: see
        runtime/engine/kept_prefix.py, and `generation.reused_tokens`. A prompt for which the cache is too small
        replaces it: set `max_context` for a conversation.

        Args:
            prompt: a text or token ids, or a list of such prompts.
            sampling, options: either a `SamplingConfig`, or its fields by name: `stream("...", temperature=0.8)`.
            progress: called now and then before the first token, with the prompt tokens done so far.
        Raises:
            UserError: options that do not exist or have a wrong value; a prompt that is none, does not fit, or is not
                the same on every rank; another call has begun; the engine is closed.
            BadNumbersError: NaN or Inf in a step; no token of that step is yielded.
            RankFailureError: a step waited in vain for a rank.
        """
        if sampling is not None and (options or not isinstance(sampling, SamplingConfig)):
            raise UserError("Engine.stream: expected either a SamplingConfig or its fields by name")
        self._refuse_closed()
        sampling = sampling or validate(SamplingConfig, options, "Engine.stream")
        with self._lock:
            number, sampling, notices = self._begin(prompt, sampling)
        notices += [] if self._has_warned else self.notices
        notices = [] if self.placement.rank else notices
        self._has_warned = True
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        yield from self._generate(number, self.generation, sampling, progress)

    def generate(
        self, prompt: Prompt | Sequence[Prompt], sampling: SamplingConfig | None = None, **options: Any
    ) -> Completion | list[Completion]:
        """Generate to the end: the `Completion` of a prompt, or a list of them for several prompts or answers.

        With n answers to each prompt, those of the first prompt come first. See `stream`.
        """
        for _ in self.stream(prompt, sampling, **options):
            pass
        completions = self.generation.completions()
        is_single = any(each is prompt for each in prompts_of(prompt))
        return completions[0] if is_single and self.generation.num_answers == 1 else completions

    def _begin(
        self, prompt: Prompt | Sequence[Prompt], sampling: SamplingConfig
    ) -> tuple[int, SamplingConfig, list[str]]:
        """Check and encode the prompts, and load what they need.

        Returns:
            Number of the new generation, the settings in force, and notices about them.
        """
        settings = sampling.model_dump(mode="json", include=set(SamplingConfig.model_fields))
        self.heartbeat.start(self._release)
        with self.heartbeat.waiting(f"the start of generation {self._generations + 1}"):
            # First, because all ranks must refuse the same prompts.
            self.agreement.require_same({"prompt": spelled(prompt)} | settings)
            self._catch_up(self.agreement.exchange)
            tokenizer = partial(self.text_tokenizer, "give token ids")
            self.check_sampling(sampling)
            prompts = rows_of(encode_prompts(prompt, tokenizer, self.max_total_tokens), sampling.n)
            sampling, notice = self.fit_new_tokens(prompts, sampling)
            needed, batch_size = self.check_prompts(prompts, sampling.max_new_tokens), len(prompts)
            if self.memory is None or self.cache.batch_size != batch_size or self.cache.max_context < needed:
                self.load(batch_size, needed)
            if self.model.set_total_length(needed):
                self._kept.forget()  # its keys have other rotary frequencies
            # A call that was interrupted may have ended at another token on each rank.
            of_ranks = map(json.loads, self.agreement.exchange(json.dumps(self._kept.reusable(prompts))))
            reused = [min(of_request) for of_request in zip(*of_ranks, strict=True)]
            reused = [reused[row - row % sampling.n] for row in range(batch_size)]  # other answers are copied
        requests = requests_of(prompts, sampling, self.tokenizer, self.model_config)
        made = Generation(requests, num_answers=sampling.n, reused_tokens=reused)
        number = self._own(made)
        return number, sampling, [notice] if notice else []

    def _own(self, generation: Generation) -> int:
        """Give the cache to a new generation; returns its number."""
        self.generation = generation
        self._generations += 1
        self._owner = self._generations
        return self._generations

    def _generate(
        self,
        number: int,
        generation: Generation,
        sampling: SamplingConfig,
        progress: Callable[[int], None] | None,
    ) -> Iterator[Token]:
        """Prefill, then decode until every request has ended; yields tokens as they come."""
        first_lossy = self.config.speculation.first_lossy_length
        with self._running(number):
            # Cut before anything is written: an interrupted call then leaves a valid prefix. Other answers are copied.
            kept = [n if row % sampling.n == 0 else 0 for row, n in enumerate(generation.reused_tokens)]
            for row, num_tokens in enumerate(kept):
                self._kept.cut(row, num_tokens)
            self._prepare(sampling, kept)
            prompts = [request.prompt_ids for request in generation.requests]
            seen = tokens_seen(prompts, self.model_config.vocab_size, self.device) if sampling.penalises else None
            tokens, logprobs = self._prefill(generation, sampling, seen, progress)
        for token in generation.push([[token] for token in tokens], None, first_lossy, logprobs):
            yield token
            self._check_running(number)
        if any(generation.live):
            with self._running(number):
                self._begin_steps(tokens, generation.seq_lens, seen, prompts)
        while any(generation.live):
            with self._running(number):
                self._mark_step()
                assert self.decode_step is not None
                record = self.decode_step.step(generation.remaining, generation.live)
                self._raise_fault(record.fault)
            for index, request in enumerate(generation.requests):
                if request.live:
                    self._kept.appended(index, [request.token_ids[-1], *record.token_ids[index][:-1]])
            generation.step_us.append(record.step_us)
            for token in generation.push(record.token_ids, record.hits, first_lossy, record.logprobs, record.drafts):
                yield token
                self._check_running(number)

    @contextmanager
    def _running(self, number: int) -> Iterator[None]:
        """Hold the engine for work of one generation, if that still has the cache."""
        with self._lock:
            self._check_running(number)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a setting of each thread
            with self.heartbeat.waiting(f"generation {number}"):
                try:
                    yield
                except Exception:
                    self._kept.forget()  # the cache may hold bad numbers
                    raise

    def _check_running(self, number: int) -> None:
        self._refuse_closed()
        if number != self._owner:
            why = "another generation of this engine has begun, which ends this one"
            raise UserError(f"stream: {why}; take one after the other, or use two engines")

    def _prefill(
        self,
        generation: Generation,
        sampling: SamplingConfig,
        seen: Tensor | None,
        progress: Callable[[int], None] | None,
    ) -> tuple[list[int], Logprobs | None]:
        """Process all prompts; returns the first token of each request, and their log probabilities if asked for."""
        transport = self.connected()
        transport.barrier()
        self.timeline.start()
        started = time.perf_counter()
        self._step = 0
        assert self.decode_step is not None
        logits, layer_sums = process_prompts(
            self.model, self.cache, self._kept, transport, generation, self._operation, progress,
            self.decode_step.prompt_queries,
        )  # fmt: skip
        chosen = choose_tokens(logits, layer_sums, sampling, generation.seq_lens, seen, self._step, transport)
        generation.prefill_us = (time.perf_counter() - started) * 1e6
        return chosen

    def prepare(self, sampling: SamplingConfig) -> None:
        """Compile and capture the decode step for this way of sampling; overwrites the start of the cache.

        Raises:
            BadNumbersError, RankFailureError: as `decode`.
        """
        self._kept.forget()
        self._prepare(sampling, None)

    def _prepare(self, sampling: SamplingConfig, kept: list[int] | None) -> None:
        assert self.decode_step is not None
        self.heartbeat.mark(0, LOADING, -1)  # compiling is one long call
        self._step = 0
        self._attempts += 1
        is_warm, self._is_warm = self._is_warm, False
        try:
            fault = self.decode_step.prepare(sampling, kept)
        finally:
            self._is_warm = is_warm
        self._raise_fault(fault)

    def decode(
        self, token_ids: list[int], seq_lens: list[int], num_steps: int, prompts: list[list[int]] | None = None
    ) -> Iterator[StepRecord]:
        """Steps of the prepared decode step behind what the cache holds; for profiling.

        Args:
            token_ids, seq_lens: the newest token of each request, and lengths that count it.
            prompts: the tokens before them, for drafts.
        Raises:
            BadNumbersError: NaN or Inf in a step.
            RankFailureError: a step waited in vain for a rank.
        """
        self._kept.forget()
        self.timeline.start()
        self._begin_steps(token_ids, seq_lens, prompts=prompts)
        tokens = self.config.tokens_of_step
        for remaining in range(num_steps, 0, -1):
            self._mark_step()
            assert self.decode_step is not None
            record = self.decode_step.step(remaining * tokens)
            self._raise_fault(record.fault)
            yield record

    def _begin_steps(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: list[list[int]] | None = None,
    ) -> None:
        assert self.decode_step is not None
        self._attempts += 1
        self._step = 0
        self.decode_step.begin(token_ids, seq_lens, seen, prompts)

    def _mark_step(self) -> None:
        self._step += 1
        self.heartbeat.mark(self._step, "replay" if self.uses_graph else "decode", -1)

    def _raise_fault(self, code: int) -> None:
        if code:
            raise fault_error(code, self._step, self.model_config.num_layers, self.agreement, self._attempts)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UserError("engine: it is closed; create another one")

    def text_tokenizer(self, advice: str, where: str = "prompt") -> Tokenizer:
        """The tokenizer, where a text needs it.

        Args:
            advice: what else to do.  where: the text comes from.
        Raises:
            UserError: there is none.
        """
        if self.tokenizer is None and self.checkpoint is not None:
            return open_tokenizer(self.config, self.model_config)  # says what is missing
        if self.tokenizer is None:
            raise UserError(f"{where}: random weights have no tokenizer; {advice}")
        return self.tokenizer

    def gather_rows(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Rows of every rank, on every rank."""
        return [json.loads(text) for text in self.agreement.exchange(json.dumps(rows))]

    def close(self) -> None:
        """End in order: wait for all ranks, stop the heartbeat, end the process groups, free the memory.

        Every rank calls it, or leaves a `with` block, before it ends. A rank that ends without `close` does not wait
        for the others. If an error is pending, as in a `finally` block, `close` waits only for ranks that close as
        well; ranks that wait for this one in a step end with an error that names it.
        """
        with self._lock:
            self._close()
            self._is_closed = True

    def _close(self) -> None:
        # At the interpreter's end the heartbeat may have stopped before: then wait for no rank.
        has_left = self.placement.world_size > 1 and not self.heartbeat.watching
        if self.transport is None:
            self.heartbeat.stop(has_met=False)
        elif not self._is_closed and not has_left:
            error = pending_error()
            if error is None:
                with self.heartbeat.waiting("close"):
                    if self.heartbeat.rendezvous(None):
                        self.transport.flush()
                        self._close_together(self.transport)
            elif self.heartbeat.rendezvous(error):
                # Messages may have no receiver any more, and the pending error is the one to report.
                with suppress(RuntimeError):
                    self._close_together(self.transport)

    def _close_together(self, transport: Transport) -> None:
        """The part of `close` that every rank runs, if all ranks close."""
        with self.heartbeat.waiting("close"):
            self._catch_up(lambda own: self.agreement.gather_within("launched", own, TIMEOUT.total_seconds()))
            transport.barrier()
        # Graphs first, then the memory of packets, then process groups: NCCL waits for graphs that refer to it.
        self._release()
        self.heartbeat.stop()
        transport.close()
        self._free()

    def _free(self) -> None:
        """Free weights and cache for the next engine of this process."""
        # The decode step and this engine form a reference cycle, which would keep the weights alive.
        self.decode_step = self.memory = None
        for name in ("model", "cache", "_kept"):
            vars(self).pop(name, None)
        if self._drafting is not None:
            self._drafting.model = None
        self._weights_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
