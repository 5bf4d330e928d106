"""Device code of lean decode attention: schedule, streaming, where partials lie (see lean_attention.py for the method).

- *output*: a (request, KV head), with all query heads of that KV head; numbered `request * HKV + head`.
- *guess*: `A~` of an output, over the tokens of sink and window; it may come in *parts*.
- *rest*: the tokens of an output outside sink and window; without speculation, all of them. The rests of all outputs
  form one row of tiles, in the order of outputs.
- *run*: the consecutive tiles of that row which one program takes.
- *leader*: a program that begins with a guess, and whose run is that much shorter; *follower*: any other. Where there
  are as many guesses as programs or more, there are no leaders.
- *turn*: what a program does in one pass of its loop: a guess, or its run. Guesses come first.
- *slot*: where a partial lies. That of a program's run for an output is `program + output`: each program adds one, and
  so does each further output that a run meets, so no two partials share a slot. Those of guesses lie behind.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .merge import await_partials, inverse_of_sum, log2_of_sum, merge_output, send_guess, store_partial
from .prefetch import prefetch, wait_cycles

__all__ = [
    "ALL",
    "PREDICTOR",
    "REST",
    "deal",
    "head_of",
    "lean_decode_kernel",
    "lean_merge_kernel",
    "locate",
    "normalise",
    "plan",
    "start_after",
    "tiles_in",
    "token_ranges",
    "tokens_of_guess",
]

# The phase that a launch does. Of two launches the first leaves `A~` and its partial for the second; in between, `A~`
# goes to a paired rank whose memory cannot be addressed.
ALL = tl.constexpr(0)
PREDICTOR = tl.constexpr(1)
REST = tl.constexpr(2)

WINDOW_ALIGN = tl.constexpr(64)  # the window is widened to whole tiles of this many tokens, whatever BLOCK_N is
GUESS_OVERHEAD = tl.constexpr(1)  # what waiting for a guess's tiles and sending it away costs, in streamed tiles
# Cycles by which programs with a guess start ahead of the others: requests are served in the order in which they come,
# and the first tiles of all programs take 4 us. Only where runs have 3 tiles or more: else memory is not busy for long.
HEAD_START = tl.constexpr(500)
BUSY_TILES = tl.constexpr(3)
# All programs work where each has so many tiles: 128 of 132 SMs stream slower by 1 %, more than a merge gains.
MANY_TILES = tl.constexpr(32)


@triton.jit
def token_ranges(seq_len, chunk_size, SPEC: tl.constexpr):
    """sink, window: the guess is over tokens `[0, sink)` and `[window, seq_len)`, the rest lies in between.

    Without a guess the rest is all tokens.
    """
    if SPEC:
        sink = tl.minimum(chunk_size, seq_len)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_size, 0) // WINDOW_ALIGN * WINDOW_ALIGN)
    else:
        sink = seq_len * 0
        window = seq_len
    return sink, window


@triton.jit
def tiles_in(tokens, is_long, BLOCK_N: tl.constexpr):
    """How many tiles of BLOCK_N tokens, or of twice as many, they fill. By constants, so that nothing is divided."""
    return tl.where(is_long, tl.cdiv(tokens, 2 * BLOCK_N), tl.cdiv(tokens, BLOCK_N))


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
        of_warps = tl.max(tl.max(tl.reshape(s, [BLOCK_N // 64, 4, 16, ROWS]), 0), 1)
        a, b = tl.split(tl.reshape(tl.trans(of_warps), [ROWS, 2, 2]))
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
def normalise(row_max, row_sum, acc):
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
    begin2,  # then tokens [begin2, end2): of the same output if `is_guess`, else of each output that follows
    end2,
    is_guess,
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
            output += (crosses & (not is_guess)).to(tl.int32)
        else:
            if token >= limit:
                token, limit = begin2 + 0, end2 + 0
                if not is_guess:
                    request, before = locate(tile + i, rest_end)
                    token, limit, _, rest = _rest_of(request, seq_lens, chunk_size, False, B_PAD, BLOCK_N, SPEC)
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
            o, lse = normalise(row_max, row_sum, acc)
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
    o, lse = normalise(row_max, row_sum, acc)
    return o, lse, slot


@triton.jit
def _divide(a, b):
    """a // b for a >= 0 and b > 0: unsigned, which takes a third fewer instructions."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def head_of(tile, tiles, HKV: tl.constexpr):
    """The head of a request that a tile lies in, if each head has `tiles`: counted, which is faster than a division."""
    head = tile * 0
    for other in tl.static_range(1, HKV):
        head += (other * tiles <= tile).to(tl.int32)
    return head


