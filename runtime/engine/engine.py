"""The engine: from a model folder to a stream of tokens, the same program on every rank."""

from __future__ import annotations

import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from alspec.config import EngineConfig, SamplingConfig, refuse_unavailable, validate
from alspec.errors import UserError
from alspec.kernels.common.limits import MAX_BATCH
from alspec.models.checkpoint.source import model_config, model_folder
from alspec.models.generation_config import notice_of_settings
from alspec.models.llama import Llama
from alspec.models.tokenizer.tokenizer import Prompt, Tokenizer, encode_prompts, spelled
from alspec.runtime.cache.codecs import Cache, check_codec, check_head_dim, new_cache
from alspec.runtime.decode.eager_sampling import sample
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.captured_step import CapturedStep, StepRecord
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.agreement import Agreement, fingerprint, shared_settings
from alspec.runtime.distributed.peer_memory import probe_peer_memory
from alspec.runtime.distributed.placement import (
    PeerMemory,
    Placement,
    choose_device,
    choose_graph,
    choose_mode,
    peer_memory_candidates,
)
from alspec.runtime.distributed.transport import TIMEOUT, Transport, connect_store
from alspec.runtime.engine.generation import Generation, IdDecoder, Request, Token, check_prompts, most_tokens
from alspec.runtime.engine.loading import open_model, read_weights, take_device, warm_up
from alspec.runtime.engine.memory import DTYPES, MemoryPlan, available_bytes, check_fits, check_max_context
from alspec.runtime.faults.bad_steps import bad_logits_error, fault_error
from alspec.runtime.faults.heartbeat import LOADING, Heartbeat, error_on_its_way
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
    # One of these two decodes: the fused kernels, or operation by operation from the host.
    loop: CapturedStep | None = None
    program: EagerStep | None = None

    def __init__(self, config: EngineConfig, trace: bool = False) -> None:
        self.config = config
        refuse_unavailable(config)
        environment = Placement.from_environment()
        self.model_config = model_config(config)
        self.checkpoint, self.tokenizer = open_model(config, self.model_config)
        check_max_context(config.max_context, self.model_config)
        self.mode, num_groups = choose_mode(config.speculation.mode, self.model_config, environment.world_size)
        self.placement = replace(environment, num_groups=num_groups)
        check_codec(config.kv_cache, self.model_config, self.placement.tp_size)
        self.device, self.backend, notice = choose_device(config, self.placement)
        check_head_dim(self.model_config, self.device)
        ignored = None if self.checkpoint is None else notice_of_settings(model_folder(config))
        self.notices = [each for each in (notice, ignored) if each]  # choices that a user may not expect
        if self.mode == "paired" and config.speculation.mode == "auto":
            why = f"heads do not divide over {self.placement.world_size} ranks"
            what = f"guesses within lambda {config.speculation.threshold:g} are accepted (threshold 0 accepts none)"
            self.notices.append(f"speculation: a pair, because {why}; {what}")
        self._told = False  # by `stream`; commands print them
        # The fused kernels of a whole step: those steps can be captured, and their results can travel as words.
        self._has_decoder = self.device.type == "cuda" and self.mode in ("off", "paired")
        if self.device.type == "cuda" and not self._has_decoder:
            self.notices.append(f"{self.mode}: operations are launched one by one; captured steps serve off and paired")
        # Where words may travel; `_load_model` finds out where they do.
        self._candidates = peer_memory_candidates(config, self.mode, self.placement.world_size, self._has_decoder)
        self._peer_memory: PeerMemory | None = None
        self._wants_graph = choose_graph(config, self.mode, self.device, self._has_decoder, trace)
        if trace and self._has_decoder:
            self.notices.append("operations are launched one by one, because --trace times each of them")
        stored = self.model_config.dtype if self.device.type == "cuda" else "fp32"
        self.dtype_name = config.dtype or stored
        self.dtype = DTYPES[self.dtype_name]
        # Engines of one process, one after the other, have keys of their own; ranks create them in the same order.
        job = f"alspec-{next(_JOBS)}"
        several = self.placement.world_size > 1
        self._store = dist.PrefixStore(job, connect_store(self.placement)) if several else None
        self.agreement = Agreement(self.placement, self._store)
        self.heartbeat = Heartbeat(self.placement, job=job)
        if self._store is not None:
            self.heartbeat.announce(self._store)
        self.timeline = Timeline(self.device, trace)
        self.memory: MemoryPlan | None = None  # of what is loaded, cache included
        self._weights_bytes = 0  # of those that are loaded
        self.transport: Transport | None = None
        self._step = 0
        self._attempts = 0  # to run the loop; a fault ends one
        self._generations = 0  # begun so far
        self._owner = 0  # the generation that may use the cache: the last one, if nothing was loaded since
        self._lock = threading.RLock()  # of threads: one at a time loads, closes or takes a step
        self._is_closed = False
        self._is_warm = self.device.type != "cuda"

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **options: Any) -> Engine:
        """An engine for a Hugging Face folder (default: the demo checkpoint); options are fields of `EngineConfig`."""
        return cls(validate(EngineConfig, {"model": model, **options}, "Engine.from_pretrained"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may be anywhere: there is no meeting them.
        if kind is None or self.placement.world_size == 1:
            self.close()

    @property
    def transport_name(self) -> str:
        """How this rank's results reach the others while decoding."""
        return self._peer_memory if self._peer_memory and self.loop is not None else self.backend

    @property
    def uses_graph(self) -> bool:
        """Decode steps are replays of a captured graph."""
        return self.loop is not None and self._wants_graph

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its answer."""
        return most_tokens(self.config, self.model_config)

    def check_prompts(self, prompts: list[list[int]], max_new_tokens: int) -> int:
        """The cache room that these prompts need; refuses what the model or `max_context` has no room for."""
        needed = check_prompts(prompts, max_new_tokens, self.config, self.model_config)
        return self.config.max_context or needed

    def load(self, batch_size: int, max_context: int) -> None:
        """Take memory: connect the ranks, read this rank's weights, allocate the cache.

        Called again for a larger batch or context, it replaces the cache only; after an error it starts over with what
        it lacks.

        Raises:
            DoesNotFitError: before anything is allocated; of the host's memory for words, after weights and cache.
            UserError: settings that ranks disagree on; a transport asked for that does not work; after `close`.
        """
        with self._lock:
            self._refuse_closed()
            self._load(batch_size, max_context)

    def _load(self, batch_size: int, max_context: int) -> None:
        self._owner = 0
        config, placement = self.model_config, self.placement
        held = self._weights_bytes + (self.cache.num_bytes if "cache" in vars(self) else 0)
        self.heartbeat.start(self._release)
        with self.heartbeat.waiting("load"):
            self._catch_up(self.agreement.exchange)
            # What the rank with least has, for all have to refuse what one does.
            own = available_bytes(self.device, placement.local_world_size) + held
            available = min(map(int, self.agreement.exchange(str(own))))
        codec = self.config.kv_cache
        memory = check_fits(
            config, placement.shard, self.dtype, batch_size, max_context, available, codec, self.device.type
        )
        if "cache" in vars(self):
            # The old cache goes before the new one comes, and a graph before what it refers to.
            self._release()
            self.memory = self.program = None
            del self.cache
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if not self._weights_bytes:
            with self.heartbeat.waiting("load"):
                self._load_model()
            self._weights_bytes = memory.weights_bytes
        self.cache = new_cache(
            codec, config, placement.tp_size, batch_size, max_context, self.dtype, self.device, self.config.softmax
        )
        is_paired = self.mode == "paired"
        if self._has_decoder and batch_size <= MAX_BATCH:
            self.loop = CapturedStep.build(
                self.model,
                self.cache,
                self.connected(),
                self._peer_memory,
                self._wants_graph,
                self._looped_operation,
                self.config.speculation if is_paired else None,
            )
        else:
            notice = (
                f"{batch_size} requests: operations are launched one by one; captured steps serve up to {MAX_BATCH}"
            )
            if self._has_decoder and notice not in self.notices:
                self.notices.append(notice)
            speculation = self.config.speculation
            self.program = EagerStep(
                self.model,
                self.cache,
                self.connected(),
                self.mode,
                speculation.threshold,
                speculation.chunk_size,
                self._operation,
            )
        self.memory = memory
        if self.device.type == "cuda":
            program = None if self._is_warm else self.program  # only once
            warm_up(self.model, self.cache, self.connected(), self._operation, program)
            self._is_warm = True

    def _release(self) -> None:
        if self.loop is not None:
            self.loop.release()
            self.loop = None

    def _catch_up(self, exchange: Callable[[str], list[str]]) -> None:
        """Before anything waits for the device: launch the steps that other ranks have launched, see `CapturedStep`.

        Args:
            exchange: every rank's text, for this rank's.
        """
        most = max(map(int, exchange(str(self.loop.launched if self.loop is not None else 0))))
        if self.loop is not None:
            self.loop.catch_up(most)

    def _load_model(self) -> None:
        config, placement = self.model_config, self.placement
        if self._store is not None and dist.is_initialized():
            raise UserError(
                "engine: torch.distributed is in use in this process; close the other engine first, or end your own "
                "process group: several ranks have one at a time"
            )
        self._check_agreement()
        self.heartbeat.mark(0, LOADING, -1)
        take_device(self.device, placement)
        weights = read_weights(self.checkpoint, config, placement, self.dtype, self.device)
        self.transport = Transport(placement, self.device, self.backend, self._store)
        if self._candidates:
            self._peer_memory, reason = probe_peer_memory(self._candidates, self.transport)
            if self._peer_memory is None and self.config.transport != "auto":
                self.transport.close()
                self.transport = None
                raise UserError(f"transport: {self.config.transport} does not work here: {reason}; use auto or nccl")
            if reason:
                over = self._peer_memory or self.backend
                self.notices.append(f"transport: {over}, because symm does not work here ({reason})")
        self.model = Llama(config, weights, self.transport)

    def _check_agreement(self) -> None:
        """Ranks on different hosts are told, and choose, for themselves; it must be the same everywhere."""
        chosen = {"resolved transport": self._candidates[0] if self._candidates else self.backend}
        chosen |= {"resolved mode": self.mode, "resolved dtype": self.dtype_name}
        chosen |= {f"the model's {name}": value for name, value in self.model_config.model_dump(mode="json").items()}
        if self.checkpoint is not None and self._store is not None:
            chosen |= {"the model's files (fingerprint)": fingerprint(model_folder(self.config))}
        self.agreement.require_same(shared_settings(self.config) | chosen)

    def connected(self) -> Transport:
        """The transport; `load` comes first."""
        assert self.transport is not None, "load comes first"
        return self.transport

    @contextmanager
    def _operation(self, name: str, layer: int) -> Iterator[None]:
        # Until the kernels are compiled, the heartbeat is as patient as while loading.
        if self._is_warm:
            self.heartbeat.mark(self._step, name, layer)
        with self.timeline.span(name, layer):
            yield

    @contextmanager
    def _looped_operation(self, name: str, layer: int) -> Iterator[None]:
        # The loop launches ahead of the step that the host reads.
        assert self.loop is not None
        self.timeline.step = self.loop.next_step
        with self._operation(name, layer):
            yield

    def start_generation(self, prompts: list[list[int]], sampling: SamplingConfig) -> Generation:
        """The state of one batch; `run` fills it."""
        if self.tokenizer is None:
            eos = self.model_config.eos_token_ids
            return Generation([Request(ids, IdDecoder(), sampling, eos) for ids in prompts])
        eos, decoder = self.tokenizer.eos_token_ids, self.tokenizer.stream_decoder
        stop_ids = [each for each in map(self.tokenizer.special_token_id, sampling.stop) if each is not None]
        return Generation([Request(ids, decoder(ids), sampling, eos, stop_ids) for ids in prompts])

    def run(
        self, generation: Generation, sampling: SamplingConfig, progress: Callable[[int], None] | None = None
    ) -> Iterator[Token]:
        """Prefill, then decode until every request has ended; yields tokens as they come.

        Args:
            progress: told how many tokens of all prompts are done, now and then before the first token comes.
        Raises:
            BadNumbersError: NaN or Inf in the logits; no token of that step is yielded.
            UserError: another generation has begun since the last token, and has the cache; after `close`.
        """
        with self._lock:
            number = self._begin_generation()
        yield from self._locked_steps(number, self._run(generation, sampling, progress))

    def _begin_generation(self) -> int:
        """The number of a new generation, which has the cache from now on; within the lock that it was loaded under."""
        self._generations += 1
        self._owner = self._generations
        return self._generations

    def _locked_steps(self, number: int, steps: Iterator[Token]) -> Iterator[Token]:
        while True:
            with self._lock:
                self._refuse_closed()
                if number != self._owner:
                    why = "another generation of this engine has begun, which ends this one"
                    raise UserError(f"stream: {why}; take one after the other, or use two engines")
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # each thread has its own
                with self.heartbeat.waiting(f"generation {number}"):
                    token = next(steps, None)
            if token is None:
                return
            yield token

    def _run(
        self, generation: Generation, sampling: SamplingConfig, progress: Callable[[int], None] | None
    ) -> Iterator[Token]:
        transport = self.connected()
        if self.loop is not None:
            self.prepare(sampling)
        transport.barrier()
        self.timeline.start()
        started = time.perf_counter()
        self._step = 0
        parts, done = [], 0
        for index, request in enumerate(generation.requests):
            if progress is not None:
                progress(done)
            in_prompt = None if progress is None else lambda tokens, before=done: progress(before + tokens)
            ids = request.prompt_ids
            parts.append(prefill(self.model, self.cache, transport, index, ids, self._operation, progress=in_prompt))
            done += len(ids)
        logits, layer_sums = torch.cat([part[0] for part in parts]), torch.stack([part[1] for part in parts]).sum(0)
        tokens = self._choose(logits, layer_sums, generation, sampling)
        generation.prefill_us = (time.perf_counter() - started) * 1e6
        yield from generation.push(tokens, None, self.config.speculation.chunk_size)
        steps = self._launched_steps if self.loop is None else self._looped_steps
        yield from steps(generation, tokens, sampling)

    def _launched_steps(self, generation: Generation, tokens: list[int], sampling: SamplingConfig) -> Iterator[Token]:
        """Decode operation by operation, with tokens and verdicts on the host at each step."""
        while any(generation.live):
            self._step += 1
            self.timeline.step = self._step
            started = time.perf_counter()
            assert self.program is not None
            result = self.program.run(
                DecodeState(
                    token_ids=torch.tensor(tokens, device=self.device),
                    seq_lens=torch.tensor(generation.seq_lens, dtype=torch.int32, device=self.device),
                    live=torch.tensor(generation.live),
                )
            )
            tokens = self._choose(result.logits, result.layer_sums, generation, sampling)
            generation.step_us.append((time.perf_counter() - started) * 1e6)
            yield from generation.push(tokens, result.hits, self.config.speculation.chunk_size)

    def _looped_steps(self, generation: Generation, tokens: list[int], sampling: SamplingConfig) -> Iterator[Token]:
        """Decode with the fused kernels: the devices go on by themselves, the host reads tokens as they come."""
        if not any(generation.live):
            return
        started = time.perf_counter()
        last_clock_ns = 0
        num_steps = sampling.max_new_tokens - 1
        for record in self.decode(tokens, generation.seq_lens, num_steps, lambda: generation.live):
            # The first step's time is the host's: before it no step has left the device's clock.
            first_us = (time.perf_counter() - started) * 1e6
            generation.step_us.append((record.clock_ns - last_clock_ns) / 1e3 if last_clock_ns else first_us)
            last_clock_ns = record.clock_ns
            yield from generation.push(record.token_ids, record.hits, self.config.speculation.chunk_size)
            if not any(generation.live):
                return

    def prepare(self, sampling: SamplingConfig) -> None:
        """Compile and capture the `loop` for this way of sampling; overwrites the start of the cache.

        Raises:
            BadNumbersError, RankFailureError: as `decode`.
        """
        assert self.loop is not None
        self.heartbeat.mark(0, LOADING, -1)  # compiling is one long call
        self._step = 0
        self._attempts += 1
        self._raise_fault(self.loop.prepare(sampling))

    def decode(
        self, token_ids: list[int], seq_lens: list[int], num_steps: int, live: Callable[[], list[bool]] | None = None
    ) -> Iterator[StepRecord]:
        """Steps of the prepared `loop` after what the cache holds; lengths count the newest tokens, `token_ids`.

        Args:
            live: who is still generating, asked before each step; without it, all are.
        Raises:
            BadNumbersError: NaN or Inf in a step.
            RankFailureError: a step waited for a rank in vain.
        """
        assert self.loop is not None
        self._attempts += 1
        self.loop.begin(token_ids, seq_lens)
        for self._step in range(1, num_steps + 1):
            self.heartbeat.mark(self._step, "replay" if self.uses_graph else "decode", -1)
            record = self.loop.step(num_steps - self._step + 1, live() if live else None)
            self._raise_fault(record.fault)
            yield record

    def _raise_fault(self, code: int) -> None:
        if code:
            raise fault_error(code, self._step, self.model_config.num_layers, self.agreement, self._attempts)

    def stream(
        self, prompt: Prompt | Sequence[Prompt], sampling: SamplingConfig | None = None, **options: Any
    ) -> Iterator[Token]:
        """Generate from a prompt, or from several at once, the same on every rank, loading the model on first use.

        Of several, `token.request` says whose a token is. An engine serves one call at a time: its tokens end when
        another one begins, in any thread.

        Args:
            prompt: a text or token ids, or a list of such prompts.
            sampling, options: either all of it, or fields of `SamplingConfig`: `stream("...", temperature=0.8)`.
        Raises:
            UserError: options that do not exist or have no such value; a prompt that is none, does not fit, or is not
                the same on every rank; as `run`; after `close`.
        """
        if sampling is not None and (options or not isinstance(sampling, SamplingConfig)):
            raise UserError("Engine.stream: expected either a SamplingConfig or its fields by name")
        self._refuse_closed()
        sampling = sampling or validate(SamplingConfig, options, "Engine.stream")
        settings = sampling.model_dump(mode="json", include=set(SamplingConfig.model_fields))
        with self._lock:
            self.heartbeat.start(self._release)
            with self.heartbeat.waiting(f"the start of generation {self._generations + 1}"):
                # Before anything of it is refused, for that has to happen on all ranks.
                self.agreement.require_same({"prompt": spelled(prompt)} | settings)
                self._catch_up(self.agreement.exchange)
                of_text = partial(self.text_tokenizer, "give token ids")
                prompts = encode_prompts(prompt, of_text, self.most_tokens)
                needed, batch_size = self.check_prompts(prompts, sampling.max_new_tokens), len(prompts)
                if self.memory is None or self.cache.batch_size != batch_size or self.cache.max_context < needed:
                    self.load(batch_size, needed)
            number = self._begin_generation()
        notices = () if self._told or self.placement.rank else self.notices
        self._told = True
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        yield from self._locked_steps(number, self._run(self.start_generation(prompts, sampling), sampling, None))

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
            return Tokenizer.from_folder(model_folder(self.config), self.model_config)  # says what is missing
        if self.tokenizer is None:
            raise UserError(f"{where}: random weights have no tokenizer; {advice}")
        return self.tokenizer

    def _choose(
        self, logits: Tensor, layer_sums: Tensor, generation: Generation, sampling: SamplingConfig
    ) -> list[int]:
        """Sample on the device and bring the tokens to the host; a finished request keeps its last one."""
        tokens = sample(
            logits,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.seed,
            request=torch.arange(len(generation.requests), device=self.device),
            position=torch.tensor(generation.seq_lens, device=self.device),
        )
        finite = torch.isfinite(logits).all().to(tokens.dtype)
        *chosen, is_finite = torch.cat([tokens, finite[None]]).tolist()
        if not is_finite:
            raise bad_logits_error(logits, layer_sums, self._step, self.connected())
        return [
            token if request.live else request.token_ids[-1]
            for token, request in zip(chosen, generation.requests, strict=True)
        ]

    def gather_rows(self, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Rows of every rank, on every rank."""
        return [json.loads(text) for text in self.agreement.exchange(json.dumps(rows))]

    def close(self) -> None:
        """Leave in order: all ranks meet, the heartbeat says goodbye, the process groups end, memory is given back.

        Every rank calls it, or leaves a `with` block, before it ends: one that ends without leaves at its exit, and
        does not wait for the others. Called while an error is on its way, as in a `finally` block, it meets the others
        only where they close as well; those that wait for this rank in a step end, and name it.
        """
        with self._lock:
            self._close()
            self._is_closed = True

    def _close(self) -> None:
        # At the interpreter's end, this may come after the heartbeat has left: nobody is met then.
        has_left = self.placement.world_size > 1 and not self.heartbeat.watching
        if self.transport is None:
            self.heartbeat.stop(has_met=False)
        elif not self._is_closed and not has_left:
            error = error_on_its_way()
            if error is None:
                with self.heartbeat.waiting("close"):
                    if self.heartbeat.meets(None):
                        self.transport.flush()
                        self._close_together(self.transport)
            elif self.heartbeat.meets(error):
                # Messages may have no receiver any more; and the error on its way is the one to be seen.
                with suppress(RuntimeError):
                    self._close_together(self.transport)

    def _close_together(self, transport: Transport) -> None:
        """Every rank is here, or on its way."""
        with self.heartbeat.waiting("close"):
            self._catch_up(lambda own: self.agreement.gather_within("launched", own, TIMEOUT.total_seconds()))
            transport.barrier()
        # Graphs first, then the memory of words, then process groups: NCCL waits for graphs that refer to it.
        self._release()
        self.heartbeat.stop()
        transport.close()
        self._free()

    def _free(self) -> None:
        """Give weights and cache back: the next engine of this process needs the room."""
        # `program` and this engine refer to each other: both, and weights with them, may stay for long after their use.
        self.program = self.memory = None
        for name in ("model", "cache"):
            vars(self).pop(name, None)
        self._weights_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
