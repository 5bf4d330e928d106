"""Heads padded for quantised caches: zeros change no result, in prompts, eager steps and fused steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import greedy, save_family
from model_runner import Runner, close, load_model

from alspec.config import SamplingConfig
from alspec.errors import UserError
from alspec.models.llama import rotate_values
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import check_codec, fit_heads, new_cache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.composition import build_captured_step
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.memory import plan_memory

CPU = torch.device("cpu")
# Heads of 12 and 20; biases; a partly rotated head with longrope.
CASES = ["llama-biases", "mistral", "phi3-partial-long"]


def ids_of(length: int) -> list[int]:
    return torch.randint(151, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_rotated", [False, True])
@torch.no_grad()
def test_padding_changes_no_logits(case: str, is_rotated: bool, tmp_path: Path) -> None:
    """With a random rotation of the values, too, which fills the zeros of v."""
    reference, ids = save_family(tmp_path, case), ids_of(41)
    model = load_model(tmp_path, head_dim=64)
    if is_rotated:
        rotation = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))[0]
        rotate_values(model.weights, model.config, rotation)
    runner = Runner(model.config, model.weights, Transport(Placement(), CPU, "gloo", None))
    logits = reference(torch.tensor([ids])).logits[0]
    close(runner.prefill(ids[:-1], chunk_tokens=17), logits[-2])
    close(runner.decode(ids[-1], len(ids)), logits[-1])


@pytest.mark.parametrize("case", ["llama-biases", pytest.param("phi3-partial-long", marks=pytest.mark.full)])
def test_fused_steps_of_padded_heads(case: str, tmp_path: Path) -> None:
    """The kernels run in the interpreter here."""
    reference, ids = save_family(tmp_path, case, num_hidden_layers=2), ids_of(37)
    model = load_model(tmp_path, head_dim=64)
    transport = Transport(Placement(), CPU, "gloo", None)
    cache = new_cache("bf16", model.config, 1, 1, 48, torch.float32, CPU)
    captured = build_captured_step(model, cache, transport, None, False, no_hook)
    captured.prepare(SamplingConfig())
    tokens = [int(prefill(model, cache, transport, 0, ids, no_hook)[0].argmax())]
    captured.begin(tokens, [len(ids) + 1])
    tokens += [captured.step(remaining).token_ids[0][0] for remaining in (3, 2, 1)]
    assert tokens == greedy(reference, ids, 4)


def test_a_quantised_cache_pads_heads(tmp_path: Path) -> None:
    """Cache and plan count the padded heads. A codec of 4 bits changes few of the tokens, none of the first ones."""
    reference, ids = save_family(tmp_path, "mistral", scale=0.1), ids_of(101)
    engine = Engine.from_pretrained(tmp_path, transport="gloo", kv_cache="turboquant4")
    sampling = SamplingConfig(max_new_tokens=6)
    tokens = [token.token_id for token in engine.stream(ids, sampling)]
    assert (engine.cache.head_dim, engine.model.sm_scale) == (64, 20**-0.5)
    assert engine.memory is not None
    assert engine.memory.cache_bytes == engine.cache.num_bytes
    assert sum(tensor.nbytes for layer in engine.model.weights.layers for tensor in layer.tensors.values()) == sum(
        tensor.nbytes for layer in load_model(tmp_path, head_dim=64).weights.layers for tensor in layer.tensors.values()
    )
    assert tokens[:4] == greedy(reference, ids, 4)
    assert (
        plan_memory(
            engine.model_config, Placement().shard, torch.float32, 1, engine.cache.max_context, "turboquant4"
        ).weights_bytes
        == engine.memory.weights_bytes
    )


def test_which_heads_are_padded(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral")
    config = LlamaConfig.from_folder(tmp_path)
    for head_dim, expected in ((20, 64), (64, 64), (66, 128), (96, 128), (128, 128), (160, 160)):
        own = config.model_copy(update={"head_dim": head_dim})
        fitted = fit_heads("turbo4", own)
        assert (fitted.head_dim, fitted.as_stored) == (expected, own)
        assert fitted.sm_scale == own.sm_scale == head_dim**-0.5
        assert fit_heads("bf16", own) == own
        if expected <= 128:
            check_codec("turbo4", fitted, 1)
    with pytest.raises(UserError, match=r"needs a head_dim of up to 128, the model has 160; use bf16"):
        check_codec("turbo4", fitted, 1)
    normed = fit_heads("turbo4", config.model_copy(update={"qk_norm": True}))
    with pytest.raises(UserError, match=r"needs a head_dim of 64 or 128, the model has 20, with norms of heads"):
        check_codec("turbo4", normed, 1)
