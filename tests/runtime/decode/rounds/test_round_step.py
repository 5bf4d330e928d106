"""Rounds give the text of plain decoding, and leave its cache, whatever is drafted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from round_cases import (
    CoinDrafter,
    ConstantDrafter,
    ListsForward,
    NoDrafter,
    cached,
    engine_of,
    generated,
    put_captured,
    put_drafter,
)
from tiers import covering, fast

from alspec.config import SamplingConfig
from alspec.errors import BadNumbersError
from alspec.runtime.decode.rounds.draft_policy import DraftPolicy
from alspec.runtime.decode.rounds.round_step import RoundStep
from alspec.runtime.decode.rounds.row_forward import RowForward
from alspec.runtime.engine.generation import Token

CODECS = ["bf16", "turbo4", "turboquant3", "hybrid-k4v2"]
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
FEW_TOKENS = {7: 100.0, 30: 99.0, 99: 100.0, 150: 99.5, 201: 100.0}  # a text of few tokens repeats itself
HOW = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED, "both": SAMPLED | PENALISED}
NEW_TOKENS = 24
LENGTHS = [90, 61, 14]  # the second prompt's text goes beyond a block


@pytest.fixture(scope="module")
def prompts(make_prompt: Any) -> list[list[int]]:
    """A text that repeats itself, so that drafts are found, and two random ones."""
    repeated = make_prompt(12, seed=3)
    return [(repeated * 10)[: LENGTHS[0]], *(make_prompt(length, seed=length) for length in LENGTHS[1:])]


def sampling_of(how: str, **more: Any) -> SamplingConfig:
    return SamplingConfig(
        **{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "logit_bias": FEW_TOKENS} | HOW[how] | more
    )


@pytest.fixture(scope="module")
def plain(turbo_folder: Path, prompts: list[list[int]]) -> Any:
    """The text and the cache of plain decoding, by codec and settings."""
    found: dict[tuple[str, str], tuple[list[list[int]], list[torch.Tensor]]] = {}

    def run(codec: str, how: str) -> tuple[list[list[int]], list[torch.Tensor]]:
        if (codec, how) not in found:
            with engine_of(turbo_folder, kv_cache=codec) as engine:
                tokens = generated(engine, prompts, sampling_of(how))
                found[codec, how] = tokens, cached(engine, cached_lengths(prompts))
        return found[codec, how]

    return run


def cached_lengths(prompts: list[list[int]]) -> list[int]:
    """Tokens of each request in the cache: the last one was never fed."""
    return [len(ids) + NEW_TOKENS - 1 for ids in prompts]


@pytest.mark.parametrize(
    ("drafter", "codec", "how", "num_drafts"), covering(["ngram", "self"], CODECS, list(HOW), [1, 2, 3, 8])
)
def test_text_and_cache_are_those_of_plain_decoding(
    turbo_folder: Path, prompts: list[list[int]], plain: Any, drafter: str, codec: str, how: str, num_drafts: int
) -> None:
    tokens, cache = plain(codec, how)
    options = {"kv_cache": codec, "draft": drafter, "draft_tokens": num_drafts, "draft_always": True}
    with engine_of(turbo_folder, **options) as engine:
        assert generated(engine, prompts, sampling_of(how)) == tokens
        rounds = [each for step in engine.generation.rounds for each in step]
        assert sum(drafts for drafts, _ in rounds) > 0
        assert all(0 <= accepted <= drafts <= num_drafts for drafts, accepted in rounds)
        if drafter == "self":  # sink and window are everything here: every draft is right
            assert all(accepted == drafts for drafts, accepted in rounds)
        for found, expected in zip(cached(engine, cached_lengths(prompts)), cache, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("codec", "weights"), [("bf16", "fp8"), ("turboquant3", "fp8")])
@pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_quantised_copy_drafts_for_the_model(
    turbo_folder: Path, prompts: list[list[int]], codec: str, weights: str, is_captured: bool
) -> None:
    """Its drafts are wrong now and then; the text is that of the model's own weights."""
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS if not is_captured else 6, ignore_eos=True)
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        tokens = generated(engine, prompts[:2], sampling)
    options = {"kv_cache": codec, "draft": "self", "draft_weights": weights, "draft_always": True, "draft_tokens": 3}
    with engine_of(turbo_folder, **options) as engine:
        if is_captured:
            engine.load(2, LENGTHS[0] + NEW_TOKENS)
            put_captured(engine)
        assert generated(engine, prompts[:2], sampling) == tokens
        copy = engine._drafting.model if engine._drafting is not None else None
        assert copy is not None
        assert not torch.equal(copy.weights.layers[0].down, engine.model.weights.layers[0].down)
        assert copy.weights.lm_head is engine.model.weights.lm_head
        rounds = [each for step in engine.generation.rounds for each in step]
        assert 0 < sum(accepted for _, accepted in rounds) <= sum(drafts for drafts, _ in rounds)


