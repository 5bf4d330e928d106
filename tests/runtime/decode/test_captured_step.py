"""The loop over the fused kernels (here launched in the interpreter) against the step program, token for token."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch
from paired_ranks import pairs

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.errors import RankFailureError
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, split_fault
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.flashq.flashq_reference import flashq_dequantize
from alspec.kernels.sampling import sampler
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.cache.flashq_cache import FlashQCache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode import captured_step
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decoder import Decoder
from alspec.runtime.decode.eager_sampling import sample
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.paired_decoder import PairedDecoder
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.composition import build_captured_step

CPU = torch.device("cpu")
CAPACITY = 48
PROMPTS = [[7, 30, 200, 5, 5, 91], [11] * 20]
# Decoding fills a block of each, and reads it as a record from the next step on.
LONG_PROMPTS = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (61, 126)]
GREEDY = SamplingConfig(max_new_tokens=5)
SAMPLED = SamplingConfig(max_new_tokens=5, temperature=0.9, top_k=50, top_p=0.95, seed=3)


class Setting:
    """A model with a filled cache; `loop` and `tokens` continue the same prompts."""

    def __init__(self, folder: Path, codec: str = "bf16", prompts: list[list[int]] = PROMPTS) -> None:
        self.prompts = prompts
        config = LlamaConfig.from_folder(folder)
        weights = load_weights(Checkpoint.open(folder, config), config, Placement().shard, torch.float32, CPU)
        self.transport = Transport(Placement(), CPU, "gloo", None)
        self.model = Llama(config, weights, self.transport)
        capacity = max(CAPACITY, *(len(ids) + 10 for ids in prompts))
        self.cache = new_cache(codec, config, 1, len(prompts), capacity, torch.float32, CPU)

    def prefill(self) -> list[int]:
        """Fill the cache; returns the first new token of each request."""
        logits = [
            prefill(self.model, self.cache, self.transport, request, ids, no_hook)[0]
            for request, ids in enumerate(self.prompts)
        ]
        return torch.cat(logits).argmax(1).tolist()

    def loop(self) -> CapturedStep:
        return build_captured_step(self.model, self.cache, self.transport, None, False, no_hook)

    def tokens(self, sampling: SamplingConfig) -> list[list[int]]:
        """The reference: each step's tokens, by the step program and `sample`."""
        token_ids = self.prefill()
        program = EagerStep(self.model, self.cache, self.transport, "off", SpeculationConfig(), no_hook)
        steps = []
        for step in range(1, sampling.max_new_tokens):
            seq_lens = torch.tensor([len(ids) + step for ids in self.prompts], dtype=torch.int32)
            state = DecodeState(torch.tensor(token_ids), seq_lens, torch.ones(len(self.prompts), dtype=torch.bool))
            token_ids = sample(
                program.run(state).logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed,
                torch.arange(len(self.prompts)), seq_lens.long(),
            ).tolist()  # fmt: skip
            steps.append(token_ids)
        return steps


@pytest.fixture(scope="module")
def setting(small_folder: Path) -> Setting:
    return Setting(small_folder)


