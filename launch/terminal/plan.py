"""`--plan`: predict memory and latency of each mode, without a GPU."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

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
from alspec.runtime.engine.composition import keeps_context, num_recalled_blocks
from alspec.runtime.engine.drafting import (
    check_draft_tokenizer,
    draft_config_with_weights,
    draft_copy_config,
    draft_model_config,
    round_size,
)
from alspec.runtime.engine.memory import DTYPES, GIB, check_max_context, plan_memory
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.profiling.forced_verdicts import ForcedVerdicts, read_layer_rates
from alspec.runtime.profiling.predicted_costs import (
    BESIDE_KERNELS,
    LINK_BYTES,
    LINK_GB_PER_S,
    LINK_US,
    STREAM_BYTES_PER_S,
    link_costs,
    message_us,
    step_costs,
)

__all__ = ["PlanSettings", "add_plan_flags", "plan_settings", "print_plan"]

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
    hit_rate: float | Sequence[float] = 0.0  # one of all layers, evenly spread, or one of each
    two_hosts: bool = False  # with one rank each, over a link


@dataclass(frozen=True)
class PlanSettings:
    """What `--plan` takes to be so, beside the configuration."""

    link_us: float = LINK_US  # a message of LINK_BYTES between two hosts, alone
    link_gb_per_s: float = LINK_GB_PER_S  # of large messages
    all_reduce_us: float = BESIDE_KERNELS * LINK_US  # over two hosts
    hit_rate: float | Sequence[float] | None = None  # as of `Mode`; None: those of `modes`

    @property
    def mean_hit_rate(self) -> float:
        """Share of layers that accept, for a pair on one host: it does not matter which layers reject."""
        if self.hit_rate is None:
            return PREDICTED_HIT_RATE
        return self.hit_rate if isinstance(self.hit_rate, float) else fmean(self.hit_rate)

    def modes(self) -> tuple[Mode, ...]:
        """The lines of the table, for each number of ranks that can run them."""
        named: list[tuple[str, float | Sequence[float]]] = [(f"{rate:.0%} hits", rate) for rate in LINKED_HIT_RATES]
        if self.hit_rate is not None:
            by_layer = "" if isinstance(self.hit_rate, float) else " by layer"
            named = [(f"{100 * self.mean_hit_rate:.3g}% hits{by_layer}", self.hit_rate)]
        return (
            Mode("off", 1),
            Mode("paired", 2, self.mean_hit_rate),
            Mode("two hosts, off", 1, two_hosts=True),
            *(Mode(f"two hosts, paired, {name}", 2, rate, two_hosts=True) for name, rate in named),
        )


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--plan`, and what only it takes."""
    group = parser.add_argument_group("prediction")
    group.add_argument("--plan", action="store_true", help="print memory and predicted latency; needs no GPU")
    size = f"{LINK_BYTES // 1024} KB"
    for flag, metavar, text in (
        ("--link-us", "US", f"microseconds of a message of {size}, alone, between hosts (default: {LINK_US:g}, TCP)"),
        ("--link-gbs", "GB/S", f"rate of large messages between them (default: {LINK_GB_PER_S:g}, TCP)"),
        ("--all-reduce-us", "US", f"microseconds of an all-reduce over both (default: {BESIDE_KERNELS} of --link-us)"),
    ):
        group.add_argument(flag, type=float, metavar=metavar, help=f"of --plan: {text}; the doctor measures it")
    group.add_argument(
        "--hit-rate", metavar="RATE|FILE",
        help=f"of --plan: share of the layers that accept, or a file with one of evaluate's rows (default: "
        f"{PREDICTED_HIT_RATE:g} on one host; {', '.join(f'{rate:g}' for rate in LINKED_HIT_RATES)} on two)",
    )  # fmt: skip


def plan_settings(args: argparse.Namespace) -> PlanSettings:
    """The values of `add_plan_flags`.

    Raises:
        UserError: names the flag; also one of them without --plan.
    """
    for name, what, least, most in (
        ("link_us", "microseconds", 0.0, 1e9),
        ("link_gbs", "GB/s", 1e-3, 1e6),
        ("all_reduce_us", "microseconds", 0.0, 1e9),
    ):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and not args.plan:
            raise UserError(f"flags: {flag}: expected beside --plan, found {value:g} without it")
        if value is not None and not least <= value <= most:
            raise UserError(f"flags: {flag}: expected a number of {what} from {least:g} to {most:g}, found {value:g}")
    if args.hit_rate is not None and not args.plan:
        raise UserError(f"flags: --hit-rate: expected beside --plan, found {args.hit_rate!r} without it")
    link_us = LINK_US if args.link_us is None else args.link_us
    return PlanSettings(
        link_us,
        LINK_GB_PER_S if args.link_gbs is None else args.link_gbs,
        BESIDE_KERNELS * link_us if args.all_reduce_us is None else args.all_reduce_us,
        None if args.hit_rate is None else _read_hit_rate(args.hit_rate),
    )


