"""Device code of lean decode attention: schedule, streaming, merging (see lean_attention.py for the method)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["lean_decode_kernel"]

# Which part of the work a launch does. In two launches, the first leaves `A~` and its partial for the second; a message
# to a paired rank whose memory cannot be addressed goes out between them.
ALL = tl.constexpr(0)
PREDICTOR = tl.constexpr(1)
REST = tl.constexpr(2)

WINDOW_ALIGN = tl.constexpr(64)  # the window is widened to whole tiles of this many tokens, whatever BLOCK_N is
GUESS_OVERHEAD = tl.constexpr(6)  # what waiting for a guess's tiles and sending it away costs, in streamed tiles
# One SM takes in 50 bytes a clock: beyond WIDE partials of an output (50 KB), groups of FAN are merged side by side.
WIDE = tl.constexpr(24)
FAN = tl.constexpr(8)


@triton.jit
def _token_ranges(seq_len, chunk_size, SPEC: tl.constexpr):
    """The guess is over tokens `[0, sink)` and `[window, seq_len)`; the rest lies between; without a guess, all."""
    if SPEC:
        sink = tl.minimum(chunk_size, seq_len)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_size, 0) // WINDOW_ALIGN * WINDOW_ALIGN)
    else:
        sink = tl.zeros_like(seq_len)
        window = seq_len
    return sink, window


@triton.jit
def _store_partial(o, lse, o_ptr, lse_ptr, slot, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr):
    """Write the `GROUP` real rows of a partial, o [D, ROWS], into its slot."""
    rows = tl.arange(0, ROWS)
    real = rows < GROUP
    tl.store(o_ptr + (slot * GROUP + rows)[None, :] * D + tl.arange(0, D)[:, None], o, mask=real[None, :])
    tl.store(lse_ptr + slot * GROUP + rows, lse, mask=real)


@triton.jit
def _no_tokens(BLOCK_N: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """The online softmax of nothing: maximum, sums of the places of a tile, o."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([BLOCK_N, ROWS], tl.float32), tl.zeros([D, ROWS], tl.float32)


