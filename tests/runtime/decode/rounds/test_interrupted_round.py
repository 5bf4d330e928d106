"""Ctrl-C at the wrong moments, and ranks that are not at the same round: what the next generation finds."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jobs import default_interrupts
from round_cases import engine_of, generated, put_captured
from tiers import fast

from alspec.config import SamplingConfig
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.decode.rounds.captured_round import CapturedRoundStep, RoundKind
from alspec.runtime.decode.rounds.model_drafter import ModelDrafter
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.kept_prefix import KeptPrefix

MakePrompt = Callable[..., list[int]]


class Graph:
    """A stand-in for the CUDA graph of one kind of round. `interrupted`: Ctrl-C arrives while it is launched."""

    def __init__(self, step: CapturedRoundStep, kind: RoundKind, interrupted: bool = False) -> None:
        self._step, self._kind, self._interrupted = step, kind, interrupted

    def replay(self) -> None:
        if self._interrupted:
            signal.raise_signal(signal.SIGINT)
        self._step._launch_kernels(self._kind, no_hook)

    def reset(self) -> None:
        """There is nothing to release."""


@contextmanager
def captured(folder: Path, batch_size: int, length: int, **options: Any) -> Iterator[tuple[Engine, CapturedRoundStep]]:
    """An engine whose rounds run the fused kernels in the interpreter."""
    with engine_of(folder, **options) as engine:
        engine.load(batch_size, length)
        put_captured(engine)
        step = engine.decode_step
        assert isinstance(step, CapturedRoundStep)
        yield engine, step
        for kind in step._kinds:
            kind.graph = None


def put_graphs(step: CapturedRoundStep, interrupted: bool = False) -> None:
    for kind in step._kinds:
        kind.graph = Graph(step, kind, interrupted)  # type: ignore[assignment]


def sampling(num_tokens: int, **options: Any) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=num_tokens, ignore_eos=True, **options)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_launch_is_counted(turbo_folder: Path, make_prompt: MakePrompt) -> None:
    """Other ranks launch it, too, and nobody captures again."""
    with captured(turbo_folder, 1, 32, draft="ngram", draft_tokens=1, draft_always=True) as (engine, step):
        tokens = engine.stream([make_prompt(6, seed=1)], sampling(8))
        next(tokens)
        put_graphs(step, interrupted=True)
        with default_interrupts(), pytest.raises(KeyboardInterrupt):
            list(tokens)
        assert step.launched == int(step._state.number) - 1
        assert step._prepared


@pytest.mark.full
def test_an_interrupted_copy_of_the_live_flags(turbo_folder: Path, make_prompt: MakePrompt) -> None:
    """The device has other flags than the host then."""
    prompts = [make_prompt(6, seed=1), make_prompt(7, seed=2)]
    with captured(turbo_folder, 2, 32, draft="ngram", draft_tokens=1, draft_always=True) as (engine, step):
        expected = generated(engine, prompts, sampling(4))
        copy = torch.Tensor.copy_

        def copied(own: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            found = copy(own, *args, **options)
            if own is step._state.live:
                raise KeyboardInterrupt
            return found

        ending = engine.stream(prompts, sampling(8, stop_ids=[expected[0][1]]))
        next(ending)
        with mock.patch.object(torch.Tensor, "copy_", copied), pytest.raises(KeyboardInterrupt):
            list(ending)
        assert step._state.live.tolist() == [0, 1]
        assert generated(engine, prompts, sampling(4)) == expected


def test_a_rank_that_is_behind_launches_the_same_kinds(turbo_folder: Path, make_prompt: MakePrompt) -> None:
    """It has read fewer rounds than the rank that was interrupted, so it would choose another kind."""
    options: dict[str, Any] = {"draft": "ngram", "draft_tokens": 1, "draft_always": True}
    with (
        captured(turbo_folder, 1, 80, **options) as (ahead, first),
        captured(turbo_folder, 1, 80, **options) as (
            behind,
            second,
        ),
    ):
        found = []
        for engine, step in ((ahead, first), (behind, second)):
            step.force_acceptance(0.0)
            tokens = engine.stream([make_prompt(6, seed=1)], sampling(6))
            for _ in range(5):
                next(tokens)
            put_graphs(step)
            found.append(tokens)
        # The last token has no room for drafts, which only the first rank knows.
        with mock.patch.object(first._queue.ring, "read", interrupted), pytest.raises(KeyboardInterrupt):
            next(found[0])
        assert first.launched == second.launched + 1
        second.launch_missing(first.launched, first.recent_kinds)
        assert second.launched == first.launched
        assert second.recent_kinds[-5:] == first.recent_kinds[-5:]
        assert first.recent_kinds.endswith("dp")


@pytest.mark.parametrize(("draft", "logprobs"), fast([("self", 2), ("ngram", 2)], keep=[("self", 2)]))
def test_equal_settings_are_captured_once(
    turbo_folder: Path, make_prompt: MakePrompt, draft: str, logprobs: int
) -> None:
    """Draft steps report no log probabilities, whatever is asked for."""
    with captured(turbo_folder, 1, 32, draft=draft, draft_tokens=1, draft_always=True) as (engine, step):
        with mock.patch.object(step, "_capture", wraps=step._capture) as capture:
            for _ in range(2):
                generated(engine, [make_prompt(6, seed=1)], sampling(2, logprobs=logprobs))
        assert capture.call_count == 2  # both kinds


@pytest.mark.full
def test_a_plain_step_behind_a_round_of_right_drafts_leaves_no_hole(
    turbo_folder: Path, make_prompt: MakePrompt
) -> None:
    """A draft model's cache then lacks three tokens, and its first step feeds two."""
    options: dict[str, Any] = {"draft": f"model:{turbo_folder}", "draft_tokens": 2, "draft_always": True}
    with captured(turbo_folder, 1, 64, **options) as (engine, step):
        step.force_acceptance(1.0)
        assert step._draft_text is not None
        catch_up = step._draft_text.complete
        decisions = iter([True, False, True, True, True, True])
        with mock.patch.object(step, "_policy", mock.Mock(decide_next=lambda *_: next(decisions))):
            generated(engine, [make_prompt(20, seed=1)], sampling(12))
        assert "cpc" in step.recent_kinds
        drafter = next(
            cell.cell_contents
            for cell in catch_up.__closure__
            if isinstance(cell.cell_contents, ModelDrafter)  # type: ignore[attr-defined]
        )
        cache, (held,) = drafter._forward.cache, step._held
        found = [cache.layer(layer).k[0, :, :held].clone() for layer in range(cache.num_layers)]
        text = step._state.history[0, :held].tolist()
        prefill(drafter._forward.model, cache, drafter._forward.transport, 0, text, engine._operation)
        for layer, keys in enumerate(found):
            torch.testing.assert_close(keys, cache.layer(layer).k[0, :, :held], rtol=1e-3, atol=1e-3)


