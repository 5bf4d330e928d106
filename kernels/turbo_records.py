"""How words of records come from memory to the registers of a warp: device code of decode over a quantised cache.

A step takes W blocks, one for each warp. The order of a record's words (flashq_layout.py) is that of a warp's operands,
16 bytes of a lane at a time. From compute capability 9.0 on (BULK) each warp has a slot for K and one for V in shared
memory. One instruction of one lane brings a part there, and a barrier of the warp's own counts its bytes; lanes read it
where they use it, and once they have, the same part of the next block is on its way. So memory is asked all the time,
by no register and by no address that a loop has to compute, and no warp waits for another. Elsewhere words go straight
into registers.

Reads are inline assembly, for Triton does not know this memory. Three rules keep them right:

- What reads depends on what waits (the address comes out of the wait), and what sends depends on what has been read
  (`after`). Reads are pure: the compiler may do them twice, in different layouts, which become one again further down.
- Only elementwise operations and reshapes stand between a read and the product that it is an operand of, and no factor:
  with one the compiler takes other layouts, and goes through shared memory and barriers of all warps; a test looks.
- Tensors [W, 32] have a warp in each row and a lane in each column.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "load_k",
    "load_scales",
    "load_v",
    "open_slots",
    "receive_k",
    "receive_v",
    "rows_of_warps",
    "send_part",
]

LANE_WORDS = tl.constexpr(128)  # of a warp's load: four for each lane
BARRIERS = tl.constexpr(16)  # bytes of a warp's two barriers, K's and V's


@triton.constexpr_function
def _part_bytes(bits, head_dim):
    """Of K, or V, of a block: codes and parameters."""
    return 4 * (2 * head_dim * bits + head_dim // 2)


@triton.constexpr_function
def _slots_bytes(warps, head_dim):
    """Shared memory of a program: slots for K and V of 4 bits, then barriers. More than 48 KB cannot be declared."""
    return warps * (2 * _part_bytes(4, head_dim) + BARRIERS.value)


@triton.jit
def rows_of_warps(x, W: tl.constexpr):
    """[N W, M], rows of the warps by turns -> [W, N M].

    A tensor of 128 words in a row is loaded 16 bytes by each lane, and a row is of one warp: so each has its own block.
    """
    N: tl.constexpr = x.shape[0] // W
    M: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [N, W, M]), (1, 0, 2)), [W, N * M])


@triton.jit
def _block_of(step, warps, blocks, W: tl.constexpr):
    """The block of each warp in a step, the last one again beyond the end.

    `blocks` are (first, split, second, count): [first, first + split), then those from `second` on; `count` of both.
    """
    index = tl.minimum(step * W + warps, blocks[3] - 1)
    gap = blocks[2] - blocks[0] - blocks[1]
    return blocks[0] + index + tl.minimum(tl.maximum(index - blocks[1] + 1, 0), 1) * gap


@triton.jit
def _load_rows(records_ptr, step, blocks, row_size, places, W: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr):
    """N rows of words for each warp, [W, N M]: `places` [M] in each of them, `row_size` words apart."""
    rows = tl.arange(0, N * W)
    block = _block_of(step, rows % W, blocks, W).to(tl.int64)
    # Constants come last, so that they become offsets in the instructions.
    at = (records_ptr + block * STRIDE)[:, None] + places[None, :]
    return rows_of_warps(tl.load(at + (rows // W * row_size)[:, None]), W)


@triton.jit
def load_k(records_ptr, step, blocks, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """K of a step, int32: codes [W, 2 D BITS], and of `s_int` and `z` [W, 2 D] the words of a lane's channels.

    Those are the same for all g of a lane (g, t), [D / 64][g][t][4]: for each column of q, or row of an operand.
    """
    CODES: tl.constexpr = 2 * D * BITS
    STRIDE: tl.constexpr = 2 * CODES + D
    TILES: tl.constexpr = D // 16
    r = tl.arange(0, LANE_WORDS)
    words = _load_rows(records_ptr, step, blocks, LANE_WORDS, r, W, CODES // LANE_WORDS, STRIDE)
    places = tl.multiple_of(tl.max_contiguous(r // 4 % 4 * TILES + r % 4, [4]), [4])
    s_int = _load_rows(records_ptr + CODES, step, blocks, 4, places, W, TILES // 4, STRIDE)
    z = _load_rows(records_ptr + (CODES + D // 4), step, blocks, 4, places, W, TILES // 4, STRIDE)
    return words, s_int, z


@triton.jit
def load_v(records_ptr, step, blocks, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """V of a step, int32: codes [W, 2 D BITS], and of `s_int` and `z` [W, D] the words of a lane's rows.

    Those are the same for all t, [g][t][D / 32]: for each column of an output.
    """
    CODES: tl.constexpr = 2 * D * BITS
    STRIDE: tl.constexpr = 2 * CODES + D
    RUN: tl.constexpr = D // 32
    r = tl.arange(0, LANE_WORDS)
    records_ptr += CODES + D // 2
    words = _load_rows(records_ptr, step, blocks, LANE_WORDS, r, W, CODES // LANE_WORDS, STRIDE)
    r = tl.arange(0, D)
    places = tl.multiple_of(tl.max_contiguous(r // (4 * RUN) * RUN + r % RUN, [RUN]), [RUN])
    params = _load_rows(records_ptr + CODES, step, blocks, D // 4, places, W, 2, STRIDE)
    s_int, z = tl.split(tl.permute(tl.reshape(params, [W, 2, D]), (0, 2, 1)))
    return words, s_int, z


@triton.jit
def load_scales(scales_ptr, step, blocks, W: tl.constexpr):
    """The scales of K and of V of a step's blocks, [W] each."""
    block = _block_of(step, tl.arange(0, W), blocks, W)
    return tl.load(scales_ptr + block * 2), tl.load(scales_ptr + block * 2 + 1)


