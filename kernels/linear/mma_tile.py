"""MMA tiles of the decode projections for 2 to 16 requests: 16 whole weight rows to a program, on tensor cores.

The instruction (mma.m16n8k16) multiplies A [16 rows, 16 inputs] by B [16 inputs, 8 requests]. More than 8 requests are
two *halves*: each weight that is loaded is multiplied by one after the other. The order of the inputs
does not matter if A and B agree. So lane `4 g + t` reads 16 bytes at once, inputs 8 t to 8 t + 7 of 32: of weight rows
g and g + 8, and of request g. Without any shuffle these registers are its operands of two instructions. The 32 inputs
of two instructions are a *k-block*.

A row is read in *slices*. In a slice each warp has its own `STEPS` k-blocks; the sums of the warps are added up at the
end of the row. A program loads its first slice before it waits for the previous kernel. It loads each further slice
while it uses the previous slice, also across tiles. A request's result has the same bits with 2 requests and with 16.

As in kernels/attention/decode_quantised/lanes.py, tensors [W, 32] have a warp in each row and a lane in each column.
They are loaded by inline assembly, because the compiler would choose another layout for a load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, stacked, unstacked
from alspec.kernels.linear.gemv_tile import inputs_at_once, num_warps_for, rows_in_tile, rstd

__all__ = [
    "add_mma",
    "halves_of",
    "k_block_words",
    "load_lane_inputs",
    "load_rows",
    "load_squares",
    "load_words",
    "products",
    "reduce_warps",
    "replaced",
    "tile_of",
]

NUM_WARPS = 4
# k-blocks that a warp loads at once: 64 registers of a lane, which leaves room for three programs on an SM.
SLICE_K_BLOCKS = 8
ROWS = 16  # of a tile
K_BLOCK = tl.constexpr(32)  # inputs
LANE = tl.constexpr(8)  # inputs that a lane reads at once: 16 bytes


def tile_of(
    batch_size: int, num_inputs: int, itemsize: int, num_rows: int, matrices: int, closes: bool = False
) -> tuple[int, int, int]:
    """Return how a projection is divided: rows of each matrix in a program's tile, STEPS, warps of a program.

    STEPS is 0 if a program reads its tile at once and multiplies it by one request after another (gemv_tile.py): for
    one request, in fp32, and for shapes that no known model has.

    Args:
        num_rows: a multiple of the returned rows; 0: the last tile may be partial.
        closes: True if the launch has a gate; then long rows are read in slices (`inputs_at_once`).
    """
    is_aligned = itemsize == 2 and num_inputs % int(LANE.value) == 0
    if batch_size > 1 and is_aligned and (matrices == 1 or num_rows % (ROWS // matrices) == 0):
        return ROWS // matrices, _slice_k_blocks(num_inputs), NUM_WARPS
    width = inputs_at_once(batch_size, num_inputs, itemsize, closes)
    rows = rows_in_tile(num_rows, width, itemsize, matrices)
    return rows, 0, num_warps_for(matrices * rows, width, itemsize)


def _slice_k_blocks(num_inputs: int) -> int:
    """Return the k-blocks of a warp per slice: the largest number without a partial slice, if over half the maximum."""
    inputs = NUM_WARPS * int(K_BLOCK.value)
    whole = [n for n in range(SLICE_K_BLOCKS, SLICE_K_BLOCKS // 2, -1) if num_inputs % (inputs * n) == 0]
    return whole[0] if whole else min(SLICE_K_BLOCKS, triton.cdiv(num_inputs, inputs))


@triton.constexpr_function
def _loads(index, is_conditional, clears):
    """Assembly of `_load_two`: 16 bytes at $8 and at $9; if it is conditional, only where $10 is not 0."""
    at = 2 * index * K_BLOCK.value
    # A load is half a line of the L2; L2::128B fetches the whole line, because the other half is read next.
    load = "ld.global.L1::no_allocate.L2::128B.v4.b32"
    if not is_conditional:
        return f"{load} {{$0, $1, $2, $3}}, [$8+{at}]; {load} {{$4, $5, $6, $7}}, [$9+{at}];"
    zeros = " ".join([f"mov.b32 ${i}, 0;" for i in range(8)]) if clears else ""
    return (
        f"{{ .reg .pred goes; setp.ne.u32 goes, $10, 0; {zeros}"
        f" @goes {load} {{$0, $1, $2, $3}}, [$8+{at}]; @goes {load} {{$4, $5, $6, $7}}, [$9+{at}]; }}"
    )


@triton.constexpr_function
def _num_slices(num_inputs, warps, k_blocks):
    """Return the number of slices of a row; the last slice may be partial."""
    return -(-num_inputs // (warps * k_blocks * K_BLOCK.value))


@triton.constexpr_function
def _has_partial_slice(num_inputs, warps, k_blocks):
    """Return whether the last slice is partial."""
    return num_inputs % (warps * k_blocks * K_BLOCK.value) != 0


@triton.jit
def _first_input(slice_index, W: tl.constexpr, STEPS: tl.constexpr):
    """The first input of each lane in a slice, [W, 32]."""
    return (slice_index * W + tl.arange(0, W)[:, None]) * (K_BLOCK * STEPS) + tl.arange(0, 32)[None, :] % 4 * LANE


@triton.jit
def _row_addresses(
    w_ptr, row, last_row, slice_index, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr
):
    """Addresses of each lane's rows in a slice, [W, 32], `row + g` and `row + g + STRIDE`; index of its first input."""
    inputs, rows = _first_input(slice_index, W, STEPS), row + tl.arange(0, 32)[None, :] // 4
    first = w_ptr + (tl.minimum(rows, last_row).to(tl.int64) * K + inputs)
    second = w_ptr + (tl.minimum(rows + STRIDE, last_row).to(tl.int64) * K + inputs)
    return first, second, inputs


