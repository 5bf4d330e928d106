"""Measure the time from the launch of speculative decode until another kernel has received all packets of `A~`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from alspec.errors import RankFailureError
from alspec.kernels.attention.decode.lean_decode import SpecOutput, lean_decode_attention, lean_recall_parts, spec_parts
from alspec.kernels.attention.dispatch import KVLayer, attend_workspace
from alspec.kernels.attention.oracles import decode_attention_ref
from alspec.kernels.bench.measuring import NEVER, POLLED, compare_clocks, stamp_time, watch_packets
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.kernels.common.jit_launch import num_sms
from alspec.launch.bench.bench_common import check_close, combined, new_recall, new_spec_output
from alspec.predictor import KV_TILE, predictor_ranges
from alspec.runtime.profiling.stats import spread

__all__ = ["spec_ready_us"]

WARMUP, REPETITIONS = 5, 20
FLUSH_BYTES = 200 * 2**20
# Several programs poll the same packets: if one has just polled too early, another one polls soon after. An SM holds 32
# programs; at most 28 watchers leave room for attention and its combine kernel.
WATCHERS, WATCHERS_PER_SM = 6, 28
# Delay the first launch until everything after it is queued and the waiting kernels poll.
HEAD_START_CYCLES = 2_000_000
DEADLINE_NS = 50_000_000
ROUNDS = 16  # round trips of a packet, to compare the clocks of two GPUs
TOLERANCE = 1e-2


class _Watch:
    """A kernel that waits for packets and records when it received them."""

    def __init__(self, packets: Tensor) -> None:
        device = packets.device
        self.packets = packets
        self.copy = torch.empty(packets.shape, device=device)
        self.times = torch.empty(triton.cdiv(packets.numel(), POLLED), dtype=torch.int64, device=device)
        self.watchers = min(WATCHERS, WATCHERS_PER_SM * num_sms(device) // len(self.times))

    def reset(self) -> None:
        self.copy.fill_(torch.nan)
        self.times.fill_(NEVER)

    def start(self, epoch: int) -> None:
        """Launch the kernel on the current stream of the GPU that holds the packets."""
        watch_packets(self.packets, epoch, self.copy, self.times, self.watchers, DEADLINE_NS)

    def seen_at(self) -> int:
        """Time of the last packet, in ns; `NEVER` if one is missing."""
        return int(self.times.max())


class _Clocks:
    """How far the second GPU's clock is ahead of the first one's.

    The GPUs send a packet there and back. In the quickest round, the second GPU is assumed to answer at half time. The
    error is at most half of the round trip, and small if both directions take equally long. Until the measurement, a
    millisecond later, the clocks may drift by about 20 ns.
    """

    def __init__(self, here: torch.device, there: torch.device) -> None:
        self.packets = [torch.zeros(1, dtype=torch.int64, device=device) for device in (here, there)]
        self.times = [torch.zeros(ROUNDS, 2, dtype=torch.int64, device=device) for device in (here, there)]
        self.streams = [torch.cuda.Stream(device) for device in (here, there)]
        self.first = 1

    def start(self) -> None:
        """Launch the exchange on both GPUs, each on its own stream."""
        for side in (1, 0):
            with torch.cuda.device(self.streams[side].device), torch.cuda.stream(self.streams[side]):
                own, other = self.packets[side], self.packets[1 - side]
                compare_clocks(own, other, self.times[side], self.first, side == 0, DEADLINE_NS)
        self.first += ROUNDS

    def ahead_ns(self) -> float:
        """Return the clock difference in ns, from the last exchange, which must have ended.

        Raises:
            RankFailureError: a packet did not arrive in time.
        """
        asked, answered = (times.tolist() for times in self.times)
        if any(came == NEVER for times in (asked, answered) for _, came in times):
            raise RankFailureError("spec_ready: two GPUs could not compare their clocks: a packet did not arrive")
        # In whole ns: at more than 2^60 ns since 1970, floats are 256 apart.
        _, twice = min(
            (end - begin, 2 * seen - begin - end) for (begin, end), (_, seen) in zip(asked, answered, strict=True)
        )
        return float(twice / 2)


def spec_ready_us(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, chunk_size: int, peer: bool, recall_blocks: int = 0
) -> dict[str, float]:
    """Microseconds from the launch of speculative decode until another kernel sees all of `A~`.

    The time starts when the kernel before it ends, so it includes the launch. With `peer`, `A~` is stored on the second
    GPU, where a kernel waits for it; the clocks of both GPUs are compared just before.

    Args:
        q, k, v, seq_lens: one request, as for `lean_decode_attention`, on the first GPU.
        recall_blocks: blocks that `A~` of each KV head recalls.
    Returns:
        p20, p50, p80 over launches with a cold L2.
    Raises:
        RankFailureError: a packet did not arrive in time.
        BadNumbersError: `A~` is wrong.
    """
    here = q.device
    there = torch.device("cuda", 1) if peer else here
    batch, hq, dim = q.shape
    workspace = attend_workspace(KVLayer(k, v), hq, here)
    out, lse = torch.empty_like(q), torch.empty(batch, hq, device=here)
    parts = spec_parts(chunk_size, batch, hq, k.shape[1], dim, q.dtype, here)
    recall = new_recall(
        seq_lens, (hq, k.shape[1], k.shape[2]), chunk_size, recall_blocks, lean_recall_parts(recall_blocks)
    )
    speculation, packets = new_spec_output(chunk_size, q, parts, there, recall)
    assert speculation.epoch is not None
    started = torch.zeros(1, dtype=torch.int64, device=here)
    watch, clocks = _Watch(packets), _Clocks(here, there) if peer else None
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=here)
    main, waiting = torch.cuda.Stream(here), torch.cuda.Stream(there)

    def attend() -> None:
        stamp_time(started)
        lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)

    samples = []
    for repetition in range(WARMUP + REPETITIONS):
        watch.reset()
        speculation.epoch.fill_(repetition)
        _synchronize(here, there)
        if repetition == 0:
            # Compile and load all kernels before any of them polls: loading a kernel waits for the device.
            with torch.cuda.device(here):
                flush.fill_(1)
                torch.cuda._sleep(1)
                attend()
            if clocks is not None:
                clocks.start()
            with torch.cuda.device(there):
                watch.start(-1)  # no packet has this epoch: the kernel waits until its deadline
            _synchronize(here, there)
            watch.reset()
        if clocks is not None:
            clocks.start()
            _synchronize(here, there)
        with torch.cuda.device(there), torch.cuda.stream(waiting):
            watch.start(repetition)
        with torch.cuda.device(here), torch.cuda.stream(main):
            flush.fill_(repetition % 7)
            torch.cuda._sleep(HEAD_START_CYCLES)
            attend()
        _synchronize(here, there)
        end = watch.seen_at()
        if end == NEVER or not torch.equal(watch.copy, unpack_packets(packets, repetition)):
            raise RankFailureError(f"spec_ready: repetition {repetition}: A~ did not arrive in time")
        samples.append((end - int(started) - (clocks.ahead_ns() if clocks else 0)) / 1e3)
    _check_spec(speculation, q, k, v, seq_lens, WARMUP + REPETITIONS - 1)
    return spread(samples[WARMUP:])


def _check_spec(speculation: SpecOutput, q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, epoch: int) -> None:
    """Compare `A~` of one request with the fp64 oracle over sink, window and recalled blocks, alike for all heads."""
    n = int(seq_lens)
    sink_end, window_start = (int(end) for end in predictor_ranges(seq_lens, speculation.chunk_size))
    listed = [] if speculation.recall is None else speculation.recall.lists[0, 0].tolist()
    recalled = [KV_TILE * block + i for block in listed if block >= 0 for i in range(KV_TILE)]
    tokens = [*range(sink_end), *recalled, *range(window_start, n)]
    num_tokens = torch.tensor([len(tokens)])
    expected, _ = decode_attention_ref(q, k[:, :, tokens], v[:, :, tokens], num_tokens, q.shape[-1] ** -0.5)
    found = combined(speculation.spec_out, speculation.spec_lse, epoch).to(expected)
    check_close(f"A~ of {n} tokens", found, expected, TOLERANCE)


def _synchronize(here: torch.device, there: torch.device) -> None:
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)
