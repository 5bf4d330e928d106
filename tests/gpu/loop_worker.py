"""One job over captured steps, all well or with something wrong on a rank; torchrun starts it, the test reads it."""

import json
import os
import random
import sys
import time

import torch

from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.errors import AlspecError, report
from alspec.kernels import push
from alspec.models import decoder
from alspec.runtime.engine import Engine
from alspec.runtime.faults import run_guarded

LOST_SLOT = 5
PROMPT = [random.Random(3).randrange(6, 4000) for _ in range(300)]
CAPACITY = 400


def main() -> int:
    mode, case = sys.argv[1:]
    try:
        config = {"speculation": {"mode": mode}, "dtype": "fp32", "transport": "symm"}
        engine = Engine(validate(EngineConfig, config, "worker"))
        return run_guarded(engine.heartbeat, lambda: WORK[case](engine))
    except AlspecError as error:
        return report(error)


def delay(engine: Engine) -> int:
    """The same generation with no slow host, then with each rank's in turn."""
    engine.load(1, CAPACITY)
    loop, sampling = engine.loop, SamplingConfig(max_new_tokens=20, ignore_eos=True)
    assert loop is not None
    step = loop.step
    results: list[dict] = []
    # The first one loads and compiles.
    for slow in (None, None, *range(engine.placement.world_size)):
        late = engine.placement.rank == slow
        loop.step = _late(step, results[-1]["seconds"] / sampling.max_new_tokens) if late else step
        generation = engine.start_generation([PROMPT], sampling)
        started = time.monotonic()
        for _ in engine.run(generation, sampling):
            pass
        hits = [step_hits.int().tolist() for step_hits in generation.hits]
        seconds = time.monotonic() - started
        results.append({"tokens": generation.requests[0].token_ids, "hits": hits, "seconds": seconds})
    if engine.placement.rank == 0:
        print(json.dumps({"results": results[1:], "graph": engine.uses_graph}), flush=True)
    engine.close()
    return 0


def _late(step, step_s):
    """A rank whose host is slow at random, by up to 0.1 s and three times what a step takes."""
    pauses = random.Random(1)

    def late_step(*args):
        time.sleep(pauses.choice([0.0, 0.03, 0.1]) + pauses.choice([0.0, 3 * step_s]))
        return step(*args)

    return late_step


def lost(engine: Engine) -> int:
    """Rank 1 never sends one of its partial sums."""
    if engine.placement.rank == 1:
        decoder.push_partial = _lose
    return _generate(engine)


def _lose(act, weight, exchange, slot, *rest):
    """Every push but one."""
    if slot != LOST_SLOT:
        push.push_partial(act, weight, exchange, slot, *rest)


def nan(engine: Engine) -> int:
    """A weight of rank 1 goes bad after prefill, which reads the same ones."""
    return _generate(engine, spoils=engine.placement.rank == 1)


def _generate(engine: Engine, spoils: bool = False) -> int:
    sampling = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    engine.load(1, CAPACITY)
    for token in engine.run(engine.start_generation([PROMPT], sampling), sampling):
        if engine.placement.rank == 0:
            print(f"token {token.token_id}", flush=True)
        if spoils:
            engine.model.weights.layers[3].down[17, 5] = torch.nan
    engine.close()
    return 0


def endless(engine: Engine) -> int:
    """Steps without end, at the cache's last position once it is full; each rank tells its process."""
    engine.load(1, CAPACITY)
    sampling = SamplingConfig(max_new_tokens=1, ignore_eos=True)
    generation = engine.start_generation([PROMPT], sampling)
    for _ in engine.run(generation, sampling):
        pass
    assert engine.uses_graph
    for count, _ in enumerate(engine.decode(generation.requests[0].token_ids, [len(PROMPT) + 1], 10**9)):
        if count == 50:
            sys.stdout.write(f"{json.dumps({'rank': engine.placement.rank, 'pid': os.getpid()})}\n")
            sys.stdout.flush()
    return 0


WORK = {"delay": delay, "lost": lost, "nan": nan, "endless": endless}

if __name__ == "__main__":
    sys.exit(main())
