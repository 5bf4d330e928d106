"""The timing, checks and rows of kernel benches; the kernels themselves need a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.table import Table

from alspec.errors import BadNumbersError
from alspec.kernels.attention.oracles import (
    decode_attention_ref,
    int8_prefill_attention_ref,
    speculative_decode_attention_ref,
)
from alspec.kernels.kv_codec.formats import record_words
from alspec.launch import bench_kernels
from alspec.launch.bench import bench_common, bench_prefill, bench_quantised


@dataclass
class Graph:
    """A stand-in for a captured graph: a replay takes as many microseconds as its run says."""

    us: float

    def replay(self) -> None:
        pass


def test_implementations_are_timed_in_alternation(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[float] = []

    def replay_us(graph: Any, flush: None) -> float:
        replayed.append(graph.us)
        # Drift: every replay takes longer than the one before.
        return float(graph.us) + len(replayed) / 1000

    monkeypatch.setattr(bench_common, "_captured", lambda run, copies: Graph(run(copies)))
    monkeypatch.setattr(bench_common, "_replay_us", replay_us)
    runs = [lambda copies: 100.0 * copies, lambda copies: 101.0 * copies, lambda copies: 99.0 * copies]
    times = bench_common.times_us(runs, 4)
    assert [us["p50"] for us in times] == pytest.approx([100, 101, 99], abs=0.05)
    assert replayed[-3 * bench_common.REPLAYS :] == [400.0, 404.0, 396.0] * bench_common.REPLAYS
    assert bench_common.times_us(runs[1:2], 2)[0]["p50"] == pytest.approx(101, abs=0.1)


def test_an_implementation_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are checked before the first is timed. The first that is installed is the base, unless a base is given."""
    done: list[object] = []
    q, k, v = (torch.zeros(2, 1, *shape) for shape in ((4, 16), (2, 7, 16), (2, 7, 16)))
    case = bench_kernels.Case(q, k, v, torch.tensor([7], dtype=torch.int32))

    class Results:
        def add(self, bench: str, impl: str, label: object, us: dict[str, float], size: int, base: float) -> None:
            assert (label, size) == ({"context": 7}, case.num_bytes)
            done.append((bench, impl, us["p50"], base))

    def plain(_: int) -> tuple[torch.Tensor, ...]:
        raise AssertionError("not run")

    def spec(_: int) -> tuple[torch.Tensor, ...]:
        raise AssertionError("not run")

    def times_us(runs: list[object], copies: int) -> list[dict[str, float]]:
        assert copies == 2
        done.append(runs)
        return [{"p50": float(place)} for place in range(3, 3 + len(runs))]

    monkeypatch.setattr(bench_kernels, "check", lambda _, run, chunk_size, count: done.append((run, chunk_size)))
    monkeypatch.setattr(bench_kernels, "times_us", times_us)
    runs = [("a", "ours", plain, 0), ("a", "theirs", None, 0), ("b", "ours", spec, 128)]
    results: Any = Results()
    assert bench_kernels.add_runs(results, {"context": 7}, case, runs) == 3.0
    assert done == [(plain, 0), (spec, 128), [plain, spec], ("a", "ours", 3.0, 3.0), ("b", "ours", 4.0, 3.0)]
    assert bench_kernels.add_runs(results, {"context": 7}, case, runs, 12.0) == 12.0
    assert done[-1] == ("b", "ours", 4.0, 12.0)


def drawn_case(seq_lens: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 16) -> bench_kernels.Case:
    """Two copies of random inputs in fp32, on the CPU."""
    generator = torch.Generator().manual_seed(sum(seq_lens))
    q = torch.randn(2, len(seq_lens), heads, dim, generator=generator)
    k, v = torch.randn(2, 2, len(seq_lens), kv_heads, max(seq_lens), dim, generator=generator)
    return bench_kernels.Case(q, k, v, torch.tensor(seq_lens, dtype=torch.int32))


def test_bytes_of_decode_attention() -> None:
    """K and V of all tokens; over a quantised cache the records with their scales, then the tail with its scales."""
    assert drawn_case([3, 7]).num_bytes == (3 + 7) * 2 * 16 * 2 * 4
    layer: Any = SimpleNamespace(bits=torch.tensor([[4, 2], [4, 4], [2, 4]]), head_dim=64, format="flashq")
    case = bench_quantised.QuantisedCase(torch.zeros(1), [layer], torch.tensor([64, 65, 1]))
    full = {bits: 4 * record_words("flashq", bits, 64) + 8 for bits in (4, 2)}
    tails = 2 * (64 + 1 + 1) * 2 * 64 + 6 * 8
    assert case.num_bytes == tails + 2 * full[4]


