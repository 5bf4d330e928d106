"""`--plan`: predict memory and latency of each mode, without a GPU."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from alspec.config import GenerateConfig
from alspec.error_bounds import high_probability_bound
from alspec.latency_model import linked_step_us, speculative_step_us, tp_step_us
from alspec.models.checkpoint.source import model_config
from alspec.models.llama import Shard
from alspec.runtime.cache.codecs import cache_name, check_codec, check_softmax, fit_heads
from alspec.runtime.engine.composition import keeps_context, recalled_blocks
from alspec.runtime.engine.drafting import draft_model_config, round_size
from alspec.runtime.engine.kept_weights import with_weights
from alspec.runtime.engine.memory import DTYPES, GIB, check_max_context, plan_memory
from alspec.runtime.profiling.predicted_costs import STREAM_BYTES_PER_S, link_costs, step_costs
from alspec.runtime.profiling.profile import forced_verdicts

__all__ = ["print_plan"]

PREDICTED_HIT_RATE = 0.65  # lowest of the published range, 65 to 80 %
MAX_RANKS = 16
H200_GIB = 139  # as PyTorch reports it, minus 1 to 2 GiB that CUDA and NCCL take
FAILURE_PROBABILITY = 0.01  # of the bound on the error of accepted A~


def print_plan(config: GenerateConfig) -> None:
    """Print a table over world sizes and modes on stdout.

    Raises:
        UserError: unknown shape, broken folder, more tokens than the model has positions, or a softmax that the codec
            does not have.
    """
    check_softmax(config)
    model = fit_heads(config.kv_cache, model_config(config))
    check_codec(config.kv_cache, model, 1, config.kv_protect)
    check_max_context(config.max_context, model)
    dtype = DTYPES[config.dtype or model.dtype]
    context = config.max_context or model.longest_context
    packs = dtype.itemsize == 2
    named = with_weights(config, model, 1, packs)
    weights = named.weights_name(config.dtype or model.dtype)
    weights = weights if named.quantised_as is None else f"weights {weights}"
    draft_model = draft_model_config(config)
    rounds = round_size(config, draft_model)
    table = Table(
        title=f"{context} tokens, {weights}, cache {cache_name(config)}; captured step over peer "
        f"memory on H200s, {STREAM_BYTES_PER_S / 1e12:.1f} TB/s, paired at a hit rate of {PREDICTED_HIT_RATE:.2f}; "
        "over TCP: a pair on two hosts, against one group alone",
        caption=_what_speculation_changes(config.speculation.threshold, model.num_layers)
        if rounds is None
        else f"memory with --draft {config.draft}, latency of plain steps",
    )
    for name in ("ranks", "mode", "T", "weights GiB", "cache GiB", "buffers GiB", "ms/token", "against off"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    worlds = {groups * tp_size for tp_size in model.valid_tp_sizes for groups in (1, 2)}
    for world_size in sorted(world for world in worlds if world <= MAX_RANKS):
        off_us = None
        for mode, num_groups in (("off", 1), ("paired", 2), ("over TCP", 2)):
            tp_size = world_size // num_groups
            if world_size % num_groups or tp_size not in model.valid_tp_sizes:
                continue
            if mode == "over TCP" and tp_size > 1:
                continue  # not measured
            if mode != "off" and rounds is not None:
                continue
            if draft_model is not None and tp_size not in draft_model.valid_tp_sizes:
                continue
            if config.kv_cache == "turbo-mixed" and tp_size >= model.num_kv_heads:
                continue  # a rank would have one KV head; turbo-mixed needs two
            codec, protect, shards = config.kv_cache, config.kv_protect, tp_size if mode == "over TCP" else world_size
            shard = Shard(0, tp_size, 0, shards)
            run_mode = "off" if mode == "off" else "paired"
            recalled, keeps = recalled_blocks(config, run_mode), keeps_context(config, run_mode)
            kept = with_weights(config, model, tp_size, packs)
            plan = plan_memory(kept, shard, dtype, 1, context, codec, "cuda", protect, recalled, rounds, keeps)
            costs = step_costs(kept, world_size, num_groups, dtype, context, codec, protect)
            against = ""
            if mode == "over TCP":
                accepted = list(map(bool, forced_verdicts(model.num_layers, PREDICTED_HIT_RATE)))
                step_us = linked_step_us(link_costs(kept, tp_size, dtype, context, codec, protect), accepted)
                off_us = tp_step_us(step_costs(kept, tp_size, 1, dtype, context, codec, protect))
                against = f" of {tp_size}"
            else:
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
                f"{off_us / step_us:.2f}x{against}" if mode != "off" and off_us is not None and fits else "-",
            ]
            table.add_row(*cells)
    Console(width=120).print(table)


def _what_speculation_changes(threshold: float, num_layers: int) -> str | None:
    """Return a sentence about the error that accepted A~ add to the output of a step.

    The unit is the norm of an attention output, taken to be equal in all layers. The constant of
    `high_probability_bound` is not known: it is taken to be 1.
    """
    if not math.isfinite(threshold):
        return None
    bound = high_probability_bound([1.0] * num_layers, threshold, FAILURE_PROBABILITY, 1.0)
    return (
        f"lambda {threshold:g}: if every layer accepts A~ and the errors are independent, the step's output changes by "
        f"about {bound:.2g} norms of an attention output at most, with probability {1 - FAILURE_PROBABILITY:g}"
    )
