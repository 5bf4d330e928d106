"""The launches of a round around the model: its rows, its drafts, and which of them are accepted.

The oracle of each kernel is in runtime/decode/rounds: acceptance.py says which rows there are and what is accepted.

Shapes: B requests, W rows of each, V vocabulary, C blocks of 1024 tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from alspec.kernels.comm.exchange import LogitExchange
from alspec.kernels.comm.ll_packets import pack_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.common.pdl import wait_for_previous_kernel
from alspec.kernels.kv_codec.quantised_layer import BLOCK
from alspec.kernels.rounds.round_state import RoundRowBuffers, RoundState
from alspec.kernels.sampling.adjustment import IN_ANSWER
from alspec.kernels.sampling.next_token import RING_HEADER, RING_STEPS, store_stamp

__all__ = ["begin_model_draft", "begin_round", "finish_round", "round_ring_width", "take_draft"]

TAIL = tl.constexpr(BLOCK)  # tokens of a tail, which a round does not leave
NOT_A_TOKEN = tl.constexpr(0x7FFFFFFF)


def round_ring_width(batch_size: int, num_rows: int) -> int:
    """Int64 in a row of the ring: the header, then of each request drafts << 32 | emitted tokens, and the tokens."""
    return RING_HEADER + batch_size * (1 + num_rows)


@triton.jit
def _begin_round_kernel(
    newest_ptr,  # [B] int64
    lengths_ptr,  # [B] int32
    live_ptr,  # [B] int32
    token_ids_ptr,  # [B, W] int64
    row_lens_ptr,  # [B, W] int32
    last_lens_ptr,  # [B] int32
    counts_ptr,  # [B] int32
    best_match_ptr,  # [B] int64
    draft_tokens_ptr,  # [B] int64, or None
    draft_lens_ptr,  # [B] int32, or None
    capacity,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of one request, with room for as many drafts as it can take. Grid [B]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request, row = tl.program_id(0), tl.arange(0, W_PAD)
    length, newest = tl.load(lengths_ptr + request), tl.load(newest_ptr + request)
    most = tl.maximum(tl.minimum(W - 1, capacity - 1 - length), 0)
    if HAS_BLOCKS:
        most = tl.minimum(most, -((length - 1) % TAIL) + (TAIL - 1))
    most *= tl.load(live_ptr + request)
    tl.store(counts_ptr + request, most)
    tl.store(last_lens_ptr + request, length + most)
    tl.store(best_match_ptr + request, newest * 0)
    tl.store(row_lens_ptr + request * W + row, length + tl.minimum(row, most), mask=row < W)
    tl.store(token_ids_ptr + request * W + row, newest + row * 0, mask=row < W)
    if draft_tokens_ptr is not None:
        tl.store(draft_tokens_ptr + request, newest)
        tl.store(draft_lens_ptr + request, length)


def begin_round(
    state: RoundState,
    rows: RoundRowBuffers,
    capacity: int,
    has_blocks: bool,
    draft: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Begin a round: write its rows, without drafts yet. Oracles: `max_drafts`, `round_rows`.

    Args:
        capacity: tokens that the cache holds.  has_blocks: the cache is quantised: a round stays in a block of 64.
        draft: tokens [B] int64 and lengths [B] int32 of the first draft step, written.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_rows = rows.token_ids.shape
    compiled = jit_launch(_begin_round_kernel, (batch_size,))(
        state.newest, state.lengths, state.live, rows.token_ids, rows.row_lens, rows.last_lens, rows.counts,
        rows.best_match, *(draft or (None, None)), capacity, W=num_rows, W_PAD=triton.next_power_of_2(num_rows),
        HAS_BLOCKS=has_blocks, num_warps=1, **pdl_options(state.newest.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _begin_model_draft_kernel(
    history_ptr,  # [B, width] int32
    lengths_ptr,  # [B] int32
    token_ids_ptr,  # [B, 2] int64
    row_lens_ptr,  # [B, 2] int32
    last_lens_ptr,  # [B] int32
    width,
    PDL: tl.constexpr,
):
    """The last two tokens of one text. Grid [B]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request, row = tl.program_id(0), tl.arange(0, 2)
    length = tl.load(lengths_ptr + request)
    place = tl.maximum(length - 2 + row, 0)
    tl.store(token_ids_ptr + request * 2 + row, tl.load(history_ptr + request * width + place).to(tl.int64))
    tl.store(row_lens_ptr + request * 2 + row, place + 1)
    tl.store(last_lens_ptr + request, length)


