"""Rotary frequencies that depend on the length of a text: of prompt and answer together, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from family_models import LONGROPE, greedy, save_family

from alspec import Engine
from alspec.models.llama_config import LlamaConfig

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}


def prompt(length: int) -> list[int]:
    return torch.randint(1, 151, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def rotary(reference: Any) -> Any:
    return reference.model.rotary_emb


def grow(reference: Any, total: int) -> None:
    """Let transformers choose its frequencies for `total` tokens; they stay while a text is not shorter than before."""
    rotary(reference)(torch.zeros(1, 1, 48), torch.tensor([[total - 1]]))


def test_dynamic_scaling_beyond_the_positions(tmp_path: Path) -> None:
    """Short and long generations of one engine; the longest context is stretched by the factor."""
    reference = save_family(tmp_path, "dynamic-short", rope_parameters=DYNAMIC, max_position_embeddings=64)
    assert LlamaConfig.from_folder(tmp_path).longest_context == 192
    with Engine.from_pretrained(tmp_path, transport="gloo") as engine:
        for length, new_tokens in ((100, 12), (30, 10), (70, 90), (20, 5)):
            if length > 64:
                grow(reference, length + new_tokens)
            ids = prompt(length)
            found = engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True).token_ids
            if length > 64:
                assert not torch.allclose(rotary(reference).inv_freq, rotary(reference).original_inv_freq)
            assert found == greedy(reference, ids, new_tokens), (length, new_tokens)


def test_longrope_on_both_sides_of_its_switch(tmp_path: Path) -> None:
    reference = save_family(tmp_path, "phi3-long", rope_parameters=LONGROPE, original_max_position_embeddings=50)
    config = LlamaConfig.from_folder(tmp_path)
    assert torch.equal(config.inv_freq(50), config.inv_freq())
    assert not torch.equal(config.inv_freq(51), config.inv_freq())
    with Engine.from_pretrained(tmp_path, transport="gloo") as engine:
        for length, new_tokens in ((30, 20), (51, 20), (12, 6)):
            ids = prompt(length)
            found = engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True).token_ids
            assert found == greedy(reference, ids, new_tokens), (length, new_tokens)
        # Across the switch: the long set from the beginning.
        ids = prompt(40)
        crossing = engine.generate(ids, max_new_tokens=20, ignore_eos=True).token_ids
        rotary(reference).original_inv_freq = config.inv_freq(60)
        assert crossing == greedy(reference, ids, 20)


def test_a_given_context_fixes_the_frequencies(tmp_path: Path) -> None:
    """Then a kept prefix stays valid from one generation to the next."""
    save_family(tmp_path, "phi3-long", rope_parameters=LONGROPE, original_max_position_embeddings=50)
    with Engine.from_pretrained(tmp_path, transport="gloo", max_context=90) as engine:
        engine.generate(prompt(10), max_new_tokens=3)
        assert not engine.model.set_total_length(90)
        assert engine.model.set_total_length(10)
