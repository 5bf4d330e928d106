"""Fused steps of every family, whose kernels run in the interpreter here, against transformers and the eager step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from family_models import CASES, greedy, save_family
from model_runner import load_model
from paths import WORKERS
from tiers import fast

from alspec.config import QUANTISED_CODECS, SamplingConfig, SpeculationConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")
NEW_TOKENS = 5
PROMPTS = [torch.randint(151, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 5)]
FAST_CASES = ["qwen3-biases", "phi3-partial-long", "qwen2-window"]


@pytest.mark.parametrize("case", fast(list(CASES), FAST_CASES))
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = save_family(tmp_path, case)
    transport = Transport(Placement(), CPU, "gloo", None)
    model = load_model(tmp_path, transport)
    cache = new_cache("bf16", model.config, 1, len(PROMPTS), 48, torch.float32, CPU)
    captured = build_captured_step(model, cache, transport, None, False, no_hook)
    captured.prepare(SamplingConfig())
    tokens = [
        [int(prefill(model, cache, transport, index, ids, no_hook)[0].argmax())] for index, ids in enumerate(PROMPTS)
    ]
    captured.begin([made[0] for made in tokens], [len(ids) + 1 for ids in PROMPTS])
    for remaining in range(NEW_TOKENS - 1, 0, -1):
        record = captured.step(remaining)
        assert record.fault == 0
        for made, new in zip(tokens, record.token_ids, strict=True):
            made += new
    assert tokens == [greedy(reference, ids, NEW_TOKENS) for ids in PROMPTS]


@pytest.mark.parametrize(
    ("case", "world_size", "num_kv_heads"),
    fast(
        [
            *(("qwen3-biases", 2, 1), ("llama-biases", 2, 2), ("qwen3-biases", 4, 2), ("qwen3-window", 2, 2)),
            *((case, 2, 2) for case in ("qwen2", "phi3-partial", "yarn-mscale", "dynamic-long", "linear")),
        ],
        [("qwen3-biases", 2, 1)],
    ),
    ids=str,
)
def test_ranks_share_a_fused_step(case: str, world_size: int, num_kv_heads: int, tmp_path: Path) -> None:
    """Over Gloo, also with more ranks than KV heads. The bias of a row-parallel product is added once."""
    model = tmp_path / "model"
    reference = save_family(model, case, num_key_value_heads=num_kv_heads, mlp_bias=case == "llama-biases")
    (tmp_path / "spec.json").write_text(json.dumps({"model": str(model), "prompts": PROMPTS, "tokens": NEW_TOKENS}))
    jobs.run_ranks(WORKERS / "fused_worker.py", world_size, tmp_path, timeout_s=300, TRITON_INTERPRET="1")
    expected = [greedy(reference, ids, NEW_TOKENS) for ids in PROMPTS]
    for rank in range(world_size):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == expected


# Case, codec, number of ranks, sliding window, recalled blocks.
PAIRS = [
    ("qwen3-biases", "bf16", 2, None, 0),
    ("qwen3-biases", "turboquant3", 2, None, 0),
    ("qwen3-biases", "bf16", 4, None, 0),
    ("qwen3-biases", "bf16", 2, None, 1),
    ("mistral-window", "bf16", 2, 330, 0),
    ("mistral-window", "turbo4", 2, 345, 0),
    ("mistral-window", "bf16", 2, 330, 1),
    ("llama-biases", "bf16", 2, None, 0),
    ("llama-biases", "bf16", 4, None, 1),
    ("llama-biases", "turbo4", 2, None, 1),
    ("qwen2", "bf16", 2, None, 0),
    ("qwen2", "turboquant3", 2, None, 0),
    ("phi3-long", "bf16", 2, None, 0),
    ("phi3-long", "bf16", 4, None, 1),
    *(("qwen3-biases", codec, 2, None, 0) for codec in QUANTISED_CODECS if codec not in ("turboquant3", "hybrid-k4v3")),
    ("llama-biases", "hybrid-k4v3", 2, None, 0),
    *(("phi3", codec, 2, None, 1) for codec in ("turbo2", "turbo-mixed", "turboquant4", "hybrid-k4v2")),
    ("phi3-partial-long", "bf16", 2, None, 1),
]


@pytest.mark.parametrize(
    ("case", "codec", "world_size", "window", "recalled"), fast(PAIRS, [PAIRS[4], PAIRS[-1]]), ids=str
)
def test_a_pair_gives_the_tokens_and_verdicts_of_one_group(
    case: str, codec: str, world_size: int, window: int | None, recalled: int, tmp_path: Path
) -> None:
    """Fused, and over a link; also with a sliding window that begins within the sink, and with recalled blocks."""
    model, head_dim = tmp_path / "model", 16 if codec == "bf16" else 64
    # Configurations of Qwen2 and Phi-3 have no size of heads.
    sizes = {"hidden_size": 4 * head_dim} if case.startswith(("qwen2", "phi3")) else {"head_dim": head_dim}
    save_family(model, case, num_hidden_layers=2, scale=0.15, **sizes, **({"sliding_window": window} if window else {}))
    prompt = torch.randint(151, (360,), generator=torch.Generator().manual_seed(2)).tolist()
    predictor = {"predictor": "recall", "recall_blocks": recalled} if recalled else {"predictor": "window"}
    run: dict[str, Any] = {
        "kv_cache": codec, "prompts": [prompt], "live_steps": [9], "thresholds": [{"value": "0.2", "steps": 3}],
        "predictor": predictor,
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps({"model": str(model), "cases": [run], "packets": False}))
    jobs.run_ranks(WORKERS / "linked_worker.py", world_size, tmp_path, timeout_s=300, TRITON_INTERPRET="1")
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    assert ranks[: world_size // 2] == ranks[world_size // 2 :]
    expected = simulated(model, codec, prompt, predictor, 0.2, 3)
    assert all(rank[0]["steps"] == expected for rank in ranks)
    assert {hit for step in expected for layer in step["hits"] for hit in layer} == {0, 1}


def simulated(
    folder: Path, codec: str, prompt: list[int], predictor: dict[str, Any], threshold: float, steps: int
) -> list[dict[str, Any]]:
    """The reference: eager steps of one process."""
    transport = Transport(Placement(), CPU, "gloo", None)
    model = load_model(folder, transport)
    capacity = len(prompt) + steps + 1
    cache = new_cache(codec, model.config, 1, 1, capacity, torch.float32, CPU, keeps_context=True)
    speculation = SpeculationConfig(threshold=threshold, chunk_size=128, **predictor)
    eager = EagerStep(model, cache, transport, "simulated", speculation, no_hook)
    token, found = int(prefill(model, cache, transport, 0, prompt, no_hook)[0].argmax()), []
    eager.begin([token], [len(prompt) + 1])
    for step in range(1, steps + 1):
        seq_lens = torch.tensor([len(prompt) + step], dtype=torch.int32)
        result = eager.run(DecodeState(torch.tensor([token]), seq_lens, torch.tensor([True])))
        assert result.hits is not None
        token = int(result.logits.argmax())
        found.append({"tokens": [token], "hits": result.hits.int().tolist(), "fault": 0})
    return found