@triton.jit
def _largest_of_tile(s, BLOCK_N: tl.constexpr, ROWS: tl.constexpr):
    """Maximum over the tokens of s [BLOCK_N, ROWS].

    `tl.max` goes through shared memory twice. This goes once: each of the 4 warps has 16 of every 64 tokens; `tl.split`
    hands the 4 warps' values to every thread. Not with the small tiles of Blackwell, where it spills registers.
    """
    if BLOCK_N % 128 == 0:
        of_warps = tl.max(tl.max(tl.reshape(s, [BLOCK_N // 64, 4, 16, ROWS]), 0), 1)
        a, b = tl.split(tl.reshape(tl.trans(of_warps), [ROWS, 2, 2]))
        a, b = tl.split(tl.maximum(a, b))
        largest = tl.maximum(a, b)
    else:
        largest = tl.max(s, 0)
    return largest


@triton.jit
def _normalise(row_max, row_sum, acc):
    """The end of an online softmax: o [D, ROWS] and lse [ROWS], base 2."""
    row_sum = tl.sum(row_sum, 0)
    return acc * (1.0 / row_sum)[None, :], row_max + tl.log2(row_sum)


@triton.jit
def _attend_run(
    q_ptr,
    k_ptr,
    v_ptr,
    output,  # (request, KV head) of the first tile
    begin,  # its tokens begin here and, tile by tile, go on to `end`
    end,
    begin2,  # then tokens [begin2, end2): of the same output if `is_guess`, else of each output that follows
    end2,
    is_guess,
    tile,  # of the flattened rest
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
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Online softmax over `count` tiles in one loop, whose loads run ahead from one output into the next.

    Products are transposed: the rows are tokens, then channels, for a Hopper matrix instruction has 64 of them; the few
    query heads, padded to 16, are its columns.

    Returns:
        o [D, ROWS], normalised, and lse [ROWS], base 2, of the last output. The partials of those before are stored.
    """
    channels = tl.arange(0, D)
    offsets = tl.arange(0, BLOCK_N)
    q_at, exists = _output_at(0, ROWS, GROUP, D, HEAD_DIM)
    row_max, row_sum, acc = _no_tokens(BLOCK_N, ROWS, D)
    slot, token, limit = program + output, begin - BLOCK_N, end + 0
    for i in tl.range(0, count, num_stages=STAGES):
        # Where the tile is: carried from the one before, not computed from its number, so that it costs no division.
        token += BLOCK_N
        if B_PAD == 1:
            crosses = token >= limit
            token = tl.where(crosses, begin2, token)
            limit = tl.where(crosses, end2, limit)
            output += (crosses & (not is_guess)).to(tl.int32)
        else:
            if token >= limit:
                token, limit = begin2 + 0, end2 + 0
                if not is_guess:
                    request, before = _locate(tile + i, rest_end)
                    token, limit, _, rest = _rest_of(request, seq_lens, chunk_size, B_PAD, BLOCK_N, SPEC)
                    output = request * HKV + (tile + i - before) // tl.maximum(rest, 1)
        left = limit - token
        # Loaded with every tile, so that q's latency is that of the first tile's, not before it.
        q = tl.load(q_ptr + output * (GROUP * HEAD_DIM) + q_at, mask=exists, other=0.0)
        # Past the end the last token is read again: cheaper than a mask, and what lies there, NaN perhaps, stays out.
        rows = tl.minimum(offsets, left - 1).to(tl.int64)[:, None] * HEAD_DIM
        base = output.to(tl.int64) * (capacity * HEAD_DIM) + token * HEAD_DIM
        k_at = (k_ptr + base + channels)[None, :] + rows
        v_at = (v_ptr + base + channels)[None, :] + rows
        if D == HEAD_DIM:
            k = tl.load(k_at, eviction_policy="evict_first")
            v = tl.load(v_at, eviction_policy="evict_first")
        else:
            inside = (channels < HEAD_DIM)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0, eviction_policy="evict_first")
            v = tl.load(v_at, mask=inside, other=0.0, eviction_policy="evict_first")
        if program + output != slot:
            o, lse = _normalise(row_max, row_sum, acc)
            _store_partial(o, lse, o_ptr, lse_ptr, slot, ROWS, GROUP, D)
            row_max, row_sum, acc = _no_tokens(BLOCK_N, ROWS, D)
            # A zero unknown to the compiler: with constants alone it splits the branch, and Blackwell spills registers.
            row_sum += (slot >> 31).to(tl.float32)
        slot = program + output  # not `output` itself: a value that comes two tiles later stops the pipeliner
        s = tl.dot(k, tl.trans(q), input_precision="ieee") * qk_scale
        s = tl.where((offsets < left)[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, _largest_of_tile(s, BLOCK_N, ROWS))
        p = tl.exp2(s - new_max[None, :])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha[None, :] + p
        acc = acc * alpha[None, :] + tl.dot(tl.trans(v), p.to(v.dtype), input_precision="ieee")
        row_max = new_max
    o, lse = _normalise(row_max, row_sum, acc)
    return o, lse, slot


@triton.jit
def _arrive(counter_ptr, contributors):
    """Take a ticket; whether all contributors have come. The last one puts the counter back to 0."""
    # The ticket is taken by one thread: all threads' stores must come before it, and their loads after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == contributors - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def _no_partial(GROUP_PAD: tl.constexpr, D: tl.constexpr):
    """What nothing merged looks like: maximum, sum, o."""
    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    return row_max, tl.zeros([GROUP_PAD], tl.float32), tl.zeros([GROUP_PAD, D], tl.float32)


@triton.jit
def _merge_partials(
    o_ptr,
    lse_ptr,
    slot,
    stride,
    count,
    row_max,  # [GROUP_PAD]: what is merged already, or -inf, 0, 0
    row_sum,
    acc,  # [GROUP_PAD, D]
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge `count` slots from `slot` on, `stride` apart, in this order.

        o = sum_s 2^(lse_s - m) o_s,   l = sum_s 2^(lse_s - m),   m = max_s lse_s

    The loads of `MERGE` slots are issued together: their latency, not the arithmetic, is what this costs.

    Returns:
        o [GROUP_PAD, D], normalised, and lse [GROUP_PAD].
    """
    rows = tl.arange(0, GROUP_PAD)
    real = rows < GROUP
    o_at = o_ptr + (slot * GROUP + rows[:, None]) * D + tl.arange(0, D)[None, :]
    lse_at = lse_ptr + slot * GROUP + rows
    for start in tl.range(0, count, MERGE):
        values, weights = (), ()
        new_max = row_max
        for i in tl.static_range(MERGE):
            inside = real & (start + i < count)
            # .cg: another SM wrote these, and L1 may hold older bytes.
            o_s = tl.load(o_at, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            lse_s = tl.load(lse_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
            values, weights = values + (o_s,), weights + (lse_s,)  # noqa: RUF005 (Triton has no *)
            new_max = tl.maximum(new_max, lse_s)
            o_at += stride * (GROUP * D)
            lse_at += stride * GROUP
        # Rows of padding stay at -inf; 0 avoids -inf - -inf there.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - base)
        row_sum = row_sum * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(MERGE):
            weight = tl.exp2(weights[i] - base)
            row_sum += weight
            acc += weight[:, None] * values[i]
        row_max = new_max
    return acc * (1.0 / row_sum)[:, None], row_max + tl.log2(row_sum)


@triton.jit
def _schedule(num_guesses, guess_tiles, total_rest, PROGRAMS: tl.constexpr):
    """How the tiles of the rest are dealt: `leaders` programs begin with a guess and take `lead_run` tiles after it.

    The other tiles go to `followers` programs, `run` tiles each and the first `longer` of them one more. A guess counts
    as `guess_tiles` tiles; where that is more than a program's due, the leaders get no others. No follower's run is
    empty, so that the runs that meet one output use consecutive slots.
    """
    leaders = tl.where(num_guesses < PROGRAMS, num_guesses, 0)
    lead_run = tl.maximum((total_rest + leaders * guess_tiles) // PROGRAMS - guess_tiles, 0)
    left = total_rest - leaders * lead_run
    followers = tl.maximum(tl.minimum(PROGRAMS - leaders, left), 1)
    run = left // followers
    return leaders, lead_run, followers, run, left - run * followers


@triton.jit
def _run_start(program, leaders, lead_run, followers, run, longer):
    """First tile of a program's run over the rest; grows with `program`, from 0 to all of them."""
    place = tl.minimum(program - leaders, followers)
    follow = leaders * lead_run + place * run + tl.minimum(place, longer)
    return tl.where(program < leaders, program * lead_run, follow)


@triton.jit
def _run_of(tile, leaders, lead_run, run, longer):
    """The program whose run holds a tile: the inverse of `_run_start`. One division, for it is slow."""
    after = tile - leaders * lead_run
    is_lead = after < 0
    is_longer = after < longer * (run + 1)
    size = tl.where(is_lead, lead_run, tl.where(is_longer, run + 1, run))
    from_tile = tl.where(is_lead, tile, tl.where(is_longer, after, after - longer * (run + 1)))
    first = tl.where(is_lead, 0, tl.where(is_longer, leaders, leaders + longer))
    return first + from_tile // tl.maximum(size, 1)


@triton.jit
def _locate(tile, tiles_end):
    """Request of a tile of the flattened work, and where its tiles begin; tiles_end: [B_PAD], cumulative."""
    before = tiles_end <= tile
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, tiles_end, 0), 0)


@triton.jit
def _rest_of(request, seq_lens, chunk_size, B_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """Sink, window, length of a request and the tiles of each of its heads; seq_lens: [B_PAD]."""
    seq_len = tl.sum(tl.where(tl.arange(0, B_PAD) == request, seq_lens, 0), 0)
    sink, window = _token_ranges(seq_len, chunk_size, SPEC)
    return sink, window, seq_len, tl.cdiv(window - sink, BLOCK_N)


@triton.jit
def _output_at(output, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Offsets [ROWS, D] of one output's rows in `out` and the like, and which of them exist."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, D)
    at = (output * GROUP + rows)[:, None] * HEAD_DIM + channels[None, :]
    return at, (rows < GROUP)[:, None] & (channels < HEAD_DIM)[None, :]


@triton.jit
def _finish(
    o_ptr,
    lse_ptr,
    slot,
    stride,
    count,
    spec_slot,
    output,
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    SPEC: tl.constexpr,
):
    """The last arriver of an output: merge everything, write it, and with `A~` the verdict's sums of each row."""
    rows = tl.arange(0, GROUP_PAD)
    at, mask = _output_at(output, GROUP_PAD, GROUP, D, HEAD_DIM)
    if SPEC:
        spec_at = o_ptr + (spec_slot * GROUP + rows[:, None]) * D + tl.arange(0, D)[None, :]
        spec_o = tl.load(spec_at, mask=mask, other=0.0, cache_modifier=".cg")
        spec_lse = tl.load(lse_ptr + spec_slot * GROUP + rows, mask=rows < GROUP, other=0.0, cache_modifier=".cg")
        o, lse = _merge_partials(
            o_ptr, lse_ptr, slot, stride, count, spec_lse, tl.full([GROUP_PAD], 1.0, tl.float32), spec_o,
            GROUP, GROUP_PAD, D, MERGE,
        )  # fmt: skip
    else:
        none_max, none_sum, none_o = _no_partial(GROUP_PAD, D)
        o, lse = _merge_partials(
            o_ptr, lse_ptr, slot, stride, count, none_max, none_sum, none_o, GROUP, GROUP_PAD, D, MERGE
        )
    tl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_lse_ptr + output * GROUP + rows, lse, mask=rows < GROUP)
    if SPEC:
        # A sum for each row: one over all of them costs a microsecond, and whoever decides adds up heads anyway.
        full = tl.where(mask, o, 0.0)
        delta = spec_o - full
        sums_at = sums_ptr + (output * GROUP + rows) * 2
        tl.store(sums_at, tl.sum(delta * delta, 1), mask=rows < GROUP)
        tl.store(sums_at + 1, tl.sum(full * full, 1), mask=rows < GROUP)


@triton.jit
def lean_decode_kernel(
    q_ptr,  # [B, Hkv * GROUP, head_dim]
    k_ptr,  # [B, Hkv, capacity, head_dim]
    v_ptr,
    seq_lens_ptr,  # [B] int32
    out_ptr,  # [B, Hkv * GROUP, head_dim]
    lse_ptr,  # [B, Hkv * GROUP] fp32
    spec_out_ptr,  # [B, Hkv * GROUP, head_dim], may lie in the paired rank's memory
    spec_flag_ptr,  # [B, Hkv] int32 beside spec_out: the epoch, once that head's A~ is there
    epoch_ptr,  # [1] int32
    sums_ptr,  # [B, Hkv * GROUP, 2] fp32: dist2, norm2
    o_partial_ptr,  # [G + 2 B Hkv, GROUP, D] fp32 partials: of runs, then A~ of each head
    lse_partial_ptr,  # [G + 2 B Hkv, GROUP] fp32
    counters_ptr,  # [B Hkv] int32 and
    group_counters_ptr,  # [G + B Hkv] int32: arrivals at outputs and at groups of partials; all 0 between launches
    gate_ptr,  # [1] int32 or None
    num_requests,
    capacity,
    qk_scale,
    chunk_size,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE: tl.constexpr,
    SPEC: tl.constexpr,
    PART: tl.constexpr,
    FLAG: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch, or with `PART` a part of one; grid [PROGRAMS]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if gate_ptr is not None:  # noqa: SIM102 (one is of the compiler, the other of the program)
        if tl.load(gate_ptr) == 0:
            return
    program = tl.program_id(0)
    requests = tl.arange(0, B_PAD)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)
    if FLAG:
        epoch = tl.load(epoch_ptr)  # here, where its latency is that of seq_lens
    sink, window = _token_ranges(seq_lens, chunk_size, SPEC)
    rest_tiles = tl.cdiv(window - sink, BLOCK_N) * HKV
    rest_end = tl.cumsum(rest_tiles, 0)
    total_rest = tl.sum(rest_tiles, 0)
    num_outputs = num_requests * HKV
    num_guesses = num_outputs if SPEC and PART != REST else 0
    leaders, lead_run, followers, run, longer = _schedule(
        num_guesses if PART == ALL else 0, 2 * tl.cdiv(chunk_size, BLOCK_N) + GUESS_OVERHEAD, total_rest, PROGRAMS
    )
    tile = _run_start(program, leaders, lead_run, followers, run, longer)
    last = _run_start(program + 1, leaders, lead_run, followers, run, longer)
    if PART == PREDICTOR:
        tile = last + 0

    # First the guess of a head, sent and merged before this program's run of the rest begins.
    guess = program
    while (guess < num_guesses) | (tile < last):
        is_guess = guess < num_guesses
        request, before = _locate(tile, rest_end)
        if SPEC:
            request = tl.where(is_guess, guess // HKV, request)
            before = tl.max(tl.where(requests < request, rest_end, 0), 0)
        sink_r, window_r, seq_len, rest_r = _rest_of(request, seq_lens, chunk_size, B_PAD, BLOCK_N, SPEC)
        head = (tile - before) // tl.maximum(rest_r, 1)
        if SPEC:
            head = tl.where(is_guess, guess % HKV, head)
        output = request * HKV + head
        head_tile = before + head * rest_r
        begin, end, begin2, end2 = sink_r + (tile - head_tile) * BLOCK_N, window_r, sink_r, window_r
        count = last - tile
        if SPEC:
            begin, end = tl.where(is_guess, 0, begin), tl.where(is_guess, sink_r, end)
            begin2, end2 = tl.where(is_guess, window_r, begin2), tl.where(is_guess, seq_len, end2)
            guess_tiles = tl.cdiv(sink_r, BLOCK_N) + tl.cdiv(seq_len - window_r, BLOCK_N)
            count = tl.where(is_guess, guess_tiles, count)
        o, lse, slot = _attend_run(
            q_ptr, k_ptr, v_ptr, output, begin, end, begin2, end2, is_guess, tile, count, seq_lens, rest_end,
            o_partial_ptr, lse_partial_ptr, capacity, chunk_size, qk_scale, program,
            HKV, GROUP, ROWS, D, HEAD_DIM, B_PAD, BLOCK_N, STAGES, SPEC,
        )  # fmt: skip
        current = slot - program
        if SPEC and PART != REST:  # noqa: SIM102 (one is of the compiler, the other of the program)
            if is_guess:
                at, exists = _output_at(current, ROWS, GROUP, D, HEAD_DIM)
                tl.store(spec_out_ptr + at, tl.trans(o).to(spec_out_ptr.dtype.element_ty), mask=exists)
                if FLAG:
                    tl.debug_barrier()
                    tl.atomic_xchg(spec_flag_ptr + current, epoch, sem="release", scope="sys")
                slot = PROGRAMS + num_outputs + current
        _store_partial(o, lse, o_partial_ptr, lse_partial_ptr, slot, ROWS, GROUP, D)

        # Then a ticket for each output that has a partial of this program.
        while output <= current:
            # An output's rest is one range of tiles; the runs that meet it use consecutive slots.
            first_run = _run_of(head_tile, leaders, lead_run, run, longer)
            last_run = _run_of(head_tile + rest_r - 1, leaders, lead_run, run, longer)
            runs = tl.where(rest_r > 0, last_run - first_run + 1, 0)
            first_slot = first_run + output
            arrives = True
            if (runs > WIDE) and (not is_guess):
                # Many partials are merged in two levels: the groups of the first side by side, on many SMs.
                place = program - first_run
                group_slot = program + output - place % FAN
                members = tl.minimum(runs - place + place % FAN, FAN)
                arrives = _arrive(group_counters_ptr + group_slot, members)
                if arrives:
                    none_max, none_sum, none_o = _no_partial(GROUP_PAD, D)
                    group_o, group_lse = _merge_partials(
                        o_partial_ptr, lse_partial_ptr, group_slot, 1, members, none_max, none_sum, none_o,
                        GROUP, GROUP_PAD, D, MERGE,
                    )  # fmt: skip
                    # Into the slot of the group's first member, once every thread has read that.
                    tl.debug_barrier()
                    _store_partial(
                        tl.trans(group_o), group_lse, o_partial_ptr, lse_partial_ptr, group_slot, GROUP_PAD, GROUP, D
                    )
            if arrives:
                stride = tl.where(runs > WIDE, FAN, 1)
                contributors = tl.cdiv(runs, stride)
                if PART == PREDICTOR:
                    is_last = rest_r == 0
                    tl.debug_barrier()
                else:
                    is_last = _arrive(counters_ptr + output, contributors + (1 if SPEC and PART == ALL else 0))
                if is_last:
                    _finish(
                        o_partial_ptr, lse_partial_ptr, first_slot, stride, contributors,
                        PROGRAMS + num_outputs + output, output,
                        out_ptr, lse_ptr, sums_ptr, GROUP, GROUP_PAD, D, HEAD_DIM, MERGE, SPEC,
                    )  # fmt: skip
            head_tile += rest_r
            if B_PAD == 1:
                output += 1
            else:
                if output < current:
                    request, before = _locate(head_tile, rest_end)
                    _, _, _, rest_r = _rest_of(request, seq_lens, chunk_size, B_PAD, BLOCK_N, SPEC)
                    output = request * HKV + (head_tile - before) // tl.maximum(rest_r, 1)
                else:
                    output += 1
        tile = tl.where(is_guess, tile, last) if SPEC else last + 0
        guess += PROGRAMS
