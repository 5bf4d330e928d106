"""Helpers of the benchmarks: buffers for `A~`, the outputs of attention, their check, and timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alspec.errors import BadNumbersError
from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import RecallBuffers, SpecOutput
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.predictor import KV_TILE, predictor_ranges
from alspec.runtime.profiling.stats import spread

__all__ = ["check_close", "combined", "new_recall", "new_spec_output", "times_us", "written"]

WARMUP_MS = 20  # replays before the measurement, until the clock rates have settled
REPLAYS = 25
FLUSH_BYTES = 256 * 2**20  # reading as much replaces everything in the L2


def new_recall(
    seq_lens: Tensor, shape: tuple[int, int, int], chunk_size: int, count: int, parts: int
) -> RecallBuffers | None:
    """Recall lists of `count` blocks that are spread evenly between sink and window; None with count 0.

    Args:
        seq_lens: [B].  shape: query heads, KV heads and capacity in tokens.  parts: see `RecallBuffers`.
    """
    if not count:
        return None
    _, num_kv_heads, _ = shape
    rows = []
    for sink_end, window_start in zip(*(ends.tolist() for ends in predictor_ranges(seq_lens, chunk_size)), strict=True):
        blocks = torch.arange(sink_end // KV_TILE, window_start // KV_TILE)
        chosen = blocks[:: max(1, len(blocks) // count)][:count].int()
        rows.append(torch.nn.functional.pad(chosen, (0, count - len(chosen)), value=-1))
    lists = torch.stack(rows)[:, None].repeat(1, num_kv_heads, 1).to(seq_lens.device)
    return RecallBuffers(lists, new_block_lse(len(rows), shape, seq_lens.device), parts)


def new_block_lse(batch_size: int, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Room for the weights of all blocks, as `RecallBuffers.block_lse`. shape: as for `new_recall`."""
    num_qo_heads, num_kv_heads, capacity = shape
    blocks = -(-capacity // KV_TILE)
    return torch.empty(batch_size, num_kv_heads, blocks, 4, num_qo_heads // num_kv_heads, device=device)


def new_spec_output(
    chunk_size: int, q: Tensor, parts: int, device: torch.device, recall: RecallBuffers | None = None
) -> tuple[SpecOutput, Tensor]:
    """Allocate what speculative attention of q writes for a pair.

    Args:
        q: [B, Hq, D].
        parts: number of partials of sink and window in which `A~` is sent.
        device: holds the packets of `A~`.
        recall: blocks that are recalled, which adds their parts.
    Returns:
        The `SpecOutput`, with epoch 0, and all of its packets, [n] int64, zeroed.
    """
    batch, hq, dim = q.shape
    parts += 0 if recall is None else recall.parts
    size = parts * q.numel()
    packets = torch.zeros(size + (parts * batch * hq if parts > 1 else 0), dtype=torch.int64, device=device)
    speculation = SpecOutput(
        chunk_size,
        packets[:size].view(parts, *q.shape),
        torch.full((batch, num_sums(batch, hq, dim), 2), torch.nan, device=q.device),
        torch.zeros(1, dtype=torch.int32, device=q.device),
        packets[size:].view(parts, batch, hq) if parts > 1 else None,
        recall,
    )
    return speculation, packets


def written(out: Tensor, speculation: SpecOutput | None) -> tuple[Tensor, ...]:
    """The outputs of attention: A; with `speculation` also A~ and the verdict's sums, and the lse if A~ has parts."""
    if speculation is None:
        return (out,)
    lse = () if speculation.spec_lse is None else (speculation.spec_lse,)
    return (out, speculation.spec_out, speculation.sums, *lse)


def combined(spec_out: Tensor, spec_lse: Tensor | None, epoch: int) -> Tensor:
    """Combine the packets of a `SpecOutput` into `A~`, [B, Hq, D] fp32; NaN where a packet of `epoch` is missing."""
    o = unpack_packets(spec_out, epoch)
    if spec_lse is None:
        return o[0]
    weight = (unpack_packets(spec_lse, epoch) * math.log(2)).softmax(0)
    return (o * weight[..., None]).sum(0)


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare two tensors by their relative error, in fp64: |found - expected| < tolerance |expected|.

    Raises:
        BadNumbersError: the error is larger, or not a number.
    """
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error < tolerance:
        raise BadNumbersError(f"wrong {what}: relative error {error:.2e}, tolerance {tolerance:.0e}")


def times_us(
    runs: Sequence[Callable[[int], Any]], copies: int, replays: int = REPLAYS, *, flush_l2: bool = False
) -> list[dict[str, float]]:
    """Microseconds of one launch of each run: p20, p50, p80 over replays of a CUDA graph that runs every copy once.

    The graphs are replayed in turn, so that a change over time affects all of them.

    Args:
        runs: functions of the index of a copy.
        copies: number of copies of the inputs.
        replays: measured replays of each graph.
        flush_l2: replace the contents of the L2 before each replay, for copies that together fit into it.
    """
    # Read, not written: dirty lines would be written back during the replay.
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda") if flush_l2 else None
    graphs = [_captured(run, copies) for run in runs]
    for graph in graphs:
        for _ in range(2 + int(WARMUP_MS / max(_replay_us(graph, flush) / 1e3, 0.05))):
            graph.replay()
    samples = [[_replay_us(graph, flush) / copies for graph in graphs] for _ in range(replays)]
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


def _replay_us(graph: torch.cuda.CUDAGraph, flush: Tensor | None) -> float:
    if flush is not None:
        flush.sum()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
