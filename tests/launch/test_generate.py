"""The command line end to end on a tiny checkpoint: what it prints and writes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from generated import LONG_PROMPT, PROMPT, SMALL, WINDOW, read_json
from paths import ROOT
from tiers import fast

import alspec
from alspec import Engine, SamplingConfig, SpeculationConfig
from alspec.config import GenerateConfig
from alspec.errors import UserError
from alspec.launch import generate
from alspec.launch.terminal.display import StatusLine
from alspec.models import llama_config as model_config
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama import Shard
from alspec.runtime.profiling.stats import step_bytes

Run = Callable[..., tuple[int, str, str]]
GenerateText = Callable[..., str]

full = pytest.mark.full
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def test_a_terminal_shows_progress(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", *SMALL)
    prompt = ("--prompt", LONG_PROMPT)
    code, text, plain = run(*flags, *prompt)
    assert code == 0
    assert "\x1b[K" not in plain, "stderr is no terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("alspec.runtime.decode.prefill.prefill.__defaults__", (64, None, 0, None, None))
    code, again, err = run(*flags, *prompt)
    assert (code, again) == (0, text)
    shown = re.findall(r"\r\x1b\[Kalspec: ([^\r]*)", err)
    assert shown[:2] == ["loading weights", "preparing"]
    total = int(shown[2].removeprefix("prompt: 0 of ").removesuffix(" tokens"))
    assert total > 128
    assert shown[2:] == [f"prompt: {done} of {total} tokens" for done in range(0, total, 64)]
    assert err.split(shown[-1])[1].startswith("\r\x1b[K"), "the text does not begin on an empty line"


@pytest.mark.parametrize(("is_first", "expected"), [(True, "\r\x1b[Kalspec: loading\r\x1b[K"), (False, "")])
def test_an_error_gets_its_own_line(
    is_first: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    def fail() -> None:
        with StatusLine(is_first) as status:
            status.show("loading")
            raise UserError("no")

    with pytest.raises(UserError):
        fail()
    assert capsys.readouterr().err == expected


def test_stdout_is_the_text_and_a_newline(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--transport", "gloo", "--prompt", PROMPT, *SMALL, "--json", tmp_path / "out.json")
    code, out, err = run("--model", checkpoint, *flags)
    assert code == 0
    text = read_json(tmp_path / "out.json")["requests"][0]["text"]
    assert len(text) >= 1
    assert out == text + "\n"
    assert err.startswith("mode: off, 1 rank(s) on CPU, fp32\n")
    for name in ("prompt tokens: 50\n", "new tokens: 12\n", "TTFT: ", "tokens/s: ", "ms/token: p50 ", "memory: "):
        assert name in err
    assert "\x1b" not in out + err, "no colours without a terminal"


def test_default_length_and_one_token(generate_json: Callable[..., Any]) -> None:
    one = generate_json("--prompt", PROMPT, "--max-new-tokens", 1)
    assert len(one["requests"][0]["token_ids"]) == 1
    assert one["step_us"] == []
    assert one["summary"]["tokens_per_s"] is None
    assert one["summary"]["hit_rate"] is None
    default = generate_json("--prompt", PROMPT, "--ignore-eos")
    assert len(default["requests"][0]["token_ids"]) == 128


def test_json(generate_json: Callable[..., Any], checkpoint: Path) -> None:
    found = generate_json("--prompt", LONG_PROMPT, *SMALL, *WINDOW, "--threshold", "0.3")
    assert list(found) == ["requests", "ttft_us", "step_us", "hit_map", "rounds", "summary", "config", "versions"]
    (request,) = found["requests"]
    assert request["prompt_ids"][0] == 96
    assert len(request["prompt_ids"]) == 1 + len(LONG_PROMPT)
    assert len(request["token_ids"]) == 12
    assert all(0 <= token < 100 for token in request["token_ids"])
    assert request["finish_reason"] == "length"
    # One time for each token: the first after the prompt, then each step.
    assert found["ttft_us"] > 0
    assert len(found["step_us"]) == 11
    assert all(us > 0 for us in found["step_us"])
    # [steps][layers][requests]
    assert [[len(layer) for layer in step] for step in found["hit_map"]] == [[1, 1, 1]] * 11
    hits = [layer[0] for step in found["hit_map"] for layer in step]
    assert set(hits) == {0, 1}, "a threshold that both accepts and rejects"
    summary = found["summary"]
    assert summary["hit_rate"] == pytest.approx(sum(hits) / len(hits))
    assert summary["prompt_tokens"] == [len(request["prompt_ids"])]
    assert summary["new_tokens"] == [12]
    assert (summary["mode"], summary["world_size"], summary["tp_size"], summary["dtype"]) == ("simulated", 1, 1, "fp32")
    assert summary["ttft_ms"] == pytest.approx(found["ttft_us"] / 1e3)
    assert min(found["step_us"]) <= summary["ms_per_token_p50"] * 1e3 <= max(found["step_us"])
    assert found["config"]["speculation"] == {
        "mode": "simulated", "threshold": 0.3, "chunk_size": 128, "predictor": "window", "recall_blocks": 16,
        "always": False,
    }  # fmt: skip
    assert found["config"]["model"] == str(checkpoint)
    assert GenerateConfig.model_validate(found["config"]).max_new_tokens == 12
    assert set(found["versions"]) == {"python", "torch", "cuda", "alspec", "triton"}
    assert found["versions"]["alspec"] == "0.1.0"


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo4"])
def test_bytes_read(kv_cache: str, run: Run, tmp_path: Path) -> None:
    """Step i of 11 reads the prompt and i tokens after it, as the cache holds them: 6 on average."""
    flags = ("--transport", "gloo", "--kv-cache", kv_cache, "--json", tmp_path / "out.json", *SMALL)
    code, _, err = run("--prompt", "The road", *flags)
    assert code == 0, err
    summary = read_json(tmp_path / "out.json")["summary"]
    config, tokens = model_config.LlamaConfig.from_folder(DEMO_CHECKPOINT), summary["prompt_tokens"][0] + 6
    read = step_bytes(config, Shard(), torch.float32, [tokens], kv_cache)
    assert summary["gb_per_s"] == pytest.approx(read / summary["ms_per_token_p50"] / 1e6)
    assert summary["share_of_limit"] == pytest.approx(summary["gb_per_s"] / summary["stream_gb_per_s"])


def test_requests_that_have_ended_read_no_more(generate_json: Callable[..., Any]) -> None:
    """Eager steps append nothing to them; captured steps would."""
    with mock.patch.object(generate, "mean_lengths", wraps=generate.mean_lengths) as lengths:
        generate_json("--prompt", PROMPT, "--max-new-tokens", 2)
    assert [call.kwargs for call in lengths.call_args_list] == [{"goes_on": False}]


@pytest.mark.parametrize(("threshold", "hit_rate"), [("0", 0.0), ("inf", 1.0)])
def test_threshold_limits(threshold: str, hit_rate: float, generate_json: Callable[..., Any]) -> None:
    found = generate_json("--prompt", LONG_PROMPT, *SMALL, *WINDOW, "--threshold", threshold)
    assert found["summary"]["hit_rate"] == hit_rate
    config = GenerateConfig.model_validate(found["config"])
    assert config.speculation.threshold == float(threshold)
    assert float(found["summary"]["threshold"]) == float(threshold)


def test_a_hit_rate_of_a_short_text_is_not_shown(run: Run, checkpoint: Path) -> None:
    """Below two chunks and a tile `A~` is exact; one token has no verdict."""
    for prompt, is_short in ((PROMPT, True), (LONG_PROMPT, False)):
        code, _, err = run("--model", checkpoint, "--prompt", prompt, *SMALL, *WINDOW)
        assert code == 0
        (shown,) = re.findall("^hit rate: (.*)$", err, re.MULTILINE)
        if is_short:
            assert shown == "- (counted from 320 tokens on; A~ leaves out hardly anything before)"
        else:
            assert re.fullmatch(r"\d+\.\d % at lambda 0\.1", shown)
    code, _, err = run("--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 1, "--speculation", "simulated")
    assert (code, "hit rate" in err) == (0, False)


def test_speculation_that_never_accepts_is_off(generate_text: GenerateText) -> None:
    flags = ("--prompt", LONG_PROMPT, *SMALL)
    off = generate_text(*flags, "--speculation", "off")
    assert generate_text(*flags, *WINDOW, "--threshold", "0") == off
    assert generate_text(*flags, *WINDOW, "--threshold", "inf") != off


def test_auto_on_one_rank_is_off(generate_json: Callable[..., Any]) -> None:
    found = generate_json("--prompt", PROMPT, "--max-new-tokens", 2)
    assert found["config"]["speculation"]["mode"] == "auto"
    assert found["summary"]["mode"] == "off"
    assert found["hit_map"] == []


# Sampling and stopping.


def test_stop_text_is_cut(generate_text: GenerateText) -> None:
    whole = generate_text("--prompt", PROMPT, *SMALL)[:-1]
    assert len(whole) > 6
    stop = whole[3:5]
    assert generate_text("--prompt", PROMPT, *SMALL, "--stop", stop) == whole[: whole.index(stop)] + "\n"
    # The earliest of several stop texts counts, in any order.
    assert generate_text("--prompt", PROMPT, *SMALL, "--stop", stop, "--stop", whole[1]) == (
        whole[: min(whole.index(stop), whole.index(whole[1]))] + "\n"
    )


def test_stop_text_that_never_occurs(generate_text: GenerateText) -> None:
    flags = ("--prompt", PROMPT, *SMALL)
    assert generate_text(*flags, "--stop", "no such text") == generate_text(*flags)


def test_stop_at_a_special_token(generate_json: Callable[..., Any], make_checkpoint: Callable[..., Path]) -> None:
    """It leaves no text; here it is a letter that greedy decoding generates."""
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos")
    before = generate_json(*flags)["requests"][0]
    token_id = before["token_ids"][3]
    folder = make_checkpoint()
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (name,) = [token for token, id_ in vocab.items() if id_ == token_id]
    path = folder / "tokenizer_config.json"
    added = {str(token_id): {"content": name, "special": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    flags = ("--model", folder, "--prompt-ids", ",".join(map(str, before["prompt_ids"])), *flags[2:])
    unstopped = generate_json(*flags)["requests"][0]
    assert unstopped["token_ids"] == before["token_ids"]
    assert name not in unstopped["text"]
    stopped = generate_json(*flags, "--stop", "no such text", "--stop", name)["requests"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == before["token_ids"][: before["token_ids"].index(token_id) + 1]
    assert unstopped["text"].startswith(stopped["text"])


def test_seed(generate_text: GenerateText) -> None:
    def sample(seed: int) -> str:
        return generate_text("--prompt", PROMPT, *SMALL, "--temperature", 1.5, "--seed", seed)

    texts = [sample(seed) for seed in range(4)]
    assert sample(1) == texts[1]
    assert len(set(texts)) == 4


def test_sampling_cut_to_one_token_is_greedy(generate_text: GenerateText) -> None:
    flags = ("--prompt", PROMPT, *SMALL)
    greedy = generate_text(*flags)
    assert generate_text(*flags, "--temperature", 2, "--top-k", 1) == greedy
    assert generate_text(*flags, "--temperature", 2, "--top-p", 1e-9) == greedy
    assert generate_text(*flags, "--temperature", 2) != greedy


def test_ignore_eos(generate_json: Callable[..., Any], make_checkpoint: Callable[..., Path]) -> None:
    """The end token is the fourth token of greedy decoding."""
    flags = ("--prompt", PROMPT, "--max-new-tokens", 12)
    ids = generate_json(*flags, "--ignore-eos")["requests"][0]["token_ids"]
    end = ids[3]
    position = ids.index(end)
    folder = make_checkpoint()
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [97, end]}))
    stopped = generate_json("--model", folder, *flags)["requests"][0]
    assert stopped["finish_reason"] == "eos"
    assert stopped["token_ids"] == ids[: position + 1]
    assert generate_json("--model", folder, *flags, "--ignore-eos")["requests"][0]["token_ids"] == ids


def test_max_context_sizes_the_cache(generate_json: Callable[..., Any]) -> None:
    needed = generate_json("--prompt", "abc", "--max-new-tokens", 2)["summary"]["memory"]["cache_bytes"]
    larger = generate_json("--prompt", "abc", "--max-new-tokens", 2, "--max-context", 600)["summary"]["memory"]
    assert larger["cache_bytes"] == needed // 6 * 600


@pytest.mark.parametrize("dtype", fast(["bf16", "fp16"], keep=["bf16"]))
def test_half_precision(dtype: str, generate_json: Callable[..., Any]) -> None:
    full = generate_json("--prompt", PROMPT, *SMALL)["summary"]["memory"]
    found = generate_json("--prompt", PROMPT, *SMALL, "--dtype", dtype)["summary"]
    assert found["dtype"] == dtype
    assert found["memory"]["weights_bytes"] * 2 == full["weights_bytes"]
    assert found["memory"]["cache_bytes"] * 2 == full["cache_bytes"]


# What else it prints and writes.


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "FORCE_COLOR"])
def test_color(terminal: bool, generate_text: GenerateText, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--prompt", LONG_PROMPT, *SMALL, *WINDOW, "--threshold", "0.3")
    plain = generate_text(*flags)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if terminal:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    else:
        monkeypatch.setenv("FORCE_COLOR", "1")
    colored = generate_text(*flags, "--color")
    assert "\x1b" not in plain
    assert ANSI.sub("", colored) == plain
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", colored))) > 1, "a shade for each hit rate"
    assert colored.count("\x1b[0m") == len(ANSI.findall(colored)) / 2


def test_color_is_for_terminals(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    flags = ("--model", checkpoint, "--transport", "gloo", "--prompt", LONG_PROMPT, *SMALL)
    flags = (*flags, "--speculation", "simulated")
    code, out, err = run(*flags, "--color")
    assert (code, out) == (0, run(*flags)[1])
    assert err.startswith("alspec: --color shades nothing: standard output is no terminal; FORCE_COLOR=1 shades all ")


NO_BLOCKS = "--recall-blocks without effect: --predictor window recalls no blocks"


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        pytest.param(("--top-k", 3), "--top-k without effect: temperature 0 takes the most likely token", marks=full),
        (
            ("--top-k", 3, "--top-p", 0.5),
            "--top-k and --top-p without effect: temperature 0 takes the most likely token",
        ),
        pytest.param(
            ("--top-k", 3, "--top-p", 0.5, "--min-p", 0.1),
            "--top-k, --top-p and --min-p without effect: temperature 0 takes the most likely token",
            marks=full,
        ),
        (("--answers", 2), "--answers gives the same answer 2 times: temperature 0 takes the most likely token"),
        (("--answers", 2, "--min-p", 0.1, "--temperature", 1), ""),
        (("--logprobs", 0), "--logprobs without effect: they are written to the file of --json"),
        (("--top-p", 0.5, "--temperature", 1), ""),
        (
            ("--threshold", 0.3, "--chunk", 256),
            "--threshold and --chunk without effect: mode off does not speculate; use --speculation simulated, "
            "or paired on two ranks",
        ),
        pytest.param(("--threshold", 0.3, "--speculation", "simulated"), "", marks=full),
        (("--recall-blocks", 8, "--predictor", "window", "--speculation", "simulated"), NO_BLOCKS),
        (("--recall-blocks", 8, "--predictor", "window", "--draft", "self"), NO_BLOCKS),
        pytest.param(("--recall-blocks", 8, "--draft", "self"), "", marks=full),
        pytest.param(("--predictor", "window", "--speculation", "simulated"), "", marks=full),
        pytest.param((), "", marks=full),
    ],
    ids=str,
)
def test_flags_without_effect_give_one_notice(
    flags: tuple[object, ...], notice: str, run: Run, checkpoint: Path
) -> None:
    code, _, err = run("--model", checkpoint, "--transport", "gloo", "--prompt", PROMPT, *SMALL, *flags)
    assert code == 0
    assert [line for line in err.splitlines() if line.startswith("alspec")] == ([f"alspec: {notice}"] if notice else [])


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({"repetition_penalty": 1.3, "temperature": 0.6}, "repetition_penalty 1.3"),
        pytest.param({"num_beams": 3, "no_repeat_ngram_size": 2}, "no_repeat_ngram_size 2, num_beams 3", marks=full),
        pytest.param(
            {"suppress_tokens": [5], "begin_suppress_tokens": [6]},
            "suppress_tokens [5], begin_suppress_tokens [6]",
            marks=full,
        ),
        ({"bad_words_ids": [[5, 6, 7], [8, 9, 10]]}, "bad_words_ids [[5, 6, 7], [8, 9..."),
        pytest.param({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": 97}, "", marks=full),
        ({"repetition_penalty": 1, "no_repeat_ngram_size": 0, "bad_words_ids": None, "num_beams": 1}, ""),
        pytest.param({"suppress_tokens": [], "begin_suppress_tokens": None}, "", marks=full),
    ],
    ids=str,
)
def test_settings_that_are_not_applied_give_one_notice(
    settings: dict[str, Any], listed: str, run: Run, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint()
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    code, _, err = run("--model", folder, "--transport", "gloo", "--prompt", PROMPT, *SMALL)
    assert code == 0
    notice = f"alspec: generation_config.json: not applied: {listed}; only flags and options say how tokens are chosen"
    assert [line for line in err.splitlines() if line.startswith("alspec")] == ([notice] if listed else [])


@pytest.mark.parametrize(
    ("is_batch", "mode", "why"),
    [(True, "simulated", "a batch is printed as JSON"), (True, "off", "a batch"), (False, "off", "nothing is specul")],
)
def test_color_that_shades_nothing_says_why(
    is_batch: bool, mode: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    (notice,) = generate._without_effect(GenerateConfig(color=True), is_batch, mode)
    assert notice.startswith(f"--color shades nothing: {why}")


def test_color_without_speculation_has_nothing_to_shade(generate_text: GenerateText) -> None:
    flags = ("--prompt", PROMPT, *SMALL)
    assert generate_text(*flags, "--color") == generate_text(*flags)


@pytest.mark.parametrize("text", ["tab\t", "\r", "  ", "\n", "a" * 300, "[bold]x[/bold]", "\x07", "\N{EM SPACE}"])
def test_color_changes_no_character(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from alspec.launch.terminal.display import Printer
    from alspec.runtime.engine.generation import Token

    Printer([{}], is_batch=False, color=True).show(Token(0, 1, text, 0.5, None))
    assert ANSI.sub("", capsys.readouterr().out) == text


def test_trace(generate_text: GenerateText, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    generate_text("--prompt", LONG_PROMPT, *SMALL, "--speculation", "simulated", "--trace", path)
    trace = read_json(path)
    assert [event["args"] for event in trace["traceEvents"] if event["ph"] == "M"] == [{"name": "rank 0"}]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    operations = ("pre_attention", "predictor", "full_attention", "verdict", "post_attention")
    expected = [("prefill", 0, layer) for layer in range(3)]
    for step in range(1, 12):
        expected += [(name, step, layer) for layer in range(3) for name in operations] + [("lm_head", step, 3)]
    assert [(event["name"], event["args"]["step"], event["args"]["layer"]) for event in spans] == expected
    assert all(event["dur"] >= 0 for event in spans)
    starts = [event["ts"] for event in spans]
    assert starts == sorted(starts)
    assert starts[0] >= 0


def test_plan_needs_no_weights(run: Run, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    for path in [*folder.glob("*.safetensors"), folder / "tokenizer.json"]:
        path.unlink()
    code, out, err = run("--model", folder, "--plan", "--max-context", 512)
    assert (code, err) == (0, "")
    assert "512 tokens, fp32" in out
    assert "memory on H200s" in " ".join(out.split())
    # lambda sqrt(L (4 - ln 0.01)) for three layers
    assert "lambda 0.1: if every layer accepts" in " ".join(out.split())
    assert "by about 0.51 norms" in " ".join(out.split())
    assert "lambda" not in run("--model", folder, "--plan", "--max-context", 512, "--threshold", "inf")[1]
    for name in ("ranks", "mode", "T", "weights GiB", "cache GiB", "buffers GiB", "ms/token", "against off"):
        assert name in out
    rows = [line.strip("\u2502| ").replace("\u2502", " ").split()[:3] for line in out.splitlines()]
    # Four query heads: at most four ranks share them, two of them each KV head; eight ranks can only pair.
    assert [row for row in rows if row and row[0].isdigit() and row[1] in ("off", "paired")] == [
        ["1", "off", "1"],
        ["2", "off", "2"],
        ["2", "paired", "1"],
        ["4", "off", "4"],
        ["4", "paired", "2"],
        ["8", "paired", "4"],
    ]


def test_plan_of_a_published_shape(run: Run) -> None:
    """Llama 3.1 8B has 8.03e9 parameters; one bf16 copy is 14.96 GiB, 8192 tokens of cache are 1 GiB."""
    code, out, _ = run("--random-weights", "llama-3.1-8b", "--plan", "--max-context", 8192)
    assert code == 0
    (row,) = [line for line in out.splitlines() if re.search(r"\b1\b.*\boff\b", line)]
    assert "14.96" in row
    assert "1.00" in row
    rows = [line.strip("\u2502| ").replace("\u2502", " ").split() for line in out.splitlines()]
    rows = [row for row in rows if row and row[0].isdigit()]
    ms = {(row[0], row[1]): float(row[6]) for row in rows if row[1] == "off"}
    for ranks, mode, *_, step_ms, against in (row for row in rows if row[1] in ("off", "paired")):
        if mode == "off" or (ranks, "off") not in ms:  # 16 ranks share 8 KV heads only as pairs
            assert against == "-"
        else:
            assert float(against.removesuffix("x")) == pytest.approx(ms[ranks, "off"] / float(step_ms), abs=0.01)
            assert float(against.removesuffix("x")) < 1, "why auto takes off"


def test_print_config(run: Run, tmp_path: Path) -> None:
    """The settings in force are printed, nothing is opened, and --config reads them back."""
    flags = ("--model", "no/such/folder", "--threshold", "inf", "--stop", "a", "--stop", "b", "--prompt", "x: y\n")
    code, out, err = run(*flags, "--print-config")
    assert (code, err) == (0, "")
    shown = yaml.safe_load(out)
    assert shown["model"] == "no/such/folder"
    assert shown["stop"] == ["a", "b"]
    (tmp_path / "config.yaml").write_text(out, encoding="utf-8")
    assert run("--config", tmp_path / "config.yaml", "--print-config") == (0, out, "")
    code, changed, _ = run("--config", tmp_path / "config.yaml", "--seed", 7, "--print-config")
    assert yaml.safe_load(changed) == shown | {"seed": 7}


def test_config_file_generates(generate_text: GenerateText, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"prompt": PROMPT, "max_new_tokens": 12, "ignore_eos": True}))
    assert generate_text("--config", tmp_path / "config.yaml") == generate_text("--prompt", PROMPT, *SMALL)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main(["--help"])
    assert caught.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for flag in ("--model", "--prompt", "--threshold", "--chunk", "--plan", "--print-config", "--config"):
        assert flag in captured.out
    text = " ".join(captured.out.split())
    for default in ("fewer by default if fewer fit (default: 128)", "inf always (default: 0.1)"):
        assert default in text
    assert not re.search(r"default: (None|False|\(\))", text), "no value to show"
    assert "--kv-cache bf16|turbo4|turbo2|turbo-mixed|turboquant4" in text, "every value"


# Without a checkpoint.


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a small shape for --random-weights."""
    monkeypatch.setitem(model_config._LLAMA_3, "vocab_size", 300)
    for name in ("bos_token_id", "eos_token_ids"):
        monkeypatch.delitem(model_config._LLAMA_3, name)
    monkeypatch.setitem(model_config._SHAPES, "tiny", model_config._llama_3_shape(64, 96, 2, 8, 8, 8.0))
    return "tiny"


