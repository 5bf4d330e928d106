"""Check, then measure kernels against PyTorch, and whole prompts: `launch/bench_kernels.py --rows out.jsonl`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from alspec.config import FLASHQ_CODECS, BenchConfig
from alspec.errors import UserError
from alspec.kernels.attention.decode.lean_decode import lean_decode_attention, spec_parts
from alspec.kernels.attention.dispatch import KVLayer, attend_workspace
from alspec.kernels.attention.oracles import decode_attention_ref, speculative_decode_attention_ref
from alspec.launch.bench.bench_allreduce import BATCHES, HIDDEN, connect, measure
from alspec.launch.bench.bench_common import check_close, combined, new_spec_output, written
from alspec.launch.bench.bench_flashq import FlashQCase, flashq_run
from alspec.launch.bench.bench_prefill import PREFILL_CASES, PrefillCase, check_prefill, prefill_runs
from alspec.launch.bench.bench_prompt import PROMPT_CONTEXTS, measure_prompts, prompt_engines, prompt_table
from alspec.launch.bench.bench_reading import can_read_alone, reading_alone
from alspec.launch.bench.spec_ready import spec_ready_us
from alspec.launch.terminal.flags import Parser, check_writable, parse_command
from alspec.launch.terminal.output import append_rows, exit_code
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.faults.guard import translate_out_of_memory
from alspec.runtime.profiling.provenance import provenance
from alspec.runtime.profiling.stats import spread, stream_bandwidth
from alspec.sas import Softmax

__all__ = ["main"]

# Copies of the inputs rotate through this much memory, 35 times the L2, so that nearly all reads come from DRAM. With
# less, data that is loaded as evict_first, such as quantised records, would partly stay in the L2.
COLD_BYTES = 2 * 2**30
WARMUP_MS = 20  # replays before the measurement, until the clock rates have settled
REPLAYS = 25
CHUNK_SIZE = 128
CONTEXTS = tuple(2**power for power in range(10, 19))
SHAPES = ((32, 8, 128), (8, 2, 128), (32, 8, 64))
TOLERANCE = 1e-2  # relative RMS of a bf16 output against fp64


@dataclass
class Case:
    """One shape, with enough copies of its inputs to keep the L2 cold."""

    q: Tensor  # [copies, B, Hq, D] bf16
    k: Tensor  # [copies, B, Hkv, N, D] bf16
    v: Tensor
    seq_lens: Tensor  # [B] int32

    @classmethod
    def draw(cls, seq_lens: list[int], num_qo_heads: int, num_kv_heads: int, head_dim: int) -> Case:
        """Fresh random inputs."""
        batch, capacity = len(seq_lens), max(seq_lens)
        copies = max(8, min(128, COLD_BYTES // (4 * batch * num_kv_heads * capacity * head_dim)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(copies, batch, *shape, dtype=torch.bfloat16, device="cuda")

        return cls(
            q=normal(num_qo_heads, head_dim),
            k=normal(num_kv_heads, capacity, head_dim),
            v=normal(num_kv_heads, capacity, head_dim),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        )

    def last(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and seq_lens of the last copy."""
        return self.q[-1], self.k[-1], self.v[-1], self.seq_lens

    @property
    def num_bytes(self) -> int:
        """Bytes that one launch must read."""
        heads, head_dim = self.k.shape[2], self.k.shape[4]
        return int(self.seq_lens.sum()) * heads * head_dim * 2 * self.k.itemsize


def lean(case: Case, chunk_size: int = 0) -> Callable[[int], tuple[Tensor, ...]]:
    """Our kernel on copy `i`. With `chunk_size` it also writes `A~` and the verdict's sums."""
    _, batch, hq, dim = case.q.shape
    device, hkv = case.q.device, case.k.shape[2]
    workspace = attend_workspace(KVLayer(case.k[0], case.v[0]), hq, device)
    out, lse = torch.full_like(case.q[0], math.nan), torch.full((batch, hq), math.nan, device=device)
    speculation = None
    if chunk_size:
        parts = spec_parts(chunk_size, batch, hq, hkv, dim, case.q.dtype, device)
        speculation, packets = new_spec_output(chunk_size, case.q[0], parts, device)
        packets.fill_(-1)  # another epoch than that of the run

    def run(i: int) -> tuple[Tensor, ...]:
        lean_decode_attention(
            case.q[i], case.k[i], case.v[i], case.seq_lens, dim**-0.5, workspace, out, lse, speculation
        )
        return written(out, speculation)

    return run


