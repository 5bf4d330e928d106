"""One batch of requests from prompt to last token: stopping, streaming text, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from alspec.config import EngineConfig, SamplingConfig
from alspec.errors import UserError, show
from alspec.kernels.common.limits import max_batch
from alspec.kernels.sampling.logprobs import Logprobs
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer

__all__ = [
    "Completion",
    "Generation",
    "IdDecoder",
    "Request",
    "TextDecoder",
    "Token",
    "TokenLogprobs",
    "check_ids",
    "check_prompts",
    "check_sampling",
    "fit_new_tokens",
    "max_total_tokens",
    "requests_of",
    "rows_of",
]


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
class TokenLogprobs:
    """Natural logarithms of probabilities, by the model's distribution before temperature, penalties and cuts."""

    logprob: float  # of the generated token
    top: list[tuple[int, float]]  # token id and log probability of the most likely tokens, the most likely one first
    # Texts of the generated token and of those in `top`, see `Tokenizer.token_text`; None without a tokenizer.
    text: str | None = None
    top_texts: list[str] | None = None


@dataclass(frozen=True)
class Token:
    """One generated token, as streamed."""

    request: int
    token_id: int
    text: str  # what it adds to the printed text: '' while a character or a possible stop text is incomplete
    # Share of layers in which this request accepts A~; None without speculation, or if A~ reads every token.
    hit_rate: float | None
    finish_reason: str | None  # 'eos', 'stop' or 'length' on the last token of a request
    logprobs: TokenLogprobs | None = None  # if the settings ask for them
    # A draft that was accepted, and not the last token of its round; None if nothing is drafted.
    is_draft: bool | None = None


