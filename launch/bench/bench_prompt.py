"""Whole prompts, chunk by chunk: time to the first token, share of what a large product reaches here, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from alspec.config import EngineConfig, SpeculationConfig
from alspec.errors import BadNumbersError
from alspec.launch.bench.bench_common import check_close
from alspec.launch.terminal.flags import check_positions
from alspec.models.checkpoint.source import model_name
from alspec.models.llama import LayerWeights, Llama
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import CHUNK_TOKENS, prefill
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.memory import GIB
from alspec.runtime.faults.heartbeat import run_guarded
from alspec.runtime.profiling.stats import percentile, seconds_in_a_row, spread

__all__ = ["PROMPT_CONTEXTS", "matrix_peak", "measure_prompts", "prompt_engines", "prompt_flops", "prompt_table"]

PROMPT_CONTEXTS = (8192, 32768, 131072)

# Prompts of one length: until they have taken long enough, and one at least.
MAX_PROMPTS = 9
ENOUGH_US = 3e6
# For each group, of the prompt before them, which is not counted: its second chunk has run all that further ones run.
WARMUP_TOKENS = 2 * CHUNK_TOKENS

MATRIX_SIZE = 8192
WARMUP_PRODUCTS = 20
PRODUCTS = 50

CHECKED_LAYERS = 2
CHECKED_TOKENS, CHECKED_CHUNK = 500, 256  # the second chunk ends within a block of a quantised cache
# Relative RMS against fp32 of the 8B shape's logits. Measured on two such layers: rounding 0.004, 4-bit keys and values
# 0.02, attention to the last chunk alone 0.3, and none at all 0.12.
TOLERANCE = {"bf16": 2e-2, "turbo4": 5e-2}

Row = dict[str, Any]


def prompt_engines(world_size: int) -> list[EngineConfig]:
    """What is measured with so many ranks: all of them in tensor parallelism, and as two groups, over two caches."""
    modes = [SpeculationConfig(mode="off"), *([SpeculationConfig(mode="paired")] if world_size % 2 == 0 else [])]
    return [
        EngineConfig(random_weights="llama-3.1-8b", kv_cache=codec, speculation=mode)
        for mode in modes
        for codec in ("bf16", "turbo4")
    ]


def prompt_flops(config: LlamaConfig, num_tokens: int) -> int:
    """Operations of a prompt, of all ranks together; a multiplication and an addition are two.

        2 n L (h (2 Hq + 2 Hkv) D + 3 h I)  +  L 4 Hq D n (n + 1) / 2  +  2 h V

    for n tokens, L layers, hidden size h, Hq and Hkv heads of D channels, an MLP of width I and a vocabulary of V: the
    layers' matrices, both products of attention where the causal mask leaves anything, and the LM head, which `prefill`
    applies to the last token alone. Norms, RoPE, softmax and SiLU are not counted.
    Source: Kaplan et al., Scaling Laws for Neural Language Models, table 1, with fewer KV heads and the third matrix of
    a gated MLP.
    """
    hidden, q_width = config.hidden_size, config.num_qo_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    matrices = hidden * (2 * q_width + 2 * kv_width + 3 * config.intermediate_size)
    pairs = num_tokens * (num_tokens + 1) // 2
    layer = 2 * num_tokens * matrices + 4 * q_width * pairs
    return config.num_layers * layer + 2 * hidden * config.vocab_size


def matrix_peak(device: torch.device) -> float:
    """Operations/s of a product of two bf16 matrices: the median of some in a row, after some more."""
    size = MATRIX_SIZE
    # Not zeros: with those a GPU is faster.
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    multiply = partial(torch.mm, a, b, out=out)
    for _ in range(WARMUP_PRODUCTS):
        multiply()
    return float(2 * size**3 / percentile(seconds_in_a_row(multiply, PRODUCTS, device), 0.5))


def measure_prompts(config: EngineConfig, contexts: list[int], found: Callable[[Row], None]) -> None:
    """Check prefill, then time prompts of random tokens of each length; every rank calls it.

    Args:
        config: what the engine, which is this function's own, is made with; on the CPU it measures, too.
        contexts: lengths in tokens.
        found: gets a row for each length, less its provenance, as soon as it is measured.
    Raises:
        UserError: a prompt longer than the model has positions.
        DoesNotFitError: weights and cache of a length.
        BadNumbersError: a wrong result.
    """
    engine = Engine(config)
    check_positions(max(contexts), engine.model_config)

    def work() -> int:
        engine.load(1, CHECKED_TOKENS)
        _check(engine)
        (peak,) = _largest(engine, matrix_peak(engine.device))
        for context in sorted(set(contexts)):
            engine.load(1, context)
            found(_measure(engine, context, peak))
        engine.close()
        return 0

    run_guarded(engine.heartbeat, work, "Lower --contexts, or use more ranks")


def _check(engine: Engine) -> None:
    """Logits of a short prompt in two chunks after the first layers, against those in fp32, uncompressed, in one chunk.

    Raises:
        BadNumbersError: they differ by more than rounding and quantisation make them.
    """
    model, ids = engine.model.first_layers(CHECKED_LAYERS), _random_ids(engine, CHECKED_TOKENS)
    config, weights = model.config, model.weights
    # The embedding is read as fp32 anyway.
    exact = replace(
        weights,
        layers=tuple(LayerWeights(**{name: x.float() for name, x in vars(layer).items()}) for layer in weights.layers),
        final_norm=weights.final_norm.float(),
        lm_head=weights.lm_head.float(),
    )
    cache = new_cache("bf16", config, engine.placement.tp_size, 1, CHECKED_TOKENS, torch.float32, engine.device)
    group = engine.connected()
    expected = _logits(engine, Llama(config, exact, group), cache, ids, CHECKED_TOKENS)
    logits = _logits(engine, model, engine.cache, ids, CHECKED_CHUNK)
    kind = engine.config.kv_cache
    check_close(f"logits of a prompt over {kind}", logits, expected, TOLERANCE[kind])


def _measure(engine: Engine, context: int, peak: float) -> Row:
    """One length's row; `peak`: operations/s that a GPU reaches in a product."""
    device, config, world_size = engine.device, engine.model_config, engine.placement.world_size
    ids = _random_ids(engine, context)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _first_token_us(engine, ids[: WARMUP_TOKENS * engine.placement.num_groups])
    samples: list[float] = []
    while len(samples) < MAX_PROMPTS and sum(samples) < ENOUGH_US:
        samples += _largest(engine, _first_token_us(engine, ids))
    assert engine.memory is not None
    taken = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    taken_bytes, planned_bytes = map(int, _largest(engine, taken, engine.memory.total_bytes))
    us = spread(samples)
    flops = prompt_flops(config, context)
    rate = flops / us["p50"] * 1e6 / world_size
    return {
        "bench": "prompt",
        "impl": "alspec.prefill",
        "case": {
            "shape": model_name(engine.config),
            "world": world_size,
            "mode": engine.mode,
            "dtype": engine.dtype_name,
            "kv_cache": engine.config.kv_cache,
            "context": context,
            "chunk_tokens": CHUNK_TOKENS,
        },
        "us": {name: round(value, 3) for name, value in us.items()},
        "prompts": len(samples),
        "flops": flops,
        "tflop_s": round(rate / 1e12, 3),  # of one GPU, as the next two
        "peak_tflop_s": round(peak / 1e12, 3),
        "share_of_peak": round(rate / peak, 4),
        "memory_bytes": taken_bytes,  # of PyTorch's tensors, on the fullest GPU; 0 on the CPU
        "planned_bytes": planned_bytes,
    }