def begin_model_draft(state: RoundState, rows: RoundRowBuffers) -> None:
    """Write the rows of a draft model's first step: the newest token, and the one before it.

    The draft model has not seen the latter if all drafts of the last round were accepted, or if a plain step came
    between. After both it lacks three tokens, which the host gives it first (`CapturedRoundStep`).

    Args:
        rows: two of each request, written.
    Capture: graph-safe; allocates nothing.
    """
    batch_size = len(state.lengths)
    compiled = jit_launch(_begin_model_draft_kernel, (batch_size,))(
        state.history, state.lengths, rows.token_ids, rows.row_lens, rows.last_lens, state.history.shape[1],
        num_warps=1, **pdl_options(state.newest.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _likeliest(best_ptr, best_token_ptr, row, mask, num_candidates, C: tl.constexpr):
    """The most likely token of each row [N], the lowest id among equals; 0 if all logits are NaN."""
    candidates = tl.arange(0, C)[None, :]
    inside = mask[:, None] & (candidates < num_candidates)
    offsets = row[:, None] * num_candidates + candidates
    best = tl.load(best_ptr + offsets, mask=inside, other=float("-inf"))
    tokens = tl.load(best_token_ptr + offsets, mask=inside, other=NOT_A_TOKEN)
    token = tl.min(tl.where(best == tl.max(best, 1)[:, None], tokens, NOT_A_TOKEN), 1)
    return tl.where(token == NOT_A_TOKEN, 0, token).to(tl.int64)


@triton.jit
def _take_draft_kernel(
    sampled_ptr,  # [B STEP_ROWS] int64, or None
    best_ptr,  # [B STEP_ROWS, C] fp32
    best_token_ptr,  # [B STEP_ROWS, C] int32
    token_ids_ptr,  # [B, W] int64
    counts_ptr,  # [B] int32
    draft_tokens_ptr,  # [B] int64
    draft_lens_ptr,  # [B] int32
    epoch_ptr,  # [1] int32
    num_candidates,
    STEP_ROWS: tl.constexpr,  # rows of each request in the draft step; the last one is the draft's
    PLACE: tl.constexpr,
    B: tl.constexpr,
    B_PAD: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put each request's draft in its place; the next draft step feeds it if a further one is wanted. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request = tl.arange(0, B_PAD)
    mask = request < B
    source = request * STEP_ROWS + (STEP_ROWS - 1)
    if sampled_ptr is not None:
        token = tl.load(sampled_ptr + source, mask=mask, other=0)
    else:
        token = _likeliest(best_ptr, best_token_ptr, source, mask, num_candidates, C)
    count = tl.load(counts_ptr + request, mask=mask, other=0)
    fed = tl.load(draft_tokens_ptr + request, mask=mask, other=0)
    length = tl.load(draft_lens_ptr + request, mask=mask, other=1)
    last = tl.load(token_ids_ptr + request * W + PLACE, mask=mask, other=0)
    tl.store(token_ids_ptr + request * W + PLACE + 1, tl.where(count > PLACE, token, last), mask=mask)
    goes_on = count > PLACE + 1
    tl.store(draft_tokens_ptr + request, tl.where(goes_on, token, fed), mask=mask)
    tl.store(draft_lens_ptr + request, length + goes_on.to(tl.int32), mask=mask)
    tl.store(epoch_ptr, tl.load(epoch_ptr) + 1)


def take_draft(
    rows: RoundRowBuffers,
    place: int,
    draft: tuple[Tensor, Tensor],
    sampled: Tensor | None,
    best: Tensor,
    best_token: Tensor,
    epoch: Tensor,
) -> None:
    """End draft step `place`, from 0 on: its tokens become rows, and the next step's input. Oracle: `draft_by_steps`.

    Args:
        draft: tokens [B] int64 and lengths [B] int32 of the draft step, written for the next one.
        sampled: [B N] int64, of a step of N rows, whose last one counts; None: the most likely of best, best_token
            [B N, C].
        epoch: [1] int32, of the exchange between ranks; increased by 1.
    Capture: graph-safe; allocates nothing.
    """
    (batch_size, num_rows), candidates = rows.token_ids.shape, best.shape[1]
    compiled = jit_launch(_take_draft_kernel, (1,))(
        sampled, best, best_token, rows.token_ids, rows.counts, *draft, epoch, candidates,
        STEP_ROWS=len(best) // batch_size, PLACE=place, B=batch_size, B_PAD=triton.next_power_of_2(batch_size),
        W=num_rows, C=triton.next_power_of_2(candidates), num_warps=1, **pdl_options(best.device),
    )  # fmt: skip
    set_l1_carveout(compiled)


@triton.jit
def _finish_round_kernel(
    sampled_ptr,  # [B, W] int64, or None
    best_ptr,  # [B W, C] fp32
    best_token_ptr,  # [B W, C] int32
    token_ids_ptr,  # [B, W] int64
    counts_ptr,  # [B] int32
    newest_ptr,  # [B] int64
    lengths_ptr,  # [B] int32
    live_ptr,  # [B] int32
    history_ptr,  # [B, width] int32
    number_ptr,  # [1] int32
    accepted_ptr,  # [B] int32
    committed_ptr,  # [B] int32
    forced_ptr,  # [1] fp32
    seen_ptr,  # [B, V] int32, or None
    epoch_ptr,  # [1] int32
    fault_ptr,  # [1] int32
    ring_ptr,  # [RING_STEPS, ring_width] int64, pinned host memory
    stamps_ptr,  # [RING_STEPS] int32, pinned host memory
    ring_width,
    num_candidates,
    capacity,
    history_width,
    vocab_size,
    logits_ptr,  # [B W, V] fp32, or None: no log probabilities
    log_sums_ptr,  # [B W] fp32
    top_ptr,  # [B W, TOP] int64
    logprobs_ring_ptr,  # [RING_STEPS, B W, 1 + TOP] int64, pinned host memory
    B: tl.constexpr,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    RING_ROWS: tl.constexpr,  # rows that the ring has room for
    C: tl.constexpr,
    RING_STEPS: tl.constexpr,
    RING_HEADER: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept drafts, write the texts and the round's row of the ring, then its stamp. Grid [1]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    number = tl.load(number_ptr)
    ring_row = number & (RING_STEPS - 1)
    ring = ring_ptr + ring_row.to(tl.int64) * ring_width
    row = tl.arange(0, W_PAD)
    is_row = row < W
    for request in tl.static_range(B):
        if sampled_ptr is not None:
            chosen = tl.load(sampled_ptr + request * W + row, mask=is_row, other=0)
        else:
            chosen = _likeliest(best_ptr, best_token_ptr, request * W + row, is_row, num_candidates, C)
        count, length = tl.load(counts_ptr + request), tl.load(lengths_ptr + request)
        is_live = tl.load(live_ptr + request) != 0
        draft = tl.load(token_ids_ptr + request * W + row + 1, mask=row + 1 < W, other=-1)
        forced = tl.load(forced_ptr)
        drawn, _, _, _ = tl.philox(number.to(tl.int64), row, request + row * 0, row * 0, row * 0)
        is_right = tl.where(forced < 0.0, chosen == draft, tl.uint_to_uniform_float(drawn) < forced)
        accepted = tl.min(tl.where(is_right & (row < count), W_PAD, row), 0)
        emitted = tl.where(row < accepted, draft, chosen)
        is_kept = (row <= accepted) & is_live
        place = length + row
        tl.store(history_ptr + request * history_width + place, emitted.to(tl.int32), mask=is_kept)
        newest = tl.sum(tl.where(row == accepted, emitted, 0), 0)
        tl.store(newest_ptr + request, tl.where(is_live, newest, tl.load(newest_ptr + request)))
        longer = tl.minimum(length + accepted + 1, capacity)
        tl.store(lengths_ptr + request, tl.where(is_live, longer, length))
        tl.store(accepted_ptr + request, accepted)
        tl.store(committed_ptr + request, length + accepted)
        if seen_ptr is not None:
            fed = tl.load(token_ids_ptr + request * W + row, mask=is_row, other=0)
            tl.atomic_add(seen_ptr + request * vocab_size + fed, row * 0 + IN_ANSWER, mask=is_kept)
        own = ring + RING_HEADER + request * (1 + RING_ROWS)
        tl.store(own, (count.to(tl.int64) << 32) | (accepted + 1).to(tl.int64))
        tl.store(own + 1 + row, emitted, mask=row <= accepted)
        if logits_ptr is not None:
            source = request * W + row
            logit = tl.load(logits_ptr + source.to(tl.int64) * vocab_size + emitted, mask=row <= accepted, other=0.0)
            logprob = logit - tl.load(log_sums_ptr + source, mask=is_row, other=0.0)
            target = logprobs_ring_ptr + (ring_row * (B * W) + source).to(tl.int64) * (1 + TOP)
            tl.store(target, pack_packets(logprob, emitted), mask=is_row)
            column = tl.arange(0, TOP_PAD)[None, :]
            is_top = is_row[:, None] & (column < TOP)
            top = tl.load(top_ptr + source[:, None] * TOP + column, mask=is_top, other=0)
            tl.store(target[:, None] + 1 + column, top, mask=is_top)
    tl.store(ring + 1, tl.load(fault_ptr).to(tl.int64))
    tl.store(epoch_ptr, tl.load(epoch_ptr) + 1)
    tl.store(number_ptr, number + 1)
    store_stamp(ring, stamps_ptr + ring_row, number)


def finish_round(
    state: RoundState,
    rows: RoundRowBuffers,
    capacity: int,
    sampled: Tensor | None,
    best: Tensor,
    best_token: Tensor,
    exchange: LogitExchange,
    ring: Tensor,
    stamps: Tensor,
    ring_rows: int,
    seen: Tensor | None = None,
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """End a round: accept the longest prefix of drafts that are the chosen tokens. Oracle: `accepted_drafts`.

    Args:
        sampled: [B W] int64, the token chosen behind each row; None: the most likely of best, best_token [B W, C].
        ring: [RING_STEPS, `round_ring_width`] int64, in pinned host memory.
        stamps: [RING_STEPS] int32, there too: a row of the ring is complete once its stamp is the round's number.
        ring_rows: rows that the ring has room for, W or more.
        seen: [B, V] int32, of penalties: gets the tokens of the accepted rows.
        logprobs: as for `finish_step`, of all rows; the ring is [RING_STEPS, B W, 1 + N].
    Capture: graph-safe; allocates nothing.
    """
    (batch_size, num_rows), candidates = rows.token_ids.shape, best.shape[1]
    logits, log_sums, top, logprobs_ring = logprobs or (None,) * 4
    vocab_size = seen.shape[1] if seen is not None else logits.shape[1] if logits is not None else 0
    num_top = 0 if top is None else top.shape[1]
    compiled = jit_launch(_finish_round_kernel, (1,))(
        sampled, best, best_token, rows.token_ids, rows.counts, state.newest, state.lengths, state.live, state.history,
        state.number, state.accepted, state.committed, state.forced, seen, exchange.epoch, exchange.fault, ring, stamps,
        ring.shape[1], candidates, capacity, state.history.shape[1], vocab_size, logits, log_sums, top, logprobs_ring,
        B=batch_size, W=num_rows, W_PAD=triton.next_power_of_2(num_rows), RING_ROWS=ring_rows,
        C=triton.next_power_of_2(candidates), RING_STEPS=RING_STEPS, RING_HEADER=RING_HEADER, TOP=num_top,
        TOP_PAD=triton.next_power_of_2(num_top), num_warps=1, **pdl_options(best.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
