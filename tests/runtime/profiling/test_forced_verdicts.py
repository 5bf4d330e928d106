"""Forced verdicts: their rates, their order, and the file that gives the rate of each layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from alspec.errors import UserError
from alspec.runtime.profiling.forced_verdicts import (
    ForcedVerdicts,
    drawn_verdicts,
    forced_verdicts,
    read_layer_rates,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_layers", [1, 22, 32, 80])
@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.65, 0.875, 1.0])
def test_forced_verdicts_have_the_rate_and_are_spread(num_layers: int, hit_rate: float) -> None:
    verdicts = forced_verdicts(num_layers, hit_rate)
    assert len(verdicts) == num_layers
    assert set(verdicts) <= {0, 1}
    for count in range(num_layers + 1):
        assert abs(sum(verdicts[:count]) - count * hit_rate) < 1


@pytest.mark.parametrize("num_layers", [3, 30, 32, 80])
def test_drawn_verdicts_have_the_rates_of_their_layers(num_layers: int) -> None:
    """Layers of a deeper model repeat those of the other one. Draws are the same on every rank."""
    rates = [0.0, 0.2, 0.9, 1.0]
    drawn = drawn_verdicts(num_layers, rates, 4000)
    assert drawn.dtype == torch.int32
    expected = torch.tensor([rates[4 * layer // num_layers] for layer in range(num_layers)])
    assert (drawn.float().mean(0) - expected).abs().max() < 0.04  # five sigma
    assert torch.equal(drawn, drawn_verdicts(num_layers, rates, 4000))
    covariance = torch.cov(drawn.float().T)
    assert (covariance - covariance.diag().diag()).abs().max() < 0.02


def test_verdicts_turn_from_step_to_step() -> None:
    drawn = ForcedVerdicts.of(12, [0.5], CPU)
    place = drawn.now.data_ptr()
    for step in (0, 1, 7, len(drawn.of_steps), len(drawn.of_steps) + 3):
        drawn.turn(step)
        assert torch.equal(drawn.now, drawn.of_steps[step % len(drawn.of_steps)])
    assert drawn.now.data_ptr() == place  # a captured step reads it
    assert len(drawn.of_steps.unique(dim=0)) > 200
    even = ForcedVerdicts.of(12, 0.25, CPU)
    for step in range(3):
        even.turn(step)
        assert even.now.tolist() == forced_verdicts(12, 0.25)


def test_rates_come_from_the_one_row_with_hits(tmp_path: Path) -> None:
    rows = [{"hit_rate_per_layer": [0.0, 0.0]}, {"hit_rate_per_layer": [0.25, 1]}, {"hit_rate_per_layer": None}, {}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_layer_rates(file) == [0.25, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one row with hits in hit_rate_per_layer, found 0; write the file with launch/evaluate.py"),
        ('{"hit_rate_per_layer": [0.5]}\n{"hit_rate_per_layer": [0.7]}', "in hit_rate_per_layer, found 2; write"),
        ('{"hit_rate_per_layer": [0.5, 1.5]}', r"from 0 to 1 in hit_rate_per_layer, found \[0.5, 1.5\]"),
        ('{"hit_rate_per_layer": ["half"]}', "expected numbers from 0 to 1"),
        ('{"hit_rate_per_layer": "half"}', "found 0"),
        ("0.5\n[1]", "found 0"),
        ("{", "give real, numbers from 0 to 1, or a file of evaluate's rows"),
        ("\xff", "give real, numbers from 0 to 1, or a file of evaluate's rows"),
        (None, "No such file or directory; give real, numbers from 0 to 1, or a file"),
    ],
)  # fmt: skip
def test_other_files_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=f"flags: --hit-rates: .*rows.jsonl: .*{message}"):
        read_layer_rates(file)
