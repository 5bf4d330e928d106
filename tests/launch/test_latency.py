"""The latency profiler end to end: its output, its files and its refusals."""

from __future__ import annotations

import importlib.util
import json
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
from paths import ROOT

from alspec.launch import latency, plot_trace
from alspec.launch.plots.plot_latency import draw
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.models.llama import Shard
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.decode import eager_step
from alspec.runtime.decode.captured_step import CapturedStep
from alspec.runtime.decode.pair_policy import PairPolicy
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.kernel_trace import TRACE_STEPS
from alspec.runtime.profiling.profile import WARMUP_STEPS
from alspec.runtime.profiling.stats import percentile, step_bytes
from alspec.runtime.profiling.timeline import trace_json

HAS_GPU = torch.cuda.is_available()
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
COLUMNS = "context mode cache hits ms/token p50 p20 p80 p99 tokens/s MB/rank GB/s % of limit"
SMALL = ("--contexts", "24,16", "--steps", 3)

Profile = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(capsys: pytest.CaptureFixture[str]) -> Profile:
    """`profile("--flag", ...)`: the command line in this process; returns exit code, stdout and stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = latency.main([str(arg) for arg in argv])
        return (code, *capsys.readouterr())

    return call


def cells(out: str) -> list[list[str]]:
    """The texts of the table's rows, the header first."""
    lines = [re.split(r" *[\u2502\u2503] *", line)[1:-1] for line in out.splitlines()]
    return [line for line in lines if line]


