"""The residual stream of a decode step: embedding, all-reduce, and the sums that the next RMSNorm needs.

The stream `x` is fp32 and the same bits on every rank of a group. Each kernel that changes it leaves, for the
projection after it, `x * gamma` in the weights' dtype and partial sums of `x^2`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, store_packets, wait_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.common.pdl import wait_for_previous_kernel

__all__ = ["BLOCK", "embed_norm", "new_residual", "num_square_sums", "reduce_norm", "write_residual"]

BLOCK = 32  # channels of one program: at a hidden size of 4096, 128 programs poll a few words each


def num_square_sums(hidden_size: int) -> int:
    """S: partial sums of `x^2` for each request."""
    return int(triton.cdiv(hidden_size, BLOCK))


@triton.jit
def write_residual(x, at, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request):
    """Store x, x * gamma and this block's sum of x^2."""
    tl.store(x_ptr + at, x, mask=inside)
    tl.store(x_norm_ptr + at, (x * gamma).to(x_norm_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + request * tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def _embed_norm_kernel(
    token_ids_ptr,  # [B] int64
    seq_lens_ptr,  # [B] int32, with the new token
    table_ptr,  # [V, hidden]
    gamma_ptr,  # [hidden]
    inv_freq_ptr,  # [D / 2] fp32
    x_ptr,  # [B, hidden] fp32
    x_norm_ptr,  # [B, hidden]
    squares_ptr,  # [B, S] fp32
    rope_ptr,  # [B, 2, D / 2] fp32
    HIDDEN: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [hidden / BLOCK, B]. The first program of a request also turns its position into cosines and sines."""
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
        position = (tl.load(seq_lens_ptr + request) - 1).to(tl.float32)
        angle = position * tl.load(inv_freq_ptr + c, mask=c < HALF, other=0.0)
        tl.store(rope_ptr + request * 2 * HALF + c, tl.cos(angle), mask=c < HALF)
        tl.store(rope_ptr + request * 2 * HALF + HALF + c, tl.sin(angle), mask=c < HALF)


def embed_norm(
    token_ids: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    gamma: Tensor,
    inv_freq: Tensor,
    x: Tensor,
    x_norm: Tensor,
    square_sums: Tensor,
    rope: Tensor,
) -> None:
    """The step's first kernel: embeddings, what the first RMSNorm needs, and RoPE's angles. Oracle: `embed_norm_ref`.

    Args:
        token_ids: [B] int64.  seq_lens: [B] int32, with the new token.  table: [V, hidden].  gamma: [hidden].
        inv_freq: [D/2] fp32.  Written: x [B, hidden] fp32, x_norm [B, hidden] in gamma's dtype, square_sums [B, S]
        fp32, rope [B, 2, D/2] fp32.
    Capture: graph-safe; allocates nothing. Launched without overlap with the step before.
    """
    batch_size, hidden = x.shape
    half = inv_freq.shape[0]
    compiled = jit_launch(_embed_norm_kernel, (num_square_sums(hidden), batch_size))(
        token_ids, seq_lens, table, gamma, inv_freq, x, x_norm, square_sums, rope,
        HIDDEN=hidden, HALF=half, HALF_PAD=triton.next_power_of_2(half), BLOCK=BLOCK,
        PDL=pdl_options(x.device)["PDL"], num_warps=1,
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit(
    do_not_specialize=["slot", "own_rank", "timeout_ns", "code"],
    do_not_specialize_on_alignment=["verdict_ptr", "inbox_ptr"],
)
def _reduce_norm_kernel(
    packets_ptr,  # [slots, B, T, hidden] int64
    own_packets_ptr,  # the same, or None: where this rank's are
    partial_ptr,  # [B, hidden] fp32, where there are no words
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
    slot,
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
    """BLOCK channels of one request; grid [hidden / BLOCK, B]."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channels < HIDDEN
    gamma = tl.load(gamma_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    epoch = tl.load(epoch_ptr)
    if PDL:
        wait_for_previous_kernel()
    rejected = epoch.to(tl.int64) << 32  # a verdict's word: 0.0 under the epoch
    if gate_ptr is not None:
        is_open = tl.load(gate_ptr) != 0
        if next_gate_ptr is not None:
            goes_on = is_open & (tl.load(verdict_ptr, volatile=True) != rejected)
            is_first = (tl.program_id(0) == 0) & (request == 0)
            tl.store(next_gate_ptr, goes_on.to(tl.int32), mask=is_first)
        if not is_open:
            return
    at = request * HIDDEN + channels
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if PACKETS:
        ranks = tl.arange(0, T_PAD)
        exist = (ranks < T)[:, None] & inside[None, :]
        of_rank = packets_ptr
        if own_packets_ptr is not None:
            of_rank = tl.where(ranks == own_rank, own_packets_ptr, packets_ptr)
        first = (slot * tl.num_programs(1) + request).to(tl.int64) * (T * HIDDEN)
        ptr = (of_rank + first + ranks * HIDDEN)[:, None] + channels[None, :]
        codes = (code + ranks)[:, None] + tl.zeros([T_PAD, BLOCK], tl.int32)
        if verdict_ptr is None:
            x += tl.sum(wait_packets(ptr, exist, epoch, timeout_ns, fault_ptr, codes), 0)
        else:
            # Ranks of a rejected group stop one by one, and one that waits for another's words stops as well.
            end_ptr = tl.zeros_like(codes).to(tl.int64) + verdict_ptr.to(tl.int64)
            end = tl.zeros_like(end_ptr) + rejected
            x += tl.sum(wait_packets(ptr, exist, epoch, timeout_ns, fault_ptr, codes, end_ptr, end), 0)
    else:
        x += tl.load(partial_ptr + at, mask=inside, other=0.0)
    if inbox_ptr is not None:
        store_packets(inbox_ptr + request * message_packets + channels, x, epoch, inside)
    write_residual(x, at, inside, gamma, x_ptr, x_norm_ptr, squares_ptr, request)


def reduce_norm(
    exchange: Exchange,
    slot: int,
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
    """All-reduce, residual, and what the next RMSNorm needs. Oracle: `reduce_norm_ref`.

        x += sum over ranks of partial;  x_norm = x * gamma;  square_sums = partial sums of x^2

    With words, the kernel waits for those of all ranks, at most `timeout_ns`, and every rank adds them in the same
    order: `x` has the same bits on all of them. Without, `exchange.partial` holds the sum already.

    Args:
        slot: as given to `push_partial`.  x: [B, hidden] fp32, in place.  gamma: [hidden].  Written: x_norm [B, hidden]
        in gamma's dtype, square_sums [B, S] fp32.  gate: [1] int32; 0 skips everything.
        next_gate: [1] int32, written for the kernels that follow: open if `gate` is, and if `verdict`, [1] int64, is no
        word of this step that rejects. A rejection also ends the waits: what was computed is worth nothing.
        inbox: [B, M] int64, M >= hidden: of the paired rank, whose first words of a request become x under the epoch.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, hidden = x.shape
    tp_size = exchange.tp_size
    compiled = jit_launch(_reduce_norm_kernel, (num_square_sums(hidden), batch_size))(
        exchange.packets, exchange.own_packets, exchange.partial, exchange.epoch, exchange.fault, x, gamma, x_norm,
        square_sums, gate, next_gate, verdict, inbox, 0 if inbox is None else inbox.shape[1], slot, exchange.tp_rank,
        timeout_ns, fault_code(LATE_PACKET, slot, exchange.rank - exchange.tp_rank),
        HIDDEN=hidden, T=tp_size, T_PAD=triton.next_power_of_2(tp_size), PACKETS=exchange.packets is not None,
        BLOCK=BLOCK, num_warps=max(1, min(4, triton.next_power_of_2(tp_size))), **pdl_options(x.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


def new_residual(batch_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """x, x_norm and square_sums of one step."""
    return (
        torch.zeros(batch_size, hidden_size, device=device),
        torch.zeros(batch_size, hidden_size, dtype=dtype, device=device),
        torch.zeros(batch_size, num_square_sums(hidden_size), device=device),
    )
