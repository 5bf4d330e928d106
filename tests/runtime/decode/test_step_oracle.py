"""One process: steps of `off` and `simulated` against the fp64 oracle, over a random cache with NaN beyond its end."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alspec.config import SpeculationConfig
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.simulation import SimulatedStep, simulate_step

CPU = torch.device("cpu")
S = 128
STEPS = 4
# Request 1 is still within 2 S + 64 at the first step and beyond it at the last; the third never leaves tokens out.
SEQ_LENS = [500, 318, 130]
TOLERANCE = 1e-4


@dataclass
class Setting:
    """The same model and cache twice: in the runtime's fp32 and in the oracle's fp64."""

    config: LlamaConfig
    model: Llama
    cache: KVCache
    oracle: Any
    k_cache: list[Tensor]
    v_cache: list[Tensor]
    token_ids: Tensor  # [STEPS, B]

    def program(self, mode: str, threshold: float) -> EagerStep:
        transport = Transport(Placement(), CPU, "gloo", None)
        return EagerStep(
            self.model,
            self.cache,
            transport,
            mode,
            SpeculationConfig(threshold=threshold, chunk_size=S),
            lambda *_: nullcontext(),
        )

    def simulate(self, step: int, threshold: float, live: Tensor) -> SimulatedStep:
        """One step of the oracle; `self` keeps its caches."""
        result = simulate_step(
            self.oracle.embed(self.token_ids[step].tolist()),
            self.k_cache,
            self.v_cache,
            torch.tensor(SEQ_LENS, dtype=torch.int32) + step,
            self.oracle.pre_attention,
            self.oracle.post_attention,
            threshold=threshold,
            chunk_size=S,
            sm_scale=self.oracle.sm_scale,
            live=live,
        )
        self.k_cache, self.v_cache = result.k_cache, result.v_cache
        return result


@pytest.fixture
def setting(tiny_folder: Path, oracle: Any) -> Setting:
    config = LlamaConfig.from_folder(tiny_folder)
    checkpoint = Checkpoint.open(tiny_folder, config)
    weights = load_weights(checkpoint, config, Placement().shard, torch.float32, CPU)
    capacity = max(SEQ_LENS) + STEPS
    cache = KVCache(
        config.num_layers, len(SEQ_LENS), config.num_kv_heads, capacity, config.head_dim, torch.float32, CPU
    )
    generator = torch.Generator().manual_seed(3)
    for tensor in (cache.k, cache.v):
        # Keys and values that share a direction: the tokens left out then say little new in some layers.
        common = torch.randn(config.num_layers, 1, config.num_kv_heads, 1, config.head_dim, generator=generator)
        own = torch.linspace(0.3, 1.5, config.num_layers)[:, None, None, None, None]
        tensor.copy_(common + own * torch.randn(tensor.shape, generator=generator))
        for request, length in enumerate(SEQ_LENS):
            tensor[:, request, :, length - 1 :] = math.nan
    token_ids = torch.randint(config.vocab_size, (STEPS, len(SEQ_LENS)), generator=generator)
    k_cache, v_cache = list(cache.k.double()), list(cache.v.double())
    return Setting(
        config,
        Llama(config, weights, Transport(Placement(), CPU, "gloo", None)),
        cache,
        oracle,
        k_cache,
        v_cache,
        token_ids,
    )


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("live", [[True, True, True], [False, True, True]], ids=["all-live", "one-ended"])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.2, 0.4, math.inf])
@torch.no_grad()
def test_simulated(setting: Setting, threshold: float, live: list[bool]) -> None:
    program = setting.program("simulated", threshold)
    is_live = torch.tensor(live)
    for step in range(STEPS):
        seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32) + step
        found = program.run(DecodeState(setting.token_ids[step], seq_lens, is_live))
        not_borderline(setting, step, threshold, is_live)
        expected = setting.simulate(step, threshold, is_live)
        assert found.hits is not None
        assert torch.equal(found.hits, expected.hit_map)
        close(found.logits, setting.oracle.logits(expected.x))
        # The caches, NaN included where nothing was written: keys and values carry what was let through.
        close(setting.cache.k, torch.stack(setting.k_cache))
        close(setting.cache.v, torch.stack(setting.v_cache))
        assert found.layer_sums.isfinite().all()


def not_borderline(setting: Setting, step: int, threshold: float, live: Tensor) -> None:
    """Rounding cannot flip a verdict of this step: a lambda a little smaller or larger gives the same ones."""
    caches = setting.k_cache, setting.v_cache
    hit_maps = []
    for factor in (1 - 1e-4, 1 + 1e-4):
        hit_maps.append(setting.simulate(step, threshold * factor, live).hit_map)
        setting.k_cache, setting.v_cache = caches
    assert torch.equal(*hit_maps)


@torch.no_grad()
def test_thresholds_mean_something(setting: Setting) -> None:
    """Within the lambdas tested, one layer's verdicts differ between requests, and one request's between layers."""
    live = torch.tensor([True, True, True])
    caches = setting.k_cache, setting.v_cache
    differ = {"requests": False, "layers": False, "beside a hit": False}
    for threshold in (0.05, 0.1, 0.2, 0.4):
        setting.k_cache, setting.v_cache = caches
        for step in range(STEPS):
            result = setting.simulate(step, threshold, live)
            differ["requests"] |= bool((result.hit_map[:, 0] != result.hit_map[:, 1]).any())
            differ["layers"] |= 0 < int(result.accepted.sum()) < len(result.accepted)
            differ["beside a hit"] |= bool((result.hit_map.any(1) & ~result.accepted).any())
    assert all(differ.values()), differ


@torch.no_grad()
def test_off(setting: Setting) -> None:
    program = setting.program("off", threshold=math.inf)
    live = torch.tensor([True, True, True])
    for step in range(STEPS):
        found = program.run(
            DecodeState(setting.token_ids[step], torch.tensor(SEQ_LENS, dtype=torch.int32) + step, live)
        )
        expected = setting.simulate(step, 0.0, live)
        assert found.hits is None
        close(found.logits, setting.oracle.logits(expected.x))
    close(setting.cache.k, torch.stack(setting.k_cache))
    close(setting.cache.v, torch.stack(setting.v_cache))


@torch.no_grad()
def test_simulated_at_zero_is_off(setting: Setting) -> None:
    """lambda = 0 lets nothing through: the same logits to rounding, and no hit."""
    other = copy.deepcopy(setting.cache)
    state = DecodeState(
        setting.token_ids[0], torch.tensor(SEQ_LENS, dtype=torch.int32), torch.tensor([True, True, True])
    )
    simulated = setting.program("simulated", 0.0).run(state)
    setting.cache = other
    off = setting.program("off", 0.0).run(state)
    assert simulated.hits is not None
    assert not simulated.hits.any()
    torch.testing.assert_close(simulated.logits, off.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(simulated.logits.argmax(-1), off.logits.argmax(-1))


@torch.no_grad()
def test_nan_in_the_weights_shows_in_its_layer(setting: Setting) -> None:
    setting.model.weights.layers[3].down[5, 7] = math.nan
    state = DecodeState(
        setting.token_ids[0], torch.tensor(SEQ_LENS, dtype=torch.int32), torch.tensor([True, True, True])
    )
    result = setting.program("off", 0.0).run(state)
    assert result.layer_sums.isfinite().tolist() == [True, True, True, False, False, False]
    assert result.logits.isnan().all()