def test_other_implementations_see_the_tokens_of_each_request() -> None:
    case = drawn_case([3, 7])
    expected, _ = decode_attention_ref(*case.last(), 16**-0.5)
    torch.testing.assert_close(bench_kernels.sdpa(case)(1)[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_full_and_spec_output_and_sums_are_each_checked(wrong: int | None) -> None:
    """Over 500 tokens `A~` differs from A; sums come in parts."""
    case = drawn_case([500])
    spec_out, out, sums = speculative_decode_attention_ref(*case.last(), 128, 16**-0.5)
    found = [out, spec_out, torch.stack([sums / 4, sums * 3 / 4], dim=1)]
    if wrong is None:
        bench_kernels.check(case, lambda _: tuple(found), 128)
        bench_kernels.check(case, lambda _: (out,))
        return
    found[wrong] = found[wrong] * 1.02
    with pytest.raises(BadNumbersError, match="wrong result for seq_lens"):
        bench_kernels.check(case, lambda _: tuple(found), 128)


def test_parts_of_a_spec_output_are_combined_by_their_lse() -> None:
    """The base is 2: lse 3 has four times the weight of lse 1, and a part without tokens has none."""
    words = torch.zeros(3, 1, 1, 2, 2, dtype=torch.int32)  # value, epoch
    words[..., 1] = 5
    words[..., 0] = torch.tensor([[10.0, 20.0], [0.0, -5.0], [7.0, 7.0]]).view(torch.int32)[:, None, None]
    lse = torch.full((3, 1, 1, 2), 5, dtype=torch.int32)
    lse[..., 0] = torch.tensor([3.0, 1.0, -torch.inf]).view(torch.int32)[:, None, None]
    combined = bench_common.combined(words.view(torch.int64)[..., 0], lse.view(torch.int64)[..., 0], 5)
    torch.testing.assert_close(combined, torch.tensor([[[8.0, 15.0]]]))


def test_rows_of_a_bench(tmp_path: Path) -> None:
    """10^8 bytes in 50 us are 2 TB/s, and 10^10 operations 200 TFLOP/s."""
    results = object.__new__(bench_kernels.Results)
    results._is_first, results._rows, results._command, results.stream = True, tmp_path / "rows", "command", 4e12
    results.table = Table(*"abcdefgh")
    us = {"p20": 49.0, "p50": 50.0, "p80": 51.0}
    results.add("prefill_attention", "ours", {"tokens": 8}, us, 10**8, base=75.0, num_gpus=0, flops=10**10)
    results.add("decode_attention", "ours", {"tokens": 8}, us, 10**8, num_gpus=0)
    cells = list(zip(*(column.cells for column in results.table.columns), strict=True))
    assert cells == [
        ("prefill_attention", "tokens=8", "ours", "50.0", "2.00", "50 %", "200", "1.50x"),
        ("decode_attention", "tokens=8", "ours", "50.0", "2.00", "50 %", "-", "-"),
    ]
    first, second = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert (first["bytes"], first["stream_tb_s"], first["tflop_s"], first["us"]) == (10**8, 4.0, 200.0, us)
    assert "tflop_s" not in second


def drawn_prefill(num_queries: int, num_tokens: int) -> bench_prefill.PrefillCase:
    q = torch.randn(num_queries, 4, 16, generator=torch.Generator().manual_seed(3))
    k8, v8 = torch.randint(-9, 10, (2, 2, num_tokens, 16), dtype=torch.int8, generator=torch.Generator().manual_seed(4))
    scale = torch.full((2, num_tokens // 64), 0.1)
    return bench_prefill.PrefillCase(q, k8.float(), v8.float(), k8, v8, scale, scale)


def test_prefill_behind_a_prefix_is_checked_row_by_row() -> None:
    """Each query sees the prefix and the tokens before it; the first, some middle and the last rows are checked."""
    case = drawn_prefill(192, 320)
    out, _ = int8_prefill_attention_ref(case.q, case.k8, case.v8, case.k_scale, case.v_scale, 128**-0.5)
    bench_prefill.check_prefill(case, lambda _: out)
    for row in (0, 100, 191):
        wrong = out.clone()
        wrong[row] += 1
        with pytest.raises(BadNumbersError, match=r"wrong rows \d+ to \d+ of 192: relative error"):
            bench_prefill.check_prefill(case, lambda _, wrong=wrong: wrong)


def test_operations_and_bytes_of_prefill() -> None:
    """The last 4 of 64 tokens see 61 to 64, in 32 heads of 128. There are two products, of two operations each."""
    case = drawn_prefill(4, 64)
    assert case.flops == 2 * 2 * (61 + 62 + 63 + 64) * 32 * 128
    assert case.num_bytes(f"{bench_prefill.OURS}.sas") == case.num_bytes(bench_prefill.OURS)
