"""Decoding over a quantised cache: every mode gives the same tokens and verdicts on 1, 2 and 4 processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from step_worker import run_case
from torch import Tensor

from alspec.kernels.kv_codec.flashq.quantize import select_bits
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama_config import LlamaConfig
from alspec.models.tokenizer.tokenizer import Tokenizer
from alspec.runtime.engine.engine import Engine

pytestmark = pytest.mark.slow

# The first request completes a block while it decodes. The predictor leaves tokens of both out.
LENGTHS, NEW_TOKENS = (508, 397), 6
TEXT = (
    "Once upon a time there was a little girl who lived near a big forest with her mother. One day she found a small "
    "red box under a tree. She opened it and saw a bird. The bird said that it was lost and wanted to go home. "
)

Case = dict[str, Any]
Runs = dict[str, Case]  # by mode and lambda


@dataclass(frozen=True)
class Setting:
    """A cache, a lambda far from all verdicts, and the modes of jobs of several ranks.

    The sums of several ranks are rounded differently, which changes codes and so verdicts. With 2-bit heads an error
    relative to the output changes by up to 20 %: for `turbo-mixed` none lies within 14 % of this lambda, for the other
    codecs none within 3 %.
    """

    codec: str
    softmax: str
    threshold: float
    modes: dict[int, tuple[str, ...]]  # by the number of processes
    fast_modes: dict[int, tuple[str, ...]]  # the same for the fast tier
    tp_size: int = 1  # ranks of a group where it matters: each rank selects 2-bit heads among its own
    protect: int = 0

    def thresholds(self, mode: str) -> tuple[float, ...]:
        return (0.0,) if mode == "off" else (0.0, self.threshold)

    def cases(self, thresholds: tuple[float, ...]) -> list[Case]:
        """A batch of both prompts at each lambda."""
        tokenizer = Tokenizer.from_folder(DEMO_CHECKPOINT, LlamaConfig.from_folder(DEMO_CHECKPOINT))
        ids = tokenizer.encode(TEXT * 12)
        prompts = [ids[:length] for length in LENGTHS]
        assert tuple(map(len, prompts)) == LENGTHS
        case = {"prompts": prompts, "max_new_tokens": [NEW_TOKENS] * 2}
        return [case | {"name": f"at {threshold}", "threshold": threshold} for threshold in thresholds]


ALL_MODES = {2: ("off", "simulated", "paired")}
PAIRED = {2: ("paired",)}
MIXED = Setting(
    "turbo-mixed", "exact", 0.027, {2: ("off", "simulated"), 4: ("paired",)}, {2: ("simulated",)}, tp_size=2
)
SETTINGS = [
    pytest.param(Setting("turbo4", "exact", 0.02, ALL_MODES, PAIRED), marks=pytest.mark.full),
    pytest.param(Setting("turbo4", "sas", 0.02, ALL_MODES, PAIRED), marks=pytest.mark.full),
    pytest.param(Setting("turbo2", "exact", 0.03, ALL_MODES, PAIRED), marks=pytest.mark.full),
    pytest.param(MIXED, marks=pytest.mark.full),
    pytest.param(Setting("turboquant3", "exact", 0.03, ALL_MODES, PAIRED, protect=1), marks=pytest.mark.full),
    Setting("hybrid-k4v2", "exact", 0.03, ALL_MODES, PAIRED),
]


@dataclass
class Results:
    setting: Setting
    modes: dict[int, tuple[str, ...]]
    expected: Runs  # on one process
    found: dict[int, list[Runs]]  # on each rank, by the number of processes


def run_alone(setting: Setting, tp_size: int, modes: tuple[str, ...] = ("off", "simulated")) -> Runs:
    """Run in this process, with the bits that heads have on the ranks of a group of `tp_size`."""

    def select_on_ranks(priority: Tensor, num_low: int) -> Tensor:
        return torch.cat([select_bits(part, num_low // tp_size) for part in priority.chunk(tp_size)])

    runs = {}
    with mock.patch("alspec.runtime.cache.quantised_cache.select_bits", select_on_ranks):
        for mode in modes:
            options = {
                "kv_cache": setting.codec,
                "kv_protect": setting.protect,
                "softmax": setting.softmax,
                "speculation": {"mode": mode, "predictor": "window"},
            }
            engine = Engine.from_pretrained(dtype="fp32", transport="gloo", **options)
            runs |= {
                f"{mode} {case['name']}": run_case(engine, case) for case in setting.cases(setting.thresholds(mode))
            }
            engine.close()
    return runs


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: f"{setting.codec}-{setting.softmax}")
def results(run_ranks: Any, is_full_tier: bool, request: pytest.FixtureRequest) -> Results:
    setting = request.param
    modes = setting.modes if is_full_tier else setting.fast_modes

    def thresholds(mode: str) -> tuple[float, ...]:
        return setting.thresholds(mode) if is_full_tier else (setting.threshold,)

    found = {
        world_size: run_ranks(
            world_size,
            {mode: setting.cases(thresholds(mode)) for mode in modes_of_size},
            model=DEMO_CHECKPOINT,
            kv_cache=setting.codec,
            kv_protect=setting.protect,
            softmax=setting.softmax,
        )
        for world_size, modes_of_size in modes.items()
    }
    return Results(setting, modes, run_alone(setting, setting.tp_size), found)


def test_ranks_agree(results: Results) -> None:
    for first, *others in results.found.values():
        assert others
        for name, run in first.items():
            for other in others:
                assert all(run[key] == other[name][key] for key in ("tokens", "hits")), name


def test_every_mode_gives_the_same_tokens_without_a_hit(results: Results, is_full_tier: bool) -> None:
    expected = results.expected["off at 0.0"]["tokens"]
    assert [len(tokens) for tokens in expected] == [NEW_TOKENS] * 2
    runs = {(1, name): run for name, run in results.expected.items()}
    runs |= {(size, name): run for size, ranks in results.found.items() for name, run in ranks[0].items()}
    at_zero = {key: run for key, run in runs.items() if key[1].endswith(" at 0.0")}
    assert len(at_zero) == 2 + (sum(map(len, results.modes.values())) if is_full_tier else 0)
    for key, run in at_zero.items():
        assert run["tokens"] == expected, key
        assert not any(hit for step in run["hits"] for layer in step for hit in layer), key


def test_every_mode_gives_the_tokens_and_verdicts_of_one_process(results: Results) -> None:
    """Some layers accept. The caches of groups hold the same bits as the cache of one process."""
    threshold = results.setting.threshold
    expected = results.expected[f"simulated at {threshold}"]
    hits = [hit for step in expected["hits"] for layer in step for hit in layer]
    assert 0 < sum(hits) < len(hits)
    for world_size, modes in results.modes.items():
        for mode in set(modes) - {"off"}:
            run = results.found[world_size][0][f"{mode} at {threshold}"]
            assert run["tokens"] == expected["tokens"], (world_size, mode)
            assert run["hits"] == expected["hits"], (world_size, mode)


@pytest.mark.full
def test_two_ranks_select_other_2_bit_heads_than_one() -> None:
    """If not, equal results would not show that each rank selects among its own heads."""
    one, two = (run_alone(MIXED, tp_size, ("simulated",)) for tp_size in (1, 2))
    name = f"simulated at {MIXED.threshold}"
    assert one[name]["hits"] != two[name]["hits"]
