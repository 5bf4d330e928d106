"""Captured rounds on one GPU and on several: the text is that of captured steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import leads_of, licence_ids, needs, run_gpu_worker, unclear_place

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Completion

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
PROMPTS = [(DEMO_CHECKPOINT.parent / "prompt.txt").read_text(encoding="utf-8"), "The road", "It was"]
DRAFTS = ["ngram", "self", f"model:{DEMO_CHECKPOINT}"]
SAMPLED = {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.3}
LEAD = 0.02  # nats: rounding moves no token that leads by more


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("sampling", "num_prompts"), [({}, 1), (SAMPLED, 2), (SAMPLED, 3)])
def test_the_text_is_that_of_captured_steps(draft: str, sampling: dict[str, Any], num_prompts: int) -> None:
    """The library multiplies the rows of three prompts of six rows."""
    how = SamplingConfig(max_new_tokens=40, ignore_eos=True, **sampling)
    with Engine.from_pretrained(dtype="fp32") as engine:
        expected = engine.generate(PROMPTS[:num_prompts], how)
        assert engine.is_fused
    with Engine.from_pretrained(dtype="fp32", draft=draft, draft_tokens=5, draft_always=True) as engine:
        assert engine.generate(PROMPTS[:num_prompts], how) == expected
        assert engine.is_fused
        assert engine.uses_graph
        assert sum(accepted for step in engine.generation.rounds for _, accepted in step) > 0


@pytest.mark.parametrize("kv_cache", ["turbo4", "turboquant3", "hybrid-k4v2"])
def test_rounds_over_quantised_caches_end_as_they_should(kv_cache: str) -> None:
    """Products of one and of several rows are rounded differently here, which a quantised cache amplifies."""
    how = SamplingConfig(max_new_tokens=150, ignore_eos=True, logprobs=0)
    for draft, count in itertools.product(("ngram", "self"), (1, 3)):
        with Engine.from_pretrained(kv_cache=kv_cache, draft=draft, draft_always=True) as engine:
            answers = engine.generate(PROMPTS[:count], how)
            assert isinstance(answers, list)
            assert engine.is_fused
            assert [len(answer.token_ids) for answer in answers] == [150] * count
            assert all(accepted < 5 for step in engine.generation.rounds for _, accepted in step)
            logprobs = torch.tensor([[each.logprob for each in answer.logprobs or ()] for answer in answers])
            assert logprobs.isfinite().all()
            assert logprobs.mean() > -4.0


def clear_tokens(answer: Completion) -> list[int]:
    """Greedy tokens up to the first one that leads the second most likely one by little."""
    return answer.token_ids[: unclear_place(leads_of(answer), LEAD)]


@pytest.mark.parametrize("kv_cache", ["turbo4", "turboquant3", "hybrid-k4v2"])
def test_rounds_over_quantised_caches_give_the_clear_tokens_of_captured_steps(kv_cache: str) -> None:
    """In fp32. Texts that stay clear for long go beyond the end of a block."""
    how = SamplingConfig(max_new_tokens=80, ignore_eos=True, logprobs=2)
    with Engine.from_pretrained(dtype="fp32", kv_cache=kv_cache) as engine:
        expected = [clear_tokens(answer) for answer in answers_of(engine, how)]
        assert engine.is_fused
        assert engine.uses_graph
    assert sum(map(len, expected)) > 40
    for draft in ("ngram", "self"):
        options = {"kv_cache": kv_cache, "draft": draft, "draft_tokens": 3, "draft_always": True}
        with Engine.from_pretrained(dtype="fp32", **options) as engine:
            for answer, tokens in zip(answers_of(engine, how), expected, strict=True):
                assert answer.token_ids[: len(tokens)] == tokens
            assert engine.is_fused
            assert engine.uses_graph
            assert sum(accepted for step in engine.generation.rounds for _, accepted in step) > 0


def answers_of(engine: Engine, how: SamplingConfig) -> list[Completion]:
    answers = engine.generate(PROMPTS, how)
    assert isinstance(answers, list)
    return answers


@pytest.mark.timeout(600)
def test_ten_thousand_rounds_leave_texts_lists_and_cache_as_they_should() -> None:
    """Sampled in fp32, so that many drafts are wrong; lists of two blocks leave others out.

    Lists are those of a plain step at the end of the text. Its newest token has none yet.
    """
    ids, count, rounds = licence_ids(), 250, 0
    speculation = SpeculationConfig(mode="off", recall_blocks=2)
    drafting = {"speculation": speculation, "draft_tokens": 4, "draft_always": True}
    with (
        Engine.from_pretrained(dtype="fp32", speculation="off") as plain,
        Engine.from_pretrained(dtype="fp32", draft="ngram", **drafting) as ngram,
        Engine.from_pretrained(dtype="fp32", draft="self", **drafting) as own,
        Engine.from_pretrained(dtype="fp32", draft="self", **drafting) as prompted,
    ):
        for engine in (plain, ngram, own, prompted):
            engine.load(1, 1536)
        listed = same = 0
        for seed in itertools.count():
            prompt = ids[97 * seed :][: 900 + 7 * seed]
            how = SamplingConfig(max_new_tokens=count, ignore_eos=True, temperature=0.8, seed=seed)
            expected, places = tokens_of(plain, prompt, how), len(prompt) + count - 1
            for engine in (ngram, own):
                assert tokens_of(engine, prompt, how) == expected, (seed, engine.config.draft)
                step = engine.decode_step
                assert isinstance(step, CapturedRoundStep)
                length = int(step._state.lengths)
                text = step._state.history[0, :length].tolist()
                assert text[: len(prompt) + count] == prompt + expected
                for layer in range(engine.cache.num_layers):
                    kept, right = (each.cache.layer(layer) for each in (engine, plain))
                    for found, wanted in ((kept.k, right.k), (kept.v, right.v)):
                        torch.testing.assert_close(found[0, :, :places], wanted[0, :, :places], rtol=1e-3, atol=1e-4)
                rounds += sum(drafts > 0 for each in engine.generation.rounds for drafts, _ in each)
            step = how.model_copy(update={"max_new_tokens": 2})
            assert tokens_of(prompted, text[:-2], step) == text[-2:], "a plain step behind a prompt"
            lists, expected_lists = recall_lists(own), recall_lists(prompted)
            listed, same = listed + lists.numel(), same + int((lists == expected_lists).sum())
            if rounds >= 10_000:
                break
    assert same >= 0.995 * listed, "rounding may exchange two blocks of nearly the same weight"


def tokens_of(engine: Engine, prompt: list[int], how: SamplingConfig) -> list[int]:
    answer = engine.generate(prompt, how)
    assert isinstance(answer, Completion)
    return answer.token_ids


def recall_lists(engine: Engine) -> torch.Tensor:
    step = engine.decode_step
    assert isinstance(step, CapturedRoundStep)
    assert step._recall is not None
    return step._recall.lists.clone()


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_quantised_drafters_are_accepted_nearly_as_often(draft: str) -> None:
    """A copy in FP8 and in INT4, and a smaller model in them: all stay packed."""
    how, shares = SamplingConfig(max_new_tokens=60, ignore_eos=True), []
    names = ("auto", None), ("fp8", "fp8 (a scale for each row)"), ("int4", "int4 (groups of 128)")
    for weights, name in names:
        options = {"draft": draft, "draft_weights": weights, "draft_tokens": 3, "draft_always": True}
        with Engine.from_pretrained(dtype="bf16", **options) as engine:
            engine.generate(PROMPTS[0], how)
            assert engine.is_fused
            assert engine.draft_weights_name == name
            rounds = [each for step in engine.generation.rounds for each in step]
            shares.append(sum(accepted for _, accepted in rounds) / sum(drafts for drafts, _ in rounds))
    assert shares[1] > 0.8 * shares[0]
    assert shares[2] > 0.5 * shares[0]


@pytest.mark.parametrize("count", [17, 32])
def test_many_requests_give_the_text_of_each_alone(count: int) -> None:
    """The library multiplies more than 16 rows."""
    how = SamplingConfig(max_new_tokens=24, ignore_eos=True)
    prompts = [PROMPTS[index % 3][: 40 + 97 * index] for index in range(count)]
    with Engine.from_pretrained(dtype="fp32") as engine:
        answers = engine.generate(prompts, how)
        assert isinstance(answers, list)
        assert engine.is_fused
        assert engine.uses_graph
        for index in range(0, count, 5):
            assert engine.generate(prompts[index], how) == answers[index]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_cache", ["turbo4", "hybrid-k4v2"])
@pytest.mark.parametrize("num_ranks", [1, *(pytest.param(n, marks=[needs(n), pytest.mark.multi_gpu]) for n in (2, 4))])
def test_a_conversation_over_a_quantised_cache_gives_the_clear_tokens_of_one_without_drafts(
    num_ranks: int, kv_cache: str, tmp_path: Path
) -> None:
    """In fp32. Answers end in the middle of rounds and blocks, and the next turn goes on from what they left.

    Not `self`, for which prompt passes process the turns.
    """
    turning = [draft for draft in DRAFTS if draft != "self"]
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    turns = [tokenizer.encode(text, add_bos=False) for text in (PROMPTS[0][:900], PROMPTS[1], PROMPTS[0][900:1100])]
    shared = {"dtype": "fp32", "speculation": {"mode": "off"}, "cuda_graph": "on", "kv_cache": kv_cache}
    drafts = {draft: {"draft": draft, "draft_tokens": 4, "draft_always": True} for draft in turning}
    runs = [
        {"name": name, "engine": shared | engine, "conversation": turns}
        for name, engine in {"plain": {}, **drafts}.items()
    ]
    found = run_gpu_worker(num_ranks, {"runs": runs, "max_new_tokens": 75}, tmp_path)
    compared = {draft: 0 for draft in turning}
    for draft in turning:
        for plain, drafted in zip(found["plain"], found[draft], strict=True):
            if drafted["prompt"] != plain["prompt"]:
                break  # an unclear token before
            clear = unclear_place(plain["leads"][0], LEAD)
            assert drafted["tokens"][0][:clear] == plain["tokens"][0][:clear]
            compared[draft] += clear
        assert sum(row["accepted"] for row in found[draft]) > 0
        assert all(row["cuda_graph"] for row in found[draft])
        for row, following in itertools.pairwise(found[draft]):
            assert following["reused"] >= len(row["prompt"]) + 75 - 1  # all, if the last token was an accepted draft
    assert min(compared.values()) > 40, compared


@pytest.mark.multi_gpu
@needs(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["symm", "host", "nccl"])
def test_two_gpus_give_the_tokens_of_captured_steps(transport: str, tmp_path: Path) -> None:
    """One prompt and two, greedy and sampled with penalties."""
    shared = {"dtype": "fp32", "speculation": {"mode": "off"}, "transport": transport, "cuda_graph": "on"}
    drafts = {draft: {"draft": draft, "draft_tokens": 4, "draft_always": True} for draft in DRAFTS}
    runs = [
        {"name": name, "engine": shared | engine, "sampled": True, "long": False, "thresholds": ["0"]}
        for name, engine in {"plain": {}, **drafts}.items()
    ]
    tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    cases = {"runs": runs, "batches": [prompts[:1], prompts[1:]], "max_new_tokens": 40}
    found = run_gpu_worker(2, cases, tmp_path)
    for draft in DRAFTS:
        assert [row["tokens"] for row in found[draft]] == [row["tokens"] for row in found["plain"]]
        assert [row["sampled"] for row in found[draft]] == [row["sampled"] for row in found["plain"]]
        assert all(row["cuda_graph"] for row in found[draft])
        assert sum(row["accepted"] for row in found[draft]) > 0
