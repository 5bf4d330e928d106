"""`--plan`: bytes of each rank and predicted latency of each mode, without a GPU."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from alspec.config import GenerateConfig
from alspec.latency_model import StepCosts, speculative_step_us, tp_step_us
from alspec.models.config import LlamaConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama import Shard
from alspec.runtime.codecs import bytes_per_token, check_codec
from alspec.runtime.engine import refuse_unavailable
from alspec.runtime.memory import DTYPES, GIB, plan_memory

__all__ = ["print_plan", "step_costs"]

# Measured on H200s (NVLink, CUDA 13.0) with separate kernels in one CUDA graph. They set the scale of a prediction for
# a captured step; a step launched from the host takes longer.
STREAM_BYTES_PER_S = 4.3e12
LAYER_OVERHEAD_US = 14.0  # time per layer beyond bytes with tensor parallelism
ALONE_OVERHEAD_US = 10.0  # the same with one rank in the group
HOP_US = 2.4  # one-way put and flag to the paired GPU
PREDICTED_HIT_RATE = 0.65  # published range 65-80 %


def step_costs(
    config: LlamaConfig, world_size: int, num_groups: int, dtype: torch.dtype, context: int, kv_cache: str = "bf16"
) -> StepCosts:
    """Parts of one decode step on groups of `world_size / num_groups` ranks, predicted from bytes."""
    tp_size = world_size // num_groups
    shard = Shard(0, tp_size, 0, world_size)
    cache = bytes_per_token(kv_cache, config, tp_size, dtype) * context
    head = config.hidden_size * dtype.itemsize * -(-config.vocab_size // world_size)
    plan = plan_memory(config, shard, dtype, 1, 1)
    table = config.vocab_size * config.hidden_size * dtype.itemsize
    layers = plan.weights_bytes - table - (0 if config.tie_word_embeddings else head)

    def microseconds(num_bytes: float) -> float:
        return num_bytes / STREAM_BYTES_PER_S * 1e6

    attention = microseconds(cache / config.num_layers)
    overhead = LAYER_OVERHEAD_US if tp_size > 1 else ALONE_OVERHEAD_US
    return StepCosts(
        num_layers=config.num_layers,
        fixed_us=microseconds(head),
        layer_us=microseconds(layers / config.num_layers) + overhead,
        attention_us=attention,
        sender_us=attention,
        receiver_us=HOP_US,
    )


def print_plan(config: GenerateConfig) -> None:
    """A table over world sizes and modes on stdout.

    Raises:
        UserError: unknown shape, broken folder, or a configuration that is not available yet.
    """
    refuse_unavailable(config)
    if config.random_weights is not None:
        model = LlamaConfig.from_shape(config.random_weights)
    else:
        model = LlamaConfig.from_folder(config.model or DEMO_CHECKPOINT)
    check_codec(config.kv_cache, model, 1)
    dtype = DTYPES[config.dtype or model.dtype]
    context = config.max_context or model.max_position_embeddings
    table = Table(
        title=f"{context} tokens, {config.dtype or model.dtype}, cache {config.kv_cache}; captured step, "
        f"{STREAM_BYTES_PER_S / 1e12:.1f} TB/s, paired at a hit rate of {PREDICTED_HIT_RATE:.2f}"
    )
    for name in ("ranks", "mode", "T", "weights GiB", "cache GiB", "buffers GiB", "ms/token"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for world_size in (1, 2, 4, 8, 16):
        for mode, num_groups in (("off", 1), ("paired", 2)):
            tp_size = world_size // num_groups
            if world_size % num_groups or tp_size not in model.valid_tp_sizes:
                continue
            if config.kv_cache == "turbo-mixed" and tp_size == model.num_kv_heads:
                continue  # one KV head on a rank
            plan = plan_memory(model, Shard(0, tp_size, 0, world_size), dtype, 1, context, config.kv_cache)
            costs = step_costs(model, world_size, num_groups, dtype, context, config.kv_cache)
            step_us = tp_step_us(costs) if mode == "off" else speculative_step_us(costs, PREDICTED_HIT_RATE)
            sizes = (plan.weights_bytes, plan.cache_bytes, plan.buffer_bytes)
            cells = [
                str(world_size),
                mode,
                str(tp_size),
                *(f"{size / GIB:.2f}" for size in sizes),
                f"{step_us / 1e3:.2f}",
            ]
            table.add_row(*cells)
    Console(width=120).print(table)
