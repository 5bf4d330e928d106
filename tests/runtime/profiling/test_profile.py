"""The latency profiler: what it makes of the clocks, and the steps that it measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from alspec.config import EngineConfig, SamplingConfig, SpeculationConfig
from alspec.errors import BadNumbersError
from alspec.models.llama import Shard
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decode_step import StepRecord
from alspec.runtime.decode.eager_step import EagerStep
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.engine.composition import build_captured_step
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.forced_verdicts import ForcedVerdicts
from alspec.runtime.profiling.profile import (
    WARMUP_STEPS,
    Profile,
    cache_tokens,
    fill,
    measure,
    prepare,
    prompts_from_text,
    stream_limit,
)
from alspec.runtime.profiling.stats import step_bytes

CPU = torch.device("cpu")


class FakeTransport:
    """The other rank measures `other`. Barriers are counted."""

    def __init__(self, other: list[float]) -> None:
        self.other = other
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def all_gather_world(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.tensor(self.other, dtype=tensor.dtype).view_as(tensor)])


class FakeEngine:
    """Each step takes the next of `step_us`, each warm-up step much longer."""

    def __init__(self, step_us: list[int], other: list[float], config: Any, batch_size: int) -> None:
        self.hits: Tensor | None = None
        self.config = EngineConfig(speculation=SpeculationConfig(predictor="window"))
        self.transport = FakeTransport(other)
        self.cache = SimpleNamespace(batch_size=batch_size)
        self.model_config, self.dtype, self.device = config, torch.bfloat16, CPU
        self.placement = Placement(0, 2, 0, 2)
        self.started: list[tuple[list[int], list[int], int]] = []
        self._step_us = [90_000] * WARMUP_STEPS + step_us

    def connected(self) -> FakeTransport:
        return self.transport

    def decode(self, token_ids: list[int], seq_lens: list[int], num_steps: int) -> Iterator[StepRecord]:
        assert self.transport.barriers == 1
        self.started.append((token_ids, seq_lens, num_steps))
        for step_us in self._step_us[:num_steps]:
            yield StepRecord([[token] for token in token_ids], self.hits, step_us, 0)


@pytest.fixture
def engine(small_folder: Path) -> Engine:
    return Engine.from_pretrained(small_folder, transport="gloo", speculation={"mode": "off"})


def load_fused_step(engine: Engine, batch_size: int, capacity: int) -> None:
    """Load, and give the engine the fused step that it has on GPUs."""
    engine.load(batch_size, capacity)
    assert engine.transport is not None
    operation = lambda name, layer: nullcontext()  # noqa: E731
    engine.decode_step = build_captured_step(engine.model, engine.cache, engine.transport, None, False, operation)


def test_a_step_takes_as_long_as_on_its_slowest_rank(engine: Engine) -> None:
    fake: Any = FakeEngine([10, 20, 30, 40], [15.0, 15.0, 15.0, 50.0], engine.model_config, batch_size=3)
    profile = measure(fake, 100, 4)
    assert profile.step_us == [[10, 20, 30, 40], [15, 15, 15, 50]]
    assert profile.slowest_us == [15, 20, 30, 50]
    assert profile.us == pytest.approx({"p20": 18, "p50": 25, "p80": 38, "p99": 49.4})
    assert profile.tokens_per_s == pytest.approx(3 / 25e-6)
    # Measured steps read 110 to 113 tokens of each request.
    assert profile.read_bytes == step_bytes(engine.model_config, Shard(0, 2, 0, 2), torch.bfloat16, [112] * 3)
    assert profile.bytes_per_s == pytest.approx(profile.read_bytes / 25e-6)
    assert fake.started == [([1] * 3, [100] * 3, WARMUP_STEPS + 4)]


@pytest.mark.parametrize(
    ("context", "is_forced", "hit_rate"), [(310, False, 0.5), (306, False, None), (306, True, 0.5), (64, True, 0.5)]
)
def test_hit_rates_count_predictors_that_leave_tokens_out(
    engine: Engine, context: int, is_forced: bool, hit_rate: float | None
) -> None:
    """With S = 128 from 320 tokens on, after ten warm-up steps. Forced verdicts count at any length."""
    fake: Any = FakeEngine([10] * 4, [10.0] * 4, engine.model_config, batch_size=1)
    fake.hits = torch.tensor([[True], [False]])
    forced = ForcedVerdicts.of(2, 0.5, CPU) if is_forced else None
    assert measure(fake, context, 4, forced=forced).hit_rate == hit_rate


def test_percentiles_of_one_step_are_its_time() -> None:
    assert Profile(64, 1, [[8.0]], None, 1000).us == {"p20": 8, "p50": 8, "p80": 8, "p99": 8}


def test_measured_steps_have_the_lengths_after_the_context(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first warm-up step of an eager step reads `context` tokens, and the last one fits."""
    engine.load(2, cache_tokens(24, 3))
    prepare(engine)
    lengths = []
    assert isinstance(engine.decode_step, EagerStep)
    run = engine.decode_step.run
    monkeypatch.setattr(
        engine.decode_step, "run", lambda state: (lengths.append(state.seq_lens.tolist()), run(state))[1]
    )
    profile = measure(engine, 24, 3)
    assert lengths == [[24 + step] * 2 for step in range(WARMUP_STEPS + 3)]
    assert [len(times) for times in profile.step_us] == [3]
    assert all(us > 0 for us in profile.slowest_us)


