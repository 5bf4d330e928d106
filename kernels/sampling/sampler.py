"""Min-p, top-k and top-p sampling inside a captured step: the same token as with a full sort, without sorting.

Of the tokens that the settings keep, the one is drawn whose `logit / temperature + noise` is largest. The noise of a
token is Gumbel distributed, from a random number of its own, so each token is drawn with its probability (Gumbel-max).

Tokens are ordered by logit, largest first, and among equals by id, lowest first. A *cut* is a position in this order:
the end of the first `top_k` tokens, or of a share `top_p` of their probability. A radix select finds a cut, digit by
digit of the logit's 32-bit sort key. One launch makes a histogram of the next digit, over the tokens whose earlier
digits equal those of the cut. In the next launch every program finds the cut's digit in this histogram by itself. Both
cuts share the histogram of the first digit, because it counts all tokens. `min_p` needs no cut: tokens less likely than
its share of the most likely one are not kept.

Probabilities are summed as integers, 2^45 for the most likely token of 128K. Integer sums do not depend on the order of
additions, so all ranks cut at the same place. Oracle: `alspec.runtime.decode.eager_sampling.sample`.

Shapes: B requests, V vocabulary, C blocks of 1024 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.config import ChoiceConfig
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.sampling.next_token import BLOCK, num_candidates

__all__ = ["Sampler", "logit_from_key", "sample_tokens", "sort_key"]

# Values of each digit of a sort key: digits of 11, 11 and 10 bits.
FIRST_DIGITS = tl.constexpr(2048)
DIGITS = tl.constexpr(2048)
FIRST_SHIFT = tl.constexpr(21)  # bits after the first digit, and after the second
SECOND_SHIFT = tl.constexpr(10)
THIRD_DIGITS = tl.constexpr(1024)
ROW = tl.constexpr(128)  # entries in a row of a table
# Kinds of cut.
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
STATE = tl.constexpr(4)  # digits found so far, count and weight of the tokens before them, target


@dataclass(frozen=True)
class Sampler:
    """Sampling settings on the device, and the buffers of the kernels.

    One captured step serves all settings of the same kinds: with or without top_k, top_p and min_p.
    """

    cuts: tuple[int, ...]  # TOP_K and TOP_P if they are used
    has_min_p: bool
    shares: Tensor  # [3] fp64: temperature, top_p, min_p
    numbers: Tensor  # [2] int64: top_k, seed
    # Histograms (tables): one of FIRST_DIGITS; then for each cut one of DIGITS for the second digit, one for the third.
    counts: Tensor  # [B, all tables] int32: tokens by digit; all 0 between steps but the last table
    weights: Tensor  # [B, all tables] int64: weight by digit; likewise
    state: Tensor  # [B, tables, STATE] int64
    scores: Tensor  # [B, C] fp64: the largest (logit - largest logit) / temperature + noise of a block
    candidates: Tensor  # [B, C] int64: its token
    tokens: Tensor  # [B] int64: the chosen tokens

    @staticmethod
    def kinds_of(choice: ChoiceConfig, vocab_size: int) -> tuple[tuple[int, ...], bool] | None:
        """The cuts for these settings, in order, and whether min_p is used; None at temperature 0, which is greedy."""
        if choice.temperature == 0.0:
            return None
        cuts = [(TOP_K, 0 < choice.top_k < vocab_size), (TOP_P, choice.top_p < 1.0)]
        return tuple(int(cut.value) for cut, is_used in cuts if is_used), choice.min_p > 0.0

    @classmethod
    def allocate(
        cls, kinds: tuple[tuple[int, ...], bool] | None, batch_size: int, vocab_size: int, device: torch.device
    ) -> Sampler | None:
        """Allocate for the kinds of some settings; None if they are greedy. Call `set` before the first use."""
        if kinds is None:
            return None
        cuts, has_min_p = kinds
        num_tables = 1 + 2 * len(cuts)
        shape = (batch_size, int(FIRST_DIGITS.value) + (num_tables - 1) * int(DIGITS.value))
        blocks = (batch_size, num_candidates(vocab_size))
        return cls(
            cuts=cuts,
            has_min_p=has_min_p,
            shares=torch.ones(3, dtype=torch.float64, device=device),
            numbers=torch.zeros(2, dtype=torch.int64, device=device),
            counts=torch.zeros(shape, dtype=torch.int32, device=device),
            weights=torch.zeros(shape, dtype=torch.int64, device=device),
            state=torch.zeros(batch_size, num_tables, int(STATE.value), dtype=torch.int64, device=device),
            scores=torch.zeros(blocks, dtype=torch.float64, device=device),
            candidates=torch.zeros(blocks, dtype=torch.int64, device=device),
            tokens=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )

    def set(self, choice: ChoiceConfig) -> None:
        """Use these settings from the next step on. They are of the same kinds as before. seed: 63 bits."""
        self.shares.copy_(torch.tensor([choice.temperature, choice.top_p, choice.min_p], dtype=torch.float64))
        self.numbers.copy_(torch.tensor([choice.top_k, choice.seed], dtype=torch.int64))


@triton.jit
def sort_key(x):
    """32 bits, as int64, that order logits: the largest first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    bits = bits.to(tl.int64)
    return tl.where(bits < 0, bits + 0x100000000, 0x7FFFFFFF - bits)