def sdpa(case: Case) -> Callable[[int], tuple[Tensor, ...]]:
    """torch SDPA on copy `i`, with every request padded to the longest one."""
    _, batch, hq, dim = case.q.shape
    capacity = case.k.shape[3]
    ragged = bool((case.seq_lens != capacity).any())
    lens = case.seq_lens[:, None, None, None]
    mask = (torch.arange(capacity, device=case.q.device) < lens).expand(-1, hq, 1, -1) if ragged else None

    def run(i: int) -> tuple[Tensor, ...]:
        q = case.q[i][:, :, None]
        out = F.scaled_dot_product_attention(q, case.k[i], case.v[i], attn_mask=mask, enable_gqa=True)
        return (out.reshape(batch, hq, dim),)

    return run


def flashinfer(case: Case) -> Callable[[int], tuple[Tensor, ...]] | None:
    """FlashInfer's decode of one request on copy `i`, with tensor cores; None if it is not installed."""
    if case.q.shape[1] != 1 or importlib.util.find_spec("flashinfer") is None:
        return None
    decode = importlib.import_module("flashinfer").single_decode_with_kv_cache

    def run(i: int) -> tuple[Tensor, ...]:
        return (decode(case.q[i, 0], case.k[i, 0], case.v[i, 0], kv_layout="HND", use_tensor_cores=True)[None],)

    return run


def check(case: Case | FlashQCase, run: Callable[[int], tuple[Tensor, ...]], chunk_size: int = 0) -> None:
    """Compare the last copy's result with the fp64 oracle."""
    args = case.last()
    scale = case.q.shape[-1] ** -0.5
    found = run(case.q.shape[0] - 1)
    if chunk_size:
        spec_out, full_out, sums = speculative_decode_attention_ref(*args, chunk_size, scale)
        spec = found[1] if found[1].is_floating_point() else combined(found[1], found[3] if len(found) > 3 else None, 0)
        found = (found[0], spec, found[2].sum(1))
        expected: tuple[Tensor, ...] = (full_out, spec_out, sums)
    else:
        expected = (decode_attention_ref(*args, scale)[0],)
    for ours, reference in zip(found, expected, strict=True):
        check_close(f"result for seq_lens {case.seq_lens.tolist()[:4]}", ours, reference, TOLERANCE)


def times_us(runs: Sequence[Callable[[int], Any]], copies: int) -> list[dict[str, float]]:
    """Microseconds of one launch of each run: p20, p50, p80 over replays of a CUDA graph that runs every copy once.

    The graphs are replayed in turn, so that a change over time affects all of them.
    """
    graphs = [_captured(run, copies) for run in runs]
    for graph in graphs:
        for _ in range(2 + int(WARMUP_MS / max(_replay_us(graph) / 1e3, 0.05))):
            graph.replay()
    samples = [[_replay_us(graph) / copies for graph in graphs] for _ in range(REPLAYS)]
    return [spread(list(run_samples)) for run_samples in zip(*samples, strict=True)]


def _captured(run: Callable[[int], Any], copies: int) -> torch.cuda.CUDAGraph:
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


class Results:
    """Writes rows to the file, and collects the table."""

    def __init__(self, rows: Path | None, command: str) -> None:
        # All ranks of a job measure; rank 0 writes.
        self._is_first = Placement.from_environment().rank == 0
        self._rows = rows if self._is_first else None
        self._command = command
        self.stream = stream_bandwidth(torch.device("cuda"))
        self.table = Table(title=f"stream {self.stream / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}")
        for name in ("bench", "case", "impl", "us p50", "TB/s", "share", "TFLOP/s", "speed-up"):
            self.table.add_column(name)

    def add(
        self,
        bench: str,
        impl: str,
        case: dict[str, Any],
        us: dict[str, float],
        size: int,
        base: float | None = None,
        num_gpus: int = 1,
        flops: int = 0,
    ) -> None:
        """Add one implementation on a case that must move `size` bytes. `base` is the median to compare with."""
        rate = size / us["p50"] * 1e6
        tflop_s = flops / us["p50"] / 1e6
        label = " ".join(f"{key}={value}" for key, value in case.items())
        cells = (
            f"{us['p50']:.1f}",
            f"{rate / 1e12:.2f}",
            f"{100 * rate / self.stream:.0f} %",
            f"{tflop_s:.0f}" if flops else "-",
            f"{base / us['p50']:.2f}x" if base else "-",
        )
        self.table.add_row(bench, label, impl, *cells)
        row = {
            "bench": bench,
            "impl": impl,
            "case": case,
            "us": {name: round(value, 3) for name, value in us.items()},
            "bytes": size,
            "stream_tb_s": round(self.stream / 1e12, 3),
            **({"tflop_s": round(tflop_s, 1)} if flops else {}),
        }
        self.write(row, num_gpus)

    def write(self, row: dict[str, Any], num_gpus: int) -> None:
        """Add the provenance to a row, and append it to the file."""
        if self._rows is None:
            return
        row = row | provenance(num_gpus, self._command)
        if row["impl"] == "flashinfer":
            row["versions"]["flashinfer"] = getattr(importlib.import_module("flashinfer"), "__version__", None)
        append_rows(self._rows, [row])

    def show(self) -> None:
        """Print the table on stdout."""
        if self._is_first:
            Console(width=170).print(self.table)


