"""Captured rounds on a GPU where blocks and contexts end, with bad numbers, and over quantised caches for long."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_jobs import leads_of, licence_ids, unclear_place
from round_cases import cached

from alspec.config import SamplingConfig
from alspec.errors import BadNumbersError
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Completion

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DRAFTS = ["ngram", "self", f"model:{DEMO_CHECKPOINT}"]
CODECS = ["bf16", "turbo4", "turbo-mixed", "turboquant3", "hybrid-k4v2"]
EDGES = (63, 64, 65, 127, 128)
LEAD = 0.02  # nats: rounding moves no token that leads by more


def answers_of(engine: Engine, prompts: list[list[int]], how: SamplingConfig) -> list[Completion]:
    answers = engine.generate(prompts, how)
    assert isinstance(answers, list)
    assert engine.uses_graph
    return answers


def clear_tokens(answer: Completion, codec: str) -> list[int]:
    """All tokens over an exact cache; over a quantised one up to the first one that leads by little."""
    return answer.token_ids if codec == "bf16" else answer.token_ids[: unclear_place(leads_of(answer), LEAD)]


@pytest.mark.parametrize("codec", CODECS)
def test_rounds_around_the_edge_of_a_block(codec: str) -> None:
    """Prompts together, and each alone, in fp32; the context ends with the longest text."""
    ids, count = licence_ids(), 9
    prompts = [ids[7 * length :][:length] for length in EDGES]
    how = SamplingConfig(max_new_tokens=count, ignore_eos=True, logprobs=2)
    with Engine.from_pretrained(dtype="fp32", kv_cache=codec) as engine:
        expected = [clear_tokens(answers_of(engine, [prompt], how)[0], codec) for prompt in prompts]
    assert sum(map(len, expected)) >= 2 * len(EDGES)
    for draft in DRAFTS:
        options = {"kv_cache": codec, "draft": draft, "draft_tokens": 2, "draft_always": True}
        with Engine.from_pretrained(dtype="fp32", **options) as engine:
            engine.load(len(prompts), max(EDGES) + count)
            together, rounds = answers_of(engine, prompts, how), engine.generation.rounds
            for answer, tokens in zip(together, expected, strict=True):
                assert answer.token_ids[: len(tokens)] == tokens, draft
            assert draft == "ngram" or sum(accepted for step in rounds for _, accepted in step) > 0
            engine.load(1, max(EDGES) + count)
            for prompt, tokens in zip(prompts, expected, strict=True):
                alone = answers_of(engine, [prompt], how)[0]
                assert alone.token_ids[: len(tokens)] == tokens, draft
                assert len(alone.token_ids) == count


@pytest.mark.filterwarnings("ignore:max_new_tokens")
@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_answers_with_different_room(codec: str) -> None:
    """By default each has what fits: one token, 20 and 128. A text that fills the cache stays as it is."""
    ids, room = licence_ids(), [1, 20, 128]
    prompts = [ids[40 * count :][: 320 - count] for count in room[:2]] + [ids[:37]]
    options: dict[str, Any] = {"dtype": "fp32", "kv_cache": codec, "max_context": 320}
    with Engine.from_pretrained(**options) as engine:
        alone = []
        for prompt, count in zip(prompts, room, strict=True):
            how = SamplingConfig(max_new_tokens=count, ignore_eos=True, logprobs=2)
            alone.append(clear_tokens(answers_of(engine, [prompt], how)[0], codec))
    how = SamplingConfig(ignore_eos=True, logprobs=2)
    for drafts in ({}, *({"draft": draft, "draft_tokens": 4, "draft_always": True} for draft in DRAFTS)):
        with Engine.from_pretrained(**options, **drafts) as engine:
            for _ in range(2):  # and again, behind what the first answers left
                together = answers_of(engine, prompts, how)
                assert [len(answer.token_ids) for answer in together] == room
                for answer, tokens in zip(together, alone, strict=True):
                    assert answer.token_ids[: len(tokens)] == tokens, drafts


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("spoils_draft", [False, True])
def test_bad_numbers_inside_a_round(draft: str, spoils_draft: bool) -> None:
    """NaN in a weight, after the first token; the engine is as new when the weight is whole again."""
    if spoils_draft and not draft.startswith("model:"):
        pytest.skip("it has no weights of its own")
    how = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    prompt = licence_ids()[:200]
    with Engine.from_pretrained(dtype="bf16", draft=draft, draft_tokens=4, draft_always=True) as engine:
        expected = answers_of(engine, [prompt], how)[0].token_ids
        drafting: Any = engine._drafting
        weight = (drafting.model if spoils_draft else engine.model).weights.layers[1].o
        value = float(weight[3, 2])
        tokens = engine.stream([prompt], how)
        seen = [next(tokens).token_id]
        weight[3, 2] = torch.nan
        is_drafted = spoils_draft or draft == "self"
        place = f"rank 0, attention output, layer 1{', while drafting' if is_drafted else ''}, step"
        with pytest.raises(BadNumbersError, match=f"^NaN or Inf: first seen on {place}"):
            seen += [event.token_id for event in tokens]
        assert seen == expected[: len(seen)]
        weight[3, 2] = value
        assert answers_of(engine, [prompt], how)[0].token_ids == expected


@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["turbo4", "turboquant3", "hybrid-k4v2"])
def test_thousands_of_rounds_leave_the_cache_of_plain_steps(codec: str) -> None:
    """Sampled in fp32, so that many drafts are wrong.

    Sums of one row and of several are rounded differently, which may become another code, and after that another text:
    blocks are compared up to there. On an H200 all texts and all codes are equal.
    """
    ids, count, rounds, equal_texts, texts = licence_ids(), 250, 0, 0, 0
    options = {"dtype": "fp32", "kv_cache": codec, "speculation": {"mode": "off"}}
    drafting = {"draft_tokens": 4, "draft_always": True}
    different = compared = 0
    with (
        Engine.from_pretrained(**options) as plain,
        Engine.from_pretrained(draft="ngram", **options, **drafting) as ngram,
        Engine.from_pretrained(draft="self", **options, **drafting) as own,
    ):
        for engine in (plain, ngram, own):
            engine.load(1, 1536)
        for seed in itertools.count():
            prompt = ids[97 * seed :][: 900 + 7 * seed]
            how = SamplingConfig(max_new_tokens=count, ignore_eos=True, temperature=0.8, seed=seed)
            expected = answers_of(plain, [prompt], how)[0].token_ids
            for engine in (ngram, own):
                found = answers_of(engine, [prompt], how)[0].token_ids
                step = engine.decode_step
                assert isinstance(step, CapturedRoundStep)
                length = int(step._state.lengths)
                assert step._state.history[0, : len(prompt) + count].tolist() == prompt + found
                assert length >= len(prompt) + count
                same = next((n for n in range(count) if found[n] != expected[n]), count)
                texts, equal_texts = texts + 1, equal_texts + (same == count)
                # What a text's last token left is there only if a step followed; the tail holds what is not in records.
                places = len(prompt) + count - 1 if same == count else (len(prompt) + same) // 64 * 64
                for kept, right in zip(cached(engine, [places]), cached(plain, [places]), strict=True):
                    if not kept.dtype.is_floating_point:
                        different, compared = different + int((kept != right).sum()), compared + kept.numel()
                rounds += sum(drafts > 0 for each in engine.generation.rounds for drafts, _ in each)
            if rounds >= 3400:
                break
    assert equal_texts >= 0.9 * texts
    assert different <= 1e-4 * compared, "words of several codes"
