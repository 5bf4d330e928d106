"""Measure latency per token: `python launch/latency.py --random-weights llama-3.1-8b --contexts 8k,128k`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from alspec.config import ChoiceConfig, HitRates, LatencyConfig, SamplingConfig
from alspec.errors import AlspecError, UserError
from alspec.kernels.common.limits import max_batch
from alspec.launch.latency_rounds import Measured, check_rounds, rounds_table, rounds_title, sweep_rounds
from alspec.launch.plots.plot_latency import draw, draw_rounds
from alspec.launch.terminal.display import StatusLine, why_no_hit_rate
from alspec.launch.terminal.flags import (
    Parser,
    check_picture,
    check_positions,
    check_writable,
    cuts_without_effect,
    notify,
    parse_command,
    speculation_without_effect,
)
from alspec.launch.terminal.output import append_rows, exit_code, result_console, write_text, writing
from alspec.launch.terminal.prompts import from_first_rank, read_text_ids
from alspec.models.checkpoint.source import model_config, model_name
from alspec.runtime.cache.codecs import cache_name, check_codec, check_softmax, fit_heads
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.distributed.placement import Placement, why_no_peers
from alspec.runtime.engine.choices import choose_device, choose_mode
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded, translate_out_of_memory
from alspec.runtime.profiling.forced_verdicts import ForcedVerdicts, read_layer_rates
from alspec.runtime.profiling.kernel_trace import kernel_rows, label, layer_parts
from alspec.runtime.profiling.link_trace import is_linked, link_parts
from alspec.runtime.profiling.profile import (
    Profile,
    cache_tokens,
    first_tokens,
    measure,
    prepare,
    stream_limit,
)
from alspec.runtime.profiling.provenance import provenance
from alspec.runtime.profiling.stats import spread
from alspec.runtime.profiling.timeline import trace_json

__all__ = ["main"]

CONTEXTS = (1024, 8192, 32768, 131072)
EPILOG = (
    "The time of a step is that of its slowest rank. On GPUs it comes from the device's clock, over a cache of random"
    " numbers; on the CPU, and in eager steps, from the host's clock. Hit rates of real verdicts need a text"
    " (--prompt-file). With a text, context + steps must not exceed the model's maximum. --trace profiles further"
    " captured steps after the measured ones. Profiling slows the traced steps, not the measured ones. For a pair,"
    " --trace also writes one row per layer part (bench decode_parts, over a link link_parts). Without a CUDA graph,"
    " --trace records the measured steps and everything before them. With --draft, --trace records the rounds of the"
    " last context while they are measured: times, drafts and accepted ones; of eager rounds also the operations."
)


OUT_OF_MEMORY = "Lower --contexts or --batch, or use more ranks"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="latency", description="Latency per token.", epilog=EPILOG)
    with exit_code(argv) as outcome:
        config, args = parse_command(parser, LatencyConfig, argv, outcome)
        outcome.code = _run(config, args.command)
    return outcome.code


def _run(config: LatencyConfig, command: str) -> int:
    _check(config)
    _check_modes(config)
    if Placement.from_environment().rank == 0:
        speculates = "paired" in _modes(config)
        notify([*cuts_without_effect(config), *speculation_without_effect(config, speculates, "add --modes paired")])
    results: list[Measured] = []
    with _show_if_stopped(results, config):
        for single in _configs(config):
            _measure(single, command, results)
    if Placement.from_environment().rank == 0 and results:
        _write(config, results)
    return 0


@contextlib.contextmanager
def _show_if_stopped(results: list[Measured], config: LatencyConfig) -> Iterator[None]:
    """After Ctrl-C or an error, rank 0 prints the table of the results so far, once."""
    try:
        yield
    except (KeyboardInterrupt, AlspecError):
        if results and Placement.from_environment().rank == 0:
            _show(results, config)
        results.clear()
        raise


def _modes(config: LatencyConfig) -> list[str]:
    return list(dict.fromkeys(config.modes))


def _codecs(config: LatencyConfig) -> list[str]:
    return list(dict.fromkeys(config.codecs or [config.kv_cache]))


def _configs(config: LatencyConfig) -> list[LatencyConfig]:
    """One configuration for each mode over each cache. Each configuration gets its own engine."""
    return [
        config.model_copy(
            update={
                "kv_cache": codec,
                "kv_protect": 0 if codec == "bf16" and config.codecs else config.kv_protect,
                "speculation": config.speculation.model_copy(update={"mode": mode}),
                "pair_transport": "auto" if mode != "paired" and "paired" in _modes(config) else config.pair_transport,
            }
        )
        for codec in _codecs(config)
        for mode in _modes(config)
    ]


def _check(config: LatencyConfig) -> None:
    """Refuse mistakes that can be found without the model."""
    if config.codecs is not None and config.kv_cache != "bf16":
        raise UserError("flags: --kv-cache: --codecs names the caches to measure; leave --kv-cache out")
    if config.codecs is not None and config.softmax == "sas" and "bf16" in config.codecs:
        raise UserError("flags: --softmax: sas needs quantised caches; leave bf16 out of --codecs")
    if config.trace is not None and len(_configs(config)) > 1:
        raise UserError("flags: --trace: records one mode over one cache; give one value to --modes and to --codecs")
    check_rounds(config)
    for single in _configs(config):
        check_softmax(single)
    if config.speculation.mode not in ("auto", "off"):
        raise UserError("flags: --speculation: not used by latency; use --modes instead")
    if Placement.from_environment().rank == 0:  # which reads them
        for rate in config.hit_rates:
            if isinstance(rate, Path):
                read_layer_rates(rate)
    if "paired" not in _modes(config) and any(rate != "real" for rate in config.hit_rates):
        raise UserError("flags: --hit-rates: forced rates need --modes paired; otherwise leave --hit-rates out")
    most = min(map(max_batch, _modes(config)))
    if config.batch > most:
        raise UserError(f"flags: --batch: a captured step serves up to {most} requests, found {config.batch}")
    check_picture("flags: --plot", config.plot)
    for name in ("rows", "json_file", "trace"):
        check_writable(f"flags: --{name.removesuffix('_file')}", getattr(config, name))


def _check_modes(config: LatencyConfig) -> None:
    """Before anything is measured, reject modes that cannot run here."""
    placement = Placement.from_environment()
    model = model_config(config)
    for mode in _modes(config):
        if mode == "paired" and placement.world_size % 2:
            raise UserError(
                f"flags: --modes: paired needs an even number of ranks, found {placement.world_size}; start the "
                "program with torchrun --nproc-per-node 2 (or 4, ...), or leave paired out"
            )
        _, num_groups = choose_mode(mode, model, placement.world_size)
        for codec in _codecs(config):
            protect = 0 if codec == "bf16" else config.kv_protect
            check_codec(codec, fit_heads(codec, model), placement.world_size // num_groups, protect)
    is_forced = any(rate != "real" for rate in config.hit_rates)
    if "paired" in _modes(config) and is_forced and choose_device(config, placement)[0].type != "cuda":
        raise UserError("flags: --hit-rates: forced verdicts need the fused kernels, which run on GPUs")


def _contexts(config: LatencyConfig, engine: Engine) -> list[int]:
    # With a text, the steps must stay within the model's positions. With random numbers that does not matter.
    steps = 0 if config.prompt_file is None else cache_tokens(0, config.steps, config.tokens_of_step)
    if config.contexts is None:
        limit = max(engine.model_config.longest_context - steps, 2)
        contexts = [context for context in CONTEXTS if context <= limit] or [limit]
    else:
        contexts = sorted(set(config.contexts))
    check_positions(contexts[-1], engine.model_config, steps)
    engine.check_sampling(config.sampling)
    needed = cache_tokens(contexts[-1], config.steps, config.tokens_of_step)
    if config.max_context is not None and config.max_context < needed:
        raise UserError(
            f"flags: --max-context: {contexts[-1]} tokens and the steps after them need {needed}, "
            f"found {config.max_context}; leave it out, or lower --contexts or --steps"
        )
    return contexts


def _measure(config: LatencyConfig, command: str, results: list[Measured]) -> None:
    """Measure one mode over one cache, with a new engine. Append each result to `results` at once."""
    engine = Engine(config)
    contexts = _contexts(config, engine)
    text_ids = None if config.prompt_file is None else read_text_ids(config.prompt_file, engine)
    rates = config.hit_rates if config.speculation.mode == "paired" else ("real",)

    with (
        guarded(engine.heartbeat, OUT_OF_MEMORY),
        _show_if_stopped(results, config),
        translate_out_of_memory(OUT_OF_MEMORY),
        StatusLine(engine.placement.rank == 0) as status,
    ):
        if config.draft == "off":
            _sweep(config, engine, contexts, rates, text_ids, command, results, status)
        else:
            sweep_rounds(config, engine, contexts, text_ids, command, results, status)


def _sweep(
    config: LatencyConfig,
    engine: Engine,
    contexts: list[int],
    rates: tuple[HitRates, ...],
    text_ids: list[int] | None,
    command: str,
    results: list[Measured],
    status: StatusLine,
) -> None:
    is_first = engine.placement.rank == 0
    verdicts = [(rate, _forced(engine, rate)) for rate in rates]
    name = f"{engine.mode}, {cache_name(config)}"
    status.show(f"{name}: loading weights")
    engine.load(config.batch, config.max_context or cache_tokens(contexts[-1], config.steps))
    status.clear()
    notify(engine.take_notices() if is_first else [])
    if is_first and engine.mode == "paired" and "real" in rates:
        notify(_without_hit_rate(config, contexts))
    # Eager steps are recorded while they run. Captured steps are profiled afterwards, by `_trace`.
    engine.timeline.enabled = config.trace is not None and not engine.is_fused
    for rate, forced in verdicts:
        if engine.decode_step is not None and engine.is_fused and engine.mode == "paired":
            engine.decode_step.set_verdict_rule(config.speculation.threshold, None if forced is None else forced.now)
        status.show(f"{name}: preparing")
        prepare(engine, config.sampling)
        copy_bandwidth = stream_limit(engine)
        for context in contexts:
            status.show(f"{name}: {context} tokens")
            profile = measure(engine, context, config.steps, text_ids, forced, config.sampling)
            row = _row(config, engine, profile, rate, copy_bandwidth, command)
            results.append((row, profile))
            if is_first:
                append_rows(config.rows, [row])
    if config.trace is not None:
        status.show(f"{name}: trace")
        _trace(config, engine, contexts[-1], text_ids, results[-1][0])
    status.clear()
    engine.close()


def _without_hit_rate(config: LatencyConfig, contexts: list[int]) -> list[str]:
    """Return a notice: no verdict of these contexts could reject, so that none counts."""
    first_lossy = config.speculation.first_lossy_length
    short = [str(context) for context in contexts if cache_tokens(context, config.steps) <= first_lossy]
    return [f"no hit rate at {', '.join(short)} tokens: {why_no_hit_rate(first_lossy)}"] if short else []


def _trace(
    config: LatencyConfig, engine: Engine, context: int, text_ids: list[int] | None, row: dict[str, Any]
) -> None:
    """Write a trace of steps measured like those of `row`; for a pair, also one row per layer part."""
    assert config.trace is not None
    verdicts: list[list[int]] = []
    if not engine.is_fused:
        own = engine.timeline.rows()
    else:
        own, verdicts = kernel_rows(engine, context, first_tokens(engine, context, text_ids, config.sampling))
    rows_by_rank = engine.gather_rows(own)
    if engine.placement.rank != 0:
        return
    if engine.is_fused:
        rows_by_rank = label(rows_by_rank, verdicts)
    write_text(config.trace, trace_json(rows_by_rank, row))
    if verdicts:
        linked = is_linked(rows_by_rank)
        parts = (link_parts if linked else layer_parts)(rows_by_rank, verdicts)
        bench = "link_parts" if linked else "decode_parts"
        append_rows(config.rows, parts_rows(row, parts, engine.model_config.num_layers, bench))


WHOLE_STEP = ("us", "mean_us", "bytes", "tokens_per_s", "share_of_limit")  # fields of a row that its parts do not have


def parts_rows(
    row: dict[str, Any], parts: dict[str, list[float]], num_layers: int, bench: str = "decode_parts"
) -> list[dict[str, Any]]:
    """Rows of a bench, one per layer part of the traced steps. `row` belongs to the untraced steps."""
    kept = {name: value for name, value in row.items() if name not in WHOLE_STEP}
    return [
        kept
        | {
            "bench": bench,
            "case": row["case"] | {"part": name},
            "us": {share: round(value, 3) for share, value in spread(samples).items()},
            "untraced_us": row["us"]["p50"],
            "num_layers": num_layers,
        }
        for name, samples in parts.items()
        if samples
    ]


def _forced(engine: Engine, rate: HitRates) -> ForcedVerdicts | None:
    """The verdicts of the next steps; None: real ones. Every rank calls it."""
    if rate == "real":
        return None
    found = from_first_rank(engine, partial(read_layer_rates, rate)) if isinstance(rate, Path) else rate
    return ForcedVerdicts.of(engine.model_config.num_layers, found, engine.device)


def _write(config: LatencyConfig, results: list[Measured]) -> None:
    """Write table, samples and picture; rank 0 calls it."""
    rows = [row for row, _ in results]
    _show(results, config)
    if config.json_file is not None:
        samples = [{"case": row["case"]} | profile.samples for row, profile in results]
        everything = {"rows": rows, "samples": samples, "config": config.model_dump(mode="json", by_alias=True)}
        write_text(config.json_file, json.dumps(everything))
    if config.plot is not None:
        with writing(config.plot):
            if config.draft == "off":
                draw(config.plot, rows, _title(rows[0]))
            else:
                draw_rounds(config.plot, rows, rounds_title(rows[0]))


def _show(results: list[Measured], config: LatencyConfig) -> None:
    table = _table(results) if config.draft == "off" else rounds_table([row for row, _ in results])
    result_console(config.rows, config.json_file, config.trace, width=130).print(table)


def _row(
    config: LatencyConfig, engine: Engine, profile: Profile, rate: HitRates, copy_bandwidth: float, command: str
) -> dict[str, Any]:
    ranks = engine.placement.world_size
    return {
        "bench": "decode_step",
        "impl": f"alspec.{engine.mode}",
        "case": {
            "shape": model_name(config),
            "world": ranks,
            "mode": engine.mode,
            "transport": _transport(engine) if ranks > 1 else None,
            "cuda_graph": engine.uses_graph,
            "dtype": engine.dtype_name,
            **({"weights": name} if (name := engine.model_config.weights_in_rows) else {}),
            **({"lm_head": config.lm_head} if config.lm_head != "auto" else {}),
            "batch": profile.batch_size,
            "context": profile.context,
            "text": None if config.prompt_file is None else config.prompt_file.name,
            "kv_cache": config.kv_cache,
            **({"kv_protect": config.kv_protect} if config.kv_protect else {}),
            "softmax": config.softmax,
            "hit_rate": None if profile.hit_rate is None else round(profile.hit_rate, 4),
            "forced": rate != "real",
            # A pair over a link that pauses in all steps has no verdict, and so no hit rate.
            **({"forced_rate": rate} if engine.placement.is_linked and isinstance(rate, float) else {}),
            **({"layer_rates": rate.name} if isinstance(rate, Path) else {}),
            **_speculation_of(config, engine.mode),
            **_sampling_of(config.sampling),
        },
        "us": {name: round(profile.us[name], 3) for name in ("p20", "p50", "p80", "p99")},
        "mean_us": round(fmean(profile.slowest_us), 3),
        "bytes": profile.read_bytes,
        "stream_tb_s": round(copy_bandwidth / 1e12, 3),
        "tokens_per_s": round(profile.tokens_per_s, 2),
        **({"alone_share": round(profile.alone_share, 4)} if engine.placement.is_linked else {}),
        **_link_of(engine, profile.batch_size * profile.context),
        # A pair skips launches, which then do not read their weights. So its share of the limit is undefined.
        "share_of_limit": round(profile.bytes_per_s / copy_bandwidth, 4) if engine.mode == "off" else None,
        **provenance(ranks if engine.device.type == "cuda" else 0, command),
    }


def _link_of(engine: Engine, num_tokens: int) -> dict[str, Any]:
    """Time of a message alone, and how many layers the speculator may be ahead; empty without a link."""
    step = engine.decode_step
    policy = step.pair_policy if isinstance(step, CapturedStep) else None
    return {} if policy is None else {"link_us": round(policy.link_us, 1), "lead": policy.lead(num_tokens)}


def _speculation_of(config: LatencyConfig, mode: str) -> dict[str, Any]:
    """lambda, S and recalled blocks; empty in mode off. JSON has no infinity, so an infinite lambda is a string."""
    if mode == "off":
        return {}
    recalled = {"recall_blocks": config.speculation.recalled} if config.speculation.recalled else {}
    return config.speculation.model_dump(mode="json", include={"threshold", "chunk_size"}) | recalled


def _sampling_of(sampling: SamplingConfig) -> dict[str, Any]:
    """Settings of how a token is chosen, those in use alone; empty if greedy without penalties and biases."""
    how = ChoiceConfig(**{name: getattr(sampling, name) for name in ChoiceConfig.model_fields if name != "seed"})
    cuts = {"temperature", "top_k", "top_p"} if how.temperature > 0.0 else set()
    changed = how.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in how.model_dump(mode="json").items() if name in cuts or name in changed}


def _has_share(row: dict[str, Any]) -> bool:
    """Whether the row has a share of the byte limit. Rows of a pair have none, see `_row`."""
    return row["share_of_limit"] is not None


def _transport(engine: Engine) -> str:
    place = engine.placement
    is_one_host = place.local_world_size == place.world_size
    blocked = engine.transport_name == "nccl" and is_one_host and why_no_peers(range(place.world_size))
    return "nccl without peer access" if blocked else engine.transport_name


def _title(row: dict[str, Any]) -> str:
    case = row["case"]
    where = f"{row['num_gpus']} x {row['gpu']}" if row["gpu"] else f"{case['world']} rank(s) on CPU"
    weights, dtype = case.get("weights"), case["dtype"]
    if weights:
        dtype = f"{weights} {'to' if weights.endswith('dequantised') else 'in'} {dtype}"
    parts = [case["shape"], where, dtype, f"batch {case['batch']}", case["transport"]]
    parts += [f"{name} {case[name]}" for name in ChoiceConfig.model_fields if name in case]
    return ", ".join([part for part in parts if part] + (["captured graph"] if case["cuda_graph"] else []))


def _table(results: list[Measured]) -> Table:
    rows = [row for row, _ in results]
    filled = "the cache holds random numbers"
    if rows[0]["case"]["text"] is not None:
        filled = f"after prompts from {rows[0]['case']['text']}"
    limits = [
        f"limit = bytes / copy bandwidth ({1e3 * row['stream_tb_s']:.0f} GB/s)" for row in rows if _has_share(row)
    ]
    caption = "; ".join([*limits[:1], filled])
    table = Table(title=_title(rows[0]), caption=caption)
    for name in (
        "context",
        "mode",
        "cache",
        "hits",
        "ms/token p50",
        "p20",
        "p80",
        "p99",
        "tokens/s",
        "MB/rank",
        "GB/s",
        "% of limit",
    ):
        table.add_column(name, justify="left" if name in ("mode", "cache") else "right")
    for row, profile in results:
        assert isinstance(profile, Profile)
        times = [f"{row['us'][name] / 1e3:.3f}" for name in ("p50", "p20", "p80", "p99")]
        read = ["-", "-", "-"]
        if _has_share(row):
            read = [f"{profile.read_bytes / 1e6:.1f}", f"{profile.bytes_per_s / 1e9:.0f}"]
            read.append(f"{row['share_of_limit']:.1%}")
        mode, forced = row["case"]["mode"], " forced" if row["case"]["forced"] else ""
        forced += " by layer" if "layer_rates" in row["case"] else ""
        hits = "-" if profile.hit_rate is None else f"{profile.hit_rate:.1%}{forced}"
        if profile.alone_share:
            hits += f", {profile.alone_share:.0%} of the steps alone"
        table.add_row(
            str(profile.context), mode, row["case"]["kv_cache"], hits, *times, f"{profile.tokens_per_s:.1f}", *read
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
