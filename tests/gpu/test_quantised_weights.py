"""Captured steps with packed weights on GPUs: tokens of transformers with the dequantised weights; pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import leads_of, licence_ids, needs, run_gpu_worker, unclear_place
from quantised_folders import save_quantised

from alspec import Engine
from alspec.config import SamplingConfig
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.runtime.engine.generation import Completion

PROMPTS = {320: 1673, 1500: 6021}  # lengths and starts; among those of test_nccl.py
NEW_TOKENS, LEAD = 24, 0.15  # rounding to bf16 moves no token whose logit leads by more

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def prompts(count: int) -> list[list[int]]:
    return [
        torch.randint(151, (40 + 9 * n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(count)
    ]


@torch.no_grad()
def clear_tokens(reference: Any, ids: list[int], tokens: list[int]) -> list[tuple[int, int]]:
    """(found, greedy token of transformers after the same tokens) at each place where the latter leads clearly."""
    logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    best = logits.topk(2)
    is_clear = (best.values[:, 0] - best.values[:, 1] >= LEAD).tolist()
    pairs = zip(tokens, best.indices[:, 0].tolist(), is_clear, strict=True)
    return [(found, expected) for found, expected, clear in pairs if clear]


@pytest.mark.parametrize("weights", ["fp8", "int4", "int4-g32"])
@pytest.mark.parametrize("kv_cache", ["bf16", "turbo4", "turbo2", "turbo-mixed", "turboquant3", "hybrid-k4v2"])
def test_batches_of_packed_weights_over_each_cache(weights: str, kv_cache: str) -> None:
    """Each of eight requests gives the clear tokens that it gives alone, which other kernels compute."""
    how = SamplingConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    ids = licence_ids()
    batch = [ids[131 * n :][: 80 + 61 * n] for n in range(8)]
    with Engine.from_pretrained(None, dtype="bf16", weights=weights, kv_cache=kv_cache, speculation="off") as engine:
        compared = 0
        together = engine.generate(batch, how)
        assert isinstance(together, list)
        assert engine.uses_graph
        for prompt, answer in zip(batch, together, strict=True):
            alone = engine.generate(prompt, how)
            assert isinstance(alone, Completion)
            clear = unclear_place(leads_of(alone), LEAD)
            assert answer.token_ids[:clear] == alone.token_ids[:clear]
            compared += clear
    assert compared > 30


NAMES = ["fp8-tensor", "fp8-channel", "fp8-block", "int4-zeros", "int4-channel", "awq", "gptq"]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_captured_tokens_are_those_of_transformers(name: str, count: int, tmp_path: Path) -> None:
    reference, compared = save_quantised(tmp_path, name), 0
    with Engine.from_pretrained(tmp_path, dtype="bf16", cuda_graph="on", speculation="off") as engine:
        answers = engine.generate(prompts(count), max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert isinstance(answers, list)
        assert isinstance(engine.model.weights.layers[0].qkv, DecodeWeight)
        for ids, each in zip(prompts(count), answers, strict=True):
            pairs = clear_tokens(reference, ids, each.token_ids)
            assert [found for found, _ in pairs] == [expected for _, expected in pairs]
            compared += len(pairs)
    assert compared > 5 * count


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize(
    "settings", [{}, {"lm_head": "fp8"}, {"kv_cache": "turboquant4"}, {"speculation": "simulated"}], ids=str
)
def test_steps_agree_with_prompts(weights: str, settings: dict[str, Any]) -> None:
    """Prompts go through the library on unpacked matrices. A token that leads clearly is the same by both ways."""
    options = {"speculation": "off"} | settings
    with Engine.from_pretrained(None, dtype="bf16", weights=weights, **options) as engine:
        ids = list(range(20, 60))
        found = engine.generate(ids, max_new_tokens=16, ignore_eos=True)
        assert not isinstance(found, list)
        agree = 0
        for place in range(1, 16):
            again = engine.generate(ids + found.token_ids[:place], max_new_tokens=1, ignore_eos=True)
            assert not isinstance(again, list)
            agree += again.token_ids[0] == found.token_ids[place]
        assert agree >= 13


def run_job(
    runs: list[dict[str, Any]], num_ranks: int, folder: Path, batches: list[list[list[int]]]
) -> dict[str, list[dict[str, Any]]]:
    """What the engines of a job give, by the run's name."""
    shared = {"thresholds": ["0.1"], "sampled": False, "long": False}
    cases = {"runs": [run | shared for run in runs], "batches": batches, "max_new_tokens": NEW_TOKENS}
    return run_gpu_worker(num_ranks, cases, folder)


@pytest.mark.multi_gpu
@needs(2)
@pytest.mark.timeout(600)
def test_pairs_give_the_tokens_of_simulated(tmp_path: Path) -> None:
    """Groups of one GPU, over peer memory and over messages, for each format of weights."""

    def run(name: str, mode: str, weights: str, transport: str) -> dict[str, Any]:
        speculation = {"mode": mode, "predictor": "window", "always": True}
        options = {"dtype": "bf16", "weights": weights, "transport": transport, "cuda_graph": "auto"}
        return {"name": name, "engine": {"speculation": speculation} | options}

    formats, ids = ("fp8", "int4"), licence_ids()
    batches = [[ids[start : start + length]] for length, start in PROMPTS.items()]
    one = run_job([run(weights, "simulated", weights, "auto") for weights in formats], 1, tmp_path, batches)
    pairs = {f"{weights} {transport}": (weights, transport) for weights in formats for transport in ("symm", "nccl")}
    two = run_job([run(name, "paired", *case) for name, case in pairs.items()], 2, tmp_path, batches)
    for name, (weights, transport) in pairs.items():
        for found, expected in zip(two[name], one[weights], strict=True):
            assert found["transport"] == transport
            assert found["tokens"] == expected["tokens"], name
            assert found["hits"] == expected["hits"], name
        assert {hit for row in two[name] for step in row["hits"] for layer in step for hit in layer} == {0, 1}


@pytest.mark.multi_gpu
@needs(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block", "int4-zeros", "gptq"])
def test_two_ranks_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Each rank keeps its slices packed."""
    reference = save_quantised(tmp_path / "model", name)
    shared = {"model": str(tmp_path / "model"), "speculation": {"mode": "off"}, "dtype": "bf16", "cuda_graph": "on"}
    runs = [{"name": transport, "engine": shared | {"transport": transport}} for transport in ("symm", "nccl")]
    batches = [prompts(1), prompts(3)]
    for transport, rows in run_job(runs, 2, tmp_path, batches).items():
        compared = 0
        for batch, row in zip(batches, rows, strict=True):
            assert row["transport"] == transport
            for ids, tokens in zip(batch, row["tokens"], strict=True):
                pairs = clear_tokens(reference, ids, tokens)
                assert [found for found, _ in pairs] == [expected for _, expected in pairs]
                compared += len(pairs)
        assert compared > 20
