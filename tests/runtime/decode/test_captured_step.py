"""The captured step, whose kernels run in the interpreter here, gives the tokens of the eager step."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from jobs import default_interrupts
from paired_ranks import pairs
from tiers import fast

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.errors import RankFailureError
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, split_fault
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.codec_reference import kv_dequantize
from alspec.kernels.sampling import sampler
from alspec.kernels.sampling.adjustment import tokens_seen
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.runtime.decode import step_queue
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.decode_step import DecodeStep, StepRecord
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
# Decoding completes a block of each prompt and reads it as a record from the next step on.
LONG_PROMPTS = [torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (61, 126)]
GREEDY = SamplingConfig(max_new_tokens=4)
SAMPLED = SamplingConfig(max_new_tokens=4, temperature=0.9, top_k=50, top_p=0.95, seed=5)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": -1.5, "presence_penalty": -2.0}  # favour what was seen


class Setting:
    """A model with a filled cache. `new_step` and `tokens` continue the same prompts."""

    def __init__(
        self, folder: Path, codec: str = "bf16", prompts: list[list[int]] = PROMPTS, num_layers: int = 3
    ) -> None:
        self.prompts = prompts
        config = LlamaConfig.from_folder(folder)
        weights = load_weights(Checkpoint.open(folder, config), config, Placement().shard, torch.float32, CPU)
        config = config.model_copy(update={"num_layers": num_layers})
        weights = replace(weights, layers=weights.layers[:num_layers])
        self.transport = Transport(Placement(), CPU, "gloo", None)
        self.model = Llama(config, weights, self.transport)
        capacity = max(CAPACITY, *(len(ids) + 10 for ids in prompts))
        self.cache = new_cache(codec, config, 1, len(prompts), capacity, torch.float32, CPU)

    def prefill(self) -> list[int]:
        """Fill the cache. Returns the first new token of each request."""
        logits = [
            prefill(self.model, self.cache, self.transport, request, ids, no_hook)[0]
            for request, ids in enumerate(self.prompts)
        ]
        return torch.cat(logits).argmax(1).tolist()

    def new_step(self) -> CapturedStep:
        return build_captured_step(self.model, self.cache, self.transport, None, False, no_hook)

    def tokens(self, sampling: SamplingConfig) -> list[list[int]]:
        """The reference: the tokens of each step, by the eager step and `sample`."""
        token_ids = self.prefill()
        eager = EagerStep(self.model, self.cache, self.transport, "off", SpeculationConfig(), no_hook)
        steps = []
        for step in range(1, sampling.max_new_tokens):
            seq_lens = torch.tensor([len(ids) + step for ids in self.prompts], dtype=torch.int32)
            state = DecodeState(torch.tensor(token_ids), seq_lens, torch.ones(len(self.prompts), dtype=torch.bool))
            request = torch.arange(len(self.prompts))
            token_ids = sample(eager.run(state).logits, sampling, request, seq_lens.long()).tolist()
            steps.append(token_ids)
        return steps


@pytest.fixture(scope="module")
def setting(small_folder: Path) -> Setting:
    return Setting(small_folder, num_layers=2)


def _run(
    captured: CapturedStep, first: list[int], sampling: SamplingConfig, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    captured.begin(first, [len(ids) + 1 for ids in prompts])
    records = [captured.step(sampling.max_new_tokens - step) for step in range(1, sampling.max_new_tokens)]
    assert [record.fault for record in records] == [0] * len(records)
    return [_tokens(record) for record in records]


def _tokens(record: StepRecord) -> list[int]:
    return [token for (token,) in record.token_ids]


def test_greedy_and_sampled_tokens_are_those_of_the_eager_step(small_folder: Path) -> None:
    _check_tokens(Setting(small_folder), (GREEDY, SAMPLED, SAMPLED.model_copy(update={"top_k": 0})))


@pytest.mark.full
def test_tokens_are_those_of_the_eager_step_for_all_options(small_folder: Path) -> None:
    others = ({"seed": 4}, {"temperature": 2.0, "top_p": 0.99}, {"top_k": 0}, {"top_p": 1.0})
    _check_tokens(
        Setting(small_folder), (GREEDY, SAMPLED, *(SAMPLED.model_copy(update=other) for other in others), SAMPLED)
    )


def _check_tokens(setting: Setting, samplings: tuple[SamplingConfig, ...]) -> None:
    """One captured step serves all `samplings`, and the first three give different tokens."""
    captured = setting.new_step()
    found = []
    for sampling in samplings:
        expected = setting.tokens(sampling)
        captured.prepare(sampling)
        found.append(_run(captured, setting.prefill(), sampling))
        assert found[-1] == expected
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_a_capture_leaves_what_is_kept(small_folder: Path, turbo_folder: Path, codec: str) -> None:
    """`prepare` writes behind the kept tokens alone, and within the cache."""
    setting = Setting(small_folder if codec == "bf16" else turbo_folder, codec, LONG_PROMPTS, num_layers=1)
    setting.prefill()
    cache, kept = setting.cache, [0, 64]
    if isinstance(cache, KVCache):
        kept = [61, cache.max_context - 2]

    def held() -> list[torch.Tensor]:
        if isinstance(cache, KVCache):
            return [
                kv[:, request, :, :num_tokens] for kv in (cache.k, cache.v) for request, num_tokens in enumerate(kept)
            ]
        return [cache.layers.words, cache.layers.scales, cache.layers.tail_scale]

    before = [each.clone() for each in held()]
    assert setting.new_step().prepare(GREEDY, kept) == 0
    assert all(torch.equal(found, expected) for found, expected in zip(held(), before, strict=True))


def _records(step: DecodeStep, setting: Setting, sampling: SamplingConfig) -> list[StepRecord]:
    """Steps of a whole generation, which begins with the counts of the prompts."""
    step.prepare(sampling)
    seen = tokens_seen(setting.prompts, setting.model.config.vocab_size, CPU)
    step.begin(setting.prefill(), [len(ids) + 1 for ids in setting.prompts], seen)
    return [step.step(sampling.max_new_tokens - index) for index in range(1, sampling.max_new_tokens)]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.full),
        pytest.param(SAMPLED.model_copy(update={"min_p": 0.02}), id="sampled"),
    ],
)
def test_penalties_biases_and_log_probabilities_are_those_of_the_eager_step(
    setting: Setting, how: SamplingConfig
) -> None:
    """One captured step serves several values, and begins each generation with the prompts' tokens alone."""
    captured = setting.new_step()
    eager = EagerStep(setting.model, setting.cache, setting.transport, "off", SpeculationConfig(), no_hook)
    plain = [_tokens(record) for record in _records(eager, setting, how)]
    bias = {"logit_bias": {plain[0][0]: -30.0, 17: 1.5}}
    for update in (PENALTIES, PENALTIES | {"repetition_penalty": 0.6}), (bias,), (PENALTIES | bias | {"logprobs": 3},):
        found = []
        for values in update:
            sampling = how.model_copy(update=values)
            records, expected = _records(captured, setting, sampling), _records(eager, setting, sampling)
            found.append([_tokens(record) for record in records])
            assert found[-1] == [_tokens(record) for record in expected]
            assert found[-1] != plain
        assert len(found) == 1 or found[0] != found[1]
    for record, reference in zip(records, expected, strict=True):
        assert record.logprobs is not None
        assert reference.logprobs is not None
        assert record.logprobs.token_ids.tolist() == reference.logprobs.token_ids.tolist()
        assert record.logprobs.token_ids[:, 0].tolist() == _tokens(record)
        torch.testing.assert_close(record.logprobs.values, reference.logprobs.values, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_only_other_cuts_need_another_capture(setting: Setting) -> None:
    captured = setting.new_step()
    with mock.patch.object(captured, "_capture", mock.Mock(wraps=captured._capture)) as capture:
        for update, captures in (
            ({}, 1), ({"seed": 4}, 1), ({"temperature": 2.0, "top_k": 9}, 1), ({"top_k": 0}, 2), ({"top_p": 1.0}, 3),
            ({"temperature": 0.0}, 4), ({"temperature": 0.0, "seed": 9}, 4), ({"min_p": 0.1}, 5), ({"min_p": 0.2}, 5),
            ({"presence_penalty": 1.0}, 6), ({"frequency_penalty": 1.0, "repetition_penalty": 2.0}, 6),
            ({"logit_bias": {5: 1.0}}, 7), ({"logit_bias": {9: -3.0}}, 7), ({"logprobs": 0}, 8), ({"logprobs": 20}, 8),
        ):  # fmt: skip
            captured.prepare(SAMPLED.model_copy(update=update))
            assert capture.call_count == captures


@pytest.mark.parametrize("codec", fast(["turbo4", "turbo-mixed"], ["turbo4"]))
def test_a_quantised_cache_completes_blocks_as_in_the_eager_step(turbo_folder: Path, codec: str) -> None:
    """The tokens are equal. The caches are close to each other, since x is."""
    sampling = SamplingConfig(max_new_tokens=6)
    setting = Setting(turbo_folder, codec, LONG_PROMPTS)
    expected = setting.tokens(sampling)
    assert isinstance(setting.cache, QuantisedCache)
    lengths = torch.tensor([len(ids) + sampling.max_new_tokens for ids in LONG_PROMPTS])
    layers = range(setting.cache.num_layers)
    kept = [kv_dequantize(setting.cache.layer(layer), lengths) for layer in layers]
    # The captured step must not read what the reference wrote.
    setting.cache.layers.words.fill_(-1)
    setting.cache.layers.scales.fill_(torch.nan)
    captured = setting.new_step()
    captured.prepare(sampling)
    assert _run(captured, setting.prefill(), sampling, LONG_PROMPTS) == expected
    for layer in layers:
        for found, reference in zip(kv_dequantize(setting.cache.layer(layer), lengths), kept[layer], strict=True):
            assert (found - reference).norm() < 0.01 * reference.norm()


def test_an_abandoned_generation_leaves_nothing_behind(setting: Setting) -> None:
    expected = setting.tokens(GREEDY)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    captured.begin([1, 2], [9, 9])
    captured.step(remaining=5)
    assert _run(captured, setting.prefill(), GREEDY) == expected


class Graph:
    """A stand-in for a CUDA graph. Ctrl-C arrives while the third step from now is launched."""

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = captured
        self._left = 3

    def replay(self) -> None:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        self._captured._launch_kernels(self._captured._main, no_hook)

    def reset(self) -> None:
        """There is nothing to release."""


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.full), SAMPLED], ids=["greedy", "sampled"])
def test_an_interrupted_launch_leaves_nothing_behind(setting: Setting, sampling: SamplingConfig) -> None:
    """The step runs and is counted, so the next generation does not take its token for one of its own."""
    expected = setting.tokens(sampling)
    captured = setting.new_step()
    captured.prepare(sampling)
    before = captured.launched
    captured._main.graph = Graph(captured)  # type: ignore[assignment]
    with default_interrupts(), pytest.raises(KeyboardInterrupt):
        _run(captured, [1, 2], sampling)
    assert captured.launched == before + 3 == int(captured._decoder.exchange.epoch) - 1
    for _ in range(2):
        captured.prepare(sampling)
        assert _run(captured, setting.prefill(), sampling) == expected


