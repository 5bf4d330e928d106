"""Biases and penalties: what changes the logits before a token is chosen, also before a greedy choice.

For each token, in this order (that of vLLM), with its bias b, repetition penalty r, frequency penalty f and presence
penalty p, and c, the times that it occurs in the answer so far:

    z = logit + b
    z = z / r if z > 0 else z r,    if it occurs in the prompt or the answer
    z = z - f c
    z = z - p                       if c > 0

r is defined as in transformers (Keskar et al., CTRL (2019), section 4.1); f and p as in OpenAI's API. All of it is fp64
and rounded once, so that the kernel and `adjusted_ref` give the same bits.

Shapes: B requests, V vocabulary, C blocks of 1024 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.config import ChoiceConfig
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.sampling.next_token import BLOCK, num_candidates

__all__ = ["Adjustment", "RoundRows", "adjust_logits", "adjusted_ref", "count_newest", "tokens_seen"]

# `seen`, [B, V] int32, holds for each token: 1 if it is in the prompt, plus 2 for each time that it is in the answer.
IN_PROMPT = 1
IN_ANSWER = tl.constexpr(2)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def tokens_seen(
    prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device, answers: Sequence[Sequence[int]] = ()
) -> Tensor:
    """`seen` after these prompts and, if they are given, the tokens of their answers so far: [B, V] int32."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.int32, device=device)
    for row, ids in zip(seen, prompts, strict=True):
        row[torch.tensor(ids, dtype=torch.int64, device=device)] = IN_PROMPT
    for row, ids in zip(seen, answers, strict=False):
        times = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
        row += (times * int(IN_ANSWER.value)).to(row)
    return seen


def count_newest(seen: Tensor, token_ids: Tensor, times: int = 1) -> None:
    """Count each request's newest token, [B] int64, as part of its answer; `seen` changes. times: -1 takes it back."""
    seen[torch.arange(len(seen), device=seen.device), token_ids] += times * int(IN_ANSWER.value)


