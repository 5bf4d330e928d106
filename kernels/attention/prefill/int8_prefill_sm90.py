"""INT8 prefill attention on Hopper, exact softmax: a warp-specialised kernel with one producer and two consumers.

The producer is one warp; it loads tiles of 128 tokens. Each consumer is one warp group (four warps), called a *half*.
It computes 64 of the program's 128 queries. Both halves read the same tiles. int8_prefill.py gives the equations, and
has the kernel for other cases. The overlap is that of FlashAttention-3 (Shah et al., 2024):

- A half issues the scores of a tile, then `P V` of the previous tile.
- While the tensor cores compute `P V`, the half computes the softmax of the new scores.
- Whenever one half leaves the tensor cores idle, the other half uses them.

The instructions of a half, not the tensor cores, limit the speed. Therefore a half keeps the row maximum of earlier
tiles, and neither searches for the maximum of a tile nor rescales, as long as fp16 can hold the weights
(`_attend_tiles`). A vote of the half's threads checks that. The vote also keeps the exponentials before the wait for
`P V`: without it, ptxas would move them behind the wait, and PTX has nothing else to prevent that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from alspec.kernels.kv_codec.flashq.record import TOKENS, largest

__all__ = [
    "HALF_ROWS",
    "MAGIC",
    "MAGIC_BITS",
    "P_SHIFT",
    "Q_MAX",
    "REGISTERS",
    "STAGES",
    "TILE",
    "TINY",
    "prefill_sm90_kernel",
]

TILE = 128  # tokens per tile: two blocks, each with a scale
STAGES = 3  # tiles of K, and of V, in flight
HALF_ROWS = 64  # queries per half, one of the two consumer warp groups
REGISTERS = 168  # per thread on average: 240 in the halves, 24 in the producer

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6
ROWS = gl.constexpr(HALF_ROWS)
Q_MAX = gl.constexpr(127.0)
# x + MAGIC has x, rounded to an integer below 2^22, in its low bits. One addition rounds, or converts int to fp32.
MAGIC = gl.constexpr(1.5 * 2.0**23)
MAGIC_BITS = gl.constexpr(0x4B400000)
# $0 = 2^(n $2 + $3) for an integer n in $1: see `_weights`.
WEIGHT = gl.constexpr(
    f"{{ .reg .b32 x; add.s32 x, $1, {MAGIC_BITS.value}; fma.rn.f32 x, x, $2, $3; ex2.approx.ftz.f32 $0, x; }}"
)
# P is multiplied by 2^10, so that fp16 reaches down to 2^-34 of a row's largest weight.
P_SHIFT = gl.constexpr(10.0)
TINY = gl.constexpr(1e-37)  # smallest scale: with 0, a masked score would be 0 * inf
MASKED_SCORE = gl.constexpr(-(2**22))  # below every INT8 score, and still valid with MAGIC


@gluon.jit
def _scales(k_scale_ptr, tile, num_blocks, layout: gl.constexpr):
    """Load the scales of a tile's two blocks, [2] fp32; 1 past the last block, where all tokens are masked."""
    block = 2 * tile + gl.arange(0, 2, layout=layout)
    return gl.load(k_scale_ptr + block, mask=block < num_blocks, other=1.0)


@gluon.jit
def _pack(p):
    """fp32 [rows, tile] -> int32 [rows, tile / 2] of two fp16. A loop that carries fp16 would repack it every time."""
    rows: gl.constexpr = p.shape[0]
    pairs: gl.constexpr = p.shape[1] // 2
    low, high = gl.split(p.reshape([rows, pairs, 2]))
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)


@gluon.jit
def _unpack(packed, layout: gl.constexpr):
    """int32 [rows, tile / 2] -> fp16 [rows, tile]: the same registers as the left operand of `P V`."""
    rows: gl.constexpr = packed.shape[0]
    tile: gl.constexpr = packed.shape[1] * 2
    low = packed.to(gl.int16).to(gl.float16, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([rows, tile]), layout, assert_trivial=True)


@gluon.jit
def _weights(s, scale, row_max):
    """Compute P = 2^(n scale - m + 10) of integer scores n; fp32 [rows, blocks, 64].

    s: [rows, blocks, 64] int32, n.  scale: [rows, blocks].  row_max: [rows], m.

    Inline assembly interleaves the FMAs with the exponentials. Otherwise all FMAs come first, then all exponentials,
    of which the hardware issues one per warp in 8 cycles.
    """
    shift = gl.convert_layout(row_max - P_SHIFT, gl.SliceLayout(1, scale.type.layout), assert_trivial=True)
    offset = -(scale * MAGIC + shift[:, None])
    operands = [s, gl.broadcast(scale[:, :, None], s)[0], gl.broadcast(offset[:, :, None], s)[0]]
    return gl.inline_asm_elementwise(WEIGHT, "=r,r,r,r", operands, gl.float32, True, 1)


