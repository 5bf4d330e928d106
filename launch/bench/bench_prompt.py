"""Measure whole prompts: time to the first token, share of the matrix peak, and memory."""

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
from alspec.kernels.linear.decode_weight import DecodeWeight
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
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.stats import percentile, seconds_in_a_row, spread

__all__ = ["PROMPT_CONTEXTS", "matrix_peak", "measure_prompts", "prompt_engines", "prompt_flops", "prompt_table"]

PROMPT_CONTEXTS = (8192, 32768, 131072)

# Time prompts of one length until they have taken ENOUGH_US, at least one and at most MAX_PROMPTS.
MAX_PROMPTS = 9
ENOUGH_US = 3e6
# Length of the warm-up prompt, for each group: its second chunk launches everything that later chunks launch.
WARMUP_TOKENS = 2 * CHUNK_TOKENS

MATRIX_SIZE = 8192
WARMUP_PRODUCTS = 20
PRODUCTS = 50

CHECKED_LAYERS = 2
CHECKED_TOKENS, CHECKED_CHUNK = 500, 256  # the second chunk ends within a block of a quantised cache
# Relative RMS of the logits against fp32, for CHECKED_LAYERS layers of the 8B shape. Rounding gives 0.004, 4-bit keys
# and values 0.02. Wrong attention is found: to the last chunk alone it gives 0.3, none at all 0.12.
TOLERANCE = {"bf16": 2e-2, "turbo4": 5e-2}

Row = dict[str, Any]


def prompt_engines(world_size: int) -> list[EngineConfig]:
    """Settings to measure on `world_size` ranks: tensor parallelism and, if even, a pair; each over two caches."""
    modes = [SpeculationConfig(mode="off"), *([SpeculationConfig(mode="paired")] if world_size % 2 == 0 else [])]
    return [
        EngineConfig(random_weights="llama-3.1-8b", kv_cache=codec, speculation=mode)
        for mode in modes
        for codec in ("bf16", "turbo4")
    ]


