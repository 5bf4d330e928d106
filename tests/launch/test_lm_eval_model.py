"""Likelihoods and answers for lm-eval, against transformers and the engine's own stream; lm-eval is not needed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from alspec.config import SamplingConfig
from alspec.errors import UserError
from alspec.launch import lm_eval_model
from alspec.launch.lm_eval_model import (
    TaskTokenizer,
    cache_setting,
    generate_ids,
    generation_defaults,
    loglikelihood,
    open_engine,
    sampling_config,
    with_end_tokens,
)
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.teacher_forced import CacheSetting

LIMIT = 160


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = open_engine(transport="gloo", dtype="fp32", max_context=LIMIT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def texts(engine: Engine) -> TaskTokenizer:
    assert engine.tokenizer is not None
    return TaskTokenizer(engine.tokenizer)


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
        engines.append(open_engine(transport="gloo", dtype="fp32", max_context=LIMIT, model=folder))
        return engines[-1]

    yield open_with
    for engine in engines:
        engine.close()


@torch.no_grad()
def oracle(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    answer = torch.tensor(continuation)
    logits = model(torch.tensor([context + continuation[:-1]])).logits[0, len(context) - 1 :]
    nats = -float(torch.nn.functional.cross_entropy(logits, answer, reduction="sum"))
    return nats, torch.equal(logits.argmax(-1), answer)


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_loglikelihood(cut: int, engine: Engine, texts: TaskTokenizer) -> None:
    ids = texts.encode("He walked slowly down the road to the village.")
    nats, is_greedy = oracle(ids[:cut], ids[cut:])
    assert loglikelihood(engine, ids[:cut], ids[cut:]) == (pytest.approx(nats, rel=1e-5), is_greedy)


@pytest.mark.parametrize(("before", "count"), [(400, 5), (3, LIMIT), (LIMIT, 1), (1, LIMIT)])
def test_beyond_the_positions_the_beginning_is_cut(
    before: int, count: int, engine: Engine, texts: TaskTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The model reads as many tokens as it has positions; the last token is predicted, not read."""
    ids = texts.encode("a river and a boat, and the captain of the ship. " * 60)[: before + count]
    assert len(ids) == before + count
    kept = ids[-(LIMIT + 1) :]
    expected = oracle(kept[:-count], kept[-count:])
    assert loglikelihood(engine, ids[:before], ids[before:]) == (pytest.approx(expected[0], rel=1e-5), expected[1])
    dropped = before + count - (LIMIT + 1)
    assert (f"truncating {dropped} tokens from the left" in caplog.text) == (dropped > 0)


def test_requests_that_cannot_be_answered_are_refused(engine: Engine, texts: TaskTokenizer) -> None:
    for context, continuation in (([], [5]), ([5], [])):
        with pytest.raises(UserError, match="expected a context and a continuation that adds tokens, found none"):
            loglikelihood(engine, context, continuation)
    with pytest.raises(UserError, match=f"a continuation of {LIMIT + 1} tokens; expected {LIMIT} at most"):
        loglikelihood(engine, [5], [5] * (LIMIT + 1))
    with pytest.raises(UserError, match=f"max_gen_toks: {LIMIT} leaves no room in {LIMIT} tokens"):
        generate_ids(engine, texts, [5], SamplingConfig(max_new_tokens=LIMIT))
    with pytest.raises(UserError, match="lm-eval: speculation: leave it out"):
        open_engine(speculation="off")


