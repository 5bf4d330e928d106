"""Quality and hit rates over lambda: `python launch/evaluate.py --text books.jsonl.xz --recall 50 --rows out.jsonl`."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import math
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from rich.console import Console
from rich.table import Table

from alspec.config import EngineConfig
from alspec.errors import AlspecError, UserError, report
from alspec.launch.cli import Parser, check_writable, parse, parse_tokens
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.demo.data import RecallPrompt, recall_prompts
from alspec.runtime.engine import Engine
from alspec.runtime.faults import run_guarded
from alspec.runtime.quality import score_text
from alspec.runtime.stats import provenance

__all__ = ["main"]

EPILOG = (
    "Every figure is of the reference semantics (simulated): each verdict from both outputs, accepted A~ let through."
)


@dataclass(frozen=True)
class Quality:
    """One measured value, and each layer's share of accepted verdicts where sink and window leave something out."""

    value: float
    hit_rates: list[float]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        parser = Parser(prog="evaluate", description="Quality under speculation.", epilog=EPILOG, allow_abbrev=False)
        parser.add_argument("--text", type=Path, required=True, help=".txt, or .jsonl / .jsonl.xz with a 'text' field")
        parser.add_argument("--contexts", default="1k,8k", help="window lengths in tokens for bits per byte")
        parser.add_argument("--windows", type=int, default=16, help="windows of the longest context to score")
        parser.add_argument("--recall", type=int, default=0, help="recall prompts of the longest context")
        parser.add_argument("--records", type=Path, help="key-value retrieval cases (.jsonl.gz) to recall from as well")
        parser.add_argument("--thresholds", default="0,0.05,0.1,0.15,0.2,0.25,inf", help="lambda values")
        parser.add_argument("--rows", type=Path, help="append one JSON line for each value to this file")
        parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        config, args = parse(parser, EngineConfig, argv)
        speculation = config.speculation.model_copy(update={"mode": "simulated"})
        engine = Engine(config.model_copy(update={"speculation": speculation}))
        contexts = parse_tokens("--contexts", args.contexts)
        if args.windows < 1 or args.recall < 0:
            raise UserError("flags: expected --windows >= 1 and --recall >= 0")
        check_writable("flags: --rows", args.rows)
        thresholds = [_threshold(item) for item in args.thresholds.split(",")]
        text = _read_text(args.text)
        return run_guarded(engine.heartbeat, lambda: _evaluate(engine, args, contexts, thresholds, text))
    except AlspecError as error:
        if debug:
            traceback.print_exc()
        return report(error)


def _threshold(item: str) -> float:
    try:
        value = float(item)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UserError(f"flags: --thresholds: expected numbers >= 0 or inf, found {item!r}")
    return value


def _read_text(path: Path) -> str:
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = data.decode("utf-8")
        if ".jsonl" in path.suffixes:
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    except OSError as error:
        raise UserError(f"flags: --text: cannot read {path}: {error.strerror}; give a text file") from None
    except (lzma.LZMAError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"flags: --text: {path}: broken at {error!r}; give .txt, .jsonl or .jsonl.xz") from None
    return text


def _evaluate(engine: Engine, args: Any, contexts: list[int], thresholds: list[float], text: str) -> int:
    if engine.tokenizer is None:
        raise UserError("evaluate: random weights have no tokenizer; give a --model folder")
    longest = max(contexts)
    limit = engine.model_config.max_position_embeddings
    if longest > limit:
        raise UserError(f"flags: --contexts: {longest} is beyond the model's {limit} positions")
    ids = engine.tokenizer.encode(text, add_bos=False)
    if len(ids) < args.windows * longest:
        raise UserError(f"flags: --text: {args.windows} windows of {longest} tokens needed, {args.text} has {len(ids)}")
    tasks = _recall_tasks(engine, args, longest, text)
    engine.load(1, longest)
    table = Table(title=f"{engine.config.model or 'demo checkpoint'}, S = {engine.config.speculation.chunk_size}")
    for name in ("measure", "context", "lambda", "value", "hit rate", "hit rate per layer"):
        table.add_column(name)
    for threshold in thresholds:
        for context in contexts:
            quality = _bits_per_byte(engine, ids[: args.windows * longest], context, threshold)
            _report(engine, args, table, "bits per byte", context, threshold, quality)
        for measure, prompts in tasks.items():
            context = max(len(prompt.prompt_ids + prompt.answer_ids) for prompt in prompts)
            _report(engine, args, table, measure, context, threshold, _recall(engine, prompts, threshold))
    if engine.placement.rank == 0:
        Console(width=160).print(table)
    engine.close()
    return 0


def _recall_tasks(engine: Engine, args: Any, context: int, text: str) -> dict[str, list[RecallPrompt]]:
    """Prompts by the name of their measure."""
    tasks = {}
    if args.recall:
        core = tokenizers.Tokenizer.from_file(str((engine.config.model or DEMO_CHECKPOINT) / "tokenizer.json"))
        tasks["recall"] = recall_prompts(args.recall, context, core, text, seed=1)
    if args.records is not None:
        tasks["record recall"] = _records_prompts(engine, args.records, args.recall or 100)
    return tasks


