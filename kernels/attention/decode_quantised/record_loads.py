"""Device code of decode attention over a quantised cache: loads of records from memory into the registers of a warp.

A record has two *sides*, K's and V's. A side is the codes of a block and their parameters (kv_codec/formats.py).

A tile is W blocks, one for each warp. The words of a record are stored in the order in which a warp's lanes use them as
MMA operands, 16 bytes per lane at a time.

From compute capability 9.0 on (BULK), each warp has a buffer for K and one for V in shared memory. The barriers and q
(query.py) follow behind all buffers. One bulk copy, issued by one lane, loads a side into its buffer; a barrier of the
warp counts the bytes. The lanes read the buffer where they use the data. Then the copy of the same side of the warp's
next block is issued. So copies are always in flight, without registers or address arithmetic for their data, and no
warp waits for another. On older GPUs lanes load the same words from global memory. At the end of a work item, the warps
reuse the buffers to combine their sums (warp_combine.py).

Buffers are read by inline assembly, because Triton does not know this memory. Three rules keep these reads correct:

- A read depends on a wait: its address is a result of the wait. A copy depends on the reads of the buffer before it:
  its address depends on `after`. Reads are pure: the compiler may duplicate them in different layouts, which become one
  again later.
- Only elementwise operations and reshapes are allowed between a read and the MMA that uses it, and no multiplication:
  with one, the compiler chooses other layouts and goes through shared memory and barriers of all warps. A test counts
  the barriers.
- Tensors [W, 32] have a warp in each row and a lane in each column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.common.device import INTERPRETED, unstacked
from alspec.kernels.kv_codec.formats import FORMATS, has_own_bits, side_words

__all__ = [
    "QUERY_BARRIER",
    "await_side",
    "block_index",
    "buffer_bytes",
    "copy_side",
    "head_stride",
    "init_buffers",
    "load_scales",
    "query_barrier",
    "read_channels",
    "read_tokens",
    "side_pointer",
]

LANE_WORDS = tl.constexpr(128)  # words that a warp loads at once: four for each lane
BARRIERS = tl.constexpr(16)  # bytes of a warp's two barriers, K's and V's
QUERY_BARRIER = tl.constexpr(16)  # bytes of q's barrier


@triton.constexpr_function
def _buffer_size(head_dim):
    """Bytes of a buffer: a side of any format."""
    return 4 * max([side_words(format, is_v, 4, head_dim) for format in FORMATS for is_v in (False, True)])


@triton.constexpr_function
def buffer_bytes(head_dim, bulk):
    """Bytes of a warp's buffers: K's and V's; without bulk copies only the sums of up to two heads of a lane."""
    return 2 * _buffer_size(head_dim) if bulk else 2 * 128 * (head_dim // 8 + 2)


@triton.constexpr_function
def head_stride(head_dim, heads):
    """Bytes from one head of q to the next (16-bit values), padded so that lanes read without bank conflicts."""
    return 2 * head_dim + (32 if heads == 4 else 16)


@triton.constexpr_function
def _shared_bytes(warps, head_dim, bulk):
    """Shared memory of a program: all buffers, their barriers, q's barrier and q. At most 48 KB can be declared."""
    query_bytes = QUERY_BARRIER.value + max([heads * head_stride(head_dim, heads) for heads in (4, 8)])
    return warps * buffer_bytes(head_dim, bulk) + (warps * BARRIERS.value + query_bytes if bulk else 0)


@triton.jit
def block_index(tile, warps, blocks, W: tl.constexpr):
    """Return the block of each warp in a tile; past the end, the last block again.

    Args:
        blocks: (first, split, second, count): [first, first + split), then those from `second` on; `count` in all. With
            two further values, (list pointer, is_listed), the blocks are read from this list if is_listed.
    """
    index = tl.minimum(tile * W + warps, blocks[3] - 1)
    gap = blocks[2] - blocks[0] - blocks[1]
    block = blocks[0] + index + tl.minimum(tl.maximum(index - blocks[1] + 1, 0), 1) * gap
    if len(blocks) > 4:
        listed = tl.load(blocks[4] + index, mask=blocks[5] & (index >= 0), other=0)
        block = tl.where(blocks[5], listed, block)
    return block


@triton.jit
def _record_pointer(records_ptr, tile, blocks, record_size, W: tl.constexpr):
    """Return where the record of each warp's block in a tile begins, [W, 1]; record_size: in words."""
    block = block_index(tile, tl.arange(0, W)[:, None], blocks, W)
    return records_ptr + block.to(tl.int64) * record_size


@triton.jit
def side_pointer(
    records_ptr, tile, blocks, FORMAT: tl.constexpr, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Return where K (or V) of each warp's block in a tile begins in global memory, [W, 1]; BITS: of the head."""
    K_WORDS: tl.constexpr = side_words(FORMAT, False, BITS, D)
    V_WORDS: tl.constexpr = side_words(FORMAT, True, BITS, D)
    return _record_pointer(records_ptr, tile, blocks, K_WORDS + V_WORDS, W) + (K_WORDS if IS_V else 0)


@triton.jit
def load_scales(scales_ptr, tile, blocks, W: tl.constexpr):
    """Load the scales of K and of V of a tile's blocks, [W] each."""
    block = block_index(tile, tl.arange(0, W), blocks, W)
    return tl.load(scales_ptr + block * 2), tl.load(scales_ptr + block * 2 + 1)


@triton.jit
def init_buffers(W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """Return the shared memory address of the buffers; with BULK, initialise the barriers. Only once in a kernel."""
    buffers = 0
    if not INTERPRETED:
        SIZE: tl.constexpr = _shared_bytes(W, D, BULK)
        # Not in braces: if the compiler ever duplicates it, ptxas rejects the second declaration.
        buffers = tl.inline_asm_elementwise(
            f".shared .align 128 .b8 record_slots[{SIZE}]; mov.u32 $0, record_slots;",
            "=r,r", [tl.full([], 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if BULK:
        warps, lanes = _warps_and_lanes(W)
        # The fence makes the initialised barriers visible to the copies; `bar.sync` because all warps use q's barrier.
        tl.inline_asm_elementwise(
            "{ .reg .pred first, one; .reg .u32 thread; elect.sync _|first, -1;"
            " @first mbarrier.init.shared.b64 [$1], 1; @first mbarrier.init.shared.b64 [$1+8], 1;"
            " mov.u32 thread, %tid.x; setp.lt.and.u32 one, thread, 32, first; @one mbarrier.init.shared.b64 [$2], 1;"
            " fence.proxy.async.shared::cta; bar.sync 0; mov.u32 $0, 0; }",
            "=r,r,r",
            [_barrier_address(buffers, warps, W, D) + lanes * 0, query_barrier(buffers, W, D) + (warps + lanes) * 0],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return buffers


@triton.jit
def _warps_and_lanes(W: tl.constexpr):
    return tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]


@triton.jit
def _buffer_address(buffers, warps, IS_V: tl.constexpr, D: tl.constexpr):
    """Address of a warp's buffer for K, or of the one behind it for V."""
    return buffers + warps * buffer_bytes(D, True) + (_buffer_size(D) if IS_V else 0)


@triton.jit
def _barrier_address(buffers, warps, W: tl.constexpr, D: tl.constexpr):
    """Address of a warp's barriers: K's, and 8 bytes behind it V's."""
    return buffers + W * buffer_bytes(D, True) + warps * BARRIERS


@triton.jit
def query_barrier(buffers, W: tl.constexpr, D: tl.constexpr):
    """Address of q's barrier; q itself follows QUERY_BARRIER bytes behind."""
    return buffers + W * (buffer_bytes(D, True) + BARRIERS)


@triton.constexpr_function
def _copy_assembly(reads):
    """Assembly of a bulk copy that depends on `reads` values, $6 and up.

    $1: barrier.  $2: destination.  $3: source.  $4: bytes.  $5: whether to copy.

    A bulk copy can overtake earlier reads of its destination. So the destination address depends on the values read,
    through address bits that are 0 in shared memory.

    Each byte is used only once per launch, so it is marked as the first to leave the L2 (`evict_first`).
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
def copy_side(
    buffers, records_ptr, tile, blocks, bits, enabled, after, FORMAT: tl.constexpr, IS_V: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Issue the bulk copy of K (or V) of each warp's block in a tile into its buffer.

    Args:
        enabled: whether to copy; each copy must be awaited by `await_side`.
        after: values [W, 32], one of each earlier read of the buffer; the copy is issued when all have arrived.
    """
    warps, lanes = _warps_and_lanes(W)
    if has_own_bits(FORMAT):
        size = 8 * D * bits + 2 * D
        k_size, record_size = size, size // 2
    else:
        size = 4 * side_words(FORMAT, IS_V, 0, D)
        k_size = 4 * side_words(FORMAT, False, 0, D)
        record_size = side_words(FORMAT, False, 0, D) + side_words(FORMAT, True, 0, D)
    side = _record_pointer(records_ptr, tile, blocks, record_size, W).to(tl.int64)
    buffer, barrier = _buffer_address(buffers, warps, IS_V, D), _barrier_address(buffers, warps, W, D)
    if IS_V:
        side, barrier = side + k_size, barrier + 8
    # `elect.sync`, not a comparison: ptxas would not know that a comparison selects one thread, and would emit a loop.
    operands = (barrier + lanes * 0, buffer + lanes * 0, side + lanes * 0, size + 0 * (warps + lanes))
    operands = operands + (enabled.to(tl.int32) + 0 * (warps + lanes),) + after  # noqa: RUF005 (Triton has no *)
    tl.inline_asm_elementwise(
        _copy_assembly(len(after)), "=r,r,r,l,r,r" + ",r" * len(after), operands, dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_side(buffers, parity, IS_V: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Wait for the copies of a side; return the addresses [W, 1] of its buffers.

    parity: phase of the barriers; 0 and 1 alternate from tile to tile. No timeout: a copy that this program itself
    issued always completes.
    """
    warps, _ = _warps_and_lanes(W)
    FIRST: tl.constexpr = W * buffer_bytes(D, True) + (8 if IS_V else 0)
    buffers = tl.inline_asm_elementwise(
        "{ .reg .pred done; .reg .u32 barrier; mov.u32 barrier, %tid.x; shr.u32 barrier, barrier, 5;"
        f" mad.lo.u32 barrier, barrier, {BARRIERS}, $1;"
        f" WAIT: mbarrier.try_wait.parity.shared.b64 done, [barrier+{FIRST}], $2; @!done bra WAIT; mov.u32 $0, $1; }}",
        "=r,r,r", [buffers, parity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return _buffer_address(buffers, warps, IS_V, D)


@triton.jit
def _read(side, offsets, OFFSET: tl.constexpr, SIZE: tl.constexpr):
    """Load SIZE words, 2 or 4, of each lane.

    Args:
        side: [W, 1], each warp's side: pointer, or shared memory address.
        offsets: [1, 32], first word of each lane in the side, minus OFFSET.
    Returns:
        x: SIZE tensors [W, 32].
        done: a tuple with one of them if the side is in shared memory, else (). What depends on it is after this read.
    """
    if INTERPRETED:
        words = tl.load((side + offsets + OFFSET)[:, :, None] + tl.arange(0, SIZE)[None, None, :])
        x = unstacked(words, SIZE)
        done = ()
    else:
        # Inline assembly also for global memory: with `tl.load` the compiler would choose which lane holds what.
        IS_SHARED: tl.constexpr = not side.dtype.is_ptr()
        SPACE: tl.constexpr = "shared" if IS_SHARED else "global"
        KIND: tl.constexpr = "r" if IS_SHARED else "l"
        BYTES: tl.constexpr = OFFSET * 4
        address = side.to(tl.int32 if IS_SHARED else tl.int64) + offsets * 4
        if SIZE == 4:
            x = tl.inline_asm_elementwise(
                f"ld.{SPACE}.v4.b32 {{$0, $1, $2, $3}}, [$4+{BYTES}];", f"=r,=r,=r,=r,{KIND}", [address],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            x = tl.inline_asm_elementwise(
                f"ld.{SPACE}.v2.b32 {{$0, $1}}, [$2+{BYTES}];", f"=r,=r,{KIND}", [address],
                dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        done = (x[0],) if IS_SHARED else ()
    return x, done


@triton.jit
def _read_codes(side, D: tl.constexpr, BITS: tl.constexpr):
    """Load the codes of a side: D BITS / 64 tuples of four words of a lane; and `done` of `_read`."""
    words, done = (), ()
    for n in tl.static_range(2 * D * BITS // LANE_WORDS):
        row, row_done = _read(side, tl.arange(0, 32)[None, :] * 4, LANE_WORDS * n, 4)
        words, done = words + (row,), done + row_done  # noqa: RUF005 (Triton has no *)
    return words, done


@triton.jit
def read_channels(side, D: tl.constexpr, BITS: tl.constexpr, IS_V: tl.constexpr):
    """Load a FlashQ side of a tile; side: of `side_pointer` or `await_side`.

    Returns, tensors [W, 32] int32:
        words: codes, D BITS / 64 tuples of four words of a lane.
        s_int, z: parameters. K: a word for each channel tile; lane 4 g + t has [g / 2][tile] of `s_int`, [t][tile] of
            `z`. V: D / 32 words of row g, each for two channel tiles; the same for all t.
        done: of `_read`, for `after` of `copy_side`.
    """
    CODES: tl.constexpr = 2 * D * BITS
    lanes = tl.arange(0, 32)[None, :]
    words, done = _read_codes(side, D, BITS)
    if IS_V:
        V_WORDS: tl.constexpr = D // 32
        s_int, s_done = _read(side, lanes // 4 * V_WORDS, CODES, V_WORDS)
        z, z_done = _read(side, lanes // 4 * V_WORDS, CODES + D // 4, V_WORDS)
        done = done + s_done + z_done
    else:
        TILES: tl.constexpr = D // 16
        s_int, z = (), ()
        for n in tl.static_range(TILES // 4):
            row, row_done = _read(side, lanes // 8 * TILES, CODES + 4 * n, 4)
            s_int, done = s_int + row, done + row_done
        for n in tl.static_range(TILES // 4):
            row, row_done = _read(side, lanes % 4 * TILES, CODES + D // 4 + 4 * n, 4)
            z, done = z + row, done + row_done
    return words, s_int, z, done


@triton.jit
def read_tokens(side, D: tl.constexpr, BITS: tl.constexpr):
    """Load a TurboQuant side of a tile; side: of `side_pointer` or `await_side`.

    Returns, tensors [W, 32] int32:
        words: codes, D BITS / 64 tuples of four words of a lane.
        ratios: the four words of the tokens 8 n + g, two fp16 each; the same for all t.
        done: of `_read`, for `after` of `copy_side`.
    """
    words, done = _read_codes(side, D, BITS)
    ratios, ratio_done = _read(side, tl.arange(0, 32)[None, :] // 4 * 4, 2 * D * BITS, 4)
    return words, ratios, done + ratio_done
