"""Latency per token at a given context: decode steps timed on every rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from alspec.config import SamplingConfig
from alspec.predictor import first_lossy_length
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.prefill import CHUNK_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Generation
from alspec.runtime.profiling.stats import percentile, step_bytes, stream_bandwidth

__all__ = [
    "WARMUP_STEPS",
    "Profile",
    "fill",
    "first_tokens",
    "forced_verdicts",
    "measure",
    "prepare",
    "prompts_of",
    "room",
    "stream_limit",
]

WARMUP_STEPS = 10
TOKEN_ID = 1  # the newest token of every request, where the cache is not a prompt's
PERCENTILES = (20, 50, 80, 99)
GREEDY = SamplingConfig()


@dataclass(frozen=True)
class Profile:
    """Decode steps from one context on, as every rank timed them."""

    context: int
    batch_size: int
    step_us: list[list[float]]  # [world][steps]
    hit_rate: float | None  # verdicts accepted, of guesses that left tokens out or were forced; None without any
    read_bytes: int  # by this rank in a step of mean length

    @property
    def slowest_us(self) -> list[float]:
        """Each step's time on the rank that took longest for it."""
        return [max(times) for times in zip(*self.step_us, strict=True)]

    @property
    def us(self) -> dict[str, float]:
        """p20, p50, p80 and p99 of `slowest_us`."""
        return {f"p{percent}": percentile(self.slowest_us, percent / 100) for percent in PERCENTILES}

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, at the median step."""
        return self.batch_size / self.us["p50"] * 1e6

    @property
    def bytes_per_s(self) -> float:
        """What this rank reads at the median step."""
        return self.read_bytes / self.us["p50"] * 1e6


def room(context: int, num_steps: int) -> int:
    """Tokens that the cache must hold to measure `num_steps` steps from `context` on."""
    return context + WARMUP_STEPS + num_steps


def prepare(engine: Engine, sampling: SamplingConfig = GREEDY) -> None:
    """After `engine.load`: compile and capture the step, and fill the cache. Nothing on a CPU, where prompts do it."""
    if engine.loop is not None:
        engine.prepare(sampling)
        fill(engine.cache, seed=engine.placement.rank)


def fill(cache: Cache, seed: int) -> None:
    """Normal random keys and values everywhere, in place of a prompt."""
    generator = torch.Generator(cache.device).manual_seed(seed)
    # Chunk by chunk: nothing as large as the cache is allocated on the way.
    for layer, request in itertools.product(range(cache.num_layers), range(cache.batch_size)):
        for start in range(0, cache.max_context, CHUNK_TOKENS):
            shape = (2, min(CHUNK_TOKENS, cache.max_context - start), cache.num_kv_heads, cache.head_dim)
            k, v = torch.randn(shape, generator=generator, device=cache.device)
            cache.write_prefill(layer, request, start, k, v)


def forced_verdicts(num_layers: int, hit_rate: float) -> list[int]:
    """Verdicts of a step's layers that accept this share of them, as evenly spread as can be: 1 accepts, 0 rejects."""
    # As in the latency model: L r may fall short of a whole number by a few ulp.
    hits = [int(layer * hit_rate + 1e-9) for layer in range(num_layers + 1)]
    return [after - before for before, after in itertools.pairwise(hits)]


