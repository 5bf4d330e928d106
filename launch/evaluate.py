"""Measure quality over codecs, softmaxes and lambda: `python launch/evaluate.py --text books.jsonl.xz --recall 50`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import itertools
import math
import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from alspec.config import QUANTISED_CODECS, EvaluateConfig
from alspec.errors import UserError
from alspec.kernels.kv_codec.formats import rotates_values
from alspec.launch.evaluation.evaluate_drafts import evaluate_drafts
from alspec.launch.evaluation.evaluate_tasks import (
    ANSWER,
    Quality,
    Task,
    answer_tasks,
    answered,
    first_lossy_position,
    needle_tasks,
    read_text,
    recall_task,
    record_needle_tasks,
    records_task,
    text_task,
    too_short,
)
from alspec.launch.plots.plot_quality import draw, threshold_name
from alspec.launch.terminal.display import StatusLine, why_no_hit_rate
from alspec.launch.terminal.flags import Parser, check_picture, check_positions, check_writable, notify, parse_command
from alspec.launch.terminal.output import append_rows, exit_code, result_console, writing
from alspec.models.checkpoint.source import model_name
from alspec.runtime.cache.codecs import check_codec, fit_heads
from alspec.runtime.decode.decode_step import WARM_UP_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.teacher_forced import CacheSetting, has_turboquant_keys
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.provenance import provenance

__all__ = ["main"]

EPILOG = (
    "All values are measured with the reference semantics (simulated): each verdict compares A~ with A, an accepted A~ "
    "replaces A, and keys and values are those of the cache. The ablations of TurboAttention: "
    "Table 3 is --codecs bf16,turbo4 --block-sizes 32,64,128; Table 4 is --codecs bf16,turbo4 --softmaxes exact,sas; "
    "Figure 7b is --codecs turbo-mixed --selectors gap_std,entropy,min_max,variation --low-heads 0,1,2,3,4. "
    "The ablations of TurboQuant: --codecs turboquant3 with --protect 0,2, --qjl off,gaussian,orthogonal, "
    "--norm-corrections on,off, or --value-quantisers codebook,uniform. "
    "--draft measures drafts instead: tokens a step, and the share of drafts accepted in each place, when the model "
    "continues windows of --text. "
    "Only --baselines uses --threshold: the hit rates at this lambda choose the fixed layers."
)
CONTEXTS = (1024, 8192)  # without --contexts
# In the baseline of fixed layers, a layer always speculates if its measured hit rate is above this (ALSpec, Figure 2).
FIXED_LAYER_HIT_RATE = 0.8


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(
        prog="evaluate",
        description="Quality under speculation and quantisation.",
        epilog=EPILOG,
    )
    with exit_code(argv) as outcome:
        config, args = parse_command(parser, EvaluateConfig, argv, outcome)
        outcome.code = _run(config, args.command)
    return outcome.code


def _run(config: EvaluateConfig, command: str) -> int:
    if config.text is None:
        raise UserError("flags: --text: none given; give a .txt, .jsonl or .jsonl.xz file")
    if config.max_context is not None:
        raise UserError("flags: --max-context: lengths come from --contexts; leave it out")
    recall_blocks = EvaluateConfig().speculation.recall_blocks
    if config.speculation.predictor == "window" and config.speculation.recall_blocks != recall_blocks:
        raise UserError("flags: --recall-blocks: --predictor window recalls no blocks; leave one of them out")
    if config.draft != "off":
        return evaluate_drafts(config, command)
    _check(config)
    caches = _caches(config)
    text = read_text(config.text)
    # Scores do not use the engine's own cache and mode: the content of each codec's cache is computed from keys and
    # values of the text. The answers to compare with are decoded by full attention.
    speculation = config.speculation.model_copy(update={"mode": "off" if config.answers else "simulated"})
    exact = {"kv_cache": "bf16", "kv_protect": 0, "softmax": "exact"}
    engine = Engine(config.model_copy(update={"speculation": speculation, **exact}))
    contexts = _contexts(config, engine)
    _check_baselines(config, contexts[-1])
    with guarded(engine.heartbeat, "Lower --contexts, or use more ranks"):
        return _evaluate(engine, config, _tasks(engine, config, contexts, text), caches, command)


def _check(config: EvaluateConfig) -> None:
    """Refuse mistakes that can be found without the model."""
    if config.speculation.mode not in ("auto", "simulated"):
        raise UserError("flags: --speculation: evaluate is always simulated; leave it out")
    if not (config.windows or config.recall or config.needles or config.records or config.answers):
        raise UserError("flags: nothing to measure; give one of --windows, --answers, --recall, --needles or --records")
    if config.baselines and not config.windows:
        raise UserError("flags: --baselines takes its fixed layers from bits per byte; give --windows")
    _check_effects(config)
    check_picture("flags: --plot", config.plot)
    check_writable("flags: --rows", config.rows)


def _check_effects(config: EvaluateConfig) -> None:
    """Refuse settings that are not the default and would change nothing."""
    codecs = config.codecs or (config.kv_cache,)
    is_quantised = set(codecs) != {"bf16"}
    counted = config.recall_counts is None, "--recall-counts names the numbers of blocks; add it there"
    mixed = "turbo-mixed" in codecs, "only turbo-mixed has heads of 2 bits; add it to --codecs"
    protected = is_quantised, "a bf16 cache has no quantised layers; add another one to --codecs"
    has_keys, has_values = (any(has(codec) for codec in codecs) for has in (has_turboquant_keys, rotates_values))
    has_norm = has_keys or (has_values and "codebook" in config.value_quantisers)
    effects = {
        "threshold": (config.baselines, "only --baselines needs one; give --thresholds"),
        "kv_cache": (config.codecs is None, "--codecs names the caches to measure; add it there"),
        "softmax": (config.softmaxes is None, "--softmaxes names those to measure; add it there"),
        "block_sizes": (is_quantised, "a bf16 cache has no blocks; add another one to --codecs"),
        "selectors": mixed,
        "low_heads": mixed,
        "kv_protect": protected if config.protect is None else (False, "--protect names the numbers; add it there"),
        "protect": protected,
        "norm_corrections": (has_norm, "only TurboQuant's codes have a norm; add a turboquant codec to --codecs"),
        "qjl": (has_keys, "only TurboQuant's keys have a sketch; add a turboquant codec to --codecs"),
        "value_quantisers": (has_values, "only for TurboQuant's values; add a turboquant or hybrid codec to --codecs"),
        "draft_tokens": (False, "only --draft has drafts; give one of its drafters"),
        "temperatures": (False, "only --draft generates at a temperature; give one of its drafters"),
        "depths": (config.needles > 0, "only needles have a depth; give --needles"),
        "predictor": counted,
        "recall_blocks": counted,
    }
    given, default = (vars(one) | vars(one.speculation) for one in (config, EvaluateConfig()))
    for name, (has_effect, reason) in effects.items():
        if given[name] != default[name] and not has_effect:
            raise UserError(f"flags: --{name.replace('_', '-')}: {reason}, or leave it out")


def _contexts(config: EvaluateConfig, engine: Engine) -> list[int]:
    """Lengths to measure, in ascending order; by default those of `CONTEXTS` that fit, or the model's own length."""
    if config.contexts is not None:
        return sorted(set(config.contexts))
    limit = engine.model_config.longest_context
    contexts = [context for context in CONTEXTS if context <= limit] or [limit]
    if contexts != list(CONTEXTS) and engine.placement.rank == 0:
        measured = ", ".join(map(str, contexts))
        notify([f"the model takes {limit} tokens: measuring contexts of {measured} tokens; --contexts names others"])
    return contexts


