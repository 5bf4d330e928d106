"""`launch/evaluate.py`, `launch/bench_kernels.py` and `launch/plot_trace.py` as commands."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from alspec.config import EngineConfig, validate
from alspec.errors import BadNumbersError, UserError
from alspec.launch import bench_kernels, evaluate, plot_trace
from alspec.launch.bench.bench_common import check_close
from alspec.launch.bench.bench_prefill import PrefillCase, check_prefill
from alspec.launch.evaluation.evaluate_tasks import record_needle_tasks
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.decode.decode_step import WARM_UP_TOKENS
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.timeline import trace_json

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
TEXT = (
    "The old man walked slowly down the road to the village. He had lived there when he was young, before the mill was "
    "closed and the river changed its course. Nobody knew him now. The houses stood where they had always stood, with "
    "their small windows and doors, and smoke rose from the chimney of the inn. He stopped at the bridge. "
) * 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl.xz"
    path.write_bytes(lzma.compress("".join(json.dumps({"text": TEXT[i::2]}) + "\n" for i in (0, 1)).encode()))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_table(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    records = tmp_path / "records.jsonl.gz"
    pairs = [[f"key-{i}", f"value-{i}"] for i in range(5)]
    case = {"ordered_kv_records": pairs, "key": "key-3", "value": "value-3"}
    records.write_bytes(gzip.compress((json.dumps(case) + "\n").encode()))
    flags = [
        "--predictor",
        "window",
        "--contexts",
        "128,512",
        "--windows",
        "1",
        "--thresholds",
        "0,inf",
        "--recall",
        "1",
        "--records",
        str(records),
    ]
    assert evaluate.main(["--text", str(text), *flags, "--rows", str(rows), "--transport", "gloo"]) == 0
    found = rows_of(rows)
    cases = [(row["case"]["measure"], row["case"]["context"], row["case"]["threshold"]) for row in found]
    measures = ["bits per byte", "bits per byte", "recall", "record recall"]
    assert [case[0] for case in cases] == [measure for measure in measures for _ in range(2)]
    assert {case[2] for case in cases} == {"0.0", "inf"}
    by_case = dict(zip(cases, found, strict=True))
    assert by_case["recall", 512, "0.0"]["value"] == 1.0
    assert by_case["recall", 512, "inf"]["value"] == 0.0
    assert by_case["bits per byte", 512, "0.0"]["hit_rate"] == 0.0
    assert by_case["bits per byte", 512, "inf"]["hit_rate"] == 1.0
    # At 128 tokens sink and window are everything: A~ is exact.
    values = [by_case["bits per byte", 128, threshold]["value"] for threshold in ("0.0", "inf")]
    assert values[0] == pytest.approx(values[1])
    assert 0.5 < values[0] < 4.0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize(("positions", "measured"), [(300, [300]), (1200, [1024])])
def test_default_contexts_fit_the_model(
    positions: int, measured: list[int], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(config))
    rows = tmp_path / "rows.jsonl"
    text.write_text(2 * TEXT)
    flags = ["--text", str(text), "--model", str(folder), "--windows", "1", "--thresholds", "0", "--transport", "gloo"]
    assert evaluate.main([*flags, "--rows", str(rows)]) == 0
    assert [row["case"]["context"] for row in rows_of(rows)] == measured
    said = f"the model takes {positions} tokens: measuring contexts of {measured[0]} tokens; --contexts names others"
    assert said in " ".join(capsys.readouterr().err.split())
    assert evaluate.main([*flags, "--contexts", "2k"]) == 2
    assert f"--contexts: 2048 is beyond the model's {positions} positions" in capsys.readouterr().err


def test_an_unused_cache_is_small(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long texts are scored without a cache too."""
    loaded: list[tuple[int, int]] = []
    load = Engine.load

    def record(engine: Engine, batch_size: int, max_context: int) -> None:
        load(engine, batch_size, max_context)
        loaded.append((engine.cache.batch_size, engine.cache.max_context))

    monkeypatch.setattr(Engine, "load", record)
    flags = ["--contexts", "128,512", "--windows", "1", "--recall", "1", "--thresholds", "0", "--transport", "gloo"]
    assert evaluate.main(["--text", str(text), *flags]) == 0
    assert loaded == [(1, WARM_UP_TOKENS)]


