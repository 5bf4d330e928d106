"""Captured steps of every family on real GPUs against transformers in fp32 on the CPU; one rank, two and four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import CASES, LONGROPE, greedy, save_family
from gpu_jobs import leads_of, needs, run_gpu_worker, unclear_place

from alspec import Engine
from alspec.kernels.linear.decode_weight import DecodeWeight

NEW_TOKENS, LEAD = 24, 0.02  # rounding moves no token whose logit leads by more
ROUNDING = {"bf16": 0.25, "fp16": 0.05}  # of a logit; their standard deviation is 1.7


def prompt(length: int) -> list[int]:
    return torch.randint(1, 151, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def clear_tokens(reference: Any, ids: list[int]) -> list[int]:
    """Greedy tokens of transformers up to the first one that leads by little."""
    tokens = greedy(reference, ids, NEW_TOKENS)
    with torch.no_grad():
        logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    best = logits.topk(2).values
    unclear = (best[:, 0] - best[:, 1] < LEAD).nonzero().flatten().tolist()
    return tokens[: unclear[0]] if unclear else tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", CASES)
def test_captured_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, case, hidden_size=64)  # heads of 16 channels: the smallest on a GPU
    compared = 0
    with Engine.from_pretrained(tmp_path, dtype="fp32", cuda_graph="on", speculation="off") as engine:
        # Frequencies that depend on the length: both on the side of the case.
        for length in (61, 100) if "long" in case else (5, 61, 150):
            ids = prompt(length)
            expected = clear_tokens(reference, ids)
            found = engine.generate(ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert not isinstance(found, list)
            assert found.token_ids[: len(expected)] == expected
            compared += len(expected)
        assert engine.uses_graph
    assert compared > 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("draft", ["ngram", "self"])
@pytest.mark.parametrize("case", ["mistral-window", "qwen2-window"])
def test_drafts_behind_a_sliding_window(case: str, draft: str, tmp_path: Path) -> None:
    """Captured rounds over the whole context: each row has a window of its own."""
    reference = save_family(tmp_path, case, hidden_size=64)
    options = {"draft": draft, "draft_tokens": 3, "draft_always": True, "cuda_graph": "on"}
    with Engine.from_pretrained(tmp_path, dtype="fp32", speculation="off", **options) as engine:
        for length in (5, 61, 150):
            ids = prompt(length)
            expected = clear_tokens(reference, ids)
            found = engine.generate(ids, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert not isinstance(found, list)
            assert found.token_ids[: len(expected)] == expected
        assert engine.uses_graph


@torch.no_grad()
def anew(reference: Any, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each of a pass over the whole text: not each release of transformers drops its cache at C."""
    text = list(ids)
    for _ in range(count):
        text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(ids) :]


BY_LENGTH: dict[str, dict[str, Any]] = {
    "dynamic-short": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0},
        "max_position_embeddings": 50,
    },
    "phi3-long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 50},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("draft", ["off", "ngram", "self"])
@pytest.mark.parametrize("case", BY_LENGTH)
def test_texts_that_grow_beyond_the_short_context(case: str, draft: str, tmp_path: Path) -> None:
    """Captured steps go on with the frequencies of a longer text: one request, then three of other lengths."""
    reference, compared = save_family(tmp_path, case, hidden_size=64, **BY_LENGTH[case]), 0
    options = {} if draft == "off" else {"draft": draft, "draft_tokens": 3, "draft_always": True}
    with Engine.from_pretrained(tmp_path, dtype="fp32", cuda_graph="on", speculation="off", **options) as engine:
        for lengths in ((40,), (20, 47, 60)):
            batch = [prompt(length) for length in lengths]
            answers = engine.generate(batch, max_new_tokens=40, ignore_eos=True, logprobs=2)
            assert isinstance(answers, list)
            for ids, answer in zip(batch, answers, strict=True):
                reference(torch.tensor([[1]]))  # transformers keeps the frequencies of the longest text otherwise
                clear = unclear_place(leads_of(answer), LEAD)
                tokens = (anew if case == "phi3-long" else greedy)(reference, ids, 40)
                assert answer.token_ids[:clear] == tokens[:clear]
                compared += clear
        assert engine.uses_graph
    assert compared > 60


