"""Steps of `launch/latency.py --draft`: their time and the tokens that they yield, with real or forced acceptance.

Where drafts do not pay, plain steps are among them, unless `--draft-always` is given.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

from alspec.config import HitRate, LatencyConfig
from alspec.errors import UserError
from alspec.launch.terminal.display import StatusLine
from alspec.launch.terminal.flags import notify
from alspec.launch.terminal.output import append_rows, write_text
from alspec.models.checkpoint.source import drafter_name, model_name
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.profile import Profile, RoundProfile, cache_tokens, measure_rounds, prepare
from alspec.runtime.profiling.provenance import provenance
from alspec.runtime.profiling.stats import spread
from alspec.runtime.profiling.timeline import trace_json

__all__ = ["Measured", "check_rounds", "rounds_table", "rounds_title", "sweep_rounds"]

Measured = tuple[dict[str, Any], Profile | RoundProfile]  # a row, and the profile behind it


def check_rounds(config: LatencyConfig) -> None:
    """Refuse settings that do not fit rounds, or that only rounds have.

    Raises:
        UserError: names the flag.
    """
    if config.draft == "off":
        if _forces_acceptance(config):
            raise UserError("flags: --acceptances: only drafts are accepted; add --draft, or leave it out")
        return
    if config.modes != ("off",):
        raise UserError(f"flags: --modes: --draft needs off, found {','.join(config.modes)}; leave --modes out")


def _forces_acceptance(config: LatencyConfig) -> bool:
    return any(acceptance != "real" for acceptance in config.acceptances)


def sweep_rounds(
    config: LatencyConfig,
    engine: Engine,
    contexts: list[int],
    text_ids: list[int] | None,
    command: str,
    results: list[Measured],
    status: StatusLine,
) -> None:
    """Measure rounds over one cache at each context. Append each result to `results` at once, on rank 0 also to files.

    Rounds of the last context are traced while they are measured. Kernels of captured rounds are not.
    """
    is_first = engine.placement.rank == 0
    status.show("loading weights")
    engine.load(config.batch, config.max_context or cache_tokens(contexts[-1], config.steps, config.tokens_of_step))
    status.clear()
    notify(engine.take_notices() if is_first else [])
    # Events around the operations of a fused round would slow what is measured.
    engine.timeline.enabled = config.trace is not None and not engine.is_fused
    engine.timeline.keeps_rounds = config.trace is not None
    step = engine.decode_step
    if _forces_acceptance(config) and not isinstance(step, CapturedRoundStep):
        raise UserError("flags: --acceptances: forced shares need captured rounds: up to 128 rows on GPUs")
    status.show("preparing")
    prepare(engine, config.sampling)
    for acceptance in config.acceptances:
        if isinstance(step, CapturedRoundStep):
            step.force_acceptance(None if acceptance == "real" else float(acceptance))
        for context in contexts:
            status.show(f"{context} tokens")
            profile = measure_rounds(engine, context, config.steps, text_ids, config.sampling)
            row = _row(config, engine, profile, acceptance, command)
            results.append((row, profile))
            if is_first:
                append_rows(config.rows, [row])
    if config.trace is not None:
        rows_by_rank = engine.gather_rows(engine.timeline.rows())
        if is_first:
            write_text(config.trace, trace_json(rows_by_rank, results[-1][0]))
    status.clear()
    engine.close()


def _row(
    config: LatencyConfig, engine: Engine, profile: RoundProfile, acceptance: HitRate, command: str
) -> dict[str, Any]:
    ranks, us, drafting_us = engine.placement.world_size, profile.slowest_us, profile.drafting_us
    return {
        "bench": "decode_round",
        "impl": "alspec.off",
        "case": {
            "shape": model_name(config),
            "world": ranks,
            "transport": engine.transport_name if ranks > 1 else None,
            "cuda_graph": engine.uses_graph,
            "dtype": engine.dtype_name,
            "batch": config.batch,
            "context": profile.context,
            "text": None if config.prompt_file is None else config.prompt_file.name,
            "kv_cache": config.kv_cache,
            "draft": drafter_name(config),
            "draft_tokens": config.draft_tokens,
            "draft_weights": engine.draft_weights_name or "auto",
            "weights": engine.weights_name,
            **({"recall_blocks": config.speculation.recalled} if config.draft == "self" else {}),
            "acceptance": acceptance,
            "always": config.draft_always,
            "temperature": config.temperature,
        },
        "us": _spread(us),
        "drafting_us": _spread(drafting_us) if drafting_us else None,
        "tokens_per_step": round(sum(profile.tokens) / len(profile.tokens), 4),
        "accepted": profile.accepted,
        "tokens_per_s": round(config.batch * sum(profile.tokens) / sum(us) * 1e6, 2),
        **provenance(ranks if engine.device.type == "cuda" else 0, command),
    }


def _spread(us: list[float]) -> dict[str, float]:
    return {share: round(value, 3) for share, value in spread(us).items()}


def rounds_title(row: dict[str, Any]) -> str:
    """What was run, for a table or a picture."""
    case = row["case"]
    drafts = f"{case['draft']}, K {case['draft_tokens']}"
    return f"{case['shape']}, {case['world']} rank(s), batch {case['batch']}, {drafts}"


def rounds_table(rows: list[dict[str, Any]]) -> Table:
    """A line for each row."""
    is_forced = any(row["case"]["acceptance"] != "real" for row in rows)
    caption = "a forced acceptance takes drafts whatever they are" if is_forced else None
    table = Table(title=rounds_title(rows[0]), caption=caption)
    columns = "ms/step p50", "p20", "p80", "with drafts", "tokens/step", "tokens/s"
    for name in ("context", "cache", "acceptance", *columns):
        table.add_column(name, justify="right")
    for row in rows:
        case, us = row["case"], row["us"]
        forced = "real" if case["acceptance"] == "real" else f"{case['acceptance']:g} forced"
        times = [f"{us[name] / 1e3:.3f}" for name in ("p50", "p20", "p80")]
        drafting = "-" if row["drafting_us"] is None else f"{row['drafting_us']['p50'] / 1e3:.3f}"
        made = drafting, f"{row['tokens_per_step']:.2f}", f"{row['tokens_per_s']:.1f}"
        table.add_row(str(case["context"]), case["kv_cache"], forced, *times, *made)
    return table
