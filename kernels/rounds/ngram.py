"""The n-gram drafter on the device: what followed the newest tokens when they occurred before.

Two launches: all ends of earlier matches are compared side by side, then the drafts are read behind the best one.
Oracle: `ngram_drafts` in runtime/decode/rounds/ngram_drafter.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.common.pdl import wait_for_previous_kernel
from alspec.kernels.rounds.round_state import RoundRowBuffers, RoundState

__all__ = ["LONGEST_MATCH", "SHORTEST_MATCH", "draft_by_ngrams"]

LONGEST_MATCH = 5
SHORTEST_MATCH = 2
ENDS = 1024  # ends of matches that a program compares


@triton.jit
def _find_match_kernel(
    history_ptr,  # [B, width] int32
    lengths_ptr,  # [B] int32
    best_match_ptr,  # [B] int64: the largest of length of a match * width + place of its end
    width,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compare ENDS ends with the newest tokens of one request. Grid [cdiv(width, ENDS), B]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request, first = tl.program_id(1), tl.program_id(0) * ENDS
    length = tl.load(lengths_ptr + request)
    if first >= length - 1:
        return
    text = history_ptr + request * width
    end = first + tl.arange(0, ENDS)
    matched, is_match = tl.zeros([ENDS], tl.int32), end < length - 1
    for i in tl.static_range(LONGEST):
        newest = tl.load(text + length - 1 - i, mask=length - 1 - i >= 0, other=-1)
        token = tl.load(text + end - i, mask=is_match & (end >= i), other=-2)
        is_match = is_match & (token == newest)
        matched += is_match.to(tl.int32)
    key = tl.where(matched >= SHORTEST, matched.to(tl.int64) * width + end, 0)
    tl.atomic_max(best_match_ptr + request, tl.max(key, 0))


@triton.jit
def _take_match_kernel(
    history_ptr,  # [B, width] int32
    lengths_ptr,  # [B] int32
    best_match_ptr,  # [B] int64
    token_ids_ptr,  # [B, W] int64
    row_lens_ptr,  # [B, W] int32
    last_lens_ptr,  # [B] int32
    counts_ptr,  # [B] int32
    forced_ptr,  # [1] fp32: from 0 on, drafts are needed without a match, too
    width,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read the drafts of one request; without a match there are none. Grid [B]."""
    if PDL:
        gdc_launch_dependents()
        wait_for_previous_kernel()
    request, row = tl.program_id(0), tl.arange(0, W_PAD)
    length, best = tl.load(lengths_ptr + request), tl.load(best_match_ptr + request)
    count = tl.where((best > 0) | (tl.load(forced_ptr) >= 0.0), tl.load(counts_ptr + request), 0)
    start = tl.minimum((best % width).to(tl.int32) + 1, length - 1)
    # Row r holds draft r - 1; rows behind the last draft repeat it. A continuation that ends begins again.
    draft = tl.maximum(tl.minimum(row, count) - 1, 0)
    token = tl.load(history_ptr + request * width + start + draft % (length - start))
    newest = tl.load(history_ptr + request * width + length - 1)
    token = tl.where((row == 0) | (count == 0), newest, token)
    tl.store(token_ids_ptr + request * W + row, token.to(tl.int64), mask=row < W)
    tl.store(row_lens_ptr + request * W + row, length + tl.minimum(row, count), mask=row < W)
    tl.store(last_lens_ptr + request, length + count)
    tl.store(counts_ptr + request, count)


def draft_by_ngrams(state: RoundState, rows: RoundRowBuffers) -> None:
    """Draft for the rows of a round that has begun. Oracle: `ngram_drafts`.

    Capture: graph-safe; allocates nothing.
    """
    (batch_size, num_rows), width = rows.token_ids.shape, state.history.shape[1]
    options = pdl_options(state.newest.device)
    compiled = jit_launch(_find_match_kernel, (triton.cdiv(width, ENDS), batch_size))(
        state.history, state.lengths, rows.best_match, width, LONGEST=LONGEST_MATCH, SHORTEST=SHORTEST_MATCH, ENDS=ENDS,
        num_warps=4, **options,
    )  # fmt: skip
    set_l1_carveout(compiled)
    compiled = jit_launch(_take_match_kernel, (batch_size,))(
        state.history, state.lengths, rows.best_match, rows.token_ids, rows.row_lens, rows.last_lens, rows.counts,
        state.forced, width, W=num_rows, W_PAD=triton.next_power_of_2(num_rows), num_warps=1, **options,
    )  # fmt: skip
    set_l1_carveout(compiled)