@pytest.mark.parametrize(
    ("settings", "prefix", "begins"),
    [
        ({}, "<|bos|>", "<|bos|>"),
        ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"}, "<|bos|>", "<|bos|>"),
        ({"bos_token": None}, "<|eos|>", ""),
        ({"eos_token": None}, "<|bos|>", "<|bos|>"),
    ],
)
def test_begin_of_texts(settings: dict[str, Any], prefix: str, begins: str, open_copy: Callable[..., Engine]) -> None:
    tokenizer = open_copy(**settings).tokenizer
    assert tokenizer is not None
    text, ids_of = "The road", tokenizer.core.token_to_id
    plain = tokenizer.encode(text, add_bos=False)
    own = [ids_of(begins)] if begins else []
    bos = [] if "bos_token" in settings else [ids_of("<|bos|>")]
    for add_bos_token, begin in ((None, own), (True, bos), (False, [])):
        texts = TaskTokenizer(tokenizer, add_bos_token)
        assert texts.prefix_token_id == ids_of(prefix)
        assert texts.encode(text) == texts.encode_prompt(text) == begin + plain
        assert texts.encode(text, add_special_tokens=False) == plain
        assert texts.encode(prefix + text) == [ids_of(prefix), *plain]  # once
        assert texts.encode_prompt("") == begin or [ids_of(prefix)]
    assert TaskTokenizer(tokenizer, prefix_token_id=7).prefix_token_id == 7


def test_a_tokenizer_without_bos_and_eos(open_copy: Callable[..., Engine]) -> None:
    tokenizer = open_copy(bos_token=None, eos_token=None).tokenizer
    assert tokenizer is not None
    texts = TaskTokenizer(tokenizer)
    assert texts.encode("He walked") == tokenizer.encode("He walked")
    with pytest.raises(UserError, match="an empty context needs a BOS or EOS token"):
        texts.encode_prompt("")


def test_memory_is_taken_for_generation_only() -> None:
    with open_engine(transport="gloo", dtype="fp32") as engine:
        assert engine.tokenizer is not None
        texts = TaskTokenizer(engine.tokenizer)
        long = texts.encode("a river and a boat. " * 50)
        loglikelihood(engine, long, texts.encode("the captain"))
        assert engine.cache.max_context < 8
        for count, low, high in ((3, 3, 16), (50, 50, 100), (3, 50, 100)):
            assert len(generate_ids(engine, texts, long[:count], SamplingConfig(max_new_tokens=4))) == 4
            assert low < engine.cache.max_context < high


def test_greedy_decoding_is_reported_as_greedy(engine: Engine, texts: TaskTokenizer) -> None:
    prompt, sampling = texts.encode_prompt("The old man stood by the"), SamplingConfig(max_new_tokens=12)
    ids = generate_ids(engine, texts, prompt, sampling)
    assert ids == [token.token_id for token in engine.stream([prompt], sampling)]
    assert loglikelihood(engine, prompt, ids)[1]
    assert not loglikelihood(engine, prompt, [*ids[:-1], ids[-1] - 1])[1]


def test_an_answer_ends_with_the_token_that_completes_a_text(engine: Engine, texts: TaskTokenizer) -> None:
    prompt, sampling = texts.encode_prompt("The old man stood by the"), SamplingConfig(max_new_tokens=12)
    ids = generate_ids(engine, texts, prompt, sampling)
    text = texts.decode(ids)
    for stop in (text[5:8], text[9:11], text[-1:]):
        short = generate_ids(engine, texts, prompt, sampling, ["no such text", stop])
        assert short == ids[: len(short)]
        assert stop in texts.decode(short)
        assert stop not in texts.decode(short[:-1])


