"""Tiles of quantised weights for the decode projections of 1 to 16 requests: 16 rows to a program, on tensor cores.

As in mma_tile.py, the 16 bytes that a lane reads at once are its operands without any shuffle; decode_weight.py has the
layout. One request takes the same path, because tensor cores leave the other units free for the conversion of codes.

A code becomes a number of 16 bits without rounding (weight_codes.py). Products are added in fp32. The scale multiplies
the sum of a group, or that of the whole row.

The warps take turns at the blocks of a tile: a few blocks that follow each other are a *chunk*. From compute capability
9.0 on (BULK), a warp has STAGES buffers in shared memory, and one bulk copy, issued by one lane, loads a chunk into a
buffer. The copies of the first chunks are issued before the program waits for the previous kernel, each further one
when its buffer has been read, also across tiles. So copies are always in flight, and loads of inputs do
not queue behind loads from DRAM. On older GPUs lanes load the same words from global memory.

The order of all sums is fixed: a request's result has the same bits with 1 request and with 16.

Reads of shared memory are correct by the rules in kernels/attention/decode_quantised/record_loads.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from alspec.kernels.common.device import INTERPRETED
from alspec.kernels.common.limits import MAX_FUSED_ROWS
from alspec.kernels.linear.decode_weight import K_BLOCK as INPUTS_OF_K_BLOCK
from alspec.kernels.linear.decode_weight import TILE_ROWS, DecodeWeight, block_lines
from alspec.kernels.linear.mma_tile import (
    add_mma,
    halves_of,
    k_block_words,
    load_lane_inputs,
    load_squares,
    load_words,
    reduce_warps,
    replaced,
    tile_of,
)
from alspec.kernels.linear.weight_codes import code_operands, scale_of, zero_operand

__all__ = [
    "abandon_tile",
    "load_tile",
    "num_warps",
    "packed_arguments",
    "packed_products",
    "shared_programs",
    "tile_settings",
]

K_BLOCK = tl.constexpr(INPUTS_OF_K_BLOCK)
LINE = tl.constexpr(128)  # words of 512 bytes
MANY_TILES = 264  # two to an SM of an H100 or H200: as many programs of eight warps run at once
CHUNK_K_BLOCKS = 8  # at most
BUFFER_BYTES = tl.constexpr(36864)  # of a program: five fit an SM


def tile_settings(
    weight: Tensor | DecodeWeight, x: Tensor, num_rows: int, matrices: int, closes: bool = False
) -> tuple[int, int, int]:
    """`tile_of` for a projection of x [B, K]: rows of each matrix in a tile, STEPS, warps of a program.

    STEPS of a quantised weight are the k-blocks of a chunk.

    Raises:
        ValueError: a quantised weight with inputs in fp32, or with too many requests.
    """
    if not isinstance(weight, DecodeWeight):
        return tile_of(x.shape[0], x.shape[1], weight.itemsize, num_rows, matrices, closes)
    if x.itemsize != 2 or x.shape[0] > MAX_FUSED_ROWS:
        raise ValueError(f"x: expected up to {MAX_FUSED_ROWS} rows of 16-bit numbers, found {len(x)} of {x.dtype}")
    warps = num_warps(weight.format, len(weight.data))
    return TILE_ROWS // matrices, _chunk_k_blocks(weight.shape[1], weight.format, weight.group, warps), warps


def num_warps(weight_format: str, num_tiles: int) -> int:
    """Warps of a program. More of them shorten a tile, but each has its first inputs and its last sums.

    FP8 takes four where all tiles then run at once, four to an SM, and the second round of eight would be half full.
    """
    few = num_tiles > MANY_TILES if weight_format == "int4" else MANY_TILES * 3 < 2 * num_tiles <= MANY_TILES * 4
    return 4 if few else 8


def _chunk_k_blocks(num_inputs: int, weight_format: str, group: int, warps: int) -> int:
    """Return the k-blocks of a chunk: the number of blocks that leaves warps idle least, at best the largest."""
    of_block = _block_k_blocks(weight_format, group)
    blocks = -(-num_inputs // (INPUTS_OF_K_BLOCK * of_block))
    # Two chunks fit the buffers of a warp.
    most = BUFFER_BYTES.value // (8 * warps * _block_words(weight_format, group))
    sizes = range(max(1, min(most, CHUNK_K_BLOCKS // of_block)), 0, -1)
    return int(of_block * min(sizes, key=lambda size: -(-blocks // (size * warps)) * size))


def shared_programs(weight: Tensor | DecodeWeight, batch_size: int, warps: int) -> int:
    """Programs on an SM to reserve shared memory for: the buffers of quantised weights (`set_l1_carveout`).

    Shared memory that no program uses is lost to the L1, which holds the inputs: each program reads all of them.
    """
    if not isinstance(weight, DecodeWeight):
        return 0
    num_tiles = len(weight.data)
    if weight.format == "int4" and weight.group * INPUTS_OF_K_BLOCK == 128 and batch_size == 1:
        return 5  # inputs of one request need little L1, and the next launch begins to load weights
    if batch_size > 8 and num_tiles > 2 * MANY_TILES:
        return 2  # more programs would share the L1 that inputs of 16 requests fill
    if warps == 4:
        return 4
    # Registers allow three programs, and two with 16 requests. With three, some SMs would take three of 264 tiles.
    return 2 if batch_size > 8 or num_tiles <= MANY_TILES else 3


def packed_arguments(weight: Tensor | DecodeWeight) -> tuple[tuple[Tensor, Tensor | None], dict[str, Any]]:
    """Arguments of the projections' kernels for a weight: w_ptr and scale_ptr, and the constants of its format."""
    if isinstance(weight, DecodeWeight):
        return (weight.data, weight.scales), {"FORMAT": weight.format, "GROUP": weight.group}
    return (weight, None), {"FORMAT": None, "GROUP": 0}


