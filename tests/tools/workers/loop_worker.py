"""One job over captured steps, without a fault or with one on a rank; torchrun starts it, the test reads its lines.

`loop_worker.py MODE TRANSPORT CASE,CASE...`: cases follow each other on one engine; `broken` comes last, and a case
that ends the job comes alone. `symm+nccl`: peer memory inside a group, messages over NCCL between the groups.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from alspec.config import EngineConfig, SamplingConfig, validate
from alspec.errors import AlspecError, report
from alspec.kernels.linear import push
from alspec.kernels.linear.products import FusedProducts
from alspec.kernels.norm import residual
from alspec.runtime.decode import decoder
from alspec.runtime.decode.captured_step import StepKind
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.engine.engine import Engine
from alspec.runtime.faults.guard import guarded

LOST_LAYER = 2
SPOILT_LAYERS = {"off": 3, "paired": 2}  # if all layers accept, rank 1 of a pair computes the even ones
# Long enough that `A~` leaves tokens out: layers accept and reject.
_ids = random.Random(3)
PROMPT = [_ids.randrange(6, 4000) for _ in range(500)]
CAPACITY, LONG_CAPACITY = 600, 1300
GREEDY = SamplingConfig(max_new_tokens=20, ignore_eos=True)
SAMPLED = SamplingConfig(max_new_tokens=20, ignore_eos=True, temperature=0.8, seed=1)
PAUSE_CYCLES = 2 * 10**7  # 10 ms at 2 GHz
PAUSED_RUNS = 8


def main() -> int:
    mode, transport, cases = sys.argv[1:]
    try:
        own, _, pair = transport.partition("+")
        speculation = {"mode": "off" if mode == "rounds" else mode, "always": True}
        if cases == "swaps":
            speculation["predictor"] = "window"
        config = {"speculation": speculation, "dtype": "fp32"}
        if mode == "rounds":
            config |= {"draft": "ngram", "draft_always": True}
        config |= {"transport": own, "pair_transport": pair or "auto"}
        engine = Engine(validate(EngineConfig, config, "worker"))
        with guarded(engine.heartbeat):
            for case in cases.split(","):
                WORK[case](engine)
            engine.close()
        return 0
    except AlspecError as error:
        return report(error)


def delay(engine: Engine) -> None:
    """The same generation with no slow host, then with each rank's host slow once."""
    engine.load(1, CAPACITY)
    decode_step = engine.decode_step
    assert decode_step.is_fused
    step = decode_step.step
    results: list[dict] = []
    # The first one loads and compiles.
    for slow in (None, None, *range(engine.placement.world_size)):
        late = engine.placement.rank == slow
        decode_step.step = _late(step, results[-1]["seconds"] / GREEDY.max_new_tokens) if late else step
        results.append(_timed(engine))
    decode_step.step = step
    _report(engine, "delay", results[1:])


def _timed(engine: Engine, sampling: SamplingConfig = GREEDY) -> dict:
    engine.prepare(sampling)
    started = time.monotonic()
    for _ in engine.stream(PROMPT, sampling):
        pass
    # The slowest rank counts, because the verifier of a pair over a link does not wait for the other group.
    seconds = torch.tensor(time.monotonic() - started, device="cuda")
    torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    generation = engine.generation
    hits = [step_hits.int().tolist() for step_hits in generation.hits]
    return {"tokens": generation.requests[0].token_ids, "hits": hits, "seconds": float(seconds)}


def _report(engine: Engine, case: str, results: list) -> None:
    if engine.placement.rank == 0:
        settings = {"graph": engine.uses_graph, "transport": engine.transport_name}
        print(json.dumps({"case": case, "results": results} | settings), flush=True)


def _late(step, step_s, pauses_s=(0.0, 0.03, 0.1)):
    """A rank whose host is slow at random: by one of `pauses_s`, and up to three times what a step takes."""
    pauses = random.Random(1)

    def late_step(*args):
        time.sleep(pauses.choice(pauses_s) + pauses.choice([0.0, 3 * step_s]))
        return step(*args)

    return late_step


def pause(engine: Engine) -> None:
    """The same generation undisturbed, then with each rank's device pausing inside its steps, captured or eager."""
    engine.load(1, CAPACITY)
    # Load the kernel here: inside a step, loading could wait for ranks that wait for this one.
    torch.cuda._sleep(1)
    engine.transport.synchronize()
    results = [_timed(engine)]
    choices = engine._choices
    for run in range(PAUSED_RUNS):
        rank, round_of_ranks = run % engine.placement.world_size, run // engine.placement.world_size
        engine._choices = replace(choices, uses_graph=choices.uses_graph and round_of_ranks % 2 == 0)
        engine.load(1, CAPACITY)  # nothing is captured yet
        places: list[tuple[str, int]] = []
        issue = _pausing(engine.decode_step._launch_kernels, random.Random(run), engine.placement.rank == rank, places)
        with mock.patch.object(engine.decode_step, "_launch_kernels", issue):
            results.append(_timed(engine) | {"rank": rank, "graph": engine.uses_graph, "places": places})
    engine._choices = choices
    engine.load(1, CAPACITY)  # as configured again: captured, without a pause
    _report(engine, "pause", results)


