"""The tables that people read are those of the measured rows."""

import gzip
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the tables are made from and written to, in a folder of its own."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def make_tables(project: Path, **rows: list[str]) -> list[str]:
    """Lines of docs/results/README.md, with other rows in the files named."""
    for name, lines in rows.items():
        (project / "docs" / "results" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, project / "docs" / "results" / "tables.py"], check=True)
    return (project / "docs" / "results" / "README.md").read_text().splitlines()


def test_tables_are_those_of_the_rows(project: Path) -> None:
    make_tables(project)
    for name in ("README.md", "docs/results/README.md"):
        assert (project / name).read_text() == (ROOT / name).read_text(), f"run docs/results/tables.py: {name} is old"


def test_tables_of_decode_steps(project: Path) -> None:
    """A line for each configuration, a column for each context; the README has captured steps of the 8B shape alone."""
    (project / "docs" / "results" / "turbo_attention.jsonl").unlink()  # so that whole steps are what is quantised

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
        readme = (project / "README.md").read_text()
        short = readme.split("<!-- decode_step -->")[1].split("<!-- /decode_step -->")[0]
        assert [line for line in short.splitlines() if line.startswith("|")] == [
            "| GPUs, off | 1024 | 8192 |",
            "| --- | --- | --- |",
            "| 1 | 250 (88%) | 240 (88%) |",
            "| 4 | 800 (88%) |  |",
        ]
        caches = readme.split("<!-- quantised -->")[1].split("<!-- /quantised -->")[0]
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
    # 5 accepted layers of max(80, 20 + 40) and 5 rejected ones of 80 + 40, and 50.
    begin = "| llama-3.1-8b | 1 + 1 | symm | 1 |"
    assert f"{begin} bf16, random numbers | 8192 | 50% | 1.050 | 1.200 | 1.14x | 1.050 | +0.0% | +10.0% |" in long
    # Of another commit than `off`, and than the parts: both are marked. 10 accepted layers, and 50.
    cells = "8192 | 100% | 1.000 | 1.200 | 1.20x\\* | 0.850\\*\\* | +17.6%\\*\\* | +10.0% |"
    assert f"{begin} bf16, random numbers | {cells}" in long
    assert "\\* The pair is of an earlier commit than `off`." in long
    assert "\\*\\* The parts given to the model are of another commit than the pair." in long
    assert f"{begin} bf16, book.txt | 8192 | 50% | 0.900 | 0.990 | 1.10x |  |  |  |" in long
    parts_line = "| llama-3.1-8b | 2 | 8192 | bf16, random numbers | 50% | 70.0 | 80.0 | 20.0 | 40.0 | 50.0 | 1100.0 |"
    assert parts_line in long
    assert long[long.index("| GPUs | batch | KB | nccl | alspec |") + 2 :][:2] == [
        "| 4 | 1 | 16 | 19.0 / 20.0 / 21.0 | 2.0 / 3.0 / 4.0 |",
        "| 4 | 4 | 64 | 19.0 / 20.0 / 21.0 | 5.0 / 6.0 / 7.0 |",
    ]


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
        row("decode_attention", "alspec.turbo_decode_attention", 8.0, codec="turbo4", **at),
        row("decode_attention", "alspec.turbo_decode_attention.sas", 10.0, codec="turbo4", **at),
        row("speculative_decode", "alspec.turbo_decode_attention", 7.0, codec="turbo4", **at),
    ]
    prompts = [
        row("prefill_attention", impl, us, tokens=4096, **at)
        for impl, us in (("torch.sdpa", 900.0), ("alspec.turbo_prefill_attention", 600.0))
    ]
    long = make_tables(project, turbo_attention=rows, prefill_attention=prompts)
    plain = long.index("### 32/8 heads of 128, plain")
    assert long[plain + 4 : plain + 8] == [
        "| torch SDPA, bf16 | 15.0 (0.80x) |",
        "| bf16 | 12.0 (1.00x) |",
        "| turbo4 | 8.0 (1.50x) |",
        "| turbo4, SAS | 10.0 (1.20x) |",
    ]
    guess = long.index("### 32/8 heads of 128, with guess and verdict")
    assert long[guess + 4 : guess + 6] == ["| bf16 | 14.0 (1.00x) |", "| turbo4 | 7.0 (2.00x) |"]
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
    """Of repeated rows the last counts, once; their order does not matter, and no cell is of a shorter context."""
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
    short = (project / "README.md").read_text().split("<!-- quality -->")[1].split("<!-- /quality -->")[0]
    assert "\n| 0.1 | 50% | 1.5000 | 50% | 25% |\n" in short


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