def _check_baselines(config: EvaluateConfig, longest: int) -> None:
    """Refuse --baselines if no context is long enough for hit rates, which determine the fixed layers."""
    chunk_size = config.speculation.chunk_size
    if config.baselines and longest <= first_lossy_position(chunk_size):
        raise UserError(
            f"flags: --baselines takes its fixed layers from hit rates; in {longest} tokens A~ leaves out none; "
            f"give --contexts beyond {first_lossy_position(chunk_size)}"
        )


def _caches(config: EvaluateConfig) -> list[CacheSetting]:
    """Every combination of the flags, each once. Settings that do not affect a codec stay at their defaults."""
    codecs = config.codecs or (config.kv_cache,)
    softmaxes = config.softmaxes or (config.softmax,)
    settings = itertools.product(
        codecs,
        softmaxes,
        config.block_sizes,
        config.selectors,
        config.low_heads or (None,),
        config.protect or (config.kv_protect,),
        (correction == "on" for correction in config.norm_corrections),
        config.qjl,
        config.value_quantisers,
        config.recall_counts or (config.speculation.recalled,),
    )
    default = CacheSetting()
    caches = []
    for codec, softmax, block, selector, low, protect, correction, sketch, quantiser, recalled in settings:
        is_mixed, is_exact = codec == "turbo-mixed", codec == "bf16"
        has_keys, has_values = has_turboquant_keys(codec), rotates_values(codec)
        has_norm = has_keys or (has_values and quantiser == default.value_quantiser)
        caches.append(
            CacheSetting(
                codec,
                softmax,
                default.block_size if is_exact else block,
                selector if is_mixed else default.selector,
                low if is_mixed else None,
                default.protect if is_exact else protect,
                correction if has_norm else default.norm_correction,
                sketch if has_keys else default.qjl,
                quantiser if has_values else default.value_quantiser,
                recalled,
            )
        )
    return list(dict.fromkeys(caches))


