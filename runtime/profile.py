"""Latency per token at a given context: decode steps timed on every rank, and the kernels inside them."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import SamplingConfig
from .codecs import Cache
from .engine import Engine
from .faults import LOADING
from .prefill import CHUNK_TOKENS
from .replay import StepRecord
from .stats import percentile, step_bytes, stream_bandwidth
from .transport import Transport

__all__ = [
    "WARMUP_STEPS",
    "Profile",
    "fill",
    "forced_verdicts",
    "kernel_rows",
    "measure",
    "prepare",
    "room",
    "step_kernels",
    "stream_limit",
]

WARMUP_STEPS = 10
TRACE_STEPS = 3
TOKEN_ID = 1  # the newest token of every request, where the cache is not a prompt's
PERCENTILES = (20, 50, 80, 99)
# Part of the name of a step's last kernel.
STEP_END = "finish_step"


@dataclass(frozen=True)
class Profile:
    """Decode steps from one context on, as every rank timed them."""

    context: int
    batch_size: int
    step_us: list[list[float]]  # [world][steps]
    hit_rate: float | None  # accepted verdicts; None without speculation
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


def prepare(engine: Engine) -> None:
    """After `engine.load`: compile and capture the step, and fill the cache. Nothing on a CPU, where prompts do it."""
    if engine.loop is not None:
        engine.prepare(SamplingConfig())
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


def measure(engine: Engine, context: int, num_steps: int) -> Profile:
    """Time `num_steps` greedy steps after a warm-up; every rank calls it.

    The warm-up begins at `context` tokens, so the measured steps read `context + WARMUP_STEPS` tokens and more.

    Raises:
        BadNumbersError, RankFailureError: as in generation.
    """
    transport, batch_size = _transport(engine), engine.cache.batch_size
    transport.barrier()
    if engine.loop is not None:
        # Time of a step: from the end of the one before to its own, on the device's clock.
        records = list(_steps(engine, context, WARMUP_STEPS + num_steps))[WARMUP_STEPS - 1 :]
        own_us = [(after.clock_ns - before.clock_ns) / 1e3 for before, after in itertools.pairwise(records)]
        hits = [record.hits for record in records[1:] if record.hits is not None]
    else:
        own_us, hits = _prompted(engine, context, num_steps)
    gathered = transport.all_gather_world(torch.tensor(own_us, dtype=torch.float64, device=engine.device))
    seq_lens = [context + WARMUP_STEPS + num_steps // 2] * batch_size
    read = step_bytes(engine.model_config, engine.placement.shard, engine.dtype, seq_lens, engine.config.kv_cache)
    hit_rate = float(torch.stack(hits).float().mean()) if hits else None
    return Profile(context, batch_size, gathered.tolist(), hit_rate, read)


def _transport(engine: Engine) -> Transport:
    assert engine.transport is not None, "load comes first"
    return engine.transport


def _steps(engine: Engine, context: int, num_steps: int) -> Iterable[StepRecord]:
    batch_size = engine.cache.batch_size
    return engine.decode([TOKEN_ID] * batch_size, [context] * batch_size, num_steps)


def _prompted(engine: Engine, context: int, num_steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Steps launched from the host, on its clock, after a prompt of random tokens; the first step reads `context`."""
    generator = torch.Generator().manual_seed(0)
    vocab_size, batch_size = engine.model_config.vocab_size, engine.cache.batch_size
    prompts = torch.randint(vocab_size, (batch_size, context - 1), generator=generator).tolist()
    sampling = SamplingConfig(max_new_tokens=1 + WARMUP_STEPS + num_steps, ignore_eos=True)
    generation = engine.start_generation(prompts, sampling)
    for _ in engine.run(generation, sampling):
        pass
    return generation.step_us[WARMUP_STEPS:], generation.hits[WARMUP_STEPS:]


def stream_limit(engine: Engine) -> float:
    """Bytes/s that a copy moves on the fastest rank, measured on all at once; every rank calls it."""
    transport = _transport(engine)
    transport.barrier()
    own = torch.tensor(stream_bandwidth(engine.device), dtype=torch.float64, device=engine.device)
    return float(transport.all_gather_world(own).max())


def kernel_rows(engine: Engine, context: int) -> list[dict[str, Any]]:
    """Rows for `write_trace` of every kernel in some steps of `loop`; every rank calls it.

    Time zero is the end of the step before them. On one host the profiler's timestamps are of one clock, and zero is
    that end on the first rank to reach it. On several hosts clocks may differ, and zero is each rank's own such end:
    a step ends everywhere once the last rank's logits have arrived.
    """
    transport, placement = _transport(engine), engine.placement
    # Starting to profile may hold up the heartbeat's thread.
    engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        # A rank may take long to start, and kernels wait only so long for each other.
        transport.barrier()
        for _ in _steps(engine, context, TRACE_STEPS + 1):
            pass
        transport.synchronize()
        engine.heartbeat.mark(0, LOADING, -1, publish=True)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        exported = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))
    zero_ns, kernels = step_kernels(exported)
    zeros = transport.all_gather_world(torch.tensor(zero_ns, device=engine.device))
    if placement.local_world_size == placement.world_size:
        zero_ns = int(zeros.min())
    return [
        {"op": name, "step": step, "start_us": (start - zero_ns) / 1e3, "end_us": (end - zero_ns) / 1e3}
        for name, step, start, end in kernels
    ]


def step_kernels(exported: dict[str, Any]) -> tuple[int, list[tuple[str, int, int, int]]]:
    """Kernels of whole steps in a trace that the profiler exported.

    Returns:
        The first step's end, in ns since the epoch, and each later kernel: name, step from 1 on, start and end in ns.
        Without a step's end in the trace: a time after all others, and no kernels.
    """
    base_ns = int(exported.get("baseTimeNanoseconds", 0))
    spans = sorted(
        (base_ns + round(event["ts"] * 1e3), round(event["dur"] * 1e3), event["name"])
        for event in exported["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    zero_ns, step = torch.iinfo(torch.int64).max, 0
    kernels = []
    for start_ns, duration_ns, name in spans:
        if step:
            kernels.append((name, step, start_ns, start_ns + duration_ns))
        if STEP_END in name:
            step += 1
            zero_ns = min(zero_ns, start_ns + duration_ns)
    return zero_ns, kernels