def test_the_captured_step_is_prepared_and_its_lengths_fit_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alspec.runtime.profiling.profile.WARMUP_STEPS", 2)
    load_fused_step(engine, 1, cache_tokens(20, 2))
    prepare(engine)
    assert 0.9 < float(engine.cache.k.float().std()) < 1.1
    profile = measure(engine, 20, 2)
    assert [len(times) for times in profile.step_us] == [2]
    assert isinstance(engine.decode_step, CapturedStep)
    # The next step would read one token more than the last measured step.
    assert engine.decode_step._decoder.buffers.seq_lens.tolist() == [cache_tokens(20, 2)]
    assert engine.decode_step.next_step == 2 + 2 + 1, "no step is launched after the last one"


def test_bad_numbers_end_the_measurement(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alspec.runtime.profiling.profile.WARMUP_STEPS", 2)
    load_fused_step(engine, 1, cache_tokens(20, 2))
    prepare(engine)
    engine.cache.v[1] = torch.nan
    with pytest.raises(BadNumbersError, match="rank 0, attention output, layer 1, step 1;"):
        measure(engine, 20, 2)


def test_captured_and_eager_steps_generate_the_same_tokens(engine: Engine) -> None:
    """Generation ends with the request, not at the largest number of tokens."""

    def run(*stop: str) -> list[int]:
        sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True, stop=stop)
        made = [token.token_id for token in engine.stream([7, 30, 200, 5, 5, 60], sampling)]
        assert len(engine.generation.step_us) == len(made) - 1
        return made

    engine.load(1, 16)
    expected = run()
    assert len(expected) == 4
    load_fused_step(engine, 1, 16)
    assert run() == expected
    assert engine.tokenizer is not None
    assert run(engine.tokenizer.decode(expected[:2])) == expected[:2]
    assert run(engine.tokenizer.decode(expected[:1])) == expected[:1]


def test_a_filled_cache_holds_normal_numbers_of_its_seed(engine: Engine) -> None:
    engine.load(2, 64)
    fill(engine.cache, seed=0)
    k, v = engine.cache.k.clone(), engine.cache.v.clone()
    assert abs(float(k.mean())) < 0.02
    assert 0.98 < float(k.std()) < 1.02
    assert len({float(layer.flatten()[0]) for layer in (*k, *v)}) == 2 * engine.model_config.num_layers
    fill(engine.cache, seed=0)
    assert torch.equal(engine.cache.k, k)
    fill(engine.cache, seed=1)
    assert not torch.equal(engine.cache.v, v)


def test_the_bandwidth_limit_is_that_of_the_fastest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alspec.runtime.profiling.profile.stream_bandwidth", lambda device: 3e9)
    for other, fastest in ((2e9, 3e9), (4e9, 4e9)):
        fake: Any = SimpleNamespace(device=CPU, connected=partial(FakeTransport, [other]))
        assert stream_limit(fake) == fastest


@pytest.mark.parametrize(("batch_size", "num_tokens"), [(1, 3), (1, 11), (2, 5), (3, 26)])
def test_prompts_repeat_or_cut_a_text(batch_size: int, num_tokens: int) -> None:
    """Each prompt repeats the text from its own starting point."""
    prompts = prompts_from_text([96, *range(10)], batch_size, num_tokens)
    assert [len(ids) for ids in prompts] == [num_tokens] * batch_size
    for request, (first, *rest) in enumerate(prompts):
        assert first == 96
        assert rest == [(10 * request // batch_size + at) % 10 for at in range(num_tokens - 1)]
    assert prompts_from_text([7], 2, 3) == [[7, 7, 7]] * 2


def test_measured_steps_after_a_text_give_the_tokens_of_generation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the captured step: it reads the text into the cache, and the timed steps generate its tokens."""
    monkeypatch.setattr("alspec.runtime.profiling.profile.WARMUP_STEPS", 2)
    text_ids = [5, 30, 200, 7, 7, 91]
    load_fused_step(engine, 2, cache_tokens(9, 2))
    prepare(engine)
    sampling = SamplingConfig(max_new_tokens=5, ignore_eos=True)
    list(engine.stream(prompts_from_text(text_ids, 2, 8), sampling))
    generation = engine.generation
    assert len(set(map(tuple, (request.token_ids for request in generation.requests)))) == 2
    prepare(engine)  # random numbers into the cache, of which the engine then keeps nothing
    made = []
    decode = engine.decode

    def recording(token_ids: list[int], seq_lens: list[int], num_steps: int) -> Iterator[StepRecord]:
        made.append(token_ids)
        assert seq_lens == [9, 9]
        for record in decode(token_ids, seq_lens, num_steps):
            made.append([token for (token,) in record.token_ids])
            yield record

    monkeypatch.setattr(engine, "decode", recording)
    profile = measure(engine, 9, 2, text_ids)
    assert [len(times) for times in profile.step_us] == [2]
    assert list(map(list, zip(*made, strict=True))) == [request.token_ids for request in generation.requests]


def test_sampled_tokens_depend_on_request_and_position(engine: Engine) -> None:
    """Two requests with one prompt differ, alike in captured and eager steps. The first is as it is alone."""
    sampling = SamplingConfig(max_new_tokens=4, ignore_eos=True, temperature=1.5, seed=3)

    def run(batch_size: int) -> list[list[int]]:
        list(engine.stream([[7, 30, 200, 5, 5, 60]] * batch_size, sampling))
        return [request.token_ids for request in engine.generation.requests]

    engine.load(1, 16)
    (alone,) = run(1)
    engine.load(2, 16)
    expected = run(2)
    assert expected[0] == alone != expected[1]
    load_fused_step(engine, 2, 16)
    assert run(2) == expected
