"""`--plan`: bytes of each rank and predicted latency of each mode, without a GPU."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.table import Table

from alspec.config import GenerateConfig, refuse_unavailable
from alspec.error_bounds import high_probability_bound
from alspec.latency_model import StepCosts, speculative_step_us, tp_step_us
from alspec.models.checkpoint.source import model_config
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import bytes_per_token, check_codec
from alspec.runtime.engine.memory import DTYPES, GIB, check_max_context, plan_memory
from alspec.runtime.profiling.stats import step_bytes

__all__ = ["print_plan", "step_costs"]

# Measured on H200s, captured steps of one request over peer memory (NVLink); other transports and steps launched from
# the host take longer. Each constant names its rows in docs/results, by bench; tests/launch/test_plan.py compares every
# predicted step with its row. decode_parts, unless said otherwise, is one run: llama-3.1-8b, 131072 tokens, 1 + 1 GPUs,
# half of the guesses accepted.
STREAM_BYTES_PER_S = 4.26e12  # decode_step: stream_tb_s, 4.22 to 4.28
# Of the cache, 537 MB: reading alone, 32/8 heads of 128, 131072 tokens, in 119.2; decode_parts: attention
# 120.9, less ATTENTION_US.
READ_BYTES_PER_S = 4.5e12
ATTENTION_US = 3.4  # decode_attention, 32/8 heads of 128, 1024 tokens: 4.2 to 4.3, less the time of its bytes
ALL_REDUCE_US = 0.65  # of two in a layer, for each rank of the group. decode_step in mode off: fitted
FIXED_US = 8.0  # the same, shapes of 10 to 80 layers: outside of layers
LAYER_US = 2.1  # the same, in each layer
PAIR_FIXED_US = 14.4  # decode_parts, fixed: 145.8, less the time of its bytes and FIXED_US
HANDOVER_US = 5.4  # decode_parts, layer: 109.9, less the time of its bytes and LAYER_US
VERDICT_US = 2.2  # decode_parts: sender 123.0, less attention 120.9
# decode_parts of the same step over turbo4, receiver, where it varies least (over bf16 6.4, but 23 at p80). Where all
# attention takes less, the guess comes no later than its end.
PREDICTOR_US = 9.7
PREDICTED_HIT_RATE = 0.65  # published range 65-80 %
MAX_RANKS = 16
H200_GIB = 139  # less what a process takes for CUDA and NCCL: 1 to 2 are left of what PyTorch reports
FAILURE_PROBABILITY = 0.01  # of the bound on what accepted guesses change


def step_costs(
    config: LlamaConfig, world_size: int, num_groups: int, dtype: torch.dtype, context: int, kv_cache: str = "bf16"
) -> StepCosts:
    """Parts of one decode step on groups of `world_size / num_groups` ranks: the time of bytes, and constants."""
    tp_size = world_size // num_groups
    shard = Shard(0, tp_size, 0, world_size)
    cache = bytes_per_token(kv_cache, config, tp_size, dtype) * context
    head = config.hidden_size * dtype.itemsize * -(-config.vocab_size // world_size)
    layers = step_bytes(config, shard, dtype, [], kv_cache) - head

    def microseconds(num_bytes: float) -> float:
        return num_bytes / STREAM_BYTES_PER_S * 1e6

    attention_us = cache / config.num_layers / READ_BYTES_PER_S * 1e6 + ATTENTION_US
    fixed_us = microseconds(head) + FIXED_US
    layer_us = microseconds(layers / config.num_layers) + LAYER_US
    if tp_size > 1:
        layer_us += 2 * tp_size * ALL_REDUCE_US
    if num_groups > 1:
        fixed_us, layer_us = fixed_us + PAIR_FIXED_US, layer_us + HANDOVER_US
    return StepCosts(
        num_layers=config.num_layers,
        fixed_us=fixed_us,
        layer_us=layer_us,
        attention_us=attention_us,
        sender_us=attention_us + VERDICT_US,
        receiver_us=min(PREDICTOR_US, attention_us),
    )


def print_plan(config: GenerateConfig) -> None:
    """A table over world sizes and modes on stdout.

    Raises:
        UserError: unknown shape, broken folder, more tokens than the model has positions, or a configuration that is
            not available yet.
    """
    refuse_unavailable(config)
    model = model_config(config)
    check_codec(config.kv_cache, model, 1)
    check_max_context(config.max_context, model)
    dtype = DTYPES[config.dtype or model.dtype]
    context = config.max_context or model.longest_context
    table = Table(
        title=f"{context} tokens, {config.dtype or model.dtype}, cache {config.kv_cache}; captured step over peer "
        f"memory on H200s, {STREAM_BYTES_PER_S / 1e12:.1f} TB/s, paired at a hit rate of {PREDICTED_HIT_RATE:.2f}",
        caption=_what_speculation_changes(config.speculation.threshold, model.num_layers),
    )
    for name in ("ranks", "mode", "T", "weights GiB", "cache GiB", "buffers GiB", "ms/token", "against off"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    worlds = {groups * tp_size for tp_size in model.valid_tp_sizes for groups in (1, 2)}
    for world_size in sorted(world for world in worlds if world <= MAX_RANKS):
        off_us = None
        for mode, num_groups in (("off", 1), ("paired", 2)):
            tp_size = world_size // num_groups
            if world_size % num_groups or tp_size not in model.valid_tp_sizes:
                continue
            if config.kv_cache == "turbo-mixed" and tp_size == model.num_kv_heads:
                continue  # one KV head on a rank
            plan = plan_memory(model, Shard(0, tp_size, 0, world_size), dtype, 1, context, config.kv_cache, "cuda")
            costs = step_costs(model, world_size, num_groups, dtype, context, config.kv_cache)
            step_us = tp_step_us(costs) if mode == "off" else speculative_step_us(costs, PREDICTED_HIT_RATE)
            off_us = step_us if mode == "off" else off_us
            sizes = (plan.weights_bytes, plan.cache_bytes, plan.buffer_bytes)
            fits = sum(sizes) < H200_GIB * GIB
            cells = [
                str(world_size),
                mode,
                str(tp_size),
                *(f"{size / GIB:.2f}" for size in sizes),
                f"{step_us / 1e3:.2f}" if fits else "does not fit",
                f"{off_us / step_us:.2f}x" if mode != "off" and off_us is not None and fits else "-",
            ]
            table.add_row(*cells)
    Console(width=120).print(table)


def _what_speculation_changes(threshold: float, num_layers: int) -> str | None:
    """The scale of what a step's accepted guesses change, in norms of an attention output that is alike in every layer.

    By `high_probability_bound`, whose constant is not known: 1 is taken for it.
    """
    if not math.isfinite(threshold):
        return None
    bound = high_probability_bound([1.0] * num_layers, threshold, FAILURE_PROBABILITY, 1.0)
    return (
        f"lambda {threshold:g}: if every layer accepts and their errors are unrelated, the step's output changes, with "
        f"probability {1 - FAILURE_PROBABILITY:g}, by the order of {bound:.2g} norms of an attention output at most"
    )