def _run(
    loop: CapturedStep, first: list[int], sampling: SamplingConfig, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    loop.begin(first, [len(ids) + 1 for ids in prompts])
    records = [loop.step(sampling.max_new_tokens - step) for step in range(1, sampling.max_new_tokens)]
    assert [record.fault for record in records] == [0] * len(records)
    return [record.token_ids for record in records]


def test_greedy_and_sampled_tokens_are_those_of_the_step_program(setting: Setting) -> None:
    loop = setting.loop()
    others = ({"seed": 4}, {"temperature": 2.0, "top_p": 0.99}, {"top_k": 0}, {"top_p": 1.0})
    found = []
    for sampling in (GREEDY, SAMPLED, *(SAMPLED.model_copy(update=other) for other in others), SAMPLED):
        expected = setting.tokens(sampling)
        loop.prepare(sampling)
        found.append(_run(loop, setting.prefill(), sampling))
        assert found[-1] == expected
    assert found[0] != found[1] != found[2]


def test_only_other_cuts_need_another_captured_step(setting: Setting) -> None:
    loop = setting.loop()
    with mock.patch.object(loop, "_capture", mock.Mock(wraps=loop._capture)) as capture:
        for update, captures in (
            ({}, 1), ({"seed": 4}, 1), ({"temperature": 2.0, "top_k": 9}, 1), ({"top_k": 0}, 2), ({"top_p": 1.0}, 3),
            ({"temperature": 0.0}, 4), ({"temperature": 0.0, "seed": 9}, 4),
        ):  # fmt: skip
            loop.prepare(SAMPLED.model_copy(update=update))
            assert capture.call_count == captures


@pytest.mark.parametrize("codec", ["turbo4", "turbo-mixed"])
def test_a_quantised_cache_fills_blocks_as_the_step_program_does(turbo_folder: Path, codec: str) -> None:
    """Tokens; and what the caches hold, close to each other, for x is."""
    sampling = SamplingConfig(max_new_tokens=6)
    setting = Setting(turbo_folder, codec, LONG_PROMPTS)
    expected = setting.tokens(sampling)
    assert isinstance(setting.cache, FlashQCache)
    lengths = torch.tensor([len(ids) + sampling.max_new_tokens for ids in LONG_PROMPTS])
    layers = range(setting.cache.num_layers)
    kept = [flashq_dequantize(setting.cache.layer(layer), lengths) for layer in layers]
    # Nothing of the reference is left to be read.
    setting.cache.layers.words.fill_(-1)
    setting.cache.layers.scales.fill_(torch.nan)
    loop = setting.loop()
    loop.prepare(sampling)
    assert _run(loop, setting.prefill(), sampling, LONG_PROMPTS) == expected
    for layer in layers:
        for found, reference in zip(flashq_dequantize(setting.cache.layer(layer), lengths), kept[layer], strict=True):
            assert (found - reference).norm() < 0.01 * reference.norm()


def test_a_generation_left_early_leaves_nothing_behind(setting: Setting) -> None:
    expected = setting.tokens(GREEDY)
    loop = setting.loop()
    loop.prepare(GREEDY)
    loop.begin([1, 2], [9, 9])
    loop.step(remaining=5)
    assert _run(loop, setting.prefill(), GREEDY) == expected


class Graph:
    """Stands for a captured one: Ctrl-C comes while the third step from now is being launched."""

    def __init__(self, loop: CapturedStep) -> None:
        self._loop = loop
        self._left = 3

    def replay(self) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        self._loop._issue(no_hook)

    def reset(self) -> None:
        """Nothing to give back."""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_interrupted_launch_leaves_nothing_behind(setting: Setting, sampling: SamplingConfig) -> None:
    """The step is under way, and counted: the next generation does not take its token for one of its own."""
    expected = setting.tokens(sampling)
    loop = setting.loop()
    loop.prepare(sampling)
    before = loop.launched
    loop._graph = Graph(loop)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        _run(loop, [1, 2], sampling)
    assert loop.launched == before + 3 == int(loop._decoder.exchange.epoch) - 1
    for _ in range(2):
        loop.prepare(sampling)
        assert _run(loop, setting.prefill(), sampling) == expected


def test_steps_that_other_ranks_have_launched_are_launched(setting: Setting) -> None:
    """Captured ones; those that are launched one by one begin with the host's, and wait for no one's."""
    expected = setting.tokens(GREEDY)
    loop = setting.loop()
    loop.prepare(GREEDY)
    loop.begin([1, 2], [9, 9])
    loop.step(remaining=5)
    before = loop.launched
    loop.catch_up(before + 2)
    assert loop.launched == before
    loop._graph = Graph(loop)  # type: ignore[assignment]
    for most, launched in ((before - 1, before), (before + 2, before + 2)):
        loop.catch_up(most)
        assert loop.launched == launched == int(loop._decoder.exchange.epoch) - 1
    loop._graph = None
    assert _run(loop, setting.prefill(), GREEDY) == expected


@pytest.mark.parametrize("left", [0, 3])
def test_steps_go_on_beyond_the_last_epoch_of_32_bits(setting: Setting, left: int) -> None:
    expected = setting.tokens(GREEDY)
    loop = setting.loop()
    loop.prepare(GREEDY)
    loop._decoder.exchange.epoch.fill_(2**31 - 1 - left)
    for _ in range(2):
        assert _run(loop, setting.prefill(), GREEDY) == expected


def test_a_step_that_never_ends_is_an_error(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_step, "STEP_S", 0.2)
    loop = setting.loop()
    loop.prepare(GREEDY)
    loop.begin([1, 2], [9, 9])
    loop.step(remaining=3)  # launches two
    with mock.patch.object(loop, "_issue"):
        loop.step(remaining=2)
        with pytest.raises(RankFailureError, match=r"^rank 0: step 3 has not ended in 0.2 s"):
            loop.step(remaining=1)


def test_half_a_step_leaves_nothing_behind(setting: Setting) -> None:
    """Its first kernels have counted logits that its last one, which did not come, would have taken away."""
    expected = setting.tokens(SAMPLED)
    loop = setting.loop()
    loop.prepare(SAMPLED)
    launch = sampler.jit_launch

    def interrupted(kernel: object, grid: tuple[int, ...]) -> object:
        if kernel is sampler._token_kernel:
            raise KeyboardInterrupt
        return launch(kernel, grid)

    with mock.patch.object(sampler, "jit_launch", interrupted), pytest.raises(KeyboardInterrupt):
        _run(loop, [1, 2], SAMPLED)
    for _ in range(2):
        loop.prepare(SAMPLED)
        assert _run(loop, setting.prefill(), SAMPLED) == expected


def test_steps_that_are_launched_are_counted_from_the_beginning_of_a_generation(setting: Setting) -> None:
    loop, launched = setting.loop(), []
    loop.prepare(GREEDY)

    def operation(name: str, layer: int) -> AbstractContextManager[None]:
        if name == "embed":
            launched.append(loop.next_step)
        return nullcontext()

    with mock.patch.object(loop, "_operation", operation):
        for _ in range(2):
            loop.begin([1, 2], [9, 9])
            for step in (1, 2, 3):
                loop.step(remaining=4 - step)
    assert launched == [1, 2, 3] * 2


def test_a_generation_begins_with_the_first_roles(setting: Setting) -> None:
    """After a fault, two groups may disagree on who sends."""
    loop = setting.loop()
    common = [getattr(loop._decoder, field.name) for field in fields(Decoder)]
    for group, ranks in enumerate(pairs(torch.device("cpu"), PairShape(2, 2, 1, 64, 4, 2, 16), 6)):
        pair = ranks[0]
        first = pair.priority.tolist(), pair.gates.tolist()
        assert first[0] == [2 - 2 * group, 2 * group]
        pair.priority.copy_(torch.tensor([1, 2]))
        pair.gates.copy_(torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]]))
        decoder = PairedDecoder(*common, mock.Mock(), pair, mock.Mock(), stops_early=True)
        with mock.patch.object(loop, "_decoder", decoder):
            loop.begin([1, 2], [9, 9])
        assert (pair.priority.tolist(), pair.gates.tolist()) == first


