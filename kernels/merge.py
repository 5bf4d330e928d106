"""Partials of decode attention and how they are merged: device code of both decode kernels (see lean_attention.py).

What stores partials and sends a guess is that over bf16; over a quantised cache, turbo_warps.py does.

A partial is `(o, lse)` of some tokens of one output, that is of the query heads of one (request, KV head), normalised,
fp32, `lse` in base 2. Partials of one output lie in consecutive slots. A launch of its own merges them: programs of
one warp, each for some channels of a query head. They know from the schedule where partials lie, and are on their SMs
before the attention has ended; so a merge is the way from one kernel to the next and a round of loads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .words import INTERPRETED, pack_words

__all__ = [
    "MERGE_REGISTERS",
    "await_partials",
    "inverse_of_sum",
    "log2_of_sum",
    "merge_output",
    "merge_sizes",
    "num_sums",
    "send_guess",
    "store_partial",
]

LANE = tl.constexpr(4)  # channels that a lane loads at once
# Channels of a program: few, for what one warp has to do takes longer than the loads (32 were 1 us slower, H200). With
# a guess, when each program also leaves two sums that somebody has to add up, twice as many if there are many programs
# even so: over a quantised cache, whose programs leave no registers to others until they end, 512 of them took 0.8 us
# longer than 256, and 128 of 8 heads up to 0.5 us less than 64.
CHUNK = 8
SPEC_CHUNK = 16
FEW_PROGRAMS = 128
MERGE_VALUES = 2048  # that a program loads at once: 64 registers
# By itself ptxas aims at 64 in all, and delays loads until others have come.
MERGE_REGISTERS = 128


def _chunk(spec: bool, num_qo_heads: int, head_dim: int) -> int:
    return SPEC_CHUNK if spec and num_qo_heads * -(-head_dim // CHUNK) > FEW_PROGRAMS else CHUNK


def num_sums(num_qo_heads: int, head_dim: int) -> int:
    """S: how many pairs of sums of a request its heads leave for the verdict."""
    return num_qo_heads * -(-head_dim // _chunk(True, num_qo_heads, head_dim))


def merge_sizes(spec: bool, num_qo_heads: int, head_dim: int, programs_of_head: int) -> tuple[int, int, int]:
    """Channels that a program merges, programs of a head, and how many partials they load at once: nearly always all
    that a head has of so many programs of the attention."""
    chunk = _chunk(spec, num_qo_heads, head_dim)
    most = triton.next_power_of_2(programs_of_head + 2)
    return chunk, -(-head_dim // chunk), max(32 * int(LANE.value) // chunk, min(most, MERGE_VALUES // chunk))


@triton.jit
def log2_of_sum(x):
    """log2 of a sum that is 1 or more: by the hardware; `tl.log2` is 25 instructions, each waiting for the last."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def inverse_of_sum(x):
    """1 / x of a sum that is 1 or more: by the hardware, without the cases of very large and very small numbers."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def store_partial(o, lse, o_ptr, lse_ptr, slot, rows, channels, HEADS_PER_KV: tl.constexpr):
    """Write the `HEADS_PER_KV` real rows of a partial, o [D, ROWS], into its slot; rows, channels: their numbers."""
    real = rows < HEADS_PER_KV
    tl.store(o_ptr + (slot * HEADS_PER_KV + rows)[None, :] * o.shape[0] + channels[:, None], o, mask=real[None, :])
    tl.store(lse_ptr + slot * HEADS_PER_KV + rows, lse, mask=real)


@triton.jit
def send_guess(
    o,
    lse,
    output,
    part,
    parts,  # how many have tokens
    num_heads,  # query heads of all outputs
    spec_out_ptr,
    spec_lse_ptr,  # or None, with one part
    epoch,  # or None
    rows,  # [ROWS] and
    channels,  # [D]: the numbers of o's columns and rows, in the layouts of a kernel that chooses its own
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GUESS_PARTS: tl.constexpr,
):
    """Write a part of `A~` of an output, o [D, ROWS] and lse [ROWS].

    With an epoch as words, which need no fence and no flag behind them. The first part also writes those without
    tokens, as partials of no weight: the receiver does not know how many parts have tokens.
    """
    real = rows < HEADS_PER_KV
    exists = real[None, :] & (channels < HEAD_DIM)[:, None]
    at = (output * HEADS_PER_KV + rows)[None, :] * HEAD_DIM + channels[:, None]
    value, to = o, spec_out_ptr
    if epoch is not None:
        value = pack_words(o, epoch)
    if GUESS_PARTS > 1:
        to += part * (num_heads * HEAD_DIM)
    tl.store(to + at, value.to(spec_out_ptr.dtype.element_ty), mask=exists)
    if GUESS_PARTS > 1:
        lse_at = spec_lse_ptr + output * HEADS_PER_KV + rows
        tl.store(lse_at + part * num_heads, pack_words(lse, epoch), mask=real)
        if part == 0:
            nothing = pack_words(tl.where(rows >= 0, float("-inf"), lse), epoch)
            zeros = pack_words(tl.where((channels >= 0)[:, None], 0.0, o), epoch)
            for absent in range(parts, GUESS_PARTS):
                tl.store(lse_at + absent * num_heads, nothing, mask=real)
                tl.store(spec_out_ptr + absent * (num_heads * HEAD_DIM) + at, zeros, mask=exists)


@triton.jit
def await_partials(slot, runs):
    """`gdc_wait`, once these are computed: the compiler would move to behind the wait what nobody needs before."""
    if not INTERPRETED:
        slot, runs = tl.inline_asm_elementwise(
            "{ .reg .pred known; .reg .b32 both; or.b32 both, $2, $3; setp.ne.u32 known, both, 0xFFFFFFFF;"
            " @known griddepcontrol.wait; mov.b32 $0, $2; mov.b32 $1, $3; }",
            "=&r,=r,r,r", [slot, runs], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return slot, runs


@triton.jit
def _load_partials(
    o_ptr, lse_ptr, slot, count, head, first, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """A head's partials in `count` slots from `slot` on, N at most, for channels from `first` on.

    All lanes that load channels of a partial load its `lse` as well, so that nothing but sums crosses lanes.

    Returns:
        lse [N, lanes], -inf of those that there are none of, and o [N, lanes, LANE].
    """
    LANES: tl.constexpr = CHUNK // LANE
    slots, channels = tl.arange(0, N)[:, None], tl.arange(0, CHUNK)[None, :]
    # As one dimension, of which there is one way to lie in lanes; of two, Triton 3.6 and 3.7 choose different ones.
    place = tl.arange(0, N * LANES) // LANES
    # What no lane changes is added first: addresses then take fewer instructions.
    row = slot * HEADS_PER_KV + head
    # .cg: other SMs wrote these, and L1 may hold older bytes.
    lse = tl.load(lse_ptr + row + place * HEADS_PER_KV, mask=place < count, other=float("-inf"), cache_modifier=".cg")
    o = tl.load(
        o_ptr + (row * D + first) + (slots * (HEADS_PER_KV * D) + channels),
        mask=(slots < count) & (channels >= 0), other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return tl.reshape(lse, [N, LANES]), tl.reshape(o, [N, LANES, LANE])


@triton.jit
def _merge(lse, o):
    """Merge what `_load_partials` has loaded.

    Returns:
        m = max lse and sum 2^(lse - m), [lanes], and sum 2^(lse - m) o, [lanes, LANE].
    """
    row_max = tl.max(lse, 0)
    # Without partials the maximum is -inf; 0 avoids -inf - -inf there.
    weight = tl.exp2(lse - tl.where(row_max == float("-inf"), 0.0, row_max)[None, :])
    return row_max, tl.sum(weight, 0), tl.sum(weight[:, :, None] * o, 0)


@triton.jit
def _add(a_max, a_sum, a_o, b_max, b_sum, b_o):
    """Two results of `_merge` as one; the first has partials."""
    row_max = tl.maximum(a_max, b_max)
    a_weight, b_weight = tl.exp2(a_max - row_max), tl.exp2(b_max - row_max)
    return row_max, a_sum * a_weight + b_sum * b_weight, a_o * a_weight[:, None] + b_o * b_weight[:, None]


@triton.jit
def merge_output(
    o_ptr,  # partials
    lse_ptr,
    slot,  # the first of the output's runs
    runs,  # how many there are
    spec_slot,  # where `A~` of this output begins
    parts,  # how many it has
    row,  # of query heads of all requests: output * HEADS_PER_KV + head
    head,
    chunk,  # of the head's channels
    out_ptr,
    out_lse_ptr,
    sums_ptr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUND: tl.constexpr,
    SPEC: tl.constexpr,
):
    """Merge some channels of a head's partials and write them; with a guess, also sums for the verdict.

    o = sum_s 2^(lse_s - m) o_s / l,   l = sum_s 2^(lse_s - m),   lse = m + log2 l,   m = max_s lse_s
    """
    lanes, first = tl.arange(0, CHUNK // LANE), chunk * CHUNK
    lse, o = _load_partials(o_ptr, lse_ptr, slot, runs, head, first, HEADS_PER_KV, D, CHUNK, ROUND)
    if SPEC:
        # As many slots as there are lanes for, more than parts.
        PARTS: tl.constexpr = 32 * LANE // CHUNK
        guess = _load_partials(o_ptr, lse_ptr, spec_slot, parts, head, first, HEADS_PER_KV, D, CHUNK, PARTS)
    row_max, row_sum, o = _merge(lse, o)
    if SPEC:
        guess = _merge(*guess)
        spec_o = guess[2] * inverse_of_sum(guess[1])[:, None]
        row_max, row_sum, o = _add(guess[0], guess[1], guess[2], row_max, row_sum, o)
    for done in tl.range(ROUND, runs, ROUND):
        left = runs - done
        more = _merge(*_load_partials(o_ptr, lse_ptr, slot + done, left, head, first, HEADS_PER_KV, D, CHUNK, ROUND))
        row_max, row_sum, o = _add(row_max, row_sum, o, more[0], more[1], more[2])
    o = o * inverse_of_sum(row_sum)[:, None]
    channels = first + lanes[:, None] * LANE + tl.arange(0, LANE)[None, :]
    exists = channels < HEAD_DIM
    tl.store(out_ptr + row * HEAD_DIM + channels, o.to(out_ptr.dtype.element_ty), mask=exists)
    tl.store(out_lse_ptr + row + lanes, row_max + log2_of_sum(row_sum), mask=lanes + chunk == 0)
    if SPEC:
        delta, full = tl.where(exists, spec_o - o, 0.0), tl.where(exists, o, 0.0)
        at = sums_ptr + (row * CHUNKS + chunk) * 2
        tl.store(at, tl.sum(tl.sum(delta * delta, 1), 0))
        tl.store(at + 1, tl.sum(tl.sum(full * full, 1), 0))
