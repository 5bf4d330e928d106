"""Check, then measure kernels against PyTorch, and whole prompts: `launch/bench_kernels.py --rows out.jsonl`."""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from alspec.launch.terminal.output import exit_on_interrupt

    exit_on_interrupt()

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.table import Table
from torch import Tensor

from alspec.config import QUANTISED_CODECS, BenchConfig
from alspec.errors import BadNumbersError, UserError
from alspec.kernels.attention.recall import RecallState, choose_recall_lists, recall_lists_ref
from alspec.kernels.common.jit_launch import compiling
from alspec.kernels.common.limits import FAST_ROWS
from alspec.launch.bench.bench_allreduce import BATCHES, HIDDEN, connect, measure
from alspec.launch.bench.bench_common import times_us
from alspec.launch.bench.bench_linear import (
    LINEAR_ROWS,
    LINEAR_SHAPES,
    LINEAR_WEIGHTS,
    LinearCase,
    baselines,
    products_of,
)
from alspec.launch.bench.bench_prefill import PREFILL_CASES, PrefillCase, check_prefill, prefill_runs
from alspec.launch.bench.bench_prompt import PROMPT_CONTEXTS, measure_prompts, prompt_engines, prompt_table
from alspec.launch.bench.bench_quantised import QuantisedCase, quantised_run
from alspec.launch.bench.bench_reading import can_read_alone, reading_alone
from alspec.launch.bench.bench_shapes import NUM_CASES, measure_shapes, shapes_table
from alspec.launch.bench.bench_turn import TURN_CONTEXTS, measure_turns, turn_table
from alspec.launch.bench.decode_case import COLD_BYTES, Case, check, flashinfer, lean, sdpa
from alspec.launch.bench.spec_ready import spec_ready_us
from alspec.launch.terminal.flags import Parser, check_writable, parse_command
from alspec.launch.terminal.output import append_rows, exit_code, result_console
from alspec.predictor import KV_TILE
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.faults.guard import translate_out_of_memory
from alspec.runtime.profiling.provenance import provenance
from alspec.runtime.profiling.stats import stream_bandwidth
from alspec.sas import Softmax

__all__ = ["main"]

CHUNK_SIZE = 128
CONTEXTS = tuple(2**power for power in range(10, 19))
RECALL_COUNTS, RECALL_CODECS, NUM_LAYERS = (16, 32), ("turbo4", "turboquant3", "hybrid-k4v2"), 32
RECALL_CONTEXTS = (8192, 32768, 131072)
SHAPES = ((32, 8, 128), (8, 2, 128), (32, 8, 64))


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
            result_console(self._rows, width=170).print(self.table)


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
    case: Case | QuantisedCase,
    runs: Sequence[tuple[str, str, Callable[[int], tuple[Tensor, ...]] | None, int]],
    base: float | None = None,
    recalled: Sequence[int] | None = None,
) -> float:
    """Check all runs that are not None, then time them in turn.

    Args:
        runs: (bench, implementation, run, chunk size) of each.
        recalled: blocks that `A~` of each run recalls, which their labels then name.
    Returns:
        The median to compare with: `base`, or that of the first run.
    """
    found = [(bench, impl, run, chunk_size) for bench, impl, run, chunk_size in runs if run is not None]
    counts = recalled or [0] * len(found)
    for (_, _, run, chunk_size), count in zip(found, counts, strict=True):
        check(case, run, chunk_size, count)
    times = times_us([run for _, _, run, _ in found], case.q.shape[0])
    base = base or times[0]["p50"]
    for (bench, impl, _, _), us, count in zip(found, times, counts, strict=True):
        own = label if recalled is None else label | {"recall_blocks": count}
        results.add(bench, impl, own, us, case.num_bytes, base)
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


def bench_quantised_decode(results: Results, contexts: list[int]) -> None:
    """Decode over the quantised cache, plain and speculative, with either softmax, against SDPA and ours over bf16."""
    with compiling():  # all kernels side by side; they do not depend on the context
        for (hq, hkv, dim), codec in itertools.product(SHAPES[:2], QUANTISED_CODECS):
            small = QuantisedCase.draw([4 * CHUNK_SIZE], hq, hkv, dim, codec, 0)
            for softmax, chunk_size in itertools.product(get_args(Softmax), (0, CHUNK_SIZE)):
                quantised_run(small, chunk_size, softmax=softmax)(0)
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
            for codec in QUANTISED_CODECS:
                quantised = QuantisedCase.draw([context], hq, hkv, dim, codec, COLD_BYTES)
                benches = (("decode_attention", 0), ("speculative_decode", CHUNK_SIZE))
                runs = [
                    (
                        bench,
                        "alspec.quantised_decode_attention" + (".sas" if softmax == "sas" else ""),
                        quantised_run(quantised, chunk_size, softmax=softmax),
                        chunk_size,
                    )
                    for softmax, (bench, chunk_size) in itertools.product(get_args(Softmax), benches)
                ]
                add_runs(results, {**label, "codec": codec}, quantised, runs, base)
                size, copies = quantised.num_bytes, quantised.q.shape[0]
                del quantised, runs
                add_reading(results, {**label, "codec": codec}, size, copies, base)