def bench_decode(results: Results, contexts: list[int]) -> None:
    """Plain and speculative decode against SDPA and FlashInfer: batch 1 at every context, then a ragged batch.

    The last case pads this batch to its longest request, as a kernel without ragged lengths has to.
    """
    generator = torch.Generator().manual_seed(11)
    ragged = torch.randint(1024, 65536, (8,), generator=generator).tolist()
    for hq, hkv, dim in SHAPES:
        for seq_lens in [*([n] for n in contexts), ragged, [max(ragged)] * len(ragged)]:
            case = Case.draw(seq_lens, hq, hkv, dim)
            label: dict[str, Any] = {"heads": f"{hq}/{hkv}", "head_dim": dim}
            label["context"] = seq_lens[0]
            if len(seq_lens) > 1:
                label["context"] = f"{'ragged' if seq_lens is ragged else 'padded'} {len(seq_lens)}"
            runs = (
                ("decode_attention", "torch.sdpa", sdpa(case), 0),
                ("decode_attention", "flashinfer", flashinfer(case), 0),
                ("decode_attention", "alspec.lean_decode_attention", lean(case), 0),
                ("speculative_decode", "alspec.lean_decode_attention", lean(case, CHUNK_SIZE), CHUNK_SIZE),
            )
            base = add_runs(results, label, case, runs)
            size, copies = case.num_bytes, case.q.shape[0]
            del case, runs
            add_reading(results, label, size, copies, base)


def add_runs(
    results: Results,
    label: dict[str, Any],
    case: Case | FlashQCase,
    runs: Sequence[tuple[str, str, Callable[[int], tuple[Tensor, ...]] | None, int]],
    base: float | None = None,
) -> float:
    """Check all runs that are not None, then time them in turn.

    Args:
        runs: (bench, implementation, run, chunk size) of each.
    Returns:
        The median to compare with: `base`, or that of the first run.
    """
    found = [(bench, impl, run, chunk_size) for bench, impl, run, chunk_size in runs if run is not None]
    for _, _, run, chunk_size in found:
        check(case, run, chunk_size)
    times = times_us([run for _, _, run, _ in found], case.q.shape[0])
    base = base or times[0]["p50"]
    for (bench, impl, _, _), us in zip(found, times, strict=True):
        results.add(bench, impl, label, us, case.num_bytes, base)
    return base


def add_reading(results: Results, case: dict[str, Any], num_bytes: int, copies: int, base: float | None) -> None:
    """Add the time of a kernel that only reads as many bytes as attention must read."""
    if can_read_alone(torch.device("cuda")):
        (us,) = times_us([reading_alone(num_bytes, copies)], copies)
        results.add("reading", "reading alone", case, us, num_bytes, base)


def bench_ready(results: Results, contexts: list[int]) -> None:
    """Measure the time until `A~` can be used by the same GPU and, if there is one, by a second GPU."""
    places = ["this GPU"]
    if torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1):
        # A copy in each direction makes PyTorch enable peer access.
        torch.zeros(1, device="cuda:0").to("cuda:1").to("cuda:0")
        places.append("second GPU")
    for hq, hkv, dim in SHAPES:
        for context in contexts:
            case = Case.draw([context], hq, hkv, dim)
            for num_gpus, place in enumerate(places, start=1):
                for chunk_size in (128, 256, 512):
                    label = {"heads": f"{hq}/{hkv}", "head_dim": dim, "context": context, "chunk_size": chunk_size}
                    us = spec_ready_us(case.q[0], case.k[0], case.v[0], case.seq_lens, chunk_size, num_gpus > 1)
                    size = min(context, 2 * chunk_size) * hkv * dim * 2 * case.k.itemsize
                    label["seen_by"] = place
                    results.add("spec_ready", "alspec.lean_decode_attention", label, us, size, num_gpus=num_gpus)
            del case


def bench_allreduce(results: Results, contexts: list[int]) -> None:
    """The step's all-reduce alone, on every rank of a torchrun job. Contexts have no effect."""
    transport, peer_memory = connect()
    for batch_size in BATCHES:
        case, times = measure(transport, peer_memory, batch_size)
        for impl, us in times.items():
            base = times["nccl"]["p50"]
            results.add("allreduce_rmsnorm", impl, case, us, 4 * batch_size * HIDDEN, base, case["world"])
    transport.barrier()
    transport.close()


