"""The wait for the kernel ahead, in kernels that have no use for shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.comm.ll_packets import INTERPRETED

__all__ = ["wait_for_kernel_ahead"]


@triton.jit
def wait_for_kernel_ahead():
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
