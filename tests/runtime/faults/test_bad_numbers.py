"""NaN or Inf in the logits ends the job with exit 4, names where it began, and prints no token of that step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from jobs import LONG, job
from safetensors.torch import load_file, save_file

from alspec.launch.generate import main


def spoil(folder: Path, name: str, row: int, column: int, value: float) -> None:
    """Overwrite one weight."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row, column] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# Fault -> (tensor, element, value, where it is first seen). Layer 2's down_proj is split by columns over the ranks of a
# group, the LM head by rows over all ranks.
FAULTS = {
    "nan-in-down": ("model.layers.2.mlp.down_proj.weight", (3, 90), torch.nan, "layer 2"),
    "inf-in-down": ("model.layers.2.mlp.down_proj.weight", (3, 90), torch.inf, "layer 2"),
    "nan-in-lm-head": ("lm_head.weight", (300, 5), torch.nan, "the LM head"),
}


def spoilt_copy(tiny_folder: Path, tmp_path: Path, fault: str) -> tuple[Path, str]:
    """A model folder with one bad weight, and the place that the message must name."""
    name, place, value, where = FAULTS[fault]
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, name, *place, value)
    return folder, where


def bad_numbers(rank: int, where: str, step: int) -> str:
    return f"alspec: exit 4: NaN or Inf in the logits: first seen on rank {rank}, {where}, step {step};"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["off", "simulated"])
def test_one_rank_names_where_bad_numbers_began_and_prints_no_token(
    tiny_folder: Path, tmp_path: Path, fault: str, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, where = spoilt_copy(tiny_folder, tmp_path, fault)
    code = main([*LONG, "--model", str(folder), "--speculation", mode])
    captured = capfd.readouterr()
    assert code == 4
    assert captured.out == ""
    assert captured.err.startswith(bad_numbers(0, where, 0))
    assert captured.err.count("\n") == 1


def test_a_weight_beyond_fp16_is_a_bad_number_that_fp32_mends(
    tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weight is Inf in fp16. The message advises fp32."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, "model.layers.4.mlp.down_proj.weight", 1, 1, 70_000.0)
    flags = [*LONG[:2], "--max-new-tokens", "4", "--ignore-eos", "--transport", "gloo", "--model", str(folder)]
    assert main([*flags, "--dtype", "fp16"]) == 4
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(bad_numbers(0, "layer 4", 0))
    assert "--dtype fp32" in captured.err
    assert main([*flags, "--dtype", "fp32"]) == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mode", "rank"), [("nan-in-down", "off", 1), ("inf-in-down", "paired", 0), ("nan-in-lm-head", "off", 1)]
)
def test_two_ranks_name_the_rank_where_bad_numbers_began(
    tiny_folder: Path, tmp_path: Path, fault: str, mode: str, rank: int
) -> None:
    """Under tensor parallelism only rank 1 has the bad weight. Both ranks of a pair have it; rank 0 is named."""
    folder, where = spoilt_copy(tiny_folder, tmp_path, fault)
    with job(tmp_path, 2, [*LONG, "--model", str(folder), "--speculation", mode]) as running:
        running.torchrun.wait(timeout=90)
        # The last rank to leave may also report, with exit 5, that the first one has left.
        lines = [line for line in running.lines if line.startswith("alspec: exit 4")]
        assert lines, running.stderr
        assert all(line.startswith(bad_numbers(rank, where, 0)) for line in lines)
        assert running.stdout == ""


def test_tokens_before_a_bad_step_are_printed_and_none_after_it(
    tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token with a bad embedding spoils the step that reads it."""
    flags = [*LONG, "--speculation", "off"]
    flags[flags.index("100000")] = "12"
    assert main([*flags, "--model", str(tiny_folder), "--json", str(tmp_path / "run.json")]) == 0
    whole = capfd.readouterr().out
    token_ids = json.loads((tmp_path / "run.json").read_text())["requests"][0]["token_ids"]
    step, token_id = next(
        (index, token) for index, token in enumerate(token_ids) if index >= 3 and token not in token_ids[:index]
    )
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, "model.embed_tokens.weight", token_id, 0, torch.nan)
    assert main([*flags, "--model", str(folder)]) == 4
    captured = capfd.readouterr()
    assert captured.out[1:].endswith("\n"), "some text, and the error on a line of its own"
    assert whole.startswith(captured.out[:-1])
    assert captured.err.startswith(bad_numbers(0, "layer 0", step + 1))
