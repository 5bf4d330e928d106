"""Device code of decode attention over a quantised cache: q, from memory to lanes.

All warps of a program need the same few KB of q, and all programs of a head the same bytes. With bulk copies (BULK, see
record_loads.py) q is copied once into shared memory. The heads are padded so that lanes read without bank conflicts.
The copy of q is issued before those of the records; behind them it would wait until their bytes have arrived.
(Exception: a launch that copies its first records before the previous kernel has ended must issue the copy of q behind
them, because that kernel writes q.) On older GPUs, and in fp32, lanes load q value by value.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from alspec.kernels.attention.decode.tile_schedule import query_row
from alspec.kernels.attention.decode_quantised.lanes import reduce_rows
from alspec.kernels.attention.decode_quantised.record_loads import QUERY_BARRIER, head_stride, query_barrier
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum

__all__ = [
    "MAGIC",
    "MAGIC_BITS",
    "ULP",
    "await_query",
    "copy_query",
    "head_offset",
    "load_query_head",
    "query_source",
    "relative_to_max",
]

# n ULP + MAGIC has the nearest integer n + 128 in its lowest bits: the second byte is h, the first is l + 128.
ULP = tl.constexpr(2.0**-40)
MAGIC = tl.constexpr((1.5 * 2.0**23 + 128) * ULP.value)
MAGIC_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", MAGIC.value))[0])


@triton.jit
def query_source(
    q_ptr, output, HKV: tl.constexpr, HEADS_PER_KV: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Return what `head_offset` needs to find the query heads of an output, which may be those of several rows.

    Returns:
        The pointer of the first head. With TOGETHER > 1 also: values from a row to the next, and the index of the
        bundle's last row in the bundle. Columns behind that row repeat it.
    """
    first = q_ptr + query_row(output, 0, HKV, HEADS_PER_KV, ROWS, TOGETHER).to(tl.int64) * D
    if TOGETHER == 1:
        source = (first,)
    else:
        BUNDLES: tl.constexpr = (ROWS + TOGETHER - 1) // TOGETHER
        rows = tl.minimum(ROWS - output // HKV % BUNDLES * TOGETHER, TOGETHER)
        source = (first, HKV * (HEADS_PER_KV // TOGETHER) * D, rows - 1)
    return source


@triton.jit
def head_offset(column, source, HEADS_PER_KV: tl.constexpr, TOGETHER: tl.constexpr, D: tl.constexpr):
    """Return the values between the first head of `query_source` and the head of a column."""
    if TOGETHER == 1:
        offset = column * D
    else:
        HEADS: tl.constexpr = HEADS_PER_KV // TOGETHER
        offset = tl.minimum(column // HEADS, source[2]) * source[1] + column % HEADS * D
    return offset


@triton.constexpr_function
def _copy_assembly(heads, rows, head_dim, stride):
    """Assembly of the bulk copies of q. $1: barrier, q follows behind.  $2: whether to copy.  $3 and up: rows."""
    size = 2 * head_dim
    copies = " ".join(
        [
            "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [$1+{QUERY_BARRIER.value + (row * heads + head) * stride}], [${3 + row}+{head * size}], {size}, [$1];"
            for row in range(rows)
            for head in range(heads)
        ]
    )
    return (
        "{ .reg .pred first, goes; .reg .b64 state; setp.ne.u32 goes, $2, 0;"
        " bar.warp.sync -1; elect.sync _|first, -1; and.pred first, first, goes;"
        f" @first mbarrier.arrive.expect_tx.shared.b64 state, [$1], {rows * heads * size}; {copies} mov.u32 $0, 0; }}"
    )


@triton.jit
def copy_query(
    buffers, source, enabled, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Issue the bulk copies of an output's query heads, 16-bit values, by one lane of the first warp.

    source: of `query_source`.  enabled: whether to copy; each copy must be awaited by `await_query`.
    """
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    zeros = warps * 0 + lanes * 0
    OWN: tl.constexpr = HEADS_PER_KV // TOGETHER
    rows = ()
    for row in tl.static_range(TOGETHER):
        first = source[0] + head_offset(row * OWN, source, HEADS_PER_KV, TOGETHER, D)
        rows = rows + (first.to(tl.int64) + zeros,)  # noqa: RUF005 (Triton has no *)
    tl.inline_asm_elementwise(
        _copy_assembly(OWN, TOGETHER, D, head_stride(D, HEADS)), "=r,r,r" + ",l" * TOGETHER,
        (query_barrier(buffers, W, D) + zeros, (enabled & (warps == 0)).to(tl.int32) + zeros) + rows,  # noqa: RUF005
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def await_query(buffers, parity, W: tl.constexpr, D: tl.constexpr):
    """Wait for the copy of q and return its address. No timeout: the program's own copy always completes."""
    barrier = query_barrier(buffers, W, D)
    barrier = tl.inline_asm_elementwise(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [$1], $2; @!done bra WAIT;"
        " mov.u32 $0, $1; }",
        "=r,r,r", [barrier, parity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return barrier + QUERY_BARRIER


@triton.constexpr_function
def _unpack_assembly(dtype):
    """Assembly that converts the two 16-bit values of $2 to fp32: $0 the lower, $1 the upper."""
    if dtype == tl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"


@triton.jit
def _unpack(word, dtype: tl.constexpr):
    return tl.inline_asm_elementwise(
        _unpack_assembly(dtype), "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def _query_from_shared(
    q_address, c: tl.constexpr, dtype: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """As `_query_from_global`, from shared memory; q_address: of `await_query`."""
    C: tl.constexpr = HEADS // 4
    STRIDE: tl.constexpr = head_stride(D, HEADS)
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    # ldmatrix.trans: a row is the 8 channels 8 n + g of one head; rows 2 t and 2 t + 1 become a word of lane 4 g + t.
    head = tl.minimum(lane % 8 // 2 * C + c, HEADS_PER_KV - 1)
    address = q_address + head * STRIDE + lane // 8 * 32 + lane % 2 * 16
    values = ()
    for n in tl.static_range(D // 64):
        words = tl.inline_asm_elementwise(
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4+{128 * n}];", "=r,=r,=r,=r,r",
            [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        for i in tl.static_range(4):
            values = values + _unpack(words[i], dtype)
    head = tl.minimum(lane % 4 * C + c, HEADS_PER_KV - 1)
    address = q_address + head * STRIDE + lane // 4 % 2 * 16 + lane // 8 * 4
    pairs = ()
    for tile in tl.static_range(D // 16):
        word = tl.inline_asm_elementwise(
            f"ld.shared.b32 $0, [$1+{32 * tile}];", "=r,r", [address], dtype=tl.int32, is_pure=True, pack=1
        )
        pairs = pairs + (_unpack(word, dtype),)  # noqa: RUF005 (Triton has no *)
    return values, pairs


@triton.constexpr_function
def _load_assembly(dtype):
    """Assembly that loads the value at $1 and converts it to fp32, $0."""
    if dtype == tl.bfloat16:
        return "{ .reg .b16 low, x; mov.b16 low, 0; ld.global.b16 x, [$1]; mov.b32 $0, {low, x}; }"
    if dtype == tl.float16:
        return "{ .reg .b16 x; ld.global.b16 x, [$1]; cvt.f32.f16 $0, x; }"
    return "ld.global.b32 $0, [$1];"


@triton.jit
def _load(q_ptr, offsets):
    """Load q at offsets [W, 32] as fp32, by assembly: with `tl.load` the compiler may choose other lanes."""
    if INTERPRETED:
        x = tl.load(q_ptr + offsets).to(tl.float32)
    else:
        # Not pure: it must not move ahead of the wait for the previous kernel.
        x = tl.inline_asm_elementwise(
            _load_assembly(q_ptr.dtype.element_ty),
            "=f,l", [(q_ptr + offsets).to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _query_from_global(
    source, c: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Load q of a lane's head c; source: of `query_source`.

    Returns:
        values: D / 8, of channels 8 n + g.
        pairs: D / 16, of the two channels in each channel tile that the lane contributes to `hi_lo_operands`.
    """
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    g = lane // 4
    head = tl.minimum(lane % 4 * (HEADS // 4) + c, HEADS_PER_KV - 1)
    first = head_offset(head, source, HEADS_PER_KV, TOGETHER, D)
    values, pairs = (), ()
    for n in tl.static_range(D // 8):
        values = values + (_load(source[0], first + (g + 8 * n)),)  # noqa: RUF005
    offsets = first + (g % 2 * 8 + g // 2 * 2)
    for tile in tl.static_range(D // 16):
        pair = _load(source[0], offsets + 16 * tile), _load(source[0], offsets + (16 * tile + 1))
        pairs = pairs + (pair,)  # noqa: RUF005
    return values, pairs


@triton.jit
def load_query_head(
    source, q_address, c: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, BULK_Q: tl.constexpr,
):  # fmt: skip
    """Load q of a lane's head c, as `_query_from_global`; q_address: of `await_query`, with BULK_Q."""
    if BULK_Q:
        loaded = _query_from_shared(q_address, c, source[0].dtype.element_ty, HEADS_PER_KV, HEADS, W, D)
    else:
        loaded = _query_from_global(source, c, HEADS_PER_KV, HEADS, TOGETHER, W, D)
    return loaded


@triton.jit
def relative_to_max(x, D: tl.constexpr):
    """Return the largest |q| of a head, NaN if a q is NaN, and the factor that makes q relative to it.

    Args:
        x: D / 8 values of the head in each lane.
    """
    max_abs = tl.abs(x[0])
    for n in tl.static_range(1, D // 8):
        max_abs = tl.maximum(max_abs, tl.abs(x[n]), propagate_nan=tl.PropagateNan.ALL)
    max_abs = reduce_rows(max_abs, "max.NaN")
    # Multiply by a power of two first: then the inverse is finite for any q, also for 0.
    exponent = tl.maximum(max_abs.to(tl.int32, bitcast=True) >> 23, 32)
    power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = power * inverse_of_sum(tl.maximum(max_abs * power, 1.0))
    return tl.maximum(max_abs, 2.0**-109) + max_abs * 0.0, factor
