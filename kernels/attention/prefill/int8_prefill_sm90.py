"""The INT8 prefill kernel of Hopper, with exact exponentials: one warp loads, two halves of 64 queries each compute.

A half is one warp group, of four warps. Both read the same tiles of 128 tokens. A half asks for the scores of a tile
and, behind them, for `P V` of the tile before; while the matrix unit computes the latter, the half takes the softmax of
the former. The time that one half leaves of the matrix unit goes to the other. The method is in int8_prefill.py, whose
kernel does the same elsewhere; the schedule is FlashAttention-3's (Shah et al., 2024).

A tile of 64 queries and 128 tokens (D 128) takes 256 cycles for q8 k8^T and 512 for P V of the matrix unit, which both
halves share, and for each half 528 of exponentials. Waits for the matrix unit are 4 % of a tile's time; the rest are a
half's own instructions. So the largest score of a tile is not looked for, and nothing is rescaled, as long as the
maximum of the tiles before will do (`_attend_tiles`): 390 instead of 530 instructions. Nothing in PTX keeps the
exponentials ahead of the wait for the product, and ptxas would put them behind it: the vote in between prevents that.
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

TILE = 128  # tokens, two blocks with a scale each
STAGES = 3  # tiles of K, and of V, in flight
HALF_ROWS = 64  # queries of a half: of one of the two warp groups that compute
REGISTERS = 168  # a thread in the mean: 240 where it computes, 24 where it loads

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6
ROWS = gl.constexpr(HALF_ROWS)
Q_MAX = gl.constexpr(127.0)
# fp32 holds an integer below 2^22 in its low bits once this is added: rounding, and int to float, in a cheap addition.
MAGIC = gl.constexpr(1.5 * 2.0**23)
MAGIC_BITS = gl.constexpr(0x4B400000)
# 2^(n $2 + $3) of an integer n: see `_weights`.
WEIGHT = gl.constexpr(
    f"{{ .reg .b32 x; add.s32 x, $1, {MAGIC_BITS.value}; fma.rn.f32 x, x, $2, $3; ex2.approx.ftz.f32 $0, x; }}"
)
# P is held times 2^10, so that fp16 goes down to 2^-34 of a row's largest weight.
P_SHIFT = gl.constexpr(10.0)
TINY = gl.constexpr(1e-37)  # a scale of 0 would make what is masked 0 * inf
HIDDEN = gl.constexpr(-(2**22))  # below every score of INT8, and MAGIC still takes it


@gluon.jit
def _scales(k_scale_ptr, tile, num_blocks, layout: gl.constexpr):
    """[2] fp32 of the blocks of a tile; past the last block nothing is visible, and any will do."""
    block = 2 * tile + gl.arange(0, 2, layout=layout)
    return gl.load(k_scale_ptr + block, mask=block < num_blocks, other=1.0)


@gluon.jit
def _pack(p):
    """fp32 [rows, tile] -> int32 [rows, tile / 2], two fp16 each: a loop that carries fp16 packs it again each time."""
    rows: gl.constexpr = p.shape[0]
    pairs: gl.constexpr = p.shape[1] // 2
    low, high = gl.split(p.reshape([rows, pairs, 2]))
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1)


@gluon.jit
def _unpack(packed, layout: gl.constexpr):
    """int32 [rows, tile / 2] -> fp16 [rows, tile], the same registers as an operand of the product with V."""
    rows: gl.constexpr = packed.shape[0]
    tile: gl.constexpr = packed.shape[1] * 2
    low = packed.to(gl.int16).to(gl.float16, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([rows, tile]), layout, assert_trivial=True)


@gluon.jit
def _weights(s, scale, row_max):
    """P = 2^(n scale - m + 10) of scores n, fp32 [rows, blocks, 64].

    s: [rows, blocks, 64] int32, n.  scale: [rows, blocks].  row_max: [rows], m.

    By assembly, element by element: else all sums come first and then all exponentials, of which the hardware takes
    one of a warp in 8 cycles.
    """
    shift = gl.convert_layout(row_max - P_SHIFT, gl.SliceLayout(1, scale.type.layout), assert_trivial=True)
    offset = -(scale * MAGIC + shift[:, None])
    operands = [s, gl.broadcast(scale[:, :, None], s)[0], gl.broadcast(offset[:, :, None], s)[0]]
    return gl.inline_asm_elementwise(WEIGHT, "=r,r,r,r", operands, gl.float32, True, 1)


@gluon.jit
def _sums_of(p, row_sum):
    """P as [rows, tile], and its sums [rows, 8] of every 8th token: those that one thread has.

    p: [rows, blocks, 64].  row_sum: as the sums, for their layout; sums of threads meet after the last tile.
    """
    rows: gl.constexpr = p.shape[0]
    tile: gl.constexpr = p.shape[1] * p.shape[2]
    p = p.reshape([rows, tile])
    return p, gl.convert_layout(gl.sum(p.reshape([rows, tile // 8, 8]), 1), row_sum.type.layout, assert_trivial=True)


@gluon.jit
def _scale_of(s, k_scale, q_scale):
    """Scale of scores, [rows, blocks].  s: [rows, blocks, 64].  k_scale: [blocks].  q_scale: [rows]."""
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, s.type.layout))
    return gl.convert_layout(q_scale, of_row, assert_trivial=True)[:, None] * k_scale[None, :]


@gluon.jit
def _as_floats(s):
    """Scores int32 as MAGIC + s, fp32."""
    return (s + MAGIC_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def _in_blocks(s):
    return s.reshape([s.shape[0], s.shape[1] // TOKENS, TOKENS])


@gluon.jit
def _softmax(s, k_scale, q_scale, row_max, row_sum, positions, start, MASKED: gl.constexpr):
    """One step of the online softmax over tokens from `start`.

        x = s s_Q s_K,   m' = max(m, max x),   P = 2^(x - m' + 10),   alpha = 2^(m - m'),   sum' = sum alpha + P

    s: [rows, tile] int32.  k_scale: [2].  q_scale, row_max, positions: [rows].  row_sum: [rows, 8].
    Returns P [rows, tile] fp32, m', sum', alpha.
    """
    row_layout: gl.constexpr = row_max.type.layout
    sum_layout: gl.constexpr = row_sum.type.layout
    if MASKED:
        tokens = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        last = gl.convert_layout(positions, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
        visible = tokens[None, :] <= last[:, None]
        s = gl.where(visible, s, HIDDEN)
        visible = _in_blocks(visible)
    s = _in_blocks(s)
    scale = _scale_of(s, k_scale, q_scale)
    if MASKED:
        scale = gl.where(scale < TINY, TINY, scale)  # a maximum would leave NaN out
    # The largest among integers: of those the hardware compares three at once.
    top = _as_floats(gl.max(s, 2))
    if MASKED:
        top = gl.where(top > MAGIC + HIDDEN, top, float("-inf"))
    new_max = gl.convert_layout(gl.max(top * scale - scale * MAGIC, 1), row_layout, assert_trivial=True)
    new_max = gl.maximum(row_max, new_max)
    p = _weights(s, scale, new_max)
    if MASKED:
        p = gl.where(visible, p, 0.0)
    p, sums = _sums_of(p, row_sum)
    alpha = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, sum_layout), assert_trivial=True)[:, None] + sums
    return p, new_max, row_sum, alpha


@gluon.constexpr_function
def _declaration(half):
    """Assembly of the register that a half votes into: once in a kernel, the assembler refuses a second one."""
    return f".reg .u32 grown_{half}; mov.u32 $0, $1;"


@gluon.constexpr_function
def _vote_of(half):
    """Assembly of a half's barrier, behind sums $4 to $7 (ptxas has to have them before it): is one above 2^15?"""
    number = 10 + 2 * half  # Triton takes numbers from 0 up
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
def _result(half):
    """Assembly that reads a half's vote, as a scalar for a branch: assembly for a tensor cannot return one."""
    return f"mov.u32 $0, grown_{half};"


@gluon.jit
def _vote(sums, zero, half: gl.constexpr):
    """sums [rows, 8] of a tile's weights, once all threads of the half are here, and whether one of them is above 2^15.

    If none is, every weight fits fp16. With the true maximum, a thread's 16 weights sum to 2^14 at most.
    """
    sums = gl.inline_asm_elementwise(_vote_of(half), "=&r,=&r,=&r,=&r,r,r,r,r", [sums], gl.float32, False, 4)
    return sums, gl.inline_asm_elementwise(_result(half), "=r,r", [zero], gl.int32, False, 1) != 0


@gluon.jit
def _rescaled(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _attend_tiles(
    half: gl.constexpr, first, last, step, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks, k_tiles, v_tiles,
    ready, empty, p, row_max, row_sum, acc, MASKED: gl.constexpr, s_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Tiles [first, last), first at least 1; P, packed, comes in from the tile before. step: that of tile 0.

    Where every row sees every token, weights are relative to a maximum m of earlier tiles, and nothing is rescaled: one
    that is too small does as well while fp16 holds the weights. Where it does not, m and weights are found anew.
    """
    rows: gl.constexpr = q8.shape[0]
    tile_tokens: gl.constexpr = k_tiles.shape[1]
    stages: gl.constexpr = k_tiles.shape[0]
    scale_layout: gl.constexpr = k_scale.type.layout
    none = gl.zeros([rows, tile_tokens], gl.int32, s_layout)
    for tile in range(first, last):
        next_scale = _scales(k_scale_ptr, tile + 1, num_blocks, scale_layout)
        stage, before = (step + tile) % stages, (step + tile - 1) % stages
        start = tile * tile_tokens
        mbarrier.wait(ready.index(stage), ((step + tile) // stages) & 1)
        s = warpgroup_mma(q8, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        acc = warpgroup_mma(_unpack(p, p_layout), v_tiles.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # the product with V goes on, and reads P till it is waited for
        if MASKED:
            next_p, row_max, row_sum, alpha = _softmax(s, k_scale, q_scale, row_max, row_sum, positions, start, True)
            acc, _ = warpgroup_mma_wait(0, [acc, p])
            acc = _rescaled(acc, alpha)
        else:
            blocks = _in_blocks(s)
            weights = _weights(blocks, _scale_of(blocks, k_scale, q_scale), row_max)
            next_p, sums = _sums_of(weights, row_sum)
            sums, grown = _vote(sums, tile, half)
            acc, _ = warpgroup_mma_wait(0, [acc, p])
            if grown:
                s = warpgroup_mma(q8, k_tiles.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, [s])
                next_p, row_max, row_sum, alpha = _softmax(
                    s, k_scale, q_scale, row_max, row_sum, positions, start, False
                )
                acc = _rescaled(acc, alpha)
            else:
                row_sum += sums
        mbarrier.arrive(empty.index(stage), count=1)
        p, k_scale = _pack(next_p), next_scale
    return p, k_scale, row_max, row_sum, acc


@gluon.jit
def _place(program, programs, turn):
    return gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _turns(program, programs, blocks):
    """How many blocks of queries a program has: of one list of all, longest first, one of each `programs` in a row.

    In every other turn they are dealt backwards. So programs have equal work: of two turns nearly to a tile.
    """
    turns = blocks // programs
    return turns + (_place(program, programs, turns) < blocks % programs).to(gl.int32)


@gluon.jit
def _block(work, sizes, turn, tile_tokens: gl.constexpr):
    """What a program's turn is about: the block's head, the position of its first query, and the tiles it sees."""
    program, programs, _ = work
    num_qo_heads, num_queries, num_tokens = sizes[0], sizes[1], sizes[2]
    at = turn * programs + _place(program, programs, turn)
    first_query = (gl.cdiv(num_queries, 2 * ROWS) - 1 - at // num_qo_heads) * (2 * ROWS)
    first_position = num_tokens - num_queries + first_query
    tiles = gl.cdiv(gl.minimum(first_position + 2 * ROWS, num_tokens), tile_tokens)
    return at % num_qo_heads, first_position, tiles


@gluon.jit
def _attend_block(
    half: gl.constexpr, head, first_position, tiles, step, sizes, pointers, shared, s_layout: gl.constexpr,
    o_layout: gl.constexpr,
):  # fmt: skip
    """64 queries of one block; step: of its first tile. It takes a step more than it has tiles."""
    num_qo_heads, num_queries, num_tokens, heads_per_kv, num_blocks = sizes
    first_query = first_position - (num_tokens - num_queries)
    q_ptr, unit_ptr, k_scale_ptr, out_ptr, lse_ptr, qk_scale = pointers
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
    none = gl.zeros([rows, tile_tokens], gl.int32, s_layout)
    blocks_layout: gl.constexpr = none.reshape([rows, tile_tokens // TOKENS, TOKENS]).type.layout
    scale_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, blocks_layout))

    queries = first_query + half * rows + gl.arange(0, rows, layout=gl.SliceLayout(1, q_layout))
    at = (queries.to(gl.int64) * num_qo_heads + head)[:, None] * dim
    at += gl.arange(0, dim, layout=gl.SliceLayout(0, q_layout))[None, :]
    q = gl.load(q_ptr + at, mask=(queries < num_queries)[:, None], other=0.0).to(gl.float32)
    q_step = largest(q, 1) / Q_MAX
    inverse = gl.where(q_step > TINY, 1.0 / gl.maximum(q_step, TINY), 0.0)
    _barrier()  # all warps are done with q of the block before
    q8.store((q * inverse[:, None] + MAGIC - MAGIC).to(gl.int8))
    fence_async_shared()
    _barrier()
    q_scale = gl.convert_layout(q_step * qk_scale, row_layout)
    positions = first_position + half * rows + gl.arange(0, rows, layout=row_layout)

    row_max = gl.full([rows], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([rows, 8], gl.float32, sum_layout)
    acc = gl.zeros([rows, dim], gl.float32, o_layout)
    kv_head = head // heads_per_kv
    k_scale_ptr += kv_head * num_blocks
    k_scale = _scales(k_scale_ptr, 0, num_blocks, scale_layout)
    mbarrier.wait(ready.index(step % stages), (step // stages) & 1)
    s = warpgroup_mma(q8, k_tiles.index(step % stages).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(empty.index(step % stages), count=1)
    p, row_max, row_sum, _ = _softmax(s, k_scale, q_scale, row_max, row_sum, positions, 0, True)
    p = _pack(p)
    k_scale = _scales(k_scale_ptr, 1, num_blocks, scale_layout)
    full_tiles = (first_position + 1) // tile_tokens  # that all rows see whole
    p, k_scale, row_max, row_sum, acc = _attend_tiles(
        half, 1, full_tiles, step, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks, k_tiles, v_tiles, ready,
        empty, p, row_max, row_sum, acc, False, s_layout, p_layout,
    )  # fmt: skip
    p, k_scale, row_max, row_sum, acc = _attend_tiles(
        half, gl.maximum(full_tiles, 1), tiles, step, q8, q_scale, positions, k_scale, k_scale_ptr, num_blocks, k_tiles,
        v_tiles, ready, empty, p, row_max, row_sum, acc, True, s_layout, p_layout,
    )  # fmt: skip
    last = step + tiles
    mbarrier.wait(ready.index(last % stages), (last // stages) & 1)
    acc = warpgroup_mma(_unpack(p, p_layout), v_tiles.index((last - 1) % stages), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index(last % stages), count=1)

    total = gl.convert_layout(gl.sum(row_sum, 1), row_layout, assert_trivial=True)
    acc = acc * (gl.load(unit_ptr + kv_head) / total)[:, None]
    queries = first_query + half * rows + gl.arange(0, rows, layout=row_layout)
    row = queries.to(gl.int64) * num_qo_heads + head
    at = row[:, None] * dim + gl.arange(0, dim, layout=gl.SliceLayout(0, o_layout))[None, :]
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(queries < num_queries)[:, None])
    gl.store(lse_ptr + row, row_max - P_SHIFT + gl.log2(total), mask=queries < num_queries)


@gluon.jit
def _attend(half: gl.constexpr, work, sizes, pointers, shared):
    """What the warp group of a half, 0 or 1, does."""
    gl.inline_asm_elementwise(_declaration(half), "=r,r", [work[0]], gl.int32, False, 1)
    tile_tokens: gl.constexpr = shared[1].shape[1]
    dim: gl.constexpr = shared[1].shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_tokens, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    step = 0
    for turn in range(_turns(*work)):
        head, first_position, tiles = _block(work, sizes, turn, tile_tokens)
        _attend_block(half, head, first_position, tiles, step, sizes, pointers, shared, s_layout, o_layout)
        step += tiles + 1


@gluon.jit
def _attend_first(work, sizes, pointers, shared, descriptors):
    _attend(0, work, sizes, pointers, shared)


@gluon.jit
def _attend_second(work, sizes, pointers, shared, descriptors):
    _attend(1, work, sizes, pointers, shared)


@gluon.jit
def _load_tiles(work, sizes, pointers, shared, descriptors):
    """Keep the stages full, also from one block of queries to the next.

    Step j of a block brings K of tile j and V of tile j - 1: they are wanted, and done with, together.
    """
    num_tokens, heads_per_kv = sizes[2], sizes[3]
    _, k_tiles, v_tiles, ready, empty = shared
    k_desc, v_desc, k_stride = descriptors
    stages: gl.constexpr = k_tiles.shape[0]
    tile_tokens: gl.constexpr = k_tiles.shape[1]
    k_bytes: gl.constexpr = k_desc.block_type.nbytes
    v_bytes: gl.constexpr = v_desc.block_type.nbytes
    first = 0
    for turn in range(_turns(*work)):
        head, _position, tiles = _block(work, sizes, turn, tile_tokens)
        k_row, v_row = head // heads_per_kv * k_stride, head // heads_per_kv * num_tokens
        for j in range(tiles + 1):
            stage, before = (first + j) % stages, (first + j + stages - 1) % stages
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), (((first + j) // stages) & 1) ^ 1)
            has_k, has_v = j < tiles, j > 0
            mbarrier.expect(bar, k_bytes, pred=j == 0)
            mbarrier.expect(bar, k_bytes + v_bytes, pred=has_k & has_v)
            mbarrier.expect(bar, v_bytes, pred=j == tiles)
            token = j * tile_tokens
            tma.async_copy_global_to_shared(k_desc, [k_row + token, 0], bar, k_tiles.index(stage), pred=has_k)
            token -= tile_tokens
            tma.async_copy_global_to_shared(v_desc, [v_row + token, 0], bar, v_tiles.index(before), pred=has_v)
        first += tiles + 1


# Specialised, a size of 1 would be a constant, which cannot be passed to the functions of the halves.
@gluon.jit(do_not_specialize=["num_queries", "num_tokens", "num_blocks", "k_stride"])
def prefill_sm90_kernel(
    q_ptr, k_desc, v_desc, unit_ptr, k_scale_ptr, out_ptr, lse_ptr, num_queries, num_tokens, num_blocks, k_stride,
    qk_scale, HQ: gl.constexpr, HEADS_PER_KV: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Blocks of 128 queries of one head; any grid, which shares ceil(n_q / 128) * Hq of them; 4 warps, and 5 more.

    The arguments are those of `_prefill_kernel` in int8_prefill.py, but for the descriptors' layouts.
    """
    tile_tokens: gl.constexpr = k_desc.block_type.shape[0]
    program = gl.program_id(0)
    work = (program, gl.num_programs(0), gl.cdiv(num_queries, 2 * ROWS) * HQ)
    # Constants cannot be passed.
    heads, heads_per_kv = HQ + 0 * program, HEADS_PER_KV + 0 * program
    sizes = (heads, num_queries, num_tokens, heads_per_kv, num_blocks)
    q_halves = gl.allocate_shared_memory(gl.int8, [2, ROWS, D], k_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.int8, [STAGES, tile_tokens, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, tile_tokens, D], v_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # one arrival of each half
    fence_async_shared()
    pointers = (q_ptr, unit_ptr, k_scale_ptr, out_ptr, lse_ptr, qk_scale)
    shared = (q_halves, k_tiles, v_tiles, ready, empty)
    arguments = (work, sizes, pointers, shared, (k_desc, v_desc, k_stride))
    gl.warp_specialize(
        [(_attend_first, arguments), (_attend_second, arguments), (_load_tiles, arguments)], [4, 1], [240, 24]
    )
