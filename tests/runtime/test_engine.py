"""The engine as a library: one model, several prompts, and a process that stays its owner's."""

from __future__ import annotations

import signal

import pytest
import torch

from alspec.config import SamplingConfig
from alspec.errors import DoesNotFitError
from alspec.runtime import engine as engine_module
from alspec.runtime.engine import Engine
from alspec.runtime.faults import Heartbeat, run_guarded
from alspec.runtime.placement import Placement

SAMPLING = SamplingConfig(max_new_tokens=4, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    torch.set_num_threads(1)
    return Engine.from_pretrained(transport="gloo", dtype="fp32")


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo-mixed"])
def test_a_longer_prompt_replaces_the_cache(kv_cache: str) -> None:
    """And a shorter one after it finds nothing of it."""
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(transport="gloo", dtype="fp32", kv_cache=kv_cache)
    short = [token.token_id for token in engine.stream("The road", SAMPLING)]
    first = engine.memory
    long = [token.token_id for token in engine.stream("The road " * 90, SAMPLING)]
    assert first is not None
    assert engine.memory is not None
    assert engine.memory.cache_bytes == engine.cache.num_bytes > first.cache_bytes
    assert [token.token_id for token in engine.stream("The road", SAMPLING)] == short
    assert len(long) == 4
    assert engine.notices == []


def test_growth_is_checked_before_memory_is_taken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    list(engine.stream("The road", SAMPLING))
    monkeypatch.setattr(engine_module, "available_bytes", lambda *_: 10**6)
    with pytest.raises(DoesNotFitError, match="does not fit"):
        engine.load(1, 8192)
    monkeypatch.undo()
    assert len(list(engine.stream("The road", SAMPLING))) == 4, "the engine must stay usable"


def test_out_of_memory_is_exit_3() -> None:
    def work() -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")

    with pytest.raises(DoesNotFitError, match=r"out of memory: CUDA out of memory\. Tried to allocate 1 GiB\."):
        run_guarded(Heartbeat(Placement()), work)


def test_one_rank_leaves_signals_alone(engine: Engine) -> None:
    before = signal.getsignal(signal.SIGTERM)
    list(engine.stream("The road", SAMPLING))
    engine.close()
    assert signal.getsignal(signal.SIGTERM) is before
