"""Measure the second turn of a conversation: time to its first token with the kept prefix, and without."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from alspec.config import EngineConfig, SamplingConfig
from alspec.errors import BadNumbersError
from alspec.launch.terminal.flags import check_positions
from alspec.models.checkpoint.source import model_name
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.stats import spread

__all__ = ["TURN_CONTEXTS", "measure_turns", "turn_table"]

TURN_CONTEXTS = (6144,)
ANSWER, NEW = 128, 32  # tokens of the first turn's answer, and of what the user says then
SAMPLES = 9
GREEDY = SamplingConfig(max_new_tokens=ANSWER, ignore_eos=True)

Row = dict[str, Any]


def measure_turns(config: EngineConfig, contexts: list[int], found: Callable[[Row], None]) -> None:
    """Time the first token of a second turn after a first prompt of each length. Every rank calls it.

    Args:
        config: settings of the engine that this function makes. It may run on the CPU.
        contexts: tokens of the first prompt.
        found: called with the row of each length, without provenance, as soon as it is measured.
    Raises:
        UserError: a conversation is longer than the model's positions.
        BadNumbersError: another number of tokens was kept than the engine promises.
    """
    engine = Engine(config)
    check_positions(max(contexts), engine.model_config, 2 * ANSWER + NEW)
    with guarded(engine.heartbeat, "Lower --contexts, or use more ranks"):
        engine.load(1, max(contexts) + 2 * ANSWER + NEW, for_turns=True)
        for context in sorted(set(contexts)):
            found(_measure(engine, context))
        engine.close()


def _measure(engine: Engine, context: int) -> Row:
    generator = torch.Generator().manual_seed(context)
    vocab_size = engine.model_config.vocab_size
    ids: list[int] = torch.randint(vocab_size, (context + NEW,), generator=generator).tolist()
    first, new, other = ids[:context], ids[context:], [(ids[0] + 1) % vocab_size]
    kept_us: list[float] = []
    anew_us: list[float] = []
    reused = 0
    for sample in range(SAMPLES + 1):
        _first_token_us(engine, other)  # the cache then holds nothing of the conversation
        answer = [token.token_id for token in engine.stream(first, GREEDY)]
        second = first + answer + new
        kept = _first_token_us(engine, second)
        (reused,) = engine.generation.reused_tokens
        if not context - 64 < reused < len(second):
            raise BadNumbersError(f"second turn: {reused} tokens kept of a first prompt of {context}")
        _first_token_us(engine, other)
        anew = _first_token_us(engine, second)
        if engine.generation.reused_tokens != [0]:
            raise BadNumbersError(f"a prompt that is processed anew kept {engine.generation.reused_tokens} tokens")
        if sample:  # the first one is a warm-up
            kept_us.append(kept)
            anew_us.append(anew)
    us, of_anew = (spread(_max_over_ranks(engine, samples)) for samples in (kept_us, anew_us))
    return {
        "bench": "second_turn",
        "impl": "alspec.kept_prefix",
        "case": {
            "shape": model_name(engine.config),
            "world": engine.placement.world_size,
            "mode": engine.mode,
            "dtype": engine.dtype_name,
            "kv_cache": engine.config.kv_cache,
            "context": context,
            "answer": ANSWER,
            "new": NEW,
        },
        "reused_tokens": reused,
        "us": {name: round(value, 3) for name, value in us.items()},
        "anew_us": {name: round(value, 3) for name, value in of_anew.items()},
        "samples": SAMPLES,
    }


def _first_token_us(engine: Engine, ids: list[int]) -> float:
    """Microseconds from the call to the first token on the host."""
    engine.connected().barrier()
    started = time.perf_counter()
    tokens = engine.stream(ids, GREEDY)
    next(tokens)
    us = (time.perf_counter() - started) * 1e6
    tokens.close()
    return us


def _max_over_ranks(engine: Engine, samples: list[float]) -> list[float]:
    own = torch.tensor(samples, dtype=torch.float64, device=engine.device)
    slowest: list[float] = engine.connected().all_gather_world(own).amax(0).tolist()
    return slowest


def turn_table(rows: list[Row]) -> Table:
    """A table of the rows of `measure_turns`."""
    case = rows[0]["case"]
    title = f"Second turn, {case['shape']}, {case['dtype']}, {case['world']} rank(s): {ANSWER} + {NEW} tokens later"
    table = Table(title=title, caption="until the host has the first token; anew: nothing was kept")
    for name in ("mode", "cache", "first prompt", "kept", "ms p50", "anew, ms p50", "sooner"):
        table.add_column(name, justify="left" if name in ("mode", "cache") else "right")
    for row in rows:
        case, us, anew = row["case"], row["us"]["p50"], row["anew_us"]["p50"]
        cells = [str(case["context"]), str(row["reused_tokens"]), f"{us / 1e3:.1f}", f"{anew / 1e3:.1f}"]
        table.add_row(case["mode"], case["kv_cache"], *cells, f"{anew / us:.1f}x")
    return table