def test_random_weights(tiny_shape: str, run: Run, tmp_path: Path) -> None:
    """No tokenizer: the text is the ids."""
    flags = ("--random-weights", tiny_shape, "--prompt-ids", "1,2,3", "--transport", "gloo", "--max-new-tokens", 5)
    code, out, err = run(*flags, "--json", tmp_path / "out.json")
    assert code == 0, err
    (request,) = read_json(tmp_path / "out.json")["requests"]
    assert len(request["token_ids"]) == 5
    assert out == "".join(f"{token} " for token in request["token_ids"]) + "\n"
    assert run(*flags)[1] == out, "the same numbers every time"


# From Python and as a script.


def test_engine_streams(checkpoint: Path, generate_json: Callable[..., Any]) -> None:
    flags = ("--prompt", LONG_PROMPT, *SMALL, *WINDOW, "--threshold", "0.3")
    expected = generate_json(*flags)
    engine = Engine.from_pretrained(
        checkpoint, transport="gloo", speculation=SpeculationConfig(mode="simulated", predictor="window", threshold=0.3)
    )
    tokens = list(engine.stream(LONG_PROMPT, SamplingConfig(max_new_tokens=12, ignore_eos=True)))
    assert [token.token_id for token in tokens] == expected["requests"][0]["token_ids"]
    assert "".join(token.text for token in tokens) == expected["requests"][0]["text"]
    rates = [token.hit_rate for token in tokens]
    assert rates[0] is None
    assert rates[1:] == pytest.approx([sum(map(sum, step)) / 3 for step in expected["hit_map"]])
    assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
    # Again, longer: the cache grows, the weights stay.
    assert len(list(engine.stream(LONG_PROMPT, SamplingConfig(max_new_tokens=20, ignore_eos=True)))) == 20
    engine.close()


