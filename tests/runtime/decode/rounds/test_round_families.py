"""Rounds of every family and of the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import CASES, save_family
from round_cases import engine_of, generated
from tiers import fast

from alspec.config import QUANTISED_CODECS, SamplingConfig
from alspec.models.demo import DEMO_CHECKPOINT

FEW_TOKENS = {5: 60.0, 9: 60.0, 30: 60.0, 41: 60.0}  # a text of few tokens repeats itself
SAMPLING = SamplingConfig(max_new_tokens=20, ignore_eos=True, temperature=0.7, seed=4, logit_bias=FEW_TOKENS)


PROMPTS = [[5, 9, 5, 9, 30, 5, 9], list(range(40, 71))]
FAST_CASES = ["llama-biases", "qwen3", "phi3-partial", "phi3-long", "mistral-window", "qwen3-window"]


@pytest.mark.parametrize("case", fast(list(CASES), FAST_CASES))
def test_every_family(case: str, tmp_path: Path) -> None:
    """Windows are shorter than the texts. What is rejected there replaces no token that is still read."""
    save_family(tmp_path, case)
    with engine_of(tmp_path) as engine:
        expected = generated(engine, PROMPTS, SAMPLING)
    for draft in ("ngram", "self"):
        with engine_of(tmp_path, draft=draft, draft_tokens=3, draft_always=True) as engine:
            assert generated(engine, PROMPTS, SAMPLING) == expected
            rounds = [each for step in engine.generation.rounds for each in step]
            assert sum(drafts for drafts, _ in rounds) > 0
            assert draft == "ngram" or all(accepted == drafts for drafts, accepted in rounds)


@pytest.mark.parametrize("codec", fast(["bf16", *QUANTISED_CODECS], ["bf16"]))
def test_the_bundled_model(codec: str) -> None:
    """Drafts out of a text are right now and then."""
    prompt = (Path(DEMO_CHECKPOINT).parent / "prompt.txt").read_text(encoding="utf-8")
    sampling = SamplingConfig(max_new_tokens=32, ignore_eos=True)
    texts: dict[str, Any] = {}
    for draft in ("off", "ngram", "self", f"model:{DEMO_CHECKPOINT}"):
        options = {} if draft == "off" else {"draft": draft, "draft_tokens": 4, "draft_always": True}
        with engine_of(DEMO_CHECKPOINT, kv_cache=codec, **options) as engine:
            texts[draft] = engine.generate([prompt, "The road"], sampling)
            accepted = [accepted for step in engine.generation.rounds for drafts, accepted in step if drafts]
            assert draft == "off" or 4 in accepted
            assert draft != "ngram" or 0 in accepted
    assert all(text == texts["off"] for text in texts.values())
