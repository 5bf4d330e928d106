"""GEMV tiles of the decode projections: each weight is read once, and multiplied by one request after another.

A program holds a tile of whole weight rows in registers. It loads its first tile before it waits for the previous
kernel (programmatic dependent launch), so that the stream of weights does not stop between kernels. Then it loads the
activations, multiplies, and runs the epilogue: RoPE and cache append, SiLU (projections.py), or the push of partial
sums to the group (push.py). With a gate, it loads early only if the gate looks open: a group that does not compute must
not take memory bandwidth from other kernels.

The input of a normalised projection is `x * gamma` in the weights' dtype. The product is multiplied by `1 / rms(x)`,
computed from the sums of squares that the previous kernel wrote.

mma_tile.py is for several requests with 16-bit weights.

Shapes in all four files: B requests (`B`), K inputs (`K`), their next power of two (`KP`), S sums of squares of each
request (`S`), their next power of two (`SP`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from alspec.kernels.common.jit_launch import num_sms

__all__ = [
    "PROGRAMS_PER_SM",
    "dot",
    "dot_slices",
    "dot_pairs",
    "inputs_at_once",
    "load_inputs",
    "load_weights",
    "num_programs_on",
    "num_warps_for",
    "gate_open",
    "programs_for",
    "rows_in_tile",
    "rstd_of",
]

TILE_BYTES = 16384  # weights in the registers of one program; a longer row is one tile, or is read in slices (below)
# Programs per SM of launches whose programs take several tiles and load the next tile while they use the current one.
# With a gate, few programs make a closed launch cheap. Without a gate, only row-parallel projections use such launches.
PROGRAMS_PER_SM = 4


@triton.jit
def gate_open(gate_ptr, PDL: tl.constexpr):
    """Return whether the gate is open. If it looks closed, wait for the previous kernel, which may open it.

    Warps may read different values before the wait. That is safe: they share nothing until each of them has waited.
    """
    is_open = tl.load(gate_ptr, volatile=True) != 0
    if PDL:
        if not is_open:
            gdc_wait()
            is_open = tl.load(gate_ptr, volatile=True) != 0
    return is_open


@triton.jit
def load_weights(w_ptr, rows, num_rows, K: tl.constexpr, KP: tl.constexpr, MASKED: tl.constexpr):
    """Load tile [rows, KP] of a [num_rows, K] matrix. It is read once in a step, so it is evicted first."""
    k = tl.arange(0, KP)
    ptrs = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    if MASKED:
        inside = (rows < num_rows)[:, None] & (k < K)[None, :]
        return tl.load(ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
    if KP > K:
        return tl.load(ptrs, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(ptrs, eviction_policy="evict_first")


@triton.jit
def load_inputs(x_ptr, request, K: tl.constexpr, KP: tl.constexpr):
    """Load one request's activations, [KP] fp32."""
    k = tl.arange(0, KP)
    if KP > K:
        return tl.load(x_ptr + request * K + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.load(x_ptr + request * K + k).to(tl.float32)


@triton.jit
def dot(w, x):
    """Multiply a tile by one request's activations. Returns [rows] fp32."""
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def dot_pairs(w, x, PAIRS: tl.constexpr):
    """Return the products of the even rows and of the odd rows of a tile, with one reduction for both."""
    return tl.split(tl.reshape(dot(w, x), [PAIRS, 2]))


@triton.jit
def dot_slices(
    w, x_ptr, w_ptr, rows, next_rows, has_next, K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """`dot_pairs` for one request, with rows read in slices of KP inputs; the next slice is loaded while one is in use.

    Args:
        w: the first slice of `rows`.
        next_rows: rows of the next tile, if `has_next`.
    Returns:
        Products of the even and of the odd rows, and the first slice of `next_rows`.
    """
    even, odd = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
    for i in tl.static_range(K // KP):
        x = load_inputs(x_ptr + i * KP, 0, K, KP)
        if i + 1 < K // KP:
            next_w = load_weights(w_ptr + (i + 1) * KP, rows, 0, K, KP, False)
        else:
            next_w = load_weights(w_ptr, next_rows, tl.where(has_next, 2**30, 0), K, KP, True)
        first, second = dot_pairs(w, x, PAIRS)
        even, odd = even + first, odd + second
        w = next_w
    return even, odd, w


@triton.jit
def rstd(mean_square, eps):
    """`1 / sqrt(mean(x^2) + eps)`. NaN if the squares overflow: 0 would hide the error."""
    return tl.where(mean_square < float("inf"), tl.rsqrt(mean_square + eps), float("nan"))


@triton.jit
def rstd_of(squares_ptr, request, eps, K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr):
    """`rstd` of one request, from its partial sums of squares."""
    s = tl.arange(0, SP)
    squares = tl.load(squares_ptr + request * S + s, mask=s < S, other=0.0)
    return rstd(tl.sum(squares, 0) / K, eps)


def rows_in_tile(num_rows: int, width: int, itemsize: int, matrices: int) -> int:
    """Return the rows of each matrix in a program's tile: a power of two that divides `num_rows` (0: no limit)."""
    rows = max(1, TILE_BYTES // (width * itemsize * matrices))
    return min(rows, num_rows & -num_rows) if num_rows else rows


def inputs_at_once(batch_size: int, num_inputs: int, itemsize: int, closes: bool) -> int:
    """Return KP, inputs of a tile of two rows: the whole row, or for one request with a gate what fits a tile.

    A program of whole long rows needs many warps. An SM holds few such programs, and fewer still with two tiles each.
    """
    width, max_inputs = triton.next_power_of_2(num_inputs), TILE_BYTES // (2 * itemsize)
    return max_inputs if closes and batch_size == 1 and width == num_inputs > max_inputs else width


def num_programs_on(num_tiles: int, per_sm: int, device: torch.device) -> int:
    """Return the number of programs, about `per_sm` on each SM. `per_sm` 0: one program per tile."""
    return programs_for(num_tiles, per_sm * (num_sms(device) if device.type == "cuda" else 1))


def programs_for(num_tiles: int, at_once: int) -> int:
    """Return a number of programs near `at_once` that gives equal shares of the tiles. 0: one program per tile."""
    return -(-num_tiles // max(1, round(num_tiles / at_once))) if at_once else num_tiles


def num_warps_for(rows: int, width: int, itemsize: int) -> int:
    """Return the warps of a program: 64 weights per thread, or 32 if its rows are longer than a tile."""
    weights_per_thread = 64 if rows * width * itemsize <= TILE_BYTES else 32
    return max(1, min(16, rows * width // (32 * weights_per_thread)))