def test_ranks_that_read_other_numbers_of_rounds_complete_the_draft_cache_alike(
    turbo_folder: Path, make_prompt: MakePrompt
) -> None:
    """Another rank knows of fewer tokens in the draft model's cache: this rank computes those anew, too."""
    options: dict[str, Any] = {"draft": f"model:{turbo_folder}", "draft_tokens": 2, "draft_always": True}
    prompt = make_prompt(20, seed=1)
    with captured(turbo_folder, 1, 64, **options) as (engine, step):
        expected = generated(engine, [prompt], sampling(12))[0]
        text = [*prompt, *expected[:6]]
        assert step._draft_text is not None
        complete = step._draft_text.complete = mock.Mock(wraps=step._draft_text.complete)
        assert generated(engine, [text], sampling(6))[0] == expected[6:]
        assert complete.call_count == 0  # the cache holds the text from the call before
        step._draft_text.held_by_all = lambda held, is_long: torch.minimum(held, torch.full_like(held, 9))
        assert generated(engine, [text], sampling(6))[0] == expected[6:]
        assert complete.call_count == 1
        assert complete.call_args.args[1].tolist() == [9]


@pytest.mark.full
def test_an_interrupted_step_keeps_whole_blocks(turbo_folder: Path, make_prompt: MakePrompt) -> None:
    """The second of two rounds in flight may have replaced the tail by that of the next block."""
    with captured(turbo_folder, 1, 160, draft="ngram", draft_tokens=3, kv_cache="turbo4", draft_always=True) as (
        engine,
        step,
    ):
        step.force_acceptance(1.0)
        engine._kept = KeptPrefix(engine.cache, is_lossless=True, max_appended=64)
        prompt = make_prompt(100, seed=7)
        tokens = engine.stream([prompt], sampling(40))
        for _ in range(3):
            next(tokens)
        assert engine._kept.reusable([[*engine._kept._ids[0], 1]])[0] > 100
        with mock.patch.object(step._queue.ring, "read", interrupted), pytest.raises(KeyboardInterrupt):
            list(tokens)
        assert engine._kept.reusable([[*prompt, 1]]) == [64]


@pytest.mark.full
@pytest.mark.parametrize(("codec", "is_exact"), [("turboquant3", False), ("turbo4", False), ("bf16", True)])
def test_an_answer_that_ends_inside_a_round_is_kept(
    turbo_folder: Path, make_prompt: MakePrompt, codec: str, is_exact: bool
) -> None:
    """Accepted drafts behind its end are dropped from the tail; only where that is still there."""
    options: dict[str, Any] = {"kv_cache": codec, "draft": "ngram", "draft_tokens": 3, "draft_always": True}
    with captured(turbo_folder, 1, 160, **options) as (engine, step):
        step.force_acceptance(1.0)
        engine._kept = KeptPrefix(engine.cache, is_lossless=True, max_appended=64)
        for num_prompt in (70, 120):  # the second answer reaches the next block
            prompt = make_prompt(num_prompt, seed=7)
            stop = generated(engine, [prompt], sampling(8))[0][1 if num_prompt == 70 else 6]
            (ids,) = generated(engine, [prompt], sampling(12, stop_ids=[stop]))
            held = engine._kept._ids[0]
            assert len(held) > num_prompt + len(ids), "it ended inside a round"
            whole = num_prompt + len(ids)
            reused = engine._kept.reusable([[*prompt, *ids, *make_prompt(5, seed=3)]])
            in_tail = len(held) // 64 == whole // 64
            assert reused == [whole if in_tail or is_exact else 64 if codec == "turbo4" else 0]