def test_a_rank_catches_up_with_the_launches_of_other_ranks(setting: Setting) -> None:
    """Only captured steps. Steps that are launched operation by operation need no catching up."""
    expected = setting.tokens(GREEDY)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    captured.begin([1, 2], [9, 9])
    captured.step(remaining=5)
    before = captured.launched
    captured.launch_missing(before + 2, "mm")
    assert captured.launched == before
    captured._main.graph = Graph(captured)  # type: ignore[assignment]
    for most, launched in ((before - 1, before), (before + 2, before + 2)):
        captured.launch_missing(most, "mm")
        assert captured.launched == launched == int(captured._decoder.exchange.epoch) - 1
    captured._main.graph = None
    assert _run(captured, setting.prefill(), GREEDY) == expected


@pytest.mark.parametrize("left", fast([0, 3], [3]))
def test_steps_go_on_beyond_the_last_32_bit_epoch(setting: Setting, left: int) -> None:
    expected = setting.tokens(GREEDY)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    captured._decoder.exchange.epoch.fill_(2**31 - 1 - left)
    for _ in range(2):
        assert _run(captured, setting.prefill(), GREEDY) == expected


def test_a_step_that_never_ends_is_an_error(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "STEP_S", 0.2)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    captured.begin([1, 2], [9, 9])
    captured.step(remaining=3)  # launches two
    with mock.patch.object(captured, "_launch_kernels"):
        captured.step(remaining=2)
        with pytest.raises(RankFailureError, match=r"^rank 0: step 3 has not ended in 0.2 s"):
            captured.step(remaining=1)


