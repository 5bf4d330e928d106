"""The tables and pictures of docs/results are those of the measured rows."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import results_folder
from paths import ROOT
from results_folder import copy_results, run_script


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that the tables read and write."""
    return copy_results(tmp_path)


def make_tables(project: Path, **rows: list[str]) -> list[str]:
    """Lines of docs/results/README.md, with other rows in the named files."""
    for name, lines in rows.items():
        (project / "docs" / "results" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return results_folder.make_tables(project)


def test_tables_are_those_of_the_rows(project: Path) -> None:
    subprocess.run([sys.executable, project / "docs" / "results" / "tables.py"], check=True)
    pages = ("performance.md", "turbo_attention.md", "recall.md", "drafts.md", "weights.md", "results/README.md")
    for name in ("README.md", *(f"docs/{page}" for page in pages)):
        assert (project / name).read_text() == (ROOT / name).read_text(), f"run docs/results/tables.py: {name} is old"


def test_a_pair_that_always_paused_has_a_line_for_each_forced_rate(project: Path) -> None:
    """Rows without verdicts have no hit rate; the rate that was asked for keeps them apart."""
    path = project / "docs" / "results" / "linked_hosts.jsonl"
    found = list(map(json.loads, path.read_text().splitlines()))
    paused = [row for row in found if row["case"]["forced"] and row["case"]["hit_rate"] is None]
    assert len(paused) == 3
    rows = [row | {"case": row["case"] | {"forced_rate": rate}} for rate in (0.94, 1.0) for row in paused]
    others = [row for row in found if row not in paused]
    lines = make_tables(project, linked_hosts=[json.dumps(row) for row in (*others, *rows)])
    for rate in (94, 100):
        start = f"| 2 + 2, no layer speculates ({rate}% forced to accept), with pauses |"
        assert sum(line.startswith(start) for line in lines) == 1


def test_tables_of_decode_steps(project: Path) -> None:
    """A line for each configuration, a column for each context; performance.md has captured steps of the 8B shape."""
    (
        project / "docs" / "results" / "turbo_attention.jsonl"
    ).unlink()  # so that the quantised table is that of whole steps

    def row(
        shape: str, world: int, context: int, tokens_per_s: float, cuda_graph: bool = True, kv_cache: str = "bf16"
    ) -> str:
        transport = "symm" if world > 1 else None
        case = {"shape": shape, "world": world, "mode": "off", "transport": transport, "cuda_graph": cuda_graph}
        case |= {
            "dtype": "bf16",
            "batch": 1,
            "context": context,
            "kv_cache": kv_cache,
            "hit_rate": None,
            "forced": False,
        }
        rest = {
            "gpu": "NVIDIA H200",
            "num_gpus": world,
            "versions": {"torch": "2.11.0"},
            "command": "launch/latency.py",
        }
        found = {"us": {"p50": 1e6 / tokens_per_s}, "tokens_per_s": tokens_per_s, "share_of_limit": 0.875}
        return json.dumps({"bench": "decode_step", "impl": "alspec.off", "case": case} | found | rest)

    rows = [
        row("llama-3.1-8b", 1, 8192, 100.0),
        row("llama-3.1-8b", 1, 1024, 250.4),
        row("llama-3.1-8b", 1, 8192, 240.0),  # measured again
        row("llama-3.1-8b", 4, 1024, 800.0),
        row("llama-3.1-8b", 4, 1024, 90.0, cuda_graph=False),
        row("llama-3.1-70b", 4, 1024, 100.0),
        row("llama-3.1-8b", 1, 1024, 200.0, kv_cache="turbo4"),
        row("llama-3.1-8b", 1, 8192, 160.0, kv_cache="turbo4"),
        row("llama-3.1-8b", 1, 1024, 125.0, kv_cache="turbo-mixed"),
    ]
    for _ in range(2):
        long = make_tables(project, decode_step=rows)
        performance = (project / "docs" / "performance.md").read_text()
        short = performance.split("<!-- decode_step -->")[1].split("<!-- /decode_step -->")[0]
        assert [line for line in short.splitlines() if line.startswith("|")] == [
            "| GPUs, off | 1024 | 8192 |",
            "| --- | --- | --- |",
            "| 1 | 250 (88%) | 240 (88%) |",
            "| 4 | 800 (88%) |  |",
        ]
        caches = performance.split("<!-- quantised -->")[1].split("<!-- /quantised -->")[0]
        assert [line for line in caches.splitlines() if line.startswith("|")] == [
            "| whole step, ms | 1024 |",
            "| --- | --- |",
            "| bf16 | 3.99 |",
            "| turbo4 | 5.00 |",
            "| turbo-mixed | 8.00 |",
        ]
    assert "| llama-3.1-8b | 4 | off | symm | one by one | bf16 | 1 | bf16, random numbers |  | 90 (88%) |  |" in long
    assert "| llama-3.1-70b | 4 | off | symm | captured | bf16 | 1 | bf16, random numbers |  | 100 (88%) |  |" in long


def test_tables_of_pairs_and_all_reduces(project: Path) -> None:
    """A pair beside `off` on the same GPUs and beside the latency model; all-reduces, a column for each."""
    rest = {"gpu": "NVIDIA H200", "num_gpus": 2, "versions": {"torch": "2.11.0"}, "command": "launch/latency.py"}

    def row(
        mode: str,
        p50: float,
        hit_rate: float | None = None,
        text: str | None = None,
        part: str = "",
        commit: str = "new",
    ) -> str:
        case = {"shape": "llama-3.1-8b", "world": 2, "mode": mode, "transport": "symm", "cuda_graph": True}
        case |= {"dtype": "bf16", "batch": 1, "context": 8192, "kv_cache": "bf16", "hit_rate": hit_rate}
        case |= {"forced": False, "text": text}
        shown = {"us": {"p50": p50}, "tokens_per_s": 1e6 / p50, "share_of_limit": None}
        bench = {"bench": "decode_step"}
        if part:
            case["part"] = part
            bench = {"bench": "decode_parts", "untraced_us": 1000.0, "num_layers": 10}
        return json.dumps(bench | {"case": case, "commit": commit} | shown | rest)

    parts = {"attention": 70.0, "sender": 80.0, "receiver": 20.0, "layer": 40.0, "fixed": 50.0, "step": 1100.0}
    rows = [
        row("off", 1200.0),
        row("paired", 1050.0, 0.5),
        row("paired", 1000.0, 1.0, commit="old"),
        row("paired", 900.0, 0.5, "book.txt"),
        row("off", 990.0, text="book.txt"),
        row("off", 1100.0, commit="newest"),
        *(row("paired", p50, 0.5, part=part) for part, p50 in parts.items()),
    ]
    sums = [
        {"bench": "allreduce_rmsnorm", "impl": impl, "case": {"world": 4, "batch": batch}, "bytes": 16384 * batch}
        | {"us": {"p20": p50 - 1, "p50": p50, "p80": p50 + 1}}
        | rest
        for batch in (4, 1)
        for impl, p50 in (("nccl", 20.0), ("alspec", 2.0 + batch))
    ]
    long = make_tables(project, decode_step=rows, allreduce=list(map(json.dumps, sums)))
    # Beside `off` of its commit. 5 accepted layers of max(80, 20 + 40) and 5 rejected ones of 80 + 40, and 50.
    begin = "| llama-3.1-8b | 1 + 1 | symm | 1 |"
    assert f"{begin} bf16, random numbers | 8192 | 50% | 1.050 | 1.200 | 1.14x | 1.050 | +0.0% | +10.0% |" in long
    # The pair is of another commit than the last `off` and the parts, so both are marked. 10 layers accept, and 50.
    cells = "8192 | 100% | 1.000 | 1.100 | 1.10x\\* | 0.850\\*\\* | +17.6%\\*\\* | +10.0% |"
    assert f"{begin} bf16, random numbers | {cells}" in long
    assert "\\* The pair was measured at an earlier commit than `off`." in long
    assert "\\*\\* The parts given to the model were measured at another commit than the pair." in long
    assert f"{begin} bf16, book.txt | 8192 | 50% | 0.900 | 0.990 | 1.10x |  |  |  |" in long
    numbers = "70.0 | 80.0 | 20.0 | 40.0 | 50.0 | 1100.0"
    parts_line = f"| llama-3.1-8b | 2 | symm | 8192 | bf16, random numbers | 50% | {numbers} |"
    assert parts_line in long
    assert long[long.index("| GPUs | batch | KB | nccl | alspec |") + 2 :][:2] == [
        "| 4 | 1 | 16 | 19.0 / 20.0 / 21.0 | 2.0 / 3.0 / 4.0 |",
        "| 4 | 4 | 64 | 19.0 / 20.0 / 21.0 | 5.0 / 6.0 / 7.0 |",
    ]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the tables."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    return importlib.import_module("tables")


def step_row(mode: str, p50: float, **of_case: object) -> dict[str, Any]:
    """A captured step of the 8B shape on two GPUs."""
    case = {"shape": "llama-3.1-8b", "world": 2, "mode": mode, "transport": "symm", "cuda_graph": True, "batch": 1}
    case |= {"dtype": "bf16", "context": 1024, "kv_cache": "bf16", "hit_rate": None, "forced": False, "text": None}
    rest = {"gpu": "NVIDIA H200", "num_gpus": 2, "versions": {"torch": "2.11.0"}, "command": "launch/latency.py"}
    found = {"us": {"p50": p50}, "tokens_per_s": 1e6 / p50, "share_of_limit": 0.5, "commit": "new"}
    return {"bench": "decode_step", "impl": f"alspec.{mode}", "case": case | of_case} | found | rest


def test_a_pair_stands_beside_off_over_the_same_cache(tables: ModuleType) -> None:
    """`off` has the same softmax; the latency model has no value for several requests."""
    of_pair = {"hit_rate": 0.5, "kv_cache": "turbo4", "softmax": "sas", "batch": 2}
    rows = [step_row("paired", 900.0, **of_pair)]
    rows += [
        step_row("off", p50, **of_pair | {"hit_rate": None, "softmax": softmax})
        for softmax, p50 in (("sas", 990.0), ("exact", 800.0))
    ]
    parts = [
        step_row("paired", 50.0, **of_pair, part=part) | {"untraced_us": 50.0, "num_layers": 10}
        for part in ("attention", "sender", "receiver", "layer", "fixed", "step")
    ]
    text = tables.against_off("Pairs", rows, parts)
    cells = "turbo4 with sas, random numbers | 1024 | 50% | 0.900 | 0.990 | 1.10x |  |  |  |"
    assert f"| llama-3.1-8b | 1 + 1 | symm | 2 | {cells}" in text


def test_other_spec_settings_have_lines_of_their_own(tables: ModuleType) -> None:
    """Rows without lambda and S have the defaults; forced verdicts do not depend on lambda."""
    ways: list[dict[str, Any]] = [{}, {"threshold": 0.1, "chunk_size": 128}, {"threshold": 0.2, "chunk_size": 128}]
    ways += [{"threshold": "inf", "chunk_size": 512}, {"threshold": 0.2, "chunk_size": 128, "forced": True}]
    rows = [step_row("paired", 1000.0 - at, hit_rate=0.5, **way) for at, way in enumerate(ways)]
    parts = [
        step_row("paired", us, hit_rate=0.5, **way, part=part) | {"untraced_us": 50.0, "num_layers": 10}
        for us, way in ((50.0, ways[0]), (70.0, ways[3]))
        for part in ("attention", "sender", "receiver", "layer", "fixed", "step")
    ]
    found = ["50%", "50%, lambda 0.2", "50%, lambda inf, S = 512", "50% forced"]
    lines = [line.split(" | ") for line in tables.steps("Steps", rows).splitlines() if line.startswith("| llama")]
    assert [line[8] for line in lines] == found
    text = tables.against_off("Pairs", [*rows, step_row("off", 1200.0)], parts)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| llama-3.1-8b | 1 + 1 |")]
    # 5 accepted layers of 100 and 5 rejected ones of 100, and 50; of the longer parts as many of 140, and 70.
    expected = [["0.999", "1.050"], ["0.998", ""], ["0.997", "1.470"], ["0.996", "1.050"]]
    assert [[line[7], line[10]] for line in lines] == expected
    assert [line[6] for line in lines] == found


def test_short_tables_are_of_random_numbers_and_the_exact_softmax(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later rows of other kinds change nothing."""
    alone = {"world": 1, "transport": None}
    rows = [
        step_row("off", p50, kv_cache=codec, **alone)
        for codec, p50 in (("bf16", 4000.0), ("turbo4", 5000.0), ("turbo-mixed", 8000.0))
    ]
    rows += [step_row("off", 6000.0, kv_cache="turbo4", softmax="sas", **alone)]
    rows += [step_row("off", 10000.0, text="book.txt", **alone)]
    for module in (tables, sys.modules["sections.codec_tables"]):
        monkeypatch.setattr(module, "read", lambda name, bench=None: rows if name == "decode_step.jsonl" else [])
    assert "\n| 1 | 250 (50%) |" in tables.short_steps()
    caches = [line for line in tables.short_quantised().splitlines() if line.startswith("|")]
    assert caches[2:] == ["| bf16 | 4.00 |", "| turbo4 | 5.00 |", "| turbo-mixed | 8.00 |"]


def test_sampling_is_compared_at_the_same_length(tables: ModuleType) -> None:
    """The order of rows does not matter, and a length may be missing."""
    measured = [
        (8192, 2000.0, {}),
        (1024, 1000.0, {}),
        (8192, 2050.0, {"temperature": 1.0}),
        (1024, 1030.0, {"temperature": 1.0}),
        (8192, 2080.0, {"temperature": 1.0, "top_k": 5}),
        (512, 1.0, {"temperature": 1.0, "top_k": 5}),
    ]
    run = {"command": "c", "gpu": "one", "num_gpus": 1, "versions": {"torch": "t"}}
    rows = [run | {"case": {"context": context} | way, "us": {"p50": us}} for context, us, way in measured]
    lines = tables.sampled(rows).splitlines()
    assert "| choice | 1024 tokens | 8192 tokens |" in lines
    assert "| temperature 1.0 | 1.030 (+30 us) | 2.050 (+50 us) |" in lines
    assert "| temperature 1.0, top_k 5 |  | 2.080 (+80 us) |" in lines


def test_tables_of_attention_over_quantised_caches(project: Path) -> None:
    """How many times faster than bf16 under the same heading; SAS beside exact; prefill against SDPA."""
    rest = {"gpu": "NVIDIA H200", "num_gpus": 1, "versions": {"torch": "2.11.0"}, "command": "launch/bench_kernels.py"}

    def row(bench: str, impl: str, us: float, **case: object) -> str:
        return json.dumps({"bench": bench, "impl": impl, "case": case, "us": {"p50": us}, "tflop_s": 500.0} | rest)

    at = {"heads": "32/8", "context": 8192}
    rows = [
        row("decode_attention", "torch.sdpa", 15.0, codec="bf16", **at),
        row("decode_attention", "alspec.lean_decode_attention", 12.0, codec="bf16", **at),
        row("speculative_decode", "alspec.lean_decode_attention", 14.0, codec="bf16", **at),
        row("decode_attention", "alspec.quantised_decode_attention", 8.0, codec="turbo4", **at),
        row("decode_attention", "alspec.quantised_decode_attention.sas", 10.0, codec="turbo4", **at),
        row("speculative_decode", "alspec.quantised_decode_attention", 7.0, codec="turbo4", **at),
    ]
    prompts = [
        row("prefill_attention", impl, us, tokens=4096, **at)
        for impl, us in (("torch.sdpa", 900.0), ("alspec.int8_prefill_attention", 600.0))
    ]
    long = make_tables(project, turbo_attention=rows, prefill_attention=prompts)
    plain = long.index("### 32/8 heads of 128, plain")
    assert long[plain + 4 : plain + 8] == [
        "| torch SDPA, bf16 | 15.0 (0.80x) |",
        "| bf16 | 12.0 (1.00x) |",
        "| turbo4 | 8.0 (1.50x) |",
        "| turbo4, SAS | 10.0 (1.20x) |",
    ]
    spec = long.index("### 32/8 heads of 128, with `A~` and verdict")
    assert long[spec + 4 : spec + 6] == ["| bf16 | 14.0 (1.00x) |", "| turbo4 | 7.0 (2.00x) |"]
    assert "| 4096 | 8192 | 900, 500 TFLOP/s, 1.00x | 600, 500 TFLOP/s, 1.50x |" in long


def quality_row(measure: str, context: int, value: float, rates: list[float] | None = None, **of_case: object) -> str:
    """A row of the reference semantics over a cache, in bf16."""
    case = {"measure": measure, "context": context, "depth": None, "chunk_size": 128, "dtype": "bf16", "samples": 10}
    rest = {"gpu": None, "num_gpus": 0, "versions": {"torch": "2.11.0"}, "command": "launch/evaluate.py"}
    hits = {"hit_rate": 0.5, "hit_rate_per_layer": rates or [0.25, 0.75]}
    return json.dumps({"bench": "quality", "case": case | of_case, "value": value} | hits | rest)


def section(lines: list[str], title: str) -> list[str]:
    """Lines of the tables under one heading."""
    text = "\n".join(lines).split(f"## {title}\n")[1].split("## ")[0]
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]


def test_tables_of_caches(project: Path) -> None:
    """Each cache and lambda at the longest context, with its change against bf16; over contexts, layers and depths."""
    bf16, turbo4 = ({"cache": cache, "threshold": "0.1"} for cache in ("bf16", "turbo4"))
    rows = [
        quality_row("bits per byte", 1024, 9.0, **bf16),
        quality_row("bits per byte", 8192, 1.25, [0.125, 0.875], **bf16),
        quality_row("recall", 8192, 1.0, **bf16),
        quality_row("bits per byte", 8192, 1.26, **turbo4),
        quality_row("recall", 8192, 0.995, **turbo4),
        quality_row("record needle", 1024, 0.7, **turbo4 | {"depth": 0.0}),
        quality_row("needle", 8192, 0.9, **turbo4 | {"depth": 0.0}),
        quality_row("needle", 8192, 0.8, **turbo4 | {"depth": 1.0}),
        quality_row("bits per byte", 8192, 1.5, **turbo4 | {"threshold": "fixed"}),
        quality_row("needle", 8192, 1.0, **turbo4 | {"threshold": "inf", "depth": 0.0, "samples": 5}),
        quality_row("needle", 8192, 0.6, **turbo4 | {"cache": "turbo4, sas", "depth": 0.0, "samples": 5}),
    ]
    assert section(make_tables(project, quality_codecs=rows), "Demo checkpoint over caches") == [
        "| lambda | cache | bits per byte | change | fact recalled | change | hit rate |",
        "| 0.1 | bf16 | 1.2500 |  | 100.0% |  | 0.500 |",
        "| 0.1 | turbo4 | 1.2600 | +0.80% | 99.5% | -0.5 points | 0.500 |",
        "| fixed layers | turbo4 | 1.5000 |  |  |  | 0.500 |",
        "| lambda | cache | 1024 | 8192 |",
        "| 0.1 | bf16 | 9.0000 | 1.2500 |",
        "| 0.1 | turbo4 |  | 1.2600 |",
        "| fixed layers | turbo4 |  | 1.5000 |",
        "| cache | layer 0 | layer 1 |",
        "| bf16 | 0.125 | 0.875 |",
        "| turbo4 | 0.250 | 0.750 |",
        "| what | cache | 0.1 | inf |",
        "| a fact in a text | turbo4 | 17 of 20 | 5 of 5 |",
        "| a fact in a text | turbo4, sas | 3 of 5 |  |",
        "| one of as many pairs as fit | turbo4 | 7 of 10 |  |",
    ]


def test_tables_of_quality_measured_again(project: Path) -> None:
    """The last of repeated rows counts; their order does not matter, and no cell has a shorter context."""
    bf16, turbo4 = ({"cache": cache, "threshold": "0.1"} for cache in ("bf16", "turbo4"))
    again = [
        quality_row("needle", 8192, 0.5, **turbo4 | {"depth": 0.0}),
        quality_row("bits per byte", 8192, 1.5, **bf16),
        quality_row("bits per byte", 4096, 1.5, **turbo4),
        quality_row("recall", 8192, 0.5, **turbo4),
        quality_row("record recall", 5600, 0.25, **turbo4),
    ]
    rows = [row.replace('"value": ', '"value": 1') for row in again] + again
    lines = section(make_tables(project, quality_codecs=rows), "Demo checkpoint over caches")
    head = "| lambda | cache | bits per byte | change | fact recalled | change | UUID recalled | change | hit rate |"
    assert lines[:3] == [
        head,
        "| 0.1 | bf16 | 1.5000 |  |  |  |  |  | 0.500 |",
        "| 0.1 | turbo4 |  |  | 50.0% |  | 25.0% |  | 0.500 |",
    ]
    assert lines[-1] == "| a fact in a text | turbo4 | 5 of 10 |"
    of_lambda = [
        quality_row(measure, 8192, value, threshold="0.1")
        for measure, value in (("record recall", 0.25), ("recall", 0.5), ("bits per byte", 1.5))
    ]
    make_tables(project, quality=[*of_lambda, *of_lambda])
    short = (project / "docs" / "performance.md").read_text().split("<!-- quality -->")[1].split("<!-- /quality -->")[0]
    assert "\n| 0.1 | 50% | 1.5000 | 50% | 25% |\n" in short


def test_tables_of_speculation_on_a_real_model(project: Path) -> None:
    """Lines for each S and lambda, columns for each context, layers, answers; the last of repeated rows counts."""
    rows, at = [], {"model": "smollm2", "codec": "bf16", "cache": "bf16", "dtype": "bf16"}
    for chunk in (256, 128):
        for threshold, change in (("inf", 0.5), ("0.1", 0.25), ("0.0", 0.0)):
            key = at | {"chunk_size": chunk, "threshold": threshold, "samples": 3}
            for context in (8192, 2048):
                rows.append(quality_row("bits per byte", context, 9.0, [0.0, 0.0], **key))
                rows.append(quality_row("bits per byte", context, 1 + change, [change, 2 * change], **key))
                answer = json.loads(quality_row("greedy tokens equal", context, 1 - change, [change, change], **key))
                shares = {"share before the first difference": 0.5, "share of whole answers": 1 - 2 * change}
                rows.append(json.dumps(answer | {"details": shares}))
    lines = section(make_tables(project, quality_smollm2=rows), "SmolLM2 over lambda, S and context")
    tables = [line for line in lines if line.startswith("|")]
    assert tables[0] == ("| S | lambda | bits per byte, 2048 | hit rate, 2048 | bits per byte, 8192 | hit rate, 8192 |")
    assert tables[1:7] == [
        f"| {chunk} | {threshold} | {value} | 50.0% | {value} | 50.0% |"
        for chunk in (128, 256)
        for threshold, value in (("0", "1.0000"), ("0.1", "1.2500"), ("inf", "1.5000"))
    ]
    assert tables[7:10] == ["| layer | S 128, 0.1 | S 256, 0.1 |", "| 0 | 25.0% | 25.0% |", "| 1 | 50.0% | 50.0% |"]
    assert tables[12] == "| 128 | 0.1 | 75.0% | 50.0% | 50.0% | 50.0% | 75.0% | 50.0% | 50.0% | 50.0% |"
    page = (project / "docs" / "performance.md").read_text()
    short = page.split("<!-- speculation -->")[1].split("<!-- /speculation -->")[0]
    assert "| 0.1 | 50.0% | 1.2500 | 75.0% | 50.0% |" in short
    assert "256" not in short


def test_table_of_selectors(project: Path) -> None:
    """Settings of half the heads in one table, selectors over the number of heads in another."""
    at = {"threshold": "0.0", "selector": "gap_std", "low_heads": None}
    rows = [quality_row("bits per byte", 8192, 1.25, cache="bf16", **at)]
    for selector, low, bits, recall in (
        ("gap_std", 1, 1.26, 1.0),
        ("gap_std", 2, 1.27, 0.98),
        ("entropy", 2, 1.3, 0.8),
    ):
        of = at | {"cache": f"turbo-mixed, {selector}, {low} heads low", "selector": selector, "low_heads": low}
        rows += [quality_row("bits per byte", 8192, bits, **of), quality_row("recall", 8192, recall, **of)]
    assert section(make_tables(project, quality_ablations=rows), "Softmax, block sizes and selectors") == [
        "| lambda | cache | bits per byte | change | hit rate |",
        "| 0 | bf16 | 1.2500 |  | 0.500 |",
        "| heads of lowest priority by | 1 | 2 |",
        "| gap_std | 1.2600, 100% | 1.2700, 98% |",
        "| entropy |  | 1.3000, 80% |",
    ]


@pytest.mark.full
def test_pictures(project: Path) -> None:
    pytest.importorskip("matplotlib")
    run_script(project, "pictures.py", str(project))
    for name in ("latency.png", "needles.png"):
        assert (project / name).read_bytes().startswith(b"\x89PNG")


def test_picture_of_needles_has_every_lambda_of_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Maps of facts and of pairs, and hit rates, for every cache; the last value of a repeated row counts."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    pictures = importlib.import_module("pictures")
    of_lambda = [
        json.loads(quality_row(measure, 1024, value, cache=cache, threshold=threshold, softmax=softmax, depth=depth))
        for cache, softmax in (("bf16", "exact"), ("turbo4", "exact"), ("turbo4, sas", "sas"))
        for threshold in ("0.0", "inf", "fixed")
        for measure, depth, value in (("needle", 0.0, 0.5), ("record needle", 1.0, 0.25), ("bits per byte", None, 1.2))
    ]
    again = of_lambda[0] | {"value": 0.75}
    pictures.plot_quality.draw(tmp_path / "needles.svg", pictures.needle_rows([*of_lambda, again]))
    drawn = (tmp_path / "needles.svg").read_text(encoding="utf-8")
    for cache in ("bf16", "turbo4"):
        for kind in ("needle", "record needle"):
            for name in ("0", "inf", "fixed layers"):
                assert drawn.count(f"<!-- {cache}: {kind} recalled, lambda {name} -->") == 1
        assert f"<!-- {cache}: hit rate on text, 1024 tokens -->" in drawn
    assert "sas" not in drawn
    assert [drawn.count(f"<!-- {value} -->") for value in ("0.75", "0.50", "0.25")] == [1, 5, 6]


def test_picture_has_the_steps_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact softmax and no text, as in the README's table beside it."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    pictures, axes = importlib.import_module("pictures"), mock.Mock()
    case = {"shape": "llama-3.1-8b", "world": 1, "mode": "off", "transport": None, "cuda_graph": True, "batch": 1}
    case |= {"context": 8192, "kv_cache": "turbo4", "hit_rate": None}
    others: list[dict[str, object]] = [{}, {"softmax": "sas"}, {"text": "book.txt"}]
    pictures.steps(axes, [{"case": case | of, "us": {"p50": 1e3 * at}} for at, of in enumerate(others, start=1)])
    drawn = [call.args for call in axes.plot.call_args_list if call.kwargs["color"] == "tab:orange"]
    assert ([8192], [1.0]) in drawn
