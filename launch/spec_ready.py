"""How long after the start of speculative decode `A~` can be used, measured by a kernel that waits for its words."""

from __future__ import annotations

import math
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from alspec.errors import AlspecError
from alspec.kernels.launch import RESERVED_BYTES, prefer_l1
from alspec.kernels.lean_attention import LeanWorkspace, Speculation, guess_parts, lean_decode_attention
from alspec.kernels.merge import num_sums
from alspec.kernels.words import unpack_words
from alspec.launch.output import no_command
from alspec.runtime.stats import percentile

__all__ = ["merged", "pair_speculation", "spec_ready_us", "written"]

REPETITIONS = 25
FLUSH_BYTES = 200 * 2**20
# Words of a program that waits. A poll takes as long as the slowest of its loads, which go through what memory is busy
# with: with 256, a poll took up to 22 us.
POLLED = 64
# The first launch is held back until everything after it is queued and the waiting kernels spin.
HEAD_START_CYCLES = 2_000_000
DEADLINE_NS = 50_000_000


@triton.jit
def _stamp(time_ptr):
    """Write the GPU's clock, in ns."""
    tl.store(time_ptr, globaltimer())


@triton.jit(do_not_specialize=["epoch"])
def _wait_and_copy(
    words_ptr,  # [size] int64: values under an epoch, or acknowledgements
    epoch,
    copy_ptr,  # [size] fp32
    size,
    time_ptr,  # [1] int64: when all was seen, in ns
    seen_ptr,  # [1] int32: programs that have seen theirs; 0 between launches
    ack_ptr,  # [1] int64: a word of the epoch, once seen
    deadline_ns,
    PAD: tl.constexpr,
):
    """Spin until all words carry the epoch, acknowledge, copy their values. Past the deadline: return at once.

    PAD words of a program.
    """
    start = globaltimer()
    at = tl.program_id(0) * PAD + tl.arange(0, PAD)
    late = 1
    words = tl.full([PAD], 0, tl.int64)
    while (late > 0) & (globaltimer() - start < deadline_ns):
        words = tl.load(words_ptr + at, mask=at < size, other=0, volatile=True)
        late = tl.sum(((words >> 32 != epoch) & (at < size)).to(tl.int32))
    if late == 0:
        tl.atomic_max(time_ptr, globaltimer())
        if tl.atomic_add(seen_ptr, 1) == tl.num_programs(0) - 1:
            tl.store(seen_ptr, 0)
            tl.store(ack_ptr, tl.full([], epoch, tl.int64) << 32)
        tl.store(copy_ptr + at, words.to(tl.int32).to(tl.float32, bitcast=True), mask=at < size)


def pair_speculation(chunk_size: int, q: Tensor, parts: int, device: torch.device) -> tuple[Speculation, Tensor]:
    """What attention of q [B, Hq, D] writes for a pair, with the words of `A~` on `device`; and these words, zeroed.

    `A~` comes in so many parts. Their epoch is 0.
    """
    batch, hq, dim = q.shape
    size = parts * q.numel()
    words = torch.zeros(size + (parts * batch * hq if parts > 1 else 0), dtype=torch.int64, device=device)
    speculation = Speculation(
        chunk_size,
        words[:size].view(parts, *q.shape),
        torch.full((batch, num_sums(hq, dim), 2), torch.nan, device=q.device),
        torch.zeros(1, dtype=torch.int32, device=q.device),
        words[size:].view(parts, batch, hq) if parts > 1 else None,
    )
    return speculation, words


def written(out: Tensor, speculation: Speculation | None) -> tuple[Tensor, ...]:
    """What attention writes: its output; with a guess `A~`, the verdict's sums and, of several parts, their lse."""
    if speculation is None:
        return (out,)
    lse = () if speculation.spec_lse is None else (speculation.spec_lse,)
    return (out, speculation.spec_out, speculation.sums, *lse)


def merged(spec_out: Tensor, spec_lse: Tensor | None, epoch: int) -> Tensor:
    """`A~` [B, Hq, D] fp32 of the words of a `Speculation` under an epoch; NaN where one is missing."""
    o = unpack_words(spec_out, epoch)
    if spec_lse is None:
        return o[0]
    weight = (unpack_words(spec_lse, epoch) * math.log(2)).softmax(0)
    return (o * weight[..., None]).sum(0)