def test_half_a_step_leaves_nothing_behind(setting: Setting) -> None:
    """Its first kernels have counted logits, and the kernel that would have reset the counts did not run."""
    expected = setting.tokens(SAMPLED)
    captured = setting.new_step()
    captured.prepare(SAMPLED)
    launch = sampler.jit_launch

    def interrupted(kernel: object, grid: tuple[int, ...]) -> object:
        if kernel is sampler._score_kernel:
            raise KeyboardInterrupt
        return launch(kernel, grid)

    with mock.patch.object(sampler, "jit_launch", interrupted), pytest.raises(KeyboardInterrupt):
        _run(captured, [1, 2], SAMPLED)
    for _ in range(2):
        captured.prepare(SAMPLED)
        assert _run(captured, setting.prefill(), SAMPLED) == expected


def test_launched_steps_are_counted_from_the_beginning_of_a_generation(setting: Setting) -> None:
    captured, launched = setting.new_step(), []
    captured.prepare(GREEDY)

    def operation(name: str, layer: int) -> AbstractContextManager[None]:
        if name == "embed":
            launched.append(captured.next_step)
        return nullcontext()

    with mock.patch.object(captured, "_operation", operation):
        for _ in range(2):
            captured.begin([1, 2], [9, 9])
            for step in (1, 2, 3):
                captured.step(remaining=4 - step)
    assert launched == [1, 2, 3] * 2


