"""A real model: texts with drafts are those of plain decoding, and those of a pair are simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import smollm2
from paths import ROOT
from smollm2 import texts

from alspec.config import EngineConfig
from alspec.models.checkpoint.source import model_config, open_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.slow]

NEW_TOKENS = 24
# From 448 tokens on, sink, window and two recalled blocks leave out tokens.
BLOCKS = ("--recall-blocks", 2)
# SmolLM2 has 9 query heads and 3 KV heads: a group has 1, 3 or 9 ranks.
GROUP = 3
DRAFTERS = ["ngram", "self", "model:smollm2"]
CACHES = ["bf16", "turbo4"]

Generate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Token ids of 37, 700 and 1500 tokens; the longer ones repeat a passage.

    Over `turbo4` each token of their texts leads the second most likely one by 0.3 nats at least, because on a GPU
    rounding may change a code of the cache.
    """
    smollm2.installed()
    config = EngineConfig(model=smollm2.NAME)
    tokenizer = open_tokenizer(config, model_config(config))
    ids = tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))
    return [ids[1474:1511], ids[700:1100] + ids[700:1000], ids[:800] + ids[:700]]


@pytest.fixture(scope="module")
def generate(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Generate:
    """`generate(transport, ranks, "--flag", ...)`: what --json writes for the batch of prompts. A run is made once."""
    folder = tmp_path_factory.mktemp("smollm2")
    found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def call(transport: str, ranks: int, *flags: object) -> dict[str, Any]:
        key = (transport, ranks, *flags)
        if key not in found:
            length = ("--max-new-tokens", NEW_TOKENS)
            found[key] = smollm2.generate(prompts, folder, ranks, "--transport", transport, *length, *flags)
        return found[key]

    return call


@pytest.mark.parametrize(
    ("transport", "ranks"), [("gloo", 1), ("gloo", GROUP), pytest.param("auto", 1, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token(drafter: str, cache: str, transport: str, ranks: int, generate: Generate) -> None:
    plain = generate(transport, ranks, "--kv-cache", cache)
    drafts = ("--draft", drafter, "--draft-always", *(BLOCKS if drafter == "self" else ()))
    found = generate(transport, ranks, "--kv-cache", cache, *drafts)
    assert texts(found) == texts(plain)
    assert found["requests"][1]["prompt_ids"] == plain["requests"][1]["prompt_ids"]
    assert [len(text) for text in texts(found)] == [NEW_TOKENS] * 3
    accepted = found["summary"]["drafts"]["accepted_histogram"]
    assert sum(accepted[1:]) > 0


@pytest.mark.parametrize("transport", ["gloo", pytest.param("auto", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])])
@pytest.mark.parametrize("cache", CACHES)
def test_a_pair_gives_what_is_simulated(cache: str, transport: str, generate: Generate) -> None:
    """Tokens and every verdict; some verdicts reject."""
    flags = ("--kv-cache", cache, *BLOCKS)
    simulated = generate(transport, 1, *flags, "--speculation", "simulated")
    paired = generate(transport, 2, *flags, "--speculation", "paired")
    assert texts(paired) == texts(simulated)
    assert paired["hit_map"] == simulated["hit_map"]
    assert 0 < paired["summary"]["hit_rate"] < 1
