"""The end of a decode step: logits of all vocabulary shards, the most likely token, and the results for the host.

Shapes: B requests, V vocabulary, C blocks of 1024 tokens, L layers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from alspec.kernels.comm.exchange import LogitExchange
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, LATE_PACKET, pack_packets, wait_packets
from alspec.kernels.common.device import INTERPRETED
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.common.pdl import wait_for_previous_kernel

__all__ = ["BLOCK", "RING_HEADER", "RING_STEPS", "collect_logits", "finish_step", "num_candidates", "store_stamp"]

BLOCK = 1024  # logits of one program
RING_STEPS = 16  # steps that the host may lag behind
RING_HEADER = 2  # int64 before the tokens of a step: the device clock in ns, the fault word


def num_candidates(vocab_size: int) -> int:
    """Return C, the number of programs; each of them writes the most likely token of its block."""
    return int(triton.cdiv(vocab_size, BLOCK))


@triton.jit(do_not_specialize=["own_rank", "timeout_ns", "late_code", "bad_code"])
def _collect_logits_kernel(
    packets_ptr,  # [B, world, rows] int64
    own_packets_ptr,  # the same, or None: read this rank's part here
    gathered_ptr,  # [world, B, rows] fp32, used without packets
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    best_token_ptr,  # [B, C] int32
    own_rank,
    timeout_ns,
    late_code,
    bad_code,
    rows,
    num_tokens,  # that have logits; those behind them, up to V, get -inf
    vocab_size,
    WORLD: tl.constexpr,
    PACKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK tokens of one request. Grid [C, B]."""
    if PDL:
        gdc_launch_dependents()
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, num_requests = tl.program_id(1), tl.num_programs(1)
    inside = tokens < num_tokens
    source = tokens // rows
    epoch = tl.load(epoch_ptr)
    if PDL:
        gdc_wait()
    if PACKETS:
        src_ptr = packets_ptr
        if own_packets_ptr is not None:
            src_ptr = tl.where(source == own_rank, own_packets_ptr, packets_ptr)
        src = src_ptr + request.to(tl.int64) * WORLD * rows + tokens
        logits = wait_packets(src, inside, epoch, timeout_ns, fault_ptr, late_code + source)
    else:
        src = (source * num_requests + request).to(tl.int64) * rows + tokens - source * rows
        logits = tl.load(gathered_ptr + src, mask=inside, other=0.0)
    out = tl.where(inside, logits, float("-inf"))
    tl.store(logits_ptr + request.to(tl.int64) * vocab_size + tokens, out, mask=tokens < vocab_size)
    is_bad = (~(tl.abs(logits) < float("inf"))) & inside & (tl.load(fault_ptr, volatile=True) == 0)
    tl.store(fault_ptr + tl.zeros_like(tokens), bad_code + source, mask=is_bad)
    best = tl.max(out, 0)
    best_offset = request * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + best_offset, best)
    tl.store(best_token_ptr + best_offset, tl.min(tl.where(out == best, tokens, 0x7FFFFFFF), 0))


