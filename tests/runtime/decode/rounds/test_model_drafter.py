"""Drafts of a smaller model: its cache follows the text, tokenizers are compared, and ranks draft alike."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from paths import WORKERS
from round_cases import cached, engine_of, generated
from safetensors.torch import load_file, save_file
from tiers import fast
from torch import Tensor

from alspec.config import SamplingConfig
from alspec.errors import UserError
from alspec.runtime.decode.rounds.drafter import DraftRequest
from alspec.runtime.decode.rounds.model_drafter import CATCH_UP_ROWS, ModelDrafter
from alspec.runtime.decode.rounds.round_step import RoundStep
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.kept_prefix import common_prefix

SAMPLING = SamplingConfig(max_new_tokens=30, ignore_eos=True)
SAMPLED = SamplingConfig(max_new_tokens=30, ignore_eos=True, temperature=0.2, seed=2)


@pytest.fixture(scope="module")
def noisy_folder(turbo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise in its weights, so that it is right now and then, and a longer vocabulary."""
    folder = tmp_path_factory.mktemp("draft") / "noisy"
    shutil.copytree(turbo_folder, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")

    def changed(name: str, weight: Tensor) -> Tensor:
        weight = weight + 0.006 * torch.randn(weight.shape, generator=generator)
        return (
            torch.cat([weight, weight[:19] * 3]) if name in ("model.embed_tokens.weight", "lm_head.weight") else weight
        )

    save_file({name: changed(name, weight) for name, weight in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 19}))
    return folder


def drafter_of(engine: Engine) -> ModelDrafter:
    assert isinstance(engine.decode_step, RoundStep)
    assert isinstance(engine.decode_step._drafter, ModelDrafter)
    return engine.decode_step._drafter