def measure(
    engine: Engine,
    context: int,
    num_steps: int,
    text_ids: list[int] | None = None,
    is_forced: bool = False,
    sampling: SamplingConfig = GREEDY,
) -> Profile:
    """Time `num_steps` steps after a warm-up; every rank calls it.

    The warm-up begins at `context` tokens, so the measured steps read `context + WARMUP_STEPS` tokens and more.

    Args:
        text_ids: what the prompts consist of, see `prompts_of`; without it the `loop` reads what is in the cache, and
            launched steps follow prompts of random tokens.
        is_forced: verdicts are, so that guesses may miss that leave no token out.
        sampling: how tokens are chosen, as given to `prepare`.
    Raises:
        BadNumbersError, RankFailureError: as in generation.
    """
    transport, batch_size = engine.connected(), engine.cache.batch_size
    transport.barrier()
    if engine.loop is not None:
        token_ids = first_tokens(engine, context, text_ids, sampling)
        # Time of a step: from the end of the one before to its own, on the device's clock.
        steps = engine.decode(token_ids, [context] * batch_size, WARMUP_STEPS + num_steps)
        records = list(steps)[WARMUP_STEPS - 1 :]
        own_us = [(after.clock_ns - before.clock_ns) / 1e3 for before, after in itertools.pairwise(records)]
        hits = [record.hits for record in records[1:] if record.hits is not None]
    else:
        own_us, hits = _launched(engine, context, num_steps, text_ids, sampling)
    gathered = transport.all_gather_world(torch.tensor(own_us, dtype=torch.float64, device=engine.device))
    seq_lens = [context + WARMUP_STEPS + num_steps // 2] * batch_size
    read = step_bytes(engine.model_config, engine.placement.shard, engine.dtype, seq_lens, engine.config.kv_cache)
    # Of guesses that could miss, as in `summarize`.
    shortest = 0 if is_forced else first_lossy_length(engine.config.speculation.chunk_size)
    counted = [of_step for length, of_step in enumerate(hits, context + WARMUP_STEPS) if length >= shortest]
    hit_rate = float(torch.stack(counted).float().mean()) if counted else None
    return Profile(context, batch_size, gathered.tolist(), hit_rate, read)


def prompts_of(text_ids: list[int], batch_size: int, num_tokens: int) -> list[list[int]]:
    """A prompt of `num_tokens` for each request: `text_ids` over and over, each request from another place on.

    The first token, a text's beginning, begins every prompt and is not repeated.
    """
    first, *rest = text_ids
    if not rest:
        return [[first] * num_tokens] * batch_size
    starts = [len(rest) * request // batch_size for request in range(batch_size)]
    return [[first, *itertools.islice(itertools.cycle(rest), start, start + num_tokens - 1)] for start in starts]


def first_tokens(engine: Engine, context: int, text_ids: list[int] | None, sampling: SamplingConfig) -> list[int]:
    """The newest token of each request, from which `engine.decode` goes on with `context` tokens.

    With a text, the prompts before it are read into the cache.
    """
    batch_size = engine.cache.batch_size
    if text_ids is None:
        return [TOKEN_ID] * batch_size
    prompts = prompts_of(text_ids, batch_size, context - 1)
    return [request.token_ids[0] for request in _generate(engine, prompts, 1, sampling).requests]


def _generate(engine: Engine, prompts: list[list[int]], num_tokens: int, sampling: SamplingConfig) -> Generation:
    sampling = sampling.model_copy(update={"max_new_tokens": num_tokens, "ignore_eos": True})
    generation = engine.start_generation(prompts, sampling)
    for _ in engine.run(generation, sampling):
        pass
    return generation


def _launched(
    engine: Engine, context: int, num_steps: int, text_ids: list[int] | None, sampling: SamplingConfig
) -> tuple[list[float], list[torch.Tensor]]:
    """Steps launched from the host, on its clock, after prompts; the first step reads `context` tokens."""
    batch_size = engine.cache.batch_size
    if text_ids is None:
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, context - 1)
        prompts = torch.randint(engine.model_config.vocab_size, shape, generator=generator).tolist()
    else:
        prompts = prompts_of(text_ids, batch_size, context - 1)
    generation = _generate(engine, prompts, 1 + WARMUP_STEPS + num_steps, sampling)
    return generation.step_us[WARMUP_STEPS:], generation.hits[WARMUP_STEPS:]


def stream_limit(engine: Engine) -> float:
    """Bytes/s that a copy moves on the fastest rank, measured on all at once; every rank calls it."""
    transport = engine.connected()
    transport.barrier()
    own = torch.tensor(stream_bandwidth(engine.device), dtype=torch.float64, device=engine.device)
    return float(transport.all_gather_world(own).max())