@triton.jit
def logit_from_key(key):
    """The inverse of `sort_key`."""
    return tl.where(key > 0x7FFFFFFF, key - 0x100000000, 0x7FFFFFFF - key).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(x, max_logit, temperature, min_p, SCALE: tl.constexpr):
    """exp((x - max_logit) / temperature) as an integer in units of 1 / SCALE; 0 if it is NaN, or below `min_p`."""
    share = tl.exp((x.to(tl.float64) - max_logit.to(tl.float64)) / temperature)
    if min_p is not None:
        share = tl.where(share >= min_p, share, 0.0)
    return (tl.where((share >= 0.0) & (share <= 1.0), share, 0.0) * SCALE + 0.5).to(tl.int64)


@triton.jit
def _table(request, NUMBER: tl.constexpr, TABLES: tl.constexpr):
    """Offset of table NUMBER of a request."""
    BEFORE: tl.constexpr = FIRST_DIGITS + (NUMBER - 1) * DIGITS if NUMBER > 0 else 0
    return request * (FIRST_DIGITS + (TABLES - 1) * DIGITS) + BEFORE


@triton.jit
def _find_group(counts, weights, target, count, weight, BY_COUNT: tl.constexpr):
    """Find the first group at which the cumulative count (BY_COUNT) or weight reaches `target`.

    counts, weights: of each group.  count, weight: of the tokens before the first group. Without BY_COUNT, tokens are
    not counted. Returns the index of the group, and count and weight before it.
    """
    if BY_COUNT:
        is_before = count + tl.cumsum(counts, 0) < target
        count += tl.sum(tl.where(is_before, counts, 0), 0)
    else:
        is_before = weight + tl.cumsum(weights, 0) < target
    # The index is past the end only if logits are NaN.
    index = tl.minimum(tl.sum(is_before.to(tl.int64), 0), weights.shape[0] - 1)
    return index, count, weight + tl.sum(tl.where(is_before, weights, 0), 0)


