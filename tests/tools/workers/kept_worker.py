"""One rank of a conversation; started with torchrun's variables.

Run as `kept_worker.py FOLDER`: reads FOLDER/spec.json, writes FOLDER/rank{RANK}.json with the prompt, the tokens and
the reused tokens of each turn. Before the last turn, rank 1 forgets what its cache holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from alspec.config import SamplingConfig
from alspec.runtime.engine.engine import Engine


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    spec = json.loads((folder / "spec.json").read_text())
    speculation = {"mode": spec["mode"], "threshold": spec["threshold"], "predictor": "window"}
    engine = Engine.from_pretrained(
        spec["model"], transport="gloo", dtype="fp32", max_context=700, speculation=speculation
    )
    sampling = SamplingConfig(max_new_tokens=spec["new"], ignore_eos=True)
    turns: list[dict[str, Any]] = []
    prompt = spec["first"]
    for turn in range(3):
        if turn == 2 and engine.placement.rank == 1:
            engine._kept.forget()
        tokens = [token.token_id for token in engine.stream(prompt, sampling)]
        turns.append({"prompt": prompt, "tokens": tokens, "reused": engine.generation.reused_tokens[0]})
        prompt = [*prompt, *tokens, 1, 2, 3]
    engine.close()
    (folder / f"rank{engine.placement.rank}.json").write_text(json.dumps(turns))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
