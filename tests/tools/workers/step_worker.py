"""One rank of the several-process tests: runs every case of a spec and writes its record.

Run as `step_worker.py FOLDER` with torchrun's variables except MASTER_PORT; reads FOLDER/spec.json, writes
FOLDER/rank{RANK}.json. A case has a name, a threshold, prompts, `max_new_tokens` of each request, and perhaps `eos`,
`sampling`, `slow_us`, a delay of full attention and post-attention, and `late_us`, the longest delay of a message.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from alspec.config import EngineConfig, SamplingConfig, SpeculationConfig
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Generation, IdDecoder, Request
from alspec.runtime.profiling.timeline import Timeline


def slowed(seconds: float) -> Callable[..., AbstractContextManager[None]]:
    """`Timeline.span` with a delay in full attention and post-attention."""
    span = Timeline.span

    @contextmanager
    def slow_span(timeline: Timeline, operation: str, layer: int) -> Iterator[None]:
        with span(timeline, operation, layer):
            if operation in ("full_attention", "post_attention"):
                time.sleep(seconds)
            yield

    return slow_span


@contextmanager
def late_messages(longest_s: float) -> Iterator[None]:
    """Delay every third message, at random: those between the groups and those inside a group."""
    draw = random.Random(int(os.environ.get("RANK", "0")))

    def late(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def wait_first(*args: Any) -> Any:
            if draw.random() < 1 / 3:
                time.sleep(draw.random() * longest_s)
            return exchange(*args)

        return wait_first

    with ExitStack() as stack:
        for name in ("send", "gather_partials", "all_gather_group"):
            stack.enter_context(mock.patch.object(Transport, name, late(getattr(Transport, name))))
        yield


def run_case(engine: Engine, case: dict[str, Any]) -> dict[str, Any]:
    """Generate one batch. `load` resets the decode step and its priorities."""
    prompts = case["prompts"]
    engine.load(len(prompts), engine.check_prompts(prompts, [max(case["max_new_tokens"])] * len(prompts)))
    engine.decode_step.set_verdict_rule(case["threshold"])
    settings = case.get("sampling", {})
    samplings = [SamplingConfig(max_new_tokens=limit, **settings) for limit in case["max_new_tokens"]]
    requests = [
        Request(ids, IdDecoder(), sampling, case.get("eos", ()))
        for ids, sampling in zip(prompts, samplings, strict=True)
    ]
    generation = Generation(requests)
    slow_span = mock.patch.object(Timeline, "span", slowed(case.get("slow_us", 0) / 1e6))
    with slow_span, late_messages(case.get("late_us", 0) / 1e6):
        for _ in engine._generate(engine._start_generation(generation), generation, samplings[0], None):
            pass
    return {
        "tokens": [request.token_ids for request in requests],
        "reasons": [request.finish_reason for request in requests],
        "hits": [hits.tolist() for hits in generation.hits],
        "step_us": generation.step_us,
        "zero_us": engine.timeline._zero * 1e6,
        "rows": engine.timeline.rows() if engine.mode == "paired" else [],
    }


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for port, (mode, cases) in zip(spec["ports"], spec["modes"].items(), strict=True):
        # Each engine of a process has a store of its own: keys must not collide.
        os.environ["MASTER_PORT"] = str(port)
        recall = (
            {"predictor": "recall", "recall_blocks": spec["recall_blocks"]}
            if spec["recall_blocks"]
            else {"predictor": "window"}
        )
        speculation = SpeculationConfig(mode=mode, **recall)
        config = EngineConfig(
            model=Path(spec["model"]),
            speculation=speculation,
            dtype="fp32",
            transport="gloo",
            kv_cache=spec["kv_cache"],
            kv_protect=spec["kv_protect"],
            softmax=spec["softmax"],
        )
        engine = Engine(config, trace=True)
        for case in cases:
            results[f"{mode} {case['name']}"] = run_case(engine, case)
        engine.close()
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