@pytest.mark.parametrize("sampling", [SAMPLING, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("codec", fast(["bf16", "turbo4"], ["turbo4"]))
@pytest.mark.parametrize("num_drafts", fast([1, 4], [4]))
def test_text_and_cache_are_those_of_plain_decoding(
    turbo_folder: Path, noisy_folder: Path, make_prompt: Any, sampling: SamplingConfig, codec: str, num_drafts: int
) -> None:
    """At the end, the draft model's cache holds what its own prompt pass would write."""
    prompts = [make_prompt(length, seed=length) for length in (50, 33, 70)]
    lengths = [len(ids) + sampling.max_new_tokens - 1 for ids in prompts]
    with engine_of(turbo_folder, kv_cache=codec) as engine:
        tokens, cache = generated(engine, prompts, sampling), cached(engine, lengths)
    options = {"kv_cache": codec, "draft": f"model:{noisy_folder}", "draft_tokens": num_drafts, "draft_always": True}
    with engine_of(turbo_folder, **options) as engine:
        assert generated(engine, prompts, sampling) == tokens
        accepted = {accepted for step in engine.generation.rounds for drafts, accepted in step if drafts == num_drafts}
        assert accepted >= {0, num_drafts}
        for found, right in zip(cached(engine, lengths), cache, strict=True):
            assert torch.equal(found, right)
        own, held = drafter_of(engine)._forward.cache, drafter_of(engine)._held
        own_k = own.layer(1).k.clone()
    with engine_of(noisy_folder) as engine:
        texts = [ids + new for ids, new in zip(prompts, tokens, strict=True)]
        generated(engine, texts, SamplingConfig(max_new_tokens=1))
        for request, (text, ids) in enumerate(zip(texts, held.tolist(), strict=True)):
            count = common_prefix(text, ids)
            assert count >= len(text) - num_drafts - 2
            expected = engine.cache.layer(1).k[request, :, :count]
            torch.testing.assert_close(own_k[request, :, :count], expected, rtol=1e-4, atol=1e-4)


def test_the_model_itself_is_always_right(turbo_folder: Path, make_prompt: Any) -> None:
    """After a full acceptance its cache lacks the last draft."""
    prompts = [make_prompt(20, seed=1), make_prompt(9, seed=2)]
    with engine_of(turbo_folder, draft=f"model:{turbo_folder}", draft_tokens=4, draft_always=True) as engine:
        generated(engine, prompts, SAMPLED)
        assert engine.generation.rounds == [[(4, 4), (4, 4)]] * 5 + [[(3, 3), (3, 3)]]


def test_plain_steps_and_other_prompts_in_between(turbo_folder: Path, make_prompt: Any) -> None:
    """It computes again what its cache lacks: a few rows, or a prompt."""
    options = {"draft": f"model:{turbo_folder}", "draft_tokens": 3, "draft_always": True, "max_context": 200}
    with engine_of(turbo_folder, **options) as engine:
        generated(engine, [make_prompt(40, seed=1)], SAMPLING)
        drafter = drafter_of(engine)
        assert isinstance(engine.decode_step, RoundStep)
        history = engine.decode_step._history
        for lacking in (1, CATCH_UP_ROWS, CATCH_UP_ROWS + 5):
            text = make_prompt(50, seed=lacking)
            history.begin([text[49]], [50], [text[:49]])
            drafter._held.fill_(-1)
            request = DraftRequest(history, torch.tensor([3]), 3, SAMPLING, None)
            expected = drafter.draft(request).token_ids
            drafter._held[0, 50 - lacking :] = -1
            drafter._forward.cache.layer(0).k[:, :, 50 - lacking :] = torch.nan
            assert torch.equal(drafter.draft(request).token_ids, expected)


def test_memory_is_that_of_both_models(turbo_folder: Path, noisy_folder: Path) -> None:
    """Also when a larger cache replaces the first one, and when all of it is freed."""
    engine = engine_of(turbo_folder, kv_cache="turbo4", draft=f"model:{noisy_folder}")
    for batch_size, max_context in ((1, 70), (3, 200)):
        engine.load(batch_size, max_context)
        own = drafter_of(engine)._forward
        assert own.cache.batch_size == batch_size
        assert own.cache.max_context == max_context
        assert engine.memory is not None
        assert engine.memory.cache_bytes == engine.cache.num_bytes + own.cache.num_bytes
        tensors: list[Tensor] = []
        for weights in (engine.model.weights, own.model.weights):
            tensors += [weights.embedding, weights.lm_head, weights.final_norm]
            tensors += [tensor for layer in weights.layers for tensor in layer.tensors.values()]
        assert engine.memory.weights_bytes == sum(tensor.nbytes for tensor in tensors)
    weight = weakref.ref(own.model.weights)
    engine.close()
    del own, tensors, weights
    assert weight() is None


def test_another_tokenizer_is_refused(turbo_folder: Path, noisy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(noisy_folder, folder)
    core = json.loads((folder / "tokenizer.json").read_text())
    vocab = core["model"]["vocab"]
    first, second = (next(token for token, id_ in vocab.items() if id_ == place) for place in (17, 40))
    vocab[first], vocab[second] = 40, 17
    (folder / "tokenizer.json").write_text(json.dumps(core))
    with pytest.raises(
        UserError, match=rf"^draft: model:\S+other: .* id 17 is '{first}', found '{second}'; use [^\n]+$"
    ):
        engine_of(turbo_folder, draft=f"model:{folder}")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^draft: model:\S+other has no tokenizer to compare"):
        engine_of(turbo_folder, draft=f"model:{folder}")
    with pytest.raises(UserError, match=r"^draft: \S+missing: expected a model folder"):
        engine_of(turbo_folder, draft=f"model:{tmp_path / 'missing'}")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
def test_two_ranks_draft_alike(
    turbo_folder: Path, noisy_folder: Path, make_prompt: Any, tmp_path: Path, is_captured: bool
) -> None:
    sampled = {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5, "logit_bias": {7: 50, 30: 49, 99: 50, 150: 51}}
    how = [{"max_new_tokens": 20, "ignore_eos": True, **more} for more in ({}, sampled)]
    if is_captured:  # the interpreter takes seconds for a round
        how = [how[1] | {"max_new_tokens": 6, "temperature": 0.5, "frequency_penalty": 0.1}]  # so few tokens repeat
    drafters = ["ngram", "self", f"model:{noisy_folder}"]
    options: dict[str, dict[str, Any]] = {
        name: {"draft": name, "draft_always": True, "draft_tokens": 3} for name in drafters
    }
    options["ngram"] |= {"kv_cache": "turbo4"}
    cases = {"off": {}, "off turbo4": {"kv_cache": "turbo4"}} | options
    spec = {
        "model": str(turbo_folder),
        "prompts": [make_prompt(length, seed=length) for length in (50, 21)],
        "cases": cases,
        "how": how,
        "is_captured": is_captured,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    jobs.run_ranks(WORKERS / "round_worker.py", 2, tmp_path, timeout_s=600 if is_captured else 240)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for name in drafters:
        plain = ranks[0]["off turbo4" if name == "ngram" else "off"]
        assert [run["tokens"] for run in ranks[0][name]] == [run["tokens"] for run in plain], name
        rounds = [each for run in ranks[0][name] for step in run["rounds"] for each in step]
        assert sum(accepted for _, accepted in rounds) > 0, name