@gluon.jit
def _partial_sums(p, row_sum):
    """Return P as [rows, tile], and its sums over every 8th token, [rows, 8]: each thread sums its own weights.

    p: [rows, blocks, 64].  row_sum: [rows, 8], only its layout is used. The 8 sums are added up after the last tile.
    """
    rows: gl.constexpr = p.shape[0]
    tile: gl.constexpr = p.shape[1] * p.shape[2]
    p = p.reshape([rows, tile])
    return p, gl.convert_layout(gl.sum(p.reshape([rows, tile // 8, 8]), 1), row_sum.type.layout, assert_trivial=True)


@gluon.jit
def _score_scale(s, k_scale, q_scale):
    """Return q_scale [rows] times k_scale [blocks], as [rows, blocks] in the layout of s [rows, blocks, 64]."""
    row_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout))
    return gl.convert_layout(q_scale, row_layout, assert_trivial=True)[:, None] * k_scale[None, :]


@gluon.jit
def _magic_float(s):
    """Convert int32 scores to fp32 MAGIC + s."""
    return (s + MAGIC_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def _split_blocks(s):
    return s.reshape([s.shape[0], s.shape[1] // TOKENS, TOKENS])


@gluon.jit
def _softmax(s, k_scale, q_scale, row_max, row_sum, positions, start, MASKED: gl.constexpr):
    """Online softmax of one tile, whose tokens begin at `start`, with its true maximum.

        x = s s_Q s_K,   m' = max(m, max x),   P = 2^(x - m' + 10),   alpha = 2^(m - m'),   sum' = sum alpha + P

    s: [rows, tile] int32.  k_scale: [2].  q_scale, row_max (m), positions: [rows].  row_sum (sum): [rows, 8].
    Returns P [rows, tile] fp32, m', sum', alpha.
    """
    row_layout: gl.constexpr = row_max.type.layout
    sum_layout: gl.constexpr = row_sum.type.layout
    if MASKED:
        tokens = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        last = gl.convert_layout(positions, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
        visible = tokens[None, :] <= last[:, None]
        s = gl.where(visible, s, MASKED_SCORE)
        visible = _split_blocks(visible)
    s = _split_blocks(s)
    scale = _score_scale(s, k_scale, q_scale)
    if MASKED:
        scale = gl.where(scale < TINY, TINY, scale)  # not `maximum`, which would drop NaN
    # Maximum of integers: the hardware compares three of them at once.
    block_max = _magic_float(gl.max(s, 2))
    if MASKED:
        block_max = gl.where(block_max > MAGIC + MASKED_SCORE, block_max, float("-inf"))
    new_max = gl.convert_layout(gl.max(block_max * scale - scale * MAGIC, 1), row_layout, assert_trivial=True)
    new_max = gl.maximum(row_max, new_max)
    p = _weights(s, scale, new_max)
    if MASKED:
        p = gl.where(visible, p, 0.0)
    p, sums = _partial_sums(p, row_sum)
    alpha = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, sum_layout), assert_trivial=True)[:, None] + sums
    return p, new_max, row_sum, alpha


@gluon.constexpr_function
def _declare_vote_asm(half):
    """Assembly that declares the vote register of a half; once per kernel, as ptxas rejects a second declaration."""
    return f".reg .u32 grown_{half}; mov.u32 $0, $1;"


@gluon.constexpr_function
def _vote_asm(half):
    """Assembly of a half's vote, a barrier: is a sum $4 to $7 above 2^15? As inputs, the sums must come before it."""
    number = 10 + 2 * half  # Triton uses the barriers from 0 upwards
    return f"""
    {{
        .reg .pred above;  .reg .f32 most, other;
        max.f32 most, $4, $5;    max.f32 other, $6, $7;    max.f32 most, most, other;
        setp.gt.f32 above, most, 0f47000000;
        barrier.cta.red.or.pred above, {number}, 128, above;
        selp.u32 grown_{half}, 1, 0, above;
        mov.b32 $0, $4;    mov.b32 $1, $5;    mov.b32 $2, $6;    mov.b32 $3, $7;
    }}
    """


@gluon.constexpr_function
def _read_vote_asm(half):
    """Assembly that reads a half's vote as a scalar for a branch; assembly on a tensor cannot return a scalar."""
    return f"mov.u32 $0, grown_{half};"


@gluon.jit
def _vote(sums, scalar, half: gl.constexpr):
    """Wait for all threads of the half; return `sums`, [rows, 8], of a tile's weights, and whether one exceeds 2^15.

    scalar: any int32 scalar; it makes the read of the vote a scalar operation.

    If no sum exceeds 2^15, fp16 can hold every weight. With the true maximum, the 16 weights of a thread sum to at
    most 2^14.
    """
    sums = gl.inline_asm_elementwise(_vote_asm(half), "=&r,=&r,=&r,=&r,r,r,r,r", [sums], gl.float32, False, 4)
    return sums, gl.inline_asm_elementwise(_read_vote_asm(half), "=r,r", [scalar], gl.int32, False, 1) != 0


@gluon.jit
def _rescale(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _attend_tiles(
    half: gl.constexpr, first, last, begin, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks, k_tiles, v_tiles,
    ready, empty, p, row_max, row_sum, acc, MASKED: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Process tiles [first, last), first >= 1. p: packed P of the previous tile. begin: pipeline iteration of tile 0.

    Without `MASKED`, weights use the row maximum m of earlier tiles, and nothing is rescaled. A smaller m gives the
    same result as long as fp16 can hold the weights. If it cannot, m and the weights are computed again.
    """
    rows: gl.constexpr = q8.shape[0]
    tile_tokens: gl.constexpr = k_tiles.shape[1]
    stages: gl.constexpr = k_tiles.shape[0]
    scale_layout: gl.constexpr = k_scale.type.layout
    s_init = gl.zeros([rows, tile_tokens], gl.int32, s_layout)
    for tile in range(first, last):
        next_scale = _scales(k_scale_ptr, tile + 1, num_blocks, scale_layout)
        stage, previous = (begin + tile) % stages, (begin + tile - 1) % stages
        start = tile * tile_tokens
        mbarrier.wait(ready.index(stage), ((begin + tile) // stages) & 1)
        s = warpgroup_mma(q8, k_tiles.index(stage).permute((1, 0)), s_init, use_acc=False, is_async=True)
        acc = warpgroup_mma(_unpack(p, p_layout), v_tiles.index(previous), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # `P V` continues and reads P until the wait for it
        if MASKED:
            next_p, row_max, row_sum, alpha = _softmax(s, k_scale, q_scale, row_max, row_sum, positions, start, True)
            acc, _ = warpgroup_mma_wait(0, [acc, p])
            acc = _rescale(acc, alpha)
        else:
            blocks = _split_blocks(s)
            weights = _weights(blocks, _score_scale(blocks, k_scale, q_scale), row_max)
            next_p, sums = _partial_sums(weights, row_sum)
            sums, overflow = _vote(sums, tile, half)
            acc, _ = warpgroup_mma_wait(0, [acc, p])
            if overflow:
                s = warpgroup_mma(q8, k_tiles.index(stage).permute((1, 0)), s_init, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                next_p, row_max, row_sum, alpha = _softmax(
                    s, k_scale, q_scale, row_max, row_sum, positions, start, False
                )
                acc = _rescale(acc, alpha)
            else:
                row_sum += sums
        mbarrier.arrive(empty.index(stage), count=1)
        p, k_scale = _pack(next_p), next_scale
    return p, k_scale, row_max, row_sum, acc


@gluon.jit
def _dealt_index(program, programs, item):
    return gl.where(item % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _num_items(program, programs, blocks):
    """Return the number of work items of a program. A work item is one block of 128 queries of one head.

    The list of all items is sorted, longest first, and dealt to the programs in rounds of one item each. Every second
    round is dealt backwards. So the work of two rounds is equal for all programs, to about one tile.
    """
    rounds = blocks // programs
    return rounds + (_dealt_index(program, programs, rounds) < blocks % programs).to(gl.int32)


@gluon.jit
def _locate_item(work, sizes, item, tile_tokens: gl.constexpr):
    """Return head, position of the first query, and number of tiles of the program's work item number `item`."""
    program, programs, _ = work
    num_qo_heads, num_queries, num_tokens = sizes[0], sizes[1], sizes[2]
    index = item * programs + _dealt_index(program, programs, item)
    first_query = (gl.cdiv(num_queries, 2 * ROWS) - 1 - index // num_qo_heads) * (2 * ROWS)
    first_position = num_tokens - num_queries + first_query
    tiles = gl.cdiv(gl.minimum(first_position + 2 * ROWS, num_tokens), tile_tokens)
    return index % num_qo_heads, first_position, tiles


@gluon.jit
def _attend_block(
    half: gl.constexpr, head, first_position, tiles, begin, sizes, pointers, shared, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """Process a half's 64 queries of one item, in tiles + 1 iterations. begin: pipeline iteration of tile 0."""
    num_qo_heads, num_queries, num_tokens, heads_per_kv, num_blocks = sizes
    first_query = first_position - (num_tokens - num_queries)
    q_ptr, v_max_scale_ptr, k_scale_ptr, out_ptr, lse_ptr, qk_scale = pointers
    q_halves, k_tiles, v_tiles, ready, empty = shared
    q8 = q_halves.index(half)
    rows: gl.constexpr = q8.shape[0]
    dim: gl.constexpr = q8.shape[1]
    tile_tokens: gl.constexpr = k_tiles.shape[1]
    stages: gl.constexpr = k_tiles.shape[0]
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    s_init = gl.zeros([rows, tile_tokens], gl.int32, s_layout)
    blocks_layout: gl.constexpr = s_init.reshape([rows, tile_tokens // TOKENS, TOKENS]).type.layout
    scale_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, blocks_layout))

    queries = first_query + half * rows + gl.arange(0, rows, layout=gl.SliceLayout(1, q_layout))
    offsets = (queries.to(gl.int64) * num_qo_heads + head)[:, None] * dim
    offsets += gl.arange(0, dim, layout=gl.SliceLayout(0, q_layout))[None, :]
    q = gl.load(q_ptr + offsets, mask=(queries < num_queries)[:, None], other=0.0).to(gl.float32)
    q8_scale = largest(q, 1) / Q_MAX
    inverse = gl.where(q8_scale > TINY, 1.0 / gl.maximum(q8_scale, TINY), 0.0)
    _barrier()  # all warps have finished with q8 of the previous item
    q8.store((q * inverse[:, None] + MAGIC - MAGIC).to(gl.int8))
    fence_async_shared()
    _barrier()
    q_scale = gl.convert_layout(q8_scale * qk_scale, row_layout)
    positions = first_position + half * rows + gl.arange(0, rows, layout=row_layout)

    row_max = gl.full([rows], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([rows, 8], gl.float32, sum_layout)
    acc = gl.zeros([rows, dim], gl.float32, o_layout)
    kv_head = head // heads_per_kv
    k_scale_ptr += kv_head * num_blocks
    k_scale = _scales(k_scale_ptr, 0, num_blocks, scale_layout)
    mbarrier.wait(ready.index(begin % stages), (begin // stages) & 1)
    s = warpgroup_mma(q8, k_tiles.index(begin % stages).permute((1, 0)), s_init, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(empty.index(begin % stages), count=1)
    p, row_max, row_sum, _ = _softmax(s, k_scale, q_scale, row_max, row_sum, positions, 0, True)
    p = _pack(p)
    k_scale = _scales(k_scale_ptr, 1, num_blocks, scale_layout)
    full_tiles = (first_position + 1) // tile_tokens  # tiles that need no mask in any row
    p, k_scale, row_max, row_sum, acc = _attend_tiles(
        half, 1, full_tiles, begin, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks, k_tiles, v_tiles, ready,
        empty, p, row_max, row_sum, acc, False, s_layout, p_layout,
    )  # fmt: skip
    p, k_scale, row_max, row_sum, acc = _attend_tiles(
        half, gl.maximum(full_tiles, 1), tiles, begin, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks,
        k_tiles, v_tiles, ready, empty, p, row_max, row_sum, acc, True, s_layout, p_layout,
    )  # fmt: skip
    last = begin + tiles
    mbarrier.wait(ready.index(last % stages), (last // stages) & 1)
    acc = warpgroup_mma(_unpack(p, p_layout), v_tiles.index((last - 1) % stages), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(last % stages), count=1)

    total = gl.convert_layout(gl.sum(row_sum, 1), row_layout, assert_trivial=True)
    acc = acc * (gl.load(v_max_scale_ptr + kv_head) / total)[:, None]
    queries = first_query + half * rows + gl.arange(0, rows, layout=row_layout)
    row = queries.to(gl.int64) * num_qo_heads + head
    offsets = row[:, None] * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, o_layout))[None, :]
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(queries < num_queries)[:, None])
    gl.store(lse_ptr + row, row_max - P_SHIFT + gl.log2(total), mask=queries < num_queries)


@gluon.jit
def _attend(half: gl.constexpr, work, sizes, pointers, shared):
    """Main loop of a half, 0 or 1."""
    gl.inline_asm_elementwise(_declare_vote_asm(half), "=r,r", [work[0]], gl.int32, False, 1)
    tile_tokens: gl.constexpr = shared[1].shape[1]
    dim: gl.constexpr = shared[1].shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_tokens, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    begin = 0
    for item in range(_num_items(*work)):
        head, first_position, tiles = _locate_item(work, sizes, item, tile_tokens)
        _attend_block(half, head, first_position, tiles, begin, sizes, pointers, shared, s_layout, o_layout)
        begin += tiles + 1


@gluon.jit
def _attend_first(work, sizes, pointers, shared, descriptors):
    _attend(0, work, sizes, pointers, shared)


@gluon.jit
def _attend_second(work, sizes, pointers, shared, descriptors):
    _attend(1, work, sizes, pointers, shared)


@gluon.jit
def _load_tiles(work, sizes, pointers, shared, descriptors):
    """Main loop of the producer: keep all stages full, also from one item to the next.

    Iteration j of an item loads K of tile j and V of tile j - 1, because the halves use and release them together.
    """
    num_tokens, heads_per_kv = sizes[2], sizes[3]
    _, k_tiles, v_tiles, ready, empty = shared
    k_desc, v_desc, k_stride = descriptors
    stages: gl.constexpr = k_tiles.shape[0]
    tile_tokens: gl.constexpr = k_tiles.shape[1]
    k_bytes: gl.constexpr = k_desc.block_type.nbytes
    v_bytes: gl.constexpr = v_desc.block_type.nbytes
    begin = 0
    for item in range(_num_items(*work)):
        head, _position, tiles = _locate_item(work, sizes, item, tile_tokens)
        k_row, v_row = head // heads_per_kv * k_stride, head // heads_per_kv * num_tokens
        for j in range(tiles + 1):
            stage, previous = (begin + j) % stages, (begin + j + stages - 1) % stages
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), (((begin + j) // stages) & 1) ^ 1)
            has_k, has_v = j < tiles, j > 0
            mbarrier.expect(bar, k_bytes, pred=j == 0)
            mbarrier.expect(bar, k_bytes + v_bytes, pred=has_k & has_v)
            mbarrier.expect(bar, v_bytes, pred=j == tiles)
            token = j * tile_tokens
            tma.async_copy_global_to_shared(k_desc, [k_row + token, 0], bar, k_tiles.index(stage), pred=has_k)
            token -= tile_tokens
            tma.async_copy_global_to_shared(v_desc, [v_row + token, 0], bar, v_tiles.index(previous), pred=has_v)
        begin += tiles + 1


# Not specialised: a size of 1 would become a constant, and `gl.warp_specialize` cannot pass constants.
@gluon.jit(do_not_specialize=["num_queries", "num_tokens", "num_blocks", "k_stride"])
def prefill_sm90_kernel(
    q_ptr, k_desc, v_desc, v_max_scale_ptr, k_scale_ptr, out_ptr, lse_ptr, num_queries, num_tokens, num_blocks,
    k_stride, qk_scale, HQ: gl.constexpr, HEADS_PER_KV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 128 queries of one head per work item. Any grid: programs share ceil(n_q / 128) * Hq items.

    Launched with 4 warps, which are the first half; 5 more warps are the second half and the producer. Arguments as in
    `_prefill_kernel` of int8_prefill.py, except for the layouts of the descriptors.
    """
    tile_tokens: gl.constexpr = k_desc.block_type.shape[0]
    program = gl.program_id(0)
    work = (program, gl.num_programs(0), gl.cdiv(num_queries, 2 * ROWS) * HQ)
    # `gl.warp_specialize` cannot pass constants.
    heads, heads_per_kv = HQ + 0 * program, HEADS_PER_KV + 0 * program
    sizes = (heads, num_queries, num_tokens, heads_per_kv, num_blocks)
    q_halves = gl.allocate_shared_memory(gl.int8, [2, ROWS, D], k_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, tile_tokens, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, tile_tokens, D], v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # one arrival from each half
    fence_async_shared()
    pointers = (q_ptr, v_max_scale_ptr, k_scale_ptr, out_ptr, lse_ptr, qk_scale)
    shared = (q_halves, k_tiles, v_tiles, ready, empty)
    arguments = (work, sizes, pointers, shared, (k_desc, v_desc, k_stride))
    gl.warp_specialize(
        [(_attend_first, arguments), (_attend_second, arguments), (_load_tiles, arguments)], [4, 1], [240, 24]
    )
