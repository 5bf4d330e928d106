"""The interface through which the engine runs decode steps, eager or captured, one token or several at a time.

step.prepare(sampling, kept)        compile, and capture a graph
step.begin(token_ids, seq_lens)     set each request's newest token, and its length with this token
record = step.step(remaining)       one more token for each request; a round (rounds/round_step.py) gives one or more
step.release()                      destroy the graph, before its buffers are freed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from alspec.config import SamplingConfig
from alspec.kernels.sampling.logprobs import Logprobs

__all__ = ["RECENT_STEPS", "WARM_UP_TOKENS", "DecodeStep", "StepRecord", "warm_up_steps"]

RECENT_STEPS = 8  # `recent_kinds` tells as many: a rank is never so many launches behind another

WARM_UP_TOKENS = 2  # tokens behind those that are kept, of the step that `warm_up_steps` runs; a cache must have room


@dataclass(frozen=True)
class StepRecord:
    """Results of one step on the host."""

    token_ids: list[list[int]]  # the new tokens of each request, in order; one, or those that a round emits
    hits: Tensor | None  # [L, B] bool: each request's verdict in each layer; None without speculation
    step_us: float  # from the end of the previous step to the end of this one; for the first step, from `begin`
    fault: int  # 0, or a fault word (kernels/comm/ll_packets.py)
    # A row for each new token, request after request: its own, then the most likely ones; if `prepare` asked for them.
    logprobs: Logprobs | None = None
    # Number of drafts for each request; all of its tokens but the last are accepted ones. None: the step never drafts.
    drafts: list[int] | None = None
    is_alone: bool = False  # each group of a pair decoded alone, so there are no verdicts

    def accepted_drafts(self, live: list[bool] | None = None) -> list[tuple[int, int]]:
        """(drafts, accepted ones) of each live request, default all; empty if the step never drafts."""
        if self.drafts is None:
            return []
        requests = zip(self.drafts, self.token_ids, live or [True] * len(self.drafts), strict=True)
        return [(count, len(ids) - 1) for count, ids, is_live in requests if is_live]


class DecodeStep(Protocol):
    """The decode steps of one batch on one rank. Every rank makes the same calls in the same order."""

    @property
    def is_fused(self) -> bool:
        """Steps run the fused kernels, captured or not."""

    @property
    def uses_graph(self) -> bool:
        """Steps are replays of a captured graph."""

    @property
    def next_step(self) -> int:
        """Number of the step that is launched next, or is being launched. The first step after `begin` is 1."""

    @property
    def launched(self) -> int:
        """Steps launched ahead of the host so far, over all generations."""

    @property
    def recent_kinds(self) -> str:
        """Kinds of the newest launched steps, a letter for each, the newest last; at most `RECENT_STEPS`."""

    @property
    def prompt_queries(self) -> Tensor | None:
        """[L, B, Hq, D] on the device: room for the queries of each prompt's last token, if `A~` recalls blocks."""

    def set_verdict_rule(self, threshold: float, forced: Tensor | None = None) -> None:
        """Change the rule for verdicts. Call `prepare` before the next step.

        Args:
            threshold: lambda.
            forced: [L] int32 verdicts for profiling: 1 accepts, 0 rejects, -1 decides from the sums.
        """

    def prepare(self, sampling: SamplingConfig, kept: Sequence[int] | None = None) -> int:
        """Compile and capture the step for these sampling settings. Overwrites some of the cache behind `kept`.

        Args:
            kept: tokens of each request that stay, default none; the cache has room for two more.
        Returns:
            The fault word of the trial steps: 0, or see kernels/comm/ll_packets.py.
        """

    def begin(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        """Set each request's newest token, and its length with this token.

        Args:
            seen: [B, V] int32, for penalties: 1 for a token of the prompt, plus 2 for each time in the answer
                (kernels/sampling/adjustment.py). The step may change it.
            prompts: the tokens before the newest one, for drafts. Their last queries are in `prompt_queries`, and
                choose the first recall lists. Default: not known; the first step recalls no block.
            continued: requests that were in the last step and go on as they are: they keep their recall lists.
        """

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Decode one token for each request, or more.

        Args:
            remaining: most tokens that a live request still needs: no more steps than that are in flight, this one
                included.
            live: [B], requests that are still generating; only these count in verdicts. None: all requests.
        """

    def launch_missing(self, launched: int, kinds: str) -> None:
        """Launch the steps that another rank has launched ahead, before anything waits for the device.

        Args:
            launched, kinds: `launched` and `recent_kinds` of the rank that has launched most.
        """

    def release(self) -> None:
        """Destroy the graph. Call it before the graph's buffers and process groups are freed."""


def warm_up_steps(step: DecodeStep, kept: Sequence[int], remaining: int) -> None:
    """Run one step behind the kept tokens of each request, so that its kernels are compiled.

    Args:
        remaining: as of `DecodeStep.step`.
    """
    step.begin([0] * len(kept), [num_tokens + WARM_UP_TOKENS for num_tokens in kept])
    step.step(remaining)
