"""What `launch/evaluate.py --draft` measures: how many drafts are accepted when the model continues a text.

Prompts are cut out of `--text`. The model continues each by real rounds, greedily and at a temperature; they draft also
where it does not pay. Then plain steps continue the same prompts. Where the bits of a product depend on its rows, texts
may part when two tokens are nearly as likely: the rows tell how many do, and how near the tokens are.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from alspec.config import EvaluateConfig, SamplingConfig
from alspec.errors import UserError
from alspec.launch.evaluation.evaluate_tasks import read_text, too_short
from alspec.launch.terminal.display import StatusLine
from alspec.launch.terminal.flags import check_positions, check_writable, notify
from alspec.launch.terminal.output import append_rows, result_console
from alspec.models.checkpoint.source import drafter_name, model_name
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.provenance import provenance
from alspec.runtime.profiling.stats import draft_summary

__all__ = ["NEW_TOKENS", "evaluate_drafts"]

NEW_TOKENS = 64  # tokens by which each prompt is continued; a context counts them
CONTEXTS = (1024, 8192)  # without --contexts
Row = dict[str, Any]
HINT = "Lower --contexts, or use more ranks"
UNUSED = (
    "answers", "recall", "records", "needles", "baselines", "codecs", "softmaxes", "block_sizes", "selectors",
    "low_heads", "protect", "norm_corrections", "qjl", "value_quantisers", "recall_counts", "depths", "thresholds",
    "plot",
)  # fmt: skip


def evaluate_drafts(config: EvaluateConfig, command: str) -> int:
    """Measure every context at every temperature; returns the exit code."""
    _check(config)
    assert config.text is not None
    text = read_text(config.text)
    speculation = config.speculation.model_copy(update={"mode": "off"})
    engine = Engine(config.model_copy(update={"speculation": speculation, "draft_always": True}))
    contexts = _contexts(config, engine)
    prompts = _prompts(config, engine, contexts, text)
    is_first = engine.placement.rank == 0
    rows, texts = [], []
    with guarded(engine.heartbeat, HINT), StatusLine(is_first) as status:
        status.show("loading weights")
        engine.load(1, contexts[-1])
        notify(engine.take_notices() if is_first else [])
        for context in contexts:
            for temperature in config.temperatures:
                status.show(f"drafts, {config.windows} windows of {context} tokens, temperature {temperature:g}")
                row, answers = _measure(config, engine, context, temperature, prompts[context], command)
                rows.append(row)
                texts.append(answers)
        engine.close()
        status.show("plain steps")
        _compare(config, rows, texts, prompts)
        status.clear()
    if is_first:
        append_rows(config.rows, rows)
        result_console(config.rows, width=140).print(_table(config, engine, rows))
    return 0


def _check(config: EvaluateConfig) -> None:
    """Refuse mistakes that can be found without the model."""
    default = EvaluateConfig()
    for name in UNUSED:
        if getattr(config, name) != getattr(default, name):
            raise UserError(f"flags: --{name.replace('_', '-')}: not measured with --draft; leave one of them out")
    if config.speculation.mode not in ("auto", "off"):
        raise UserError("flags: --speculation: drafts are measured without; leave it out")
    if not config.windows:
        raise UserError("flags: --windows: --draft measures windows of the text; give 1 or more")
    check_writable("flags: --rows", config.rows)


def _contexts(config: EvaluateConfig, engine: Engine) -> list[int]:
    """Lengths in ascending order; by default those of `CONTEXTS` that the model takes, or its own length."""
    limit = engine.model_config.longest_context
    contexts = sorted(set(config.contexts or [each for each in CONTEXTS if each <= limit] or [limit]))
    check_positions(contexts[-1], engine.model_config)
    engine.check_prompts([[0]], [contexts[-1] - 1])
    if contexts[0] <= 2 * NEW_TOKENS:
        raise UserError(
            f"flags: --contexts: expected more than {2 * NEW_TOKENS} tokens, as {NEW_TOKENS} of them are generated, "
            f"found {contexts[0]}"
        )
    return contexts


def _prompts(config: EvaluateConfig, engine: Engine, contexts: list[int], text: str) -> dict[int, list[list[int]]]:
    """For each context, prompts from places spread over the text."""
    tokenizer = engine.text_tokenizer("give a --model folder", "evaluate")
    begin, ids = tokenizer.encode(""), tokenizer.encode(text, add_bos=False)
    longest = contexts[-1]
    if len(ids) < config.windows * longest:
        raise too_short(config, config.windows, longest, len(ids))
    stride = len(ids) // config.windows
    starts = [window * stride for window in range(config.windows)]
    return {
        context: [begin + ids[start : start + context - NEW_TOKENS - len(begin)] for start in starts]
        for context in contexts
    }


def _measure(
    config: EvaluateConfig, engine: Engine, context: int, temperature: float, prompts: list[list[int]], command: str
) -> tuple[Row, list[list[int]]]:
    """The row of a context and a temperature, and the text of each window."""
    steps: list[list[tuple[int, int]]] = []
    texts = []
    for seed, prompt in enumerate(prompts):
        texts.append([token.token_id for token in engine.stream(prompt, _sampling(temperature, seed))])
        steps += engine.generation.rounds
    summary = draft_summary(steps)
    assert summary is not None
    row = {
        "bench": "drafts",
        "impl": "alspec.rounds",
        "case": {
            "model": model_name(engine.config),
            "drafter": drafter_name(config),
            "draft_tokens": config.draft_tokens,
            "context": context,
            "temperature": temperature,
            "kv_cache": config.kv_cache,
            "kv_protect": config.kv_protect,
            "chunk_size": config.speculation.chunk_size,
            **({"recall_blocks": config.speculation.recalled} if config.draft == "self" else {}),
            "samples": len(prompts),
            "new_tokens": NEW_TOKENS,
            "dtype": engine.dtype_name,
            **({"weights": name} if (name := engine.model_config.weights_in_rows) else {}),
            **({"draft_weights": name} if (name := engine.draft_weights_name) else {}),
        },
        "value": summary["tokens_per_step"],
        "unit": "tokens a step",
        "details": summary,
        **provenance(engine.placement.world_size if engine.device.type == "cuda" else 0, command),
    }
    return row, texts


def _sampling(temperature: float, seed: int) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature, seed=seed)


def _compare(
    config: EvaluateConfig, rows: list[Row], texts: list[list[list[int]]], prompts: dict[int, list[list[int]]]
) -> None:
    """Add to each row how its texts differ from those of plain steps."""
    plain = {"draft": "off", "draft_always": False, "draft_weights": "auto"}
    speculation = config.speculation.model_copy(update={"mode": "off"})
    engine = Engine(config.model_copy(update=plain | {"speculation": speculation}))
    with guarded(engine.heartbeat, HINT):
        engine.load(1, max(prompts))
        for row, answers in zip(rows, texts, strict=True):
            row["details"] |= _differences(engine, row["case"], prompts[row["case"]["context"]], answers)
        engine.close()


def _differences(
    engine: Engine, case: dict[str, Any], prompts: list[list[int]], texts: list[list[int]]
) -> dict[str, Any]:
    """How texts differ from those of plain steps, and how near two tokens are where one parts.

    Returns:
        differing_tokens: in all texts.  parted_by: of each text that parts, the difference of the log probabilities of
        the two most likely tokens there, in nats.
    """
    parted, differing = [], 0
    for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        sampling = _sampling(case["temperature"], seed).model_copy(update={"logprobs": 2})
        tokens = list(engine.stream(prompt, sampling))
        differs = [token.token_id != other for token, other in zip(tokens, text, strict=True)]
        differing += sum(differs)
        if any(differs):
            found = tokens[differs.index(True)].logprobs
            assert found is not None
            parted.append(round(found.top[0][1] - found.top[1][1], 4))
    return {"differing_tokens": differing, "parted_by": parted}


def _table(config: EvaluateConfig, engine: Engine, rows: list[dict[str, Any]]) -> Table:
    """A row for each context and temperature; a column for each place of a draft."""
    name = engine.config.model or "demo checkpoint"
    drafter = config.draft if engine.draft_weights_name is None else f"{config.draft} in {engine.draft_weights_name}"
    table = Table(
        title=f"{name}, {drafter}, up to {config.draft_tokens} drafts, {config.kv_cache}, {engine.weights_name}",
        caption="share of the drafts in each place that are accepted, over the steps that have drafts",
    )
    places = [f"place {place}" for place in range(1, config.draft_tokens + 1)]
    columns = "context", "temperature", "tokens a step", "tokens a round", "steps with drafts", "texts that part"
    for column in (*columns, *places):
        table.add_column(column, justify="right")
    for row in rows:
        details = row["details"]
        shares = [f"{100 * share:.1f} %" for share in details["accepted_by_place"]]
        per_round = "-" if details["tokens_per_round"] is None else f"{details['tokens_per_round']:.2f}"
        case = row["case"]
        table.add_row(
            str(case["context"]), f"{case['temperature']:g}", f"{row['value']:.2f}", per_round, str(details["rounds"]),
            f"{len(details['parted_by'])} of {case['samples']}", *shares, *["-"] * (len(places) - len(shares)),
        )  # fmt: skip
    return table
