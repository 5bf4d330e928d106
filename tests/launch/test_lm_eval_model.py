"""Likelihoods and answers for lm-eval, against transformers and the engine's own stream."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import fast

from alspec.config import SamplingConfig
from alspec.errors import UserError
from alspec.launch import lm_eval_model
from alspec.launch.lm_eval_model import cache_setting, generate_until, loglikelihood, loglikelihood_rolling, open_engine
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.teacher_forced import CacheSetting


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = open_engine(threshold=0.0, transport="gloo", dtype="fp32", max_context=160)
    yield engine
    engine.close()


@pytest.fixture
def open_copy(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """An engine of the demo checkpoint with other tokenizer settings; None leaves a setting out."""
    engines = []

    def open_with(**overrides: Any) -> Engine:
        folder = Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "model"))
        changed = {"tokenizer_config.json": overrides, "config.json": {"bos_token_id": None} if overrides else {}}
        if overrides.get("bos_token", "") is None:
            changed["tokenizer.json"] = {"post_processor": None}
        for name, values in changed.items():
            settings = json.loads((folder / name).read_text(encoding="utf-8")) | values
            settings = {key: value for key, value in settings.items() if value is not None}
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")
        engines.append(open_engine(threshold=0.0, transport="gloo", dtype="fp32", max_context=160, model=folder))
        return engines[-1]

    yield open_with
    for engine in engines:
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


@pytest.mark.parametrize("space", fast([" ", "\n", "\n\n", " \t\n", "\u00a0"], keep=[" \t\n", "\u00a0"]))
def test_whitespace_belongs_to_the_continuation(engine: Engine, space: str) -> None:
    assert engine.tokenizer is not None
    context, continuation = "He walked slowly down the", "road to the village."
    ids, start = engine.tokenizer.encode(context + space + continuation), len(engine.tokenizer.encode(context))
    expected = pytest.approx(-oracle_nats(ids, start), rel=1e-4)
    assert loglikelihood(engine, context + space, continuation)[0] == expected
    assert loglikelihood(engine, context, space + continuation)[0] == expected


@pytest.mark.parametrize(
    ("context", "settings", "prefix"),
    [
        pytest.param(context, settings, prefix, marks=[] if context == fast_context else pytest.mark.full)
        for settings, prefix, fast_context in (
            ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"}, "<|bos|>", ""),
            ({"bos_token": None}, "<|eos|>", " "),
            ({"eos_token": None}, "<|bos|>", None),
        )
        for context in ("", " ")
    ],
)
def test_an_empty_context_is_bos_or_eos(
    context: str, settings: dict[str, Any], prefix: str, open_copy: Callable[..., Engine]
) -> None:
    """Every token counts, also where the tokenizer adds no BOS."""
    engine = open_copy(**settings)
    assert engine.tokenizer is not None
    text = "The road to the village."
    first, *ids = engine.tokenizer.encode(prefix + context + text)
    expected = pytest.approx(-oracle_nats([first, *ids], 1), rel=1e-4)
    assert loglikelihood(engine, context, text)[0] == expected
    assert loglikelihood(engine, "", prefix + context + text)[0] == expected
    if not context:
        assert loglikelihood_rolling(engine, text) == expected


def test_a_tokenizer_without_bos_and_eos(open_copy: Callable[..., Engine]) -> None:
    engine = open_copy(bos_token=None, eos_token=None)
    assert loglikelihood(engine, "He walked", " down")[0] < 0
    for call in (lambda: loglikelihood(engine, "", "He"), lambda: loglikelihood_rolling(engine, "He")):
        with pytest.raises(UserError, match="an empty context needs a BOS or EOS token"):
            call()


def test_memory_is_taken_for_generation_only() -> None:
    with open_engine(threshold=0.0, transport="gloo", dtype="fp32") as engine:
        longest = engine.model_config.max_position_embeddings
        loglikelihood(engine, "a river and a boat. " * 50, "the captain")
        assert engine.cache.max_context < 8
        assert generate_until(engine, "He walked", {"max_gen_toks": 4})
        assert engine.cache.max_context < 16
        with pytest.raises(UserError, match=f"max_gen_toks: {longest} leaves no room in {longest} tokens"):
            generate_until(engine, "He walked", {"max_gen_toks": longest})
        assert generate_until(engine, "a river and a boat. " * 10, {"max_gen_toks": 4})
        room = engine.cache.max_context
        assert 50 < room < 100
        assert generate_until(engine, "He walked", {"max_gen_toks": 4})
        assert engine.cache.max_context == room


def test_greedy_decoding_is_reported_as_greedy(engine: Engine) -> None:
    context = "The old man stood by the"
    text = generate_until(engine, context, {"until": [], "max_gen_toks": 12})
    assert text == "".join(token.text for token in engine.stream(context, SamplingConfig(max_new_tokens=12)))
    assert loglikelihood(engine, context, text)[1]
    stop = text[5:8]
    assert generate_until(engine, context, {"until": [stop], "max_gen_toks": 12}) == text[: text.index(stop)]


def test_sampling_settings_of_a_task_are_used(engine: Engine) -> None:
    """They count only with do_sample; repeated requests have different seeds."""
    context, room = "The old man stood by the", {"max_gen_toks": 12, "until": ["", "\n\n\n"]}
    greedy = generate_until(engine, context, room)
    for others in ({"temperature": 3.0}, {"do_sample": True, "temperature": 3.0, "top_k": 1}):
        assert generate_until(engine, context, room | others) == greedy
    assert generate_until(engine, context, room | {"do_sample": True, "top_p": 1e-6}) == greedy
    sampled = [generate_until(engine, context, room | {"do_sample": True, "temperature": 3.0}, seed) for seed in (0, 1)]
    config = SamplingConfig(max_new_tokens=12, temperature=3.0, seed=1)
    assert sampled[1] == "".join(token.text for token in engine.stream(context, config))
    assert len({greedy, *sampled}) == 3
    with pytest.raises(UserError, match=r"lm-eval: top_p: .+, found 2"):
        generate_until(engine, context, room | {"do_sample": True, "top_p": 2})


def test_a_long_context_loses_its_beginning(engine: Engine) -> None:
    assert engine.tokenizer is not None
    context, continuation = "a river and a boat. " * 60, "the captain"
    ids = engine.tokenizer.encode(context + continuation)[-160:]
    added = len(engine.tokenizer.encode(context + continuation)) - len(engine.tokenizer.encode(context.rstrip()))
    assert loglikelihood(engine, context, continuation)[0] == pytest.approx(-oracle_nats(ids, 160 - added), rel=1e-4)


def test_a_continuation_longer_than_the_model_keeps_one_token_before_it(engine: Engine) -> None:
    assert engine.tokenizer is not None
    context, continuation = "He walked slowly down the", " road to the village." * 60
    ids, start = (len(engine.tokenizer.encode(text)) for text in (context + continuation, context))
    assert ids - start > 160
    tokens = engine.tokenizer.encode(context + continuation)[start - 1 :]
    assert loglikelihood(engine, context, continuation)[0] == pytest.approx(-oracle_nats(tokens, 1), rel=1e-4)


def test_a_long_prompt_to_generate_from_loses_its_beginning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.tokenizer is not None
    prompts: list[list[int]] = []
    check = engine.check_prompts
    monkeypatch.setattr(engine, "check_prompts", lambda *args: (prompts.extend(args[0]), check(*args))[1])
    context = "The old man stood by the river. " * 40
    generate_until(engine, context, {"max_gen_toks": 4})
    assert prompts == [engine.tokenizer.encode(context)[-156:]]


@pytest.mark.parametrize(("kv_cache", "softmax"), [("turbo4", "fast"), ("bf17", "sas"), ("bf17", "fast")])
def test_unknown_caches_are_refused(kv_cache: str, softmax: str) -> None:
    assert cache_setting("turbo4", "sas") == CacheSetting("turbo4", "sas")
    with pytest.raises(UserError, match=f"lm-eval: expected kv_cache bf16, .*, found '{kv_cache}' and '{softmax}'"):
        cache_setting(kv_cache, softmax)


def test_rolling_counts_each_token_once(engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = "He had lived there when he was young, before the mill was closed. " * 20
    bos, *ids = engine.tokenizer.encode(text)
    windows = [[bos, *ids[start : start + 159]] for start in range(0, len(ids), 159)]
    assert len(windows) > 1
    expected = -math.fsum(oracle_nats(window, 1) for window in windows)
    assert loglikelihood_rolling(engine, text) == pytest.approx(expected, rel=1e-4)


def test_requests_that_cannot_be_answered_are_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="expected a continuation that adds tokens, found ''"):
        loglikelihood(engine, "He walked", "")
    with pytest.raises(UserError, match="max_gen_toks: 160 leaves no room in 160 tokens"):
        generate_until(engine, "He walked", {"max_gen_toks": 160})


def test_requests_of_a_task_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}

    def register_model(name: str) -> Callable[[type], type]:
        return lambda model: registered.setdefault(name, model)

    parts: dict[str, dict[str, Any]] = {
        "": {},
        ".api": {},
        ".api.model": {"LM": object},
        ".api.registry": {"register_model": register_model},
    }
    for name, content in parts.items():
        module = ModuleType(f"lm_eval{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    lm_eval_model._register()
    model = registered["alspec"](threshold=0.0, transport="gloo", dtype="fp32")
    loads: list[int] = []
    load = model.engine.load
    monkeypatch.setattr(model.engine, "load", lambda *room: (loads.append(room[1]), load(*room)))
    contexts = ["He walked", "He walked slowly down the road to the village", "The old man stood by the"]
    requests = [SimpleNamespace(args=(context, {"max_gen_toks": 4})) for context in contexts]
    answers = model.generate_until(requests)
    assert len(loads) == 1
    for context, answer in zip(contexts, answers, strict=True):
        assert generate_until(model.engine, context, {"max_gen_toks": 4}) == answer
    request = SimpleNamespace(args=(contexts[0], {"max_gen_toks": 8, "do_sample": True, "temperature": 3.0}))
    answers = model.generate_until(3 * [request])
    assert len(set(answers)) == 3
    assert model.generate_until(3 * [request]) == answers
    for cache in (cache_setting("turbo4", "exact"), cache_setting("bf16", "sas")):
        model.cache = cache  # the engine has another one
        with pytest.raises(UserError, match="decode from kv_cache bf16 with softmax exact only"):
            model.generate_until(requests)
    model.engine.close()


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_the_error_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_eval_model.main() == 2
    assert (
        "lm-eval cannot be imported (No module named 'lm_eval'); pip install -e '.[lm-eval]'" in capsys.readouterr().err
    )
