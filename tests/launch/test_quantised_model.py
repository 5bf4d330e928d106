"""Commands say what the weights of a quantised checkpoint are, and count the bytes that are held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generated import read_json
from quantised_folders import save_quantised

from alspec import Engine
from alspec.errors import UserError
from alspec.launch import generate, latency
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.engine.memory import GIB, plan_memory

Run = Callable[..., tuple[int, str, str]]
WEIGHTS = "int4 (gptq, groups of 32), dequantised to fp32"


def test_generate_says_what_the_weights_are(run: Run, tmp_path: Path) -> None:
    """The tokens are those of transformers with the dequantised weights."""
    reference = save_quantised(tmp_path, "gptq-ordered")
    ids = [3, 77, 12, 140, 5, 9]
    flags = ("--transport", "gloo", "--prompt-ids", ",".join(map(str, ids)), "--max-new-tokens", 8, "--ignore-eos")
    code, out, err = run("--model", tmp_path, *flags, "--json", tmp_path / "out.json")
    assert code == 0, err
    assert f"alspec: weights: {WEIGHTS}\n" in err
    assert f"\nweights: {WEIGHTS}\n" in err
    assert read_json(tmp_path / "out.json")["summary"]["weights"] == WEIGHTS
    expected = reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert read_json(tmp_path / "out.json")["requests"][0]["token_ids"] == expected[0, len(ids) :].tolist()
    assert out


def test_a_copy_of_a_quantised_checkpoint_drafts(run: Run, tmp_path: Path) -> None:
    """An INT4 copy of FP8 weights: the text is that of the FP8 weights. A copy with as many bits is refused."""
    folders = {name: tmp_path / name for name in ("fp8-block", "awq")}
    for name, folder in folders.items():
        save_quantised(folder, name)
    flags = ("--transport", "gloo", "--prompt-ids", "3,77,12,140", "--max-new-tokens", 9, "--ignore-eos")
    fp8 = ("--model", folders["fp8-block"], *flags)
    _, expected, _ = run(*fp8)
    copy = ("--draft", "self", "--draft-always", "--draft-weights")
    code, out, err = run(*fp8, *copy, "int4-g32")
    assert (code, out) == (0, expected), err
    assert "drafts: self, weights int4 (groups of 32), dequantised to fp32, up to 4: " in err
    for model, given, bits, found in (
        (folders["fp8-block"], "fp8", 8, r"fp8 (compressed-tensors, blocks of 128 x 128)"),
        (folders["awq"], "int4-g32", 4, "int4 (awq, groups of 32)"),
        (folders["awq"], "fp8", 8, "int4 (awq, groups of 32)"),
    ):
        code, _, err = run("--model", model, *flags, *copy, given)
        reason = f"draft_weights: {given} copies weights of more than {bits} bits, found {found}; leave it out\n"
        assert (code, err) == (2, f"alspec: exit 2: {reason}")


def test_rows_say_that_weights_were_dequantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_quantised(tmp_path, "awq")
    flags = ["--model", tmp_path, "--transport", "gloo", "--contexts", 16, "--steps", 1, "--rows", tmp_path / "rows"]
    assert latency.main(list(map(str, flags))) == 0
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["case"]["weights"] == "int4 (awq, groups of 32), dequantised"
    assert "int4 (awq, groups of 32), dequantised to fp32, batch 1" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_what_the_weights_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are kept as they are; ranks that would cut groups are not listed."""
    save_quantised(tmp_path, "fp8-block")
    flags = ["--model", str(tmp_path), "--dtype", "bf16", "--plan"]
    assert generate.main(flags) == 0
    out = capsys.readouterr().out
    title = "256 tokens, weights fp8 (compressed-tensors, blocks of 128 x 128), cache bf16"
    assert title in " ".join(out.split())
    rows = [line.strip("│| ").replace("│", " ").split() for line in out.splitlines()]
    found = [row for row in rows if row and row[0].isdigit() and row[1] in ("off", "paired")]
    assert [" ".join(row[:3]) for row in found] == [
        "1 off 1", "2 off 2", "2 paired 1", "4 off 4", "4 paired 2", "8 paired 4",
    ]  # fmt: skip
    config = LlamaConfig.from_folder(tmp_path).model_copy(update={"packs_weights": True})
    plan = plan_memory(config, Shard(), torch.bfloat16, 1, 256, device_type="cuda")
    assert found[0][3] == f"{plan.weights_bytes / GIB:.2f}"


def test_a_plan_of_weights_that_are_quantised_when_read(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for weights in ("auto", "fp8", "int4"):
        assert generate.main(["--random-weights", "llama-3.1-8b", "--weights", weights, "--plan"]) == 0
        out = capsys.readouterr().out
        rows = [line.strip("│| ").replace("│", " ").split() for line in out.splitlines()]
        found.append(next(float(row[3]) for row in rows if row and row[:2] == ["1", "off"]))
    assert "weights int4 (groups of 128)" in " ".join(out.split())
    # 6.98e9 numbers in layers, 1.05e9 in embedding and head. A scale for each row, or 32 bits for each group.
    expected = [(16 * 6.98 + 16 * 1.05) / 8, (8 * 6.98 + 16 * 1.05) / 8, (4.25 * 6.98 + 16 * 1.05) / 8]
    assert found == pytest.approx([1e9 * size / GIB for size in expected], rel=0.005)


def test_what_is_not_used_is_said_once(tmp_path: Path) -> None:
    save_quantised(tmp_path, "fp8-inverse")
    notices = Engine.from_pretrained(tmp_path, dtype="bf16").notices
    assert "weights: fp8 (blocks of 128 x 128), dequantised to bf16" in notices
    expected = "checkpoint: not used: activation_scheme; only weights are quantised (the cache by --kv-cache)"
    assert [notice for notice in notices if "not used" in notice] == [expected]


def test_random_weights_drop_a_quantisation_with_a_notice(run: Run, tmp_path: Path) -> None:
    save_quantised(tmp_path, "awq")
    notice = (
        "alspec: config.json: not used: int4 (awq, groups of 32); random weights are quantised by --weights alone\n"
    )
    flags = ("--random-weights", tmp_path)
    code, _, err = run(*flags, "--transport", "gloo", "--prompt-ids", "1,2", "--max-new-tokens", 2)
    assert (code, err.count(notice)) == (0, 1)
    code, _, err = run(*flags, "--plan")
    assert (code, err) == (0, notice)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, _, err = run(*flags, "--plan")
    assert (code, err) == (0, "")


def test_ranks_that_would_cut_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything connects, with the sizes that fit."""
    save_quantised(tmp_path, "awq", intermediate_size=672)
    ranks = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 1}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    why = r"2 ranks must divide intermediate_size \(672\) into multiples of 32.* group: 1"
    with pytest.raises(UserError, match=why):
        Engine.from_pretrained(tmp_path, transport="gloo", speculation={"mode": "off"})


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4"])
def test_a_method_that_is_not_supported(method: str, run: Run, tmp_path: Path) -> None:
    save_quantised(tmp_path, "awq")
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, out, err = run("--model", tmp_path, "--prompt-ids", "1,2")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"found '{method}'; give the unquantised checkpoint" in err
