"""Quality over cache codecs, softmaxes and lambda: `python launch/evaluate.py --text books.jsonl.xz --recall 50`."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
import traceback
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alspec.config import EngineConfig
from alspec.errors import AlspecError, UserError, report
from alspec.kernels.flashq import SELECTORS
from alspec.launch.cli import Parser, check_picture, check_writable, parse, parse_tokens, print_config
from alspec.launch.evaluate_tasks import (
    Quality,
    Task,
    first_guess,
    needle_tasks,
    read_text,
    recall_task,
    record_needle_tasks,
    records_task,
    text_task,
)
from alspec.launch.plot_quality import draw, threshold_name
from alspec.runtime.decoded_attention import CODECS, SOFTMAXES, CacheSetting
from alspec.runtime.engine import Engine
from alspec.runtime.faults import run_guarded
from alspec.runtime.placement import Placement
from alspec.runtime.stats import provenance

__all__ = ["main"]

EPILOG = (
    "Every figure is of the reference semantics (simulated): each verdict from both outputs, accepted A~ let through, "
    "keys and values as the cache holds them. The ablations of TurboAttention: Table 3 is --codecs bf16,turbo4 "
    "--block-sizes 32,64,128; Table 4 is --codecs bf16,turbo4 --softmaxes exact,sas; Figure 7b is --codecs turbo-mixed "
    "--selectors gap_std,entropy,min_max,variation --low-heads 0,1,2,3,4."
)
# Layers whose measured hit rate is above this always speculate in the baseline of fixed layers (ALSpec, Figure 2).
FIXED_LAYER_HIT_RATE = 0.8


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        parser = Parser(
            prog="evaluate",
            description="Quality under speculation and quantisation.",
            epilog=EPILOG,
            allow_abbrev=False,
        )
        _add_flags(parser)
        config, args = parse(parser, EngineConfig, argv)
        if args.print_config:
            if Placement.from_environment().rank == 0:
                print_config(config)
            return 0
        if config.speculation.mode not in ("auto", "simulated"):
            raise UserError("flags: --speculation: evaluate is always simulated; leave it out")
        if config.max_context is not None:
            raise UserError("flags: --max-context: lengths come from --contexts; leave it out")
        contexts = sorted(set(parse_tokens("--contexts", args.contexts)))
        thresholds = _numbers("--thresholds", args.thresholds, math.inf)
        depths = _numbers("--depths", args.depths, 1.0)
        caches = _caches(config, args)
        _check(args)
        _check_baselines(args, contexts[-1], config.speculation.chunk_size)
        text = read_text(args.text)
        # The runtime's own cache is not used: what each codec holds is computed from the keys and values of the text.
        speculation = config.speculation.model_copy(update={"mode": "simulated"})
        engine = Engine(config.model_copy(update={"speculation": speculation, "kv_cache": "bf16", "softmax": "exact"}))

        def evaluate() -> int:
            tasks = _tasks(engine, args, contexts, depths, text)
            return _evaluate(engine, args, tasks, thresholds, caches)

        return run_guarded(engine.heartbeat, evaluate)
    except AlspecError as error:
        if debug:
            traceback.print_exc()
        return report(error)


def _add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--text", type=Path, required=True, help=".txt, or .jsonl / .jsonl.xz with a 'text' field")
    add("--contexts", default="1k,8k", help="lengths in tokens, of windows for bits per byte and of needle prompts")
    add("--windows", type=int, default=16, help="windows of the longest context to score; 0: no bits per byte")
    add("--recall", type=int, default=0, help="recall prompts of the longest context, in the demo checkpoint's form")
    add("--records", type=Path, help="key-value retrieval cases (.jsonl.gz) to recall from as well")
    add(
        "--needles",
        type=int,
        default=0,
        help="prompts, likewise, for each context and depth of a needle, and of a pair of --records",
    )
    add("--depths", default="0,0.25,0.5,0.75,1", help="where it stands, 0 to 1")
    add("--thresholds", default="0,0.05,0.1,0.15,0.2,0.25,inf", help="lambda values")
    add("--baselines", action="store_true", help="measure sink and window in all layers and in fixed layers as well")
    add("--codecs", help=f"what the cache holds: {', '.join(CODECS)} (default: --kv-cache)")
    add("--softmaxes", help=f"{', '.join(SOFTMAXES)} (default: --softmax)")
    add("--block-sizes", default="64", help="tokens of a quantised block")
    add("--selectors", default=SELECTORS[0], help=f"of turbo-mixed's 2-bit heads: {', '.join(SELECTORS)}")
    add("--low-heads", help="how many heads turbo-mixed holds at 2 bits, such as 0,1,2 (default: half)")
    add("--rows", type=Path, help="append one JSON line for each value to this file")
    add("--plot", type=Path, help="picture to write: needles over context and depth, hit rates of layers over lambda")
    add("--debug", action="store_true", help="show the traceback of an error")


def _check(args: Namespace) -> None:
    if min(args.windows, args.recall, args.needles) < 0:
        raise UserError("flags: expected --windows, --recall and --needles >= 0")
    if not (args.windows or args.recall or args.needles or args.records):
        raise UserError("flags: nothing to measure; give one of --windows, --recall, --needles or --records")
    if args.baselines and not args.windows:
        raise UserError("flags: --baselines takes its fixed layers from bits per byte; give --windows")
    check_picture("flags: --plot", args.plot)
    check_writable("flags: --rows", args.rows)


def _check_baselines(args: Namespace, longest: int, chunk_size: int) -> None:
    """Whether there are hit rates to take the fixed layers from."""
    if args.baselines and longest <= first_guess(chunk_size):
        raise UserError(
            f"flags: --baselines takes its fixed layers from hit rates; in {longest} tokens no guess leaves out one, "
            f"give --contexts beyond {first_guess(chunk_size)}"
        )


def _numbers(flag: str, text: str, most: float) -> list[float]:
    """Comma-separated numbers from 0 to `most`."""
    values = []
    for item in text.split(","):
        try:
            values.append(float(item))
        except ValueError:
            values.append(math.nan)
        if not 0 <= values[-1] <= most:
            expected = "numbers >= 0 or inf" if math.isinf(most) else f"numbers from 0 to {most:g}"
            raise UserError(f"flags: {flag}: expected {expected}, found {item!r}")
    return values


def _whole(flag: str, item: str) -> int:
    if not item.isdigit():
        raise UserError(f"flags: {flag}: expected whole numbers separated by commas, found {item!r}")
    return int(item)


def _caches(config: EngineConfig, args: Namespace) -> list[CacheSetting]:
    """Every combination of the flags, without what a codec does not depend on."""

    def names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
        unknown = next((name for name in text.split(",") if name not in known), None)
        if unknown is not None:
            raise UserError(f"flags: {flag}: expected some of {', '.join(known)}, found {unknown!r}")
        return text.split(",")

    codecs = names("--codecs", args.codecs or config.kv_cache, CODECS)
    softmaxes = names("--softmaxes", args.softmaxes or config.softmax, SOFTMAXES)
    selectors = names("--selectors", args.selectors, SELECTORS)
    block_sizes = parse_tokens("--block-sizes", args.block_sizes)
    low_heads = (
        [None] if args.low_heads is None else [_whole("--low-heads", item) for item in args.low_heads.split(",")]
    )
    default = CacheSetting()
    caches = []
    for codec, softmax, block, selector, low in itertools.product(codecs, softmaxes, block_sizes, selectors, low_heads):
        is_mixed = codec == "turbo-mixed"
        caches.append(
            CacheSetting(
                codec,
                softmax,
                default.block_size if codec == "bf16" else block,
                selector if is_mixed else default.selector,
                low if is_mixed else None,
            )
        )
    return list(dict.fromkeys(caches))


def _tasks(engine: Engine, args: Namespace, contexts: list[int], depths: list[float], text: str) -> list[Task]:
    if engine.tokenizer is None:
        raise UserError("evaluate: random weights have no tokenizer; give a --model folder")
    longest = max(contexts)
    limit = engine.model_config.max_position_embeddings
    if longest > limit:
        raise UserError(f"flags: --contexts: {longest} is beyond the model's {limit} positions")
    tasks = []
    if args.windows:
        ids = engine.tokenizer.encode(text, add_bos=False)
        needed = args.windows * longest
        if len(ids) < needed:
            raise UserError(
                f"flags: --text: {args.windows} windows of {longest} tokens needed, {args.text} has {len(ids)}"
            )
        tasks += [text_task(engine, ids[:needed], context) for context in contexts]
    if args.recall:
        tasks.append(recall_task(engine, text, longest, args.recall))
    if args.records is not None:
        tasks.append(records_task(engine, args.records, args.recall or 100))
    if args.needles:
        tasks += needle_tasks(engine, text, contexts, depths, args.needles)
    if args.needles and args.records is not None:
        tasks += record_needle_tasks(engine, args.records, contexts, depths, args.needles)
    return tasks


def _evaluate(
    engine: Engine, args: Namespace, tasks: list[Task], thresholds: list[float], caches: list[CacheSetting]
) -> int:
    num_kv_heads = engine.model_config.num_kv_heads // engine.placement.tp_size
    if max((cache.low_heads or 0 for cache in caches), default=0) > num_kv_heads:
        raise UserError(f"flags: --low-heads: a rank has {num_kv_heads} KV heads")
    if num_kv_heads == 1 and any(cache.codec == "turbo-mixed" for cache in caches):
        raise UserError("flags: --codecs: turbo-mixed needs two KV heads on each rank; run fewer ranks")
    engine.load(1, max(task.context for task in tasks))
    num_layers, base = engine.model_config.num_layers, engine.config.speculation.threshold
    if args.baselines:
        thresholds = sorted({*thresholds, base, math.inf})
    rows: list[dict[str, Any]] = []

    def measure(task: Task, cache: CacheSetting, under: dict[str, list[float]]) -> list[Quality]:
        qualities = task.run(engine, list(under.values()), cache)
        measured = [_row(engine, task, cache, name, quality) for name, quality in zip(under, qualities, strict=True)]
        rows.extend(measured)
        if args.rows is not None and engine.placement.rank == 0:
            with args.rows.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in measured)
        return qualities

    texts, prompts = ([task for task in tasks if (task.answers is None) == is_text] for is_text in (True, False))
    for cache in caches:
        under = {str(threshold): [threshold] * num_layers for threshold in thresholds}
        for task in texts:
            qualities = dict(zip(under, measure(task, cache, under), strict=True))
        if args.baselines:  # fixed layers are those of the longest context, which comes last
            hit_rates = qualities[str(base)].hit_rates
            assert hit_rates is not None  # _check_baselines
            fixed = {"fixed": [math.inf if rate > FIXED_LAYER_HIT_RATE else 0.0 for rate in hit_rates]}
            for task in texts:
                measure(task, cache, fixed)
            under |= fixed
        for task in prompts:
            measure(task, cache, under)
    if engine.placement.rank == 0:
        Console(width=180).print(_table(engine, rows))
        if args.plot is not None:
            draw(args.plot, rows)
    engine.close()
    return 0


def _row(engine: Engine, task: Task, cache: CacheSetting, threshold: str, quality: Quality) -> dict[str, Any]:
    rates = quality.hit_rates
    return {
        "bench": "quality",
        "impl": "alspec.simulated",
        "case": {
            "model": str(engine.config.model or "demo"),
            "measure": task.measure,
            "context": task.context,
            "depth": task.depth,
            "cache": cache.label,
            **asdict(cache),
            "threshold": threshold,
            "chunk_size": engine.config.speculation.chunk_size,
            "samples": len(task.texts),
            "dtype": engine.dtype_name,
        },
        "value": quality.value,
        "unit": task.measure,
        "hit_rate": None if rates is None else sum(rates) / len(rates),
        "hit_rate_per_layer": None if rates is None else [round(rate, 4) for rate in rates],
        **provenance(
            engine.placement.world_size if engine.device.type == "cuda" else 0,
            shlex.join(["launch/evaluate.py", *sys.argv[1:]]),
        ),
    }


def _table(engine: Engine, rows: list[dict[str, Any]]) -> Table:
    """A line for each cache and lambda, a column for each measure and context; needles are averaged over depths."""
    lines: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        case = row["case"]
        line = lines.setdefault((case["cache"], threshold_name(row)), {})
        line.setdefault(f"{case['measure']} {case['context']}", []).append(row)
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    name = engine.config.model or "demo checkpoint"
    table = Table(title=f"{name}, S = {engine.config.speculation.chunk_size}, {engine.dtype_name}")
    # Hits are those of the longest text, or of the first task where no text is scored.
    shown = max((column for column in columns if column.startswith("bits")), default=columns[0], key=columns.index)
    for column in ("cache", "lambda", *columns, f"hit rate, {shown}"):
        table.add_column(column)
    for (cache, threshold), line in lines.items():
        values = [f"{sum(row['value'] for row in line[column]) / len(line[column]):.4f}" for column in columns]
        hit_rate = line[shown][0]["hit_rate"]
        table.add_row(cache, threshold, *values, "-" if hit_rate is None else f"{hit_rate:.3f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