def test_steps_stop_at_the_end_of_the_cache(setting: Setting) -> None:
    loop = setting.loop()
    loop.prepare(GREEDY)
    assert isinstance(setting.cache, KVCache)
    before = setting.cache.k[:, :, :, : CAPACITY - 1].clone()
    loop.begin([1, 2], [CAPACITY, CAPACITY])
    for _ in range(3):
        assert loop.step(remaining=1).fault == 0
    assert torch.equal(setting.cache.k[:, :, :, : CAPACITY - 1], before)


def test_bad_weights_name_operation_and_rank(small_folder: Path) -> None:
    setting = Setting(small_folder)
    loop = setting.loop()
    loop.prepare(GREEDY)
    setting.model.weights.layers[1].down[17, 5] = torch.nan
    loop.begin(setting.prefill(), [len(ids) + 1 for ids in PROMPTS])
    assert split_fault(loop.step(remaining=1).fault) == (BAD_NUMBERS, 2 * 1 + 1, 0)
    setting.model.weights.layers[1].down[17, 5] = 0.0
    # The next generation begins without it.
    assert _run(loop, setting.prefill(), GREEDY)


def test_a_preparation_that_was_broken_off_is_done_again(setting: Setting) -> None:
    """As by Ctrl-C, or for want of memory: also if the same step had been prepared before."""
    loop = setting.loop()
    loop.prepare(SAMPLED)
    with (
        mock.patch.object(loop, "_issue", mock.Mock(side_effect=torch.OutOfMemoryError)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        loop.prepare(GREEDY)
    for sampling in (SAMPLED, GREEDY):
        with mock.patch.object(loop, "_capture", mock.Mock(wraps=loop._capture)) as capture:
            loop.prepare(sampling)
        assert capture.call_count == 1
        assert _run(loop, setting.prefill(), sampling) == setting.tokens(sampling)


def test_requests_of_a_batch_before_are_not_remembered(setting: Setting) -> None:
    """A pair's verdicts ask who is still generating; of the next generation, all are."""
    loop = setting.loop()
    loop.prepare(GREEDY)
    pairing = mock.Mock(live=torch.ones(2, dtype=torch.int32), hits=torch.zeros(2, 2, dtype=torch.int32))
    with (
        mock.patch.object(loop, "_speculation", pairing),
        mock.patch.object(loop, "_issue"),
        mock.patch.object(loop, "_wait_for_stamp"),
    ):
        found = []
        for live in ([True, True], [True, False], [True, False], None, [False, True]):
            loop.step(3, live)
            found.append(pairing.live.tolist())
    assert found == [[1, 1], [1, 0], [1, 0], [1, 1], [0, 1]]


def test_a_preparation_that_failed_is_tried_again(small_folder: Path) -> None:
    setting = Setting(small_folder)
    loop = setting.loop()
    setting.model.weights.layers[0].o[3, 2] = torch.nan
    for _ in range(2):
        assert split_fault(loop.prepare(GREEDY)) == (BAD_NUMBERS, 0, 0)
    setting.model.weights.layers[0].o[3, 2] = 0.0
    assert loop.prepare(GREEDY) == 0
    assert _run(loop, setting.prefill(), GREEDY)


def test_logits_have_the_models_epsilon(small_folder: Path, tmp_path: Path) -> None:
    """One so large that it shows, in every norm."""
    folder = shutil.copytree(small_folder, tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}), encoding="utf-8")
    setting = Setting(folder)
    loop = setting.loop()
    loop.prepare(GREEDY)
    first, lengths = setting.prefill(), [len(ids) + 1 for ids in PROMPTS]
    loop.begin(first, lengths)
    loop.step(remaining=1)
    found = loop._decoder.buffers.logits.clone()
    program = EagerStep(setting.model, setting.cache, setting.transport, "off", SpeculationConfig(), no_hook)
    live = torch.ones(2, dtype=torch.bool)
    state = DecodeState(torch.tensor(first), torch.tensor(lengths, dtype=torch.int32), live)
    torch.testing.assert_close(found, program.run(state).logits, rtol=1e-3, atol=1e-3)


