"""Texts over caches whose heads are padded: one pass equals decoding step by step with such a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import save_family

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval.quality import score_text
from alspec.runtime.eval.teacher_forced import CacheSetting


@pytest.mark.parametrize("codec", ["turboquant3", "hybrid-k4v2", "turbo4"])
def test_one_pass_equals_decoding(codec: str, tmp_path: Path) -> None:
    """Heads of 24 are padded to 64. The engine that scores has an exact cache, whose heads are not padded."""
    torch.set_num_threads(1)
    save_family(tmp_path, "llama-biases", scale=0.15, hidden_size=96, num_hidden_layers=1)
    ids = torch.randint(151, (330,), generator=torch.Generator().manual_seed(5)).tolist()
    speculation = SpeculationConfig(mode="simulated", threshold=0.3, predictor="window")
    options = {"transport": "gloo", "dtype": "fp32", "speculation": speculation, "max_context": 500}
    with Engine.from_pretrained(tmp_path, kv_cache=codec, **options) as engine:
        tokens = [token.token_id for token in engine.stream(ids, SamplingConfig(max_new_tokens=40, ignore_eos=True))]
        hits = torch.stack(engine.generation.hits)[:, :, 0].T
        assert engine.cache.head_dim == 64
    with Engine.from_pretrained(tmp_path, **options) as engine:
        engine.load(1, 16)
        assert engine.transport is not None
        score = score_text(engine.model, engine.transport, ids + tokens, 0.3, 128, len(ids), CacheSetting(codec))
    assert (score.predicted[len(ids) - 1 :] == torch.tensor(tokens)).float().mean() > 0.95
    assert (score.hits[:, len(ids) : len(ids) + len(tokens) - 1] == hits).float().mean() > 0.95
    assert 0 < hits.float().mean() < 1, "both verdicts must occur"