@dataclass(frozen=True)
class Completion:
    """The whole answer to one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str | None  # 'eos', 'stop' or 'length'
    hit_rate: float | None  # mean over its tokens; None as in `Token`
    logprobs: list[TokenLogprobs] | None = None  # one for each token, if the settings ask for them


class Request:
    """One request: its prompt, what it has generated, and when it ends."""

    def __init__(
        self,
        prompt_ids: list[int],
        decoder: TextDecoder,
        sampling: SamplingConfig,
        eos_token_ids: Iterable[int],
        stop_token_ids: Iterable[int] = (),
        token_text: Callable[[int], str] | None = None,
    ) -> None:
        """Begin with the prompt.

        Args:
            stop_token_ids: stop ids, and ids of those stop texts that are special tokens.
            token_text: the text of a token, for log probabilities; None without a tokenizer.
        """
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []
        self.hit_rates: list[float] = []  # of the tokens that have one
        self.drafted: list[bool] = []  # which tokens behind the first were drafts; empty if nothing is drafted
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder, self._token_text = decoder, token_text
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

    @property
    def text_ids(self) -> list[int]:
        """Token ids of prompt and answer."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def remaining(self) -> int:
        """Tokens until its `max_new_tokens`."""
        return self._sampling.max_new_tokens - len(self.token_ids)

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

    def add_logprobs(self, logprobs: Logprobs, row: int) -> TokenLogprobs:
        """Add those of the newest token, which lie in this row; returns them."""
        logprob, *values = logprobs.values[row].tolist()
        token_id, *ids = logprobs.token_ids[row].tolist()
        top = list(zip(ids, values, strict=True))
        found = TokenLogprobs(logprob, top)
        if self._token_text is not None:
            found = TokenLogprobs(logprob, top, self._token_text(token_id), list(map(self._token_text, ids)))
        assert self.logprobs is not None
        self.logprobs.append(found)
        return found

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
    prefill_us: float = 0.0  # from the start of prefill to the first token on the host (TTFT)
    # Times of all decode steps. The host times eager steps and the first step; the device times the others.
    step_us: list[float] = field(default_factory=list)
    # Every step that speculates: [L, B] bool; None for a step of a pair in which each group decoded alone.
    hits: list[Tensor | None] = field(default_factory=list)
    # With drafts, every decode step: (drafts, accepted ones) of each request that was live, which gives accepted + 1
    # tokens. In the step that ends a text, drafts count up to the one before the last token.
    rounds: list[list[tuple[int, int]]] = field(default_factory=list)
    num_answers: int = 1  # to each prompt; they lie side by side
    # Tokens of each prompt that the cache still held, default none: prefill begins behind them.
    reused_tokens: list[int] = field(default_factory=list)
    # Longer texts have other rotary frequencies, with which the cache is computed again; None: it never is.
    short_context: int | None = None

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

    def push(
        self,
        token_ids: list[list[int]],
        hits: Tensor | None,
        first_lossy: int,
        logprobs: Logprobs | None = None,
        drafts: list[int] | None = None,
        is_alone: bool = False,
    ) -> Iterator[Token]:
        """Add each request's next tokens, and what their step measured.

        Yields the tokens of live requests. A token that ends its request is the last: those behind it are dropped.
        So are those behind a token with which a text becomes longer than the short context.

        Args:
            token_ids: of each request, in order; see `StepRecord`.
            hits: [L, B] bool.  first_lossy: tokens from which on `A~` leaves some out.
            logprobs: of all tokens, request after request.  drafts: proposed to each request.
            is_alone: see `StepRecord`.
        """
        if hits is not None or is_alone:
            self.hits.append(hits)
        entries: dict[int, int] = {}  # of live requests in the newest of `rounds`
        if drafts is not None:
            entries = {index: entry for entry, index in enumerate(at for at, on in enumerate(self.live) if on)}
            self.rounds.append([(drafts[index], len(token_ids[index]) - 1) for index in entries])
        row = 0
        for index, (request, ids) in enumerate(zip(self.requests, token_ids, strict=True)):
            for place, token_id in enumerate(ids):
                if not request.live or (place and self._has_crossed(request)):
                    break
                hit_rate = None
                if hits is not None and request.seq_len >= first_lossy:
                    hit_rate = float(hits[:, index].float().mean())
                    request.hit_rates.append(hit_rate)
                text, own, is_draft = request.push(token_id), None, None
                if logprobs is not None and request.logprobs is not None:
                    own = request.add_logprobs(logprobs, row + place)
                if drafts is not None:
                    is_draft = place < len(ids) - 1
                    if is_draft and (request.finish_reason is not None or self._has_crossed(request)):
                        # The last token of a round counts as the model's own, also where a text ends before others.
                        is_draft, self.rounds[-1][entries[index]] = False, (place, place)
                    request.drafted.append(is_draft)
                yield Token(index, token_id, text, hit_rate, request.finish_reason, own, is_draft)
            row += len(ids)

    @property
    def remaining(self) -> int:
        """Most tokens that a live request still needs, up to the first one with which one of them is `crossing`."""
        live = [request for request in self.requests if request.live]
        most = max((request.remaining for request in live), default=0)
        if self.short_context is None:
            return most
        return min([most, *(n for request in live if (n := self.short_context + 1 - request.seq_len) > 0)])

    @property
    def crossing(self) -> list[int]:
        """Live requests whose text has just become longer than the short context: their caches are computed again."""
        return [
            index for index, request in enumerate(self.requests)
            if request.live and request.token_ids and self._has_crossed(request)
        ]  # fmt: skip

    def _has_crossed(self, request: Request) -> bool:
        return self.short_context is not None and request.seq_len == self.short_context + 1

    @property
    def tokens_of_steps(self) -> list[float]:
        """Tokens that each decode step gave a live request, mean over the requests: 1 without drafts."""
        if not self.rounds:
            return [1.0] * len(self.step_us)
        return [sum(accepted + 1 for _, accepted in step) / len(step) for step in self.rounds]

    def completions(self) -> list[Completion]:
        """What each request has generated so far."""
        return [
            Completion(
                each.prompt_ids,
                each.token_ids,
                each.text,
                each.finish_reason,
                sum(each.hit_rates) / len(each.hit_rates) if each.hit_rates else None,
                each.logprobs,
            )
            for each in self.requests
        ]


def max_total_tokens(config: EngineConfig, model: LlamaConfig) -> int:
    """The most tokens of a prompt and its answer: `max_context`, or the positions of the model."""
    return config.max_context or model.longest_context


