"""One rank of two paired groups whose fused steps exchange messages over a link; started with torchrun's variables.

Run as `linked_worker.py FOLDER`: reads FOLDER/spec.json, writes FOLDER/rank{RANK}.json. It holds, for each case, tokens
and hits of each step, and a hash of the cache. With `"packets": true` the ranks of a group exchange packets through
memory that their processes share. In a case that is `late`, messages leave late and their arrival is noted late, at
random; then it also holds how many layers took x of the other group, in which the groups differ.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from model_runner import load_model
from paths import TOOLS
from triton.runtime.interpreter import InterpretedFunction

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.kernels.comm.ll_packets import wait_packets
from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed import host_memory
from alspec.runtime.distributed.pair_link import PairLink
from alspec.runtime.distributed.placement import PeerMemory, Placement
from alspec.runtime.distributed.transport import Transport, connect_store
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")
PACKETS_WITHIN_S = 60


def share_memory_of_the_host() -> None:
    """Share pages that are not pinned, and let the interpreter wait for packets in them."""
    load, shared = InterpretedFunction.__call__, []

    def pin(pages: mmap.mmap, _: torch.device) -> torch.Tensor:
        shared.append(torch.frombuffer(pages, dtype=torch.int64))
        return shared[-1]

    def is_absent(address: Any, value: Any) -> bool:
        """Whether a packet in shared memory has not arrived. Messages of the link are awaited elsewhere."""
        absent = address.handle.data[np.isnan(value.handle.data)]
        return any(((absent >= each.data_ptr()) & (absent < each.data_ptr() + each.nbytes)).any() for each in shared)

    def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        deadline = time.monotonic() + PACKETS_WITHIN_S
        while self is wait_packets and is_absent(args[0], found):
            assert time.monotonic() < deadline, "a packet did not arrive"
            time.sleep(0.001)
            found = load(self, *args, **kwargs)
        return found

    host_memory._pin, InterpretedFunction.__call__ = pin, call


@contextmanager
def late_messages(placement: Placement) -> Iterator[None]:
    """Send some messages late, and leave some that have arrived unnoticed for a while.

    The verifier is later, as on a GPU, so that the speculator is ahead of it now and then.
    """
    draw, send, poll = random.Random(placement.rank), PairLink.send, PairLink.poll
    delays = [0, 0, 0, 0.02] if placement.group else [0, 0.02, 0.1]

    def late_send(link: PairLink, message: torch.Tensor) -> None:
        time.sleep(draw.choice(delays))
        send(link, message)

    def late_poll(link: PairLink) -> None:
        if draw.random() < 0.5:
            poll(link)

    with mock.patch.object(PairLink, "send", late_send), mock.patch.object(PairLink, "poll", late_poll):
        yield


class Script:
    """Says for each step whether it speculates, as a policy does."""

    def __init__(self, kinds: list[bool]) -> None:
        self.kinds, self.place, self.recorded = kinds, 0, 0

    def begin(self) -> None:
        self.place = 0

    def decide_next(self, num_tokens: int) -> bool:
        self.place += 1
        return self.kinds[self.place - 1]

    def lead(self, num_tokens: int) -> int:
        """One layer, or two: the text does not depend on it."""
        return 1 + self.place % 2

    def record(self, accepted: list[bool], num_tokens: int) -> None:
        self.recorded += 1


def digest(cache: Cache) -> str:
    tensors = [cache.k, cache.v] if isinstance(cache, KVCache) else list(cache.layers.tensors.values())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def run_case(model: Llama, transport: Transport, case: dict[str, Any], has_packets: bool) -> dict[str, Any]:
    config, prompts = model.config, case["prompts"]
    capacity = max(map(len, prompts)) + max(sum(threshold["steps"] for threshold in case["thresholds"]), 2)
    tp_size = transport.placement.tp_size
    sizes = tp_size, len(prompts), capacity
    cache = new_cache(case["kv_cache"], config, *sizes, torch.float32, CPU, keeps_context=True)
    speculation = SpeculationConfig(mode="paired", chunk_size=128, **case.get("predictor", {"predictor": "window"}))
    memory: PeerMemory | None = "host" if has_packets else None
    policy: Any = Script(case["kinds"]) if "kinds" in case else None
    captured = build_captured_step(model, cache, transport, memory, False, no_hook, speculation, policy)
    assert (captured._decoder.exchange.packets is not None) == has_packets
    found, taken = [], 0
    for threshold in case["thresholds"]:
        forced = torch.tensor(threshold["forced"], dtype=torch.int32) if "forced" in threshold else None
        captured.set_verdict_rule(float(threshold["value"]), forced)
        fault = captured.prepare(SamplingConfig())
        tokens = [
            int(prefill(model, cache, transport, request, ids, no_hook)[0].argmax())
            for request, ids in enumerate(prompts)
        ]
        captured.begin(tokens, [len(ids) + 1 for ids in prompts])
        for step in range(threshold["steps"]):
            live = [step < limit for limit in case["live_steps"]]
            record = captured.step(threshold["steps"] - step, live)
            taken += int(captured._decoder.pair.gates[0, : config.num_layers, 0].sum())
            hits = None if record.hits is None else record.hits.int().tolist()
            made = [token for (token,) in record.token_ids]
            found.append({"tokens": made, "hits": hits, "fault": record.fault | fault})
    assert policy is None or policy.recorded == sum(case["kinds"])
    counted = {"taken": taken} if case.get("late") else {}
    return {"steps": found, "cache": digest(cache)} | counted


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    torch.set_num_threads(1)
    environment = Placement.from_environment()
    placement = Placement(environment.rank, environment.world_size, num_groups=2, is_linked=True)
    transport = Transport(placement, CPU, "gloo", connect_store(placement))
    model = load_model(Path(spec["model"]), transport)
    if spec["packets"]:
        share_memory_of_the_host()
    results = []
    for case in spec["cases"]:
        with late_messages(placement) if case.get("late") else nullcontext():
            results.append(run_case(model, transport, case, spec["packets"]))
    (folder / f"rank{placement.rank}.json").write_text(json.dumps(results))
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    runpy.run_path(str(TOOLS / "interpreter.py"))
    main(Path(sys.argv[1]))