@triton.jit
def _load_k_block(addresses, enabled, k_block, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """Load the operands of 16 rows and 32 inputs: 16 bytes of both rows of a lane. Only if `enabled`; None: always."""
    HAS_PARTIAL: tl.constexpr = _has_partial_slice(K, W, STEPS)
    mask = enabled
    if HAS_PARTIAL:
        mask = addresses[2] + K_BLOCK * k_block < K
        if enabled is not None:
            mask = mask & enabled
    return _load_two(addresses[0], addresses[1], mask, k_block, HAS_PARTIAL)


@triton.jit
def load_rows(w_ptr, row, last_row, STRIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """Load the operands of the first slice of 16 rows, [W, 32] int32 each: per k-block four words of each of two rows.

    Args:
        row: of a [num_rows, K] matrix. Lanes read rows `row + g` and `row + g + STRIDE`, but none after `last_row`.
    """
    addresses, words = _row_addresses(w_ptr, row, last_row, 0, STRIDE, K, W, STEPS), ()
    for k_block in tl.static_range(STEPS):
        words = words + _load_k_block(addresses, None, k_block, K, W, STEPS)
    return words


@triton.jit
def _load_two(first, second, mask, INDEX: tl.constexpr, CLEARS: tl.constexpr):
    """Load 16 bytes of two rows in each lane. Where the mask is False: 0 with CLEARS, else undefined."""
    if INTERPRETED:
        x = _interpreted_load(first, mask, INDEX) + _interpreted_load(second, mask, INDEX)
    else:
        operands = (first.to(tl.int64), second.to(tl.int64))
        if mask is not None:
            condition = mask & (operands[0] != 0)  # one for each lane; `mask` may be a scalar
            operands = operands + (condition.to(tl.int32),)  # noqa: RUF005 (Triton has no *)
        x = tl.inline_asm_elementwise(
            _loads(INDEX, mask is not None, CLEARS),
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l" + (",r" if mask is not None else ""), operands,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.constexpr_function
def _load_of_words(offset, is_conditional, clears):
    """Assembly of `load_words`: 16 bytes at $4; if it is conditional, only where $5 is not 0."""
    load = f"ld.global.L1::no_allocate.L2::128B.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    if not is_conditional:
        return load
    zeros = " ".join([f"mov.b32 ${i}, 0;" for i in range(4)]) if clears else ""
    return f"{{ .reg .pred goes; setp.ne.u32 goes, $5, 0; {zeros} @goes {load} }}"


@triton.jit
def load_words(addresses, mask, OFFSET: tl.constexpr, CLEARS: tl.constexpr):
    """Load four int32 in each lane, OFFSET bytes behind int32 `addresses`. Where the mask is False: as `_load_two`."""
    if INTERPRETED:
        x = _interpreted_load(addresses + OFFSET // 4, mask, 0)
    else:
        operands = (addresses.to(tl.int64),)
        if mask is not None:
            condition = mask & (operands[0] != 0)  # one for each lane; `mask` may be a scalar
            operands = operands + (condition.to(tl.int32),)  # noqa: RUF005
        x = tl.inline_asm_elementwise(
            _load_of_words(OFFSET, mask is not None, CLEARS),
            "=&r,=&r,=&r,=&r,l" + (",r" if mask is not None else ""), operands,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _interpreted_load(ptrs, lane_mask, INDEX: tl.constexpr):
    """Interpreter: load 16 bytes at each of `ptrs` as four int32."""
    words = ptrs.to(tl.pointer_type(tl.int32))[:, :, None] + (K_BLOCK // 2 * INDEX + tl.arange(0, 4)[None, None, :])
    mask = words.to(tl.int64) > 0
    if lane_mask is not None:
        mask = mask & (lane_mask & (ptrs.to(tl.int64) > 0))[:, :, None]
    return unstacked(tl.load(words, mask=mask, other=0), 4)


@triton.jit
def load_lane_inputs(ptrs, INDEX: tl.constexpr):
    """Load 16 bytes of each lane's request."""
    if INTERPRETED:
        x = _interpreted_load(ptrs, None, INDEX)
    else:
        # Not pure: it must not move before the wait for the previous kernel.
        BYTES: tl.constexpr = 2 * K_BLOCK * INDEX
        x = tl.inline_asm_elementwise(
            f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{BYTES}];", "=r,=r,=r,=r,l", [ptrs.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _to_floats(words, BF16: tl.constexpr):
    """Interpreter: unpack the 8 inputs in four words of each lane, [W, 32, 8] fp32."""
    halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
    halves = tl.reshape(halves, [words.shape[0], words.shape[1], 8])
    if BF16:
        x = (halves << 16).to(tl.float32, bitcast=True)
    else:
        x = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _load_slice_inputs(x_ptr, request, slice_index, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr):
    """Load 16 bytes of each lane's request for every k-block of a slice."""
    inputs, x = _first_input(slice_index, W, STEPS), ()
    for k_block in tl.static_range(STEPS):
        offsets = inputs
        if _has_partial_slice(K, W, STEPS):
            # Clamp the index: weights past the end are 0, but 0 * NaN is NaN.
            offsets = tl.minimum(inputs, K - LANE - K_BLOCK * k_block)
        x = x + load_lane_inputs(x_ptr + (request * K + offsets), k_block)
    return x


@triton.jit
def k_block_words(words, k_block: tl.constexpr, N: tl.constexpr):
    """The N words of one k-block."""
    x = ()
    for i in tl.static_range(N):
        x = x + (words[N * k_block + i],)  # noqa: RUF005
    return x


@triton.jit
def add_mma(sums, w, x, BF16: tl.constexpr):
    """Add [16, 32] times [32, 8]. A lane's four sums: columns 2 t and 2 t + 1 of row g, then of row g + 8."""
    if INTERPRETED:
        W: tl.constexpr = x[0].shape[0]
        left = tl.join(_to_floats(stacked(w[:4], 4), BF16), _to_floats(stacked(w[4:], 4), BF16))  # [W, 32, 8, 2]
        left = tl.permute(tl.reshape(left, [W, 8, 4, 8, 2]), (0, 4, 1, 2, 3))
        right = tl.permute(tl.reshape(_to_floats(stacked(x, 4), BF16), [W, 8, 32]), (0, 2, 1))
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
def load_squares(squares_ptr, request, B: tl.constexpr, S: tl.constexpr, W: tl.constexpr):
    """Load each lane's part, [W, 32], of the square sums of its request; request: [1, 32], the same for all g."""
    index = tl.arange(0, W)[:, None] * 8 + tl.arange(0, 32)[None, :] // 4
    row = squares_ptr + tl.minimum(request, B - 1) * S
    total = tl.zeros([W, 32], tl.float32)
    for i in tl.static_range((S + 8 * W - 1) // (8 * W)):
        offsets = index + i * 8 * W
        if INTERPRETED:
            total += tl.load(row + offsets, mask=offsets < S, other=0.0)
        else:
            total += tl.inline_asm_elementwise(
                "{ .reg .pred goes; setp.ne.u32 goes, $2, 0; mov.b32 $0, 0; @goes ld.global.b32 $0, [$1]; }",
                "=&f,l,r", [(row + offsets).to(tl.int64), (offsets < S).to(tl.int32)],
                dtype=tl.float32, is_pure=False, pack=1,
            )  # fmt: skip
    return total


@triton.jit
def _sum_over_rows(x):
    """Sum x [W, 32] over all g."""
    W: tl.constexpr = x.shape[0]
    total = tl.sum(tl.reshape(x, [W, 8, 4]), 1)
    return tl.reshape(tl.broadcast_to(total[:, None, :], [W, 8, 4]), [W, 32])


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_six(a, b, c, d, s, t, e, f, g, h, u, v):
    return a + e, b + f, c + g, d + h, s + u, t + v


@triton.constexpr_function
def halves_of(num_requests):
    """Return the halves of so many requests: more than 8 are two."""
    return 2 if num_requests > 8 else 1


@triton.jit
def _add_slice(
    sums, words, x_ptr, slice_index, addresses, has_next, LOADS: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
    W: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Add a slice's products to two chains of sums. With LOADS, also load the slice at `addresses` if `has_next`.

    Args:
        sums: of each half four sums for even k-blocks, then four for odd ones.
    """
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    HALVES: tl.constexpr = halves_of(B)
    next_words = ()
    for half in tl.static_range(HALVES):
        request = tl.minimum(tl.arange(0, 32)[None, :] // 4 + 8 * half, B - 1)
        inputs = _load_slice_inputs(x_ptr, request, slice_index, K, W, STEPS)
        for k_block in tl.static_range(STEPS):
            operands, x = k_block_words(words, k_block, 8), k_block_words(inputs, k_block, 4)
            added = add_mma(k_block_words(sums, 2 * half + k_block % 2, 4), operands, x, BF16)
            sums = replaced(sums, added, 2 * half + k_block % 2, 2 * HALVES)
            if half == HALVES - 1:
                # The registers of this k-block are free now: load the same k-block of the next slice.
                next_words = next_words + (
                    _load_k_block(addresses, has_next, k_block, K, W, STEPS) if LOADS else operands
                )
    return sums, next_words


@triton.jit
def replaced(sums, four, index: tl.constexpr, N: tl.constexpr):
    """Sums, four by four, N times; the four at `index` are replaced."""
    x = ()
    for i in tl.static_range(N):
        x = x + (four if i == index else k_block_words(sums, i, 4))
    return x


@triton.jit
def products(
    words, x_ptr, squares_ptr, eps, w_ptr, row, next_row, last_row, has_next, STRIDE: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows by up to 16 requests.

    Args:
        words: the first slice of the rows, from `load_rows`.  x_ptr: [B, K].  row, last_row: as there.
        squares_ptr: [B, S] fp32, to normalise the products, or None.
        next_row: the row whose first slice is loaded meanwhile, with LOOP and if `has_next`.
    Returns:
        Of each half four [32] fp32, by lane `4 g + t`: row `row + g` for requests 2 t and 2 t + 1 of the half, then row
        `row + g + STRIDE`; undefined for requests from B on. Then the first slice of the next rows.
    """
    SLICES: tl.constexpr = _num_slices(K, W, STEPS)
    HALVES: tl.constexpr = halves_of(B)
    zero = tl.zeros([W, 32], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    if HALVES == 2:
        sums = sums + sums
    for slice_index in range(SLICES - 1):
        addresses = _row_addresses(w_ptr, row, last_row, slice_index + 1, STRIDE, K, W, STEPS)
        sums, words = _add_slice(sums, words, x_ptr, slice_index, addresses, None, True, B, K, W, STEPS)
    squares = ()
    if squares_ptr is not None:
        # Do not load the squares earlier: the loads of the inputs would queue behind them.
        for half in tl.static_range(HALVES):
            column = tl.arange(0, 32)[None, :] % 4 * 2 + 8 * half
            first, second = load_squares(squares_ptr, column, B, S, W), load_squares(squares_ptr, column + 1, B, S, W)
            squares = squares + (first, second)  # noqa: RUF005
    addresses = _row_addresses(w_ptr, next_row, last_row, 0, STRIDE, K, W, STEPS)
    sums, words = _add_slice(sums, words, x_ptr, SLICES - 1, addresses, has_next, LOOP, B, K, W, STEPS)
    results = ()
    for half in tl.static_range(HALVES):
        own = k_block_words(sums, half, 8)
        own = (own[0] + own[4], own[1] + own[5], own[2] + own[6], own[3] + own[7])
        results = results + reduce_warps(own, squares, half, eps, K)
    return results, words


@triton.jit
def reduce_warps(sums, squares, half: tl.constexpr, eps, K: tl.constexpr):
    """Add up a half's four sums of all warps; with `squares` of a lane's two requests of each half, normalise them."""
    # One reduction over the warps for all values, because each reduction needs barriers.
    if len(squares) == 0:
        sums = tl.reduce(sums, 0, _add_four)
    else:
        squares = _sum_over_rows(squares[2 * half]), _sum_over_rows(squares[2 * half + 1])
        x = tl.reduce(sums + squares, 0, _add_six)
        rstd_0, rstd_1 = rstd(x[4] / K, eps), rstd(x[5] / K, eps)
        sums = (x[0] * rstd_0, x[1] * rstd_1, x[2] * rstd_0, x[3] * rstd_1)
    return sums