def test_another_threshold_needs_another_captured_step(setting: Setting) -> None:
    """Launches take it as it is."""
    loop, pairing = setting.loop(), mock.Mock()
    loop.prepare(GREEDY)
    with mock.patch.object(loop, "_speculation", pairing):
        loop.speculate(0.2)
    assert (pairing.threshold, pairing.forced) == (0.2, None)
    with mock.patch.object(loop, "_capture", mock.Mock(wraps=loop._capture)) as capture:
        for _ in range(2):
            loop.prepare(GREEDY)
    assert capture.call_count == 1


@pytest.mark.parametrize(("live", "launched"), [([True, True], [1, 2, 3]), (None, [2, 3, 3])])
def test_steps_wait_for_the_host_where_verdicts_ask_who_is_live(
    live: list[bool] | None, launched: list[int], setting: Setting
) -> None:
    """Of two requests of a pair, one may end with any token; else the next step is under way meanwhile."""
    loop = setting.loop()
    loop.prepare(GREEDY)
    pairing = mock.Mock(live=torch.ones(2, dtype=torch.int32))
    with (
        mock.patch.object(loop, "_speculation", pairing),
        mock.patch.object(loop, "_issue") as issue,
        mock.patch.object(loop, "_wait_for_stamp"),
    ):
        found = []
        for remaining in (3, 2, 1):
            loop.step(remaining, live)
            found.append(issue.call_count)
    assert found == launched


def test_a_step_takes_what_the_devices_clock_says(setting: Setting) -> None:
    """The host times the first one, because no step before it has left a time."""
    step = setting.loop()
    step.prepare(GREEDY)
    clocks_ns = iter([7 * 10**18 + 1000 * us for us in (0, 250, 1000)])

    def set_clock(index: int) -> None:
        step._ring_view[index, 0] = next(clocks_ns)

    step.begin([1, 2], [9, 9])
    with mock.patch.object(step, "_wait_for_stamp", set_clock):
        first, *others = [step.step(remaining=remaining).step_us for remaining in (3, 2, 1)]
    assert 0 < first < 60e6
    assert others == [250.0, 750.0]
