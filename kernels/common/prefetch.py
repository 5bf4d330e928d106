"""When memory is asked for: early, by a prefetch, or late, to let other programs ask first."""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.comm.ll_packets import INTERPRETED

__all__ = ["prefetch", "wait_cycles"]


@triton.jit
def prefetch(pointer, size):
    """Fetch `size` bytes, a multiple of 16 (rounded down), into the L2, from `pointer` (rounded down likewise) on.

    A hint, from compute capability 9.0 on: only when bytes move changes, and what is written there later is still seen.
    One instruction of one thread; later loads do not queue up behind it.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread, bytes; .reg .u64 start;"
            " mov.u32 thread, %tid.x; and.b32 bytes, $2, -16; and.b64 start, $1, -16;"
            " setp.eq.u32 first, thread, 0; setp.ne.and.u32 first, bytes, 0, first;"
            " @first cp.async.bulk.prefetch.L2.global [start], bytes; mov.u32 $0, 0; }",
            "=r,l,r", [pointer.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait_cycles(cycles):
    """Do nothing for so many cycles of the SM's clock, int32."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .u32 start, now; mov.u32 start, %clock;"
            " AGAIN: mov.u32 now, %clock; sub.u32 now, now, start; setp.lt.u32 early, now, $1;"
            " @early bra AGAIN; mov.u32 $0, 0; }",
            "=r,r", [cycles], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
