"""Passes of several rows append a prompt to a kept prefix as decode steps would, token after token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from round_cases import cached, engine_of, put_captured
from tiers import fast

from alspec.config import SamplingConfig
from alspec.kernels.common.limits import MAX_FUSED_ROWS
from alspec.runtime.decode.rounds.row_append import pass_sizes
from alspec.runtime.engine import composition
from alspec.runtime.engine.composition import build_decode_step
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.kept_prefix import KeptPrefix
from alspec.runtime.engine.round_composition import build_row_append

NEW = 5
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}


def test_passes_lie_in_blocks() -> None:
    assert pass_sizes(33, 6271, 16, has_blocks=False) == [16, 16, 1]
    assert pass_sizes(33, 6271, 16, has_blocks=True) == [1, 16, 16]
    assert pass_sizes(40, 120, 16, has_blocks=True) == [8, 16, 16]
    assert pass_sizes(0, 5, 16, has_blocks=True) == []


def put_append(engine: Engine) -> None:
    """Replace the engine's step by the fused one, and give it passes of rows, in the interpreter."""
    choices = replace(engine._choices, has_fused_step=True, uses_graph=False)
    parts = engine.model, engine.cache, engine.connected(), None
    if engine.config.draft != "off":
        put_captured(engine)
    else:
        engine.decode_step = build_decode_step(choices, engine.config.speculation, *parts, engine._step_operation)
    assert engine.decode_step is not None
    engine._append = build_row_append(choices, *parts, engine.decode_step, engine._step_operation)
    assert engine._append is not None
    engine._kept = KeptPrefix(engine.cache, is_lossless=True, max_appended=engine._append.max_tokens)
    assert engine._append.prepare() == 0


def answer(engine: Engine, ids: list[int], **settings: Any) -> list[int]:
    sampling = SamplingConfig(max_new_tokens=NEW, ignore_eos=True, **settings)
    return [token.token_id for token in engine.stream(ids, sampling)]


def fed(engine: Engine, first: list[int], ids: list[int], **settings: Any) -> list[int]:
    """The oracle: the decode step reads the tokens behind the first prompt one at a time, then answers."""
    answer(engine, first, **settings)
    step = engine.decode_step
    assert step is not None
    for length in range(len(first) + 1, len(ids)):
        step.begin([ids[length - 1]], [length])
        step.step(1)
    step.begin(ids[-1:], [len(ids)])
    return [step.step(NEW - place).token_ids[0][0] for place in range(NEW)]


CASES = [
    (codec, length)
    for codec in ("bf16", "turbo4", "turbo-mixed", "turboquant3", "hybrid-k4v2")
    for length in (100, 120, 123, 128)
]


@pytest.mark.parametrize(("codec", "length"), fast(CASES, keep=[]))
def test_a_second_turn_is_appended(
    turbo_folder: Path, make_prompt: Any, codec: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around the edge of a block: tokens, and what the cache holds. The first answer stays as steps wrote it.

    Passes over a quantised cache multiply as steps do, with the same bits: the library's roundings would move codes.
    """
    if codec != "bf16":
        monkeypatch.setattr(composition, "FAST_ROWS", MAX_FUSED_ROWS)
    first, new = make_prompt(length, seed=7), make_prompt(21, seed=8)
    with engine_of(turbo_folder, kv_cache=codec, max_context=200) as engine:
        engine.load(1, 200)
        put_append(engine)
        second = first + answer(engine, first) + new
        found = answer(engine, second)
        assert engine.generation.reused_tokens == [length + NEW - 1]
        assert engine.generation.prefill_us > 0
        assert len(engine.generation.step_us) == NEW - 1
        held = len(second) + NEW - 1
        own = cached(engine, [held])
        third = second + found + new[:3]
        answer(engine, third)
        assert engine.generation.reused_tokens == [held]
    with engine_of(turbo_folder, kv_cache=codec, max_context=200) as engine:
        engine.load(1, 200)
        if codec != "bf16":
            put_append(engine)  # the eager step makes a record of a full block before it reads it, the fused one after
        assert fed(engine, first, second) == found
        for ours, right in zip(own, cached(engine, [held]), strict=True):
            if ours.dtype == torch.float32:
                torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
            else:
                assert (ours != right).float().mean() < 0.002  # attention sums up in another order, which moves a code


@pytest.mark.parametrize("codec", fast(["bf16", "turbo4", "hybrid-k4v2"], keep=[]))
def test_a_turn_behind_a_sliding_window_is_appended(narrow_folder: Path, make_prompt: Any, codec: str) -> None:
    """A conversation that is longer than the window: each appended token has a window of its own."""
    first, new = make_prompt(120, seed=7), make_prompt(21, seed=8)
    with engine_of(narrow_folder, kv_cache=codec, max_context=200) as engine:
        engine.load(1, 200, for_turns=True)
        put_append(engine)
        second = first + answer(engine, first) + new
        found = answer(engine, second)
        assert engine.generation.reused_tokens == [120 + NEW - 1]
    with engine_of(narrow_folder, kv_cache=codec, max_context=200) as engine:
        engine.load(1, 200, for_turns=True)
        if codec != "bf16":
            put_append(engine)
        assert fed(engine, first, second) == found


@pytest.mark.full
def test_penalties_count_the_prompt_once(turbo_folder: Path, make_prompt: Any) -> None:
    """The prompt's last token is fed as a step's newest one, and stays part of the prompt."""
    first, new = make_prompt(90, seed=7), [*make_prompt(12, seed=8), 5]
    settings = PENALISED | {"temperature": 0.9, "seed": 3, "logprobs": 2}
    found = []
    for appends in (True, False):
        with engine_of(turbo_folder, max_context=200) as engine:
            engine.load(1, 200)
            if appends:
                put_append(engine)
            second = first + answer(engine, first, **settings) + new
            tokens = answer(engine, second, **settings)
            assert engine.generation.reused_tokens == [90 + NEW - 1]
            (done,) = engine.generation.completions()
            found.append((second, tokens, [own.logprob for own in done.logprobs or []]))
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2], abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_rounds_follow_an_appended_prompt(turbo_folder: Path, make_prompt: Any, codec: str) -> None:
    """With drafts the text stays that of plain steps; the first token is one of a plain step."""
    first, new = (make_prompt(9, seed=3) * 11)[:95], (make_prompt(9, seed=3) * 3)[:20]
    texts = []
    for drafts in ({"draft": "ngram", "draft_tokens": 3, "draft_always": True}, {}):
        with engine_of(turbo_folder, kv_cache=codec, max_context=200, **drafts) as engine:
            engine.load(1, 200)
            put_append(engine)
            second = first + answer(engine, first) + new
            texts.append((second, answer(engine, second)))
            assert engine.generation.reused_tokens[0] >= (64 if codec == "turbo4" else 95)
    assert texts[0] == texts[1]


@pytest.mark.full
def test_an_interrupted_pass_keeps_what_is_whole(turbo_folder: Path, make_prompt: Any) -> None:
    """Nothing of a quantised cache stays but whole blocks that its records tell."""
    first = make_prompt(100, seed=7)
    with engine_of(turbo_folder, kv_cache="turbo4", max_context=200) as engine:
        engine.load(1, 200)
        put_append(engine)
        second = first + answer(engine, first) + make_prompt(10, seed=9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._append, "run", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                answer(engine, second)
        expected = answer(engine, second)
        assert engine.generation.reused_tokens == [64]
        answer(engine, make_prompt(70, seed=1))
        assert len(expected) == NEW


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
