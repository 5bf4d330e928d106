"""`--plan`: predict memory and latency of each mode, without a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from alspec.config import GenerateConfig
from alspec.error_bounds import high_probability_bound
from alspec.errors import UserError
from alspec.latency_model import linked_step_us, linked_tp_step_us, speculative_step_us, tp_step_us
from alspec.models.checkpoint.source import model_config
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import weights_name
from alspec.runtime.cache.codecs import cache_name, check_codec, check_softmax, fit_heads
from alspec.runtime.engine.composition import keeps_context, recalled_blocks
from alspec.runtime.engine.drafting import (
    check_draft_tokenizer,
    copied_weights,
    draft_model_config,
    kept_draft_model,
    round_size,
)
from alspec.runtime.engine.kept_weights import with_weights
from alspec.runtime.engine.memory import DTYPES, GIB, check_max_context, plan_memory
from alspec.runtime.profiling.forced_verdicts import forced_verdicts
from alspec.runtime.profiling.predicted_costs import LINK_US, STREAM_BYTES_PER_S, link_costs, step_costs

__all__ = ["print_plan"]

PREDICTED_HIT_RATE = 0.65  # lowest of the published range, 65 to 80 %
LINKED_HIT_RATES = (0.8, 0.95, 1.0)  # of SmolLM2 with 16 and with more recalled blocks, and the most
MAX_RANKS = 16
H200_GIB = 139  # as PyTorch reports it, minus 1 to 2 GiB that CUDA and NCCL take
FAILURE_PROBABILITY = 0.01  # of the bound on the error of accepted A~


@dataclass(frozen=True)
class Mode:
    """A kind of line of the table."""

    name: str
    num_groups: int
    hit_rate: float = 0.0
    two_hosts: bool = False  # with one rank each, over a link


MODES = (
    Mode("off", 1),
    Mode("paired", 2, PREDICTED_HIT_RATE),
    Mode("two hosts, off", 1, two_hosts=True),
    *(Mode(f"two hosts, paired, {rate:.0%} hits", 2, rate, two_hosts=True) for rate in LINKED_HIT_RATES),
)


def print_plan(config: GenerateConfig, link_us: float = LINK_US) -> None:
    """Print a table over world sizes and modes on stdout.

    Args:
        link_us: time of a message between two hosts, and of an all-reduce.

    Raises:
        UserError: unknown shape, broken folder, more tokens than the model has positions, a softmax that the codec
            does not have, a draft model with another tokenizer, or a copy of weights with as few bits.
    """
    check_softmax(config)
    model = fit_heads(config.kv_cache, model_config(config))
    check_codec(config.kv_cache, model, 1, config.kv_protect)
    check_max_context(config.max_context, model)
    dtype = DTYPES[config.dtype or model.dtype]
    context = config.max_context or model.longest_context
    packs = dtype.itemsize == 2
    named = with_weights(config, model, 1, packs)
    weights = weights_name(named, 1, config.dtype or model.dtype)
    weights = weights if named.quantised_as is None else f"weights {weights}"
    draft_model = draft_model_config(config)
    check_draft_tokenizer(config, model, draft_model)
    copied = copied_weights(config, named, 1, packs)
    small = kept_draft_model(config, draft_model, 1, packs)
    drafter = config.draft if copied is None else f"{config.draft} and its {copied.quantised_as} copy"
    if small is not None and small.quantised_as is not None:
        drafter += f" in {small.quantised_as}"
    table = Table(
        title=f"{context} tokens, {weights}, cache {cache_name(config)}; captured step over peer "
        f"memory on H200s, {STREAM_BYTES_PER_S / 1e12:.1f} TB/s, paired at a hit rate of {PREDICTED_HIT_RATE:.2f}; "
        f"two hosts: {link_us:g} us a message, against one of them alone; a pair that does not pay pauses",
        caption=_what_speculation_changes(config.speculation.threshold, model.num_layers)
        if config.draft == "off"
        else f"memory with --draft {drafter}, latency of plain steps",
    )
    for name in ("ranks", "mode", "T", "weights GiB", "cache GiB", "buffers GiB", "ms/token", "against off"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    alone_us: dict[int, float] = {}  # step of one group in tensor parallelism, by ranks
    fitting = set()  # numbers of ranks on which that group fits
    worlds = {groups * tp_size for tp_size in model.valid_tp_sizes for groups in (1, 2)}
    for world_size in sorted(world for world in worlds if world <= MAX_RANKS):
        for mode in MODES:
            tp_size = world_size // mode.num_groups
            if world_size % mode.num_groups or tp_size not in model.valid_tp_sizes:
                continue
            if mode.two_hosts and world_size != 2:
                continue  # not predicted
            if mode.name != "off" and config.draft != "off":
                continue
            if draft_model is not None and tp_size not in draft_model.valid_tp_sizes:
                continue
            if config.kv_cache == "turbo-mixed" and tp_size >= model.num_kv_heads:
                continue  # a rank would have one KV head; turbo-mixed needs two
            shard = Shard(0, tp_size, 0, tp_size if mode.two_hosts else world_size)
            run_mode = "off" if mode.num_groups == 1 else "paired"
            recalled, keeps = recalled_blocks(config, run_mode), keeps_context(config, run_mode)
            try:
                kept = with_weights(config, model, tp_size, packs)
                rounds = round_size(config, kept_draft_model(config, draft_model, tp_size, packs))
                plan = plan_memory(
                    kept, shard, dtype, 1, context, config.kv_cache, "cuda", config.kv_protect, recalled, rounds, keeps
                )
            except UserError:
                continue  # a rank's inputs, or those of a copy that drafts, do not divide into groups
            sizes = (plan.weights_bytes, plan.cache_bytes, plan.buffer_bytes)
            fits = sum(sizes) < H200_GIB * GIB
            step_us = _step_us(mode, kept, world_size, dtype, context, config, alone_us.get(1), link_us)
            if mode.name == "off":
                alone_us[world_size] = step_us
                if fits:
                    fitting.add(world_size)
            base = 1 if mode.two_hosts else world_size
            ratio = f"{alone_us[base] / step_us:.2f}x{' of 1' if mode.two_hosts else ''}" if base in fitting else "-"
            table.add_row(
                str(world_size), mode.name, str(tp_size), *(f"{size / GIB:.2f}" for size in sizes),
                f"{step_us / 1e3:.2f}" if fits else "does not fit",
                ratio if fits and mode.name != "off" else "-",
            )  # fmt: skip
    Console(width=120).print(table)


def _step_us(
    mode: Mode,
    model: LlamaConfig,
    world_size: int,
    dtype: torch.dtype,
    context: int,
    config: GenerateConfig,
    alone_us: float | None,
    link_us: float,
) -> float:
    """Predicted time of a step.

    Args:
        model: with the weights of one rank's group.  alone_us: of one rank, for two hosts.
        link_us: as for `print_plan`.
    """
    sizes = dtype, context, config.kv_cache, config.kv_protect
    costs = step_costs(model, world_size, mode.num_groups, *sizes)
    if not mode.two_hosts:
        return tp_step_us(costs) if mode.num_groups == 1 else speculative_step_us(costs, mode.hit_rate)
    if mode.num_groups == 1:
        return linked_tp_step_us(costs, link_us)
    assert alone_us is not None
    accepted = list(map(bool, forced_verdicts(model.num_layers, mode.hit_rate)))
    always_us = linked_step_us(link_costs(model, world_size // mode.num_groups, *sizes, link_us), accepted)
    return min(always_us, alone_us)  # a pair that does not pay pauses


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