@triton.jit
def _schedule(num_guesses, guess_tiles, total_rest, PROGRAMS: tl.constexpr, EVEN: tl.constexpr, SPEC: tl.constexpr):
    """How the tiles of the rest are dealt: (leaders, lead_run, followers, run, longer), below called the schedule.

    `leaders` programs begin with a guess and take `lead_run` tiles after it. The other tiles go to `followers`
    programs, `run` tiles each and the first `longer` of them one more. A guess counts as `guess_tiles` tiles; where
    that is more than a program's share, leaders get no tiles of the rest. No follower's run is empty, so that the runs
    that meet one output use consecutive slots.

    Without guesses, EVEN programs work instead of all if their longest run is no longer: lengths are often powers of
    two, and few runs then cross from one head into the next.
    """
    if SPEC:
        leaders = tl.where(num_guesses < PROGRAMS, num_guesses, 0)
        lead_run = tl.maximum((total_rest + leaders * guess_tiles) // PROGRAMS - guess_tiles, 0)
        left = total_rest - leaders * lead_run
        others = PROGRAMS - leaders
        run = _divide(left, others)
    else:
        # By constants: the compiler makes such divisions multiplications.
        leaders, lead_run, left = 0, 0, total_rest
        others, run = PROGRAMS, left // PROGRAMS
        if EVEN < PROGRAMS:
            even_run = tl.cdiv(left, EVEN)
            is_even = (even_run <= tl.cdiv(left, PROGRAMS)) & (even_run < MANY_TILES)
            others, run = tl.where(is_even, EVEN, others), tl.where(is_even, left // EVEN, run)
    followers = tl.maximum(tl.minimum(others, left), 1)
    run = tl.where(left < others, tl.minimum(left, 1), run)
    return leaders, lead_run, followers, run, left - run * followers


@triton.jit
def run_start(program, leaders, lead_run, followers, run, longer):
    """First tile of a program's run; from 0 for the first program to the number of tiles past the last one."""
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    place = tl.minimum(program - leaders, followers)
    follow = leaders * lead_run + place * run + tl.minimum(place, longer)
    return tl.where(program < leaders, program * lead_run, follow)


@triton.jit
def run_of(tile, leaders, lead_run, run, longer):
    """The program whose run holds a tile: the inverse of `run_start`. One division only, because it is slow."""
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    after = tile - leaders * lead_run
    is_lead = after < 0
    is_longer = after < longer * (run + 1)
    size = tl.where(is_lead, lead_run, tl.where(is_longer, run + 1, run))
    from_tile = tl.where(is_lead, tile, tl.where(is_longer, after, after - longer * (run + 1)))
    first = tl.where(is_lead, 0, tl.where(is_longer, leaders, leaders + longer))
    return first + _divide(from_tile, tl.maximum(size, 1))


@triton.jit
def locate(tile, tiles_end):
    """Request of a tile in the row of all rests, and where its tiles begin; tiles_end: [B_PAD], cumulative."""
    before = tiles_end <= tile
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, tiles_end, 0), 0)


