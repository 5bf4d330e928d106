"""What people ask of an answer: penalties, several answers, stop ids and log probabilities, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.errors import UserError
from alspec.runtime.engine import prompt_pass
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Completion

PROMPT = [7, 30, 200, 5, 5, 91, 30, 12]
LONGER = [11, 40, 7, 7, 250, 3, 90, 90, 14, 61, 17]
SAMPLED = {"temperature": 1.3, "max_new_tokens": 10, "ignore_eos": True, "seed": 4}
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    torch.set_num_threads(1)
    with Engine.from_pretrained(tiny_folder, transport="gloo", dtype="fp32") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def answers(engine: Engine, prompt: object, **options: object) -> list[Completion]:
    found = engine.generate(prompt, **options)  # type: ignore[arg-type]
    return found if isinstance(found, list) else [found]


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_greedy_answers_with_a_repetition_penalty_are_those_of_transformers(
    engine: Engine, reference: LlamaForCausalLM, penalty: float
) -> None:
    found = answers(engine, PROMPT, repetition_penalty=penalty, max_new_tokens=24, ignore_eos=True)
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False, repetition_penalty=penalty,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert found[0].token_ids == expected[0, len(PROMPT) :].tolist()


def test_other_settings_change_greedy_answers(engine: Engine) -> None:
    """A token with the largest bias is the only one; a strong presence penalty lets no token come twice."""
    forced = answers(engine, PROMPT, logit_bias={77: 100}, max_new_tokens=5, ignore_eos=True)
    assert forced[0].token_ids == [77] * 5
    plain = answers(engine, PROMPT, max_new_tokens=5, ignore_eos=True)[0].token_ids
    banned = answers(engine, PROMPT, logit_bias={plain[0]: -100}, max_new_tokens=5, ignore_eos=True)
    assert plain[0] not in banned[0].token_ids
    both = answers(engine, PROMPT, logit_bias={77: 1.0, 78: 0.9}, presence_penalty=2.0, max_new_tokens=4)
    assert len(both[0].token_ids) == len(set(both[0].token_ids))


def test_min_p_of_1_is_greedy(engine: Engine) -> None:
    greedy = answers(engine, PROMPT, max_new_tokens=10, ignore_eos=True)
    assert answers(engine, PROMPT, **SAMPLED, min_p=1.0)[0].token_ids == greedy[0].token_ids
    assert answers(engine, PROMPT, **SAMPLED)[0].token_ids != greedy[0].token_ids


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo-mixed"])
def test_several_answers(turbo_folder: Path, kv_cache: str) -> None:
    """They differ, are those of as many equal prompts, and take one pass over each prompt."""
    torch.set_num_threads(1)
    prompts, prefill = [LONGER * 9, PROMPT], prompt_pass.prefill
    with Engine.from_pretrained(turbo_folder, transport="gloo", dtype="fp32", kv_cache=kv_cache) as engine:
        with mock.patch.object(prompt_pass, "prefill", mock.Mock(wraps=prefill)) as counted:
            found = answers(engine, prompts, **SAMPLED, **PENALTIES, n=3)
            assert counted.call_count == 2
        assert [each.prompt_ids for each in found] == [prompts[0]] * 3 + [prompts[1]] * 3
        assert len({tuple(each.token_ids) for each in found}) == 6
    # Another engine: this one would process the prompts in two chunks, because its cache keeps their prefixes.
    with Engine.from_pretrained(turbo_folder, transport="gloo", dtype="fp32", kv_cache=kv_cache) as engine:
        repeated = answers(engine, [prompts[0]] * 3 + [prompts[1]] * 3, **SAMPLED, **PENALTIES)
        assert [each.token_ids for each in repeated] == [each.token_ids for each in found]


def test_requests_of_tokens_and_completions_of_several_answers(engine: Engine) -> None:
    tokens = list(engine.stream([PROMPT, LONGER], **SAMPLED, n=2))
    assert {token.request for token in tokens} == {0, 1, 2, 3}
    one = engine.generate(PROMPT, **SAMPLED, n=2)
    assert isinstance(one, list)
    assert len(one) == 2
    assert isinstance(engine.generate(PROMPT, **SAMPLED, n=1), Completion)
    assert engine.generation.num_answers == 1


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalties"])
def test_an_answer_does_not_depend_on_the_other_requests(engine: Engine, penalties: dict[str, float]) -> None:
    alone = answers(engine, PROMPT, **SAMPLED, **penalties)[0].token_ids
    for others in ([LONGER], [PROMPT, LONGER * 3]):
        assert answers(engine, [PROMPT, *others], **SAMPLED, **penalties)[0].token_ids == alone


def test_stop_ids_end_an_answer_without_text(engine: Engine) -> None:
    whole = answers(engine, PROMPT, max_new_tokens=12, ignore_eos=True)[0]
    stop = whole.token_ids[4]
    place = whole.token_ids.index(stop)
    found = answers(engine, PROMPT, max_new_tokens=12, ignore_eos=True, stop_ids=[300, stop])[0]
    assert found.token_ids == whole.token_ids[: place + 1]
    assert found.finish_reason == "stop"
    assert whole.text.startswith(found.text)
    assert len(found.text) < len(whole.text)


@pytest.mark.parametrize("num_top", [0, 4])
def test_log_probabilities_are_those_of_the_model(engine: Engine, reference: LlamaForCausalLM, num_top: int) -> None:
    """Temperature and penalties choose other tokens, but do not change their log probabilities."""
    options = SAMPLED | PENALTIES | {"logprobs": num_top, "n": 2}
    tokens = list(engine.stream(PROMPT, SamplingConfig.model_validate(options)))
    found = engine.generation.completions()
    for index, completion in enumerate(found):
        ids = completion.prompt_ids + completion.token_ids
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert completion.logprobs is not None
        assert [token.logprobs for token in tokens if token.request == index] == completion.logprobs
        chosen = torch.tensor([each.logprob for each in completion.logprobs])
        wanted = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(chosen, wanted, rtol=1e-4, atol=1e-4)
        for each, row in zip(completion.logprobs, expected, strict=True):
            values, top = row.topk(num_top)
            assert engine.tokenizer is not None
            assert each.top_texts == list(map(engine.tokenizer.token_text, top.tolist()))
            assert [token for token, _ in each.top] == top.tolist()
            torch.testing.assert_close(torch.tensor([value for _, value in each.top]), values, rtol=1e-4, atol=1e-4)
    assert answers(engine, PROMPT, max_new_tokens=2)[0].logprobs is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_ids": [301]}, "stop_ids: token id 301 is outside the vocabulary of 301; give ids from 0 to 300"),
        (
            {"logit_bias": {999: 1.0}},
            "logit_bias: token id 999 is outside the vocabulary of 301; give ids from 0 to 300",
        ),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        engine.generate(PROMPT, **options)
    assert str(caught.value) == message


@pytest.mark.gpu
def test_a_captured_graph_gives_the_answers_of_eager_steps(turbo_folder: Path) -> None:
    """With every setting, and again with others of the same kinds. Lambda is 0, so `simulated` is eager attention."""
    found = []
    for mode in ("off", "simulated"):
        speculation = SpeculationConfig(mode=mode, threshold=0.0)
        with Engine.from_pretrained(turbo_folder, dtype="fp32", speculation=speculation) as engine:
            assert engine.device.type == "cuda"
            for more in ({"logit_bias": {7: 2.0}}, {"logit_bias": {9: 1.0, 7: -5.0}, "seed": 8, "min_p": 0.02}):
                options = SAMPLED | PENALTIES | {"min_p": 0.01, "top_p": 0.95, "n": 2, "logprobs": 3} | more
                found.append(answers(engine, [LONGER, PROMPT], **options))
            greedy = {"max_new_tokens": 10, "ignore_eos": True, "logprobs": 2}
            found.append(answers(engine, [LONGER, PROMPT], **PENALTIES, **greedy))
            assert engine.uses_graph == (mode == "off")
    assert found[0] != found[1]
    for captured, eager in zip(found[:3], found[3:], strict=True):
        assert [each.token_ids for each in captured] == [each.token_ids for each in eager]
        for one, other in zip(captured, eager, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            for ours, reference in zip(one.logprobs, other.logprobs, strict=True):
                assert [token for token, _ in ours.top] == [token for token, _ in reference.top]
                values = [[each.logprob, *(value for _, value in each.top)] for each in (ours, reference)]
                torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-3, atol=1e-3)