def test_a_generation_begins_with_the_initial_roles(setting: Setting) -> None:
    """After a fault, two groups may disagree about which of them sends."""
    captured = setting.new_step()
    common = [getattr(captured._decoder, field.name) for field in fields(Decoder) if not field.kw_only]
    for group, ranks in enumerate(pairs(torch.device("cpu"), PairShape(2, 2, 1, 64, 4, 2, 16), 6)):
        pair = ranks[0]
        first = pair.priority.tolist(), pair.gates.tolist()
        assert first[0] == [2 - 2 * group, 2 * group]
        pair.priority.copy_(torch.tensor([1, 2]))
        pair.gates.copy_(torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]]))
        decoder = PairedDecoder(*common, mock.Mock(recall=None), pair, mock.Mock(), stops_early=True)
        with mock.patch.object(captured, "_decoder", decoder):
            captured.begin([1, 2], [9, 9])
        assert (pair.priority.tolist(), pair.gates.tolist()) == first


def test_steps_stop_at_the_end_of_the_cache(setting: Setting) -> None:
    captured = setting.new_step()
    captured.prepare(GREEDY)
    assert isinstance(setting.cache, KVCache)
    before = setting.cache.k[:, :, :, : CAPACITY - 1].clone()
    captured.begin([1, 2], [CAPACITY, CAPACITY])
    for _ in range(3):
        assert captured.step(remaining=1).fault == 0
    assert torch.equal(setting.cache.k[:, :, :, : CAPACITY - 1], before)


def test_bad_weights_name_operation_and_rank(small_folder: Path) -> None:
    setting = Setting(small_folder, num_layers=2)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    setting.model.weights.layers[1].down[17, 5] = torch.nan
    captured.begin(setting.prefill(), [len(ids) + 1 for ids in PROMPTS])
    assert split_fault(captured.step(remaining=1).fault) == (BAD_NUMBERS, 2 * 1 + 1, 0)
    setting.model.weights.layers[1].down[17, 5] = 0.0
    # The next generation starts without the fault.
    assert _run(captured, setting.prefill(), GREEDY)


def test_an_interrupted_preparation_is_done_again(setting: Setting) -> None:
    """Ctrl-C or lack of memory interrupts it. A step that was prepared before is prepared again too."""
    captured = setting.new_step()
    captured.prepare(SAMPLED)
    with (
        mock.patch.object(captured, "_launch_kernels", mock.Mock(side_effect=torch.OutOfMemoryError)),
        pytest.raises(torch.OutOfMemoryError),
    ):
        captured.prepare(GREEDY)
    for sampling in (SAMPLED, GREEDY):
        with mock.patch.object(captured, "_capture", mock.Mock(wraps=captured._capture)) as capture:
            captured.prepare(sampling)
        assert capture.call_count == 1
        assert _run(captured, setting.prefill(), sampling) == setting.tokens(sampling)


