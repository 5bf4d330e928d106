"""Rounds over the fused kernels, in the interpreter, against eager rounds and plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from round_cases import cached, engine_of, generated, put_captured
from tiers import fast

from alspec.config import SamplingConfig
from alspec.errors import BadNumbersError
from alspec.kernels.linear.gemm_products import GemmProducts
from alspec.kernels.linear.products import FusedProducts
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep

FEW_TOKENS = {7: 100.0, 30: 99.0, 99: 100.0, 150: 99.5, 201: 100.0}  # a text of few tokens repeats itself
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": SAMPLED, "penalised": PENALISED, "both": SAMPLED | PENALISED | {"logprobs": 3},
}  # fmt: skip
NEW_TOKENS = 6
CASES = [
    (drafter, codec, how, num_drafts)
    for drafter in ("ngram", "self")
    for codec in ("bf16", "turbo4", "hybrid-k4v2")
    for how, num_drafts in (("greedy", 3), ("sampled", 2), ("penalised", 2), ("both", 3))
]


@pytest.mark.parametrize(
    ("drafter", "codec", "how", "num_drafts"),
    fast(CASES, keep=[("ngram", "bf16", "both", 3)]),
)
def test_tokens_rounds_and_cache_are_those_of_eager_rounds(
    turbo_folder: Path, make_prompt: Any, drafter: str, codec: str, how: str, num_drafts: int
) -> None:
    """Texts begin before the end of a block, and cross into the next one. Not all prompts find drafts."""
    # Sums that eager steps round otherwise become another code now and then.
    prompts = [(make_prompt(9, seed=3) * 10)[:70], make_prompt(60, seed=65)]
    sampling = SamplingConfig(**{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "logit_bias": FEW_TOKENS} | HOW[how])
    lengths = [len(ids) + NEW_TOKENS - 1 for ids in prompts]
    options = {"kv_cache": codec, "draft": drafter, "draft_tokens": num_drafts, "draft_always": True}
    with engine_of(turbo_folder, **options) as engine:
        expected = generated(engine, prompts, sampling)
        rounds, cache = engine.generation.rounds, cached(engine, lengths)
        logprobs = [answer.logprobs for answer in engine.generation.completions()]
    with engine_of(turbo_folder, **options) as engine:
        engine.load(2, max(map(len, prompts)) + NEW_TOKENS)
        put_captured(engine)
        assert generated(engine, prompts, sampling) == expected
        # The last round of a text is as long as the others here: its rest is dropped.
        assert [[accepted for _, accepted in step] for step in engine.generation.rounds[:-2]] == [
            [accepted for _, accepted in step] for step in rounds[: len(engine.generation.rounds) - 2]
        ]
        for found, right in zip(cached(engine, lengths), cache, strict=True):
            if found.dtype == torch.float32:
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
            elif found.dtype == torch.int8:
                assert (found.int() - right.int()).abs().max() <= 1, "codes of the tail"
            else:
                assert (found != right).sum() <= 0.05 * found.numel(), "words of several codes"
        for answer, right in zip(engine.generation.completions(), logprobs, strict=True):
            assert (answer.logprobs is None) == (right is None)
            for own, other in zip(answer.logprobs or [], right or [], strict=True):
                assert abs(own.logprob - other.logprob) < (1e-4 if codec == "bf16" else 2**-10)
                assert [token for token, _ in own.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("drafter", fast(["ngram", "self"], keep=["ngram"]))
def test_bad_numbers_name_operation_and_rank(turbo_folder: Path, make_prompt: Any, drafter: str) -> None:
    """From the second round on. No token of it is returned, and the next generation starts without the fault."""
    prompt = (make_prompt(9, seed=3) * 3)[:20]
    # So few tokens that no round is launched ahead of the one that is read.
    sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True, logit_bias=FEW_TOKENS)
    with engine_of(turbo_folder, draft=drafter, draft_tokens=2, draft_always=True) as engine:
        engine.load(1, 32)
        put_captured(engine)
        step, o = engine.decode_step, engine.model.weights.layers[0].o
        assert isinstance(step, CapturedRoundStep)
        step.force_acceptance(0.0)
        tokens, weight = engine.stream([prompt], sampling), float(o[3, 2])
        first, second = next(tokens), next(tokens)
        assert step.next_step == 2
        o[3, 2] = torch.nan
        place = f"rank 0, attention output, layer 0{', while drafting' if drafter == 'self' else ''}, step 2;"
        with pytest.raises(BadNumbersError, match=f"^NaN or Inf: first seen on {place}"):
            next(tokens)
        assert engine.generation.requests[0].token_ids == [first.token_id, second.token_id]
        assert any(drafts for round_ in engine.generation.rounds for drafts, _ in round_)
        o[3, 2] = weight
        again = generated(engine, [prompt], sampling)[0]
        assert again[:2] == [first.token_id, second.token_id]
        assert len(again) == 4


@pytest.mark.full
def test_bad_numbers_of_a_draft_model_are_named(turbo_folder: Path, make_prompt: Any) -> None:
    sampling = SamplingConfig(max_new_tokens=8, ignore_eos=True)
    with engine_of(turbo_folder, draft=f"model:{turbo_folder}", draft_tokens=2, draft_always=True) as engine:
        engine.load(1, 40)
        put_captured(engine)
        assert engine._drafting is not None
        tokens = engine.stream([make_prompt(20, seed=3)], sampling)
        next(tokens)
        engine._drafting.model.weights.layers[1].down[3, 2] = torch.nan
        with pytest.raises(BadNumbersError, match="rank 0, MLP output, layer 1, while drafting, step"):
            list(tokens)


WINDOWED = [(draft, codec) for draft in ("ngram", "self", "model") for codec in ("bf16", "turbo4", "turboquant3")]


@pytest.mark.full
@pytest.mark.parametrize(("draft", "codec"), WINDOWED)
def test_a_model_with_a_sliding_window(narrow_folder: Path, make_prompt: Any, draft: str, codec: str) -> None:
    """Each row has a window of its own; what is rejected replaces no token that is read. Also in a draft model."""
    prompts = [(make_prompt(9, seed=3) * 15)[:124], make_prompt(60, seed=61)]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, logit_bias=FEW_TOKENS)
    draft = f"model:{narrow_folder}" if draft == "model" else draft
    options = {"kv_cache": codec, "draft": draft, "draft_tokens": 3, "draft_always": True}
    with engine_of(narrow_folder, kv_cache=codec) as engine:
        expected = generated(engine, prompts, sampling)
    for is_captured in (False, True):
        with engine_of(narrow_folder, **options) as engine:
            engine.load(2, max(map(len, prompts)) + NEW_TOKENS)
            if is_captured:
                put_captured(engine)
            assert generated(engine, prompts, sampling) == expected
            assert any(drafts for step in engine.generation.rounds for drafts, _ in step)


@pytest.mark.full
@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
@pytest.mark.parametrize("drafter", ["ngram", "self"])
def test_rounds_of_more_rows_than_fused_products_take(
    turbo_folder: Path, make_prompt: Any, drafter: str, codec: str
) -> None:
    """Five requests of four rows: the library multiplies these, fused kernels the draft steps of one row."""
    prompts = [(make_prompt(9, seed=seed) * 10)[: 40 + 7 * seed] for seed in range(5)]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, logit_bias=FEW_TOKENS, **SAMPLED)
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        expected = generated(engine, prompts, sampling)
    options = {"kv_cache": codec, "draft": drafter, "draft_tokens": 3, "draft_always": True}
    with engine_of(turbo_folder, **options) as engine:
        engine.load(5, max(map(len, prompts)) + NEW_TOKENS)
        put_captured(engine)
        step = engine.decode_step
        assert isinstance(step, CapturedRoundStep)
        assert isinstance(step._drafting.decoder.products, GemmProducts)
        assert isinstance(step._plain.decoder.products, FusedProducts)
        assert generated(engine, prompts, sampling) == expected
        assert sum(accepted for step in engine.generation.rounds for _, accepted in step) > 0


@pytest.mark.full
def test_a_round_that_finds_nothing_to_draft_counts_as_any_other(turbo_folder: Path) -> None:
    """It costs as much: over a text without repeats the policy must see that drafts do not pay."""
    with engine_of(turbo_folder, draft="ngram", draft_tokens=2) as engine:
        engine.load(1, 16)
        put_captured(engine)
        step, record = engine.decode_step, mock.Mock()
        assert isinstance(step, CapturedRoundStep)
        with mock.patch.object(step, "_policy", mock.Mock(decide_next=lambda *_: True, record=record)):
            generated(engine, [list(range(40, 46))], SamplingConfig(max_new_tokens=4, ignore_eos=True))
        # The last token has no room for drafts: a plain step.
        assert engine.generation.rounds == [[(0, 0)]] * 3
        assert [call.args[0] for call in record.call_args_list] == [1.0, 1.0]


@pytest.mark.full
@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_a_draft_model(turbo_folder: Path, make_prompt: Any, codec: str) -> None:
    """The model drafts for itself over another cache: every draft is right, also behind plain steps."""
    prompts = [make_prompt(62, seed=1)]
    sampling = SamplingConfig(max_new_tokens=12, ignore_eos=True)
    options = {"kv_cache": codec, "draft": f"model:{turbo_folder}", "draft_tokens": 2, "draft_always": True}
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        expected = generated(engine, prompts, sampling)
    with engine_of(turbo_folder, **options) as engine:
        engine.load(1, 80)
        put_captured(engine)
        step = engine.decode_step
        assert isinstance(step, CapturedRoundStep)
        assert step._draft_text is not None
        catch_up = step._draft_text.complete = mock.Mock(wraps=step._draft_text.complete)
        decisions = iter([True, False, False, False, True, True, True, True, True, True, True])
        with mock.patch.object(step, "_policy", mock.Mock(decide_next=lambda *_: next(decisions))):
            assert generated(engine, prompts, sampling) == expected
        drafted = [counts for ((counts, accepted),) in engine.generation.rounds if counts and counts == accepted]
        assert len(drafted) >= 2 if codec == "bf16" else drafted
        assert catch_up.call_count == 2  # at the prompt, and behind several plain steps


@pytest.mark.full
def test_a_forced_share_of_drafts_is_accepted(turbo_folder: Path, make_prompt: Any) -> None:
    """For profiling: whatever the drafts are. Here all of them are right. A trace has the rounds."""
    with engine_of(turbo_folder, draft="self", draft_tokens=3, draft_always=True) as engine:
        engine.load(1, 64)
        put_captured(engine)
        step, prompt = engine.decode_step, make_prompt(20, seed=5)
        assert isinstance(step, CapturedRoundStep)
        for share, new_tokens, rounds in ((0.0, 4, [[(3, 0)]] * 2 + [[(0, 0)]]), (1.0, 5, [[(3, 3)]])):
            step.force_acceptance(share)
            engine.timeline.keeps_rounds = True  # without operations, as for graphs
            generated(engine, [prompt], SamplingConfig(max_new_tokens=new_tokens, ignore_eos=True))
            assert engine.generation.rounds == rounds
            traced = engine.timeline.rows()
            assert {row["op"] for row in traced} == {"round"}
            assert [[*zip(row["drafts"], row["accepted"], strict=True)] for row in traced] == rounds
