"""Rotary frequencies that depend on the length of a text: every token is the one that transformers generates.

C is the length at which they change. `dynamic` beyond it: a prompt has those of its own length, a decoded token those
of the text that ends with it. `longrope`: the cache is computed again where a text becomes longer than C tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import LONGROPE, greedy, save_family
from round_cases import put_captured
from tiers import fast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from alspec import Engine
from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.engine import drafting
from alspec.runtime.engine.composition import build_decode_step
from alspec.runtime.engine.kept_prefix import KeptPrefix
from alspec.runtime.engine.round_composition import build_row_append
from alspec.runtime.eval.quality import score_text

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
C = 50
FIELDS: dict[str, dict[str, Any]] = {
    "dynamic-short": {"rope_parameters": DYNAMIC, "max_position_embeddings": C},
    "phi3-long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": C},
}
KINDS = list(FIELDS)
# Prompt and new tokens: below C, up to C and one more, at C and around it, beyond it, from far below to far beyond.
LENGTHS = [(20, 10), (40, 10), (40, 11), (49, 6), (50, 6), (51, 6), (80, 6), (35, 40)]


def prompt(length: int) -> list[int]:
    return torch.randint(1, 151, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def expected(reference: Any, ids: list[int], count: int) -> list[int]:
    """Tokens of transformers, which keeps the frequencies of the longest text until a short one is computed."""
    reference(torch.tensor([[1]]))
    return greedy(reference, ids, count)


def answer(engine: Engine, ids: list[int], count: int, **settings: Any) -> list[int]:
    return engine.generate(ids, max_new_tokens=count, ignore_eos=True, **settings).token_ids  # type: ignore[union-attr]


@contextmanager
def engine_of(folder: Path, is_fused: bool = False, batch_size: int = 1, **options: Any) -> Iterator[Engine]:
    """An engine whose steps are eager, or run the fused kernels in the interpreter and append prompts by rows."""
    with Engine.from_pretrained(folder, transport="gloo", dtype="fp32", **options) as engine:
        if is_fused:
            engine.load(batch_size, options.get("max_context", 120))
            put_fused(engine)
        yield engine


def put_fused(engine: Engine) -> None:
    choices = replace(engine._choices, has_fused_step=True, uses_graph=False)
    parts = engine.model, engine.cache, engine.connected(), None
    if engine.config.draft != "off":
        put_captured(engine)
        return
    engine.decode_step = build_decode_step(choices, engine.config.speculation, *parts, engine._step_operation)
    if engine.cache.batch_size == 1:
        engine._append = build_row_append(choices, *parts, engine.decode_step, engine._step_operation)
        assert engine._append is not None
        most, frequency_length = engine._append.max_tokens, engine.model_config.frequency_length
        engine._kept = KeptPrefix(engine.cache, True, most, frequency_length)
        assert engine._append.prepare() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_the_length(kind: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, kind, **FIELDS[kind])
    config, kind_of_rope = LlamaConfig.from_folder(tmp_path), FIELDS[kind]["rope_parameters"]["rope_type"]
    rotary, positions = config.rotary(torch.device("cpu")), torch.tensor([0, C - 2, C - 1, C, C + 1, 3 * C])
    for found, position in zip(rotary.at(positions), positions.tolist(), strict=True):
        oracle, _ = ROPE_INIT_FUNCTIONS[kind_of_rope](reference.config, torch.device("cpu"), seq_len=position + 1)
        torch.testing.assert_close(found, oracle, rtol=3e-7, atol=0.0)
    for length in (1, C, C + 1, 3 * C):
        found = rotary.at(positions, length).expand(len(positions), -1)
        assert torch.equal(found, rotary.at(torch.full((len(positions),), length - 1)))
    lengths = [1, C, C + 1, 2 * C]
    assert torch.equal(rotary.at(positions, C).expand(2, -1)[0], config.inv_freq())
    assert not torch.equal(rotary.at(positions, C + 1)[0], config.inv_freq())
    keys = [config.frequency_length(length) for length in lengths]
    assert keys == ([C, C, C + 1, 2 * C] if kind == "dynamic-short" else [C, C, C + 1, C + 1])


def test_plain_frequencies_are_one_set() -> None:
    inv_freq = torch.rand(8)
    assert RotaryFrequencies(inv_freq).at(torch.tensor([4, 5])) is inv_freq


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
def test_tokens_are_those_of_transformers(kind: str, is_fused: bool, tmp_path: Path) -> None:
    reference = save_family(tmp_path, kind, num_hidden_layers=2 if is_fused else 3, **FIELDS[kind])
    with engine_of(tmp_path, is_fused) as engine:
        for length, new_tokens in LENGTHS[2:5] + LENGTHS[6:7] if is_fused else LENGTHS:
            ids = prompt(length)
            assert answer(engine, ids, new_tokens) == expected(reference, ids, new_tokens), (length, new_tokens)


def test_the_context_is_stretched(tmp_path: Path) -> None:
    save_family(tmp_path, "dynamic-short", **FIELDS["dynamic-short"])
    assert LlamaConfig.from_folder(tmp_path).longest_context == 3 * C


@pytest.mark.parametrize("kind", KINDS)
def test_limits_change_no_token(kind: str, tmp_path: Path) -> None:
    """Neither the longest answer nor `max_context` has any influence, greedy or sampled."""
    save_family(tmp_path, kind, **FIELDS[kind])
    found = []
    for options in ({}, {"max_context": 110}):
        with engine_of(tmp_path, **options) as engine:
            for new_tokens in (1, 12, 40):
                found.append([answer(engine, prompt(44), new_tokens, temperature=t, seed=3) for t in (0.0, 0.9)])
    longest = found[-1]
    for tokens in found:
        for own, whole in zip(tokens, longest, strict=True):
            assert own == whole[: len(own)]


ROUNDS = list(itertools.product(KINDS, (False, True), ("ngram", "self")))
FAST_ROUNDS = [("dynamic-short", False, "self"), ("phi3-long", True, "self")]


@pytest.mark.parametrize(("kind", "is_fused", "draft"), fast(ROUNDS, FAST_ROUNDS), ids=str)
def test_drafts_change_no_token(kind: str, is_fused: bool, draft: str, tmp_path: Path) -> None:
    """Rounds that cross C; penalties and random numbers go on as in plain decoding."""
    reference = save_family(tmp_path, kind, num_hidden_layers=2 if is_fused else 3, **FIELDS[kind])
    sampling = {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    with engine_of(tmp_path) as engine:
        sampled = answer(engine, prompt(46), 12, **sampling)
    options: dict[str, Any] = {"draft": draft, "draft_tokens": 3, "draft_always": True}
    with engine_of(tmp_path, is_fused, **options) as engine:
        assert answer(engine, prompt(46), 12) == expected(reference, prompt(46), 12)
        rounds = [each for step in engine.generation.rounds for each in step]
        assert sum(accepted + 1 for _, accepted in rounds) == 11
        assert draft == "ngram" or sum(drafts for drafts, _ in rounds) > 3
        assert draft == "ngram" or all(accepted == drafts for drafts, accepted in rounds)
        assert answer(engine, prompt(46), 12, **sampling) == sampled


@pytest.mark.parametrize(
    ("is_fused", "short_context"), fast([(False, C), (False, 44), (True, C), (True, 44)], [(False, 44)])
)
def test_a_draft_model_crosses_by_itself(
    is_fused: bool, short_context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights draft; where their frequencies change at another length, they are wrong between the two."""
    monkeypatch.setattr(drafting, "_check_tokenizers", lambda *_: None)  # these folders have none
    own, other = tmp_path / "own", tmp_path / "other"
    scaling = {"num_hidden_layers": 2, "rope_parameters": LONGROPE | {"attention_factor": 1.2}}
    reference = save_family(own, "phi3-long", **(FIELDS["phi3-long"] | scaling))
    save_family(other, "phi3-long", original_max_position_embeddings=short_context, **scaling)
    options: dict[str, Any] = {"draft": f"model:{other}", "draft_tokens": 2, "draft_always": True}
    with engine_of(own, is_fused, **options) as engine:
        for _ in range(2):  # then what the draft model's cache holds is too long
            assert answer(engine, prompt(40), 24) == expected(reference, prompt(40), 24)
            length, rounds = 41, []
            for ((drafts, accepted),) in engine.generation.rounds:
                rounds.append((length, drafts - accepted))
                length += accepted + 1
            # A captured round begins with the token before the newest one: drafts behind it are wrong once.
            crossed = C + 1 + is_fused
            assert all(rejected == 0 for length, rejected in rounds if length < short_context or length > crossed)
            assert sum(length > crossed for length, _ in rounds) >= 4