def _tasks(engine: Engine, config: EvaluateConfig, contexts: list[int], text: str) -> list[Task]:
    tokenizer = engine.text_tokenizer("give a --model folder", "evaluate")
    longest = max(contexts)
    check_positions(longest, engine.model_config)
    tasks = []
    count = max(config.windows, config.answers)
    ids = tokenizer.encode(text, add_bos=False) if count else []
    if len(ids) < count * longest:
        raise too_short(config, count, longest, len(ids))
    if config.windows:
        needed = config.windows * longest
        begin = tokenizer.encode("")  # each window begins like a prompt
        tasks += [text_task(begin, ids[:needed], context) for context in contexts]
    if config.answers:
        tasks += answer_tasks(engine, ids, contexts, config.answers)
    if config.recall:
        tasks.append(recall_task(engine, text, longest, config.recall))
    if config.records is not None:
        tasks.append(records_task(engine, config.records, config.recall or 100))
    if config.needles:
        tasks += needle_tasks(engine, text, contexts, config.depths, config.needles)
    if config.needles and config.records is not None:
        tasks += record_needle_tasks(engine, config.records, contexts, config.depths, config.needles)
    return tasks


def _evaluate(
    engine: Engine, config: EvaluateConfig, tasks: list[Task], caches: list[CacheSetting], command: str
) -> int:
    _, num_kv_heads = engine.model_config.local_heads(engine.placement.tp_size)
    if max((cache.low_heads or 0 for cache in caches), default=0) > num_kv_heads:
        raise UserError(f"flags: --low-heads: a rank has {num_kv_heads} KV heads")
    if num_kv_heads == 1 and any(cache.codec == "turbo-mixed" for cache in caches):
        raise UserError("flags: --codecs: turbo-mixed needs two KV heads on each rank; run fewer ranks")
    num_layers, most = engine.model_config.num_layers, max(cache.protect for cache in caches)
    if 2 * most >= num_layers and most:
        raise UserError(f"flags: --protect: expected less than half of the model's {num_layers} layers, found {most}")
    for codec in dict.fromkeys(cache.codec for cache in caches if cache.codec in QUANTISED_CODECS):
        check_codec(codec, fit_heads(codec, engine.model_config), engine.placement.tp_size)
    is_first = engine.placement.rank == 0
    with StatusLine(is_first) as status:
        status.show("loading weights")
        engine.load(1, WARM_UP_TOKENS)  # the scoring of texts does not use its cache
        if config.answers:
            status.show("answers by full attention")
        tasks = [answered(engine, task) if task.measure == ANSWER else task for task in tasks]
        rows = _measure(engine, config, tasks, caches, command, status)
    if is_first:
        result_console(config.rows, width=180).print(_table(engine, rows))
        if config.plot is not None:
            with writing(config.plot):
                draw(config.plot, rows)
    engine.close()
    return 0


