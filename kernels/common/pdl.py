"""Programmatic dependent launch (PDL): wait for the previous kernel, prefetch to L2, delay."""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED

__all__ = ["prefetch", "spin_cycles", "wait_for_previous_kernel"]


@triton.jit
def wait_for_previous_kernel():
    """`griddepcontrol.wait`, with 4 bytes of unused shared memory declared.

    An SM changes its split between L1 and shared memory only when it is idle. A kernel without any shared memory
    appears to wait for that change after attention, which uses most of an SM as shared memory. The declaration avoids
    this wait. Kernels that exist only in a pair call `gdc_wait` instead: most of them return at a closed gate.
    """
    if not INTERPRETED:
        # The store never runs (a grid has depth >= 1), but the assembler cannot know that and keeps the declaration.
        tl.inline_asm_elementwise(
            "{ .shared .align 4 .b8 unused[4]; .reg .pred never; .reg .b32 place, depth; griddepcontrol.wait;"
            " mov.u32 depth, %nctaid.z; setp.eq.u32 never, depth, 0; mov.u32 place, unused;"
            " @never st.shared.b32 [place], depth; mov.u32 $0, depth; }",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch(pointer, size):
    """Prefetch `size` bytes from `pointer` into the L2, both rounded down to multiples of 16.

    A hint, for compute capability 9.0 and later. Results do not change: later writes to this memory are still seen.
    One thread issues one instruction. Later loads do not queue behind it.
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
    """Spin for `cycles` cycles of the SM's clock; int32."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .u32 start, now; mov.u32 start, %clock;"
            " AGAIN: mov.u32 now, %clock; sub.u32 now, now, start; setp.lt.u32 early, now, $1;"
            " @early bra AGAIN; mov.u32 $0, 0; }",
            "=r,r", [cycles], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