def adjusted_ref(logits: Tensor, choice: ChoiceConfig, seen: Tensor | None = None) -> Tensor:
    """Logits after biases and penalties: [B, V] fp32; without any, the logits themselves.

    Args:
        logits: [B, V] fp32.  seen: [B, V] int32, with the newest token; needed for penalties.
    """
    if not (choice.logit_bias or choice.penalises):
        return logits
    z = logits.double()
    if choice.logit_bias:
        z = z + _dense(choice.logit_bias, logits.shape[1]).to(z.device)
    if choice.penalises:
        assert seen is not None, "penalties need the tokens seen"
        times = (seen // int(IN_ANSWER.value)).double()
        repetition = choice.repetition_penalty
        z = torch.where(seen > 0, torch.where(z > 0.0, z * (1.0 / repetition), z * repetition), z)
        z = z - times * choice.frequency_penalty
        z = torch.where(times > 0, z - choice.presence_penalty, z)
    return z.clamp(-LARGEST.value, LARGEST.value).float()


def _dense(logit_bias: dict[int, float], vocab_size: int) -> Tensor:
    """[V] fp64 on the host."""
    dense = torch.zeros(vocab_size, dtype=torch.float64)
    dense[list(logit_bias)] = torch.tensor(list(logit_bias.values()), dtype=torch.float64)
    return dense


@dataclass(frozen=True)
class Adjustment:
    """Biases and penalties of a captured step on the device. One captured step serves all values of the same kinds."""

    penalties: Tensor  # [4] fp64: r, 1 / r, f, p
    bias: Tensor | None  # [V] fp64; None: no biases
    seen: Tensor | None  # [B, V] int32; None: no penalties
    adjusted: Tensor  # [B, V] fp32: the result

    @staticmethod
    def kinds_of(choice: ChoiceConfig) -> tuple[bool, bool]:
        """Whether there are biases, and penalties."""
        return bool(choice.logit_bias), choice.penalises

    @classmethod
    def allocate(
        cls, kinds: tuple[bool, bool], batch_size: int, vocab_size: int, device: torch.device, rows: int = 1
    ) -> Adjustment | None:
        """Allocate for some kinds; None without any. Call `set` and `begin` before the first use.

        rows: rows of each request that are adjusted together.
        """
        if not any(kinds):
            return None
        has_bias, has_penalties = kinds
        shape = (batch_size, vocab_size)
        return cls(
            penalties=torch.ones(4, dtype=torch.float64, device=device),
            bias=torch.zeros(vocab_size, dtype=torch.float64, device=device) if has_bias else None,
            seen=torch.zeros(shape, dtype=torch.int32, device=device) if has_penalties else None,
            adjusted=torch.zeros(batch_size * rows, vocab_size, device=device),
        )

    def set(self, choice: ChoiceConfig) -> None:
        """Use these values from the next step on; they are of the same kinds."""
        r = choice.repetition_penalty
        values = [r, 1.0 / r, choice.frequency_penalty, choice.presence_penalty]
        self.penalties.copy_(torch.tensor(values, dtype=torch.float64))
        if self.bias is not None:
            self.bias.copy_(_dense(choice.logit_bias, self.bias.shape[0]))

    def begin(self, seen: Tensor | None) -> None:
        """Begin answers, with the prompts' tokens, [B, V] int32; None: no token counts as part of a prompt."""
        if self.seen is not None:
            self.seen.zero_() if seen is None else self.seen.copy_(seen)


@triton.jit
def _adjust_logits_kernel(
    logits_ptr,  # [B, V] fp32
    penalties_ptr,  # [4] fp64
    bias_ptr,  # [V] fp64, or None
    seen_ptr,  # [B, V] int32, or None
    token_ids_ptr,  # [B] int64: the newest tokens
    adjusted_ptr,  # [B, V] fp32
    best_ptr,  # [B, C] fp32
    best_token_ptr,  # [B, C] int32
    row_lens_ptr,  # [B, WIDTH] int32 and token_ids [B, WIDTH], of a round; or None
    vocab_size,
    FIRST_ROW: tl.constexpr,  # of a round: the logits are those of ROWS rows of each request from this one on
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adjust BLOCK logits of one row; count its request's newest token, if there is no round. Grid [C, B ROWS]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block, request = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    offsets = request.to(tl.int64) * vocab_size + tokens
    z = tl.load(logits_ptr + offsets, mask=inside, other=0.0).to(tl.float64)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + tokens, mask=inside, other=0.0)
    if seen_ptr is not None:
        if row_lens_ptr is None:
            seen = tl.load(seen_ptr + offsets, mask=inside, other=0)
            newest = tl.load(token_ids_ptr + request)
            seen = tl.where(tokens == newest, seen + IN_ANSWER, seen)
            tl.store(seen_ptr + offsets, seen, mask=inside & (tokens == newest))
        else:
            row, text = FIRST_ROW + request % ROWS, request // ROWS
            seen = tl.load(seen_ptr + text.to(tl.int64) * vocab_size + tokens, mask=inside, other=0)
            before = tl.zeros_like(row)
            for i in tl.static_range(WIDTH):
                # A row that repeats the one before it has no token of its own.
                length = tl.load(row_lens_ptr + text * WIDTH + i)
                is_new = (tokens == tl.load(token_ids_ptr + text * WIDTH + i)) & (length > before) & (i <= row)
                seen = tl.where(is_new, seen + IN_ANSWER, seen)
                before = length
        repetition, inverse = tl.load(penalties_ptr), tl.load(penalties_ptr + 1)
        frequency, presence = tl.load(penalties_ptr + 2), tl.load(penalties_ptr + 3)
        times = (seen // IN_ANSWER).to(tl.float64)
        z = tl.where(seen > 0, z * tl.where(z > 0.0, inverse, repetition), z)
        z = z - times * frequency
        z = tl.where(times > 0.0, z - presence, z)
    adjusted = tl.minimum(tl.maximum(z, -LARGEST), LARGEST).to(tl.float32)
    tl.store(adjusted_ptr + offsets, adjusted, mask=inside)
    adjusted = tl.where(inside, adjusted, float("-inf"))
    best = tl.max(adjusted, 0)
    best_offset = request * tl.num_programs(0) + block
    tl.store(best_ptr + best_offset, best)
    tl.store(best_token_ptr + best_offset, tl.min(tl.where(adjusted == best, tokens, 0x7FFFFFFF), 0))


@dataclass(frozen=True)
class RoundRows:
    """Which rows of a round logits belong to: `rows` of each request from `first` on."""

    token_ids: Tensor  # [B, R] int64: the newest token, then drafts
    row_lens: Tensor  # [B, R] int32: tokens up to each row; a row with the number of the one before it repeats it
    first: int
    rows: int


def adjust_logits(
    adjustment: Adjustment,
    logits: Tensor,
    token_ids: Tensor,
    best: Tensor,
    best_token: Tensor,
    rows: RoundRows | None = None,
) -> Tensor:
    """Count the newest tokens, then apply biases and penalties. Oracle: `adjusted_ref`.

    Args:
        logits: [B, V] fp32.  token_ids: [B] int64, each request's newest token, part of its answer.
        best: [B, C] fp32, best_token: [B, C] int32, of the logits; written again for the adjusted ones.
        rows: logits and `adjusted` have these rows of each request. The round's tokens up to a row count in its
            penalties, in place of `token_ids`, and `seen` does not change.
    Returns:
        [B, V] fp32: `adjustment.adjusted`.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, vocab_size = logits.shape
    row_lens, first, width, count = None, 0, 1, 1
    if rows is not None:
        token_ids, row_lens, first, count = rows.token_ids, rows.row_lens, rows.first, rows.rows
        width = token_ids.shape[1]
    compiled = jit_launch(_adjust_logits_kernel, (num_candidates(vocab_size), batch_size))(
        logits, adjustment.penalties, adjustment.bias, adjustment.seen, token_ids, adjustment.adjusted, best,
        best_token, row_lens, vocab_size, FIRST_ROW=first, ROWS=count, WIDTH=width, BLOCK=BLOCK, num_warps=8,
        enable_fp_fusion=False,  # no FMA: rounded as in PyTorch
        **pdl_options(logits.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
    return adjustment.adjusted
