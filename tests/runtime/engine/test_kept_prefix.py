"""The kept prefix: a prompt that begins with what the cache holds gives the same tokens as one processed anew."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jobs
import pytest
import torch
from comparison import close
from paths import WORKERS
from tiers import fast

from alspec.config import QUANTISED_CODECS, SamplingConfig
from alspec.errors import BadNumbersError
from alspec.kernels.kv_codec.codec_reference import kv_dequantize
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.runtime.decode.eager_step import EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.engine.composition import build_cache
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.kept_prefix import KeptPrefix, common_prefix

MakePrompt = Callable[[int, int], list[int]]
Oracle = Any  # of conftest.py
WORKER = WORKERS / "kept_worker.py"
NEW = 9
SAMPLING = SamplingConfig(max_new_tokens=NEW, ignore_eos=True)


def engine_of(folder: Path, max_context: int = 700, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, transport="gloo", dtype="fp32", max_context=max_context, **options)


def answers(engine: Engine, *prompts: list[int]) -> list[list[int]]:
    for _ in engine.stream(list(prompts), SAMPLING):
        pass
    return [request.token_ids for request in engine.generation.requests]


def test_a_tail_is_cut_where_its_answer_parts() -> None:
    """Behind the prompt, in the block of the newest token, by as many tokens as are appended again."""

    def keepable(num_tokens: int, is_whole: bool) -> int:
        return num_tokens // 64 * 64 if is_whole else 0

    cache = mock.Mock(batch_size=1, appends_exactly=False, keepable=keepable)
    for held, common, rest, expected in (
        (90, 90, 5, 90), (90, 80, 5, 80), (90, 70, 5, 70), (90, 69, 5, 0), (140, 130, 5, 130), (140, 127, 5, 0),
        (90, 80, 16, 80), (90, 80, 17, 0),
    ):  # fmt: skip
        kept = KeptPrefix(cache, is_lossless=True, max_appended=16)
        kept.wrote_prompt(0, range(70))
        kept.appended(0, range(70, held))
        assert kept.reusable([[*range(common), *range(500, 500 + rest)]]) == [expected], (held, common, rest)
        kept.cut(0, expected)
        assert cache.cut.called == (expected == 0)
        cache.cut.reset_mock()
    kept.wrote_prompt(0, range(70))
    kept.interrupted()
    assert kept.reusable([list(range(80))]) == [0]


def test_common_prefix() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, 2, 3, 17, 64, 1000):
        ids = torch.randint(3, (length,), generator=generator).tolist()
        for shared in {0, 1, length // 2, max(length - 1, 0), length}:
            for other in ([], [9], [9, 9, 9]):
                assert common_prefix(ids, ids[:shared] + other) == min(shared, length)
                assert common_prefix(ids[:shared] + other, ids) == min(shared, length)


def test_each_turn_gives_the_oracles_tokens(tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt) -> None:
    """A conversation, then prompts that part from it at every place: all equal the oracle, which keeps nothing."""
    engine, history = engine_of(tiny_folder), make_prompt(301, 0)
    reused = []
    for turn in range(3):
        expected = oracle.generate([history], [NEW], 0.0).tokens
        assert answers(engine, history) == expected
        reused += engine.generation.reused_tokens
        history = history + expected[0] + make_prompt(17 + turn, turn + 1)
    # All of the previous prompt and answer but its last token, which no step has read.
    assert reused == [0, 301 + NEW - 1, 301 + NEW + 17 + NEW - 1]
    held = history[: -19 - 1]
    for cut, behind in ((held, []), (held[:300], []), (held[:200], [7, 8, 9]), (held[:1], []), ([7], []), ([], [5, 6])):
        ids = cut + behind
        assert answers(engine, ids) == oracle.generate([ids], [NEW], 0.0).tokens
        assert engine.generation.reused_tokens == [min(len(cut), len(ids) - 1)]
        answers(engine, held)


@pytest.mark.parametrize("model", ["window_folder", "mixed_folder"])
@pytest.mark.parametrize("for_turns", [True, False])
def test_a_conversation_of_a_model_with_a_sliding_window(
    model: str, for_turns: bool, oracle_of: Any, make_prompt: MakePrompt, request: pytest.FixtureRequest
) -> None:
    """Longer than the window. A ring keeps nothing, so a conversation has none; prompts may part from it anywhere."""
    folder = request.getfixturevalue(model)
    engine, history = engine_of(folder), make_prompt(470, 0)
    engine.load(1, 700, for_turns=for_turns)
    reused = []
    for turn in range(2):
        expected = oracle_of(folder).generate([history], [NEW], 0.0).tokens
        assert answers(engine, history) == expected
        reused += engine.generation.reused_tokens
        history = history + expected[0] + make_prompt(17 + turn, turn + 1)
    assert reused == [0, (470 + NEW - 1) * for_turns]
    for cut in (400, 30):
        ids = [*history[:cut], 7, 8, 9]
        assert answers(engine, ids) == oracle_of(folder).generate([ids], [NEW], 0.0).tokens
        assert engine.generation.reused_tokens == [cut * for_turns]


@pytest.mark.parametrize("codec", fast(QUANTISED_CODECS, ["turbo4", "turboquant3"]))
def test_a_quantised_cache_with_a_sliding_window_keeps_whole_blocks(
    mixed_folder: Path, make_prompt: MakePrompt, codec: str
) -> None:
    """As a prompt in two chunks, of which the first one ends where the kept blocks do."""
    engine = engine_of(mixed_folder, kv_cache=codec)
    first = make_prompt(410, 0)
    (answer,) = answers(engine, first)
    goes_on = first + answer + make_prompt(50, 1)
    (found,) = answers(engine, goes_on)
    assert engine.generation.reused_tokens == [384]
    fresh = build_cache(engine._choices, engine.config, engine.model_config, 1, 700)
    transport = engine.connected()
    prefill(engine.model, fresh, transport, 0, first if codec == "turbo-mixed" else first[:384], no_hook)
    logits, _ = prefill(engine.model, fresh, transport, 0, goes_on, no_hook, start=384)
    assert int(logits.argmax()) == found[0]


def test_each_request_of_a_batch_keeps_its_own_prefix(
    tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt
) -> None:
    engine = engine_of(tiny_folder)
    first = [make_prompt(250, 0), make_prompt(90, 1), make_prompt(33, 2)]
    found = answers(engine, *first)
    assert found == oracle.generate(first, [NEW] * 3, 0.0).tokens
    # One goes on, one parts from its prompt, one begins anew.
    second = [first[0] + found[0] + [1, 2, 3], [*first[1][:70], 4, 5], make_prompt(40, 3)]
    assert answers(engine, *second) == oracle.generate(second, [NEW] * 3, 0.0).tokens
    assert engine.generation.reused_tokens == [250 + NEW - 1, 70, common_prefix(second[2], first[2])]


def test_the_cache_is_as_after_prompts_processed_from_their_start(tiny_folder: Path, make_prompt: MakePrompt) -> None:
    """Keys and values are within the tolerance of prompts in several chunks."""
    engine, ids = engine_of(tiny_folder), make_prompt(200, 0)
    (answer,) = answers(engine, ids)
    ids = ids + answer + make_prompt(40, 1)
    next(engine.stream(ids, SAMPLING))
    assert engine.generation.reused_tokens == [200 + NEW - 1]
    fresh = engine_of(tiny_folder)
    next(fresh.stream(ids, SAMPLING))
    for found, expected in ((engine.cache.k, fresh.cache.k), (engine.cache.v, fresh.cache.v)):
        torch.testing.assert_close(found[..., : len(ids), :], expected[..., : len(ids), :], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", fast(QUANTISED_CODECS, ["turbo4", "turbo-mixed", "turboquant3"]))
@pytest.mark.parametrize("protect", [0, 1])
def test_a_quantised_cache_keeps_whole_blocks(
    turbo_folder: Path, make_prompt: MakePrompt, codec: str, protect: int
) -> None:
    """As a prompt in two chunks, of which the first one ends where the kept blocks do; the answer is not kept."""
    engine = engine_of(turbo_folder, kv_cache=codec, kv_protect=protect)
    first = make_prompt(150, 0)
    (answer,) = answers(engine, first)
    goes_on, parts = first + answer + make_prompt(50, 1), first[:140] + make_prompt(60, 2)
    # Each prompt as chunks (tokens so far, start). With `turbo-mixed` the whole first prompt selects the heads.
    chunks_on = [(first if codec == "turbo-mixed" else first[:128], 0), (goes_on, 128)]
    chunks_parts = [(first[:128], 0), (parts, 128)] if codec in ("turbo4", "turbo2") else [(parts, 0)]
    for ids, chunks in ((goes_on, chunks_on), (parts, chunks_parts), (parts, [*chunks_parts, (parts, 192)])):
        next(engine.stream(ids, SAMPLING))
        assert engine.generation.reused_tokens == [chunks[-1][1]]
        fresh = build_cache(engine._choices, engine.config, engine.model_config, 1, 700)
        for tokens, start in chunks:
            prefill(engine.model, fresh, engine.connected(), 0, tokens, no_hook, start=start)
        for layer in range(engine.cache.num_layers):
            found, expected = engine.cache.layer(layer), fresh.layer(layer)
            if isinstance(found, QuantisedLayer):
                assert torch.equal(found.bits, expected.bits)
                # In later layers, codes that rounding has changed change it.
                close(found.tail_scale, expected.tail_scale, 1e-2 if layer else 1e-6)
                lengths = torch.tensor([len(ids) + 1])
                for x, y in zip(kv_dequantize(found, lengths), kv_dequantize(expected, lengths), strict=True):
                    close(x[:, :, : len(ids)], y[:, :, : len(ids)], 1e-2)  # rounding changes some codes


def test_a_speculated_answer_is_not_kept(tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt) -> None:
    """An accepted `A~` changes keys and values: the next prompt processes the answer again."""
    engine = engine_of(tiny_folder, speculation={"mode": "simulated", "threshold": 0.5, "predictor": "window"})
    first = make_prompt(300, 0)
    found = answers(engine, first)
    assert torch.stack(engine.generation.hits).any()
    second = first + found[0] + make_prompt(20, 1)
    assert answers(engine, second) == oracle.generate([second], [NEW], 0.5).tokens
    assert engine.generation.reused_tokens == [300]
    exact = engine_of(tiny_folder, speculation={"mode": "simulated", "threshold": 0.0, "predictor": "window"})
    found = answers(exact, first)
    answers(exact, first + found[0])
    assert exact.generation.reused_tokens == [300 + NEW - 1]


def test_an_abandoned_answer_is_kept_as_far_as_it_went(
    tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt
) -> None:
    engine, first = engine_of(tiny_folder), make_prompt(100, 0)
    taken = [token.token_id for token in itertools.islice(engine.stream(first, SAMPLING), 5)]
    second = first + taken + [1, 2, 3]
    assert answers(engine, second) == oracle.generate([second], [NEW], 0.0).tokens
    assert engine.generation.reused_tokens == [104]


@pytest.mark.parametrize("codec", ["turbo4", "turboquant4"])
def test_an_abandoned_prompt_leaves_what_it_began_with(turbo_folder: Path, make_prompt: MakePrompt, codec: str) -> None:
    engine, first = engine_of(turbo_folder, kv_cache=codec), make_prompt(150, 0)
    answers(engine, first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("alspec.runtime.engine.prompt_pass.prefill", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            answers(engine, [*first, 1, 2, 3])
    answers(engine, first)
    # The universal scale may count tokens of the abandoned prompt: only records of FlashQ tell it anew.
    assert engine.generation.reused_tokens == [128 if codec == "turbo4" else 0]


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_nothing_is_kept_over_another_cache_or_an_error(
    tiny_folder: Path, make_prompt: MakePrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = engine_of(tiny_folder), make_prompt(100, 0)

    def reused() -> list[int]:
        next(engine.stream(ids, SAMPLING))
        return engine.generation.reused_tokens

    assert [reused(), reused()] == [[0], [99]]
    engine.load(1, 300)
    assert [reused(), reused()] == [[0], [99]]
    engine.prepare(SAMPLING)
    assert [reused(), reused()] == [[0], [99]]
    list(engine.decode([1], [101], 1))
    assert [reused(), reused()] == [[0], [99]]
    with monkeypatch.context() as patch:
        patch.setattr(EagerStep, "step", _fail)
        with pytest.raises(BadNumbersError):
            answers(engine, ids)
    assert [reused(), reused()] == [[0], [99]]
    weight = engine.model.weights.final_norm
    before = weight.clone()
    weight.mul_(torch.nan)
    with pytest.raises(BadNumbersError):
        reused()
    weight.copy_(before)
    assert reused() == [0]


def _fail(*_: Any) -> None:
    raise BadNumbersError("bad")


@pytest.mark.parametrize("mode", ["off", "paired"])
def test_ranks_keep_the_same(
    tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt, tmp_path: Path, mode: str
) -> None:
    """Two ranks: tensor parallelism, and a pair. A rank that has lost its record makes all begin anew."""
    first, threshold = make_prompt(300, 0), 0.5 if mode == "paired" else 0.0
    (tmp_path / "spec.json").write_text(
        json.dumps({"model": str(tiny_folder), "mode": mode, "threshold": threshold, "first": first, "new": NEW})
    )
    jobs.run_ranks(WORKER, 2, tmp_path, timeout_s=120)
    records = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert records[0] == records[1]
    for turn in records[0]:
        assert [turn["tokens"]] == oracle.generate([turn["prompt"]], [NEW], threshold).tokens
    kept = 300 if mode == "paired" else 300 + NEW - 1
    assert [turn["reused"] for turn in records[0]] == [0, kept, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_step_is_captured_again_behind_the_prefix(tiny_folder: Path, oracle: Oracle, make_prompt: MakePrompt) -> None:
    """Another way of sampling needs another graph, whose trial steps write to the cache."""
    engine, ids = Engine.from_pretrained(tiny_folder, dtype="fp32", max_context=700), make_prompt(301, 0)
    expected = oracle.generate([ids], [NEW], 0.0).tokens
    assert answers(engine, ids) == expected
    assert engine.uses_graph
    for _ in engine.stream(ids, max_new_tokens=2, ignore_eos=True, temperature=1.0, top_k=5):
        pass
    assert engine.generation.reused_tokens == [300]
    assert answers(engine, ids) == expected
    assert engine.generation.reused_tokens == [300]
    history = ids + expected[0] + make_prompt(20, 1)
    assert answers(engine, history) == oracle.generate([history], [NEW], 0.0).tokens
    assert engine.generation.reused_tokens == [301 + NEW - 1]


@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_an_interrupted_preparation_keeps_only_what_it_began_with(
    turbo_folder: Path, make_prompt: MakePrompt, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial steps write behind the kept tokens; a Ctrl-C then must not leave the old prompt as if it were whole."""
    engine, first = engine_of(turbo_folder, kv_cache=codec), make_prompt(200, 0)
    (expected,) = answers(engine, first)
    step = engine.decode_step
    assert step is not None

    def interrupted(sampling: SamplingConfig, kept: list[int]) -> int:
        if isinstance(step._cache, type(engine.cache)) and codec == "bf16":  # type: ignore[attr-defined]
            engine.cache.k[:, :, :, kept[0] :].zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, "prepare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(engine, [*first[:130], 5, 6])
    assert answers(engine, first) == [expected]
    assert engine.generation.reused_tokens[0] <= 130
