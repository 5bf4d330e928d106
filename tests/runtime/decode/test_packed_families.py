"""Fused steps of every family over packed weights, whose kernels run in the interpreter here, against prompts.

Prompts unpack a matrix and multiply by the library: test_weight_settings.py compares their logits with transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import CASES, save_family
from tiers import fast

from alspec.config import SamplingConfig
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import MATRICES
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.composition import build_captured_step

CPU, FP16 = torch.device("cpu"), torch.float16  # the interpreter computes no whole step in bf16
NEW_TOKENS = 3
# Rounding to fp16 changes no logit by more, relative to the standard deviation of all.
TOLERANCE = 0.02
PROMPTS = [torch.randint(151, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (37, 5)]
EVERY = [(case, weights) for case in CASES for weights in ("fp8", "int4")]
FAST = [("qwen3-biases", "int4")]


@pytest.mark.parametrize(("case", "weights"), fast(EVERY, FAST), ids=str)
def test_steps_continue_prompts(case: str, weights: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96} | ({"head_dim": 16} if "head_dim" in CASES[case][1] else {})
    save_family(tmp_path, case, **sizes)
    config = LlamaConfig.from_folder(tmp_path).model_copy(update={"weights": weights, "packs_weights": True})
    transport = Transport(Placement(), CPU, "gloo", None)
    loaded = load_weights(Checkpoint.open(tmp_path, config), config, transport.placement.shard, FP16, CPU)
    assert all(isinstance(getattr(layer, name), DecodeWeight) for layer in loaded.layers for name in MATRICES)
    model = Llama(config, loaded, transport)

    def logits_behind(ids: list[int]) -> torch.Tensor:
        cache = new_cache("bf16", config, 1, 1, len(ids) + 1, FP16, CPU)
        return prefill(model, cache, transport, 0, ids, no_hook)[0][0].float()

    cache = new_cache("bf16", config, 1, len(PROMPTS), 48, FP16, CPU)
    captured = build_captured_step(model, cache, transport, None, False, no_hook)
    captured.prepare(SamplingConfig())
    texts = [
        [*ids, int(prefill(model, cache, transport, index, ids, no_hook)[0].argmax())]
        for index, ids in enumerate(PROMPTS)
    ]
    captured.begin([ids[-1] for ids in texts], [len(ids) for ids in texts])
    for remaining in range(NEW_TOKENS, 0, -1):
        expected = [logits_behind(ids) for ids in texts]
        record = captured.step(remaining)
        assert record.fault == 0
        for ids, logits, (token,) in zip(texts, expected, record.token_ids, strict=True):
            assert logits.max() - logits[token] <= TOLERANCE * logits.std()
            ids.append(token)
