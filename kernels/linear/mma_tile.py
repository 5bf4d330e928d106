"""Tiles of the decode projections for 2 to 8 requests: 16 whole weight rows to a program, on tensor cores.

The instruction multiplies A [16 rows, 16 inputs] by B [16 inputs, 8 requests]. In which order inputs come does not
matter, as long as A and B agree. So a lane `4 g + t` reads 16 bytes at once, 8 inputs from 8 t on of 32: of weight rows
g and g + 8, and of request g. As they are, they are its operands of two products.

The inputs of a row are read in *chunks*, in which each warp has a part of its own; what the warps' products come to is
added up at the end of a row. The first chunk of a program is loaded before it waits for the kernel ahead, and every
other one while the chunk before it is in use, also across tiles. A request's result is the same bits among 2 requests
and among 8.

As in values.py, tensors [W, 32] have a warp in each row and a lane in each column. What is loaded into them is
loaded by assembly: for a load of its own the compiler would choose other lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, stacked, unstacked
from alspec.kernels.linear.gemv_tile import inputs_at_once, num_warps_for, rows_in_tile, rstd

__all__ = ["load_rows", "products", "tile_of"]

NUM_WARPS = 4
# Of 32 inputs, that a warp loads at once: 64 registers of a lane, and three programs to an SM. Fewer, or one program
# with twice as many, were slower (H200).
SLICE_STEPS = 8
ROWS = 16  # of a tile
STEP = tl.constexpr(32)  # inputs
LANE = tl.constexpr(8)  # inputs that a lane reads at once


def tile_of(
    batch_size: int, num_inputs: int, itemsize: int, num_rows: int, matrices: int, closes: bool = False
) -> tuple[int, int, int]:
    """How a projection is divided: rows of each of `matrices` in a program's tile, steps, warps of a program.

    Steps are 0 where a program reads its tile at once, and multiplies it by one request after another (gemv_tile.py):
    for one request, in fp32, and for shapes that no model has. `num_rows` is a multiple of the rows; 0: it may end in
    the middle of a tile. closes: behind a gate, and read in chunks where rows are long (`inputs_at_once`).
    """
    in_words = itemsize == 2 and num_inputs % int(LANE.value) == 0
    if batch_size > 1 and in_words and (matrices == 1 or num_rows % (ROWS // matrices) == 0):
        return ROWS // matrices, _slice_steps(num_inputs), NUM_WARPS
    width = inputs_at_once(batch_size, num_inputs, itemsize, closes)
    rows = rows_in_tile(num_rows, width, itemsize, matrices)
    return rows, 0, num_warps_for(matrices * rows, width, itemsize)


def _slice_steps(num_inputs: int) -> int:
    """Steps of a warp's part of a chunk: such that all chunks are whole ones, if that does not take small ones."""
    once = NUM_WARPS * int(STEP.value)
    whole = [steps for steps in range(SLICE_STEPS, SLICE_STEPS // 2, -1) if num_inputs % (once * steps) == 0]
    return whole[0] if whole else min(SLICE_STEPS, triton.cdiv(num_inputs, once))


@triton.constexpr_function
def _loads(index, is_conditional, clears):
    """Assembly of `_load_two`: 16 bytes at $8 and at $9; if it is conditional, where $10 is not 0."""
    at = 2 * index * STEP.value
    # Each is half a line of the L2, which is asked for the whole: 3 % of a layer's products.
    load = "ld.global.L1::no_allocate.L2::128B.v4.b32"
    if not is_conditional:
        return f"{load} {{$0, $1, $2, $3}}, [$8+{at}]; {load} {{$4, $5, $6, $7}}, [$9+{at}];"
    zeros = " ".join([f"mov.b32 ${i}, 0;" for i in range(8)]) if clears else ""
    return (
        f"{{ .reg .pred goes; setp.ne.u32 goes, $10, 0; {zeros}"
        f" @goes {load} {{$0, $1, $2, $3}}, [$8+{at}]; @goes {load} {{$4, $5, $6, $7}}, [$9+{at}]; }}"
    )


@triton.constexpr_function
def _num_slices(num_inputs, warps, steps):
    return -(-num_inputs // (warps * steps * STEP.value))


@triton.constexpr_function
def _is_part(num_inputs, warps, steps):
    """Whether the last chunk is not a whole one."""
    return num_inputs % (warps * steps * STEP.value) != 0


@triton.jit
def _first_input(chunk, W: tl.constexpr, STEPS: tl.constexpr):
    """The first input of each lane in a chunk, [W, 32]."""
    return (chunk * W + tl.arange(0, W)[:, None]) * (STEP * STEPS) + tl.arange(0, 32)[None, :] % 4 * LANE


@triton.jit
def _row_addresses(
    w_ptr, row, last_row, chunk, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr
):
    """Where both rows of each lane begin in a chunk, [W, 32]: row `row + g` and the one STRIDE further on."""
    inputs, rows = _first_input(chunk, W, STEPS), row + tl.arange(0, 32)[None, :] // 4
    first = w_ptr + (tl.minimum(rows, last_row).to(tl.int64) * K + inputs)
    second = w_ptr + (tl.minimum(rows + STRIDE, last_row).to(tl.int64) * K + inputs)
    return first, second, inputs


@triton.jit
def _load_step(at, goes, step, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """Operands of 16 rows and 32 inputs: 16 bytes of both rows. If goes is not None, only if it is true."""
    IS_PART: tl.constexpr = _is_part(K, W, STEPS)
    exist = goes
    if IS_PART:
        exist = at[2] + STEP * step < K
        if goes is not None:
            exist = exist & goes
    return _load_two(at[0], at[1], exist, step, IS_PART)


@triton.jit
def load_rows(w_ptr, row, last_row, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """Operands of the first chunk of 16 rows, [W, 32] int32 each: for every step four words of a row, four of another.

    Args:
        row: of a [num_rows, K] matrix. Lanes read row `row + g` and the one STRIDE further on; beyond `last_row`, that.
    """
    at, words = _row_addresses(w_ptr, row, last_row, 0, STRIDE, K, W, STEPS), ()
    for step in tl.static_range(STEPS):
        words = words + _load_step(at, None, step, K, W, STEPS)
    return words


@triton.jit
def _load_two(first, second, exist, INDEX: tl.constexpr, CLEARS: tl.constexpr):
    """16 bytes of two rows of each lane. CLEARS: zeros where they do not exist, otherwise anything."""
    if INTERPRETED:
        x = _interpreted_load(first, exist, INDEX) + _interpreted_load(second, exist, INDEX)
    else:
        operands = (first.to(tl.int64), second.to(tl.int64))
        if exist is not None:
            condition = exist & (operands[0] != 0)  # of each lane; `exist` may be of all
            operands = operands + (condition.to(tl.int32),)  # noqa: RUF005 (Triton has no *)
        x = tl.inline_asm_elementwise(
            _loads(INDEX, exist is not None, CLEARS),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l" + (",r" if exist is not None else ""), operands,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _interpreted_load(at, exist, INDEX: tl.constexpr):
    words = at.to(tl.pointer_type(tl.int32))[:, :, None] + (STEP // 2 * INDEX + tl.arange(0, 4)[None, None, :])
    mask = words.to(tl.int64) > 0
    if exist is not None:
        mask = mask & (exist & (at.to(tl.int64) > 0))[:, :, None]
    return unstacked(tl.load(words, mask=mask, other=0), 4)


@triton.jit
def _load_inputs(at, INDEX: tl.constexpr):
    """16 bytes of each lane's request."""
    if INTERPRETED:
        x = _interpreted_load(at, None, INDEX)
    else:
        # Not pure: it must not come before the wait for the kernel ahead.
        BYTES: tl.constexpr = 2 * STEP * INDEX
        x = tl.inline_asm_elementwise(
            f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{BYTES}];", "=r,=r,=r,=r,l", [at.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _floats(words, BF16: tl.constexpr):
    """Interpreter: 8 inputs of each lane of four words, [W, 32, 8]."""
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    halves = tl.reshape(halves, [words.shape[0], words.shape[1], 8])
    if BF16:
        x = (halves << 16).to(tl.float32, bitcast=True)
    else:
        x = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _inputs_of(x_ptr, request, chunk, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """16 bytes of each lane's request for every step of a chunk."""
    inputs, x = _first_input(chunk, W, STEPS), ()
    for step in tl.static_range(STEPS):
        at = inputs
        if _is_part(K, W, STEPS):
            # Where weights are zeros, another input than none: no number may be none.
            at = tl.minimum(inputs, K - LANE - STEP * step)
        x = x + _load_inputs(x_ptr + (request * K + at), step)
    return x


@triton.jit
def _of_step(words, step: tl.constexpr, N: tl.constexpr):
    """A step's N words."""
    x = ()
    for i in tl.static_range(N):
        x = x + (words[N * step + i],)  # noqa: RUF005
    return x


@triton.jit
def _add_product(sums, w, x, BF16: tl.constexpr):
    """Add [16, 32] times [32, 8]: in a lane's four sums, columns 2 t and 2 t + 1 of row g, then of row g + 8."""
    if INTERPRETED:
        W: tl.constexpr = x[0].shape[0]
        left = tl.join(_floats(stacked(w[:4], 4), BF16), _floats(stacked(w[4:], 4), BF16))  # [W, 32, 8, 2]
        left = tl.permute(tl.reshape(left, [W, 8, 4, 8, 2]), (0, 4, 1, 2, 3))
        right = tl.permute(tl.reshape(_floats(stacked(x, 4), BF16), [W, 8, 32]), (0, 2, 1))
        y = tl.dot(tl.reshape(left, [W, 16, 32]), right)
        y = tl.permute(tl.reshape(y, [W, 2, 8, 4, 2]), (0, 2, 3, 1, 4))
        added = unstacked(tl.reshape(y, [W, 32, 4]), 4)
        total = (sums[0] + added[0], sums[1] + added[1], sums[2] + added[2], sums[3] + added[3])
    else:
        KIND: tl.constexpr = "bf16" if BF16 else "f16"
        MMA: tl.constexpr = f"mma.sync.aligned.m16n8k16.row.col.f32.{KIND}.{KIND}.f32"
        total = tl.inline_asm_elementwise(
            "{ .reg .f32 u0, u1, u2, u3;"
            f" {MMA} {{u0, u1, u2, u3}}, {{$8, $12, $9, $13}}, {{$16, $17}}, {{$4, $5, $6, $7}};"
            f" {MMA} {{$0, $1, $2, $3}}, {{$10, $14, $11, $15}}, {{$18, $19}}, {{u0, u1, u2, u3}}; }}",
            "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r", sums + w + x,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return total


@triton.jit
def _load_squares(squares_ptr, request, B: tl.constexpr, S: tl.constexpr, W: tl.constexpr):
    """Each lane's share, [W, 32], of the sums of squares of its request [1, 32], which is the same for all g."""
    place = tl.arange(0, W)[:, None] * 8 + tl.arange(0, 32)[None, :] // 4
    row = squares_ptr + tl.minimum(request, B - 1) * S
    total = tl.zeros([W, 32], tl.float32)
    for i in tl.static_range((S + 8 * W - 1) // (8 * W)):
        at = place + i * 8 * W
        if INTERPRETED:
            total += tl.load(row + at, mask=at < S, other=0.0)
        else:
            total += tl.inline_asm_elementwise(
                "{ .reg .pred goes; setp.ne.u32 goes, $2, 0; mov.b32 $0, 0; @goes ld.global.b32 $0, [$1]; }",
                "=&f,l,r", [(row + at).to(tl.int64), (at < S).to(tl.int32)],
                dtype=tl.float32, is_pure=False, pack=1,
            )  # fmt: skip
    return total


@triton.jit
def _of_rows(x):
    """x [W, 32] added up over all g."""
    W: tl.constexpr = x.shape[0]
    total = tl.sum(tl.reshape(x, [W, 8, 4]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [W, 8, 4]), [W, 32])


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_six(a, b, c, d, s, t, e, f, g, h, u, v):
    return a + e, b + f, c + g, d + h, s + u, t + v


@triton.jit
def _add_slice(
    even, odd, words, x_ptr, request, chunk, at, goes, LOADS: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Add a chunk's products to both chains of sums. LOADS: and load the one `at` in its place, if it `goes`."""
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    following = ()
    inputs = _inputs_of(x_ptr, request, chunk, K, W, STEPS)
    for step in tl.static_range(STEPS):
        operands, x = _of_step(words, step, 8), _of_step(inputs, step, 4)
        if step % 2 == 0:
            even = _add_product(even, operands, x, BF16)
        else:
            odd = _add_product(odd, operands, x, BF16)
        # With what a step has used, its registers are free for the same step of the next chunk.
        following = following + (_load_step(at, goes, step, K, W, STEPS) if LOADS else operands)
    return even, odd, following


@triton.jit
def products(
    words, x_ptr, squares_ptr, eps, w_ptr, row, next_row, last_row, goes_on, STRIDE: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Products of 16 rows and up to 8 requests.

    Args:
        words: the rows' first chunk, of `load_rows`.  x_ptr: [B, K].  row, last_row: as there.
        squares_ptr: [B, S] fp32, by which products are normalised, or None.
        next_row: whose first chunk is loaded by the way, with LOOP and if it `goes_on`.
    Returns:
        Four of [32] fp32, by lanes `4 g + t`: of row `row + g` and requests 2 t and 2 t + 1, and of the row STRIDE
        further on; those of requests that there are none of are of no use. Then the next rows' first chunk.
    """
    CHUNKS: tl.constexpr = _num_slices(K, W, STEPS)
    zero = tl.zeros([W, 32], tl.float32)
    even, odd = (zero, zero, zero, zero), (zero, zero, zero, zero)
    request = tl.minimum(tl.arange(0, 32)[None, :] // 4, B - 1)
    for chunk in range(CHUNKS - 1):
        at = _row_addresses(w_ptr, row, last_row, chunk + 1, STRIDE, K, W, STEPS)
        even, odd, words = _add_slice(even, odd, words, x_ptr, request, chunk, at, None, True, K, W, STEPS)
    if squares_ptr is not None:
        # Not ahead of the inputs, which would wait behind it: qkv took 16.5 us instead of 13.9.
        column = tl.arange(0, 32)[None, :] % 4 * 2
        squares = _load_squares(squares_ptr, column, B, S, W), _load_squares(squares_ptr, column + 1, B, S, W)
    at = _row_addresses(w_ptr, next_row, last_row, 0, STRIDE, K, W, STEPS)
    even, odd, words = _add_slice(even, odd, words, x_ptr, request, CHUNKS - 1, at, goes_on, LOOP, K, W, STEPS)
    # Of all warps, in one go: it takes barriers.
    sums = (even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3])
    if squares_ptr is None:
        sums = tl.reduce(sums, 0, _add_four)
    else:
        squares = _of_rows(squares[0]), _of_rows(squares[1])
        x = tl.reduce(sums + squares, 0, _add_six)
        rstd_0, rstd_1 = rstd(x[4] / K, eps), rstd(x[5] / K, eps)
        sums = (x[0] * rstd_0, x[1] * rstd_1, x[2] * rstd_0, x[3] * rstd_1)
    return sums, words