@triton.constexpr_function
def _k_blocks_of_line(weight_format):
    return 2 if weight_format == "int4" else 1


@triton.constexpr_function
def _block_k_blocks(weight_format, group):
    return block_lines(weight_format, group) * _k_blocks_of_line(weight_format)


@triton.constexpr_function
def _block_words(weight_format, group):
    """Words of a block: its lines, and the scales of two groups."""
    return block_lines(weight_format, group) * LINE.value + (32 if group else 0)


@triton.constexpr_function
def _chunk_blocks(steps, weight_format, group):
    return steps // _block_k_blocks(weight_format, group)


@triton.constexpr_function
def _ahead(steps, weight_format, num_rows):
    """K-blocks from the load of inputs to their use."""
    return steps if weight_format == "int4" and num_rows <= 8 else min(steps, 3)


@triton.constexpr_function
def _num_blocks(num_inputs, weight_format, group):
    """Blocks of a tile."""
    return -(-num_inputs // (K_BLOCK.value * _block_k_blocks(weight_format, group)))


@triton.constexpr_function
def _num_rounds(num_inputs, warps, steps):
    """Chunks of each warp in a tile; in the last round some may be partial, or empty."""
    return -(-num_inputs // (warps * steps * K_BLOCK.value))


@triton.constexpr_function
def _is_whole(num_inputs, warps, steps, weight_format, group):
    """Whether all chunks are whole."""
    return num_inputs % (warps * steps * K_BLOCK.value) == 0


@triton.constexpr_function
def _num_stages(num_inputs, warps, steps, weight_format, group):
    """Buffers of a warp: as many as have a use."""
    bytes_of_chunk = 4 * _chunk_blocks(steps, weight_format, group) * _block_words(weight_format, group)
    return max(1, min(BUFFER_BYTES.value // (warps * bytes_of_chunk), _num_rounds(num_inputs, warps, steps)))


@triton.jit
def _lanes(W: tl.constexpr):
    """Zeros [W, 32]: added to a value of each warp, they give it to each lane."""
    return tl.arange(0, W)[:, None] * 0 + tl.arange(0, 32)[None, :] * 0


@triton.jit
def _first_block(chunk_round, W: tl.constexpr, BLOCKS: tl.constexpr):
    """The first block of each warp's chunk in a round, [W, 1]."""
    return (chunk_round * W + tl.arange(0, W)[:, None]) * BLOCKS


@triton.jit
def _init_buffers(W: tl.constexpr, STAGES: tl.constexpr, BYTES: tl.constexpr):
    """Declare the buffers and barriers of all warps; return their address in shared memory. Only once in a kernel."""
    SIZE: tl.constexpr = W * STAGES * (BYTES + 8)
    # Not in braces: if the compiler ever duplicates it, ptxas rejects the second declaration.
    buffers = tl.inline_asm_elementwise(
        f".shared .align 128 .b8 weight_chunks[{SIZE}]; mov.u32 $0, weight_chunks;",
        "=r,r", [tl.full([], 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    for stage in tl.static_range(STAGES):
        barrier = _barrier(buffers, stage, W, STAGES, BYTES) + _lanes(W)
        tl.inline_asm_elementwise(
            "{ .reg .pred first; elect.sync _|first, -1; @first mbarrier.init.shared.b64 [$1], 1; mov.u32 $0, 0; }",
            "=r,r", [barrier], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    # The fence makes the initialised barriers visible to the copies. Each warp uses its own barriers only.
    tl.inline_asm_elementwise(
        "{ fence.proxy.async.shared::cta; bar.warp.sync -1; mov.u32 $0, $1; }",
        "=r,r", [_lanes(W)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return buffers


@triton.jit
def _buffer(buffers, stage, W: tl.constexpr, STAGES: tl.constexpr, BYTES: tl.constexpr):
    """Address of each warp's buffer, [W, 1]."""
    return buffers + (tl.arange(0, W)[:, None] * STAGES + stage) * BYTES


@triton.jit
def _barrier(buffers, stage, W: tl.constexpr, STAGES: tl.constexpr, BYTES: tl.constexpr):
    """Address of the barrier of each warp's buffer, [W, 1]."""
    return buffers + W * STAGES * BYTES + (tl.arange(0, W)[:, None] * STAGES + stage) * 8


@triton.constexpr_function
def _copy_assembly(reads):
    """Assembly of a bulk copy that depends on `reads` values, $6 and up; see record_loads.py.

    $1: barrier.  $2: destination.  $3: source.  $4: bytes, which may be 0.  $5: whether to copy.
    """
    values = " ".join([f"or.b32 read, read, ${6 + i};" for i in range(reads)])
    return (
        "{ .reg .pred first, goes, copies; .reg .b64 state, policy; .reg .b32 zero, read, to; setp.ne.u32 goes, $5, 0;"
        f" shr.u32 zero, $2, 20; mov.u32 read, 0; {values} and.b32 read, read, zero; add.u32 to, $2, read;"
        " bar.warp.sync -1; elect.sync _|first, -1; and.pred first, first, goes; setp.ne.and.u32 copies, $4, 0, first;"
        " @first mbarrier.arrive.expect_tx.shared.b64 state, [$1], $4;"
        " createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " @copies cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [to], [$3], $4, [$1], policy;"
        " mov.u32 $0, 0; }"
    )


@triton.jit
def _copy_chunk(
    buffers, stage, w_ptr, tile, chunk_round, enabled, after, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Issue the copy of each warp's chunk into its buffer, if `enabled`, when all of `after` have arrived."""
    BLOCKS: tl.constexpr = _chunk_blocks(STEPS, FORMAT, GROUP)
    WORDS: tl.constexpr = _block_words(FORMAT, GROUP)
    TOTAL: tl.constexpr = _num_blocks(K, FORMAT, GROUP)
    BYTES: tl.constexpr = 4 * BLOCKS * WORDS
    lanes, block = _lanes(W), _first_block(chunk_round, W, BLOCKS)
    size = lanes + BYTES
    if not _is_whole(K, W, STEPS, FORMAT, GROUP):
        size = lanes + tl.minimum(tl.maximum(TOTAL - block, 0), BLOCKS) * (4 * WORDS)
    source = (w_ptr + (tl.cast(tile, tl.int64) * TOTAL + block) * WORDS).to(tl.int64) + lanes
    operands = (_barrier(buffers, stage, W, STAGES, BYTES) + lanes, _buffer(buffers, stage, W, STAGES, BYTES) + lanes)
    operands = operands + (source, size, tl.cast(enabled, tl.int32) + lanes) + after  # noqa: RUF005
    tl.inline_asm_elementwise(
        _copy_assembly(len(after)), "=r,r,r,l,r,r" + ",r" * len(after), operands, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _await_chunk(buffers, count, W: tl.constexpr, STAGES: tl.constexpr, BYTES: tl.constexpr):
    """Wait for the copy of chunk `count` of each warp; return the address of its buffer in each lane, [W, 32].

    No timeout: a copy that this program itself issued always completes.
    """
    stage, parity = count % STAGES, count // STAGES % 2
    operands = (
        _buffer(buffers, stage, W, STAGES, BYTES) + _lanes(W), _barrier(buffers, stage, W, STAGES, BYTES) + _lanes(W),
        parity + _lanes(W),
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [$2], $3; @!done bra WAIT;"
        " mov.u32 $0, $1; }",
        "=r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _read_words(chunk, mask, OFFSET: tl.constexpr):
    """Read four words of each lane in a chunk, OFFSET words behind `chunk`; zeros where the mask is False."""
    if chunk.dtype.is_ptr():
        words = load_words(chunk, mask, 4 * OFFSET, True)
    else:
        LOAD: tl.constexpr = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{4 * OFFSET}];"
        operands = (chunk,)
        if mask is not None:
            operands = operands + ((mask & (chunk == chunk)).to(tl.int32),)  # noqa: RUF005
            words = tl.inline_asm_elementwise(
                "{ .reg .pred goes; setp.ne.u32 goes, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
                f" mov.b32 $3, 0; @goes {LOAD} }}",
                "=&r,=&r,=&r,=&r,r,r", operands,
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
        else:
            words = tl.inline_asm_elementwise(
                LOAD, "=r,=r,=r,=r,r", operands,
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
            )  # fmt: skip
    return words


@triton.jit
def _load_row_scales(scale_ptr, tile, W: tl.constexpr, GROUP: tl.constexpr):
    """Load the scales of a tile's rows, if each has one: row g and row g + 8 of each lane."""
    scales = ()
    if GROUP == 0:
        words = load_words(
            scale_ptr + (tl.cast(tile, tl.int64) * 32 + tl.arange(0, 32)[None, :] // 4 * 4) + _lanes(W), None, 0, False
        )
        scales = (words[0], words[1])
    return scales


@triton.jit
def load_tile(
    w_ptr, scale_ptr, tile, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Begin to load a program's first tile. Only once in a kernel.

    Returns:
        The state of `packed_products`: the address of the buffers, the chunks that each warp has used, and scales of
        rows.
    """
    buffers = 0
    if BULK and not INTERPRETED:
        STAGES: tl.constexpr = _num_stages(K, W, STEPS, FORMAT, GROUP)
        buffers = _init_buffers(W, STAGES, 4 * _chunk_blocks(STEPS, FORMAT, GROUP) * _block_words(FORMAT, GROUP))
        for stage in tl.static_range(STAGES):
            _copy_chunk(buffers, stage, w_ptr, tile, stage, True, (), K, W, STEPS, FORMAT, GROUP, STAGES)
    return (buffers, 0) + _load_row_scales(scale_ptr, tile, W, GROUP)  # noqa: RUF005


@triton.jit
def abandon_tile(
    state, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """Wait for the copies of `load_tile`, which must not arrive after the program has ended."""
    if BULK and not INTERPRETED:
        STAGES: tl.constexpr = _num_stages(K, W, STEPS, FORMAT, GROUP)
        for stage in tl.static_range(STAGES):
            _await_chunk(
                state[0], stage, W, STAGES, 4 * _chunk_blocks(STEPS, FORMAT, GROUP) * _block_words(FORMAT, GROUP)
            )


@triton.jit
def _load_x(x_ptr, inputs, k_block: tl.constexpr, B: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Load 16 bytes of each lane's request in a k-block, of each half of the requests."""
    offsets = inputs
    if not WHOLE:
        # Clamp the index: weights behind a row are 0, but 0 * NaN is NaN.
        offsets = tl.minimum(inputs, K - 8 - K_BLOCK * k_block)
    x = ()
    for half in tl.static_range(halves_of(B)):
        request = tl.minimum(tl.arange(0, 32)[None, :] // 4 + 8 * half, B - 1)
        x = x + load_lane_inputs(x_ptr + (request * K + offsets), k_block)
    return x


@triton.jit
def _first_input(chunk_round, W: tl.constexpr, STEPS: tl.constexpr):
    """The first input of each lane in a round, [W, 32]."""
    return (chunk_round * W + tl.arange(0, W)[:, None]) * (K_BLOCK * STEPS) + tl.arange(0, 32)[None, :] % 4 * 8


@triton.jit
def _load_first_x(
    x_ptr, chunk_round, B: tl.constexpr, K: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Load the inputs of a chunk's first k-blocks, before the program waits for the chunk."""
    inputs, x = _first_input(chunk_round, W, STEPS), ()
    for k_block in tl.static_range(_ahead(STEPS, FORMAT, B)):
        x = x + _load_x(x_ptr, inputs, k_block, B, K, _is_whole(K, W, STEPS, FORMAT, GROUP))
    return x


@triton.jit
def _zeros(W: tl.constexpr, N: tl.constexpr):
    """N sums."""
    zeros = ()
    for _ in tl.static_range(N):
        zeros = zeros + (tl.zeros([W, 32], tl.float32),)  # noqa: RUF005
    return zeros


@triton.jit
def _add_scaled(sums, group_sums, first, second):
    """Add the sums of a group, times the scales of row g and of row g + 8."""
    return (
        sums[0] + group_sums[0] * first, sums[1] + group_sums[1] * first,
        sums[2] + group_sums[2] * second, sums[3] + group_sums[3] * second,
    )  # fmt: skip


@triton.jit
def _add_chunk(
    sums, x, chunk, block, x_ptr, chunk_round, next_round, B: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    STEPS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add a chunk's products.

    Args:
        sums: of each half four scaled ones, with GROUP; without, two chains of four.  x: of `_load_first_x`.
        chunk: where the chunk of each lane's warp begins, with the lane's offset: pointer, or shared memory address.
        block: the first block of each warp's chunk, [W, 1].
    Returns:
        The sums, the first inputs of the next round, and a word of each read.
    """
    BF16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    AHEAD: tl.constexpr = _ahead(STEPS, FORMAT, B)
    OF_LINE: tl.constexpr = _k_blocks_of_line(FORMAT)
    OF_BLOCK: tl.constexpr = STEPS // _chunk_blocks(STEPS, FORMAT, GROUP)
    WHOLE: tl.constexpr = _is_whole(K, W, STEPS, FORMAT, GROUP)
    WORDS: tl.constexpr = _block_words(FORMAT, GROUP)
    inputs, done = _first_input(chunk_round, W, STEPS), ()
    next_inputs, next_x = _first_input(next_round, W, STEPS), ()
    HALVES: tl.constexpr = halves_of(B)
    group_sums, scales, line = _zeros(W, 4 * HALVES), (), ()
    for k_block in tl.static_range(STEPS):
        if k_block + AHEAD < STEPS:
            x = x + _load_x(x_ptr, inputs, k_block + AHEAD, B, K, WHOLE)
        else:
            next_x = next_x + _load_x(x_ptr, next_inputs, k_block + AHEAD - STEPS, B, K, WHOLE)
        mask = None
        if not WHOLE:
            mask = block + k_block // OF_BLOCK < _num_blocks(K, FORMAT, GROUP)
        if GROUP > 0 and k_block % OF_BLOCK == 0:
            # The words of a lane are the same for all t; `chunk` counts 16 bytes for each lane.
            scales = _read_scales(chunk, mask, k_block // OF_BLOCK * WORDS + (WORDS - 32))
            done = done + (scales[0],)  # noqa: RUF005
        if k_block % OF_LINE == 0:
            line = _read_words(chunk, mask, k_block // OF_BLOCK * WORDS + k_block % OF_BLOCK // OF_LINE * LINE)
            done = done + (line[0],)  # noqa: RUF005
        zeros, pair = None, ()
        if GROUP > 0:
            pair = k_block_words(scales, k_block % OF_BLOCK // GROUP, 2)
            zeros = zero_operand(pair[0], FORMAT, BF16), zero_operand(pair[1], FORMAT, BF16)
            if k_block % GROUP == 0:
                group_sums = _zeros(W, 4 * HALVES)
        operands = code_operands(line, k_block % OF_LINE, zeros, FORMAT, BF16)
        for half in tl.static_range(HALVES):
            own_x = k_block_words(x, k_block * HALVES + half, 4)
            if GROUP > 0:
                added = add_mma(k_block_words(group_sums, half, 4), operands, own_x, BF16)
                group_sums = replaced(group_sums, added, half, HALVES)
                if k_block % GROUP == GROUP - 1:
                    scaled = _add_scaled(
                        k_block_words(sums, half, 4), added, scale_of(pair[0], FORMAT), scale_of(pair[1], FORMAT)
                    )
                    sums = replaced(sums, scaled, half, HALVES)
            else:
                added = add_mma(k_block_words(sums, 2 * half + k_block % 2, 4), operands, own_x, BF16)
                sums = replaced(sums, added, 2 * half + k_block % 2, 2 * HALVES)
    return sums, next_x, done


@triton.jit
def _read_scales(chunk, mask, OFFSET: tl.constexpr):
    """Read the words of two groups, the same for all t."""
    lanes = tl.arange(0, 32)[None, :]
    back = lanes // 4 * 4 - lanes * 4  # `chunk` lies four words behind that of the previous lane
    return _read_words(chunk + (back if chunk.dtype.is_ptr() else 4 * back), mask, OFFSET)


@triton.jit
def packed_products(
    state, x_ptr, squares_ptr, eps, w_ptr, scale_ptr, tile, next_tile, has_next, B: tl.constexpr, K: tl.constexpr,
    S: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, LOOP: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Multiply a tile by up to 16 requests.

    Args:
        state: of `load_tile`, or of the previous tile.  x_ptr: [B, K].
        squares_ptr: [B, S] fp32, to normalise the products, or None.
        next_tile: the tile that is loaded next, with LOOP and if `has_next`.
    Returns:
        Of each half of the requests four [32] fp32, by lane `4 g + t`: row g of the tile for requests 2 t and 2 t + 1
        of the half, then row g + 8; undefined for requests from B on. Then the state.
    """
    ROUNDS: tl.constexpr = _num_rounds(K, W, STEPS)
    BLOCKS: tl.constexpr = _chunk_blocks(STEPS, FORMAT, GROUP)
    WORDS: tl.constexpr = _block_words(FORMAT, GROUP)
    STAGES: tl.constexpr = _num_stages(K, W, STEPS, FORMAT, GROUP)
    buffers, count, scales = state[0], state[1], state[2:]
    next_scales = scales
    if LOOP:
        next_scales = _load_row_scales(scale_ptr, tl.where(has_next, next_tile, tile), W, GROUP)
    HALVES: tl.constexpr = halves_of(B)
    x, squares = _load_first_x(x_ptr, 0, B, K, W, STEPS, FORMAT, GROUP), ()
    if squares_ptr is not None:
        for half in tl.static_range(HALVES):
            column = tl.arange(0, 32)[None, :] % 4 * 2 + 8 * half
            first, second = load_squares(squares_ptr, column, B, S, W), load_squares(squares_ptr, column + 1, B, S, W)
            squares = squares + (first, second)  # noqa: RUF005
    sums = _zeros(W, (4 if GROUP else 8) * HALVES)
    for chunk_round in range(ROUNDS):
        block, next_round = _first_block(chunk_round, W, BLOCKS), tl.minimum(chunk_round + 1, ROUNDS - 1)
        if BULK and not INTERPRETED:
            chunk = _await_chunk(buffers, count, W, STAGES, 4 * BLOCKS * WORDS) + tl.arange(0, 32)[None, :] * 16
            sums, x, done = _add_chunk(
                sums, x, chunk, block, x_ptr, chunk_round, next_round, B, K, W, STEPS, FORMAT, GROUP
            )
            following = chunk_round + STAGES
            is_own = following < ROUNDS
            goes = is_own
            if LOOP:
                goes = is_own | has_next
            _copy_chunk(
                buffers, count % STAGES, w_ptr, tl.where(is_own, tile, next_tile),
                following - tl.where(is_own, 0, ROUNDS), goes, done, K, W, STEPS, FORMAT, GROUP, STAGES,
            )  # fmt: skip
        else:
            TOTAL: tl.constexpr = _num_blocks(K, FORMAT, GROUP)
            chunk = w_ptr + (tl.cast(tile, tl.int64) * TOTAL + block) * WORDS + tl.arange(0, 32)[None, :] * 4
            sums, x, _ = _add_chunk(
                sums, x, chunk, block, x_ptr, chunk_round, next_round, B, K, W, STEPS, FORMAT, GROUP
            )
        count += 1
    results = ()
    for half in tl.static_range(HALVES):
        own = k_block_words(sums, half, 4 if GROUP else 8)
        if GROUP == 0:
            first, second = scale_of(scales[0], FORMAT), scale_of(scales[1], FORMAT)
            own = (
                (own[0] + own[4]) * first, (own[1] + own[5]) * first,
                (own[2] + own[6]) * second, (own[3] + own[7]) * second,
            )  # fmt: skip
        results = results + reduce_warps(own, squares, half, eps, K)
    return results, (buffers, count) + next_scales  # noqa: RUF005