def bench_recall(results: Results, contexts: list[int]) -> None:
    """What recalled blocks cost: attention over each kind of cache, the time to `A~`, and the choice of all lists.

    `masses` is attention that writes the weights of blocks, without `A~`.
    """
    counts, (hq, hkv, dim) = (0, 0, 0, *RECALL_COUNTS), SHAPES[0]
    names = ("decode_attention", "masses", *["speculative_decode"] * (len(counts) - 2))
    chunks = tuple(CHUNK_SIZE if name == "speculative_decode" else 0 for name in names)
    kinds = [(chunk, count, name == "masses") for name, chunk, count in zip(names, chunks, counts, strict=True)]
    for context in contexts:
        label = {"heads": f"{hq}/{hkv}", "head_dim": dim, "context": context}
        case = Case.draw([context], hq, hkv, dim)
        lean_runs = [lean(case, *kind) for kind in kinds]
        impls = ["alspec.lean_decode_attention"] * len(counts)
        add_runs(
            results,
            label | {"codec": "bf16"},
            case,
            list(zip(names, impls, lean_runs, chunks, strict=True)),
            None,
            counts,
        )
        for count in (0, *RECALL_COUNTS):
            us = spec_ready_us(case.q[0], case.k[0], case.v[0], case.seq_lens, CHUNK_SIZE, False, count)
            size = min(context, 2 * CHUNK_SIZE + KV_TILE * count) * hkv * dim * 2 * case.k.itemsize
            ready = label | {"chunk_size": CHUNK_SIZE, "recall_blocks": count, "seen_by": "this GPU"}
            results.add("spec_ready", impls[0], ready, us, size)
        del case, lean_runs
        for codec in RECALL_CODECS:
            quantised = QuantisedCase.draw([context], hq, hkv, dim, codec, COLD_BYTES)
            runs = [quantised_run(quantised, chunk, "exact", count, masses) for chunk, count, masses in kinds]
            impls = ["alspec.quantised_decode_attention"] * len(counts)
            own = label | {"codec": codec}
            add_runs(results, own, quantised, list(zip(names, impls, runs, chunks, strict=True)), None, counts)
            del quantised, runs
        for count in RECALL_COUNTS:
            us, size = recall_lists_us(NUM_LAYERS, hq, hkv, context, CHUNK_SIZE, count)
            results.add(
                "recall_lists",
                "alspec.choose_recall_lists",
                label | {"layers": NUM_LAYERS, "recall_blocks": count},
                us,
                size,
            )


def recall_lists_us(
    num_layers: int, num_qo_heads: int, num_kv_heads: int, context: int, chunk_size: int, count: int
) -> tuple[dict[str, float], int]:
    """Time of the choice of the recall lists of all layers of one request, and the bytes that it reads."""
    device = torch.device("cuda")
    state = RecallState.allocate(num_layers, 1, num_qo_heads, num_kv_heads, context, count, 1, device)
    state.block_lse.copy_(torch.randn(state.block_lse.shape, device=device))
    seq_lens = torch.tensor([context], dtype=torch.int32, device=device)
    choose_recall_lists(state, seq_lens, chunk_size)
    expected = recall_lists_ref(state.block_lse, state.lse, seq_lens, chunk_size, count)
    if not torch.equal(state.lists, expected):
        raise BadNumbersError(f"wrong recall lists of {context} tokens")
    (us,) = times_us([lambda _: choose_recall_lists(state, seq_lens, chunk_size)], 8, flush_l2=True)
    return us, state.block_lse.numel() * 4


def bench_prompt(results: Results, contexts: list[int]) -> None:
    """Whole prompts of the 8B shape over each cache, in each mode of a torchrun job. They have their own table."""
    rows: list[dict[str, Any]] = []

    def found(row: dict[str, Any]) -> None:
        results.write(row, row["case"]["world"])
        rows.append(row)

    for config in prompt_engines(Placement.from_environment().world_size):
        measure_prompts(config, contexts, found)
    results.table = prompt_table(rows)


