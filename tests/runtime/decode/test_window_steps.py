"""Models with a sliding window, in contexts longer than it: every mode, cache and kind of step against an oracle.

The windows are longer than what `A~` reads (S = 128 in every test), so that layers with a window speculate, too.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner import load_model
from tiers import fast

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.cache.window_cache import WindowCache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")
NEW_TOKENS = 8
MODELS = ["window_folder", "mixed_folder"]
# The window of one request begins behind the sink, that of another one within it, and a third one is no longer than it.
CASES = [([700], 0.05, 0), ([700], 0.1, 2), ([640, 130, 500], 0.15, 2), ([450, 575], 0.1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "model"), fast(list(itertools.product([1, 2, 4], MODELS)), keep=[(2, "mixed_folder")])
)
def test_tokens_and_verdicts_of_the_oracle(
    model: str, world_size: int, run_ranks: Any, oracle_of: Any, make_prompt: Any, request: pytest.FixtureRequest
) -> None:
    """`simulated` and `paired`, with and without recalled blocks; prompts, lists, verdicts and tokens."""
    folder = request.getfixturevalue(model)
    modes = {1: ["simulated"], 2: ["paired", "simulated"], 4: ["paired"]}[world_size]
    verdicts = set()
    for recall_blocks in (0, 2):
        cases = [
            {
                "name": f"{lengths} at {threshold}",
                "threshold": threshold,
                "prompts": [make_prompt(length, seed=length) for length in lengths],
                "max_new_tokens": [NEW_TOKENS - request for request in range(len(lengths))],
            }
            for lengths, threshold, recalled in CASES
            if recalled == recall_blocks
        ]
        ranks = run_ranks(world_size, {mode: cases for mode in modes}, model=folder, recall_blocks=recall_blocks)
        for case in cases:
            args = case["prompts"], case["max_new_tokens"], case["threshold"]
            expected = oracle_of(folder).generate(*args, recall_blocks=recall_blocks)
            lengths = [len(tokens) for tokens in expected.tokens]
            for found in (rank[f"{mode} {case['name']}"] for rank in ranks for mode in modes):
                assert found["tokens"] == expected.tokens
                for step, layers in enumerate(found["hits"]):
                    live = [[bool(h) and step < n - 1 for h, n in zip(hits, lengths, strict=True)] for hits in layers]
                    assert live == expected.steps[step].hit_map.tolist()
            verdicts |= {bool(hit) for step in expected.steps for hit in step.hit_map.flatten()}
    assert verdicts == {False, True}


def eager_tokens(folder: Path, codec: str, prompts: list[list[int]], count: int) -> tuple[list[list[int]], Cache]:
    """Greedy tokens of plain eager steps over a cache that holds the whole context."""
    transport = Transport(Placement(), CPU, "gloo", None)
    model = load_model(folder, transport)
    cache = new_cache(
        codec, model.config, 1, len(prompts), max(map(len, prompts)) + count, torch.float32, CPU, keeps_context=True
    )
    tokens = [
        [int(prefill(model, cache, transport, request, ids, no_hook)[0].argmax())]
        for request, ids in enumerate(prompts)
    ]
    eager = EagerStep(model, cache, transport, "off", SpeculationConfig(), no_hook)
    while len(tokens[0]) < count:
        lengths = torch.tensor([len(ids) + len(made) for ids, made in zip(prompts, tokens, strict=True)])
        newest = torch.tensor([made[-1] for made in tokens])
        result = eager.run(DecodeState(newest, lengths.int(), torch.ones(len(prompts), dtype=torch.bool)))
        for made, new in zip(tokens, result.logits.argmax(-1).tolist(), strict=True):
            made.append(new)
    return tokens, cache


@pytest.mark.parametrize(
    ("codec", "model"),
    fast(
        [(codec, "mixed_folder") for codec in ("bf16", "turbo4", "turbo-mixed", "turboquant3", "hybrid-k4v2")]
        + [("bf16", "window_folder")],
        keep=[],
    ),
)
def test_a_captured_step_over_the_whole_context(
    codec: str, model: str, make_prompt: Any, request: pytest.FixtureRequest
) -> None:
    """Fused `off` steps over a cache without rings give the tokens of eager ones, and those of the rings."""
    folder, count = request.getfixturevalue(model), 4
    prompts = [make_prompt(510, seed=3), make_prompt(130, seed=4)]
    expected, held = eager_tokens(folder, codec, prompts, count)
    transport = Transport(Placement(), CPU, "gloo", None)
    weights = load_model(folder, transport)
    for keeps_context in (True, False) if codec == "bf16" else (True,):
        cache = new_cache(
            codec, weights.config, 1, 2, held.max_context, torch.float32, CPU, keeps_context=keeps_context
        )
        assert isinstance(cache, WindowCache) != keeps_context
        captured = build_captured_step(weights, cache, transport, None, False, no_hook)
        captured.prepare(SamplingConfig())
        tokens = [
            [int(prefill(weights, cache, transport, index, ids, no_hook)[0].argmax())]
            for index, ids in enumerate(prompts)
        ]
        captured.begin([made[0] for made in tokens], [len(ids) + 1 for ids in prompts])
        for remaining in range(count - 1, 0, -1):
            record = captured.step(remaining)
            assert record.fault == 0
            for made, new in zip(tokens, record.token_ids, strict=True):
                made += new
        assert tokens == expected