def test_hit_rates_where_no_spec_output_leaves_out_a_token(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is counted up to 2 S + 63 tokens: rows have no hit rate, and the table has a dash."""
    rows = tmp_path / "rows.jsonl"
    flags = ["--text", str(text), "--windows", "1", "--thresholds", "0,inf", "--transport", "gloo"]
    plot = ["--plot", str(tmp_path / "plot.svg")] if HAS_MATPLOTLIB else []
    assert evaluate.main([*flags, "--contexts", "319", "--rows", str(rows), *plot]) == 0
    assert [(row["hit_rate"], row["hit_rate_per_layer"]) for row in rows_of(rows)] == [(None, None)] * 2
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "bf16" in line]
    assert [re.split(r" *\u2502 *", line)[-2] for line in lines] == ["-", "-"]
    assert "hit rate: counted from 320 tokens on" in " ".join(out.split())
    rows.unlink()
    assert evaluate.main([*flags, "--contexts", "320", "--rows", str(rows)]) == 0
    assert [row["hit_rate"] for row in rows_of(rows)] == [0.0, 1.0]


def test_caches_needles_and_baselines(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every combination of the flags is measured once; fixed layers get the verdicts that their hit rates give."""
    rows = tmp_path / "rows.jsonl"
    flags = [
        "--predictor",
        "window",
        "--contexts",
        "350",
        "--windows",
        "1",
        "--needles",
        "1",
        "--depths",
        "0.5",
        "--transport",
        "gloo",
    ]
    flags += ["--codecs", "bf16,turbo4", "--thresholds", "0.02", "--threshold", "0.02", "--baselines"]
    assert evaluate.main(["--text", str(text), *flags, "--rows", str(rows)]) == 0
    found = rows_of(rows)
    values = {tuple(row["case"][name] for name in ("cache", "threshold", "measure")): row for row in found}
    assert len(values) == len(found) == 2 * 3 * 2
    for cache in ("bf16", "turbo4"):
        text_row, fixed = (values[cache, threshold, "bits per byte"] for threshold in ("0.02", "fixed"))
        assert fixed["hit_rate_per_layer"] == [float(rate > 0.8) for rate in text_row["hit_rate_per_layer"]]
        assert 0 < fixed["hit_rate"] < 1
        assert values[cache, "inf", "needle"]["hit_rate"] == 1.0
    assert values["bf16", "0.02", "needle"]["value"] == 1.0
    out = capsys.readouterr().out
    assert all(name in out for name in ("turbo4", "fixed layers", "needle 350"))


def test_records_over_context_and_depth(text: Path, tmp_path: Path) -> None:
    """A context holds as many pairs as fit, with the requested one at its depth; the last length holds all pairs."""
    records, rows = tmp_path / "records.jsonl.gz", tmp_path / "rows.jsonl"
    pairs = [(f"key-{i}", f"value-{i}") for i in range(40)]
    case = {"ordered_kv_records": pairs, "key": "key-17", "value": "value-17"}
    records.write_bytes(gzip.compress((json.dumps(case) + "\n").encode()))
    engine = Engine(validate(EngineConfig, {"speculation": {"mode": "simulated"}, "transport": "gloo"}, "test"))
    tasks = record_needle_tasks(engine, records, [100, 300, 8000, 8192], [0.0, 0.5, 1.0], 5)
    with pytest.raises(UserError, match="30 tokens do not hold one pair"):
        record_needle_tasks(engine, records, [30, 300], [0.5], 5)
    engine.close()
    assert [task.depth for task in tasks] == [0.0, 0.5, 1.0] * 3
    counts = []
    for task in tasks:
        (prompt,), (answer,) = task.texts, task.answers or []
        keys = re.findall(r'"(key-\d+)": "value-', engine.tokenizer.decode(prompt))
        assert keys.index("key-17") == round((task.depth or 0.0) * (len(keys) - 1))
        assert task.context - 40 < len(prompt + answer) <= task.context
        assert engine.tokenizer.decode(answer) == ' "value-17"'
        counts.append(len(keys))
    assert 1 < counts[0] < counts[3] < counts[6] == 40
    assert tasks[6].context == tasks[8].context < 8000

    flags = ["--contexts", "220,350", "--windows", "0", "--needles", "1", "--depths", "0,1", "--thresholds", "0"]
    flags += ["--records", str(records), "--rows", str(rows), "--transport", "gloo"]
    assert evaluate.main(["--text", str(text), *flags]) == 0
    found = [row["case"] for row in rows_of(rows) if row["case"]["measure"] == "record needle"]
    assert [(case["context"], case["depth"]) for case in found] == [(220, 0.0), (220, 1.0), (350, 0.0), (350, 1.0)]


def test_every_softmax_is_measured_over_every_cache(text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = ["--predictor", "window", "--contexts", "200", "--windows", "1", "--thresholds", "0", "--transport", "gloo"]
    flags += ["--codecs", "bf16,turbo4", "--softmaxes", "exact,sas"]
    assert evaluate.main(["--text", str(text), *flags, "--rows", str(rows)]) == 0
    found = {row["case"]["cache"]: row["value"] for row in rows_of(rows)}
    assert list(found) == ["bf16", "bf16, sas", "turbo4", "turbo4, sas"]
    assert 0 < abs(found["bf16, sas"] - found["bf16"]) < abs(found["turbo4"] - found["bf16"]) < 0.1 * found["bf16"]
    assert found["turbo4, sas"] != found["turbo4"]


def test_recalled_blocks_raise_hits(text: Path, tmp_path: Path) -> None:
    """Four blocks are all that lies between sink and window here: only a block that has just left the window is not."""
    rows = tmp_path / "rows.jsonl"
    flags = ["--contexts", "500", "--windows", "1", "--thresholds", "0.01", "--transport", "gloo"]
    assert evaluate.main(["--text", str(text), *flags, "--recall-counts", "0,1,4", "--rows", str(rows)]) == 0
    found = {row["case"]["cache"]: row for row in rows_of(rows)}
    assert list(found) == ["bf16", "bf16, 1 blocks recalled", "bf16, 4 blocks recalled"]
    assert [row["case"]["recall_blocks"] for row in found.values()] == [0, 1, 4]
    window, one, all_blocks = (row["hit_rate"] for row in found.values())
    assert window < one < all_blocks
    assert all_blocks > 0.97


@pytest.mark.full
def test_ablations_measure_each_setting_once(text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = [
        "--predictor",
        "window",
        "--contexts",
        "200",
        "--windows",
        "1",
        "--thresholds",
        "0",
        "--codecs",
        "bf16,turbo4,turbo-mixed",
    ]
    flags += ["--block-sizes", "32,128", "--selectors", "gap_std,entropy", "--low-heads", "0,1"]
    assert evaluate.main(["--text", str(text), *flags, "--rows", str(rows), "--transport", "gloo"]) == 0
    found = {row["case"]["cache"]: row["value"] for row in rows_of(rows)}
    assert len(found) == 1 + 2 + 2 * 2 * 2
    # Without heads at 2 bits, turbo-mixed is turbo4 with any selector.
    assert found["turbo-mixed, blocks of 32, entropy, 0 heads low"] == found["turbo4, blocks of 32"]
    assert found["turbo-mixed, blocks of 32, 1 heads low"] != found["turbo4, blocks of 32"]


def test_ablations_of_turboquant_change_the_codecs_that_have_them(text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    flags = ["--predictor", "window", "--contexts", "200", "--windows", "1", "--thresholds", "0", "--transport", "gloo"]
    flags += ["--codecs", "bf16,turbo4,turboquant3,hybrid-k4v3", "--protect", "0,2", "--qjl", "off,orthogonal"]
    assert evaluate.main(["--text", str(text), *flags, "--rows", str(rows)]) == 0
    names = ("codec", "protect", "qjl", "norm_correction", "value_quantiser")
    found = {tuple(row["case"][name] for name in names): row for row in rows_of(rows)}
    assert list(found) == [
        ("bf16", 0, "off", True, "codebook"),
        *(("turbo4", protect, "off", True, "codebook") for protect in (0, 2)),
        *(("turboquant3", protect, sketch, True, "codebook") for protect in (0, 2) for sketch in ("off", "orthogonal")),
        *(("hybrid-k4v3", protect, "off", True, "codebook") for protect in (0, 2)),
    ]
    assert len({row["value"] for row in found.values()}) == len(found)
    assert {row["case"]["model"] for row in found.values()} == {"demo"}
    assert found["turboquant3", 2, "orthogonal", True, "codebook"]["case"]["cache"] == (
        "turboquant3, 2 layers at each end in bf16, orthogonal QJL"
    )


def test_a_terminal_shows_progress(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    flags = [
        "--predictor",
        "window",
        "--contexts",
        "200,300",
        "--windows",
        "1",
        "--thresholds",
        "0",
        "--codecs",
        "bf16,turbo4",
    ]
    assert evaluate.main(["--text", str(text), *flags, "--transport", "gloo"]) == 0
    err = capsys.readouterr().err
    shown = re.findall(r"\x1b\[Kalspec: ([^\r]*)", err)
    tasks = [f"bits per byte, 1 of {size} tokens, {cache}" for cache in ("bf16", "turbo4") for size in (200, 300)]
    assert shown == ["loading weights", *tasks]
    assert err.endswith("\r\x1b[K"), "the table does not begin on an empty line"


def request_plot(monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: list[list[dict[str, Any]]]) -> Path:
    """Set the arguments of `plot_trace.main`: layers 0 to 2 of step 1 of a trace; returns the picture's path."""
    (folder / "trace.json").write_text(trace_json(ranks))
    picture = folder / "picture.svg"
    flags = [str(folder / "trace.json"), str(picture), "--step", "1", "--layers", "0:3"]
    monkeypatch.setattr("sys.argv", ["plot_trace", *flags])
    return picture


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_plot(text: Path, tmp_path: Path) -> None:
    picture = tmp_path / "quality.svg"
    flags = [
        "--predictor",
        "window",
        "--contexts",
        "300",
        "--windows",
        "0",
        "--needles",
        "1",
        "--depths",
        "0,1",
        "--thresholds",
        "0,inf",
    ]
    assert evaluate.main(["--text", str(text), *flags, "--plot", str(picture), "--transport", "gloo"]) == 0
    drawn = picture.read_text(encoding="utf-8")
    assert all(title in drawn for title in ("needle recalled, lambda 0", "needle recalled, lambda inf", "hit rate"))


def test_bits_per_byte_of_a_known_model(text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that gives every token the same probability spends log2(vocabulary) bits on each."""
    monkeypatch.setattr("alspec.models.llama.Llama.lm_head", lambda self, x: torch.zeros(x.shape[0], 4096))
    rows = tmp_path / "rows.jsonl"
    flags = ["--contexts", "256", "--windows", "1", "--thresholds", "0", "--rows", str(rows), "--transport", "gloo"]
    assert evaluate.main(["--text", str(text), *flags]) == 0
    bytes_per_token = math.log2(4096) / rows_of(rows)[0]["value"]
    assert 2.5 < bytes_per_token < 5.5


def test_bytes_of_characters_that_windows_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each byte counts once, also if a character begins in one window and ends in the next."""
    monkeypatch.setattr("alspec.models.llama.Llama.lm_head", lambda self, x: torch.zeros(x.shape[0], 4096))
    text = "道可道。非常道。名可名。非常名。 " * 60
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    flags = ["--contexts", "32", "--windows", "40", "--thresholds", "0", "--rows", str(tmp_path / "rows.jsonl")]
    assert evaluate.main(["--text", str(tmp_path / "text.txt"), *flags, "--transport", "gloo"]) == 0
    (row,) = rows_of(tmp_path / "rows.jsonl")
    num_tokens = 31 * row["case"]["samples"]
    core = tokenizers.Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
    # A byte-level tokenizer writes each byte as one character.
    num_bytes = sum(map(len, core.encode(text, add_special_tokens=False).tokens[:num_tokens]))
    assert 12 * num_tokens / row["value"] == pytest.approx(num_bytes, abs=2)  # the last character may be cut


def test_recall_needs_words_for_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("a b c. d e f.")
    flags = ["--windows", "0", "--recall", "1", "--contexts", "1k", "--transport", "gloo"]
    assert evaluate.main(["--text", str(tmp_path / "short.txt"), *flags]) == 2
    why = "recall prompts take keys from it: expected at least 8 words of 4 to 8 letters, found 0"
    assert capsys.readouterr().err == f"alspec: exit 2: flags: --text: {why}\n"


def test_text_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--recall", "1"]) == 2
    expected = "flags: --text: none given; give a .txt, .jsonl or .jsonl.xz file"
    assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_plot_with_an_unknown_extension(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plot.foo"
    assert evaluate.main(["--text", str(text), "--plot", str(picture)]) == 2
    expected = f"flags: --plot: expected a file that ends in .png, .svg, .pdf, found {str(picture)!r}"
    assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


def test_plot_without_matplotlib(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert evaluate.main(["--text", str(text), "--plot", str(tmp_path / "plot.png")]) == 2
    expected = "flags: --plot: needs matplotlib; pip install -e '.[plot]'"
    assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


def test_work_of_prefill_attention() -> None:
    """4 queries over 64 tokens in two heads: K and V in bf16, or in INT8 with a scale for each block."""
    q, (k, v) = torch.zeros(4, 4, 8, dtype=torch.bfloat16), torch.zeros(2, 2, 64, 8, dtype=torch.bfloat16)
    case = PrefillCase(q, k, v, k.to(torch.int8), v.to(torch.int8), torch.ones(2, 1), torch.ones(2, 1))
    q_and_o = 2 * 2 * 4 * 4 * 8
    assert case.num_bytes("torch.sdpa") == q_and_o + 2 * 2 * 2 * 64 * 8 == case.num_bytes("alspec.prefill_attention")
    assert case.num_bytes("alspec.int8_prefill_attention") == q_and_o + 2 * (2 * 64 * 8 + 2 * 4)


def test_a_wrong_result_ends_a_bench_like_bad_numbers() -> None:
    check_close("sum", torch.full((3,), 1.0009), torch.ones(3).double(), 1e-3)
    for wrong in (0.0, 1.0011, torch.nan):
        with pytest.raises(BadNumbersError, match=r"wrong sum: relative error .*, tolerance 1e-03"):
            check_close("sum", torch.full((3,), wrong), torch.ones(3).double(), 1e-3)
    q, (k, v) = torch.randn(64, 4, 128), torch.randint(-9, 9, (2, 2, 64, 128), dtype=torch.int8)
    case = PrefillCase(q, k.float(), v.float(), k, v, torch.ones(2, 1), torch.ones(2, 1))
    with pytest.raises(BadNumbersError, match="wrong rows 0 to 64 of 64: relative error"):
        check_prefill(case, lambda _: torch.zeros_like(q))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main([]) == 2
    assert capsys.readouterr().err == "alspec: exit 2: bench_kernels: needs a CUDA GPU, found none\n"


def test_bench_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_kernels.main(["--bench", "allreduce"]) == 2
    expected = "bench_kernels: needs a CUDA GPU for each rank, found 1 for 2 ranks"
    assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


def test_a_bench_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(bench_kernels, "Results", no_memory)
    assert bench_kernels.main([]) == 3
    assert capsys.readouterr().err == "alspec: exit 3: out of memory: CUDA out of memory. Lower --contexts\n"


def test_plot_trace_draws_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(op: str, layer: int, start: float, end: float) -> dict[str, Any]:
        return {"op": op, "layer": layer, "step": 1, "start_us": start, "end_us": end}

    ranks = [
        [row("full_attention", 0, 0.0, 10.0), row("full_attention", 1, 30.0, 40.0)],
        [row("post_attention", 0, 4.0, 8.0), row("post_attention", 1, 41.0, 45.0)],
    ]
    (tmp_path / "trace.json").write_text(trace_json(ranks))
    picture = tmp_path / "picture.png"
    argv = ["plot_trace", str(tmp_path / "trace.json"), str(picture), "--step", "1", "--layers", "0:2"]
    monkeypatch.setattr("sys.argv", argv)
    assert plot_trace.main() == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "in 1 of 2 layers" in capsys.readouterr().out


def test_plot_trace_of_captured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed kernels are not work, and a kernel that was launched early began only when it was ready."""

    def row(op: str, layer: int, times: tuple[float, float, float], is_open: bool = True) -> dict[str, Any]:
        """Times: start, ready, end."""
        kernel = "_finish_step_kernel" if op == "lm_head" else f"_{op}_kernel"
        moments = {"start_us": times[0], "ready_us": times[1], "end_us": times[2]}
        return {"op": op, "kernel": kernel, "layer": layer, "step": 1, "open": is_open} | moments

    ranks = [
        [
            row("full_attention", 0, (0, 0, 10)),
            row("post_attention", 0, (5, 10, 11), is_open=False),
            row("full_attention", 1, (11, 11, 12), is_open=False),
            row("post_attention", 1, (11, 29, 33)),
            row("full_attention", 2, (33, 33, 40)),
            row("lm_head", 3, (40, 40, 44)),
        ],
        [
            row("full_attention", 0, (0, 0, 3), is_open=False),
            row("post_attention", 0, (2, 6, 9)),
            row("full_attention", 1, (9, 9, 25)),
            row("post_attention", 1, (24, 25, 26), is_open=False),
            row("post_attention", 2, (30, 39, 42)),
            row("lm_head", 3, (41, 42, 45.5)),
        ],
    ]
    picture = request_plot(monkeypatch, tmp_path, ranks)
    drawn = []
    draw = plot_trace._draw
    monkeypatch.setattr(plot_trace, "_draw", lambda bars, *rest: (drawn.extend(bars), draw(bars, *rest)))
    assert plot_trace.main() == 0
    spans = [(bar["rank"], bar["op"][:4], bar["layer"], bar["begin"], bar["end"]) for bar in drawn]
    assert sorted(spans) == [
        (0, "full", 0, 0, 10),
        (0, "full", 2, 33, 40),
        (0, "post", 1, 29, 33),
        (1, "full", 1, 9, 25),
        (1, "post", 0, 6, 9),
        (1, "post", 2, 39, 42),
    ]
    assert "handover" not in picture.read_text()
    out = capsys.readouterr().out
    assert "in 2 of 3 layers" in out
    assert "within 1.5 us on all ranks" in out


def test_plot_trace_counts_accepted_spec_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`A~` of the second of three layers is rejected: its sender recomputes and stays the sender."""

    def row(op: str, layer: int, start: float, end: float) -> dict[str, Any]:
        return {"op": op, "kernel": op, "layer": layer, "step": 1, "start_us": start, "end_us": end, "open": True}

    ranks = [
        [
            row("full_attention", 0, 0, 10),
            row("post_attention", 1, 15, 20),
            row("post_attention", 2, 35, 40),
            row("post_attention", 2, 40, 43),
        ],
        [
            row("post_attention", 0, 2, 7),
            row("post_attention", 0, 7, 9),
            row("full_attention", 1, 12, 22),
            row("post_attention", 1, 22, 30),
            row("full_attention", 2, 32, 42),
        ],
    ]
    picture = request_plot(monkeypatch, tmp_path, ranks)
    parts = []
    original = plot_trace._parts
    monkeypatch.setattr(plot_trace, "_parts", lambda *given: parts.extend(original(*given)) or parts)
    assert plot_trace.main() == 0
    assert [(part["rank"], part["op"], part["begin"], part["end"], part["label"]) for part in parts] == [
        (0, "predictor", 0, 2, ""),
        (0, "full_attention", 2, 10, "full attention"),
        (0, "rejected", 15, 20, "on A~"),
        (0, "post_attention", 35, 43, "on A~"),
        (1, "post_attention", 2, 9, "on A~"),
        (1, "predictor", 12, 15, ""),
        (1, "full_attention", 15, 22, "full attention"),
        (1, "post_attention", 22, 30, "recompute"),
        (1, "predictor", 32, 35, ""),
        (1, "full_attention", 35, 42, "full attention"),
    ]
    words = picture.read_text()
    assert words.count("<!-- accepted: -->") == 2
    assert words.count("<!-- rejected: -->") == 1
    out = capsys.readouterr().out
    assert "2 of 3 A~ were accepted" in out
    assert "where accepted, the next full attention began 12 us after this one" in out
    assert "where rejected, the next full attention began 20 us after this one" in out


def test_plot_trace_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit 2, and no picture."""

    def row(op: str, start: float) -> dict[str, Any]:
        return {"op": op, "layer": 0, "step": 1, "start_us": start, "end_us": start + 4.0}

    alone, pair, broken = (tmp_path / name for name in ("alone.json", "pair.json", "broken.json"))
    alone.write_text(trace_json([[row("full_attention", 0.0), row("post_attention", 4.0)]]))
    pair.write_text(trace_json([[row("full_attention", 0.0)], [row("post_attention", 2.0)]]))
    broken.write_text("no JSON", encoding="utf-8")
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    (tmp_path / "list.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "rows.json").write_text('{"rows": []}', encoding="utf-8")
    (tmp_path / "foreign.json").write_text('{"traceEvents": [{"ph": "X", "name": "a", "args": {}}]}', encoding="utf-8")
    picture = tmp_path / "picture.png"

    def refused(*flags: object) -> str:
        assert plot_trace.main([str(flag) for flag in flags]) == 2
        err = capsys.readouterr().err
        assert err.startswith("alspec: exit 2: ")
        assert err.count("\n") == 1
        assert not picture.exists()
        return err

    if HAS_MATPLOTLIB:
        assert "trace: cannot read nowhere.json: No such file or directory" in refused(
            "nowhere.json", picture, "--step", 1
        )
        for name, what in (
            ("broken.json", "is not JSON: "),
            ("broken.gz", "is not JSON: "),
            ("list.json", "is no trace: it has no traceEvents; give a file written by --trace"),
            ("rows.json", "is no trace: it has no traceEvents; give a file written by --trace"),
            ("foreign.json", "is a trace of something else: its events lack step or layer; give a file written by"),
        ):
            assert f"trace: {tmp_path / name} {what}" in refused(tmp_path / name, picture, "--step", 1)
        for layers in ("4", "a:b", "4:", "-1:2", "3:3"):
            expected = f"flags: --layers: expected first:last such as 4:8, found {layers!r}"
            assert expected in refused(pair, picture, "--step", 1, f"--layers={layers}")
        expected = "picture: expected a file that ends in .png, .svg, .pdf, found 'picture.foo'"
        assert expected in refused(pair, "picture.foo", "--step", 1)
        assert f"{alone} has no pair" in refused(alone, picture, "--step", 1)
        assert f"{pair} has no operation of step 2, layers 0:4" in refused(pair, picture, "--step", 2)
    assert "flags: the following arguments are required: --step" in refused(pair, picture)
    assert "unknown flag --stp; the nearest valid name is --step" in refused(pair, picture, "--step", 1, "--stp", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "picture: needs matplotlib; pip install -e '.[plot]'" in refused("nowhere.json", picture, "--step", 1)