def bench_turn(results: Results, contexts: list[int]) -> None:
    """Second turns of conversations with the 8B shape, over the caches and modes of `bench_prompt`."""
    rows: list[dict[str, Any]] = []

    def found(row: dict[str, Any]) -> None:
        results.write(row, row["case"]["world"])
        rows.append(row)

    for config in prompt_engines(Placement.from_environment().world_size):
        measure_turns(config, contexts, found)
    results.table = turn_table(rows)


def bench_shapes(results: Results, _: list[int], num_cases: int, seed: int) -> None:
    """Decode attention on random shapes against SDPA and FlashInfer. They have their own table."""
    rows: list[dict[str, Any]] = []

    def found(row: dict[str, Any]) -> None:
        results.write(row, num_gpus=1)
        rows.append(row)

    measure_shapes(num_cases, seed, results.stream, found)
    results.table = shapes_table(rows)


def bench_linear(results: Results, _: list[int]) -> None:
    """The products of a layer, by the format of their weights, and the library's. It has its own cases.

    The speed-up is that over the library's product with bf16 weights. With more than `FAST_ROWS` rows a step uses that
    one, too.
    """
    for product in (each for shape in LINEAR_SHAPES for each in products_of(shape)):
        label = {"product": product.name, "out": product.rows, "in": product.columns}
        base: dict[int, float] = {}
        for impl, weights, copies, run in baselines(product):
            for batch in LINEAR_ROWS:
                (us,) = times_us([run(batch)], len(copies))
                base.setdefault(batch, us["p50"])
                case = {**label, "rows": batch, "weights": weights}
                results.add("linear", impl, case, us, copies[0].nbytes, base[batch])
            del copies, run
        for weights in LINEAR_WEIGHTS:
            drawn = LinearCase.draw(product, weights, max(LINEAR_ROWS))
            cases = {batch: drawn.of(batch) for batch in LINEAR_ROWS if weights != "bf16" or batch <= FAST_ROWS}
            with compiling():
                for each in cases.values():
                    each.runs()(0)
            for batch, each in cases.items():
                each.check()
                (us,) = times_us([each.runs()], len(drawn.weights))
                case = {**label, "rows": batch, "weights": weights}
                results.add("linear", "alspec.projections", case, us, drawn.num_bytes, base[batch])
            del drawn, cases, each


BENCHES: dict[str, Callable[..., None]] = {
    "decode": bench_decode,
    "linear": bench_linear,
    "ready": bench_ready,
    "allreduce": bench_allreduce,
    "prefill": bench_prefill,
    "prompt": bench_prompt,
    "recall": bench_recall,
    "shapes": bench_shapes,
    "turbo": bench_quantised_decode,
    "turn": bench_turn,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="bench_kernels", description="Kernels against PyTorch, and whole prompts.")
    with exit_code(argv) as outcome:
        config, args = parse_command(parser, BenchConfig, argv, outcome)
        outcome.code = _run(config, args.command)
    return outcome.code


def _run(config: BenchConfig, command: str) -> int:
    if config.contexts and config.bench in ("allreduce", "linear", "prefill", "shapes"):
        raise UserError(f"flags: --contexts: --bench {config.bench} has cases of its own; leave it out")
    for flag, value in (("--cases", config.cases), ("--seed", config.seed)):
        if value is not None and config.bench != "shapes":
            raise UserError(f"flags: {flag}: only --bench shapes draws its cases; leave it out")
    if not torch.cuda.is_available():
        raise UserError("bench_kernels: needs a CUDA GPU, found none")
    check_writable("flags: --rows", config.rows)
    placement = Placement.from_environment()
    if placement.world_size > 1 and config.bench not in ("allreduce", "prompt", "turn"):
        raise UserError("bench_kernels: torchrun is for --bench allreduce, prompt and turn alone")
    if torch.cuda.device_count() < placement.local_world_size:
        found = f"found {torch.cuda.device_count()} for {placement.local_world_size} ranks"
        raise UserError(f"bench_kernels: needs a CUDA GPU for each rank, {found}")
    torch.cuda.set_device(placement.local_rank)
    is_drawn = config.bench == "shapes"
    options = {"num_cases": config.cases or NUM_CASES, "seed": config.seed or 0} if is_drawn else {}
    with translate_out_of_memory("--bench shapes needs some 40 GB" if is_drawn else "Lower --contexts"):
        results = Results(config.rows, command)
        for name in [config.bench] if config.bench else ["decode", "ready"]:
            default = {"prompt": PROMPT_CONTEXTS, "turn": TURN_CONTEXTS, "recall": RECALL_CONTEXTS}.get(name, CONTEXTS)
            BENCHES[name](results, list(config.contexts or default), **options)
    results.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
