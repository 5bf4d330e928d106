"""Small kernels that try one thing each that the runtime builds on; `runtime/doctor/diagnostics.py` judges them.

Every wait has a deadline, so that a broken installation cannot hang a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

__all__ = ["exchange_packets", "increment", "send_word"]

BLOCK = 256


@triton.jit
def _increment_kernel(
    x_ptr,  # [size]
    out_ptr,  # [size]
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # The next launch may begin now; like this one it reads nothing before the launch ahead of it has ended.
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size) + 1, mask=at < size)


def increment(x: Tensor, out: Tensor, pdl: bool = False) -> None:
    """`out = x + 1`, contiguous, of one shape; `out` may be `x`. With `pdl`: a programmatic dependent launch (sm_90).

    Capture: graph-safe; allocates nothing.
    """
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _increment_kernel[grid](x, out, x.numel(), BLOCK=BLOCK, PDL=pdl, **({"launch_pdl": True} if pdl else {}))


@triton.jit(do_not_specialize=["word"])
def _send_word_kernel(
    mail_ptr,  # [3] int32 of pinned host memory
    word,
    deadline_ns,
):
    start = globaltimer()
    # Written through to the host, which must see it while this kernel still runs.
    tl.store(mail_ptr, word, cache_modifier=".wt")
    answer = 0
    while (answer != word) & (globaltimer() - start < deadline_ns):
        answer = tl.load(mail_ptr + 1, volatile=True)
    tl.store(mail_ptr + 2, answer)


def send_word(mail: Tensor, word: int, deadline_ns: int) -> None:
    """Write `word` to `mail[0]`, wait until the host has put it into `mail[1]`, and copy what came to `mail[2]`."""
    _send_word_kernel[(1,)](mail, word, deadline_ns, num_warps=1)


@triton.jit(do_not_specialize=["rank", "rounds"])
def _exchange_packets_kernel(
    buffers_ptr,  # [WORLD] int64: the address of each rank's [WORLD] int32
    rank,
    rounds,
    result_ptr,  # [2] int64: completed rounds, and the ns of all but the first
    deadline_ns,
    WORLD: tl.constexpr,
    PAD: tl.constexpr,
):
    start = globaltimer()
    ranks = tl.arange(0, PAD)
    is_rank = ranks < WORLD
    buffers = tl.load(buffers_ptr + ranks, mask=is_rank, other=0).to(tl.pointer_type(tl.int32))
    own = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int32))
    done = 0
    first_ns = start
    while (done < rounds) & (globaltimer() - start < deadline_ns):
        tl.store(buffers + rank, done + 1, mask=is_rank, cache_modifier=".wt")
        seen = 0
        while (seen < WORLD) & (globaltimer() - start < deadline_ns):
            # A faster rank may have written its next word already.
            words = tl.load(own + ranks, mask=is_rank, other=0, volatile=True)
            seen = tl.sum((words > done).to(tl.int32))
        if done == 0:
            first_ns = globaltimer()
        # Past the deadline the loop above ends unseen: nothing is counted, and the loop around it ends as well.
        done += (seen == WORLD).to(tl.int32)
    tl.store(result_ptr, done)
    tl.store(result_ptr + 1, globaltimer() - first_ns)


def exchange_packets(
    buffers: Tensor, rank: int, world_size: int, rounds: int, result: Tensor, deadline_ns: int
) -> None:
    """Meet the other ranks `rounds` times: write a word into every rank's buffer, then wait for a word from every rank.

    Args:
        buffers: [world_size] int64, addresses that this GPU can write; each rank's [world_size] int32, zeros at first.
        result: [2] int64: completed rounds, and nanoseconds of all but the first, in which ranks wait for each other.
    """
    pad = triton.next_power_of_2(world_size)
    _exchange_packets_kernel[(1,)](buffers, rank, rounds, result, deadline_ns, WORLD=world_size, PAD=pad, num_warps=1)