def fit_new_tokens(
    prompts: list[list[int]], sampling: SamplingConfig, config: EngineConfig, model: LlamaConfig
) -> tuple[list[int], str | None]:
    """The most tokens behind each prompt: `max_new_tokens` if it was given, else its default or what fits.

    Returns:
        A number for each prompt, and a notice if some are lower than the default.
    """
    longest, limit, default = max(map(len, prompts)), max_total_tokens(config, model), sampling.max_new_tokens
    if "max_new_tokens" in sampling.model_fields_set or not 0 < limit - longest < default:
        return [default] * len(prompts), None
    name = "max_context" if config.max_context else model.longest_context_name
    what = "prompt" if len(prompts) == 1 else "longest prompt"
    return [min(default, limit - len(ids)) for ids in prompts], (
        f"max_new_tokens: {limit - longest} instead of {default}, the default: the {what} has {longest} tokens, "
        f"{name} is {limit}"
    )


def requests_of(
    prompts: list[list[int]],
    new_tokens: list[int],
    sampling: SamplingConfig,
    tokenizer: Tokenizer | None,
    model: LlamaConfig,
) -> list[Request]:
    """A request for each row of the batch. new_tokens: of `fit_new_tokens`, for each row."""
    stop_ids, eos, token_text = list(sampling.stop_ids or ()), model.eos_token_ids, None
    if tokenizer is not None:
        eos, token_text = tokenizer.eos_token_ids, tokenizer.token_text
        stop_ids += [each for each in map(tokenizer.special_token_id, sampling.stop) if each is not None]
    requests = []
    for ids, most in zip(prompts, new_tokens, strict=True):
        decoder = IdDecoder() if tokenizer is None else tokenizer.stream_decoder(ids)
        own = sampling.model_copy(update={"max_new_tokens": most})
        requests.append(Request(ids, decoder, own, eos, stop_ids, token_text))
    return requests


def rows_of(prompts: list[list[int]], n: int) -> list[list[int]]:
    """The prompt of each row of the batch: every prompt n times, one row for each answer."""
    return [ids for ids in prompts for _ in range(n)]


def check_sampling(sampling: SamplingConfig, model: LlamaConfig) -> None:
    """Check token ids against the vocabulary.

    Raises:
        UserError: an id that the model does not have, or more log probabilities than tokens.
    """
    for name, ids in (("stop_ids", sampling.stop_ids or ()), ("logit_bias", sampling.logit_bias)):
        check_ids(ids, name, model)
    if (sampling.logprobs or 0) > model.vocab_size:
        raise UserError(f"logprobs: expected up to the {model.vocab_size} tokens of the vocabulary")


def check_ids(ids: Iterable[int], where: str, model: LlamaConfig) -> None:
    """Refuse token ids that the model does not have; `where` is the beginning of the error."""
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise UserError(
            f"{where}: token id {show(wrong)} is outside the vocabulary of {model.vocab_size}; "
            f"give ids from 0 to {model.vocab_size - 1}"
        )


def check_prompts(
    prompts: list[list[int]], new_tokens: list[int], config: EngineConfig, model: LlamaConfig, mode: str
) -> int:
    """The most tokens that one of these rows of a batch needs together with its answer.

    Args:
        new_tokens: the most tokens of each answer.
    Raises:
        UserError: too many tokens for the model or `max_context`, too many requests for the transport or graph asked
            for, or an invalid token id.
    """
    most = max_batch(mode)
    for name, value in (("cuda_graph", "on"), ("transport", "symm"), ("transport", "host")):
        if getattr(config, name) == value and len(prompts) > most:
            raise UserError(
                f"{name}: {value} serves up to {most} requests, found {len(prompts)}; use auto, or fewer prompts"
            )
    for index, ids in enumerate(prompts):
        if not ids:
            raise UserError(f"prompt {index}: expected at least one token, found none")
        check_ids(ids, f"prompt {index}", model)
    needed, most_new = max((len(ids) + most, most) for ids, most in zip(prompts, new_tokens, strict=True))
    limit = max_total_tokens(config, model)
    if needed > limit:
        name = "max_context" if config.max_context else model.longest_context_name
        advice = "shorten the prompt"
        if needed - most_new < limit:
            advice += " or lower --max-new-tokens"
        if limit < model.longest_context:
            advice += f", or raise --max-context (up to {model.longest_context})"
        raise UserError(
            f"prompt: {needed} tokens needed ({needed - most_new} of prompt, {most_new} new), "
            f"{name} is {limit}; {advice}"
        )
    return needed
