"""One pass over a text gives the verdicts and predictions of `simulated` decoding step by step."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiers import fast
from torch import Tensor

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.kernels.kv_codec.formats import FORMATS
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval import quality
from alspec.runtime.eval.quality import score_text, score_under
from alspec.runtime.eval.teacher_forced import CacheSetting

NEW_TOKENS = 24


def new_engine(
    kv_cache: str, softmax: str = "exact", protect: int = 0, model: Path = DEMO_CHECKPOINT, recall_blocks: int = 0
) -> Engine:
    torch.set_num_threads(1)
    predictor = {"predictor": "recall", "recall_blocks": recall_blocks} if recall_blocks else {"predictor": "window"}
    speculation = SpeculationConfig.model_validate({"mode": "simulated"} | predictor)
    engine = Engine.from_pretrained(
        model,
        dtype="fp32",
        transport="gloo",
        kv_cache=kv_cache,
        kv_protect=protect,
        softmax=softmax,
        speculation=speculation,
    )
    engine.load(1, 1024)
    return engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine("bf16")


def decode(engine: Engine, prompt_len: int, threshold: float, new_tokens: int) -> tuple[list[int], list[int], Tensor]:
    """A prompt of random words, the tokens that `simulated` decoding gives, and its hits [L, new_tokens - 1]."""
    assert engine.tokenizer is not None
    words = ["lantern", "river", "the", "of", "captain", "was", "and", "is", "48213", "stood", "old", "harbour", "."]
    text = " ".join(random.Random(prompt_len).choices(words, k=prompt_len))
    prompt = engine.tokenizer.encode(text)[:prompt_len]
    sampling = SamplingConfig(max_new_tokens=new_tokens, ignore_eos=True)
    engine.decode_step.threshold = threshold
    tokens = [token.token_id for token in engine.stream(prompt, sampling)]
    return prompt, tokens, torch.stack(engine.generation.hits)[:, :, 0].T


CASES = list(itertools.product([5, 300, 337, 700], [0.0, 0.1, 0.2, math.inf]))
FAST_CASES = [(5, 0.1), (300, 0.2), (337, math.inf), (700, 0.0), (700, 0.1)]


@pytest.mark.parametrize(("prompt_len", "threshold"), fast(CASES, FAST_CASES))
def test_one_pass_equals_decoding_step_by_step(engine: Engine, prompt_len: int, threshold: float) -> None:
    assert engine.transport is not None
    prompt, tokens, decoded = decode(engine, prompt_len, threshold, NEW_TOKENS)

    score = score_text(engine.model, engine.transport, prompt + tokens, threshold, 128, prompt_tokens=prompt_len)

    assert torch.equal(score.hits[:, prompt_len : prompt_len + NEW_TOKENS - 1], decoded)
    assert not score.hits[:, :prompt_len].any()
    assert score.predicted[prompt_len - 1 :].tolist() == tokens
    assert score.nll.shape == (prompt_len + NEW_TOKENS - 1,)
    if prompt_len == 700 and threshold == 0.1:
        assert 0 < decoded.float().mean() < 1, "both verdicts must occur"


CACHES = [("turbo4", "exact"), ("turbo2", "exact"), ("turbo-mixed", "exact"), ("turbo4", "sas")]
# In each case decoding completes a block.
QUANTISED = [(*cache, *sizes) for cache in CACHES for sizes in ((5, 70), (440, 24), (640, 70), (700, 70))]
FAST_QUANTISED = [("turbo4", "exact", 5, 70), ("turbo2", "exact", 440, 24), ("turbo4", "sas", 440, 24)]


@pytest.mark.parametrize(("codec", "softmax", "prompt_len", "new_tokens"), fast(QUANTISED, FAST_QUANTISED))
def test_one_pass_equals_decoding_from_a_quantised_cache(
    codec: str, softmax: str, prompt_len: int, new_tokens: int
) -> None:
    engine = new_engine(codec, softmax)
    assert engine.transport is not None
    prompt, tokens, decoded = decode(engine, prompt_len, 0.05, new_tokens)
    setting = CacheSetting(codec, softmax)
    score = score_text(engine.model, engine.transport, prompt + tokens, 0.05, 128, prompt_len, setting)
    # fp32 rounds one position and many differently, so a value between two codes may get either.
    same = score.hits[:, prompt_len : prompt_len + new_tokens - 1] == decoded
    assert same.float().mean() > 0.99
    assert (score.predicted[prompt_len - 1 :] == torch.tensor(tokens)).float().mean() > 0.95
    if prompt_len > 300:
        assert 0 < decoded.float().mean() < 1, "both verdicts must occur"


@pytest.mark.parametrize(
    ("codec", "prompt_len", "new_tokens"), [("bf16", 700, 70), pytest.param("turbo4", 560, 70, marks=pytest.mark.full)]
)
def test_one_pass_recalls_what_decoding_recalls(codec: str, prompt_len: int, new_tokens: int) -> None:
    """Also in the first step, whose lists come from the prompt, and when a block leaves the window."""
    engine = new_engine(codec, recall_blocks=2)
    assert engine.transport is not None
    prompt, tokens, decoded = decode(engine, prompt_len, 0.03, new_tokens)
    found = {
        count: score_text(
            engine.model, engine.transport, prompt + tokens, 0.03, 128, prompt_len,
            CacheSetting(codec, recall_blocks=count),
        ).hits[:, prompt_len : prompt_len + new_tokens - 1]
        for count in (0, 2)
    }  # fmt: skip
    same = (found[2] == decoded).float().mean()
    assert same == 1 if codec == "bf16" else same > 0.99
    assert found[0].sum() < found[2].sum()
    assert 0 < decoded.float().mean() < 1, "both verdicts must occur"


@pytest.mark.parametrize(("codec", "recall_blocks"), fast([("bf16", 2), ("turbo4", 0), ("turbo4", 2)], []))
def test_one_pass_equals_decoding_with_a_sliding_window(tmp_path: Path, codec: str, recall_blocks: int) -> None:
    """The bundled model as a Mistral. Its window leaves the sink behind while the answer is decoded."""
    config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 600}
    (tmp_path / "config.json").write_text(json.dumps(config | kind))
    for path in [*DEMO_CHECKPOINT.glob("*.safetensors"), DEMO_CHECKPOINT / "tokenizer.json"]:
        shutil.copy(path, tmp_path)
    engine = new_engine(codec, model=tmp_path, recall_blocks=recall_blocks)
    assert engine.transport is not None
    prompt, tokens, decoded = decode(engine, 700, 0.05, 70)
    setting = CacheSetting(codec, recall_blocks=recall_blocks)
    score = score_text(engine.model, engine.transport, prompt + tokens, 0.05, 128, 700, setting)
    same = (score.hits[:, 700:769] == decoded).float().mean()
    assert same == 1 if codec == "bf16" else same > 0.99
    assert (score.predicted[699:] == torch.tensor(tokens)).float().mean() > (0.99 if codec == "bf16" else 0.95)
    assert 0 < decoded.float().mean() < 1, "both verdicts must occur"
    _, without, _ = decode(new_engine(codec, recall_blocks=recall_blocks), 700, 0.05, 70)
    assert without != tokens, "the window must matter"


TURBOQUANT = [*((codec, 1, 0) for codec in FORMATS if codec != "flashq"), ("hybrid-k3v2", 3, 1)]


@pytest.mark.parametrize(("codec", "layers", "protect"), fast(TURBOQUANT, keep=TURBOQUANT[1::2]))
def test_one_pass_equals_decoding_with_turboquant(tmp_path: Path, codec: str, layers: int, protect: int) -> None:
    """With one quantised layer: in a deeper model, a value between two codes changes most codes of later layers."""
    config = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    shutil.copy(DEMO_CHECKPOINT / "tokenizer.json", tmp_path)
    tensors = {name: x for path in DEMO_CHECKPOINT.glob("*.safetensors") for name, x in load_file(path).items()}
    is_kept = re.compile(rf"model\.(?!layers)|model\.layers\.[0-{layers - 1}]\.").match
    save_file({name: x for name, x in tensors.items() if is_kept(name)}, tmp_path / "model.safetensors")

    engine = new_engine(codec, protect=protect, model=tmp_path)
    assert engine.transport is not None
    prompt, tokens, decoded = decode(engine, 440, 0.02, 70)
    engine = new_engine("bf16", model=tmp_path)
    args = engine.model, engine.transport, prompt + tokens, 0.02, 128, 440
    found, other = (score_text(*args, CacheSetting(codec, protect=number)) for number in (protect, 1 - protect))
    assert (found.hits[:, 440:509] == decoded).float().mean() > 0.98
    assert (found.predicted[439:] == torch.tensor(tokens)).float().mean() > 0.98
    assert 0 < decoded.float().mean() < 1, "both verdicts must occur"
    assert not torch.equal(other.hits, found.hits) or not torch.equal(other.predicted, found.predicted)


@pytest.mark.parametrize(
    ("codec", "prompt_len"), [("bf16", 0), pytest.param("bf16", 403, marks=pytest.mark.full), ("turbo-mixed", 403)]
)
def test_several_lambdas_share_the_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, codec: str, prompt_len: int
) -> None:
    """Each lambda gives the scores that it gives alone. Here two lambdas fit into memory at once, then the third."""
    assert engine.transport is not None
    prompt, tokens, _ = decode(engine, 403, 0.0, 40)
    ids, cache = prompt + tokens, CacheSetting(codec)
    monkeypatch.setattr(quality, "KEYS_AT_ONCE", 2 * len(ids) * 4 * 64)
    thresholds = [[0.0] * 10, [0.05] * 10, [math.inf, 0.0] * 5]
    scores = score_under(engine.model, engine.transport, ids, thresholds, 128, prompt_len, cache)
    assert len(scores) == 3
    for score, under in zip(scores, thresholds, strict=True):
        alone = score_text(engine.model, engine.transport, ids, under, 128, prompt_len, cache)
        # Rounding depends on the size of a product, so a value between two codes may get either.
        assert float((score.nll - alone.nll).abs().median()) < (1e-5 if codec == "bf16" else 0.01)
        assert (score.hits == alone.hits).float().mean() > 0.99
        assert (score.predicted == alone.predicted).float().mean() > 0.98
    assert 0 < scores[1].hits[:, prompt_len:].float().mean() < 1, "both verdicts must occur"
    assert scores[2].hits[:, prompt_len:].float().mean(1).tolist() == [1.0, 0.0] * 5
    assert not scores[0].hits.any()


def test_likelihood_is_that_of_transformers(engine: Engine) -> None:
    transformers = pytest.importorskip("transformers")
    assert engine.transport is not None
    ids = torch.randint(6, 4096, (200,), generator=torch.Generator().manual_seed(1))
    oracle = transformers.LlamaForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    with torch.no_grad():
        logits = oracle(ids[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    score = score_text(engine.model, engine.transport, ids.tolist(), 0.0, 128)
    torch.testing.assert_close(score.nll, expected, rtol=1e-4, atol=1e-4)


def test_a_long_text_is_scored_under_one_lambda_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.transport is not None
    monkeypatch.setattr(quality, "KEYS_AT_ONCE", 1)
    thresholds = [[0.0] * 10, [math.inf] * 10]
    scores = score_under(engine.model, engine.transport, list(range(6, 46)), thresholds, 128, 10, CacheSetting())
    assert [float(score.hits[:, 10:].float().mean()) for score in scores] == [0.0, 1.0]


@pytest.mark.parametrize(("num_tokens", "prompt_tokens", "expected"), [(80, 0, 64), (40, 0, 40), (80, 70, 70)])
def test_the_prompt_or_the_first_tokens_set_the_scales(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_tokens: int, prompt_tokens: int, expected: int
) -> None:
    assert engine.transport is not None
    cache_text, found = quality.cache_text, []

    def recording(k: Tensor, v: Tensor, num_tokens: int, *rest: Any) -> Any:
        found.append(num_tokens)
        return cache_text(k, v, num_tokens, *rest)

    monkeypatch.setattr(quality, "CALIBRATION_TOKENS", 64)
    monkeypatch.setattr(quality, "cache_text", recording)
    ids = list(range(6, 6 + num_tokens))
    score_text(engine.model, engine.transport, ids, 0.1, 128, prompt_tokens, CacheSetting("turbo4"))
    assert found == [expected] * engine.model.num_layers
