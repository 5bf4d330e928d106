"""What an engine holds: opened, loaded and released in order, the same on every rank."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from alspec.config import EngineConfig, validate
from alspec.errors import UserError, show
from alspec.models.checkpoint.source import model_config
from alspec.models.llama import Llama
from alspec.models.matrix_formats import weights_name
from alspec.runtime.cache.codecs import Cache, check_softmax, fit_heads
from alspec.runtime.decode.decode_step import DecodeStep
from alspec.runtime.decode.rounds.row_append import RowAppend
from alspec.runtime.distributed.agreement import Agreement
from alspec.runtime.distributed.failed_start import new_job
from alspec.runtime.distributed.placement import PeerMemory
from alspec.runtime.distributed.transport import TIMEOUT, Transport, connect_store
from alspec.runtime.engine import composition
from alspec.runtime.engine.choices import choose
from alspec.runtime.engine.drafting import Drafting, draft_model_config
from alspec.runtime.engine.generation import (
    Generation,
    max_total_tokens,
)
from alspec.runtime.engine.kept_prefix import KeptPrefix
from alspec.runtime.engine.loading import (
    agreed_settings,
    model_notices,
    open_model,
    read_weights,
    take_device,
    warm_up_prompts,
)
from alspec.runtime.engine.memory import MemoryPlan, available_bytes, check_fits, check_max_context, with_append_rows
from alspec.runtime.engine.round_composition import build_row_append
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.faults.bad_steps import fault_error
from alspec.runtime.faults.heartbeat import LOADING, Heartbeat, pending_error
from alspec.runtime.profiling.timeline import Timeline

__all__ = ["Resources"]


class Resources:
    """A model on this rank's device, its cache and decode step: the part of an `Engine` that takes and frees them.

    Creating it finds every mistake in configuration and checkpoint without taking device memory; `load` takes it.

    Raises:
        UserError: flags, checkpoint, tokenizer, or a world size the model does not divide by.
    """

    # Set by `load`.
    model: Llama
    cache: Cache
    _kept: KeptPrefix  # what the cache holds
    decode_step: DecodeStep | None = None
    _append: RowAppend | None = None  # of prompts that go on from what the cache holds
    _for_turns = False

    def __init__(self, config: EngineConfig, trace: bool = False) -> None:
        with new_job() as job:
            self._open(config, trace)
            self._join(job)
        self.timeline = Timeline(self.device, trace)
        self.memory: MemoryPlan | None = None  # of what is loaded, cache included
        self._weights_bytes = 0  # of the weights that are loaded
        self.transport: Transport | None = None
        self._peer_memory: PeerMemory | None = None
        self.generation = Generation([])  # what `stream` serves, or served last: its requests and what was measured
        self._step = 0
        self._attempts = 0  # to run decode steps; a fault ends one
        self._generations = 0  # begun so far
        self._active_generation = 0  # the generation that may use the cache: the last one, unless a load came after it
        self._lock = threading.RLock()  # one thread at a time loads, closes or takes a step
        self._is_closed = False
        self._is_warm = self.device.type != "cuda"

    def _open(self, config: EngineConfig, trace: bool) -> None:
        """Find every mistake in configuration and checkpoint."""
        self.config = config
        check_softmax(config)
        self.model_config = fit_heads(config.kv_cache, model_config(config))
        self.checkpoint, self.tokenizer = open_model(config, self.model_config)
        check_max_context(config.max_context, self.model_config)
        draft_model = draft_model_config(config)
        self._choices = choose(config, self.model_config, trace, draft_model)
        tp_size = self._choices.placement.tp_size
        self.model_config = config_with_weights(config, self.model_config, tp_size, self._choices.packs_weights)
        self._drafting = Drafting.open(config, self.model_config, draft_model, self.tokenizer, self._choices)
        self.mode, self.placement, self.device = self._choices.mode, self._choices.placement, self._choices.device
        self.dtype, self.dtype_name = self._choices.dtype, self._choices.dtype_name
        about_model = model_notices(config, self.checkpoint, self.model_config, self.dtype_name, tp_size)
        self.notices = [*about_model, *self._choices.notices]  # choices a user may not expect
        self._has_warned = False  # `stream` shows them once
        self._prints_notices = False  # a command prints all notices: `stream` shows none

    def _join(self, job: str) -> None:
        """Connect to the job's store. From now on the other ranks see whether this one is alive."""
        several = self.placement.world_size > 1
        self._store = dist.PrefixStore(job, connect_store(self.placement)) if several else None
        self.agreement = Agreement(self.placement, self._store)
        self.heartbeat = Heartbeat(self.placement, job=job)
        self.heartbeat.start(self._release)

    @classmethod
    def from_pretrained(cls, model: str | Path | None = None, **options: Any) -> Self:
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
        """How ranks exchange results while decoding; `symm+nccl`: inside a group, and between the two of a pair."""
        backend = self._choices.backend
        inside = self._peer_memory if self._peer_memory and self.is_fused else backend
        return f"{inside}+{backend}" if self.placement.is_linked and inside != backend else inside

    @property
    def is_fused(self) -> bool:
        """Decode steps run the fused kernels."""
        return self.decode_step is not None and self.decode_step.is_fused

    @property
    def uses_graph(self) -> bool:
        """Decode steps are replays of a captured graph."""
        return self.decode_step is not None and self.decode_step.uses_graph

    @property
    def weights_name(self) -> str:
        """What the weights are, and the dtype in which they are used."""
        return weights_name(self.model_config, self._choices.placement.tp_size, self.dtype_name)

    @property
    def draft_weights_name(self) -> str | None:
        """What the weights of a drafting copy, or of a quantised draft model, are; None: there is none."""
        return None if self._drafting is None else self._drafting.weights_name

    @property
    def max_total_tokens(self) -> int:
        """The most tokens that a prompt and its answer may have together."""
        return max_total_tokens(self.config, self.model_config)

    def load(self, batch_size: int, max_context: int, for_turns: bool = False) -> None:
        """Take memory: connect the ranks, read this rank's weights, allocate the cache.

        A second call, for a larger batch or context, replaces only the cache. A call after an error loads what is
        missing.

        Args:
            for_turns: prepare for a conversation, whose next prompt goes on from the last prompt and answer: with one
                request on a GPU and speculation off, passes of several rows append it (decode/rounds/row_append.py).
        Raises:
            DoesNotFitError: before anything is allocated; for packets in the host's memory, after weights and cache.
            UserError: sizes that are none; settings that ranks disagree on; a transport asked for that does not work;
                after `close`.
        """
        for name, size in (("batch_size", batch_size), ("max_context", max_context)):
            if type(size) is not int or size < 1:
                raise UserError(f"Engine.load: {name}: expected a whole number from 1 on, found {show(size)}")
        with self._lock:
            self._refuse_closed()
            self._for_turns = for_turns
            self._load(batch_size, max_context)

    def _load(self, batch_size: int, max_context: int) -> None:
        self._active_generation = 0  # a generation that is running ends: its cache goes away
        config, placement = self.model_config, self.placement
        held = self._weights_bytes + (self.cache.num_bytes if "cache" in vars(self) else 0)
        if self.memory is not None:  # a draft model's cache, too
            held = self._weights_bytes + self.memory.cache_bytes
        with self.heartbeat.waiting("load"):
            self._catch_up_with_ranks(self.agreement.exchange)
            # The rank with the least memory decides for all.
            own = available_bytes(self.device, placement.local_world_size) + held
            available = min(map(int, self.agreement.exchange(str(own))))
        drafts, recalled = self._drafting, composition.num_recalled_blocks(self.config, self.mode)
        memory = check_fits(
            config, placement.shard, self.dtype, batch_size, max_context, available, self.config.kv_cache,
            self.device.type, self.config.kv_protect, recalled,
            with_append_rows(None if drafts is None else drafts.size, self._for_turns and self.device.type == "cuda"),
            composition.keeps_context(self.config, self.mode, self._for_turns),
        )  # fmt: skip
        self._free_cache()
        if not self._weights_bytes:
            with self.heartbeat.waiting("load"):
                self._load_model()
                self._weights_bytes = memory.weights_bytes
                self.notices += composition.network_notices(
                    self._choices, self.config, config, self.connected(), max_context
                )
        self.cache = composition.build_cache(
            self._choices, self.config, config, batch_size, max_context, self._for_turns
        )
        self.notices += composition.eager_notices(self._choices, batch_size, self.config, config, self.notices)
        self.decode_step = self._build_step(max_context)
        if self._for_turns:
            self._append = build_row_append(
                self._choices, self.model, self.cache, self.connected(), self._peer_memory, self.decode_step,
                self._step_operation,
            )  # fmt: skip
        is_lossless = self.mode == "off" or self.config.speculation.threshold == 0.0
        max_appended = 0 if self._append is None else self._append.max_tokens
        self._kept = KeptPrefix(self.cache, is_lossless, max_appended, config.frequency_length)
        self.memory = memory
        if self._append is not None:
            self._compile(self._append.prepare)
        if not self._is_warm:
            warm_up_prompts(self.model, self.cache, self.connected(), self._operation)
            self._is_warm = True

    def _free_cache(self) -> None:
        """Free the graph, then the cache that it refers to."""
        if "cache" not in vars(self):
            return
        self._release()
        self.memory = None
        for name in ("cache", "_kept"):  # a load that failed may lack the second
            vars(self).pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build_step(self, max_context: int) -> DecodeStep:
        """The decode step over the cache, or its rounds with drafts; notes what a user may not expect."""
        parts, notices = (self.model, self.cache, self.connected()), []
        if self._drafting is not None:
            step = self._drafting.build_step(*parts, self._peer_memory, self._step_operation)
            notices = self._drafting.notices(max_context)
        else:
            policy = composition.choose_pair_policy(
                self._choices, self.config, self.model_config, self.connected(), self.cache.batch_size
            )
            if self._choices.mode != "off" and policy is None and self.config.speculation.always:
                notices = ["--pair-always without effect: only a pair over a link, in captured steps, pauses"]
            step = composition.build_decode_step(
                self._choices, self.config.speculation, *parts, self._peer_memory, self._step_operation, policy
            )
        self.notices += [each for each in notices if each not in self.notices]
        return step

    def _release(self) -> None:
        for captured in (self.decode_step, self._append):
            if captured is not None:
                captured.release()
        self.decode_step = self._append = None

    def _catch_up_with_ranks(self, exchange: Callable[[str], list[str]]) -> None:
        """Bring this rank level with the others after an interrupt, before anything waits for the device.

        It launches the steps that they have launched ahead, and takes over the largest counts of generations and of
        attempts.

        Args:
            exchange: every rank's text, given this rank's.
        """
        step = self.decode_step
        own = (0, "") if step is None else (step.launched, step.recent_kinds)
        texts = exchange(json.dumps([*own, self._generations, self._attempts]))
        steps, kinds_of, generations, attempts = zip(*map(json.loads, texts), strict=True)
        self._generations, self._attempts = max(generations), max(attempts)
        launched, kinds = max(zip(steps, kinds_of, strict=True))
        if step is not None:
            step.launch_missing(launched, kinds)

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
            self.notices += notices
            self.model = Llama(config, weights, self.transport)
            if self._drafting is not None:
                self._drafting.load(self.transport)
        except BaseException:  # the next load begins anew
            self.transport.close()
            self.transport = None
            raise

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

    def _compile(self, prepare: Callable[[], int]) -> None:
        """Compile and capture. prepare: returns a fault word."""
        self.heartbeat.mark(0, LOADING, -1)  # compiling is one long call
        self._step = 0
        self._attempts += 1
        is_warm, self._is_warm = self._is_warm, False
        try:
            fault = prepare()
        finally:
            self._is_warm = is_warm
        self._raise_fault(fault)

    def _raise_fault(self, code: int) -> None:
        if code:
            draft_layers = self._drafting.num_layers if self._drafting is not None else 0
            layers = self.model_config.num_layers
            raise fault_error(code, self._step, layers, self.agreement, self._attempts, draft_layers)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UserError("engine: it is closed; create another one")

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
            self._catch_up_with_ranks(
                lambda own: self.agreement.gather_within("launched", own, TIMEOUT.total_seconds())
            )
            transport.barrier()
        # Graphs first, then the memory of packets, then process groups: NCCL waits for graphs that refer to it.
        self._release()
        self.heartbeat.stop()
        transport.close()
        self._free()

    def _free(self) -> None:
        """Free weights and cache for the next engine of this process."""
        # The decode step and this engine form a reference cycle, which would keep the weights alive.
        self.decode_step = self._append = self.memory = None
        for name in ("model", "cache", "_kept"):
            vars(self).pop(name, None)
        if self._drafting is not None:
            self._drafting.model = None
        self._weights_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