@triton.jit
def open_slots(W: tl.constexpr, D: tl.constexpr):
    """The address of this program's slots in shared memory, their barriers ready. Once in a kernel."""
    SIZE: tl.constexpr = _slots_bytes(W, D)
    # Not in braces: should the compiler ever write it twice, the assembler refuses the second declaration.
    slots = tl.inline_asm_elementwise(
        f".shared .align 128 .b8 record_slots[{SIZE}]; mov.u32 $0, record_slots;",
        "=r,r", [tl.full([], 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    warps, lanes = _warps_and_lanes(W)
    # The fence is for the copies, which count on what a barrier is at first.
    tl.inline_asm_elementwise(
        "{ .reg .pred first; elect.sync _|first, -1;"
        " @first mbarrier.init.shared.b64 [$1], 1; @first mbarrier.init.shared.b64 [$1+8], 1;"
        " fence.proxy.async.shared::cta; bar.warp.sync -1; mov.u32 $0, 0; }",
        "=r,r", [_barriers_of(slots, warps, W, D) + lanes * 0], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return slots


@triton.jit
def _warps_and_lanes(W: tl.constexpr):
    return tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]


@triton.jit
def _slot_of(slots, warps, IS_V: tl.constexpr, D: tl.constexpr):
    """A warp's slot for K, or behind it for V."""
    return slots + warps * (2 * _part_bytes(4, D)) + (_part_bytes(4, D) if IS_V else 0)


@triton.jit
def _barriers_of(slots, warps, W: tl.constexpr, D: tl.constexpr):
    """A warp's barriers: K's, and 8 bytes behind it V's."""
    return slots + W * 2 * _part_bytes(4, D) + warps * BARRIERS


@triton.jit
def send_part(
    slots, records_ptr, step, blocks, bits, goes, after, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr
):
    """Ask for K, or V, of each warp's block in a step.

    Args:
        goes: whether anything is asked for; whoever asks has to receive.
        after: values [W, 32] that were read from the slot, which is free with them. What is sent arrives a memory's
            latency later than reads that the warp has issued, all of them before this.
    """
    warps, lanes = _warps_and_lanes(W)
    size = 8 * D * bits + 2 * D
    record = (records_ptr + _block_of(step, warps, blocks, W).to(tl.int64) * (size // 2)).to(tl.int64)
    slot, barrier = _slot_of(slots, warps, IS_V, D), _barriers_of(slots, warps, W, D)
    if IS_V:
        record, barrier = record + size, barrier + 8
    # By a thread that is elected: of one that a comparison picks the assembler does not know that it is one, and loops.
    operands = (barrier + lanes * 0, slot + lanes * 0, record + lanes * 0, size + 0 * (warps + lanes))
    operands = operands + (goes.to(tl.int32) + 0 * (warps + lanes),) + after  # noqa: RUF005 (Triton has no *)
    tl.inline_asm_elementwise(
        "{ .reg .pred first, goes; .reg .b64 state; setp.ne.u32 goes, $5, 0;"
        " bar.warp.sync -1; elect.sync _|first, -1; and.pred first, first, goes;"
        " @first mbarrier.arrive.expect_tx.shared.b64 state, [$1], $4;"
        " @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$2], [$3], $4, [$1];"
        " mov.u32 $0, 0; }",
        "=r,r,r,l,r,r" + ",r" * len(after), operands, dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _await_part(slots, phase, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """The slots [W, 1] of a part, which is there once they are known; phase: 0 and 1 by turns.

    No deadline: a copy of this program's own always ends.
    """
    warps, _ = _warps_and_lanes(W)
    FIRST: tl.constexpr = W * 2 * _part_bytes(4, D) + (8 if IS_V else 0)
    slots = tl.inline_asm_elementwise(
        "{ .reg .pred done; .reg .u32 barrier; mov.u32 barrier, %tid.x; shr.u32 barrier, barrier, 5;"
        f" mad.lo.u32 barrier, barrier, {BARRIERS}, $1;"
        f" WAIT: mbarrier.try_wait.parity.shared.b64 done, [barrier+{FIRST}], $2; @!done bra WAIT; mov.u32 $0, $1; }}",
        "=r,r,r", [slots, phase], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return _slot_of(slots, warps, IS_V, D)


@triton.jit
def _read(at, OFFSET: tl.constexpr, SIZE: tl.constexpr):
    """SIZE words, 2 or 4, of each lane from its address `at` [W, 32] on: the first [W, 32], and all [W, 32 SIZE]."""
    if SIZE == 4:
        x = tl.inline_asm_elementwise(
            f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{OFFSET}];", "=r,=r,=r,=r,r", [at],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise(
            f"ld.shared.v2.b32 {{$0, $1}}, [$2+{OFFSET}];", "=r,=r,r", [at],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return x[0], tl.reshape(_side_by_side(x, SIZE), [at.shape[0], at.shape[1] * SIZE])


@triton.jit
def _read_rows(at, OFFSET: tl.constexpr, STRIDE: tl.constexpr, N: tl.constexpr):
    """N times 16 bytes of each lane, STRIDE apart, [W, N 128]; and one value of each, with which that read is done."""
    rows, done = (), ()
    for n in tl.static_range(N):
        first, row = _read(at, OFFSET + STRIDE * n, 4)
        rows, done = rows + (row,), done + (first,)  # noqa: RUF005 (Triton has no *)
    W: tl.constexpr = at.shape[0]
    words = tl.permute(tl.reshape(_side_by_side(rows, N), [W, LANE_WORDS, N]), (0, 2, 1))
    return tl.reshape(words, [W, N * LANE_WORDS]), done


@triton.jit
def _side_by_side(x, N: tl.constexpr):
    """1, 2, 4 or 8 tensors [...], a tuple, as one [..., N or 2, 2 or 2, 2, 2]."""
    if N == 1:
        y = x[0]
    elif N == 2:
        y = tl.join(x[0], x[1])
    elif N == 4:
        y = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
        y = tl.join(even, odd)
    return y


@triton.jit
def receive_k(slots, phase, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """`load_k` of what `send_part` has asked for; and what frees the slot. phase: of a step, 0 and 1 by turns."""
    CODES: tl.constexpr = 8 * D * BITS
    TILES: tl.constexpr = D // 16
    _, lanes = _warps_and_lanes(W)
    slot = _await_part(slots, phase, False, W, D)
    words, done = _read_rows(slot + lanes * 16, 0, 4 * LANE_WORDS, CODES // (4 * LANE_WORDS))
    at = slot + lanes % 4 * (4 * TILES)
    s_int, s_done = _read_rows(at, CODES, 16, TILES // 4)
    z, z_done = _read_rows(at, CODES + D, 16, TILES // 4)
    return words, s_int, z, done + s_done + z_done


@triton.jit
def receive_v(slots, phase, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """The same of `load_v`."""
    CODES: tl.constexpr = 8 * D * BITS
    RUN: tl.constexpr = D // 32
    _, lanes = _warps_and_lanes(W)
    slot = _await_part(slots, phase, True, W, D)
    words, done = _read_rows(slot + lanes * 16, 0, 4 * LANE_WORDS, CODES // (4 * LANE_WORDS))
    at = slot + lanes // 4 * (4 * RUN)
    s_done, s_int = _read(at, CODES, RUN)
    z_done, z = _read(at, CODES + D, RUN)
    return words, s_int, z, done + (s_done, z_done)  # noqa: RUF005 (Triton has no *)
