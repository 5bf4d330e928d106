"""Likelihoods and answers that lm-eval asks for, against transformers and the engine's own stream."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch

from alspec.config import SamplingConfig
from alspec.errors import UserError
from alspec.launch import lm_eval_model
from alspec.launch.lm_eval_model import generate_until, loglikelihood, loglikelihood_rolling, open_engine
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = open_engine(threshold=0.0, transport="gloo", dtype="fp32", max_context=160)
    yield engine
    engine.close()


@torch.no_grad()
def oracle_nats(ids: list[int], start: int) -> float:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    logits = model(torch.tensor([ids])).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[start - 1 : -1], torch.tensor(ids[start:]), reduction="sum"))


@pytest.mark.parametrize("context", ["He walked slowly down the", "He walked slowly down the ", ""])
def test_loglikelihood(engine: Engine, context: str) -> None:
    assert engine.tokenizer is not None
    continuation = "road to the village." if context.endswith(" ") else " road to the village."
    ids = engine.tokenizer.encode(context.rstrip() + " road to the village.")
    start = len(engine.tokenizer.encode(context.rstrip()))
    nats, is_greedy = loglikelihood(engine, context, continuation)
    assert nats == pytest.approx(-oracle_nats(ids, start), rel=1e-4)
    assert not is_greedy


def test_what_decoding_says_is_greedy(engine: Engine) -> None:
    context = "The old man stood by the"
    text = generate_until(engine, context, {"until": [], "max_gen_toks": 12})
    assert text == "".join(token.text for token in engine.stream(context, SamplingConfig(max_new_tokens=12)))
    assert loglikelihood(engine, context, text)[1]
    stop = text[5:8]
    assert generate_until(engine, context, {"until": [stop], "max_gen_toks": 12}) == text[: text.index(stop)]


def test_a_long_context_loses_its_beginning(engine: Engine) -> None:
    assert engine.tokenizer is not None
    context, continuation = "a river and a boat. " * 60, "the captain"
    ids = engine.tokenizer.encode(context + continuation)[-160:]
    added = len(engine.tokenizer.encode(context + continuation)) - len(engine.tokenizer.encode(context.rstrip()))
    assert loglikelihood(engine, context, continuation)[0] == pytest.approx(-oracle_nats(ids, 160 - added), rel=1e-4)


def test_rolling_counts_each_token_once(engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = "He had lived there when he was young, before the mill was closed. " * 20
    bos, *ids = engine.tokenizer.encode(text)
    windows = [[bos, *ids[start : start + 159]] for start in range(0, len(ids), 159)]
    assert len(windows) > 1
    expected = -math.fsum(oracle_nats(window, 1) for window in windows)
    assert loglikelihood_rolling(engine, text) == pytest.approx(expected, rel=1e-4)


def test_requests_that_cannot_be_answered(engine: Engine) -> None:
    with pytest.raises(UserError, match="expected a continuation that adds tokens, found ''"):
        loglikelihood(engine, "He walked", "")
    with pytest.raises(UserError, match="max_gen_toks: 160 leaves no room in 160 tokens"):
        generate_until(engine, "He walked", {"max_gen_toks": 160})


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_eval_model.main() == 2
    assert (
        "lm-eval cannot be imported (No module named 'lm_eval'); pip install -e '.[lm-eval]'" in capsys.readouterr().err
    )
