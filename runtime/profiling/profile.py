"""Latency per token at a given context: decode steps timed on every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from alspec.config import SamplingConfig
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.prefill import CHUNK_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.forced_verdicts import ForcedVerdicts
from alspec.runtime.profiling.stats import percentile, step_bytes, stream_bandwidth

__all__ = [
    "RoundProfile",
    "WARMUP_STEPS",
    "Profile",
    "fill",
    "first_tokens",
    "measure",
    "measure_rounds",
    "prepare",
    "prompts_from_text",
    "cache_tokens",
    "stream_limit",
]

WARMUP_STEPS = 10
TOKEN_ID = 1  # the newest token of every request, if the cache is filled without a prompt
PERCENTILES = (20, 50, 80, 99)
GREEDY = SamplingConfig()


@dataclass(frozen=True)
class Profile:
    """Decode steps from one context on, timed on every rank."""

    context: int
    batch_size: int
    step_us: list[list[float]]  # [world][steps]
    hit_rate: float | None  # accepted share of the verdicts that could reject (see `measure`); None if there are none
    read_bytes: int  # read by this rank in a step of mean length
    alone_share: float = 0.0  # steps in which each group of a pair decoded alone, because the pair did not pay

    @property
    def slowest_us(self) -> list[float]:
        """Time of each step on the slowest rank."""
        return [max(times) for times in zip(*self.step_us, strict=True)]

    @property
    def samples(self) -> dict[str, Any]:
        """What `--json` writes beside the row."""
        return {"step_us": self.step_us}

    @property
    def us(self) -> dict[str, float]:
        """p20, p50, p80 and p99 of `slowest_us`."""
        return {f"p{percent}": percentile(self.slowest_us, percent / 100) for percent in PERCENTILES}

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all requests together, at the median step."""
        return self.batch_size / self.us["p50"] * 1e6

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that this rank reads, at the median step."""
        return self.read_bytes / self.us["p50"] * 1e6


def cache_tokens(context: int, num_steps: int, tokens_of_step: int = 1) -> int:
    """Cache size in tokens for `num_steps` measured steps that begin at `context` tokens, warm-up included."""
    return context + (WARMUP_STEPS + num_steps) * tokens_of_step


def prepare(engine: Engine, sampling: SamplingConfig = GREEDY) -> None:
    """Compile and capture the decode step, and fill the cache; `engine.load` comes first."""
    engine.prepare(sampling)
    fill(engine.cache, seed=engine.placement.rank)


def fill(cache: Cache, seed: int) -> None:
    """Fill the cache with normal random keys and values, in place of a prompt."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    # By prompt chunks, so that no temporary is as large as the cache.
    for layer, request in itertools.product(range(cache.num_layers), range(cache.batch_size)):
        for start in range(0, cache.max_context, CHUNK_TOKENS):
            shape = (2, min(CHUNK_TOKENS, cache.max_context - start), cache.num_kv_heads, cache.head_dim)
            k, v = torch.randn(shape, generator=generator, device=cache.device)
            cache.write_prefill(layer, request, start, k, v)


