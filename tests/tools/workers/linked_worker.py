"""One rank of two paired groups whose fused steps exchange messages over a link; started with torchrun's variables.

Run as `linked_worker.py FOLDER`: reads FOLDER/spec.json, writes FOLDER/rank{RANK}.json. It holds the tokens and
hits of each step of each case, and a hash of the cache after each case.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from model_runner import load_model
from paths import TOOLS

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.models.llama import Llama
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")


def digest(cache: Cache) -> str:
    tensors = [cache.k, cache.v] if isinstance(cache, KVCache) else list(cache.layers.tensors.values())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def run_case(model: Llama, transport: Transport, case: dict[str, Any]) -> dict[str, Any]:
    config, prompts = model.config, case["prompts"]
    capacity = max(map(len, prompts)) + max(sum(threshold["steps"] for threshold in case["thresholds"]), 2)
    tp_size = transport.placement.tp_size
    sizes = tp_size, len(prompts), capacity
    cache = new_cache(case["kv_cache"], config, *sizes, torch.float32, CPU, keeps_context=True)
    speculation = SpeculationConfig(mode="paired", chunk_size=128, **case.get("predictor", {"predictor": "window"}))
    captured = build_captured_step(model, cache, transport, None, False, no_hook, speculation)
    found = []
    for threshold in case["thresholds"]:
        forced = torch.tensor(threshold["forced"], dtype=torch.int32) if "forced" in threshold else None
        captured.speculate(float(threshold["value"]), forced)
        fault = captured.prepare(SamplingConfig())
        tokens = [
            int(prefill(model, cache, transport, request, ids, no_hook)[0].argmax())
            for request, ids in enumerate(prompts)
        ]
        captured.begin(tokens, [len(ids) + 1 for ids in prompts])
        for step in range(threshold["steps"]):
            live = [step < limit for limit in case["live_steps"]]
            record = captured.step(threshold["steps"] - step, live)
            assert record.hits is not None
            made = [token for (token,) in record.token_ids]
            found.append({"tokens": made, "hits": record.hits.int().tolist(), "fault": record.fault | fault})
    return {"steps": found, "cache": digest(cache)}


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    torch.set_num_threads(1)
    environment = Placement.from_environment()
    placement = Placement(environment.rank, environment.world_size, num_groups=2, is_linked=True)
    transport = Transport(placement, CPU, "gloo", connect_store(placement))
    model = load_model(Path(spec["model"]), transport)
    results = [run_case(model, transport, case) for case in spec["cases"]]
    (folder / f"rank{placement.rank}.json").write_text(json.dumps(results))
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    runpy.run_path(str(TOOLS / "interpreter.py"))
    main(Path(sys.argv[1]))
