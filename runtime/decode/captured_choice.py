"""How a captured step chooses its tokens: the kernels that its settings need, and their buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from alspec.config import MAX_LOGPROBS, SamplingConfig
from alspec.kernels.sampling.adjustment import Adjustment, RoundRows, adjust_logits
from alspec.kernels.sampling.logprobs import LogprobBuffers, Logprobs, collect_logprobs
from alspec.kernels.sampling.next_token import RING_STEPS
from alspec.kernels.sampling.sampler import Sampler, sample_tokens
from alspec.runtime.decode.decoder import DecodeBuffers

__all__ = ["CapturedChoice", "ChoiceKinds"]


class ChoiceKinds(NamedTuple):
    """Which kernels some settings need. One captured step serves all settings of the same kinds."""

    sampler: tuple[tuple[int, ...], bool] | None  # cuts, min_p; None: greedy
    adjustment: tuple[bool, bool]  # biases, penalties
    logprobs: bool

    @classmethod
    def of(cls, sampling: SamplingConfig, vocab_size: int) -> ChoiceKinds:
        """The kinds of these settings."""
        sampler = Sampler.kinds_of(sampling, vocab_size)
        return cls(sampler, Adjustment.kinds_of(sampling), sampling.logprobs is not None)


class CapturedChoice:
    """The choice of the next tokens in a captured step; the oracle is `eager_sampling.sample`."""

    def __init__(
        self, kinds: ChoiceKinds, batch_size: int, vocab_size: int, device: torch.device, rows: int = 1
    ) -> None:
        """Allocate; call `set` and `begin` before the first use. rows: of each request, in a round."""
        self.kinds, self._rows = kinds, rows
        self._sampler = Sampler.allocate(kinds.sampler, batch_size * rows, vocab_size, device)
        self._adjustment = Adjustment.allocate(kinds.adjustment, batch_size, vocab_size, device, rows)
        self._logprobs = self._ring = None
        self._num_top = 0
        if kinds.logprobs:
            self._logprobs = LogprobBuffers.allocate(batch_size * rows, vocab_size, device)
            shape = (RING_STEPS, batch_size * rows, 1 + MAX_LOGPROBS)
            self._ring = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")

    def set(self, sampling: SamplingConfig) -> None:
        """Use these settings from the next step on; they are of the same kinds."""
        if self._sampler is not None:
            self._sampler.set(sampling)
        if self._adjustment is not None:
            self._adjustment.set(sampling)
        if self._logprobs is not None:
            self._num_top = sampling.logprobs or 0
            self._logprobs.set(self._num_top)

    def begin(self, seen: Tensor | None) -> None:
        """Begin answers to prompts with these tokens, see `tokens_seen`; None: no token is part of a prompt."""
        if self._adjustment is not None:
            self._adjustment.begin(seen)

    def launch(self, buffers: DecodeBuffers, rows: RoundRows | None = None) -> Tensor | None:
        """Launch what comes between `collect_logits` and `finish_step`; returns sampled tokens, None if greedy.

        rows: which rows of a round the logits belong to.
        """
        logits = buffers.logits
        if self._logprobs is not None:
            collect_logprobs(self._logprobs, logits)
        if self._adjustment is not None:
            logits = adjust_logits(self._adjustment, logits, buffers.token_ids, buffers.best, buffers.best_token, rows)
        if self._sampler is None:
            return None
        return sample_tokens(self._sampler, logits, buffers.best, buffers.seq_lens, self._rows)

    def share_seen(self, other: CapturedChoice) -> None:
        """Use the tokens that another choice of the same kinds counts."""
        if self._adjustment is not None:
            self._adjustment = replace(self._adjustment, seen=other.seen)

    @property
    def seen(self) -> Tensor | None:
        """[B, V] int32: the tokens that penalties count; None without penalties."""
        return None if self._adjustment is None else self._adjustment.seen

    def logprobs_of(self, buffers: DecodeBuffers) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """What `finish_step` needs to report log probabilities."""
        if self._logprobs is None or self._ring is None:
            return None
        return buffers.logits, self._logprobs.log_sums, self._logprobs.top, self._ring

    def read_logprobs(self, row: int) -> Logprobs | None:
        """Log probabilities of a step, from its row of the ring on the host."""
        return None if self._ring is None else Logprobs.unpack(self._ring[row], self._num_top)