def test_engine_takes_text_and_dictionary_options(checkpoint: Path) -> None:
    engine = Engine.from_pretrained(str(checkpoint), transport="gloo", speculation={"mode": "off"})
    token = next(engine.stream("abc", SamplingConfig(max_new_tokens=1)))
    assert token.finish_reason in ("length", "eos")
    with pytest.raises(alspec.UserError, match=r"unknown key 'kv_cach'; the nearest valid name is 'kv_cache'"):
        Engine.from_pretrained(checkpoint, kv_cach="bf16")


def test_public_names() -> None:
    assert sorted(alspec.__all__) == alspec.__all__
    for name in alspec.__all__:
        assert getattr(alspec, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        alspec.__getattr__("Engin")


def test_rules_do_not_import_the_runtime() -> None:
    code = (
        "import sys, alspec, alspec.verdict, alspec.config; alspec.EngineConfig; alspec.UserError;"
        "print([m for m in sys.modules if m.startswith(('alspec.runtime', 'alspec.models', 'alspec.kernels'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def run_script(folder: Path, *flags: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """launch/generate.py in a process of its own, started in `folder`."""
    command = [sys.executable, str(ROOT / "launch" / "generate.py"), *map(str, flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=120
    )


def test_script_works_from_any_folder(checkpoint: Path, generate_text: GenerateText, tmp_path: Path) -> None:
    expected = generate_text("--prompt", PROMPT, *SMALL)
    done = run_script(tmp_path, "--model", checkpoint, "--transport", "gloo", *SMALL, stdin=PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected


@full
def test_script_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--promt", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "alspec: exit 2: flags: unknown flag --promt; the nearest valid name is --prompt\n"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--temp", "--temperature"), ("--max-con", "--max-context"), ("--n", "--answers"), ("--always", "--pair-always")],
)
def test_the_beginning_of_a_flag_suggests_it(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([word, "1"]) == 2
    line = f"alspec: exit 2: flags: unknown flag {word}; the nearest valid name is {meant}\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(("value", "layer"), [(math.nan, 1), (1e37, 2)], ids=["nan", "squares overflow"])
def test_bad_numbers_are_named_by_their_origin(
    run: Run, make_checkpoint: Callable[..., Path], value: float, layer: int
) -> None:
    """Exit 4, with the rank, layer and step of the first; no token is printed."""
    import safetensors.torch

    folder = make_checkpoint()
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    code, out, err = run("--model", folder, "--prompt", "a", "--transport", "gloo")
    assert (code, out) == (4, "")
    assert err.startswith(f"alspec: exit 4: NaN or Inf in the logits: first seen on rank 0, layer {layer}, step 0;")
    assert err.count("\n") == 1