def prompt_flops(config: LlamaConfig, num_tokens: int) -> int:
    """Operations of a prompt, on all ranks together. A multiply-add counts as two.

        2 n L (h (2 Hq + 2 Hkv) D + 3 h I)  +  L 4 Hq D n (n + 1) / 2  +  2 h V

    for n tokens, L layers, hidden size h, Hq and Hkv heads of D channels, an MLP of width I and a vocabulary of V. The
    terms: the matrices of the layers; both products of attention, without what the causal mask hides; the LM head,
    which `prefill` applies to the last token alone. Norms, RoPE, softmax and SiLU are not counted.
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
    """Measure operations/s of a bf16 matrix product: the median of `PRODUCTS` in a row, after a warm-up."""
    size = MATRIX_SIZE
    # Not zeros: a GPU multiplies zeros faster.
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    multiply = partial(torch.mm, a, b, out=out)
    for _ in range(WARMUP_PRODUCTS):
        multiply()
    return float(2 * size**3 / percentile(seconds_in_a_row(multiply, PRODUCTS, device), 0.5))


def measure_prompts(config: EngineConfig, contexts: list[int], found: Callable[[Row], None]) -> None:
    """Check prefill, then time prompts of random tokens of each length. Every rank calls it.

    Args:
        config: settings of the engine that this function makes. It may run on the CPU.
        contexts: lengths in tokens.
        found: called with the row of each length, without provenance, as soon as it is measured.
    Raises:
        UserError: a prompt is longer than the model's positions.
        DoesNotFitError: weights and cache do not fit for a length.
        BadNumbersError: a wrong result.
    """
    engine = Engine(config)
    check_positions(max(contexts), engine.model_config)

    with guarded(engine.heartbeat, "Lower --contexts, or use more ranks"):
        engine.load(1, CHECKED_TOKENS)
        _check(engine)
        (peak,) = _max_over_ranks(engine, matrix_peak(engine.device))
        for context in sorted(set(contexts)):
            engine.load(1, context)
            found(_measure(engine, context, peak))
        engine.close()


def _check(engine: Engine) -> None:
    """Compare the logits of a short prompt, in two chunks, with those in fp32, in one chunk over a cache of fp32.

    Uses the first `CHECKED_LAYERS` layers.

    Raises:
        BadNumbersError: the error is larger than `TOLERANCE`.
    """
    model, ids = engine.model.first_layers(CHECKED_LAYERS), _random_ids(engine, CHECKED_TOKENS)
    config, weights = model.config, model.weights

    def exactly(x: Tensor | DecodeWeight) -> Tensor:
        return x.dequantise(torch.float32) if isinstance(x, DecodeWeight) else x.float()

    # The embedding needs no conversion: it is read as fp32 anyway.
    exact = replace(
        weights,
        layers=tuple(LayerWeights(**{key: exactly(x) for key, x in layer.tensors.items()}) for layer in weights.layers),
        final_norm=weights.final_norm.float(),
        lm_head=exactly(weights.lm_head),
    )
    cache = new_cache("bf16", config, engine.placement.tp_size, 1, CHECKED_TOKENS, torch.float32, engine.device)
    group = engine.connected()
    expected = _logits(engine, Llama(config, exact, group), cache, ids, CHECKED_TOKENS)
    logits = _logits(engine, model, engine.cache, ids, CHECKED_CHUNK)
    kind = engine.config.kv_cache
    check_close(f"logits of a prompt over {kind}", logits, expected, TOLERANCE[kind])


def _measure(engine: Engine, context: int, peak: float) -> Row:
    """Measure the row of one length. `peak`: operations/s of a GPU in `matrix_peak`."""
    device, config, world_size = engine.device, engine.model_config, engine.placement.world_size
    ids = _random_ids(engine, context)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _first_token_us(engine, ids[: WARMUP_TOKENS * engine.placement.num_groups])
    samples: list[float] = []
    while len(samples) < MAX_PROMPTS and sum(samples) < ENOUGH_US:
        samples += _max_over_ranks(engine, _first_token_us(engine, ids))
    assert engine.memory is not None
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    used_bytes, planned_bytes = map(int, _max_over_ranks(engine, used, engine.memory.total_bytes))
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
        "tflop_s": round(rate / 1e12, 3),  # of one GPU, like the next two fields
        "peak_tflop_s": round(peak / 1e12, 3),
        "share_of_peak": round(rate / peak, 4),
        "memory_bytes": used_bytes,  # peak of PyTorch's tensors on the fullest GPU; 0 on the CPU
        "planned_bytes": planned_bytes,
    }


def _first_token_us(engine: Engine, ids: list[int]) -> float:
    """Microseconds from the prompt's ids on the host to the next token on the host.

    Raises:
        BadNumbersError: logits are not finite.
    """
    engine.connected().barrier()
    started = time.perf_counter()
    logits = _logits(engine, engine.model, engine.cache, ids)
    int(logits.argmax())
    us = (time.perf_counter() - started) * 1e6
    if not bool(logits.isfinite().all()):
        raise BadNumbersError(f"prefill of {len(ids)} tokens gave logits that are not finite")
    return us


def _logits(engine: Engine, model: Llama, cache: Cache, ids: list[int], chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Logits after the last token of the prompt, [1, V] fp32."""
    return prefill(model, cache, engine.connected(), 0, ids, no_hook, chunk_tokens)[0]


def _random_ids(engine: Engine, num_tokens: int) -> list[int]:
    """Random token ids, the same on every rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids: list[int] = torch.randint(engine.model_config.vocab_size, (num_tokens,), generator=generator).tolist()
    return ids


def _max_over_ranks(engine: Engine, *values: float) -> list[float]:
    """The maximum of each value over all ranks. Every rank calls it."""
    own = torch.tensor(values, dtype=torch.float64, device=engine.device)
    maxima: list[float] = engine.connected().all_gather_world(own).amax(0).tolist()
    return maxima


def prompt_table(rows: list[Row]) -> Table:
    """A table of the rows of `measure_prompts`."""
    case = rows[0]["case"]
    table = Table(
        title=f"Prompts of random tokens, {case['shape']}, {case['dtype']}, {case['world']} rank(s)",
        caption="TTFT: until the host has the first token; peak: a large product of bf16 matrices in this run",
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