def _measure(
    engine: Engine,
    config: EvaluateConfig,
    tasks: list[Task],
    caches: list[CacheSetting],
    command: str,
    status: StatusLine,
) -> list[dict[str, Any]]:
    """Measure a row for each task, cache and lambda, and for the fixed layers of `--baselines`."""
    num_layers, base = engine.model_config.num_layers, engine.config.speculation.threshold
    thresholds = sorted({*config.thresholds, base, math.inf}) if config.baselines else config.thresholds
    rows: list[dict[str, Any]] = []

    def measure(task: Task, cache: CacheSetting, under: dict[str, list[float]]) -> list[Quality]:
        status.show(f"{task.measure}, {len(task.texts)} of {task.context} tokens, {cache.label}")
        qualities = task.run(engine, list(under.values()), cache)
        measured = [
            _row(engine, task, cache, name, quality, command) for name, quality in zip(under, qualities, strict=True)
        ]
        rows.extend(measured)
        if engine.placement.rank == 0:
            append_rows(config.rows, measured)
        return qualities

    texts, prompts = ([task for task in tasks if (task.answers is None) == is_text] for is_text in (True, False))
    for cache in caches:
        under = {str(threshold): [threshold] * num_layers for threshold in thresholds}
        for task in texts:
            qualities = dict(zip(under, measure(task, cache, under), strict=True))
        if config.baselines:  # fixed layers come from the longest context, which is measured last
            hit_rates = qualities[str(base)].hit_rates
            assert hit_rates is not None  # `_check_baselines` refused contexts without hit rates
            fixed = {"fixed": [math.inf if rate > FIXED_LAYER_HIT_RATE else 0.0 for rate in hit_rates]}
            for task in texts:
                measure(task, cache, fixed)
            under |= fixed
        for task in prompts:
            measure(task, cache, under)
    return rows


def _row(
    engine: Engine, task: Task, cache: CacheSetting, threshold: str, quality: Quality, command: str
) -> dict[str, Any]:
    rates = quality.hit_rates
    return {
        "bench": "quality",
        "impl": "alspec.simulated",
        "case": {
            "model": model_name(engine.config),
            "measure": task.measure,
            "context": task.context,
            "depth": task.depth,
            "cache": cache.label,
            **asdict(cache),
            "threshold": threshold,
            "chunk_size": engine.config.speculation.chunk_size,
            "samples": len(task.texts),
            "dtype": engine.dtype_name,
            **({"weights": name} if (name := engine.model_config.weights_in_rows) else {}),
            **({"lm_head": head} if (head := engine.model_config.lm_head) != "auto" else {}),
        },
        "value": quality.value,
        "unit": task.measure,
        **({"details": quality.details} if quality.details else {}),
        "hit_rate": None if rates is None else sum(rates) / len(rates),
        "hit_rate_per_layer": None if rates is None else [round(rate, 4) for rate in rates],
        **provenance(engine.placement.world_size if engine.device.type == "cuda" else 0, command),
    }


def _table(engine: Engine, rows: list[dict[str, Any]]) -> Table:
    """A row for each cache and lambda, a column for each measure and context. Needles are averaged over depths."""
    lines: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        case = row["case"]
        line = lines.setdefault((case["cache"], threshold_name(row)), {})
        line.setdefault(f"{case['measure']} {case['context']}", []).append(row)
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    name = engine.config.model or "demo checkpoint"
    table = Table(title=f"{name}, S = {engine.config.speculation.chunk_size}, {engine.weights_name}")
    # Show the hit rate of the longest text; if no text is scored, that of the first task.
    shown = max((column for column in columns if column.startswith("bits")), default=columns[0], key=columns.index)
    for column in ("cache", "lambda", *columns, f"hit rate, {shown}"):
        table.add_column(column)
    for (cache, threshold), line in lines.items():
        values = [f"{sum(row['value'] for row in line[column]) / len(line[column]):.4f}" for column in columns]
        hit_rate = line[shown][0]["hit_rate"]
        table.add_row(cache, threshold, *values, "-" if hit_rate is None else f"{hit_rate:.3f}")
    if any(line[shown][0]["hit_rate"] is None for line in lines.values()):
        first = first_lossy_position(engine.config.speculation.chunk_size)
        table.caption = f"hit rate: {why_no_hit_rate(first + 1)}"
    return table


if __name__ == "__main__":
    sys.exit(main())