def measure(
    engine: Engine,
    context: int,
    num_steps: int,
    text_ids: list[int] | None = None,
    forced: ForcedVerdicts | None = None,
    sampling: SamplingConfig = GREEDY,
) -> Profile:
    """Time `num_steps` steps after a warm-up; every rank calls it.

    The warm-up begins at `context` tokens, so the measured steps read `context + WARMUP_STEPS` tokens and more.
    The hit rate counts only verdicts that could reject: forced ones, and those whose predictor left tokens out.

    Args:
        engine: prepared with `prepare`.
        context: tokens in the cache before the warm-up.
        num_steps: measured steps.
        text_ids: tokens of the prompts, see `prompts_from_text`; None: steps read the cache as `prepare` filled it.
        forced: verdicts that the step was prepared with; all of them count.
        sampling: as passed to `prepare`.
    Raises:
        BadNumbersError, RankFailureError: as in generation.
    """
    transport, batch_size = engine.connected(), engine.cache.batch_size
    transport.barrier()
    token_ids = first_tokens(engine, context, text_ids, sampling)
    records = []
    for step, record in enumerate(engine.decode(token_ids, [context] * batch_size, WARMUP_STEPS + num_steps), 1):
        records.append(record)
        if forced is not None:
            forced.turn(step)
    records = records[WARMUP_STEPS:]
    own_us = [record.step_us for record in records]
    gathered = transport.all_gather_world(torch.tensor(own_us, dtype=torch.float64, device=engine.device))
    seq_lens = [context + WARMUP_STEPS + num_steps // 2] * batch_size
    config = engine.config
    read = step_bytes(
        engine.model_config, engine.placement.shard, engine.dtype, seq_lens, config.kv_cache, config.kv_protect
    )
    # Count only verdicts that could reject, as in `summarize`.
    shortest = 0 if forced is not None else engine.config.speculation.first_lossy_length
    numbered = enumerate(records, context + WARMUP_STEPS)
    counted = [record.hits for length, record in numbered if length >= shortest and record.hits is not None]
    hit_rate = float(torch.stack(counted).float().mean()) if counted else None
    alone = sum(record.is_alone for record in records) / num_steps
    return Profile(context, batch_size, gathered.tolist(), hit_rate, read, alone)


@dataclass(frozen=True)
class RoundProfile:
    """Rounds from one context on, timed on every rank."""

    context: int
    num_drafts: int  # K
    round_us: list[list[float]]  # [world][rounds]
    rounds: list[list[tuple[int, int]]]  # (drafts, accepted ones) of each request in each round

    @property
    def slowest_us(self) -> list[float]:
        """Time of each round on the slowest rank."""
        return [max(times) for times in zip(*self.round_us, strict=True)]

    @property
    def drafting_us(self) -> list[float]:
        """`slowest_us` of the rounds that had drafts: others are plain steps, or found nothing to draft."""
        return [us for us, each in zip(self.slowest_us, self.rounds, strict=True) if any(made for made, _ in each)]

    @property
    def samples(self) -> dict[str, Any]:
        """What `--json` writes beside the row."""
        return {"round_us": self.round_us, "rounds": self.rounds}

    @property
    def tokens(self) -> list[float]:
        """Tokens of each round, mean over the requests."""
        return [sum(accepted + 1 for _, accepted in each) / len(each) for each in self.rounds]

    @property
    def accepted(self) -> list[int]:
        """How many rounds of a request accepted 0, 1, ... K drafts, of those that had drafts."""
        found = [accepted for each in self.rounds for made, accepted in each if made]
        return [found.count(number) for number in range(self.num_drafts + 1)]


def measure_rounds(
    engine: Engine, context: int, num_rounds: int, text_ids: list[int] | None, sampling: SamplingConfig
) -> RoundProfile:
    """Time `num_rounds` rounds after a warm-up, as `measure` does; every rank calls it.

    Args:
        engine: prepared, with a drafter.  context, text_ids, sampling: as for `measure`.
    """
    transport, batch_size = engine.connected(), engine.cache.batch_size
    transport.barrier()
    # Without a text, n-grams are looked up in a constant one.
    prompts = [[TOKEN_ID] * (context - 1)] * batch_size
    if text_ids is not None:
        prompts = prompts_from_text(text_ids, batch_size, context - 1)
    token_ids = first_tokens(engine, context, text_ids, sampling)
    lengths = [context] * batch_size
    list(engine.decode(token_ids, lengths, WARMUP_STEPS, prompts))
    # The prompt again and a generation of its own, so that the first trial of drafts is measured.
    token_ids = first_tokens(engine, context, text_ids, sampling)
    records = list(engine.decode(token_ids, lengths, num_rounds, prompts))
    own_us = torch.tensor([record.step_us for record in records], dtype=torch.float64, device=engine.device)
    drafts = [record.accepted_drafts() for record in records]
    return RoundProfile(context, engine.config.draft_tokens, transport.all_gather_world(own_us).tolist(), drafts)


def prompts_from_text(text_ids: list[int], batch_size: int, num_tokens: int) -> list[list[int]]:
    """Make a prompt of `num_tokens` for each request: `text_ids` repeated, from a different start per request.

    The first token of the text begins every prompt and is not repeated.
    """
    first, *rest = text_ids
    if not rest:
        return [[first] * num_tokens] * batch_size
    starts = [len(rest) * request // batch_size for request in range(batch_size)]
    return [[first, *itertools.islice(itertools.cycle(rest), start, start + num_tokens - 1)] for start in starts]


def first_tokens(engine: Engine, context: int, text_ids: list[int] | None, sampling: SamplingConfig) -> list[int]:
    """Return each request's newest token, from which `engine.decode` continues at `context` tokens.

    With a text, prompts from the text are processed into the cache first.
    """
    batch_size = engine.cache.batch_size
    if text_ids is None:
        return [TOKEN_ID] * batch_size
    prompts = prompts_from_text(text_ids, batch_size, context - 1)
    first = sampling.model_copy(update={"max_new_tokens": 1, "ignore_eos": True})
    return [token.token_id for token in engine.stream(prompts, first)]


def stream_limit(engine: Engine) -> float:
    """Measure the copy bandwidth of the fastest rank in bytes/s. All ranks call it and measure at the same time."""
    transport = engine.connected()
    transport.barrier()
    own = torch.tensor(stream_bandwidth(engine.device), dtype=torch.float64, device=engine.device)
    return float(transport.all_gather_world(own).max())
