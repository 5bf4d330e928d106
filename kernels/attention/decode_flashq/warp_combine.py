"""The end of a turn of decode over quantised blocks: the online softmaxes of a program's warps become one partial.

In lanes, as in values.py: lane `4 g + t` has head t, or heads 2 t and 2 t + 1 (c of C), and the channels 8 n + g.
Each warp puts what it has into its own slots in shared memory (record_loads.py), which it has read by then; after one
barrier each takes a share of the channels from the slots of all. By assembly, since Triton would take a dozen barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from alspec.kernels.attention.decode_flashq.record_loads import buffer_bytes
from alspec.kernels.comm.ll_packets import pack_packets
from alspec.kernels.common.device import INTERPRETED, inverse_of_sum, log2_of_sum

__all__ = ["free_buffers", "combine_warps", "write_heads"]


@triton.constexpr_function
def _exchange_assembly(warps, values, slot):
    """Put `values` floats of a lane and two more into the warp's slots, and take those of all warps for a share.

    $0, ...: of each warp its values of that share, then the two.  Then four addresses, of a lane: to put the first
    values, and the two; to take. Then what is put. slot: bytes of a warp's slots.
    """
    share = values // warps
    size = min(share, 4)
    taken = warps * (share + 2)
    row = size * 128  # bytes of `size` values of all lanes
    code, given = "{", taken + 4

    def registers(first, count):
        return "{" + ", ".join([f"${first + i}" for i in range(count)]) + "}"

    for i in range(0, values, size):
        code += f" st.shared.v{size}.f32 [${taken}+{i // size * row}], {registers(given + i, size)};"
    code += f" st.shared.v2.f32 [${taken + 1}], {registers(given + values, 2)}; bar.sync 0;"
    for warp in range(warps):
        first = warp * (share + 2)
        for i in range(0, share, size):
            at = warp * slot + i // size * row
            code += f" ld.shared.v{size}.f32 {registers(first + i, size)}, [${taken + 2}+{at}];"
        code += f" ld.shared.v2.f32 {registers(first + share, 2)}, [${taken + 3}+{warp * slot}];"
    return code + " }"


@triton.jit
def _exchange(buffers, values, OFFSET: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """N values [W, 32] of a lane, and two more -> of each warp those of a share: N / W, and the two.

    A warp's share are the N / W values from N / W times its number on. OFFSET: where in the slots.
    """
    N: tl.constexpr = len(values) - 2
    SHARE: tl.constexpr = N // W
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    if INTERPRETED:
        taken = ()
        for warp in tl.static_range(W):
            of_warp = ()
            for i in tl.static_range(N + 2):
                of_warp = of_warp + (tl.sum(tl.where(warps == warp, values[i], 0.0), 0)[None, :],)  # noqa: RUF005
            for i in tl.static_range(SHARE):
                mine = tl.zeros([W, 32], tl.float32)
                for to in tl.static_range(W):
                    mine = tl.where(warps == to, of_warp[to * SHARE + i], mine)
                taken = taken + (mine,)  # noqa: RUF005
            for i in tl.static_range(N, N + 2):
                taken = taken + (of_warp[i] + tl.zeros([W, 32], tl.float32),)  # noqa: RUF005
    else:
        SLOT: tl.constexpr = buffer_bytes(D, BULK)
        SIZE: tl.constexpr = 4 * min(SHARE, 4)
        first = buffers + OFFSET + lanes * SIZE
        sums = buffers + (OFFSET + N * 128) + lanes * 8
        places = (first + warps * SLOT, sums + warps * SLOT, first + warps * (SHARE * 128), sums + warps * 0)
        taken = tl.inline_asm_elementwise(
            _exchange_assembly(W, N, SLOT), "=&f" + ",=&f" * (W * (SHARE + 2) - 1) + ",r,r,r,r" + ",f" * (N + 2),
            places + values, dtype=(tl.float32,) * (W * (SHARE + 2)), is_pure=False, pack=1,
        )  # fmt: skip
    return taken


@triton.constexpr_function
def _free_assembly(bulk):
    fence = "fence.proxy.async.shared::cta;" if bulk else ""
    return f"{{ .reg .pred again; setp.ne.u32 again, $1, 0; @again bar.sync 0; {fence} mov.u32 $0, 0; }}"


@triton.jit
def free_buffers(again, BULK: tl.constexpr):
    """Before copies into the slots, if there will be any: all warps have read there, and what they wrote is done."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            _free_assembly(BULK),
            "=r,r", [again.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def combine_warps(buffers, maxima, state, HEADS: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BULK: tl.constexpr):
    """One partial of the warps' online softmaxes, maxima and state of `add_values`.

    Returns:
        o, normalised: (c, i), of a lane's head c, the i-th of the warp's D / 8 / W shares of 8 channels, and g.
        lse: (c), base 2.
    """
    N: tl.constexpr = D // 8
    SHARE: tl.constexpr = N // W
    o, lse = (), ()
    for c in tl.static_range(HEADS // 4):
        row_sum, excess, values = state[c * (N + 2)], state[c * (N + 2) + 1], ()
        for n in tl.static_range(N):
            values = values + (state[c * (N + 2) + 2 + n] - excess,)  # noqa: RUF005 (Triton has no *)
        taken = _exchange(buffers, values + (maxima[c], row_sum), c * (N + 2) * 128, W, D, BULK)  # noqa: RUF005
        top = taken[SHARE]
        for warp in tl.static_range(1, W):
            top = tl.maximum(top, taken[warp * (SHARE + 2) + SHARE])
        total, weights = tl.zeros_like(top), ()
        for warp in tl.static_range(W):
            weight = tl.exp2(taken[warp * (SHARE + 2) + SHARE] - top)
            total += taken[warp * (SHARE + 2) + SHARE + 1] * weight
            weights = weights + (weight,)  # noqa: RUF005
        inverse = inverse_of_sum(total)
        for i in tl.static_range(SHARE):
            x = tl.zeros_like(top)
            for warp in tl.static_range(W):
                x += taken[warp * (SHARE + 2) + i] * weights[warp]
            o = o + (x * inverse,)  # noqa: RUF005
        lse = lse + (top + log2_of_sum(total),)  # noqa: RUF005
    return o, lse


@triton.jit
def _write(pointers, x, where):
    """Store x [W, 32] from the lanes that have it: by assembly, since a store would have others move it first."""
    x = x.to(pointers.dtype.element_ty)
    if INTERPRETED:
        tl.store(pointers, x, mask=where)
    else:
        BITS: tl.constexpr = x.dtype.primitive_bitwidth
        KIND: tl.constexpr = "l" if BITS == 64 else "r" if BITS == 32 else "h"
        STORE: tl.constexpr = "st.relaxed.sys.global" if BITS == 64 else "st.global"  # 64: words, as `store_packets`
        bits = x.to(tl.int64 if BITS == 64 else tl.int32 if BITS == 32 else tl.int16, bitcast=True)
        tl.inline_asm_elementwise(
            f"{{ .reg .pred here; setp.ne.u32 here, $3, 0; @here {STORE}.b{BITS} [$1], $2; mov.u32 $0, 0; }}",
            f"=r,l,{KIND},r", [pointers.to(tl.int64), bits, where.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def write_heads(
    o,  # of `combine_warps`
    lse,
    o_ptr,  # [..., D]
    lse_ptr,  # [...] fp32, with an epoch words, or None
    first,  # the row of the first query head
    epoch,  # with it, words; or None
    HEADS_PER_KV: tl.constexpr,
    HEADS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """Write a partial into `HEADS_PER_KV` rows, each value by the lane that has it: 32 bytes of a row together."""
    C: tl.constexpr = HEADS // 4
    SHARE: tl.constexpr = D // 8 // W
    warps, lanes = tl.arange(0, W)[:, None], tl.arange(0, 32)[None, :]
    for c in tl.static_range(C):
        head = lanes % 4 * C + c + warps * 0
        exists = head < HEADS_PER_KV
        at = (first + head) * D + warps * (8 * SHARE) + lanes // 4
        for i in tl.static_range(SHARE):
            x = o[c * SHARE + i]
            if epoch is not None:
                x = pack_packets(x, epoch)
            _write(o_ptr + at + 8 * i, x, exists)
        if lse_ptr is not None:
            x = lse[c]
            if epoch is not None:
                x = pack_packets(x, epoch)
            _write(lse_ptr + first + head, x, exists & (lanes // 4 + warps == 0))
