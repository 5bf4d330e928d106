"""Small device functions that several kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "inverse_of_sum", "log2_of_sum", "stacked", "unstacked"]

# Triton's interpreter cannot run inline assembly. Kernels branch on this at compile time.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def log2_of_sum(x):
    """log2(x) for x >= 1, by one hardware instruction (`tl.log2` compiles to 25)."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def inverse_of_sum(x):
    """1 / x for x >= 1, by one hardware instruction. Subnormal inputs and results become 0."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def unstacked(x, N: tl.constexpr):
    """Split x [W, M, N] into a tuple of N tensors [W, M]. N is a power of two."""
    if N == 1:
        y = (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], N // 2, 2]))
        evens, odds = unstacked(even, N // 2), unstacked(odd, N // 2)
        y = ()
        for i in tl.static_range(N // 2):
            y = y + (evens[i], odds[i])  # noqa: RUF005 (Triton has no *)
    return y


@triton.jit
def stacked(x, N: tl.constexpr):
    """Join a tuple of N tensors [W, M] into [W, M, N], the inverse of `unstacked`. N is a power of two."""
    if N == 1:
        y = tl.reshape(x[0], [x[0].shape[0], x[0].shape[1], 1])
    else:
        evens, odds = (), ()
        for i in tl.static_range(N // 2):
            evens, odds = evens + (x[2 * i],), odds + (x[2 * i + 1],)  # noqa: RUF005
        both = tl.join(stacked(evens, N // 2), stacked(odds, N // 2))
        y = tl.reshape(both, [x[0].shape[0], x[0].shape[1], N])
    return y
