"""Captured rounds, in the interpreter, where blocks, contexts and answers end: texts are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_cases import engine_of, generated, put_captured
from tiers import fast

from alspec.config import QUANTISED_CODECS, SamplingConfig

CODECS = ("bf16", *QUANTISED_CODECS)
EDGES = (63, 64, 65, 127, 128)
FEW_TOKENS = {7: 100.0, 30: 99.0, 99: 100.0, 150: 99.5, 201: 100.0}  # a text of few tokens repeats itself
ALWAYS: dict[str, Any] = {"draft_always": True}


@pytest.mark.full
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("drafter", ["ngram", "self"])
def test_rounds_around_the_edge_of_a_block(turbo_folder: Path, make_prompt: Any, drafter: str, codec: str) -> None:
    """Five requests; over a quantised cache no round crosses an edge."""
    prompts = [(make_prompt(9, seed=length) * 15)[:length] for length in EDGES]
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True, logit_bias=FEW_TOKENS)
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        expected = generated(engine, prompts, sampling)
    with engine_of(turbo_folder, kv_cache=codec, draft=drafter, draft_tokens=2, **ALWAYS) as engine:
        engine.load(len(prompts), max(EDGES) + 6)
        put_captured(engine)
        assert generated(engine, prompts, sampling) == expected
        assert sum(accepted for step in engine.generation.rounds for _, accepted in step) > 0


@pytest.mark.full
@pytest.mark.parametrize("codec", ["bf16", "turbo4", "turboquant3"])
def test_the_end_of_the_context(turbo_folder: Path, make_prompt: Any, codec: str) -> None:
    """Rounds that would write behind it are plain steps."""
    prompts = [make_prompt(50, seed=1), make_prompt(39, seed=2)]
    sampling = SamplingConfig(max_new_tokens=14, ignore_eos=True)
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        expected = generated(engine, prompts, sampling)
    options: dict[str, Any] = {"draft": "self", "draft_tokens": 4, "max_context": 64}
    with engine_of(turbo_folder, kv_cache=codec, **options, **ALWAYS) as engine:
        engine.load(2, 64)
        put_captured(engine)
        assert generated(engine, prompts, sampling) == expected
        assert engine.cache.max_context == 64
        assert any(accepted > 0 for step in engine.generation.rounds for _, accepted in step)


@pytest.mark.parametrize("how", fast(["stop id", "stop text", "end token", "length"], keep=[]))
def test_an_answer_ends_in_the_middle_of_a_round(turbo_folder: Path, make_prompt: Any, how: str) -> None:
    """With penalties. The rest of the round is dropped; the other request goes on."""
    prompts = [make_prompt(30, seed=3), make_prompt(41, seed=4)]
    free = SamplingConfig(max_new_tokens=8, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3)
    with engine_of(turbo_folder) as engine:
        text = generated(engine, prompts, free)[0]
        assert engine.tokenizer is not None
        pieces = [engine.tokenizer.decode([token]) for token in text]
        place = next(place for place in range(2, 7) if pieces[place].isascii() and pieces[place] not in pieces[:place])
        ends = {"stop id": {"stop_ids": (text[place],)}, "stop text": {"stop": (pieces[place],)}}
        ends["end token"] = {"ignore_eos": False}
        ended = free.model_copy(update=ends.get(how, {"max_new_tokens": 6}))
        eos = (text[place],) if how == "end token" else engine.tokenizer.eos_token_ids
        engine.tokenizer.eos_token_ids = eos
        expected = engine.generate(prompts, ended)
    with engine_of(turbo_folder, draft="self", draft_tokens=3, **ALWAYS) as engine:
        engine.load(2, 49)
        put_captured(engine)
        assert engine.tokenizer is not None
        engine.tokenizer.eos_token_ids = eos
        found = engine.generate(prompts, ended)
        assert found == expected
        assert any(accepted > 0 for step in engine.generation.rounds for _, accepted in step)
    assert isinstance(found, list)
    assert how == "length" or len(found[0].token_ids) < 8