def test_ended_requests_are_forgotten_in_the_next_generation(setting: Setting) -> None:
    """A pair's verdicts depend on the requests that still generate. In a new generation all requests do."""
    captured = setting.new_step()
    captured.prepare(GREEDY)
    speculation = mock.Mock(live=torch.ones(2, dtype=torch.int32), hits=torch.zeros(2, 2, dtype=torch.int32))
    with (
        mock.patch.object(captured, "_speculation", speculation),
        mock.patch.object(captured, "_launch_kernels"),
        mock.patch.object(captured._queue.ring, "read", return_value=[0, 0, 1, 1]),
    ):
        found = []
        for live in ([True, True], [True, False], [True, False], None, [False, True]):
            captured.step(3, live)
            found.append(speculation.live.tolist())
    assert found == [[1, 1], [1, 0], [1, 0], [1, 1], [0, 1]]


def test_a_failed_preparation_is_tried_again(small_folder: Path) -> None:
    setting = Setting(small_folder, num_layers=2)
    captured = setting.new_step()
    setting.model.weights.layers[0].o[3, 2] = torch.nan
    for _ in range(2):
        assert split_fault(captured.prepare(GREEDY)) == (BAD_NUMBERS, 0, 0)
    setting.model.weights.layers[0].o[3, 2] = 0.0
    assert captured.prepare(GREEDY) == 0
    assert _run(captured, setting.prefill(), GREEDY)


def test_every_norm_uses_the_models_epsilon(small_folder: Path, tmp_path: Path) -> None:
    """The epsilon is so large that it changes the logits."""
    folder = shutil.copytree(small_folder, tmp_path / "other")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 0.5}), encoding="utf-8")
    setting = Setting(folder)
    captured = setting.new_step()
    captured.prepare(GREEDY)
    first, lengths = setting.prefill(), [len(ids) + 1 for ids in PROMPTS]
    captured.begin(first, lengths)
    captured.step(remaining=1)
    found = captured._decoder.buffers.logits.clone()
    eager = EagerStep(setting.model, setting.cache, setting.transport, "off", SpeculationConfig(), no_hook)
    live = torch.ones(2, dtype=torch.bool)
    state = DecodeState(torch.tensor(first), torch.tensor(lengths, dtype=torch.int32), live)
    torch.testing.assert_close(found, eager.run(state).logits, rtol=1e-3, atol=1e-3)


def test_another_threshold_needs_another_capture(setting: Setting) -> None:
    """A captured launch contains the threshold."""
    captured, speculation = setting.new_step(), mock.Mock()
    captured.prepare(GREEDY)
    with mock.patch.object(captured, "_speculation", speculation):
        captured.set_verdict_rule(0.2)
    assert (speculation.threshold, speculation.forced) == (0.2, None)
    with mock.patch.object(captured, "_capture", mock.Mock(wraps=captured._capture)) as capture:
        for _ in range(2):
            captured.prepare(GREEDY)
    assert capture.call_count == 1


@pytest.mark.parametrize(("live", "launched"), [([True, True], [1, 2, 3]), (None, [2, 3, 3])])
def test_a_step_waits_for_the_host_if_verdicts_depend_on_live_requests(
    live: list[bool] | None, launched: list[int], setting: Setting
) -> None:
    """One of two requests may end with any token. Otherwise the next step is launched before."""
    captured = setting.new_step()
    captured.prepare(GREEDY)
    speculation = mock.Mock(live=torch.ones(2, dtype=torch.int32))
    with (
        mock.patch.object(captured, "_speculation", speculation),
        mock.patch.object(captured, "_launch_kernels") as issue,
        mock.patch.object(captured._queue.ring, "read", return_value=[0, 0, 1, 1]),
    ):
        found = []
        for remaining in (3, 2, 1):
            captured.step(remaining, live)
            found.append(issue.call_count)
    assert found == launched


def test_the_devices_clock_measures_a_step(setting: Setting) -> None:
    """The host measures the first step, because no step before it has left a time."""
    captured = setting.new_step()
    captured.prepare(GREEDY)
    clocks_ns = iter([7 * 10**18 + 1000 * us for us in (0, 250, 1000)])

    def read(*_: object) -> list[int]:
        return [next(clocks_ns), 0, 1, 1]

    captured.begin([1, 2], [9, 9])
    with mock.patch.object(captured._queue.ring, "read", read):
        first, *others = [captured.step(remaining=remaining).step_us for remaining in (3, 2, 1)]
    assert 0 < first < 60e6
    assert others == [250.0, 750.0]