def _records_prompts(engine: Engine, path: Path, count: int) -> list[RecallPrompt]:
    """Key-value retrieval prompts of a .jsonl.gz file with `ordered_kv_records`, `key` and `value` in each line."""
    assert engine.tokenizer is not None
    lead = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    prompts = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in itertools.islice(lines, count):
                case = json.loads(line)
                records = ", ".join(f'"{key}": "{value}"' for key, value in case["ordered_kv_records"])
                body = f'{lead}{{{records}}}\n\nKey: "{case["key"]}"\nCorresponding value:'
                answer_ids = engine.tokenizer.encode(f' "{case["value"]}"', add_bos=False)
                prompts.append(RecallPrompt(engine.tokenizer.encode(body), answer_ids, case["value"]))
    except OSError as error:
        raise UserError(f"flags: --records: cannot read {path}: {error}; give a .jsonl.gz file") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"flags: --records: {path}: broken at {error!r}") from None
    limit = engine.model_config.max_position_embeddings
    longest = max((len(prompt.prompt_ids + prompt.answer_ids) for prompt in prompts), default=0)
    if not 0 < longest <= limit:
        raise UserError(f"flags: --records: {path}: prompts of {longest} tokens; the model has {limit} positions")
    return prompts


def _bits_per_byte(engine: Engine, ids: list[int], context: int, threshold: float) -> Quality:
    """Bits per UTF-8 byte over windows of `context` tokens, BOS first; every token of a window counts."""
    assert engine.tokenizer is not None
    bos = [engine.model_config.bos_token_id] if engine.model_config.bos_token_id is not None else []
    step = context - len(bos)
    nats, num_bytes = 0.0, 0
    hits, counted = torch.zeros(engine.model_config.num_layers), 0
    for start in range(0, len(ids) - step + 1, step):
        window = ids[start : start + step]
        score = _score(engine, bos + window, threshold, 0)
        scored = window if bos else window[1:]
        nats += float(score.nll.double().sum())
        num_bytes += len(engine.tokenizer.decode(scored).encode("utf-8"))
        meaningful = score.hits[:, _first_meaningful(engine) :]
        hits, counted = hits + meaningful.sum(1), counted + meaningful.shape[1]
    return Quality(nats / math.log(2) / num_bytes, (hits / max(counted, 1)).tolist())


def _recall(engine: Engine, prompts: list[RecallPrompt], threshold: float) -> Quality:
    """Share of prompts whose whole answer greedy decoding states; the prompt is read with full attention."""
    right, hits, counted = 0, torch.zeros(engine.model_config.num_layers), 0
    for prompt in prompts:
        start = len(prompt.prompt_ids)
        score = _score(engine, prompt.prompt_ids + prompt.answer_ids, threshold, start)
        # Greedy decoding follows the answer exactly where every token of it is the greedy one given those before.
        right += score.predicted[start - 1 :].tolist() == prompt.answer_ids
        hits, counted = hits + score.hits[:, start:].sum(1), counted + len(prompt.answer_ids)
    return Quality(right / len(prompts), (hits / counted).tolist())


def _score(engine: Engine, ids: list[int], threshold: float, first_speculated: int) -> Any:
    assert engine.transport is not None
    chunk_size = engine.config.speculation.chunk_size
    return score_text(engine.model, engine.transport, ids, threshold, chunk_size, first_speculated)


def _first_meaningful(engine: Engine) -> int:
    """The first position whose guess leaves out a token: before it A~ is A, and every layer hits."""
    return 2 * engine.config.speculation.chunk_size + 63


def _report(
    engine: Engine, args: Any, table: Table, measure: str, context: int, threshold: float, quality: Quality
) -> None:
    if engine.placement.rank != 0:
        return
    per_layer = " ".join(f"{rate:.2f}" for rate in quality.hit_rates)
    mean = sum(quality.hit_rates) / len(quality.hit_rates)
    table.add_row(measure, str(context), f"{threshold:g}", f"{quality.value:.4f}", f"{mean:.3f}", per_layer)
    if args.rows is None:
        return
    cuda = engine.device.type == "cuda"
    row = {
        "bench": "quality",
        "impl": "alspec.simulated",
        "case": {
            "model": str(engine.config.model or "demo"),
            "measure": measure,
            "context": context,
            "threshold": str(threshold),
            "chunk_size": engine.config.speculation.chunk_size,
            "samples": args.windows if measure == "bits per byte" else args.recall or 100,
            "dtype": engine.dtype_name,
        },
        "value": quality.value,
        "unit": measure,
        "hit_rate": mean,
        "hit_rate_per_layer": [round(rate, 4) for rate in quality.hit_rates],
        **provenance(engine.placement.world_size if cuda else 0, shlex.join(["launch/evaluate.py", *sys.argv[1:]])),
    }
    with args.rows.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