def bench_prefill(results: Results, _: list[int]) -> None:
    """INT8 prefill attention with either softmax, and ours over bf16, against SDPA. It has its own cases."""
    for num_queries, num_tokens in PREFILL_CASES:
        case = PrefillCase.draw(num_queries, num_tokens)
        heads, dim = f"{case.q.shape[1]}/{case.k.shape[0]}", case.q.shape[2]
        label = {"heads": heads, "head_dim": dim, "tokens": num_queries, "context": num_tokens}
        runs = prefill_runs(case)
        for run in runs.values():
            check_prefill(case, run)
        times = times_us(list(runs.values()), 1)
        for impl, us in zip(runs, times, strict=True):
            size, base = case.num_bytes(impl), times[0]["p50"]
            results.add("prefill_attention", impl, label, us, size, base, flops=case.flops)
        del case, runs, run


def bench_flashq_decode(results: Results, contexts: list[int]) -> None:
    """Decode over the quantised cache, plain and speculative, with either softmax, against SDPA and ours over bf16."""
    for hq, hkv, dim in SHAPES[:2]:
        for context in contexts:
            label = {"heads": f"{hq}/{hkv}", "head_dim": dim, "context": context}
            case = Case.draw([context], hq, hkv, dim)
            runs: list[tuple[str, str, Callable[[int], tuple[Tensor, ...]], int]] = [
                ("decode_attention", "torch.sdpa", sdpa(case), 0),
                ("decode_attention", "alspec.lean_decode_attention", lean(case), 0),
                ("speculative_decode", "alspec.lean_decode_attention", lean(case, CHUNK_SIZE), CHUNK_SIZE),
            ]
            base = add_runs(results, {**label, "codec": "bf16"}, case, runs)
            del case, runs
            for codec in FLASHQ_CODECS:
                quantised = FlashQCase.draw([context], hq, hkv, dim, codec, COLD_BYTES)
                benches = (("decode_attention", 0), ("speculative_decode", CHUNK_SIZE))
                runs = [
                    (
                        bench,
                        "alspec.flashq_decode_attention" + (".sas" if softmax == "sas" else ""),
                        flashq_run(quantised, chunk_size, softmax=softmax),
                        chunk_size,
                    )
                    for softmax, (bench, chunk_size) in itertools.product(get_args(Softmax), benches)
                ]
                add_runs(results, {**label, "codec": codec}, quantised, runs, base)
                size, copies = quantised.num_bytes, quantised.q.shape[0]
                del quantised, runs
                add_reading(results, {**label, "codec": codec}, size, copies, base)


def bench_prompt(results: Results, contexts: list[int]) -> None:
    """Whole prompts of the 8B shape over each cache, in each mode of a torchrun job. They have their own table."""
    rows: list[dict[str, Any]] = []

    def found(row: dict[str, Any]) -> None:
        results.write(row, row["case"]["world"])
        rows.append(row)

    for config in prompt_engines(Placement.from_environment().world_size):
        measure_prompts(config, contexts, found)
    results.table = prompt_table(rows)


BENCHES = {
    "decode": bench_decode,
    "ready": bench_ready,
    "allreduce": bench_allreduce,
    "prefill": bench_prefill,
    "prompt": bench_prompt,
    "turbo": bench_flashq_decode,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="bench_kernels", description="Kernels against PyTorch, and whole prompts.")
    with exit_code(argv) as outcome:
        config, args = parse_command(parser, BenchConfig, argv, outcome)
        outcome.code = _run(config, args.command)
    return outcome.code


def _run(config: BenchConfig, command: str) -> int:
    if config.contexts and config.bench in ("allreduce", "prefill"):
        raise UserError(f"flags: --contexts: --bench {config.bench} has cases of its own; leave it out")
    if not torch.cuda.is_available():
        raise UserError("bench_kernels: needs a CUDA GPU, found none")
    check_writable("flags: --rows", config.rows)
    placement = Placement.from_environment()
    if placement.world_size > 1 and config.bench not in ("allreduce", "prompt"):
        raise UserError("bench_kernels: torchrun is for --bench allreduce and --bench prompt alone")
    if torch.cuda.device_count() < placement.local_world_size:
        found = f"found {torch.cuda.device_count()} for {placement.local_world_size} ranks"
        raise UserError(f"bench_kernels: needs a CUDA GPU for each rank, {found}")
    torch.cuda.set_device(placement.local_rank)
    with translate_out_of_memory("Lower --contexts"):
        results = Results(config.rows, command)
        for name in [config.bench] if config.bench else ["decode", "ready"]:
            default = PROMPT_CONTEXTS if name == "prompt" else CONTEXTS
            BENCHES[name](results, list(config.contexts or default))
    results.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
