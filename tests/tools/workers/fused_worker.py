"""One rank of a group that decodes with fused steps over collectives; started with torchrun's variables.

Run as `fused_worker.py FOLDER`: reads FOLDER/spec.json, writes the tokens of each request to FOLDER/rank{RANK}.json.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
from model_runner import load_model
from paths import TOOLS

from alspec.config import SamplingConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport, connect_store
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")


def main(folder: Path) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    torch.set_num_threads(1)
    placement = Placement.from_environment()
    transport = Transport(placement, CPU, "gloo", connect_store(placement))
    model, prompts = load_model(Path(spec["model"]), transport), spec["prompts"]
    capacity = max(map(len, prompts)) + spec["tokens"]
    cache = new_cache("bf16", model.config, placement.tp_size, len(prompts), capacity, torch.float32, CPU)
    captured = build_captured_step(model, cache, transport, None, False, no_hook)
    captured.prepare(SamplingConfig())
    tokens = [
        [int(prefill(model, cache, transport, index, ids, no_hook)[0].argmax())] for index, ids in enumerate(prompts)
    ]
    captured.begin([made[0] for made in tokens], [len(ids) + 1 for ids in prompts])
    for remaining in range(spec["tokens"] - 1, 0, -1):
        for made, new in zip(tokens, captured.step(remaining).token_ids, strict=True):
            made += new
    (folder / f"rank{placement.rank}.json").write_text(json.dumps(tokens))
    transport.barrier()
    transport.close()


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    runpy.run_path(str(TOOLS / "interpreter.py"))
    main(Path(sys.argv[1]))
