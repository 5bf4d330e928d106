"""One job over captured steps with something wrong on rank 1; torchrun starts it, the test reads what it says."""

import json
import random
import sys
import time

import torch

from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.errors import AlspecError, report
from alspec.kernels import gemv
from alspec.models import decoder
from alspec.runtime.engine import Engine
from alspec.runtime.faults import run_guarded

LOST_SLOT = 5


def main() -> int:
    case = sys.argv[1]
    try:
        engine = Engine(validate(EngineConfig, {"speculation": {"mode": "off"}, "dtype": "fp32"}, "worker"))
        return run_guarded(engine.heartbeat, lambda: work(case, engine))
    except AlspecError as error:
        return report(error)


def work(case: str, engine: Engine) -> int:
    prompt = [random.Random(3).randrange(6, 4000) for _ in range(300)]
    sampling = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    is_second = engine.placement.rank == 1
    if case == "lost" and is_second:
        decoder.push_partial = _lose
    engine.load(1, 400)
    loop = engine.loop
    assert loop is not None
    if case == "delay" and is_second:
        loop.step = _late(loop.step)
    generation = engine.start_generation([prompt], sampling)
    for token in engine.run(generation, sampling):
        if engine.placement.rank == 0:
            print(f"token {token.token_id}", flush=True)
        if case == "nan" and is_second:  # after prefill, which reads the same weights
            engine.model.weights.layers[3].down[17, 5] = torch.nan
    if engine.placement.rank == 0:
        print(json.dumps({"tokens": generation.requests[0].token_ids, "graph": engine.uses_graph}), flush=True)
    engine.close()
    return 0


def _lose(act, weight, exchange, slot, gate=None):
    """Every push but one."""
    if slot != LOST_SLOT:
        gemv.push_partial(act, weight, exchange, slot, gate)


def _late(step):
    """A rank whose host is slow at random."""
    pauses = random.Random(1)

    def late_step(remaining):
        time.sleep(pauses.choice([0.0, 0.05, 0.2]))
        return step(remaining)

    return late_step


if __name__ == "__main__":
    sys.exit(main())