@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
def test_requests_cross_one_by_one(is_fused: bool, tmp_path: Path) -> None:
    """Each by its own length, whatever the others do; one has ended before, one begins beyond C."""
    reference = save_family(tmp_path, "phi3-long", num_hidden_layers=2, **FIELDS["phi3-long"])
    prompts = [prompt(length) for length in (47, 20, 60, 44)]
    with engine_of(tmp_path, is_fused, batch_size=4) as engine:
        tokens = [expected(reference, ids, 9) for ids in prompts]
        stop = tokens[1][2]
        made = engine.generate(prompts, max_new_tokens=9, ignore_eos=True, stop_ids=[stop])
        for completion, right in zip(made, tokens, strict=True):  # type: ignore[arg-type]
            end = right.index(stop) + 1 if stop in right else len(right)
            assert completion.token_ids == right[:end]


def test_a_request_that_crosses_leaves_the_recall_lists_of_others(tmp_path: Path) -> None:
    """Every `A~` is accepted, so that a wrong list of the long request shows in its text."""
    fields = FIELDS["phi3-long"] | {"original_max_position_embeddings": 100}
    save_family(tmp_path, "phi3-long", num_hidden_layers=2, **fields)
    speculation = {"mode": "simulated", "threshold": float("inf"), "recall_blocks": 1}
    with engine_of(tmp_path, max_context=450, speculation=speculation) as engine:
        made: list[Any] = []
        for beside in (94, 60):
            how: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "logprobs": 1}
            made.append(engine.generate([prompt(beside), prompt(400)], **how)[1])  # type: ignore[index]
    assert made[0].token_ids == made[1].token_ids
    for found, right in zip(made[0].logprobs, made[1].logprobs, strict=True):
        assert found.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
