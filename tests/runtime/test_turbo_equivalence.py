"""Decoding over the quantised cache: every mode alike, on one process and on two, with the demo checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from alspec.models.config import LlamaConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

# The first one's decoding completes a block; both leave tokens out of sink and window.
LENGTHS, NEW_TOKENS = (508, 397), 6
MODES = {1: ("off", "simulated"), 2: ("off", "simulated", "paired")}
TEXT = (
    "Once upon a time there was a little girl who lived near a big forest with her mother. One day she found a small "
    "red box under a tree. She opened it and saw a bird. The bird said that it was lost and wanted to go home. "
)

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=["exact", "sas"])
def results(run_ranks: Any, request: pytest.FixtureRequest) -> Results:
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    ids = tokenizer.encode(TEXT * 12)
    prompts = [ids[:length] for length in LENGTHS]
    assert tuple(map(len, prompts)) == LENGTHS
    case = {"prompts": prompts, "max_new_tokens": [NEW_TOKENS] * 2}
    found = {}
    for world_size, modes in MODES.items():
        spec = {
            mode: [
                case | {"name": f"at {threshold}", "threshold": threshold}
                for threshold in (0.0, 0.02)
                if mode != "off" or threshold == 0.0
            ]
            for mode in modes
        }
        found[world_size] = run_ranks(world_size, spec, model=DEMO_CHECKPOINT, kv_cache="turbo4", softmax=request.param)
    return found


def test_ranks_agree(results: Results) -> None:
    first, second = results[2]
    for name, run in first.items():
        assert [run[key] for key in ("tokens", "hits")] == [second[name][key] for key in ("tokens", "hits")], name


def test_every_mode_gives_the_same_tokens_without_a_hit(results: Results) -> None:
    expected = results[1][0]["off at 0.0"]["tokens"]
    assert [len(tokens) for tokens in expected] == [NEW_TOKENS] * 2
    for world_size, modes in MODES.items():
        for mode in modes:
            run = results[world_size][0][f"{mode} at 0.0"]
            assert run["tokens"] == expected, (world_size, mode)
            assert not any(hit for step in run["hits"] for layer in step for hit in layer)


def test_paired_is_simulated(results: Results) -> None:
    """Tokens and verdicts, where some layers accept: both groups' caches hold the same bits."""
    expected = results[1][0]["simulated at 0.02"]
    hits = [hit for step in expected["hits"] for layer in step for hit in layer]
    assert 0 < sum(hits) < len(hits)
    for mode in ("simulated", "paired"):
        run = results[2][0][f"{mode} at 0.02"]
        assert run["tokens"] == expected["tokens"], mode
        assert run["hits"] == expected["hits"], mode
