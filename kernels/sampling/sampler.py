"""Top-k / top-p sampling inside a captured step: the token that a sort of all logits would find, without the sort.

Tokens are ordered by logit, the largest first and of equals the lowest id. Everything that is asked for is a place in
that order: where `top_k` tokens end, where a share `top_p` of their probability is reached, where the random number
falls. Each is found digit by digit of the logit's 32 bits (a radix select): a launch adds up, for each value of the
next digit, the tokens whose digits so far are those of the place. Each program of the next launch finds the digit by
itself. All places share the first digit's sums, for what comes before a place does not depend on where the order is
cut.

Probabilities are summed as integers, 2^45 for the most likely token of 128K: sums are the same in any order, so all
ranks choose the same token. The oracle is `alspec.runtime.decode.eager_sampling.sample`.

Shapes: B requests, V vocabulary, C blocks of 1024 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.sampling.next_token import BLOCK, num_candidates

__all__ = ["Sampler", "sample_tokens"]

# Digits of a logit's place in the order, of 11, 11 and 10 bits. With 10 bits the first digit was level, but slower with
# both cuts; with 9 or 13 slower (H100).
FIRST_DIGITS = tl.constexpr(2048)
DIGITS = tl.constexpr(2048)
FIRST = tl.constexpr(21)  # bits behind the first digit, and behind the second
SECOND = tl.constexpr(10)
THIRD_DIGITS = tl.constexpr(1024)
ROW = tl.constexpr(128)
# What a place in the order is looked for by.
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
DRAW = tl.constexpr(2)
STATE = tl.constexpr(4)  # digits found so far, tokens and weight before them, what is to be reached


@dataclass(frozen=True)
class Sampler:
    """How tokens are chosen, on the device, and what that takes.

    One captured step serves all settings that cut in the same way: by top_k or not, by top_p or not.
    """

    cuts: tuple[int, ...]  # TOP_K, TOP_P, as far as they cut; then DRAW
    shares: Tensor  # [2] fp64: temperature, top_p
    numbers: Tensor  # [2] int64: top_k, seed
    # Tables: one of FIRST_DIGITS, then for each cut one of DIGITS for the second digit and one for the third.
    counts: Tensor  # [B, all tables] int32: tokens by their digit; zeros
    weights: Tensor  # [B, all tables] int64: their weight
    state: Tensor  # [B, tables, STATE] int64
    tokens: Tensor  # [B] int64: what was chosen

    @staticmethod
    def cuts_of(temperature: float, top_k: int, top_p: float, vocab_size: int) -> tuple[int, ...]:
        """The places that these settings ask for, in this order; none at temperature 0, which takes the most likely."""
        if temperature == 0.0:
            return ()
        asked = [(TOP_K, 0 < top_k < vocab_size), (TOP_P, top_p < 1.0), (DRAW, True)]
        return tuple(int(cut.value) for cut, is_asked in asked if is_asked)

    @classmethod
    def allocate(cls, cuts: tuple[int, ...], batch_size: int, device: torch.device) -> Sampler:
        """For `cuts_of` some settings; `set` comes before the first use."""
        num_tables = 1 + 2 * len(cuts)
        shape = (batch_size, int(FIRST_DIGITS.value) + (num_tables - 1) * int(DIGITS.value))
        return cls(
            cuts=cuts,
            shares=torch.ones(2, dtype=torch.float64, device=device),
            numbers=torch.zeros(2, dtype=torch.int64, device=device),
            counts=torch.zeros(shape, dtype=torch.int32, device=device),
            weights=torch.zeros(shape, dtype=torch.int64, device=device),
            state=torch.zeros(batch_size, num_tables, int(STATE.value), dtype=torch.int64, device=device),
            tokens=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def set(self, temperature: float, top_k: int, top_p: float, seed: int) -> None:
        """Choose like this, which makes the same cuts, from the next step on; seed: 63 bits."""
        self.shares.copy_(torch.tensor([temperature, top_p], dtype=torch.float64))
        self.numbers.copy_(torch.tensor([top_k, seed], dtype=torch.int64))


@triton.jit
def _place_of(x):
    """32 bits, as int64, that order logits: the largest first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    bits = bits.to(tl.int64)
    return tl.where(bits < 0, bits + 0x100000000, 0x7FFFFFFF - bits)


@triton.jit
def _logit_of(place):
    """The inverse of `_place_of`."""
    return (
        tl.where(place > 0x7FFFFFFF, place - 0x100000000, 0x7FFFFFFF - place).to(tl.int32).to(tl.float32, bitcast=True)
    )


