"""On one process, eager steps of `off` and `simulated` equal the fp64 oracle. The cache has NaN beyond its end."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import fast
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
# The predictor reads all tokens of the second request at the first step only, of the third request at all steps.
SEQ_LENS = [500, 318, 130]
TOLERANCE = 1e-4


@dataclass
class Setting:
    """Model and cache twice: in fp32 for the runtime and in fp64 for the oracle."""

    config: LlamaConfig
    model: Llama
    cache: KVCache
    oracle: Any
    k_cache: list[Tensor]
    v_cache: list[Tensor]
    token_ids: Tensor  # [STEPS, B]

    def eager_step(self, mode: str, threshold: float) -> EagerStep:
        transport = Transport(Placement(), CPU, "gloo", None)
        return EagerStep(
            self.model,
            self.cache,
            transport,
            mode,
            SpeculationConfig(threshold=threshold, chunk_size=S, predictor="window"),
            lambda *_: nullcontext(),
        )

    def simulate(self, step: int, threshold: float, live: Tensor) -> SimulatedStep:
        """One step of the oracle, whose caches `self` keeps."""
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
        # Keys and values share a direction, so in some layers the tokens left out change little.
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


ALL_LIVE, ONE_ENDED = [True, True, True], [False, True, True]
CASES = [(threshold, live) for threshold in (0.0, 0.05, 0.1, 0.2, 0.4, math.inf) for live in (ALL_LIVE, ONE_ENDED)]
FAST_CASES = [(0.0, ONE_ENDED), (0.1, ALL_LIVE), (0.2, ONE_ENDED), (math.inf, ALL_LIVE)]


@pytest.mark.parametrize(("threshold", "live"), fast(CASES, FAST_CASES), ids=str)
@torch.no_grad()
def test_simulated_equals_the_oracle(setting: Setting, threshold: float, live: list[bool]) -> None:
    eager = setting.eager_step("simulated", threshold)
    is_live = torch.tensor(live)
    for step in range(STEPS):
        seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32) + step
        found = eager.run(DecodeState(setting.token_ids[step], seq_lens, is_live))
        check_verdicts_are_clear(setting, step, threshold, is_live)
        expected = setting.simulate(step, threshold, is_live)
        assert found.hits is not None
        assert torch.equal(found.hits, expected.hit_map)
        close(found.logits, setting.oracle.logits(expected.x))
        # Keys and values depend on the accepted `A~`. Where nothing was written, NaN is left.
        close(setting.cache.k, torch.stack(setting.k_cache))
        close(setting.cache.v, torch.stack(setting.v_cache))
        assert found.layer_sums.isfinite().all()


def check_verdicts_are_clear(setting: Setting, step: int, threshold: float, live: Tensor) -> None:
    """Rounding cannot change a verdict of this step: a lambda a little smaller or larger gives the same verdicts."""
    caches = setting.k_cache, setting.v_cache
    hit_maps = []
    for factor in (1 - 1e-4, 1 + 1e-4):
        hit_maps.append(setting.simulate(step, threshold * factor, live).hit_map)
        setting.k_cache, setting.v_cache = caches
    assert torch.equal(*hit_maps)


@torch.no_grad()
def test_thresholds_mean_something(setting: Setting) -> None:
    """At the tested lambdas, verdicts differ between the requests of a layer and between the layers of a request."""
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
def test_off_equals_the_oracle(setting: Setting) -> None:
    eager = setting.eager_step("off", threshold=math.inf)
    live = torch.tensor([True, True, True])
    for step in range(STEPS):
        found = eager.run(DecodeState(setting.token_ids[step], torch.tensor(SEQ_LENS, dtype=torch.int32) + step, live))
        expected = setting.simulate(step, 0.0, live)
        assert found.hits is None
        close(found.logits, setting.oracle.logits(expected.x))
    close(setting.cache.k, torch.stack(setting.k_cache))
    close(setting.cache.v, torch.stack(setting.v_cache))


@torch.no_grad()
def test_simulated_at_zero_is_off(setting: Setting) -> None:
    """lambda = 0 accepts nothing: no hit, and equal logits up to rounding."""
    other = copy.deepcopy(setting.cache)
    state = DecodeState(
        setting.token_ids[0], torch.tensor(SEQ_LENS, dtype=torch.int32), torch.tensor([True, True, True])
    )
    simulated = setting.eager_step("simulated", 0.0).run(state)
    setting.cache = other
    off = setting.eager_step("off", 0.0).run(state)
    assert simulated.hits is not None
    assert not simulated.hits.any()
    torch.testing.assert_close(simulated.logits, off.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(simulated.logits.argmax(-1), off.logits.argmax(-1))


@torch.no_grad()
def test_nan_in_the_weights_is_found_in_its_layer(setting: Setting) -> None:
    setting.model.weights.layers[3].down[5, 7] = math.nan
    state = DecodeState(
        setting.token_ids[0], torch.tensor(SEQ_LENS, dtype=torch.int32), torch.tensor([True, True, True])
    )
    result = setting.eager_step("off", 0.0).run(state)
    assert result.layer_sums.isfinite().tolist() == [True, True, True, False, False, False]
    assert result.logits.isnan().all()
