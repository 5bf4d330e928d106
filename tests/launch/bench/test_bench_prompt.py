"""`launch/bench_kernels.py --bench prompt`: counted operations, rows, the table and refusals; on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from results_folder import copy_results, make_tables
from rich.console import Console
from tiers import fast
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alspec.config import BenchConfig, EngineConfig, SpeculationConfig
from alspec.errors import AlspecError, UserError
from alspec.kernels.attention import torch_attention
from alspec.launch import bench_kernels
from alspec.launch.bench import bench_prompt
from alspec.launch.bench.bench_prompt import matrix_peak, measure_prompts, prompt_engines, prompt_flops, prompt_table
from alspec.models.llama import Llama, Shard, random_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport
from alspec.runtime.engine.memory import plan_memory

CPU = torch.device("cpu")
TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=301,
    max_position_embeddings=1024,
)
# Layers of the 8B shape.
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape is `TINY`, products are small, and few prompts of each length are timed."""
    monkeypatch.setattr(LlamaConfig, "from_shape", lambda name: TINY)
    monkeypatch.setattr(bench_prompt, "MATRIX_SIZE", 64)
    monkeypatch.setattr(bench_prompt, "MAX_PROMPTS", 3)


def engine_config(kv_cache: str = "bf16", transport: str = "gloo") -> EngineConfig:
    return EngineConfig(
        random_weights="llama-3.1-8b",
        kv_cache=kv_cache,
        transport=transport,
        speculation=SpeculationConfig(mode="off"),
    )


def measured(contexts: list[int], kv_cache: str = "bf16") -> list[Row]:
    rows: list[Row] = []
    measure_prompts(engine_config(kv_cache), contexts, rows.append)
    return rows


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_tokens", [1, 2, 37])
def test_operations_equal_the_count_of_pytorch(num_tokens: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token: PyTorch also counts what a mask hides."""
    monkeypatch.setattr(torch_attention, "newest_causal_mask", lambda num_queries, num_tokens: None)
    config = TINY.model_copy(update={"tie_word_embeddings": tied})
    transport = Transport(Placement(), CPU, "gloo", None)
    model = Llama(config, random_weights(config, Shard(), torch.float32, CPU), transport)
    cache = new_cache("bf16", config, 1, 1, num_tokens, torch.float32, CPU)
    # Fused attention on the CPU is not counted at all.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        prefill(model, cache, transport, 0, list(range(num_tokens)), no_hook, chunk_tokens=1)
    assert prompt_flops(config, num_tokens) == counter.get_total_flops()


def test_operations_of_llama_8b() -> None:
    """8.03e9 parameters without the embedding and 65 norms. The LM head is used once, the others by each token."""
    config = TINY.model_copy(update={**WIDE, "num_layers": 32, "vocab_size": 128256})
    head = 128256 * 4096
    layers = 8_030_261_248 - 2 * head - 65 * 4096
    one, two = prompt_flops(config, 1), prompt_flops(config, 2)
    pair = 32 * 2 * 2 * 4096  # a query and a key
    assert (one, two) == (2 * (layers + head) + pair, 2 * (2 * layers + head) + 3 * pair)


def test_matrix_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A multiplication and an addition are two operations; the median of the products counts."""
    assert 1e6 < matrix_peak(CPU) < 1e15
    monkeypatch.setattr(bench_prompt, "seconds_in_a_row", lambda run, count, device: [0.5, 0.25, 1.0])
    assert matrix_peak(CPU) == 2 * bench_prompt.MATRIX_SIZE**3 / 0.5


@pytest.mark.parametrize("kv_cache", ["bf16", "turbo4"])
def test_rows(kv_cache: str) -> None:
    """One row for each length, in order, with figures that follow from its own numbers."""
    rows = measured([300, 70, 300], kv_cache)
    assert [row["case"]["context"] for row in rows] == [70, 300]
    for row in rows:
        context, us = row["case"]["context"], row["us"]
        case = {"shape": "llama-3.1-8b", "world": 1, "mode": "off", "dtype": "fp32", "kv_cache": kv_cache}
        case |= {"chunk_tokens": 8192}
        assert row["case"] == case | {"context": context}
        assert (row["bench"], row["impl"], row["prompts"]) == ("prompt", "alspec.prefill", 3)
        assert 0 < us["p20"] <= us["p50"] <= us["p80"]
        assert row["flops"] == prompt_flops(TINY, context)
        assert row["planned_bytes"] == plan_memory(TINY, Shard(), torch.float32, 1, context, kv_cache).total_bytes
        assert row["memory_bytes"] == 0
        json.dumps(row)


def test_a_length_is_timed_until_enough_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt is always timed. The warm-up before it, of two prompt chunks at most, is not counted."""
    lengths: list[int] = []

    def takes(engine: object, ids: list[int]) -> float:
        lengths.append(len(ids))
        return 5.0 * len(ids)

    monkeypatch.setattr(bench_prompt, "_first_token_us", takes)
    monkeypatch.setattr(bench_prompt, "WARMUP_TOKENS", 64)
    monkeypatch.setattr(bench_prompt, "ENOUGH_US", 501.0)
    monkeypatch.setattr(bench_prompt, "matrix_peak", lambda device: 0.5e12)
    rows = measured([20, 60, 500])
    assert lengths == [20, 20, 20, 20, 60, 60, 60, 64, 500]
    assert [row["prompts"] for row in rows] == [3, 2, 1]
    assert [row["us"]["p50"] for row in rows] == [100.0, 300.0, 2500.0]
    for row in rows:
        tflop_s = prompt_flops(TINY, row["case"]["context"]) / row["us"]["p50"] / 1e6
        assert (row["tflop_s"], row["peak_tflop_s"]) == (pytest.approx(tflop_s, abs=6e-4), 0.5)
        assert row["share_of_peak"] == pytest.approx(tflop_s / 0.5, abs=6e-5)


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt chunk that does not see the chunks before it."""

    def own_chunk(
        self: KVCache, layer: int, request: int, start: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float, stop: int
    ) -> Tensor:
        return torch_attention.prefill_attention(q, k.transpose(0, 1), v.transpose(0, 1), sm_scale)

    monkeypatch.setattr(KVCache, "prefill_attention", own_chunk)
    with pytest.raises(AlspecError, match="wrong logits of a prompt over bf16: relative error"):
        measured([16])


def test_numbers_that_are_not_finite_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_prompt, "_check", lambda engine: engine.model.weights.lm_head.fill_(torch.nan))
    with pytest.raises(AlspecError, match="prefill of 16 tokens gave logits that are not finite"):
        measured([16])


