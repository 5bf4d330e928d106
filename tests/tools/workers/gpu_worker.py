"""Run many prompts and thresholds in several modes, one engine after the other, and write tokens and hit maps.

torchrun starts one job for each number of ranks. Prompts of one batch size share a cache and a captured graph. A run
with a `conversation` has its turns in place of the batches: each follows the answers before it. A run with `leads`
writes by how much each token led the second most likely one, as conversations do.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch

from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded

WARM = SamplingConfig(
    max_new_tokens=12, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.9, seed=5, min_p=0.01,
    repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1, logit_bias={7: 1.5},
)  # fmt: skip


def checked_step(self: CapturedStep, *args: object) -> StepRecord:
    """`CapturedStep.step`; it is an error if the host waits for the device in it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step(self, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


step = CapturedStep.step
CapturedStep.step = checked_step


def main() -> int:
    cases = json.loads(Path(sys.argv[1]).read_text())
    found, start = {}, time.monotonic()
    for run in cases["runs"]:
        engine = Engine(validate(EngineConfig, run["engine"], "worker"))
        found[run["name"]] = rows = []
        with guarded(engine.heartbeat):
            if "conversation" in run:
                rows += converse(engine, run["conversation"], cases["max_new_tokens"])
            else:
                work(engine, run, cases, rows)
        rank = engine.placement.rank
        print(f"rank {rank}: {run['name']} after {time.monotonic() - start:.0f} s", flush=True)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    return 0


def work(engine: Engine, run: dict, cases: dict, rows: list[dict]) -> None:
    logprobs = 2 if run.get("leads") else None
    greedy = SamplingConfig(max_new_tokens=cases["max_new_tokens"], ignore_eos=True, logprobs=logprobs)
    for size in sorted({len(batch) for batch in cases["batches"]}):
        batches = [batch for batch in cases["batches"] if len(batch) == size]
        engine.load(size, max(len(ids) for batch in batches for ids in batch) + greedy.max_new_tokens)
        for threshold in run["thresholds"]:
            set_threshold(engine, threshold)
            for batch in batches:
                rows.append(generate(engine, batch, greedy) | {"threshold": threshold})
        if run["sampled"]:
            for row, batch in zip(rows[-len(batches) :], batches, strict=True):
                row["sampled"] = generate(engine, batch, WARM)["tokens"]
    if run["long"]:
        long = SamplingConfig(ignore_eos=True, **cases["long"]["sampling"])
        engine.load(1, len(cases["long"]["prompt"]) + long.max_new_tokens)
        set_threshold(engine, cases["long"]["threshold"])
        rows.append(generate(engine, [cases["long"]["prompt"]], long) | {"threshold": "long"})


def converse(engine: Engine, turns: list[list[int]], max_new_tokens: int) -> list[dict]:
    """Rows of the turns, with their prompts."""
    how, rows, prompt = SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=True, logprobs=2), [], []
    engine.load(1, sum(map(len, turns)) + len(turns) * max_new_tokens, for_turns=True)
    for turn in turns:
        prompt = [*prompt, *turn]
        row = generate(engine, [prompt], how)
        rows.append(row | {"prompt": prompt, "reused": engine.generation.reused_tokens[0]})
        prompt = [*prompt, *row["tokens"][0]]
    return rows


def set_threshold(engine: Engine, threshold: str) -> None:
    if engine.mode != "off":
        engine.decode_step.set_verdict_rule(float(threshold))


def generate(engine: Engine, batch: list[list[int]], sampling: SamplingConfig) -> dict:
    for _ in engine.stream(batch, sampling):
        pass
    generation = engine.generation
    tops = [[each.top for each in answer.logprobs or ()] for answer in generation.completions()]
    return {
        "prompt_lens": [len(ids) for ids in batch],
        "tokens": [request.token_ids for request in generation.requests],
        "hits": [hits.int().tolist() for hits in generation.hits],
        "leads": [[top[0][1] - top[1][1] for top in answer] for answer in tops],
        "accepted": sum(accepted for step in generation.rounds for _, accepted in step),
        "sampled": [],
        "device": engine.device.type,
        "transport": engine.transport_name,
        "cuda_graph": engine.uses_graph,
    }


if __name__ == "__main__":
    sys.exit(main())
