"""Print a table of every family: greedy tokens of this project and of transformers, as docs/transcripts.md shows them.

Run from the root of the repository: `python tests/tools/family_table.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from family_models import CASES, greedy, save_family

from alspec import Engine

__all__ = ["family_table"]

NUM_PROMPT, NUM_NEW, NUM_SHOWN = 61, 32, 8


def family_table(cases: list[str]) -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        f"| case | family, RoPE | first {NUM_SHOWN} tokens of alspec | of transformers | all {NUM_NEW} |",
        "| --- | --- | --- | --- | --- |",
    ]
    ids = torch.randint(151, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            expected = greedy(save_family(Path(folder), case), ids, NUM_NEW)
            with Engine.from_pretrained(folder, dtype="fp32", transport="gloo") as engine:
                found = [token.token_id for token in engine.stream(ids, max_new_tokens=NUM_NEW, ignore_eos=True)]
        family, settings = CASES[case]
        rope = settings.get("rope_parameters", {}).get("rope_type", "default")
        shown = (" ".join(map(str, tokens[:NUM_SHOWN])) for tokens in (found, expected))
        verdict = "equal" if found == expected else "differ"
        lines.append(f"| {case} | {family}, {rope} | {' | '.join(shown)} | {verdict} |")
    return lines


if __name__ == "__main__":
    print("\n".join(family_table(sys.argv[1:] or list(CASES))))