def medians_of(name: str, **of_case: object) -> dict[object, float]:
    """p50 in us of the measured rows of one file that have this bench, impl or case, by context."""
    rows = map(json.loads, (ROOT / "docs" / "results" / f"{name}.jsonl").read_text().splitlines())
    flat = (row["case"] | {"bench": row["bench"], "impl": row["impl"], "p50": row["us"]["p50"]} for row in rows)
    return {row["context"]: row["p50"] for row in flat if of_case.items() <= row.items()}


def test_prose_says_what_the_rows_say() -> None:
    """Ratios outside of the tables that tables.py makes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    step = {"shape": "llama-3.1-8b", "world": 1, "mode": "off", "bench": "decode_step"}
    bf16, *quantised = (
        medians_of("decode_step", **step, kv_cache=codec)[131072] for codec in ("bf16", "turbo4", "turbo-mixed")
    )
    turbo4, mixed = (f"{bf16 / us:.2f}x" for us in quantised)
    without_peers = step | {"transport": "nccl without peer access"}
    medians = [medians_of("decode_step", **without_peers | {"world": world}).values() for world in (2, 4)]
    two, four = (" and ".join(f"{1e6 / us:.0f}" for us in of_world) for of_world in medians)
    peerless = f"where `off` reaches, at 8K and 128K tokens, {two} tokens/s on two GPUs and {four} on four."
    assert peerless in " ".join(readme.split())
    assert f"at 128K they are {turbo4} and {mixed} as fast." in " ".join(readme.split())
    of_four = step | {"world": 4, "transport": "symm"}
    first, *others = (
        medians_of("decode_step", **of_four, kv_cache=codec)[131072] for codec in ("bf16", "turbo4", "turbo-mixed")
    )
    turbo4, mixed = (f"{first / us:.2f}x" for us in others)
    assert f"On four GPUs, with 2 KV heads on each, it is {turbo4} and {mixed}." in " ".join(readme.split())
    pair = {"shape": "llama-3.1-8b", "world": 2, "transport": "symm", "kv_cache": "bf16", "hit_rate": 1.0}
    against_one = bf16 / medians_of("decode_step", **pair)[131072]
    assert f"with every guess accepted are {against_one:.2f}x as fast at 128K" in readme

    prose = " ".join(readme.split())
    for world, text in (
        (2, "reach {} tokens/s at 8K tokens and {} at 128K"),
        (4, "Four reach {} and {}, 84 % and 93 %;"),
    ):
        h100 = {
            "shape": "llama-3.1-8b",
            "world": world,
            "transport": "symm",
            "kv_cache": "bf16",
            "bench": "decode_step",
        }
        off, held = (medians_of("decode_step_h100", **h100, hit_rate=rate) for rate in (None, 1.0))
        assert text.format(*(f"{1e6 / off[context]:.0f}" for context in (8192, 131072))) in prose
        assert f"with every guess accepted {1e6 / held[8192]:.0f} and {1e6 / held[131072]:.0f}" in prose


def test_prose_about_pairs_and_other_shapes_says_what_the_rows_say() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = " ".join(readme.split())
    of = {"bench": "decode_step", "kv_cache": "bf16"}

    def pair_against_off(**case: object) -> dict[object, float]:
        off, pair = (medians_of("decode_step", **of, **case, mode=mode) for mode in ("off", "paired"))
        return {context: off[context] / us for context, us in pair.items()}

    eight = pair_against_off(shape="llama-3.1-8b", world=2, transport="symm")  # of the last rate: every guess accepted
    assert f"at 128K tokens, at {eight[131072]:.2f}x of that speed, if every guess is accepted" in prose
    real = pair_against_off(shape="checkpoint", world=2)
    assert f"1 + 1 GPUs come to {min(real.values()):.2f}x to {max(real.values()):.2f}x of two" in prose
    off, pair = (medians_of("decode_step_h100", **of, shape="checkpoint", mode=mode) for mode in ("off", "paired"))
    ratios = [off[context] / us for context, us in pair.items()]
    assert f"2 + 2 H100s to {min(ratios):.2f}x to {max(ratios):.2f}x of four." in prose
    large, middle, small = (
        1e6 / medians_of("decode_step", **of, shape=f"llama-3.{name}b", world=world)[8192]
        for name, world in (("1-70", 4), ("1-70", 2), ("2-1", 1))
    )
    one = of | {"shape": "llama-3.1-8b", "world": 1}
    batches = {size: medians_of("decode_step_h100", **one, batch=size) for size in (2, 4, 8)}
    *first, last = (f"{size * 1e6 / us[8192]:.0f}" for size, us in batches.items())
    assert f"8K tokens each, reach {', '.join(first)} and {last} tokens/s on one H100, 91 % of the limit" in prose
    assert f"70B shape on four GPUs runs at {large:.0f} tokens/s (8K tokens" in prose
    assert f"on two at {middle:.0f} (101 %), a 1B shape on one at {small:.0f}." in prose


def test_the_latency_model_is_as_near_as_said() -> None:
    text = (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## Pairs against tensor parallelism on H100")
    errors = [abs(float(found)) for found in re.findall(r"\| ([+-][\d.]+)% \| [+-]", section)]
    assert len(errors) == 15
    prose = (ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8")
    assert f"it is within {max(errors)} % of the steps at every hit rate" in prose


def test_decode_steps_beside_others_are_those_of_the_rows() -> None:
    prose = (ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8")
    case = {"bench": "decode_step", "shape": "llama-3.1-8b", "mode": "off", "kv_cache": "bf16"}
    for world, transport in ((1, None), (4, "symm")):
        us = medians_of("decode_step", **case, world=world, transport=transport)
        tokens_per_s = " | ".join(f"{1e6 / us[context]:.0f}" for context in (1024, 8192, 131072))
        assert f"| alspec, `off` | {world} x H200 | {tokens_per_s} |" in prose


def test_prose_about_the_exchange_says_what_the_rows_say() -> None:
    """A rank's share alone, and all ranks, in milliseconds; what is exposed of each of 64 all-reduces."""
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    alone, both = (
        medians_of("decode_step_h100", mode="off", shape=shape, world=world)
        for shape, world in (("slice", 1), ("llama-3.1-8b", 2))
    )
    contexts = (1024, 8192, 32768, 131072)
    for us in (alone, both):
        *first, last = (f"{us[context] / 1e3:.3f}" for context in contexts)
        assert f"{', '.join(first)} and {last}" in prose
    exposed = sorted((both[context] - alone[context]) / 64 for context in contexts)
    assert f"{exposed[0]:.1f} to {exposed[-1]:.1f} us are exposed" in prose

    alone, four = (
        medians_of("decode_step", mode="off", kv_cache="bf16", shape=shape, world=world, transport=transport)
        for shape, world, transport in (("slice4", 1, None), ("llama-3.1-8b", 4, "symm"))
    )
    for us in (alone, four):
        *first, last = (f"{us[context] / 1e3:.3f}" for context in contexts)
        assert f"{', '.join(first)} and {last}" in prose
    exposed = sorted((four[context] - alone[context]) / 64 for context in contexts)
    assert f"{exposed[0]:.1f} to {exposed[-1]:.1f} us exposed" in prose
    rows = map(json.loads, (ROOT / "docs" / "results" / "decode_step.jsonl").read_text().splitlines())
    case = {
        "shape": "llama-3.1-8b",
        "world": 4,
        "mode": "off",
        "transport": "symm",
        "context": 8192,
        "kv_cache": "bf16",
    }
    (row,) = (row for row in rows if row["bench"] == "decode_step" and case.items() <= row["case"].items())
    beyond = (row["us"]["p50"] - row["bytes"] / row["stream_tb_s"] / 1e6) / 32
    assert f"takes {row['us']['p50'] / 1e3:.3f} ms at 8K tokens: {beyond:.1f} us a layer beyond its bytes" in prose