def check_rounds_by_chance(folder: Path, make_prompt: Any, codec: str, seed: int) -> int:
    """Drafts that are right by chance leave nothing behind: tokens, lists and cache are those of a plain run.

    Texts go over several blocks. The last rounds of a text see a cache that others have ended at any place. The lists
    of one block leave others out: between sink and window of 64 tokens each there are up to three.

    Returns:
        Rounds, counted for each request.
    """
    prompts = [make_prompt(length, seed=seed + length) for length in (222, 126, 3)]
    sampling = SamplingConfig(max_new_tokens=100, ignore_eos=True, temperature=1.0, seed=seed)
    lengths = [len(ids) + sampling.max_new_tokens - 1 for ids in prompts]
    with engine_of(folder, kv_cache=codec) as engine:
        tokens = generated(engine, prompts, sampling)
        expected = cached(engine, lengths)
    with engine_of(folder, kv_cache=codec, draft="ngram") as engine:
        # Rounds of a text that has ended go on until the others have.
        longer = sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens + 8})
        engine.load(3, max(map(len, prompts)) + longer.max_new_tokens)
        plain = put_drafter(engine, NoDrafter(), 1, recall_blocks=1)
        assert [ids[: sampling.max_new_tokens] for ids in generated(engine, prompts, longer)] == tokens
    with engine_of(folder, kv_cache=codec, draft="ngram") as engine:
        engine.load(3, max(map(len, prompts)) + sampling.max_new_tokens)
        texts = [ids + new for ids, new in zip(prompts, tokens, strict=True)]
        forward = put_drafter(engine, CoinDrafter(texts, seed), 5, recall_blocks=1)
        assert generated(engine, prompts, sampling) == tokens
        check_lists(forward, plain)
        rounds = [each for step in engine.generation.rounds for each in step]
        assert {accepted for drafts, accepted in rounds if drafts == 5} >= {0, 1, 2, 3}
        for found, right in zip(cached(engine, lengths), expected, strict=True):
            assert torch.equal(found, right)
    return len(rounds)


def check_lists(forward: RowForward, plain: RowForward) -> None:
    """After each round, the lists are those of plain steps at that length; some of them leave blocks out."""
    assert isinstance(forward, ListsForward)
    assert isinstance(plain, ListsForward)
    assert max(length for _, length in forward.left) > 64 + 2 * 64 + 63 + 64
    for place in forward.left:
        assert torch.equal(forward.left[place], plain.left[place]), place
    listed = {int(lists.max()) for (request, _), lists in forward.left.items() if request == 0}
    assert len(listed) > 1, "not always the same block"


@pytest.mark.parametrize("codec", fast([*CODECS, "turbo-mixed"], ["turbo4"]))
def test_drafts_that_are_right_by_chance_leave_nothing_behind(turbo_folder: Path, make_prompt: Any, codec: str) -> None:
    check_rounds_by_chance(turbo_folder, make_prompt, codec, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ten_thousand_rounds(turbo_folder: Path, make_prompt: Any) -> None:
    rounds, codecs = 0, itertools.cycle(CODECS)
    for seed in itertools.count(2):
        rounds += check_rounds_by_chance(turbo_folder, make_prompt, next(codecs), seed)
        if rounds >= 10_000:
            break


@pytest.mark.parametrize("codec", ["bf16", "turboquant3"])
def test_rounds_around_the_edge_of_a_block(turbo_folder: Path, make_prompt: Any, codec: str) -> None:
    """Every length near an edge; over a quantised cache no round crosses it."""
    edges = [*range(62, 67), *range(126, 130)]
    prompts = [make_prompt(length, seed=length) for length in edges]
    sampling = SamplingConfig(max_new_tokens=9, ignore_eos=True)
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        tokens = generated(engine, prompts, sampling)
    with engine_of(turbo_folder, kv_cache=codec, draft="self", draft_tokens=3, draft_always=True) as engine:
        assert generated(engine, prompts, sampling) == tokens
        steps = len(engine.generation.step_us)
        # Each round yields four tokens; a prompt of 62 tokens has room for drafts in one place of its block only.
        assert steps == 2 if codec == "bf16" else steps > 2


def test_steps_without_drafts_do_not_choose_blocks(turbo_folder: Path, make_prompt: Any) -> None:
    """That is full attention in each layer a second time; the first draft after them chooses."""
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True)
    with engine_of(turbo_folder, draft="self", draft_tokens=2) as engine:
        engine.load(1, 320)
        step = engine.decode_step
        assert isinstance(step, RoundStep)
        forward = step._forward
        chosen = mock.Mock(wraps=forward._attention.recall_prompts)
        with mock.patch.object(forward._attention, "recall_prompts", chosen):
            step._policy = mock.Mock(decide_next=lambda room, cost: False)
            generated(engine, [make_prompt(290, seed=4)], sampling)
            assert chosen.call_count == 0
            step._policy = DraftPolicy(always=True)
            generated(engine, [make_prompt(290, seed=4)], sampling)
            rounds = sum(drafts > 0 for each in engine.generation.rounds for drafts, _ in each)
            assert chosen.call_count == rounds > 1