def _read_hit_rate(text: str) -> float | list[float]:
    """A share of layers, or that of each layer from the file with this name."""
    if not text.strip():
        raise UserError("flags: --hit-rate: expected a number from 0 to 1, or a file of evaluate's rows, found nothing")
    try:
        rate = float(text)
    except ValueError:
        return read_layer_rates(Path(text), "--hit-rate", "a number from 0 to 1")
    if not 0 <= rate <= 1:
        raise UserError(f"flags: --hit-rate: expected a number from 0 to 1, or a file of evaluate's rows, found {text}")
    return rate


def print_plan(config: GenerateConfig, settings: PlanSettings) -> None:
    """Print a table over world sizes and modes on stdout.

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
    named = config_with_weights(config, model, 1, packs)
    weights = weights_name(named, 1, config.dtype or model.dtype)
    weights = weights if named.quantised_as is None else f"weights {weights}"
    draft_model = draft_model_config(config)
    check_draft_tokenizer(config, model, draft_model)
    copied = draft_copy_config(config, named, 1, packs)
    small = draft_config_with_weights(config, draft_model, 1, packs)
    drafter = config.draft if copied is None else f"{config.draft} and its {copied.quantised_as} copy"
    if small is not None and small.quantised_as is not None:
        drafter += f" in {small.quantised_as}"
    title = (
        f"{context} tokens, {weights}, cache {cache_name(config)}; captured step over peer memory on H200s, "
        f"{STREAM_BYTES_PER_S / 1e12:.1f} TB/s"
    )
    if config.draft == "off":
        title += (
            f", paired at a hit rate of {settings.mean_hit_rate:.2f}; two hosts: {_link_text(settings, model)}, "
            f"against one of them alone; {_pauses(config)}"
        )
    table = Table(
        title=title,
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
        for mode in settings.modes():
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
            recalled, keeps = num_recalled_blocks(config, run_mode), keeps_context(config, run_mode)
            try:
                kept = config_with_weights(config, model, tp_size, packs)
                rounds = round_size(config, draft_config_with_weights(config, draft_model, tp_size, packs))
                plan = plan_memory(
                    kept, shard, dtype, 1, context, config.kv_cache, "cuda", config.kv_protect, recalled, rounds, keeps
                )
            except UserError:
                continue  # a rank's inputs, or those of a copy that drafts, do not divide into groups
            sizes = (plan.weights_bytes, plan.cache_bytes, plan.buffer_bytes)
            fits = sum(sizes) < H200_GIB * GIB
            step_us = _step_us(mode, kept, world_size, dtype, context, config, alone_us.get(1), settings)
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
    settings: PlanSettings,
) -> float:
    """Predicted time of a step.

    Args:
        model: with the weights of one rank's group.  alone_us: of one rank, for two hosts.
    """
    sizes = dtype, context, config.kv_cache, config.kv_protect
    recalled, tp_size = config.speculation.recalled, world_size // mode.num_groups
    costs = step_costs(model, world_size, mode.num_groups, *sizes, recalled)
    if not mode.two_hosts:
        return tp_step_us(costs) if mode.num_groups == 1 else speculative_step_us(costs, settings.mean_hit_rate)
    if mode.num_groups == 1:
        return linked_tp_step_us(costs, settings.all_reduce_us)
    assert alone_us is not None
    linked = link_costs(model, tp_size, *sizes, _message_us(settings, model, tp_size), recalled)
    of_steps = ForcedVerdicts.of(model.num_layers, mode.hit_rate, torch.device("cpu")).of_steps.bool().tolist()
    always_us = median(linked_step_us(linked, accepted) for accepted in of_steps)
    return always_us if config.speculation.always else min(always_us, alone_us)


def _message_us(settings: PlanSettings, model: LlamaConfig, tp_size: int = 1) -> float:
    return message_us(model, tp_size, settings.link_us, settings.link_gb_per_s)


def _link_text(settings: PlanSettings, model: LlamaConfig) -> str:
    """The times over the link."""
    return f"{_message_us(settings, model):.4g} us a message, {settings.all_reduce_us:.3g} us an all-reduce"


def _pauses(config: GenerateConfig) -> str:
    return "a pair never pauses" if config.speculation.always else "a pair that does not pay pauses"


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
