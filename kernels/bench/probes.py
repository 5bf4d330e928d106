"""Probe kernels for the doctor command: each tests one hardware feature that the runtime needs.

`runtime/doctor/diagnostics.py` launches them and checks the results. Every wait has a deadline, so that a broken
installation cannot hang a GPU.
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
    """Add 1 to BLOCK elements. Grid [size / BLOCK]."""
    if PDL:
        # The next launch may start now. Like this one, it reads nothing before the previous launch has ended.
        gdc_launch_dependents()
        gdc_wait()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < size) + 1, mask=offsets < size)


def increment(x: Tensor, out: Tensor, pdl: bool = False) -> None:
    """Compute `out = x + 1`.

    Args:
        x: contiguous.  out: contiguous, of the same shape; may be `x`.
        pdl: use a programmatic dependent launch (sm_90).
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
    """Write a word for the host, wait for its answer, and store the answer. Grid [1]."""
    start = globaltimer()
    # Write-through: the host must see the word while this kernel still runs.
    tl.store(mail_ptr, word, cache_modifier=".wt")
    answer = 0
    while (answer != word) & (globaltimer() - start < deadline_ns):
        answer = tl.load(mail_ptr + 1, volatile=True)
    tl.store(mail_ptr + 2, answer)


def send_word(mail: Tensor, word: int, deadline_ns: int) -> None:
    """Write `word` to `mail[0]`, wait until the host writes it to `mail[1]`, and copy the last value seen to `mail[2]`.

    Args:
        mail: [3] int32, pinned host memory.
        deadline_ns: longest wait.
    """
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
    """All-to-all barrier, `rounds` times. Grid [1] on every rank."""
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
            # `>`: a faster rank may have written the number of its next round already.
            numbers = tl.load(own + ranks, mask=is_rank, other=0, volatile=True)
            seen = tl.sum((numbers > done).to(tl.int32))
        if done == 0:
            first_ns = globaltimer()
        # After the deadline the inner loop ends early: the round does not count, and the outer loop ends too.
        done += (seen == WORLD).to(tl.int32)
    tl.store(result_ptr, done)
    tl.store(result_ptr + 1, globaltimer() - first_ns)


def exchange_packets(
    buffers: Tensor, rank: int, world_size: int, rounds: int, result: Tensor, deadline_ns: int
) -> None:
    """Run `rounds` barriers over all ranks: write a number into every rank's buffer, then wait for all ranks' numbers.

    Args:
        buffers: [world_size] int64: address of each rank's [world_size] int32, writable by this GPU, zeros at first.
        result: [2] int64, written: completed rounds, and the ns of all but the first. (In the first, ranks wait for
            each other to start.)
        deadline_ns: longest time of all rounds together.
    """
    pad = triton.next_power_of_2(world_size)
    _exchange_packets_kernel[(1,)](buffers, rank, rounds, result, deadline_ns, WORLD=world_size, PAD=pad, num_warps=1)
