"""Programmatic dependent launch: wait for the previous kernel, prefetch before that wait, delay."""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED

__all__ = ["prefetch", "spin_cycles", "wait_for_previous_kernel"]


@triton.jit
def wait_for_previous_kernel():
    """`gdc_wait`, and a declaration of shared memory, which nobody uses.

    An SM changes how its memory is split only when it is idle, and seemingly programs without any shared memory are not
    started on one whose split is another than they ask for: behind attention, which takes most of an SM's memory,
    launches without took 0.4 to 0.7 us longer, elsewhere in a step of one GPU less than 0.1 us (H200). A pair's own
    kernels, most of which find their gate closed, do without: with it, its steps took 0.2 to 0.3 % longer (two H100s).
    """
    if not INTERPRETED:
        # A grid of no depth is never launched, but the assembler does not know.
        tl.inline_asm_elementwise(
            "{ .shared .align 4 .b8 unused[4]; .reg .pred never; .reg .b32 place, depth; griddepcontrol.wait;"
            " mov.u32 depth, %nctaid.z; setp.eq.u32 never, depth, 0; mov.u32 place, unused;"
            " @never st.shared.b32 [place], depth; mov.u32 $0, depth; }",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


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
def spin_cycles(cycles):
    """Do nothing for so many cycles of the SM's clock, int32."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .u32 start, now; mov.u32 start, %clock;"
            " AGAIN: mov.u32 now, %clock; sub.u32 now, now, start; setp.lt.u32 early, now, $1;"
            " @early bra AGAIN; mov.u32 $0, 0; }",
            "=r,r", [cycles], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
