"""How long after the start of speculative decode `A~` can be used, seen by a kernel that waits for its flags."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from alspec.errors import AlspecError
from alspec.kernels.lean_attention import LeanWorkspace, Speculation, lean_decode_attention
from alspec.runtime.stats import percentile

__all__ = ["spec_ready_us"]

REPETITIONS = 25
FLUSH_BYTES = 200 * 2**20
# The start waits until everything behind it is queued and the waiting kernels spin.
HEAD_START_CYCLES = 2_000_000
DEADLINE_NS = 50_000_000


@triton.jit
def _stamp(time_ptr):
    """Write the GPU's clock, in ns."""
    tl.store(time_ptr, globaltimer())


@triton.jit(do_not_specialize=["epoch"])
def _wait_and_copy(
    flag_ptr,  # [count] int32
    epoch,
    count,
    source_ptr,  # [size], what the flags announce
    copy_ptr,
    size,
    time_ptr,  # [1] int64: when all was seen, in ns
    ack_ptr,  # [1] int32: the epoch, once copied
    deadline_ns,
    COUNT_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Spin until all flags hold the epoch, copy what they announce, acknowledge. Past the deadline: return at once."""
    start = globaltimer()
    flags = tl.arange(0, COUNT_PAD)
    seen = 0
    while (seen < count) & (globaltimer() - start < deadline_ns):
        found = tl.load(flag_ptr + flags, mask=flags < count, other=0, volatile=True)
        seen = tl.sum((found == epoch).to(tl.int32))
    if seen == count:
        # An acquire: what was written before the flags were released can be read from here on.
        tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        tl.store(time_ptr, globaltimer())
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(source_ptr + at, mask=at < size, cache_modifier=".cg")
            tl.store(copy_ptr + at, values, mask=at < size)
        tl.debug_barrier()
        tl.atomic_xchg(ack_ptr, epoch, sem="release", scope="sys")


def spec_ready_us(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, chunk_size: int, peer: bool) -> dict[str, float]:
    """Microseconds from the launch of speculative decode until another kernel sees every head's flag.

    The clock starts when the kernel before it ends, so its launch is in it; all is of one GPU's clock. With `peer`,
    `A~` and the flags lie on the second GPU, where a kernel waits for them and acknowledges to the first: the time
    ends there, when the acknowledgement is seen, and holds the way back too.

    Args:
        q, k, v, seq_lens: as for `lean_decode_attention`, on the first GPU.
    Returns:
        p20, p50, p80 over launches with a cold L2.
    Raises:
        AlspecError: a flag did not come in time, or not what it announced.
    """
    here = q.device
    there = torch.device("cuda", 1) if peer else here
    batch, hq, dim = q.shape
    heads = batch * k.shape[1]
    sms = torch.cuda.get_device_properties(here).multi_processor_count
    workspace = LeanWorkspace.allocate(batch, hq, k.shape[1], dim, here, sms)
    out, lse = torch.empty_like(q), torch.empty(batch, hq, device=here)
    spec_out = torch.zeros(q.shape, dtype=q.dtype, device=there)
    flag = torch.zeros(heads, dtype=torch.int32, device=there)
    epoch = torch.zeros(1, dtype=torch.int32, device=here)
    speculation = Speculation(chunk_size, spec_out, torch.empty(batch, hq, 2, device=here), flag, epoch)
    copy, ack = torch.zeros_like(spec_out), torch.zeros(1, dtype=torch.int32, device=here)
    times = torch.zeros(3, dtype=torch.int64, device=here)
    far_time = torch.zeros(1, dtype=torch.int64, device=there)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=here)
    main, waiting = torch.cuda.Stream(here), torch.cuda.Stream(there)
    acknowledged = torch.cuda.Stream(here)
    nothing = torch.zeros(2, dtype=torch.int32, device=here)
    with torch.cuda.device(here):
        # Compiled and loaded before anything spins, for loading a kernel waits for the device. Epoch 0 is there.
        flush.fill_(1)
        torch.cuda._sleep(1)
        lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)
        _stamp[(1,)](times)
        _await(ack, 0, 1, nothing, nothing[1:], times[1:], times[2:].view(torch.int32))
    with torch.cuda.device(there):
        _await(flag, 0, heads, spec_out, copy, far_time, ack)
    samples = []
    for repetition in range(1, REPETITIONS + 1):
        times.zero_()
        epoch.fill_(repetition)
        copy.zero_()
        _synchronize(here, there)
        with torch.cuda.device(there), torch.cuda.stream(waiting):
            _await(flag, repetition, heads, spec_out, copy, far_time if peer else times[1:], ack)
        with torch.cuda.device(here):
            if peer:
                with torch.cuda.stream(acknowledged):
                    _await(ack, repetition, 1, nothing, nothing[1:], times[1:], times[2:].view(torch.int32))
            with torch.cuda.stream(main):
                flush.fill_(repetition % 7)
                torch.cuda._sleep(HEAD_START_CYCLES)
                _stamp[(1,)](times)
                lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, speculation)
        _synchronize(here, there)
        start, seen = times[:2].tolist()
        if not seen or not torch.equal(copy, spec_out):
            raise AlspecError(f"spec_ready: repetition {repetition}: A~ was not there when its flags said so")
        samples.append((seen - start) / 1e3)
    samples = samples[5:]
    return {f"p{int(100 * share)}": percentile(samples, share) for share in (0.2, 0.5, 0.8)}


def _await(flag: Tensor, epoch: int, count: int, source: Tensor, copy: Tensor, time: Tensor, ack: Tensor) -> None:
    size = source.numel() if copy.numel() == source.numel() else 0
    _wait_and_copy[(1,)](
        flag, epoch, count, source, copy, size, time, ack, DEADLINE_NS, triton.next_power_of_2(count), 1024, num_warps=4
    )


def _synchronize(here: torch.device, there: torch.device) -> None:
    torch.cuda.synchronize(here)
    torch.cuda.synchronize(there)