@triton.jit
def _rest_of(request, seq_lens, chunk_size, is_long, B_PAD: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """Sink, window and length of a request, and how many tiles the rest of each of its heads has; seq_lens: [B_PAD]."""
    seq_len = tl.sum(tl.where(tl.arange(0, B_PAD) == request, seq_lens, 0), 0)
    sink, window = token_ranges(seq_len, chunk_size, SPEC)
    return sink, window, seq_len, tiles_in(window - sink, is_long, BLOCK_N)


@triton.jit
def _tiles_of(outputs, rest, HKV: tl.constexpr, B_PAD: tl.constexpr):
    """First tile of the rest of each output, and how many it has; rest: [B_PAD], of each head of a request."""
    if B_PAD == 1:
        tiles = tl.zeros_like(outputs) + tl.sum(rest, 0)
        first = outputs * tiles
    else:
        request, requests = (outputs // HKV)[:, None], tl.arange(0, B_PAD)[None, :]
        tiles = tl.sum(tl.where(requests == request, rest[None, :], 0), 1)
        first = tl.sum(tl.where(requests < request, rest[None, :], 0), 1) * HKV + outputs % HKV * tiles
    return first, tiles


@triton.jit
def parts_of_guess(sink, window, chunk_size, is_long, BLOCK_N: tl.constexpr, GUESS_PARTS: tl.constexpr):
    """Tiles of one part of a guess, and how many parts have tiles; sink, window: numbers of tokens, [1] with parts."""
    part_tiles = tl.cdiv(2 * tiles_in(chunk_size, is_long, BLOCK_N) + 1, GUESS_PARTS)
    parts = 1
    if GUESS_PARTS > 1:
        tiles = tl.sum(tiles_in(sink, is_long, BLOCK_N) + tiles_in(window, is_long, BLOCK_N), 0)
        for part in tl.static_range(1, GUESS_PARTS):
            parts += (part * part_tiles < tiles).to(tl.int32)
    return part_tiles, parts


@triton.jit
def tokens_of_guess(part, sink, window, seq_len, part_tiles, is_long, BLOCK_N: tl.constexpr, GUESS_PARTS: tl.constexpr):
    """What a part of a guess begins with, tokens [first, end), and how many tiles it has; [window, seq_len) follow."""
    sink_tiles = tiles_in(sink, is_long, BLOCK_N)
    tiles = sink_tiles + tiles_in(seq_len - window, is_long, BLOCK_N)
    first, end = 0, sink
    if GUESS_PARTS > 1:
        block_n = tl.where(is_long, 2 * BLOCK_N, BLOCK_N)
        first = part * part_tiles
        tiles = tl.minimum(tiles - first, part_tiles)
        end = tl.where(first < sink_tiles, sink, seq_len)
        first = first * block_n + tl.where(first < sink_tiles, 0, window - sink_tiles * block_n)
    return first, end, tiles


@triton.jit
def deal(
    program, num_guesses, total_rest, leaders, lead_run, followers, run, longer, PROGRAMS: tl.constexpr,
    SPEC: tl.constexpr, PHASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a program does, after its head start is over that others may have.

    Returns:
        First tile of its run, and past the last one; how many guesses it has, and how many turns in all: first guesses,
        each sent before the next turn, then the run.
    """
    # Schedule: (leaders, lead_run, followers, run, longer), see `_schedule`.
    tile = run_start(program, leaders, lead_run, followers, run, longer)
    last = run_start(program + 1, leaders, lead_run, followers, run, longer)
    if PHASE == PREDICTOR:
        tile = last + 0
    if SPEC and PHASE == ALL and PDL:
        if (program >= num_guesses) & (total_rest >= BUSY_TILES * PROGRAMS):
            wait_cycles(HEAD_START)
    # At least one turn, even with nothing to do: then what follows is no branch, and is computed while `seq_lens` is on
    # its way.
    guesses, turns = 0, (program >= 0).to(tl.int32)
    if SPEC:
        guesses = (num_guesses + PROGRAMS - 1 - program) // PROGRAMS
        turns = tl.maximum(guesses + (tile < last).to(tl.int32), 1)
    return tile, last, guesses, turns


@triton.jit
def start_after(EARLY: tl.constexpr):
    """Begin a dependent launch: wait for the kernel ahead, then let the merge start; EARLY: wait later.

    The merge reads lengths at its start. So it may start when what is ahead of this launch has ended, or has promised
    not to write them.
    """
    if EARLY:
        gdc_launch_dependents()
    else:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _lengths(seq_lens_ptr, num_requests, B_PAD: tl.constexpr):
    """seq_lens [B_PAD], 0 of requests that there are none of."""
    requests = tl.arange(0, B_PAD)
    if B_PAD == 1:
        seq_lens = tl.load(seq_lens_ptr + requests)
    else:
        seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)
    return seq_lens


@triton.jit
def plan(
    seq_lens, num_requests, chunk_size, HKV: tl.constexpr, PROGRAMS: tl.constexpr, B_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, LONG: tl.constexpr, SPEC: tl.constexpr, GUESS_PARTS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """What follows from lengths [B_PAD] alone.

    Returns:
        Whether tiles are long; tiles of each request's rest [B_PAD], and of all; tiles of a part of a guess, and how
        many parts have tiles; the schedule.
    """
    sink, window = token_ranges(seq_lens, chunk_size, SPEC)
    tiles = tl.sum(tiles_in(window - sink, False, BLOCK_N), 0) * HKV
    is_long = LONG > 0 and tiles > LONG * PROGRAMS
    if LONG > 0 and BLOCK_N < 128 and not SPEC:
        # Or where the longest run has no more tokens by it.
        long_tiles = tl.sum(tiles_in(window - sink, True, BLOCK_N), 0) * HKV
        is_long |= 2 * tl.cdiv(long_tiles, PROGRAMS) <= tl.cdiv(tiles, PROGRAMS)
    rest_tiles = tiles_in(window - sink, is_long, BLOCK_N) * HKV
    total_rest = tl.sum(rest_tiles, 0)
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    part_tiles, parts = parts_of_guess(sink, seq_lens - window, chunk_size, is_long, BLOCK_N, GUESS_PARTS)
    EVEN: tl.constexpr = PROGRAMS // 8 * 8 if B_PAD == 1 and PROGRAMS > 8 else PROGRAMS
    leaders, lead_run, followers, run, longer = _schedule(
        num_outputs * parts, tl.minimum(part_tiles, 2 * tiles_in(chunk_size, is_long, BLOCK_N)) + GUESS_OVERHEAD,
        total_rest, PROGRAMS, EVEN, SPEC and PHASE == ALL,
    )  # fmt: skip
    return is_long, rest_tiles, total_rest, part_tiles, parts, leaders, lead_run, followers, run, longer


@triton.jit
def lean_decode_kernel(
    q_ptr,  # [B, Hkv * HEADS_PER_KV, head_dim]
    k_ptr,  # [B, Hkv, capacity, head_dim]
    v_ptr,
    capacity,
    seq_lens_ptr,  # [B] int32
    # [B, Hkv * HEADS_PER_KV, head_dim], or [GUESS_PARTS, ...] words; may lie in the paired rank's memory
    spec_out_ptr,
    spec_lse_ptr,  # [GUESS_PARTS, B, Hkv * HEADS_PER_KV] words, or None where there is one part
    epoch_ptr,  # [1] int32, where A~ goes as words, or None
    # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV, D] fp32 partials: of runs, then of each head the parts of A~
    o_partial_ptr,
    lse_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV] fp32
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
    GUESS_PARTS: tl.constexpr,  # 1 with a batch
    PHASE: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Partials, and with a guess `A~`; grid [PROGRAMS]."""
    if PDL:
        start_after(EARLY)
    if gate_ptr is not None:
        if tl.load(gate_ptr) == 0:
            return

    # 1. The schedule: every program computes all of it, from `seq_lens` alone.
    program = tl.program_id(0)
    requests = tl.arange(0, B_PAD)
    seq_lens = _lengths(seq_lens_ptr, num_requests, B_PAD)
    epoch = None
    if epoch_ptr is not None:
        epoch = tl.load(epoch_ptr)  # here, so that it arrives together with seq_lens
    is_long, rest_tiles, total_rest, part_tiles, parts, leaders, lead_run, followers, run, longer = plan(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, GUESS_PARTS, PHASE
    )
    num_outputs = HKV if B_PAD == 1 else num_requests * HKV
    num_guesses = num_outputs * parts if SPEC and PHASE != REST else 0
    block_n = tl.where(is_long, 2 * BLOCK_N, BLOCK_N)
    rest_end = tl.cumsum(rest_tiles, 0)
    tile, last, guesses, turns = deal(
        program, num_guesses, total_rest, leaders, lead_run, followers, run, longer, PROGRAMS, SPEC, PHASE, PDL
    )
    # With two tile loops, what neither changes is not moved ahead of both: that would spill registers and delay the
    # first copy.
    for turn in tl.range(turns, disable_licm=LONG > 0):
        # 2. Which output and tokens this turn begins with.
        is_guess = turn < guesses
        guess = program + turn * PROGRAMS
        part = 0
        if GUESS_PARTS > 1:
            part = guess // HKV
        if B_PAD == 1:
            request, before = 0, 0
        else:
            request, before = locate(tile, rest_end)
            if SPEC:
                request = tl.where(is_guess, guess // HKV, request)
                before = tl.max(tl.where(requests < request, rest_end, 0), 0)
        sink_r, window_r, seq_len, rest_r = _rest_of(request, seq_lens, chunk_size, is_long, B_PAD, BLOCK_N, SPEC)
        head = head_of(tile - before, rest_r, HKV) if HKV <= 32 else (tile - before) // tl.maximum(rest_r, 1)
        if SPEC:
            head = tl.where(is_guess, guess % HKV, head)
        output = request * HKV + head
        head_tile = before + head * rest_r
        begin, end, begin2, end2 = sink_r + (tile - head_tile) * block_n, window_r, sink_r, window_r
        count = last - tile
        if EARLY:
            # While the kernel ahead ends. One tile only: more would arrive together, and so the first one late.
            ELEMENT: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth // 8
            size = tl.where(count > 0, tl.minimum(block_n, end - begin) * (HEAD_DIM * ELEMENT), 0)
            at = (output.to(tl.int64) * capacity + begin) * HEAD_DIM
            prefetch(k_ptr + at, size)
            prefetch(v_ptr + at, size)
            gdc_wait()
        if SPEC:
            first, first_end, guess_tiles = tokens_of_guess(
                part, sink_r, window_r, seq_len, part_tiles, is_long, BLOCK_N, GUESS_PARTS
            )
            begin, end = tl.where(is_guess, first, begin), tl.where(is_guess, first_end, end)
            begin2, end2 = tl.where(is_guess, window_r, begin2), tl.where(is_guess, seq_len, end2)
            count = tl.where(is_guess, guess_tiles, count)

        # 3. Stream the tiles. The partials of outputs that this run goes beyond are stored on the way.
        work = (
            q_ptr, k_ptr, v_ptr, output, begin, end, begin2, end2, is_guess, tile, count, seq_lens, rest_end,
            o_partial_ptr, lse_partial_ptr, capacity, chunk_size, qk_scale, program,
        )  # fmt: skip
        if LONG > 0 and is_long:
            o, lse, slot = _attend_run(*work, HKV, HEADS_PER_KV, ROWS, D, HEAD_DIM, B_PAD, 2 * BLOCK_N, STAGES, SPEC)
        else:
            o, lse, slot = _attend_run(*work, HKV, HEADS_PER_KV, ROWS, D, HEAD_DIM, B_PAD, BLOCK_N, STAGES, SPEC)

        if count > 0:
            # 4. Leave the partial of the last output; a guess also goes to its receiver.
            current, rows, channels = slot - program, tl.arange(0, o.shape[1]), tl.arange(0, D)
            if SPEC and PHASE != REST:
                if is_guess:
                    send_guess(
                        o, lse, current, part, parts, num_outputs * HEADS_PER_KV, spec_out_ptr, spec_lse_ptr, epoch,
                        rows, channels, HEADS_PER_KV, HEAD_DIM, GUESS_PARTS,
                    )  # fmt: skip
                    slot = PROGRAMS + num_outputs + current * GUESS_PARTS + part
            store_partial(o, lse, o_partial_ptr, lse_partial_ptr, slot, rows, channels, HEADS_PER_KV)


@triton.jit
def lean_merge_kernel(
    seq_lens_ptr,  # [B] int32
    o_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV, D] fp32, as the attention has left them
    lse_partial_ptr,  # [G + (1 + GUESS_PARTS) B Hkv, HEADS_PER_KV] fp32
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
    CHUNK: tl.constexpr,  # channels of a program, and
    CHUNKS: tl.constexpr,  # programs of a head
    ROUND: tl.constexpr,  # partials loaded together
    SPEC: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
    PHASE: tl.constexpr,  # of the attention before it
    PDL: tl.constexpr,
):
    """Merge what the attention has left; grid [B Hkv HEADS_PER_KV CHUNKS]."""
    if PDL:
        gdc_launch_dependents()
    row, chunk = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS
    output, head = row // HEADS_PER_KV, row % HEADS_PER_KV
    seq_lens = _lengths(seq_lens_ptr, num_requests, B_PAD)
    _, rest_tiles, _, _, parts, leaders, lead_run, _, run, longer = plan(
        seq_lens, num_requests, chunk_size, HKV, PROGRAMS, B_PAD, BLOCK_N, LONG, SPEC, GUESS_PARTS, PHASE
    )
    # The rest of an output is one range of tiles, and the runs that meet it use consecutive slots.
    first_tile, tiles = _tiles_of(tl.arange(0, 1) + output, rest_tiles // HKV, HKV, B_PAD)
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
    merge_output(
        o_partial_ptr, lse_partial_ptr, slot, runs, PROGRAMS + num_outputs + output * GUESS_PARTS, parts,
        row, head, chunk, out_ptr, lse_ptr, sums_ptr, HEADS_PER_KV, D, HEAD_DIM, CHUNK, CHUNKS, ROUND, SPEC,
    )  # fmt: skip
