"""Generate text: `torchrun --standalone --nproc-per-node 2 launch/generate.py --prompt "..."`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that take seconds
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from alspec.config import PROMPTS, GenerateConfig, SamplingConfig
from alspec.errors import UserError
from alspec.launch.terminal.display import Printer, StatusLine, color_without_effect, print_panel, shows_color, use_utf8
from alspec.launch.terminal.flags import Parser, cuts_without_effect, notify, parse_command, speculation_without_effect
from alspec.launch.terminal.output import Finished, exit_code, has_reader, is_dash, write_text
from alspec.launch.terminal.plan import PlanSettings, add_plan_flags, plan_settings, print_plan
from alspec.launch.terminal.prompts import GivenPrompts, read_prompts
from alspec.models.checkpoint.source import notice_of_random_weights
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Generation, rows_of
from alspec.runtime.faults.guard import guarded
from alspec.runtime.profiling.provenance import versions
from alspec.runtime.profiling.stats import mean_lengths, step_bytes, stream_bandwidth, summarize
from alspec.runtime.profiling.timeline import trace_json

__all__ = ["main"]

OUT_OF_MEMORY = "Use more ranks, fewer or shorter prompts, or a lower --max-context"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="generate", description="Generate text with a Llama model.")
    add_plan_flags(parser)
    with exit_code(argv) as outcome:
        config, args = parse_command(parser, GenerateConfig, argv, outcome)
        settings = plan_settings(args)
        if args.plan:
            _plan(config, settings)
            raise Finished
        use_utf8()
        engine = Engine(config, trace=config.trace is not None)
        is_first = engine.placement.rank == 0
        with guarded(engine.heartbeat, OUT_OF_MEMORY), StatusLine(is_first) as status:
            prompts = _load(config, engine, status)
            shows = is_first and not (is_dash(config.json_file) or is_dash(config.trace))
            is_batch = prompts.is_batch or config.n > 1
            colored = config.color and shows_color()
            printer = Printer(prompts.extras, is_batch, colored, config.n) if shows else None
            if printer is not None:
                engine.heartbeat.end_output = printer.end_line
            progress = status.show_prompt_progress(sum(map(len, prompts.ids)))
            is_printed_only = config.json_file is None and config.trace is None and engine.placement.world_size == 1
            for token in engine.stream(prompts.ids, config, progress=progress):
                status.clear()
                if printer is not None:
                    printer.show(token)
                if is_printed_only and not has_reader():
                    break
            if printer is not None:
                printer.close()
            _finish(config, engine, prompts.extras)
            engine.close()
    return outcome.code


def _plan(config: GenerateConfig, settings: PlanSettings) -> None:
    for flag, path in (("--json", config.json_file), ("--trace", config.trace)):
        if path is not None:
            raise UserError(f"flags: {flag}: --plan generates nothing to write there; leave one of them out")
    answer_keys = {*SamplingConfig.model_fields} | {"chat", "system", "color"}
    given = {"answers" if name == "n" else name for name in config.model_fields_set & {*PROMPTS, *answer_keys}}
    if "mode" in config.speculation.model_fields_set:
        given |= {"speculation"}
    if Placement.from_environment().rank != 0:  # once, not by every rank of torchrun
        return
    print_plan(config, settings)
    notice = None if config.random_weights is None else notice_of_random_weights(config.random_weights)
    notify([notice] if notice else [])
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        what = "shows every mode, for one request of --max-context tokens (default: all that the model takes)"
        notify([f"without effect: {flags}; --plan {what}"])


def _load(config: GenerateConfig, engine: Engine, status: StatusLine) -> GivenPrompts:
    """Read the prompts and load the model; returns the prompts."""
    prompts = read_prompts(config, engine)
    engine.check_sampling(config)
    rows = rows_of(prompts.ids, config.n)
    new_tokens, notice = engine.fit_new_tokens(rows, config)
    max_context = engine.check_prompts(rows, new_tokens)
    is_first = engine.placement.rank == 0
    if is_first:
        without_effect = _without_effect(config, prompts.is_batch or config.n > 1, engine.mode)
        notify([*prompts.notices, *([notice] if notice else []), *without_effect])
    status.show("loading weights")
    engine.load(len(rows), max_context)
    status.clear()
    notify(engine.take_notices() if is_first else [])
    status.show("preparing")
    return prompts


def _without_effect(config: GenerateConfig, is_batch: bool, mode: str) -> list[str]:
    """Notices about flags that change nothing."""
    notices = []
    if config.color and is_batch:
        notices.append("--color shades nothing: a batch is printed as JSON")
    elif config.color:
        notices += color_without_effect(mode != "off" or config.draft != "off")
    notices += cuts_without_effect(config)
    if config.n > 1 and config.temperature == 0.0:
        notices.append(f"--answers gives the same answer {config.n} times: temperature 0 takes the most likely token")
    if config.logprobs is not None and config.json_file is None:
        notices.append("--logprobs without effect: they are written to the file of --json")
    if config.draft == "off" and config.draft_tokens != GenerateConfig.model_fields["draft_tokens"].default:
        notices.append("--draft-tokens without effect: --draft is off")
    advice = "use --speculation simulated, or paired on two ranks"
    return notices + speculation_without_effect(config, mode != "off", advice)


def _finish(config: GenerateConfig, engine: Engine, extras: list[dict[str, Any]]) -> None:
    """Write JSON and trace and print the panel, on rank 0; the panel also if a file cannot be written."""
    summary = _summary(engine)
    rows_by_rank = engine.gather_rows(engine.timeline.rows()) if config.trace is not None else []
    if engine.placement.rank != 0:
        return
    try:
        if config.json_file is not None:
            write_text(config.json_file, json.dumps(_json_report(config, engine.generation, summary, extras)))
        if config.trace is not None:
            write_text(config.trace, trace_json(rows_by_rank))
    finally:
        print_panel(summary)


def _summary(engine: Engine) -> dict[str, Any]:
    assert engine.memory is not None
    generation = engine.generation
    summary = summarize(generation, engine.config.speculation.first_lossy_length)
    limit = stream_bandwidth(engine.device)
    gb_per_s = share = None
    # In a pair, the bytes that a rank reads depend on the verdicts: it skips the work of the other group.
    # A round reads its weights once for several tokens, and a draft model's, too.
    if generation.step_us and engine.mode != "paired" and engine.config.draft == "off":
        seq_lens = mean_lengths(generation, goes_on=engine.is_fused)
        config = engine.config
        read = step_bytes(
            engine.model_config, engine.placement.shard, engine.dtype, seq_lens, config.kv_cache, config.kv_protect
        )
        bytes_per_s = read / (summary["ms_per_token_p50"] / 1e3)
        gb_per_s, share = bytes_per_s / 1e9, bytes_per_s / limit
    cuda = engine.device.type == "cuda"
    return summary | {
        "mode": engine.mode,
        "draft": engine.config.draft,
        "draft_tokens": engine.config.draft_tokens,
        "draft_weights": engine.draft_weights_name,
        "threshold": engine.config.speculation.threshold,
        "chunk_size": engine.config.speculation.chunk_size,
        "world_size": engine.placement.world_size,
        "tp_size": engine.placement.tp_size,
        "transport": engine.transport_name if engine.placement.world_size > 1 else None,
        "cuda_graph": engine.uses_graph,
        "device": torch.cuda.get_device_name(engine.device) if cuda else "CPU",
        "dtype": engine.dtype_name,
        "weights": engine.weights_name,
        "gb_per_s": gb_per_s,
        "stream_gb_per_s": limit / 1e9,
        "share_of_limit": share,
        "memory": asdict(engine.memory),
    }


def _json_report(
    config: GenerateConfig, generation: Generation, summary: dict[str, Any], extras: list[dict[str, Any]]
) -> dict[str, Any]:
    settings = config.model_dump(mode="json", by_alias=True)
    requests: list[dict[str, Any]] = [
        {
            "prompt_ids": request.prompt_ids,
            "token_ids": request.token_ids,
            "text": request.text,
            "finish_reason": request.finish_reason,
        }
        | extras[index // config.n]
        for index, request in enumerate(generation.requests)
    ]
    for index, (request, entry) in enumerate(zip(generation.requests, requests, strict=True)):
        if config.n > 1:
            entry["request"], entry["answer"] = divmod(index, config.n)
        if request.logprobs is not None:
            entry["logprobs"] = [asdict(each) for each in request.logprobs]
        if config.draft != "off":
            entry["drafted"] = [False, *request.drafted]  # the first token is the prompt's
    return {
        "requests": requests,
        "ttft_us": generation.prefill_us,
        "step_us": generation.step_us,
        "hit_map": [None if hits is None else hits.int().tolist() for hits in generation.hits],
        "rounds": generation.rounds,
        # JSON has no infinity: the settings hold such a threshold as text.
        "summary": summary | {"threshold": settings["speculation"]["threshold"]},
        "config": settings,
        "versions": versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