def test_a_dynamic_draft_model_is_right_after_other_turns(
    is_fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond C a prompt of another length has other keys: the model itself drafts, and is accepted each time."""
    monkeypatch.setattr(drafting, "_check_tokenizers", lambda *_: None)  # this folder has none
    reference = save_family(tmp_path, "dynamic-short", num_hidden_layers=2, **FIELDS["dynamic-short"])
    options: dict[str, Any] = {"draft": f"model:{tmp_path}", "draft_tokens": 2, "draft_always": True}
    ids = prompt(80)
    with engine_of(tmp_path, is_fused, max_context=120, **options) as engine:
        for length in (30, 60, 80, 70, 80):
            assert answer(engine, ids[:length], 6) == expected(reference, ids[:length], 6)
            assert all(drafts == accepted for step in engine.generation.rounds for drafts, accepted in step)


def test_answers_to_one_prompt_cross(tmp_path: Path) -> None:
    save_family(tmp_path, "phi3-long", **FIELDS["phi3-long"])
    settings: dict[str, Any] = {"n": 2, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    with engine_of(tmp_path) as engine:
        short = engine.generate(prompt(46), max_new_tokens=4, **settings)
        long = engine.generate(prompt(46), max_new_tokens=20, **settings)
        assert [each.token_ids for each in short] == [each.token_ids[:4] for each in long]  # type: ignore[union-attr]
        assert len({tuple(each.token_ids) for each in long}) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "fused"])
def test_log_probabilities_and_penalties_across_the_switch(is_fused: bool, tmp_path: Path) -> None:
    reference = save_family(tmp_path, "phi3-long", num_hidden_layers=2, **FIELDS["phi3-long"])
    ids = prompt(46)
    with engine_of(tmp_path, is_fused) as engine:
        made: Any = engine.generate(ids, max_new_tokens=10, ignore_eos=True, logprobs=1, repetition_penalty=1.3)
    whole = torch.tensor([ids])
    penalised = reference.generate(
        whole, attention_mask=torch.ones_like(whole), max_new_tokens=10, do_sample=False, eos_token_id=None,
        pad_token_id=0, repetition_penalty=1.3,
    )  # fmt: skip
    assert made.token_ids == penalised[0, len(ids) :].tolist()
    with torch.no_grad():
        for place, (token, found) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
            right = reference(penalised[:, : len(ids) + place]).logits[0, -1].log_softmax(-1)
            assert found.logprob == pytest.approx(float(right[token]), abs=2e-4)


@pytest.mark.parametrize("is_fused", [False, True], ids=["eager", "rows"])
def test_a_conversation_keeps_what_has_the_same_frequencies(is_fused: bool, tmp_path: Path) -> None:
    reference = save_family(tmp_path, "phi3-long", num_hidden_layers=2, **FIELDS["phi3-long"])
    turns = [(20, 5), (10, 13), (3, 6), (7, 4)]
    assert conversation(reference, tmp_path, is_fused, turns) == [0, 24, 0, 56]
    assert conversation(reference, tmp_path, is_fused, [(40, 15), (3, 2)]) == [0, 54], "the answer crossed"


@pytest.mark.parametrize("is_fused", fast([False, True], [False]), ids=["eager", "rows"])
def test_a_dynamic_conversation_keeps_short_texts(is_fused: bool, tmp_path: Path) -> None:
    """Beyond C every length has its own frequencies: only a prompt of the same length goes on from what is cached."""
    reference = save_family(tmp_path, "dynamic-short", num_hidden_layers=2, **FIELDS["dynamic-short"])
    assert conversation(reference, tmp_path, is_fused, [(20, 5), (10, 8), (12, 4), (9, 3)]) == [0, 24, 0, 0]
    with engine_of(tmp_path, is_fused) as engine:
        for ids, reused in ((prompt(60), 0), ([*prompt(60)[:-2], 3, 4], 58), (prompt(60)[:40], 0)):
            assert answer(engine, ids, 4) == expected(reference, ids, 4)
            assert engine.generation.reused_tokens == [reused]


def conversation(reference: Any, folder: Path, is_fused: bool, turns: Sequence[tuple[int, int]]) -> list[int]:
    """Compare the answers of turns of (new tokens of the prompt, tokens of the answer); returns what each reuses."""
    text, reused = [], []
    with engine_of(folder, is_fused, max_context=120) as engine:
        for number, (new, count) in enumerate(turns):
            text += prompt(new + 30 * number)[:new]
            found = answer(engine, text, count)
            assert found == expected(reference, text, count), (number, len(text))
            reused.append(engine.generation.reused_tokens[0])
            text += found
    return reused


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_that_accepts_nothing_changes_no_token(kind: str, tmp_path: Path) -> None:
    """With texts so long that `A~` leaves tokens out; the first recall lists are chosen again, too."""
    fields = FIELDS[kind] | ({"max_position_embeddings": 1000} if kind == "phi3-long" else {})
    name = "original_max_position_embeddings" if kind == "phi3-long" else "max_position_embeddings"
    reference = save_family(tmp_path, kind, scale=0.1, **(fields | {name: 400}))
    options = {"mode": "simulated", "threshold": 0.0, "chunk_size": 128, "predictor": "recall", "recall_blocks": 1}
    with engine_of(tmp_path, speculation=options) as engine:
        assert answer(engine, prompt(396), 10) == expected(reference, prompt(396), 10)
        assert len(engine.generation.hits) == 9


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_of_a_text_are_those_of_one_forward_pass(kind: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, kind, **FIELDS[kind])
    with engine_of(tmp_path) as engine:
        answer(engine, prompt(5), 1)
        for length in (C + 2, C + 1, 2 * C):
            ids = torch.tensor(prompt(length))
            reference(torch.tensor([[1]]))
            right = torch.nn.functional.cross_entropy(reference(ids[None, :-1]).logits[0], ids[1:], reduction="none")
            score = score_text(engine.model, engine.connected(), ids.tolist(), 0.0, 128)
            torch.testing.assert_close(score.nll, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", ["turbo4", "turboquant3"])
def test_a_quantised_cache_crosses(codec: str, tmp_path: Path) -> None:
    """With the same tokens for every longest answer, beside another request, and with drafts."""
    save_family(tmp_path, "phi3-long", scale=0.1, **FIELDS["phi3-long"])
    with engine_of(tmp_path, kv_cache=codec) as engine:
        crossing, short = answer(engine, prompt(45), 16), answer(engine, prompt(20), 16)
        assert answer(engine, prompt(45), 3) == crossing[:3]
        made: Any = engine.generate([prompt(20), prompt(45)], max_new_tokens=16, ignore_eos=True)
        assert [each.token_ids for each in made] == [short, crossing]
    with engine_of(tmp_path, kv_cache=codec, draft="ngram", draft_tokens=3, draft_always=True) as engine:
        assert answer(engine, prompt(45), 16) == crossing