def test_prompts_beyond_the_models_positions_are_refused() -> None:
    with pytest.raises(UserError, match=r"flags: --contexts: 1025 is beyond the model's 1024 positions"):
        measured([16, 1025])


def test_table() -> None:
    """Times in ms, memory in GiB."""
    row = {
        "case": {"shape": "llama-3.1-8b", "world": 2, "dtype": "bf16"},
        "us": {"p20": 200_000.0, "p50": 250_000.0, "p80": 310_040.0},
        "prompts": 9,
        "tflop_s": 401.2,
        "peak_tflop_s": 780.0,
        "share_of_peak": 0.5144,
        "memory_bytes": 3 * 2**29,
        "planned_bytes": 2**31,
    }
    row["case"] |= {"mode": "paired", "kv_cache": "turbo4", "context": 8192}
    console = Console(width=180)
    with console.capture() as shown:
        console.print(prompt_table([row]))
    title, *lines = shown.get().splitlines()
    assert title.strip() == "Prompts of random tokens, llama-3.1-8b, bf16, 2 rank(s)"
    (cells,) = ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "turbo4" in line)
    times = ["250.0", "200.0", "310.0"]
    assert cells == ["paired", "turbo4", "8192", *times, "9", "32768", "401", "780", "51.4%", "1.50", "2.00"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows with their provenance for each cache, and the table; the CPU poses as a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(bench_kernels, "stream_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(bench_kernels, "prompt_engines", lambda world_size: [engine_config(), engine_config("turbo4")])
    monkeypatch.setattr(bench_kernels, "PROMPT_CONTEXTS", (20, 90))
    path = tmp_path / "rows.jsonl"
    assert bench_kernels.main(["--bench", "prompt", "--rows", str(path)]) == 0
    shown = [line.split("│")[2:4] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["case"]["kv_cache"], row["case"]["context"]) for row in rows]
    assert found == [("bf16", 20), ("bf16", 90), ("turbo4", 20), ("turbo4", 90)]
    assert [(cache.strip(), int(tokens)) for cache, tokens in shown] == found
    for row in rows:
        assert (row["gpu"], row["num_gpus"], row["versions"]["torch"]) == ("some GPU", 1, torch.__version__)
        assert row["command"] == f"launch/bench_kernels.py --bench prompt --rows {path}"


@pytest.mark.parametrize("bench", ["allreduce", "prefill", "shapes"])
def test_contexts_without_effect_are_refused(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main(["--bench", bench, "--contexts", "1k"]) == 2
    assert f"flags: --contexts: --bench {bench} has cases of its own" in capsys.readouterr().err


def test_lengths_come_from_the_flag_or_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(bench_kernels, "Results", lambda rows, command: bench_kernels)  # has a `show` below
    monkeypatch.setattr(bench_kernels, "show", lambda: None, raising=False)
    found: list[list[int]] = []
    for name in ("decode", "prompt"):
        monkeypatch.setitem(bench_kernels.BENCHES, name, lambda results, contexts: found.append(contexts))
    for flags in (["decode"], ["prompt"], ["prompt", "--contexts", "4k,100"]):
        assert bench_kernels.main(["--bench", *flags]) == 0
    assert found == [[1024 * 2**power for power in range(9)], [8192, 32768, 131072], [4096, 100]]
    assert BenchConfig().contexts is None


def test_a_job_measures_one_group_and_a_pair() -> None:
    """A pair needs two ranks or more; each runs over both caches."""
    for world_size, modes in ((1, ["off"]), (2, ["off", "paired"]), (3, ["off"]), (4, ["off", "paired"])):
        engines = [(engine.speculation.mode, engine.kv_cache) for engine in prompt_engines(world_size)]
        assert engines == [(mode, codec) for mode in modes for codec in ("bf16", "turbo4")]


def test_torchrun_is_for_some_benches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench_kernels.main(["--bench", "prefill"]) == 2
    expected = "bench_kernels: torchrun is for --bench allreduce, prompt and turn alone"
    assert capsys.readouterr().err == f"alspec: exit 2: {expected}\n"


@pytest.mark.slow
@pytest.mark.full
def test_ranks_measure_together(checkpoint: Path, tmp_path: Path) -> None:
    """Two processes find the same rows, those of the slower one; one engine follows another."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import json, os
from alspec.config import EngineConfig, SpeculationConfig
from alspec.launch.bench import bench_prompt
bench_prompt.MATRIX_SIZE = 64
measured = bench_prompt._first_token_us
bench_prompt._first_token_us = lambda *args: 0 * measured(*args) + 100 + 50 * int(os.environ["RANK"])
rows = []
for mode, contexts in (("off", [20, 300]), ("off", [40]), ("paired", [300])):
    config = EngineConfig(model={str(checkpoint)!r}, transport="gloo", speculation=SpeculationConfig(mode=mode))
    bench_prompt.measure_prompts(config, contexts, rows.append)
open({str(tmp_path)!r} + "/rank" + os.environ["RANK"], "w").write(json.dumps(rows))
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows, others = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert rows == others
    cases = [tuple(row["case"][name] for name in ("world", "mode", "context")) for row in rows]
    assert cases == [(2, "off", 20), (2, "off", 300), (2, "off", 40), (2, "paired", 300)]
    config = LlamaConfig.from_folder(checkpoint)
    assert [row["flops"] for row in rows] == [prompt_flops(config, context) for context in (20, 300, 40, 300)]
    for row in rows:
        assert row["us"] == {"p20": 150.0, "p50": 150.0, "p80": 150.0}
        assert row["tflop_s"] == pytest.approx(row["flops"] / 150.0 / 1e6 / 2, abs=6e-4)


def test_table_of_the_results(tmp_path: Path) -> None:
    """Without rows there is no table. The last of repeated rows counts; lengths are in order."""
    project = copy_results(tmp_path)
    results = project / "docs" / "results"
    (results / "prompt.jsonl").unlink(missing_ok=True)
    assert "## Whole prompts" not in make_tables(project)
    rows = [
        {
            "bench": "prompt",
            "case": {"shape": "llama-3.1-8b", "world": 1, "kv_cache": "bf16", "context": context},
            "us": {"p20": 0.9 * p50, "p50": p50, "p80": 1.1 * p50},
            "prompts": 9,
            "tflop_s": 400.4,
            "peak_tflop_s": 780.0,
            "share_of_peak": 0.5133,
            "memory_bytes": 3 * 2**29,
            "planned_bytes": 2**31,
            "gpu": "NVIDIA H200",
            "num_gpus": 1,
            "versions": {"torch": "2.11.0"},
            "command": "launch/bench_kernels.py --bench prompt",
        }
        for context, p50 in ((32768, 2e6), (8192, 9e9), (8192, 25e4))
    ]
    (results / "prompt.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = make_tables(project)
    begin = found.index("## Whole prompts")
    end = "| 9 | {} | 400 | 780 | 51% | 1.50 | 2.00 |"
    assert [line for line in found[begin:] if line.startswith("| llama-3.1-8b")][:2] == [
        "| llama-3.1-8b | 1 | off | bf16 | 8192 | 225.0 / 250.0 / 275.0 " + end.format(32768),
        "| llama-3.1-8b | 1 | off | bf16 | 32768 | 1800.0 / 2000.0 / 2200.0 " + end.format(16384),
    ]
    assert "- [Whole prompts](#whole-prompts)" in found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kv_cache", fast(["bf16", "turbo4"], keep=["turbo4"]))
def test_prompts_on_a_gpu(kv_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompt chunks, through two layers as wide as the 8B shape's."""
    config = TINY.model_copy(update={**WIDE, "num_layers": 2, "dtype": "bf16", "max_position_embeddings": 16384})
    monkeypatch.setattr(LlamaConfig, "from_shape", lambda name: config)
    monkeypatch.setattr(bench_prompt, "MATRIX_SIZE", 8192)
    others = torch.cuda.memory_allocated()  # by other tests
    rows: list[Row] = []
    measure_prompts(engine_config(kv_cache, transport="auto"), [9000], rows.append)
    (row,) = rows
    assert (row["case"]["dtype"], row["case"]["world"]) == ("bf16", 1)
    assert 0.1 < row["share_of_peak"] < 1
    assert 0.5 * row["planned_bytes"] < row["memory_bytes"] - others <= row["planned_bytes"]