def collect_logits(
    exchange: LogitExchange,
    gathered: Tensor,
    timeout_ns: int,
    reduce_index: int,
    logits: Tensor,
    best: Tensor,
    best_token: Tensor,
    num_tokens: int | None = None,
) -> None:
    """Collect the logits of the whole vocabulary, and the most likely token of each block of 1024.

    With packets, the kernel waits for the packets of all ranks, at most `timeout_ns`. A logit that is not finite sets
    the fault word. Oracle: `collect_logits_ref`.

    Args:
        gathered: [world, B, rows] fp32, used without packets.
        timeout_ns: longest wait for a packet.
        reduce_index: only for the fault word.
        logits: [B, V] fp32, written.
        best: [B, C] fp32, written.
        best_token: [B, C] int32, written.
        num_tokens: tokens that are collected, up to V; those behind them get -inf. None: all of V.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, vocab_size = logits.shape
    compiled = jit_launch(_collect_logits_kernel, (num_candidates(vocab_size), batch_size))(
        exchange.packets, exchange.own_packets, gathered, exchange.epoch, exchange.fault, logits, best, best_token,
        exchange.rank, timeout_ns, exchange.fault_code(LATE_PACKET, reduce_index, 0),
        exchange.fault_code(BAD_NUMBERS, reduce_index, 0), exchange.shard.shape[1],
        vocab_size if num_tokens is None else num_tokens, vocab_size,
        WORLD=exchange.world_size, PACKETS=exchange.packets is not None, BLOCK=BLOCK, num_warps=8,
        **pdl_options(logits.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def store_stamp(row_ptr, stamp_ptr, stamp):
    """Write the device's clock into a complete row of the ring, then its stamp."""
    if INTERPRETED:
        tl.store(stamp_ptr, stamp)
    else:
        tl.store(row_ptr, globaltimer())
        # All threads must have stored before the stamp: a host that reads the stamp then reads their data.
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
            "=r,l,r", [stamp_ptr.to(tl.int64), stamp], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _finish_step_kernel(
    best_ptr,  # [B, C] fp32
    best_token_ptr,  # [B, C] int32
    sampled_ptr,  # [B] int64, or None: take the most likely token
    token_ids_ptr,  # [B] int64
    seq_lens_ptr,  # [B] int32
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    ring_ptr,  # [RING_STEPS, RING_HEADER + B] int64, pinned host memory
    stamps_ptr,  # [RING_STEPS] int32, pinned host memory
    hits_ptr,  # [num_hits] int32, or None
    hits_ring_ptr,  # [RING_STEPS, num_hits] int32, pinned host memory
    num_hits,
    num_candidates,
    capacity,
    logits_ptr,  # [B, V] fp32, or None: no log probabilities
    log_sums_ptr,  # [B] fp32
    top_ptr,  # [B, TOP] int64
    logprobs_ring_ptr,  # [RING_STEPS, B, 1 + TOP] int64, pinned host memory
    C: tl.constexpr,
    B: tl.constexpr,
    RING_STEPS: tl.constexpr,
    RING_HEADER: tl.constexpr,
    HITS: tl.constexpr,
    V: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the next tokens, then the step's row of the ring, then its stamp. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    epoch = tl.load(epoch_ptr)
    ring_row = epoch & (RING_STEPS - 1)  # also valid after 2^31 steps, when the epoch is negative
    row = ring_ptr + ring_row * (RING_HEADER + B)
    candidates = tl.arange(0, C)
    for request in tl.static_range(B):
        if sampled_ptr is not None:
            token = tl.load(sampled_ptr + request)
        else:
            offsets = request * num_candidates + candidates
            mask = candidates < num_candidates
            best = tl.load(best_ptr + offsets, mask=mask, other=float("-inf"))
            tokens = tl.load(best_token_ptr + offsets, mask=mask, other=0x7FFFFFFF)
            token = tl.min(tl.where(best == tl.max(best, 0), tokens, 0x7FFFFFFF), 0).to(tl.int64)
        # If all logits are NaN, there is no maximum (see the fault word). Token 0 keeps reads inside the embedding.
        token = tl.where(token == 0x7FFFFFFF, 0, token)
        tl.store(token_ids_ptr + request, token)
        tl.store(row + RING_HEADER + request, token)
        if logits_ptr is not None:
            logprob = tl.load(logits_ptr + request * V + token) - tl.load(log_sums_ptr + request)
            logprobs_row = logprobs_ring_ptr + (ring_row * B + request) * (1 + TOP)
            tl.store(logprobs_row, pack_packets(logprob, token))
            place = tl.arange(0, TOP_PAD)
            top = tl.load(top_ptr + request * TOP + place, mask=place < TOP)
            tl.store(logprobs_row + 1 + place, top, mask=place < TOP)
        seq_len = tl.load(seq_lens_ptr + request)
        tl.store(seq_lens_ptr + request, tl.minimum(seq_len + 1, capacity))
    if hits_ptr is not None:
        hit = tl.arange(0, HITS)
        hits = tl.load(hits_ptr + hit, mask=hit < num_hits)
        tl.store(hits_ring_ptr + ring_row * num_hits + hit, hits, mask=hit < num_hits)
    tl.store(row + 1, tl.load(fault_ptr).to(tl.int64))
    tl.store(epoch_ptr, epoch + 1)
    store_stamp(row, stamps_ptr + ring_row, epoch)


def finish_step(
    best: Tensor,
    best_token: Tensor,
    sampled: Tensor | None,
    token_ids: Tensor,
    seq_lens: Tensor,
    capacity: int,
    exchange: LogitExchange,
    ring: Tensor,
    stamps: Tensor,
    hits: Tensor | None = None,
    hits_ring: Tensor | None = None,
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch the last kernel of a step: it writes each request's next token for the next step and for the host.

    Args:
        best, best_token: from `collect_logits`, or of adjusted logits.
        sampled: [B] int64, tokens from the sampler; None: take the most likely token, the lowest id among equals.
        token_ids: [B] int64, written.
        seq_lens: [B] int32, increased by 1, up to `capacity`.
        ring: [RING_STEPS, RING_HEADER + B] int64, in pinned host memory.
        stamps: [RING_STEPS] int32, in pinned host memory; a row of the ring is complete once its stamp is the epoch.
        hits: [L, B] int32, the verdicts of a pair, copied to hits_ring.
        hits_ring: [RING_STEPS, L, B] int32, in pinned host memory.
        logprobs: logits [B, V] fp32 as `collect_logits` wrote them, [B] fp32 and [B, N] int64 from `collect_logprobs`,
            and [RING_STEPS, B, 1 + N] int64 in pinned host memory, which gets the chosen token and the N most likely
            ones: id << 32 | log probability.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, candidates = best.shape
    num_hits = 1 if hits is None else hits.numel()
    logits, log_sums, top, logprobs_ring = logprobs or (None,) * 4
    vocab_size, num_top = (0, 0) if logprobs is None else (logprobs[0].shape[1], logprobs[2].shape[1])
    compiled = jit_launch(_finish_step_kernel, (1,))(
        best, best_token, sampled, token_ids, seq_lens, exchange.epoch, exchange.fault, ring, stamps, hits,
        hits_ring, num_hits, candidates, capacity, logits, log_sums, top, logprobs_ring,
        C=triton.next_power_of_2(candidates), B=batch_size, RING_STEPS=RING_STEPS, RING_HEADER=RING_HEADER,
        HITS=triton.next_power_of_2(num_hits), V=vocab_size, TOP=num_top, TOP_PAD=triton.next_power_of_2(num_top),
        num_warps=1, **pdl_options(best.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
