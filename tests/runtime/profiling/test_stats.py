"""Statistics of a generation: percentiles, bytes, bandwidth, hit rates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alspec.config import SamplingConfig
from alspec.models.llama import Shard, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.predictor import predictor_ranges
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.runtime.engine.generation import Generation, IdDecoder, Request
from alspec.runtime.profiling import stats
from alspec.runtime.profiling.stats import (
    draft_summary,
    mean_lengths,
    percentile,
    step_bytes,
    stream_bandwidth,
    summarize,
)

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, 100 * share))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_percentile_ends_and_order() -> None:
    values = [4.0, 1.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 1.0)] == [1.0, 3.0, 4.0]
    assert values == [4.0, 1.0, 3.0]
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_step_bytes_are_all_weights_and_the_cache(tp_size: int, tied: bool) -> None:
    """Every weight once, except rows of the embedding table, and K and V of every token."""
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_qo_heads=8,
        num_kv_heads=4,
        head_dim=10,
        vocab_size=301,
        tie_word_embeddings=tied,
    )
    shard = Shard(tp_size - 1, tp_size, tp_size - 1, tp_size)
    weights = random_weights(config, shard, torch.bfloat16, CPU)
    read = sum(tensor.nbytes for layer in weights.layers for tensor in layer.tensors.values())
    read += weights.final_norm.nbytes + weights.lm_head.nbytes
    cache = 2 * config.num_layers * (config.num_kv_heads // tp_size) * config.head_dim * 2
    assert step_bytes(config, shard, torch.bfloat16, [100, 7]) == read + 107 * cache
    wide = config.model_copy(update={"head_dim": 64})
    heads = wide.num_kv_heads // tp_size
    smaller, larger = (QuantisedCache("turbo2", wide.num_layers, 1, heads, n, 64, CPU).num_bytes for n in (64, 256))
    weights_alone = step_bytes(wide, shard, torch.bfloat16, [0])
    assert step_bytes(wide, shard, torch.bfloat16, [128, 64], "turbo2") == weights_alone + larger - smaller


def test_stream_bandwidth_is_plausible() -> None:
    assert 1e8 < stream_bandwidth(CPU) < 1e13


def request(prompt_tokens: int, new_tokens: int) -> Request:
    made = Request([1] * prompt_tokens, IdDecoder(), SamplingConfig(max_new_tokens=new_tokens), [])
    for token_id in range(new_tokens):
        made.push(token_id)
    return made


def test_a_summary_of_two_requests_by_hand() -> None:
    """Two requests of 4 and 2 tokens: 3 decode steps. The second request is live in the first step only."""
    hits = torch.tensor(
        [
            [[True, True], [True, False]],
            [[False, True], [True, True]],
            [[True, True], [True, True]],
        ]
    )
    generation = Generation([request(400, 4), request(319, 2)], 2_000.0, [1_000.0, 3_000.0, 2_000.0], list(hits))
    summary = summarize(generation, 320)
    assert summary["prompt_tokens"] == [400, 319]
    assert summary["new_tokens"] == [4, 2]
    assert summary["ttft_ms"] == 2.0
    assert summary["ms_per_token_p50"] == 2.0
    assert summary["ms_per_token_p90"] == pytest.approx(2.8)
    assert summary["ms_per_token_p99"] == pytest.approx(2.98)
    assert summary["tokens_per_s"] == pytest.approx(4 / 6e-3)
    # Live: [T, T], [F], [T] in layer 0 and [T, F], [T], [T] in layer 1.
    assert summary["hit_rate_per_layer"] == pytest.approx([3 / 4, 3 / 4])
    assert summary["hit_rate"] == pytest.approx(0.75)


def test_a_summary_of_rounds_by_hand() -> None:
    """Two requests; the second ends in the second of three steps. Tokens of a round share its time."""
    generation = Generation([request(40, 8), request(31, 5)], 2_000.0, [4_000.0, 3_000.0, 6_000.0])
    generation.rounds = [[(3, 3), (3, 1)], [(0, 0), (2, 0)], [(2, 1)]]
    summary = summarize(generation, 320)
    times = sorted([4 / 3, 3.0, 3.0])  # 3, 1 and 2 tokens of each request
    assert summary["ms_per_token_p50"] == pytest.approx(times[1])
    assert summary["tokens_per_s"] == pytest.approx(11 / 13e-3)
    drafts = summary["drafts"]
    assert drafts["tokens_per_step"] == pytest.approx((4 + 2 + 1 + 1 + 2) / 5)
    assert drafts["tokens_per_round"] == pytest.approx((4 + 2 + 1 + 2) / 4)
    assert (drafts["rounds"], drafts["accepted_histogram"]) == (4, [1, 2, 0, 1])
    assert drafts["accepted_by_place"] == pytest.approx([3 / 4, 1 / 4, 1 / 2])
    assert draft_summary([]) is None
    assert draft_summary([[(0, 0)]]) == {
        "tokens_per_step": 1.0,
        "tokens_per_round": None,
        "rounds": 0,
        "accepted_histogram": [0],
        "accepted_by_place": [],
    }


@pytest.mark.parametrize("goes_on", [False, True], ids=["eager", "captured"])
def test_mean_lengths_are_those_of_the_steps(goes_on: bool) -> None:
    """Two requests end early. The steps go on for the longest request."""
    counts = (8, 3, 1)
    generation = Generation([request(10, count) for count in counts], 1.0, [1.0] * 7)
    steps = [[10 + (step if goes_on else min(step, count)) for step in range(1, 8)] for count in counts]
    assert mean_lengths(generation, goes_on) == pytest.approx([sum(lengths) / 7 for lengths in steps])


def test_summary_counts_live_requests_only() -> None:
    hits = [torch.tensor([[True, False]]), torch.tensor([[True, False]])]
    summary = summarize(Generation([request(1000, 3), request(1000, 1)], 1.0, [1.0, 1.0], hits), 320)
    assert summary["hit_rate"] == 1.0


@pytest.mark.parametrize(("prompt_tokens", "rate"), [(319, 1 / 3), (318, 0.0), (317, 0.0), (316, None), (4, None)])
def test_summary_counts_predictors_that_leave_tokens_out(prompt_tokens: int, rate: float | None) -> None:
    """With S = 128 from 320 tokens on. Before, `A~ = A` and every layer hits. Only the first of three steps hits."""
    hits = [torch.tensor([[True]]), torch.tensor([[False]]), torch.tensor([[False]])]
    n = torch.tensor([prompt_tokens + step for step in (1, 2, 3)])
    sink_end, window_start = predictor_ranges(n, 128)
    if prompt_tokens < 319:  # `A~` of all tokens hits, the others miss
        hits = [torch.tensor([[bool(end == start)]]) for end, start in zip(sink_end, window_start, strict=True)]
    summary = summarize(Generation([request(prompt_tokens, 4)], 1.0, [1.0] * 3, hits), 320)
    assert summary["hit_rate"] == pytest.approx(rate)
    assert summary["hit_rate_per_layer"] == (None if rate is None else pytest.approx([rate]))


def test_summary_of_one_token() -> None:
    """Nothing was decoded: times per token and hit rate are None, without a division by zero."""
    summary = summarize(Generation([request(4, 1)], 500.0), 320)
    assert summary["ttft_ms"] == 0.5
    for name in ("ms_per_token_p50", "ms_per_token_p90", "ms_per_token_p99", "tokens_per_s", "hit_rate"):
        assert summary[name] is None


def test_bandwidth_counts_reads_and_writes_of_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "seconds_in_a_row", lambda run, count, device: [0.5, 0.25, 1.0])
    assert stream_bandwidth(CPU) == 2 * 2**26 / 0.25


def test_steps_in_which_groups_decoded_alone_have_no_verdicts() -> None:
    """The second of three steps; with S = 128, `A~` leaves tokens out from 320 on, so from the second step."""
    hits = [torch.tensor([[True], [True]]), None, torch.tensor([[True], [False]])]
    summary = summarize(Generation([request(318, 4)], 1.0, [1.0] * 3, hits), 320)
    assert (summary["alone_steps"], summary["hit_rate"], summary["hit_rate_per_layer"]) == (1, 0.5, [1.0, 0.0])