def spec_ready_us(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, chunk_size: int, peer: bool) -> dict[str, float]:
    """Microseconds from the launch of speculative decode until another kernel sees all of `A~`.

    The clock starts when the kernel before it ends, so its launch is in it; all is of one GPU's clock. With `peer`,
    `A~` lies on the second GPU, where a kernel waits for it and acknowledges to the first: the time ends there, when
    the acknowledgement is seen, and holds the way back too.

    Args:
        q, k, v, seq_lens: as for `lean_decode_attention`, on the first GPU.
    Returns:
        p20, p50, p80 over launches with a cold L2.
    Raises:
        AlspecError: a word did not come in time.
    """
    here = q.device
    there = torch.device("cuda", 1) if peer else here
    batch, hq, dim = q.shape
    sms = torch.cuda.get_device_properties(here).multi_processor_count
    workspace = LeanWorkspace.allocate(batch, hq, k.shape[1], dim, here, sms)
    out, lse = torch.empty_like(q), torch.empty(batch, hq, device=here)
    parts = guess_parts(chunk_size, batch, hq, k.shape[1], dim, q.dtype, here)
    speculation, words = pair_speculation(chunk_size, q, parts, there)
    epoch = speculation.epoch
    assert epoch is not None
    copy = torch.zeros(words.shape, device=there)
    # In tensors of their own, aligned alike: so the first launches below compile all forms of the waiting kernel, and
    # later ones have the split of an SM's memory that it is to have. Programs that want more L1 keep attention off SMs.
    started, seen_at = (torch.zeros(1, dtype=torch.int64, device=here) for _ in range(2))
    ack, no_ack = (torch.zeros(1, dtype=torch.int64, device=here) for _ in range(2))
    far_time = torch.zeros(1, dtype=torch.int64, device=there)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=here)
    main, waiting = torch.cuda.Stream(here), torch.cuda.Stream(there)
    acknowledged = torch.cuda.Stream(here)
    nothing = torch.zeros(1, device=here)
    with torch.cuda.device(here):
        # Compile and load before anything spins: loading a kernel waits for the device. The words of epoch 0 are there.
        flush.fill_(1)
        torch.cuda._sleep(1)
        lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)
        _stamp[(1,)](started)
        _await(ack, 0, nothing, seen_at, no_ack)
    with torch.cuda.device(there):
        _await(words, 0, copy, far_time, ack)
    samples = []
    for repetition in range(1, REPETITIONS + 1):
        started.zero_()
        seen_at.zero_()
        epoch.fill_(repetition)
        copy.fill_(torch.nan)
        _synchronize(here, there)
        with torch.cuda.device(there), torch.cuda.stream(waiting):
            _await(words, repetition, copy, far_time if peer else seen_at, ack)
        with torch.cuda.device(here):
            if peer:
                with torch.cuda.stream(acknowledged):
                    _await(ack, repetition, nothing, seen_at, no_ack)
            with torch.cuda.stream(main):
                flush.fill_(repetition % 7)
                torch.cuda._sleep(HEAD_START_CYCLES)
                _stamp[(1,)](started)
                lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)
        _synchronize(here, there)
        start, end = int(started), int(seen_at)
        if not end or not torch.equal(copy, unpack_words(words, repetition)):
            raise AlspecError(f"spec_ready: repetition {repetition}: A~ did not come")
        samples.append((end - start) / 1e3)
    samples = samples[5:]
    return {f"p{int(100 * share)}": percentile(samples, share) for share in (0.2, 0.5, 0.8)}


def _await(words: Tensor, epoch: int, copy: Tensor, time: Tensor, ack: Tensor) -> None:
    # Many small programs: one that polls many words takes much of its SM's share of memory bandwidth.
    seen = torch.zeros(1, dtype=torch.int32, device=words.device)
    compiled = _wait_and_copy[(triton.cdiv(words.numel(), POLLED),)](
        words, epoch, copy, words.numel(), time, seen, ack, DEADLINE_NS, POLLED, num_warps=1
    )
    # Give all of an SM's memory to shared memory, as attention needs: an SM cannot change that while a program runs.
    room = torch.cuda.get_device_properties(words.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    prefer_l1(compiled, (room + RESERVED_BYTES) // (compiled.metadata.shared + RESERVED_BYTES))


def _synchronize(here: torch.device, there: torch.device) -> None:
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)


if __name__ == "__main__":
    sys.exit(no_command(__file__, "launch/bench_kernels.py --bench ready"))
