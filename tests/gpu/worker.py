"""Run many prompts and thresholds in one job and write tokens and hit maps; torchrun starts one job for a mode."""

import json
import sys
from pathlib import Path

from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.runtime.engine import Engine
from alspec.runtime.faults import run_guarded


def main() -> int:
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = []
    engine = Engine(validate(EngineConfig, cases["engine"], "worker"))
    sampling = SamplingConfig(max_new_tokens=cases["max_new_tokens"], ignore_eos=True)
    warm = SamplingConfig(max_new_tokens=12, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.9, seed=5)

    def work() -> int:
        for batch in cases["batches"]:
            engine.load(len(batch), max(map(len, batch)) + sampling.max_new_tokens)
            for threshold in cases["thresholds"]:
                if engine.loop is None:
                    engine.program.threshold = float(threshold)
                elif engine.mode == "paired":
                    engine.loop.speculate(float(threshold))
                generation = engine.start_generation(batch, sampling)
                for _ in engine.run(generation, sampling):
                    pass
                sampled = engine.start_generation(batch, warm) if cases["sampled"] else None
                for _ in engine.run(sampled, warm) if sampled else ():
                    pass
                results.append(
                    {
                        "threshold": threshold,
                        "prompt_lens": [len(ids) for ids in batch],
                        "tokens": [request.token_ids for request in generation.requests],
                        "hits": [hits.int().tolist() for hits in generation.hits],
                        "sampled": [request.token_ids for request in sampled.requests] if sampled else [],
                        "device": engine.device.type,
                        "transport": engine.transport_name,
                        "cuda_graph": engine.uses_graph,
                    }
                )
        return 0

    code = run_guarded(engine.heartbeat, work)
    if engine.placement.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    engine.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