def test_a_long_prompt_loses_its_beginning(
    engine: Engine, texts: TaskTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, sampling = texts.encode("The old man stood by the river. " * 40), SamplingConfig(max_new_tokens=4)
    assert generate_ids(engine, texts, prompt, sampling) == generate_ids(engine, texts, prompt[-156:], sampling)
    assert caplog.text.count(f"prompt of {len(prompt)} tokens: truncating it to its last 156 tokens") == 1


NONE: dict[str, Any] = {}


def test_settings_of_a_task() -> None:
    """Given as lm-eval's `normalize_gen_kwargs` leaves them."""
    greedy = SamplingConfig(max_new_tokens=9, seed=3)
    for settings in (
        {"do_sample": False, "temperature": 0.0},
        {"do_sample": False, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"do_sample": False, "num_beams": 1, "use_cache": True, "no_repeat_ngram_size": 0},
    ):
        assert sampling_config(settings, generation_defaults(Path("no folder")), 9, seed=3) == greedy
    sampled = {"do_sample": True, "temperature": 0.7}
    assert sampling_config(sampled, {"top_k": 50}, 9, 3) == greedy.model_copy(update={"temperature": 0.7, "top_k": 50})
    given = sampling_config(sampled | {"top_p": 0.9, "top_k": 2}, {"top_k": 50}, 9, 3)
    assert given == greedy.model_copy(update={"temperature": 0.7, "top_p": 0.9, "top_k": 2})
    assert sampling_config(sampled | {"ignore_eos": True}, NONE, 9, 3).ignore_eos


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "lm-eval: num_beams: 4 cannot be applied; known are do_sample, temperature, "),
        ({"typical_p": 0.5, "do_sample": True, "temperature": 1.0}, "lm-eval: typical_p: 0.5 cannot be applied"),
        ({"n": 2}, "lm-eval: n: 2 cannot be applied"),
        ({"do_sample": True}, "lm-eval: temperature: expected more than 0 with do_sample"),
        ({"do_sample": True, "temperature": 1.0, "top_p": 2}, "lm-eval: top_p: .+, found 2"),
    ],
)
def test_settings_that_cannot_be_applied_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sampling_config(settings, NONE, 9)


def test_a_penalty_is_applied() -> None:
    penalty = {"repetition_penalty": 5.0}
    assert sampling_config({"repetition_penalty": 1.0}, NONE, 9) == SamplingConfig(max_new_tokens=9)
    assert sampling_config(penalty, NONE, 9).repetition_penalty == 5.0
    assert sampling_config(NONE, penalty, 9).repetition_penalty == 5.0


def test_end_tokens_replace_those_of_the_engine() -> None:
    settings = with_end_tokens(SamplingConfig(stop_ids=(7,)), [1, 3])
    assert (settings.ignore_eos, settings.stop_ids) == (True, (1, 3, 7))
    endless = SamplingConfig(ignore_eos=True)
    assert with_end_tokens(endless, [1, 3]) == endless


def test_settings_of_a_folder(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == generation_defaults(tmp_path / "model.gguf") == {"top_k": 50}
    values = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True, "eos_token_id": [2, 3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    assert generation_defaults(tmp_path) == {"top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"min_new_tokens": 4, "top_h": 0.4}), encoding="utf-8")
    with pytest.raises(UserError, match="lm-eval: min_new_tokens: 4 cannot be applied"):
        sampling_config(NONE, generation_defaults(tmp_path), 9)


def test_a_threshold_simulates_speculation(engine: Engine, texts: TaskTokenizer) -> None:
    ids = texts.encode("He had lived there when he was young, before the mill was closed. " * 40)[:600]
    with open_engine(threshold=float("inf"), transport="gloo", dtype="fp32") as lossy:
        assert (lossy.mode, engine.mode) == ("simulated", "off")
        with open_engine(transport="gloo", dtype="fp32") as exact:
            nats = [loglikelihood(each, ids[:500], ids[500:])[0] for each in (lossy, exact)]
    assert nats[1] == pytest.approx(oracle(ids[:500], ids[500:])[0], rel=1e-5)
    assert abs(nats[0] - nats[1]) > 1e-3


@pytest.mark.parametrize(("kv_cache", "softmax"), [("turbo4", "fast"), ("bf17", "sas"), ("bf17", "fast")])
def test_unknown_caches_are_refused(kv_cache: str, softmax: str) -> None:
    assert cache_setting("turbo4", "sas") == CacheSetting("turbo4", "sas")
    with pytest.raises(UserError, match=f"lm-eval: expected kv_cache bf16, .*, found '{kv_cache}' and '{softmax}'"):
        cache_setting(kv_cache, softmax)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_the_error_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert lm_eval_model.main() == 2
    assert (
        "lm-eval cannot be imported (No module named 'lm_eval'); pip install -e '.[lm-eval]'" in capsys.readouterr().err
    )


def test_other_ranks_write_no_reports() -> None:
    argv = ["--tasks", "a", "--output_path", "x", "--log_samples", "--output_path=x", "-o", "y", "--limit", "3"]
    assert lm_eval_model._without_reports(argv) == ["--tasks", "a", "--limit", "3"]
