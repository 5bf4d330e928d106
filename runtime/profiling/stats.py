"""Statistics of a generation and of a device: percentiles, bytes per step, memory bandwidth, hit rates."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import read_bytes
from alspec.runtime.engine.generation import Generation
from alspec.runtime.engine.memory import plan_memory

__all__ = [
    "device_bandwidth",
    "draft_summary",
    "mean_lengths",
    "percentile",
    "seconds_in_a_row",
    "spread",
    "step_bytes",
    "stream_bandwidth",
    "summarize",
]

# An idle GPU needs some milliseconds of work before its clocks rise.
STREAM_WARMUP_S = 0.02
STREAM_COPIES = 9


def percentile(values: list[float], share: float) -> float:
    """Interpolated quantile: the value below which `share` (0 to 1) of the values lie; values must not be empty."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: list[float]) -> dict[str, float]:
    """p20, p50 and p80 of values, for the rows of benches."""
    return {f"p{percent}": percentile(values, percent / 100) for percent in (20, 50, 80)}


def step_bytes(
    config: LlamaConfig,
    shard: Shard,
    dtype: torch.dtype,
    seq_lens: Sequence[float],
    kv_cache: str = "bf16",
    kv_protect: int = 0,
) -> int:
    """Bytes that one rank must read in one decode step: its weights without the embedding table, and its cache.

    Args:
        config: the model's.
        shard: this rank's part of it.
        dtype: of the weights.
        seq_lens: tokens of each request.
        kv_cache: codec of the cache.  kv_protect: first and last layers that are not quantised.
    """
    start, stop = shard.vocab_range(config.vocab_size)
    table_rows = config.vocab_size - (stop - start if config.tie_word_embeddings and config.lm_head == "auto" else 0)
    weights = plan_memory(config, shard, dtype, 1, 1).weights_bytes - table_rows * config.hidden_size * dtype.itemsize
    cache = (read_bytes(kv_cache, config, shard.tp_size, dtype, length, kv_protect) for length in seq_lens)
    return weights + round(sum(cache))


def mean_lengths(generation: Generation, goes_on: bool) -> list[float]:
    """Tokens of each request that a decode step reads, averaged over the steps. The first step reads one new token.

    Args:
        generation: with at least one step.
        goes_on: True if the devices still append to requests that have ended, so that their lengths grow.
    """
    steps = len(generation.step_us)
    lengths = []
    for request in generation.requests:
        growing = steps if goes_on else min(len(request.token_ids), steps)
        lengths.append(len(request.prompt_ids) + growing * (2 * steps - growing + 1) / 2 / steps)
    return lengths


@functools.cache
def device_bandwidth(device: torch.device) -> float:
    """`stream_bandwidth`, measured once in this process; its memory is given back."""
    found = stream_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def stream_bandwidth(device: torch.device) -> float:
    """Bytes per second that a device-to-device copy moves, reads plus writes: the limit to compare kernels with."""
    size = min(2**30, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else 2**26
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    warm_s = 0.0
    while warm_s < STREAM_WARMUP_S:
        warm_s += sum(seconds_in_a_row(copy, STREAM_COPIES, device))
    return 2 * size / min(seconds_in_a_row(copy, STREAM_COPIES, device))


def seconds_in_a_row(run: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` runs back to back, without a pause in which the device could lower its clocks."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                run()
                event.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(events)]
    moments = [time.perf_counter()]
    for _ in range(count):
        run()
        moments.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(moments)]


def summarize(generation: Generation, first_lossy: int) -> dict[str, Any]:
    """Counts, times, hit rates and accepted drafts of one generation.

    Times are None if no step was decoded. The tokens that a round gave a request share its time. Hit rates count only
    verdicts whose predictor left tokens out, from `first_lossy` tokens on; they are None if there is none.
    """
    new_tokens = [len(request.token_ids) for request in generation.requests]
    of_steps = zip(generation.step_us, generation.tokens_of_steps, strict=True)
    tokens_ms = [us / 1e3 / tokens for us, tokens in of_steps]
    decoded = sum(new_tokens) - len(new_tokens)
    hit_rate = per_layer = None
    judged = [(step, hits) for step, hits in enumerate(generation.hits) if hits is not None]
    if judged:
        hits = torch.stack([hits for _, hits in judged]).float()  # [steps, L, B]
        steps = torch.tensor([step for step, _ in judged])
        live = torch.stack([steps < count - 1 for count in new_tokens], dim=1)
        # The first step reads the prompt and the first new token.
        lengths = torch.tensor([len(request.prompt_ids) + 1 for request in generation.requests]) + steps[:, None]
        counted = (live & (lengths >= first_lossy))[:, None, :]
        if counted.any():
            per_layer = ((hits * counted).sum((0, 2)) / counted.sum()).tolist()
            hit_rate = sum(per_layer) / len(per_layer)
    return {
        "prompt_tokens": [len(request.prompt_ids) for request in generation.requests],
        "reused_tokens": generation.reused_tokens,
        "new_tokens": new_tokens,
        "ttft_ms": generation.prefill_us / 1e3,
        "ms_per_token_p50": percentile(tokens_ms, 0.5) if tokens_ms else None,
        "ms_per_token_p90": percentile(tokens_ms, 0.9) if tokens_ms else None,
        "ms_per_token_p99": percentile(tokens_ms, 0.99) if tokens_ms else None,
        "tokens_per_s": decoded / (sum(generation.step_us) / 1e6) if tokens_ms else None,
        "hit_rate": hit_rate,
        "hit_rate_per_layer": per_layer,
        "first_lossy_length": first_lossy,
        "alone_steps": len(generation.hits) - len(judged),
        "drafts": draft_summary(generation.rounds),
    }


def draft_summary(steps: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any] | None:
    """What became of the drafts; None if there was no round.

    Args:
        steps: (drafts, accepted ones) of each request in each step; no drafts: a plain step.
    Returns:
        tokens_per_step: mean over requests and steps, with or without drafts; tokens_per_round: over those with drafts.
        rounds: requests' steps with drafts.  accepted_histogram: [a] rounds in which a drafts were accepted.
        accepted_by_place: [i] share of the drafts in place i that were accepted, which needs those before them.
    """
    all_steps = [each for step in steps for each in step]
    if not all_steps:
        return None
    rounds = [(drafts, accepted) for drafts, accepted in all_steps if drafts]
    longest = max((drafts for drafts, _ in rounds), default=0)
    offered = [sum(drafts > place for drafts, _ in rounds) for place in range(longest)]
    right = [sum(accepted > place for _, accepted in rounds) for place in range(longest)]
    tokens, of_rounds = (sum(accepted + 1 for _, accepted in part) for part in (all_steps, rounds))
    return {
        "tokens_per_step": tokens / len(all_steps),
        "tokens_per_round": of_rounds / len(rounds) if rounds else None,
        "rounds": len(rounds),
        "accepted_histogram": [sum(accepted == count for _, accepted in rounds) for count in range(longest + 1)],
        "accepted_by_place": [each / count for each, count in zip(right, offered, strict=True)],
    }
