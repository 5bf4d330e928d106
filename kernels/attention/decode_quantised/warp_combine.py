"""Device code of decode attention over a quantised cache: combine the warps of a program into one partial.

In lanes, as in values.py: lane `4 g + t` has head t, or heads 2 t and 2 t + 1 (c of C), and the channels 8 n + g.

Each warp writes its values into its buffers in shared memory (record_loads.py), after it has read all records there.
After one barrier each warp computes a slice of the channels from the buffers of all warps. This is inline assembly,
because Triton's reductions would need many barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_quantised.record_loads import buffer_bytes
from alspec.kernels.comm.ll_packets import pack_packets
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum, log2_of_sum

__all__ = ["combine_warps", "free_buffers", "store_lanes", "write_heads"]


@triton.constexpr_function
def _exchange_assembly(warps, values, warp_bytes):
    """Assembly that stores `values` + 2 floats of each lane in the warp's buffers and loads one slice from all warps.

    Operands: $0 and up, the results: for each warp the values of the slice, then its two. Then four addresses of the
    lane: store the values, store the two, load the values, load the two. Then the floats to store.
    warp_bytes: bytes of a warp's buffers.
    """
    slice_size = values // warps
    vector = min(slice_size, 4)
    num_received = warps * (slice_size + 2)
    row = vector * 128  # bytes of `vector` values of all lanes
    code, sent = "{", num_received + 4

    def registers(first, count):
        return "{" + ", ".join([f"${first + i}" for i in range(count)]) + "}"

    for i in range(0, values, vector):
        code += f" st.shared.v{vector}.f32 [${num_received}+{i // vector * row}], {registers(sent + i, vector)};"
    code += f" st.shared.v2.f32 [${num_received + 1}], {registers(sent + values, 2)}; bar.sync 0;"
    for warp in range(warps):
        first = warp * (slice_size + 2)
        for i in range(0, slice_size, vector):
            offset = warp * warp_bytes + i // vector * row
            code += f" ld.shared.v{vector}.f32 {registers(first + i, vector)}, [${num_received + 2}+{offset}];"
        code += f" ld.shared.v2.f32 {registers(first + slice_size, 2)}, [${num_received + 3}+{warp * warp_bytes}];"
    return code + " }"


@triton.jit
def _exchange(buffers, values, OFFSET: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """Exchange values between the warps of a program through shared memory.

    Warp w receives the slice of N / W values that begins at value w N / W, from every warp.

    Args:
        values: N + 2 tensors [W, 32].  OFFSET: byte offset in the buffers.
    Returns:
        For each warp: N / W values of the slice, then its last two values.
    """
    N: tl.constexpr = len(values) - 2
    SLICE: tl.constexpr = N // W
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    if INTERPRETED:
        received = ()
        for warp in tl.static_range(W):
            warp_values = ()
            for i in tl.static_range(N + 2):
                warp_values = warp_values + (tl.sum(tl.where(warps == warp, values[i], 0.0), 0)[None, :],)  # noqa: RUF005
            for i in tl.static_range(SLICE):
                own = tl.zeros([W, 32], tl.float32)
                for dst in tl.static_range(W):
                    own = tl.where(warps == dst, warp_values[dst * SLICE + i], own)
                received = received + (own,)  # noqa: RUF005
            for i in tl.static_range(N, N + 2):
                received = received + (warp_values[i] + tl.zeros([W, 32], tl.float32),)  # noqa: RUF005
    else:
        WARP_BYTES: tl.constexpr = buffer_bytes(D, BULK)
        SIZE: tl.constexpr = 4 * min(SLICE, 4)
        first = buffers + OFFSET + lanes * SIZE
        sums = buffers + (OFFSET + N * 128) + lanes * 8
        addresses = (
            first + warps * WARP_BYTES,
            sums + warps * WARP_BYTES,
            first + warps * (SLICE * 128),
            sums + warps * 0,
        )
        received = tl.inline_asm_elementwise(
            _exchange_assembly(W, N, WARP_BYTES), "=&f" + ",=&f" * (W * (SLICE + 2) - 1) + ",r,r,r,r" + ",f" * (N + 2),
            addresses + values, dtype=(tl.float32,) * (W * (SLICE + 2)), is_pure=False, pack=1,
        )  # fmt: skip
    return received


@triton.constexpr_function
def _free_assembly(bulk):
    """Assembly of `free_buffers`. $1: whether to wait."""
    fence = "fence.proxy.async.shared::cta;" if bulk else ""
    return f"{{ .reg .pred again; setp.ne.u32 again, $1, 0; @again bar.sync 0; {fence} mov.u32 $0, 0; }}"


@triton.jit
def free_buffers(enabled, BULK: tl.constexpr):
    """Barrier before new copies into the buffers: all warps have read them, and their writes are visible to the copies.

    enabled: whether another work item, and so new copies, will follow.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            _free_assembly(BULK),
            "=r,r", [enabled.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def combine_warps(buffers, maxima, state, HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """Combine the warps' online softmaxes into one partial.

        o = sum_w 2^(m_w - m) o_w / l,   l = sum_w 2^(m_w - m) l_w,   lse = m + log2 l,   m = max_w m_w

    o_w, l_w: sums of warp w relative to its maximum m_w, not normalised.

    Args:
        maxima, state: of `attend_blocks`, in lanes.
    Returns:
        o: normalised; (c, i) is head c of a lane and channel 8 i + g of the warp's slice of D / W channels.
        lse: (c), base 2.
    """
    N: tl.constexpr = D // 8
    SLICE: tl.constexpr = N // W
    o, lse = (), ()
    for c in tl.static_range(HEADS // 4):
        row_sum, excess, values = state[c * (N + 2)], state[c * (N + 2) + 1], ()
        for n in tl.static_range(N):
            values = values + (state[c * (N + 2) + 2 + n] - excess,)  # noqa: RUF005 (Triton has no *)
        received = _exchange(buffers, values + (maxima[c], row_sum), c * (N + 2) * 128, W, D, BULK)  # noqa: RUF005
        max_all = received[SLICE]
        for warp in tl.static_range(1, W):
            max_all = tl.maximum(max_all, received[warp * (SLICE + 2) + SLICE])
        total, weights = tl.zeros_like(max_all), ()
        for warp in tl.static_range(W):
            weight = tl.exp2(received[warp * (SLICE + 2) + SLICE] - max_all)
            total += received[warp * (SLICE + 2) + SLICE + 1] * weight
            weights = weights + (weight,)  # noqa: RUF005
        inverse = inverse_of_sum(total)
        for i in tl.static_range(SLICE):
            x = tl.zeros_like(max_all)
            for warp in tl.static_range(W):
                x += received[warp * (SLICE + 2) + i] * weights[warp]
            o = o + (x * inverse,)  # noqa: RUF005
        lse = lse + (max_all + log2_of_sum(total),)  # noqa: RUF005
    return o, lse


@triton.jit
def store_lanes(pointers, x, lane_mask):
    """Store x [W, 32] from the lanes that hold it, by assembly: `tl.store` would move it to other lanes first."""
    x = x.to(pointers.dtype.element_ty)
    if INTERPRETED:
        tl.store(pointers, x, mask=lane_mask)
    else:
        BITS: tl.constexpr = x.dtype.primitive_bitwidth
        KIND: tl.constexpr = "l" if BITS == 64 else "r" if BITS == 32 else "h"
        # 64 bits are LL packets, stored as by `store_packets`.
        STORE: tl.constexpr = "st.relaxed.sys.global" if BITS == 64 else "st.global"
        bits = x.to(tl.int64 if BITS == 64 else tl.int32 if BITS == 32 else tl.int16, bitcast=True)
        tl.inline_asm_elementwise(
            f"{{ .reg .pred here; setp.ne.u32 here, $3, 0; @here {STORE}.b{BITS} [$1], $2; mov.u32 $0, 0; }}",
            f"=r,l,{KIND},r", [pointers.to(tl.int64), bits, lane_mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def write_heads(
    o,  # of `combine_warps`
    lse,  # of `combine_warps`
    o_ptr,  # [..., D]; with an epoch LL packets
    lse_ptr,  # [...] fp32; with an epoch LL packets; or None
    first,  # row of the first query head
    epoch,  # of the LL packets, or None
    HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """Write a partial into `HEADS_PER_KV` rows; each lane writes its own values, 32 bytes of a row together."""
    C: tl.constexpr = HEADS // 4
    SLICE: tl.constexpr = D // 8 // W
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    for c in tl.static_range(C):
        head = lanes % 4 * C + c + warps * 0
        head_mask = head < HEADS_PER_KV
        offsets = (first + head) * D + warps * (8 * SLICE) + lanes // 4
        for i in tl.static_range(SLICE):
            x = o[c * SLICE + i]
            if epoch is not None:
                x = pack_packets(x, epoch)
            store_lanes(o_ptr + offsets + 8 * i, x, head_mask)
        if lse_ptr is not None:
            x = lse[c]
            if epoch is not None:
                x = pack_packets(x, epoch)
            store_lanes(lse_ptr + first + head, x, head_mask & (lanes // 4 + warps == 0))