@triton.jit
def _weight_of(x, largest, temperature, SCALE: tl.constexpr):
    """exp((x - largest) / temperature), in SCALE parts of 1; 0 where it is no number."""
    share = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) / temperature)
    return (tl.where((share >= 0.0) & (share <= 1.0), share, 0.0) * SCALE + 0.5).to(tl.int64)


@triton.jit
def _table(request, NUMBER: tl.constexpr, TABLES: tl.constexpr):
    """Where a table of a request begins."""
    BEFORE: tl.constexpr = FIRST_DIGITS + (NUMBER - 1) * DIGITS if NUMBER > 0 else 0
    return request * (FIRST_DIGITS + (TABLES - 1) * DIGITS) + BEFORE


@triton.jit
def _reach(counts, weights, reach, count, weight, BY_COUNT: tl.constexpr):
    """The first of some groups of tokens at which their number, or weight, comes to `reach`; what comes before it.

    counts, weights: of each group.  count, weight: before the first. Without BY_COUNT tokens are not counted.
    """
    if BY_COUNT:
        is_before = count + tl.cumsum(counts, 0) < reach
        count += tl.sum(tl.where(is_before, counts, 0), 0)
    else:
        is_before = weight + tl.cumsum(weights, 0) < reach
    # Past the last one only if logits are no numbers.
    index = tl.minimum(tl.sum(is_before.to(tl.int64), 0), weights.shape[0] - 1)
    return index, count, weight + tl.sum(tl.where(is_before, weights, 0), 0)