@triton.jit
def _find_digit(counts_ptr, weights_ptr, target, count, weight, BY_COUNT: tl.constexpr, SIZE: tl.constexpr):
    """As `_find_group`, for the digits of a table [SIZE]. Finds the row first: sums over the whole table are slower."""
    column = tl.arange(0, ROW)
    offsets = tl.arange(0, SIZE // ROW)[:, None] * ROW + column[None, :]
    weights = tl.sum(tl.load(weights_ptr + offsets), 1)
    counts = weights
    if BY_COUNT:
        counts = tl.sum(tl.load(counts_ptr + offsets).to(tl.int64), 1)
    row, count, weight = _find_group(counts, weights, target, count, weight, BY_COUNT)
    weights = tl.load(weights_ptr + row * ROW + column)
    if BY_COUNT:
        counts = tl.load(counts_ptr + row * ROW + column).to(tl.int64)
    digit, count, weight = _find_group(counts, weights, target, count, weight, BY_COUNT)
    return row * ROW + digit, count, weight


@triton.jit
def _add_to_histogram(
    x,
    key,
    mask,
    max_logit,
    temperature,
    min_p,  # or None
    counts_ptr,
    weights_ptr,
    SHIFT: tl.constexpr,
    SCALE: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """Add the tokens in `mask` to tables, by the digit of their key that begins at bit SHIFT."""
    digit = key >> SHIFT
    if SHIFT < FIRST_SHIFT:
        digit %= DIGITS if SHIFT > 0 else THIRD_DIGITS
    weight = _weight_of(x, max_logit, temperature, min_p, SCALE)
    tl.atomic_add(weights_ptr + digit, weight, mask=mask & (weight > 0), sem="relaxed")
    if BY_COUNT:
        tl.atomic_add(counts_ptr + digit, tl.full(digit.shape, 1, tl.int32), mask=mask, sem="relaxed")


@triton.jit
def _load_block(logits_ptr, best_ptr, request, vocab_size, C: tl.constexpr, C_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Load this program's logits. Returns them, their sort keys, their mask, and the request's largest logit."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    x = tl.load(logits_ptr + request.to(tl.int64) * vocab_size + tokens, mask=mask, other=float("-inf"))
    blocks = tl.arange(0, C_PAD)
    best = tl.load(best_ptr + request * C + blocks, mask=blocks < C, other=float("-inf"))
    return x, sort_key(x), mask, tl.max(best, 0)


@triton.jit
def _clear(counts_ptr, weights_ptr, size, BLOCK: tl.constexpr):
    """Clear consecutive tables, by all programs of a request."""
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(counts_ptr + offsets, tl.zeros([BLOCK], tl.int32), mask=offsets < size)
        tl.store(weights_ptr + offsets, tl.zeros([BLOCK], tl.int64), mask=offsets < size)


@triton.jit
def _first_digit_kernel(
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    shares_ptr,  # [3] fp64
    counts_ptr,  # [B, tables] int32
    weights_ptr,  # [B, tables] int64
    vocab_size,
    MIN_P: tl.constexpr,
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    BY_COUNT: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Histogram of all tokens by their first digit; clears the last table of the previous step. Grid [C, B]."""
    if PDL:
        gdc_wait()
        # Not before the wait: later kernels load logits before their own wait.
        gdc_launch_dependents()
    request = tl.program_id(1)
    x, key, mask, max_logit = _load_block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    table, last = _table(request, 0, TABLES), _table(request, TABLES - 1, TABLES)
    _clear(counts_ptr + last, weights_ptr + last, DIGITS, BLOCK)
    min_p = tl.load(shares_ptr + 2) if MIN_P else None
    _add_to_histogram(
        x, key, mask, max_logit, tl.load(shares_ptr), min_p, counts_ptr + table, weights_ptr + table, FIRST_SHIFT,
        SCALE, BY_COUNT,
    )  # fmt: skip


@triton.jit
def _end_of_cut(
    counts_ptr, weights_ptr, state_ptr, max_logit, temperature, min_p, CUT: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Find the last key that a cut keeps. The cut keeps all tokens with smaller keys, and the first ones with this key.

    Args:
        counts_ptr, weights_ptr: tables of the cut's third digit.  state_ptr: of the launch that made them.
    Returns:
        The key; how many tokens with this key are kept, and how many there are; the weight of all that are kept.
    """
    digits, count, weight = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    target = tl.load(state_ptr + 3)
    digit, count, weight = _find_digit(counts_ptr, weights_ptr, target, count, weight, CUT == TOP_K, THIRD_DIGITS)
    key = digits * THIRD_DIGITS + digit
    token_weight = _weight_of(logit_from_key(key), max_logit, temperature, min_p, SCALE)
    if CUT == TOP_K:
        num_kept, num_equal = target - count, tl.load(counts_ptr + digit).to(tl.int64)
    else:
        divisor = tl.maximum(token_weight, 1)
        num_kept, num_equal = (target - weight + divisor - 1) // divisor, tl.load(weights_ptr + digit) // divisor
    return key, num_kept, num_equal, weight + num_kept * token_weight


@triton.jit
def _store_state(state_ptr, digits, count, weight, target):
    """Store the state for later launches, by the first program."""
    if tl.program_id(0) == 0:
        tl.store(state_ptr, digits)
        tl.store(state_ptr + 1, count)
        tl.store(state_ptr + 2, weight)
        tl.store(state_ptr + 3, target)


@triton.jit
def _cut_target(
    request, max_logit, temperature, min_p, shares_ptr, numbers_ptr, counts_ptr, weights_ptr, state_ptr,
    TABLE: tl.constexpr, CUT: tl.constexpr, CUT_BEFORE: tl.constexpr, TABLES: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the target of a cut: a number of tokens, or a share of the weight that the previous cut keeps.

    TABLE: the first table of the cut.  CUT_BEFORE: the previous cut, or None.
    """
    if CUT == TOP_K:
        target = tl.load(numbers_ptr)
    else:
        if CUT_BEFORE is None:
            table = _table(request, 0, TABLES)
            kept_weight = tl.sum(tl.load(weights_ptr + table + tl.arange(0, FIRST_DIGITS)), 0)
        else:
            table = _table(request, TABLE - 1, TABLES)
            state = state_ptr + (request * TABLES + TABLE - 1) * STATE
            _, _, _, kept_weight = _end_of_cut(
                counts_ptr + table, weights_ptr + table, state, max_logit, temperature, min_p, CUT_BEFORE, SCALE
            )  # fmt: skip
        top_p = tl.load(shares_ptr + 1)
        target = tl.maximum(tl.ceil(top_p * kept_weight.to(tl.float64)).to(tl.int64), 1)
    return target


@triton.jit
def _next_digit_kernel(
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    shares_ptr,  # [3] fp64
    numbers_ptr,  # [2] int64
    counts_ptr,  # [B, tables] int32
    weights_ptr,  # [B, tables] int64
    state_ptr,  # [B, TABLES, STATE] int64
    vocab_size,
    TABLE: tl.constexpr,  # the table that this launch fills: of the cut's second digit if odd, of its third if even
    CUT: tl.constexpr,
    CUT_BEFORE: tl.constexpr,  # the previous cut, or None
    MIN_P: tl.constexpr,
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the first or second digit of a cut; histogram of the next digit of tokens with these digits. Grid [C, B]."""
    request = tl.program_id(1)
    x, key, mask, max_logit = _load_block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(shares_ptr)
    min_p = tl.load(shares_ptr + 2) if MIN_P else None
    IS_SECOND_DIGIT: tl.constexpr = TABLE % 2 == 1
    BY_COUNT: tl.constexpr = CUT == TOP_K
    state = state_ptr + (request * TABLES + TABLE) * STATE
    if IS_SECOND_DIGIT:
        target = _cut_target(
            request, max_logit, temperature, min_p, shares_ptr, numbers_ptr, counts_ptr, weights_ptr, state_ptr, TABLE,
            CUT, CUT_BEFORE, TABLES, SCALE,
        )  # fmt: skip
        prev = _table(request, 0, TABLES)
        digits, count, weight = _find_digit(counts_ptr + prev, weights_ptr + prev, target, 0, 0, BY_COUNT, FIRST_DIGITS)
    else:
        before = state - STATE
        digits, count, weight, target = tl.load(before), tl.load(before + 1), tl.load(before + 2), tl.load(before + 3)
        prev = _table(request, TABLE - 1, TABLES)
        digit, count, weight = _find_digit(
            counts_ptr + prev, weights_ptr + prev, target, count, weight, BY_COUNT, DIGITS
        )
        digits = digits * DIGITS + digit
    _store_state(state, digits, count, weight, target)
    selected = mask & (key >> (FIRST_SHIFT if IS_SECOND_DIGIT else SECOND_SHIFT) == digits)
    table = _table(request, TABLE, TABLES)
    _add_to_histogram(
        x, key, selected, max_logit, temperature, min_p, counts_ptr + table, weights_ptr + table,
        SECOND_SHIFT if IS_SECOND_DIGIT else 0, SCALE, BY_COUNT,
    )  # fmt: skip


@triton.jit
def _gumbel(seed, position, request, tokens):
    """Gumbel noise of tokens, fp64: -log(-log u), u uniform with 52 bits. Counter and key as in `eager_sampling`."""
    zero = tokens * 0
    high, low, _, _ = tl.philox(seed, position + zero, request + zero, tokens, zero)
    high, low = high.to(tl.uint32, bitcast=True), low.to(tl.uint32, bitcast=True) >> 12
    uniform = (high.to(tl.float64) * 1048576.0 + low.to(tl.float64) + 0.5) / 4503599627370496.0
    return -tl.log(-tl.log(uniform))


@triton.jit
def _is_inside(key, mask, logits_ptr, vocab_size, end, request, BLOCK: tl.constexpr):
    """Whether a cut keeps the tokens of this program's block. end: as returned by `_end_of_cut`."""
    cut_key, num_kept, num_equal, _ = end
    is_equal = mask & (key == cut_key)
    place = tl.cumsum(is_equal.to(tl.int64), 0)
    if (num_kept < num_equal) & (tl.sum(is_equal.to(tl.int64), 0) > 0):  # the cut keeps those with the lowest ids
        for other in range(tl.program_id(0)):
            ptrs = logits_ptr + request.to(tl.int64) * vocab_size + other * BLOCK + tl.arange(0, BLOCK)
            place += tl.sum((sort_key(tl.load(ptrs)) == cut_key).to(tl.int64), 0)
    return mask & ((key < cut_key) | (is_equal & (place <= num_kept)))


@triton.jit
def _score_kernel(
    logits_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    seq_lens_ptr,  # [B] int32
    shares_ptr,  # [3] fp64
    numbers_ptr,  # [2] int64
    counts_ptr,  # [B, tables] int32
    weights_ptr,  # [B, tables] int64
    state_ptr,  # [B, TABLES, STATE] int64
    scores_ptr,  # [B, C] fp64
    candidates_ptr,  # [B, C] int64
    vocab_size,
    CUT: tl.constexpr,  # the last cut, or None
    ROWS: tl.constexpr,  # of each request; they share its random numbers
    MIN_P: tl.constexpr,
    TABLES: tl.constexpr,
    SCALE: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best token of a block; clears all tables but the last. Grid [C, B]."""
    if PDL and CUT is None:  # otherwise a kernel in front has waited for the logits
        gdc_wait()
        gdc_launch_dependents()
    block, request = tl.program_id(0), tl.program_id(1)
    x, key, mask, max_logit = _load_block(logits_ptr, best_ptr, request, vocab_size, C, C_PAD, BLOCK)
    if PDL and CUT is not None:
        gdc_wait()
        gdc_launch_dependents()
    temperature = tl.load(shares_ptr)
    min_p = tl.load(shares_ptr + 2) if MIN_P else None
    if CUT is not None:
        first, last = _table(request, 0, TABLES), _table(request, TABLES - 1, TABLES)
        _clear(counts_ptr + first, weights_ptr + first, last - first, BLOCK)
        state = state_ptr + (request * TABLES + TABLES - 1) * STATE
        end = _end_of_cut(
            counts_ptr + last, weights_ptr + last, state, max_logit, temperature, min_p, CUT, SCALE
        )  # fmt: skip
        mask = _is_inside(key, mask, logits_ptr, vocab_size, end, request, BLOCK)
    scaled = (x.to(tl.float64) - max_logit.to(tl.float64)) / temperature
    if min_p is not None:
        mask = mask & (tl.exp(scaled) >= min_p)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    drawing = request if ROWS == 1 else request // ROWS
    score = scaled + _gumbel(tl.load(numbers_ptr + 1), tl.load(seq_lens_ptr + request), drawing, tokens)
    score = tl.where(mask & (score == score), score, float("-inf"))  # NaN is not drawn
    largest = tl.max(score, 0)
    tl.store(scores_ptr + request * C + block, largest)
    tl.store(
        candidates_ptr + request * C + block, tl.min(tl.where(score == largest, tokens, vocab_size), 0).to(tl.int64)
    )


@triton.jit
def _choose_kernel(scores_ptr, candidates_ptr, tokens_ptr, C: tl.constexpr, C_PAD: tl.constexpr, PDL: tl.constexpr):
    """The best token of all blocks, of the first one among equals. Grid [B]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request, blocks = tl.program_id(0), tl.arange(0, C_PAD)
    scores = tl.load(scores_ptr + request * C + blocks, mask=blocks < C, other=float("-inf"))
    block = tl.min(tl.where((scores == tl.max(scores, 0)) & (blocks < C), blocks, C_PAD), 0)
    tl.store(tokens_ptr + request, tl.load(candidates_ptr + request * C + block))


def sample_tokens(sampler: Sampler, logits: Tensor, best: Tensor, seq_lens: Tensor, rows: int = 1) -> Tensor:
    """Choose one token for each request, at position `seq_lens`. Oracle: `eager_sampling.sample`.

    In the sums for top_p, a token that is less likely than the most likely one by a factor of V / 2^63 has weight 0.
    The sums are exact here and rounded in the oracle: if top_p ends exactly between equal tokens, the oracle may take
    one more. If logits are not finite (see the fault word), the token is arbitrary.

    Args:
        logits: [B, V] fp32, V up to 2^24.
        best: [B, C] fp32, the largest logit of each block, from `collect_logits`.
        seq_lens: [B] int32, with the new token.
        rows: rows of each request, side by side; each counts as a request here, but draws as its request does.
    Returns:
        [B] int64: `sampler.tokens`.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, vocab_size = logits.shape
    blocks = num_candidates(vocab_size)
    sizes = {"C": blocks, "C_PAD": triton.next_power_of_2(blocks)}
    pdl = pdl_options(logits.device)
    options = {
        "MIN_P": sampler.has_min_p,
        "TABLES": sampler.state.shape[1],
        "SCALE": 2.0 ** (62 - (vocab_size - 1).bit_length()),
        "BLOCK": BLOCK,
        "num_warps": 8,
        **sizes,
        **pdl,
    }
    settings, tables = (sampler.shares, sampler.numbers), (sampler.counts, sampler.weights)
    grid = (blocks, batch_size)
    if sampler.cuts:
        compiled = jit_launch(_first_digit_kernel, grid)(
            logits, best, sampler.shares, *tables, vocab_size, BY_COUNT=int(TOP_K.value) in sampler.cuts, **options
        )
        set_l1_carveout(compiled)
    for i, cut in enumerate(sampler.cuts):
        before = sampler.cuts[i - 1] if i else None
        for table in (1 + 2 * i, 2 + 2 * i):
            compiled = jit_launch(_next_digit_kernel, grid)(
                logits, best, *settings, *tables, sampler.state, vocab_size, TABLE=table, CUT=cut, CUT_BEFORE=before,
                **options,
            )  # fmt: skip
            set_l1_carveout(compiled)
    compiled = jit_launch(_score_kernel, grid)(
        logits, best, seq_lens, *settings, *tables, sampler.state, sampler.scores, sampler.candidates, vocab_size,
        CUT=sampler.cuts[-1] if sampler.cuts else None, ROWS=rows, **options,
    )  # fmt: skip
    set_l1_carveout(compiled)
    compiled = jit_launch(_choose_kernel, (batch_size,))(
        sampler.scores, sampler.candidates, sampler.tokens, num_warps=1, **sizes, **pdl
    )
    set_l1_carveout(compiled)
    return sampler.tokens
