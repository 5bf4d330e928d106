"""Device code of lean decode attention: streaming, where partials lie (see lean_decode.py for the method).

The words used here (output, guess, rest, run, turn, slot) are those of tile_schedule.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.combine import await_partials, combine_output, send_spec, store_partial
from alspec.kernels.attention.decode.tile_schedule import (
    REST,
    build_schedule,
    deal,
    give_head_start,
    head_of,
    lengths_of,
    locate,
    rest_of,
    run_of,
    spec_tile,
    start_after,
    tiles_of,
    tokens_of_spec_part,
)
from alspec.kernels.common.device import inverse_of_sum, log2_of_sum
from alspec.kernels.common.pdl import prefetch

__all__ = ["lean_decode_kernel", "lean_combine_kernel"]


@triton.jit
def _no_tokens(BLOCK_N: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """The online softmax of no tokens: maximum [ROWS], sums of each place in a tile [BLOCK_N, ROWS], o [D, ROWS]."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([BLOCK_N, ROWS], tl.float32), tl.zeros([D, ROWS], tl.float32)


@triton.jit
def _largest_of_tile(s, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Maximum over the tokens of s [BLOCK_N, ROWS].

    `tl.max` goes through shared memory twice. This goes once: each of the 4 warps has 16 of every 64 tokens; `tl.split`
    hands the 4 warps' values to every thread. Not with tiles of 64 tokens: on Blackwell it spills registers.
    """
    if BLOCK_N % 128 == 0:
        warp_max = tl.max(tl.max(tl.reshape(s, [BLOCK_N // 64, 4, 16, ROWS]), 0), 1)
        a, b = tl.split(tl.reshape(tl.trans(warp_max), [ROWS, 2, 2]))
        a, b = tl.split(tl.maximum(a, b))
        largest = tl.maximum(a, b)
    else:
        largest = tl.max(s, 0)
    return largest


@triton.jit
def _real(x, N: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr):
    """The first REAL columns of x [N, ROWS]: all of them, or half; they stay in the same registers."""
    if REAL < ROWS:
        x, _ = tl.split(tl.permute(tl.reshape(x, [N, 2, REAL]), (0, 2, 1)))
    return x


@triton.jit
def _padded(x, N: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr):
    """x [N, REAL] with columns of zeros behind, ROWS in all."""
    if REAL < ROWS:
        x = tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), [N, ROWS])
    return x


@triton.jit
def _normalise(row_max, row_sum, acc):
    """The end of an online softmax: o [D, ROWS] and lse [ROWS], base 2."""
    # Only here: a sum in every tile would have another layout than the maximum, and that would go through shared memory
    # twice a tile.
    row_sum = tl.sum(row_sum, 0)
    return acc * inverse_of_sum(row_sum)[None, :], row_max + log2_of_sum(row_sum)


@triton.jit
def _attend_run(
    q_ptr,
    k_ptr,
    v_ptr,
    output,  # of the first tile
    begin,  # first tokens [begin, end) of that output
    end,
    begin2,  # then tokens [begin2, end2): of the same output if `is_spec`, else of each output that follows
    end2,
    is_spec,
    tile,  # the first, in the row of all rests
    count,  # tiles
    seq_lens,
    rest_end,
    o_ptr,  # partials
    lse_ptr,
    capacity,
    chunk_size,
    qk_scale,
    program,
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Online softmax over `count` tiles in one loop, whose loads run ahead from one output into the next.

    Products are transposed: their rows are tokens, then channels, because a Hopper matrix instruction has 64 rows; the
    few query heads, padded to 16, are the columns.

    Returns:
        o [D, ROWS], normalised, lse [ROWS], base 2, and slot of the last output. Partials of those before are stored.
    """
    REAL: tl.constexpr = 8 if HEADS_PER_KV <= 8 and ROWS == 16 else ROWS
    channels = tl.arange(0, D)
    offsets = tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    q_at = rows[:, None] * HEAD_DIM + channels[None, :]
    exists = (rows < HEADS_PER_KV)[:, None] & (channels < HEAD_DIM)[None, :]
    row_max, row_sum, acc = _no_tokens(BLOCK_N, REAL, D)
    slot, token, limit = program + output, begin - BLOCK_N, end + 0
    for i in tl.range(0, count, num_stages=STAGES):
        # Which tokens: carried on from the tile before, because computing them from the tile's number takes a division.
        token += BLOCK_N
        if B_PAD == 1:
            crosses = token >= limit
            token = tl.where(crosses, begin2, token)
            limit = tl.where(crosses, end2, limit)
            output += (crosses & (not is_spec)).to(tl.int32)
        else:
            if token >= limit:
                token, limit = begin2 + 0, end2 + 0
                if not is_spec:
                    request, before = locate(tile + i, rest_end)
                    token, limit, _, rest = rest_of(request, seq_lens, chunk_size, False, B_PAD, BLOCK_N, SPEC)
                    output = request * HKV + (tile + i - before) // tl.maximum(rest, 1)
        left = limit - token
        # Loaded with every tile, so that the wait for q and that for the first tile are one.
        q = tl.load(q_ptr + output * (HEADS_PER_KV * HEAD_DIM) + q_at, mask=exists, other=0.0)
        # Past the end the last token is read again: cheaper than a mask, and NaN of unused memory stays out.
        tokens = tl.minimum(offsets, left - 1).to(tl.int64)[:, None] * HEAD_DIM
        base = output.to(tl.int64) * (capacity * HEAD_DIM) + token * HEAD_DIM
        k_at = (k_ptr + base + channels)[None, :] + tokens
        v_at = (v_ptr + base + channels)[None, :] + tokens
        if D == HEAD_DIM:
            k = tl.load(k_at, eviction_policy="evict_first")
            v = tl.load(v_at, eviction_policy="evict_first")
        else:
            inside = (channels < HEAD_DIM)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=inside, other=0.0, eviction_policy="evict_first")
        if program + output != slot:
            o, lse = _normalise(row_max, row_sum, acc)
            store_partial(o, lse, o_ptr, lse_ptr, slot, tl.arange(0, REAL), channels, HEADS_PER_KV)
            row_max, row_sum, acc = _no_tokens(BLOCK_N, REAL, D)
            # Adds 0, which the compiler does not know: with constants alone it splits the branch, and spills registers
            # on Blackwell.
            row_sum += (slot >> 31).to(tl.float32)
        slot = program + output  # not `output` itself: the pipeliner gives up on a value that is used two tiles later
        s = _real(tl.dot(k, tl.trans(q), input_precision="ieee"), BLOCK_N, ROWS, REAL) * qk_scale
        s = tl.where((offsets < left)[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, _largest_of_tile(s, BLOCK_N, REAL))
        p = tl.exp2(s - new_max[None, :])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha[None, :] + p
        p, acc = _padded(p.to(v.dtype), BLOCK_N, ROWS, REAL), _padded(acc * alpha[None, :], D, ROWS, REAL)
        acc = _real(tl.dot(tl.trans(v), p, acc, input_precision="ieee"), D, ROWS, REAL)
        row_max = new_max
    o, lse = _normalise(row_max, row_sum, acc)
    return o, lse, slot


# One compiled kernel serves every capacity.
@triton.jit(do_not_specialize=["capacity", "num_requests"])
def lean_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, head_dim]
    k_ptr,  # [B, Hkv, capacity, head_dim]
    v_ptr,
    capacity,
    seq_lens_ptr,  # [B] int32
    # [B, Hkv * HEADS_PER_KV, head_dim], or [SPEC_PARTS, ...] words; may be the paired rank's mailbox
    spec_out_ptr,
    spec_lse_ptr,  # [SPEC_PARTS, B, Hkv * HEADS_PER_KV] words, or None where there is one part
    epoch_ptr,  # [1] int32, where A~ goes as words, or None
    # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV, D] fp32 partials: of runs, then of each head the parts of A~
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV] fp32
    gate_ptr,  # [1] int32 or None
    num_requests,
    chunk_size,
    qk_scale,
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,  # where runs have more tiles, they have twice as many tokens; 0: nowhere
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,  # 1 with a batch
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Partials, and with a guess `A~`; grid [PROGRAMS]."""
    AHEAD: tl.constexpr = EARLY and not SPEC and gate_ptr is None
    if PDL and not EARLY:
        start_after(False)
    seq_lens = lengths_of(seq_lens_ptr, num_requests, B_PAD)
    if PDL and EARLY:
        start_after(AHEAD)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return

    # 1. The schedule: every program computes all of it, from `seq_lens` alone.
    program = tl.program_id(0)
    requests = tl.arange(0, B_PAD)
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)  # here, so that it arrives together with seq_lens
    is_long, rest_tiles, total_rest, parts, leaders, lead_run, followers, run, longer = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
    )
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    num_spec = num_outputs * parts if SPEC and PHASE != REST else 0
    block_n = tl.where(is_long, 2 * BLOCK_N, BLOCK_N)
    rest_end = tl.cumsum(rest_tiles, 0)
    tile, last, guesses, turns = deal(
        program, num_spec, leaders, lead_run, followers, run, longer, PROGRAMS, SPEC, PHASE
    )
    # With two tile loops, what neither changes is not moved ahead of both: that would spill registers and delay the
    # first copy.
    for turn in tl.range(turns, disable_licm=LONG > 0):
        # 2. Which output and tokens this turn begins with.
        give_head_start(program, turn, num_spec, total_rest, is_long, BLOCK_N, HEAD_DIM, PROGRAMS, SPEC, PHASE, PDL)
        is_spec = turn < guesses
        guess = program + turn * PROGRAMS
        part = 0
        if SPEC_PARTS > 1:
            part = guess // HKV
        if B_PAD == 1:
            request, before = 0, 0
        else:
            request, before = locate(tile, rest_end)
            if SPEC:
                request = tl.where(is_spec, guess // HKV, request)
                before = tl.max(tl.where(requests < request, rest_end, 0), 0)
        sink_r, window_r, seq_len, rest_r = rest_of(request, seq_lens, chunk_size, is_long, B_PAD, BLOCK_N, SPEC)
        head = head_of(tile - before, rest_r, HKV) if HKV <= 32 else (tile - before) // tl.maximum(rest_r, 1)
        if SPEC:
            head = tl.where(is_spec, guess % HKV, head)
        output = request * HKV + head
        head_tile = before + head * rest_r
        begin, end, begin2, end2 = sink_r + (tile - head_tile) * block_n, window_r, sink_r, window_r
        count = last - tile
        if AHEAD:
            # While the kernel ahead ends. One tile only: more would arrive together, and so the first one late.
            ELEMENT: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
            size = tl.where(count > 0, tl.minimum(block_n, end - begin) * (HEAD_DIM * ELEMENT), 0)
            at = (output.to(tl.int64) * capacity + begin) * HEAD_DIM
            prefetch(k_ptr + at, size)
            prefetch(v_ptr + at, size)
            gdc_wait()
        has_long = is_long  # tiles in this turn
        if SPEC:
            SPEC_N: tl.constexpr = spec_tile(BLOCK_N, LONG)
            first, first_end, spec_tiles = tokens_of_spec_part(
                part, sink_r, window_r, seq_len, chunk_size, SPEC_N, SPEC_PARTS
            )
            if LONG > 0:
                has_long = (has_long | is_spec) if SPEC_N > BLOCK_N else (has_long & (turn >= guesses))
            begin, end = tl.where(is_spec, first, begin), tl.where(is_spec, first_end, end)
            begin2, end2 = tl.where(is_spec, window_r, begin2), tl.where(is_spec, seq_len, end2)
            count = tl.where(is_spec, spec_tiles, count)

        # 3. Stream the tiles. The partials of outputs that this run goes beyond are stored on the way.
        work = (
            q_ptr, k_ptr, v_ptr, output, begin, end, begin2, end2, is_spec, tile, count, seq_lens, rest_end,
            o_partial_ptr, lse_partial_ptr, capacity, chunk_size, qk_scale, program,
        )  # fmt: skip
        if LONG > 0 and has_long:
            o, lse, slot = _attend_run(*work, HKV, HEADS_PER_KV, ROWS, D, HEAD_DIM, B_PAD, 2 * BLOCK_N, STAGES, SPEC)
        else:
            o, lse, slot = _attend_run(*work, HKV, HEADS_PER_KV, ROWS, D, HEAD_DIM, B_PAD, BLOCK_N, STAGES, SPEC)

        if count > 0:
            # 4. Leave the partial of the last output; a guess also goes to its receiver.
            current, rows, channels = slot - program, tl.arange(0, o.shape[1]), tl.arange(0, D)
            if SPEC and PHASE != REST:
                if is_spec:
                    send_spec(
                        o, lse, current, part, parts, num_outputs * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch,
                        rows, channels, HEADS_PER_KV, HEAD_DIM, SPEC_PARTS,
                    )  # fmt: skip
                    slot = PROGRAMS + num_outputs + current * SPEC_PARTS + part
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, slot, rows, channels, HEADS_PER_KV)


@triton.jit(do_not_specialize=["num_requests"])
def lean_combine_kernel(
    seq_lens_ptr,  # [B] int32
    o_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV, D] fp32, as the attention has left them
    lse_partial_ptr,  # [G + (1 + SPEC_PARTS) B Hkv, HEADS_PER_KV] fp32
    out_ptr,  # [B, Hkv * HEADS_PER_KV, head_dim]
    lse_ptr,  # [B, Hkv * HEADS_PER_KV] fp32
    sums_ptr,  # [B, Hkv * HEADS_PER_KV * CHUNKS, 2] fp32: dist2, norm2; or None
    gate_ptr,  # [1] int32 or None
    num_requests,
    chunk_size,
    HKV: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of the attention
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LONG: tl.constexpr,
    SLICE: tl.constexpr,  # channels of a program, and
    SLICES: tl.constexpr,  # programs of a head
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    SPEC_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # of the attention before it
    PDL: tl.constexpr,
):
    """Merge what the attention has left; grid [B Hkv HEADS_PER_KV CHUNKS]."""
    if PDL:
        gdc_launch_dependents()
    row, chunk = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    output, head = row // HEADS_PER_KV, row % HEADS_PER_KV
    seq_lens = lengths_of(seq_lens_ptr, num_requests, B_PAD)
    _, rest_tiles, _, parts, leaders, lead_run, _, run, longer = build_schedule(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, SPEC_PARTS, PHASE
    )
    # The rest of an output is one range of tiles, and the runs that meet it use consecutive slots.
    first_tile, tiles = tiles_of(tl.arange(0, 1) + output, rest_tiles // HKV, HKV, B_PAD)
    first_tile, tiles = tl.sum(first_tile, 0), tl.sum(tiles, 0)
    first_run = run_of(first_tile, leaders, lead_run, run, longer)
    last_run = run_of(first_tile + tiles - 1, leaders, lead_run, run, longer)
    slot, runs = first_run + output, tl.where(tiles > 0, last_run - first_run + 1, 0)
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    if PDL:
        slot, runs = await_partials(slot, runs)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return
    combine_output(
        o_partial_ptr, lse_partial_ptr, slot, runs, PROGRAMS + num_outputs + output * SPEC_PARTS, parts,
        row, head, chunk, out_ptr, lse_ptr, sums_ptr, HEADS_PER_KV, D, HEAD_DIM, SLICE, SLICES, ROUND, SPEC,
        SPEC_PARTS,
    )  # fmt: skip
