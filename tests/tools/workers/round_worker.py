"""One rank that decodes by rounds; started with torchrun's variables.

Run as `round_worker.py FOLDER`: reads FOLDER/spec.json, writes FOLDER/rank{RANK}.json with the tokens and the rounds of
each case. With `is_captured`, rounds run over the fused kernels. A case runs twice in one engine, the second time with
longer prompts. Between the two, rank 1 forgets what the cache of its draft model holds, as after an interrupt.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from alspec.config import SamplingConfig
from alspec.runtime.decode.rounds.model_drafter import ModelDrafter
from alspec.runtime.decode.rounds.round_step import RoundStep
from alspec.runtime.engine.engine import Engine

TOOLS = Path(__file__).parents[1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    spec = json.loads((folder / "spec.json").read_text())
    found: dict[str, Any] = {}
    for name, options in spec["cases"].items():
        engine = Engine.from_pretrained(spec["model"], transport="gloo", dtype="fp32", max_context=300, **options)
        if spec["is_captured"] and "draft" in options:
            from round_cases import put_captured

            engine.load(len(spec["prompts"]), 300)
            put_captured(engine)
        found[name] = []
        for prompts in (spec["prompts"], [[*ids, 5, 9, 30] for ids in spec["prompts"]]):
            step = engine.decode_step
            if isinstance(step, RoundStep) and isinstance(step._drafter, ModelDrafter) and engine.placement.rank == 1:
                step._drafter._held.fill_(-1)
            for how in spec["how"]:
                list(engine.stream(prompts, SamplingConfig(**how)))
                generation = engine.generation
                tokens = [request.token_ids for request in generation.requests]
                found[name].append({"tokens": tokens, "rounds": generation.rounds})
        engine.close()
    (folder / f"rank{engine.placement.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(TOOLS))
    assert os.environ["TRITON_INTERPRET"] == "1"
    runpy.run_path(str(TOOLS / "interpreter.py"))
    main(Path(sys.argv[1]))