def test_published_steps_are_those_of_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    prose = (ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8")
    for world, reported in importlib.import_module("pictures").REPORTED.items():
        assert f"| gpt-fast | {world} x H200 | | {reported[8192]} | {reported[131072]} |" in prose


def test_prose_about_the_latency_model_says_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    tables = importlib.import_module("tables")
    prose = " ".join((ROOT / "docs" / "decode_step.md").read_text(encoding="utf-8").split())
    parts = {row["case"]["part"]: row for row in tables.read("decode_step.jsonl", tables.PARTS)}
    case = parts["step"]["case"]
    assert (case["context"], case["hit_rate"]) == (131072, 0.5)
    none, half, every = (f"{tables.predicted_us(parts, rate) / 1e3:.2f}" for rate in (0.0, 0.5, 1.0))
    untraced = f"{parts['step']['untraced_us'] / 1e3:.2f}"
    assert f"it predicts {half} ms for such a step; without a profiler, those of the same run took {untraced}" in prose
    assert f"It predicts {every} with every guess accepted and {none} with none" in prose
    names = ("shape", "world", "transport", "kv_cache")
    of_pair = {"bench": "decode_step", "mode": "paired"} | {name: case[name] for name in names}
    worst, best = (f"{medians_of('decode_step', **of_pair, hit_rate=rate)[131072] / 1e3:.2f}" for rate in (0.0, 1.0))
    assert f"with none; steps took {best} and {worst} " in prose


def test_prose_about_sampling_and_prompts_says_what_the_rows_say() -> None:
    readme, step = (
        " ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in ("README.md", "docs/decode_step.md")
    )
    rows = [json.loads(line) for line in (ROOT / "docs" / "results" / "sampling.jsonl").read_text().splitlines()]
    us = {
        (row["case"].get("top_k"), row["case"].get("top_p"), row["case"]["context"]): row["us"]["p50"] for row in rows
    }
    assert len(us) == len(rows)
    more = [value - us[None, None, context] for (_, top_p, context), value in us.items() if top_p is not None]
    assert f"it adds {min(more) / 1e3:.2f} to {max(more) / 1e3:.2f} ms to a step of one GPU" in readme
    greedy, top_p = us[None, None, 1024], us[0, 0.9, 1024]
    assert f"took a step from {greedy / 1e3:.2f} to {top_p / 1e3:.2f} ms with top-p" in step

    prompts = [json.loads(line) for line in (ROOT / "docs" / "results" / "prompt.jsonl").read_text().splitlines()]
    found = {
        (row["num_gpus"], row["case"].get("mode", "off"), row["case"]["kv_cache"], row["case"]["context"]): row
        for row in prompts
    }
    assert len(found) == len(prompts)

    def seconds(num_gpus: int, mode: str, cache: str, digits: int) -> list[str]:
        of = [found[num_gpus, mode, cache, context] for context in (8192, 32768, 131072)]
        return [f"{row['us']['p50'] / 1e6:.{1 if row['case']['context'] > 2**16 else digits}f}" for row in of]

    bf16, turbo4 = (seconds(1, "off", cache, 2) for cache in ("bf16", "turbo4"))
    shares = [f"{100 * found[1, 'off', cache, 8192]['share_of_peak']:.0f} %" for cache in ("bf16", "turbo4")]
    assert (
        f"8K tokens take {bf16[0]} s over bf16 and {turbo4[0]} s over `turbo4`, at {' and '.join(shares)} of" in readme
    )
    assert [found[1, "off", cache, 131072]["prompts"] for cache in ("bf16", "turbo4")] == [1, 1], "one prompt each"
    assert f"128K tokens take {bf16[2]} s over the bf16 cache and {turbo4[2]} s over `turbo4`" in readme
    pair, pair4, both, both4 = (
        "{}, {} and {}".format(*seconds(2, mode, cache, 2))
        for mode in ("paired", "off")
        for cache in ("bf16", "turbo4")
    )
    assert (
        f"over bf16 take a pair {pair} s, the two in tensor parallelism {both}; over `turbo4` {pair4} s, and {both4}"
        in step
    )
    pairs, four = (seconds(4, mode, "bf16", 2)[-1] for mode in ("paired", "off"))
    assert (
        f"take 1 + 1 H200s {pair.split()[-1]} s and 2 + 2 {pairs}, "
        f"two in tensor parallelism {both.split()[-1]} and four {four}."
    ) in readme


SHAPES = (("32/8", 128), ("8/2", 128), ("32/8", 64))


def medians_of_decode(impl: str, shape: tuple[str, int], bench: str = "decode_attention") -> dict[int, float]:
    """Those of decode attention of one request."""
    found = medians_of("decode_attention", bench=bench, impl=impl, heads=shape[0], head_dim=shape[1])
    return {context: us for context, us in found.items() if isinstance(context, int)}


def test_prose_about_decode_attention_says_what_the_rows_say() -> None:
    readme, lean = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/lean_attention.md"))
    ours = "alspec.lean_decode_attention"

    def speedups(rival: str, longest: int = 2**20) -> list[list[float]]:
        """Of each shape, at every length up to the longest."""
        both = [(medians_of_decode(rival, shape), medians_of_decode(ours, shape)) for shape in SHAPES]
        return [[theirs[n] / us for n, us in mine.items() if n <= longest] for theirs, mine in both]

    early, sdpa, flashinfer = speedups("torch.sdpa", 8192), speedups("torch.sdpa"), speedups("flashinfer")
    up_to_8k, of_sdpa, of_flashinfer = (
        [f"{min(x):.2f}x to {max(x):.2f}x" for x in of] for of in (early, sdpa, flashinfer)
    )
    assert f"| 1.3x SDPA up to 8K | {up_to_8k[0]}, {up_to_8k[1]} (8/2), {up_to_8k[2]} (head_dim 64) |" in lean
    for rival, found in (("SDPA", of_sdpa), ("FlashInfer", of_flashinfer)):
        line = f"| never slower than {rival} | at 32/8 {found[0]}, at 8/2 {found[1]}, at head_dim 64 {found[2]} | |"
        assert line in lean
    # "The fastest at every length", by what at the longest, and by what up to 8K.
    assert min(map(min, sdpa + flashinfer)) > 1
    longest = [100 * (of_shape[-1] - 1) for of_shape in sdpa]
    prose = " ".join(readme.split())
    least, most = min(map(min, early)), max(map(max, early))
    assert (
        f"{least:.2f}x to {most:.2f}x as fast as SDPA up to 8K tokens, and {min(longest):.1f} to {max(longest):.0f} % "
        "faster at 256K."
    ) in prose

    for context, name in ((8192, "5 % at 8K"), (131072, "2 % at 128K")):
        costs = []
        for shape in SHAPES:
            plain, guess = (
                medians_of_decode(ours, shape, bench)[context] for bench in ("decode_attention", "speculative_decode")
            )
            costs.append(f"{100 * (guess / plain - 1):.1f} %")
        assert f"| speculation: {name} | {costs[0]}, {costs[1]} (8/2), {costs[2]} (head_dim 64) |" in lean


def test_prose_about_quantised_caches_says_what_the_rows_say() -> None:
    """How many times faster than the bf16 kernel of the same run."""
    prose = (ROOT / "docs" / "turbo_attention.md").read_text(encoding="utf-8")

    def speedups(heads: str, codec: str, bench: str = "decode_attention", of_bf16: str = "decode_attention") -> str:
        shape = {"heads": heads}
        bf16 = medians_of("turbo_attention", **shape, bench=of_bf16, codec="bf16", impl="alspec.lean_decode_attention")
        ours = medians_of("turbo_attention", **shape, bench=bench, codec=codec, impl="alspec.turbo_decode_attention")
        return " | ".join(f"{bf16[context] / us:.2f}x" for context, us in ours.items())

    assert f"| `turbo4` | 1.8x at 8K, 2.7x at 32K, 3.3x at 128K | {speedups('32/8', 'turbo4')} |" in prose
    guess = "speculative_decode"
    assert f"| `turbo4`, both with guess and verdict | the same | {speedups('32/8', 'turbo4', guess, guess)} |" in prose
    assert f"| `turbo4` with them, bf16 without | | {speedups('32/8', 'turbo4', guess)} |" in prose
    assert f"| `turbo-mixed` | 4.2x at 128K | {speedups('32/8', 'turbo-mixed')} |" in prose
    assert f"| `turbo4`, 8/2 heads | | {speedups('8/2', 'turbo4')} |" in prose


def test_prose_about_quality_of_quantised_caches_says_what_the_rows_say() -> None:
    prose = (ROOT / "docs" / "turbo_attention.md").read_text(encoding="utf-8")
    rows = map(json.loads, (ROOT / "docs" / "results" / "quality_codecs.jsonl").read_text().splitlines())
    names = ("cache", "measure", "threshold", "context", "depth")
    found = {tuple(row["case"][name] for name in names): row for row in rows}

    def bits(cache: str, threshold: str) -> dict[str, float]:
        return found[cache, "bits per byte", threshold, 8192, None]

    def more(cache: str, threshold: str, digits: int) -> str:
        change = 100 * (bits(cache, threshold)["value"] / bits("bf16", threshold)["value"] - 1)
        return f"+{change:.{digits}f} %"

    for cache, digits in (("turbo4", 2), ("turbo-mixed", 2), ("turbo2", 1)):
        recalled = (
            f"{100 * found[cache, measure, '0.0', context, None]['value']:.0f}"
            for measure, context in (("recall", 8192), ("record recall", 5623))
        )
        cells = [more(cache, threshold, digits) for threshold in ("0.0", "0.1")]
        cells += [*recalled, f"{100 * bits(cache, '0.1')['hit_rate']:.1f} %"]
        assert f"| `{cache}` | {' | '.join(cells)} |" in prose
    exact, guessed = (f"{bits('bf16', threshold)['value']:.4f}" for threshold in ("0.0", "0.1"))
    assert f"| bf16 | {exact} | {guessed} |" in prose


def test_prose_about_prefill_says_what_the_rows_say() -> None:
    pages = ("README.md", "docs/turbo_attention.md", "docs/decode_step.md")
    readme, turbo, step = ((ROOT / page).read_text(encoding="utf-8") for page in pages)
    ours = "alspec.turbo_prefill_attention"
    us = {
        (impl, tokens): medians_of("prefill_attention", impl=impl, tokens=tokens)
        for impl in ("torch.sdpa", "alspec.prefill_attention", ours, f"{ours}.sas")
        for tokens in (4096, 8192, 32768)
    }

    def speed(tokens: int, context: int, softmax: str = "", impl: str = ours, base: str = "torch.sdpa") -> str:
        return f"{us[base, tokens][context] / us[impl + softmax, tokens][context]:.2f}x"

    short, long, chunk = speed(8192, 8192), speed(32768, 32768), speed(4096, 32768)
    assert f"Against SDPA: {short} at 8K tokens and {long} at 32K" in turbo
    assert re.search(rf"{chunk} for a\s+chunk of 4096 after 28K", turbo)
    bf16 = "alspec.prefill_attention"
    assert f"and {speed(4096, 32768, base=bf16)} against what such a chunk takes over bf16" in turbo
    assert f"lse: {speed(4096, 32768, impl=bf16)} as fast as the kernel with a causal mask behind a prefix" in step
    assert f"run at {speed(8192, 8192, '.sas')} of SDPA with SAS and at {short} with exact" in turbo
    assert f"{short} of SDPA's speed on prompts of 8K tokens, {long} on 32K" in readme


def test_pictures(project: Path) -> None:
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, project / "docs" / "results" / "pictures.py", project], check=True)
    for name in ("latency.png", "needles.png"):
        assert (project / name).read_bytes().startswith(b"\x89PNG")


