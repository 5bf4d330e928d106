"""How the words of records come from memory to the registers of a warp: device code of decode over a quantised cache.

A record has two *sides*, K's and V's: the codes of a block and their parameters.

A step takes W blocks, one for each warp. The order of a record's words (layout.py) is that of a warp's operands,
16 bytes of a lane at a time. From compute capability 9.0 on (BULK) each warp has a slot for K and one for V in shared
memory, and behind all of them lies q (query.py). One instruction of one lane copies a side there, and the warp's
own barrier counts its bytes. Lanes read the slot where they use it, and after that the copy of the same side of the
next block is issued. So copies are always under way, without registers and addresses for what they bring, and no warp
waits for another. Elsewhere lanes read the same words from memory. At the end of a turn warps leave their sums in the
slots (warp_combine.py).

Slots are read by inline assembly, because Triton does not know this memory. Three rules keep these reads right:

- A read depends on a wait (its address comes out of it), and a copy depends on the reads of the slot before (its
  address comes out of `after`). Reads are pure: the compiler may do them twice, in different layouts, which become one
  again further down.
- Only elementwise operations and reshapes stand between a read and the product that it is an operand of, and no factor:
  with one the compiler takes other layouts, and goes through shared memory and barriers of all warps. A test counts.
- Tensors [W, 32] have a warp in each row and a lane in each column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, unstacked

__all__ = [
    "QUERY_BARRIER",
    "await_side",
    "head_stride",
    "load_scales",
    "init_buffers",
    "query_barrier",
    "side_of",
    "read_k",
    "read_v",
    "send_side",
    "buffer_bytes",
]

LANE_WORDS = tl.constexpr(128)  # of a warp's load: four for each lane
BARRIERS = tl.constexpr(16)  # bytes of a warp's two barriers, K's and V's
QUERY_BARRIER = tl.constexpr(16)  # bytes of q's


@triton.constexpr_function
def _side_bytes(bits, head_dim):
    """Bytes of a side: codes and parameters of K, or of V, of a block."""
    return 4 * (2 * head_dim * bits + head_dim // 2)


@triton.constexpr_function
def buffer_bytes(head_dim, bulk):
    """A warp's slots: for K and V of 4 bits; without copies for sums, of up to two heads of a lane, alone."""
    return 2 * _side_bytes(4, head_dim) if bulk else 2 * 128 * (head_dim // 8 + 2)


@triton.constexpr_function
def head_stride(head_dim, heads):
    """Bytes from one head of q to the next, in 16-bit values: those that lanes read together lie in different banks."""
    return 2 * head_dim + (32 if heads == 4 else 16)


@triton.constexpr_function
def _shared_bytes(warps, head_dim, bulk):
    """Shared memory of a program: all slots, barriers, q's barrier and q. More than 48 KB cannot be declared."""
    of_query = QUERY_BARRIER.value + max([heads * head_stride(head_dim, heads) for heads in (4, 8)])
    return warps * buffer_bytes(head_dim, bulk) + (warps * BARRIERS.value + of_query if bulk else 0)


@triton.jit
def _block_of(step, warps, blocks, W: tl.constexpr):
    """The block of each warp in a step, the last one again beyond the end.

    `blocks` are (first, split, second, count): [first, first + split), then those from `second` on; `count` of both.
    """
    index = tl.minimum(step * W + warps, blocks[3] - 1)
    gap = blocks[2] - blocks[0] - blocks[1]
    return blocks[0] + index + tl.minimum(tl.maximum(index - blocks[1] + 1, 0), 1) * gap


@triton.jit
def _records_of(records_ptr, step, blocks, side_size, W: tl.constexpr):
    """Where the record of each warp's block in a step begins, [W, 1]; side_size: bytes of one side."""
    block = _block_of(step, tl.arange(0, W)[:, None], blocks, W)
    return records_ptr + block.to(tl.int64) * (side_size // 2)


@triton.jit
def side_of(records_ptr, step, blocks, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Where K, or V, of each warp's block in a step begins, [W, 1]."""
    SIZE: tl.constexpr = _side_bytes(BITS, D)
    return _records_of(records_ptr, step, blocks, SIZE, W) + (SIZE // 4 if IS_V else 0)


@triton.jit
def load_scales(scales_ptr, step, blocks, W: tl.constexpr):
    """The scales of K and of V of a step's blocks, [W] each."""
    block = _block_of(step, tl.arange(0, W), blocks, W)
    return tl.load(scales_ptr + block * 2), tl.load(scales_ptr + block * 2 + 1)


@triton.jit
def init_buffers(W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """The address of this program's slots in shared memory; with BULK their barriers are ready. Once in a kernel."""
    buffers = 0
    if not INTERPRETED:
        SIZE: tl.constexpr = _shared_bytes(W, D, BULK)
        # Not in braces: should the compiler ever write it twice, the assembler refuses the second declaration.
        buffers = tl.inline_asm_elementwise(
            f".shared .align 128 .b8 record_slots[{SIZE}]; mov.u32 $0, record_slots;",
            "=r,r", [tl.full([], 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if BULK:
        warps, lanes = _warps_and_lanes(W)
        # The fence is for the copies, which count on what a barrier is at first. All warps wait at q's barrier.
        tl.inline_asm_elementwise(
            "{ .reg .pred first, one; .reg .u32 thread; elect.sync _|first, -1;"
            " @first mbarrier.init.shared.b64 [$1], 1; @first mbarrier.init.shared.b64 [$1+8], 1;"
            " mov.u32 thread, %tid.x; setp.lt.and.u32 one, thread, 32, first; @one mbarrier.init.shared.b64 [$2], 1;"
            " fence.proxy.async.shared::cta; bar.sync 0; mov.u32 $0, 0; }",
            "=r,r,r",
            [_barriers_of(buffers, warps, W, D) + lanes * 0, query_barrier(buffers, W, D) + (warps + lanes) * 0],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return buffers


@triton.jit
def _warps_and_lanes(W: tl.constexpr):
    return tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]


@triton.jit
def _buffer_of(buffers, warps, IS_V: tl.constexpr, D: tl.constexpr):
    """A warp's slot for K, or behind it for V."""
    return buffers + warps * buffer_bytes(D, True) + (_side_bytes(4, D) if IS_V else 0)


@triton.jit
def _barriers_of(buffers, warps, W: tl.constexpr, D: tl.constexpr):
    """A warp's barriers: K's, and 8 bytes behind it V's."""
    return buffers + W * buffer_bytes(D, True) + warps * BARRIERS


@triton.jit
def query_barrier(buffers, W: tl.constexpr, D: tl.constexpr):
    """The barrier of q, which lies behind it."""
    return buffers + W * (buffer_bytes(D, True) + BARRIERS)


@triton.constexpr_function
def _copy_after(reads):
    """Assembly of a copy once so many values, from $6 on, are there.

    $1: barrier.  $2: to.  $3: from.  $4: bytes.  $5: whether.

    A step reads these bytes once: so they are the first to leave the L2. Attention without a guess is 1.4 to 2.3 %
    faster by it at 32K and 128K tokens of `turbo4`, a step on one GPU 0.6 % (H100).

    A copy can overtake reads of its target that were issued before it: seen on an H200 in a fifth of all launches of
    one length. So its target depends on what they brought, by bits of an address that are 0 in shared memory.
    """
    values = " ".join([f"or.b32 read, read, ${6 + i};" for i in range(reads)])
    return (
        "{ .reg .pred first, goes; .reg .b64 state, policy; .reg .b32 zero, read, to; setp.ne.u32 goes, $5, 0;"
        f" shr.u32 zero, $2, 20; mov.u32 read, 0; {values} and.b32 read, read, zero; add.u32 to, $2, read;"
        " bar.warp.sync -1; elect.sync _|first, -1; and.pred first, first, goes;"
        " @first mbarrier.arrive.expect_tx.shared.b64 state, [$1], $4;"
        " createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [to], [$3], $4, [$1], policy;"
        " mov.u32 $0, 0; }"
    )


@triton.jit
def send_side(
    buffers, records_ptr, step, blocks, bits, goes, after, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr
):
    """Ask for K, or V, of each warp's block in a step.

    Args:
        goes: whether anything is asked for; each request has to be awaited.
        after: values [W, 32], one of each read of the slot, which is free once they are there.
    """
    warps, lanes = _warps_and_lanes(W)
    size = 8 * D * bits + 2 * D
    side = _records_of(records_ptr, step, blocks, size, W).to(tl.int64)
    slot, barrier = _buffer_of(buffers, warps, IS_V, D), _barriers_of(buffers, warps, W, D)
    if IS_V:
        side, barrier = side + size, barrier + 8
    # By an elected thread: if a comparison chose it, the assembler would not know that it is one, and would loop.
    operands = (barrier + lanes * 0, slot + lanes * 0, side + lanes * 0, size + 0 * (warps + lanes))
    operands = operands + (goes.to(tl.int32) + 0 * (warps + lanes),) + after  # noqa: RUF005 (Triton has no *)
    tl.inline_asm_elementwise(
        _copy_after(len(after)), "=r,r,r,l,r,r" + ",r" * len(after), operands, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_side(buffers, parity, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """The slots [W, 1] of a side, which is there once they are known; parity: of the step, 0 and 1 alternate.

    No deadline: a copy of this program's own always ends.
    """
    warps, _ = _warps_and_lanes(W)
    FIRST: tl.constexpr = W * buffer_bytes(D, True) + (8 if IS_V else 0)
    buffers = tl.inline_asm_elementwise(
        "{ .reg .pred done; .reg .u32 barrier; mov.u32 barrier, %tid.x; shr.u32 barrier, barrier, 5;"
        f" mad.lo.u32 barrier, barrier, {BARRIERS}, $1;"
        f" WAIT: mbarrier.try_wait.parity.shared.b64 done, [barrier+{FIRST}], $2; @!done bra WAIT; mov.u32 $0, $1; }}",
        "=r,r,r", [buffers, parity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return _buffer_of(buffers, warps, IS_V, D)


@triton.jit
def _read(side, at, OFFSET: tl.constexpr, SIZE: tl.constexpr):
    """SIZE words, 2 or 4, of each lane from word `at` [1, 32] + OFFSET of its warp's side on: [W, 32] each.

    And with a side in shared memory one of them in a tuple: with it that read is done.
    """
    if INTERPRETED:
        words = tl.load((side + at + OFFSET)[:, :, None] + tl.arange(0, SIZE)[None, None, :])
        x = unstacked(words, SIZE)
        done = ()
    else:
        # By assembly from memory as well: with a load the compiler would choose which lane has what.
        IS_SLOT: tl.constexpr = not side.dtype.is_ptr()
        SPACE: tl.constexpr = "shared" if IS_SLOT else "global"
        KIND: tl.constexpr = "r" if IS_SLOT else "l"
        BYTES: tl.constexpr = OFFSET * 4
        place = side.to(tl.int32 if IS_SLOT else tl.int64) + at * 4
        if SIZE == 4:
            x = tl.inline_asm_elementwise(
                f"ld.{SPACE}.v4.b32 {{$0, $1, $2, $3}}, [$4+{BYTES}];", f"=r,=r,=r,=r,{KIND}", [place],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            x = tl.inline_asm_elementwise(
                f"ld.{SPACE}.v2.b32 {{$0, $1}}, [$2+{BYTES}];", f"=r,=r,{KIND}", [place],
                dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        done = (x[0],) if IS_SLOT else ()
    return x, done


@triton.jit
def _read_codes(side, D: tl.constexpr, BITS: tl.constexpr):
    """Codes of a side: four words of a lane for each D BITS / 64; and what frees the slot."""
    words, done = (), ()
    for n in tl.static_range(2 * D * BITS // LANE_WORDS):
        row, row_done = _read(side, tl.arange(0, 32)[None, :] * 4, LANE_WORDS * n, 4)
        words, done = words + (row,), done + row_done  # noqa: RUF005 (Triton has no *)
    return words, done


@triton.jit
def read_k(side, D: tl.constexpr, BITS: tl.constexpr):
    """K of a step, [W, 32] int32: codes, four words of a lane for each D BITS / 64, and words of `s_int` and of `z`.

    Those are of each channel tile: `s_int` of lanes 4 g + t the word of g / 2, `z` that of t. And what frees the slot,
    if `side` is one: it is what `side_of` or `await_side` has returned.
    """
    CODES: tl.constexpr = 2 * D * BITS
    TILES: tl.constexpr = D // 16
    lanes = tl.arange(0, 32)[None, :]
    words, done = _read_codes(side, D, BITS)
    s_int, z = (), ()
    for n in tl.static_range(TILES // 4):
        row, row_done = _read(side, lanes // 8 * TILES, CODES + 4 * n, 4)
        s_int, done = s_int + row, done + row_done
    for n in tl.static_range(TILES // 4):
        row, row_done = _read(side, lanes % 4 * TILES, CODES + D // 4 + 4 * n, 4)
        z, done = z + row, done + row_done
    return words, s_int, z, done


@triton.jit
def read_v(side, D: tl.constexpr, BITS: tl.constexpr):
    """V of a step, [W, 32] int32: codes, four words of a lane for each D BITS / 64, and words of `s_int` and of `z`.

    Those are the same for all t, D / 32 of [g], each of two channel tiles. And what frees the slot.
    """
    CODES: tl.constexpr = 2 * D * BITS
    RUN: tl.constexpr = D // 32
    lanes = tl.arange(0, 32)[None, :]
    words, done = _read_codes(side, D, BITS)
    s_int, s_done = _read(side, lanes // 4 * RUN, CODES, RUN)
    z, z_done = _read(side, lanes // 4 * RUN, CODES + D // 4, RUN)
    return words, s_int, z, done + s_done + z_done