def test_the_end_of_the_context(turbo_folder: Path, make_prompt: Any) -> None:
    """Rounds get shorter before the end, and write nothing behind it."""
    prompts = [make_prompt(50, seed=1), make_prompt(39, seed=2)]
    sampling = SamplingConfig(max_new_tokens=20, ignore_eos=True)
    with engine_of(turbo_folder) as engine:
        tokens = generated(engine, prompts, sampling)
    with engine_of(turbo_folder, draft="self", draft_tokens=8, draft_always=True, max_context=70) as engine:
        assert generated(engine, prompts, sampling) == tokens
        assert engine.cache.max_context == 70
        # The first token is the prompt's; 9 + 9 + 1 follow, for both requests.
        assert engine.generation.rounds == [[(8, 8), (8, 8)], [(8, 8), (8, 8)], [(0, 0), (0, 0)]]


@pytest.mark.parametrize("how", ["stop id", "length", "stop text"])
def test_a_request_ends_in_the_middle_of_a_round(turbo_folder: Path, make_prompt: Any, how: str) -> None:
    """The rest of the round is dropped, log probabilities are those of each token, and what is kept is right."""
    prompts = [make_prompt(30, seed=3), make_prompt(41, seed=4)]
    free = SamplingConfig(max_new_tokens=20, ignore_eos=True, logprobs=2)
    with engine_of(turbo_folder) as engine:
        text = generated(engine, prompts, free)[0]
        assert engine.tokenizer is not None
        pieces = [engine.tokenizer.decode([token]) for token in text]
    place = next(place for place in range(4, 19) if pieces[place].isascii() and pieces[place] not in pieces[:place])
    options = {
        "stop id": {"stop_ids": (text[place],)},
        "length": {"max_new_tokens": 9},
        "stop text": {"stop": (pieces[place],)},
    }
    ended = free.model_copy(update=options[how])
    with engine_of(turbo_folder) as engine:
        expected = list(engine.stream(prompts, ended))
        texts = [request.prompt_ids + request.token_ids for request in engine.generation.requests]
    assert 3 < len(texts[0]) - len(prompts[0]) < 20
    longer = [[*ids, 1, 2] for ids in texts]
    with engine_of(turbo_folder) as engine:
        answers = generated(engine, longer, free)
    with engine_of(turbo_folder, draft="self", draft_tokens=5, draft_always=True, max_context=100) as engine:
        found = list(engine.stream(prompts, ended))
        assert seen(found) == seen(expected)
        marks = [token.is_draft for token in found if token.request == 0]
        # The last token of a round counts as the model's own, also where the text ends before others.
        assert marks[:-1][:7] == [None, *[True] * 5, False][: len(marks) - 1]
        assert marks[-1] is False
        assert len(engine.generation.step_us) < 5
        assert generated(engine, longer, free) == answers
        for reused, ids in zip(engine.generation.reused_tokens, texts, strict=True):
            assert len(ids) - 1 <= reused <= len(ids)


def seen(tokens: list[Token]) -> list[list[tuple[Any, ...]]]:
    """What a client sees of each request, without what drafts add. A round yields a request's tokens in a row."""
    parts = [(each.request, each.token_id, each.text, each.finish_reason, each.logprobs) for each in tokens]
    return [[part for part in parts if part[0] == request] for request in (0, 1)]


def test_bad_numbers_behind_a_wrong_draft_do_not_matter(turbo_folder: Path, make_prompt: Any) -> None:
    """A plain run would not see them. In an emitted token's logits they end the run."""
    prompt, bad = make_prompt(20, seed=1), 300
    sampling = SamplingConfig(max_new_tokens=9, ignore_eos=True, logit_bias={bad: -100.0})
    with engine_of(turbo_folder) as engine:
        tokens = generated(engine, [prompt], sampling)
    with engine_of(turbo_folder, draft="ngram") as engine:
        engine.load(1, 64)
        put_drafter(engine, ConstantDrafter(bad), 3)
        engine.model.weights.embedding[bad] = torch.nan
        assert generated(engine, [prompt], sampling) == tokens
        assert engine.generation.rounds[0] == [(3, 0)]
        engine.model.weights.embedding[tokens[0][4]] = torch.nan
        with pytest.raises(BadNumbersError, match="rank 0, layer 0, step "):
            list(engine.stream(prompt, sampling))
        found = engine.generation.requests[0].token_ids
        assert found == tokens[0][: len(found)]
        assert 0 < len(found) <= 5
