"""The engine: from a model folder to a stream of tokens, the same program on every rank.

One request, call by call:

    launch/generate.py               Engine(config); engine.load; engine.stream
    runtime/engine/resources.py      load: weights, cache, and the step that composition.py builds
    here                             stream -> _begin, then _generate: _prepare, _prefill, and _run_step for each token
    runtime/decode/captured_step.py  prepare: compile, trial steps, capture; step: replay the graph, read its token
    runtime/decode/decoder.py        embed, run_layers, logits: the launches that the graph holds
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alspec.config import SamplingConfig, validate
from alspec.errors import UserError
from alspec.interrupts import interrupts_wait
from alspec.kernels.sampling.adjustment import count_newest, tokens_seen
from alspec.kernels.sampling.logprobs import Logprobs
from alspec.models.checkpoint.source import open_tokenizer
from alspec.models.tokenizer.tokenizer import Prompt, Tokenizer, encode_prompts, prompts_of, spelled
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.decode.eager_step import choose_tokens
from alspec.runtime.engine.generation import (
    Completion,
    Generation,
    Token,
    check_prompts,
    check_sampling,
    fit_new_tokens,
    requests_of,
    rows_of,
)
from alspec.runtime.engine.prompt_pass import PromptPass, appends_prompt
from alspec.runtime.engine.resources import Resources

__all__ = ["Engine"]


class Engine(Resources):
    """A model on this rank's device, ready to generate. `Resources` creates, loads and closes it."""

    def take_notices(self) -> list[str]:
        """Choices that a user may not expect, for a command that prints them; `stream` then shows none."""
        self._prints_notices = True
        return self.notices

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Refuse settings that do not fit the model: token ids that it does not have."""
        check_sampling(sampling, self.model_config)

    def fit_new_tokens(self, prompts: list[list[int]], sampling: SamplingConfig) -> tuple[list[int], str | None]:
        """See `generation.fit_new_tokens`."""
        return fit_new_tokens(prompts, sampling, self.config, self.model_config)

    def check_prompts(self, prompts: list[list[int]], new_tokens: list[int]) -> int:
        """Return the tokens that the cache must hold for these rows, see `rows_of`; refuse too long prompts.

        new_tokens: the most tokens of each answer.
        """
        needed = check_prompts(prompts, new_tokens, self.config, self.model_config, self.mode)
        return self.config.max_context or needed

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
        replaces it: set `max_context` for a conversation. So does another number of rows (prompts times answers), a
        smaller one too: the cache, the buffers of a step and its captured graph have one batch size.

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
            number, notices = self._begin(prompt, sampling)
        notices += [] if self._has_warned else self.notices
        notices = [] if self.placement.rank or self._prints_notices else notices
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

    def _begin(self, prompt: Prompt | Sequence[Prompt], sampling: SamplingConfig) -> tuple[int, list[str]]:
        """Check and encode the prompts, and load what they need.

        Returns:
            Number of the new generation, and notices about its settings.
        """
        settings = sampling.model_dump(mode="json", include=set(SamplingConfig.model_fields))
        with self.heartbeat.waiting(f"the start of generation {self._generations + 1}"):
            # First, because all ranks must refuse the same prompts.
            self.agreement.require_same({"prompt": spelled(prompt)} | settings)
            self._catch_up_with_ranks(self.agreement.exchange)
            tokenizer = partial(self.text_tokenizer, "give token ids")
            self.check_sampling(sampling)
            prompts = rows_of(encode_prompts(prompt, tokenizer, self.max_total_tokens), sampling.n)
            new_tokens, notice = self.fit_new_tokens(prompts, sampling)
            needed, batch_size = self.check_prompts(prompts, new_tokens), len(prompts)
            if self.memory is None or self.cache.batch_size != batch_size or self.cache.max_context < needed:
                self.load(batch_size, needed, self._for_turns)
            # A call that was interrupted may have ended at another token on each rank.
            reusable = map(json.loads, self.agreement.exchange(json.dumps(self._kept.reusable(prompts))))
            reused = [min(by_rank) for by_rank in zip(*reusable, strict=True)]
            reused = [reused[row - row % sampling.n] for row in range(batch_size)]  # other answers are copied
        requests = requests_of(prompts, new_tokens, sampling, self.tokenizer, self.model_config)
        made = Generation(
            requests, num_answers=sampling.n, reused_tokens=reused, short_context=self.model_config.short_context
        )
        number = self._start_generation(made)
        return number, [notice] if notice else []

    def _start_generation(self, generation: Generation) -> int:
        """Give the cache to a new generation; returns its number."""
        self.generation = generation
        self._generations += 1
        self._active_generation = self._generations
        return self._generations

    def _generate(
        self,
        number: int,
        generation: Generation,
        sampling: SamplingConfig,
        progress: Callable[[int], None] | None,
    ) -> Iterator[Token]:
        """Prefill, then decode until every request has ended; yields tokens as they come.

        Between two steps, texts that have become too long for their rotary frequencies are processed again.
        """
        first_lossy = self.config.speculation.first_lossy_length
        with self._running(number):
            # Cut before anything is written: an interrupted call then leaves a valid prefix. Other answers are copied.
            kept = [n if row % sampling.n == 0 else 0 for row, n in enumerate(generation.reused_tokens)]
            for row, num_tokens in enumerate(kept):
                self._kept.cut(row, num_tokens)
            self._prepare(sampling, kept)
            prompts = [request.prompt_ids for request in generation.requests]
            seen = tokens_seen(prompts, self.model_config.vocab_size, self.device) if sampling.penalises else None
            appends = self._append is not None and appends_prompt(self._kept, generation)
            first = self._append_prompt if appends else partial(self._prefill, sampling=sampling, progress=progress)
            tokens, logprobs = first(generation, seen=seen)
        for token in generation.push([[token] for token in tokens], None, first_lossy, logprobs):
            yield token
            self._check_running(number)
        has_begun, again_us = appends, 0.0
        while any(generation.live):
            with self._running(number):
                continued: list[int] = []
                if crossing := generation.crossing:
                    continued = [row for row in range(len(generation.requests)) if has_begun and row not in crossing]
                    again_us = self._process_again(generation)
                    has_begun = False
                if not has_begun:
                    self._begin_behind(generation, sampling, continued)
                    has_begun = True
                record = self._run_step(generation.remaining, generation.live)
            for index, request in enumerate(generation.requests):
                if request.live:
                    self._kept.appended(index, [request.token_ids[-1], *record.token_ids[index][:-1]])
            generation.step_us.append(record.step_us + again_us)
            again_us = 0.0
            results = record.logprobs, record.drafts, record.is_alone
            for token in generation.push(record.token_ids, record.hits, first_lossy, *results):
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
                except BaseException:
                    self._kept.interrupted()
                    raise

    def _check_running(self, number: int) -> None:
        self._refuse_closed()
        if number != self._active_generation:
            why = "another generation of this engine has begun, which ends this one"
            raise UserError(f"stream: {why}; take one after the other, or use two engines")

    @property
    def _prompt_pass(self) -> PromptPass:
        assert self.decode_step is not None
        transport, queries = self.connected(), self.decode_step.prompt_queries
        return PromptPass(self.model, self.cache, self._kept, transport, self._operation, queries)

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
        logits, layer_sums = self._prompt_pass.process(generation, progress)
        chosen = choose_tokens(logits, layer_sums, sampling, generation.seq_lens, seen, self._step, transport)
        generation.prefill_us = (time.perf_counter() - started) * 1e6
        return chosen

    def _process_again(self, generation: Generation) -> float:
        """Process the texts of `Generation.crossing` again; returns the microseconds that it took."""
        started = time.perf_counter()
        self.connected().barrier()
        self._prompt_pass.process_again(generation)
        self.connected().synchronize()
        return (time.perf_counter() - started) * 1e6

    def _append_prompt(self, generation: Generation, seen: Tensor | None) -> tuple[list[int], Logprobs | None]:
        """Append the prompt to what the cache keeps of it, and begin the steps; the first one gives the first token."""
        (request,), (kept,) = generation.requests, generation.reused_tokens
        ids, started = request.prompt_ids, time.perf_counter()
        assert self._append is not None
        self.connected().barrier()
        self.timeline.start()
        self._step = 0
        with interrupts_wait():  # all ranks launch all passes, and then know what the cache holds
            fault = self._append.run(ids[kept:-1], kept)
            self._kept.wrote_prompt(0, ids[:-1], len(ids))
        self._raise_fault(fault)
        if seen is not None:
            count_newest(seen, torch.tensor(ids[-1:], device=seen.device), times=-1)  # the step will count it
        self._begin_steps(ids[-1:], [len(ids)], seen, [ids[:-1]])
        record = self._run_step(1)
        self._kept.wrote_prompt(0, ids)
        generation.prefill_us = (time.perf_counter() - started) * 1e6
        return record.token_ids[0], record.logprobs

    def prepare(self, sampling: SamplingConfig) -> None:
        """Compile and capture the decode step for this way of sampling; overwrites the start of the cache.

        Raises:
            BadNumbersError, RankFailureError: as `decode`.
        """
        self._kept.forget()
        self._prepare(sampling, None)

    def _prepare(self, sampling: SamplingConfig, kept: list[int] | None) -> None:
        assert self.decode_step is not None
        self._compile(partial(self.decode_step.prepare, sampling, kept))

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
            yield self._run_step(remaining * tokens)

    def _begin_steps(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: list[list[int]] | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        assert self.decode_step is not None
        self._attempts += 1
        self._step = 0
        self.decode_step.begin(token_ids, seq_lens, seen, prompts, continued)

    def _begin_behind(self, generation: Generation, sampling: SamplingConfig, continued: list[int]) -> None:
        """Begin the steps behind the newest token of each request. continued: see `DecodeStep.begin`."""
        requests, seen = generation.requests, None
        prompts, answers = [each.prompt_ids for each in requests], [each.token_ids[:-1] for each in requests]
        if sampling.penalises:
            seen = tokens_seen(prompts, self.model_config.vocab_size, self.device, answers)
        newest, texts = [each.token_ids[-1] for each in requests], [each.text_ids[:-1] for each in requests]
        self._begin_steps(newest, generation.seq_lens, seen, texts, continued)

    def _run_step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Run the next step. Args as of `DecodeStep.step`."""
        self._step += 1
        self.heartbeat.mark(self._step, "replay" if self.uses_graph else "decode", -1)
        assert self.decode_step is not None
        record = self.decode_step.step(remaining, live)
        self._raise_fault(record.fault)
        if record.drafts is not None:
            self.timeline.add_round(self._step, record.accepted_drafts(live), record.step_us)
        return record

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
