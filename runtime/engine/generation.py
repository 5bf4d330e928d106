"""One batch of requests from prompt to last token: stopping, streaming text, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from alspec.config import EngineConfig, SamplingConfig
from alspec.errors import UserError, show
from alspec.kernels.common.limits import MAX_BATCH
from alspec.models.llama_config import LlamaConfig
from alspec.predictor import first_lossy_length

__all__ = [
    "Completion",
    "Generation",
    "IdDecoder",
    "Request",
    "TextDecoder",
    "Token",
    "check_prompts",
    "fit_new_tokens",
    "max_total_tokens",
]

SamplingT = TypeVar("SamplingT", bound=SamplingConfig)


class TextDecoder(Protocol):
    """Turns token ids into text one by one; holds back incomplete characters."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """The text held back so far."""


class IdDecoder:
    """Used without a tokenizer: the ids themselves, separated by spaces."""

    def push(self, token_id: int) -> str:
        """`'17 '`."""
        return f"{token_id} "

    def flush(self) -> str:
        """Nothing: an id is never incomplete."""
        return ""


@dataclass(frozen=True)
class Token:
    """One generated token, as streamed."""

    request: int
    token_id: int
    text: str  # what it adds to the printed text: '' while a character or a possible stop text is incomplete
    # Share of layers in which this request accepts A~; None without speculation, or if A~ reads every token.
    hit_rate: float | None
    finish_reason: str | None  # 'eos', 'stop' or 'length' on the last token of a request


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None  # 'eos', 'stop' or 'length'
    hit_rate: float | None  # mean over its tokens; None as in `Token`


class Request:
    """One request: its prompt, what it has generated, and when it ends."""

    def __init__(
        self,
        prompt_ids: list[int],
        decoder: TextDecoder,
        sampling: SamplingConfig,
        eos_token_ids: Iterable[int],
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """`stop_token_ids`: ids of those stop texts that are special tokens."""
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.hit_rates: list[float] = []  # of the tokens that have one
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = decoder
        self._sampling = sampling
        self._eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(stop_token_ids)
        self._held = ""

    @property
    def live(self) -> bool:
        """Still generating."""
        return self.finish_reason is None

    @property
    def seq_len(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.token_ids)

    def push(self, token_id: int) -> str:
        """Add the next token; returns the text that may be printed now."""
        self.token_ids.append(token_id)
        if token_id in self._eos:
            self.finish_reason = "eos"
        elif token_id in self._stop_ids:
            self.finish_reason = "stop"
        else:
            self._held += self._decoder.push(token_id)
            if len(self.token_ids) == self._sampling.max_new_tokens:
                self.finish_reason = "length"
        if not self.live:
            self._held += self._decoder.flush()
        text = self._release()
        self.text += text
        return text

    def _release(self) -> str:
        """Cut at the earliest stop text; while generating, hold back an end that may become one."""
        found = [at for at in map(self._held.find, self._sampling.stop) if at >= 0]
        if found:
            self.finish_reason = "stop"
            text, self._held = self._held[: min(found)], ""
            return text
        keep = 0
        if self.live:
            for stop in self._sampling.stop:
                ends = (n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n]))
                keep = max(keep, next(ends, 0))
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


@dataclass
class Generation:
    """A batch and everything measured while it ran."""

    requests: list[Request]
    # Tokens of each prompt that the cache still held, default none: prefill begins behind them.
    reused_tokens: list[int] = field(default_factory=list)
    prefill_us: float = 0.0  # from the start of prefill to the first token on the host (TTFT)
    # Times of all decode steps. The host times eager steps and the first step; the device times the others.
    step_us: list[float] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)  # every decode step: [L, B] bool

    def __post_init__(self) -> None:
        self.reused_tokens = self.reused_tokens or [0] * len(self.requests)

    @property
    def live(self) -> list[bool]:
        """Which requests are still generating."""
        return [request.live for request in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request's prompt and answer."""
        return [request.seq_len for request in self.requests]

    def push(self, token_ids: list[int], hits: Tensor | None, chunk_size: int) -> Iterator[Token]:
        """Add each request's next token and its step's verdicts, if any; yields the tokens of live requests.

        Args:
            hits: [L, B] bool.  chunk_size: S.
        """
        if hits is not None:
            self.hits.append(hits)
        shortest = first_lossy_length(chunk_size)
        for index, (request, token_id) in enumerate(zip(self.requests, token_ids, strict=True)):
            if request.live:
                hit_rate = None
                if hits is not None and request.seq_len >= shortest:
                    hit_rate = float(hits[:, index].float().mean())
                    request.hit_rates.append(hit_rate)
                text = request.push(token_id)
                yield Token(index, token_id, text, hit_rate, request.finish_reason)

    def completions(self) -> list[Completion]:
        """What each request has generated so far."""
        return [
            Completion(
                each.prompt_ids,
                each.token_ids,
                each.text,
                each.finish_reason,
                sum(each.hit_rates) / len(each.hit_rates) if each.hit_rates else None,
            )
            for each in self.requests
        ]


def max_total_tokens(config: EngineConfig, model: LlamaConfig) -> int:
    """The most tokens of a prompt and its answer: `max_context`, or the positions of the model."""
    return config.max_context or model.longest_context


def fit_new_tokens(
    prompts: list[list[int]], sampling: SamplingT, config: EngineConfig, model: LlamaConfig
) -> tuple[SamplingT, str | None]:
    """Lower the default of `max_new_tokens` to what fits behind the longest prompt; a number that was given stays.

    Returns:
        The settings, and a notice if they were changed.
    """
    longest, limit, default = max(map(len, prompts)), max_total_tokens(config, model), sampling.max_new_tokens
    if "max_new_tokens" in sampling.model_fields_set or not 0 < limit - longest < default:
        return sampling, None
    fitting = sampling.model_copy(update={"max_new_tokens": limit - longest})
    name = "max_context" if config.max_context else model.longest_context_name
    return fitting, (
        f"max_new_tokens: {limit - longest} instead of {default}, the default: the prompt has {longest} tokens, "
        f"{name} is {limit}"
    )


def check_prompts(prompts: list[list[int]], max_new_tokens: int, config: EngineConfig, model: LlamaConfig) -> int:
    """The tokens that the longest of these prompts needs together with its answer.

    Raises:
        UserError: too many tokens for the model or `max_context`, too many requests for the transport or graph asked
            for, or an invalid token id.
    """
    for name, value in (("cuda_graph", "on"), ("transport", "symm"), ("transport", "host")):
        if getattr(config, name) == value and len(prompts) > MAX_BATCH:
            raise UserError(
                f"{name}: {value} serves up to {MAX_BATCH} requests, found {len(prompts)}; use auto, or fewer prompts"
            )
    for index, ids in enumerate(prompts):
        if not ids:
            raise UserError(f"prompt {index}: expected at least one token, found none")
        wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"prompt {index}: token id {show(wrong)} is outside the vocabulary of {model.vocab_size}; "
                f"give ids from 0 to {model.vocab_size - 1}"
            )
    needed = max(map(len, prompts)) + max_new_tokens
    limit = max_total_tokens(config, model)
    if needed > limit:
        name = "max_context" if config.max_context else model.longest_context_name
        advice = "shorten the prompt or lower --max-new-tokens"
        if limit < model.longest_context:
            advice += f", or raise --max-context (up to {model.longest_context})"
        raise UserError(
            f"prompt: {needed} tokens needed ({needed - max_new_tokens} of prompt, {max_new_tokens} new), "
            f"{name} is {limit}; {advice}"
        )
    return needed
