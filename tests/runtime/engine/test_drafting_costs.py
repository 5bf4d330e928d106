"""The predicted cost of a round, by which drafts pause, is near the measured rows in docs/results."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from paths import ROOT

from alspec.config import EngineConfig
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.engine.choices import Choices
from alspec.runtime.engine.drafting import Drafting, draft_config_with_weights, draft_copy_config
from alspec.runtime.engine.weight_settings import config_with_weights
from alspec.runtime.profiling.predicted_costs import rows_us

TOLERANCE = 0.07
ROWS = [json.loads(line) for line in (ROOT / "docs" / "results" / "decode_rounds.jsonl").read_text().splitlines()]
SMOLLM2 = LlamaConfig.from_shape("llama-3.2-1b").model_copy(
    update={
        "num_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_qo_heads": 9, "num_kv_heads": 3,
        "head_dim": 64, "vocab_size": 49152, "max_positions": 8192,
    }
)  # fmt: skip
OPTIONS = {"--weights": "weights", "--draft-weights": "draft_weights"}


def setting_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a round and the plain step beside it have in common."""
    case = row["case"]
    return case["shape"], case["world"], case["batch"], option(row, "--weights"), case["kv_cache"], case["context"]


def option(row: dict[str, Any], flag: str) -> str:
    """The value of a flag in the command of a row, or `auto`."""
    words = row["command"].split()
    return words[words.index(flag) + 1] if flag in words else "auto"


def drafts_nearly_always(row: dict[str, Any]) -> bool:
    """Whether the median step of a row is a round: where drafts pause, or find nothing, plain steps are among them."""
    return row["case"]["acceptance"] != "real" or sum(row["accepted"]) > 0.75 * int(option(row, "--steps"))


PLAIN = {setting_of(row): row["us"]["p50"] for row in ROWS if "draft" not in row["case"]}
ROUNDS = {
    (row["case"]["draft"], row["case"]["draft_tokens"], *setting_of(row), option(row, "--draft-weights")): row
    for row in ROWS
    if "draft" in row["case"] and drafts_nearly_always(row)
}  # of repeated rows the last counts


def test_rows_of_real_drafts_are_among_them() -> None:
    assert sum(row["case"]["acceptance"] == "real" for row in ROUNDS.values()) >= 2


@pytest.mark.parametrize("row", ROUNDS.values(), ids=["-".join(map(str, setting)) for setting in ROUNDS])
def test_predicted_round_is_near_the_measured_one(row: dict[str, Any]) -> None:
    case = row["case"]
    shape = SMOLLM2 if case["shape"] == "smollm2" else LlamaConfig.from_shape(case["shape"])
    options: dict[str, Any] = {name: option(row, flag) for flag, name in OPTIONS.items()}
    config = EngineConfig(
        random_weights=case["shape"], draft=case["draft"], draft_tokens=case["draft_tokens"], kv_cache=case["kv_cache"],
        **options,
    )  # fmt: skip
    target = config_with_weights(config, shape, case["world"], packs=True)
    copy = draft_copy_config(config, target, case["world"], packs=True)
    is_smaller = case["draft"].startswith("model:")
    smaller = LlamaConfig.from_shape(case["draft"].removeprefix("model:")) if is_smaller else None
    smaller = draft_config_with_weights(config, smaller, case["world"], packs=True)
    choices = SimpleNamespace(placement=SimpleNamespace(tp_size=case["world"]), dtype=torch.bfloat16)
    drafting = Drafting(config, target, cast(Choices, choices), smaller, None, copy)
    found = drafting._fused_round_cost([case["context"]] * case["batch"])
    assert found == pytest.approx(row["us"]["p50"] / PLAIN[setting_of(row)], rel=TOLERANCE)


def test_rows_read_protected_layers_once() -> None:
    """Half of the layers are not quantised: only those that are cost more with more rows."""
    shape = LlamaConfig.from_shape("llama-3.1-8b")
    sizes = [131072], "turbo4"
    none, half, all_of_them = (rows_us(shape, 1, torch.bfloat16, *sizes, protect, 5) for protect in (0, 8, 16))
    assert none > half > all_of_them == pytest.approx(rows_us(shape, 1, torch.bfloat16, [1], "bf16", 0, 5), rel=0.01)
    assert none - half == pytest.approx(half - all_of_them, rel=0.01)


def test_what_makes_attention_of_rows_longer() -> None:
    """More columns than a product of bf16 attention has, also in protected layers; with SAS each row reads alone."""
    shape = LlamaConfig.from_shape("llama-3.1-8b")

    def cost(rows: int, kv_cache: str, protect: int = 0, softmax: Any = "exact") -> float:
        return rows_us(shape, 1, torch.bfloat16, [131072], kv_cache, protect, rows, softmax)

    read = 131072 * 2 * 8 * 128 * 2 * 32 / 4.5e6  # us, of the whole bf16 cache
    assert cost(9, "bf16") - cost(8, "bf16") > 0.9 * read
    assert cost(9, "turbo4", 8) - cost(8, "turbo4", 8) > 0.45 * read
    # Five passes on 240 of 264 programs, and three on all.
    passes = 5 * 264 / 240 - 3
    assert cost(5, "turbo4", 0, "sas") - cost(5, "turbo4") == pytest.approx(passes * 0.21 * read, rel=0.02)


def test_a_round_is_priced_once_for_a_block_of_tokens() -> None:
    shape, choices = LlamaConfig.from_shape("llama-3.1-8b"), SimpleNamespace(placement=SimpleNamespace(tp_size=1))
    choices.dtype = torch.bfloat16
    config = EngineConfig(random_weights="llama-3.1-8b", draft="self", draft_tokens=4)
    drafting = Drafting(config, shape, cast(Choices, choices), None, None)
    costs = [drafting._captured_round_cost([length, length + 64]) for length in range(100_001, 100_101)]
    assert len(set(costs)) == len(drafting._round_costs) == 2
    assert costs[0] == drafting._fused_round_cost([100_096, 100_096])
    drafting.most_tokens = 100_100
    assert drafting._captured_round_cost([90_000, 100_101]) == math.inf