def test_picture_of_needles_has_every_lambda_of_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of the maps of facts and of pairs, and hit rates, for every cache; of a repeated row the last value."""
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
    """Exact softmax and no text, as in the README's table beside it."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs" / "results")
    pictures, axes = importlib.import_module("pictures"), mock.Mock()
    case = {"shape": "llama-3.1-8b", "world": 1, "mode": "off", "transport": None, "cuda_graph": True, "batch": 1}
    case |= {"context": 8192, "kv_cache": "turbo4", "hit_rate": None}
    others: list[dict[str, object]] = [{}, {"softmax": "sas"}, {"text": "book.txt"}]
    pictures.steps(axes, [{"case": case | of, "us": {"p50": 1e3 * at}} for at, of in enumerate(others, start=1)])
    drawn = [call.args for call in axes.plot.call_args_list if call.kwargs["color"] == "tab:orange"]
    assert ([8192], [1.0]) in drawn


PAGES = ["README.md", "models/demo/README.md", *(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
FOLDERS = "alspec|docs|kernels|launch|models|runtime|tests"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Links to files and to headings of them, and every path of a file that is named."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], link
    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]+\.(?:py|jsonl|json\.gz|png|md)\b", text):
        assert (ROOT / path).exists(), f"{page}: {path}"


def test_what_is_shown_names_no_folder_of_a_machine() -> None:
    """Rows and the trace have the commands that wrote them."""
    results = ROOT / "docs" / "results"
    files = [*results.glob("*.jsonl"), *results.glob("*.json.gz"), *(ROOT / page for page in PAGES)]
    for path in files:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work|mnt)/", text), path


def test_pages_are_looked_at() -> None:
    """The test above has pages, and finds in them what it looks for."""
    assert {"docs/lean_attention.md", "docs/results/README.md"} <= set(PAGES)
    assert re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]+\.py\b", "see `kernels/words.py`.") == ["kernels/words.py"]