def outputs(folder: Path) -> list[object]:
    """Flags for everything that can be written."""
    return ["--rows", folder / "rows.jsonl", "--json", folder / "out.json", "--trace", folder / "trace.json"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


def slices(folder: Path) -> list[dict[str, Any]]:
    """The operations in the trace."""
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_alone_on_the_cpu(profile: Profile, checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", "--batch", 2, *SMALL)
    code, out, err = profile(*flags, *outputs(tmp_path))
    assert (code, err) == (0, "")
    header, *lines = cells(out)
    assert " ".join(header) == COLUMNS
    assert [line[:2] for line in lines] == [["16", "off"], ["24", "off"]]
    assert "1 rank(s) on CPU, fp32, batch 2" in out
    assert "the cache holds random numbers" in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == read_rows(tmp_path)
    assert written["config"]["contexts"] == [24, 16]
    for line, row, sample in zip(lines, written["rows"], written["samples"], strict=True):
        context = int(line[0])
        assert (row["bench"], row["impl"]) == ("decode_step", "alspec.off")
        assert row["case"] == {
            "shape": checkpoint.name,
            "world": 1,
            "mode": "off",
            "transport": None,
            "cuda_graph": False,
            "dtype": "fp32",
            "batch": 2,
            "context": context,
            "text": None,
            "kv_cache": "bf16",
            "softmax": "exact",
            "hit_rate": None,
            "forced": False,
        }
        assert sample["case"] == row["case"]
        (samples,) = sample["step_us"]
        assert len(samples) == 3
        assert row["us"] == pytest.approx(
            {f"p{share}": percentile(samples, share / 100) for share in (20, 50, 80, 99)}, abs=1e-3
        )
        config = LlamaConfig.from_folder(checkpoint)
        read = step_bytes(config, Shard(0, 1, 0, 1), torch.float32, [context + WARMUP_STEPS + 1] * 2)
        assert row["bytes"] == read
        assert row["tokens_per_s"] == pytest.approx(2e6 / row["us"]["p50"], abs=0.01)
        assert 0 < row["share_of_limit"] < 1
        assert (row["gpu"], row["num_gpus"]) == (None, 0)
        assert row["command"].startswith(f"launch/latency.py --model {checkpoint}")
        assert [float(text) for text in line[4:8]] == pytest.approx(
            [row["us"][name] / 1e3 for name in ("p50", "p20", "p80", "p99")], abs=1e-3
        )
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"] == written["rows"][-1]
    steps = {event["args"]["step"] for event in slices(tmp_path)}
    assert steps == set(range(1, WARMUP_STEPS + 4)), "of the last context alone"


def test_caches_follow_each_other_in_one_run(profile: Profile, tmp_path: Path) -> None:
    flags = ("--contexts", 16, "--steps", 1, "--codecs", "bf16,turbo4", "--rows", tmp_path / "rows.jsonl")
    code, out, _ = profile("--transport", "gloo", *flags)
    assert code == 0
    assert [line[:3] for line in cells(out)[1:]] == [["16", "off", "bf16"], ["16", "off", "turbo4"]]
    bf16, turbo4 = read_rows(tmp_path)
    assert (bf16["case"]["kv_cache"], turbo4["case"]["kv_cache"]) == ("bf16", "turbo4")
    assert turbo4["bytes"] < bf16["bytes"]


def test_a_printed_configuration_is_read_back(profile: Profile, tmp_path: Path) -> None:
    for flags in (("--kv-cache", "turbo4"), ("--codecs", "bf16,turbo4"), ()):
        code, printed, _ = profile("--contexts", 16, *flags, "--print-config")
        assert code == 0
        (tmp_path / "config.yaml").write_text(printed, encoding="utf-8")
        assert profile("--config", tmp_path / "config.yaml", "--print-config")[:2] == (0, printed)
        config = latency.LatencyConfig(**yaml.safe_load(printed))
        latency._check(config)
        assert latency._codecs(config) == {"--kv-cache": ["turbo4"], "--codecs": ["bf16", "turbo4"]}.get(
            next(iter(flags), ""), ["bf16"]
        )


def test_flags_without_effect_give_a_notice(profile: Profile, checkpoint: Path) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", "--contexts", 16, "--steps", 1, "--top-k", 5)
    assert profile(*flags)[2] == "alspec: --top-k without effect: temperature 0 takes the most likely token\n"
    assert profile(*flags, "--temperature", 1)[2] == ""
    notice = "alspec: --threshold without effect: mode off does not speculate; add --modes paired\n"
    assert profile(*flags, "--temperature", 1, "--threshold", 0.3)[2] == notice


def test_sampled_steps(profile: Profile, checkpoint: Path, tmp_path: Path) -> None:
    """Tokens are sampled with the given settings, and rows and title say so."""
    sampling = ("--temperature", 0.8, "--top-p", 0.9, "--seed", 5)
    with mock.patch.object(eager_step, "sample", wraps=eager_step.sample) as sample:
        code, out, _ = profile("--model", checkpoint, "--contexts", 16, "--steps", 2, *sampling, *outputs(tmp_path))
    assert code == 0
    assert "temperature 0.8, top_k 0, top_p 0.9" in out
    chosen = [call.args[1] for call in sample.call_args_list]
    assert {(how.temperature, how.top_k, how.top_p, how.seed) for how in chosen} == {(0.8, 0, 0.9, 5)}
    (row,) = read_rows(tmp_path)
    assert {name: row["case"][name] for name in ("temperature", "top_k", "top_p")} == {
        "temperature": 0.8, "top_k": 0, "top_p": 0.9,
    }  # fmt: skip


def test_a_terminal_shows_progress(profile: Profile, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    code, out, err = profile("--model", checkpoint, "--transport", "gloo", *SMALL)
    assert code == 0
    shown = re.findall(r"\x1b\[Kalspec: ([^\r]*)", err)
    assert shown == [f"off, bf16: {what}" for what in ("loading weights", "preparing", "16 tokens", "24 tokens")]
    assert err.endswith("\r\x1b[K"), "the table does not begin on an empty line"
    assert "alspec" not in out


def test_rows_are_appended_and_nothing_else_is_written(
    profile: Profile, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--model", checkpoint, "--transport", "gloo", "--contexts", 16, "--steps", 1, "--rows", "rows.jsonl")
    assert [profile(*flags)[0] for _ in range(2)] == [0, 0]
    assert len(read_rows(tmp_path)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_steps_after_a_text(
    profile: Profile, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts repeat the text, each request from another place; rows name the file."""
    (tmp_path / "text.txt").write_text("The quick brown fox. ", encoding="utf-8")
    prompts = []
    stream = Engine.stream
    monkeypatch.setattr(Engine, "stream", lambda *args: (prompts.append(args[1]), stream(*args))[1])
    flags = ("--model", checkpoint, "--transport", "gloo", "--contexts", "12,60", "--steps", 2, "--batch", 2)
    code, out, err = profile(*flags, "--prompt-file", tmp_path / "text.txt", "--rows", tmp_path / "rows.jsonl")
    assert (code, err) == (0, "")
    assert "after prompts from text.txt" in out
    assert [row["case"]["text"] for row in read_rows(tmp_path)] == ["text.txt"] * 2
    tokenizer = Engine.from_pretrained(checkpoint, transport="gloo").tokenizer
    assert tokenizer is not None
    text = "The quick brown fox. "
    for context, (first, second) in zip((12, 60), prompts, strict=True):
        assert len(first) == len(second) == context - 1
        assert tokenizer.decode(first).removeprefix("<begin>") == (text * 3)[: context - 2]
        assert tokenizer.decode(second).removeprefix("<begin>") == (text * 4)[10 : context + 8]


@pytest.mark.parametrize("text", ["", " \n\t\n"], ids=repr)
def test_text_without_words(text: str, profile: Profile, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    found = profile("--model", checkpoint, "--transport", "gloo", "--prompt-file", path)
    assert found == (2, "", f"alspec: exit 2: prompt_file: {path} is empty; give a text file\n")


def test_text_for_random_weights(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox.", encoding="utf-8")
    flags = ("--random-weights", "llama-3.2-1b", "--transport", "gloo", "--prompt-file", tmp_path / "text.txt")
    message = "prompt_file: random weights have no tokenizer; leave it out, or use --model"
    assert profile(*flags, "--contexts", 64) == (2, "", f"alspec: exit 2: {message}\n")


def test_rows_of_parts() -> None:
    row = {"bench": "decode_step", "case": {"context": 64}, "us": {"p50": 7.0}, "bytes": 3, "tokens_per_s": 1.0}
    row |= {"share_of_limit": None, "gpu": "one", "command": "latency"}
    parts = {"layer": [3.0, 1.0, 2.0], "fixed": [5.0], "attention": []}
    case = {"context": 64, "part": "layer"}
    rest = {"gpu": "one", "command": "latency", "untraced_us": 7.0, "num_layers": 32}
    found = latency.parts_rows(row, parts, 32)
    assert found[0] == {"bench": "decode_parts", "case": case, "us": {"p20": 1.4, "p50": 2.0, "p80": 2.6}} | rest
    assert [(one["case"]["part"], one["us"]["p50"]) for one in found] == [("layer", 2.0), ("fixed", 5.0)]


def test_default_contexts_fit_the_model(checkpoint: Path) -> None:
    """After a text there must be room for the steps too, ten warm-up steps included."""
    engine = Engine.from_pretrained(checkpoint, transport="gloo")
    after_text = {"prompt_file": "text.txt", "steps": 90}
    for longest, settings, expected in (
        (1024, {}, [1024]),
        (9000, {}, [1024, 8192]),
        (500, {}, [500]),
        (10**6, {}, [1024, 8192, 32768, 131072]),
        (1024, after_text, [924]),
        (8192 + 99, after_text, [1024]),
        (8192 + 100, after_text, [1024, 8192]),
    ):
        engine.model_config = engine.model_config.model_copy(update={"max_position_embeddings": longest})
        assert latency._contexts(latency.LatencyConfig(**settings), engine) == expected


def test_print_config(profile: Profile, tmp_path: Path) -> None:
    code, out, _ = profile("--contexts", "1k", "--json", "a.json", "--print-config")
    shown = yaml.safe_load(out)
    assert (code, shown["contexts"], shown["json"], shown["steps"]) == (0, [1024], "a.json", 100)
    (tmp_path / "config.yaml").write_text(out, encoding="utf-8")
    assert profile("--config", tmp_path / "config.yaml", "--print-config") == (0, out, "")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_plot(profile: Profile, checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", "--contexts", "16,32", "--steps", 2)
    assert profile(*flags, "--plot", tmp_path / "plot.png")[0] == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_plot_of_one_context(tmp_path: Path) -> None:
    row = {
        "case": {"context": 1000, "mode": "off", "kv_cache": "bf16", "hit_rate": None, "forced": False},
        "us": {"p20": 1.0, "p50": 2.0, "p80": 3.0},
        "bytes": 10**9,
        "stream_tb_s": 4.0,
    }
    draw(tmp_path / "plot.svg", [row], "one context")
    assert "one context" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def paired_row(p50: float) -> dict[str, Any]:
    """A pair that takes less time than all its bytes would."""
    case = {"shape": "tiny", "world": 2, "mode": "paired", "transport": "symm", "cuda_graph": True, "dtype": "bf16"}
    case |= {"batch": 1, "context": 1024, "text": None, "kv_cache": "bf16", "hit_rate": 1.0, "forced": True}
    us = {name: p50 for name in ("p20", "p50", "p80", "p99")}
    row = {"case": case, "us": us, "bytes": 10**9, "stream_tb_s": 3.0, "share_of_limit": None, "gpu": "one"}
    return row | {"num_gpus": 2}


def plot_pair(folder: Path, measured: dict[str, Any] | None, *flags: str) -> str:
    """The SVG that `plot_trace.py` draws for a pair's trace."""
    moments = {"layer": 0, "step": 1, "start_us": 0.0, "end_us": 4.0}
    ranks = [[{"op": op} | moments] for op in ("full_attention", "post_attention")]
    (folder / "trace.json").write_text(trace_json(ranks, measured))
    picture = folder / "picture.svg"
    assert plot_trace.main([str(folder / "trace.json"), str(picture), "--step", "1", *flags]) == 0
    return picture.read_text(encoding="utf-8")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_picture_of_a_trace_says_that_verdicts_were_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with a given title. Real verdicts are not mentioned, and older traces do not say."""
    row = paired_row(100.0)
    run = "tiny, 2 x one, bf16, paired, 1024 tokens"
    drawn = plot_pair(tmp_path, row | {"case": row["case"] | {"hit_rate": 0.5}})
    assert f"{run}; verdicts forced: 50 %" in drawn
    assert capsys.readouterr().out.startswith(f"{run}\nverdicts forced: 50 %\n")
    assert "my pair; verdicts forced: 100 %" in plot_pair(tmp_path, row, "--title", "my pair")
    real = plot_pair(tmp_path, row | {"case": row["case"] | {"forced": False}})
    assert run in real
    assert "forced" not in real
    capsys.readouterr()
    assert "forced" not in plot_pair(tmp_path, None)
    assert capsys.readouterr().out.startswith("post-attention began")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_picture_of_the_trace_in_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = ROOT / "docs" / "results" / "paired_trace.json.gz", tmp_path / "picture.png"
    assert plot_trace.main([str(trace), str(picture), "--step", "3", "--layers", "4:8"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert len(re.findall(r"began (\d+) us after this one", out)) == 2
    assert "had ended in 160 of 160 layers" in out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
@pytest.mark.parametrize("has_off", [False, True])
def test_limit_in_the_picture_is_that_of_off(has_off: bool, tmp_path: Path) -> None:
    pair = paired_row(100.0)
    off = pair | {"case": pair["case"] | {"mode": "off", "hit_rate": None}, "stream_tb_s": 4.0}
    draw(tmp_path / "plot.svg", [pair, off] if has_off else [pair], "two GPUs")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "bytes of paired" not in text
    assert ("bytes of off at 4.00 TB/s" in text) == has_off


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_each_cache_has_a_line_and_a_limit_in_the_picture(tmp_path: Path) -> None:
    pair = paired_row(100.0)
    rows = [
        pair | {"case": pair["case"] | {"mode": mode, "hit_rate": None, "kv_cache": codec}}
        for codec in ("bf16", "turbo4")
        for mode in ("off", "paired")
    ]
    draw(tmp_path / "plot.svg", rows, "two caches")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for name in ("off", "paired", "off over turbo4", "paired over turbo4"):
        assert f"{name}, p50" in text
    assert "bytes of off at" in text
    assert "bytes of off over turbo4 at" in text


def test_table_shows_no_bytes_of_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair reads only some bytes and has no limit; the limit of `off` beside it is of the run of `off`."""
    pair = paired_row(100.0)
    off = pair | {"case": pair["case"] | {"mode": "off", "hit_rate": None}, "stream_tb_s": 4.0, "share_of_limit": 0.5}
    profiles = [latency.Profile(1024, 1, [[100.0]], rate, 10**9) for rate in (1.0, None)]
    latency._show(list(zip((pair, off), profiles, strict=True)), latency.LatencyConfig())
    out = capsys.readouterr().out
    assert [line[-3:] for line in cells(out)[1:]] == [["-", "-", "-"], ["1000.0", "10000", "50.0%"]]
    assert "limit = bytes / copy bandwidth (4000 GB/s)" in out
    latency._show([(pair, profiles[0])], latency.LatencyConfig())
    assert "limit" not in capsys.readouterr().out.partition("of limit")[2]


MISTAKES = [
    (("--modes", "off,simulated"), "flags: --modes: expected off or paired, found 'simulated'"),
    (
        ("--hit-rates", "real,1.5"),
        "flags: --hit-rates: expected real, numbers from 0 to 1, or a file of rows that evaluate wrote, found '1.5'",
    ),
    (
        ("--hit-rates", "half"),
        "flags: --hit-rates: half: No such file or directory; give real, numbers from 0 to 1, or a "
        "file of evaluate's rows",
    ),
    (
        ("--hit-rates", "real,0.5"),
        "flags: --hit-rates: forced rates need --modes paired; otherwise leave --hit-rates out",
    ),
    (
        ("--modes", "off,paired"),
        "flags: --modes: paired needs an even number of ranks, found 1; start the program with torchrun "
        "--nproc-per-node 2 (or 4, ...), or leave paired out",
    ),
    (
        ("--modes", "off,paired", "--trace", "t.json"),
        "flags: --trace: records one mode over one cache; give one value to --modes and to --codecs",
    ),
    (("--modes", "pared"), "flags: --modes: expected off or paired, found 'pared'"),
    (
        ("--prompt-file", "no/such/file"),
        "prompt_file: cannot read no/such/file: No such file or directory; give an existing text file",
    ),
    (("--speculation", "paired"), "flags: --speculation: not used by latency; use --modes instead"),
    (("--batch", 9, "--modes", "off,paired"), "flags: --batch: a captured step serves up to 8 requests, found 9"),
    (("--batch", 33), "flags: --batch: a captured step serves up to 32 requests, found 33"),
    (("--batch", 0), "flags: --batch: expected 1 or more, found '0'"),
    (("--steps", 0), "flags: --steps: expected 1 or more, found '0'"),
    (("--contexts", "1025"), "flags: --contexts: 1025 is beyond the model's 1024 positions"),
    (
        ("--contexts", "64,915", "--prompt-file", "text.txt"),
        "flags: --contexts: 915 tokens and the 110 steps after them are beyond the model's 1024 positions; lower "
        "--contexts or --steps",
    ),
    (
        ("--steps", 1013, "--prompt-file", "text.txt"),
        "flags: --contexts: 2 tokens and the 1023 steps after them are beyond the model's 1024 positions; lower "
        "--contexts or --steps",
    ),
    (("--contexts", "1k,x"), "flags: --contexts: expected lengths such as 1k,8k or 4096, found 'x'"),
    (
        ("--contexts", "64", "--max-context", 173),
        "flags: --max-context: 64 tokens and the steps after them need 174, found 173; leave it out, or lower "
        "--contexts or --steps",
    ),
    (("--contxts", "64"), "flags: unknown flag --contxts; the nearest valid name is --contexts"),
    (
        ("--kv-cache", "turbo4", "--codecs", "bf16,turbo4"),
        "flags: --kv-cache: --codecs names the caches to measure; leave --kv-cache out",
    ),
    (
        ("--codecs", "bf16,turbo4", "--trace", "t.json"),
        "flags: --trace: records one mode over one cache; give one value to --modes and to --codecs",
    ),
    (
        ("--codecs", "turbo4,bf16", "--softmax", "sas"),
        "flags: --softmax: sas needs quantised caches; leave bf16 out of --codecs",
    ),
    (
        ("--codecs", "bf16,int8"),
        "flags: --codecs: expected bf16, turbo4, turbo2, turbo-mixed, turboquant4, turboquant3, turboquant2, "
        "hybrid-k4v3, hybrid-k4v2 or hybrid-k3v2, found 'int8'",
    ),
    (("--softmax", "sas"), "softmax: sas needs a quantised cache; use --kv-cache turbo4 or another quantised codec"),
    (("--cuda-graph", "on"), "cuda_graph: on needs a GPU, and this runs on the CPU; use auto or off"),
    *(
        (
            (flag, "no/such/folder/file"),
            f"flags: {flag}: cannot write no/such/folder/file: No such file or directory; "
            "give a file in a folder that exists and is writable",
        )
        for flag in ("--rows", "--json", "--trace")
    ),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES, ids=[" ".join(map(str, flags)) for flags, _ in MISTAKES])
def test_mistakes(
    flags: tuple[object, ...],
    message: str,
    profile: Profile,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line and exit 2, before any memory is taken."""

    def no_memory(*args: object) -> None:
        raise AssertionError("memory was taken before the mistake was found")

    monkeypatch.setattr(Engine, "load", no_memory)
    found = profile("--model", checkpoint, "--transport", "gloo", *flags)
    assert found == (2, "", f"alspec: exit 2: {message}\n")


def test_plot_without_matplotlib(profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "alspec: exit 2: flags: --plot: needs matplotlib; pip install -e '.[plot]'\n"
    assert profile("--plot", tmp_path / "plot.png") == (2, "", expected)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
@pytest.mark.parametrize("name", ["plot.foo", "plot"])
def test_plot_with_an_unknown_extension(
    name: str, profile: Profile, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is found before the measurement, and nothing is written."""
    monkeypatch.setattr(latency, "Engine", None)
    picture = tmp_path / name
    expected = f"flags: --plot: expected a file that ends in .png, .svg, .pdf, found {str(picture)!r}"
    assert profile("--model", checkpoint, "--plot", picture) == (2, "", f"alspec: exit 2: {expected}\n")
    assert not picture.exists()


def test_what_does_not_fit(profile: Profile, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alspec.runtime.engine.resources.available_bytes", lambda device, ranks: 600_000)
    code, out, err = profile("--model", checkpoint, "--transport", "gloo", "--contexts", "1k")
    assert (code, out) == (3, "")
    assert err.startswith("alspec: exit 3: does not fit: a rank needs ")


@pytest.mark.slow
@pytest.mark.full
def test_two_ranks(checkpoint: Path, tmp_path: Path) -> None:
    """Samples and operations of each rank are written; rank 0 alone prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "launch" / "latency.py"), "--model", str(checkpoint), "--transport", "gloo"]
    done = subprocess.run(
        [*command, *map(str, (*SMALL, *outputs(tmp_path)))],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert [line[0] for line in cells(done.stdout)] == ["context", "16", "24"]
    rows = read_rows(tmp_path)
    written = json.loads((tmp_path / "out.json").read_text())
    for row, sample in zip(rows, written["samples"], strict=True):
        assert (row["case"]["world"], row["case"]["transport"]) == (2, "gloo")
        assert row["command"].startswith("torchrun --nproc-per-node 2 launch/latency.py --model")
        first, second = sample["step_us"]
        assert len(first) == len(second) == 3
        assert first != second
        slowest = [max(times) for times in zip(first, second, strict=True)]
        assert row["us"]["p50"] == pytest.approx(percentile(slowest, 0.5), abs=1e-3)
    assert len(rows) == 2
    assert {event["pid"] for event in slices(tmp_path)} == {0, 1}


@pytest.mark.slow
def test_modes_follow_each_other_in_one_job(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "launch" / "latency.py"), "--model", str(checkpoint), "--transport", "gloo"]
    (tmp_path / "text.txt").write_text("The quick brown fox. ", encoding="utf-8")
    flags = ["--contexts", "300,400", "--steps", 3, "--modes", "off,paired", "--threshold", "inf"]
    flags += ["--predictor", "window", "--prompt-file", tmp_path / "text.txt"]
    done = subprocess.run(
        [*command, *map(str, [*flags, "--rows", tmp_path / "rows.jsonl", "--json", tmp_path / "out.json"])],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    off = [["300", "off", "bf16", "-"], ["400", "off", "bf16", "-"]]
    paired = [["300", "paired", "bf16", "-"], ["400", "paired", "bf16", "100.0%"]]
    assert [line[:4] for line in cells(done.stdout)[1:]] == off + paired, "in 300 tokens no A~ can miss"
    cases = [row["case"] for row in read_rows(tmp_path)]
    assert {case["text"] for case in cases} == {"text.txt"}
    assert [(case["mode"], case["hit_rate"], case["forced"]) for case in cases] == [
        ("off", None, False),
        ("off", None, False),
        ("paired", None, False),
        ("paired", 1.0, False),
    ]


def test_pairs_need_two_ranks(profile: Profile, checkpoint: Path) -> None:
    flags = ("--model", checkpoint, "--transport", "gloo", "--contexts", 16, "--modes", "paired", "--hit-rates", 0.5)
    code, _, err = profile(*flags)
    assert code == 2
    assert "paired needs an even number of ranks" in err


def test_forced_verdicts_are_refused_before_the_first_mode(
    profile: Profile, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_engine(*args: object) -> None:
        raise AssertionError("a mode was measured before the mistake was found")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(latency, "Engine", no_engine)
    flags = ("--model", checkpoint, "--transport", "gloo", *SMALL, "--modes", "off,paired", "--hit-rates", 0.5)
    message = "flags: --hit-rates: forced verdicts need the fused kernels, which run on GPUs"
    assert profile(*flags) == (2, "", f"alspec: exit 2: {message}\n")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
def test_captured_steps(profile: Profile, tmp_path: Path) -> None:
    """The demo checkpoint, replayed: times are the device's, and the trace has the kernels of the replays."""
    flags = ("--contexts", "256,4k", "--steps", 20, "--cuda-graph", "on")
    code, out, err = profile(*flags, *outputs(tmp_path))
    assert (code, err) == (0, "")
    assert "captured graph" in out
    assert "the cache holds random numbers" in out
    rows = read_rows(tmp_path)
    assert [row["case"]["context"] for row in rows] == [256, 4096]
    for row in rows:
        assert row["case"]["cuda_graph"]
        assert row["num_gpus"] == 1
        assert 20 < row["us"]["p20"] <= row["us"]["p50"] <= row["us"]["p80"] < 20_000
        assert 0 < row["share_of_limit"] < 1
        assert row["stream_tb_s"] > 0.1
    kernels = slices(tmp_path)
    num_layers = LlamaConfig.from_folder(DEMO_CHECKPOINT).num_layers
    for step in range(1, TRACE_STEPS + 1):
        names = [event["args"]["kernel"] for event in kernels if event["args"]["step"] == step]
        assert sum("finish_step" in name for name in names) == 1
        assert len(names) >= 3 * num_layers
        layers = {event["args"]["layer"] for event in kernels if event["name"] == "attention"}
        assert layers == set(range(num_layers))
    assert {event["args"]["step"] for event in kernels} == set(range(1, TRACE_STEPS + 1))
    assert all(-1e3 < event["ts"] < 1e6 for event in kernels)


def test_rows_of_a_pair_over_a_link_tell_its_time_and_how_far_one_is_ahead() -> None:
    policy = mock.Mock(spec=PairPolicy, link_us=77.04, lead=lambda num_tokens: num_tokens // 1000)
    linked = mock.Mock(decode_step=mock.Mock(spec=CapturedStep, pair_policy=policy))
    assert latency._link_of(linked, 8192) == {"link_us": 77.0, "lead": 8}
    for step in (mock.Mock(spec=CapturedStep, pair_policy=None), mock.Mock(), None):
        assert latency._link_of(mock.Mock(decode_step=step), 8192) == {}
