"""Log probabilities of tokens: log_softmax of the logits as the model gives them, before anything changes them.

This is the meaning in OpenAI's API and in vLLM (`raw_logprobs`). Reported are the chosen token and the N most likely
ones, the lowest id first among equals. N is at most `MAX_LOGPROBS`.

Shapes: B requests, V vocabulary, C blocks of 1024 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.config import MAX_LOGPROBS
from alspec.kernels.comm.ll_packets import pack_packets
from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.sampling.next_token import BLOCK, num_candidates
from alspec.kernels.sampling.sampler import logit_from_key, sort_key

__all__ = ["LogprobBuffers", "Logprobs", "collect_logprobs", "logprobs_ref"]

TOP = tl.constexpr(MAX_LOGPROBS)
TOKEN_BITS = tl.constexpr(24)  # V is up to 2^24, as in the sampler
TOKEN_MASK = tl.constexpr(2**24 - 1)
LAST_KEY = tl.constexpr(2**63 - 1)
SORTED_AT_ONCE = 8  # requests: bounds the memory of a large batch


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of one step on the host: first the chosen token, then the N most likely ones."""

    token_ids: Tensor  # [B, 1 + N] int64
    values: Tensor  # [B, 1 + N] fp32

    @classmethod
    def unpack(cls, packed: Tensor, num_top: int) -> Logprobs:
        """From the row that `finish_step` writes: [B, 1 + MAX_LOGPROBS] int64."""
        packed = packed[:, : 1 + num_top].contiguous()
        return cls(packed >> 32, packed.view(torch.float32)[:, ::2].clone())


def logprobs_ref(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """`Logprobs` of the chosen tokens, [B] int64, by sorting logits [B, V] fp32, a few requests at a time."""
    parts = []
    for rows, chosen in zip(logits.split(SORTED_AT_ONCE), token_ids.split(SORTED_AT_ONCE), strict=True):
        most_likely = torch.sort(rows, dim=-1, descending=True, stable=True)[1][:, :num_top]
        ids = torch.cat([chosen[:, None], most_likely], 1)
        parts.append((ids, torch.log_softmax(rows, -1).gather(1, ids)))
    ids, values = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    return Logprobs(ids, values)


@dataclass(frozen=True)
class LogprobBuffers:
    """Log probabilities of a captured step on the device. One captured step serves every N."""

    num_top: Tensor  # [1] int32: N
    block_log_sums: Tensor  # [B, C] fp32: log of the sum of exp(logit) over a block
    block_keys: Tensor  # [B, C, MAX_LOGPROBS] int64: the most likely tokens of a block
    log_sums: Tensor  # [B] fp32: over the vocabulary
    top: Tensor  # [B, MAX_LOGPROBS] int64: token id << 32 | log probability, the most likely token first

    @classmethod
    def allocate(cls, batch_size: int, vocab_size: int, device: torch.device) -> LogprobBuffers:
        """Allocate for any N. Call `set` before the first use."""
        blocks = num_candidates(vocab_size)
        return cls(
            num_top=torch.zeros(1, dtype=torch.int32, device=device),
            block_log_sums=torch.zeros(batch_size, blocks, device=device),
            block_keys=torch.zeros(batch_size, blocks, MAX_LOGPROBS, dtype=torch.int64, device=device),
            log_sums=torch.zeros(batch_size, device=device),
            top=torch.zeros(batch_size, MAX_LOGPROBS, dtype=torch.int64, device=device),
        )

    def set(self, num_top: int) -> None:
        """Report so many most likely tokens from the next step on."""
        self.num_top.fill_(num_top)


@triton.jit
def _log_sum_exp(x):
    """log(sum(exp(x))) of a block; -inf counts as nothing."""
    largest = tl.max(x, 0)
    return largest + tl.log(tl.sum(tl.exp(x - largest), 0))


@triton.jit
def _block_logprobs_kernel(
    logits_ptr,  # [B, V] fp32
    num_top_ptr,  # [1] int32
    block_log_sums_ptr,  # [B, C] fp32
    block_keys_ptr,  # [B, C, TOP] int64
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum and most likely tokens of BLOCK logits of one request. Grid [C, B]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    x = tl.load(logits_ptr + request.to(tl.int64) * vocab_size + tokens, mask=inside, other=float("-inf"))
    block = request * tl.num_programs(0) + tl.program_id(0)
    tl.store(block_log_sums_ptr + block, _log_sum_exp(x))
    # Largest logit first, then the lowest id: every key occurs once.
    keys = tl.where(inside, (sort_key(x) << TOKEN_BITS) | tokens, LAST_KEY)
    for place in range(tl.load(num_top_ptr)):
        first = tl.min(keys, 0)
        tl.store(block_keys_ptr + block * TOP + place, first)
        keys = tl.where(keys == first, LAST_KEY, keys)


@triton.jit
def _top_logprobs_kernel(
    num_top_ptr,  # [1] int32
    block_log_sums_ptr,  # [B, C] fp32
    block_keys_ptr,  # [B, C, TOP] int64
    log_sums_ptr,  # [B] fp32
    top_ptr,  # [B, TOP] int64
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the blocks of one request: each iteration takes the first of their next keys. Grid [B]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.program_id(0)
    blocks = tl.arange(0, C_PAD)
    inside = blocks < C
    log_sums = tl.load(block_log_sums_ptr + request * C + blocks, mask=inside, other=float("-inf"))
    log_sum = _log_sum_exp(log_sums)
    tl.store(log_sums_ptr + request, log_sum)
    num_top = tl.load(num_top_ptr)
    num_taken = blocks * 0
    keys_ptr = block_keys_ptr + (request * C + blocks) * TOP
    keys = tl.load(keys_ptr, mask=inside & (num_taken < num_top), other=LAST_KEY)
    for place in range(num_top):
        first = tl.min(keys, 0)
        logit = logit_from_key(first >> TOKEN_BITS)
        token = (first & TOKEN_MASK).to(tl.int32)
        tl.store(top_ptr + request * TOP + place, pack_packets(logit - log_sum, token))
        is_taken = keys == first
        num_taken += is_taken.to(tl.int32)
        following = tl.load(keys_ptr + num_taken, mask=is_taken & inside & (num_taken < num_top), other=LAST_KEY)
        keys = tl.where(is_taken, following, keys)


def collect_logprobs(buffers: LogprobBuffers, logits: Tensor) -> None:
    """Find the most likely tokens and the sum that makes logits to log probabilities. Oracle: `logprobs_ref`.

    `finish_step` adds the chosen token.

    Args:
        logits: [B, V] fp32, as the model gives them, V up to 2^24 and at least N.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, vocab_size = logits.shape
    blocks, pdl = num_candidates(vocab_size), pdl_options(logits.device)
    set_l1_carveout(
        jit_launch(_block_logprobs_kernel, (blocks, batch_size))(
            logits, buffers.num_top, buffers.block_log_sums, buffers.block_keys, vocab_size, BLOCK=BLOCK, num_warps=8,
            **pdl,
        )
    )  # fmt: skip
    set_l1_carveout(
        jit_launch(_top_logprobs_kernel, (batch_size,))(
            buffers.num_top, buffers.block_log_sums, buffers.block_keys, buffers.log_sums, buffers.top, C=blocks,
            C_PAD=triton.next_power_of_2(blocks), num_warps=4, **pdl,
        )
    )  # fmt: skip
