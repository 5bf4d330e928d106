"""Steps that recall blocks, on 1, 2 and 4 processes, against the fp64 oracle: prompts, lists, verdicts and tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import fast

pytestmark = pytest.mark.slow

BLOCKS, NEW_TOKENS = 2, 9
CASES = [([700], 0.05), ([700], 0.1), ([640, 130, 500], 0.1)]
MODES = {1: ["simulated"], 2: ["paired", "simulated"], 4: ["paired"]}


@pytest.fixture(scope="module")
def cases(make_prompt: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{lengths} at {threshold}",
            "threshold": threshold,
            "prompts": [make_prompt(length, seed=length) for length in lengths],
            "max_new_tokens": [NEW_TOKENS - request for request in range(len(lengths))],
        }
        for lengths, threshold in CASES
    ]


@pytest.mark.parametrize("world_size", fast([1, 2, 4], keep=[2]))
def test_tokens_and_verdicts_of_the_oracle(
    world_size: int, run_ranks: Any, oracle: Any, cases: list[dict[str, Any]]
) -> None:
    modes = MODES[world_size]
    ranks = run_ranks(world_size, {mode: cases for mode in modes}, recall_blocks=BLOCKS)
    differs = False
    for case in cases:
        args = case["prompts"], case["max_new_tokens"], case["threshold"]
        expected = oracle.generate(*args, recall_blocks=BLOCKS)
        hit_maps = [step.hit_map.tolist() for step in expected.steps]
        differs |= hit_maps != [step.hit_map.tolist() for step in oracle.generate(*args).steps]
        for mode in modes:
            for rank in ranks:
                found = rank[f"{mode} {case['name']}"]
                assert found["tokens"] == expected.tokens
                lengths = [len(tokens) for tokens in expected.tokens]
                live = [
                    [
                        [bool(hit) and step < length - 1 for hit, length in zip(layer, lengths, strict=True)]
                        for layer in layers
                    ]
                    for step, layers in enumerate(found["hits"])
                ]
                assert live == hit_maps
    assert differs, "recalled blocks change verdicts"
