"""q of decode over quantised blocks: from memory to operands of the product with K (see keys.py).

All warps of a program need the same few KB of q, and all programs of a head the same bytes. So with bulk copies (BULK,
see record_loads.py) it comes once into shared memory, in 16-byte pieces apart from each other so that lanes read
without conflicts; before the records, because behind them it would wait until their bytes have come. (Where a launch
asks for its first records before the kernel ahead has ended, q, which that kernel writes, comes behind them.)
Elsewhere, and in fp32, lanes load it value by value.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from alspec.kernels.attention.decode_flashq.record_loads import QUERY_BARRIER, head_stride, query_barrier
from alspec.kernels.attention.decode_flashq.values import over_rows, picked, transposed
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum

__all__ = ["FLIP_SIGNS", "LARGEST_Z", "MAGIC", "START_UPPER", "ULP", "operands_of", "query_of_keys", "send_query"]

# Added to n ULP, it leaves the nearest integer n + 128 in the lowest bits: their second byte is h, the first l + 128.
ULP = tl.constexpr(2.0**-40)
MAGIC = tl.constexpr((1.5 * 2.0**23 + 128) * ULP.value)
MAGIC_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", MAGIC.value))[0])
FLIP_SIGNS = tl.constexpr(0x80808080 - 2**32)  # of a word's bytes: + 128 in each
FLIP_UPPER = tl.constexpr(0x80800000 - 2**32)  # of the upper two
LARGEST_Z = tl.constexpr(32500.0)  # n of q in the second sum
START_UPPER = tl.constexpr(2**21)  # what half of the second sum starts at; more than 128 255 64 (see keys.py)


@triton.constexpr_function
def _copy_assembly(rows, head_dim, stride):
    """$1: the barrier, q behind it.  $2: from.  $3: whether."""
    size = 2 * head_dim
    copies = " ".join(
        [
            "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [$1+{QUERY_BARRIER.value + row * stride}], [$2+{row * size}], {size}, [$1];"
            for row in range(rows)
        ]
    )
    return (
        "{ .reg .pred first, goes; .reg .b64 state; setp.ne.u32 goes, $3, 0;"
        " bar.warp.sync -1; elect.sync _|first, -1; and.pred first, first, goes;"
        f" @first mbarrier.arrive.expect_tx.shared.b64 state, [$1], {rows * size}; {copies} mov.u32 $0, 0; }}"
    )


@triton.jit
def send_query(
    buffers, q_ptr, output, goes, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr
):
    """Ask for the query heads of an output, 16-bit values; by one lane of the first warp.

    goes: whether anything is asked for; each request has to be awaited, by `query_of_keys`.
    """
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    everywhere = warps * 0 + lanes * 0
    first = (q_ptr + output.to(tl.int64) * (HEADS_PER_KV * D)).to(tl.int64)
    tl.inline_asm_elementwise(
        _copy_assembly(HEADS_PER_KV, D, head_stride(D, HEADS)), "=r,r,l,r",
        [
            query_barrier(buffers, W, D) + everywhere,
            first + everywhere,
            (goes & (warps == 0)).to(tl.int32) + everywhere,
        ],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _await_query(buffers, parity, W: tl.constexpr, D: tl.constexpr):
    """Where q is, once it is there. No deadline: a copy of this program's own always ends."""
    barrier = query_barrier(buffers, W, D)
    barrier = tl.inline_asm_elementwise(
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [$1], $2; @!done bra WAIT;"
        " mov.u32 $0, $1; }",
        "=r,r,r", [barrier, parity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return barrier + QUERY_BARRIER


@triton.constexpr_function
def _unpack_assembly(dtype):
    """$0, $1: the lower and the upper half of $2, of this type, as fp32."""
    if dtype == tl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;"
    return "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"


@triton.jit
def _unpacked(word, dtype: tl.constexpr):
    return tl.inline_asm_elementwise(
        _unpack_assembly(dtype), "=f,=f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def _from_slot(
    q, c: tl.constexpr, dtype: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """As `_from_memory`, from where `_await_query` has found q."""
    C: tl.constexpr = HEADS // 4
    STRIDE: tl.constexpr = head_stride(D, HEADS)
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    # Matrices of 8 rows, a row the 8 channels 8 n + g of one head: rows 2 t and 2 t + 1 become a word of lane 4 g + t.
    head = tl.minimum(lane % 8 // 2 * C + c, HEADS_PER_KV - 1)
    at = q + head * STRIDE + lane // 8 * 32 + lane % 2 * 16
    values = ()
    for n in tl.static_range(D // 64):
        words = tl.inline_asm_elementwise(
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$0, $1, $2, $3}}, [$4+{128 * n}];", "=r,=r,=r,=r,r",
            [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        for i in tl.static_range(4):
            values = values + _unpacked(words[i], dtype)
    head = tl.minimum(lane % 4 * C + c, HEADS_PER_KV - 1)
    at = q + head * STRIDE + lane // 4 % 2 * 16 + lane // 8 * 4
    pairs = ()
    for tile in tl.static_range(D // 16):
        word = tl.inline_asm_elementwise(
            f"ld.shared.b32 $0, [$1+{32 * tile}];", "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1
        )
        pairs = pairs + (_unpacked(word, dtype),)  # noqa: RUF005 (Triton has no *)
    return values, pairs


@triton.constexpr_function
def _load_assembly(dtype):
    """$0: the value at $1, of this type, as fp32."""
    if dtype == tl.bfloat16:
        return "{ .reg .b16 low, x; mov.b16 low, 0; ld.global.b16 x, [$1]; mov.b32 $0, {low, x}; }"
    if dtype == tl.float16:
        return "{ .reg .b16 x; ld.global.b16 x, [$1]; cvt.f32.f16 $0, x; }"
    return "ld.global.b32 $0, [$1];"


@triton.jit
def _load(q_ptr, at):
    """q at offsets [W, 32], as fp32. By assembly: a load would let the compiler choose other lanes."""
    if INTERPRETED:
        x = tl.load(q_ptr + at).to(tl.float32)
    else:
        # Not pure: it must not move ahead of the wait for the kernel before.
        x = tl.inline_asm_elementwise(
            _load_assembly(q_ptr.dtype.element_ty),
            "=f,l", [(q_ptr + at).to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return x


@triton.jit
def _from_memory(
    q_ptr, output, c: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr
):
    """q of a lane's head c: D / 8 values, of channels 8 n + g; D / 16 pairs, of the channels of `operands_of`."""
    lane = tl.arange(0, 32)[None, :] + tl.zeros([W, 32], tl.int32)
    g = lane // 4
    head = output * HEADS_PER_KV + tl.minimum(lane % 4 * (HEADS // 4) + c, HEADS_PER_KV - 1)
    values, pairs = (), ()
    for n in tl.static_range(D // 8):
        values = values + (_load(q_ptr, head * D + (g + 8 * n)),)  # noqa: RUF005
    at = head * D + (g % 2 * 8 + g // 2 * 2)
    for tile in tl.static_range(D // 16):
        pairs = pairs + ((_load(q_ptr, at + 16 * tile), _load(q_ptr, at + (16 * tile + 1))),)  # noqa: RUF005
    return values, pairs


@triton.jit
def operands_of(a, b, C: tl.constexpr):
    """A word of right operands, or two, high and low, of n + 128 of each c: a in the lower byte of 16 bits, b above.

    Lane `4 g + t` gives those of the rows 2 g and 2 g + 1, its own heads' columns, and gets 4 rows of column g.
    """
    if C == 1:
        operands = (transposed(picked(a[0], b[0], 0x4051) ^ FLIP_UPPER),)  # l
    else:
        even, odd = picked(a[0], b[0], 0x4051), picked(a[1], b[1], 0x4051)
        high, low = picked(even, odd, 0x5410), picked(even, odd, 0x7632)
        operands = (transposed(high), transposed(low ^ FLIP_SIGNS))
    return operands


@triton.jit
def query_of_keys(
    q_ptr, output, buffers, parity, HEADS_PER_KV: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    SENT: tl.constexpr,
):  # fmt: skip
    """The query heads of an output, in lanes, relative to the largest of each. SENT: by `send_query`.

    Returns, each for each c but the third:
        That largest |q|; no number if one q is none.
        D / 8 values q, of channels 8 n + g.
        Right operands of the second sum: those of `operands_of`, tile after tile.
        What the second sum has too much, because bytes are z + 128 and because of its start.
    """
    C: tl.constexpr = HEADS // 4
    TILES: tl.constexpr = D // 16
    q = 0
    if SENT:
        q = _await_query(buffers, parity, W, D)
    tops, values, even, odd, offsets = (), (), (), (), ()
    for c in tl.static_range(C):
        if SENT:
            x, pairs = _from_slot(q, c, q_ptr.dtype.element_ty, HEADS_PER_KV, HEADS, W, D)
        else:
            x, pairs = _from_memory(q_ptr, output, c, HEADS_PER_KV, HEADS, W, D)
        top = tl.abs(x[0])
        for n in tl.static_range(1, D // 8):
            top = tl.maximum(top, tl.abs(x[n]), propagate_nan=tl.PropagateNan.ALL)
        top = over_rows(top, "max.NaN")
        # A power of two first: its inverse is a number whatever q is, 0 too.
        exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 32)
        power = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        factor = power * inverse_of_sum(tl.maximum(top * power, 1.0))
        tops = tops + (tl.maximum(top, 2.0**-109) + top * 0.0,)  # noqa: RUF005
        scaled = ()
        for n in tl.static_range(D // 8):
            scaled = scaled + (x[n] * factor,)  # noqa: RUF005
        values = values + (scaled,)  # noqa: RUF005
        a, b, total = (), (), tl.zeros([W, 32], tl.int32)
        for tile in tl.static_range(TILES):
            low = pairs[tile][0] * (factor * (LARGEST_Z * ULP)) + MAGIC
            high = pairs[tile][1] * (factor * (LARGEST_Z * ULP)) + MAGIC
            a, b = a + (low.to(tl.int32, bitcast=True),), b + (high.to(tl.int32, bitcast=True),)  # noqa: RUF005
            total += (a[tile] - MAGIC_BITS) + (b[tile] - MAGIC_BITS)
        even, odd = even + (a,), odd + (b,)  # noqa: RUF005
        offsets = offsets + (over_rows(total.to(tl.float32), "add") * 128.0 + 2 * 257.0 * START_UPPER,)  # noqa: RUF005
    operands = ()
    for tile in tl.static_range(TILES):
        a, b = (), ()
        for c in tl.static_range(C):
            a, b = a + (even[c][tile],), b + (odd[c][tile],)  # noqa: RUF005
        operands = operands + operands_of(a, b, C)
    return tops, values, operands, offsets
