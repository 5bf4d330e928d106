"""The residual stream of a decode step: embedding, all-reduce, and the input of the next normalised projection.

The stream `x` is fp32 and has the same bits on every rank of a group. Each kernel that changes it also writes, for the
next projection, `x * gamma` in the weights' dtype and partial sums of `x^2`.

Shapes: B requests, V vocabulary, D head_dim, T ranks of a group, S sums of squares of each request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, store_packets, wait_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.common.pdl import wait_for_previous_kernel
from alspec.kernels.common.rotary import RotaryFrequencies

__all__ = ["BLOCK", "embed_norm", "new_residual", "num_square_sums", "reduce_norm", "write_residual"]

BLOCK = 32  # channels of one program: small, so that many programs poll a few packets each


def num_square_sums(hidden_size: int) -> int:
    """Return S, the number of partial sums of `x^2` per request."""
    return int(triton.cdiv(hidden_size, BLOCK))


@triton.jit
def write_residual(x, offsets, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request):
    """Store x, x * gamma and this block's sum of x^2."""
    tl.store(x_ptr + offsets, x, mask=inside)
    tl.store(x_norm_ptr + offsets, (x * gamma).to(x_norm_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + request * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _embed_norm_kernel(
    token_ids_ptr,  # [B] int64
    seq_lens_ptr,  # [B] int32, with the new token
    table_ptr,  # [V, hidden]
    gamma_ptr,  # [hidden]
    inv_freq_ptr,  # [D / 2] fp32
    long_freq_ptr,  # [D / 2] fp32 or None
    exponents_ptr,  # [D / 2] fp64 or None
    x_ptr,  # [B, hidden] fp32
    x_norm_ptr,  # [B, hidden]
    squares_ptr,  # [B, S] fp32
    rope_ptr,  # [B, 2, D / 2] fp32
    HIDDEN: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_FACTOR: tl.constexpr,
    CONTEXT: tl.constexpr,
    STRETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one request; its first program also writes the cosines and sines. Grid [hidden / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    token = tl.load(token_ids_ptr + request)
    x = tl.load(table_ptr + token.to(tl.int64) * HIDDEN + channels, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    write_residual(x, request * HIDDEN + channels, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request)
    if tl.program_id(0) == 0:
        c = tl.arange(0, HALF_PAD)
        length = tl.load(seq_lens_ptr + request)
        position = (length - 1).to(tl.float32)
        inv_freq = tl.load(inv_freq_ptr + c, mask=c < HALF, other=0.0)
        if long_freq_ptr is not None:
            long_freq = tl.load(long_freq_ptr + c, mask=c < HALF, other=0.0)
            inv_freq = tl.where(length > CONTEXT, long_freq, inv_freq)
        if exponents_ptr is not None:
            # In fp64: at long lengths an error of the frequency in the last bits of fp32 turns the angle.
            exponents = tl.load(exponents_ptr + c, mask=c < HALF, other=0.0)
            stretch = 1.0 + STRETCH * tl.maximum(length - CONTEXT, 0).to(tl.float64)
            inv_freq = (inv_freq * tl.exp2(exponents * tl.log2(stretch))).to(tl.float32)
        angle = position * inv_freq
        cos_factor = 1.0
        if ROPE_FACTOR != 1.0:
            cos_factor = tl.where(inv_freq > 0, ROPE_FACTOR, 1.0)
        tl.store(rope_ptr + request * 2 * HALF + c, tl.cos(angle) * cos_factor, mask=c < HALF)
        tl.store(rope_ptr + request * 2 * HALF + HALF + c, tl.sin(angle) * ROPE_FACTOR, mask=c < HALF)


def embed_norm(
    token_ids: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    gamma: Tensor,
    rotary: RotaryFrequencies,
    x: Tensor,
    x_norm: Tensor,
    square_sums: Tensor,
    rope: Tensor,
    rope_factor: float = 1.0,
) -> None:
    """The first kernel of a step: embeddings, inputs of the first RMSNorm, RoPE table. Oracle: `embed_norm_ref`.

        x = table[token];  x_norm = x * gamma;  square_sums = partial sums of x^2
        rope = cos and sin of position * f, times rope_factor where f > 0;  f = rotary.at(position)

    Args:
        token_ids: [B] int64.
        seq_lens: [B] int32, with the new token.
        table: [V, hidden].
        gamma: [hidden].
        rotary: frequencies.
        x: [B, hidden] fp32, written.
        x_norm: [B, hidden] in gamma's dtype, written.
        square_sums: [B, S] fp32, written.
        rope: [B, 2, D/2] fp32, written.
    Capture: graph-safe; allocates nothing. Launched without overlap with the previous step.
    """
    batch_size, hidden = x.shape
    half = rotary.inv_freq.shape[0]
    compiled = jit_launch(_embed_norm_kernel, (num_square_sums(hidden), batch_size))(
        token_ids, seq_lens, table, gamma, rotary.inv_freq, rotary.long_freq, rotary.exponents, x, x_norm, square_sums,
        rope, HIDDEN=hidden, HALF=half, HALF_PAD=triton.next_power_of_2(half), BLOCK=BLOCK, ROPE_FACTOR=rope_factor,
        CONTEXT=rotary.context, STRETCH=rotary.factor / max(rotary.context, 1), PDL=pdl_options(x.device)["PDL"],
        num_warps=1,
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(
    do_not_specialize=["reduce_index", "own_rank", "timeout_ns", "code"],
    do_not_specialize_on_alignment=["verdict_ptr", "inbox_ptr"],
)
def _reduce_norm_kernel(
    packets_ptr,  # [num_reduces, B, T, hidden] int64
    own_packets_ptr,  # as `packets`, or None: this rank's part is read here
    partial_ptr,  # [B, hidden] fp32, used without packets
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    x_ptr,  # [B, hidden] fp32
    gamma_ptr,  # [hidden]
    x_norm_ptr,  # [B, hidden]
    squares_ptr,  # [B, S] fp32
    gate_ptr,  # [1] int32 or None
    next_gate_ptr,  # [1] int32 or None
    verdict_ptr,  # [1] int64 or None
    inbox_ptr,  # [B, message_packets] int64, the paired rank's, or None
    message_packets,
    reduce_index,
    own_rank,
    timeout_ns,
    code,
    HIDDEN: tl.constexpr,
    T: tl.constexpr,
    T_PAD: tl.constexpr,
    PACKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK channels of one request. Grid [hidden / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    gamma = tl.load(gamma_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    epoch = tl.load(epoch_ptr)
    if PDL:
        wait_for_previous_kernel()
    rejected = epoch.to(tl.int64) << 32  # the packet of a reject: 0.0 and the epoch
    if gate_ptr is not None:
        is_open = tl.load(gate_ptr) != 0
        if next_gate_ptr is not None:
            next_is_open = is_open & (tl.load(verdict_ptr, volatile=True) != rejected)
            is_first = (tl.program_id(0) == 0) & (request == 0)
            tl.store(next_gate_ptr, next_is_open.to(tl.int32), mask=is_first)
        if not is_open:
            return
    offsets = request * HIDDEN + channels
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if PACKETS:
        ranks = tl.arange(0, T_PAD)
        mask = (ranks < T)[:, None] & inside[None, :]
        src_ptr = packets_ptr
        if own_packets_ptr is not None:
            src_ptr = tl.where(ranks == own_rank, own_packets_ptr, packets_ptr)
        base = (reduce_index * tl.num_programs(1) + request).to(tl.int64) * (T * HIDDEN)
        ptr = (src_ptr + base + ranks * HIDDEN)[:, None] + channels[None, :]
        codes = (code + ranks)[:, None] + tl.zeros([T_PAD, BLOCK], tl.int32)
        if verdict_ptr is None:
            x += tl.sum(wait_packets(ptr, mask, epoch, timeout_ns, fault_ptr, codes), 0)
        else:
            # After a reject, the ranks of a receiver stop one after the other. So a wait for a rank that has stopped
            # must end, too.
            end_ptr = tl.zeros_like(codes).to(tl.int64) + verdict_ptr.to(tl.int64)
            end = tl.zeros_like(end_ptr) + rejected
            x += tl.sum(wait_packets(ptr, mask, epoch, timeout_ns, fault_ptr, codes, end_ptr, end), 0)
    else:
        x += tl.load(partial_ptr + offsets, mask=inside, other=0.0)
    if inbox_ptr is not None:
        store_packets(inbox_ptr + request * message_packets + channels, x, epoch, inside)
    write_residual(x, offsets, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request)


def reduce_norm(
    exchange: Exchange,
    reduce_index: int,
    timeout_ns: int,
    x: Tensor,
    gamma: Tensor,
    x_norm: Tensor,
    square_sums: Tensor,
    gate: Tensor | None = None,
    next_gate: Tensor | None = None,
    verdict: Tensor | None = None,
    inbox: Tensor | None = None,
) -> None:
    """All-reduce, residual, and the inputs of the next RMSNorm. Oracle: `reduce_norm_ref`.

        x += sum over ranks of partial;  x_norm = x * gamma;  square_sums = partial sums of x^2

    With packets, the kernel waits for the packets of all ranks, at most `timeout_ns`. Every rank adds them in the same
    order, so `x` has the same bits on all ranks. Without packets, `exchange.partial` already holds the sum.

    Args:
        reduce_index: as given to `push_partial`.
        timeout_ns: longest wait for a packet.
        x: [B, hidden] fp32, updated in place.
        gamma: [hidden].
        x_norm: [B, hidden] in gamma's dtype, written.
        square_sums: [B, S] fp32, written.
        gate: [1] int32; 0 skips everything.
        next_gate: [1] int32, written for later kernels: open if `gate` is open and `verdict` is not a reject.
        verdict: [1] int64, a packet. A reject of this step also ends the waits, because the results are not needed.
        inbox: [B, M] int64, M >= hidden, the paired rank's; the first packets of each request become x.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, hidden = x.shape
    tp_size = exchange.tp_size
    compiled = jit_launch(_reduce_norm_kernel, (num_square_sums(hidden), batch_size))(
        exchange.packets, exchange.own_packets, exchange.partial, exchange.epoch, exchange.fault, x, gamma, x_norm,
        square_sums, gate, next_gate, verdict, inbox, 0 if inbox is None else inbox.shape[1], reduce_index,
        exchange.tp_rank, timeout_ns, exchange.fault_code(LATE_PACKET, reduce_index, exchange.rank - exchange.tp_rank),
        HIDDEN=hidden, T=tp_size, T_PAD=triton.next_power_of_2(tp_size), PACKETS=exchange.packets is not None,
        BLOCK=BLOCK, num_warps=max(1, min(4, triton.next_power_of_2(tp_size))), **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def new_residual(batch_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Allocate x, x_norm and square_sums of one step."""
    return (
        torch.zeros(batch_size, hidden_size, device=device),
        torch.zeros(batch_size, hidden_size, dtype=dtype, device=device),
        torch.zeros(batch_size, num_square_sums(hidden_size), device=device),
    )