@triton.jit
def _find(counts_ptr, weights_ptr, reach, count, weight, BY_COUNT: tl.constexpr, SIZE: tl.constexpr):
    """As `_reach`, of the digits of a table [SIZE]: first its row, for sums over all of it would take longer."""
    column = tl.arange(0, ROW)
    at = tl.arange(0, SIZE // ROW)[:, None] * ROW + column[None, :]
    weights = tl.sum(tl.load(weights_ptr + at), 1)
    counts = weights
    if BY_COUNT:
        counts = tl.sum(tl.load(counts_ptr + at).to(tl.int64), 1)
    row, count, weight = _reach(counts, weights, reach, count, weight, BY_COUNT)
    weights = tl.load(weights_ptr + row * ROW + column)
    if BY_COUNT:
        counts = tl.load(counts_ptr + row * ROW + column).to(tl.int64)
    digit, count, weight = _reach(counts, weights, reach, count, weight, BY_COUNT)
    return row * ROW + digit, count, weight


@triton.jit
def _add_up(
    x,
    place,
    asked,
    largest,
    temperature,
    counts_ptr,
    weights_ptr,
    SHIFT: tl.constexpr,
    SCALE: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Tokens that are asked for, into tables by the digit of their place that begins at bit SHIFT."""
    digit = place >> SHIFT
    if SHIFT < FIRST:
        digit %= DIGITS if SHIFT > 0 else THIRD_DIGITS
    weight = _weight_of(x, largest, temperature, SCALE)
    tl.atomic_add(weights_ptr + digit, weight, mask=asked & (weight > 0), sem="relaxed")
    if BY_COUNT:
        tl.atomic_add(counts_ptr + digit, tl.full(digit.shape, 1, tl.int32), mask=asked, sem="relaxed")


@triton.jit
def _block(logits_ptr, best_ptr, request, vocab_size, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Logits of this program's tokens, their places, which exist; and the largest logit of the request."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exist = tokens < vocab_size
    x = tl.load(logits_ptr + request.to(tl.int64) * vocab_size + tokens, mask=exist, other=float("-inf"))
    blocks = tl.arange(0, C_PAD)
    best = tl.load(best_ptr + request * C + blocks, mask=blocks < C, other=float("-inf"))
    return x, _place_of(x), exist, tl.max(best, 0)


@triton.jit
def _clear(counts_ptr, weights_ptr, size, BLOCK: tl.constexpr):
    """Zeros into consecutive tables, by all programs of a request."""
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(counts_ptr + at, tl.zeros([BLOCK], tl.int32), mask=at < size)
        tl.store(weights_ptr + at, tl.zeros([BLOCK], tl.int64), mask=at < size)


@triton.jit
def _first_digit_kernel(
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    shares_ptr,  # [2] fp64
    counts_ptr,  # [B, tables] int32
    weights_ptr,  # [B, tables] int64
    vocab_size,
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All tokens by their first digit; the last table, of the step before, is cleared. Grid [C, B]."""
    if PDL:
        gdc_wait()
        # Not before: the kernels behind this one load logits ahead of their own wait.
        gdc_launch_dependents()
    request = tl.program_id(1)
    x, place, exist, largest = _block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    table, last = _table(request, 0, TABLES), _table(request, TABLES - 1, TABLES)
    _clear(counts_ptr + last, weights_ptr + last, DIGITS, BLOCK)
    _add_up(
        x, place, exist, largest, tl.load(shares_ptr), counts_ptr + table, weights_ptr + table, FIRST, SCALE, BY_COUNT
    )  # fmt: skip


@triton.jit
def _kept(counts_ptr, weights_ptr, state_ptr, largest, temperature, CUT: tl.constexpr, SCALE: tl.constexpr):
    """Weight of what a cut keeps: what comes before its last logit, and of that one's tokens as many as it takes.

    counts_ptr, weights_ptr: tables of its third digit.  state_ptr: of the launch that made them.
    """
    digits, count, weight = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    reach = tl.load(state_ptr + 3)
    digit, count, weight = _find(counts_ptr, weights_ptr, reach, count, weight, CUT == TOP_K, THIRD_DIGITS)
    unit = _weight_of(_logit_of(digits * THIRD_DIGITS + digit), largest, temperature, SCALE)
    missing = reach - count if CUT == TOP_K else (reach - weight + unit - 1) // tl.maximum(unit, 1)
    return weight + missing * unit


@triton.jit
def _store_state(state_ptr, digits, count, weight, reach):
    """For the launches behind this one, by the first program."""
    if tl.program_id(0) == 0:
        tl.store(state_ptr, digits)
        tl.store(state_ptr + 1, count)
        tl.store(state_ptr + 2, weight)
        tl.store(state_ptr + 3, reach)


@triton.jit
def _to_reach(
    request, largest, temperature, seq_lens_ptr, shares_ptr, numbers_ptr, counts_ptr, weights_ptr, state_ptr,
    TABLE: tl.constexpr, CUT: tl.constexpr, CUT_BEFORE: tl.constexpr, TABLES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """What a cut is to reach: a number of tokens, or a share of the weight that the cut before it keeps.

    TABLE: the first that the cut makes.  CUT_BEFORE: or None.
    """
    if CUT == TOP_K:
        reach = tl.load(numbers_ptr)
    else:
        if CUT_BEFORE is None:
            table = _table(request, 0, TABLES)
            kept = tl.sum(tl.load(weights_ptr + table + tl.arange(0, FIRST_DIGITS)), 0)
        else:
            table = _table(request, TABLE - 1, TABLES)
            state = state_ptr + (request * TABLES + TABLE - 1) * STATE
            kept = _kept(
                counts_ptr + table, weights_ptr + table, state, largest, temperature, CUT_BEFORE, SCALE
            )  # fmt: skip
        if CUT == TOP_P:
            top_p = tl.load(shares_ptr + 1)
            reach = tl.maximum(tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64), 1)
        else:
            position = tl.load(seq_lens_ptr + request)
            zero = position * 0
            word, _, _, _ = tl.philox(tl.load(numbers_ptr + 1), position, request + zero, zero, zero)
            uniform = word.to(tl.uint32, bitcast=True).to(tl.float64) / 4294967296.0
            reach = (uniform * kept.to(tl.float64)).to(tl.int64) + 1
    return reach


@triton.jit
def _next_digit_kernel(
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    seq_lens_ptr,  # [B] int32
    shares_ptr,  # [2] fp64
    numbers_ptr,  # [2] int64
    counts_ptr,  # [B, tables] int32
    weights_ptr,  # [B, tables] int64
    state_ptr,  # [B, TABLES, STATE] int64
    vocab_size,
    TABLE: tl.constexpr,  # that is made here: of a cut's second digit if odd, of its third if even
    CUT: tl.constexpr,
    CUT_BEFORE: tl.constexpr,  # or None
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first digit of a cut, or the second; tokens that have the digits so far, by their next. Grid [C, B]."""
    request = tl.program_id(1)
    x, place, exist, largest = _block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(shares_ptr)
    BEGINS: tl.constexpr = TABLE % 2 == 1
    BY_COUNT: tl.constexpr = CUT == TOP_K
    state = state_ptr + (request * TABLES + TABLE) * STATE
    if BEGINS:
        reach = _to_reach(
            request, largest, temperature, seq_lens_ptr, shares_ptr, numbers_ptr, counts_ptr, weights_ptr, state_ptr,
            TABLE, CUT, CUT_BEFORE, TABLES, SCALE,
        )  # fmt: skip
        known = _table(request, 0, TABLES)
        digits, count, weight = _find(counts_ptr + known, weights_ptr + known, reach, 0, 0, BY_COUNT, FIRST_DIGITS)
    else:
        before = state - STATE
        digits, count, weight, reach = tl.load(before), tl.load(before + 1), tl.load(before + 2), tl.load(before + 3)
        known = _table(request, TABLE - 1, TABLES)
        digit, count, weight = _find(counts_ptr + known, weights_ptr + known, reach, count, weight, BY_COUNT, DIGITS)
        digits = digits * DIGITS + digit
    _store_state(state, digits, count, weight, reach)
    asked = exist & (place >> (FIRST if BEGINS else SECOND) == digits)
    table = _table(request, TABLE, TABLES)
    _add_up(
        x, place, asked, largest, temperature, counts_ptr + table, weights_ptr + table,
        SECOND if BEGINS else 0, SCALE, BY_COUNT,
    )  # fmt: skip


@triton.jit
def _token_kernel(
    logits_ptr,
    best_ptr,
    shares_ptr,
    counts_ptr,
    weights_ptr,
    state_ptr,
    tokens_ptr,  # [B] int64
    vocab_size,
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token at the place that was drawn; all tables but the last are cleared. Grid [C, B]."""
    block, request = tl.program_id(0), tl.program_id(1)
    _, place, exist, largest = _block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first, last = _table(request, 0, TABLES), _table(request, TABLES - 1, TABLES)
    _clear(counts_ptr + first, weights_ptr + first, last - first, BLOCK)
    state = state_ptr + (request * TABLES + TABLES - 1) * STATE
    digits, weight, reach = tl.load(state), tl.load(state + 2), tl.load(state + 3)
    digit, _, weight = _find(counts_ptr + last, weights_ptr + last, reach, 0, weight, False, THIRD_DIGITS)
    drawn = digits * THIRD_DIGITS + digit
    unit = tl.maximum(_weight_of(_logit_of(drawn), largest, tl.load(shares_ptr), SCALE), 1)
    is_drawn = exist & (place == drawn)
    found = tl.sum(is_drawn.to(tl.int64), 0)
    if found > 0:
        # Of tokens with one logit, as many come before the drawn one as its random number has left over.
        index = (reach - 1 - weight) // unit
        if tl.load(weights_ptr + last + digit) > unit:
            for other in range(block):
                at = logits_ptr + request.to(tl.int64) * vocab_size + other * BLOCK + tl.arange(0, BLOCK)
                index -= tl.sum((_place_of(tl.load(at)) == drawn).to(tl.int64), 0)
        nth = tl.cumsum(is_drawn.to(tl.int64), 0) - 1
        token = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(tokens_ptr + request + tl.zeros_like(token), token.to(tl.int64), mask=is_drawn & (nth == index))


def sample_tokens(sampler: Sampler, logits: Tensor, best: Tensor, seq_lens: Tensor) -> Tensor:
    """Choose one token for each request: `eager_sampling.sample` is the oracle, at position `seq_lens`.

    A token less likely than the most likely one by a factor of V / 2^63 has no weight. Sums are exact, where those of
    the oracle are rounded: of equal tokens, of which top_p takes a whole number, it may take one more. Where logits are
    not finite, which the fault word says, any token comes out.

    Args:
        logits: [B, V] fp32, V up to 2^24.  best: [B, C] fp32, the largest of each block, see `collect_logits`.
        seq_lens: [B] int32, with the new token.
    Returns:
        [B] int64: `sampler.tokens`.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, vocab_size = logits.shape
    blocks = num_candidates(vocab_size)
    tables = sampler.state.shape[1]
    options = {
        "TABLES": tables,
        "SCALE": 2.0 ** (62 - (vocab_size - 1).bit_length()),
        "C": blocks,
        "C_PAD": triton.next_power_of_2(blocks),
        "BLOCK": BLOCK,
        "num_warps": 8,
        **pdl_options(logits.device),
    }
    by_count = int(TOP_K.value) in sampler.cuts
    sums = (sampler.shares, sampler.counts, sampler.weights)
    grid = (blocks, batch_size)
    set_l1_carveout(
        jit_launch(_first_digit_kernel, grid)(logits, best, *sums, vocab_size, BY_COUNT=by_count, **options)
    )
    for i, cut in enumerate(sampler.cuts):
        before = sampler.cuts[i - 1] if i else None
        for table in (1 + 2 * i, 2 + 2 * i):
            compiled = jit_launch(_next_digit_kernel, grid)(
                logits, best, seq_lens, sampler.shares, sampler.numbers, sampler.counts, sampler.weights, sampler.state,
                vocab_size, TABLE=table, CUT=cut, CUT_BEFORE=before, **options,
            )  # fmt: skip
            set_l1_carveout(compiled)
    set_l1_carveout(
        jit_launch(_token_kernel, grid)(logits, best, *sums, sampler.state, sampler.tokens, vocab_size, **options)
    )
    return sampler.tokens
