"""The handover between paired groups, over LL packets: x, the newest k and v, and `A~` of a layer; at the end x alone.

The kernel that computes a value also pushes it: `reduce_norm` pushes x (for the next layer, or after the last one),
`qkv_rope_append` pushes k and v, attention pushes `A~`. The receiver waits for each packet. Roles and verdicts are in
roles.py. A receiver that computes on a rejected `A~` also pushes; its paired rank is the sender and does not read these
packets. Layer 0 needs no x: both groups have the embedding.

Shapes: B requests, L layers, Hq and Hkv this rank's query and KV heads, D head_dim, N cache capacity, S sums of squares
of each request, R (dist2, norm2) pairs per request, M = hidden + 2 Hkv D packets of a request's message: x, k and v.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.attention.decode.lean_decode import RecallBuffers, SpecOutput
from alspec.kernels.attention.dispatch import CacheLayer, KVLayer
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import store_packets, wait_packets
from alspec.kernels.comm.pair_state import PairState
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.kv_codec.flashq.record import TOKENS, to_int8
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD
from alspec.kernels.norm.residual import BLOCK as RESIDUAL_BLOCK
from alspec.kernels.norm.residual import num_square_sums, write_residual

__all__ = [
    "cache_args",
    "launch_receive_residual",
    "newest_offset",
    "pair_spec_output",
    "receive_handover",
    "receive_residual",
    "store_message",
]

BLOCK = 32  # packets of one program, one for each thread


@triton.jit
def newest_offset(j, request, seq_lens_ptr, capacity, HKV: tl.constexpr, D: tl.constexpr):
    """Offset of channel `j` of the newest token's HKV x D channels in a cache [B, HKV, capacity, D]."""
    position = tl.load(seq_lens_ptr + request) - 1
    return ((request * HKV + j // D).to(tl.int64) * capacity + position) * D + j % D


@triton.jit
def store_message(
    value, index, has_x, request, x_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr, capacity, seq_lens_ptr,
    HIDDEN: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store channels `index` of a request's message (x, then the newest k and v) where this rank reads them.

    Without `has_x`, x is not stored. With a tail (quantised cache), k and v go into it, quantised as `qkv_rope_append`
    does it in the other group.
    """
    tl.store(x_ptr + request * HIDDEN + index, value, mask=(index < HIDDEN) & has_x)
    j = index - HIDDEN
    is_k, is_v = (j >= 0) & (j < HKV * D), (j >= HKV * D) & (j < 2 * HKV * D)
    c = tl.maximum(j, 0) % (HKV * D)
    if tail_ptr is None:
        offsets = newest_offset(c, request, seq_lens_ptr, capacity, HKV, D)
        tl.store(k_ptr + offsets, value.to(k_ptr.dtype.element_ty), mask=is_k)
        tl.store(v_ptr + offsets, value.to(v_ptr.dtype.element_ty), mask=is_v)
    else:
        row = (request * HKV + c // D) * 2 + is_v.to(tl.int32)
        q1 = to_int8(value, tl.load(tail_scale_ptr + row, mask=is_k | is_v, other=1.0))
        position = tl.load(seq_lens_ptr + request) - 1
        tl.store(tail_ptr + (row * TOKENS + position % TOKENS) * D + c % D, q1.to(tl.int8), mask=is_k | is_v)


def pair_spec_output(
    pair: PairState, layer: int, chunk_size: int, sums: Tensor, recall: RecallBuffers | None = None
) -> SpecOutput:
    """Return where a sender's attention writes `A~` (the paired rank's mailbox) and the sums for the verdict.

    Args:
        sums: [B, R, 2] fp32, written: (dist2, norm2) of slices of heads.
        recall: recalled blocks of the layer.
    """
    mailbox, in_parts = pair.paired, pair.shape.spec_parts > 1
    return SpecOutput(
        chunk_size, mailbox.spec_out[layer], sums, pair.exchange.epoch, mailbox.spec_lse[layer] if in_parts else None,
        recall,
    )  # fmt: skip


def cache_args(cache: CacheLayer) -> tuple[Tensor | int | None, ...]:
    """Return the arguments k_ptr, v_ptr, tail_ptr, tail_scale_ptr and capacity of `store_message`."""
    if isinstance(cache, KVLayer):
        return cache.k, cache.v, None, None, cache.k.shape[2]
    return None, None, cache.tail, cache.tail_scale, 0


@triton.jit
def _receive_spec(
    spec_out_ptr,
    spec_lse_ptr,
    attn_out_ptr,
    program,
    layer,
    request,
    num_requests,
    epoch,
    timeout_ns,
    fault_ptr,
    code,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Receive VALUES channels of `A~`: one packet each, or all PARTS partials and their lse, combined."""
    channel = program * VALUES + tl.arange(0, VALUES)
    mask = channel < OUT
    if PARTS == 1:
        ptrs = spec_out_ptr + (layer * num_requests + request).to(tl.int64) * OUT + channel
        spec_out = wait_packets(ptrs, mask, epoch, timeout_ns, fault_ptr, code + tl.zeros_like(channel))
    else:
        PAD: tl.constexpr = BLOCK // VALUES // 2
        column = tl.arange(0, 2 * PAD)[None, :]
        part = column % PAD
        row = (layer * PARTS + part).to(tl.int64) * num_requests + request
        lse_ptrs = spec_lse_ptr + row * (OUT // D) + (channel // D)[:, None]
        ptrs = tl.where(column < PAD, spec_out_ptr + row * OUT + channel[:, None], lse_ptrs)
        codes = code + tl.zeros([VALUES, 2 * PAD], tl.int32)
        values = wait_packets(ptrs, mask[:, None] & (part < PARTS), epoch, timeout_ns, fault_ptr, codes)
        o, lse = tl.split(tl.permute(tl.reshape(values, [VALUES, 2, PAD]), (0, 2, 1)))
        lse = tl.where((tl.arange(0, PAD) < PARTS)[None, :], lse, float("-inf"))
        weight = tl.exp2(lse - tl.max(lse, 1)[:, None])
        spec_out = tl.sum(o * weight, 1) / tl.sum(weight, 1)
    tl.store(attn_out_ptr + request * OUT + channel, spec_out.to(attn_out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "timeout_ns", "code"], do_not_specialize_on_alignment=PER_HEAD)
def _receive_handover_kernel(
    x_ptr,  # [B, HIDDEN] fp32
    k_ptr,  # [B, HKV, N, D], or None: store into the tail
    v_ptr,
    tail_ptr,  # [B, HKV, 2, 64, D] int8, or None
    tail_scale_ptr,  # [B, HKV, 2] fp32
    capacity,
    seq_lens_ptr,  # [B] int32, with the new token
    attn_out_ptr,  # [B, OUT]
    inbox_ptr,  # [L + 1, B, M] int64
    spec_out_ptr,  # [L, PARTS, B, OUT] int64
    spec_lse_ptr,  # [L, PARTS, B, OUT / D] int64
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    gate_ptr,  # [1] int32
    layer,
    timeout_ns,
    code,
    HIDDEN: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,  # channels of `A~` in one program
    SPEC_BLOCKS: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK packets of one request, of `A~` or of its message. Grid [SPEC_BLOCKS + M / BLOCK, B]."""
    MESSAGE: tl.constexpr = HIDDEN + 2 * HKV * D
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    epoch = tl.load(epoch_ptr)
    if PDL:
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    row = (layer * tl.num_programs(1) + request).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = code + tl.zeros_like(index)
    if tl.program_id(0) < SPEC_BLOCKS:
        _receive_spec(
            spec_out_ptr, spec_lse_ptr, attn_out_ptr, tl.program_id(0), layer, request, tl.num_programs(1), epoch,
            timeout_ns, fault_ptr, code, OUT, PARTS, VALUES, D, BLOCK,
        )  # fmt: skip
    else:
        index -= SPEC_BLOCKS * BLOCK
        has_x = layer > 0
        mask = (index < MESSAGE) & ((index >= HIDDEN) | has_x)
        value = wait_packets(inbox_ptr + row * MESSAGE + index, mask, epoch, timeout_ns, fault_ptr, codes)
        store_message(
            value, index, has_x, request, x_ptr, k_ptr, v_ptr, tail_ptr, tail_scale_ptr, capacity, seq_lens_ptr, HIDDEN,
            HKV, D,
        )  # fmt: skip


def receive_handover(
    pair: PairState,
    layer: int,
    x: Tensor,
    cache: CacheLayer,
    seq_lens: Tensor,
    attn_out: Tensor,
    timeout_ns: int,
) -> None:
    """Receive k, v and `A~` from the paired rank, and from layer 1 on x. Gate: `is_receiver`.

    Waits at most `timeout_ns` for each packet. Launch it after the sender's kernels of the layer. Their gate is
    closed on a receiver, so that they do not delay post-attention after `A~` has arrived.

    Args:
        x: [B, hidden] fp32, written.
        cache: of the layer; the newest token is written, in a quantised cache into the tail as by `kv_append_ref`.
        seq_lens: [B] int32, with the new token.
        attn_out: [B, Hq, D], written.
    Capture: graph-safe; allocates nothing.
    """
    shape, exchange, own = pair.shape, pair.exchange, pair.own
    # One packet for each thread, because a thread polls its packets one after the other. With several partials, a
    # channel has several packets. Then each program has more threads, instead of more programs: on a sender, every
    # program starts only to return.
    block = BLOCK if shape.spec_parts == 1 else 4 * BLOCK
    values = block if shape.spec_parts == 1 else block // (2 * triton.next_power_of_2(shape.spec_parts))
    spec_blocks = triton.cdiv(shape.num_qo_heads * shape.head_dim, values)
    grid = (spec_blocks + triton.cdiv(shape.message_packets, block), x.shape[0])
    compiled = jit_launch(_receive_handover_kernel, grid)(
        x, *cache_args(cache), seq_lens, attn_out, own.inbox, own.spec_out, own.spec_lse, exchange.epoch,
        exchange.fault, pair.is_receiver, layer, timeout_ns, pair.late_fault(layer),
        HIDDEN=shape.hidden_size, OUT=shape.num_qo_heads * shape.head_dim, PARTS=shape.spec_parts, VALUES=values,
        SPEC_BLOCKS=spec_blocks, HKV=shape.num_kv_heads, D=shape.head_dim, BLOCK=block, num_warps=block // 32,
        # No fused multiply-add: several lanes combine the same partials in different orders, and any of them may store
        # the result, so their bits must agree.
        enable_fp_fusion=False, **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(do_not_specialize=["timeout_ns", "code"], do_not_specialize_on_alignment=["inbox_ptr", "next_ptr"])
def _receive_residual_kernel(
    inbox_ptr,  # [B, message_packets] int64
    x_ptr,  # [B, HIDDEN] fp32
    gamma_ptr,  # [HIDDEN]
    x_norm_ptr,  # [B, HIDDEN]
    squares_ptr,  # [B, S] fp32
    next_ptr,  # [B, next_packets] int64, or None
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    gate_ptr,  # [1] int32
    timeout_ns,
    code,
    message_packets,
    next_packets,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one request. Grid [HIDDEN / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    gamma = tl.load(gamma_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    epoch = tl.load(epoch_ptr)
    if PDL:
        gdc_wait()
    if tl.load(gate_ptr) == 0:
        return
    ptrs = inbox_ptr + request.to(tl.int64) * message_packets + channels
    x = wait_packets(ptrs, inside, epoch, timeout_ns, fault_ptr, code + tl.zeros_like(channels))
    x = tl.where(inside, x, 0.0)
    if next_ptr is not None:
        store_packets(next_ptr + request.to(tl.int64) * next_packets + channels, x, epoch, inside)
    write_residual(x, request * HIDDEN + channels, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request)


def receive_residual(
    pair: PairState, x: Tensor, gamma: Tensor, x_norm: Tensor, square_sums: Tensor, timeout_ns: int
) -> None:
    """Receive the sender's x after the last layer; compute the inputs of the final norm. Gate: `is_receiver`.

    Args:
        As `reduce_norm`; x is overwritten. Waits at most `timeout_ns` for each packet.
    Capture: graph-safe; allocates nothing.
    """
    code = pair.late_fault(pair.shape.num_layers + 1)
    launch_receive_residual(
        pair.own.inbox[-1], x, gamma, x_norm, square_sums, pair.exchange, pair.is_receiver, timeout_ns, code
    )


def launch_receive_residual(
    packets: Tensor,
    x: Tensor,
    gamma: Tensor,
    x_norm: Tensor,
    square_sums: Tensor,
    exchange: Exchange,
    gate: Tensor,
    timeout_ns: int,
    code: int,
    following: Tensor | None = None,
) -> None:
    """Receive x from packets of this step, and compute the inputs of the next norm.

    Args:
        packets: [B, M] int64, M >= hidden; the first ones of each request are x.
        x, gamma, x_norm, square_sums: as in `reduce_norm`; x is overwritten.
        gate: [1] int32; 0 skips everything.
        timeout_ns, code: longest wait for a packet, and the fault after it.
        following: [B, M] int64; its first packets become x, to be sent on.
    Capture: graph-safe; allocates nothing.
    """
    compiled = jit_launch(_receive_residual_kernel, (num_square_sums(x.shape[1]), x.shape[0]))(
        packets, x, gamma, x_norm, square_sums, following, exchange.epoch, exchange.fault, gate, timeout_ns, code,
        packets.shape[1], 0 if following is None else following.shape[1], HIDDEN=x.shape[1], BLOCK=RESIDUAL_BLOCK,
        num_warps=1, **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