def swaps(engine: Engine) -> None:
    """A long text undisturbed; then, with each rank twice, one host late now and then and its device pausing."""
    long = SamplingConfig(max_new_tokens=LONG_CAPACITY - len(PROMPT), ignore_eos=True, temperature=1.3, seed=2)
    engine.load(1, LONG_CAPACITY)
    torch.cuda._sleep(1)
    engine.transport.synchronize()
    results = [_timed(engine, long)]
    for run in range(2 * engine.placement.world_size):
        rank = run % engine.placement.world_size
        is_here, places = engine.placement.rank == rank, []
        engine.load(1, LONG_CAPACITY)  # nothing is captured yet
        decode_step = engine.decode_step
        issue = _pausing(decode_step._launch_kernels, random.Random(run), is_here, places)
        late = _late(decode_step.step, 0.0, (0.0,) * 9 + (0.03,)) if is_here else decode_step.step
        with mock.patch.object(decode_step, "_launch_kernels", issue), mock.patch.object(decode_step, "step", late):
            results.append(_timed(engine, long) | {"rank": rank, "places": places})
    _report(engine, "swaps", results)


def _pausing(
    issue: Callable[[StepKind, OperationHook], None], draws: random.Random, is_here: bool, places: list[tuple[str, int]]
) -> Callable[[StepKind, OperationHook], None]:
    """Launch a step as `issue` does, with a pause ahead of one operation: drawn for each step, noted in `places`.

    A captured step keeps the last one. Every rank draws the same place; only one rank pauses.
    """
    operations: dict[int, list[tuple[str, int]]] = {}  # of each kind of step

    def pausing_issue(kind: StepKind, operation: OperationHook) -> None:
        if id(kind) not in operations:  # the first time only compiles
            own = operations[id(kind)] = []
            issue(kind, partial(_note, own))
            return
        own, count = operations[id(kind)], 0
        chosen = draws.randrange(len(own))
        places.append(own[chosen])

        def pause_ahead(name: str, layer: int) -> AbstractContextManager[None]:
            nonlocal count
            if is_here and count == chosen:
                torch.cuda._sleep(PAUSE_CYCLES)
            count += 1
            return operation(name, layer)

        issue(kind, pause_ahead)

    return pausing_issue


def _note(operations: list[tuple[str, int]], name: str, layer: int) -> AbstractContextManager[None]:
    operations.append((name, layer))
    return nullcontext()


def lost(engine: Engine) -> None:
    """Packets that never come: one partial sum of rank 1 in a group, one handover of rank 0 in a pair."""
    if engine.mode == "off" and engine.placement.rank == 1:
        FusedProducts.push_partial = staticmethod(_lose_sums)
    if engine.mode == "paired" and engine.placement.rank == 0:
        decoder.reduce_norm = _lose_handover
    engine.load(1, CAPACITY)
    _generate(engine)


def _lose_sums(act, weight, exchange, reduce_index, *rest):
    """Every push but one."""
    if reduce_index != 2 * LOST_LAYER + 1:
        push.push_partial(act, weight, exchange, reduce_index, *rest)


def _lose_handover(exchange, reduce_index, *rest):
    """Every x but one layer's, which the layer before pushes."""
    *rest, inbox = rest
    residual.reduce_norm(exchange, reduce_index, *rest, None if reduce_index == 2 * LOST_LAYER - 1 else inbox)


def nan(engine: Engine) -> None:
    """A weight of rank 1 goes bad after prefill, which reads the same weights."""
    engine.load(1, CAPACITY)
    if engine.mode == "paired":
        engine.decode_step.set_verdict_rule(torch.inf)
    _generate(engine, spoils=engine.placement.rank == 1)


def _generate(engine: Engine, spoils: bool = False) -> None:
    sampling = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    for token in engine.stream(PROMPT, sampling):
        if engine.placement.rank == 0:
            print(f"token {token.token_id}", flush=True)
        if spoils:
            engine.model.weights.layers[SPOILT_LAYERS[engine.mode]].down[17, 5] = torch.nan


def endless(engine: Engine) -> None:
    """Steps without end, at the cache's last position once it is full; each rank prints its process id.

    Rounds begin again and again, as there is no room for drafts at the end.
    """
    engine.load(1, CAPACITY)
    sampling = SamplingConfig(max_new_tokens=1, ignore_eos=True)
    for _ in engine.stream(PROMPT, sampling):
        pass
    generation = engine.generation
    assert engine.uses_graph
    assert engine.transport_name == sys.argv[2]
    first, steps = generation.requests[0].token_ids, 10**9 if engine.config.draft == "off" else 20
    passes = (engine.decode(first, [len(PROMPT) + 1], steps, [PROMPT]) for _ in itertools.repeat(None))
    for count, _ in enumerate(itertools.chain.from_iterable(passes)):
        if count == 50:
            sys.stdout.write(f"{json.dumps({'rank': engine.placement.rank, 'pid': os.getpid()})}\n")
            sys.stdout.flush()


def broken(engine: Engine) -> None:
    """A whole generation, then others that half of the ranks break off a token later, a whole one after each."""
    engine.load(1, CAPACITY)
    results = []
    for sampling in (None, GREEDY, SAMPLED, GREEDY):  # another way of sampling takes another captured step
        if sampling is not None:
            for count, _ in enumerate(engine.stream(PROMPT, sampling)):
                # A step is launched ahead. Two tokens later a rank would wait for a step that others never launch.
                if count == 4 + engine.placement.rank % 2:
                    break
        results.append([token.token_id for token in engine.stream(PROMPT, GREEDY)])
    _report(engine, "broken", results)
    for count, _ in enumerate(engine.stream(PROMPT, GREEDY)):  # `close` comes next
        if count == 4 + engine.placement.rank % 2:
            break


WORK = {"broken": broken, "delay": delay, "pause": pause, "swaps": swaps, "lost": lost, "nan": nan, "endless": endless}

if __name__ == "__main__":
    sys.exit(main())