@pytest.mark.full
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_packed_weights_continue_prompts(case: str, weights: str, dtype: str, tmp_path: Path) -> None:
    """Captured steps of one request and of three, against a prompt of each text so far (see test_packed_families.py).

    The same engine computes both: another dtype would quantise other weights. Each token has nearly the largest logit.
    """
    head_dim = {"head_dim": 16} if "head_dim" in CASES[case][1] else {}
    save_family(tmp_path, case, hidden_size=64, intermediate_size=96, **head_dim)
    options = {"dtype": dtype, "weights": weights, "cuda_graph": "on", "speculation": "off"}
    with Engine.from_pretrained(tmp_path, **options) as engine:
        for lengths in ((61,), (40, 47, 60)):
            batch = [prompt(length) for length in lengths]
            answers = engine.generate(batch, max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert isinstance(answers, list)
            assert engine.uses_graph
            texts = [
                (ids + answer.token_ids[:place], answer.token_ids[place])
                for ids, answer in zip(batch, answers, strict=True)
                for place in range(1, NEW_TOKENS)
            ]
            for start in range(0, len(texts), 8):
                some = texts[start : start + 8]
                again = engine.generate([ids for ids, _ in some], max_new_tokens=1, ignore_eos=True, logprobs=20)
                assert isinstance(again, list)
                for (_, token), answer in zip(some, again, strict=True):
                    top = (answer.logprobs or [])[0].top
                    assert token in dict(top)
                    assert top[0][1] - dict(top)[token] <= ROUNDING[dtype]
        assert isinstance(engine.model.weights.layers[0].qkv, DecodeWeight)


# Mode, transport and settings of an engine of several ranks.
RUNS = {
    "off symm": {"speculation": {"mode": "off"}, "transport": "symm", "cuda_graph": "on"},
    "off nccl": {"speculation": {"mode": "off"}, "transport": "nccl", "cuda_graph": "on"},
    "paired symm": {"speculation": {"mode": "paired"}, "transport": "symm", "cuda_graph": "on"},
    "paired nccl": {"speculation": {"mode": "paired", "always": True}, "transport": "nccl", "cuda_graph": "on"},
}


@pytest.mark.multi_gpu
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["qwen3-biases", "llama-biases", "mistral-window", "phi3-long"])
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=needs(n)) for n in (2, 4)])
def test_several_ranks_give_the_tokens_of_transformers(num_ranks: int, case: str, tmp_path: Path) -> None:
    """With one KV head, which all ranks of a group have; a pair at lambda 0."""
    model = tmp_path / "model"
    reference = save_family(model, case, hidden_size=64, num_key_value_heads=1)
    batches = [[prompt(61)], [prompt(150)]]
    runs = [
        {"name": name, "engine": {"model": str(model), "dtype": "fp32"} | engine, "sampled": False, "long": False,
         "thresholds": ["0"]}
        for name, engine in RUNS.items()
    ]  # fmt: skip
    cases = {"runs": runs, "batches": batches, "max_new_tokens": NEW_TOKENS}
    for rows in run_gpu_worker(num_ranks, cases, tmp_path).values():
        for (ids,), row in zip(batches, rows, strict=True):
            expected = clear_tokens(reference, ids)
            assert row["tokens"][0][: len(expected)] == expected
            assert row["cuda_graph"]


@pytest.mark.full
@pytest.mark.multi_gpu
@pytest.mark.gpu
@needs(4)
@pytest.mark.timeout(600)
def test_four_ranks_give_the_tokens_of_transformers_for_every_family(tmp_path: Path) -> None:
    """With two KV heads, so that two ranks have the same one."""
    references = {case: save_family(tmp_path / case, case, hidden_size=64) for case in CASES}
    batches = [[prompt(61)], [prompt(150)]]
    runs = [
        {"name": case, "engine": {"model": str(tmp_path / case), "dtype": "fp32"} | RUNS["off symm"], "sampled": False,
         "long": False, "thresholds": ["0"]}
        for case in CASES
    ]  # fmt: skip
    found = run_gpu_worker(4, {"runs": runs, "batches": batches, "max_new_tokens": NEW_TOKENS}, tmp_path)
    for case, reference in references.items():
        for (ids,), row in zip(batches, found[case], strict=True):
            expected = clear_tokens(reference, ids)
            assert row["tokens"][0][: len(expected)] == expected, case
            assert row["cuda_graph"]


PAIRS = [
    ("qwen3-biases", "turbo4"),
    ("llama-biases", "turboquant3"),
    ("phi3-partial", "bf16"),
    ("mistral-window", "bf16"),
]


@pytest.mark.full
@pytest.mark.multi_gpu
@pytest.mark.gpu
@needs(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "codec"), PAIRS)
def test_a_pair_gives_the_clear_tokens_and_verdicts_of_simulated(case: str, codec: str, tmp_path: Path) -> None:
    """Captured, over both kinds of link, with layers that are accepted and layers that are not."""
    model = tmp_path / "model"
    sizes: dict[str, Any] = {"hidden_size": 256} if case.startswith("phi3") else {"head_dim": 64}
    window = {"sliding_window": 345} if case == "mistral-window" else {}  # begins within the sink
    save_family(model, case, num_hidden_layers=2, scale=0.15, **sizes, **window)
    batches = [[prompt(length)] for length in (360, 400, 480)]
    shared = {"model": str(model), "dtype": "fp32", "kv_cache": codec}
    jobs = {1: {"simulated": {}}, 2: {name: run for name, run in RUNS.items() if "paired" in name}}
    found: dict[str, list[dict[str, Any]]] = {}
    for num_ranks, named in jobs.items():
        runs = [
            {"name": name, "engine": shared | run | {"speculation": {"mode": name.split()[0], "predictor": "window",
             "always": True}}, "sampled": False, "long": False, "thresholds": ["0.2"], "leads": num_ranks == 1}
            for name, run in named.items()
        ]  # fmt: skip
        found |= run_gpu_worker(num_ranks, {"runs": runs, "batches": batches, "max_new_tokens": 16}, tmp_path)
    verdicts, compared = set(), 0
    for name in jobs[2]:
        for row, expected in zip(found[name], found["simulated"], strict=True):
            clear = unclear_place(expected["leads"][0], LEAD)
            assert row["tokens"][0][:clear] == expected["tokens"][0][:clear]
            hits = expected["hits"][: max(clear - 1, 0)]
            assert row["hits"][: len(hits)] == hits
            assert row["cuda_graph"]
            verdicts |= {hit for step in hits for layer in step for hit in layer}
            compared += clear
    assert verdicts == {0, 1}
    assert compared > 20