def _first_token_us(engine: Engine, ids: list[int]) -> float:
    """Microseconds from a prompt's ids on the host to the next token there.

    Raises:
        BadNumbersError: logits that are not finite.
    """
    engine.connected().barrier()
    started = time.perf_counter()
    logits = _logits(engine, engine.model, engine.cache, ids)
    int(logits.argmax())
    us = (time.perf_counter() - started) * 1e6
    if not bool(logits.isfinite().all()):
        raise BadNumbersError(f"prefill of {len(ids)} tokens left logits that are not finite")
    return us


def _logits(engine: Engine, model: Llama, cache: Cache, ids: list[int], chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """[1, V] fp32 after the prompt's last token."""
    return prefill(model, cache, engine.connected(), 0, ids, no_hook, chunk_tokens)[0]


def _random_ids(engine: Engine, num_tokens: int) -> list[int]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids: list[int] = torch.randint(engine.model_config.vocab_size, (num_tokens,), generator=generator).tolist()
    return ids


def _largest(engine: Engine, *values: float) -> list[float]:
    """Each value on the rank where it is largest; every rank calls it."""
    own = torch.tensor(values, dtype=torch.float64, device=engine.device)
    largest: list[float] = engine.connected().all_gather_world(own).amax(0).tolist()
    return largest


def prompt_table(rows: list[Row]) -> Table:
    """What rows of `measure_prompts` say, for people."""
    case = rows[0]["case"]
    table = Table(
        title=f"Prompts of random tokens, {case['shape']}, {case['dtype']}, {case['world']} rank(s)",
        caption="TTFT: until the host has the first token; peak: of a large product of bf16 matrices in this run",
    )
    names = ("mode", "cache", "tokens", "TTFT ms p50", "p20", "p80", "prompts", "tokens/s")
    for name in (*names, "TFLOP/s a rank", "peak", "of peak", "GiB", "GiB planned"):
        table.add_column(name, justify="left" if name in ("mode", "cache") else "right")
    for row in rows:
        case, us = row["case"], row["us"]
        cells = [f"{us[name] / 1e3:.1f}" for name in ("p50", "p20", "p80")]
        cells += [str(row["prompts"]), f"{case['context'] / us['p50'] * 1e6:.0f}"]
        cells += [f"{row['tflop_s']:.0f}", f"{row['peak_tflop_s']:.0f}", f"{row['share_of_peak']:.1%}"]
        cells += [f"{row[name] / GIB:.2f}" for name in ("memory_bytes", "planned_bytes")]
        table.add_row(case["mode"], case["kv_cache"], str(case["context"]), *cells)
    return table
