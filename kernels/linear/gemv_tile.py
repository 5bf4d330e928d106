"""Tiles of the decode projections: skinny matrix-vector products that read each weight once, one request after another.

One program holds a tile of whole weight rows in registers, its first one loaded before it waits for the kernel ahead of
it (programmatic dependent launch): the stream of weights does not stop at kernel boundaries. Then come the activations,
the products and the epilogue: RoPE and cache append, SiLU (projections.py), or the push of partial sums to the group
(push.py). With a gate, the tile is loaded that early only if the gate looks open: a group that does not compute leaves
the memory to others.

The input of a normalised projection is `x * gamma` in the weights' dtype; the factor `1 / rms(x)` is applied to the
product, from the sums of squares that the kernel ahead left.

For several requests with weights of 16 bits, see mma_tile.py.

In all four files: B requests (`B`), K inputs (`K`), the next power of two (`KP`), S sums of squares of each request
(`S`), the next power of two (`SP`).
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

TILE_BYTES = 16384  # of weights in the registers of one program; a longer row is one tile, or comes in chunks (below)
# Of programs that take several tiles, each loaded while the one before is in use. Where a gate can close, few programs
# make a closed launch cheap: with one for each tile of gate and up, doing nothing takes 37 us (8B shape, one H200).
# Without a gate this was faster for the row-parallel projections only.
PROGRAMS_PER_SM = 4


@triton.jit
def gate_open(gate_ptr, PDL: tl.constexpr):
    """Whether weights are worth reading. A gate that looks closed may be about to open: then wait for its value.

    Warps may see different values. They diverge only until each of them has waited, and use nothing shared until then.
    """
    is_open = tl.load(gate_ptr, volatile=True) != 0
    if PDL:
        if not is_open:
            gdc_wait()
            is_open = tl.load(gate_ptr, volatile=True) != 0
    return is_open


@triton.jit
def load_weights(w_ptr, rows, num_rows, K: tl.constexpr, KP: tl.constexpr, MASKED: tl.constexpr):
    """Tile [rows, KP] of a [num_rows, K] matrix; read once in a step, so it may leave the cache first."""
    k = tl.arange(0, KP)
    at = w_ptr + rows[:, None].to(tl.int64) * K + k[None, :]
    if MASKED:
        inside = (rows < num_rows)[:, None] & (k < K)[None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    if KP > K:
        return tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def load_inputs(x_ptr, request, K: tl.constexpr, KP: tl.constexpr):
    """One request's activations [KP] fp32."""
    k = tl.arange(0, KP)
    if KP > K:
        return tl.load(x_ptr + request * K + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.load(x_ptr + request * K + k).to(tl.float32)


@triton.jit
def dot(w, x):
    """Products [rows] of a tile and one request's activations."""
    return tl.sum(w.to(tl.float32) * x[None, :], 1)


@triton.jit
def dot_pairs(w, x, PAIRS: tl.constexpr):
    """Products of the even and of the odd rows of a tile, with one reduction for both."""
    return tl.split(tl.reshape(dot(w, x), [PAIRS, 2]))


@triton.jit
def dot_slices(
    w, x_ptr, w_ptr, rows, next_rows, goes_on, K: tl.constexpr, KP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """`dot_pairs` of one request and rows that are read KP inputs at once, each chunk loaded while the last is in use.

    Args:
        w: the first chunk of `rows`.  next_rows: of the tile that follows, if it `goes_on`.
    Returns:
        Products of the even and of the odd rows, and the first chunk of the next rows.
    """
    even, odd = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
    for chunk in tl.static_range(K // KP):
        x = load_inputs(x_ptr + chunk * KP, 0, K, KP)
        if chunk + 1 < K // KP:
            following = load_weights(w_ptr + (chunk + 1) * KP, rows, 0, K, KP, False)
        else:
            following = load_weights(w_ptr, next_rows, tl.where(goes_on, 2**30, 0), K, KP, True)
        first, second = dot_pairs(w, x, PAIRS)
        even, odd = even + first, odd + second
        w = following
    return even, odd, w


@triton.jit
def rstd(mean_square, eps):
    """`1 / sqrt(mean(x^2) + eps)`. NaN where the squares overflow: 0 would silence a row without a word."""
    return tl.where(mean_square < float("inf"), tl.rsqrt(mean_square + eps), float("nan"))


@triton.jit
def rstd_of(squares_ptr, request, eps, K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr):
    """`rstd` of one request, from its partial sums of squares."""
    s = tl.arange(0, SP)
    squares = tl.load(squares_ptr + request * S + s, mask=s < S, other=0.0)
    return rstd(tl.sum(squares, 0) / K, eps)


def rows_in_tile(num_rows: int, width: int, itemsize: int, matrices: int) -> int:
    """Rows of each of `matrices` in one program's tile: a power of two that divides `num_rows` (0: any does)."""
    rows = max(1, TILE_BYTES // (width * itemsize * matrices))
    return min(rows, num_rows & -num_rows) if num_rows else rows


def inputs_at_once(batch_size: int, num_inputs: int, itemsize: int, closes: bool) -> int:
    """KP: inputs of a tile of two rows; all (the next power of two), or of one request behind a gate what a tile holds.

    Programs of long rows have many warps, of which an SM holds few, and with two tiles each fewer still.
    """
    width, most = triton.next_power_of_2(num_inputs), TILE_BYTES // (2 * itemsize)
    return most if closes and batch_size == 1 and width == num_inputs > most else width


def num_programs_on(num_tiles: int, per_sm: int, device: torch.device) -> int:
    """Programs of a launch on a device, about `per_sm` on each SM; with 0 one for each tile."""
    return programs_for(num_tiles, per_sm * (num_sms(device) if device.type == "cuda" else 1))


def programs_for(num_tiles: int, at_once: int) -> int:
    """Programs of equal shares of the tiles, about `at_once`; with 0 one for each tile."""
    return -(-num_tiles // max(1, round(num_tiles / at_once))) if at_once else num_tiles


def num_warps_for(rows: int, width: int, itemsize: int) -> int:
    """64 weights to a thread, or 32 of a row longer than a tile: the fastest on H200 with 1 and with 4 ranks."""
    weights_per_thread = 64 if rows * width * itemsize <= TILE_BYTES else 32
    return max(1, min(16, rows * width // (32 * weights_per_thread)))
