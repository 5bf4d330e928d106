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

    def work() -> int:
        for batch in cases["batches"]:
            engine.load(len(batch), max(map(len, batch)) + sampling.max_new_tokens)
            for threshold in cases["thresholds"]:
                engine.program.threshold = float(threshold)
                generation = engine.start_generation(batch, sampling)
                for _ in engine.run(generation, sampling):
                    pass
                results.append(
                    {
                        "threshold": threshold,
                        "prompt_lens": [len(ids) for ids in batch],
                        "tokens": [request.token_ids for request in generation.requests],
                        "hits": [hits.int().tolist() for hits in generation.hits],
                        "device": engine.device.type,
                        "transport": engine.backend,
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
